"""Find stragglers: the ranks that other ranks wait for, where they are slow, why, and their cost.

In unprofiled steps, lflops only reads the clock. These steps are numerous, and show which rank is
late, and in which phase of the step. In module-timing steps, hooks time every module. These steps
are few, but also show the slow module. If ranks wait for each other within a phase, unprofiled
steps cannot show which rank was slow in that phase, so only module-timing steps are used for such a
phase.

In this module, `hooked` is the comparison of the ranks in module-timing steps, and `unprofiled` is
the comparison of the ranks in unprofiled steps.
"""

import statistics
from collections.abc import Iterable

from msgspec.structs import replace

from lflops.profile.profile import Profile
from lflops.profile.records import (
    PASS_PHASES,
    Rank,
    RankComparison,
    RankDelay,
    Straggler,
    step_phase,
)
from lflops.profile.series import summed
from lflops.ranks.reported_stragglers import with_reported
from lflops.ranks.straggler import Stragglers, in_module_of
from lflops.ranks.straggler_causes import (
    OUTSIDE_MODULES,
    is_busy,
    larger_stages,
    preempted_ranks,
    with_cause,
)
from lflops.ranks.straggler_search import (
    ENOUGH,
    MANY_STEPS,
    MOST_OF,
    WORTH_SAYING,
    find_stragglers,
    unprofiled_stragglers,
)

# Large cost, as a share of a step. A rank that is slow in every module-timing step and costs this
# much needs fewer steps to be flagged. If ranks wait this much for each other in the median step
# and no rank is a steady straggler, different ranks are late in different steps (they alternate).
MUCH = 0.1
# Smallest correlation between batch sizes and lateness at which the sizes explain why ranks are
# late.
CORRELATED = 0.5
# Ranks alternate if different ranks are late in different steps. Each of n ranks is then late in
# about 1/n of the steps, and in at most MOST_OF_A_TURN times as many.
MOST_OF_A_TURN = 1.2
# If a straggler was found in module-timing steps: the smallest share of its cost that unprofiled
# steps must show in the same phase.
CONFIRMED = 0.5

_PASSES = frozenset({"forward", "backward"})


def stragglers(profile: Profile) -> Stragglers:
    """Find the ranks that other ranks wait for. A profile of one rank has none."""
    hooked = profile.rank_comparison
    unprofiled = profile.unprofiled_comparison
    shown = _most_telling(hooked, unprofiled)
    if shown is None:
        return Stragglers()
    rows = _all_rows(profile, hooked, unprofiled)
    is_alternating = _is_alternating(rows, unprofiled, len(profile.ranks))
    if is_alternating:
        rows = []
    is_machine_busy = not rows and is_busy(unprofiled)
    is_alternating = is_alternating and not is_machine_busy
    is_enough = shown.from_quartiles or shown.steps >= ENOUGH or bool(rows)
    least_wait = WORTH_SAYING * shown.seconds
    return Stragglers(
        rows=tuple(rows),
        waits=tuple(wait for wait in shown.waits if wait.seconds >= least_wait),
        lost_share=_lost_share(shown),
        step_seconds=shown.seconds,
        too_few_steps=None if is_enough else shown.steps,
        is_alternating=is_alternating,
        busy_machine=is_machine_busy,
        lengths_differ=is_alternating and _do_lengths_explain(unprofiled),
    )


def _most_telling(
    hooked: RankComparison | None, unprofiled: RankComparison | None
) -> RankComparison | None:
    """Return the comparison that shows more delays.

    If the comparison in unprofiled steps shows all delays, it is returned. Otherwise, the
    comparison in module-timing steps is returned, if there is one.
    """
    if hooked is None or _shows_all_delays(unprofiled):
        return unprofiled
    return hooked


def _shows_all_delays(unprofiled: RankComparison | None) -> bool:
    """Return whether the comparison in unprofiled steps is enough to find all delays.

    There must be enough steps, and ranks must not wait for each other within forward or backward.
    """
    if unprofiled is None or unprofiled.steps < ENOUGH:
        return False
    return _PASSES.isdisjoint(unprofiled.awaited)


