"""Test `StepTimer`: steps on the fast path, which is the path of almost all steps.

A step on the fast path is converted to a timed step later. The result must be the same as on the
slow path.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from lflops.error_guard import unguarded
from lflops.inputs.batch import BatchReader
from lflops.monitoring.window.step_timer import CPU_ROUND, MAX_PENDING_STEPS, StepTimer
from lflops.profile.steps import Step
from lflops.timing.clock import ThreadSchedule
from lflops.timing.step_phases import LoggedPhases
from lflops.torch_private.modules import Compilations
from tests.support.fake_clock import StillClock
from tests.support.phase_events import Events

BATCH = torch.zeros(4, 3)
OTHER_BATCH = torch.zeros(2, 3)
COLD = 2


class Run:
    """A run of steps on a clock that only the test advances.

    Args:
        is_short: Whether steps may take the fast path.
        on_ranks: Whether there are other ranks.
    """

    def __init__(self, *, is_short: bool = True, on_ranks: bool = False) -> None:
        """Run the warm-up steps."""
        self.clock = StillClock()
        self.events = Events(self.clock.mark)
        self.phases = LoggedPhases(self.events.log, "train", self.clock)
        self.phases.connect()
        self.depth = 0
        self.reader = BatchReader()
        self.steps = StepTimer(
            self.phases, None, None, 0, updating=frozenset(), scaled=False, on_ranks=on_ranks
        )
        self.steps.install(unguarded)
        self.logged = 0
        self._is_short = is_short
        for _ in range(COLD):
            self.end(BATCH)

    def play(self, script: str) -> None:
        """Run a part of a step that the characters of `script` describe.

        A letter enters the phase that begins with it: data, forward or backward. `)` leaves the
        innermost phase, and `!` leaves it by an exception. A digit advances the clock by that many
        seconds.
        """
        for sign in script:
            if sign.isdigit():
                self.clock.advance(int(sign))
            elif sign not in ")!":
                self.events.enter({"d": "data", "f": "forward", "b": "backward"}[sign])
                self.depth += 1
            elif self.depth:
                if sign == ")":
                    self.events.leave()
                else:
                    self.events.drop()
                self.depth -= 1

    def end(self, batch: Any) -> bool:
        """End a step with one batch. Returns whether it took the fast path."""
        fast_path = self.steps.fast_path
        is_fast = len(fast_path.steps) < fast_path.limit
        is_fast = is_fast and fast_path.note(self.reader.shapes(batch))
        if not is_fast:
            self.steps.batch(batch)
            self.steps.end(self.logged)
            self.steps.allow_fast_path(math.inf if self._is_short else 0)
        self.logged += 1
        return is_fast

    def read(self) -> Iterator[Step]:
        """Return all complete steps except the warm-up steps."""
        self.steps.flush_fast_path(self.logged)
        timed = [step for step in self.steps.read() if step.is_complete and step.ordinal >= COLD]
        return map(self.steps.step, timed)


def seen(run: Run) -> list[tuple[Any, ...]]:
    """Return the values of each step that the tests compare."""
    return [
        (step.index, step.seconds, step.phases, step.samples, step.marks) for step in run.read()
    ]


def test_a_plain_step_has_its_phases() -> None:
    """Each step on the fast path has its phases.

    The first step has 1 s of data, 2 s of forward, and 3 + 4 s outside all phases. A phase that
    continues after the end of a step is divided between the two steps.
    """
    run = Run()
    run.play("d1)3f2)4")
    assert run.end(BATCH)
    run.play("5d1")
    assert run.end(BATCH)
    run.play("2)3")
    assert run.end(BATCH)
    assert [
        (2, 10.0, {"data": 1.0, "forward": 2.0, "other": 7.0}, 4, ()),
        (3, 6.0, {"data": 1.0, "other": 5.0}, 4, ()),
        (4, 5.0, {"data": 2.0, "other": 3.0}, 4, ()),
    ] == seen(run)


def test_a_phase_that_was_left_by_an_exception_is_over_in_the_next_step() -> None:
    """A phase that an exception ended is over in the next step.

    The exception leaves no mark at the end of the phase. So the phase lasts until the end of its
    step: 2 + 3 s. The next step begins outside this phase.
    """
    run = Run()
    run.play("1f2!3")
    assert run.end(BATCH)
    run.play("4")
    assert run.end(BATCH)
    assert [{"other": 1.0, "forward": 5.0}, {"other": 4.0}] == [step.phases for step in run.read()]


@given(
    st.lists(st.tuples(st.text("dfb)!123", max_size=12), st.booleans(), st.booleans()), max_size=12)
)
def test_the_short_way_is_the_long_one(script: list[tuple[str, bool, bool]]) -> None:
    """Both paths give the same steps, whatever happens in the steps.

    Phases may continue over several steps, batches may have other shapes, and steps may be marked.
    """
    short = Run()
    long = Run(is_short=False)
    for run in (short, long):
        for within, is_other, is_marked in script:
            run.play(within)
            if is_marked:
                run.steps.mark("validation")
            run.end(OTHER_BATCH if is_other else BATCH)
    assert seen(long) == seen(short)


def test_a_step_in_which_something_happens_is_not_plain() -> None:
    """A step with a mark or with new shapes takes the slow path; the next one is fast again."""
    run = Run()
    assert run.end(BATCH)
    run.steps.mark("checkpoint")
    assert [False, True] == [run.end(BATCH), run.end(BATCH)]
    assert [False, True, True] == [run.end(OTHER_BATCH), run.end(OTHER_BATCH), run.end(BATCH)]
    assert [(), ("checkpoint",), (), ("new_shapes",), (), ()] == [step.marks for step in run.read()]


def test_an_event_in_every_step_is_part_of_a_typical_step() -> None:
    """An event that happens in each step, such as a checkpoint, is a mark only in the first three.

    This occurs for example if an epoch is one batch. After a step without a checkpoint, a
    checkpoint is a mark again. A compilation in every step stays a mark.
    """
    run = Run()
    for is_saved in (True,) * 5 + (False, True):
        if is_saved:
            run.steps.mark("checkpoint")
        run.end(BATCH)
    saved = ("checkpoint",)
    assert [saved, saved, saved, (), (), (), saved] == [step.marks for step in run.read()]
    for _ in range(5):
        run.steps.mark("recompiled")
        run.end(BATCH)
    assert [("recompiled",)] * 5 == [step.marks for step in run.read()]


def test_a_step_whose_batch_was_left_is_not_plain() -> None:
    """A step whose batch was abandoned takes the slow path, and its time is not reported.

    Such a step began twice, so its time is not the time of one step.
    """
    run = Run()
    run.play("1")
    run.end(BATCH)
    run.play("2")
    run.steps.drop_batches()
    run.play("3")
    assert not run.end(BATCH)
    run.play("4")
    run.end(BATCH)
    assert [1.0, 4.0] == [step.seconds for step in run.read()]


def test_batches_that_turn_out_to_be_parts_of_steps_are_none() -> None:
    """If batches turn out to be parts of steps, no step is reported for them.

    The loggers have counted fewer steps than batches, because gradients were accumulated.
    """
    run = Run()
    for _ in range(3):
        assert run.end(BATCH)
    run.logged -= 1
    assert [] == [*run.read()]
    run.end(BATCH)
    assert [run.logged - 1] == [step.index for step in run.read()]


def test_there_are_only_so_many_plain_steps_in_a_row() -> None:
    """After `MAX_PENDING_STEPS` steps on the fast path, one step takes the slow path.

    The notes of the steps on the fast path need memory. The last steps can still be read.
    """
    run = Run()
    were_fast = [run.end(BATCH) for _ in range(MAX_PENDING_STEPS + 2)]
    assert [*[True] * MAX_PENDING_STEPS, False, True] == were_fast
    assert MAX_PENDING_STEPS + 2 == run.steps.ordinal - COLD
    assert [*range(4, MAX_PENDING_STEPS + 4)] == [step.index for step in run.read()]


def test_the_cpu_time_of_some_plain_steps_is_read() -> None:
    """The CPU time is known for the first three of every sixteen steps on the fast path.

    So it is known for all steps of a short sequence. The CPU time of a step is the difference
    between the system's values before and after the step.
    """
    run = Run()
    for _ in range(2 * CPU_ROUND + 2):
        assert run.end(BATCH)
    read = [
        place
        for place, step in enumerate(run.read(), 1)
        if step.cpu_user is not None and step.cpu_system is not None
    ]
    assert [1, 2, 3, 17, 18, 19, 33, 34] == read


@pytest.mark.parametrize("is_short", [True, False])
def test_on_ranks_the_system_is_asked_in_each_step(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several ranks, the scheduler counters of the training thread are read in each step.

    Each step, the counters advance by 2 s on a core and 0.5 s of waiting for a core. With one rank,
    these times are unknown.
    """
    readings = (
        f"{2_000_000_000 * number} {500_000_000 * number} {number}\n".encode()
        for number in itertools.count(7)
    )
    monkeypatch.setattr(ThreadSchedule, "read", lambda _: next(readings))
    run = Run(is_short=is_short, on_ranks=True)
    for _ in range(CPU_ROUND):
        run.end(BATCH)
    assert [(2.0, 0.5)] * CPU_ROUND == [
        (step.thread_cpu, step.thread_waited) for step in run.read()
    ]
    alone = Run(is_short=is_short)
    alone.end(BATCH)
    assert [(None, None)] == [(step.thread_cpu, step.thread_waited) for step in alone.read()]


