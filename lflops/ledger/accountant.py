"""Compute the time account of one process of a run: nanoseconds by category, and the slow steps.

The input is a sequence of marks. A mark is a moment at which another category begins or at which a
step ends.

To find slow steps, each step is compared with recent steps whose batches have about the same size.
The median of those recent steps is called the usual step.
"""

import math
import statistics
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from lflops.ledger.account import (
    CATEGORIES,
    NO_LOSS,
    SlowStep,
    StepGroup,
    duration_class,
    group_of,
    in_pairs,
)
from lflops.ledger.marks import AFTER_RUN, BETWEEN_EPOCHS, OTHER, StepEnd

REMEMBERED = 64
"""Maximum number of recent steps that are kept. Their median duration is the usual duration."""

FEWEST = 8
"""Smallest number of recent steps with which a step is compared. With fewer, no step is slow."""

# A step is slow only if it exceeds the usual duration by more than each of the next three values.
LEAST = 50_000_000
"""Time in nanoseconds by which a step must exceed the usual duration to be slow."""

SHARE = 0.25
"""Time by which a step must exceed the usual duration to be slow, as a share of this duration."""

SPREADS = 8
"""Time by which a step must exceed the usual duration to be slow, as a multiple of the spread.

The spread is the distance from the median of the recent durations to their 80th percentile.
"""

LONG_WAIT = 250_000_000
"""Time in nanoseconds by which a step that only waited for a core must exceed the usual duration.

With less extra time, such a step is not slow. The limit is higher than `LEAST`, because short waits
are normal when programs share a machine.
"""

MANY_FAULTS = 50
"""A step can be slow because it reads at least this many more memory pages from disk than usual."""

SIZES_PER_DOUBLING = 4
"""Number of size classes between a batch and a batch that is twice as large.

A step is compared with recent steps of the same size class.
"""

MOST_SIZES = 64
"""Maximum number of size classes.

If there are more, the recent steps of all classes are dropped.
"""

MUCH_LARGER = 1.2
"""A batch is much larger than usual if its size exceeds this multiple of the usual size.

The size of a batch is its number of elements. The usual size is the median over the recent steps.
"""


class Evidence(NamedTuple):
    """Counters that show why a step was slow, from the operating system and the CUDA allocator.

    Attributes:
        waiting: Nanoseconds in which the training thread was ready to run but had no core, or in
            which the process was stopped.
        computing: Nanoseconds in which the training thread ran on a core in user mode.
        faults: Number of memory pages that were read from disk (major page faults).
        retries: Number of times that the CUDA allocator freed its cache and tried again.
    """

    waiting: int = 0
    computing: int = 0
    faults: int = 0
    retries: int = 0


class StepSpent(NamedTuple):
    """The duration of a step, and the data that may explain it.

    Attributes:
        phases: Nanoseconds by phase.
        total: Nanoseconds of the whole step.
        evidence: Counters that show why a step was slow.
        elements: Number of elements of the tensors in the step's batch, or `None` if unknown.
    """

    phases: Mapping[str, int]
    total: int
    evidence: Evidence
    elements: int | None

    @property
    def net(self) -> int:
        """Nanoseconds of the step, without the time in which the training thread had no core."""
        return self.total - self.evidence.waiting


class Verdict(NamedTuple):
    """The extra time of a slow step and its cause.

    Attributes:
        usual: Nanoseconds of the usual step.
        cost: Nanoseconds by which the slow step exceeded the usual step. If something interrupted
            the step, such as validation, the nanoseconds of the interruption.
        by_phase: Nanoseconds of the cost by phase of the step; empty for an interruption.
        cause: One of `CAUSES`.
        phase: The phase with the largest part of the cost, or the category of the interruption.
    """

    usual: int
    cost: int
    by_phase: Mapping[str, int]
    cause: str
    phase: str


