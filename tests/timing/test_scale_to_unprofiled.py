"""Test how the times of hooked passes divide the time of unprofiled passes among the modules.

The expected values are worked out by hand.
"""

from collections.abc import Mapping

import pytest

from lflops.profile.records import ModulePhase, TimingStats
from lflops.timing.module_times import NO_OVERHEAD, HookOverhead, PassTimes, scale_to_unprofiled

ROOT = ModulePhase("", "forward")
Q = ModulePhase("q", "forward")
K = ModulePhase("k", "forward")
ROOT_BACK = ModulePhase("", "backward")
Q_BACK = ModulePhase("q", "backward")


def lap(
    seconds: Mapping[ModulePhase, float],
    called: Mapping[ModulePhase, int] | None = None,
    calls_others: Mapping[ModulePhase, int] | None = None,
) -> PassTimes:
    """Return the times of one part of a pass, with the given self seconds and calls."""
    made = PassTimes()
    made.self_seconds.update(seconds)
    made.called.update(called or {})
    made.calls_others.update(calls_others or {})
    return made


def medians(spreads: Mapping[ModulePhase, TimingStats]) -> dict[ModulePhase, float]:
    """Return the medians. With a single pass, these are the times of this pass."""
    return {place: spread.median for place, spread in spreads.items()}


def test_what_adds_up_to_the_clean_pass_is_left_as_it_is() -> None:
    """If the modules add up to the unprofiled pass, their times stay: 4 s and 6 s of 10 s."""
    divided = scale_to_unprofiled([{"forward": lap({ROOT: 4, Q: 6})}], {"forward": 10}, NO_OVERHEAD)
    assert {ROOT: 4, Q: 6} == medians(divided.self_seconds)
    assert {ROOT: 10, Q: 6} == medians(divided.inclusive)
    assert {"forward": 1} == divided.factors


def test_what_no_overhead_explains_scales_all_places_alike() -> None:
    """A difference that no overhead explains scales all modules by the same factor.

    The hooked pass takes 10 s and the unprofiled pass 5 s, so all times are halved.
    """
    divided = scale_to_unprofiled([{"forward": lap({ROOT: 4, Q: 6})}], {"forward": 5}, NO_OVERHEAD)
    assert {ROOT: 2, Q: 3} == medians(divided.self_seconds)
    assert {"forward": 0.5} == divided.factors


def test_a_mean_above_the_usual_pass_is_no_fault_of_the_division() -> None:
    """The times of the modules add up to the mean, but the factor refers to the usual pass.

    One slow unprofiled pass doubles the mean. The hooked pass takes as long as the usual unprofiled
    pass, so the factor is 1.
    """
    divided = scale_to_unprofiled(
        [{"forward": lap({ROOT: 4, Q: 6})}], {"forward": 10}, NO_OVERHEAD, means={"forward": 20}
    )
    assert {ROOT: 8, Q: 12} == medians(divided.self_seconds)
    assert {"forward": 1} == divided.factors


def times_the_overhead(clean: float) -> tuple[dict[ModulePhase, float], float]:
    """Scale a hooked pass of 100 s to an unprofiled pass of `clean` seconds.

    In the hooked pass, the root calls q ten times, so the overhead of the trial is 10 s in each of
    them. Returns the self seconds of the modules, and the factor.
    """
    hooked = lap({ROOT: 40, Q: 60}, called={Q: 10}, calls_others={ROOT: 10})
    divided = scale_to_unprofiled(
        [{"forward": hooked}], {"forward": clean}, HookOverhead(inside=1, outside=1)
    )
    return medians(divided.self_seconds), divided.factors["forward"]


def test_the_overhead_is_as_much_as_explains_the_difference() -> None:
    """The overhead is multiplied so that it explains the whole difference, and nothing is scaled.

    The overhead of 20 s is subtracted once, one and a half times, and three times.
    """
    assert ({ROOT: 30, Q: 50}, 1) == times_the_overhead(80)
    assert ({ROOT: 25, Q: 45}, 1) == times_the_overhead(70)
    assert ({ROOT: 10, Q: 30}, 1) == times_the_overhead(40)


def test_the_overhead_is_never_more_than_three_times_the_trials() -> None:
    """At most three times the overhead is subtracted: 60 of 100 s.

    The remaining 40 s are halved, because the unprofiled pass takes 20 s.
    """
    assert ({ROOT: 5, Q: 15}, 0.5) == times_the_overhead(20)


