"""Find out why a straggler (a rank that the other ranks wait for) is slow.

Also find stragglers that are slow in everything, and not in a single module or phase.

In this module, `unprofiled` is the comparison of the ranks in unprofiled steps, in which lflops
only reads the clock. A place is a module in a phase.
"""

import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from lflops.profile.profile import Profile
from lflops.profile.records import (
    PREEMPTED,
    Cause,
    Rank,
    RankActivity,
    RankComparison,
    RankDelay,
    Straggler,
)
from lflops.profile.steps import EVENTS
from lflops.ranks.significant_delay import (
    NEARLY_ALL,
    PRESENT,
    SignificantDelay,
    significant,
    steps_at_least,
)
from lflops.ranks.straggler import straggler_of
from lflops.ranks.straggler_search import MANY_STEPS, WORTH_SAYING

# Smallest share of a step that threads must wait for a CPU core, if other programs use the machine.
BUSY = 0.05
# Smallest ratio of a rank's work to the work of the other ranks, if the work makes the rank slow.
MORE_WORK = 1.15
# If a rank has 2 times the work of the other ranks, its work explains a time that is up to 2 x
# AS_MUCH_LONGER times the time of the other ranks.
AS_MUCH_LONGER = 1.5
# Smallest ratio of a rank's wait for a CPU core to the wait of the other ranks, if only this rank
# shares its core with other processes.
ALONE = 4.0
# Smallest share of the time by which a rank is late that a cause must explain.
EXPLAINED = 0.5
# The excess of a rank is the time that it takes longer than the other ranks. Waits for a CPU core
# explain the excess only if its standard deviation, after the waits are subtracted, is at most
# VARIES_MORE times as large as before.
VARIES_MORE = 1.1
# To check whether a rank shares its CPU core during the whole run, the run is divided into PARTS
# parts with at least FEWEST_OF_PART steps each. The rank must wait for the core in nearly every
# part.
PARTS = 8
FEWEST_OF_PART = 4

OUTSIDE_MODULES = frozenset({"data", "transfer", "clip", "optimizer", "other", *EVENTS})
"""The phases outside modules.

Neither the model's work nor the chip can explain a delay in such a phase.
"""


def is_busy(unprofiled: RankComparison | None) -> bool:
    """Return whether ranks often wait for a CPU core, because other programs use the machine."""
    if unprofiled is None:
        return False
    return (unprofiled.waited or 0.0) >= BUSY * unprofiled.seconds


def with_cause(row: Straggler, profile: Profile) -> Straggler:
    """Return a straggler with its cause, or unchanged if no cause is found.

    If the cause is more work, the straggler keeps its module and phase, because the additional work
    may be only there. All other causes (see `Cause`) slow down the whole rank, so the straggler is
    then reported as slow in everything (phase `all`).
    """
    is_work = row.phase not in OUTSIDE_MODULES
    work_ratio = None
    if is_work:
        work_ratio = _explaining_work_ratio(row, profile)
    if work_ratio is not None:
        return replace(row, cause="work", work_ratio=work_ratio)
    cause = _cause(row, profile, is_work=is_work)
    # A different chip or a shared core slows down everything, so neither explains why a single
    # module is slow.
    if cause is None or (row.module and cause in {"chip", "preempted"}):
        return row
    return _in_no_place(row, cause)


def _cause(row: Straggler, profile: Profile, *, is_work: bool) -> Cause | None:
    """Find out whether a different chip, another thread or another process causes a delay.

    Returns `None` if none of the three does. `is_work` is false for phases such as `data`, in which
    a rank does none of the model's work. Neither the chip nor other threads can explain a delay in
    such a phase.
    """
    if is_work and _has_other_chip(row.slow_rank, profile.ranks):
        return "chip"
    unprofiled = profile.unprofiled_comparison
    if unprofiled is None:
        return None
    if is_work and _do_other_threads_explain(row.slow_rank, unprofiled):
        return "thread"
    if not _do_waits_explain(row, unprofiled):
        return None
    return "preempted"


def _in_no_place(row: Straggler, cause: Cause) -> Straggler:
    return replace(row, cause=cause, module="", phase="all", modules=1, is_whole_phase=False)


def preempted_ranks(unprofiled: RankComparison, ranks: int) -> Iterator[Straggler]:
    """Yield the ranks that share their CPU core with another process during the whole run.

    A shared core delays some steps a lot and other steps not at all, so the delay is neither steady
    nor intermittent. These ranks are found by the time that their training thread waited for a
    core, which the operating system measures.
    """
    if unprofiled.steps < MANY_STEPS:
        return
    for delay in unprofiled.delays:
        if delay.phase != PREEMPTED or not _is_core_shared(delay, unprofiled, ranks):
            continue
        waited = statistics.fmean(delay.excess)
        cost = min(waited, statistics.fmean(delay.late))
        if cost < BUSY * unprofiled.seconds:
            continue
        slow_steps = steps_at_least(delay.excess, PRESENT * waited)
        found = SignificantDelay(delay=delay, pattern="steady", seconds=cost, slow_steps=slow_steps)
        yield _in_no_place(straggler_of(found, unprofiled), "preempted")


