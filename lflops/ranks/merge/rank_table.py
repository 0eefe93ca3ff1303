"""Make tables of the times of all ranks in the same steps, by place and by interval.

    rank 0   | data | forward ............ | backward | waits ....... | optimizer | waits |
    rank 1   | data | forward ............ | backward ................ | optimizer | waits |
    interval |                    0                                  |      1            |

A place is a module in a phase, or a phase of the step outside modules, such as `("", "data")`. An
interval is the part of a step between two collectives. Ranks leave a collective together, so a rank
that reaches a collective late was slow in the interval before this collective.
"""

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from msgspec.structs import replace

from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, ModulePhase, RankStat, TimingStats
from lflops.profile.series import grouped, positions
from lflops.profile.steps import EVENTS
from lflops.ranks.merge.rank_series import RankSeries

BEFORE_MODULES = ("data", "transfer")
AFTER_MODULES = ("clip", "optimizer", "other", *EVENTS, "sync")
OUTSIDE = (*BEFORE_MODULES, *AFTER_MODULES)
"""The phases of a step outside modules, in the order in which they run."""

SYNC = ModulePhase("", "sync")
"""The place in which ranks wait for each other at the end of a step."""

# Maximum number of intervals in a step. With many ranks, the maximum is smaller, so that the number
# of ranks times the number of intervals is at most `MOST_SUMS`. It is at least `FEWEST_INTERVALS`.
MOST_INTERVALS = 64
FEWEST_INTERVALS = 4
MOST_SUMS = 1 << 17

# Maximum number of `rank_stats` that have the times of all ranks. The ones with the largest
# differences between ranks are chosen.
WITH_ALL_RANKS = 32

_PHASES = (*PHASES, *OUTSIDE)


@dataclass(frozen=True)
class Repeated:
    """Several modules in one phase with names that differ only in numbers, such as `layers.*.mlp`.

    Attributes:
        modules: Number of modules.
        intervals: The intervals between collectives that contain the modules.
        seconds: The time of each rank in each step, summed over the modules.
    """

    modules: int
    intervals: tuple[int, ...]
    seconds: RankSeries


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """Times of all ranks in the same steps.

    A place is a module in a phase, or a phase of the step outside modules. An interval is the part
    of a step between two collectives.

    Attributes:
        seconds: The times of the ranks in each place. If there are very many ranks and modules,
            only the most important places are included.
        repeated: Summed times of repeated modules. The key is a place whose name is a pattern, such
            as `layers.*.mlp`.
        busy: For each interval, the times of the ranks, summed over all places of the interval.
        waiting: The times of the ranks, summed over all places where ranks wait for each other.
        intervals: The number of the interval of each place where ranks do not wait.
        waits: The places where ranks wait for each other.
        step_seconds: Median time of a step over all ranks and steps.
        staged: Whether ranks have different modules, as in a pipeline.
        patterns: The pattern of each module name. For example, `layers.0.mlp` has the pattern
            `layers.*.mlp` if there are several such modules.
        are_quartiles: Whether each series has the three quartiles of a time instead of one value
            for each step, because the times of single steps are unknown.
        async_starts: The places that start a collective whose result is awaited in another place.
        exposed_on_all_ranks: For each place and rank, the seconds per step in which collectives run
            but nothing is computed. It has only places in `waits` for which all ranks have traced
            times.
    """

    seconds: Mapping[ModulePhase, RankSeries]
    repeated: Mapping[ModulePhase, Repeated] = field(default_factory=dict)
    busy: Mapping[int, RankSeries]
    waiting: RankSeries
    intervals: Mapping[ModulePhase, int]
    waits: frozenset[ModulePhase]
    staged: bool
    patterns: Mapping[str, str] = field(default_factory=dict)
    are_quartiles: bool = False
    async_starts: Collection[ModulePhase] = frozenset()
    exposed_on_all_ranks: Mapping[ModulePhase, Mapping[int, float]] = field(default_factory=dict)

    @property
    def ranks(self) -> Sequence[int]:
        return tuple(self.waiting)

    @property
    def steps(self) -> int:
        """Number of compared steps."""
        return len(next(iter(self.waiting.values()), ()))

    @cached_property
    def step_seconds(self) -> float:
        lengths = RankSeries.sum_of([self.waiting, *self.busy.values()], self.ranks)
        steps = list(chain.from_iterable(lengths.values()))
        return statistics.median(steps) if steps else 0.0

    def busy_in_all(self) -> RankSeries:
        """Return the busy time of each rank in each step, summed over all intervals."""
        return RankSeries.sum_of(self.busy.values(), self.ranks)


