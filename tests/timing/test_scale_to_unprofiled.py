"""How hooked passes divide the time of clean ones, worked out by hand."""

from collections.abc import Mapping

import pytest

from lflops.profile.records import ModulePhase, TimingStats
from lflops.timing.module_times import NO_OVERHEAD, HookOverhead, PassTimes, scale_to_unprofiled

ROOT, Q, K = (ModulePhase(row, "forward") for row in ("", "q", "k"))
ROOT_BACK, Q_BACK = ModulePhase("", "backward"), ModulePhase("q", "backward")


def lap(
    seconds: Mapping[ModulePhase, float],
    called: Mapping[ModulePhase, int] | None = None,
    calls_others: Mapping[ModulePhase, int] | None = None,
) -> PassTimes:
    """A lap of these seconds and calls."""
    made = PassTimes()
    made.self_seconds.update(seconds)
    made.called.update(called or {})
    made.calls_others.update(calls_others or {})
    return made


def medians(spreads: Mapping[ModulePhase, TimingStats]) -> dict[ModulePhase, float]:
    """What a single lap says."""
    return {place: spread.median for place, spread in spreads.items()}


def test_what_adds_up_to_the_clean_pass_is_left_as_it_is() -> None:
    """4 s and 6 s of a clean pass of 10 s."""
    divided = scale_to_unprofiled([{"forward": lap({ROOT: 4, Q: 6})}], {"forward": 10}, NO_OVERHEAD)
    assert {ROOT: 4, Q: 6} == medians(divided.self_seconds)
    assert {ROOT: 10, Q: 6} == medians(divided.inclusive)
    assert {"forward": 1} == divided.factors


def test_what_no_overhead_explains_scales_all_places_alike() -> None:
    """A hooked pass of 10 s for a clean one of 5 s."""
    divided = scale_to_unprofiled([{"forward": lap({ROOT: 4, Q: 6})}], {"forward": 5}, NO_OVERHEAD)
    assert {ROOT: 2, Q: 3} == medians(divided.self_seconds)
    assert {"forward": 0.5} == divided.factors


def test_a_mean_above_the_usual_pass_is_no_fault_of_the_division() -> None:
    """One clean pass that was held up doubles the mean.

    Modules add up to that, and the hooked pass is like the usual one.
    """
    divided = scale_to_unprofiled(
        [{"forward": lap({ROOT: 4, Q: 6})}], {"forward": 10}, NO_OVERHEAD, means={"forward": 20}
    )
    assert {ROOT: 8, Q: 12} == medians(divided.self_seconds)
    assert {"forward": 1} == divided.factors


def times_the_overhead(clean: float) -> tuple[dict[ModulePhase, float], float]:
    """100 s in 10 calls of q by the root, of which the trial's overhead is 10 + 10 s, beside a clean pass; the seconds, and the factor."""
    hooked = lap({ROOT: 40, Q: 60}, called={Q: 10}, calls_others={ROOT: 10})
    divided = scale_to_unprofiled(
        [{"forward": hooked}], {"forward": clean}, HookOverhead(inside=1, outside=1)
    )
    return medians(divided.self_seconds), divided.factors["forward"]


def test_the_overhead_is_as_much_as_explains_the_difference() -> None:
    """Once, one and a half times, and three times the trial's: nothing is left to be scaled."""
    assert ({ROOT: 30, Q: 50}, 1) == times_the_overhead(80)
    assert ({ROOT: 25, Q: 45}, 1) == times_the_overhead(70)
    assert ({ROOT: 10, Q: 30}, 1) == times_the_overhead(40)


def test_the_overhead_is_never_more_than_three_times_the_trials() -> None:
    """Of 100 s 60 s are taken off, and the 40 s that are left are halved to 20 s."""
    assert ({ROOT: 5, Q: 15}, 0.5) == times_the_overhead(20)


