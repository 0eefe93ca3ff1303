"""Merge the steps of all ranks: each interval between two collectives comes from the last rank.

    rank 0   | data 1 | forward 10 | backward 60 (50 of it waiting) | optimizer 5 | sync 1 |
    rank 1   | data 51| forward 10 | backward 10                    | optimizer 5 | sync 1 |
    the run  | data 51| forward 10 | backward 10                    | optimizer 5 | sync 1 |

Ranks leave a collective together. If each interval comes from the rank that arrived last at its
end, the intervals add up to the time of the run, and contain no waiting. The ranks of a pipeline do
not leave together, so the sum of these intervals is shorter than the step of any rank. In this
case, the merged step is the step of the rank that waited least.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.profile import Run
from lflops.profile.records import ModulePhase, TimingStats, step_phase
from lflops.profile.series import sum_known
from lflops.profile.steps import WITHIN_FORWARD, Step, is_unprofiled

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
"""The order in which the phases of a step run."""

SYNC = "sync"
"""The phase in which all ranks except rank 0 wait for rank 0."""

# If the intervals of a merged step add up to less than this share of the shortest step of any rank,
# they overlap, and are not used.
ALIGNED = 0.97


class RankSteps(Struct, frozen=True, kw_only=True):
    """Statistics of one rank's unprofiled steps: step time, data wait, and CPU time per step."""

    step: TimingStats | None
    data: TimingStats | None
    cpu: TimingStats | None


def waits_at_end(waits: Iterable[ModulePhase]) -> bool:
    """Return whether ranks wait for each other only at the end of backward, not in its modules.

    This is the case under DDP.
    """
    return not any(wait.fqn and step_phase(wait.phase) == "backward" for wait in waits)


class MergedSteps:
    """Merges the steps of all ranks into the steps of the run. Pass the ranks in their order.

    Args:
        waits: The phases in which ranks wait for each other.
        at_end: Whether ranks wait only at the end of backward, not inside it.
    """

    def __init__(self, waits: Collection[str], *, at_end: bool = False) -> None:
        self._waits = _Waits(waits, at_end=at_end)
        self._steps: dict[tuple[int, str], _MergedStep] = {}
        self._batches = _Batches()

    def add(
        self, rank: int, steps: Sequence[Step], run: Run, coordinates: Mapping[str, int]
    ) -> RankSteps:
        """Add the steps of the next rank and return the statistics of its unprofiled steps."""
        has_own_batch = self._batches.add(rank, run, coordinates)
        for step in steps:
            key = step.index, step.kind
            if key not in self._steps:
                self._steps[key] = _MergedStep(self._waits)
            self._steps[key].add(rank, step, has_own_batch=has_own_batch)
        return _statistics(steps)

    def merged(self) -> Iterator[Step]:
        """Yield the steps of the run.

        A step has the marks of all ranks (the reasons why it is not typical, such as `warmup`), and
        the samples and tokens of all batches.
        """
        for _, step in sorted(self._steps.items(), key=lambda item: item[0][0]):
            yield replace(
                step.joined(),
                marks=tuple(step.marks),
                samples=self._batches.total(step.samples),
                tokens=self._batches.total(step.tokens),
                waited_by_phase=None,
            )

    @property
    def last_rank(self) -> int | None:
        """Return the rank from which most merged unprofiled steps have the time of forward.

        Returns `None` if there is no unprofiled step.
        """
        ranks: Counter[int] = Counter()
        for step in self._steps.values():
            if step.is_unprofiled:
                ranks[step.forward_rank] += 1
        return max(ranks, key=lambda rank: (ranks[rank], -rank), default=None)


def _statistics(steps: Iterable[Step]) -> RankSteps:
    """Return the statistics of the unprofiled steps among `steps`."""
    seconds = []
    data = []
    cpu = []
    for step in steps:
        if not step.is_unprofiled:
            continue
        if step.seconds is not None:
            seconds.append(step.seconds)
        if "data" in step.phases:
            data.append(step.phases["data"])
        if step.cpu_user is not None and step.cpu_system is not None:
            cpu.append(step.cpu_user + step.cpu_system)
    return RankSteps(
        step=TimingStats.of(seconds), data=TimingStats.of(data), cpu=TimingStats.of(cpu)
    )


class _Waits:
    """Computes how long a rank waited, given the phases in which ranks wait for each other."""

    def __init__(self, phases: Collection[str], *, at_end: bool) -> None:
        self._phases = frozenset(phases)
        self._at_end = at_end
        # These phases end an interval.
        self.ends = self._phases - {SYNC}

    def ends_any(self, step: Step) -> bool:
        return not self.ends.isdisjoint(step.phases)

    def in_step(self, step: Step) -> float:
        """Return the seconds that a rank waited in a step."""
        return self._seconds(step, step.phases, self._phases)

    def in_interval(self, step: Step, phases: Iterable[str]) -> float:
        """Return the seconds that a rank waited in one interval of a step.

        `phases` are the phases in the interval, which ends with a collective.
        """
        return self._seconds(step, phases, self.ends)

    def _seconds(self, step: Step, phases: Iterable[str], awaited: Collection[str]) -> float:
        """Add up the waiting time of a step in the `phases` that are in `awaited`.

        If the waiting time in a phase is unknown, the whole phase counts as waiting.
        """
        seconds = 0.0
        for phase in phases:
            if phase not in awaited:
                continue
            if phase == "backward" and self._at_end and step.waiting is not None:
                seconds += step.waiting
            else:
                seconds += step.phases[phase]
        return seconds

    def intervals(self, step: Step) -> list[list[str]]:
        """Divide the phases of a step into intervals, each of which ends with a collective.

        The phases after the last collective of a step are part of the first interval: a rank goes
        through them, and then through the first phases of the next step, to the next collective.
        """
        phases = [phase for phase in ORDER if phase in step.phases]
        phases += [phase for phase in step.phases if phase not in ORDER]
        intervals: list[list[str]] = [[]]
        for phase in phases:
            intervals[-1].append(phase)
            if phase in self.ends:
                intervals.append([])
        last = intervals.pop()
        if not intervals:
            return [last]
        intervals[0] += last
        return intervals


