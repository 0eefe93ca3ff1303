"""Stragglers: which rank makes the others wait, in what, why, and what that costs a step.

The clean steps, which are many, show which rank is late, and in which phase of the step. The hooked
steps show in which module. Where ranks wait for each other within a phase, clean steps do not show
which was slow in it, and the hooked steps have to be enough.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.profile import Profile
from lflops.profile.records import (
    PASS_PHASES,
    Rank,
    RankComparison,
    RankDelay,
    RankWait,
    step_phase,
)
from lflops.profile.series import grouped, summed
from lflops.profile.steps import EVENTS

# median absolute deviations to a standard deviation
ROBUST = 1.4826
# standard errors of a mean to that of a median
OF_MEDIAN = 1.2533
# of the steps: in so many a steady excess is there
NEARLY_ALL = 0.8
# of the median: an excess of so much is there
THERE = 0.3
# standard errors that a steady excess is beyond 0
SIGMAS = 4.0
# standard deviations of the other ranks beyond the largest that so many ranks reach by chance
SIGMAS_OF_RANKS = 4.0
# of the steps: the share in which bursts come
LEAST_BURSTS, MOST_BURSTS = 0.01, 0.9

FEWEST_BURSTS = 3

# times the largest excess in the other steps, and their median difference in either direction
FAR_ABOVE = 2.0
# bursts that a run may have by chance, over all ranks and places
BY_CHANCE = 0.01
# of the step: a shorter place is hit by chance as often as one of this length
LEAST_EXPOSED = 0.02
# each size of `RankComparison.jolts` to the one before
JOLT_RATIO = 2**-0.5
# of the step: what is smaller is no burst
LEAST_BURST = 0.01
# of the median burst: the smallest one has at least so much
EVEN = 0.4


class Verdict(Struct, frozen=True, kw_only=True):
    """An excess that is more than noise."""

    # `steady` is in nearly every step, `burst` in some of them
    pattern: Literal["steady", "burst"]
    # what it costs a step: the median of a steady one, so that one slow step of the machine is not
    # its fault; else the mean
    seconds: float
    # in how many steps it is there
    steps: int


def costs(excess: RankDelay) -> list[float]:
    """The part of the excess that makes the rank late, step by step; negative where there is none."""
    return [min(each) for each in zip(excess.excess, excess.late, strict=True)]


def judge(excess: RankDelay, compared: RankComparison, ranks: int) -> Verdict | None:
    """The verdict.

    `None` where the excess can be noise: the slowest of many `ranks` is slow by chance.
    """
    lost = costs(excess)
    if _is_steady(excess, ranks):
        there = sum(each >= THERE * statistics.median(excess.excess) for each in excess.excess)
        return Verdict(pattern="steady", seconds=statistics.median(lost), steps=there)
    # its threads take the processor when the last rank has come
    if excess.begins_collective:
        return None
    bursts = _bursts(excess.excess, least=LEAST_BURST * compared.seconds)
    if (
        not bursts
        or _by_chance(excess, bursts, compared, ranks) * ranks * max(compared.places, 1)
        >= BY_CHANCE
    ):
        return None
    costly = [
        cost for cost, seconds in zip(lost, excess.excess, strict=True) if seconds >= bursts[-1]
    ]
    return Verdict(
        pattern="burst",
        seconds=len(bursts) * statistics.median(costly) / len(lost),
        steps=len(bursts),
    )


def _is_steady(excess: RankDelay, ranks: int) -> bool:
    median = statistics.median(excess.excess)
    if median <= 0 or sum(each >= THERE * median for each in excess.excess) < NEARLY_ALL * len(
        excess.excess
    ):
        return False
    deviation = ROBUST * statistics.median(abs(each - median) for each in excess.excess)
    if median < SIGMAS * OF_MEDIAN * deviation / math.sqrt(len(excess.excess)):
        return False
    return (
        excess.noise is None
        or median >= (SIGMAS_OF_RANKS + math.sqrt(2 * math.log(ranks))) * excess.noise
    )


def _bursts(seconds: Sequence[float], *, least: float) -> Sequence[float]:
    """The excesses that are far above the others and near each other, in falling order.

    None where there are no such.
    """
    ordered = sorted(seconds, reverse=True)
    fewest = max(FEWEST_BURSTS, math.ceil(LEAST_BURSTS * len(seconds)))
    for number in range(math.floor(MOST_BURSTS * len(seconds)), fewest - 1, -1):
        bursts, rest = ordered[:number], ordered[number:]
        usual = max(rest[0], statistics.median(map(abs, rest)))
        if bursts[-1] > max(FAR_ABOVE * usual, EVEN * statistics.median(bursts), least):
            return bursts
    return ()


def _by_chance(
    excess: RankDelay, bursts: Sequence[float], compared: RankComparison, ranks: int
) -> float:
    """The probability of so many bursts in one place, in proportion to its time, by chance.

    Bursts in a row are one.
    """
    smallest, steps = bursts[-1], len(excess.excess)
    larger = [
        number
        for number in range(len(compared.jolts))
        if compared.seconds * JOLT_RATIO**number <= smallest
    ]
    rate = 0.0
    if larger and compared.jolted_seconds:
        size = compared.seconds * JOLT_RATIO ** larger[0]
        elsewhere = max(compared.jolts[larger[0]] - sum(each >= size for each in excess.excess), 0)
        rate = (
            (elsewhere + 0.5)
            / compared.jolted_seconds
            * max(excess.usual, LEAST_EXPOSED * compared.seconds)
        )
    here = sum(each >= smallest for each in excess.largest_of_others) / (steps * max(ranks - 1, 1))
    rate = min(max(rate, here), 1.0)
    begins = sum(
        now >= smallest and before < smallest
        for before, now in itertools.pairwise((0.0, *excess.excess))
    )
    return sum(
        math.comb(steps, k) * rate**k * (1 - rate) ** (steps - k) for k in range(begins, steps + 1)
    )


Cause = Literal["work", "chip", "thread", "preempted"]
"""Why a rank takes longer.