def repeated_places(
    intervals: Mapping[ModulePhase, int], patterns: Mapping[str, str]
) -> dict[ModulePhase, list[ModulePhase]]:
    """Group the places (modules in a phase) whose modules have the same name pattern.

    The key of a group is a place whose name is the pattern, such as `layers.*.mlp`. Places without
    a similar place are left out.
    """

    def pattern_of(place: ModulePhase) -> ModulePhase:
        return ModulePhase(patterns.get(place.fqn, place.fqn), place.phase)

    groups = grouped(intervals, pattern_of)
    return {pattern: members for pattern, members in groups.items() if len(members) > 1}


def intervals_of(
    places: Iterable[ModulePhase], waits: Collection[ModulePhase]
) -> dict[ModulePhase, int]:
    """Return, for each place where ranks do not wait, the number of the interval that contains it.

    A place is a module in a phase, and an interval is the part of a step between two collectives.
    `places` has modules in the order of their forward pass. Backward is assumed to run in reverse
    order. If a step does not end with a collective, its last interval continues in the next step,
    so the places in it get the number of the first interval, 0.
    """
    ordered = _in_execution_order(places)
    intervals = {}
    number = 0
    for place in ordered:
        if place in waits:
            number += 1
        else:
            intervals[place] = number
    if ordered and ordered[-1] not in waits:
        for place, interval in intervals.items():
            if interval == number:
                intervals[place] = 0
    return intervals


def is_in_model(place: ModulePhase) -> bool:
    """Return whether a place is a module in a phase, and not a phase outside the model."""
    return bool(place.fqn) or place.phase not in OUTSIDE


def _in_execution_order(places: Iterable[ModulePhase]) -> list[ModulePhase]:
    outside = {}
    forward = []
    backward = []
    for place in places:
        if not is_in_model(place):
            outside[place.phase] = place
        elif place.phase == "forward":
            forward.append(place)
        else:
            backward.append(place)
    before = [outside[phase] for phase in BEFORE_MODULES if phase in outside]
    after = [outside[phase] for phase in AFTER_MODULES if phase in outside]
    return [*before, *forward, *reversed(backward), *after]