class Usual:
    """Finds slow steps: keeps recent steps by batch size, and compares each new step with them."""

    def __init__(self) -> None:
        self._by_size: dict[int | None, _Recent] = {}
        self._all = _Recent()

    def judge(self, step: StepSpent) -> Verdict | None:
        """Compare a step with the recent steps of the same batch size, then add it to them.

        If there are too few recent steps of this batch size, the step is compared with all recent
        steps. Returns `None` if the step is not slow, or if there are too few recent steps in all.
        """
        size = None
        if step.elements:
            size = round(SIZES_PER_DOUBLING * math.log2(step.elements))
        recent = self._by_size.setdefault(size, _Recent())
        verdict = self._verdict(step, recent)
        recent.add(step)
        self._all.add(step)
        if len(self._by_size) > MOST_SIZES:
            self._by_size.clear()
        return verdict

    def _verdict(self, step: StepSpent, recent: "_Recent") -> Verdict | None:
        is_new_size = not recent.has_enough_steps
        compared = self._all if is_new_size else recent
        cost = 0
        if compared.has_enough_steps:
            cost = compared.cost_of(step)
        if not cost:
            return None
        by_phase = _excess(step, compared, cost)
        phase = max(by_phase, key=by_phase.__getitem__)
        is_larger = is_new_size and compared.is_exceeded(step.elements)
        cause = _cause(step, compared, cost, phase, is_larger=is_larger)
        return Verdict(compared.totals.median, cost, by_phase, cause, phase)

    def beyond(self, step: StepSpent) -> Mapping[str, int] | None:
        """Return, for each phase, by how many nanoseconds a step exceeded the usual step.

        Returns `None` if there is no recent step yet.
        """
        if not self._all.steps:
            return None
        return _excess(step, self._all, max(step.total - self.median, 0))

    @property
    def tolerance(self) -> int:
        """Nanoseconds by which a step can exceed the usual step without being slow."""
        return self._all.totals.tolerance if self._all.has_enough_steps else LEAST

    @property
    def median(self) -> int:
        """Median duration of a step in nanoseconds."""
        return self._all.totals.median


def _cause(step: StepSpent, recent: "_Recent", cost: int, phase: str, *, is_larger: bool) -> str:
    """Return the cause of a slow step, or `"unknown"`.

    If several causes apply, the cause that this function lists first is returned.

    Args:
        step: The slow step.
        recent: The recent steps with which it is compared.
        cost: Nanoseconds by which the step exceeded the usual step.
        phase: The phase with the largest part of the cost.
        is_larger: Whether the batch of the step is much larger than usual.
    """
    usual = recent.usual_evidence
    more_waiting = step.evidence.waiting - usual.waiting
    more_computing = step.evidence.computing - usual.computing
    more_faults = step.evidence.faults - usual.faults
    reads_disk = more_faults >= MANY_FAULTS and 2 * more_computing < cost and phase != "data"
    # On a busy machine, a thread that computes more, or often waits for the disk, also waits more
    # often for a core. Such waits are not the cause.
    waits_anyway = reads_disk or (is_larger and 4 * more_computing >= cost)
    causes = {
        "allocator_retry": step.evidence.retries > usual.retries,
        "gc": phase == "gc",
        LOGGING: phase == LOGGING,
        "not_scheduled": 2 * more_waiting >= cost and not waits_anyway,
        "loader": phase == "data",
        "other_rank": phase in {"wait", "sync"},
        "swap": reads_disk,
        "larger_batch": is_larger,
    }
    for cause, applies in causes.items():
        if applies:
            return cause
    return "unknown"


