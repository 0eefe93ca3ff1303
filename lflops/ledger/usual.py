"""Which steps are slow, and why: each step is compared with the last ones of its size, by phase and by what the system has counted."""

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

REMEMBERED, FEWEST = 64, 8  # steps that tell what is usual, at most and at least

LEAST, SHARE, SPREADS = 50_000_000, 0.25, 8
"""A slow step takes longer than usual by so many nanoseconds, by this share of the usual, and by so many times the spread."""

LONG_WAIT = 250_000_000  # nanoseconds without a core that make a step slow. Less is usual where programs share a machine.
MANY_FAULTS = 50  # pages that were read from disk in a step, from which on they explain its time

SIZES_PER_DOUBLING, MOST_SIZES = 4, 64
MUCH_LARGER = 1.2


class Evidence(NamedTuple):
    """What the system and Python have counted in a step; times are in nanoseconds."""

    waiting: int = 0  # ready to run, or stopped, while the thread had no core
    running: int = 0  # on a core
    faults: int = 0  # pages that were read from disk
    retries: int = 0  # times that the CUDA allocator freed its cache and tried again


class StepSpent(NamedTuple):
    """A step: nanoseconds by phase, with what was counted in it."""

    phases: Mapping[str, int]
    total: int
    evidence: Evidence
    elements: int | None  # of its batch

    @property
    def net(self) -> int:
        """Nanoseconds without those in which the thread waited for a core."""
        return self.total - self.evidence.waiting


class Verdict(NamedTuple):
    """What a slow step took longer, by phase, than is usual, and why."""

    usual: int
    cost: int
    by_phase: Mapping[str, int]  # adds up to the cost
    cause: str
    phase: str  # the one with the most of the cost


class Usual:
    """The last steps of a run, by the size of their batches."""

    def __init__(self) -> None:
        self._by_size: dict[int | None, _Recent] = {}
        self._all = _Recent()

    def judge(self, step: StepSpent) -> Verdict | None:
        """Whether a step is slow: `None` where it is not, or where that is not known yet. It is remembered for those that follow."""
        size = round(SIZES_PER_DOUBLING * math.log2(step.elements)) if step.elements else None
        recent = self._by_size.setdefault(size, _Recent())
        is_new_size = not recent.knows
        compared = self._all if is_new_size else recent
        verdict = None
        if compared.knows and (cost := compared.cost_of(step)):
            by_phase = _excess(step, compared, cost)
            phase = max(by_phase, key=by_phase.__getitem__)
            cause = _cause(step, compared, cost, phase, is_larger=is_new_size and compared.is_exceeded(step.elements))
            verdict = Verdict(compared.totals.median, cost, by_phase, cause, phase)
        recent.add(step)
        self._all.add(step)
        if len(self._by_size) > MOST_SIZES:
            self._by_size.clear()
        return verdict

    def beyond(self, step: StepSpent) -> Mapping[str, int] | None:
        """What a step took longer by phase than the median of all so far; `None` without one."""
        if not self._all.steps:
            return None
        return _excess(step, self._all, max(step.total - self.median, 0))

    @property
    def tolerance(self) -> int:
        """Nanoseconds that a step may take longer."""
        return self._all.totals.tolerance if self._all.knows else LEAST

    @property
    def median(self) -> int:
        """Nanoseconds of the usual step."""
        return self._all.totals.median


def _cause(step: StepSpent, recent: "_Recent", cost: int, phase: str, *, is_larger: bool) -> str:
    """The first cause that explains half of the cost."""
    more = Evidence(*(value - usual for value, usual in zip(step.evidence, recent.usual_evidence, strict=True)))
    # A thread that computes more, or often waits for the disk, waits more often for a core as well, on a busy machine.
    reads_disk = more.faults >= MANY_FAULTS and 2 * more.running < cost and phase != "data"
    waits_anyway = reads_disk or (is_larger and 4 * more.running >= cost)
    causes = {
        "allocator_retry": more.retries > 0,
        "gc": phase == "gc",
        "not_scheduled": 2 * more.waiting >= cost and not waits_anyway,
        "loader": phase == "data",
        "other_rank": phase in {"wait", "sync"},
        "swap": reads_disk,
        "larger_batch": is_larger,
    }
    return next((cause for cause, is_it in causes.items() if is_it), "unknown")


