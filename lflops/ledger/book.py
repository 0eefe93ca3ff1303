"""The account of one start from its marks.

Nanoseconds by category, and slow steps, compared with the last ones of their size.
"""

import math
import statistics
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from lflops.ledger.account import CATEGORIES, NO_LOSS, SlowStep, group_of

# steps that tell what is usual, at most and at least
REMEMBERED, FEWEST = 64, 8

LEAST, SHARE, SPREADS = 50_000_000, 0.25, 8
"""A slow step takes longer than usual by so many nanoseconds, by this share of the usual, and by so many times the spread."""

# nanoseconds without a core that make a step slow. Less is usual where programs share a machine.
LONG_WAIT = 250_000_000
# pages that were read from disk in a step, from which on they explain its time
MANY_FAULTS = 50

SIZES_PER_DOUBLING, MOST_SIZES = 4, 64
MUCH_LARGER = 1.2


class StepEnd(NamedTuple):
    """A mark at the end of a step. It does not change the category."""

    # how many steps were done, as the loggers count
    step: int
    # nanoseconds of the thread on a core so far
    ran: int
    schedule: (
        bytes | None
        # when it ran and waited for a core, as the system counted it not long ago
    )
    # what it had used by then, as `getrusage` says: pages read from disk, and time in the system
    usage: Any
    # those of its batch, where they are known
    shapes: Hashable
    # whether lflops counted, timed or traced the step
    touched: bool


class Evidence(NamedTuple):
    """What the system and Python have counted in a step; times are in nanoseconds."""

    # ready to run, or stopped, while the thread had no core
    waiting: int = 0
    # on a core, and not in the system
    computing: int = 0
    # pages that were read from disk
    faults: int = 0
    # times that the CUDA allocator freed its cache and tried again
    retries: int = 0


class StepSpent(NamedTuple):
    """A step: nanoseconds by phase, with what was counted in it."""

    phases: Mapping[str, int]
    total: int
    evidence: Evidence
    # of its batch
    elements: int | None

    @property
    def net(self) -> int:
        """Nanoseconds without those in which the thread waited for a core."""
        return self.total - self.evidence.waiting


class Verdict(NamedTuple):
    """What a slow step took longer, by phase, than is usual, and why."""

    usual: int
    cost: int
    # adds up to the cost
    by_phase: Mapping[str, int]
    cause: str
    # the one with the most of the cost
    phase: str


