"""Compare the ranks in unprofiled steps, phase by phase.

In an unprofiled step, lflops only reads the clock. So there are no module times, but there are many
such steps. They also show delays that occur only in every tenth step, or that begin late in the
run.

A rank also takes longer if its training thread waits for a CPU core, because the operating system
has given the core to another thread. This wait has nothing to do with the phase in which it
happens. If each rank has measured its waits for a core in each phase, the phases are compared
without these waits, and the waits are compared separately, as a phase called `preempted`:

    measured   forward 30 ms (5 ms of it waiting) | backward 40 ms (10 ms of it waiting)
    compared   forward 25 ms | backward 30 ms | preempted 15 ms

A place is a module in a phase. Here, all places are phases of the whole step.
"""

import heapq
import math
import statistics
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from lflops.profile.records import (
    PREEMPTED,
    ModulePhase,
    RankActivity,
    RankComparison,
    RankDelay,
    step_phase,
)
from lflops.profile.steps import EVENTS, Step
from lflops.ranks.merge.rank_comparison import compare_ranks
from lflops.ranks.merge.rank_series import RankSeries, Steps, mean_excess, minus, plus, positive
from lflops.ranks.merge.rank_table import RankTable, table_of_series
from lflops.ranks.merge.steps import waits_at_end

# Maximum number of steps that are kept for each rank. The last steps are kept.
MOST_STEPS = 256
# With many ranks, fewer steps are kept: at most `MOST_ROWS` for all ranks together, but always
# `FEWEST_STEPS` for each rank.
MOST_ROWS = 1 << 16
FEWEST_STEPS = 16

# Maximum number of delays that a comparison keeps. Each delay has two numbers per step.
MOST_DELAYS = 6
# Maximum number of ranks for which the waits for a CPU core are kept as a delay. The ranks that
# wait longest are chosen.
PREEMPTIONS_KEPT = 2

WAIT = "wait"
"""The name of the phase in which ranks wait for the gradients of other ranks.

This is the end of backward, but it is compared as a separate phase.
"""

_PHASES = (
    "data",
    "transfer",
    "forward",
    # `wait` is the end of backward. It is listed before `backward`, because a `RankTable` reverses
    # the order of these two.
    WAIT,
    "backward",
    "clip",
    "optimizer",
    "other",
    *EVENTS,
    "sync",
)
# CPU seconds of the process, CPU seconds of the training thread, seconds that the training thread
# waited for a CPU core, and the number of tokens (or of samples, if tokens are unknown).
_COUNTERS = ("cpu", "thread_cpu", "waited", "units")


def _waited_in(phase: str) -> str:
    """Return the name of the column with the waits for a CPU core in a phase."""
    return f"waited in {phase}"


_COLUMNS = (*_PHASES, *_COUNTERS, *map(_waited_in, _PHASES))

# Smallest share of a step that a rank's waits for a CPU core must cost to be kept.
_WORTH_KEEPING = 0.004


