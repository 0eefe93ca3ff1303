"""Test the throughput of ranks with uneven batches, and the words for the end of a window."""

import pytest
from msgspec.structs import replace

from lflops.monitoring.window.live_metrics import LiveMetrics, _StepSample
from lflops.monitoring.window_publisher import _ended, _shares
from lflops.profile.profile import Profile
from lflops.profile.steps import Step
from lflops.ranks.merge.merge import merge
from tests.support.profile_builders import profile, run


def window(samples: int, *, partial: bool = False) -> Profile:
    """Return a rank's profile of two steps, each with `samples` samples in 0.5 s."""
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
    """The curve `samples_per_second` includes all ranks, in the proportion of the last window.

    This rank has 4 samples in 0.5 s. Without a window, both ranks are assumed to have 4, which
    makes 16 per second. According to the window, the ranks have 4 and 8, 3 times as many: 24 per
    second.
    """
    shares = _shares(window(4).steps, merge([window(4), window(8)]).steps)
    assert {"samples": 3.0} == shares
    live = LiveMetrics(lambda step: 0.5, 2)
    for given, expected in (({}, 16.0), (shares, 24.0)):
        live._steps = [_StepSample(0.5, 4, None, ())]
        point = live.point(given)
        assert expected == point["samples_per_second"]
        assert "tokens_per_second" not in point


@pytest.mark.parametrize(
    ("cut_short", "missing", "expected"),
    [
        (False, False, ""),
        (True, False, ", earlier than planned"),
        (False, True, ", without the reports of ranks 1"),
        (True, True, ", earlier than planned, without the reports of ranks 1"),
    ],
)
def test_a_missing_rank_does_not_cut_a_window_short(
    *, cut_short: bool, missing: bool, expected: str
) -> None:
    """The log says separately that a window ended early and that reports of ranks are missing."""
    own = window(4, partial=cut_short)
    by_rank = {0: own}
    if not missing:
        by_rank[1] = own_of_another(own)
    whole = merge(by_rank)
    assert expected == _ended(whole, cut_short=cut_short)


def own_of_another(own: Profile) -> Profile:
    """Return the profile of the other rank, which is equal but without notes."""
    return replace(own, notes=())
