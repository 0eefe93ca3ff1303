"""Which rank was late, by how much, and what it took longer for than the other ranks did.

The evidence, step by step, not yet the verdict.

A rank is late in an interval by what its busy time is beyond the others' median. A place's excess
is the time that the rank spent in it beyond the others' median. What makes the rank late of that
excess is what the others wait for.
"""

import bisect
import heapq
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from lflops.profile.records import ModulePhase, RankComparison, RankDelay, RankWait
from lflops.profile.series import summed
from lflops.ranks.merge.rank_table import OUTSIDE, RankTable, Series, added_up, median_of_others

# ranks that are looked at place by place, those that are late by the most
CANDIDATES = 32
# excesses in a profile, those that cost the most
KEPT = 256
# of the step: what costs less is left out
WORTH_KEEPING = 0.004

WAITS_KEPT = 32

# of a rank's busy time: so much must be outside of its slowest place to say that the rank is slow
# in everything
LEAST_SHARE = 0.3
# a module that is like no other is expected to take so many times as long as its share of the work
GENEROUS = 3.0
# from so many ranks on the spread of the others is known
FEW_RANKS = 5
# excesses of other ranks that are kept
LARGEST = 8
# from so many steps on, the single slowest one is ignored
MANY_STEPS = 5
JOLT_RATIO, JOLT_SIZES = (
    2**-0.5,
    20,
    # the sizes in which jolts are counted: a step, and so many smaller ones
)
# median absolute deviations to a standard deviation
ROBUST = 1.4826

EVERYTHING, STAGE = ModulePhase("", "all"), ModulePhase("", "stage")
"""All that a rank's device does.

All that a rank does in a step, where ranks have different modules.
"""


class SelfWork(NamedTuple):
    """What a module itself does in a phase."""

    flops: int
    bytes_moved: int


class _Excess(NamedTuple):
    """A rank in a place: its seconds, the usual ones, and how late the rank is in the interval, step by step."""

    place: ModulePhase
    rank: int
    seconds: Sequence[float]
    usual: Sequence[float]
    late: Sequence[float]
    intervals: tuple[int, ...]
    modules: int = 1

    @property
    def excess(self) -> list[float]:
        return [took - usual for took, usual in zip(self.seconds, self.usual, strict=True)]

    @property
    def cost(self) -> float:
        return statistics.fmean(
            max(0.0, min(each)) for each in zip(self.excess, self.late, strict=True)
        )


def compare_ranks(
    table: RankTable, work: Mapping[ModulePhase, SelfWork] | None = None, *, whole: bool = False
) -> RankComparison | None:
    """The evidence of a table; `None` of fewer than two ranks, and where no step was timed."""
    # `work` is that of places in modules, for modules that one rank alone has. With `whole` a
    # rank's whole step is a place too, as where places are too few to say that the rank is slow in
    # everything.
    steps = len(next(iter(table.waiting.values()), ()))
    if len(table.ranks) < 2 or not steps:
        return None
    late = _Lateness(table)
    usual, estimated = _usual(table, work or {})
    everywhere = [
        each
        for rank in late.ranks
        if (
            each := _everywhere(
                table,
                {place: usual[place] for place in usual if place not in estimated},
                late,
                rank,
            )
        )
        is not None
    ]
    if whole or table.staged:
        busy, place = added_up(table.busy.values(), table.ranks), EVERYTHING if whole else STAGE
        others, intervals = median_of_others(busy), tuple(table.busy)
        in_all = [
            _Excess(place, rank, busy[rank], others[rank], late.within(rank, intervals), intervals)
            for rank in late.ranks
        ]
        everywhere = in_all if whole else [*everywhere, *in_all]
    found = chain(
        everywhere,
        _in_places(table, usual, late),
        _in_repeated(table, late),
        # one after the other: there are very many
    )
    worst = heapq.nlargest(KEPT, found, key=lambda each: each.cost)
    beyond = {place: _beyond(table.seconds[place], usual[place]) for place in usual}
    jolts, jolted_seconds = _jolts(table, beyond)
    beyond |= {
        place: _beyond_others(repeated.seconds) for place, repeated in table.repeated.items()
    }
    beyond[EVERYTHING] = (
        {} if table.staged else _beyond_others(_on_device(table, usual, everywhere=whole))
    )
    return RankComparison(
        steps=steps,
        seconds=table.step_seconds,
        lost_seconds=None if table.staged else _lost(table),
        excesses=tuple(
            _value(each, beyond.get(each.place, {}), begins=each.place in table.begins)
            for each in worst
            if each.cost >= WORTH_KEEPING * table.step_seconds
        ),
        waits=tuple(heapq.nlargest(WAITS_KEPT, _waits(table), key=lambda wait: wait.seconds)),
        jolts=jolts,
        jolted_seconds=jolted_seconds,
        places=len(usual),
        from_quartiles=table.are_quartiles,
    )


