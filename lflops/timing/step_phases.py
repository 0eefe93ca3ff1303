"""Divide a training step into the self times of nested phases, which add up to the step.

    a step       |........[optimizer.....[forward....].[backward.....]..[clip..].......].....|
    other         ^^^^^^^^                            ^                                 ^^^^^
    optimizer              ^^^^^^^^^^^^^^              ^              ^^        ^^^^^^^^

The self time of a phase is the time from the mark at its beginning to the mark at its end, without
the phases inside it. Time outside all phases is called `other`. If such time lies between backward
and the optimizer, it has a separate name, because custom loops clip gradients there and no hook
reports clipping. On a device, marks are events on the stream, so phases are measured in the time of
the stream. These events are read later, when the device has reached them.
"""

from collections.abc import Sequence
from typing import Any

from lflops.phase_log import STEP_END, WAIT, PhaseLog, innermost, last_phase
from lflops.timing.clock import Clock

OTHER = "other"
"""The name of the time outside all phases."""

SYNC = "sync"
"""The phase of Lightning's internal collectives, in which ranks wait for each other."""

BETWEEN = "before_optimizer"
"""The name of the time between backward and the optimizer step that belongs to no phase."""

ORDER = (
    "data",
    "transfer",
    "inference",
    "forward",
    "backward",
    "clip",
    BETWEEN,
    "optimizer",
    OTHER,
    SYNC,
)
"""The order in which the phases of a step are listed. Phases that are not in this list follow."""


PhaseMarks = tuple[list[Any], list[str], Any]
"""The timestamps (marks) of one step: a list of marks, a list of phases, and the mark at its end.

The first mark is the start of the step. At each further mark, the innermost phase changes. For each
mark, the list of phases has the phase that is the innermost from then on. The type is a plain
tuple, because every step creates one.
"""


