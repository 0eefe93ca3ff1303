"""The clean steps of all ranks, side by side: who is late in which phase of the step, and what the system did to that rank meanwhile.

Clean steps have no times of modules, but there are many of them: a delay that comes in every tenth step, or begins late, is in these.
"""

import math
import operator
import statistics
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from lflops.merging.rank_comparison import compare_ranks
from lflops.merging.rank_table import Place, Series, added_up, median_of_others, table_of_series
from lflops.profile.records import RankActivity, RankComparison, step_phase
from lflops.profile.steps import EVENTS, Step

MOST_STEPS = 256  # of each rank, the last ones. Of many ranks fewer, so that all of them together stay small.

MOST_ROWS, FEWEST_STEPS = 1 << 16, 16

KEPT = 6  # excesses in a profile: each has two numbers for each step
PARTS, FEWEST_OF_PART = 8, 4  # of the steps, and of each part of them: whether something is there all through the run

WAIT = "wait"
_PHASES = ("data", "transfer", "forward", WAIT, "backward", "clip", "optimizer", "other", *EVENTS, "sync")
"""In the order in which `rank_table` takes them: what is listed behind another runs before it in backward."""

_BESIDE = ("cpu", "thread_cpu", "waited", "units")
_PLACES = tuple(Place("", phase) for phase in _PHASES)