def _late_ranks(busy: Mapping[int, Series]) -> list[int]:
    beyond = (of_rank for series in busy.values() for of_rank in _beyond_others(series).items())
    late = summed(
        (rank, statistics.fmean(max(each, 0.0) for each in seconds)) for rank, seconds in beyond
    )
    return heapq.nlargest(CANDIDATES, late, key=late.__getitem__)


def times_last(table: RankTable) -> Counter[int] | None:
    """In how many steps each rank was busy the longest.

    `None` where ranks have different modules, or single steps are unknown.
    """
    if table.staged or table.are_quartiles:
        return None
    steps = zip(*added_up(table.busy.values(), table.ranks).values(), strict=True)
    return Counter(table.ranks[step.index(max(step))] for step in steps)


class _Lateness:
    """How late the ranks are in each interval.

    Where ranks have different modules it is how long the others wait.
    """

    def __init__(self, table: RankTable) -> None:
        self._staged = median_of_others(table.waiting) if table.staged else None
        self._by_interval = {
            number: _beyond_others(series) for number, series in table.busy.items()
        }
        waited = {rank: statistics.fmean(seconds) for rank, seconds in table.waiting.items()}
        self.ranks = (
            sorted(heapq.nsmallest(CANDIDATES, waited, key=waited.__getitem__))
            if table.staged
            else _late_ranks(table.busy)
        )

    def of(self, rank: int, interval: int) -> Sequence[float]:
        """Seconds step by step, negative where the rank is early."""
        return self._staged[rank] if self._staged is not None else self._by_interval[interval][rank]

    def within(self, rank: int, intervals: Iterable[int]) -> Sequence[float]:
        """The same over several intervals."""
        if self._staged is not None:
            return self._staged[rank]
        return tuple(
            map(sum, zip(*(self._by_interval[number][rank] for number in intervals), strict=True))
        )


def _usual(
    table: RankTable, work: Mapping[ModulePhase, SelfWork]
) -> tuple[dict[ModulePhase, Series], set[ModulePhase]]:
    """What each rank usually takes in each place, step by step: the median of the other ranks.

    And the places where that is estimated.
    """
    # A module that one rank alone has is compared with those like it, on other ranks if there are
    # any; else with its share of the work
    usual: dict[ModulePhase, Series] = {}
    alone: dict[ModulePhase, tuple[int, Sequence[float]]] = {}
    groups: dict[tuple[str, str, SelfWork | None], list[ModulePhase]] = defaultdict(list)
    estimated: set[ModulePhase] = set()
    for place in table.intervals:
        series = table.seconds.get(place, {})
        if len(series) > 1:
            usual[place] = median_of_others(series)
        elif series and table.staged:
            alone[place] = next(iter(series.items()))
            groups[table.patterns.get(place.fqn, place.fqn), place.phase, work.get(place)].append(
                place
            )
    for group in groups.values():
        for place in group:
            rank, _ = alone[place]
            like = [other for other in group if alone[other][0] != rank] or [
                other for other in group if other != place
            ]
            if like:
                usual[place] = {
                    rank: tuple(
                        map(
                            statistics.median,
                            zip(*(alone[other][1] for other in like), strict=True),
                        )
                    )
                }
                continue
            estimated.add(place)
            if (expected := _by_work(place, alone, work)) is not None:
                usual[place] = {rank: expected}
    return usual, estimated


