"""When a run is profiled.

Wait, warm up, be active, over and over; and what becomes of that in a run too short for it.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lflops.errors import ScheduleError

_LEAST = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0, "skip_first": 0}


@dataclass(frozen=True)
class Schedule:
    """What `torch.profiler.schedule` means by the same names; a step is a batch.

    Attributes:
        wait: Steps before each window, which only the clock sees.
        warmup: Steps that open a window. The last of them is counted, and never timed.
        active: Steps in which the window records.
        repeat: Windows; 0 goes on to the end of the run.
        skip_first: Steps before all that.
    """

    wait: int = 5
    warmup: int = 2
    active: int = 3
    repeat: int = 1
    skip_first: int = 0

    def __post_init__(self) -> None:
        """Raise a `ScheduleError` that names the argument, its value and what is taken, where the schedule cannot be."""
        for name, least in _LEAST.items():
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ScheduleError(f"{name}={value!r}: give a whole number, {least} or more")


class Position(NamedTuple):
    """Where in a plan a step is; windows are numbered from 0."""

    phase: Literal["wait", "warmup", "count", "traced", "module_timing", "over"]
    window: int


@dataclass(frozen=True)
class Plan:
    """A schedule in steps of the optimizer, each as many batches as gradients are accumulated over."""

    skip_first: int
    wait: int
    warmup: int
    active: int
    # how many there will be; `None` is no end of them
    windows: int | None
    # whether the active steps are traced, and as many again hooked behind them; else the active
    # ones are hooked
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
        """Round a schedule, which is in batches, up to whole steps of `accumulation` batches, and shrink it to the run's batches.

        One window at least remains, and in it the step that is counted. What goes first is what is
        skipped, then the waiting, the active steps but one, the warming up but one, and the last
        active one.
        """
        skip_first, wait, warmup, active = (
            -(-each // accumulation)
            for each in (schedule.skip_first, schedule.wait, schedule.warmup, schedule.active)
        )
        if math.isinf(batches):
            return cls(skip_first, wait, warmup, active, schedule.repeat or None, traced)
        room = max(-(-int(batches) // accumulation), 1)
        times = 2 if traced else 1
        excess = max(skip_first + wait + warmup + times * active - room, 0)
        skip_first, excess = _less(skip_first, excess, 0)
        wait, excess = _less(wait, excess, 0)
        active, excess = _less(active, excess, 1, times)
        warmup, excess = _less(warmup, excess, min(warmup, 1))
        active, excess = _less(active, excess, 0, times)
        fitting = max((room - skip_first) // max(wait + warmup + times * active, 1), 1)
        return cls(
            skip_first, wait, warmup, active, min(schedule.repeat or fitting, fitting), traced
        )

    @property
    def length(self) -> int:
        """Steps to the end of the first window."""
        return self.skip_first + self.wait + self.warmup + (2 if self.traced else 1) * self.active

    def waits_until(self, step: int) -> float:
        """The first step from this one on that is more than waited in.

        Infinity where there is none.
        """
        place = self.place(step)
        if place.phase == "over":
            return math.inf
        return max(
            step, self.skip_first + place.window * (self.length - self.skip_first) + self.wait
        )

    def place(self, step: int) -> Position:
        """Where the run's step of this index, which begins at 0, is.

        A warm-up's last step is the one to count.
        """
        window, within = divmod(max(step - self.skip_first, 0), self.length - self.skip_first)
        if self.windows is not None and window >= self.windows:
            return Position("over", self.windows)
        if step < self.skip_first or within < self.wait:
            return Position("wait", window)
        if within < self.wait + self.warmup:
            return Position("count" if within == self.wait + self.warmup - 1 else "warmup", window)
        traced = self.traced and within < self.wait + self.warmup + self.active
        return Position("traced" if traced else "module_timing", window)


class ScheduleCursor:
    """A plan as one stage goes through it.

    The position that was last acted on, which nothing but `go_to` moves.
    """

    def __init__(self, plan: Plan, first: int = 0) -> None:
        # the number of its first window
        self.first = first
        self._plan = plan
        # by how many steps it was brought forward
        self._ahead = 0
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Be at this step, which begins at 0."""
        self.phase, window = self._plan.place(step + self._ahead)
        self.window = self.first + window
        self.idle_until = (
            self._plan.waits_until(step + self._ahead) - self._ahead
            # the first step that is more than waited in
        )

    def bring_forward(self, step: int) -> None:
        """Let the window that is waited for open at this step, if it would open later."""
        self._ahead += max(int(self.idle_until) - step, 0)
        self.idle_until = min(self.idle_until, step)


def _less(length: int, excess: int, least: int, times: int = 1) -> tuple[int, int]:
    """Shorten a part that occurs `times` times; return its new length and the excess that remains."""
    cut = min(-(-excess // times), length - least)
    return length - cut, max(excess - times * cut, 0)
