"""What was counted or measured belongs to the user alone again: memory, graphs, threads."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import lflops
from lflops.timing.measure import CountAndTime, measure_generate
from lflops.timing.module_times import NO_OVERHEAD
from tests.support.canary_model import batch, in_forward, patient
from tests.support.process_state import about, differences, graph, modes, random_numbers

TIMEOUT = 120
"""Seconds after which a thread that waits for another gives up.

Only a test that fails waits so long.
"""


def fail() -> None:
    """Raise in the middle of a forward."""
    raise ValueError("planted")


def counted(model: nn.Module, x: Tensor) -> None:
    """A count with everything in it."""
    lflops.count(model, x, backward=True)


def counted_until_an_error(model: nn.Module, x: Tensor) -> None:
    """One that fails in forward."""
    with in_forward(fail), pytest.raises(ValueError, match="planted"):
        lflops.count(model, x, backward=True)


def counted_within(model: nn.Module, x: Tensor) -> None:
    """A loop that is counted, and over."""
    with lflops.counting(model) as count, lflops.scope("part"):
        model(x).sum().backward()
    assert count.profile.total()


def counted_and_kept(model: nn.Module, x: Tensor) -> object:
    """The same, with a step in it, the count of which the user still holds to read its profile."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.counting(model) as count:
        model(x).sum().backward()
        optimizer.step()
    return count


def measured(model: nn.Module, x: Tensor) -> object:
    """Passes with everything in them, and the profile kept."""
    return lflops.measure(model, x, backward=True, warmup=1, repeats=1)


def measured_until_an_error(model: nn.Module, x: Tensor) -> None:
    """The third pass fails, which is the one with hooks."""
    left = iter([None, None])

    def fail_at_last() -> None:
        if next(left, fail) is fail:
            fail()

    with in_forward(fail_at_last), pytest.raises(ValueError, match="planted"):
        lflops.measure(model, x, backward=True, warmup=0, repeats=1)


def watched_and_kept(model: nn.Module, x: Tensor) -> object:
    """A loop that is counted and timed, and over; the user still holds what watched it."""
    with CountAndTime(model, overhead=NO_OVERHEAD) as watching:
        model(x).sum().backward()
    return watching


class Writer(nn.Module):
    """Writes by calling itself."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def generate(self, x: Tensor) -> Tensor:
        return self(self(x))


def generated(model: nn.Module, x: Tensor) -> object:
    """Text generation."""
    return measure_generate(Writer(model), x, warmup=0, repeats=1)


def survivors(action: Callable[[nn.Module, Tensor], object]) -> list[str]:
    """What of a model and its batch is still alive when the user lets go of them, before any garbage is collected."""
    lflops.measure(
        patient(), batch(), warmup=0, repeats=1
    )  # what torch loads when it is first used keeps the frames that asked for it
    gc.collect()
    gc.disable()
    try:
        model, x = patient(), batch()
        things = {
            "model": model,
            "module": model.head,
            "parameter": model.head.weight,
            "gradient": model.head.weight.grad,
            "input": x,
        }
        references = {name: weakref.ref(thing) for name, thing in things.items()}
        kept = action(model, x)
        del model, x, things
        alive = [name for name, reference in references.items() if reference() is not None]
        del kept
        return alive
    finally:
        gc.enable()


ACTIONS = [
    *(counted, counted_until_an_error, counted_within, counted_and_kept),
    *(measured, measured_until_an_error, watched_and_kept, generated),
]


@pytest.mark.parametrize("action", ACTIONS)
def test_what_was_counted_is_freed_when_the_user_lets_go_of_it(
    action: Callable[[nn.Module, Tensor], object],
) -> None:
    """At once, not when garbage is collected next: on a device that memory is needed."""
    assert [] == survivors(action)


def test_what_somebody_keeps_is_seen_to_survive() -> None:
    """The check above can fail: by a reference, and by a cycle."""
    assert ["model", "module", "parameter", "gradient"] == survivors(lambda model, x: model)
    assert ["input"] == survivors(lambda model, x: [x])
    assert ["model", "module", "parameter", "gradient"] == survivors(
        lambda model, x: setattr(model, "me", [model])
    )


def test_gradients_that_the_loop_gives_up_are_freed_within_it() -> None:
    """`zero_grad` frees memory, and the counted peak is that of the run, only if nobody else holds the gradients."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.counting(model):
        model(torch.ones(1, 4)).sum().backward()
        gradient = weakref.ref(model.weight.grad)
        optimizer.step()
        assert gradient() is not None
        optimizer.zero_grad()
        assert gradient() is None


