"""Test that a compiled model is counted eagerly, and afterwards runs its compiled code again."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import lflops
from tests.support.profile_checks import calls, consistent, flops, macs
from tests.support.small_models import Block, between_linears, down, hidden, sequence, square, up

# torch warns that global module hooks run twice for a wrapper module from `torch.compile`.
ignoring_torchs_advice = pytest.mark.filterwarnings("ignore:Using `torch.compile")
# torch.compile itself reads the gradient of an input that is not a leaf.
ignoring_missing_gradients = pytest.mark.filterwarnings("ignore:The .grad attribute")


class Backend:
    """A backend that returns the graph unchanged, and counts compilations and executions."""

    def __init__(self) -> None:
        self.compilations = 0
        self.executions = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        self.compilations += 1

        def run(*args: Any) -> Any:
            self.executions += 1
            return graph.forward(*args)

        return run


class BackendWithBackward(Backend):
    """A `Backend` for which torch splits the graph into forward and backward.

    Only compilations and executions of the forward graph are counted.
    """

    def __init__(self) -> None:
        super().__init__()
        compile_forward = super().__call__
        self.compile = aot_autograd(
            fw_compiler=lambda graph, inputs: make_boxed_func(compile_forward(graph, inputs)),
            bw_compiler=lambda graph, _inputs: make_boxed_func(graph.forward),
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return self.compile(graph, inputs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(hidden, hidden)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def wrapped(model: Net, backend: Backend) -> nn.Module:
    """Compile the model with `torch.compile`, which returns a wrapper module."""
    return torch.compile(model, backend=backend)


def in_place(model: Net, backend: Backend) -> nn.Module:
    """Compile the model with its own method `compile`."""
    model.compile(backend=backend)
    return model


def a_part(model: Net, backend: Backend) -> nn.Module:
    """Compile only one block, with `torch.compile`."""
    model.blocks[1] = torch.compile(model.blocks[1], backend=backend)
    return model


def a_part_in_place(model: Net, backend: Backend) -> nn.Module:
    """Compile only one block, with its own method `compile`."""
    model.blocks[1].compile(backend=backend)
    return model


COMPILED_ROWS = {wrapped: {""}, in_place: {""}, a_part: {"blocks.1"}, a_part_in_place: {"blocks.1"}}
"""For each way to compile, the modules that the profile marks as compiled."""


@ignoring_torchs_advice
@ignoring_missing_gradients
@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("backend_class", [Backend, BackendWithBackward])
@pytest.mark.parametrize("spelling", COMPILED_ROWS)
def test_a_compiled_model_counts_like_its_own_and_stays_compiled(
    spelling: Callable[..., nn.Module], backend_class: type[Backend], calls_before: int
) -> None:
    """A compiled model has the same names and counts as the model before compilation.

    It is compiled only once. All calls except the counted call run the compiled code.
    """
    torch.compiler.reset()
    plain = Net()
    backend = backend_class()
    x = sequence()
    expected = lflops.count(plain, x, backward=True)
    model = spelling(plain, backend)
    for _ in range(calls_before):
        model(x).sum().backward()
    actual = lflops.count(model, x, backward=True)
    assert calls_before == backend.executions
    for _ in range(3):
        model(x).sum().backward()
    assert (1, calls_before + 3) == (backend.compilations, backend.executions)
    for phase in ("forward", "backward"):
        assert macs(expected, phase) == macs(actual, phase)
        assert flops(expected, phase) == flops(actual, phase)
    assert calls(expected) == calls(actual)
    assert list(expected.modules) == list(actual.modules)
    assert COMPILED_ROWS[spelling] == {
        row for row, module in actual.modules.items() if module.compiled
    }


@ignoring_missing_gradients
def test_a_compiled_function_is_counted_as_what_it_does() -> None:
    """The work of a compiled function belongs to the module whose forward calls it."""
    torch.compiler.reset()
    backend = Backend()

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(hidden, hidden))
            self.function = torch.compile(lambda x, weight: torch.relu(x @ weight), backend=backend)

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x, self.weight)

    model = between_linears(Compiled())
    x = sequence()
    model(x).sum().backward()
    profile = lflops.count(model, x, backward=True)
    model(x).sum().backward()
    assert {"0": square, "1": square, "2": square} == macs(profile, "forward")
    assert {"0": square, "1": 2 * square, "2": 2 * square} == macs(profile, "backward")
    assert (1, 2) == (backend.compilations, backend.executions)


def test_compiling_for_the_first_time_after_a_count_goes_as_always() -> None:
    """A model can be compiled as a full graph after it was counted."""
    torch.compiler.reset()
    plain = Net()
    backend = Backend()
    x = sequence()
    consistent(lflops.count(plain, x, backward=True))
    model = torch.compile(plain, backend=backend, fullgraph=True)
    for _ in range(3):
        model(x).sum().backward()
    assert (1, 3) == (backend.compilations, backend.executions)


def test_counting_a_compiled_model_warns_of_nothing() -> None:
    """Counting a compiled model produces no warnings."""
    torch.compiler.reset()
    model = torch.compile(Net(), backend=Backend())
    x = sequence()
    model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lflops.count(model, x)
    assert [] == [str(each.message) for each in caught]


@ignoring_torchs_advice
def test_a_loop_that_is_counted_in_the_middle_stays_compiled() -> None:
    """One of five steps is counted, and all steps run compiled code.

    The count has the work of one step, by module. The loop includes an optimizer.
    """
    torch.compiler.reset()
    plain = Net()
    backend = Backend()
    model = torch.compile(plain, backend=backend)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(sequence()).square().mean().backward()
        optimizer.step()

    counted = lflops.counting(plain)
    step()
    step()
    with counted:
        step()
    step()
    step()
    forward = {
        "stem": square,
        "blocks.0.up": up,
        "blocks.0.down": down,
        "blocks.1.up": up,
        "blocks.1.down": down,
    }
    assert forward == macs(counted.profile, "forward")
    backward = {row: 2 * cost for row, cost in forward.items()}
    # The input of the first layer needs no gradient.
    backward["stem"] = square
    assert backward == macs(counted.profile, "backward")
    assert (1, 5) == (backend.compilations, backend.executions)
