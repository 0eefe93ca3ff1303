"""Test that lflops keeps nothing after a count or a measurement: no memory, graphs or threads."""

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
"""Maximum seconds that a thread waits for another thread. Only a failing test waits that long."""


def fail() -> None:
    """Raise an error. Tests call this in the middle of forward."""
    raise ValueError("planted")


def counted(model: nn.Module, x: Tensor) -> None:
    """Count a forward and a backward pass."""
    lflops.count(model, x, backward=True)


def counted_until_an_error(model: nn.Module, x: Tensor) -> None:
    """Count a pass that fails in forward."""
    with in_forward(fail), pytest.raises(ValueError, match="planted"):
        lflops.count(model, x, backward=True)


def counted_within(model: nn.Module, x: Tensor) -> None:
    """Count a loop with a scope."""
    with lflops.counting(model) as count, lflops.scope("part"):
        model(x).sum().backward()
    assert count.profile.total()


def counted_and_kept(model: nn.Module, x: Tensor) -> object:
    """Count a loop with an optimizer step, and return the count, which has the profile."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.counting(model) as count:
        model(x).sum().backward()
        optimizer.step()
    return count


def measured(model: nn.Module, x: Tensor) -> object:
    """Measure forward and backward passes, and return the profile."""
    return lflops.measure(model, x, backward=True, warmup=1, repeats=1)


def measured_until_an_error(model: nn.Module, x: Tensor) -> None:
    """Measure until the third pass, the one with hooks, fails."""
    left = iter([None, None])

    def fail_at_last() -> None:
        if next(left, fail) is fail:
            fail()

    with in_forward(fail_at_last), pytest.raises(ValueError, match="planted"):
        lflops.measure(model, x, backward=True, warmup=0, repeats=1)


def watched_and_kept(model: nn.Module, x: Tensor) -> object:
    """Count and time a loop, and return the object that did so."""
    with CountAndTime(model, overhead=NO_OVERHEAD) as watching:
        model(x).sum().backward()
    return watching


class Writer(nn.Module):
    """A model with `generate`, which calls the model twice."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def generate(self, x: Tensor) -> Tensor:
        return self(self(x))


def generated(model: nn.Module, x: Tensor) -> object:
    """Measure text generation."""
    return measure_generate(Writer(model), x, warmup=0, repeats=1)


def survivors(action: Callable[[nn.Module, Tensor], object]) -> list[str]:
    """Run an action, and return the names of the objects that are alive after the user drops them.

    The objects are parts of a model and its batch. The garbage collector does not run.
    """
    # On its first use, torch imports modules that keep the calling frames alive.
    lflops.measure(patient(), batch(), warmup=0, repeats=1)
    gc.collect()
    gc.disable()
    try:
        model = patient()
        x = batch()
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
    counted,
    counted_until_an_error,
    counted_within,
    counted_and_kept,
    measured,
    measured_until_an_error,
    watched_and_kept,
    generated,
]


@pytest.mark.parametrize("action", ACTIONS)
def test_what_was_counted_is_freed_when_the_user_lets_go_of_it(
    action: Callable[[nn.Module, Tensor], object],
) -> None:
    """Models and batches are freed at once, without a garbage collection.

    On a device, this memory is needed for the next steps.
    """
    assert [] == survivors(action)


def test_what_somebody_keeps_is_seen_to_survive() -> None:
    """The test above can fail: references and reference cycles keep objects alive."""
    assert ["model", "module", "parameter", "gradient"] == survivors(lambda model, x: model)
    assert ["input"] == survivors(lambda model, x: [x])
    assert ["model", "module", "parameter", "gradient"] == survivors(
        lambda model, x: setattr(model, "me", [model])
    )


def test_gradients_that_the_loop_gives_up_are_freed_within_it() -> None:
    """A count keeps no gradients, so `zero_grad` frees their memory.

    Otherwise the counted peak would be wrong.
    """
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
    """A model that runs its first half on another thread, as pipelines do."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self.pool = [pool]
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.pool[0].submit(self.first, x).result(TIMEOUT))


def test_a_graph_of_two_threads_bears_no_marks_afterwards() -> None:
    """A count marks the nodes of a graph with their modules, and removes the marks at its end.

    The marks are seen during the count, so the check can fail.
    """
    with ThreadPoolExecutor(1) as pool:
        model = Threaded(pool)
        x = torch.ones(1, 4, requires_grad=True)
        with lflops.counting(model) as count:
            out = model(x)
            marked = about("out", out)["out: graph"]
            torch.autograd.grad(out.sum(), x, retain_graph=True)
        released = about("out", out)["out: graph"]
    by_module = dict(count.profile.by_module("backward"))
    by_module.pop("")
    assert {"first": 16, "second": 16} == by_module
    assert any(metadata for _, metadata in marked)
    assert not any(metadata for _, metadata in released)


class Keeps(nn.Module):
    """A model that keeps its last result, and with it the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.second(self.first(x).relu())]
        return self.kept[0]


