"""The steps and rows of a run of several ranks.

Each interval between two collectives is that of the rank that came last.

    rank 0   | data 1 | forward 10 | backward 60 (50 of it waiting) | optimizer 5 | sync 1 |
    rank 1   | data 51| forward 10 | backward 10                    | optimizer 5 | sync 1 |
    the run  | data 51| forward 10 | backward 10                    | optimizer 5 | sync 1 |

Ranks leave a collective together, so the intervals of the ranks that came last add up to the run's
time. Their phases hold no waiting. Clean steps have no times of modules, but there are many of
them: a delay in every tenth step, or one that begins late, is in these. Ranks of a pipeline do not
leave together: the sum is shorter than any rank's step. Then the step is that of the rank that
waited least.
"""

import math
import operator
import statistics
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.module_names import ancestry
from lflops.profile.profile import (
    COUNTS,
    Communication,
    DtypeShare,
    ModuleProfile,
    OpCount,
    Profile,
    Run,
    UnsupportedCall,
    Work,
)
from lflops.profile.records import (
    PHASES,
    ModulePhase,
    RankActivity,
    RankComparison,
    TimingStats,
    step_phase,
)
from lflops.profile.series import gathered, grouped, sum_known, sums
from lflops.profile.steps import EVENTS, WITHIN_FORWARD, Step, is_unprofiled
from lflops.ranks.merge.rank_comparison import compare_ranks
from lflops.ranks.merge.rank_table import Series, added_up, median_of_others, table_of_series

ORDER = (
    "data",
    "transfer",
    "forward",
    "recompute",
    "backward",
    "clip",
    "optimizer",
    "other",
    "sync",
)
# ranks wait for the first one in it, and it waits for none
SYNC = "sync"
ALIGNED = (
    # of the shortest rank's step: intervals that add up to less are treated as overlapping
    0.97
)

_Key = tuple[int, str]


class RankSteps(Struct, frozen=True, kw_only=True):
    """What the clean steps of one rank took: in all, for data, and of CPU time."""

    step: TimingStats | None
    data: TimingStats | None
    cpu: TimingStats | None


