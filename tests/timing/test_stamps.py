"""Test how sequences of stamps become times and counts. Expected values are worked out by hand."""

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

ROOT = ModulePhase("", "forward")
Q = ModulePhase("q", "forward")
K = ModulePhase("k", "forward")
ROOT_BACK = ModulePhase("", "backward")
Q_BACK = ModulePhase("q", "backward")
OBSERVER = None


def test_what_lies_between_two_stamps_is_the_time_of_what_the_first_says() -> None:
    """The time between two stamps belongs to the module that the first stamp names.

    The stamps are those in the docstring of `lflops.timing.module_times`: 2 s of the root, 1 s of a
    hook, 6 s of q, 1 s of a hook, and 2 s of the root.
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
    """A call is counted for the module that is entered and for the module that calls it.

    The root calls q twice, and q calls k once. Leaving a module is no call, and neither is entering
    a part that is no module.
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
    """Backward segments and counted operators are counted for their module.

    Two segments of q and one of the root begin. An operator of q is counted in its second segment.
    """
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
    """If the first stamp is the entry of a module, no module has called it."""
    lap = pass_times([(0, OBSERVER, MODULE_ENTERED), (1, Q, ""), (3, OBSERVER, "")], StillClock())
    assert ({Q: 2}, {Q: 1}, {}) == (lap.self_seconds, +lap.called, +lap.calls_others)


def test_no_stamps_are_no_time() -> None:
    """Without stamps, or with only one stamp, no time is known."""
    for stamps in ([], [(5, ROOT, "")]):
        lap = pass_times(stamps, StillClock())
        assert ({}, 0) == (lap.self_seconds, lap.observer)


def test_the_overhead_of_a_place_is_that_of_all_that_it_did() -> None:
    """The overhead of a module is the sum over its calls, segments and counted operators.

    A module without any of them has no overhead.
    """
    lap = PassTimes()
    lap.called[Q] = 2
    lap.calls_others[Q] = 3
    lap.segments[Q] = 4
    lap.operators[Q] = 5
    overhead = HookOverhead(inside=1, outside=10, segment=100, operator=1000)
    assert 2 * 1 + 3 * 10 + 4 * 100 + 5 * 1000 == lap.overhead(Q, overhead)
    assert lap.overhead(K, overhead) == 0


def test_inclusive_is_a_row_and_all_rows_below_it_in_each_phase() -> None:
    """The inclusive time of a module is the sum of the self times of the module and all below it.

    A container that never ran has the time of its modules.
    """
    own = {
        ROOT: 1.0,
        ModulePhase("blocks.0", "forward"): 2.0,
        ModulePhase("blocks.0.q", "forward"): 4.0,
        ModulePhase("blocks.1", "forward"): 8.0,
    }
    forward = {"": 15, "blocks": 14, "blocks.0": 6, "blocks.0.q": 4, "blocks.1": 8}
    backward = {"": 16, "blocks": 16, "blocks.0": 16, "blocks.0.q": 16}
    expected = {}
    for row, seconds in forward.items():
        expected[ModulePhase(row, "forward")] = seconds
    for row, seconds in backward.items():
        expected[ModulePhase(row, "backward")] = seconds
    assert expected == inclusive({**own, ModulePhase("blocks.0.q", "backward"): 16.0})