def hooks_on_graph(tensor: Tensor) -> int:
    """Return the number of hooks on the nodes of a tensor's graph.

    All hooks of a node are in one dictionary, which the handle of a new hook refers to.
    """
    found = 0
    for node in graph(tensor):
        ours = node.register_prehook(fail)
        found += len(ours.hooks_dict_ref()) - 1
        ours.remove()
    return found


def test_a_graph_that_the_model_keeps_bears_no_hooks_afterwards() -> None:
    """To time backward, lflops hooks the nodes of a graph, and removes the hooks after the pass.

    The model keeps the graph of the last pass, which is the third one and has hooks.
    """
    model = Keeps()
    x = torch.ones(1, 4)
    inside: list[int] = []

    def look(out: Tensor) -> Tensor:
        inside.append(hooks_on_graph(out))
        return out.sum()

    lflops.measure(model, x, backward=True, loss=look, warmup=0, repeats=1)
    assert [0, 0] == inside[:2]
    assert inside[2] > 0
    assert hooks_on_graph(model.kept[0]) == 0


def test_a_graph_that_is_kept_where_a_pass_fails_bears_no_hooks_afterwards() -> None:
    """The hooks are also removed if the pass with hooks, the third one, fails."""
    model = Keeps()
    x = torch.ones(1, 4)
    left = iter([None, None])

    def loss(out: Tensor) -> Tensor:
        if next(left, fail) is fail:
            fail()
        return out.sum()

    with pytest.raises(ValueError, match="planted"):
        lflops.measure(model, x, backward=True, warmup=0, repeats=1, loss=loss)
    assert hooks_on_graph(model.kept[0]) == 0


def test_a_hook_that_is_left_on_a_graph_is_seen() -> None:
    """The tests above can fail: `hooks_on_graph` finds a hook."""
    model = Keeps()
    out = model(torch.ones(1, 4))
    out.grad_fn.register_prehook(fail)
    assert hooks_on_graph(out) == 1


def modes_left_on(pool: ThreadPoolExecutor) -> int:
    """Return the number of modes on the stack of the pool's only thread."""
    return len(pool.submit(_get_current_dispatch_mode_stack).result(TIMEOUT))


def test_a_thread_that_left_the_model_has_no_mode_on_it() -> None:
    """Another thread has a dispatch mode only while it runs a module, also if forward fails."""
    model = patient().eval()
    depths: list[int] = []
    with ThreadPoolExecutor(1) as pool, lflops.counting(model):
        with in_forward(lambda: depths.append(len(_get_current_dispatch_mode_stack()))):
            pool.submit(model, batch()).result(TIMEOUT)
        assert [1] == depths
        assert modes_left_on(pool) == 0
        with in_forward(fail):
            assert isinstance(pool.submit(model, batch()).exception(TIMEOUT), ValueError)
        assert modes_left_on(pool) == 0


class Meeting(nn.Module):
    """A model of which two run at the same time. At each barrier, they wait for each other.

    Both draw random numbers.
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
    """Count a model, and return the profile and the names of what is left behind on this thread.

    The compiler's stance is left out: it applies to all threads, and the other count may need it.
    """
    before = modes()
    profile = lflops.count(model, torch.ones(1, 4), backward=True)
    return profile, differences(before, modes() | {"compiler stance": before["compiler stance"]})


def test_two_counts_in_two_threads_count_their_own_and_leave_no_trace() -> None:
    """Each of two counts at the same time has only the work of its own model.

    The dispatch modes of both threads are the same as before.
    """
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
    """A model that draws random numbers, sets `inside`, and waits for `over`."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = threading.Event()
        self.over = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x)
        self.inside.set()
        assert self.over.wait(TIMEOUT)
        return x


def test_of_two_counts_in_two_threads_the_first_that_began_may_be_the_first_that_ends() -> None:
    """Two counts that overlap restore the random state from before both of them."""
    first = Waiting()
    second = Waiting()
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
    """An optimizer with a step that sets `inside`, and waits for `over`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.inside = threading.Event()
        self.over = threading.Event()

    def step(self, closure: None = None) -> None:
        self.inside.set()
        assert self.over.wait(TIMEOUT)
        super().step()


def test_an_optimizer_that_steps_on_another_thread_is_no_part_of_the_count() -> None:
    """During the optimizer step of another thread, the work of this thread is still forward."""
    model = nn.Linear(4, 4)
    other = nn.Linear(4, 4)
    optimizer = WaitingSGD(other)
    other(torch.ones(1, 4)).sum().backward()
    with ThreadPoolExecutor(1) as pool, lflops.counting(model) as count:
        step = pool.submit(optimizer.step)
        assert optimizer.inside.wait(TIMEOUT)
        out = model(torch.ones(1, 4)) @ torch.ones(4, 4)
        optimizer.over.set()
        step.result(TIMEOUT)
    assert out.shape == (1, 4)
    assert 32 == count.profile.total(phase="forward")
    assert 0 == count.profile.total(phase="optimizer")
