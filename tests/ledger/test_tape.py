"""Calls that a training notes.

Made in their order, each at its moment, and what becomes of an error in one.
"""

import gc
import threading
from collections import deque
from resource import RUSAGE_SELF, getrusage
from typing import Any
from weakref import ref

import pytest

from lflops.error_guard import ErrorGuard
from lflops.ledger.accountant import StepAccountant
from lflops.ledger.deferred import DeferredCalls
from lflops.ledger.marks import CategoryMarks, EventQueue
from lflops.ledger.writer import LedgerWriter
from lflops.phase_log import PhaseLog
from tests.support.phase_events import Events

MS = 1_000_000


class Clock:
    """It shows what it is set to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_calls_wait_while_it_runs_and_have_their_moments() -> None:
    """By hand: three notes at 5, 7 and 7.

    What is called at once, before and after, sees the clock itself.
    """
    clock = Clock()
    tape, heard = DeferredCalls(PhaseLog(clock)), list[tuple[str, int]]()

    def hear(name: str) -> None:
        heard.append((name, tape.now()))

    clock.now = 1
    tape.note(hear, "at once")
    tape.start()
    for clock.now, name in ((5, "first"), (7, "second"), (7, "third")):
        tape.note(hear, name)
    clock.now = 9
    assert [("at once", 1)] == heard
    tape.play()
    assert [("first", 5), ("second", 7), ("third", 7)] == heard[1:]
    tape.note(hear, "fourth")
    clock.now = 11
    tape.stop()
    tape.note(hear, "at once again")
    assert [("fourth", 9), ("at once again", 11)] == heard[4:]


def test_the_account_of_what_was_noted_is_that_of_what_was_marked() -> None:
    """By hand: data from 10 to 30, forward from 30 to 70, and 30 of neither until the row at 100.

    10 before of the start-up.
    """
    for runs in (False, True):
        clock = Clock()
        phases = Events(clock)
        tape = DeferredCalls(phases.log)
        if runs:
            tape.start()
        queue = EventQueue()
        phases.log.connect(queue)
        book = StepAccountant(0, deque())
        for clock.now, call, given in (
            (10, phases.enter, ("data",)),
            (30, phases.leave, ()),
            (30, phases.enter, ("forward",)),
            (70, phases.leave, ()),
        ):
            tape.note(call, *given)
        clock.now = 100
        tape.play()
        phases.log.deliver()
        book.read(CategoryMarks().of(queue.pop()), clock())
        assert {"training/data": 20, "training/forward": 40, "training/other": 30} == book.open
        assert {"start_up": 10} == book.spent


def test_another_thread_plays_in_the_same_order_while_notes_come() -> None:
    """Ten thousand notes, which a thread plays meanwhile."""
    tape, heard, is_over = DeferredCalls(PhaseLog()), list[int](), threading.Event()
    tape.start()

    def play() -> None:
        while not is_over.is_set():
            tape.play()

    thread = threading.Thread(target=play)
    thread.start()
    for number in range(10_000):
        tape.note(heard.append, number)
    is_over.set()
    thread.join()
    tape.stop()
    assert [*range(10_000)] == heard


def test_an_error_ends_it_and_goes_to_no_boundary() -> None:
    """Whoever plays is not the training: nothing may be taken off there.

    The training asks for the error.
    """
    tape, taken_off, heard = DeferredCalls(PhaseLog()), list[Any](), list[int]()
    boundary = ErrorGuard(taken_off.append)
    boundary.passes = tape.plays_here

    def fail() -> None:
        with boundary:
            raise RuntimeError("planted")

    tape.start()
    tape.note(fail)
    tape.note(heard.append, 1)
    tape.play()
    assert (False, [], []) == (tape.runs, taken_off, heard)
    with pytest.raises(RuntimeError, match="planted"):
        tape.raise_error()
    tape.raise_error()  # no more
    fail()  # the same in the training is the boundary's
    assert ["planted"] == [str(each) for each in taken_off]


def test_notes_that_no_one_plays_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many are dropped, as where a file system hangs; and what was played is kept by nothing."""
    monkeypatch.setattr(
        "lflops.ledger.deferred.LONGEST", 9
    )  # a note of one value takes four places
    tape, heard = DeferredCalls(PhaseLog()), list[int]()
    tape.start()
    for number in range(5):
        tape.note(heard.append, number)
    tape.play()
    assert [3, 4] == heard
    kept = Clock()
    tape.note(isinstance, kept, Clock)
    tape.play()
    alive = ref(kept)
    del kept
    gc.collect()
    assert alive() is None


def test_so_many_are_played_at_once() -> None:
    """By hand: of five notes two, two and one."""
    tape, heard = DeferredCalls(PhaseLog()), list[int]()
    tape.start()
    for number in range(5):
        tape.note(heard.append, number)
    left = []
    for _ in range(3):
        tape.play(2)
        left.append((tape.next is not None, len(heard)))
    assert [(True, 2), (True, 4), (False, 5)] == left


def test_what_is_played_in_parts_is_charged_until_the_next_note_alone() -> None:
    """By hand: 100 steps of 4 ms of forward and 6 of no phase, two of them the warm-up.

    The collector has 60 ms more in the 81st.
    """
    clock = Clock()
    phases = Events(clock)
    tape = DeferredCalls(phases.log)
    watched = LedgerWriter(phases.log, tape)
    phases.log.connect(watched._queue)
    book = watched._accountant
    tape.start()
    usage = getrusage(RUSAGE_SELF)
    for step in range(1, 101):
        tape.note(phases.enter, "forward")
        if step == 81:
            watched._collections.moments.extend((clock.now + MS, clock.now + 61 * MS))
            clock.now += 60 * MS
        clock.now += 4 * MS
        tape.note(phases.leave)
        clock.now += 6 * MS
        tape.note(lambda step: watched.end_step(step, None, counters=(0, None, usage)), step)
    watched._read()
    steps = {"warm_up": 20, "training/forward": 392, "training/other": 588, "slow/gc": 60}
    spent, slow = book.take()
    assert steps == {name: each / MS for name, each in spent.items() if name != "start_up"}
    assert [("gc", 80, 0.06)] == [(each.cause, each.step, each.cost) for each in slow]
