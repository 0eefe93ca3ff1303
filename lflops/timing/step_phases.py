"""What a training step's time goes to: the self times of nested phases, which add up to the step.

    a step       |........[optimizer.....[forward....].[backward.....]..[clip..].......].....|
    other         ^^^^^^^^                            ^                                 ^^^^^
    optimizer              ^^^^^^^^^^^^^^              ^              ^^        ^^^^^^^^

A phase has the time from a mark at its beginning to one at its end, less that of the phases within
it; what is in none of them is other. What is in none of them between backward and the optimizer has
a name: a user's own loop clips gradients there, and no hook says so. Marks are read later: on a
device they are events on the stream, so a phase is the time in which the stream had nothing else to
go on with.
"""

from collections.abc import Iterable
from typing import Any

from lflops.timing.clock import Clock

# what is in no phase
OTHER = "other"
# Lightning's own collectives, in which ranks wait for each other
SYNC = "sync"

WAIT = "wait"
"""The end of backward, where every node has run:

DDP waits in it for the gradients of the other ranks. It is a part of backward.
"""

BETWEEN = (
    # what is in no phase, from the end of backward to the optimizer's step
    "before_optimizer"
)

ORDER = ("data", "transfer", "forward", "backward", "clip", BETWEEN, "optimizer", OTHER, SYNC)
"""The order of a training step's phases; others follow."""


PhaseMarks = tuple[list[Any], list[str], Any]
"""A step as it was marked: when a phase became the innermost one, which phase, and the end of the last.

Plain, as every step makes one.
"""


class StepPhases:
    """Follows one thread in and out of phases.

    It does so some twenty times in a step: what can wait is left to who reads the marks.
    """

    def __init__(self, clock: Clock, within: Clock | None = None, every: int = 1) -> None:
        """Of one step in `every` the phases are marked.

        `within` marks them where `clock` may not; its seconds have to be the same.
        """
        self._clock = clock
        # marks a moment between two steps
        self.mark = clock.mark
        self._mark = (within or clock).mark
        self._every = every
        # steps since the last one whose phases were marked
        self._unmarked = 0
        # whether those of the step that is running are
        self.is_marked = True
        self._running: list[str] = [OTHER]
        # When a phase became the innermost one, since the last step that was handed out; always the
        # same list. A moment that was not marked is `None`.
        self.marks: list[Any] = []
        self._phases: list[str] = []

    def enter(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        if self.is_marked:
            self.marks.append(self._mark())
            self._phases.append(phase)
        self._running.append(phase)

    def leave(self) -> None:
        running = self._running
        # the first is what is in no phase
        if len(running) > 1:
            running.pop()
        if self.is_marked:
            self.marks.append(self._mark())
            self._phases.append(running[-1])

    def drop(self) -> None:
        """The innermost phase is left by an exception.

        No moment is marked, so that nothing of ours can go wrong on its way.
        """
        if len(self._running) > 1:
            self._running.pop()
        self.marks.append(None)
        self._phases.append(self._running[-1])

    def wait(self) -> None:
        """Backward goes on to wait for other ranks."""
        if self.is_marked:
            self.marks.append(self._mark())
            self._phases.append(WAIT)

    def begin(self) -> None:
        """A step begins now; what was marked since the last one ended belongs to none."""
        self.marks[:] = [self.mark()]
        self._phases = [self._running[-1]]

    def end(self) -> PhaseMarks:
        """The step ends, and the next begins."""
        return self.cut([(len(self.marks), self.mark())])[0]

    def cut(self, ends: Iterable[tuple[int, Any]]) -> list[PhaseMarks]:
        """Steps whose ends somebody else has noted.

        The length of `marks` when each ended, and a mark of that moment.
        """
        steps, marks, phases, place = [], self.marks[:], self._phases, 0
        # what the step that is going on has of the one before
        first: PhaseMarks = [], [], None
        for length, end in ends:
            step = first[0] + marks[place:length], first[1] + phases[place:length], end
            first, place = (
                ([end], step[1][-1:] if self.is_marked else self._running[-1:], None),
                length,
            )
            if self._every > 1:
                self._unmarked = (self._unmarked + 1) % self._every
                self.is_marked = not self._unmarked
            # A step without what was not marked: its time is that of the phase before.
            known = [
                (mark, phase) for mark, phase in zip(*step[:2], strict=True) if mark is not None
            ]
            steps.append(([mark for mark, _ in known], [phase for _, phase in known], end))
        self.marks[:], self._phases = first[0] + marks[place:], first[1] + phases[place:]
        return steps

    def has_come(self, step: PhaseMarks) -> bool:
        """Whether the step's marks can be read without waiting for a device."""
        query = getattr(step[-1], "query", None)
        return query is None or bool(query())

    def total(self, step: PhaseMarks) -> float:
        marks, _, end = step
        return self._clock.seconds(marks[0], end)

    def seconds(self, step: PhaseMarks) -> dict[str, float]:
        """How long each phase ran. Their sum is the step."""
        marks, innermost, end = step
        innermost = ["backward" if phase == WAIT else phase for phase in innermost]
        around = zip(["", *innermost], innermost, [*innermost[1:], ""], strict=False)
        innermost = [
            BETWEEN if each == ("backward", OTHER, "optimizer") else each[1] for each in around
        ]
        ran = set(innermost)
        phases = dict.fromkeys(
            [*(phase for phase in ORDER if phase in ran), *sorted(ran.difference(ORDER))], 0.0
        )
        for start, phase, stop in zip(marks, innermost, [*marks[1:], end], strict=True):
            phases[phase] += self._clock.seconds(start, stop)
        return phases

    def waiting(self, step: PhaseMarks) -> float | None:
        """How long backward waited at its end; `None` where that is unknown."""
        marks, innermost, end = step
        if WAIT not in innermost:
            return None
        between = zip(marks, innermost, [*marks[1:], end], strict=True)
        return sum(
            self._clock.seconds(start, stop) for start, phase, stop in between if phase == WAIT
        )
