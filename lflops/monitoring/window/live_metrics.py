"""Calculate step time, MFU and throughput during the whole run, for the curves of the loggers."""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from lflops.analysis.utilization import flops_per_second, of_peak
from lflops.hardware.peaks import peak_of
from lflops.monitoring.window.counting_step import depends_on_lengths
from lflops.monitoring.window.step_timer import TimedStep
from lflops.profile.profile import Profile
from lflops.profile.series import sum_known


class _StepSample(NamedTuple):
    seconds: float
    samples: int | None
    tokens: int | None
    shapes: tuple[Hashable, ...]


SLOW_LOGGERS = 0.005
"""Seconds for a point of the curves from which loggers are slow."""

PAUSE = 50
"""After a point, slow loggers get no further point for this many times the seconds of the point.

So they take about 2 % of the run.
"""

COMPARED_POINTS = 3
"""The median of this many consecutive points decides whether loggers are slow."""


class PointPause:
    """Leaves out points of the curves if the user's loggers are slow.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._costs: deque[float] = deque(maxlen=COMPARED_POINTS)
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the next point may be logged."""
        return self._clock() >= self._until

    @contextmanager
    def logs_point(self) -> Iterator[None]:
        """Log a point in a `with` block, whose time decides when the next point may be logged."""
        begin = self._clock()
        yield
        end = self._clock()
        self._costs.append(end - begin)
        cost = median(self._costs)
        if len(self._costs) == COMPARED_POINTS and cost >= SLOW_LOGGERS:
            self._until = end + PAUSE * cost


class LiveMetrics:
    """Calculates the points of the loggers' curves from unprofiled steps.

    In an unprofiled step, lflops only reads a clock. A point has the average metrics, such as step
    time and MFU, of the steps since the last point.

    Args:
        seconds: Returns the duration of a step in seconds.
        replicas: The number of ranks that have different batches, or `None` if it is unknown.
    """

    def __init__(self, seconds: Callable[[TimedStep], float], replicas: int | None) -> None:
        self._seconds = seconds
        self._replicas = replicas
        self._macs_of_shapes: dict[Hashable, int] = {}
        self._peak: float | None = None
        self._steps: list[_StepSample] = []
        self._token_inputs: tuple[str, ...] = ()

    def set_work(self, shapes: Hashable, counted: Profile) -> None:
        """Store the MACs of a counted batch, and the peak FLOP/s of the chip.

        Later batches with the same shapes are assumed to have the same MACs. If the MACs depend on
        more than shapes, they are not stored.
        """
        self._peak = peak_of(counted.run.dtype, counted.run.hardware)
        self._token_inputs = counted.run.tokens_from
        if shapes is None:
            return
        if depends_on_lengths(counted):
            self._macs_of_shapes.pop(shapes, None)
            return
        root = counted.modules[""]
        self._macs_of_shapes[shapes] = root.forward.macs + root.backward.macs

    def add(self, step: TimedStep) -> None:
        """Add a step if it is unprofiled."""
        if not step.is_unprofiled:
            return
        seconds = self._seconds(step)
        if seconds:
            tokens = step.tokens_in(self._token_inputs)
            self._steps.append(_StepSample(seconds, step.samples, tokens, step.shapes))

    def point(self, shares: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the average metrics of the steps since the last call.

        Unknown metrics are left out.

        Args:
            shares: For samples and for tokens, the number on all ranks divided by the number on
                this rank. For example, `{"samples": 4.0}` means that all ranks together have 4
                times as many samples as this rank. If a value is missing, all ranks are assumed to
                have batches of the same size.
        """
        steps = self._steps
        self._steps = []
        if not steps:
            return {}
        seconds = sum(step.seconds for step in steps)
        point = {"step_ms": seconds / len(steps) * 1e3}
        units = {
            "samples": sum_known(step.samples for step in steps),
            "tokens": sum_known(step.tokens for step in steps),
        }
        for name, total in units.items():
            share = (shares or {}).get(name, self._replicas)
            if total is not None and share is not None:
                point[f"{name}_per_second"] = total * share / seconds
        return point | self._utilization(steps)

    def _utilization(self, steps: list[_StepSample]) -> dict[str, float]:
        """Return the FLOP/s and MFU of the steps in which the MACs of all batches are known."""
        macs = 0
        seconds = 0.0
        counted = 0
        for step in steps:
            step_macs = sum_known(self._macs_of_shapes.get(shapes) for shapes in step.shapes)
            if step_macs is not None:
                macs += step_macs
                seconds += step.seconds
                counted += 1
        if not counted:
            return {}
        rate = flops_per_second(macs, seconds)
        point = {"tflops_per_device": (rate or 0.0) / 1e12}
        if counted < len(steps):
            point["counted_share"] = counted / len(steps)
        mfu = of_peak(rate, self._peak)
        if mfu is not None:
            point["mfu"] = mfu
        return point
