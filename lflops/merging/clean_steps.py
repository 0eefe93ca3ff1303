"""The clean steps of all ranks, side by side: who is late in which phase of the step, and what the system did to that rank meanwhile.

Clean steps have no times of modules, but there are many of them: a delay that comes in every tenth step, or begins late, is in these.
"""

import math
import statistics
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from lflops.merging.rank_comparison import compare_ranks
from lflops.merging.rank_table import Place, RankTable, Series, median_of_others, table_of
from lflops.profile.records import RankActivity, RankComparison, RankExcess, step_phase
from lflops.profile.steps import Step

__all__ = ["MOST_STEPS", "CleanSteps", "waits_at_end"]

MOST_STEPS = 256
"""Of each rank, the last ones. Of many ranks fewer, so that all of them together stay small."""

MOST_ROWS, FEWEST_STEPS = 1 << 16, 16

KEPT = 6
"""Excesses in a profile: each has two numbers for each step."""

WAIT = "wait"
_PHASES = ("data", "transfer", "forward", WAIT, "backward", "clip", "optimizer", "other", "sync")
"""In the order in which `rank_table` takes them: what is listed behind another runs before it in backward."""

_BESIDE = ("cpu", "thread_cpu", "waited", "units")
_PLACES = tuple(Place("", phase) for phase in _PHASES)


