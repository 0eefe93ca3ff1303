"""The short way through a step in which nothing happens: one batch, of shapes that are known, and no figure is due at its end.

Almost every step of a training is like that. All that is touched here has left the processor's caches since the last step, and to fetch it
takes longer than to run it. So as few objects as possible are touched; what the steps were is made out when somebody asks.
"""

from collections.abc import Callable, Hashable, Mapping, Sized
from resource import struct_rusage
from typing import Any, NamedTuple

from lflops.collect.inputs.batch import BatchReader
from lflops.collect.timing.clock import ThreadSchedule, cpu_usage

MAX_PENDING_STEPS = 200  # plain steps are flushed after this many

CPU_ROUND, CPU_READ = 16, 3
"""In each round of so many plain steps, the CPU time of so many is read: the system adds it up over all threads, which takes long."""


class BatchUnits(NamedTuple):
    """What is known of batches of the same shapes; all of it is `None` for those whose shapes are unknown."""

    shapes: Hashable
    samples: int | None
    tokens: int | None


class PlainSteps:
    """Notes the plain steps since the last one that was none."""

    def __init__(self, mark: Callable[[], Any], marks: Sized, schedule: ThreadSchedule | None = None) -> None:
        self.limit = 0  # how many steps may be plain, until they are made out
        self.reader = BatchReader()  # reads the batches
        self.known: dict[Hashable, BatchUnits] = {}  # batches by their shapes
        # Of each step so far its batch, how many marks there were when it ended, and a mark of that moment.
        self.steps: list[tuple[BatchUnits, int, Any]] = []
        # What the process had used of the CPU by the end of a step, by how many steps there were; only some are there.
        self.cpu: dict[int, struct_rusage] = {}
        self.reads_cpu = True  # whether that is read at all
        self.schedule = schedule
        # What the system has counted of the training's thread by the end of each step; empty where that is not read.
        self.threads: dict[int, bytes | None] = {}
        self._mark = mark
        self._marks = marks

    def note(self, batch: Any) -> bool:
        """End a step that may be plain. Returns whether it is one; where not, nothing is done."""
        known = self.known.get(self.reader.shapes(batch))
        if known is None:
            return False
        self.steps.append((known, len(self._marks), self._mark()))
        if self.reads_cpu and (self.schedule is not None or len(self.steps) % CPU_ROUND <= CPU_READ):
            self.cpu[len(self.steps)] = cpu_usage()
            if self.schedule is not None:
                self.threads[len(self.steps)] = self.schedule.read()
        return True

    def ends(self) -> list[tuple[int, Any]]:
        """Where they ended."""
        return [(length, end) for _, length, end in self.steps]

    def take(self) -> tuple[list[tuple[BatchUnits, int, Any]], Mapping[int, struct_rusage], Mapping[int, bytes | None]]:
        """The steps so far, to begin anew."""
        taken = self.steps, self.cpu, self.threads
        self.limit, self.steps, self.cpu, self.threads = 0, [], {}, {}
        return taken