def most_steps(ranks: int) -> int:
    """How many steps are kept of each of so many ranks."""
    return max(min(MOST_STEPS, MOST_ROWS // max(ranks, 1)), FEWEST_STEPS)


class CleanSteps:
    """Keeps the last clean steps of each rank, as rows of numbers."""

    def __init__(self) -> None:
        self._rows: dict[int, deque[tuple[int, bytes]]] = {}  # no objects for the garbage collector: of many ranks these are many

    def add(self, rank: int, steps: Iterable[Step], *, ranks: int) -> None:
        """Take further steps of one of so many ranks, none disturbed by more than an event; those without phases are left out."""
        rows = self._rows.setdefault(rank, deque(maxlen=most_steps(ranks)))
        rows.extend((step.index, _row(step)) for step in steps if step.phases)

    @property
    def common(self) -> int:
        """How many steps all ranks have."""
        return len(self._common())

    def compared(self, waits: Collection[Place]) -> RankComparison | None:
        """The ranks in the steps that all of them have; `None` of fewer than two ranks, and without such a step."""
        # `waits` are the places where ranks wait for each other, modules among them
        at = self._common()
        if len(self._rows) < 2 or not at:
            return None
        columns = {rank: _columns(dict(rows), at) for rank, rows in self._rows.items()}
        splits = not any(math.isnan(sum(of_rank[WAIT])) for of_rank in columns.values())
        awaited = _awaited(waits, splits=splits)
        table = table_of_series(_seconds(columns, splits=splits), dict.fromkeys(columns, len(at)), awaited)
        found = compare_ranks(table, whole=True) if table.busy else None
        if found is None:
            return None
        kept = found.excesses[:KEPT]
        busy = added_up(table.busy.values(), columns)
        beside = {name: {rank: of_rank[name] for rank, of_rank in columns.items()} for name in _BESIDE}
        beside["other_threads"] = {
            rank: tuple(whole - own for whole, own in zip(cpu, beside["thread_cpu"][rank], strict=True))
            for rank, cpu in beside["cpu"].items()
        }
        waited = statistics.fmean(seconds for of_rank in beside["waited"].values() for seconds in of_rank)
        return replace(
            found,
            excesses=tuple(replace(each, excess=_in_microseconds(each.excess), late=_in_microseconds(each.late)) for each in kept),
            usual_lost_seconds=statistics.median(max(step) - statistics.median_low(step) for step in zip(*busy.values(), strict=True)),
            at=tuple(at),
            awaited=tuple(sorted(place.phase for place in awaited)),
            activity=tuple(_activity(rank, beside, busy) for rank in sorted({each.rank for each in kept})),
            waited=None if math.isnan(waited) else waited,
            lengths_explain=_lengths_explain(beside["units"], busy),
        )

    def _common(self) -> list[int]:
        of_ranks = [{index for index, _ in rows} for rows in self._rows.values()]
        return sorted(set.intersection(*of_ranks)) if of_ranks else []


def _row(step: Step) -> bytes:
    waiting = math.nan if step.waiting is None else step.waiting
    known = {WAIT: waiting, "backward": step.phases.get("backward", 0.0) - (step.waiting or 0.0)}
    seconds = [known.get(phase, step.phases.get(phase, 0.0)) for phase in _PHASES]
    seconds[_PHASES.index("other")] += sum(each for phase, each in step.phases.items() if phase not in _PHASES)
    for event in EVENTS:
        if event in step.marks:  # it runs between batches, where nothing else takes long
            other, here = _PHASES.index("other"), _PHASES.index(event)
            seconds[other], seconds[here] = 0.0, seconds[other]
    cpu = None if step.cpu_user is None or step.cpu_system is None else step.cpu_user + step.cpu_system
    units = step.tokens if step.tokens is not None else step.samples
    beside = (cpu, step.thread_cpu, step.thread_waited, units)
    return array("f", [*seconds, *(math.nan if each is None else each for each in beside)]).tobytes()


def _columns(rows: Mapping[int, bytes], at: Iterable[int]) -> "dict[str, tuple[float, ...]]":
    names = (*_PHASES, *_BESIDE)
    values = array("f", b"".join(rows[index] for index in at))
    return {name: tuple(values[number :: len(names)]) for number, name in enumerate(names)}


def _seconds(columns: Mapping[int, Mapping[str, tuple[float, ...]]], *, splits: bool) -> dict[Place, Series]:
    """The places of the steps. Where the wait at the end of backward is unknown on one rank, it is in backward on all."""
    found: dict[Place, dict[int, tuple[float, ...]]] = {}
    for place in _PLACES:
        for rank, of_rank in columns.items():
            seconds = of_rank[place.phase]
            if not splits and place.phase == "backward":
                waits = (0.0 if math.isnan(wait) else wait for wait in of_rank[WAIT])
                seconds = tuple(own + wait for own, wait in zip(seconds, waits, strict=True))
            if any(seconds) and (splits or place.phase != WAIT):
                found.setdefault(place, {})[rank] = seconds
    return {place: found[place] for place in _PLACES if place in found}


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


def _activity(rank: int, beside: Mapping[str, Series], busy: Series) -> RankActivity:
    """What the system tells of a rank beyond the others: means over the steps, each with the weight of the rank's lateness."""
    weights = [max(took - usual, 0.0) for took, usual in zip(busy[rank], median_of_others(busy)[rank], strict=True)]
    whole = sum(weights)

    def beyond(name: str) -> float | None:
        usual = median_of_others(beside[name])[rank]
        excess = sum(weight * (took - known) for weight, took, known in zip(weights, beside[name][rank], usual, strict=True))
        return excess / whole if whole and not math.isnan(excess) else None

    waited = list(map(operator.sub, beside["waited"][rank], median_of_others(beside["waited"])[rank]))
    number = len(waited) // PARTS
    is_known = number >= FEWEST_OF_PART and not math.isnan(sum(waited))
    units = {each: statistics.fmean(steps) for each, steps in beside["units"].items()}
    usual = statistics.median(mean for each, mean in units.items() if each != rank)
    return RankActivity(
        rank=rank,
        late=sum(each * each for each in weights) / whole if whole else 0.0,
        waited=beyond("waited"),
        waited_by_part=tuple(statistics.fmean(waited[n * number : (n + 1) * number]) for n in range(PARTS)) if is_known else (),
        other_threads=beyond("other_threads"),
        units_ratio=units[rank] / usual if usual and not math.isnan(units[rank] + usual) else None,
    )


def _lengths_explain(units: Series, busy: Series) -> float | None:
    """The correlation of how late ranks are with how much more their batches have than the others'; `None` where all have as much."""
    more, late = (
        [mine - usual for rank, others in median_of_others(series).items() for mine, usual in zip(series[rank], others, strict=True)]
        for series in (units, busy)
    )
    is_known = not any(map(math.isnan, more)) and len(set(more)) > 1 and len(set(late)) > 1
    return statistics.correlation(more, late) if is_known else None


def _in_microseconds(seconds: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(each, 6) for each in seconds)