More work, another chip, another thread of its process, or the system, which gave its core to
somebody else.
"""

# of the step: what costs less is dropped
WORTH_SAYING = 0.01
# of what several modules cost: one that costs so much is named alone
MOST_OF = 0.6
# steps to accuse a rank by
ENOUGH = 6

MUCH = 0.1
"""Of the step: what costs so much in each hooked step needs fewer.

And ranks of which none is slow take turns if they lose so much.
"""

MANY_STEPS, MANY_STEPS_COST, FEW_STEPS_COST = 50, 0.015, 0.04
"""From so many clean steps on a culprit may cost so little of the step.

Before, no less than the last.
"""

# clean steps at the end that are looked at by themselves
RECENT = (64, 32)
# of the steps from the one on at which a delay begins
MOST_STEPS_OF = 0.8
# lateness with lengths: from here on the one comes of the other
CORRELATED = 0.5
MOST_OF_A_TURN = (
    # times its share of the steps that a rank may be late in, where ranks take turns
    1.2
)
# of the step: a rank that waits so long for its core is on a machine that runs more than the
# training
BUSY = 0.05
# times the others' work: from here on it is a cause
MORE_WORK = 1.15
AS_MUCH_LONGER = (
    # times what more work explains: a rank that takes longer than that is slow too
    1.5
)
# times the other ranks' wait for their cores: so much longer a rank waits whose core alone is
# shared
ALONE = 4.0
# of the seconds that a rank is late
EXPLAINED = 0.5

_BLIND = frozenset({"forward", "backward"})
_OF_NO_WORK = frozenset({"data", "transfer", "clip", "optimizer", "other", *EVENTS})


class Row(Struct, frozen=True, kw_only=True):
    """A culprit: one rank, and what it takes longer for than the other ranks."""

    # `""` is the root, and what is in no module. `layers.*.mlp` is several modules together.
    module: str
    # One of `PHASES`, `data`, `transfer`, `clip`, `validation`, `checkpoint`. `all` is all that the
    # rank's device does, `stage` its part of a pipeline.
    phase: str
    modules: int
    slow_rank: int
    # what it costs a step, the mean over the steps
    seconds_lost: float
    # `steady` is in nearly every step, `burst` in some of them
    pattern: Literal["steady", "burst"]
    # in how many steps it is there
    slow_steps: int | None
    # of how many; `None` where single steps are unknown
    steps: int | None
    # the slow rank's median
    seconds: float
    # the other ranks' median
    usual: float
    # Why, where that is known: it has more `work` or another `chip`, a `thread` of its process
    # computes, or it was `preempted`.
    cause: Cause | None = None
    # its work to that of the others, where that is the cause
    work_ratio: float | None = None
    # the step from which on it is there, where it was not there before
    since: int | None = None

    @property
    def ratio(self) -> float | None:
        """The slow rank's time to the others'.

        `None` where they take none, or where it comes in bursts.
        """
        return self.seconds / self.usual if self.usual and self.pattern == "steady" else None


class Stragglers(Struct, frozen=True, kw_only=True):
    """What a run loses because its ranks are not equally fast."""

    # the culprits, the one that costs most first
    rows: tuple[Row, ...] = ()
    # where ranks wait for another, the longest first
    waits: tuple[RankWait, ...] = ()
    lost_share: float | None = (
        # the share that a step would be shorter by with all ranks as fast as the median one; `None`
        # is unknown
        None
    )
    step_seconds: float | None = (
        # the median compared step's; `None` where ranks were not compared at all
        None
    )
    too_few_steps: int | None = (
        # how many steps there are to compare, where more are needed to accuse a rank
        None
    )
    # whether ranks are late in turn, by about as much, so that none of them is the slow one
    take_turns: bool = False
    # whether what their batches hold explains that they take turns
    lengths_differ: bool = False
    # whether ranks are late in turn, or wait for each other, because the system preempted all of
    # them
    busy_machine: bool = False

    @property
    def worst_share(self) -> float | None:
        """What share of the compared step the worst culprit costs; `None` without one."""
        return (
            self.rows[0].seconds_lost / self.step_seconds
            if self.rows and self.step_seconds
            else None
        )


def stragglers(profile: Profile) -> Stragglers:
    """Find who makes the ranks of a merged profile wait. Of one rank there are no rows."""
    hooked, clean = profile.rank_comparison, profile.unprofiled_comparison
    ranks = max(len(profile.ranks), 2)
    sees_all = clean is not None and clean.steps >= ENOUGH and not _BLIND & set(clean.awaited)
    shown = clean if sees_all or hooked is None else hooked
    if shown is None:
        return Stragglers()
    found = (_with_cause(row, profile) for row in _rows(hooked, clean, ranks))
    is_busy = clean is not None and (clean.waited or 0.0) >= BUSY * clean.seconds
    rows = _once([row for row in found if not _is_chance(row, is_busy=is_busy)])
    rows += () if clean is None else _preempted(clean, {row.slow_rank for row in rows}, ranks)
    rows += (
        () if hooked is None else _larger_stages(hooked, {row.slow_rank for row in rows}, profile)
    )
    lost = (
        None
        if shown.lost_seconds is None or not shown.seconds
        else min(shown.lost_seconds / shown.seconds, 1.0)
    )
    loses = (
        sees_all and clean is not None and (clean.usual_lost_seconds or 0.0) >= MUCH * clean.seconds
    )
    # The usual step loses much, and each of these ranks is late in no more of them than its turn:
    # none is the slow one.
    turns = loses and all(
        row.pattern == "burst"
        and (row.slow_steps or 0) * ranks <= MOST_OF_A_TURN * (row.steps or 0)
        for row in rows
    )
    rows = [] if turns else rows
    is_busy = is_busy and not rows
    is_known = shown.from_quartiles or shown.steps >= ENOUGH or rows
    return Stragglers(
        rows=tuple(rows),
        waits=tuple(wait for wait in shown.waits if wait.seconds >= WORTH_SAYING * shown.seconds),
        lost_share=lost,
        step_seconds=shown.seconds,
        too_few_steps=None if is_known else shown.steps,
        take_turns=turns and not is_busy,
        busy_machine=is_busy,
        lengths_differ=turns
        and not is_busy
        and clean is not None
        and (clean.lengths_explain or 0.0) >= CORRELATED,
    )


def _rows(hooked: RankComparison | None, clean: RankComparison | None, ranks: int) -> list[Row]:
    """The culprits of the clean steps, with their modules, and of the hooked steps those that they do not see, if these are enough."""
    by_module = [] if hooked is None else list(culprits(hooked, ranks))
    if clean is None or clean.steps < ENOUGH:
        return [row for row in by_module if _is_enough(row, hooked)]
    rows = [_with_module(row, by_module) for row in _of_clean(clean, ranks)]
    of_hooked = [
        row
        for row in by_module
        if _is_enough(row, hooked)
        and (
            step_phase(row.phase) in clean.awaited
            or (hooked is not None and hooked.steps >= ENOUGH)
        )
        and not any(
            each.slow_rank == row.slow_rank
            and step_phase(each.phase) in {step_phase(row.phase), "all"}
            for each in rows
        )
    ]
    return sorted([*rows, *of_hooked], key=lambda row: -row.seconds_lost)


def _is_chance(row: Row, *, is_busy: bool) -> bool:
    """Whether it is a burst without a cause of the rank's own.

    In no place, or on a busy machine in what it computes in few steps.
    """
    if row.pattern == "steady" or row.cause in {"work", "thread"}:
        return False
    return row.phase == "all" or (is_busy and row.phase in _BLIND and (row.steps or 0) < MANY_STEPS)


def _is_enough(row: Row, hooked: RankComparison | None) -> bool:
    """Whether the hooked steps are enough to accuse; few of them are for what costs much."""
    if hooked is None or hooked.from_quartiles or hooked.steps >= ENOUGH:
        return True
    return row.slow_steps == hooked.steps > 1 and row.seconds_lost >= MUCH * hooked.seconds


def _of_clean(clean: RankComparison, ranks: int) -> tuple[Row, ...]:
    """The culprits of all clean steps.

    Where there are none, of the last ones: a delay may have begun late.
    """
    found = _worth(culprits(clean, ranks), clean)
    for steps in RECENT if not found else ():
        if 2 * steps <= clean.steps and (
            found := _worth(culprits(_last(clean, steps), ranks), clean)
        ):
            break
    return tuple(_since(row, clean) for row in found)


def _worth(rows: Iterable[Row], clean: RankComparison) -> tuple[Row, ...]:
    # bursts have been held against chance
    if clean.steps >= MANY_STEPS:
        return tuple(
            row
            for row in rows
            if row.pattern == "burst" or row.seconds_lost >= MANY_STEPS_COST * clean.seconds
        )
    return tuple(row for row in rows if row.seconds_lost >= FEW_STEPS_COST * clean.seconds)


def _last(clean: RankComparison, steps: int) -> RankComparison:
    """The same of the last steps alone."""
    excesses = []
    for each in clean.excesses:
        rest = each.excess[-steps:]
        seconds = max(each.usual + statistics.median(rest), 0.0)
        excesses.append(replace(each, excess=rest, late=each.late[-steps:], seconds=seconds))
    return replace(clean, excesses=tuple(excesses), steps=steps)


def _since(row: Row, clean: RankComparison) -> Row:
    """The row with the step at which it begins, if it is there in nearly all steps from one on, and was not before."""
    each = next(
        (each for each in clean.excesses if (each.rank, each.phase) == (row.slow_rank, row.phase)),
        None,
    )
    if each is None or not clean.at:
        return row
    there = [value >= (row.seconds - row.usual) / 2 > 0 for value in each.excess]
    first = max(
        range(1, len(there)),
        key=lambda place: sum(there[place:]) - 3 * sum(there[:place]) + there[:place].count(False),
        default=0,
    )
    before, after = there[:first], there[first:]
    is_new = (
        len(before) >= ENOUGH
        and len(after) >= ENOUGH
        and sum(after) >= MOST_STEPS_OF * len(after)
        and sum(before) <= len(before) / 10
    )
    return replace(row, since=clean.at[first], pattern="steady") if is_new else row


def _with_module(row: Row, by_module: Sequence[Row]) -> Row:
    """The row with the module that hooked steps name for the same rank and phase, if that explains most of it."""
    typical = (
        row.seconds_lost * (row.steps or 1) / (row.slow_steps or 1)
        # in the steps in which it is there
    )
    for each in by_module:
        same = each.slow_rank == row.slow_rank and (
            step_phase(each.phase) == row.phase or row.phase == "all" == each.phase
        )
        if same and each.phase in PASS_PHASES and each.seconds - each.usual >= MOST_OF * typical:
            of_module = {name: getattr(each, name) for name in ("module", "phase", "modules")}
            return replace(
                row,
                **of_module,
                **(
                    {"seconds": each.seconds, "usual": each.usual}
                    if each.pattern == row.pattern
                    else {}
                ),
            )
    return row


def _once(rows: Iterable[Row]) -> list[Row]:
    """Each rank and place once, with all that it costs.

    Several phases of a rank may be slow for a cause that is in no single place.
    """
    found: dict[tuple[int, str, str], Row] = {}
    for row in rows:
        key = row.slow_rank, row.module, row.phase
        known = found.get(key)
        found[key] = (
            row
            if known is None
            else replace(known, seconds_lost=known.seconds_lost + row.seconds_lost)
        )
    return list(found.values())


def _preempted(clean: RankComparison, named: Collection[int], ranks: int) -> Iterator[Row]:
    """Ranks whose core is shared with another process all through the run."""
    # That delays a step by much and another one not at all, so it is neither steady nor a burst.
    # But the system counts it. Where the other ranks wait for their cores too, the machine is busy,
    # and it is chance who waits longest.
    by_rank = {each.rank: each.waited_by_part for each in clean.activity}
    for each in clean.excesses:
        parts = by_rank.get(each.rank, ())
        if each.phase != "all" or each.rank in named or not parts or clean.steps < MANY_STEPS:
            continue
        waited, late = statistics.fmean(parts), statistics.fmean(each.excess)
        is_always_there = sum(part >= THERE * waited for part in parts) >= NEARLY_ALL * len(parts)
        usual = (clean.waited or 0.0) - waited / ranks
        if (
            min(waited, late) >= BUSY * clean.seconds
            and waited >= max(EXPLAINED * late, ALONE * usual)
            and is_always_there
        ):
            steps = sum(seconds >= THERE * waited for seconds in each.excess)
            found = Verdict(pattern="steady", seconds=min(waited, late), steps=steps)
            yield replace(_row(each, found, clean), cause="preempted")


def _larger_stages(
    hooked: RankComparison, named: Collection[int], profile: Profile
) -> Iterator[Row]:
    """Ranks of a pipeline that were given more layers than the others, each as fast as theirs."""
    for each in hooked.excesses:
        verdict = (
            judge(each, hooked, len(profile.ranks))
            if each.phase == "stage" and each.rank not in named
            else None
        )
        row = None if verdict is None else _with_cause(_row(each, verdict, hooked), profile)
        if (
            row is not None
            and row.cause == "work"
            and row.seconds_lost >= WORTH_SAYING * hooked.seconds
            and _is_enough(row, hooked)
        ):
            yield row


def _with_cause(row: Row, profile: Profile) -> Row:
    cause, work_ratio = (
        (None, None) if row.phase in _OF_NO_WORK else _cause_of(profile, row.slow_rank, row.ratio)
    )
    # that would be in no single place
    if cause in {"chip", "preempted"} and row.module:
        cause = None
    row = replace(row, cause=cause, work_ratio=work_ratio)
    return row if cause in {None, "work"} else replace(row, module="", phase="all", modules=1)


def _cause_of(
    profile: Profile, rank: int, ratio: float | None
) -> tuple[Cause | None, float | None]:
    """The cause, if known, and for more work how many times that of the others.

    `ratio`: the rank's time to theirs, if always the same.
    """
    compared = profile.unprofiled_comparison
    activity = (
        next((each for each in compared.activity if each.rank == rank), None) if compared else None
    )
    work = _work_ratio({each.rank: each.macs for each in profile.ranks}, rank)
    if work is None or work < MORE_WORK:
        work = None if activity is None else activity.units_ratio
    if work is not None and work >= MORE_WORK and (ratio is None or ratio <= AS_MUCH_LONGER * work):
        return "work", work
    devices = {each.rank: each.device for each in profile.ranks}
    mine, others = (
        devices.pop(rank, None),
        {device for device in devices.values() if device is not None},
    )
    if mine is not None and others and mine not in others:
        return "chip", None
    if activity is None or not activity.late:
        return None, None
    explained: dict[Cause, float] = {
        "thread": activity.other_threads or 0.0,
        "preempted": activity.waited or 0.0,
    }
    cause = max(
        explained,
        key=explained.__getitem__,
        # a process that waits for a core has other threads that run meanwhile
    )
    return (cause if explained[cause] >= EXPLAINED * activity.late else None), None


def _work_ratio(macs: Mapping[int, int | None], rank: int) -> float | None:
    """The rank's MACs to the median of the others'."""
    mine, others = (
        macs.get(rank),
        [each for other, each in macs.items() if other != rank and each is not None],
    )
    usual = statistics.median(others) if others else 0
    return mine / usual if mine is not None and usual else None


def culprits(compared: RankComparison, ranks: int) -> tuple[Row, ...]:
    """The excesses that are more than noise and cost more than a hundredth of the step, the worst first."""
    # One after the other: what the worst one explains of a rank's lateness is not explained once
    # more by another
    by_rank = grouped(
        (each for each in compared.excesses if each.phase != "stage"), attrgetter("rank")
    )
    rows = [row for excesses in by_rank.values() for row in _of_rank(excesses, compared, ranks)]
    return tuple(sorted(rows, key=lambda row: -row.seconds_lost))


def _of_rank(excesses: Sequence[RankDelay], compared: RankComparison, ranks: int) -> Iterator[Row]:
    left, least = list(excesses), WORTH_SAYING * compared.seconds
    while left:
        judged = [
            (each, verdict)
            for each in left
            if (verdict := judge(each, compared, ranks)) is not None and verdict.seconds >= least
        ]
        if not judged:
            return
        worst = max(judged, key=_seconds)
        alone = [
            each
            for each in judged
            if _seconds(each) >= MOST_OF * _seconds(worst) and _stands_out(each[0], worst[0])
        ]
        found, verdict = max(alone, key=_seconds, default=worst)
        yield _row(found, verdict, compared)
        explained = [max(each, 0.0) for each in costs(found)]
        left = [
            _less(each, explained, found) if set(each.intervals) & set(found.intervals) else each
            for each in left
            if each is not found
        ]


def _stands_out(each: RankDelay, of: RankDelay) -> bool:
    """Whether a single module or phase is twice as slow as the rest of those that it is one of."""
    if each.modules > 1 or each.phase == "all":
        return False
    if of.phase != "all" or of.usual <= each.usual:
        return True
    excess = statistics.fmean(each.excess)
    return (statistics.fmean(of.excess) - excess) * each.usual <= excess / 2 * (
        of.usual - each.usual
    )


def _seconds(judged: tuple[RankDelay, Verdict]) -> float:
    return judged[1].seconds


def _less(each: RankDelay, explained: Sequence[float], found: RankDelay) -> RankDelay:
    """The excess, of a rank that is late by so much less.

    Of several modules without the one that explains it.
    """
    late = tuple(late - known for late, known in zip(each.late, explained, strict=True))
    if not _is_one_of(found, each):
        return replace(each, late=late)
    rest = tuple(seconds - one for seconds, one in zip(each.excess, found.excess, strict=True))
    return replace(
        each,
        late=late,
        excess=rest,
        seconds=each.seconds - found.seconds,
        usual=each.usual - found.usual,
    )


def _is_one_of(each: RankDelay, several: RankDelay) -> bool:
    names, pattern = each.module.split("."), several.module.split(".")
    alike = len(names) == len(pattern) and all(
        part in {name, "*"} for name, part in zip(names, pattern, strict=True)
    )
    return alike and several.modules > each.modules and each.phase == several.phase


def _row(each: RankDelay, verdict: Verdict, compared: RankComparison) -> Row:
    return Row(
        module=each.module,
        phase=each.phase,
        modules=each.modules,
        slow_rank=each.rank,
        seconds_lost=verdict.seconds,
        pattern=verdict.pattern,
        slow_steps=None if compared.from_quartiles else verdict.steps,
        steps=None if compared.from_quartiles else compared.steps,
        seconds=each.seconds,
        usual=each.usual,
    )


def slowest_first(profile: Profile, found: Stragglers) -> tuple[int, ...]:
    """The ranks by their cost as culprits, then by how long others waited for them, their excess and their step; unreported ones last."""
    cost = summed((row.slow_rank, row.seconds_lost) for row in found.rows)
    waited = summed((wait.for_rank, wait.seconds) for wait in found.waits)
    stats = [(stat.median, stat.by_rank or {}) for stat in profile.rank_stats if not stat.waits]
    beyond = summed(
        (number, seconds - median)
        for median, by_rank in stats
        for number, seconds in by_rank.items()
    )

    def order(rank: Rank) -> tuple[float, ...]:
        step = rank.step.median if rank.step else 0.0
        reported = rank.status in {"ok", "late"} or rank.rank in beyond
        return (
            not reported,
            *(-each.get(rank.rank, 0.0) for each in (cost, waited, beyond)),
            -step,
            rank.rank,
        )

    return tuple(rank.rank for rank in sorted(profile.ranks, key=order))
