"""What ranks took in the same steps, place by place, and the intervals between the collectives in which they wait for each other.

    rank 0   | data | forward ............ | backward | waits ....... | optimizer | waits |
    rank 1   | data | forward ............ | backward ................ | optimizer | waits |
    interval |                    0                                  |      1            |

A place is a module in a phase, or a phase of the step outside of modules, as `("", "data")`. Ranks leave a collective together, so who is
late in it was slow in the interval before.
"""

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["OUTSIDE", "Place", "RankTable", "Repeated", "intervals_of", "median_of_others", "median_step", "repeated_places", "table_of"]

BEFORE_MODULES = ("data", "transfer")
AFTER_MODULES = ("clip", "optimizer", "other", "sync")
OUTSIDE = (*BEFORE_MODULES, *AFTER_MODULES)
"""The phases of a step that are in no module, in their order."""

FEW = 17
"""Of so many ranks the median changes where one is left out."""


class Place(NamedTuple):
    """A module in a phase, or a phase of the step outside of modules: `Place("", "data")`."""

    row: str
    phase: str


Series = Mapping[int, Sequence[float]]
"""Seconds step by step, by rank."""


class Repeated(NamedTuple):
    """Several modules in one phase, as `layers.*.mlp` forward.

    Attributes:
        modules: Their number.
        intervals: Those that they lie in.
        seconds: The sum of them, by rank.
    """

    modules: int
    intervals: tuple[int, ...]
    seconds: Series


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """Seconds of all ranks in the same steps.

    Attributes:
        seconds: By place, of the ranks that have it.
        repeated: The sum of places whose modules' names differ only in numbers, by the names' pattern.
        busy: By interval, a rank's seconds in all places of it where no rank waits.
        waiting: A rank's seconds in all places where ranks wait.
        intervals: The interval of each place where no rank waits.
        waits: The places where ranks wait for each other.
        begins: Of the others those where a collective begins that is awaited elsewhere.
        known_waits: Exposed seconds of collectives a step, by rank, of the places in `waits` where the traces of all ranks have them.
        step_seconds: The median step's, over ranks and steps.
        staged: Whether ranks have different modules.
        patterns: Each module's name with `*` for the numbers of what repeats.
        are_quartiles: Whether single steps are unknown, and there are quartiles in place of three steps.
    """

    seconds: Mapping[Place, Series]
    repeated: Mapping[Place, Repeated]
    busy: Mapping[int, Series]
    waiting: Series
    intervals: Mapping[Place, int]
    waits: Collection[Place]
    step_seconds: float
    staged: bool
    patterns: Mapping[str, str] = field(default_factory=dict)
    are_quartiles: bool = False
    begins: Collection[Place] = frozenset()
    known_waits: Mapping[Place, Mapping[int, float]] = field(default_factory=dict)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks, in their order."""
        return tuple(self.waiting)


def repeated_places(intervals: Mapping[Place, int], patterns: Mapping[str, str]) -> dict[Place, list[Place]]:
    """The places where no rank waits by the pattern of their names, of those patterns that several modules have."""
    groups: dict[Place, list[Place]] = defaultdict(list)
    for place in intervals:
        groups[Place(patterns.get(place.row, place.row), place.phase)].append(place)
    return {group: members for group, members in groups.items() if len(members) > 1}


def intervals_of(places: Iterable[Place], waits: Collection[Place]) -> dict[Place, int]:
    """The interval of each place where no rank waits: they run as the places are in order, backward in the reverse.

    The last interval goes on in the next step, unless the step ends with a collective.
    """
    listed = list(places)
    outside = {place.phase: place for place in listed if not place.row and place.phase in OUTSIDE}
    inside = [place for place in listed if place.row or place.phase not in OUTSIDE]
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
        intervals = {place: 0 if interval == number else interval for place, interval in intervals.items()}
    return intervals


def table_of(
    times: Mapping[int, Sequence[Mapping[Place, float]]],
    waits: Collection[Place],
    begins: Collection[Place] = (),
    known: Mapping[Place, Mapping[int, float]] | None = None,
    *,
    patterns: Mapping[str, str] | None = None,
    are_quartiles: bool = False,
) -> RankTable:
    """The table of some ranks.

    Args:
        times: Of each rank the seconds of each place, step by step, in the same steps.
        waits: The places where ranks wait for each other.
        begins: Those where collectives begin that are awaited elsewhere.
        known: `RankTable.known_waits`.
        patterns: Each module's name with `*` for the numbers of what repeats.
        are_quartiles: Whether these are quartiles in place of steps.
    """
    waits, patterns = frozenset(waits), patterns or {}
    places = list(dict.fromkeys(place for steps in times.values() for step in steps for place in step))
    intervals = intervals_of(places, waits)
    seconds: dict[Place, dict[int, list[float]]] = {place: {} for place in places}
    busy: dict[int, dict[int, list[float]]] = {number: {} for number in set(intervals.values())}
    waiting: dict[int, list[float]] = {}
    for rank, steps in times.items():
        waiting[rank] = [0.0] * len(steps)
        for sums in busy.values():
            sums[rank] = [0.0] * len(steps)
        for place in dict.fromkeys(place for step in steps for place in step):
            seconds[place][rank] = series = [step.get(place, 0.0) for step in steps]
            into = waiting[rank] if place in waits else busy[intervals[place]][rank]
            into[:] = [total + value for total, value in zip(into, series, strict=True)]
    return RankTable(
        seconds=seconds,
        repeated=_repeated(seconds, intervals, patterns),
        busy=busy,
        waiting=waiting,
        intervals=intervals,
        waits=waits,
        begins=frozenset(begins) - waits,
        known_waits=known or {},
        step_seconds=median_step([waiting, *busy.values()]),
        staged=any(len(series) < len(times) for place, series in seconds.items() if place.row),
        patterns=patterns,
        are_quartiles=are_quartiles,
    )


def _repeated(seconds: Mapping[Place, Series], intervals: Mapping[Place, int], patterns: Mapping[str, str]) -> dict[Place, Repeated]:
    found = {}
    for group, members in repeated_places(intervals, patterns).items():
        having = set.intersection(*(set(seconds[member]) for member in members))
        sums = {rank: [sum(each) for each in zip(*(seconds[member][rank] for member in members), strict=True)] for rank in sorted(having)}
        if len(sums) > 1:
            found[group] = Repeated(len(members), tuple({intervals[member] for member in members}), sums)
    return found


def median_step(parts: Sequence[Series]) -> float:
    """The median seconds of a step, over ranks and steps, from all parts of it."""
    lengths = [sum(each) for rank in parts[0] for each in zip(*(part[rank] for part in parts), strict=True)]
    return statistics.median(lengths) if lengths else 0.0


def median_of_others(series: Series) -> dict[int, list[float]]:
    """Of each rank the median of the other ranks, step by step."""
    ranks = list(series)
    by_step = list(zip(*series.values(), strict=True))
    if len(ranks) > FEW:
        medians = [statistics.median(step) for step in by_step]
        return dict.fromkeys(ranks, medians)
    found: dict[int, list[float]] = defaultdict(list)
    for step in by_step:
        for index, rank in enumerate(ranks):
            found[rank].append(statistics.median((*step[:index], *step[index + 1 :])))
    return dict(found)