class Threaded(nn.Module):
    """Runs its first half on another thread, as pipelines do."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self.pool = [pool]
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.pool[0].submit(self.first, x).result(TIMEOUT))


def test_a_graph_of_two_threads_bears_no_marks_afterwards() -> None:
    """Nodes are marked to tell whose they are.

    A graph that the user keeps is as it was, and its marks are not lost on the check.
    """
    with ThreadPoolExecutor(1) as pool:
        model, x = Threaded(pool), torch.ones(1, 4, requires_grad=True)
        with lflops.counting(model) as count:
            out = model(x)
            marked = about("out", out)["out: graph"]
            torch.autograd.grad(out.sum(), x, retain_graph=True)
        released = about("out", out)["out: graph"]
    assert {"first": 16, "second": 16} == {
        row: macs for row, macs in count.profile.by_module("backward").items() if row
    }
    assert any(metadata for _, metadata in marked)
    assert not any(metadata for _, metadata in released)


class Keeps(nn.Module):
    """Holds on to what it computed last, and with it to the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.second(self.first(x).relu())]
        return self.kept[0]


def hooks_on_graph(tensor: Tensor) -> int:
    """How many hooks are on the nodes that it was computed by.

    They share a dictionary, which each new hook is told of.
    """
    found = 0
    for node in graph(tensor):
        ours = node.register_prehook(fail)
        found += len(ours.hooks_dict_ref()) - 1
        ours.remove()
    return found


def test_a_graph_that_the_model_keeps_bears_no_hooks_afterwards() -> None:
    """Nodes are hooked to tell when backward comes to them.

    The last pass that is kept is one that was hooked.
    """
    model, x = Keeps(), torch.ones(1, 4)
    inside: list[int] = []

    def look(out: Tensor) -> Tensor:
        inside.append(hooks_on_graph(out))
        return out.sum()

    lflops.measure(model, x, backward=True, loss=look, warmup=0, repeats=1)
    assert [0, 0] == inside[:2]
    assert inside[2] > 0
    assert hooks_on_graph(model.kept[0]) == 0


def test_a_graph_that_is_kept_where_a_pass_fails_bears_no_hooks_afterwards() -> None:
    """As well."""
    model, x = Keeps(), torch.ones(1, 4)
    left = iter([None, None])
    with pytest.raises(ValueError, match="planted"):
        lflops.measure(
            model,
            x,
            backward=True,
            warmup=0,
            repeats=1,
            loss=lambda out: out.sum() if next(left, fail) is None else fail(),
        )
    assert hooks_on_graph(model.kept[0]) == 0


def test_a_hook_that_is_left_on_a_graph_is_seen() -> None:
    """The checks above can fail."""
    model = Keeps()
    out = model(torch.ones(1, 4))
    out.grad_fn.register_prehook(fail)
    assert hooks_on_graph(out) == 1


def modes_left_on(pool: ThreadPoolExecutor) -> int:
    """How many modes are on the stack of the pool's only thread."""
    return len(pool.submit(_get_current_dispatch_mode_stack).result(TIMEOUT))