class StepPhases:
    """Measures how long each phase of a step takes. This is the base class.

    Its subclasses mark the time at which each phase begins and ends. This class computes the times
    between these marks.

    Attributes:
        mark: Function that marks the current moment.
        is_marked: Whether phase changes in the current step are marked. If not, only the step's
            start and end are marked.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.mark = clock.mark
        self.is_marked = True
        # For each change of the innermost phase, its mark and the new innermost phase. At the end
        # of a step, the phase is `STEP_END`. The mark is `None` if the change was not marked.
        self._marks: list[Any] = []
        self._phases: list[str] = []

    def begin(self) -> None:
        """Begin a step, and drop the marks since the end of the previous step."""
        self._marks = [self.mark()]
        self._phases = [self._running]

    def end_step(self) -> None:
        """Mark the end of a step and the start of the next step."""
        raise NotImplementedError

    def steps(self) -> list[PhaseMarks]:
        """Return the marks of the steps that have ended, and remove them from this object."""
        steps, self._marks, self._phases = split_steps(self._marks, self._phases)
        return steps

    def end(self) -> PhaseMarks:
        """End the current step, begin the next step, and return the marks of the ended step."""
        self.end_step()
        return self.steps()[-1]

    def _step_ended(self, mark: Any) -> None:
        """Record the end of a step, and the start of the next step in the same phase."""
        phase = self._phases[-1] if self._phases and self.is_marked else self._running
        self._marks += [mark, mark]
        self._phases += [STEP_END, phase]

    @property
    def _running(self) -> str:
        """The innermost phase."""
        raise NotImplementedError

    def is_readable(self, step: PhaseMarks) -> bool:
        """Return whether the marks of the step can be read without waiting for a device."""
        query = getattr(step[-1], "query", None)
        return query is None or bool(query())

    def total(self, step: PhaseMarks) -> float:
        marks, _, end = step
        return self._clock.seconds(marks[0], end)

    def seconds(self, step: PhaseMarks) -> dict[str, float]:
        """Return the seconds of each phase, which add up to the duration of the step."""
        marks, innermost, end = step
        names = named_phases(innermost)
        ran = set(names)
        phases = {phase: 0.0 for phase in ORDER if phase in ran}
        for phase in sorted(ran.difference(ORDER)):
            phases[phase] = 0.0
        for start, phase, stop in zip(marks, names, [*marks[1:], end], strict=True):
            phases[phase] += self._clock.seconds(start, stop)
        return phases

    def waiting(self, step: PhaseMarks) -> float | None:
        """Return the seconds that backward waited for other ranks at its end; `None` if unknown."""
        marks, innermost, end = step
        if WAIT not in innermost:
            return None
        waited = 0.0
        for start, phase, stop in zip(marks, innermost, [*marks[1:], end], strict=True):
            if phase == WAIT:
                waited += self._clock.seconds(start, stop)
        return waited


class LoggedPhases(StepPhases):
    """Measures the phases of one stage, such as training, in host time.

    The times at which phases begin and end come from the phase log. `clock` marks only the start
    and the end of steps, so it may be a clock that waits for the device.

    Attributes:
        log: The phase log.
        is_connected: Whether this object receives the events of the log.
    """

    def __init__(self, log: PhaseLog, stage: str, clock: Clock) -> None:
        super().__init__(clock)
        self.log = log
        self._stage = stage
        self._stack: list[tuple[str, str]] = []
        self.is_connected = False

    def connect(self) -> None:
        """Receive the events of the log from now on."""
        self._stack.clear()
        self.log.connect(self)
        self.is_connected = True

    def disconnect(self) -> None:
        """Stop receiving the events of the log.

        The ends of steps are still marked. A second call does nothing.
        """
        self.log.disconnect(self)
        self.is_connected = False

    def take(self, events: Sequence[Any]) -> None:
        """Handle events of the log."""
        for moment, phase in innermost(events, self._stage, self._stack, self):
            if phase == STEP_END:
                self._step_ended(moment)
            else:
                self._marks.append(moment)
                self._phases.append(phase or OTHER)

    def begin(self) -> None:
        """Begin a step, and drop the marks since the end of the previous step."""
        self.log.deliver()
        super().begin()

    def end_step(self) -> None:
        """Mark the end of a step and the start of the next step."""
        if self.is_connected:
            self.log.append((self.mark(), STEP_END, self, None))
        else:
            self._step_ended(self.mark())

    def steps(self) -> list[PhaseMarks]:
        """Return the marks of the steps that have ended, and remove them from this object."""
        self.log.deliver()
        return super().steps()

    @property
    def _running(self) -> str:
        return last_phase(self._stack, self._stage) or OTHER


class MarkedPhases(StepPhases):
    """Measures the phases of one thread by marking the time when a phase begins or ends.

    It works with any clock. On a device, the marks are events on its stream.
    """

    def __init__(self, clock: Clock, every: int = 1) -> None:
        """Create the object. If `every` is n, phases are marked only in every n-th step."""
        super().__init__(clock)
        self._every = every
        # steps since the last step with marked phases
        self._unmarked = 0
        self._stack: list[str] = []

    def enter(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        self._stack.append(phase)
        self._record(phase)

    def leave(self) -> None:
        if self._stack:
            self._stack.pop()
        self._record(self._running)

    def drop(self) -> None:
        """Leave the innermost phase because of an exception.

        The clock is not called, so that nothing in lflops can fail while the exception propagates.
        """
        if self._stack:
            self._stack.pop()
        self._marks.append(None)
        self._phases.append(self._running)

    def wait(self) -> None:
        """Mark the moment at which backward begins to wait for other ranks."""
        self._record(WAIT)

    def end_step(self) -> None:
        """Mark the end of a step and the start of the next step."""
        self._step_ended(self.mark())
        if self._every > 1:
            self._unmarked = (self._unmarked + 1) % self._every
            self.is_marked = not self._unmarked
            if self.is_marked:
                self._phases[-1] = self._running

    def _record(self, phase: str) -> None:
        if self.is_marked:
            self._marks.append(self.mark())
            self._phases.append(phase)

    @property
    def _running(self) -> str:
        return self._stack[-1] if self._stack else OTHER


def split_steps(
    marks: Sequence[Any], phases: Sequence[str]
) -> tuple[list[PhaseMarks], list[Any], list[str]]:
    """Split a list of marks into steps. A step ends where the phase is `STEP_END`.

    Returns a list of the complete steps, then the marks and the phases of the unfinished step.
    """
    steps: list[PhaseMarks] = []
    begin = 0
    for place, phase in enumerate(phases):
        if phase == STEP_END:
            of_step = list(marks[begin:place])
            steps.append((*_without_unmarked(of_step, list(phases[begin:place])), marks[place]))
            begin = place + 1
    return steps, list(marks[begin:]), list(phases[begin:])


def _without_unmarked(marks: list[Any], phases: list[str]) -> tuple[list[Any], list[str]]:
    """Remove phase changes whose mark is `None`.

    The mark is missing if an exception ended the previous phase, because the clock was not read.
    The time after a removed change is added to the previous phase.
    """
    if None not in marks:
        return marks, phases
    known_marks = []
    known_phases = []
    for mark, phase in zip(marks, phases, strict=True):
        if mark is not None:
            known_marks.append(mark)
            known_phases.append(phase)
    return known_marks, known_phases


def named_phases(innermost: Sequence[str]) -> list[str]:
    """Return the names under which the times of the given innermost phases are reported.

    `WAIT` is reported as `backward`, and `OTHER` between backward and the optimizer as `BETWEEN`.
    """
    names = list(innermost)
    for place, phase in enumerate(innermost):
        if phase == WAIT:
            names[place] = "backward"
    for place in range(1, len(names) - 1):
        if names[place - 1 : place + 2] == ["backward", OTHER, "optimizer"]:
            names[place] = BETWEEN
    return names
