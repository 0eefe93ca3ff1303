"""Find stragglers: the ranks that make the others wait, where and why, and the cost per step.

The unprofiled steps, which are many, show which rank is late, and in which phase of the step. The
module-timing steps show in which module. Where ranks wait for each other within a phase, unprofiled
steps cannot tell which rank was slow in it, and the module-timing steps have to be enough.
"""

import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.profile import Profile
from lflops.profile.records import (
    PASS_PHASES,
    Rank,
    RankActivity,
    RankComparison,
    RankDelay,
    RankWait,
    step_phase,
)
from lflops.profile.series import grouped, summed
from lflops.profile.steps import EVENTS
from lflops.ranks.delay_verdict import NEARLY_ALL, PRESENT, Verdict, judge, step_costs

Cause = Literal["work", "chip", "thread", "preempted"]
"""The reason why a rank takes longer.

It has more work, it has another chip, another thread of its process computes, or the system gave
its core to another process.
"""

# A straggler that costs a smaller share of a step is dropped.
WORTH_SAYING = 0.01
# A module that has at least this share of a cost is named alone.
MOST_OF = 0.6
# Number of steps that are needed to flag a rank.
ENOUGH = 6
# Share of a step. A rank that costs this much in each module-timing step needs fewer steps, and
# ranks that lose this much without a steady straggler alternate.
MUCH = 0.1

# With at least this many unprofiled steps, a straggler is reported from the smaller share of a step
# on, with fewer from the larger one on.
MANY_STEPS, MANY_STEPS_COST, FEW_STEPS_COST = 50, 0.015, 0.04

# Numbers of last unprofiled steps that are compared separately.
RECENT = (64, 32)
# A delay that began during the run is present in this share of the steps since then.
MOST_STEPS_OF = 0.8
# Correlation of lateness with sequence lengths from which on lengths explain the lateness.
CORRELATED = 0.5
# If ranks alternate, each is late in at most this multiple of its share of the steps.
MOST_OF_A_TURN = 1.2

# Share of a step. If threads wait this long for a core, other programs use the machine.
BUSY = 0.05
# A rank with this many times the work of the others is slow because of its work,
MORE_WORK = 1.15
# unless it takes longer than this multiple of what the additional work explains.
AS_MUCH_LONGER = 1.5
# A rank whose core alone is shared waits this many times as long for it as the other ranks.
ALONE = 4.0
# A cause explains at least this share of the seconds by which a rank is late.
EXPLAINED = 0.5

_PASSES = frozenset({"forward", "backward"})
_PHASES_WITHOUT_WORK = frozenset({"data", "transfer", "clip", "optimizer", "other", *EVENTS})


class Straggler(Struct, frozen=True, kw_only=True):
    """A straggler: one rank and the place in which it takes longer than the other ranks.

    Attributes:
        module: `""` is the root, and everything outside modules. `layers.*.mlp` is several modules
            together.
        phase: One of `PHASES`, `data`, `transfer`, `clip`, `validation`, `checkpoint`. `all` is
            everything that the rank's device does, `stage` the rank's part of a pipeline.
        modules: Number of modules.
        seconds_lost: Mean cost per step.
        pattern: `steady` if the rank is slow in nearly every step, `burst` if it is slow in some.
        slow_steps: Number of steps in which the rank is slow; `None` where single steps are
            unknown.
        steps: Number of compared steps; `None` where single steps are unknown.
        seconds: Median time of the slow rank.
        usual: Median time of the other ranks.
        cause: The reason, if it is known.
        work_ratio: Ratio of the rank's work to the work of the others, if that is the cause.
        since: First slow step, if the rank was not slow before.
    """

    module: str
    phase: str
    modules: int
    slow_rank: int
    seconds_lost: float
    pattern: Literal["steady", "intermittent"]
    slow_steps: int | None
    steps: int | None
    seconds: float
    usual: float
    cause: Cause | None = None
    work_ratio: float | None = None
    since: int | None = None

    @property
    def ratio(self) -> float | None:
        """Ratio of the slow rank's time to the time of the others.

        `None` if the others take no time, or if the rank is slow in some steps only.
        """
        if not self.usual or self.pattern != "steady":
            return None
        return self.seconds / self.usual