class MergedSteps:
    """Takes the steps of one rank after the other, in the order of the ranks, which wait for each other in the phases `waits`.

    `at_end` says whether they wait in backward at its end alone.
    """

    def __init__(self, waits: Collection[str], *, at_end: bool = False) -> None:
        self._waits = frozenset(waits)
        self._at_end = at_end
        self._ends = self._waits - {SYNC}
        self._least: dict[_Key, tuple[float, Step, int]] = {}
        self._shortest: dict[_Key, float] = {}
        self._last: dict[tuple[_Key, int], tuple[float, Step, int]] = {}
        self._marks: dict[_Key, dict[str, None]] = {}
        self._samples: dict[_Key, list[int | None]] = {}
        self._tokens: dict[_Key, list[int | None]] = {}
        self._batches = _Batches()

    def add(
        self, rank: int, steps: Sequence[Step], run: Run, coordinates: Mapping[str, int]
    ) -> RankSteps:
        is_new = self._batches.add(rank, run, coordinates)
        for step in steps:
            key = step.index, step.kind
            self._marks.setdefault(key, {}).update(dict.fromkeys(step.marks))
            if is_new:
                self._samples.setdefault(key, []).append(step.samples)
                self._tokens.setdefault(key, []).append(step.tokens)
            self._take(key, step, rank)
        clean = [step for step in steps if step.is_unprofiled]
        return RankSteps(
            step=TimingStats.of(step.seconds for step in clean if step.seconds is not None),
            data=TimingStats.of(step.phases["data"] for step in clean if "data" in step.phases),
            cpu=TimingStats.of(
                each.cpu_user + each.cpu_system
                for each in clean
                if each.cpu_user is not None and each.cpu_system is not None
            ),
        )

    def merged(self) -> Iterator[Step]:
        """The steps of the run, with the marks of all ranks and the samples of all batches."""
        for key in sorted(self._marks, key=lambda key: key[0]):
            intervals = [
                self._last[key, number][1]
                for number in range(len(ORDER))
                if (key, number) in self._last
            ]
            step = _joined(intervals, self._ends)
            if (step.seconds or 0.0) < ALIGNED * self._shortest.get(key, 0.0):
                step = self._least[key][1]
            samples, tokens = (
                self._batches.total(units.get(key, [])) for units in (self._samples, self._tokens)
            )
            yield replace(step, marks=tuple(self._marks[key]), samples=samples, tokens=tokens)

    @property
    def last_rank(self) -> int | None:
        """The rank whose forward is that of most of the run's clean steps.

        `None` where there are none.
        """
        ranks = Counter[int]()
        for key, (_, least, rank) in self._least.items():
            if is_unprofiled(least.kind, tuple(self._marks[key])):
                intervals = range(len(ORDER))
                owners = [self._last[key, each] for each in intervals if (key, each) in self._last]
                forward = (
                    each
                    for number, each in enumerate(owners)
                    if "forward" in _intervals(each[1], self._ends)[number]
                )
                ranks[next(forward, (0.0, least, rank))[2]] += 1
        return max(ranks, key=lambda rank: (ranks[rank], -rank)) if ranks else None

    def _waited(self, step: Step, phases: Iterable[str]) -> float:
        """Seconds of waiting in these phases; with the work in them where only the sum is known."""
        known = dict(step.phases)
        if self._at_end and step.waiting is not None:
            known["backward"] = step.waiting
        return sum(known[phase] for phase in phases)

    def _take(self, key: _Key, step: Step, rank: int) -> None:
        """Keep the step where its rank came last.

        Where it waited least, or without any waiting took longest.
        """
        lateness = -(step.seconds or 0.0)
        if step.seconds is not None:
            self._shortest[key] = min(step.seconds, self._shortest.get(key, step.seconds))
        if self._ends & step.phases.keys():
            lateness = self._waited(step, (phase for phase in step.phases if phase in self._waits))
        if key not in self._least or lateness < self._least[key][0]:
            self._least[key] = lateness, step, rank
        for interval, phases in enumerate(_intervals(step, self._ends)):
            waiting = self._waited(step, (phase for phase in phases if phase in self._ends))
            late = waiting if self._ends & step.phases.keys() else lateness
            if (key, interval) not in self._last or late < self._last[key, interval][0]:
                self._last[key, interval] = late, step, rank


class _Batches:
    """Which ranks have a separate batch: those that are the first at their data coordinate."""

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()
        self._expected: int | None = None
        self._is_known = True

    def add(self, rank: int, run: Run, coordinates: Mapping[str, int]) -> bool:
        """Returns whether the rank's batch is one that no rank before it has."""
        ranks, batches = run.world_size, run.data_parallel_size
        self._expected = batches if batches is not None else 1 if ranks == 1 else None
        at = coordinates.get(
            "data", rank if batches == ranks else 0 if batches == 1 or ranks == 1 else None
        )
        if at is None:
            self._is_known = False
            return False
        self._seen[at] += 1
        return self._seen[at] == 1

    def total(self, units: Sequence[int | None]) -> int | None:
        """The sum over all batches; `None` where one is unknown."""
        known = [each for each in units if each is not None]
        return sum(known) if self._is_known and len(known) == len(units) == self._expected else None


def _intervals(step: Step, waits: Collection[str]) -> list[list[str]]:
    """The step's phases from one collective to the next.

    The last interval goes on in the first one of the next step.
    """
    phases = [
        *(phase for phase in ORDER if phase in step.phases),
        *(phase for phase in step.phases if phase not in ORDER),
    ]
    intervals: list[list[str]] = [[]]
    for phase in phases:
        intervals[-1].append(phase)
        if phase in waits:
            intervals.append([])
    last = intervals.pop()
    if not intervals:
        return [last]
    intervals[0] = [*intervals[0], *last]
    return intervals


