"""A compiled model runs compiled in a counted step and when it is timed, and is never compiled again.

A pass of our own counts eagerly.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lflops
from lflops.timing.clock import HostClock
from lflops.timing.measure import measure_generate
from lflops.timing.module_hooks import ModuleTimer
from lflops.torch_private import self_check
from tests.support.compilers import ENTERED_MODES_END_COMPILATION, Backend
from tests.support.leaky_profilers import PlainMode

# torch warns of hooks on all modules: tests/attribution/test_compile.py holds that a user does not
# hear of it.
pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Around(nn.Module):
    """A model of which a part is compiled."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def in_place(backend: Backend) -> nn.Module:
    """`model.compile()`."""
    model = Net()
    model.compile(backend=backend)
    return model


def function(backend: Backend) -> nn.Module:
    """A compiled function in a model that is not compiled."""
    weight = torch.ones(4, 4)
    return Around(torch.compile(lambda x: F.gelu(x @ weight), backend=backend))


def part_in_place(backend: Backend) -> nn.Module:
    """`model.part.compile()`."""
    model = Around(Net())
    model.inner.compile(backend=backend)
    return model


def with_modules(backend: Backend) -> nn.Module:
    """A compiled function that calls modules of the model's."""
    model = Around(Net())
    inner = model.inner
    model.forward = lambda x: model.head(compiled(x))
    compiled = torch.compile(lambda x: inner(x) * 2, backend=backend)
    return model


COMPILED: dict[str, Callable[[Backend], nn.Module]] = {
    "wrapped": lambda backend: torch.compile(Net(), backend=backend),
    "in place": in_place,
    "part": lambda backend: Around(torch.compile(Net(), backend=backend)),
    "part in place": part_in_place,
    "function": function,
    "function with modules": with_modules,
}


@pytest.fixture
def backend() -> Iterator[Backend]:
    """One that compiles everything anew."""
    torch.compiler.reset()
    yield Backend()
    torch.compiler.reset()


@pytest.fixture
def x() -> Tensor:
    """A batch."""
    return torch.ones(2, 4)


def counted(model: nn.Module, x: Tensor) -> None:
    """One pass, forward and backward."""
    assert lflops.count(model, x, backward=True).total()


def counted_step(model: nn.Module, x: Tensor) -> None:
    """A step of a loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.counting(model) as count:
        model(x).sum().backward()
        optimizer.step()
    assert count.profile.total()


def counted_twice(model: nn.Module, x: Tensor) -> None:
    """Two counts at once, the first of which ends first."""
    with contextlib.ExitStack() as second_to_end:
        with contextlib.ExitStack() as first_to_end:
            first = first_to_end.enter_context(lflops.counting(model))
            second = second_to_end.enter_context(lflops.counting(model))
            model(x)
        model(x)
    assert 2 * first.profile.total() == second.profile.total()


def counted_until_an_error(model: nn.Module, x: Tensor) -> None:
    """A pass that fails: the input has another size than the model takes."""
    with pytest.raises(RuntimeError, match="shapes"):
        lflops.count(model, torch.ones(2, 5))


def counted_in_no_grad(model: nn.Module, x: Tensor) -> None:
    """A pass in another grad mode than the model was compiled in."""
    with torch.no_grad():
        lflops.count(model, x)


WAYS = {
    counted: 0,
    counted_step: 1,
    counted_twice: 2,
    counted_until_an_error: 0,
    counted_in_no_grad: 0,
}
"""How often the compiled graph runs in each.

In a step of the user's as it would anyway, in a pass of our own never.
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_warm_model_stays_compiled(
    compile_: Callable[[Backend], nn.Module],
    way: Callable[[nn.Module, Tensor], None],
    backend: Backend,
    x: Tensor,
) -> None:
    """Its graph runs in a counted step, runs afterwards, and is the same."""
    model = compile_(backend)
    for _ in range(2):
        model(x)
    assert (1, 2) == (backend.compilations, backend.runs)
    way(model, x)
    assert (1, 2 + WAYS[way]) == (backend.compilations, backend.runs)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            model(x)
    assert (1, 4 + WAYS[way]) == (backend.compilations, backend.runs)


@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_cold_model_is_compiled_when_it_is_first_called_after_the_count(
    compile_: Callable[[Backend], nn.Module], backend: Backend, x: Tensor
) -> None:
    """The count compiles nothing, and stands in the way of nothing."""
    model = compile_(backend)
    counted(model, x)
    assert (0, 0) == (backend.compilations, backend.runs)
    for _ in range(3):
        model(x)
    assert (1, 3) == (backend.compilations, backend.runs)


@pytest.mark.skipif(not ENTERED_MODES_END_COMPILATION, reason="the culprit is none on this torch")
@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_mode_that_is_entered_in_the_ordinary_way_is_seen_to_end_the_compilation(
    compile_: Callable[[Backend], nn.Module], backend: Backend, x: Tensor
) -> None:
    """The checks above can fail: the graph of a model that ran under such a mode never runs again."""
    model = compile_(backend)
    for _ in range(2):
        model(x)
    with PlainMode():
        model(x)
    for _ in range(2):
        model(x)
    assert (1, 2) == (backend.compilations, backend.runs)