class Stragglers(Struct, frozen=True, kw_only=True):
    """The time that a run loses because its ranks are not equally fast.

    Attributes:
        rows: The stragglers, the most expensive first.
        waits: The places where ranks wait for another rank, the longest wait first.
        lost_share: Share by which a step would be shorter if all ranks were as fast as the median
            rank; `None` if unknown.
        step_seconds: Median time of a compared step; `None` if ranks were not compared.
        too_few_steps: Number of compared steps, if more are needed to flag a rank.
        is_alternating: Whether ranks alternate: all are late in some steps, none is the slow rank.
        lengths_differ: Whether ranks alternate because the sizes of their batches differ.
        busy_machine: Whether ranks are late because other programs use their processors.
    """

    rows: tuple[Straggler, ...] = ()
    waits: tuple[RankWait, ...] = ()
    lost_share: float | None = None
    step_seconds: float | None = None
    too_few_steps: int | None = None
    is_alternating: bool = False
    lengths_differ: bool = False
    busy_machine: bool = False

    @property
    def worst_share(self) -> float | None:
        """Share of a step that the worst straggler costs; `None` without a straggler."""
        if not self.rows or not self.step_seconds:
            return None
        return self.rows[0].seconds_lost / self.step_seconds


def stragglers(profile: Profile) -> Stragglers:
    """Find the ranks that make the others wait. A profile of one rank has no stragglers."""
    hooked = profile.rank_comparison
    unprofiled = profile.unprofiled_comparison
    shown = _most_telling(hooked, unprofiled)
    if shown is None:
        return Stragglers()
    rows = _all_rows(profile, hooked, unprofiled)
    is_alternating = _is_alternating(rows, unprofiled, len(profile.ranks))
    if is_alternating:
        rows = []
    is_busy = not rows and _is_busy(unprofiled)
    is_alternating = is_alternating and not is_busy
    is_enough = shown.from_quartiles or shown.steps >= ENOUGH or bool(rows)
    least_wait = WORTH_SAYING * shown.seconds
    return Stragglers(
        rows=tuple(rows),
        waits=tuple(wait for wait in shown.waits if wait.seconds >= least_wait),
        lost_share=_lost_share(shown),
        step_seconds=shown.seconds,
        too_few_steps=None if is_enough else shown.steps,
        is_alternating=is_alternating,
        busy_machine=is_busy,
        lengths_differ=is_alternating and _do_lengths_explain(unprofiled),
    )


def _most_telling(
    hooked: RankComparison | None, unprofiled: RankComparison | None
) -> RankComparison | None:
    """Return the comparison of unprofiled steps if it shows all delays, else of hooked steps."""
    if hooked is None or _shows_all_delays(unprofiled):
        return unprofiled
    return hooked


def _shows_all_delays(unprofiled: RankComparison | None) -> bool:
    """Return whether there are enough unprofiled steps and no waits inside the passes."""
    if unprofiled is None or unprofiled.steps < ENOUGH:
        return False
    return _PASSES.isdisjoint(unprofiled.awaited)


def _is_busy(unprofiled: RankComparison | None) -> bool:
    """Return whether the threads of all ranks wait long for a core."""
    if unprofiled is None:
        return False
    return (unprofiled.waited or 0.0) >= BUSY * unprofiled.seconds


def _is_alternating(
    rows: Iterable[Straggler], unprofiled: RankComparison | None, number_of_ranks: int
) -> bool:
    """Return whether the usual step loses much, and no rank is late in most of the steps."""
    if unprofiled is None or not _shows_all_delays(unprofiled):
        return False
    if (unprofiled.usual_lost_seconds or 0.0) < MUCH * unprofiled.seconds:
        return False
    ranks = max(number_of_ranks, 2)
    for row in rows:
        most_steps = MOST_OF_A_TURN * (row.steps or 0) / ranks
        if row.pattern == "steady" or (row.slow_steps or 0) > most_steps:
            return False
    return True


def _do_lengths_explain(unprofiled: RankComparison | None) -> bool:
    return unprofiled is not None and (unprofiled.lengths_explain or 0.0) >= CORRELATED


def _lost_share(shown: RankComparison) -> float | None:
    if shown.lost_seconds is None or not shown.seconds:
        return None
    return min(shown.lost_seconds / shown.seconds, 1.0)