class CleanSteps:
    """Keeps the last clean steps of each rank, as rows of numbers."""

    def __init__(self) -> None:
        self._rows: dict[int, deque[tuple[int, array[float]]]] = {}

    def add(self, rank: int, steps: Iterable[Step], *, ranks: int) -> None:
        """Take further steps of a rank, of which none is disturbed; those without phases are passed over.

        Args:
            rank: Which one.
            steps: In their order.
            ranks: How many ranks there are.
        """
        most = max(min(MOST_STEPS, MOST_ROWS // max(ranks, 1)), FEWEST_STEPS)
        rows = self._rows.setdefault(rank, deque(maxlen=most))
        rows.extend((step.index, _row(step)) for step in steps if step.phases)

    @property
    def common(self) -> int:
        """How many steps all ranks have."""
        return len(next(iter(self._common().values()), ()))

    def compared(self, waits: Collection[Place]) -> RankComparison | None:
        """The ranks in the steps that all of them have; `None` of fewer than two ranks, and without such a step.

        Args:
            waits: The places where ranks wait for each other, modules among them.
        """
        common = self._common()
        if len(self._rows) < 2 or not common:
            return None
        rows = {rank: [row for index, row in sorted(found.items())] for rank, found in common.items()}
        splits = all(not math.isnan(row[_PHASES.index(WAIT)]) for of_rank in rows.values() for row in of_rank)
        awaited = _awaited(waits, splits=splits)
        table = table_of({rank: [_seconds(row, splits=splits) for row in of_rank] for rank, of_rank in rows.items()}, awaited)
        found = compare_ranks(table, whole=True) if table.busy else None
        if found is None:
            return None
        busy = {rank: _busy(table, rank) for rank in rows}
        beside = {rank: [_beside(row) for row in of_rank] for rank, of_rank in rows.items()}
        return replace(
            found,
            excesses=tuple(map(_short, found.excesses[:KEPT])),
            usual_lost_seconds=statistics.median(max(step) - statistics.median_low(step) for step in zip(*busy.values(), strict=True)),
            at=tuple(sorted(next(iter(common.values())))),
            awaited=tuple(sorted(place.phase for place in awaited)),
            activity=tuple(_activity(rank, beside, busy) for rank in sorted({each.rank for each in found.excesses[:KEPT]})),
            waited=_mean(step["waited"] for steps in beside.values() for step in steps),
            lengths_explain=_lengths_explain(beside, busy),
        )

    def _common(self) -> dict[int, dict[int, "array[float]"]]:
        by_rank = {rank: dict(rows) for rank, rows in self._rows.items()}
        everywhere = set.intersection(*(set(rows) for rows in by_rank.values())) if by_rank else set()
        return (
            {rank: {index: row for index, row in rows.items() if index in everywhere} for rank, rows in by_rank.items()}
            if everywhere
            else {}
        )


def _row(step: Step) -> "array[float]":
    waiting = math.nan if step.waiting is None else step.waiting
    known = {WAIT: waiting, "backward": step.phases.get("backward", 0.0) - (step.waiting or 0.0)}
    seconds = [known.get(phase, step.phases.get(phase, 0.0)) for phase in _PHASES]
    seconds[_PHASES.index("other")] += sum(each for phase, each in step.phases.items() if phase not in _PHASES)
    cpu = None if step.cpu_user is None or step.cpu_system is None else step.cpu_user + step.cpu_system
    units = step.tokens if step.tokens is not None else step.samples
    beside = (cpu, step.thread_cpu, step.thread_waited, units)
    return array("f", [*seconds, *(math.nan if each is None else each for each in beside)])


def _seconds(row: "array[float]", *, splits: bool) -> dict[Place, float]:
    """The places of a step. Where the wait at the end of backward is unknown on one rank, it is in backward on all."""
    found = dict(zip(_PLACES, row, strict=False))
    if not splits:
        wait = found.pop(Place("", WAIT))
        found[Place("", "backward")] += 0.0 if math.isnan(wait) else wait
    return {place: seconds for place, seconds in found.items() if seconds}


def _awaited(waits: Iterable[Place], *, splits: bool) -> set[Place]:
    """The phases of the step in which ranks wait for each other. Of backward it may be the end alone."""
    phases = {Place("", step_phase(place.phase)) for place in waits}
    if splits and waits_at_end(waits):
        phases.discard(Place("", "backward"))
        phases.add(Place("", WAIT))
    return phases


def waits_at_end(waits: Iterable[Place]) -> bool:
    """Whether ranks wait in backward at its end alone, as under DDP."""
    return not any(place.row and step_phase(place.phase) == "backward" for place in waits)


def _busy(table: RankTable, rank: int) -> list[float]:
    """What a rank does in each step besides waiting."""
    return [sum(step) for step in zip(*(series[rank] for series in table.busy.values()), strict=True)]


def _activity(rank: int, beside: Mapping[int, Sequence[Mapping[str, float]]], busy: Series) -> RankActivity:
    """What the system tells of a rank beyond the others: means over the steps, each with the weight of the rank's lateness."""
    weights = [max(took - usual, 0.0) for took, usual in zip(busy[rank], median_of_others(busy)[rank], strict=True)]
    whole = sum(weights)

    def beyond(name: str) -> float | None:
        series = {each: [step[name] for step in steps] for each, steps in beside.items()}
        usual = median_of_others(series)[rank]
        excess = sum(weight * (took - known) for weight, took, known in zip(weights, series[rank], usual, strict=True))
        return excess / whole if whole and not math.isnan(excess) else None

    units = {each: statistics.fmean(step["units"] for step in steps) for each, steps in beside.items()}
    usual = statistics.median(mean for each, mean in units.items() if each != rank)
    return RankActivity(
        rank=rank,
        late=sum(each * each for each in weights) / whole if whole else 0.0,
        waited=beyond("waited"),
        other_threads=beyond("other_threads"),
        units_ratio=units[rank] / usual if usual and not math.isnan(units[rank] + usual) else None,
    )


def _beside(row: "array[float]") -> dict[str, float]:
    beside = dict(zip(_BESIDE, row[len(_PHASES) :], strict=True))
    return beside | {"other_threads": beside["cpu"] - beside["thread_cpu"]}


def _lengths_explain(beside: Mapping[int, Sequence[Mapping[str, float]]], busy: Series) -> float | None:
    """The correlation of how late ranks are with how much more their batches have than the others'; `None` where all have as much."""
    units = {rank: [step["units"] for step in steps] for rank, steps in beside.items()}
    more, late = (
        [mine - usual for rank, others in median_of_others(series).items() for mine, usual in zip(series[rank], others, strict=True)]
        for series in (units, busy)
    )
    is_known = not any(map(math.isnan, more)) and len(set(more)) > 1 and len(set(late)) > 1
    return statistics.correlation(more, late) if is_known else None


def _mean(values: Iterable[float]) -> float | None:
    mean = statistics.fmean(values)
    return None if math.isnan(mean) else mean


def _short(each: RankExcess) -> RankExcess:
    """To the microsecond."""
    return replace(each, excess=tuple(round(value, 6) for value in each.excess), late=tuple(round(value, 6) for value in each.late))