def _joined(steps: Sequence[Step], waits: Collection[str]) -> Step:
    """One step of the intervals, of each that of the step at its position."""
    first = steps[0]
    if len(steps) == 1:
        return first
    owners = {
        phase: step
        for number, step in enumerate(steps)
        for phase in _intervals(step, waits)[number]
    }
    phases = {phase: owners[phase].phases[phase] for phase in first.phases if phase in owners}
    phases |= {phase: step.phases[phase] for phase, step in owners.items() if phase not in phases}
    host = {
        phase: step.host_phases[phase]
        for phase, step in owners.items()
        if phase in step.host_phases
    }
    disjoint = [phase for phase in phases if phase not in WITHIN_FORWARD]
    rest = (first.seconds or 0.0) - sum(
        seconds for phase, seconds in first.phases.items() if phase not in WITHIN_FORWARD
    )
    seconds = (
        None if first.seconds is None else max(sum(phases[phase] for phase in disjoint) + rest, 0.0)
    )
    waiting = owners["backward"].waiting if "backward" in owners else None
    return replace(first, seconds=seconds, phases=phases, host_phases=host, waiting=waiting)


_LISTED = 12
_HELD = tuple(
    f"{of}{field}"
    for of in ("", "trainable_", "local_")
    for field in ("parameters", "parameter_bytes")
)


class MergedRows:
    """Takes one rank after the other, in the order in which they lead.

    A row is that of the first that has it.

    Of a rank that is taken only what no other had is kept, so that a thousand ranks take no more
    room than their rows.
    """

    def __init__(self) -> None:
        # of each row the rank that it is of
        self.sources: dict[str, int] = {}
        # whether a rank did other work than the first
        self.differ = False
        self._leading: Profile | None = None
        self._rows: dict[str, ModuleProfile] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._having: dict[str, int] = defaultdict(
            int
            # the ranks as bits, in the order in which they were added
        )
        self._added: list[int] = []
        self._peaks: dict[str, int] = {}
        self._cells: dict[int, list[OpCount]] = {}
        self._communication: dict[int, list[Communication]] = {}
        # where any rank waits for others
        self.waits: set[ModulePhase] = set()
        self.ledger: dict[
            tuple[str, str, str], UnsupportedCall
            # what any rank ran without a formula
        ] = {}

    def add(self, rank: int, profile: Profile, lowest: int) -> None:
        """Take the next rank.

        `lowest` is the lowest rank that has the same rows: theirs is the order in which they are
        shown.
        """
        if self._leading is None:
            self._leading = profile
        self.differ = self.differ or _differ(self._leading, profile)
        bit = 1 << len(self._added)
        self._added.append(rank)
        for index, (row, module) in enumerate(profile.modules.items()):
            self._having[row] |= bit
            if self.sources.setdefault(row, rank) == rank:
                self._rows[row] = module
            self._places[row] = min(self._places.get(row, (lowest, index)), (lowest, index))
            if module.peak_bytes is not None:
                self._peaks[row] = max(module.peak_bytes, self._peaks.get(row, 0))
        self.waits.update(profile.waits)
        self._cells[rank] = [
            cell for cell in profile.op_counts if self.sources[cell.module] == rank
        ]
        self._communication[rank] = [
            each for each in profile.communication if self.sources[each.module] == rank
        ]
        for each in (
            profile.unsupported
            # a total that leaves something out on one rank only is not whole either
        ):
            self.ledger.setdefault((each.module, each.operator, each.phase), each)

    def modules(self) -> dict[str, ModuleProfile]:
        """Every row as its source has it; what other ranks have below it is added."""
        grafted = (
            row for row in self._rows if row and self.sources[ancestry(row)[1]] != self.sources[row]
        )
        grafts = gathered(
            (above, self._rows[row]) for row in grafted for above in ancestry(row)[1:]
        )
        return {
            row: replace(
                _grown(self._rows[row], grafts.get(row, [])), peak_bytes=self._peaks.get(row)
            )
            for row in sorted(self._rows, key=self._places.__getitem__)
        }

    def only_on(self) -> Iterator[tuple[list[int], list[str]]]:
        """Group the rows that not all ranks have.

        The ranks that have the same ones, and the uppermost of these.
        """
        everybody = (1 << len(self._added)) - 1
        uppermost = (
            row
            for row in self._rows
            if not row or self._having[ancestry(row)[1]] != self._having[row]
        )
        groups = grouped(sorted(uppermost, key=self._places.__getitem__), self._having.__getitem__)
        for having, rows in groups.items():
            if having != everybody:
                yield [rank for index, rank in enumerate(self._added) if having >> index & 1], rows

    def op_counts(self) -> Iterator[OpCount]:
        """Those of each row's source."""
        return (cell for rank in sorted(self._cells) for cell in self._cells[rank])

    def communication(self) -> Iterator[Communication]:
        """The communication of each row's source."""
        return (each for rank in sorted(self._communication) for each in self._communication[rank])