def _is_alternating(
    rows: Iterable[Straggler], unprofiled: RankComparison | None, number_of_ranks: int
) -> bool:
    """Return whether ranks wait long in the median step, but not always for the same rank.

    `rows` are the stragglers that were found.
    """
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
    """Return all stragglers with their causes, sorted by cost in descending order."""
    ranks = max(len(profile.ranks), 2)
    credible = []
    for found in _rows(hooked, unprofiled, ranks):
        row = with_cause(found, profile)
        if not _is_chance(row, unprofiled):
            credible.append(row)
    rows = _merged(credible)
    if unprofiled is not None:
        rows = with_reported(rows, unprofiled)
        named = {row.slow_rank for row in rows}
        for row in preempted_ranks(unprofiled, ranks):
            # If the times of the phases include the waits for a CPU core, the cost of the waits is
            # already counted.
            if unprofiled.excludes_waits or row.slow_rank not in named:
                rows.append(row)
    if hooked is not None:
        named = {row.slow_rank for row in rows}
        for row in larger_stages(hooked, named, profile):
            if _is_enough(row, hooked):
                rows.append(row)
    return sorted(rows, key=lambda row: -row.seconds_lost)


def _rows(
    hooked: RankComparison | None, unprofiled: RankComparison | None, ranks: int
) -> list[Straggler]:
    """Return the stragglers in unprofiled steps, and then those found only in module-timing steps.

    If a straggler in unprofiled steps is slow in a single module, it is returned with this module.
    """
    rows: list[Straggler] = []
    if unprofiled is not None and unprofiled.steps >= ENOUGH:
        rows = unprofiled_stragglers(unprofiled, ranks)
    if hooked is None:
        return rows
    hooked_rows = find_stragglers(hooked, ranks)
    enough_hooked = [row for row in hooked_rows if _is_enough(row, hooked)]
    if unprofiled is None or unprofiled.steps < ENOUGH:
        return enough_hooked
    located = []
    known = set()
    for row in rows:
        with_module = _with_module(row, hooked_rows, hooked)
        located.append(with_module)
        known.add((with_module.slow_rank, step_phase(with_module.phase)))
    for row in enough_hooked:
        places = {(row.slow_rank, step_phase(row.phase)), (row.slow_rank, "all")}
        if known.isdisjoint(places) and _is_credible(row, hooked, unprofiled):
            located.append(row)
    return located


def _is_enough(row: Straggler, hooked: RankComparison) -> bool:
    """Return whether there are enough module-timing steps to flag the rank.

    A rank with a high cost needs fewer steps.
    """
    if hooked.from_quartiles or hooked.steps >= ENOUGH:
        return True
    is_in_all_steps = row.slow_steps == hooked.steps > 1
    return is_in_all_steps and row.seconds_lost >= MUCH * hooked.seconds


def _is_credible(row: Straggler, hooked: RankComparison, unprofiled: RankComparison) -> bool:
    """Return whether unprofiled steps are consistent with a straggler found in module-timing steps.

    If ranks do not wait for each other within a phase, unprofiled steps show which rank is slow in
    the phase. So if a rank is slow in a module in this phase, it must also be slow in this phase in
    unprofiled steps.
    """
    phase = step_phase(row.phase)
    if phase in unprofiled.awaited:
        return True
    if hooked.steps < ENOUGH or phase in OUTSIDE_MODULES:
        return False
    if phase == "all" and not _PASSES.isdisjoint(unprofiled.awaited):
        return True
    for delay in unprofiled.delays:
        if delay.rank == row.slow_rank and delay.phase == phase:
            return statistics.fmean(delay.excess) >= CONFIRMED * row.seconds_lost
    return False


