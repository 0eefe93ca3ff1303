"""Compute the time account of one process of a run: nanoseconds by category, and the slow steps.

The input is a sequence of marks. A mark is a moment at which another category begins or at which a
step ends. `slow_step_causes.py` decides which steps are slow, and why.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

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
from lflops.ledger.slow_step_causes import LOGGING, Evidence, SlowStepVerdict, StepSpent, Usual


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
        # Whether the current category, if it is logging, is a phase of the running step.
        self._logs_in_step = False
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
            if self._current != LOGGING:
                # Logging inside a validation belongs to no step.
                self._logs_in_step = self._is_in_epoch and self._current not in CATEGORIES
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
        is_in_step = self._current == LOGGING and self._logs_in_step
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
                verdict = SlowStepVerdict(self._usual.median, cost, {}, INTERRUPTIONS[name], name)
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
            elements=step.elements,
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
            return _without_logging(step.phases if beyond is None else beyond), "lflops"
        verdict = self._usual.judge(step)
        if verdict is None:
            return {}, "training/other"
        self._note_slow(end.number, at, step.total, verdict)
        return _without_logging(verdict.by_phase), f"slow/{verdict.cause}"

    def _note_slow(self, step: int, at: int, took: int, why: SlowStepVerdict) -> None:
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


def _without_logging(by_phase: Mapping[str, int]) -> dict[str, int]:
    """Return the phases except logging, whose time stays in its own category."""
    return {phase: spent for phase, spent in by_phase.items() if phase != LOGGING}


def _category_of(phase: str) -> str:
    return phase if phase in CATEGORIES else f"training/{phase}"
