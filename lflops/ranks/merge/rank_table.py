"""What ranks took in the same steps, place by place, and the intervals between the collectives in which they wait for each other.

    rank 0   | data | forward ............ | backward | waits ....... | optimizer | waits |
    rank 1   | data | forward ............ | backward ................ | optimizer | waits |
    interval |                    0                                  |      1            |

A place is a module in a phase, or a phase of the step outside of modules, as `("", "data")`. Ranks
leave a collective together, so who is late in it was slow in the interval before.

Of each place there is the least, the middle and the most; those that differ most have the time of
every rank.
"""

import dataclasses
import heapq
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec.structs

from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, ModulePhase, RankStat, TimingStats
from lflops.profile.series import grouped
from lflops.profile.steps import EVENTS

BEFORE_MODULES = ("data", "transfer")
AFTER_MODULES = ("clip", "optimizer", "other", *EVENTS, "sync")
OUTSIDE = (
    *BEFORE_MODULES,
    *AFTER_MODULES,
    # the phases of a step that are in no module, in their order
)
# of so many ranks the median changes where one is left out
FEW = 17

MOST_INTERVALS, FEWEST_INTERVALS, MOST_SUMS = 64, 4, 1 << 17
"""Intervals of a step, of many ranks fewer.

So many sums of all ranks and intervals together, in each step.
"""


Series = Mapping[int, tuple[float, ...]]
"""Seconds step by step, by rank.

Tuples of numbers cost Python's garbage collector nothing; of many ranks there are very many.
"""


