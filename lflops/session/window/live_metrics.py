"""Step time, MFU and throughput over the whole run: a point for each that the loggers take."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from lflops.analyze.speed.peaks import peak_of
from lflops.profile.model import Profile
from lflops.session.window.step_clock import TimedStep

__all__ = ["LiveMetrics"]


class _StepSample(NamedTuple):
    """What is kept of a step."""

    seconds: float
    samples: int | None
    tokens: int | None
    shapes: tuple[Hashable, ...]


class LiveMetrics:
    """Gathers the clean steps between two points.

    Args:
        seconds: How long a step took.
        replicas: Over how many ranks batches are spread; `None` is unknown.
    """

    def __init__(self, seconds: Callable[[TimedStep], float], replicas: int | None) -> None:
        """Begin the first point."""
        self._seconds = seconds
        self._replicas = replicas
        self._macs: dict[Hashable, int] = {}
        self._peak: float | None = None
        self._steps: list[_StepSample] = []

    def set_work(self, shapes: Hashable, counted: Profile) -> None:
        """Keep what a batch of these shapes takes, forward and backward, and the peak that it is held against."""
        root = counted.modules[""]
        self._macs[shapes] = root.forward.macs + root.backward.macs
        self._peak = peak_of(counted.run.dtype, counted.run, counted.run.hardware)

    def add(self, step: TimedStep) -> None:
        """Add a step, if it is a clean one."""
        if step.clean and (seconds := self._seconds(step)):
            self._steps.append(_StepSample(seconds, step.samples, step.tokens, step.shapes))

    def point(self) -> dict[str, float]:
        """The figures since the last point; what is unknown is left out. FLOP/s rest on the steps alone whose shapes were counted."""
        steps, self._steps = self._steps, []
        if not steps:
            return {}
        together = sum(step.seconds for step in steps)
        point = {"step_ms": together / len(steps) * 1e3}
        for name in ("samples", "tokens"):
            units = [getattr(step, name) for step in steps]
            if None not in units and self._replicas is not None:
                point[f"{name}_per_second"] = sum(units) * self._replicas / together
        return point | self._utilization(steps)

    def _utilization(self, steps: list[_StepSample]) -> dict[str, float]:
        counted = [step for step in steps if all(shapes in self._macs for shapes in step.shapes)]
        if not counted:
            return {}
        macs = sum(self._macs[shapes] for step in counted for shapes in step.shapes)
        rate = 2 * macs / sum(step.seconds for step in counted)
        point = {"tflops_per_device": rate / 1e12, "counted_share": len(counted) / len(steps)}
        return point if self._peak is None else point | {"mfu": rate / self._peak}
