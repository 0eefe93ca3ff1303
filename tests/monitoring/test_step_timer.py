"""Plain steps are noted in a short way and made out later.

They are what the long way makes of them.
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

BATCH, OTHER_BATCH = torch.zeros(4, 3), torch.zeros(2, 3)
COLD = 2


class Run:
    """A run of steps on a clock that stands still but for what the test lets pass.

    Args:
        is_short: Whether plain steps take the short way.
        on_ranks: Whether there are other ranks.
    """

    def __init__(self, *, is_short: bool = True, on_ranks: bool = False) -> None:
        """Make the cold steps."""
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
        """A letter enters its phase, `)` leaves the innermost, `!` by an exception, and a digit lets that many seconds pass."""
        for sign in script:
            if sign.isdigit():
                self.clock.advance(int(sign))
            elif sign not in ")!":
                self.events.enter({"d": "data", "f": "forward", "b": "backward"}[sign])
                self.depth += 1
            elif self.depth:
                (self.events.leave if sign == ")" else self.events.drop)()
                self.depth -= 1

    def end(self, batch: Any) -> bool:
        """A step of one batch ends. Returns whether it was taken for a plain one."""
        plain = self.steps.fast_path
        is_plain = len(plain.steps) < plain.limit and plain.note(self.reader.shapes(batch))
        if not is_plain:
            self.steps.batch(batch)
            self.steps.end(self.logged)
            self.steps.allow_fast_path(math.inf if self._is_short else 0)
        self.logged += 1
        return is_plain

    def read(self) -> Iterator[Step]:
        """All steps but the cold ones."""
        self.steps.flush_fast_path(self.logged)
        return map(
            self.steps.step,
            [step for step in self.steps.read() if step.is_complete and step.ordinal >= COLD],
        )


def seen(run: Run) -> list[tuple[Any, ...]]:
    """What a test compares of the steps."""
    return [
        (step.index, step.seconds, step.phases, step.samples, step.marks) for step in run.read()
    ]


def test_a_plain_step_has_its_phases() -> None:
    """1 s of fetching, 2 of forward within 7 of something else.

    A phase that goes on over the step's end belongs to both.
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
    """Its end has no mark, so all until the step's end is its time.

    The step behind that begins outside of it.
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
    """Whatever happens in the steps.

    Phases that go on over several, other shapes, something that is marked.
    """
    short, long = Run(), Run(is_short=False)
    for run in (short, long):
        for within, is_other, is_marked in script:
            run.play(within)
            if is_marked:
                run.steps.mark("validation")
            run.end(OTHER_BATCH if is_other else BATCH)
    assert seen(long) == seen(short)


def test_a_step_in_which_something_happens_is_not_plain() -> None:
    """It has a mark, or shapes that were not seen before; the next one is plain again."""
    run = Run()
    assert run.end(BATCH)
    run.steps.mark("checkpoint")
    assert [False, True] == [run.end(BATCH), run.end(BATCH)]
    assert [False, True, True] == [run.end(OTHER_BATCH), run.end(OTHER_BATCH), run.end(BATCH)]
    assert [(), ("checkpoint",), (), ("new_shapes",), (), ()] == [step.marks for step in run.read()]


def test_an_event_in_every_step_is_part_of_a_typical_step() -> None:
    """A checkpoint after each step, as where an epoch is one batch: from the fourth on, without a mark.

    After a step without one, a checkpoint is an event again. New shapes stay a mark.
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
    """It began twice, so its time is no step's."""
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
    """The loggers have counted fewer steps than there were batches: gradients were accumulated."""
    run = Run()
    for _ in range(3):
        assert run.end(BATCH)
    run.logged -= 1
    assert [] == [*run.read()]
    run.end(BATCH)
    assert [run.logged - 1] == [step.index for step in run.read()]


def test_there_are_only_so_many_plain_steps_in_a_row() -> None:
    """What is noted of them takes memory; the last ones are there for who asks."""
    run = Run()
    assert [*[True] * MAX_PENDING_STEPS, False, True] == [
        run.end(BATCH) for _ in range(MAX_PENDING_STEPS + 2)
    ]
    assert MAX_PENDING_STEPS + 2 == run.steps.ordinal - COLD
    assert [*range(4, MAX_PENDING_STEPS + 4)] == [step.index for step in run.read()]


def test_the_cpu_time_of_some_plain_steps_is_read() -> None:
    """Of the first three in each sixteen, so of all in a short row.

    The system's figures before and behind a step make it.
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
    """What it did to the training's thread between two readings.

    2 s on a core, 0.5 s of waiting for one.
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
    """Another system than Linux, or a thread that has ended."""
    assert ThreadSchedule.between(None, b"1 2 3\n") is None
    assert ThreadSchedule.between(b"", b"") is None
    schedule = ThreadSchedule()
    schedule._file = None
    assert schedule.read() is None


def test_what_is_made_out_is_in_no_step() -> None:
    """The end of a step is marked before the notes on those before it are looked at, however long that takes."""
    run = Run()
    for _ in range(3):
        run.play("2")
        run.end(BATCH)
    steps, run.phases.steps = run.phases.steps, lambda: (steps(), run.clock.advance(50))[0]  # type: ignore[method-assign,return-value]
    run.play("3")
    run.steps.mark("checkpoint")
    run.end(BATCH)
    run.phases.steps = steps  # type: ignore[method-assign]
    run.steps.resume()
    run.play("4")
    run.end(BATCH)
    assert [2.0, 2.0, 2.0, 3.0, 4.0] == [step.seconds for step in run.read()]


def compiled() -> Any:
    """A new function, compiled by a backend that only runs it."""
    return torch.compile(lambda x: x + 1, backend="eager", dynamic=False)


def test_a_step_in_which_torch_compile_compiles_is_marked() -> None:
    """The first call compiles, and so does one with another number of dimensions.

    In between it runs what there is.
    """
    torch._dynamo.reset()
    run, function = Run(), compiled()
    for shape in ((2,), (2,), (2, 2), (2, 2)):
        function(torch.zeros(shape))
        run.end(BATCH)
    assert [("recompiled",), (), ("recompiled",), ()] == [step.marks for step in run.read()]
    run.steps.close()


def test_torch_compile_is_heard_again_after_its_reset() -> None:
    """torch.compiler.reset() takes off everybody's callbacks.

    With the next step that is not plain ours is there again.
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
    """Behind a reset nothing is heard, but the graphs are counted.

    The steps until that is seen are none to measure others by.
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
    """Steps may still end, while work in the background is waited for."""
    before = list(torch._dynamo.callback_handler.start_callbacks)
    run = Run()
    run.steps.close()
    run.steps.mark("background")
    run.end(BATCH)
    assert before == torch._dynamo.callback_handler.start_callbacks


def test_nothing_is_left_with_torch_compile() -> None:
    """Each listener takes itself off, once and for all; one that does not is there."""
    callbacks = torch._dynamo.callback_handler.start_callbacks
    before = list(callbacks)
    heard: list[int] = []
    first, second = Compilations(partial(heard.append, 1)), Compilations(partial(heard.append, 2))
    for each in (first, first, second):
        each.listen(unguarded)
    assert len(before) + 2 == len(callbacks)
    first.stop()
    first.stop()
    compiled()(torch.zeros(3))
    assert {2} == set(heard)
    second.stop()
    assert before == callbacks