def test_the_overhead_is_never_less_than_nothing() -> None:
    """If the unprofiled pass takes longer, no overhead is added to modules with many calls."""
    assert ({ROOT: 80, Q: 120}, 2) == times_the_overhead(200)


def test_nobody_owes_more_overhead_than_they_have() -> None:
    """The overhead of a module is at most its time.

    q has 1 s, and its overhead would be 10 s. So it gets 0 s, and the rest is scaled to the
    unprofiled pass.
    """
    hooked = lap({ROOT: 19, Q: 1}, called={Q: 10})
    divided = scale_to_unprofiled([{"forward": hooked}], {"forward": 10}, HookOverhead(inside=1))
    assert {ROOT: 10, Q: 0} == medians(divided.self_seconds)
    assert {"forward": 10 / 19} == divided.factors


def test_each_part_is_fitted_to_its_own_clean_time() -> None:
    """Each part is scaled to its own unprofiled time.

    With hooks, forward took twice as long, and backward the same time. The phase `recompute`
    belongs to the part `backward`.
    """
    recompute = ModulePhase("q", "recompute")
    parts = {
        "forward": lap({ROOT: 2, Q: 6}),
        "backward": lap({ROOT_BACK: 1, Q_BACK: 4, recompute: 3}),
    }
    divided = scale_to_unprofiled([parts], {"forward": 4, "backward": 8}, NO_OVERHEAD)
    assert {ROOT: 1, Q: 3, ROOT_BACK: 1, Q_BACK: 4, recompute: 3} == medians(divided.self_seconds)
    assert {"forward": 0.5, "backward": 1} == divided.factors


def test_a_gradient_that_forward_takes_is_in_the_time_of_forward() -> None:
    """A gradient that is computed in forward belongs to the part `forward`.

    This part has 4 s of the phase `forward` and 6 s of `backward`, which add up to the unprofiled
    10 s. The later backward is another part, whose 10 s are halved.
    """
    parts = {"forward": lap({ROOT: 4, Q_BACK: 6}), "backward": lap({Q_BACK: 10})}
    divided = scale_to_unprofiled([parts], {"forward": 10, "backward": 5}, NO_OVERHEAD)
    assert {ROOT: 4, Q_BACK: 6 + 5} == medians(divided.self_seconds)
    assert {"forward": 1, "backward": 0.5} == divided.factors


def test_without_a_clean_pass_the_trials_overhead_is_taken_off_once() -> None:
    """Without an unprofiled pass, the overhead is subtracted once, and nothing is scaled."""
    divided = scale_to_unprofiled(
        [{"": lap({ROOT: 40, Q: 60}, called={Q: 10})}], {}, HookOverhead(inside=1)
    )
    assert {ROOT: 40, Q: 50} == medians(divided.self_seconds)
    assert {} == divided.factors


def test_the_median_pass_is_the_one_that_fits() -> None:
    """All hooked passes are scaled by the factor of the median pass.

    They take 8, 10 and 12 s, and the unprofiled pass takes 5 s. So all are halved, also their
    quartiles.
    """
    divided = scale_to_unprofiled(
        [{"forward": lap({Q: seconds})} for seconds in (8, 10, 12)], {"forward": 5}, NO_OVERHEAD
    )
    assert {"forward": 0.5} == divided.factors
    assert {Q: TimingStats(median=5, low=4.5, high=5.5, n=3)} == divided.self_seconds


def test_a_layer_that_runs_in_some_passes_has_its_share() -> None:
    """A layer that runs in one of three passes gets a third of its time.

    Its 2 s in a third of the passes and the 3 s of the root add up to 11 / 3 s, which are scaled to
    an unprofiled pass of 3 s.
    """
    laps = [
        {"forward": lap({ROOT: 1, K: 2})},
        {"forward": lap({ROOT: 3})},
        {"forward": lap({ROOT: 3})},
    ]
    divided = scale_to_unprofiled(laps, {"forward": 3}, NO_OVERHEAD)
    layer = divided.self_seconds[K]
    root = divided.self_seconds[ROOT]
    assert (pytest.approx(6 / 11), 1) == (layer.median, layer.n)
    assert (pytest.approx(27 / 11), 3) == (root.median, root.n)
    assert pytest.approx(3) == divided.inclusive[ROOT].median


