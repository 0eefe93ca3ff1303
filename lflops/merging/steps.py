"""The steps and rows of a run of several ranks. Each interval between two collectives is that of the rank that came last.

    rank 0   | data 1 | forward 10 | backward 60 (50 of it waiting) | optimizer 5 | sync 1 |
    rank 1   | data 51| forward 10 | backward 10                    | optimizer 5 | sync 1 |
    the run  | data 51| forward 10 | backward 10                    | optimizer 5 | sync 1 |

Ranks leave a collective together, so the intervals of the ranks that came last add up to the run's time. Their phases hold no waiting.
Ranks of a pipeline do not leave together: the sum is shorter than the step of every rank. Then the step is that of the rank that waited
least.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.model import COUNTS, Cell, Communication, DtypeShare, ModuleProfile, Profile, Run, Uncounted, Work
from lflops.profile.module_names import ancestry
from lflops.profile.records import PHASES, ModulePhase, Spread
from lflops.profile.series import gathered, grouped, sum_known, sums
from lflops.profile.steps import Step, is_clean

ORDER = ("data", "transfer", "forward", "recompute", "backward", "clip", "optimizer", "other", "sync")
SYNC = "sync"  # ranks wait for the first one in it, and it waits for none
ALIGNED = 0.97  # of the shortest rank's step: intervals that add up to less are treated as overlapping

WITHIN_FORWARD = frozenset({"prefill", "decode"})

_Key = tuple[int, str]


class RankSteps(Struct, frozen=True, kw_only=True):
    """What the clean steps of one rank took: in all, for data, and of CPU time."""

    step: Spread | None
    data: Spread | None
    cpu: Spread | None


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

    def add(self, rank: int, steps: Sequence[Step], run: Run, coordinates: Mapping[str, int]) -> RankSteps:
        is_new = self._batches.add(rank, run, coordinates)
        for step in steps:
            key = step.index, step.kind
            self._marks.setdefault(key, {}).update(dict.fromkeys(step.marks))
            if is_new:
                self._samples.setdefault(key, []).append(step.samples)
                self._tokens.setdefault(key, []).append(step.tokens)
            self._take(key, step, rank)
        clean = [step for step in steps if step.is_clean]
        return RankSteps(
            step=Spread.of(step.seconds for step in clean if step.seconds is not None),
            data=Spread.of(step.phases["data"] for step in clean if "data" in step.phases),
            cpu=Spread.of(each.cpu_user + each.cpu_system for each in clean if each.cpu_user is not None and each.cpu_system is not None),
        )

    def merged(self) -> Iterator[Step]:
        """The steps of the run, with the marks of all ranks and the samples of all batches."""
        for key in sorted(self._marks, key=lambda key: key[0]):
            intervals = [self._last[key, number][1] for number in range(len(ORDER)) if (key, number) in self._last]
            step = _joined(intervals, self._ends)
            if (step.seconds or 0.0) < ALIGNED * self._shortest.get(key, 0.0):
                step = self._least[key][1]
            samples, tokens = (self._batches.total(units.get(key, [])) for units in (self._samples, self._tokens))
            yield replace(step, marks=tuple(self._marks[key]), samples=samples, tokens=tokens)

    @property
    def last_rank(self) -> int | None:
        """The rank whose forward is that of most of the run's clean steps; `None` where there are none."""
        ranks = Counter[int]()
        for key, (_, least, rank) in self._least.items():
            if is_clean(least.kind, tuple(self._marks[key])):
                intervals = range(len(ORDER))
                owners = [self._last[key, each] for each in intervals if (key, each) in self._last]
                forward = (each for number, each in enumerate(owners) if "forward" in _intervals(each[1], self._ends)[number])
                ranks[next(forward, (0.0, least, rank))[2]] += 1
        return max(ranks, key=lambda rank: (ranks[rank], -rank)) if ranks else None

    def _waited(self, step: Step, phases: Iterable[str]) -> float:
        """Seconds of waiting in these phases; with the work in them where only the sum is known."""
        known = dict(step.phases)
        if self._at_end and step.waiting is not None:
            known["backward"] = step.waiting
        return sum(known[phase] for phase in phases)

    def _take(self, key: _Key, step: Step, rank: int) -> None:
        """Keep the step where its rank came last: where it waited least, or without any waiting took longest."""
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
        at = coordinates.get("data", rank if batches == ranks else 0 if batches == 1 or ranks == 1 else None)
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
    """The step's phases from one collective to the next. The last interval goes on in the first one of the next step."""
    phases = [*(phase for phase in ORDER if phase in step.phases), *(phase for phase in step.phases if phase not in ORDER)]
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
    owners = {phase: step for number, step in enumerate(steps) for phase in _intervals(step, waits)[number]}
    phases = {phase: owners[phase].phases[phase] for phase in first.phases if phase in owners}
    phases |= {phase: step.phases[phase] for phase, step in owners.items() if phase not in phases}
    host = {phase: step.host_phases[phase] for phase, step in owners.items() if phase in step.host_phases}
    disjoint = [phase for phase in phases if phase not in WITHIN_FORWARD]
    rest = (first.seconds or 0.0) - sum(seconds for phase, seconds in first.phases.items() if phase not in WITHIN_FORWARD)
    seconds = None if first.seconds is None else max(sum(phases[phase] for phase in disjoint) + rest, 0.0)
    waiting = owners["backward"].waiting if "backward" in owners else None
    return replace(first, seconds=seconds, phases=phases, host_phases=host, waiting=waiting)