def most_steps(ranks: int) -> int:
    """Return the number of steps that are kept for each rank, in a run with `ranks` ranks."""
    return max(min(MOST_STEPS, MOST_ROWS // max(ranks, 1)), FEWEST_STEPS)


class _Record(NamedTuple):
    """One step of one rank: its index, and its times and counters as packed bytes.

    The garbage collector does not track bytes.
    """

    step: int
    values: bytes


class UnprofiledSteps:
    """Keeps the last unprofiled steps of each rank, and compares the ranks in these steps."""

    def __init__(self) -> None:
        self._records: dict[int, deque[_Record]] = {}

    def add(self, rank: int, steps: Iterable[Step], *, ranks: int) -> None:
        """Add steps of one rank of a run with `ranks` ranks.

        Steps without the times of phases are left out.
        """
        if rank not in self._records:
            self._records[rank] = deque(maxlen=most_steps(ranks))
        for step in steps:
            if step.phases:
                self._records[rank].append(_Record(step.index, _packed(step)))

    @property
    def common(self) -> int:
        """Number of steps that all ranks have."""
        return len(self._common_indices())

    def compared(self, waits: Collection[ModulePhase]) -> RankComparison | None:
        """Compare the ranks, phase by phase, in the steps that all ranks have.

        `waits` are the places (modules in a phase) where ranks wait for each other. Returns `None`
        if there are fewer than two ranks, or if the ranks have no step in common.
        """
        indices = self._common_indices()
        if len(self._records) < 2 or not indices:
            return None
        columns = self._columns(indices)
        is_wait_known = not _has_unknown(columns[WAIT])
        awaited = _awaited(waits, is_wait_known=is_wait_known)
        steps = dict.fromkeys(self._records, len(indices))
        phases = _places(columns, is_wait_known=is_wait_known)
        whole = table_of_series(phases, steps, awaited)
        if not whole.busy:
            return None
        contended = _contended(columns, phases, awaited, is_wait_known=is_wait_known)
        table = whole
        waited = columns["waited"]
        if contended is not None:
            table = table_of_series(_without(phases, contended), steps, awaited)
            waited = RankSeries.sum_of(contended.values(), whole.ranks)
        comparison = compare_ranks(table, by_whole_step=True)
        if comparison is None:
            return None
        delays = [*comparison.delays[:MOST_DELAYS], *_preemptions(waited, whole)]
        busy = table.busy_in_all()
        return replace(
            comparison,
            seconds=whole.step_seconds,
            delays=tuple(map(_rounded, delays)),
            usual_lost_seconds=statistics.median(busy.excess_of_slowest()),
            at=tuple(indices),
            awaited=tuple(sorted(place.phase for place in awaited)),
            activity=_activity({delay.rank for delay in delays}, columns, busy),
            waited=_known(statistics.fmean(columns["waited"].means().values())),
            lengths_explain=_lengths_explain(columns["units"], busy),
            excludes_waits=contended is not None,
        )

    def _common_indices(self) -> list[int]:
        if not self._records:
            return []
        indices = []
        for records in self._records.values():
            indices.append({record.step for record in records})
        return sorted(set.intersection(*indices))

    def _columns(self, indices: Iterable[int]) -> dict[str, RankSeries]:
        """Return the values of all ranks, by column, in the steps with these indices.

        The names of the columns are in `_COLUMNS`.
        """
        columns = {name: RankSeries() for name in _COLUMNS}
        for rank, records in self._records.items():
            by_index = dict(records)
            values = array("f", b"".join(by_index[index] for index in indices))
            for number, name in enumerate(_COLUMNS):
                columns[name][rank] = tuple(values[number :: len(_COLUMNS)])
        return columns


def _packed(step: Step) -> bytes:
    """Pack a step: one float32 value for each column in `_COLUMNS`. An unknown value is NaN."""
    seconds = _by_column(step, step.phases)
    seconds["backward"] -= step.waiting or 0.0
    seconds[WAIT] = _or_nan(step.waiting)
    cpu = math.nan
    if step.cpu_user is not None and step.cpu_system is not None:
        cpu = step.cpu_user + step.cpu_system
    units = step.tokens if step.tokens is not None else step.samples
    counters = (cpu, _or_nan(step.thread_cpu), _or_nan(step.thread_waited), _or_nan(units))
    return array("f", [*seconds.values(), *counters, *_waits_of(step)]).tobytes()


def _waits_of(step: Step) -> list[float]:
    """Return the seconds that the training thread waited for a CPU core in each phase.

    The values are in the order of `_PHASES`. They are NaN if they are unknown.
    """
    if step.waited_by_phase is None:
        return [math.nan] * len(_PHASES)
    return list(_by_column(step, step.waited_by_phase).values())


def _by_column(step: Step, by_phase: Mapping[str, float]) -> dict[str, float]:
    """Return a time for each phase in `_PHASES`, given the times of a step in `by_phase`.

    The time of a phase that is not in `_PHASES` is added to `other`. If the step has the mark
    `validation` or `checkpoint`, the time of `other` is moved to the phase with this name.
    """
    seconds = dict.fromkeys(_PHASES, 0.0)
    for phase, each in by_phase.items():
        column = phase if phase in seconds else "other"
        seconds[column] += each
    for event in EVENTS:
        # Validation and checkpoints run between two batches, where nothing else takes long.
        if event in step.marks:
            seconds[event] = seconds["other"]
            seconds["other"] = 0.0
    return seconds


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _has_unknown(series: RankSeries) -> bool:
    """Return whether any value of any rank is unknown (NaN)."""
    return any(math.isnan(sum(seconds)) for seconds in series.values())


def _places(
    columns: Mapping[str, RankSeries], *, is_wait_known: bool
) -> dict[ModulePhase, RankSeries]:
    """Return the times of the ranks in each phase. The keys are the places of a `RankTable`.

    A phase in which no rank spent time is left out. If any rank does not know its wait at the end
    of backward (`is_wait_known` is false), this wait counts as part of backward on all ranks.
    """
    places = {}
    for phase in _PHASES:
        series = columns[phase]
        if not is_wait_known:
            if phase == WAIT:
                continue
            if phase == "backward":
                series = _with_waits(series, columns[WAIT])
        timed = RankSeries()
        for rank, seconds in series.items():
            if any(seconds):
                timed[rank] = seconds
        if timed:
            places[ModulePhase("", phase)] = timed
    return places


def _with_waits(backward: RankSeries, waits: RankSeries) -> RankSeries:
    whole = RankSeries()
    for rank, seconds in backward.items():
        known = []
        for wait in waits[rank]:
            known.append(0.0 if math.isnan(wait) else wait)
        whole[rank] = plus(seconds, known)
    return whole


def _contended(
    columns: Mapping[str, RankSeries],
    phases: Mapping[ModulePhase, RankSeries],
    awaited: Collection[ModulePhase],
    *,
    is_wait_known: bool,
) -> dict[ModulePhase, RankSeries] | None:
    """Return the time that each rank waited for a CPU core in each compared phase.

    Returns `None` if a time is unknown on any rank. A rank that waits for other ranks needs no CPU
    core, so the phases in which ranks wait for each other are left out.
    """
    for phase in _PHASES:
        if _has_unknown(columns[_waited_in(phase)]):
            return None
    contended = {}
    for place in phases:
        if place in awaited:
            continue
        series = columns[_waited_in(place.phase)]
        if place.phase == "backward" and not is_wait_known:
            series = _with_waits(series, columns[_waited_in(WAIT)])
        contended[place] = series
    return contended


def _without(
    phases: Mapping[ModulePhase, RankSeries], contended: Mapping[ModulePhase, RankSeries]
) -> dict[ModulePhase, RankSeries]:
    """Return the times of the phases without the waits for a CPU core in `contended`."""
    uncontended = dict(phases)
    for place, waits in contended.items():
        left = RankSeries()
        for rank, seconds in phases[place].items():
            left[rank] = positive(minus(seconds, waits[rank]))
        uncontended[place] = left
    return uncontended


def _preemptions(waited: RankSeries, table: RankTable) -> list[RankDelay]:
    """Return delays for the ranks that waited longest for a CPU core.

    Args:
        waited: The time that each rank waited for a core in each step.
        table: The times of the ranks, including these waits.
    """
    if _has_unknown(waited):
        return []
    excesses = waited.excess_over_others()
    usual = waited.median_of_others()
    late = table.busy_in_all().excess_over_others()
    costs = {}
    for rank in excesses:
        cost = mean_excess(map(min, excesses[rank], late[rank]))
        if cost >= _WORTH_KEEPING * table.step_seconds:
            costs[rank] = cost
    delays = []
    for rank in heapq.nlargest(PREEMPTIONS_KEPT, costs, key=costs.__getitem__):
        delay = RankDelay(
            module="",
            phase=PREEMPTED,
            rank=rank,
            seconds=statistics.median(waited[rank]),
            usual=statistics.median(usual[rank]),
            excess=excesses[rank],
            late=late[rank],
            intervals=tuple(table.busy),
        )
        delays.append(delay)
    return delays


def _rounded(delay: RankDelay) -> RankDelay:
    """Return a delay with times rounded to whole microseconds."""
    return replace(delay, excess=_in_microseconds(delay.excess), late=_in_microseconds(delay.late))


def _awaited(waits: Iterable[ModulePhase], *, is_wait_known: bool) -> set[ModulePhase]:
    """Return the phases of a step in which ranks wait for each other.

    If ranks wait only at the end of backward, and this wait is known, the phase `wait` is included
    instead of `backward`.
    """
    phases = {ModulePhase("", step_phase(wait.phase)) for wait in waits}
    if is_wait_known:
        phases.add(ModulePhase("", WAIT))
        if waits_at_end(waits):
            phases.discard(ModulePhase("", "backward"))
    return phases


def _activity(
    ranks: Collection[int], columns: Mapping[str, RankSeries], busy: RankSeries
) -> tuple[RankActivity, ...]:
    """Compare the processes of the given ranks with the processes of the other ranks.

    The result helps to explain why a rank is late. For example, its training thread waited longer
    for a CPU core, or its batches were larger. All times are means over the steps. The later the
    rank was in a step, the more weight the step has.

    Args:
        ranks: The ranks to explain.
        columns: The values of all ranks, by column.
        busy: The time in each step that each rank did not wait for other ranks.
    """
    late = busy.excess_over_others()
    waited = columns["waited"].excess_over_others()
    other_threads = columns["cpu"].minus(columns["thread_cpu"]).excess_over_others()
    units = columns["units"].means()
    activity = []
    for rank in sorted(ranks):
        weights = positive(late[rank])
        whole = sum(weights)
        squares = sum(weight * weight for weight in weights)
        each = RankActivity(
            rank=rank,
            late=squares / whole if whole else 0.0,
            waited=_weighted_mean(waited[rank], weights),
            other_threads=_weighted_mean(other_threads[rank], weights),
            units_ratio=_ratio_to_others(units, rank),
        )
        activity.append(each)
    return tuple(activity)


def _weighted_mean(values: Steps, weights: Sequence[float]) -> float | None:
    """Return the weighted mean; `None` if a value is unknown (NaN) or if all weights are 0."""
    if not any(weights):
        return None
    return _known(statistics.fmean(values, weights))


def _ratio_to_others(means: Mapping[int, float], rank: int) -> float | None:
    """Return a rank's mean divided by the median of the other ranks; `None` if unknown."""
    others = dict(means)
    own = others.pop(rank)
    usual = statistics.median(others.values())
    if not usual:
        return None
    return _known(own / usual)


def _lengths_explain(units: RankSeries, busy: RankSeries) -> float | None:
    """Return the correlation between the size of a rank's batch and the rank's busy time.

    The correlation shows whether ranks are late because they have larger batches. Both values are
    differences from the median of the other ranks. Returns `None` if the sizes or the busy times
    are all the same, or if a size is unknown. `units` has the sizes of the batches.
    """
    more = list(chain.from_iterable(units.excess_over_others().values()))
    late = list(chain.from_iterable(busy.excess_over_others().values()))
    if any(map(math.isnan, more)) or min(len(set(more)), len(set(late))) < 2:
        return None
    return statistics.correlation(more, late)


def _in_microseconds(seconds: Iterable[float]) -> Steps:
    return tuple(round(each, 6) for each in seconds)