def _all_rows(
    profile: Profile, hooked: RankComparison | None, unprofiled: RankComparison | None
) -> list[Straggler]:
    """Return all stragglers with their causes."""
    ranks = max(len(profile.ranks), 2)
    is_busy = _is_busy(unprofiled)
    found = [_with_cause(row, profile) for row in _rows(hooked, unprofiled, ranks)]
    rows = _merged([row for row in found if not _is_chance(row, is_busy=is_busy)])
    if unprofiled is not None:
        rows += list(_preempted(unprofiled, {row.slow_rank for row in rows}, ranks))
    if hooked is not None:
        rows += list(_larger_stages(hooked, {row.slow_rank for row in rows}, profile))
    return rows


def _rows(
    hooked: RankComparison | None, unprofiled: RankComparison | None, ranks: int
) -> list[Straggler]:
    """Return the stragglers of unprofiled steps, and those that only hooked steps show."""
    hooked_rows: list[Straggler] = []
    enough_hooked: list[Straggler] = []
    if hooked is not None:
        hooked_rows = list(find_stragglers(hooked, ranks))
        enough_hooked = [row for row in hooked_rows if _is_enough(row, hooked)]
    if unprofiled is None or unprofiled.steps < ENOUGH:
        return enough_hooked
    rows = [_with_module(row, hooked_rows) for row in _unprofiled_rows(unprofiled, ranks)]
    known = {(row.slow_rank, step_phase(row.phase)) for row in rows}
    for row in enough_hooked:
        phase = step_phase(row.phase)
        is_hidden = phase in unprofiled.awaited
        is_sure = hooked is not None and hooked.steps >= ENOUGH
        is_known = not known.isdisjoint({(row.slow_rank, phase), (row.slow_rank, "all")})
        if (is_hidden or is_sure) and not is_known:
            rows.append(row)
    return sorted(rows, key=lambda row: -row.seconds_lost)


def _is_chance(row: Straggler, *, is_busy: bool) -> bool:
    """Return whether an intermittent straggler has neither a cause nor a convincing place.

    On a busy machine, the passes of few steps are no convincing place.
    """
    if row.pattern == "steady" or row.cause in {"work", "thread"}:
        return False
    if row.phase == "all":
        return True
    return is_busy and row.phase in _PASSES and (row.steps or 0) < MANY_STEPS


def _is_enough(row: Straggler, hooked: RankComparison) -> bool:
    """Return whether there are enough hooked steps to flag the rank; a high cost needs fewer."""
    if hooked.from_quartiles or hooked.steps >= ENOUGH:
        return True
    is_in_all_steps = row.slow_steps == hooked.steps > 1
    return is_in_all_steps and row.seconds_lost >= MUCH * hooked.seconds


def _unprofiled_rows(unprofiled: RankComparison, ranks: int) -> list[Straggler]:
    """Return the stragglers of all unprofiled steps.

    If there are none, of the last steps: a delay may have begun late.
    """
    rows = _expensive(find_stragglers(unprofiled, ranks), unprofiled)
    for steps in RECENT:
        if not rows and 2 * steps <= unprofiled.steps:
            recent = _last_steps(unprofiled, steps)
            rows = _expensive(find_stragglers(recent, ranks), unprofiled)
    return [_since(row, unprofiled) for row in rows]


def _expensive(rows: Iterable[Straggler], unprofiled: RankComparison) -> list[Straggler]:
    """Return the rows that cost enough for the number of steps."""
    if unprofiled.steps < MANY_STEPS:
        least = FEW_STEPS_COST * unprofiled.seconds
        return [row for row in rows if row.seconds_lost >= least]
    least = MANY_STEPS_COST * unprofiled.seconds
    # An intermittent straggler has already been tested against chance.
    return [row for row in rows if row.pattern == "intermittent" or row.seconds_lost >= least]


def _last_steps(unprofiled: RankComparison, steps: int) -> RankComparison:
    """Return the comparison of the last steps alone."""
    delays = []
    for delay in unprofiled.delays:
        excess = delay.excess[-steps:]
        seconds = max(delay.usual + statistics.median(excess), 0.0)
        delays.append(replace(delay, excess=excess, late=delay.late[-steps:], seconds=seconds))
    return replace(unprofiled, delays=tuple(delays), steps=steps)