def _excess(step: StepSpent, recent: "_Recent", cost: int) -> dict[str, int]:
    """The cost divided over the phases that took longer than usual."""
    usual = recent.usual_phases
    longer = {phase: max(spent - usual.get(phase, 0), 0) for phase, spent in step.phases.items()}
    together = sum(longer.values())
    if not together:
        return {max(step.phases, key=step.phases.__getitem__): cost} if step.phases else {}
    shares = {phase: cost * spent // together for phase, spent in longer.items() if spent}
    shares[max(shares, key=shares.__getitem__)] += cost - sum(shares.values())
    return shares


class _Recent:
    """The last steps of one size."""

    def __init__(self) -> None:
        self.steps: deque[StepSpent] = deque()
        self.totals, self._net = _Times(), _Times()  # as they were, and without what the thread waited for a core

    def add(self, step: StepSpent) -> None:
        """Remember a step, and forget the oldest of many."""
        oldest = self.steps.popleft() if len(self.steps) == REMEMBERED else None
        self.steps.append(step)
        self.totals.replace(None if oldest is None else oldest.total, step.total)
        self._net.replace(None if oldest is None else oldest.net, step.net)

    def cost_of(self, step: StepSpent) -> int:
        """Nanoseconds that a slow step costs; 0 for one that is not slow.

        Other processes let steps vary, which hides what else makes them slow. So a step has to be slow without its waits for a core, unless
        these are long.
        """
        cost, net = self.totals.beyond(step.total), self._net.beyond(step.net)
        return (cost or net) if net or cost >= LONG_WAIT else 0

    @property
    def knows(self) -> bool:
        """Whether there are enough to say what is usual."""
        return len(self.steps) >= FEWEST

    @property
    def usual_phases(self) -> dict[str, int]:
        """The median of each phase."""
        names = {phase for step in self.steps for phase in step.phases}
        return {name: int(statistics.median(step.phases.get(name, 0) for step in self.steps)) for name in names}

    @property
    def usual_evidence(self) -> Iterator[int]:
        """The median of each kind."""
        return (int(statistics.median(kind)) for kind in zip(*(step.evidence for step in self.steps), strict=True))

    def is_exceeded(self, size: int | None) -> bool:
        """Whether a batch is much larger than these are."""
        known = [step.elements for step in self.steps if step.elements is not None]
        return size is not None and bool(known) and size > MUCH_LARGER * statistics.median(known)


class _Times(list[int]):
    """Times of the last steps, sorted."""

    def replace(self, oldest: int | None, newest: int) -> None:
        """Forget one, if one is given, and remember another."""
        if oldest is not None:
            del self[bisect_left(self, oldest)]
        insort(self, newest)

    @property
    def median(self) -> int:
        """The middle one; 0 where there is none."""
        return self[len(self) // 2] if self else 0

    @property
    def tolerance(self) -> int:
        """How much more than the median is not yet slow: many steps that vary make it large."""
        return max(LEAST, int(SHARE * self.median), SPREADS * (self[len(self) * 4 // 5] - self.median))

    def beyond(self, time: int) -> int:
        """How much more than the median, if that is more than the tolerance; else 0."""
        excess = time - self.median
        return excess if excess > LEAST and excess > self.tolerance else 0


def elements(shapes: Any) -> int | None:
    """Elements of a batch's tensors, from its shapes; `None` where those are unknown."""
    try:
        return sum(int(shape[1] if shape and shape[0] == "nested" else math.prod(shape)) for shape in shapes[1])
    except (TypeError, IndexError):
        return None