def measured(model: nn.Module, x: Tensor) -> None:
    """Forward and backward.

    1 pass is counted, 1 warms up, 2 are clean, 2 hooked, and 1 is thrown away.
    """
    assert lflops.measure(model, x, backward=True, warmup=1, repeats=2).total()


MEASURED = 1 + 2 + 2 + 1
"""So many passes run compiled."""


@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_warm_model_is_measured_compiled_and_never_compiled_again(
    compile_: Callable[[Backend], nn.Module], backend: Backend, x: Tensor
) -> None:
    """Neither it nor what watches it: the graph is one, and runs in every pass but the counted one."""
    model = compile_(backend)
    for _ in range(2):
        model(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        measured(model, x)
        assert (1, 2 + MEASURED) == (backend.compilations, backend.runs)
        for _ in range(2):
            model(x)
    assert (1, 2 + MEASURED + 2) == (backend.compilations, backend.runs)


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_cold_model_is_compiled_once_without_hooks(
    compile_: Callable[[Backend], nn.Module], warmup: int, backend: Backend, x: Tensor
) -> None:
    """By the first pass that is timed or warms up; after it nothing is left to be compiled."""
    model = compile_(backend)
    lflops.measure(model, x, warmup=warmup, repeats=1)
    assert (1, warmup + 2) == (backend.compilations, backend.runs)
    with torch.compiler.set_stance("fail_on_recompile"):
        model(x)
    assert (1, warmup + 3) == (backend.compilations, backend.runs)


@pytest.mark.skipif(not ENTERED_MODES_END_COMPILATION, reason="the culprit is none on this torch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["wrapped", "in place", "part", "part in place"])
def test_a_hook_that_is_compiled_as_well_is_seen(
    name: str, backend: Backend, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks above can fail.

    Whatever runs on the way into a compiled module is compiled, if nobody prevents it.
    """
    self_check.check()  # before what it tries is planted: it runs once in a process
    for name_of_hook in (
        "enter_module",
        "leave_module",
    ):  # anew, because a function is marked once for the whole process
        hook = getattr(ModuleTimer, name_of_hook)
        monkeypatch.setattr(
            ModuleTimer,
            name_of_hook,
            FunctionType(hook.__code__.replace(), hook.__globals__, closure=hook.__closure__),
        )
    monkeypatch.setattr("lflops.attribution.hooks.never_compiled", lambda hook: None)
    monkeypatch.setattr("lflops.attribution.hooks.HiddenHooks.start", lambda _: None)
    # Dynamo compiles no code that reads a clock in nanoseconds.
    monkeypatch.setattr(HostClock, "mark", staticmethod(perf_counter))
    model = COMPILED[name](backend)
    for _ in range(2):
        model(x)
    measured(model, x)
    assert backend.compilations > 1


class Writer(nn.Module):
    """Calls itself."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def generate(self, x: Tensor) -> Tensor:
        return self(self(x))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_writes_stays_compiled(in_place: bool, backend: Backend, x: Tensor) -> None:
    """Told that it has been called once by a hook of ours on it.

    2 clean passes and 2 hooked ones, 1 each to warm up and to throw away.
    """
    model = Writer(Net()) if in_place else Writer(torch.compile(Net(), backend=backend))
    if in_place:
        model.compile(backend=backend)
    with torch.no_grad():
        model.generate(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            measure_generate(model, x, warmup=1, repeats=2)
            model.generate(x)
    assert (1, 2 + 2 * MEASURED + 2) == (backend.compilations, backend.runs)


@pytest.mark.parametrize(
    "stance", ["default", "force_eager", "eager_on_recompile", "fail_on_recompile"]
)
def test_the_users_own_stance_is_put_back(stance: str, backend: Backend, x: Tensor) -> None:
    """Whatever the user told the compiler holds again afterwards."""
    model = torch.compile(Net(), backend=backend)
    model(x)
    with torch.compiler.set_stance(stance):
        before = torch._dynamo.eval_frame._stance
        counted(model, x)
        counted_twice(model, x)
        measured(model, x)
        assert before is torch._dynamo.eval_frame._stance


def test_what_is_compiled_within_a_count_is_compiled_in_it_and_after_it() -> None:
    """Also where the count began before the compiler was loaded."""
    code = """
import torch, lflops
runs = []
def backend(module, inputs):
    return lambda *args: (runs.append(1), module.forward(*args))[1]
model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
outer = torch.nn.Sequential(model)
with lflops.counting(outer) as count:
    compiled = torch.compile(lambda x: model(x) * 2, backend=backend)
    compiled(x)
print(count.profile.total(), len(runs))
compiled(x)
compiled(x)
print(len(runs))
"""
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert ["32", "1", "3"] == printed.split()