_LISTED = 12

_HELD = tuple(f"{of}{field}" for of in ("", "trainable_", "local_") for field in ("parameters", "parameter_bytes"))


class MergedRows:
    """Takes one rank after the other, in the order in which they lead: a row is that of the first that has it.

    Of a rank that is taken only what no other had is kept, so that a thousand ranks take no more room than their rows.
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}  # of each row the rank that it is of
        self.differ = False  # whether a rank did other work than the first
        self._leading: Profile | None = None
        self._rows: dict[str, ModuleProfile] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._having: dict[str, int] = defaultdict(int)  # the ranks as bits, in the order in which they were added
        self._added: list[int] = []
        self._peaks: dict[str, int] = {}
        self._cells: dict[int, list[Cell]] = {}
        self._communication: dict[int, list[Communication]] = {}
        self.waits: set[ModulePhase] = set()  # where any rank waits for others
        self.ledger: dict[tuple[str, str, str], Uncounted] = {}  # what any rank ran without a formula

    def add(self, rank: int, profile: Profile, lowest: int) -> None:
        """Take the next rank. `lowest` is the lowest rank that has the same rows: theirs is the order in which they are shown."""
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
        self._cells[rank] = [cell for cell in profile.cells if self.sources[cell.module] == rank]
        self._communication[rank] = [each for each in profile.communication if self.sources[each.module] == rank]
        for each in profile.uncounted:  # a total that leaves something out on one rank only is not whole either
            self.ledger.setdefault((each.module, each.operator, each.phase), each)

    def modules(self) -> dict[str, ModuleProfile]:
        """Every row as its source has it; what other ranks have below it is added."""
        grafted = (row for row in self._rows if row and self.sources[ancestry(row)[1]] != self.sources[row])
        grafts = gathered((above, self._rows[row]) for row in grafted for above in ancestry(row)[1:])
        return {
            row: replace(_grown(self._rows[row], grafts.get(row, [])), peak_bytes=self._peaks.get(row))
            for row in sorted(self._rows, key=self._places.__getitem__)
        }

    def only_on(self) -> Iterator[tuple[list[int], list[str]]]:
        """Group the rows that not all ranks have: the ranks that have the same ones, and the uppermost of these."""
        everybody = (1 << len(self._added)) - 1
        uppermost = (row for row in self._rows if not row or self._having[ancestry(row)[1]] != self._having[row])
        groups = grouped(sorted(uppermost, key=self._places.__getitem__), self._having.__getitem__)
        for having, rows in groups.items():
            if having != everybody:
                yield [rank for index, rank in enumerate(self._added) if having >> index & 1], rows

    def cells(self) -> Iterator[Cell]:
        """Those of each row's source."""
        return (cell for rank in sorted(self._cells) for cell in self._cells[rank])

    def communication(self) -> Iterator[Communication]:
        """The communication of each row's source."""
        return (each for rank in sorted(self._communication) for each in self._communication[rank])


def ranges(ranks: Iterable[int]) -> str:
    """Ranks in rising order as text, `0, 4-7`; of more than there is room for, the first."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda each: each[1] - each[0])]
    named = ["-".join(map(str, sorted({run[0], run[-1]}))) for run in runs[:_LISTED]]
    return ", ".join([*named, *(["…"] if len(runs) > _LISTED else [])])


def _grown(row: ModuleProfile, grafts: list[ModuleProfile]) -> ModuleProfile:
    if not grafts:
        return row
    figures: dict[str, Any] = sums((row, *grafts), *_HELD)
    figures |= {phase: _added(row.work(phase), [graft.work(phase) for graft in grafts]) for phase in PHASES}
    shares = gathered(share for each in (row, *grafts) for share in each.dtypes.items())
    return replace(row, **figures, dtypes={dtype: DtypeShare(**sums(each, "parameters", "bytes")) for dtype, each in shares.items()})


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
    if one.cells != other.cells and set(one.cells) != set(other.cells):
        return True
    return _beside_cells(one) != _beside_cells(other)


def _beside_cells(profile: Profile) -> tuple[object, ...]:
    """The rows and their calls, the ledger and the collectives; not the groups' names, of which each rank has its own."""
    rows = {row: (module.kind, module.calls) for row, module in profile.modules.items()}
    return rows, *(Counter(map(_counts, table)) for table in (profile.uncounted, profile.communication))


def _counts(each: Uncounted | Communication) -> tuple[object, ...]:
    what = (each.operator, None) if isinstance(each, Uncounted) else (each.collective, each.group_size)
    return each.module, each.phase, *what, each.calls, each.bytes