def test_the_overhead_is_never_less_than_nothing() -> None:
    """A clean pass that was slower is no reason to add to who was called often."""
    assert ({ROOT: 80, Q: 120}, 2) == times_the_overhead(200)


def test_nobody_owes_more_overhead_than_they_have() -> None:
    """Q has 1 s and is owed 10: it has none then, and the rest is scaled to the clean pass."""
    hooked = lap({ROOT: 19, Q: 1}, called={Q: 10})
    divided = scale_to_unprofiled([{"forward": hooked}], {"forward": 10}, HookOverhead(inside=1))
    assert {ROOT: 10, Q: 0} == medians(divided.self_seconds)
    assert {"forward": 10 / 19} == divided.factors


def test_each_part_is_fitted_to_its_own_clean_time() -> None:
    """Forward took twice as long, backward no longer; what is computed again is a part of backward."""
    recompute = ModulePhase("q", "recompute")
    parts = {
        "forward": lap({ROOT: 2, Q: 6}),
        "backward": lap({ROOT_BACK: 1, Q_BACK: 4, recompute: 3}),
    }
    divided = scale_to_unprofiled([parts], {"forward": 4, "backward": 8}, NO_OVERHEAD)
    assert {ROOT: 1, Q: 3, ROOT_BACK: 1, Q_BACK: 4, recompute: 3} == medians(divided.self_seconds)
    assert {"forward": 0.5, "backward": 1} == divided.factors


def test_a_gradient_that_forward_takes_is_in_the_time_of_forward() -> None:
    """Forward's 10 s are 4 s of its own and 6 s backward.

    Both fit the clean 10 s, and what goes backward later is another part.
    """
    parts = {"forward": lap({ROOT: 4, Q_BACK: 6}), "backward": lap({Q_BACK: 10})}
    divided = scale_to_unprofiled([parts], {"forward": 10, "backward": 5}, NO_OVERHEAD)
    assert {ROOT: 4, Q_BACK: 6 + 5} == medians(divided.self_seconds)
    assert {"forward": 1, "backward": 0.5} == divided.factors


def test_without_a_clean_pass_the_trials_overhead_is_taken_off_once() -> None:
    """And nothing is scaled."""
    divided = scale_to_unprofiled(
        [{"": lap({ROOT: 40, Q: 60}, called={Q: 10})}], {}, HookOverhead(inside=1)
    )
    assert {ROOT: 40, Q: 50} == medians(divided.self_seconds)
    assert {} == divided.factors


def test_the_median_pass_is_the_one_that_fits() -> None:
    """Passes of 8, 10 and 12 s for a clean one of 5 s.

    All are halved, and the spread is that of the halves.
    """
    divided = scale_to_unprofiled(
        [{"forward": lap({Q: seconds})} for seconds in (8, 10, 12)], {"forward": 5}, NO_OVERHEAD
    )
    assert {"forward": 0.5} == divided.factors
    assert {Q: TimingStats(median=5, low=4.5, high=5.5, n=3)} == divided.self_seconds


def test_a_layer_that_runs_in_some_passes_has_its_share() -> None:
    """It is dropped in two of three.

    2 s in a third of the passes, and 3 s of the root, are 11 / 3 s, scaled to a clean pass of 3 s.
    """
    laps = [
        {"forward": lap({ROOT: 1, K: 2})},
        {"forward": lap({ROOT: 3})},
        {"forward": lap({ROOT: 3})},
    ]
    divided = scale_to_unprofiled(laps, {"forward": 3}, NO_OVERHEAD)
    assert (pytest.approx(6 / 11), 1) == (divided.self_seconds[K].median, divided.self_seconds[K].n)
    assert (pytest.approx(27 / 11), 3) == (
        divided.self_seconds[ROOT].median,
        divided.self_seconds[ROOT].n,
    )
    assert pytest.approx(3) == divided.inclusive[ROOT].median