def ranges(ranks: Iterable[int]) -> str:
    """Ranks in rising order as text, `0, 4-7`; of more than there is room for, the first."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda each: each[1] - each[0])
    ]
    named = ["-".join(map(str, sorted({run[0], run[-1]}))) for run in runs[:_LISTED]]
    return ", ".join([*named, *(["…"] if len(runs) > _LISTED else [])])


def _grown(row: ModuleProfile, grafts: list[ModuleProfile]) -> ModuleProfile:
    if not grafts:
        return row
    figures: dict[str, Any] = sums((row, *grafts), *_HELD)
    figures |= {
        phase: _added(row.work(phase), [graft.work(phase) for graft in grafts]) for phase in PHASES
    }
    shares = gathered(share for each in (row, *grafts) for share in each.dtypes.items())
    return replace(
        row,
        **figures,
        dtypes={
            dtype: DtypeShare(**sums(each, "parameters", "bytes")) for dtype, each in shares.items()
        },
    )


def _added(work: Work, grafts: list[Work]) -> Work:
    """Inclusive work with more of it below. Times of several ranks have no sum."""
    more = sums(grafts, *COUNTS)
    if not any(more.values()):
        return work
    return replace(
        work,
        **{count: getattr(work, count) + added for count, added in more.items()},
        logical_macs=sum_known(each.logical_macs for each in (work, *grafts)),
        seconds=None,
        device_seconds=None,
    )


def _differ(one: Profile, other: Profile) -> bool:
    """Whether two ranks did different work. What one of them did in another order is the same."""
    if one is other:
        return False
    if one.op_counts != other.op_counts and set(one.op_counts) != set(other.op_counts):
        return True
    return _beside_cells(one) != _beside_cells(other)


def _beside_cells(profile: Profile) -> tuple[object, ...]:
    """The rows and their calls, the ledger and the collectives.

    Not the groups' names, of which each rank has its own.
    """
    rows = {row: (module.class_name, module.calls) for row, module in profile.modules.items()}
    return rows, *(
        Counter(map(_counts, table)) for table in (profile.unsupported, profile.communication)
    )


def _counts(each: UnsupportedCall | Communication) -> tuple[object, ...]:
    what = (
        (each.operator, None)
        if isinstance(each, UnsupportedCall)
        else (each.collective, each.group_size)
    )
    return each.module, each.phase, *what, each.calls, each.bytes


# of each rank, the last ones. Of many ranks fewer, so that all of them together stay small.
MOST_STEPS = 256

MOST_ROWS, FEWEST_STEPS = 1 << 16, 16

# excesses in a profile: each has two numbers for each step
KEPT = 6
PARTS, FEWEST_OF_PART = (
    8,
    4,
    # of the steps, and of each part of them: whether something is there all through the run
)

WAIT = "wait"
_PHASES = (
    "data",
    "transfer",
    "forward",
    WAIT,
    "backward",
    "clip",
    "optimizer",
    "other",
    *EVENTS,
    "sync",
)
"""In the order in which `rank_table` takes them.

