"""Append events of a training run to a `PhaseLog`, as the integrations and the ledger do."""

from collections.abc import Callable

from lflops.phase_log import BEGIN, DROP, END, ENTER, LEAVE, MOVE, REST, RUN, WAIT, PhaseLog


class Events:
    """A phase log whose events have the current time of a clock."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.log = PhaseLog(clock)

    def _add(self, event: str, subject: object = None, detail: object = None) -> None:
        self.log.append((self.log.clock(), event, subject, detail))

    def enter(self, phase: str, stage: str = "train") -> None:
        self._add(ENTER, phase, stage)

    def enter_activity(self, category: str) -> None:
        """Begin a phase of the run, such as saving a checkpoint."""
        self._add(ENTER, category, RUN)

    def leave(self) -> None:
        self._add(LEAVE)

    def drop(self) -> None:
        self._add(DROP)

    def wait(self) -> None:
        self._add(WAIT)

    def begin(self, category: str) -> None:
        self._add(BEGIN, category)

    def end(self, category: str) -> None:
        self._add(END, category)

    def rest(self, category: str) -> None:
        self._add(REST, category)

    def move(self, nanoseconds: int, phase: str, category: str) -> None:
        self._add(MOVE, (phase, category), nanoseconds)
