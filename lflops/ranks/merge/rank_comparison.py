"""Compare the ranks: find which ranks are late, by how much, and where they took longer.

A place is a module in a phase, or a phase of the step outside modules. An interval is the part of a
step between two collectives. A rank is busy in all places in which it does not wait for other
ranks.

The lateness of a rank in an interval is its busy time minus the median busy time of the other
ranks. The excess of a rank in a place is its time in this place minus the median time of the other
ranks. Only the part of the excess that makes the rank late makes other ranks wait.

This module only measures the excess and the lateness in each step. `ranks.stragglers` decides
whether they are more than noise.
"""

import bisect
import heapq
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from lflops.profile.records import (
    LARGE_EXCESS_RATIO,
    ModulePhase,
    RankComparison,
    RankDelay,
    RankWait,
)
from lflops.profile.series import robust_deviation
from lflops.ranks.merge.rank_series import RankSeries, Steps, mean_excess, minus, total
from lflops.ranks.merge.rank_table import RankTable, is_in_model

# Maximum number of ranks that are compared place by place. The latest ranks are chosen.
CANDIDATES = 32
# Maximum number of delays in a comparison. The most expensive delays are kept.
MOST_DELAYS = 256
# Smallest share of a step that a delay or a wait must cost to be kept.
WORTH_KEEPING = 0.004
# Maximum number of waits in a comparison. The longest waits are kept.
WAITS_KEPT = 32

# A rank is slower in most places only if its other places, without its slowest place, usually take
# at least this share of the time.
LEAST_SHARE = 0.3
# If there is no similar module, the usual time of a module is estimated from its share of the work.
# The estimate is multiplied by this factor, so that an inaccurate estimate flags no rank.
GENEROUS = 3.0
# Smallest number of other ranks for which their standard deviation is computed.
FEW_RANKS = 5
# Number of excesses of other ranks that are stored with a delay. The largest ones are stored.
LARGEST = 8
# With at least this many steps, the single longest time is replaced by the second longest.
MANY_STEPS = 5
# Number of limits above which large excesses are counted (see `LARGE_EXCESS_RATIO`).
LARGE_EXCESS_SIZES = 20

EVERYTHING = ModulePhase("", "all")
"""A special place for delays of a rank that is slow everywhere, not only in some modules.

Except for `STAGE`, every other place is a module in a phase, or a phase outside modules.
"""
STAGE = ModulePhase("", "stage")
"""A special place for delays of a rank in the whole step.

It is used only if ranks have different modules, such as the stages of a pipeline.
"""


class SelfWork(NamedTuple):
    """The work of a module in a phase, without its submodules."""

    flops: int
    bytes_moved: int


class _Excess(NamedTuple):
    """The extra time of one rank in one place (a module in a phase), for each step.

    Attributes:
        seconds: The time of the rank in the place, for each step.
        usual: The usual time in the place, for each step: the median of the other ranks, or an
            estimate.
        late: Lateness of the rank, summed over `intervals`, for each step.
        intervals: The intervals between collectives that contain the place.
        modules: Number of modules that the place stands for. It is greater than 1 only for
            repeated modules such as `layers.*.mlp`.
    """

    place: ModulePhase
    rank: int
    seconds: Steps
    usual: Steps
    late: Steps
    intervals: tuple[int, ...]
    modules: int = 1

    @property
    def excess(self) -> Steps:
        return minus(self.seconds, self.usual)

    @property
    def cost(self) -> float:
        """Mean cost of the excess in seconds per step: the part that makes the rank late."""
        return mean_excess(map(min, self.excess, self.late))


class _Single(NamedTuple):
    """The only rank that has a certain place (a module in a phase), and its time in each step."""

    rank: int
    seconds: Steps


class _Usual(NamedTuple):
    """The usual time in each place (a module in a phase), with which a rank's time is compared.

    Attributes:
        series: The usual times by place and rank. A place or rank with an unknown usual time is
            missing.
        estimated: The places that only one rank has and that are not similar to any other place.
            Their usual times are estimated from their work, or unknown.
    """

    series: dict[ModulePhase, RankSeries]
    estimated: set[ModulePhase]