def _since(row: Straggler, unprofiled: RankComparison) -> Straggler:
    """Return the row with its first slow step, if the rank became slow during the run."""
    if not unprofiled.at:
        return row
    for delay in unprofiled.delays:
        if delay.rank == row.slow_rank and delay.phase == row.phase:
            limit = (row.seconds - row.usual) / 2
            first = change_point([limit > 0 and excess >= limit for excess in delay.excess])
            if first is None:
                return row
            return replace(row, since=unprofiled.at[first], pattern="steady")
    return row


def change_point(is_slow: Sequence[bool]) -> int | None:
    """Return the index of the step at which a rank becomes slow for good; `None` if it does not.

    Scores each split: a slow step after it and a normal step before it count for it, a slow step
    before it counts against it three times.
    """
    best = None
    best_score = 0
    slow_steps = sum(is_slow)
    slow_before = 0
    for place in range(1, len(is_slow)):
        slow_before += is_slow[place - 1]
        normal_before = place - slow_before
        score = (slow_steps - slow_before) - 3 * slow_before + normal_before
        if best is None or score > best_score:
            best, best_score = place, score
    if best is None:
        return None
    before, after = is_slow[:best], is_slow[best:]
    if len(before) < ENOUGH or len(after) < ENOUGH:
        return None
    is_clear = sum(after) >= MOST_STEPS_OF * len(after) and sum(before) <= len(before) / 10
    return best if is_clear else None


def _with_module(row: Straggler, hooked_rows: Sequence[Straggler]) -> Straggler:
    """Return the row with the module that explains most of it in hooked steps, if there is one."""
    cost_per_slow_step = row.seconds_lost * (row.steps or 1) / (row.slow_steps or 1)
    for hooked in hooked_rows:
        is_in_phase = step_phase(hooked.phase) == row.phase or row.phase == hooked.phase == "all"
        if hooked.slow_rank != row.slow_rank or not is_in_phase:
            continue
        excess = hooked.seconds - hooked.usual
        if hooked.phase not in PASS_PHASES or excess < MOST_OF * cost_per_slow_step:
            continue
        row = replace(row, module=hooked.module, phase=hooked.phase, modules=hooked.modules)
        if hooked.pattern == row.pattern:
            row = replace(row, seconds=hooked.seconds, usual=hooked.usual)
        return row
    return row


def _merged(rows: Iterable[Straggler]) -> list[Straggler]:
    """Return one row for each rank and place, with the sum of the costs.

    Several phases of a rank may be slow for one cause that is in no single place.
    """
    merged: dict[tuple[int, str, str], Straggler] = {}
    for row in rows:
        key = row.slow_rank, row.module, row.phase
        if key in merged:
            first = merged[key]
            merged[key] = replace(first, seconds_lost=first.seconds_lost + row.seconds_lost)
        else:
            merged[key] = row
    return list(merged.values())


def _preempted(
    unprofiled: RankComparison, flagged: Collection[int], ranks: int
) -> Iterator[Straggler]:
    """Yield the ranks whose core is shared with another process during the whole run.

    Sharing a core delays some steps by much and others not at all, so it is neither steady nor
    intermittent. But the system counts the time that a thread waits for its core.
    """
    if unprofiled.steps < MANY_STEPS:
        return
    activity = {each.rank: each for each in unprofiled.activity}
    for delay in unprofiled.delays:
        if delay.phase != "all" or delay.rank in flagged or delay.rank not in activity:
            continue
        parts = activity[delay.rank].waited_by_part
        if not parts:
            continue
        waited = statistics.fmean(parts)
        cost = min(waited, statistics.fmean(delay.excess))
        if cost >= BUSY * unprofiled.seconds and _is_preempted(delay, parts, unprofiled, ranks):
            steps = sum(seconds >= PRESENT * waited for seconds in delay.excess)
            verdict = Verdict(pattern="steady", seconds=cost, steps=steps)
            yield replace(_row(delay, verdict, unprofiled), cause="preempted")


def _is_preempted(
    delay: RankDelay, waited_by_part: Sequence[float], unprofiled: RankComparison, ranks: int
) -> bool:
    """Return whether this rank alone waits for its core, throughout the run and most of its delay.

    If the other ranks wait for their cores too, it is chance which rank waits longest.
    """
    waited = statistics.fmean(waited_by_part)
    late = statistics.fmean(delay.excess)
    waited_by_others = (unprofiled.waited or 0.0) - waited / ranks
    parts = sum(part >= PRESENT * waited for part in waited_by_part)
    return (
        waited >= EXPLAINED * late
        and waited >= ALONE * waited_by_others
        and parts >= NEARLY_ALL * len(waited_by_part)
    )


