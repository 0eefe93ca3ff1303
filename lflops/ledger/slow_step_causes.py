"""Find the slow steps of a run, and the cause of each.

Each step is compared with recent steps whose batches have about the same size. The median of those
recent steps is called the usual step.
"""

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

LOGGING = "logging"
"""A category that is a phase of a step, because many loops log in each step.

Logging after an epoch or after the run belongs to no step.
"""

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


class SlowStepVerdict(NamedTuple):
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

    def judge(self, step: StepSpent) -> SlowStepVerdict | None:
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

    def _verdict(self, step: StepSpent, recent: "_Recent") -> SlowStepVerdict | None:
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
        return SlowStepVerdict(compared.totals.median, cost, by_phase, cause, phase)

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
        "not_scheduled": 2 * more_waiting >= cost and not waits_anyway,
        "loader": phase == "data",
        LOGGING: phase == LOGGING,
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
