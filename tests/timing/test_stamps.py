"""Rows of stamps, worked out by hand."""

from lflops.profile.records import ModulePhase
from lflops.timing.module_times import (
    MODULE_ENTERED,
    OPERATOR_COUNTED,
    SEGMENT_BEGAN,
    HookOverhead,
    PassTimes,
    inclusive,
    pass_times,
)
from tests.support.fake_clock import StillClock

ROOT, Q, K = (ModulePhase(row, "forward") for row in ("", "q", "k"))
ROOT_BACK, Q_BACK = ModulePhase("", "backward"), ModulePhase("q", "backward")
OBSERVER = None


def test_what_lies_between_two_stamps_is_the_time_of_what_the_first_says() -> None:
    """The row in the module's own text.

    2 s of the root, 1 s of a hook, 6 s of q, 1 s of a hook, 2 s of the root.
    """
    stamps = [
        (0, ROOT, ""),
        (2, OBSERVER, MODULE_ENTERED),
        (3, Q, ""),
        (9, OBSERVER, ""),
        (10, ROOT, ""),
        (12, OBSERVER, ""),
    ]
    lap = pass_times(stamps, StillClock())
    assert {ROOT: 4, Q: 6} == lap.self_seconds
    assert lap.observer == 1 + 1


def test_calls_are_those_of_who_is_entered_and_of_who_enters() -> None:
    """The root enters q twice, and q enters k once.

    To be left, and to enter a part that is no module, is no call.
    """
    entered = [
        (0, ROOT, ""),
        (1, OBSERVER, MODULE_ENTERED),
        (1, Q, ""),
        (2, OBSERVER, MODULE_ENTERED),
        (2, K, ""),
        (3, OBSERVER, ""),
        (3, Q, ""),
    ]
    again = [
        (4, OBSERVER, ""),
        (4, ROOT, ""),
        (5, OBSERVER, MODULE_ENTERED),
        (5, Q, ""),
        (6, OBSERVER, ""),
        (6, ROOT, ""),
    ]
    scope = [(7, OBSERVER, ""), (7, ModulePhase("part", "forward"), ""), (8, OBSERVER, "")]
    lap = pass_times([*entered, *again, *scope], StillClock())
    assert {Q: 2, K: 1} == +lap.called
    assert {ROOT: 2, Q: 1} == +lap.calls_others


def test_segments_and_operators_are_counted_where_they_are() -> None:
    """Two segments of q and one of the root begin; an operator of q's is counted within the second."""
    backward = [
        (0, ROOT_BACK, ""),
        (1, Q_BACK, SEGMENT_BEGAN),
        (3, ROOT_BACK, SEGMENT_BEGAN),
        (6, Q_BACK, SEGMENT_BEGAN),
    ]
    lap = pass_times(
        [*backward, (10, OBSERVER, OPERATOR_COUNTED), (15, Q_BACK, ""), (16, OBSERVER, "")],
        StillClock(),
    )
    assert {ROOT_BACK: 1 + 3, Q_BACK: 2 + 4 + 1} == lap.self_seconds
    assert {ROOT_BACK: 1, Q_BACK: 2} == +lap.segments
    assert {Q_BACK: 1} == +lap.operators
    assert lap.observer == 5


def test_the_observer_is_nobodys_callee_where_nothing_ran_before_it() -> None:
    """A hook that is the first to be stamped was not called by any place."""
    lap = pass_times([(0, OBSERVER, MODULE_ENTERED), (1, Q, ""), (3, OBSERVER, "")], StillClock())
    assert ({Q: 2}, {Q: 1}, {}) == (lap.self_seconds, +lap.called, +lap.calls_others)


def test_no_stamps_are_no_time() -> None:
    """Nor is one alone."""
    for stamps in ([], [(5, ROOT, "")]):
        lap = pass_times(stamps, StillClock())
        assert ({}, 0) == (lap.self_seconds, lap.observer)


def test_the_overhead_of_a_place_is_that_of_all_that_it_did() -> None:
    """Two calls of it, three by it, four segments, five operators.

    None in a place that did nothing of it.
    """
    lap = PassTimes()
    lap.called[Q], lap.calls_others[Q], lap.segments[Q], lap.operators[Q] = 2, 3, 4, 5
    overhead = HookOverhead(inside=1, outside=10, segment=100, operator=1000)
    assert 2 * 1 + 3 * 10 + 4 * 100 + 5 * 1000 == lap.overhead(Q, overhead)
    assert lap.overhead(K, overhead) == 0


def test_inclusive_is_a_row_and_all_rows_below_it_in_each_phase() -> None:
    """A container that never ran itself has the time of what is in it."""
    own = {
        ROOT: 1.0,
        ModulePhase("blocks.0", "forward"): 2.0,
        ModulePhase("blocks.0.q", "forward"): 4.0,
        ModulePhase("blocks.1", "forward"): 8.0,
    }
    forward = {"": 15, "blocks": 14, "blocks.0": 6, "blocks.0.q": 4, "blocks.1": 8}
    backward = {"": 16, "blocks": 16, "blocks.0": 16, "blocks.0.q": 16}
    assert {ModulePhase(row, "forward"): seconds for row, seconds in forward.items()} | {
        ModulePhase(row, "backward"): seconds for row, seconds in backward.items()
    } == inclusive({**own, ModulePhase("blocks.0.q", "backward"): 16.0})
