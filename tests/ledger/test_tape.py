"""Test `DeferredCalls`: calls that the training thread records and another thread makes later.

The calls must run in the order in which they were recorded, and see the clock of that moment. The
tests also cover a call that raises an exception.
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
    """A clock that returns `now`, which the test sets."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_calls_wait_while_it_runs_and_have_their_moments() -> None:
    """Recorded calls run later, and see the moment at which they were recorded.

    Three calls are recorded at the moments 5, 7 and 7. Calls before `start` and after `stop` run
    immediately and see the current moment.
    """
    clock = Clock()
    tape = DeferredCalls(PhaseLog(clock))
    heard = list[tuple[str, int]]()

    def hear(name: str) -> None:
        heard.append((name, tape.now()))

    clock.now = 1
    tape.note(hear, "at once")
    tape.start()
    for clock.now, name in ((5, "first"), (7, "second"), (7, "third")):
        tape.note(hear, name)
    clock.now = 9
    assert [("at once", 1)] == heard
    tape.run_calls()
    assert [("first", 5), ("second", 7), ("third", 7)] == heard[1:]
    tape.note(hear, "fourth")
    clock.now = 11
    tape.stop()
    tape.note(hear, "at once again")
    assert [("fourth", 9), ("at once again", 11)] == heard[4:]


def test_the_account_of_what_was_noted_is_that_of_what_was_marked() -> None:
    """The time account is the same, whether events are deferred or logged immediately.

    The expected times follow from the moments: start-up until 10, data from 10 to 30, forward from
    30 to 70, and no phase from 70 until the account is read at 100.
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
        tape.run_calls()
        phases.log.deliver()
        book.read(CategoryMarks().of(queue.pop()), clock())
        assert {"training/data": 20, "training/forward": 40, "training/other": 30} == book.open
        assert {"start_up": 10} == book.spent


def test_another_thread_plays_in_the_same_order_while_notes_come() -> None:
    """Another thread makes 10,000 calls in their order while this thread still records them."""
    tape = DeferredCalls(PhaseLog())
    heard = list[int]()
    is_over = threading.Event()
    tape.start()

    def play() -> None:
        while not is_over.is_set():
            tape.run_calls()

    thread = threading.Thread(target=play)
    thread.start()
    for number in range(10_000):
        tape.note(heard.append, number)
    is_over.set()
    thread.join()
    tape.stop()
    assert [*range(10_000)] == heard


def test_an_error_ends_it_and_goes_to_no_boundary() -> None:
    """An error in a recorded call stops the recording and is kept for the training thread.

    The error guard must not handle the error while `run_calls` runs, because its handler removes hooks,
    and that must happen only in the training thread. The training thread gets the error from
    `raise_error`. The following call in the queue is dropped.
    """
    tape = DeferredCalls(PhaseLog())
    taken_off = list[Any]()
    heard = list[int]()
    boundary = ErrorGuard(taken_off.append)
    boundary.passes = tape.runs_here

    def fail() -> None:
        with boundary:
            raise RuntimeError("planted")

    tape.start()
    tape.note(fail)
    tape.note(heard.append, 1)
    tape.run_calls()
    assert (False, [], []) == (tape.runs, taken_off, heard)
    with pytest.raises(RuntimeError, match="planted"):
        tape.raise_error()
    # The error is raised only once.
    tape.raise_error()
    # Outside `run_calls`, the error guard handles the same error.
    fail()
    assert ["planted"] == [str(each) for each in taken_off]


def test_notes_that_no_one_plays_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many values wait, all waiting notes are dropped, for example if a file system hangs.

    A call with one argument is stored as four values, so with a limit of nine values the fourth
    note drops the first three. After a call has run, its arguments can be freed.
    """
    monkeypatch.setattr("lflops.ledger.deferred.LONGEST", 9)
    tape = DeferredCalls(PhaseLog())
    heard = list[int]()
    tape.start()
    for number in range(5):
        tape.note(heard.append, number)
    tape.run_calls()
    assert [3, 4] == heard
    kept = Clock()
    tape.note(isinstance, kept, Clock)
    tape.run_calls()
    alive = ref(kept)
    del kept
    gc.collect()
    assert alive() is None


def test_so_many_are_played_at_once() -> None:
    """`run_calls(2)` makes at most two calls, so five notes need three calls of `run_calls`."""
    tape = DeferredCalls(PhaseLog())
    heard = list[int]()
    tape.start()
    for number in range(5):
        tape.note(heard.append, number)
    left = []
    for _ in range(3):
        tape.run_calls(2)
        left.append((tape.next is not None, len(heard)))
    assert [(True, 2), (True, 4), (False, 5)] == left


def test_what_is_played_in_parts_is_charged_until_the_next_note_alone() -> None:
    """The account is exact if the ledger's thread makes the recorded calls in several parts.

    Each of 100 steps has 4 ms of forward and 6 ms outside all phases; the first two are the
    warm-up. In step 81, the garbage collector takes 60 ms more. After a part of the calls, time may
    be assigned only up to the next waiting note.
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
    del spent["start_up"]
    assert steps == {name: each / MS for name, each in spent.items()}
    assert [("gc", 80, 0.06)] == [(each.cause, each.step, each.cost) for each in slow]