def _is_chance(row: Straggler, unprofiled: RankComparison | None) -> bool:
    """Return whether a straggler may be a coincidence, so that it must not be reported.

    If another process uses the CPU core of a rank for a few steps, the rank looks like an
    intermittent straggler. So a straggler may be a coincidence in three cases:

    * Its cause is another process on its core, and few steps were compared.
    * It is intermittent and slow in the whole step, and its cause is not `work` or `thread`.
    * It is intermittent and slow in forward or backward, and its cause is not `work` or `thread`.
      In addition, the machine is busy, few steps were compared, and the compared times include the
      waits for a core.
    """
    has_few_steps = (row.steps or 0) < MANY_STEPS
    if row.cause == "preempted" and has_few_steps:
        return True
    if row.pattern == "steady" or row.cause in {"work", "thread"}:
        return False
    if row.phase == "all":
        return True
    excludes_waits = unprofiled is not None and unprofiled.excludes_waits
    return is_busy(unprofiled) and not excludes_waits and row.phase in _PASSES and has_few_steps


def _with_module(
    row: Straggler, hooked_rows: Iterable[Straggler], hooked: RankComparison
) -> Straggler:
    """Return the straggler with the module that causes most of its delay, if there is one.

    The straggler was found in unprofiled steps. Its module is found in module-timing steps.
    """
    seconds_when_slow = row.seconds_lost * (row.steps or 1) / (row.slow_steps or 1)
    for found in hooked_rows:
        is_in_phase = step_phase(found.phase) == row.phase
        if found.slow_rank != row.slow_rank or not is_in_phase or found.phase not in PASS_PHASES:
            continue
        if found.seconds - found.usual >= MOST_OF * seconds_when_slow:
            row = in_module_of(row, found)
            if found.pattern == row.pattern:
                row = replace(row, seconds=found.seconds, usual=found.usual)
            return row
    slowest = _slowest_module(row, seconds_when_slow, hooked)
    if slowest is None:
        return row
    return in_module_of(row, slowest)


def _slowest_module(
    row: Straggler, seconds_when_slow: float, hooked: RankComparison
) -> RankDelay | None:
    """Return the delay of the module that causes most of a straggler's delay.

    There may be too few module-timing steps to prove a delay. But unprofiled steps have already
    proved this straggler's delay and shown its rank, phase and size. So a single module-timing step
    is enough to find the module. Returns `None` if the delay of the slowest module does not have
    about the same size, or if the delay of another module is more than half as long.
    """
    late = []
    for delay in hooked.delays:
        if delay.rank != row.slow_rank or delay.phase not in PASS_PHASES or delay.modules > 1:
            continue
        if step_phase(delay.phase) != row.phase:
            continue
        is_steady = row.pattern == "steady"
        excess = statistics.median(delay.excess) if is_steady else max(delay.excess)
        late.append((excess, delay))
    late.sort(key=lambda item: -item[0])
    if not late:
        return None
    most, slowest = late[0]
    is_size_right = MOST_OF * seconds_when_slow <= most <= seconds_when_slow / MOST_OF
    is_alone = len(late) == 1 or late[1][0] <= most / 2
    if is_size_right and is_alone:
        return slowest
    return None


def _merged(rows: Iterable[Straggler]) -> list[Straggler]:
    """Merge stragglers with the same rank, module and phase, and add up their costs.

    For example, if one cause slows down a whole rank, the delays of the rank in several phases
    become one straggler.
    """
    merged: dict[tuple[int, str, str], Straggler] = {}
    for row in rows:
        key = (row.slow_rank, row.module, row.phase)
        if key not in merged:
            merged[key] = row
            continue
        cost = merged[key].seconds_lost + row.seconds_lost
        merged[key] = replace(merged[key], seconds_lost=cost)
    return list(merged.values())


def slowest_first(profile: Profile, found: Stragglers) -> tuple[int, ...]:
    """Return all ranks, slowest first.

    Ranks are ordered by their cost as stragglers, then by the time that other ranks waited for
    them, then by the time that their modules and phases took longer than on the median rank, then
    by the length of their step. Ranks that did not report come last.
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