def _larger_stages(
    hooked: RankComparison, flagged: Collection[int], profile: Profile
) -> Iterator[Straggler]:
    """Yield the ranks of a pipeline that are slow because they have more layers."""
    for delay in hooked.delays:
        if delay.phase != "stage" or delay.rank in flagged:
            continue
        verdict = judge(delay, hooked, len(profile.ranks))
        if verdict is None or verdict.seconds < WORTH_SAYING * hooked.seconds:
            continue
        row = _with_cause(_row(delay, verdict, hooked), profile)
        if row.cause == "work" and _is_enough(row, hooked):
            yield row


def _with_cause(row: Straggler, profile: Profile) -> Straggler:
    if row.phase in _PHASES_WITHOUT_WORK:
        return row
    work_ratio = _explaining_work_ratio(row, profile)
    if work_ratio is not None:
        return replace(row, cause="work", work_ratio=work_ratio)
    cause = _cause(row.slow_rank, profile)
    # Another chip and a lost core slow everything, so they cannot explain a single module.
    if cause is None or (row.module and cause in {"chip", "preempted"}):
        return row
    return replace(row, cause=cause, module="", phase="all", modules=1)


def _explaining_work_ratio(row: Straggler, profile: Profile) -> float | None:
    """Return how many times the others' work the rank has, if that explains its time."""
    ratio = _macs_ratio(profile.ranks, row.slow_rank)
    if ratio is None or ratio < MORE_WORK:
        activity = _activity(row.slow_rank, profile)
        ratio = None if activity is None else activity.units_ratio
    if ratio is None or ratio < MORE_WORK:
        return None
    if row.ratio is not None and row.ratio > AS_MUCH_LONGER * ratio:
        return None
    return ratio


def _cause(rank: int, profile: Profile) -> Cause | None:
    """Return the cause of a rank's delay other than more work, if it is known."""
    devices = {each.rank: each.device for each in profile.ranks}
    device = devices.pop(rank, None)
    other_devices = {each for each in devices.values() if each is not None}
    if device is not None and other_devices and device not in other_devices:
        return "chip"
    activity = _activity(rank, profile)
    if activity is None or not activity.late:
        return None
    other_threads = activity.other_threads or 0.0
    waited = activity.waited or 0.0
    if max(other_threads, waited) < EXPLAINED * activity.late:
        return None
    # While a process waits for a core, its other threads run, so threads must explain more.
    return "thread" if other_threads >= waited else "preempted"


def _activity(rank: int, profile: Profile) -> RankActivity | None:
    compared = profile.unprofiled_comparison
    if compared is None:
        return None
    return next((each for each in compared.activity if each.rank == rank), None)


def _macs_ratio(ranks: Iterable[Rank], rank: int) -> float | None:
    """Return the ratio of a rank's MACs to the median of the others' MACs."""
    macs = {each.rank: each.macs for each in ranks}
    own = macs.pop(rank, None)
    others = [each for each in macs.values() if each is not None]
    usual = statistics.median(others) if others else 0
    if own is None or not usual:
        return None
    return own / usual


def find_stragglers(compared: RankComparison, ranks: int) -> tuple[Straggler, ...]:
    """Return the excesses that are more than noise, the most expensive first."""
    delays = [delay for delay in compared.delays if delay.phase != "stage"]
    rows: list[Straggler] = []
    for of_rank in grouped(delays, attrgetter("rank")).values():
        rows += _culprits_of_rank(of_rank, compared, ranks)
    return tuple(sorted(rows, key=lambda row: -row.seconds_lost))


class _Judged(Struct, frozen=True):
    """An excess that is more than noise, and its verdict."""

    delay: RankDelay
    verdict: Verdict

    @property
    def seconds(self) -> float:
        return self.verdict.seconds


def _culprits_of_rank(
    delays: Sequence[RankDelay], compared: RankComparison, ranks: int
) -> Iterator[Straggler]:
    """Yield the stragglers of one rank one after the other.

    The lateness that the worst one explains is subtracted before the next one is searched.
    """
    left = list(delays)
    while left:
        judged = _judged(left, compared, ranks)
        if not judged:
            return
        found = _most_specific(judged)
        yield _row(found.delay, found.verdict, compared)
        explained = [max(cost, 0.0) for cost in step_costs(found.delay)]
        remaining = []
        for delay in left:
            if delay is found.delay:
                continue
            if set(delay.intervals).isdisjoint(found.delay.intervals):
                remaining.append(delay)
            else:
                remaining.append(_less(delay, explained, found.delay))
        left = remaining


