"""The steps of a run of several ranks. Each interval between two collectives is that of the rank that came last.

    rank 0   | data 1 | forward 10 | backward 60 (50 of it waiting) | optimizer 5 | sync 1 |
    rank 1   | data 51| forward 10 | backward 10                    | optimizer 5 | sync 1 |
    the run  | data 51| forward 10 | backward 10                    | optimizer 5 | sync 1 |

Ranks leave a collective together, so the intervals of the ranks that came last add up to the run's time. Their phases hold no waiting.
Ranks of a pipeline do not leave together: the sum is shorter than the step of every rank. Then the step is that of the rank that waited
least.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.model import Run
from lflops.profile.records import Spread
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
