"""Find the stragglers in one comparison of the ranks, without looking for their causes.

A straggler is a rank that the other ranks wait for. A place is a module in a phase. In unprofiled
steps, lflops only reads the clock.
"""

import operator
import statistics
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from lflops.profile.records import PASSES, PREEMPTED, RankComparison, RankDelay, Straggler
from lflops.profile.series import grouped
from lflops.ranks.significant_delay import SignificantDelay, significant, step_costs
from lflops.ranks.straggler import straggler_of

# Smallest share of a step that a straggler must cost to be reported.
WORTH_SAYING = 0.01
# Smallest share of a delay's cost that a single module must cause to be reported instead.
MOST_OF = 0.6
# Smallest share of the delay of a whole step that a phase must cause to be reported instead.
MUCH_OF = 0.3
# Smallest number of compared steps from which a rank is flagged as a straggler.
ENOUGH = 6

# With at least MANY_STEPS unprofiled steps, a straggler is reported if it costs at least
# MANY_STEPS_COST of a step. With fewer steps, it must cost at least FEW_STEPS_COST.
MANY_STEPS = 50
MANY_STEPS_COST = 0.015
FEW_STEPS_COST = 0.04

# If all unprofiled steps together show no straggler, only the last 64 steps are searched. If these
# show none, only the last 32 steps are searched.
RECENT = (64, 32)
# For a rank that became slow during the run: the smallest share of the steps after this change in
# which the rank must be slow.
MOST_STEPS_OF = 0.8

# `find_stragglers` skips delays in these phases. The search for causes handles them.
_OTHER_PHASES = {"stage", PREEMPTED}


def find_stragglers(compared: RankComparison, ranks: int) -> tuple[Straggler, ...]:
    """Return the stragglers in one comparison, sorted by cost in descending order.

    A rank is a straggler only if its excess time over the other ranks is more than noise.
    """
    delays = [delay for delay in compared.delays if delay.phase not in _OTHER_PHASES]
    rows: list[Straggler] = []
    for of_rank in grouped(delays, operator.attrgetter("rank")).values():
        rows += _stragglers_of_rank(of_rank, compared, ranks)
    return tuple(sorted(rows, key=lambda row: -row.seconds_lost))


def unprofiled_stragglers(unprofiled: RankComparison, ranks: int) -> list[Straggler]:
    """Return the stragglers in unprofiled steps, each with its first slow step if it is known.

    If all steps together show no straggler, only the last steps are searched, because a steady
    delay may have begun late in the run.
    """
    rows = _expensive(find_stragglers(unprofiled, ranks), unprofiled)
    for steps in RECENT:
        if not rows and 2 * steps <= unprofiled.steps:
            recent = _last_steps(unprofiled, steps)
            late = _expensive(find_stragglers(recent, ranks), unprofiled)
            rows = [row for row in late if row.pattern == "steady"]
    found = []
    for row in rows:
        with_onset = _with_onset(row, unprofiled)
        found.append(replace(with_onset, is_whole_phase=row.phase in PASSES))
    return found


def _stragglers_of_rank(
    delays: Sequence[RankDelay], compared: RankComparison, ranks: int
) -> Iterator[Straggler]:
    """Yield the stragglers of one rank: one for each place in which the rank is slow.

    A place is a module in a phase. The most expensive delay comes first. After each straggler, the
    time that it explains is subtracted from the rank's remaining delays.
    """
    left = list(delays)
    while left:
        expensive = _expensive_delays(left, compared, ranks)
        if not expensive:
            return
        found = _most_specific(expensive, compared)
        yield straggler_of(found, compared)
        rest = []
        for delay in left:
            if delay is not found.delay:
                rest.append(_remaining(delay, found.delay, compared))
        left = rest


def _expensive_delays(
    delays: Iterable[RankDelay], compared: RankComparison, ranks: int
) -> list[SignificantDelay]:
    """Return the delays that are more than noise and cost at least `WORTH_SAYING` of a step."""
    expensive = []
    for delay in delays:
        found = significant(delay, compared, ranks)
        if found is not None and found.seconds >= WORTH_SAYING * compared.seconds:
            expensive.append(found)
    return expensive


def _most_specific(
    expensive: Sequence[SignificantDelay], compared: RankComparison
) -> SignificantDelay:
    """Return the most expensive delay, or the single place that causes most of it.

    A place is a module in a phase. For example, if a rank is slow in all `layers.*.mlp` together,
    but mainly in `layers.3.mlp`, the delay in `layers.3.mlp` is returned.
    """
    worst = max(expensive, key=operator.attrgetter("seconds"))
    is_whole_step = worst.delay.phase == "all" and compared.compares_phases
    least = (MUCH_OF if is_whole_step else MOST_OF) * worst.seconds
    single = []
    for each in expensive:
        if each.seconds >= least and _stands_out(each.delay, worst.delay):
            single.append(each)
    return max(single, key=operator.attrgetter("seconds"), default=worst)