def test_what_is_ignored_is_fitted_and_then_left_out() -> None:
    """It is in no row above either, and its seconds in all phases are told apart."""
    parts = {"forward": lap({ROOT: 4, Q: 6}), "backward": lap({ROOT_BACK: 1, Q_BACK: 2})}
    divided = scale_to_unprofiled(
        [parts], {"forward": 5, "backward": 3}, NO_OVERHEAD, ignored={"q"}
    )
    assert {ROOT: 2, ROOT_BACK: 1} == medians(divided.self_seconds) == medians(divided.inclusive)
    assert {"q": 3 + 2} == divided.ignored


def test_passes_in_which_nothing_was_stamped_fit_nothing() -> None:
    """There is no factor that would make 5 s of them."""
    divided = scale_to_unprofiled([{"forward": lap({ROOT: 0})}], {"forward": 5}, NO_OVERHEAD)
    assert ({ROOT: 0}, {}) == (medians(divided.self_seconds), divided.factors)


def test_a_module_takes_no_less_than_its_kernels() -> None:
    """Hooks made the host late: 12 s, of which kernels are 1 + 6 s, for a clean 9 s.

    Of the other 3 + 2 s 2 s are left: 0.4 of each.

    For a clean 8 s 1 s is left, 0.2 of each. Scaled as one, q would have 5.3 s then, less than its
    kernels.
    """
    hooked, kernels = [{"forward": lap({ROOT: 4, Q: 8})}], {ROOT: 1.0, Q: 6.0}
    divided = scale_to_unprofiled(hooked, {"forward": 9}, NO_OVERHEAD, kernels=kernels)
    assert pytest.approx({ROOT: 1 + 0.4 * 3, Q: 6 + 0.4 * 2}) == medians(divided.self_seconds)
    assert {"forward": 9 / 12} == divided.factors
    assert pytest.approx({ROOT: 1.6, Q: 6.4}) == medians(
        scale_to_unprofiled(hooked, {"forward": 8}, NO_OVERHEAD, kernels=kernels).self_seconds
    )


def test_what_hooks_cost_is_not_taken_from_kernels() -> None:
    """Q keeps the 55 s of its kernels, though 10 calls' overhead would leave 50 s.

    Of the clean 80 s 25 s are left for the root.
    """
    hooked = [{"forward": lap({ROOT: 40, Q: 60}, called={Q: 10}, calls_others={ROOT: 10})}]
    divided = scale_to_unprofiled(
        hooked, {"forward": 80}, HookOverhead(inside=1, outside=1), kernels={Q: 55.0}
    )
    assert pytest.approx({ROOT: 25, Q: 55}) == medians(divided.self_seconds)


def test_a_pass_that_is_all_kernels_is_divided_as_they_are() -> None:
    """Kernels of 3 and 5 s in the trace, for a clean pass of 8 s, and for one of 6 s.

    Nothing is left for what hooks made longer.
    """
    hooked, kernels = [{"forward": lap({ROOT: 9, Q: 6})}], {ROOT: 3.0, Q: 5.0}
    assert {ROOT: 3, Q: 5} == medians(
        scale_to_unprofiled(hooked, {"forward": 8}, NO_OVERHEAD, kernels=kernels).self_seconds
    )
    assert {ROOT: 2.25, Q: 3.75} == medians(
        scale_to_unprofiled(hooked, {"forward": 6}, NO_OVERHEAD, kernels=kernels).self_seconds
    )


def test_kernels_that_overlap_with_others_are_no_more_than_the_stream_was_busy() -> None:
    """A side stream has 20 s of the root's kernels in 4 s.

    These 4 s stay, and of q's 6 s those that are left.
    """
    divided = scale_to_unprofiled(
        [{"forward": lap({ROOT: 4, Q: 6})}], {"forward": 7}, NO_OVERHEAD, kernels={ROOT: 20.0}
    )
    assert {ROOT: 4, Q: 3} == medians(divided.self_seconds)
