"""Test how a counted profile gets the times of its modules if the rank had to wait.

It waits for other ranks, or for a core that another process uses. The expected values are worked
out by hand.
"""

from collections import defaultdict

import pytest

from lflops.profile.profile import Profile
from lflops.profile.records import ModulePhase
from lflops.profile.steps import Step
from lflops.timing.module_times import NO_OVERHEAD, PassTimes, attach_module_times
from tests.support.profile_builders import product, profile, run

ROOT = ModulePhase("", "backward")
Q = ModulePhase("q", "backward")


def backward_seconds(profile: Profile) -> dict[str, float]:
    """Return the self seconds of each module in backward, without modules whose time is unknown."""
    seconds = {}
    for name, module in profile.modules.items():
        stats = module.backward.self_seconds
        if stats is not None:
            seconds[name] = stats.median
    return seconds


@pytest.mark.parametrize("is_known", [True, False])
def test_how_late_other_ranks_are_says_nothing_about_the_modules(is_known: bool) -> None:
    """The wait for other ranks does not change the times of modules, if it is known.

    Without the wait, backward takes 1 s in both steps, of which q has 0.8 s. The unprofiled step
    waits for 2 s, and the module-timing step for 1 s, both in the root.

    If the waits are unknown, the 2 s of the module-timing step are scaled to the 3 s of the
    unprofiled step, and a note reports the factor.
    """
    unprofiled_wait = None
    hooked_wait = None
    expected = {"": 1.8, "q": 1.2}
    factors = [{"backward": 1.5}]
    if is_known:
        unprofiled_wait = 2.0
        hooked_wait = 1.0
        expected = {"": 2.2, "q": 0.8}
        factors = []
    steps = (
        Step(
            index=0,
            kind="unprofiled",
            seconds=3.0,
            phases={"backward": 3.0},
            waiting=unprofiled_wait,
        ),
        Step(
            index=1,
            kind="module_timing",
            seconds=2.0,
            phases={"backward": 2.0},
            waiting=hooked_wait,
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
    assert pytest.approx(expected) == backward_seconds(timed)
    assert factors == [note.values for note in timed.notes]
    assert ({ROOT: 1.2, Q: 0.8},) == stamped


@pytest.mark.parametrize(
    ("is_known", "own", "factors"),
    [
        (True, {"": 0.4, "q": 1.6}, []),
        (False, {"": 0.4, "q": 1.6}, [{"backward": 2.0}]),
    ],
)
def test_modules_that_are_timed_without_others_are_compared_with_a_step_without_others(
    is_known: bool, own: dict[str, float], factors: list[dict[str, float]]
) -> None:
    """If waits for a core are known, the times of modules are compared with a step without them.

    In the module-timing step, the rank waited for a core for 1 of 2 s. The modules took 0.2 and
    0.8 s in the other second. It is assumed that the unprofiled step also waited for 1 of 2 s. The
    remaining second equals the time of the modules, so there is no note. Without this knowledge,
    there is a note with the factor 2. In both cases, the times are scaled to the 2 s of the
    unprofiled step.
    """
    uncontended = {}
    if is_known:
        uncontended = {"backward": 1.0}
    steps = (
        Step(index=0, kind="unprofiled", seconds=2.0, phases={"backward": 2.0}),
        Step(
            index=1,
            kind="module_timing",
            seconds=2.0,
            phases={"backward": 2.0},
            uncontended_phases=uncontended,
        ),
    )
    counted = profile(
        {"": {}, "q": {}},
        [product("q", "aten::mm", "backward", macs=1, bytes_moved=1)],
        run=run(kind="training"),
        steps=steps,
    )
    hooked = {"backward": PassTimes(self_seconds=defaultdict(float, {ROOT: 0.2, Q: 0.8}))}
    timed, _ = attach_module_times(counted, [hooked], NO_OVERHEAD)
    assert pytest.approx(own) == backward_seconds(timed)
    assert factors == [note.values for note in timed.notes]


def test_the_sleep_of_a_module_does_not_grow_with_the_load() -> None:
    """On a busy machine, only the time in which a module needs a core is scaled.

    The step as above: modules take 0.2 and 0.8 s of a step of 2 s. The second module sleeps for
    0.6 s. The other 0.4 s are scaled to the other 1.4 s of the step, so by 3.5.
    """
    steps = (
        Step(index=0, kind="unprofiled", seconds=2.0, phases={"backward": 2.0}),
        Step(
            index=1,
            kind="module_timing",
            seconds=2.0,
            phases={"backward": 2.0},
            uncontended_phases={"backward": 1.0},
        ),
    )
    counted = profile(
        {"": {}, "q": {}},
        [product("q", "aten::mm", "backward", macs=1, bytes_moved=1)],
        run=run(kind="training"),
        steps=steps,
    )
    times = PassTimes(
        self_seconds=defaultdict(float, {ROOT: 0.2, Q: 0.8}), asleep=defaultdict(float, {Q: 0.6})
    )
    timed, _ = attach_module_times(counted, [{"backward": times}], NO_OVERHEAD)
    assert pytest.approx({"": 3.5 * 0.2, "q": 0.6 + 3.5 * 0.2}) == backward_seconds(timed)
