"""Step time, MFU and throughput over the whole run: a point for each that the loggers take."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from lflops.analysis.utilization import flops_per_second, of_peak
from lflops.hardware.peaks import peak_of
from lflops.monitoring.window.counting_step import NO_LENGTHS, BatchWork, HostBatch, Lengths
from lflops.monitoring.window.step_timer import MAX_PENDING_STEPS, TimedStep
from lflops.profile.profile import Profile
from lflops.profile.series import sum_known


class _StepSample(NamedTuple):
    seconds: float
    samples: int | None
    tokens: int | None
    batches: tuple[tuple[Hashable, int | None, Lengths], ...]


class LiveMetrics:
    """Gathers the clean steps between two points.

    `replicas` is over how many ranks batches are spread, `None` where that is unknown.
    """

    def __init__(self, seconds: Callable[[TimedStep], float], replicas: int | None) -> None:
        self._seconds = seconds
        self._replicas = replicas
        self._work = BatchWork()
        self._host = HostBatch()
        # before anything is counted, lengths give no work, and to read them takes longer than all
        # else here
        self._reads_lengths = False
        self._lengths: dict[
            int, list[Lengths]
            # of steps that were not read yet, by their number
        ] = {}
        self._peak: float | None = None
        self._steps: list[_StepSample] = []

    @property
    def transfers(self) -> HostBatch | None:
        """What has to listen to transfers.

        `None` where the work of batches does not depend on what is in them, as far as is known.
        """
        return self._host if self._reads_lengths else None

    def open(self) -> None:
        """A window opens, so batches are going to be counted.

        From now on read the lengths that may decide their work.
        """
        self._reads_lengths = self._work.needs_lengths

    def lengths(self, batch: Any) -> Lengths:
        """The lengths of the sequences of the batch that is running, where they may decide its work."""
        return self._host.of(batch) if self._reads_lengths else NO_LENGTHS

    def lengths_of(self, step: int) -> Lengths:
        """Those of the last batch of a step that is over."""
        return self._lengths.get(step, [NO_LENGTHS])[-1]

    def is_sample(self, batch: Any) -> bool:
        """Whether to count this batch would tell what others cost."""
        return bool(
            self._reads_lengths
            and (self._work.packed is None or self._work.needs_samples)
            and self.lengths(batch)
        )

    def record_lengths(self, step: int, batch: Any) -> None:
        """A batch of a step is over."""
        if self._reads_lengths:
            self._lengths.setdefault(step, []).append(self._host.of(batch))
            self._host.forget()
            self._lengths.pop(step - MAX_PENDING_STEPS, None)

    def drop(self, step: int) -> None:
        """The batches of a step are left, and it begins anew."""
        self._lengths.pop(step, None)

    def set_work(
        self, shapes: Hashable, tokens: int | None, lengths: Lengths, counted: Profile
    ) -> None:
        """Keep what such a batch takes, forward and backward, and the peak that it is held against."""
        self._work.add(shapes, tokens, lengths, counted)
        self._reads_lengths = self._work.needs_lengths
        self._peak = peak_of(counted.run.dtype, counted.run.hardware)

    def add(self, step: TimedStep) -> None:
        """Add a step, if it is a clean one."""
        lengths = self._lengths.pop(step.ordinal, [])
        if step.is_unprofiled and (seconds := self._seconds(step)):
            tokens = step.tokens if len(step.shapes) == 1 else None
            each = lengths if len(lengths) == len(step.shapes) else [NO_LENGTHS] * len(step.shapes)
            batches = tuple(
                (shapes, tokens, of_batch)
                for shapes, of_batch in zip(step.shapes, each, strict=True)
            )
            self._steps.append(_StepSample(seconds, step.samples, step.tokens, batches))

    def point(self, shares: Mapping[str, float] | None = None) -> dict[str, float]:
        """The figures since the last point; what is unknown is left out.

        FLOP/s rest on the steps alone whose work is known.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return {}
        together = sum(step.seconds for step in steps)
        point = {"step_ms": together / len(steps) * 1e3}
        for name in ("samples", "tokens"):
            units = [getattr(step, name) for step in steps]
            share = (shares or {}).get(name, self._replicas)
            if None not in units and share is not None:
                point[f"{name}_per_second"] = sum(units) * share / together
        return point | self._utilization(steps)

    def _utilization(self, steps: list[_StepSample]) -> dict[str, float]:
        works = [
            (step, sum_known([self._work.of(*batch) for batch in step.batches])) for step in steps
        ]
        counted = [(step, macs) for step, macs in works if macs is not None]
        if not counted:
            return {}
        rate = flops_per_second(
            sum(macs for _, macs in counted), sum(step.seconds for step, _ in counted)
        )
        point = {
            "tflops_per_device": (rate or 0.0) / 1e12,
            "counted_share": len(counted) / len(steps),
        }
        mfu = of_peak(rate, self._peak)
        return point if mfu is None else point | {"mfu": mfu}