class Usual:
    """The last steps of a run, by the size of their batches."""

    def __init__(self) -> None:
        self._by_size: dict[int | None, _Recent] = {}
        self._all = _Recent()

    def judge(self, step: StepSpent) -> Verdict | None:
        """Whether a step is slow.

        `None` where it is not, or where that is not known yet. It is remembered for those that
        follow.
        """
        size = round(SIZES_PER_DOUBLING * math.log2(step.elements)) if step.elements else None
        recent = self._by_size.setdefault(size, _Recent())
        is_new_size = not recent.knows
        compared = self._all if is_new_size else recent
        verdict = None
        if compared.knows and (cost := compared.cost_of(step)):
            by_phase = _excess(step, compared, cost)
            phase = max(by_phase, key=by_phase.__getitem__)
            cause = _cause(
                step,
                compared,
                cost,
                phase,
                is_larger=is_new_size and compared.is_exceeded(step.elements),
            )
            verdict = Verdict(compared.totals.median, cost, by_phase, cause, phase)
        recent.add(step)
        self._all.add(step)
        if len(self._by_size) > MOST_SIZES:
            self._by_size.clear()
        return verdict

    def beyond(self, step: StepSpent) -> Mapping[str, int] | None:
        """Compare a step by phase with the median of all so far; `None` without one."""
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
    more = Evidence(
        *(value - usual for value, usual in zip(step.evidence, recent.usual_evidence, strict=True))
    )
    # A thread that computes more, or often waits for the disk, waits more often for a core as well,
    # on a busy machine.
    reads_disk = more.faults >= MANY_FAULTS and 2 * more.computing < cost and phase != "data"
    waits_anyway = reads_disk or (is_larger and 4 * more.computing >= cost)
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
    """The cost divided over the phases that took longer than usual.

    No phase gives more than it has.
    """
    usual = recent.usual_phases
    longer = {phase: max(spent - usual.get(phase, 0), 0) for phase, spent in step.phases.items()}
    together = sum(longer.values()) or 1
    shares = {
        phase: min(cost * spent // together, step.phases[phase]) for phase, spent in longer.items()
    }
    for phase in sorted(shares, key=lambda each: (-shares[each], -step.phases[each])):
        shares[phase] += min(cost - sum(shares.values()), step.phases[phase] - shares[phase])
    return {phase: share for phase, share in shares.items() if share}


class _Recent:
    """The last steps of one size."""

    def __init__(self) -> None:
        self.steps: deque[StepSpent] = deque()
        self.totals, self._net = (
            _Times(),
            _Times(),
            # as they were, and without what the thread waited for a core
        )

    def add(self, step: StepSpent) -> None:
        """Remember a step, and forget the oldest of many."""
        oldest = self.steps.popleft() if len(self.steps) == REMEMBERED else None
        self.steps.append(step)
        self.totals.replace(None if oldest is None else oldest.total, step.total)
        self._net.replace(None if oldest is None else oldest.net, step.net)

    def cost_of(self, step: StepSpent) -> int:
        """Nanoseconds that a slow step costs; 0 for one that is not slow."""
        # Other processes let steps vary, which hides what else makes them slow. So a step has to be
        # slow without its waits for a core, unless these are long.
        cost, net = self.totals.beyond(step.total), self._net.beyond(step.net)
        return (cost or net) if net or cost >= LONG_WAIT else 0

    @property
    def knows(self) -> bool:
        """Whether there are enough to say what is usual."""
        return len(self.steps) >= FEWEST

    @property
    def usual_phases(self) -> dict[str, int]:
        names = {phase for step in self.steps for phase in step.phases}
        return {
            name: int(statistics.median(step.phases.get(name, 0) for step in self.steps))
            for name in names
        }

    @property
    def usual_evidence(self) -> Iterator[int]:
        return (
            int(statistics.median(kind))
            for kind in zip(*(step.evidence for step in self.steps), strict=True)
        )

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
        return max(
            LEAST, int(SHARE * self.median), SPREADS * (self[len(self) * 4 // 5] - self.median)
        )

    def beyond(self, time: int) -> int:
        """How much more than the median, if that is more than the tolerance; else 0."""
        excess = time - self.median
        return excess if excess > LEAST and excess > self.tolerance else 0


def elements(shapes: Any) -> int | None:
    """Elements of a batch's tensors, from its shapes; `None` where those are unknown."""
    try:
        return sum(
            int(shape[1] if shape and shape[0] == "nested" else math.prod(shape))
            for shape in shapes[1]
        )
    except (TypeError, IndexError):
        return None


# so many steps at the beginning are the warm-up
COLD = 2

INTERRUPTIONS = {
    "compilation": "compilation",
    "checkpoint_save": "checkpoint",
    "validation": "validation",
    "logging": "logging",
}
"""Categories that make a step slow without a part in it, and the cause that each is."""

FLUSHING = {
    "between_epochs",
    "after_run",
    # what is running when a step was given up that had only waited for the loader's end
}

LONGEST_FREEZES = 100

# a phase and a category: what Python's garbage collector takes of the others
COLLECTING = "gc"


class StepAccountant:
    """Reads the marks of a start.

    `collections` are the moments at which Python's garbage collector began and ended, in turn.
    `retries` says how often the device's allocator has freed its cache and tried again, so far.
    """

    def __init__(
        self, begin: int, collections: deque[int], retries: Callable[[], int] = lambda: 0
    ) -> None:
        self.begin = self.until = (
            # the account has every nanosecond from the one to the other
            begin
        )
        # by category, since it was taken
        self.spent = Counter[str]()
        # those since they were taken
        self.slow: list[SlowStep] = []
        # nanoseconds and slow steps of all that was taken
        self.lost, self.slow_steps = 0, 0
        self.steps: int | None = (
            # that were done, as the loggers count; `None` before the first
            None
        )
        # how many earlier starts had done
        self.first_step: int | None = None
        self.freezes: deque[tuple[int, int]] = deque(
            maxlen=LONGEST_FREEZES
            # in which no thread of the process ran
        )
        self._collections = collections
        self._retries, self._retried, self._new_retries = retries, 0, 0
        self._current = "start_up"
        self._step, self._between = Counter[str](), Counter[str]()
        self._ended = 0
        self._step_begin = begin
        self._usual = Usual()
        self._last: StepEnd | None = None

    @property
    def open(self) -> dict[str, int]:
        """Nanoseconds of the step that is going on, by phase.

        Part of the account, and perhaps to be judged otherwise at its end.
        """
        return {_category_of(phase): spent for phase, spent in self._step.items() if spent}

    @property
    def usual(self) -> float:
        """Seconds of the usual step; 0 before the first."""
        return self._usual.median / 1e9

    def read(self, marks: deque[tuple[int, str | StepEnd]], now: int) -> None:
        """Read all marks, and account for the time until now."""
        before, self._retried = self._retried, self._retries()
        self._new_retries = self._retried - before
        while marks:
            at, what = marks.popleft()
            self._charge(at)
            if isinstance(what, str):
                self._current = what
                if what in FLUSHING:
                    for phase, spent in self._step.items():
                        self.spent[_category_of(phase)] += spent
                    self._step = Counter()
            else:
                self._end_step(at, what)
        self._charge(now)

    def take(self) -> tuple[dict[str, int], list[SlowStep]]:
        """Take what was spent, and the steps that were slow, since the last time."""
        taken = {name: spent for name, spent in self.spent.items() if spent}, self.slow
        self.spent, self.slow = Counter(), []
        self.lost += sum(spent for name, spent in taken[0].items() if group_of(name) not in NO_LOSS)
        self.slow_steps += len(taken[1])
        return taken

    def _charge(self, at: int) -> None:
        # A mark may be older than the last look at the clock, which another thread took: the
        # difference goes back to where it belongs.
        begin, self.until = self.until, at
        spent = at - begin
        if self._current in CATEGORIES:
            self.spent[self._current] += spent
            self._between[self._current] += spent
            return
        if self._collections and (collecting := self._collected(begin, at)):
            self._step[COLLECTING] += collecting
            spent -= collecting
        self._step[self._current] += spent

    def _end_step(self, at: int, end: StepEnd) -> None:
        phases, self._step = self._step, Counter()
        between, self._between = self._between, Counter()
        evidence = self._evidence(at, end)
        self._step_begin = at
        step = StepSpent(
            {phase: spent for phase, spent in phases.items() if spent},
            sum(phases.values()),
            evidence,
            elements(end.shapes),
        )
        if self.first_step is None:
            self.first_step = max(end.step - 1, 0)
        self.steps = end.step
        self._ended += 1
        if self._ended <= COLD:
            self.spent["warm_up"] += step.total
            return
        taken, category = self._judged(step, end, at)
        for phase, spent in phases.items():
            self.spent[_category_of(phase)] += spent - taken.get(phase, 0)
        self.spent[category] += sum(taken.values())
        for name in between.keys() & INTERRUPTIONS.keys():
            if between[name] > self._usual.tolerance:
                took = step.total + sum(between.values())
                self._note_slow(
                    end.step,
                    at,
                    took,
                    Verdict(self._usual.median, between[name], {}, INTERRUPTIONS[name], name),
                )

    def _judged(self, step: StepSpent, end: StepEnd, at: int) -> tuple[dict[str, int], str]:
        """Judge a step: its nanoseconds that were no training, by phase, and the category that they belong to."""
        if end.touched:
            beyond = self._usual.beyond(step)
            return dict(step.phases if beyond is None else beyond), "lflops"
        verdict = self._usual.judge(step)
        if verdict is None:
            return {}, "training/other"
        self._note_slow(end.step, at, step.total, verdict)
        return dict(verdict.by_phase), f"slow/{verdict.cause}"

    def _note_slow(self, step: int, at: int, took: int, why: Verdict) -> None:
        end, seconds, usual, cost = (
            each / 1e9 for each in (at - self.begin, took, why.usual, why.cost)
        )
        self.slow.append(
            SlowStep(
                step=step,
                end=end,
                seconds=seconds,
                usual=usual,
                cost=cost,
                cause=why.cause,
                phase=why.phase,
            )
        )

    def _evidence(self, at: int, end: StepEnd) -> Evidence:
        before, self._last = self._last or end, end
        running, waiting = end.ran - before.ran, 0
        if (
            before.schedule and end.schedule
            # the second figure has the nanoseconds in which the thread was ready to run and had no core
        ):
            waiting = int(end.schedule.split()[1]) - int(before.schedule.split()[1])
        if any(
            stop > self._step_begin and start < at
            for start, stop in self.freezes
            # of which only the end is known
        ):
            waiting = max(at - self._step_begin - running, waiting)
        computing = max(running - int(1e9 * (end.usage.ru_stime - before.usage.ru_stime)), 0)
        faults = end.usage.ru_majflt - before.usage.ru_majflt
        return Evidence(
            waiting=waiting, computing=computing, faults=faults, retries=self._new_retries
        )

    def _collected(self, begin: int, at: int) -> int:
        """Nanoseconds of Python's garbage collector from one moment to another."""
        moments, collecting = self._collections, 0
        while len(moments) >= 2 and moments[0] < at:
            collecting += max(min(moments[1], at) - max(moments[0], begin), 0)
            if moments[1] > at:
                break
            moments.popleft()
            moments.popleft()
        return collecting


def _category_of(phase: str) -> str:
    return phase if phase in CATEGORIES else f"training/{phase}"
