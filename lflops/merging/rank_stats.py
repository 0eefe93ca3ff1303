"""How long ranks take for the same: of each module and phase the least, the middle and the most, and of the worst every rank's."""

import heapq
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from lflops.profile.model import Profile
from lflops.profile.records import PHASES, Phase, RankStat

__all__ = ["rank_stats", "waiting_in", "worst"]

_TOLD_BY_RANK = 32

Waiting = Mapping[tuple[str, Phase], float | None]


def rank_stats(given: Mapping[int, Profile], rows: Iterable[str]) -> list[RankStat]:
    """Of each row and phase that several ranks have times of."""
    found = list(_stats(given, rows))
    told = worst(found)
    return [stat if place in told else replace(stat, by_rank=None) for place, stat in enumerate(found)]


def waiting_in(profile: Profile) -> Waiting:
    """Seconds a step that each module itself spends inside of collectives in each phase where it runs any; `None` where unknown.

    What is begun in a module and not awaited there is awaited where the phase ends, as DDP does with gradients: so the root's own is
    unknown too, wherever another is.
    """
    found: dict[tuple[str, Phase], float | None] = {}
    for each in profile.communication:
        if each.seconds is None:
            found["", each.phase] = None
        known = found.get((each.module, each.phase), 0.0)
        found[each.module, each.phase] = None if known is None or each.seconds is None else known + each.seconds
    return found


def worst(stats: Sequence[RankStat]) -> frozenset[int]:
    """The places of those that every rank's time is kept of: what loses the most, and what may be waiting for others last."""

    def most(place: int) -> tuple[bool, float]:
        return stats[place].waiting == "unknown", -stats[place].seconds_lost

    return frozenset(heapq.nsmallest(_TOLD_BY_RANK, range(len(stats)), key=most))


def _stats(given: Mapping[int, Profile], rows: Iterable[str]) -> Iterator[RankStat]:
    waits = {rank: waiting_in(profile) for rank, profile in given.items()}
    for row in rows:
        having = {rank: profile.modules[row] for rank, profile in given.items() if row in profile.modules}
        for phase in PHASES:
            spreads = {rank: module.work(phase).own_seconds for rank, module in having.items()}
            medians = {rank: spread.median for rank, spread in spreads.items() if spread is not None}
            if len(medians) < 2:
                continue
            waited = {rank: waits[rank].get((row, phase), 0.0) for rank in medians}
            known = {rank: seconds for rank, seconds in waited.items() if seconds is not None}
            if len(known) < len(waited):
                yield _median_stat(row, phase, medians, "unknown")
            elif any((row, phase) in waits[rank] for rank in medians):
                yield _median_stat(row, phase, {rank: max(medians[rank] - known[rank], 0.0) for rank in medians}, "left_out")
            else:
                yield _median_stat(row, phase, medians, "none")


def _median_stat(
    module: str,
    phase: Phase,
    medians: Mapping[int, float],
    waiting: Literal["none", "left_out", "unknown"],
) -> RankStat:
    """How the ranks' medians compare. Of equal ones the first rank is the slow one; of two in the middle the faster one is the median."""
    slow = max(medians, key=medians.__getitem__)
    low, median = min(medians.values()), statistics.median_low(medians.values())
    return RankStat(
        module=module, phase=phase, low=low, median=median, high=medians[slow], high_rank=slow, waiting=waiting, by_rank=medians
    )
