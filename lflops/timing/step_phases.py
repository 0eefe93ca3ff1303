"""Divide a training step into phases: self times of nested phases, which add up to the step.

    a step       |........[optimizer.....[forward....].[backward.....]..[clip..].......].....|
    other         ^^^^^^^^                            ^                                 ^^^^^
    optimizer              ^^^^^^^^^^^^^^              ^              ^^        ^^^^^^^^

A phase is the time from the mark at its beginning to the mark at its end, less the phases within
it. Time in no phase is other. Time in no phase between backward and the optimizer has a separate
name: a custom loop clips gradients there, and no hook reports it. Marks are read later. On a device
they are events on the stream, so a phase is the time in which the stream had no other work to go on
with.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from lflops.timing.clock import Clock

OTHER = "other"
"""Time that is in no phase."""

SYNC = "sync"
"""Lightning's internal collectives, in which ranks wait for each other."""

WAIT = "wait"
"""The end of backward, after every node has run.

DDP waits in it for the gradients of the other ranks. It is a part of backward.
"""

BETWEEN = "before_optimizer"
"""Time in no phase from the end of backward to the optimizer's step."""

ORDER = ("data", "transfer", "forward", "backward", "clip", BETWEEN, "optimizer", OTHER, SYNC)
"""The order of a training step's phases; others follow."""


PhaseMarks = tuple[list[Any], list[str], Any]
"""A marked step: marks at which a phase became innermost, these phases, and the end mark.

It is a plain tuple, because every step makes one.
"""


class StepPhases:
    """Marks where one thread enters and leaves phases.

    It does so about twenty times in a step: everything that can wait is left to the reader of the
    marks.

    Attributes:
        mark: Marks a moment between two steps.
        marks: Moments at which a phase became the innermost one since the last step that was
            handed out. Always the same list. A moment that was not marked is `None`.
        is_marked: Set while the phases of the running step are marked.
    """

    def __init__(self, clock: Clock, within: Clock | None = None, every: int = 1) -> None:
        """Mark the phases of one step in `every`.

        `within` marks phases where `clock` may not; both must measure the same seconds.
        """
        self._clock = clock
        self.mark = clock.mark
        self._mark = (within or clock).mark
        self._every = every
        # steps since the last step whose phases were marked
        self._unmarked = 0
        self.is_marked = True
        # The first is the time in no phase.
        self._running: list[str] = [OTHER]
        self.marks: list[Any] = []
        self._phases: list[str] = []

    def enter(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        if self.is_marked:
            self.marks.append(self._mark())
            self._phases.append(phase)
        self._running.append(phase)

    def leave(self) -> None:
        running = self._running
        if len(running) > 1:
            running.pop()
        if self.is_marked:
            self.marks.append(self._mark())
            self._phases.append(running[-1])

    def drop(self) -> None:
        """Leave the innermost phase because of an exception.

        No moment is marked, so that nothing in lflops can fail while the exception passes.
        """
        if len(self._running) > 1:
            self._running.pop()
        self.marks.append(None)
        self._phases.append(self._running[-1])

    def wait(self) -> None:
        """Mark where backward begins to wait for other ranks."""
        if self.is_marked:
            self.marks.append(self._mark())
            self._phases.append(WAIT)

    def begin(self) -> None:
        """Begin a step; marks since the end of the last step belong to no step."""
        self.marks[:] = [self.mark()]
        self._phases = [self._running[-1]]

    def end(self) -> PhaseMarks:
        """End the step and begin the next."""
        return self.cut([(len(self.marks), self.mark())])[0]

    def cut(self, ends: Iterable[tuple[int, Any]]) -> list[PhaseMarks]:
        """Split the recorded marks into steps.

        `ends` has the length of `marks` at the end of each step, and a mark of that moment.
        """
        all_marks = self.marks[:]
        all_phases = self._phases
        steps: list[PhaseMarks] = []
        # The running step begins with the end mark of the step before.
        marks: list[Any] = []
        phases: list[str] = []
        place = 0
        for length, end in ends:
            marks += all_marks[place:length]
            phases += all_phases[place:length]
            steps.append((*_without_unmarked(marks, phases), end))
            marks = [end]
            phases = phases[-1:] if self.is_marked else self._running[-1:]
            place = length
            if self._every > 1:
                self._unmarked = (self._unmarked + 1) % self._every
                self.is_marked = not self._unmarked
        self.marks[:] = marks + all_marks[place:]
        self._phases = phases + all_phases[place:]
        return steps

    def has_come(self, step: PhaseMarks) -> bool:
        """Check that the marks of the step can be read without waiting for a device."""
        query = getattr(step[-1], "query", None)
        return query is None or bool(query())

    def total(self, step: PhaseMarks) -> float:
        marks, _, end = step
        return self._clock.seconds(marks[0], end)

    def seconds(self, step: PhaseMarks) -> dict[str, float]:
        """Seconds of each phase, which add up to the step."""
        marks, innermost, end = step
        names = _named(innermost)
        ran = set(names)
        phases = {phase: 0.0 for phase in ORDER if phase in ran}
        for phase in sorted(ran.difference(ORDER)):
            phases[phase] = 0.0
        for start, phase, stop in zip(marks, names, [*marks[1:], end], strict=True):
            phases[phase] += self._clock.seconds(start, stop)
        return phases

    def waiting(self, step: PhaseMarks) -> float | None:
        """Seconds that backward waited at its end, or `None` if unknown."""
        marks, innermost, end = step
        if WAIT not in innermost:
            return None
        waited = 0.0
        for start, phase, stop in zip(marks, innermost, [*marks[1:], end], strict=True):
            if phase == WAIT:
                waited += self._clock.seconds(start, stop)
        return waited


def _without_unmarked(marks: list[Any], phases: list[str]) -> tuple[list[Any], list[str]]:
    """Drop moments that were not marked: their time belongs to the phase before."""
    if None not in marks:
        return marks, phases
    known = [place for place, mark in enumerate(marks) if mark is not None]
    return [marks[place] for place in known], [phases[place] for place in known]


def _named(innermost: Sequence[str]) -> list[str]:
    """Count the wait as backward, and name the time between backward and the optimizer."""
    names = ["backward" if phase == WAIT else phase for phase in innermost]
    for place in range(1, len(names) - 1):
        if names[place - 1 : place + 2] == ["backward", OTHER, "optimizer"]:
            names[place] = BETWEEN
    return names