def _in_places(
    table: RankTable, usual: Mapping[ModulePhase, Series], late: _Lateness
) -> Iterator[_Excess]:
    for place, of_rank in usual.items():
        interval = table.intervals[place]
        for rank in late.ranks:
            if rank in of_rank:
                yield _Excess(
                    place,
                    rank,
                    table.seconds[place][rank],
                    of_rank[rank],
                    late.of(rank, interval),
                    (interval,),
                )


def _in_repeated(table: RankTable, late: _Lateness) -> Iterator[_Excess]:
    """The candidates in modules whose names differ only in numbers, all of them together."""
    for place, (modules, intervals, series) in table.repeated.items():
        usual = median_of_others(series)
        for rank in late.ranks:
            if rank in series:
                yield _Excess(
                    place,
                    rank,
                    series[rank],
                    usual[rank],
                    late.within(rank, intervals),
                    intervals,
                    modules,
                )


def _by_work(
    place: ModulePhase,
    alone: Mapping[ModulePhase, tuple[int, Sequence[float]]],
    work: Mapping[ModulePhase, SelfWork],
) -> tuple[float, ...] | None:
    """Estimate a place's seconds at the rate of the other modules, by FLOPs or by bytes, whichever takes longer."""
    others = [other for other in alone if other != place and other in work]
    if place not in work or not others:
        return None
    took = [sum(step) for step in zip(*(alone[other][1] for other in others), strict=True)]
    of_others = map(sum, zip(*(work[each] for each in others), strict=True))
    shares = [mine / theirs for mine, theirs in zip(work[place], of_others, strict=True) if theirs]
    return tuple(GENEROUS * max(shares) * seconds for seconds in took) if shares else None


def _everywhere(
    table: RankTable, usual: Mapping[ModulePhase, Series], late: _Lateness, rank: int
) -> _Excess | None:
    """The rank in all places where its device works, as far as it is usually slower there.

    The slowest place is left out.
    """
    places = [place for place in usual if rank in usual[place] and is_on_device(place)]
    if len(places) < 3:
        return None
    mine, theirs = (
        {place: series[place][rank] for place in places} for series in (table.seconds, usual)
    )
    slowest = max(places, key=lambda place: sum(mine[place]) - sum(theirs[place]))
    rest = [place for place in places if place != slowest]
    if sum(sum(theirs[place]) for place in rest) < LEAST_SHARE * sum(
        sum(each) for each in theirs.values()
    ):
        return None
    total = [sum(step) for step in zip(*theirs.values(), strict=True)]
    slower = [
        _weighted_median(
            [
                (mine[place][step] / theirs[place][step], theirs[place][step])
                for place in rest
                if theirs[place][step] > 0
            ]
        )
        for step in range(len(total))
    ]
    took = [ratio * seconds for ratio, seconds in zip(slower, total, strict=True)]
    return _Excess(EVERYTHING, rank, took, total, late.within(rank, table.busy), tuple(table.busy))


def is_on_device(place: ModulePhase) -> bool:
    """Whether it is a module's, or the root's own in a pass."""
    return bool(place.fqn) or place.phase not in OUTSIDE


def _on_device(table: RankTable, places: Iterable[ModulePhase], *, everywhere: bool) -> Series:
    """Each rank's seconds in all of these that are on the device, or everywhere."""
    on_device = [table.seconds[place] for place in places if everywhere or is_on_device(place)]
    ranks = (
        [rank for rank in table.ranks if all(rank in series for series in on_device)]
        if on_device
        else []
    )
    return added_up(on_device, ranks)


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    ordered = sorted(values)
    half, reached = (
        sum(weight for _, weight in ordered) / 2,
        accumulate(weight for _, weight in ordered),
    )
    return next(
        (value for (value, _), so_far in zip(ordered, reached, strict=True) if so_far >= half), 1.0
    )


