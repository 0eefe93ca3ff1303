"""A compiled model is counted eagerly, and goes on afterwards with the code that it had."""

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

# torch's own: that what hooks of all modules do, they do twice for a module that torch.compile
# gave.
ignoring_torchs_advice = pytest.mark.filterwarnings("ignore:Using `torch.compile")
# torch's own, on its way to an input that is no leaf.
ignoring_missing_gradients = pytest.mark.filterwarnings("ignore:The .grad attribute")


class Backend:
    """Compiles to what it is given, and counts how often it compiles and how often the result runs."""

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
    """The same behind torch's own division into a forward and a backward graph.

    The counts are of the forward's.
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
    """By `torch.compile`, which gives a module around the model."""
    return torch.compile(model, backend=backend)


def in_place(model: Net, backend: Backend) -> nn.Module:
    """By the module's own method."""
    model.compile(backend=backend)
    return model


def a_part(model: Net, backend: Backend) -> nn.Module:
    """One block alone, wrapped."""
    model.blocks[1] = torch.compile(model.blocks[1], backend=backend)
    return model


def a_part_in_place(model: Net, backend: Backend) -> nn.Module:
    """One block alone, by its own method."""
    model.blocks[1].compile(backend=backend)
    return model


COMPILED_ROWS = {wrapped: {""}, in_place: {""}, a_part: {"blocks.1"}, a_part_in_place: {"blocks.1"}}


@ignoring_torchs_advice
@ignoring_missing_gradients
@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("backend_class", [Backend, BackendWithBackward])
@pytest.mark.parametrize("spelling", COMPILED_ROWS)
def test_a_compiled_model_counts_like_its_own_and_stays_compiled(
    spelling: Callable[..., nn.Module], backend_class: type[Backend], calls_before: int
) -> None:
    """Row by row as the model that is not compiled, under the same names.

    One compilation, and every call but the counted one runs it.
    """
    torch.compiler.reset()
    plain, backend, x = Net(), backend_class(), sequence()
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
    """A function within forward that is compiled is the module's own work."""
    torch.compiler.reset()
    backend = Backend()

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(hidden, hidden))
            self.function = torch.compile(lambda x, weight: torch.relu(x @ weight), backend=backend)

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x, self.weight)

    model, x = between_linears(Compiled()), sequence()
    model(x).sum().backward()
    profile = lflops.count(model, x, backward=True)
    model(x).sum().backward()
    assert {"0": square, "1": square, "2": square} == macs(profile, "forward")
    assert {"0": square, "1": 2 * square, "2": 2 * square} == macs(profile, "backward")
    assert (1, 2) == (backend.compilations, backend.executions)


def test_compiling_for_the_first_time_after_a_count_goes_as_always() -> None:
    """A model that was counted, then compiled.

    The count left nothing for the compiler to trip over.
    """
    torch.compiler.reset()
    plain, backend, x = Net(), Backend(), sequence()
    consistent(lflops.count(plain, x, backward=True))
    model = torch.compile(plain, backend=backend, fullgraph=True)
    for _ in range(3):
        model(x).sum().backward()
    assert (1, 3) == (backend.compilations, backend.executions)


def test_counting_a_compiled_model_warns_of_nothing() -> None:
    """Neither while it is counted nor afterwards."""
    torch.compiler.reset()
    model, x = torch.compile(Net(), backend=Backend()), sequence()
    model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lflops.count(model, x)
    assert [] == [str(each.message) for each in caught]


@ignoring_torchs_advice
def test_a_loop_that_is_counted_in_the_middle_stays_compiled() -> None:
    """With optimizer and all.

    One step of five has the work of one step, module by module, and runs compiled as the others.
    """
    torch.compiler.reset()
    plain, backend = Net(), Backend()
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
    block = {"up": up, "down": down}
    rows = {
        "stem": square,
        **{f"blocks.{n}.{part}": cost for n in range(2) for part, cost in block.items()},
    }
    assert rows == macs(counted.profile, "forward")
    assert {row: cost if row == "stem" else 2 * cost for row, cost in rows.items()} == macs(
        counted.profile, "backward"
    )
    assert (1, 5) == (backend.compilations, backend.executions)
