"""How long ranks take for the same: of each place the least, the middle and the most, and of those that differ most every rank's."""

import heapq
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from lflops.merging.rank_table import OUTSIDE, Place, RankTable
from lflops.profile.model import Profile
from lflops.profile.records import PHASES, RankStat, Spread

WITH_ALL_RANKS = 32  # places that every rank's time is kept of

_PHASES = (*PHASES, *OUTSIDE)


def rank_stats(table: RankTable, rows: Iterable[str]) -> list[RankStat]:
    """Of each place that several ranks have times of, in the order of the rows.

    Of equal ranks the first is the slow one; of two in the middle the faster one is the median.
    """
    order = {row: number for number, row in enumerate(rows)}
    stats = []
    for place, series in table.seconds.items():
        medians = {rank: statistics.median(seconds) for rank, seconds in series.items()}
        if len(medians) > 1 and place.row in order:
            slow = max(medians, key=medians.__getitem__)
            low, median, high = min(medians.values()), statistics.median_low(medians.values()), medians[slow]
            waits = place in table.waits
            stats.append(
                RankStat(
                    module=place.row, phase=place.phase, low=low, median=median, high=high, high_rank=slow, waits=waits, by_rank=medians
                )
            )
    stats.sort(key=lambda stat: (order[stat.module], _PHASES.index(stat.phase)))
    kept = set(heapq.nsmallest(WITH_ALL_RANKS, range(len(stats)), key=lambda number: (stats[number].waits, -stats[number].spread)))
    return [stat if number in kept else replace(stat, by_rank=None) for number, stat in enumerate(stats)]


def waits_in(profile: Profile) -> set[Place]:
    """The places where this rank waits for others; where the profile does not say them, those of its collectives.

    Of a step that was not counted it is unknown where they run: under DDP at the end of backward, else it can be anywhere in the model.
    """
    if not profile.is_counted and profile.run.world_size > 1:
        of_ddp = "ddp" in (profile.run.strategy or "").lower()
        rows = ("",) if of_ddp else profile.modules
        return {Place(row, phase) for row in rows for phase in (("backward",) if of_ddp else PHASES)} | {Place("", "sync")}
    waits: Iterable[tuple[str, str]] = profile.waits or {
        wait for each in profile.communication for wait in ((each.module, each.phase), ("", each.phase))
    }
    found = {Place("", phase) if phase in OUTSIDE else Place(row, phase) for row, phase in waits}
    if Place("", "other") in found:  # the count does not separate clipping from what else is outside of modules
        found.add(Place("", "clip"))
    return found | ({Place("", "sync")} if profile.run.kind == "training" else set())


def begins_in(profile: Profile) -> set[Place]:
    """The places where collectives begin that are awaited elsewhere."""
    return {Place(each.module, each.phase) for each in profile.communication} - waits_in(profile)


def waiting_in(profile: Profile) -> dict[Place, float | None]:
    """Exposed seconds of collectives a step, by the place where they are awaited: transfer and waiting together. `None` is unknown.

    What backward begins in a module and does not await there is awaited at its end, in the root.
    """
    waits = waits_in(profile)
    found: dict[Place, float | None] = {}
    for each in profile.communication:
        begun = Place(each.module, each.phase)
        place = begun if begun in waits else Place("", each.phase)
        known = found.get(place, 0.0)
        found[place] = None if known is None or each.exposed_seconds is None else known + each.exposed_seconds
    return {place: seconds for place, seconds in found.items() if place in waits}


def known_waits(waiting: Mapping[int, Mapping[Place, float | None]]) -> dict[Place, dict[int, float]]:
    """Exposed seconds of collectives in the places where all ranks know them, by rank."""
    by_place: dict[Place, dict[int, float]] = defaultdict(dict)
    for rank, places in waiting.items():
        for place, seconds in places.items():
            if seconds is not None:
                by_place[place][rank] = seconds
    return {place: seconds for place, seconds in by_place.items() if len(seconds) == len(waiting)}


def quartiles_in(profile: Profile) -> list[dict[Place, float]]:
    """The first quartile, the median and the third of each place's seconds, where single steps are unknown."""
    spreads: dict[Place, Spread] = {
        Place(row, phase): spread
        for row, module in profile.modules.items()
        for phase in PHASES
        if (spread := module.work(phase).own_seconds) is not None
    }
    clean = [step.phases for step in profile.steps if step.is_clean]
    for phase in OUTSIDE:
        if spread := Spread.of(phases[phase] for phases in clean if phase in phases):
            spreads[Place("", phase)] = spread
    if not any(place.row or place.phase not in OUTSIDE for place in spreads):
        return []
    return [{place: getattr(spread, name) for place, spread in spreads.items()} for name in ("low", "median", "high")]
