"""Why a rank takes longer: more work, another thread of its process, or the system, which gave its core to somebody else."""

import statistics
from collections.abc import Mapping
from typing import Literal

from lflops.profile.model import Profile
from lflops.profile.records import RankActivity

__all__ = ["Cause", "cause_of"]

Cause = Literal["work", "thread", "preempted"]

MORE_WORK = 1.15
"""Times the others' work: from here on it is a cause."""

AS_MUCH_LONGER = 1.5
"""Times what more work explains: a rank that takes longer than that is slow too."""

EXPLAINED = 0.5
"""Of the seconds that a rank is late."""


def cause_of(profile: Profile, rank: int, ratio: float | None) -> tuple[Cause | None, float | None]:
    """The cause, as far as one is known, and for more work how many times that of the others.

    `ratio` is the rank's time to the others'; `None` where that is not the same in all steps.
    """
    compared = profile.clean_comparison
    activity = next((each for each in compared.activity if each.rank == rank), None) if compared else None
    work = _work_ratio({each.rank: each.macs for each in profile.ranks}, rank)
    if work is None or work < MORE_WORK:
        work = None if activity is None else activity.units_ratio
    if work is not None and work >= MORE_WORK and (ratio is None or ratio <= AS_MUCH_LONGER * work):
        return "work", work
    if activity is None or not activity.late:
        return None, None
    return _of_system(activity), None


def _work_ratio(macs: Mapping[int, int | None], rank: int) -> float | None:
    """The rank's MACs to the median of the others'."""
    mine, others = macs.get(rank), [each for other, each in macs.items() if other != rank and each is not None]
    usual = statistics.median(others) if others else 0
    return mine / usual if mine is not None and usual else None


def _of_system(activity: RankActivity) -> Cause | None:
    if activity.other_threads is not None and activity.other_threads >= EXPLAINED * activity.late:
        return "thread"
    return "preempted" if (activity.waited or 0.0) >= EXPLAINED * activity.late else None
