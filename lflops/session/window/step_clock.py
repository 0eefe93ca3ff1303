"""The steps of a run as they go by: how long each took, what it was made of, and whether it is a measure of the others.

This runs in every step of the training. All that can wait until somebody asks for a step is left until then.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from resource import struct_rusage
from typing import Any, NamedTuple

from torch import Tensor

from lflops.collect.inputs.batch import samples_and_tokens, units_of
from lflops.collect.inputs.tensors import tensors_in
from lflops.collect.timing.clock import cpu_usage
from lflops.collect.timing.step_phases import PhaseMarks, StepPhases
from lflops.collect.torch_private.modules import compilations
from lflops.profile.steps import Step, StepKind, is_clean
from lflops.session.window.hooked_step import HookedStep

__all__ = ["StepClock", "TimedStep", "signature"]

COLD = 2
"""So many steps at the beginning of a run are no measure of the others."""

MANY_SHAPES = 16
"""From so many on a new shape is what this training is like, and disturbs no step more than the others."""

KEPT = 200
"""Buffer of finished steps; the oldest are dropped when it is full."""


class TimedStep(NamedTuple):
    """A step that is over.

    Attributes:
        ordinal: Its number in this run, from 0.
        logged_step: The step's number in the loggers.
        counted: Whether it was counted. Such a step is not timed.
        hooked: The timestamps of its modules' hooks; `None` in a step without hooks.
        traced: Whether Kineto recorded it.
        is_complete: Whether every batch of it ran to its end.
        times_phases: Whether its phases were recorded; if not, only its total time is known.
        stretch: Its phases on the training's device.
        on_host: Its phases by the host's clock, where the device has another one.
        shapes: The signatures of its batches.
        cpu: The process's CPU time when the step began, and when it ended.
    """

    ordinal: int
    logged_step: int
    counted: bool
    hooked: HookedStep | None
    traced: bool
    is_complete: bool
    times_phases: bool
    stretch: PhaseMarks
    on_host: PhaseMarks | None
    marks: tuple[str, ...]
    shapes: tuple[Hashable, ...]
    samples: int | None
    tokens: int | None
    cpu: tuple[struct_rusage, struct_rusage]

    @property
    def kind(self) -> StepKind:
        """What lflops did in it."""
        if self.counted:
            return "counted"
        if self.hooked is not None:
            return "hooked"
        return "traced" if self.traced else "clean"

    @property
    def is_clean(self) -> bool:
        """Whether it is a clean step that no batch was dropped from."""
        return self.is_complete and is_clean(self.kind, self.marks)


def signature(batch: Any) -> Hashable:
    """The shapes of a batch's tensors in their structure: two batches of one signature are the same work."""
    if isinstance(batch, Tensor):
        return batch.numel() if batch.is_nested else batch.shape
    if isinstance(batch, list | tuple):
        return tuple([signature(each) for each in batch])
    if isinstance(batch, Mapping):
        return tuple([(key, signature(value)) for key, value in batch.items()])
    if batch is None or isinstance(batch, str | int | float):
        return None
    return tuple(map(signature, tensors_in(batch)))


_PHASE_MARKS = TimedStep._fields.index("stretch")