def _judged(delays: Iterable[RankDelay], compared: RankComparison, ranks: int) -> list[_Judged]:
    """Return the delays that are more than noise and cost enough."""
    judged = []
    for delay in delays:
        verdict = judge(delay, compared, ranks)
        if verdict is not None and verdict.seconds >= WORTH_SAYING * compared.seconds:
            judged.append(_Judged(delay, verdict))
    return judged


def _most_specific(judged: Sequence[_Judged]) -> _Judged:
    """Return the worst excess, or the single place that has most of it."""
    worst = max(judged, key=attrgetter("seconds"))
    alone = [
        each
        for each in judged
        if each.seconds >= MOST_OF * worst.seconds and _stands_out(each.delay, worst.delay)
    ]
    return max(alone, key=attrgetter("seconds"), default=worst)


def _stands_out(delay: RankDelay, several: RankDelay) -> bool:
    """Return whether a single place is slowed at least twice as much as the rest of `several`."""
    if delay.modules > 1 or delay.phase == "all":
        return False
    rest_usual = several.usual - delay.usual
    if several.phase != "all" or rest_usual <= 0:
        return True
    excess = statistics.fmean(delay.excess)
    rest_excess = statistics.fmean(several.excess) - excess
    return rest_excess * delay.usual <= excess / 2 * rest_usual


def _less(delay: RankDelay, explained: Sequence[float], found: RankDelay) -> RankDelay:
    """Return the delay without the explained lateness.

    If `found` is one of several modules of the delay, its excess is subtracted too.
    """
    late = tuple(late - known for late, known in zip(delay.late, explained, strict=True))
    if not _is_one_of(found, delay):
        return replace(delay, late=late)
    return replace(
        delay,
        late=late,
        excess=tuple(all_ - one for all_, one in zip(delay.excess, found.excess, strict=True)),
        seconds=delay.seconds - found.seconds,
        usual=delay.usual - found.usual,
    )


def _is_one_of(single: RankDelay, several: RankDelay) -> bool:
    """Return whether the single module matches the pattern of several modules in the same phase."""
    if several.modules <= single.modules or single.phase != several.phase:
        return False
    names = single.module.split(".")
    pattern = several.module.split(".")
    if len(names) != len(pattern):
        return False
    return all(part in {name, "*"} for name, part in zip(names, pattern, strict=True))


def _row(delay: RankDelay, verdict: Verdict, compared: RankComparison) -> Straggler:
    are_steps_known = not compared.from_quartiles
    return Straggler(
        module=delay.module,
        phase=delay.phase,
        modules=delay.modules,
        slow_rank=delay.rank,
        seconds_lost=verdict.seconds,
        pattern=verdict.pattern,
        slow_steps=verdict.steps if are_steps_known else None,
        steps=compared.steps if are_steps_known else None,
        seconds=delay.seconds,
        usual=delay.usual,
    )


def slowest_first(profile: Profile, found: Stragglers) -> tuple[int, ...]:
    """Return the ranks, slowest first.

    Ranks are ordered by their cost as stragglers, then by how long others waited for them, by their
    excess in all places, and by the length of their step. Ranks that did not report come last.
    """
    cost = summed((row.slow_rank, row.seconds_lost) for row in found.rows)
    waited_for = summed((wait.for_rank, wait.seconds) for wait in found.waits)
    excess: dict[int, float] = {}
    for stat in profile.rank_stats:
        if stat.waits or stat.by_rank is None:
            continue
        for rank, seconds in stat.by_rank.items():
            excess[rank] = excess.get(rank, 0.0) + seconds - stat.median

    def order(rank: Rank) -> tuple[float, ...]:
        number = rank.rank
        has_reported = rank.status in {"ok", "late"} or number in excess
        step_seconds = rank.step.median if rank.step else 0.0
        return (
            not has_reported,
            -cost.get(number, 0.0),
            -waited_for.get(number, 0.0),
            -excess.get(number, 0.0),
            -step_seconds,
            number,
        )

    return tuple(rank.rank for rank in sorted(profile.ranks, key=order))