class Repeated(NamedTuple):
    """Several modules in one phase, as `layers.*.mlp` forward."""

    # their number
    modules: int
    # those that they lie in
    intervals: tuple[int, ...]
    # the sum of them, by rank
    seconds: Series


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """Seconds of all ranks in the same steps."""

    # By place, of the ranks that have it; of very many ranks only of those that are late, and of
    # some others
    seconds: Mapping[ModulePhase, Series]
    repeated: Mapping[
        ModulePhase, Repeated
        # the sum of places whose modules' names differ only in numbers, by the names' pattern
    ]
    busy: Mapping[
        int, Series
        # by interval, a rank's seconds in all places of it where no rank waits
    ]
    # a rank's seconds in all places where ranks wait
    waiting: Series
    # the interval of each place where no rank waits
    intervals: Mapping[ModulePhase, int]
    # the places where ranks wait for each other
    waits: frozenset[ModulePhase]
    # the median step's, over ranks and steps
    step_seconds: float
    # whether ranks have different modules
    staged: bool
    patterns: Mapping[str, str] = field(
        default_factory=dict
        # each module's name with `*` for the numbers of what repeats
    )
    are_quartiles: bool = (
        # whether single steps are unknown, and there are quartiles in place of three steps
        False
    )
    begins: Collection[ModulePhase] = (
        frozenset()
        # of the others those where a collective begins that is awaited elsewhere
    )
    # Exposed seconds of collectives a step, by rank, of the places in `waits` where the traces of
    # all ranks have them
    known_waits: Mapping[ModulePhase, Mapping[int, float]] = field(default_factory=dict)
    having: Mapping[ModulePhase, int] = field(
        default_factory=dict
        # how many ranks have each place, where `seconds` has not all of them
    )

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks, in their order."""
        return tuple(self.waiting)


def repeated_places(
    intervals: Mapping[ModulePhase, int], patterns: Mapping[str, str]
) -> dict[ModulePhase, list[ModulePhase]]:
    """The places where no rank waits by the pattern of their names, of those patterns that several modules have."""
    groups = grouped(
        intervals, lambda place: ModulePhase(patterns.get(place.fqn, place.fqn), place.phase)
    )
    return {group: members for group, members in groups.items() if len(members) > 1}


def intervals_of(
    places: Iterable[ModulePhase], waits: Collection[ModulePhase]
) -> dict[ModulePhase, int]:
    """The interval of each place where no rank waits.

    They run as the places are in order, backward in the reverse.
    """
    # The last interval goes on in the next step, unless the step ends with a collective
    listed = list(places)
    outside = {place.phase: place for place in listed if not place.fqn and place.phase in OUTSIDE}
    inside = [place for place in listed if place.fqn or place.phase not in OUTSIDE]
    ordered = [outside[phase] for phase in BEFORE_MODULES if phase in outside]
    ordered += [place for place in inside if place.phase == "forward"]
    ordered += [place for place in reversed(inside) if place.phase != "forward"]
    ordered += [outside[phase] for phase in AFTER_MODULES if phase in outside]
    number, intervals = 0, {}
    for place in ordered:
        if place in waits:
            number += 1
        else:
            intervals[place] = number
    if ordered and ordered[-1] not in waits:
        intervals = {
            place: 0 if interval == number else interval for place, interval in intervals.items()
        }
    return intervals


def table_of(
    times: Mapping[int, Sequence[Mapping[ModulePhase, float]]],
    waits: Collection[ModulePhase],
    begins: Collection[ModulePhase] = (),
    known: Mapping[ModulePhase, Mapping[int, float]] | None = None,
    *,
    patterns: Mapping[str, str] | None = None,
    are_quartiles: bool = False,
) -> RankTable:
    """The table of some ranks, from their seconds of each place, step by step, in the same steps (with `are_quartiles`, quartiles)."""
    # In the places `begins`, collectives begin that are awaited elsewhere. `patterns` are each
    # module's name with `*` for what repeats.
    seconds: dict[ModulePhase, dict[int, tuple[float, ...]]] = {
        place: {} for steps in times.values() for step in steps for place in step
    }
    for rank, steps in times.items():
        for place in dict.fromkeys(place for step in steps for place in step):
            seconds[place][rank] = tuple(step.get(place, 0.0) for step in steps)
    table = table_of_series(seconds, {rank: len(steps) for rank, steps in times.items()}, waits)
    return dataclasses.replace(
        table,
        repeated=_repeated(seconds, table.intervals, patterns or {}),
        begins=frozenset(begins) - table.waits,
        known_waits=known or {},
        patterns=patterns or {},
        are_quartiles=are_quartiles,
    )


def table_of_series(
    seconds: Mapping[ModulePhase, Series], ranks: Mapping[int, int], waits: Collection[ModulePhase]
) -> RankTable:
    """The table of places that do not repeat; `ranks` has how many steps each rank has."""
    waits = frozenset(waits)
    intervals = intervals_of(seconds, waits)
    nothing = {rank: (0.0,) * steps for rank, steps in ranks.items()}
    busy = {number: dict(nothing) for number in set(intervals.values())}
    waiting = dict(nothing)
    for place, series in seconds.items():
        sums = waiting if place in waits else busy[intervals[place]]
        for rank, each in series.items():
            sums[rank] = tuple(total + value for total, value in zip(sums[rank], each, strict=True))
    return RankTable(
        seconds=seconds,
        repeated={},
        busy=busy,
        waiting=waiting,
        intervals=intervals,
        waits=waits,
        step_seconds=median_step([waiting, *busy.values()]),
        staged=any(len(series) < len(ranks) for place, series in seconds.items() if place.fqn),
    )


def few_intervals(intervals: Mapping[ModulePhase, int], ranks: int) -> dict[ModulePhase, int]:
    """The same, neighbours together where there are too many for so many ranks."""
    number = max(intervals.values(), default=0) + 1
    most = max(min(MOST_INTERVALS, MOST_SUMS // max(ranks, 1)), FEWEST_INTERVALS)
    return {
        place: interval * most // number if number > most else interval
        for place, interval in intervals.items()
    }


def _repeated(
    seconds: Mapping[ModulePhase, Series],
    intervals: Mapping[ModulePhase, int],
    patterns: Mapping[str, str],
) -> dict[ModulePhase, Repeated]:
    found = {}
    for group, members in repeated_places(intervals, patterns).items():
        having = set.intersection(*(set(seconds[member]) for member in members))
        sums = added_up([seconds[member] for member in members], sorted(having))
        if len(sums) > 1:
            found[group] = Repeated(
                len(members), tuple({intervals[member] for member in members}), sums
            )
    return found


def added_up(parts: Collection[Series], ranks: Iterable[int]) -> dict[int, tuple[float, ...]]:
    return {
        rank: tuple(map(sum, zip(*(part[rank] for part in parts), strict=True))) for rank in ranks
    }


def median_step(parts: Sequence[Series]) -> float:
    """The median seconds of a step, over ranks and steps, from all parts of it."""
    lengths = [
        sum(each) for rank in parts[0] for each in zip(*(part[rank] for part in parts), strict=True)
    ]
    return statistics.median(lengths) if lengths else 0.0


def median_of_others(series: Series) -> dict[int, tuple[float, ...]]:
    """For each rank the median of the other ranks, step by step."""
    ranks = list(series)
    by_step = list(zip(*series.values(), strict=True))
    if len(ranks) > FEW:
        medians = tuple(statistics.median(step) for step in by_step)
        return dict.fromkeys(ranks, medians)
    return {
        rank: tuple(statistics.median((*step[:at], *step[at + 1 :])) for step in by_step)
        for at, rank in enumerate(ranks)
        if by_step
    }


# places that every rank's time is kept of
WITH_ALL_RANKS = 32

_PHASES = (*PHASES, *OUTSIDE)


def rank_stats(table: RankTable, rows: Iterable[str]) -> list[RankStat]:
    """A row for each place with times of several ranks, by `rows`.

    Of equal ranks the first is slow, of two medians the faster counts.
    """
    order = {row: number for number, row in enumerate(rows)}
    stats = []
    for place, series in table.seconds.items():
        medians = {rank: statistics.median(seconds) for rank, seconds in series.items()}
        if len(medians) > 1 and place.fqn in order:
            slow = max(medians, key=medians.__getitem__)
            low, median, high = (
                min(medians.values()),
                statistics.median_low(medians.values()),
                medians[slow],
            )
            waits = place in table.waits
            stats.append(
                RankStat(
                    module=place.fqn,
                    phase=place.phase,
                    low=low,
                    median=median,
                    high=high,
                    high_rank=slow,
                    waits=waits,
                    by_rank=medians,
                )
            )
    stats.sort(key=lambda stat: (order[stat.module], _PHASES.index(stat.phase)))
    kept = set(
        heapq.nsmallest(
            WITH_ALL_RANKS,
            range(len(stats)),
            key=lambda number: (stats[number].waits, -stats[number].spread),
        )
    )
    return [
        stat if number in kept else msgspec.structs.replace(stat, by_rank=None)
        for number, stat in enumerate(stats)
    ]


def waits_in(profile: Profile) -> set[ModulePhase]:
    """The places where this rank waits for others.

    Where the profile does not say them, those of its collectives.
    """
    # Of a step that was not counted it is unknown where they run: under DDP at the end of backward,
    # else it can be anywhere in the model
    if not profile.is_counted and profile.run.world_size > 1:
        of_ddp = "ddp" in (profile.run.strategy or "").lower()
        rows = ("",) if of_ddp else profile.modules
        return {
            ModulePhase(row, phase)
            for row in rows
            for phase in (("backward",) if of_ddp else PHASES)
        } | {ModulePhase("", "sync")}
    waits: Iterable[tuple[str, str]] = profile.waits or {
        wait
        for each in profile.communication
        for wait in ((each.module, each.phase), ("", each.phase))
    }
    found = {
        ModulePhase("", phase) if phase in OUTSIDE else ModulePhase(row, phase)
        for row, phase in waits
    }
    if (
        ModulePhase("", "other") in found
        # the count does not separate clipping from what else is outside of modules
    ):
        found.add(ModulePhase("", "clip"))
    return found | ({ModulePhase("", "sync")} if profile.run.kind == "training" else set())


def begins_in(profile: Profile) -> set[ModulePhase]:
    """The places where collectives begin that are awaited elsewhere."""
    return {ModulePhase(each.module, each.phase) for each in profile.communication} - waits_in(
        profile
    )


def waiting_in(profile: Profile) -> dict[ModulePhase, float | None]:
    """Exposed seconds of collectives a step, by the place where they are awaited: transfer and waiting together.

    `None` is unknown.
    """
    # What backward begins in a module and does not await there is awaited at its end, in the root
    waits = waits_in(profile)
    found: dict[ModulePhase, float | None] = {}
    for each in profile.communication:
        begun = ModulePhase(each.module, each.phase)
        place = begun if begun in waits else ModulePhase("", each.phase)
        known = found.get(place, 0.0)
        found[place] = (
            None if known is None or each.exposed_seconds is None else known + each.exposed_seconds
        )
    return {place: seconds for place, seconds in found.items() if place in waits}


def known_waits(
    waiting: Mapping[int, Mapping[ModulePhase, float | None]],
) -> dict[ModulePhase, dict[int, float]]:
    """Exposed seconds of collectives in the places where all ranks know them, by rank."""
    by_place: dict[ModulePhase, dict[int, float]] = defaultdict(dict)
    for rank, places in waiting.items():
        for place, seconds in places.items():
            if seconds is not None:
                by_place[place][rank] = seconds
    return {place: seconds for place, seconds in by_place.items() if len(seconds) == len(waiting)}


def quartiles_in(profile: Profile) -> list[dict[ModulePhase, float]]:
    """The first quartile, the median and the third of each place's seconds, where single steps are unknown."""
    spreads: dict[ModulePhase, TimingStats] = {
        ModulePhase(row, phase): spread
        for row, module in profile.modules.items()
        for phase in PHASES
        if (spread := module.work(phase).self_seconds) is not None
    }
    clean = [step.phases for step in profile.steps if step.is_unprofiled]
    for phase in OUTSIDE:
        if spread := TimingStats.of(phases[phase] for phases in clean if phase in phases):
            spreads[ModulePhase("", phase)] = spread
    if not any(place.fqn or place.phase not in OUTSIDE for place in spreads):
        return []
    return [
        {place: getattr(spread, name) for place, spread in spreads.items()}
        for name in ("low", "median", "high")
    ]