def test_what_is_ignored_is_fitted_and_then_left_out() -> None:
    """An ignored module is scaled like the others, but its time is in no result except `ignored`.

    `ignored` has its time in all phases: 3 s forward and 2 s backward.
    """
    parts = {"forward": lap({ROOT: 4, Q: 6}), "backward": lap({ROOT_BACK: 1, Q_BACK: 2})}
    divided = scale_to_unprofiled(
        [parts], {"forward": 5, "backward": 3}, NO_OVERHEAD, ignored={"q"}
    )
    assert {ROOT: 2, ROOT_BACK: 1} == medians(divided.self_seconds) == medians(divided.inclusive)
    assert {"q": 3 + 2} == divided.ignored


def test_passes_in_which_nothing_was_stamped_fit_nothing() -> None:
    """If the hooked passes have no time, there is no factor: 0 s cannot be scaled to 5 s."""
    divided = scale_to_unprofiled([{"forward": lap({ROOT: 0})}], {"forward": 5}, NO_OVERHEAD)
    assert ({ROOT: 0}, {}) == (medians(divided.self_seconds), divided.factors)


def test_a_module_takes_no_less_than_its_kernels() -> None:
    """A module never gets less time than its kernels, because hooks slow down only the host.

    The hooked pass takes 12 s, of which 1 + 6 s are kernels and 3 + 2 s are not. For an unprofiled
    pass of 9 s, 2 s remain outside kernels, so these times are multiplied by 0.4. For an unprofiled
    pass of 8 s, 1 s remains, and they are multiplied by 0.2. If the whole times were scaled, q
    would have 5.3 s, which is less than its kernels take.
    """
    hooked = [{"forward": lap({ROOT: 4, Q: 8})}]
    kernels = {ROOT: 1.0, Q: 6.0}
    divided = scale_to_unprofiled(hooked, {"forward": 9}, NO_OVERHEAD, kernels=kernels)
    assert pytest.approx({ROOT: 1 + 0.4 * 3, Q: 6 + 0.4 * 2}) == medians(divided.self_seconds)
    assert {"forward": 9 / 12} == divided.factors
    divided = scale_to_unprofiled(hooked, {"forward": 8}, NO_OVERHEAD, kernels=kernels)
    assert pytest.approx({ROOT: 1.6, Q: 6.4}) == medians(divided.self_seconds)


def test_what_hooks_cost_is_not_taken_from_kernels() -> None:
    """The overhead of hooks is not subtracted from the time of kernels.

    q keeps the 55 s of its kernels, although the overhead of ten calls would leave only 50 s. Of
    the unprofiled 80 s, 25 s remain for the root.
    """
    hooked = [{"forward": lap({ROOT: 40, Q: 60}, called={Q: 10}, calls_others={ROOT: 10})}]
    divided = scale_to_unprofiled(
        hooked, {"forward": 80}, HookOverhead(inside=1, outside=1), kernels={Q: 55.0}
    )
    assert pytest.approx({ROOT: 25, Q: 55}) == medians(divided.self_seconds)


def test_a_pass_that_is_all_kernels_is_divided_as_they_are() -> None:
    """If kernels take the whole pass or longer, the pass is divided in proportion to them.

    The trace has kernels of 3 s and 5 s. In an unprofiled pass of 8 s, no time remains outside
    kernels. In an unprofiled pass of 6 s, the times of the kernels are scaled by 6 / 8.
    """
    hooked = [{"forward": lap({ROOT: 9, Q: 6})}]
    kernels = {ROOT: 3.0, Q: 5.0}
    divided = scale_to_unprofiled(hooked, {"forward": 8}, NO_OVERHEAD, kernels=kernels)
    assert {ROOT: 3, Q: 5} == medians(divided.self_seconds)
    divided = scale_to_unprofiled(hooked, {"forward": 6}, NO_OVERHEAD, kernels=kernels)
    assert {ROOT: 2.25, Q: 3.75} == medians(divided.self_seconds)


def test_kernels_that_overlap_with_others_are_no_more_than_the_stream_was_busy() -> None:
    """The time of a module's kernels counts only up to the module's time.

    The root has 20 s of kernels in 4 s, because a side stream runs them at the same time. These 4 s
    stay, and q gets the remaining 3 s of the unprofiled pass.
    """
    divided = scale_to_unprofiled(
        [{"forward": lap({ROOT: 4, Q: 6})}], {"forward": 7}, NO_OVERHEAD, kernels={ROOT: 20.0}
    )
    assert {ROOT: 4, Q: 3} == medians(divided.self_seconds)