def compare_ranks(
    table: RankTable,
    work: Mapping[ModulePhase, SelfWork] | None = None,
    *,
    by_whole_step: bool = False,
) -> RankComparison | None:
    """Compare the times of the ranks in each step: find delays of ranks, and waits for ranks.

    Returns `None` if the table has fewer than two ranks or no steps.

    Args:
        table: The times of the ranks.
        work: The work of each module in each phase. It is used to estimate the usual time of a
            module that only one rank has.
        by_whole_step: How to find ranks that are slow everywhere. If true, only whole steps are
            compared. If false, a rank is slow everywhere if it is slow in most places (modules in a
            phase); in a pipeline, whole steps are compared too. Pass `True` if the table has few
            places.
    """
    if len(table.ranks) < 2 or not table.steps:
        return None
    lateness = _Lateness(table)
    usual = _usual(table, work or {})
    # The excesses are computed lazily, because there may be very many places.
    excesses = chain(
        _everywhere(table, usual, lateness, by_whole_step=by_whole_step),
        _in_places(table, usual, lateness),
        _in_repeated(table, lateness),
    )
    worst = heapq.nlargest(MOST_DELAYS, excesses, key=attrgetter("cost"))
    excesses_by_place = {}
    for place, series in usual.series.items():
        excesses_by_place[place] = table.seconds[place].minus(series)
    large_excesses, large_excess_seconds = _large_excesses(table, excesses_by_place)
    for pattern, repeated in table.repeated.items():
        excesses_by_place[pattern] = repeated.seconds.excess_over_others()
    if not table.staged:
        in_model = _in_model(table, usual.series, by_whole_step=by_whole_step)
        excesses_by_place[EVERYTHING] = in_model.excess_over_others()
    delays = []
    for excess in worst:
        if excess.cost >= WORTH_KEEPING * table.step_seconds:
            of_all_ranks = excesses_by_place.get(excess.place, RankSeries())
            begins_collective = excess.place in table.async_starts
            delays.append(_delay(excess, of_all_ranks, begins_collective=begins_collective))
    return RankComparison(
        steps=table.steps,
        seconds=table.step_seconds,
        lost_seconds=None if table.staged else _lost(table),
        delays=tuple(delays),
        waits=tuple(heapq.nlargest(WAITS_KEPT, _waits(table), key=attrgetter("seconds"))),
        large_excesses=large_excesses,
        large_excess_seconds=large_excess_seconds,
        places=len(usual.series),
        from_quartiles=table.are_quartiles,
    )


def times_last(table: RankTable) -> dict[int, int]:
    """Return, for each rank, the number of steps in which it was busy longest.

    Empty if ranks have different modules, or if the times of single steps are unknown.
    """
    if table.staged or table.are_quartiles:
        return {}
    counts = dict.fromkeys(table.ranks, 0)
    for step in table.busy_in_all().by_step():
        counts[table.ranks[step.index(max(step))]] += 1
    return counts


class _Lateness:
    """Computes how late the ranks are in each interval between two collectives, for each step.

    The lateness of a rank is its busy time minus the median busy time of the other ranks. If ranks
    have different modules, it is the median waiting time of the other ranks in the whole step.

    Attributes:
        ranks: The ranks that are latest, at most `CANDIDATES`.
    """

    def __init__(self, table: RankTable) -> None:
        self._waiting_of_others = table.waiting.median_of_others() if table.staged else None
        self._by_interval: dict[int, RankSeries] = {}
        for interval, series in table.busy.items():
            self._by_interval[interval] = series.excess_over_others()
        self.ranks = self._least_waiting(table) if table.staged else self._latest()

    def within(self, rank: int, intervals: Iterable[int]) -> Steps:
        """Return a rank's lateness in each step, summed over intervals between collectives.

        The lateness is negative in steps in which the rank is early. If ranks have different
        modules, the lateness is that of the whole step, and `intervals` is ignored.
        """
        if self._waiting_of_others is not None:
            return self._waiting_of_others[rank]
        return total(self._by_interval[interval][rank] for interval in intervals)

    def _latest(self) -> list[int]:
        late: dict[int, float] = defaultdict(float)
        for series in self._by_interval.values():
            for rank, seconds in series.items():
                late[rank] += mean_excess(seconds)
        return heapq.nlargest(CANDIDATES, late, key=late.__getitem__)

    def _least_waiting(self, table: RankTable) -> list[int]:
        waited = table.waiting.means()
        return sorted(heapq.nsmallest(CANDIDATES, waited, key=waited.__getitem__))


