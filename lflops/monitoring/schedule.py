"""Define in which steps lflops profiles a run, and fit a schedule to a short run.

A window is a few consecutive steps that lflops profiles.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lflops.errors import ScheduleError

_LEAST = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0, "skip_first": 0}


@dataclass(frozen=True)
class Schedule:
    """A schedule with the parameters of `torch.profiler.schedule`. Here, a step is one batch.

    Attributes:
        wait: Number of steps before each window. In these steps, lflops only reads a clock.
        warmup: Number of steps at the start of a window. In the last of them, lflops counts all
            operators; the duration of that step is never used.
        active: Number of steps after the warm-up, which lflops times or traces.
        repeat: Number of windows. If it is 0, windows repeat until the end of the run.
        skip_first: Number of steps before the first wait.
    """

    wait: int = 5
    warmup: int = 2
    active: int = 3
    repeat: int = 1
    skip_first: int = 0

    def __post_init__(self) -> None:
        """Raise a `ScheduleError` for an argument that is too small or not a whole number."""
        for name, least in _LEAST.items():
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ScheduleError(f"{name}={value!r}: pass a whole number, {least} or more")


class Position(NamedTuple):
    """The position of a step in a schedule: a phase, and the number of a window.

    Here, a phase is a part of the schedule, such as `wait`. Windows are numbered from 0.
    """

    phase: Literal["wait", "warmup", "count", "traced", "module_timing", "over"]
    window: int


@dataclass(frozen=True)
class Plan:
    """A schedule that has been converted from batches to optimizer steps and fitted to the run.

    With gradient accumulation, an optimizer step consists of several batches.

    Attributes:
        windows: The number of windows, or `None` if they repeat until the end of the run.
        traced: Whether torch.profiler traces the active steps. Then the same number of
            module-timing steps follow, in which hooks time each module. If false, the active steps
            are module-timing steps.
    """

    skip_first: int
    wait: int
    warmup: int
    active: int
    windows: int | None
    traced: bool = False

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        *,
        accumulation: int = 1,
        batches: float = math.inf,
        traced: bool = False,
    ) -> "Plan":
        """Convert a schedule from batches to whole steps, and shorten it to fit the run.

        Partial steps are rounded up. At least one window remains. If the schedule has a warm-up,
        the step that counts operators also remains. Until one window fits into the run, the parts
        of the schedule are shortened in this order: the skipped steps, the wait, the active steps
        down to one, the warm-up steps down to one, and finally the last active step. A window then
        only counts operators.

        Args:
            schedule: The schedule, in batches.
            accumulation: The number of batches in a step.
            batches: The number of batches in the run; infinite if it is unknown.
            traced: Whether the active steps are traced.
        """

        def steps(batches: float) -> int:
            return math.ceil(batches / accumulation)

        skip_first = steps(schedule.skip_first)
        wait = steps(schedule.wait)
        warmup = steps(schedule.warmup)
        active = steps(schedule.active)
        if math.isinf(batches):
            return cls(skip_first, wait, warmup, active, schedule.repeat or None, traced)
        room = max(steps(int(batches)), 1)
        times = 2 if traced else 1
        excess = max(skip_first + wait + warmup + times * active - room, 0)
        skip_first, excess = _shortened(skip_first, excess, 0)
        wait, excess = _shortened(wait, excess, 0)
        active, excess = _shortened(active, excess, 1, times)
        warmup, excess = _shortened(warmup, excess, min(warmup, 1))
        active, excess = _shortened(active, excess, 0, times)
        fitting = max((room - skip_first) // max(wait + warmup + times * active, 1), 1)
        windows = min(schedule.repeat or fitting, fitting)
        return cls(skip_first, wait, warmup, active, windows, traced)

    @property
    def length(self) -> int:
        """Return the number of steps until the end of the first window."""
        times = 2 if self.traced else 1
        return self.skip_first + self.wait + self.warmup + times * self.active

    def waits_until(self, step: int) -> float:
        """Return the first step at or after `step` that belongs to a window, or infinity."""
        position = self.place(step)
        if position.phase == "over":
            return math.inf
        period = self.length - self.skip_first
        return max(step, self.skip_first + position.window * period + self.wait)

    def place(self, step: int) -> Position:
        """Return the position of a step. The steps of the run are numbered from 0.

        The last step of a warm-up is the counting step: lflops counts all its operators.
        """
        window, within = divmod(max(step - self.skip_first, 0), self.length - self.skip_first)
        if self.windows is not None and window >= self.windows:
            return Position("over", self.windows)
        if step < self.skip_first or within < self.wait:
            return Position("wait", window)
        counting_step = self.wait + self.warmup - 1
        if within < counting_step:
            return Position("warmup", window)
        if within == counting_step:
            return Position("count", window)
        if self.traced and within <= counting_step + self.active:
            return Position("traced", window)
        return Position("module_timing", window)


class ScheduleCursor:
    """The current position of one stage, such as training, in its plan. `go_to` changes it.

    Attributes:
        first: Number of the plan's first window, counted over the whole run. It is above 0 if the
            run already had windows before this plan.
        phase: The phase of the schedule to which the current step belongs, such as `wait`.
        window: The number of the current window or, during a wait, of the next window.
        idle_until: The first step at or after the current step that belongs to a window; infinity
            if there is none.
    """

    def __init__(self, plan: Plan, first: int = 0) -> None:
        self.first = first
        self._plan = plan
        # Number of steps by which `bring_forward` has moved the remaining windows forward.
        self._ahead = 0
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Move to a step. Steps are numbered from 0."""
        self.phase, window = self._plan.place(step + self._ahead)
        self.window = self.first + window
        self.idle_until = self._plan.waits_until(step + self._ahead) - self._ahead

    def bring_forward(self, step: int) -> None:
        """Let the next window begin at this step, unless it begins earlier."""
        self._ahead += max(int(self.idle_until) - step, 0)
        self.idle_until = min(self.idle_until, step)


def _shortened(length: int, excess: int, least: int, times: int = 1) -> tuple[int, int]:
    """Shorten a part of the schedule, because the schedule has too many steps.

    Returns the new length of the part, and the number of excess steps that remain.

    Args:
        length: Number of steps in this part.
        excess: Number of steps by which the schedule is too long.
        least: Minimum length of this part.
        times: How often the schedule contains this part.
    """
    cut = min(math.ceil(excess / times), length - least)
    return length - cut, max(excess - times * cut, 0)