def _stands_out(delay: RankDelay, several: RankDelay) -> bool:
    """Return whether `delay` is in a single place, and mainly this place is slow.

    A place is a module in a phase. `several` is a delay that may include this place. If it is the
    delay of the whole step (phase `all`), the place must be slowed down at least twice as much as
    the rest of the step, relative to the usual times.
    """
    if delay.modules > 1 or delay.phase == "all":
        return False
    rest_usual = several.usual - delay.usual
    if several.phase != "all" or rest_usual <= 0:
        return True
    excess = statistics.fmean(delay.excess)
    rest_excess = statistics.fmean(several.excess) - excess
    return rest_excess * delay.usual <= excess / 2 * rest_usual


def _remaining(delay: RankDelay, found: RankDelay, compared: RankComparison) -> RankDelay:
    """Return `delay` without the part that `found`, another delay of the same rank, explains.

    If both delays are in the same interval between two collectives, the cost of `found` is
    subtracted from the time by which `delay` makes the rank late. If, in addition, the place (a
    module in a phase) of `found` is a part of the place of `delay`, the times of `found` are
    subtracted too.
    """
    if set(delay.intervals).isdisjoint(found.intervals):
        return delay
    explained = [max(cost, 0.0) for cost in step_costs(found)]
    late = map(operator.sub, delay.late, explained)
    delay = replace(delay, late=tuple(late))
    if not _is_part_of(found, delay, compared):
        return delay
    excess = map(operator.sub, delay.excess, found.excess)
    return replace(
        delay,
        excess=tuple(excess),
        seconds=max(delay.seconds - found.seconds, 0.0),
        usual=max(delay.usual - found.usual, 0.0),
    )


def _is_part_of(single: RankDelay, several: RankDelay, compared: RankComparison) -> bool:
    """Return whether the place of `single` is a part of the place of `several`.

    A place is a module in a phase, or a whole phase. For example, each phase is a part of the whole
    unprofiled step, and `layers.0.mlp` is a part of `layers.*.mlp`.
    """
    if several.phase == "all" and single.phase != "all":
        return compared.compares_phases
    if several.modules <= single.modules or single.phase != several.phase:
        return False
    names = single.module.split(".")
    pattern = several.module.split(".")
    if len(names) != len(pattern):
        return False
    return all(part in {name, "*"} for name, part in zip(names, pattern, strict=True))


def _expensive(rows: Iterable[Straggler], unprofiled: RankComparison) -> list[Straggler]:
    """Return the stragglers that cost enough to be reported.

    With few steps, a straggler must cost more.
    """
    has_many_steps = unprofiled.steps >= MANY_STEPS
    least = (MANY_STEPS_COST if has_many_steps else FEW_STEPS_COST) * unprofiled.seconds
    expensive = []
    for row in rows:
        # With many steps, an intermittent straggler has already been tested against chance.
        is_tested = has_many_steps and row.pattern == "intermittent"
        if is_tested or row.seconds_lost >= least:
            expensive.append(row)
    return expensive


def _last_steps(unprofiled: RankComparison, steps: int) -> RankComparison:
    """Return a copy of the comparison with only the last `steps` steps."""
    delays = []
    for delay in unprofiled.delays:
        excess = delay.excess[-steps:]
        seconds = max(delay.usual + statistics.median(excess), 0.0)
        delays.append(replace(delay, excess=excess, late=delay.late[-steps:], seconds=seconds))
    return replace(unprofiled, delays=tuple(delays), steps=steps)


def _with_onset(row: Straggler, unprofiled: RankComparison) -> Straggler:
    """Return the straggler with its first slow step in `since`.

    The straggler is returned unchanged if the rank did not become slow during the run.
    """
    if not unprofiled.at:
        return row
    for delay in unprofiled.delays:
        if delay.rank == row.slow_rank and delay.phase == row.phase:
            limit = (row.seconds - row.usual) / 2
            if limit <= 0:
                return row
            first = change_point([excess >= limit for excess in delay.excess])
            if first is None:
                return row
            return replace(row, since=unprofiled.at[first], pattern="steady")
    return row


def change_point(is_slow: Sequence[bool]) -> int | None:
    """Return the index of the step at which a rank becomes slow for good, or `None`.

    The result is the index with the highest score. Each slow step from the index on and each normal
    step before the index add 1 to the score. Each slow step before the index subtracts 3. `None`
    means that even this index does not clearly separate normal steps from slow steps.
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
            best = place
            best_score = score
    if best is None:
        return None
    before = is_slow[:best]
    after = is_slow[best:]
    if len(before) < ENOUGH or len(after) < ENOUGH:
        return None
    is_clear = sum(after) >= MOST_STEPS_OF * len(after) and sum(before) <= len(before) / 10
    return best if is_clear else None