def _excess(step: StepSpent, recent: "_Recent", cost: int) -> dict[str, int]:
    """Divide the cost of a slow step among the phases that took longer than usual.

    No phase gets more than its duration in this step.
    """
    usual = recent.usual_phases
    longer = {}
    for phase, spent in step.phases.items():
        longer[phase] = max(spent - usual.get(phase, 0), 0)
    together = sum(longer.values()) or 1
    shares = {}
    for phase, excess in longer.items():
        shares[phase] = min(cost * excess // together, step.phases[phase])
    # The rest of the cost is added to the largest shares.
    for phase in sorted(shares, key=lambda each: (-shares[each], -step.phases[each])):
        rest = cost - sum(shares.values())
        shares[phase] += min(rest, step.phases[phase] - shares[phase])
    return {phase: share for phase, share in shares.items() if share}


class _Recent:
    """Recent steps whose batches have about the same size.

    Attributes:
        totals: The durations of the steps.
    """

    def __init__(self) -> None:
        self.steps: deque[StepSpent] = deque()
        self.totals = _Times()
        # The durations without the time in which the thread waited for a core.
        self._net = _Times()

    def add(self, step: StepSpent) -> None:
        """Add a step, and drop the oldest step if there are too many."""
        oldest = None
        if len(self.steps) == REMEMBERED:
            oldest = self.steps.popleft()
        self.steps.append(step)
        self.totals.replace(None if oldest is None else oldest.total, step.total)
        self._net.replace(None if oldest is None else oldest.net, step.net)

    def cost_of(self, step: StepSpent) -> int:
        """Return by how many nanoseconds a step exceeded the usual step; 0 if it is not slow.

        The time in which the step waited for a core may be left out.
        """
        # Other processes make the durations of steps vary. To find other causes in spite of this, a
        # step must be slow even without its waits for a core, unless its extra time is long.
        cost = self.totals.beyond(step.total)
        net = self._net.beyond(step.net)
        if cost and (net or cost >= LONG_WAIT):
            return cost
        return net

    @property
    def has_enough_steps(self) -> bool:
        """Return whether there are enough steps to define the usual step."""
        return len(self.steps) >= FEWEST

    @property
    def usual_phases(self) -> dict[str, int]:
        names = set[str]()
        for step in self.steps:
            names.update(step.phases)
        usual = {}
        for name in names:
            usual[name] = self._usual_phase(name)
        return usual

    def _usual_phase(self, name: str) -> int:
        return int(statistics.median(step.phases.get(name, 0) for step in self.steps))

    @property
    def usual_evidence(self) -> Evidence:
        evidence = [step.evidence for step in self.steps]
        usual = []
        for counter in zip(*evidence, strict=True):
            usual.append(int(statistics.median(counter)))
        return Evidence(*usual)

    def is_exceeded(self, size: int | None) -> bool:
        """Return whether a batch is much larger than the batches of the recent steps."""
        known = [step.elements for step in self.steps if step.elements is not None]
        if size is None or not known:
            return False
        return size > MUCH_LARGER * statistics.median(known)


class _Times(list[int]):
    """Sorted durations of recent steps."""

    def replace(self, oldest: int | None, newest: int) -> None:
        """Drop the oldest duration, unless it is `None`, and add the newest."""
        if oldest is not None:
            del self[bisect_left(self, oldest)]
        insort(self, newest)

    @property
    def median(self) -> int:
        """The middle duration; 0 if there is none."""
        return self[len(self) // 2] if self else 0

    @property
    def tolerance(self) -> int:
        """Nanoseconds by which a step can exceed the median without being slow.

        The value is larger if the durations vary more.
        """
        spread = self[len(self) * 4 // 5] - self.median
        return max(LEAST, int(SHARE * self.median), SPREADS * spread)

    def beyond(self, time: int) -> int:
        """Return the excess of `time` over the median, or 0 if it is within the tolerance."""
        excess = time - self.median
        if excess > LEAST and excess > self.tolerance:
            return excess
        return 0


def elements(shapes: Any) -> int | None:
    """Return the number of elements in a batch's tensors, or `None` if the shapes are unknown."""
    count = 0
    try:
        for shape in shapes[1]:
            is_nested = shape and shape[0] == "nested"
            count += int(shape[1] if is_nested else math.prod(shape))
    except (TypeError, IndexError):
        return None
    return count


COLD = 2
"""Number of warm-up steps at the beginning of each start (process of a run)."""

INTERRUPTIONS = {
    "compilation": "compilation",
    "checkpoint_save": "checkpoint",
    "validation": "validation",
    "inference": "inference",
}
"""Categories whose time interrupts a step without being part of its phases.

The values are the causes of slow steps that the ledger records for such interruptions.
"""

FLUSHING = {BETWEEN_EPOCHS, AFTER_RUN}
"""Categories that end an incomplete step.

At the end of an epoch, the loop begins a step and requests a batch, but the loader has no batch
left. This step never ends. When one of these categories begins, the time of the incomplete step is
assigned to the phases in which it was spent.
"""

LONGEST_FREEZES = 100
"""Maximum number of freezes that are kept. A freeze is a time in which the process did not run."""

MOST_GROUPS = 64
"""Maximum number of groups of steps since the last ledger row. If there are more, pairs are joined.

Only neighbouring groups of the same mode are joined, so more groups may remain.
"""

LOGGING = "logging"
"""A category that is a phase of a step, because many loops log in each step.

Logging after an epoch or after the run belongs to no step.
"""

COLLECTING = "gc"
"""Name of the phase for Python's garbage collector.

Its time is subtracted from the phases during which it runs.
"""


class StepAccountant:
    """Assigns every nanosecond of a process to a category, and finds the slow steps.

    All moments are clock values in nanoseconds.

    Args:
        begin: Moment at which the account begins.
        collections: Moments at which Python's garbage collector began and ended, alternately.
        retries: Function that returns how often the device's allocator has freed its cache and
            tried again.

    Attributes:
        until: The moment up to which the account covers the time.
        spent: Nanoseconds by category since the last `take`.
        slow: Slow steps since the last `take`.
        groups: Groups of all steps since the last `take_steps`.
        durations: Histogram of the durations of unprofiled steps since the last `take_steps`: the
            number of steps in each duration class.
        lost: Total nanoseconds up to the last `take` that count as lost time: all categories except
            `NO_LOSS`.
        slow_steps: Total number of slow steps up to the last `take`.
        steps: Number of steps that the run has done. `None` before the first step.
        first_step: Number of steps that the run had done before this account began. `None` before
            the first step.
        freezes: Begin and end of each period in which no thread of the process ran.
    """

    def __init__(
        self, begin: int, collections: deque[int], retries: Callable[[], int] = lambda: 0
    ) -> None:
        self.begin = begin
        self.until = begin
        self.spent = Counter[str]()
        self.slow: list[SlowStep] = []
        self.groups: list[StepGroup] = []
        self.durations = Counter[int]()
        self.lost = 0
        self.slow_steps = 0
        self.steps: int | None = None
        self.first_step: int | None = None
        self.freezes: deque[tuple[int, int]] = deque(maxlen=LONGEST_FREEZES)
        self._collections = collections
        self._retries = retries
        self._retried = 0
        self._new_retries = 0
        self._current = "start_up"
        # Whether phases have run since the beginning of the epoch.
        self._is_in_epoch = False
        # Nanoseconds of the running step, by phase.
        self._step = Counter[str]()
        # Nanoseconds since the last step ended, outside all phases of a step, by category.
        self._between = Counter[str]()
        self._ended = 0
        self._step_begin = begin
        self._usual = Usual()
        self._last: StepEnd | None = None

    @property
    def open(self) -> dict[str, int]:
        """Nanoseconds of the current, incomplete step by category.

        When the step ends, this time may be assigned to other categories, for example if the step
        is slow.
        """
        by_category = {}
        for phase, spent in self._step.items():
            if spent:
                by_category[_category_of(phase)] = spent
        return by_category

    @property
    def usual(self) -> float:
        """Seconds of the usual step (the median of the recent steps). 0 before the first step."""
        return self._usual.median / 1e9

    def read(self, marks: Iterable[tuple[int, str | StepEnd]], now: int) -> None:
        """Process marks, and assign the time up to `now` to categories."""
        retried = self._retries()
        self._new_retries = retried - self._retried
        self._retried = retried
        for at, mark in marks:
            self._charge(at)
            if isinstance(mark, StepEnd):
                self._end_step(at, mark)
                continue
            self._current = mark
            if mark not in CATEGORIES and mark != OTHER:
                self._is_in_epoch = True
            if mark in FLUSHING:
                self._is_in_epoch = False
                self._flush(keep_other=mark == BETWEEN_EPOCHS)
        self._charge(now)

    def take(self) -> tuple[dict[str, int], list[SlowStep]]:
        """Return the nanoseconds by category and the slow steps since the last call."""
        spent = {name: nanoseconds for name, nanoseconds in self.spent.items() if nanoseconds}
        slow = self.slow
        self.spent = Counter()
        self.slow = []
        for name, nanoseconds in spent.items():
            if group_of(name) not in NO_LOSS:
                self.lost += nanoseconds
        self.slow_steps += len(slow)
        return spent, slow

    def take_steps(self) -> tuple[list[StepGroup], dict[int, int]]:
        """Return the groups of steps and the histogram of durations since the last call."""
        groups = self.groups
        durations = dict(self.durations)
        self.groups = []
        self.durations = Counter()
        return groups, durations

    def _charge(self, at: int) -> None:
        # Another thread appends marks, so a mark may be older than the last read. In that case, the
        # negative difference corrects the category that the last read assumed.
        begin = self.until
        self.until = at
        spent = at - begin
        is_in_step = self._current == LOGGING and self._is_in_epoch
        if self._current in CATEGORIES and not is_in_step:
            self.spent[self._current] += spent
            self._between[self._current] += spent
            return
        collecting = 0
        if self._collections:
            collecting = self._collected(begin, at)
        if collecting:
            self._step[COLLECTING] += collecting
        self._step[self._current] += spent - collecting

    def _flush(self, *, keep_other: bool) -> None:
        """Assign the time of an incomplete step to its phases.

        Args:
            keep_other: Whether the time outside the phases, such as in callbacks that run after the
                end of a step, becomes part of the next step. Otherwise, with one batch per epoch,
                no step would contain it.
        """
        kept = self._step.pop(OTHER, 0) if keep_other else 0
        for phase, spent in self._step.items():
            self.spent[_category_of(phase)] += spent
        self._step = Counter({OTHER: kept})

    def _end_step(self, at: int, end: StepEnd) -> None:
        phases = self._step
        between = self._between
        self._step = Counter()
        self._between = Counter()
        evidence = self._evidence(at, end)
        self._step_begin = at
        step = StepSpent(
            phases={phase: spent for phase, spent in phases.items() if spent},
            total=sum(phases.values()),
            evidence=evidence,
            elements=elements(end.shapes),
        )
        if self.first_step is None:
            self.first_step = max(end.number, 0)
        self.steps = end.step
        self._ended += 1
        self._add_group(step, end, between)
        if self._ended <= COLD:
            self.spent["warm_up"] += step.total
            return
        taken, category = self._judged(step, end, at)
        for phase, spent in phases.items():
            self.spent[_category_of(phase)] += spent - taken.get(phase, 0)
        self.spent[category] += sum(taken.values())
        took = step.total + sum(between.values())
        for name in between.keys() & INTERRUPTIONS.keys():
            cost = between[name]
            if cost > self._usual.tolerance:
                verdict = Verdict(self._usual.median, cost, {}, INTERRUPTIONS[name], name)
                self._note_slow(end.number, at, took, verdict)

    def _add_group(self, step: StepSpent, end: StepEnd, between: Mapping[str, int]) -> None:
        mode: Literal["unprofiled", "profiled", "warm_up"] = "unprofiled"
        if self._ended <= COLD:
            mode = "warm_up"
        elif end.touched:
            mode = "profiled"
        seconds = step.total / 1e9
        group = StepGroup(
            first=end.number,
            last=end.number,
            spent={phase: spent / 1e9 for phase, spent in step.phases.items()},
            between={name: spent / 1e9 for name, spent in between.items() if spent},
            longest=seconds,
            mode=mode,
        )
        self.groups.append(group)
        if len(self.groups) > MOST_GROUPS:
            self.groups = in_pairs(self.groups)
        if mode == "unprofiled":
            self.durations[duration_class(seconds)] += 1

    def _judged(self, step: StepSpent, end: StepEnd, at: int) -> tuple[dict[str, int], str]:
        """Return the part of a step's time that is not training, and the category of this part.

        The part is in nanoseconds by phase. For a slow step, it is the extra time. For a step that
        lflops counted, timed by module or traced, it is the extra time that lflops caused, or the
        whole step if there is no recent step for comparison. For all other steps, it is empty.
        """
        if end.touched:
            beyond = self._usual.beyond(step)
            return dict(step.phases if beyond is None else beyond), "lflops"
        verdict = self._usual.judge(step)
        if verdict is None:
            return {}, "training/other"
        self._note_slow(end.number, at, step.total, verdict)
        category = LOGGING if verdict.cause == LOGGING else f"slow/{verdict.cause}"
        return dict(verdict.by_phase), category

    def _note_slow(self, step: int, at: int, took: int, why: Verdict) -> None:
        slow = SlowStep(
            step=step,
            end=(at - self.begin) / 1e9,
            seconds=took / 1e9,
            usual=why.usual / 1e9,
            cost=why.cost / 1e9,
            cause=why.cause,
            phase=why.phase,
        )
        self.slow.append(slow)

    def _evidence(self, at: int, end: StepEnd) -> Evidence:
        before = self._last or end
        self._last = end
        running = end.ran - before.ran
        waiting = 0
        if before.schedule and end.schedule:
            # The second counter is the time in which the thread was ready to run and had no core.
            waiting = int(end.schedule.split()[1]) - int(before.schedule.split()[1])
        # Only the end of a freeze is known exactly. So if there was a freeze during the step, all
        # time in which the thread did not run counts as waiting.
        for start, stop in self.freezes:
            if stop > self._step_begin and start < at:
                waiting = max(at - self._step_begin - running, waiting)
                break
        in_system = int(1e9 * (end.usage.ru_stime - before.usage.ru_stime))
        return Evidence(
            waiting=waiting,
            computing=max(running - in_system, 0),
            faults=end.usage.ru_majflt - before.usage.ru_majflt,
            retries=self._new_retries,
        )

    def _collected(self, begin: int, at: int) -> int:
        """Return the nanoseconds between two moments in which Python's garbage collector ran."""
        moments = self._collections
        collecting = 0
        while len(moments) >= 2 and moments[0] < at:
            collecting += max(min(moments[1], at) - max(moments[0], begin), 0)
            if moments[1] > at:
                break
            moments.popleft()
            moments.popleft()
        return collecting


def _category_of(phase: str) -> str:
    return phase if phase in CATEGORIES else f"training/{phase}"