What is listed behind another runs before it in backward.
"""

_BESIDE = ("cpu", "thread_cpu", "waited", "units")
_PLACES = tuple(ModulePhase("", phase) for phase in _PHASES)


def most_steps(ranks: int) -> int:
    """How many steps are kept of each of so many ranks."""
    return max(min(MOST_STEPS, MOST_ROWS // max(ranks, 1)), FEWEST_STEPS)


class UnprofiledSteps:
    """Keeps the last clean steps of each rank, as rows of numbers."""

    def __init__(self) -> None:
        self._rows: dict[
            int, deque[tuple[int, bytes]]
            # no objects for the garbage collector: of many ranks these are many
        ] = {}

    def add(self, rank: int, steps: Iterable[Step], *, ranks: int) -> None:
        """Take further steps of one of so many ranks, none disturbed by more than an event.

        Those without phases are left out.
        """
        rows = self._rows.setdefault(rank, deque(maxlen=most_steps(ranks)))
        rows.extend((step.index, _row(step)) for step in steps if step.phases)

    @property
    def common(self) -> int:
        """How many steps all ranks have."""
        return len(self._common())

    def compared(self, waits: Collection[ModulePhase]) -> RankComparison | None:
        """The ranks in the steps that all of them have.

        `None` of fewer than two ranks, and without such a step.
        """
        # `waits` are the places where ranks wait for each other, modules among them
        at = self._common()
        if len(self._rows) < 2 or not at:
            return None
        columns = {rank: _columns(dict(rows), at) for rank, rows in self._rows.items()}
        splits = not any(math.isnan(sum(of_rank[WAIT])) for of_rank in columns.values())
        awaited = _awaited(waits, splits=splits)
        table = table_of_series(
            _seconds(columns, splits=splits), dict.fromkeys(columns, len(at)), awaited
        )
        found = compare_ranks(table, whole=True) if table.busy else None
        if found is None:
            return None
        kept = found.excesses[:KEPT]
        busy = added_up(table.busy.values(), columns)
        beside = {
            name: {rank: of_rank[name] for rank, of_rank in columns.items()} for name in _BESIDE
        }
        beside["other_threads"] = {
            rank: tuple(
                whole - own for whole, own in zip(cpu, beside["thread_cpu"][rank], strict=True)
            )
            for rank, cpu in beside["cpu"].items()
        }
        waited = statistics.fmean(
            seconds for of_rank in beside["waited"].values() for seconds in of_rank
        )
        return replace(
            found,
            excesses=tuple(
                replace(
                    each, excess=_in_microseconds(each.excess), late=_in_microseconds(each.late)
                )
                for each in kept
            ),
            usual_lost_seconds=statistics.median(
                max(step) - statistics.median_low(step) for step in zip(*busy.values(), strict=True)
            ),
            at=tuple(at),
            awaited=tuple(sorted(place.phase for place in awaited)),
            activity=tuple(
                _activity(rank, beside, busy) for rank in sorted({each.rank for each in kept})
            ),
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
    seconds[_PHASES.index("other")] += sum(
        each for phase, each in step.phases.items() if phase not in _PHASES
    )
    for event in EVENTS:
        # it runs between batches, where nothing else takes long
        if event in step.marks:
            other, here = _PHASES.index("other"), _PHASES.index(event)
            seconds[other], seconds[here] = 0.0, seconds[other]
    cpu = (
        None
        if step.cpu_user is None or step.cpu_system is None
        else step.cpu_user + step.cpu_system
    )
    units = step.tokens if step.tokens is not None else step.samples
    beside = (cpu, step.thread_cpu, step.thread_waited, units)
    return array(
        "f", [*seconds, *(math.nan if each is None else each for each in beside)]
    ).tobytes()


def _columns(rows: Mapping[int, bytes], at: Iterable[int]) -> "dict[str, tuple[float, ...]]":
    names = (*_PHASES, *_BESIDE)
    values = array("f", b"".join(rows[index] for index in at))
    return {name: tuple(values[number :: len(names)]) for number, name in enumerate(names)}


def _seconds(
    columns: Mapping[int, Mapping[str, tuple[float, ...]]], *, splits: bool
) -> dict[ModulePhase, Series]:
    """The places of the steps.

    Where the wait at the end of backward is unknown on one rank, it is in backward on all.
    """
    found: dict[ModulePhase, dict[int, tuple[float, ...]]] = {}
    for place in _PLACES:
        for rank, of_rank in columns.items():
            seconds = of_rank[place.phase]
            if not splits and place.phase == "backward":
                waits = (0.0 if math.isnan(wait) else wait for wait in of_rank[WAIT])
                seconds = tuple(own + wait for own, wait in zip(seconds, waits, strict=True))
            if any(seconds) and (splits or place.phase != WAIT):
                found.setdefault(place, {})[rank] = seconds
    return {place: found[place] for place in _PLACES if place in found}


def _awaited(waits: Iterable[ModulePhase], *, splits: bool) -> set[ModulePhase]:
    """The phases of the step in which ranks wait for each other.

    Of backward it may be the end alone.
    """
    phases = {ModulePhase("", step_phase(place.phase)) for place in waits}
    if splits and waits_at_end(waits):
        phases.discard(ModulePhase("", "backward"))
        phases.add(ModulePhase("", WAIT))
    return phases


def waits_at_end(waits: Iterable[ModulePhase]) -> bool:
    """Whether ranks wait in backward at its end alone, as under DDP."""
    return not any(place.fqn and step_phase(place.phase) == "backward" for place in waits)


def _activity(rank: int, beside: Mapping[str, Series], busy: Series) -> RankActivity:
    """What the system tells of a rank beyond the others.

    Means over the steps, each with the weight of the rank's lateness.
    """
    weights = [
        max(took - usual, 0.0)
        for took, usual in zip(busy[rank], median_of_others(busy)[rank], strict=True)
    ]
    whole = sum(weights)

    def beyond(name: str) -> float | None:
        usual = median_of_others(beside[name])[rank]
        excess = sum(
            weight * (took - known)
            for weight, took, known in zip(weights, beside[name][rank], usual, strict=True)
        )
        return excess / whole if whole and not math.isnan(excess) else None

    waited = list(
        map(operator.sub, beside["waited"][rank], median_of_others(beside["waited"])[rank])
    )
    number = len(waited) // PARTS
    is_known = number >= FEWEST_OF_PART and not math.isnan(sum(waited))
    units = {each: statistics.fmean(steps) for each, steps in beside["units"].items()}
    usual = statistics.median(mean for each, mean in units.items() if each != rank)
    return RankActivity(
        rank=rank,
        late=sum(each * each for each in weights) / whole if whole else 0.0,
        waited=beyond("waited"),
        waited_by_part=tuple(
            statistics.fmean(waited[n * number : (n + 1) * number]) for n in range(PARTS)
        )
        if is_known
        else (),
        other_threads=beyond("other_threads"),
        units_ratio=units[rank] / usual if usual and not math.isnan(units[rank] + usual) else None,
    )


def _lengths_explain(units: Series, busy: Series) -> float | None:
    """The correlation of how late ranks are with how much more their batches have than the others'.

    `None` where all have as much.
    """
    more, late = (
        [
            mine - usual
            for rank, others in median_of_others(series).items()
            for mine, usual in zip(series[rank], others, strict=True)
        ]
        for series in (units, busy)
    )
    is_known = not any(map(math.isnan, more)) and len(set(more)) > 1 and len(set(late)) > 1
    return statistics.correlation(more, late) if is_known else None


def _in_microseconds(seconds: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(each, 6) for each in seconds)