class StepClock:
    """Makes a step of the batches that gradients are accumulated over.

    Args:
        phases: A listener to the phases.
        on_host: A listener by the host's clock, where `phases` have another.
        units: As `FlopsMonitor` is given it.
        updating: The phases without which a step has learned nothing.
        scaled: Whether gradients are scaled, so that an optimizer that should step may not.

    Attributes:
        ordinal: The number of the step that is going on, from 0.
        shapes: The signatures of its batches that are over.
        times_phases: Whether the phases are recorded.
    """

    def __init__(self, phases: StepPhases, on_host: StepPhases | None, units: Any, *, updating: frozenset[str], scaled: bool) -> None:
        """Begin the first step."""
        self.ordinal = 0
        self.shapes: list[Hashable] = []
        self.times_phases = True
        self._phases = phases
        self._on_host = on_host
        self._units = units
        self._updating = updating
        self._scaled = scaled
        self._updated = False
        self._units_of: dict[Hashable, tuple[int | None, int | None]] = {}
        self._marks: dict[str, None] = {}
        self._units_of_batches: list[tuple[int | None, int | None]] = []
        self._pending: deque[tuple[Any, ...]] = deque(maxlen=KEPT)  # the fields of a TimedStep, which is made when it is read
        self._compiled = compilations()
        self._cpu = cpu_usage()
        self._is_torn = False
        self._can_be_plain = on_host is None and units is None and not scaled
        self.resume()

    def mark(self, mark: str) -> None:
        """Note something about the step that is going on."""
        self._marks[mark] = None

    def update(self, *_: object) -> None:
        """An optimizer has made a step."""
        self._updated = True

    def drop_batches(self) -> None:
        """A batch was left before it was over: its step begins again with the next one, and is not timed."""
        self._is_torn = True
        self.shapes, self._units_of_batches = [], []

    def batch(self, batch: Any) -> Hashable:
        """A batch is over. Returns its signature."""
        shapes = signature(batch)
        units = self._units_of.get(shapes)
        if units is None:
            units = self._units_of[shapes] = samples_and_tokens((batch,), {})
            if len(self._units_of) <= MANY_SHAPES:
                self.mark("new_shapes")
        if self._units is not None:
            given = units_of("FlopsMonitor", self._units, (batch,), {})
            units = given.get("samples_per_step", units[0]), given.get("tokens_per_step", units[1])
        self.shapes.append(shapes)
        self._units_of_batches.append(units)
        return shapes

    def tokens_of(self, shapes: Hashable) -> int | None:
        """Tokens of a batch of this signature."""
        return self._units_of.get(shapes, (None, None))[1]

    def end_plain(self, batch: Any, logged_step: int) -> bool:
        """End a step of one batch in which nothing else happened: as `batch` and `end`, with as little as possible on the way.

        Returns whether it was such a step; where not, nothing is done.
        """
        shapes = signature(batch)
        units, compiled = self._units_of.get(shapes), compilations()
        if units is None or not self._can_be_plain or self._marks or self.shapes or self.ordinal < COLD or compiled != self._compiled:
            return False
        before = self._cpu
        if self.times_phases:
            self._cpu = cpu_usage()
        samples, tokens = units
        flags, cpu = (False, None, False, True, self.times_phases), (before, self._cpu)  # neither counted, hooked nor traced, but complete
        self._pending.append((self.ordinal, logged_step, *flags, self._phases.end(), None, (), (shapes,), samples, tokens, cpu))
        self.ordinal += 1
        return True

    def end(self, logged_step: int, *, counted: bool, hooked: HookedStep | None = None, traced: bool = False) -> None:
        """The step is over, and the next one begins.

        Args:
            logged_step: What the loggers call it.
            counted: Whether it was counted.
            hooked: What its modules' hooks have stamped.
            traced: Whether it was recorded.
        """
        stretch, compiled = self._phases.end(), compilations()
        on_host = None if self._on_host is None else self._on_host.end()
        cpu = cpu_usage() if self.times_phases else self._cpu
        marks, units = self._marks, self._units_of_batches
        if self.ordinal < COLD:
            marks["cold"] = None
        if compiled != self._compiled:
            marks["recompiled"] = None
        if self._scaled and not self._updated:
            marks["no_update"] = None
        samples, tokens = units[0] if len(units) == 1 else (_sum(each) for each in zip(*units, strict=True))
        step = (
            self.ordinal,
            logged_step,
            counted,
            hooked,
            traced,
            not self._is_torn,
            self.times_phases,
            stretch,
            on_host,
            tuple(marks),
            tuple(self.shapes),
            samples,
            tokens,
            (self._cpu, cpu),
        )
        self._pending.append(step)
        self.ordinal += 1
        self._marks, self.shapes, self._units_of_batches, self._is_torn, self._updated = {}, [], [], False, False
        self._cpu, self._compiled = cpu, compiled

    def resume(self) -> None:
        """Begin the step anew: what ran since the last one ended was our own."""
        self._phases.begin()
        if self._on_host is not None:
            self._on_host.begin()
        self._cpu = cpu_usage()

    def read(self) -> Iterator[TimedStep]:
        """The steps that are over and can be timed without waiting."""
        while self._pending and self._phases.has_come(self._pending[0][_PHASE_MARKS]):
            yield TimedStep._make(self._pending.popleft())

    def seconds(self, step: TimedStep) -> float:
        """How long a step took."""
        return self._phases.total(step.stretch)

    def step(self, step: TimedStep) -> Step:
        """A step as a value."""
        phases = self._phases.seconds(step.stretch) if step.times_phases else {}
        idle = step.times_phases and not self._updating <= phases.keys() and "no_update" not in step.marks
        before, after = step.cpu
        return Step(
            index=step.logged_step,
            kind=step.kind,
            seconds=None if step.counted else self.seconds(step),
            phases={} if step.counted else phases,
            host_phases=self._on_host.seconds(step.on_host)
            if self._on_host and step.on_host and step.times_phases and not step.counted
            else {},
            cpu_user=after.ru_utime - before.ru_utime if step.times_phases else None,
            cpu_system=after.ru_stime - before.ru_stime if step.times_phases else None,
            samples=step.samples,
            tokens=step.tokens,
            marks=(*step.marks, "no_update") if idle else step.marks,
        )


def _sum(counts: Any) -> int | None:
    return None if None in counts else sum(counts)
