"""Samples and tokens of all ranks, which have uneven batches, and how the end of a window is said."""

import pytest
from msgspec.structs import replace

from lflops.monitoring.window.live_metrics import LiveMetrics, _StepSample
from lflops.monitoring.window_publisher import _ended, _shares
from lflops.profile.profile import Profile
from lflops.profile.steps import Step
from lflops.ranks.merge.merge import merge
from tests.support.profile_builders import profile, run


def window(samples: int, *, partial: bool = False) -> Profile:
    """A rank's, of two steps."""
    steps = tuple(
        Step(index=n, kind="unprofiled", seconds=0.5, phases={"forward": 0.5}, samples=samples)
        for n in range(2)
    )
    return profile(
        {"": {}},
        [],
        steps=steps,
        run=run(world_size=2, data_parallel_size=2, kind="training", partial=partial),
    )


def test_the_curves_have_the_samples_of_all_ranks() -> None:
    """4 here and 8 there are 3 times 4, in half a second: 24 a second.

    Before a window knows, two equal batches: 16.
    """
    shares = _shares(window(4).steps, merge([window(4), window(8)]).steps)
    assert {"samples": 3.0} == shares
    live = LiveMetrics(lambda step: 0.5, 2)
    for given, expected in (({}, 16.0), (shares, 24.0)):
        live._steps = [_StepSample(0.5, 4, None, ())]
        point = live.point(given)
        assert (expected, "tokens_per_second" in point) == (point["samples_per_second"], False)


@pytest.mark.parametrize(
    ("cut_short", "missing", "expected"),
    [
        (False, False, ""),
        (True, False, " before its end"),
        (False, True, " without the reports of ranks 1"),
        (True, True, " before its end without the reports of ranks 1"),
    ],
)
def test_a_missing_rank_does_not_cut_a_window_short(
    *, cut_short: bool, missing: bool, expected: str
) -> None:
    """Its report is missing, and the window is a full one."""
    own = window(4, partial=cut_short)
    whole = merge({0: own} if missing else {0: own, 1: own_of_another(own)})
    assert expected == _ended(whole, cut_short=cut_short)


def own_of_another(own: Profile) -> Profile:
    """The same on the other rank."""
    return replace(own, notes=())
