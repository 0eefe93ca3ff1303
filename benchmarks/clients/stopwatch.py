"""Measure steps, the planted fault, and phases with clocks that do not use lflops."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

FIRST_STEPS = 5
"""Steps at the start of a run that are left out of every mean."""

EACH_CALL = {"slow validation", "slow reward", "slow rollout"}
"""Faults that are planted in every call. The others are planted once in a step."""


class StepCounter:
    """Records when each step of the run's main optimizer ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self._optimizer: Any = None

    def start(self) -> None:
        """Receive the end of every optimizer step from now on."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._step_ends)

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            self.ends.append(time.perf_counter())

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def median_seconds(self) -> float | None:
        """Return the median time of a step without the first steps.

        Returns `None` if there are too few steps.
        """
        ends = self.ends[FIRST_STEPS:]
        if len(ends) < 2:
            return None
        return median(later - earlier for earlier, later in itertools.pairwise(ends))

    @property
    def mean_seconds(self) -> float | None:
        """Return the mean time of a step without the first steps.

        It includes the time between steps.
        """
        ends = self.ends[FIRST_STEPS:]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None


class FaultTimer:
    """Spends the planted time, and measures it.

    Args:
        fault: The planted fault, or `None`.
        seconds: The time to spend in each call.
        steps: The counter of the run's steps.

    Attributes:
        calls: For each fault, how often its code was reached.
    """

    def __init__(self, fault: str | None, seconds: float, steps: StepCounter) -> None:
        self.calls: Counter[str] = Counter()
        self._fault = fault
        self._seconds = seconds
        self._steps = steps
        self._last_step = -1
        self._spent: list[tuple[int, float]] = []
        self._log = Path("steps.jsonl")

    def reach(self, fault: str) -> None:
        """Sleep for the planted time, if this is the planted fault."""
        self._reach(fault, lambda: time.sleep(self._seconds))

    def log(self, model: Any) -> None:
        """Write the norms of a model's parameters to a file, for as long as the planted time."""
        self._reach("step logging", lambda: self._write_norms(model))

    def _write_norms(self, model: Any) -> None:
        until = time.perf_counter() + self._seconds
        with self._log.open("w") as file:
            while time.perf_counter() < until:
                for name, parameter in model.named_parameters():
                    norm = parameter.detach().norm().item()
                    file.write(json.dumps({"name": name, "norm": norm}) + "\n")
                    if time.perf_counter() >= until:
                        break

    def _reach(self, fault: str, spend: Callable[[], None]) -> None:
        if self._seconds and fault not in EACH_CALL and len(self._steps) == self._last_step:
            return
        self.calls[fault] += 1
        if fault != self._fault or not self._seconds:
            return
        self._last_step = len(self._steps)
        start = time.perf_counter()
        spend()
        self._spent.append((self._last_step, time.perf_counter() - start))

    @property
    def seconds_per_step(self) -> float | None:
        """Return the measured cost per step, between the first steps and the last step."""
        return self._per_step(len(self._steps))

    @property
    def seconds_per_step_to_the_end(self) -> float | None:
        """Return the measured cost per step, including the time after the last step.

        This includes, for example, a final validation.
        """
        return self._per_step(len(self._steps) + 1)

    def _per_step(self, end: int) -> float | None:
        steps = len(self._steps) - FIRST_STEPS
        late = [seconds for step, seconds in self._spent if FIRST_STEPS <= step < end]
        if not late or steps < 1:
            return None
        return sum(late) / steps


class PhaseTimer:
    """Measures the time of data loading, backward and the optimizer, by wrapping torch.

    It is independent of lflops. Findings about a run without a fault are compared with it.
    """

    def __init__(self, steps: StepCounter) -> None:
        self._steps = steps
        self._seconds: Counter[str] = Counter()
        self._optimizer_starts = 0.0

    def start(self) -> None:
        """Wrap torch's functions from now on."""
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )
        from torch.utils.data import dataloader

        iterator = dataloader._BaseDataLoaderIter  # noqa: SLF001 - every loader's iterator
        iterator.__next__ = self._timed("data", iterator.__next__)
        torch.autograd.backward = self._timed("backward", torch.autograd.backward)
        register_optimizer_step_pre_hook(self._optimizer_starts_step)
        register_optimizer_step_post_hook(self._optimizer_ends_step)

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                end = time.perf_counter()
                self._add(phase, end - start)
                if phase == "backward":
                    # Lightning runs forward and backward within the optimizer's step.
                    self._optimizer_starts = end

        return timed

    def _optimizer_starts_step(self, *_: Any) -> None:
        self._optimizer_starts = time.perf_counter()

    def _optimizer_ends_step(self, *_: Any) -> None:
        self._add("optimizer", time.perf_counter() - self._optimizer_starts)

    def _add(self, phase: str, seconds: float) -> None:
        if len(self._steps) >= FIRST_STEPS:
            self._seconds[phase] += seconds

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of each phase in the time after the first steps."""
        ends = self._steps.ends[FIRST_STEPS:]
        if len(ends) < 2:
            return {}
        whole = ends[-1] - ends[0]
        return {phase: seconds / whole for phase, seconds in self._seconds.items()}