def _noise(beyond: Series, rank: int) -> float | None:
    """The standard deviation of the other ranks' excess from rank to rank.

    `None` where they are too few.
    """
    medians = [statistics.median(seconds) for each, seconds in beyond.items() if each != rank]
    if len(medians) < FEW_RANKS:
        return None
    middle = statistics.median(medians)
    return ROBUST * statistics.median(abs(each - middle) for each in medians)


def _jolts(table: RankTable, beyond: Mapping[ModulePhase, Series]) -> tuple[tuple[int, ...], float]:
    """How often an excess reaches each of the sizes, and the seconds in which it could."""
    sizes = [table.step_seconds * JOLT_RATIO**number for number in range(JOLT_SIZES)]
    large = sorted(
        value
        for series in beyond.values()
        for each in series.values()
        for value in each
        if value >= sizes[-1]
    )
    seconds = sum(sum(each) for place in beyond for each in table.seconds[place].values())
    return tuple(len(large) - bisect.bisect_left(large, size) for size in sizes), seconds


def _waits(table: RankTable) -> Iterator[RankWait]:
    """For each place where ranks wait: for whom most, and how long."""
    for place in table.waits:
        series = table.seconds.get(place, {})
        if len(series) < 2:
            continue
        ranks, by_step = list(series), list(zip(*series.values(), strict=True))
        shortest = [min(step) for step in by_step]
        waited = {
            rank: _usual_mean(
                [took - least for took, least in zip(series[rank], shortest, strict=True)]
            )
            for rank in ranks
        }
        for_whom = summed(
            (ranks[step.index(min(step))], statistics.fmean(step) - min(step)) for step in by_step
        )
        for_rank = max(for_whom, key=for_whom.__getitem__)
        others = [rank for rank in ranks if rank != for_rank]
        longest = max(others, key=waited.__getitem__)
        seconds = statistics.median(waited[rank] for rank in others)
        traced = table.known_waits.get(place)
        if seconds >= WORTH_KEEPING * table.step_seconds:
            yield RankWait(
                module=place.fqn,
                phase=place.phase,
                for_rank=for_rank,
                ranks=table.having.get(place, len(ranks)) - 1,
                seconds=seconds,
                longest=waited[longest],
                longest_rank=longest,
                traced_seconds=None
                if traced is None
                else statistics.median(traced[rank] for rank in others) - min(traced.values()),
                transfer_seconds=None if traced is None else min(traced.values()),
            )


def _lost(table: RankTable) -> float:
    """Seconds a step that the last rank of each interval takes beyond the median one."""
    return sum(
        _usual_mean(
            [max(step) - statistics.median_low(step) for step in zip(*series.values(), strict=True)]
        )
        for series in table.busy.values()
    )


def _usual_mean(steps: Sequence[float]) -> float:
    """The mean over the steps.

    In many steps the longest counts as the second longest: one disturbance of the machine is not
    the run.
    """
    if len(steps) < MANY_STEPS:
        return statistics.fmean(steps)
    *others, second, _ = sorted(steps)
    return statistics.fmean([*others, second, second])


def _beyond_others(series: Series) -> dict[int, tuple[float, ...]]:
    return _beyond(series, median_of_others(series))


def _beyond(series: Series, usual: Series) -> dict[int, tuple[float, ...]]:
    """The seconds of each rank beyond the usual ones, step by step."""
    return {rank: tuple(map(operator.sub, series[rank], usual[rank])) for rank in usual}


def _value(each: _Excess, beyond: Series, *, begins: bool) -> RankDelay:
    return RankDelay(
        module=each.place.fqn,
        phase=each.place.phase,
        rank=each.rank,
        seconds=statistics.median(each.seconds),
        usual=statistics.median(each.usual),
        excess=tuple(each.excess),
        late=tuple(each.late),
        noise=_noise(beyond, each.rank),
        largest_of_others=tuple(
            heapq.nlargest(
                LARGEST,
                (value for rank, over in beyond.items() if rank != each.rank for value in over),
            )
        ),
        intervals=each.intervals,
        modules=each.modules,
        begins_collective=begins,
    )