def _usual(table: RankTable, work: Mapping[ModulePhase, SelfWork]) -> _Usual:
    """Return the usual time with which each rank's time in each place is compared.

    A place is a module in a phase. The usual time is the median of the other ranks. Some modules
    exist on only one rank, for example in a pipeline. The usual time of such a module is the median
    of similar modules, on other ranks if possible. If there are no similar modules, it is estimated
    from the module's share of the work.
    """
    series: dict[ModulePhase, RankSeries] = {}
    alone: dict[ModulePhase, _Single] = {}
    for place in table.intervals:
        of_place = table.seconds.get(place, RankSeries())
        if len(of_place) > 1:
            series[place] = of_place.median_of_others()
        elif of_place and table.staged:
            alone[place] = _Single(*next(iter(of_place.items())))
    estimated = set()
    for group in _like_each_other(alone, table, work):
        for place in group:
            rank = alone[place].rank
            like = _comparable(place, group, alone)
            if like:
                series[place] = RankSeries({rank: _median_of(like, alone)})
                continue
            estimated.add(place)
            expected = _by_work(place, alone, work)
            if expected is not None:
                series[place] = RankSeries({rank: expected})
    return _Usual(series, estimated)


def _median_of(places: Iterable[ModulePhase], alone: Mapping[ModulePhase, _Single]) -> Steps:
    """Return the median time over the given places (modules in a phase), for each step.

    `alone` has the times of all places that only one rank has.
    """
    seconds = [alone[place].seconds for place in places]
    return tuple(map(statistics.median, zip(*seconds, strict=True)))


def _like_each_other(
    places: Iterable[ModulePhase], table: RankTable, work: Mapping[ModulePhase, SelfWork]
) -> Iterable[list[ModulePhase]]:
    """Group places whose modules do the same work and whose names differ only in numbers.

    A place is a module in a phase. For example, `layers.0.mlp` and `layers.1.mlp` in backward are
    in one group.
    """
    groups: dict[tuple[str, str, SelfWork | None], list[ModulePhase]] = defaultdict(list)
    for place in places:
        pattern = table.patterns.get(place.fqn, place.fqn)
        groups[pattern, place.phase, work.get(place)].append(place)
    return groups.values()


def _comparable(
    place: ModulePhase,
    group: Sequence[ModulePhase],
    alone: Mapping[ModulePhase, _Single],
) -> list[ModulePhase]:
    """Return the places of a group with which one place of the group is compared.

    A place is a module in a phase. The result has the places on other ranks. If there are none, it
    has all other places of the group.
    """
    rank = alone[place].rank
    on_other_ranks = []
    others = []
    for other in group:
        if alone[other].rank != rank:
            on_other_ranks.append(other)
        if other != place:
            others.append(other)
    return on_other_ranks or others


def _by_work(
    place: ModulePhase,
    alone: Mapping[ModulePhase, _Single],
    work: Mapping[ModulePhase, SelfWork],
) -> Steps | None:
    """Estimate the time of a module in a phase, for each step, from its share of the work.

    The share is computed from FLOPs and from bytes moved, and the larger share is used. The
    estimate is the share times the time of the other modules, times `GENEROUS`. Returns `None` if
    the work is unknown.
    """
    if place not in work:
        return None
    flops = 0
    bytes_moved = 0
    seconds = []
    for other, single in alone.items():
        if other != place and other in work:
            flops += work[other].flops
            bytes_moved += work[other].bytes_moved
            seconds.append(single.seconds)
    shares = []
    if flops:
        shares.append(work[place].flops / flops)
    if bytes_moved:
        shares.append(work[place].bytes_moved / bytes_moved)
    if not shares:
        return None
    factor = GENEROUS * max(shares)
    return tuple(factor * each for each in total(seconds))


def _in_places(table: RankTable, usual: _Usual, lateness: _Lateness) -> Iterator[_Excess]:
    """Yield the extra time of each of the latest ranks in each place.

    A place is a module in a phase. Places without a known usual time are left out.
    """
    for place, series in usual.series.items():
        intervals = (table.intervals[place],)
        for rank in lateness.ranks:
            if rank in series:
                seconds = table.seconds[place][rank]
                late = lateness.within(rank, intervals)
                yield _Excess(place, rank, seconds, series[rank], late, intervals)


def _in_repeated(table: RankTable, lateness: _Lateness) -> Iterator[_Excess]:
    """Yield the extra time of each of the latest ranks in repeated modules.

    Repeated modules have a common name pattern, such as `layers.*.mlp`. Their times are added up
    before they are compared with the times of the other ranks.
    """
    for place, repeated in table.repeated.items():
        usual = repeated.seconds.median_of_others()
        for rank in lateness.ranks:
            if rank in usual:
                seconds = repeated.seconds[rank]
                late = lateness.within(rank, repeated.intervals)
                yield _Excess(
                    place, rank, seconds, usual[rank], late, repeated.intervals, repeated.modules
                )