def test_where_the_system_does_not_say_a_thread_s_time_is_unknown() -> None:
    """The times of a thread are unknown if the system is not Linux or the thread has ended."""
    assert ThreadSchedule.between(None, b"1 2 3\n") is None
    assert ThreadSchedule.between(b"", b"") is None
    schedule = ThreadSchedule()
    schedule._file = None
    assert schedule.read() is None


def test_what_is_made_out_is_in_no_step() -> None:
    """The time for converting the steps of the fast path belongs to no step.

    The end of a step on the slow path is marked before the earlier steps are converted. In this
    test, the conversion takes 50 s.
    """
    run = Run()
    for _ in range(3):
        run.play("2")
        run.end(BATCH)
    steps = run.phases.steps

    def slow_steps() -> Any:
        converted = steps()
        run.clock.advance(50)
        return converted

    run.phases.steps = slow_steps  # type: ignore[method-assign]
    run.play("3")
    run.steps.mark("checkpoint")
    run.end(BATCH)
    run.phases.steps = steps  # type: ignore[method-assign]
    run.steps.resume()
    run.play("4")
    run.end(BATCH)
    assert [2.0, 2.0, 2.0, 3.0, 4.0] == [step.seconds for step in run.read()]


def compiled() -> Any:
    """Return a new function with `torch.compile` and a backend that only runs it."""
    return torch.compile(lambda x: x + 1, backend="eager", dynamic=False)