class _Candidate(NamedTuple):
    """One rank's step, which may become the merged step, and how long the rank waited in it."""

    waited: float
    step: Step
    rank: int


class _MergedStep:
    """One step of the run, merged from the steps of the ranks.

    Attributes:
        marks: The marks of the step on any rank, such as `warmup`. They are the keys of a
            dictionary, which keeps their order.
        samples: Number of samples of each batch; `None` if unknown.
        tokens: Number of tokens of each batch; `None` if unknown.
    """

    def __init__(self, waits: _Waits) -> None:
        self.marks: dict[str, None] = {}
        self.samples: list[int | None] = []
        self.tokens: list[int | None] = []
        self._waits = waits
        self._shortest: float | None = None
        # The step of the rank that waited least in the whole step, and for each interval the step
        # of the rank that waited least there.
        self._least: _Candidate | None = None
        self._last: list[_Candidate] = []

    def add(self, rank: int, step: Step, *, has_own_batch: bool) -> None:
        """Add the step of the next rank.

        `has_own_batch` is false if the batch of an earlier rank is the same batch.
        """
        self.marks.update(dict.fromkeys(step.marks))
        if has_own_batch:
            self.samples.append(step.samples)
            self.tokens.append(step.tokens)
        if step.seconds is not None and (self._shortest is None or step.seconds < self._shortest):
            self._shortest = step.seconds
        # If no rank waited, the rank with the longest step came last.
        has_waits = self._waits.ends_any(step)
        waited = self._waits.in_step(step) if has_waits else -(step.seconds or 0.0)
        if self._least is None or waited < self._least.waited:
            self._least = _Candidate(waited, step, rank)
        for number, phases in enumerate(self._waits.intervals(step)):
            in_interval = self._waits.in_interval(step, phases) if has_waits else waited
            candidate = _Candidate(in_interval, step, rank)
            if number == len(self._last):
                self._last.append(candidate)
            elif in_interval < self._last[number].waited:
                self._last[number] = candidate

    @property
    def _least_waiting(self) -> _Candidate:
        if self._least is None:
            raise RuntimeError("no rank has this step")
        return self._least

    @property
    def is_unprofiled(self) -> bool:
        return is_unprofiled(self._least_waiting.step.kind, tuple(self.marks))

    @property
    def forward_rank(self) -> int:
        """Return the rank that came last to the end of the interval with forward."""
        for number, candidate in enumerate(self._last):
            if "forward" in self._waits.intervals(candidate.step)[number]:
                return candidate.rank
        return self._least_waiting.rank

    def joined(self) -> Step:
        """Return the merged step: each interval from the rank that came last to its end.

        If these intervals add up to less than the step of any rank, they overlap. In this case,
        returns the step of the rank that waited least.
        """
        step = self._joined_intervals()
        if (step.seconds or 0.0) < ALIGNED * (self._shortest or 0.0):
            return self._least_waiting.step
        return step

    def _joined_intervals(self) -> Step:
        first = self._last[0].step
        if len(self._last) == 1:
            return first
        owners: dict[str, Step] = {}
        for number, candidate in enumerate(self._last):
            for phase in self._waits.intervals(candidate.step)[number]:
                owners[phase] = candidate.step
        phases = {}
        # Phases that are not in the first step come last.
        for phase in (*first.phases, *owners):
            if phase in owners:
                phases[phase] = owners[phase].phases[phase]
        host_phases = {}
        for phase, step in owners.items():
            if phase in step.host_phases:
                host_phases[phase] = step.host_phases[phase]
        seconds = None
        if first.seconds is not None:
            rest = first.seconds - _disjoint_seconds(first.phases)
            seconds = max(_disjoint_seconds(phases) + rest, 0.0)
        waiting = None
        if "backward" in owners:
            waiting = owners["backward"].waiting
        return replace(
            first, seconds=seconds, phases=phases, host_phases=host_phases, waiting=waiting
        )


def _disjoint_seconds(phases: Mapping[str, float]) -> float:
    """Add up the times of the phases, except for phases that are part of another phase."""
    disjoint = []
    for phase, seconds in phases.items():
        if phase not in WITHIN_FORWARD:
            disjoint.append(seconds)
    return sum(disjoint)


class _Batches:
    """Finds out which ranks have a separate batch, to count each batch once.

    Ranks with the same data-parallel coordinate have the same batch, and only the first of them
    counts.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = defaultdict(int)
        self._expected: int | None = None
        self._is_known = True

    def add(self, rank: int, run: Run, coordinates: Mapping[str, int]) -> bool:
        """Add a rank, and return whether no earlier rank has the same batch."""
        is_alone = run.world_size == 1
        self._expected = run.data_parallel_size
        if self._expected is None and is_alone:
            self._expected = 1
        coordinate = coordinates.get("data")
        if coordinate is None and run.data_parallel_size == run.world_size:
            coordinate = rank
        if coordinate is None and (is_alone or run.data_parallel_size == 1):
            coordinate = 0
        if coordinate is None:
            self._is_known = False
            return False
        self._seen[coordinate] += 1
        return self._seen[coordinate] == 1

    def total(self, units: Sequence[int | None]) -> int | None:
        """Return the sum of `units`, the samples (or tokens) of each batch; `None` if unknown."""
        if not self._is_known or len(units) != self._expected:
            return None
        return sum_known(units)