def _everywhere(
    table: RankTable, usual: _Usual, lateness: _Lateness, *, by_whole_step: bool
) -> Iterator[_Excess]:
    """Yield the extra time of each of the latest ranks over most places, or over whole steps.

    A place is a module in a phase. `by_whole_step` is described in `compare_ranks`.
    """
    if by_whole_step:
        yield from _whole_steps(table, lateness, EVERYTHING)
        return
    yield from _devices(table, usual, lateness)
    if table.staged:
        yield from _whole_steps(table, lateness, STAGE)


def _whole_steps(table: RankTable, lateness: _Lateness, place: ModulePhase) -> Iterator[_Excess]:
    """Yield how much longer each of the latest ranks is busy in a whole step than the other ranks.

    `place` is `EVERYTHING` or `STAGE`. It becomes the place of the results.
    """
    busy = table.busy_in_all()
    usual = busy.median_of_others()
    intervals = tuple(table.busy)
    for rank in lateness.ranks:
        late = lateness.within(rank, intervals)
        yield _Excess(place, rank, busy[rank], usual[rank], late, intervals)


def _devices(table: RankTable, usual: _Usual, lateness: _Lateness) -> Iterator[_Excess]:
    """For each rank that is behind the others, yield the extra time that a slow device causes.

    A rank whose device is slow is slower than usual by about the same factor in most places
    (modules in a phase). The extra time is the usual time of all these places, multiplied by this
    factor, minus the usual time.
    """
    intervals = tuple(table.busy)
    for rank in lateness.ranks:
        own = {}
        others = {}
        for place, series in usual.series.items():
            if rank in series and is_in_model(place) and place not in usual.estimated:
                own[place] = table.seconds[place][rank]
                others[place] = series[rank]
        slower = _slower_in_most_places(own, others)
        if slower is not None:
            usual_total = total(others.values())
            seconds = tuple(ratio * each for ratio, each in zip(slower, usual_total, strict=True))
            late = lateness.within(rank, intervals)
            yield _Excess(EVERYTHING, rank, seconds, usual_total, late, intervals)


def _slower_in_most_places(
    own: Mapping[ModulePhase, Steps], usual: Mapping[ModulePhase, Steps]
) -> list[float] | None:
    """Return the factor by which a rank is slower than usual in most places, for each step.

    A place is a module in a phase. In each place, the factor is the rank's time divided by the
    usual time. The result is the median over the places, weighted by the usual time. The place with
    the largest extra time is left out. Returns `None` if there are too few other places, or if they
    take too small a part of the step.

    Args:
        own: The times of the rank.
        usual: The usual times in the same places.
    """
    if len(own) < 3:
        return None
    slowest = max(own, key=lambda place: sum(own[place]) - sum(usual[place]))
    rest = [place for place in own if place != slowest]
    all_seconds = sum(map(sum, usual.values()))
    if all_seconds - sum(usual[slowest]) < LEAST_SHARE * all_seconds:
        return None
    ratios = []
    for step in range(len(own[slowest])):
        weighted = []
        for place in rest:
            weight = usual[place][step]
            if weight > 0:
                weighted.append((own[place][step] / weight, weight))
        ratios.append(_weighted_median(weighted))
    return ratios


def _in_model(
    table: RankTable, places: Iterable[ModulePhase], *, by_whole_step: bool
) -> RankSeries:
    """Return the total time of each rank in those `places` that are inside the model.

    If `by_whole_step` is true, all `places` are included. A rank that does not have all of the
    included places is left out.
    """
    parts = []
    for place in places:
        if by_whole_step or is_in_model(place):
            parts.append(table.seconds[place])
    if not parts:
        return RankSeries()
    having_all = set(parts[0]).intersection(*parts)
    ranks = [rank for rank in table.ranks if rank in having_all]
    return RankSeries.sum_of(parts, ranks)


