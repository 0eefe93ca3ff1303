"""Test that a compiled model stays compiled when its steps are counted or timed.

It is never compiled again. Only the passes that lflops itself runs to count work are eager.
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

# torch warns of hooks on all modules. tests/attribution/test_compile.py tests that users do not get
# this warning.
pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Around(nn.Module):
    """A model with an inner part, which may be compiled."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def in_place(backend: Backend) -> nn.Module:
    """Return a model that was compiled by `model.compile()`."""
    model = Net()
    model.compile(backend=backend)
    return model


def function(backend: Backend) -> nn.Module:
    """Return a model that is not compiled but calls a compiled function."""
    weight = torch.ones(4, 4)
    return Around(torch.compile(lambda x: F.gelu(x @ weight), backend=backend))


def part_in_place(backend: Backend) -> nn.Module:
    """Return a model with a part that was compiled by `model.inner.compile()`."""
    model = Around(Net())
    model.inner.compile(backend=backend)
    return model


def with_modules(backend: Backend) -> nn.Module:
    """Return a model with a compiled function that calls modules of the model."""
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
    """A backend that counts compilations and runs. No code is compiled at the start of the test."""
    torch.compiler.reset()
    yield Backend()
    torch.compiler.reset()


@pytest.fixture
def x() -> Tensor:
    """A batch."""
    return torch.ones(2, 4)


def counted(model: nn.Module, x: Tensor) -> None:
    """Count a forward and a backward pass, which lflops runs itself."""
    assert lflops.count(model, x, backward=True).total()


def counted_step(model: nn.Module, x: Tensor) -> None:
    """Count a step of a user's loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.counting(model) as count:
        model(x).sum().backward()
        optimizer.step()
    assert count.profile.total()


def counted_twice(model: nn.Module, x: Tensor) -> None:
    """Run two counts at once. The count that began first ends first."""
    with contextlib.ExitStack() as second_to_end:
        with contextlib.ExitStack() as first_to_end:
            first = first_to_end.enter_context(lflops.counting(model))
            second = second_to_end.enter_context(lflops.counting(model))
            model(x)
        model(x)
    assert 2 * first.profile.total() == second.profile.total()


def counted_until_an_error(model: nn.Module, x: Tensor) -> None:
    """Count a pass that fails, because the input has a wrong size."""
    with pytest.raises(RuntimeError, match="shapes"):
        lflops.count(model, torch.ones(2, 5))


def counted_in_no_grad(model: nn.Module, x: Tensor) -> None:
    """Count a pass in another grad mode than the one in which the model was compiled."""
    with torch.no_grad():
        lflops.count(model, x)


WAYS = {
    counted: 0,
    counted_step: 1,
    counted_twice: 2,
    counted_until_an_error: 0,
    counted_in_no_grad: 0,
}
"""How often the compiled graph runs in each of these functions.

It runs in a step of the user, but not in a pass that lflops itself runs to count.
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_warm_model_stays_compiled(
    compile_: Callable[[Backend], nn.Module],
    way: Callable[[nn.Module, Tensor], None],
    backend: Backend,
    x: Tensor,
) -> None:
    """The graph of a compiled model runs in the user's counted steps, and also afterwards.

    The model is compiled only once.
    """
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
    """Counting a model before its first call compiles nothing, and does not prevent compilation."""
    model = compile_(backend)
    counted(model, x)
    assert (0, 0) == (backend.compilations, backend.runs)
    for _ in range(3):
        model(x)
    assert (1, 3) == (backend.compilations, backend.runs)


@pytest.mark.skipif(
    not ENTERED_MODES_END_COMPILATION, reason="modes do not end compilation in this torch"
)
@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_mode_that_is_entered_in_the_ordinary_way_is_seen_to_end_the_compilation(
    compile_: Callable[[Backend], nn.Module], backend: Backend, x: Tensor
) -> None:
    """The tests above can fail: after a run in an ordinary mode, the graph never runs again."""
    model = compile_(backend)
    for _ in range(2):
        model(x)
    with PlainMode():
        model(x)
    for _ in range(2):
        model(x)
    assert (1, 2) == (backend.compilations, backend.runs)


def measured(model: nn.Module, x: Tensor) -> None:
    """Measure forward and backward.

    One pass is counted, one is a warm-up, two are timed, two are timed by module, and the result of
    one is dropped.
    """
    assert lflops.measure(model, x, backward=True, warmup=1, repeats=2).total()


MEASURED = 1 + 2 + 2 + 1
"""Number of compiled passes in `measured`: all but the counted one."""


@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_warm_model_is_measured_compiled_and_never_compiled_again(
    compile_: Callable[[Backend], nn.Module], backend: Backend, x: Tensor
) -> None:
    """Neither the model nor the hooks of lflops are compiled while the model is measured.

    The compiled graph runs in every pass except the counted one.
    """
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
    """The first warm-up or timed pass compiles the model. Later calls need no compilation."""
    model = compile_(backend)
    lflops.measure(model, x, warmup=warmup, repeats=1)
    assert (1, warmup + 2) == (backend.compilations, backend.runs)
    with torch.compiler.set_stance("fail_on_recompile"):
        model(x)
    assert (1, warmup + 3) == (backend.compilations, backend.runs)


@pytest.mark.skipif(
    not ENTERED_MODES_END_COMPILATION, reason="modes do not end compilation in this torch"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["wrapped", "in place", "part", "part in place"])
def test_a_hook_that_is_compiled_as_well_is_seen(
    name: str, backend: Backend, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: hooks that lflops does not exclude are compiled with the module."""
    # The self-check runs once in a process. It must run before the functions it tries are replaced.
    self_check.check()
    # Hooks are marked as never compiled for the whole process, so copies without the mark are used.
    for name_of_hook in ("enter_module", "leave_module"):
        hook = getattr(ModuleTimer, name_of_hook)
        copied = FunctionType(hook.__code__.replace(), hook.__globals__, closure=hook.__closure__)
        monkeypatch.setattr(ModuleTimer, name_of_hook, copied)
    monkeypatch.setattr("lflops.attribution.hooks.never_compiled", lambda hook: None)
    monkeypatch.setattr("lflops.attribution.hooks.HiddenHooks.start", lambda _: None)
    # Dynamo does not compile code that reads a clock in nanoseconds.
    monkeypatch.setattr(HostClock, "mark", staticmethod(perf_counter))
    model = COMPILED[name](backend)
    for _ in range(2):
        model(x)
    measured(model, x)
    assert backend.compilations > 1


class Writer(nn.Module):
    """A model with `generate`, which calls the model twice."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def generate(self, x: Tensor) -> Tensor:
        return self(self(x))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_writes_stays_compiled(in_place: bool, backend: Backend, x: Tensor) -> None:
    """A compiled model that generates text is measured compiled, and is not compiled again.

    The graph runs twice in each `generate`: before and after the measurement, and in each of its
    `MEASURED` passes.
    """
    if in_place:
        model = Writer(Net())
        model.compile(backend=backend)
    else:
        model = Writer(torch.compile(Net(), backend=backend))
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
    """After a count or a measurement, the compiler has the user's stance again."""
    model = torch.compile(Net(), backend=backend)
    model(x)
    with torch.compiler.set_stance(stance):
        before = torch._dynamo.eval_frame._stance
        counted(model, x)
        counted_twice(model, x)
        measured(model, x)
        assert before is torch._dynamo.eval_frame._stance


def test_what_is_compiled_within_a_count_is_compiled_in_it_and_after_it() -> None:
    """A function that is compiled inside a count runs compiled in the count and after it.

    The count begins before torch's compiler is loaded.
    """
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