def few_intervals(intervals: Mapping[ModulePhase, int], ranks: int) -> dict[ModulePhase, int]:
    """Join neighbouring intervals of the step if a table of all intervals would be too large.

    `intervals` maps each place (a module in a phase) to the index of its interval, and the result
    maps it to the new index. The more `ranks` a table has, the fewer intervals it may have.
    """
    number = max(intervals.values(), default=0) + 1
    most = max(min(MOST_INTERVALS, MOST_SUMS // max(ranks, 1)), FEWEST_INTERVALS)
    if number <= most:
        return dict(intervals)
    joined = {}
    for place, interval in intervals.items():
        joined[place] = interval * most // number
    return joined


def table_of(
    times: Mapping[int, Sequence[Mapping[ModulePhase, float]]],
    waits: Collection[ModulePhase],
    async_starts: Collection[ModulePhase] = (),
    known: Mapping[ModulePhase, Mapping[int, float]] | None = None,
    *,
    patterns: Mapping[str, str] | None = None,
    are_quartiles: bool = False,
) -> RankTable:
    """Make a table from the times of each rank in each step and place (a module in a phase).

    Args:
        times: For each rank, the seconds in each place, for each step. All ranks have the same
            steps.
        waits: See `RankTable.waits`.
        async_starts: See `RankTable.async_starts`.
        known: See `RankTable.exposed_on_all_ranks`.
        patterns: See `RankTable.patterns`.
        are_quartiles: See `RankTable.are_quartiles`.
    """
    seconds: dict[ModulePhase, RankSeries] = {}
    steps_of_ranks = {}
    for rank, steps in times.items():
        steps_of_ranks[rank] = len(steps)
        for place in dict.fromkeys(chain.from_iterable(steps)):
            series = seconds.setdefault(place, RankSeries())
            series[rank] = tuple(step.get(place, 0.0) for step in steps)
    return table_of_series(
        seconds,
        steps_of_ranks,
        waits,
        async_starts,
        known,
        patterns=patterns,
        are_quartiles=are_quartiles,
    )


def table_of_series(
    seconds: Mapping[ModulePhase, RankSeries],
    steps: dict[int, int],
    waits: Collection[ModulePhase],
    async_starts: Collection[ModulePhase] = (),
    known: Mapping[ModulePhase, Mapping[int, float]] | None = None,
    *,
    patterns: Mapping[str, str] | None = None,
    are_quartiles: bool = False,
) -> RankTable:
    """Make a table from the times of all ranks in each place (a module in a phase).

    Args:
        seconds: The times by place.
        steps: The number of steps of each rank.
        waits: See `RankTable.waits`.
        async_starts: See `RankTable.async_starts`.
        known: See `RankTable.exposed_on_all_ranks`.
        patterns: See `RankTable.patterns`.
        are_quartiles: See `RankTable.are_quartiles`.
    """
    waits = frozenset(waits)
    intervals = intervals_of(seconds, waits)
    waiting = RankSeries.zeros(steps)
    busy = {}
    for number in sorted(set(intervals.values())):
        busy[number] = RankSeries.zeros(steps)
    is_staged = False
    for place, series in seconds.items():
        if place.fqn and len(series) < len(steps):
            is_staged = True
        if place in waits:
            waiting.add(series)
        else:
            busy[intervals[place]].add(series)
    return RankTable(
        seconds=seconds,
        repeated=_repeated(seconds, intervals, patterns or {}),
        busy=busy,
        waiting=waiting,
        intervals=intervals,
        waits=waits,
        staged=is_staged,
        patterns=patterns or {},
        are_quartiles=are_quartiles,
        async_starts=frozenset(async_starts) - waits,
        exposed_on_all_ranks=known or {},
    )


def _repeated(
    seconds: Mapping[ModulePhase, RankSeries],
    intervals: Mapping[ModulePhase, int],
    patterns: Mapping[str, str],
) -> dict[ModulePhase, Repeated]:
    repeated = {}
    for pattern, members in repeated_places(intervals, patterns).items():
        parts = []
        member_intervals = set()
        for member in members:
            parts.append(seconds[member])
            member_intervals.add(intervals[member])
        ranks = set(parts[0]).intersection(*parts)
        if len(ranks) > 1:
            repeated[pattern] = Repeated(
                modules=len(members),
                intervals=tuple(sorted(member_intervals)),
                seconds=RankSeries.sum_of(parts, sorted(ranks)),
            )
    return repeated


def rank_stats(table: RankTable, rows: Iterable[str]) -> list[RankStat]:
    """Return the statistics of each place (a module in a phase) that several ranks have.

    The statistics are sorted by module, in the order of `rows`, and then by phase. If several ranks
    are equally slow, the first of them is reported as the slowest. For an even number of ranks, the
    median is the lower of the two middle values.
    """
    order = positions(rows)
    stats = []
    for place, series in table.seconds.items():
        if len(series) > 1 and place.fqn in order:
            stats.append(_stat(place, series.medians(), waits=place in table.waits))
    stats.sort(key=lambda stat: (order[stat.module], _PHASES.index(stat.phase)))
    most_different = sorted(
        range(len(stats)), key=lambda number: (stats[number].waits, -stats[number].spread)
    )
    for number in most_different[WITH_ALL_RANKS:]:
        stats[number] = replace(stats[number], by_rank=None)
    return stats


def _stat(place: ModulePhase, medians: dict[int, float], *, waits: bool) -> RankStat:
    slowest = max(medians, key=medians.__getitem__)
    return RankStat(
        module=place.fqn,
        phase=place.phase,
        low=min(medians.values()),
        median=statistics.median_low(medians.values()),
        high=medians[slowest],
        high_rank=slowest,
        waits=waits,
        by_rank=medians,
    )


def waiting_places(profile: Profile) -> set[ModulePhase]:
    """Return the places (modules in a phase) in which the profile's rank waits for other ranks.

    If the profile does not list these places, returns the places of its collectives. If no step was
    counted, returns all places where ranks might wait.
    """
    if not profile.is_counted and profile.run.world_size > 1:
        return _possible_waits(profile)
    places = set()
    for wait in profile.waits:
        places.add(ModulePhase("", wait.phase) if wait.phase in OUTSIDE else wait)
    if not places:
        for each in profile.communication:
            module = "" if each.phase in OUTSIDE else each.module
            places |= {ModulePhase(module, each.phase), ModulePhase("", each.phase)}
    # The count does not separate gradient clipping from other work outside modules.
    if ModulePhase("", "other") in places:
        places.add(ModulePhase("", "clip"))
    if profile.run.kind == "training":
        places.add(SYNC)
    return places


def _possible_waits(profile: Profile) -> set[ModulePhase]:
    """Return all places where ranks might wait, for a profile in which no step was counted.

    A place is a module in a phase. Under DDP, ranks wait at the end of backward. Otherwise, they
    might wait anywhere in the model.
    """
    if "ddp" in (profile.run.strategy or "").lower():
        return {ModulePhase("", "backward"), SYNC}
    places = {SYNC}
    for row in profile.modules:
        for phase in PHASES:
            places.add(ModulePhase(row, phase))
    return places


def async_starts_in(profile: Profile) -> set[ModulePhase]:
    """Return the places (modules in a phase) that start a collective but do not wait for it.

    The result of the collective is awaited in another place.
    """
    begun = {ModulePhase(each.module, each.phase) for each in profile.communication}
    return begun - waiting_places(profile)


def exposed_by_place(profile: Profile) -> dict[ModulePhase, float | None]:
    """Return, for each place, the seconds per step in which collectives run without computation.

    A place is a module in a phase. A collective is counted in the place where ranks wait for its
    result: in the module that starts it or, if this module does not wait, in the root module in the
    same phase. The seconds include transfer and waiting. They are `None` if the time of any
    collective that is counted in the place is unknown.
    """
    waits = waiting_places(profile)
    exposed: dict[ModulePhase, float | None] = {}
    for each in profile.communication:
        place = ModulePhase(each.module, each.phase)
        if place not in waits:
            place = ModulePhase("", each.phase)
        if place not in waits:
            continue
        before = exposed.get(place, 0.0)
        if before is None or each.exposed_seconds is None:
            exposed[place] = None
        else:
            exposed[place] = before + each.exposed_seconds
    return exposed


def exposed_on_all_ranks(
    waiting: Mapping[int, Mapping[ModulePhase, float | None]],
) -> dict[ModulePhase, dict[int, float]]:
    """Return the exposed seconds of collectives in the places where they are known on all ranks.

    A place is a module in a phase. Exposed seconds are those in which nothing is computed at the
    same time.

    Args:
        waiting: For each rank, the exposed seconds in each place; `None` if unknown.

    Returns:
        For each place, the exposed seconds on each rank.
    """
    by_place: dict[ModulePhase, dict[int, float]] = defaultdict(dict)
    for rank, places in waiting.items():
        for place, seconds in places.items():
            if seconds is not None:
                by_place[place][rank] = seconds
    return {place: seconds for place, seconds in by_place.items() if len(seconds) == len(waiting)}


def quartiles_in(profile: Profile) -> list[dict[ModulePhase, float]]:
    """Return three dictionaries of times by place: lower quartiles, medians and upper quartiles.

    A place is a module in a phase. If the times of single steps are unknown, ranks are compared by
    these three dictionaries, as if they were the times of three steps. Returns an empty list if no
    module was timed.
    """
    stats: dict[ModulePhase, TimingStats] = {}
    for row, module in profile.modules.items():
        for phase in PHASES:
            self_seconds = module.work(phase).self_seconds
            if self_seconds is not None:
                stats[ModulePhase(row, phase)] = self_seconds
    if not any(map(is_in_model, stats)):
        return []
    unprofiled = [step.phases for step in profile.steps if step.is_unprofiled]
    for name in OUTSIDE:
        outside = TimingStats.of(phases[name] for phases in unprofiled if name in phases)
        if outside is not None:
            stats[ModulePhase("", name)] = outside
    low = {}
    median = {}
    high = {}
    for place, each in stats.items():
        low[place] = each.low
        median[place] = each.median
        high[place] = each.high
    return [low, median, high]