def _weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the median of values with weights; 1 if there are no values.

    Args:
        weighted: Pairs of a value and its weight.
    """
    ordered = sorted(weighted)
    half = sum(weight for _, weight in ordered) / 2
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    return 1.0


def _noise(excesses: RankSeries, rank: int) -> float | None:
    """Return how much the ranks other than `rank` differ from each other in one place.

    `excesses` has the extra time of each rank in each step. The result is the standard deviation of
    the ranks' medians, estimated so that outliers have little influence. Returns `None` if there
    are too few ranks.
    """
    medians = excesses.medians()
    medians.pop(rank, None)
    if len(medians) < FEW_RANKS:
        return None
    return robust_deviation(list(medians.values()))


def _large_excesses(
    table: RankTable, excesses_by_place: Mapping[ModulePhase, RankSeries]
) -> tuple[tuple[int, ...], float]:
    """Count the large excesses of all ranks, to estimate how likely a large excess is by chance.

    `excesses_by_place` has the extra time of each rank in each step, by place (a module in a
    phase). Returns one count for each of `LARGE_EXCESS_SIZES` limits: the number of excesses that
    are at least as large as the limit. Also returns the total time of all ranks in these places. A
    count divided by the total time is the rate at which such excesses occur.
    """
    sizes = [
        table.step_seconds * LARGE_EXCESS_RATIO**number for number in range(LARGE_EXCESS_SIZES)
    ]
    large = []
    seconds = 0.0
    for place, series in excesses_by_place.items():
        for excess in series.values():
            large += [each for each in excess if each >= sizes[-1]]
        seconds += sum(map(sum, table.seconds[place].values()))
    large.sort()
    counts = []
    for size in sizes:
        counts.append(len(large) - bisect.bisect_left(large, size))
    return tuple(counts), seconds


def _waits(table: RankTable) -> Iterator[RankWait]:
    """Yield a `RankWait` for each place in which ranks wait long for another rank.

    A place is a module in a phase.
    """
    for place in table.waits:
        series = table.seconds.get(place, RankSeries())
        if len(series) < 2:
            continue
        shortest = list(map(min, series.by_step()))
        for_rank = _awaited_rank(series)
        waited = {}
        for rank, seconds_of_rank in series.items():
            if rank != for_rank:
                waited[rank] = _usual_mean(minus(seconds_of_rank, shortest))
        seconds = statistics.median(waited.values())
        if seconds < WORTH_KEEPING * table.step_seconds:
            continue
        longest_rank = max(waited, key=waited.__getitem__)
        transfer = None
        traced = None
        if place in table.exposed_on_all_ranks:
            known = table.exposed_on_all_ranks[place]
            transfer = min(known.values())
            traced = statistics.median(known[rank] for rank in waited) - transfer
        yield RankWait(
            module=place.fqn,
            phase=place.phase,
            for_rank=for_rank,
            ranks=len(waited),
            seconds=seconds,
            longest=waited[longest_rank],
            longest_rank=longest_rank,
            traced_seconds=traced,
            transfer_seconds=transfer,
        )


def _awaited_rank(series: RankSeries) -> int:
    """Return the rank for which the other ranks wait longest, summed over all steps."""
    ranks = list(series)
    waited_for: dict[int, float] = {}
    for step in series.by_step():
        shortest = min(step)
        rank = ranks[step.index(shortest)]
        waited_for[rank] = waited_for.get(rank, 0.0) + statistics.fmean(step) - shortest
    return max(waited_for, key=waited_for.__getitem__)


def _lost(table: RankTable) -> float:
    """Return the seconds per step that the median rank waits for the last rank at collectives."""
    lost = 0.0
    for series in table.busy.values():
        lost += _usual_mean(series.excess_of_slowest())
    return lost


def _usual_mean(steps: Sequence[float]) -> float:
    """Return the mean of `steps`, which has one value for each step.

    With many steps, the largest value is replaced by the second largest, because one disturbance of
    the machine is not typical of the run.
    """
    if len(steps) < MANY_STEPS:
        return statistics.fmean(steps)
    *others, second, _ = sorted(steps)
    return statistics.fmean([*others, second, second])


def _delay(excess: _Excess, excesses: RankSeries, *, begins_collective: bool) -> RankDelay:
    """Convert the extra time of a rank to a `RankDelay`.

    `excesses` has the extra time of all ranks in the same place (a module in a phase).
    """
    return RankDelay(
        module=excess.place.fqn,
        phase=excess.place.phase,
        rank=excess.rank,
        seconds=statistics.median(excess.seconds),
        usual=statistics.median(excess.usual),
        excess=excess.excess,
        late=excess.late,
        noise=_noise(excesses, excess.rank),
        largest_of_others=tuple(heapq.nlargest(LARGEST, excesses.values_except(excess.rank))),
        intervals=excess.intervals,
        modules=excess.modules,
        begins_collective=begins_collective,
    )