def _is_core_shared(delay: RankDelay, unprofiled: RankComparison, ranks: int) -> bool:
    """Return whether only the rank of `delay` waits for its CPU core, during the whole run.

    If the other ranks wait for their cores too, it is a matter of chance which rank waits longest.
    """
    size = len(delay.excess) // PARTS
    if size < FEWEST_OF_PART:
        return False
    waited = statistics.fmean(delay.excess)
    waited_by_others = (unprofiled.waited or 0.0) - waited / ranks
    if waited <= 0 or waited < ALONE * waited_by_others:
        return False
    if not unprofiled.excludes_waits and waited < EXPLAINED * statistics.fmean(delay.late):
        return False
    parts_with_waits = 0
    for part in range(PARTS):
        waited_in_part = statistics.fmean(delay.excess[part * size : (part + 1) * size])
        parts_with_waits += waited_in_part >= PRESENT * waited
    return parts_with_waits >= NEARLY_ALL * PARTS


def larger_stages(
    hooked: RankComparison, flagged: Collection[int], profile: Profile
) -> Iterator[Straggler]:
    """Yield the pipeline ranks that are slow because they have more work, such as more layers.

    Ranks in `flagged` are left out. `hooked` is the comparison of the ranks in module-timing steps.
    """
    for delay in hooked.delays:
        if delay.phase != "stage" or delay.rank in flagged:
            continue
        found = significant(delay, hooked, len(profile.ranks))
        if found is None or found.seconds < WORTH_SAYING * hooked.seconds:
            continue
        row = with_cause(straggler_of(found, hooked), profile)
        if row.cause == "work":
            yield row


def _explaining_work_ratio(row: Straggler, profile: Profile) -> float | None:
    """Return the ratio of a rank's work to the work of the other ranks, if it explains the delay.

    Otherwise, returns `None`. The work is measured in MACs. If the rank does not have many more
    MACs than the other ranks, the work is measured by the size of its batches.
    """
    ratio = _macs_ratio(profile.ranks, row.slow_rank)
    if ratio is None or ratio < MORE_WORK:
        activity = _activity(row.slow_rank, profile.unprofiled_comparison)
        ratio = None
        if activity is not None:
            ratio = activity.units_ratio
    if ratio is None or ratio < MORE_WORK:
        return None
    if row.ratio is not None and row.ratio > AS_MUCH_LONGER * ratio:
        return None
    return ratio


def _macs_ratio(ranks: Iterable[Rank], rank: int) -> float | None:
    """Return the ratio of a rank's MACs to the median of the other ranks; `None` if unknown."""
    own = None
    others = []
    for each in ranks:
        if each.rank == rank:
            own = each.macs
        elif each.macs is not None:
            others.append(each.macs)
    usual = statistics.median(others) if others else 0
    if own is None or not usual:
        return None
    return own / usual


def _has_other_chip(rank: int, ranks: Iterable[Rank]) -> bool:
    device = None
    other_devices = set()
    for each in ranks:
        if each.rank == rank:
            device = each.device
        elif each.device is not None:
            other_devices.add(each.device)
    return device is not None and bool(other_devices) and device not in other_devices


def _activity(rank: int, unprofiled: RankComparison | None) -> RankActivity | None:
    if unprofiled is None:
        return None
    for each in unprofiled.activity:
        if each.rank == rank:
            return each
    return None


def _do_other_threads_explain(rank: int, unprofiled: RankComparison) -> bool:
    """Return whether a rank is late because other threads of its process were computing.

    The threads must have used more CPU time than on the other ranks. This additional time must be
    at least `EXPLAINED` of the time by which the rank is late, and at least the additional time
    that the rank waited for a CPU core.
    """
    activity = _activity(rank, unprofiled)
    if activity is None or not activity.late:
        return False
    other_threads = activity.other_threads or 0.0
    return other_threads >= max(EXPLAINED * activity.late, activity.waited or 0.0)


def _do_waits_explain(row: Straggler, unprofiled: RankComparison) -> bool:
    """Return whether waits for a CPU core explain why a straggler takes longer in its phase.

    The waits are known only for whole steps, so they may have occurred in a different phase. The
    waits and the straggler's excess time vary from step to step. If the waits occurred in the
    straggler's phase, both are long in the same steps, so the excess does not vary much more after
    the waits are subtracted. Returns False if the compared times already exclude the waits.
    """
    if unprofiled.excludes_waits:
        return False
    excess = _excess_of(row.slow_rank, row.phase, unprofiled)
    waited = _excess_of(row.slow_rank, PREEMPTED, unprofiled)
    if not excess or not waited:
        return False
    left = [seconds - each for seconds, each in zip(excess, waited, strict=True)]
    if statistics.fmean(left) > (1 - EXPLAINED) * statistics.fmean(excess):
        return False
    return statistics.pstdev(left) <= VARIES_MORE * statistics.pstdev(excess)


def _excess_of(rank: int, phase: str, unprofiled: RankComparison) -> Sequence[float]:
    """Return, for each step, how much longer a rank takes than the other ranks in a phase.

    Empty if the comparison has no delay of this rank in this phase.
    """
    for delay in unprofiled.delays:
        if delay.rank == rank and delay.phase == phase and not delay.module:
            return delay.excess
    return ()