def test_a_step_in_which_torch_compile_compiles_is_marked() -> None:
    """A step in which `torch.compile` compiles has the mark `recompiled`.

    The first call compiles, and the first call with another number of dimensions compiles again.
    """
    torch._dynamo.reset()
    run = Run()
    function = compiled()
    for shape in ((2,), (2,), (2, 2), (2, 2)):
        function(torch.zeros(shape))
        run.end(BATCH)
    assert [("recompiled",), (), ("recompiled",), ()] == [step.marks for step in run.read()]
    run.steps.close()


def test_torch_compile_is_heard_again_after_its_reset() -> None:
    """After `torch.compiler.reset()`, the next step on the slow path registers the callback again.

    `torch.compiler.reset()` removes the callbacks of all packages.
    """
    run = Run()
    torch.compiler.reset()
    run.steps.mark("checkpoint")
    run.end(BATCH)
    compiled()(torch.zeros(2))
    run.end(BATCH)
    assert [("checkpoint",), ("recompiled",)] == [step.marks for step in run.read()]
    run.steps.close()


def test_what_was_compiled_unheard_was_in_any_of_the_steps() -> None:
    """A compilation after a reset is not reported, so all steps that may have compiled are marked.

    The count of compiled graphs shows that there was a compilation, but not in which of the steps
    since the last step on the slow path.
    """
    run = Run()
    run.end(BATCH)
    torch.compiler.reset()
    compiled()(torch.zeros(2))
    assert [True, True] == [run.end(BATCH), run.end(BATCH)]
    run.steps.mark("checkpoint")
    run.end(BATCH)
    run.end(BATCH)
    assert [("recompiled",)] * 3 + [("checkpoint", "recompiled"), ()] == [
        step.marks for step in run.read()
    ]
    run.steps.close()


def test_a_run_that_is_closed_hears_nothing_more() -> None:
    """A closed timer registers no callback again.

    Steps may still end after it is closed, while the run waits for work in the background.
    """
    before = list(torch._dynamo.callback_handler.start_callbacks)
    run = Run()
    run.steps.close()
    run.steps.mark("background")
    run.end(BATCH)
    assert before == torch._dynamo.callback_handler.start_callbacks


def test_nothing_is_left_with_torch_compile() -> None:
    """`Compilations.stop` removes the callback of that listener only, also if it is called twice.

    A listener that is registered twice has only one callback.
    """
    callbacks = torch._dynamo.callback_handler.start_callbacks
    before = list(callbacks)
    heard: list[int] = []
    first = Compilations(partial(heard.append, 1))
    second = Compilations(partial(heard.append, 2))
    for each in (first, first, second):
        each.listen(unguarded)
    assert len(before) + 2 == len(callbacks)
    first.stop()
    first.stop()
    compiled()(torch.zeros(3))
    assert {2} == set(heard)
    second.stop()
    assert before == callbacks
