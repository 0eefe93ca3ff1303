"""The account of one start, made of a recorder's marks: nanoseconds by category, and the steps that were slow."""

from collections import deque
from collections.abc import Callable
from typing import Any

from lflops.ledger.account import CATEGORIES, NO_LOSS, SlowStep, group_of
from lflops.ledger.recorder import StepEnd
from lflops.ledger.usual import Evidence, StepSpent, Usual, Verdict, elements

COLD = 2  # so many steps at the beginning are the warm-up

INTERRUPTIONS = {"compilation": "compilation", "checkpoint_save": "checkpoint", "validation": "validation", "logging": "logging"}
"""Categories that make a step slow without a part in it, and the cause that each is."""

FLUSHING = {"between_epochs", "after_run"}  # what is running when a step was given up that had only waited for the loader's end

LONGEST_FREEZES = 100

COLLECTING = "gc"  # a phase and a category: what Python's garbage collector takes of the others


class Book:
    """Reads the marks of a start.

    `collections` are the moments at which Python's garbage collector began and ended, in turn. `retries` says how often the device's
    allocator has freed its cache and tried again, so far.
    """

    def __init__(self, begin: int, collections: deque[int], retries: Callable[[], int] = lambda: 0) -> None:
        self.begin = self.until = begin  # the account has every nanosecond from the one to the other
        self.spent: dict[str, int] = {}  # by category, since it was taken
        self.slow: list[SlowStep] = []  # those since they were taken
        self.lost, self.slow_steps = 0, 0  # nanoseconds and slow steps of all that was taken
        self.steps: int | None = None  # that were done, as the loggers count; `None` before the first
        self.first_step: int | None = None  # how many earlier starts had done
        self.freezes: deque[tuple[int, int]] = deque(maxlen=LONGEST_FREEZES)  # in which no thread of the process ran
        self._collections = collections
        self._retries, self._retried, self._new_retries = retries, 0, 0
        self._current = "start_up"
        self._step: dict[str, int] = {}
        self._between: dict[str, int] = {}
        self._ended = 0
        self._step_begin = begin
        self._usual = Usual()
        self._usage: Any = None
        self._schedule: bytes | None = None

    @property
    def open(self) -> dict[str, int]:
        """Nanoseconds of the step that is going on, by phase: part of the account, and perhaps to be judged otherwise at its end."""
        return {_category_of(phase): spent for phase, spent in self._step.items() if spent}

    def pace(self) -> tuple[int, float]:
        """How many steps are done, as the loggers count, and the seconds of the usual one."""
        return self.steps or 0, self._usual.median / 1e9

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
                    self._give_up_step()
            else:
                self._end_step(at, what)
        self._charge(now)

    def take(self) -> tuple[dict[str, int], list[SlowStep]]:
        """What was spent and which steps were slow since the last time."""
        taken = {name: spent for name, spent in self.spent.items() if spent}, self.slow
        self.spent, self.slow = {}, []
        self.lost += sum(spent for name, spent in taken[0].items() if group_of(name) not in NO_LOSS)
        self.slow_steps += len(taken[1])
        return taken

    def _charge(self, at: int) -> None:
        # A mark may be older than the last look at the clock, which another thread took: the difference goes back to where it belongs.
        begin, self.until = self.until, at
        spent = at - begin
        if self._current in CATEGORIES:
            self._add(self._current, spent)
            self._between[self._current] = self._between.get(self._current, 0) + spent
            return
        collecting = self._collected(begin, at)
        for phase, part in ((self._current, spent - collecting), (COLLECTING, collecting)):
            self._step[phase] = self._step.get(phase, 0) + part

    def _add(self, category: str, spent: int) -> None:
        self.spent[category] = self.spent.get(category, 0) + spent

    def _give_up_step(self) -> None:
        for phase, spent in self._step.items():
            self._add(_category_of(phase), spent)
        self._step = {}

    def _end_step(self, at: int, end: StepEnd) -> None:
        phases, self._step = self._step, {}
        between, self._between = self._between, {}
        evidence = self._evidence(at, end)
        self._step_begin = at
        step = StepSpent({phase: spent for phase, spent in phases.items() if spent}, sum(phases.values()), evidence, elements(end.shapes))
        if self.first_step is None:
            self.first_step = max(end.step - 1, 0)
        self.steps = end.step
        self._ended += 1
        if self._ended <= COLD:
            self._add("warm_up", step.total)
            return
        taken, category = self._judged(step, end, at)
        for phase, spent in phases.items():
            self._add(_category_of(phase), spent - taken.get(phase, 0))
        self._add(category, sum(taken.values()))
        for name in between.keys() & INTERRUPTIONS.keys():
            if between[name] > self._usual.tolerance:
                took = step.total + sum(between.values())
                self._note_slow(end.step, at, took, Verdict(self._usual.median, between[name], {}, INTERRUPTIONS[name], name))

    def _judged(self, step: StepSpent, end: StepEnd, at: int) -> tuple[dict[str, int], str]:
        """What of a step was no training, by phase, and the category that it belongs to."""
        if end.touched:
            beyond = self._usual.beyond(step)
            return dict(step.phases if beyond is None else beyond), "lflops"
        verdict = self._usual.judge(step)
        if verdict is None:
            return {}, "training/other"
        self._note_slow(end.step, at, step.total, verdict)
        return dict(verdict.by_phase), f"slow/{verdict.cause}"

    def _note_slow(self, step: int, at: int, took: int, why: Verdict) -> None:
        end, seconds, usual, cost = (each / 1e9 for each in (at - self.begin, took, why.usual, why.cost))
        self.slow.append(SlowStep(step=step, end=end, seconds=seconds, usual=usual, cost=cost, cause=why.cause, phase=why.phase))

    def _evidence(self, at: int, end: StepEnd) -> Evidence:
        before, self._usage = self._usage, end.usage
        ran_before, self._schedule = self._schedule, end.schedule
        if before is None:
            return Evidence()
        running = end.usage.ru_utime + end.usage.ru_stime - before.ru_utime - before.ru_stime
        # As Linux counts it: the thread was ready to run, and had no core.
        waiting = int(end.schedule.split()[1]) - int(ran_before.split()[1]) if ran_before and end.schedule else 0
        if any(stop > self._step_begin and start < at for start, stop in self.freezes):  # of which only the end is known
            waiting = max(at - self._step_begin - int(running * 1e9), waiting)
        return Evidence(
            waiting=waiting,
            running=int(running * 1e9),
            faults=end.usage.ru_majflt - before.ru_majflt,
            retries=self._new_retries,
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