def test_a_thread_that_left_the_model_has_no_mode_on_it() -> None:
    """A thread is followed while it is in one of the modules, and no longer, also when forward raises there."""
    model = patient().eval()
    with ThreadPoolExecutor(1) as pool, lflops.counting(model):
        with in_forward(lambda: depths.append(len(_get_current_dispatch_mode_stack()))):
            depths: list[int] = []
            pool.submit(model, batch()).result(TIMEOUT)
        assert [1] == depths
        assert modes_left_on(pool) == 0
        with in_forward(fail):
            assert isinstance(pool.submit(model, batch()).exception(TIMEOUT), ValueError)
        assert modes_left_on(pool) == 0


class Meeting(nn.Module):
    """Two of them run at the same time: each goes on when the other has come as far.

    One of them draws random numbers.
    """

    def __init__(self, barrier: threading.Barrier, wide: int) -> None:
        super().__init__()
        self.barrier = [barrier]
        self.up = nn.Linear(4, wide)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(wide, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.barrier[0].wait(TIMEOUT)
        with lflops.scope("up"):
            x = self.up(x)
        self.barrier[0].wait(TIMEOUT)
        x = self.down(self.dropout(x))
        self.barrier[0].wait(TIMEOUT)
        return x


def count_on_this_thread(model: nn.Module) -> tuple[lflops.Profile, list[str]]:
    """A count, and what it left behind on its thread.

    The compiler's stance is that of all threads, and another may still need it.
    """
    before = modes()
    profile = lflops.count(model, torch.ones(1, 4), backward=True)
    return profile, differences(before, modes() | {"compiler stance": before["compiler stance"]})


def test_two_counts_in_two_threads_count_their_own_and_leave_no_trace() -> None:
    """Each has the work of its own model, under its own names, and its thread's modes are as they were."""
    barrier = threading.Barrier(2)
    before = modes()
    with ThreadPoolExecutor(2) as pool:
        (narrow, left), (wide, left_too) = pool.map(
            count_on_this_thread, [Meeting(barrier, 8), Meeting(barrier, 16)]
        )
    assert ([], [], []) == (left, left_too, differences(before, modes()))
    assert {"": 64, "up": 32, "dropout": 0, "down": 32} == narrow.by_module()
    assert {"": 128, "up": 64, "dropout": 0, "down": 64} == wide.by_module()


class Waiting(nn.Module):
    """Draws a random number, says that it did, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.over = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x)
        self.inside.set()
        assert self.over.wait(TIMEOUT)
        return x


def test_of_two_counts_in_two_threads_the_first_that_began_may_be_the_first_that_ends() -> None:
    """The random numbers are what they were before both."""
    first, second = Waiting(), Waiting()
    before = random_numbers()
    with ThreadPoolExecutor(2) as pool:
        running = []
        for model in (first, second):
            running.append(pool.submit(lflops.count, model, torch.ones(4)))
            assert model.inside.wait(TIMEOUT)
        for model, count in zip((first, second), running, strict=True):
            model.over.set()
            count.result(TIMEOUT)
    assert [] == differences(before, random_numbers())


class WaitingSGD(torch.optim.SGD):
    """Makes its step when it is told to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.inside, self.over = threading.Event(), threading.Event()

    def step(self, closure: None = None) -> None:
        self.inside.set()
        assert self.over.wait(TIMEOUT)
        super().step()


def test_an_optimizer_that_steps_on_another_thread_is_no_part_of_the_count() -> None:
    """What this thread runs meanwhile is forward, not the optimizer's work."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = WaitingSGD(other)
    other(torch.ones(1, 4)).sum().backward()
    with ThreadPoolExecutor(1) as pool, lflops.counting(model) as count:
        step = pool.submit(optimizer.step)
        assert optimizer.inside.wait(TIMEOUT)
        out = model(torch.ones(1, 4)) @ torch.ones(4, 4)
        optimizer.over.set()
        step.result(TIMEOUT)
    assert out.shape == (1, 4)
    assert {"forward": 32, "optimizer": 0} == {
        phase: count.profile.total(phase=phase) for phase in ("forward", "optimizer")
    }
