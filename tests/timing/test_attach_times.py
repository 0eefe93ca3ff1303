"""A counted profile gets the times of its modules, where ranks wait for each other.

Worked out by hand.
"""

from collections import defaultdict

import pytest

from lflops.profile.records import ModulePhase
from lflops.profile.steps import Step
from lflops.timing.module_times import NO_OVERHEAD, PassTimes, attach_module_times
from tests.support.profile_builders import product, profile, run

ROOT, Q = ModulePhase("", "backward"), ModulePhase("q", "backward")


@pytest.mark.parametrize("is_known", [True, False])
def test_how_late_other_ranks_are_says_nothing_about_the_modules(is_known: bool) -> None:
    """Backward without the wait takes 1 s in all steps, of which q has 0.8.

    A clean step waits for 2 s, a hooked one for 1 s.

    Where that is unknown, 2 s of a hooked step are stretched to the clean one's 3 s.
    """
    steps = (
        Step(
            index=0,
            kind="unprofiled",
            seconds=3.0,
            phases={"backward": 3.0},
            waiting=2.0 if is_known else None,
        ),
        Step(
            index=1,
            kind="module_timing",
            seconds=2.0,
            phases={"backward": 2.0},
            waiting=1.0 if is_known else None,
        ),
    )
    counted = profile(
        {"": {}, "q": {}},
        [product("q", "aten::mm", "backward", macs=1, bytes_moved=1)],
        run=run(kind="training"),
        steps=steps,
    )
    hooked = {"backward": PassTimes(self_seconds=defaultdict(float, {ROOT: 1.2, Q: 0.8}))}
    timed, stamped = attach_module_times(counted, [hooked], NO_OVERHEAD)
    took = {
        row: spread.median
        for row, module in timed.modules.items()
        if (spread := module.backward.self_seconds) is not None
    }
    assert pytest.approx({"": 2.2, "q": 0.8} if is_known else {"": 1.8, "q": 1.2}) == took
    assert ([] if is_known else [{"backward": 1.5}]) == [note.values for note in timed.notes]
    assert ({ROOT: 1.2, Q: 0.8},) == stamped


@pytest.mark.parametrize(
    ("is_known", "own", "factors"),
    [
        (True, {"": 0.4, "q": 1.6}, []),  # 0.2 and 0.8 of 1.0 s, and clean steps take 2
        (False, {"": 0.4, "q": 1.6}, [{"backward": 2.0}]),
    ],
)
def test_modules_that_are_timed_without_others_are_compared_with_a_step_without_others(
    is_known: bool, own: dict[str, float], factors: list[dict[str, float]]
) -> None:
    """Others had half of the hooked step's 2 s, and so of the clean one's.

    What is left is as long as the modules are together.
    """
    steps = (
        Step(index=0, kind="unprofiled", seconds=2.0, phases={"backward": 2.0}),
        Step(
            index=1,
            kind="module_timing",
            seconds=2.0,
            phases={"backward": 2.0},
            uncontended_phases={"backward": 1.0} if is_known else {},
        ),
    )
    counted = profile(
        {"": {}, "q": {}},
        [product("q", "aten::mm", "backward", macs=1, bytes_moved=1)],
        run=run(kind="training"),
        steps=steps,
    )
    timed, _ = attach_module_times(
        counted,
        [{"backward": PassTimes(self_seconds=defaultdict(float, {ROOT: 0.2, Q: 0.8}))}],
        NO_OVERHEAD,
    )
    took = {
        row: spread.median
        for row, module in timed.modules.items()
        if (spread := module.backward.self_seconds) is not None
    }
    assert pytest.approx(own) == took
    assert factors == [note.values for note in timed.notes]
