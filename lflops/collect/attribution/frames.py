"""The stack of modules and scopes that a thread has entered and not yet left, and what else is known of the thread.

`AutogradSegments` say which row built an autograd node; `Claims` whose number it is where threads share one.
"""

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from torch.optim import Optimizer

from lflops.collect.torch_private.autograd import ACCUMULATES_GRADIENT, NO_BACKWARD, sequence_number


class AutogradSegments:
    """The numbering of one thread, divided at the boundaries of modules."""

    def __init__(self, start: int) -> None:
        # Whether the thread built nodes that a later backward pass can meet. One that only recomputes builds nodes too, but they are gone
        # when the pass is.
        self.lasting = False
        self._starts: list[int] = []
        self._rows: list[str] = []
        self._end = start

    def mark(self, number: int, row: str) -> None:
        """Let nodes from `number` on belong to `row`."""
        if self._starts and self._starts[-1] >= number:
            self._rows[-1] = row
        else:
            self._starts.append(number)
            self._rows.append(row)
        self._end = number

    def extend(self, number: int, row: str) -> None:
        """Let the nodes built since the last boundary, up to `number`, belong to `row`."""
        if number > self._end:
            self.mark(self._end, row)
            self._end = number

    def close(self, number: int) -> None:
        """Let the nodes up to `number` keep the rows that they have."""
        self._end = number

    def row(self, number: int) -> str:
        """The row that built the node of that number; the root for one that was there before."""
        index = bisect_right(self._starts, number) - 1
        return self._rows[index] if index >= 0 else ""

    def spans(self, number: int) -> bool:
        """Whether the thread is known to have built a node of that number."""
        return bool(self._starts) and self._starts[0] <= number < self._end


class Claims:
    """Marks on the nodes themselves, made only when several threads build nodes: their numberings overlap and a node knows no thread.

    The marks are entries in `Node.metadata`, which is there for that; `release` takes them off again.
    """

    def __init__(self) -> None:
        self._claimed: list[dict[Any, Any]] = []

    def claim(self, nodes: Iterable[Any], segments: AutogradSegments) -> None:
        """Give these nodes, and all that they lead back to, to `segments`, but for those that have been claimed."""
        waiting = list(nodes)
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or sequence_number(node) >= ACCUMULATES_GRADIENT:
                continue
            seen.add(node)
            metadata: dict[Any, Any] = node.metadata
            if self not in metadata:
                metadata[self] = segments
                self._claimed.append(metadata)
            waiting.extend(following for following, _ in node.next_functions)

    def owner(self, node: Any) -> AutogradSegments | None:
        """The numbering that a node belongs to, where it was claimed."""
        segments: AutogradSegments | None = node.metadata.get(self)
        return segments

    def release(self) -> None:
        """Take the marks off; a graph that the user keeps is as it was."""
        for metadata in self._claimed:
            metadata.pop(self, None)
        self._claimed.clear()


@dataclass(slots=True)
class Frame:
    """Something entered and not yet left."""

    key: int  # the identity by which it is left


AnyFrame = TypeVar("AnyFrame", bound=Frame)


class FrameStack(list[AnyFrame]):
    """Frames, the innermost last."""

    __slots__ = ()

    def cut(self, key: int) -> list[AnyFrame]:
        """Remove the innermost frame of that key, and those above it, which were left by an exception without a hook; outermost first."""
        if self and self[-1].key == key:
            return [self.pop()]
        for position in reversed(range(len(self))):
            if self[position].key == key:
                removed = self[position:]
                del self[position:]
                return removed
        return []


@dataclass(slots=True)
class TrackedFrame(Frame):
    """A module or scope that a `ModuleTracker` follows."""

    row: str  # its row in the tree of names
    module_row: str  # the nearest row at or above it that is a module's
    backward: int  # the backward pass in which it was entered
    # The Python frame that entered a module. Once that is gone, so is this: after an interrupt torch calls no hook.
    caller: FrameType | None


class ThreadState:
    """What one thread is running."""

    def __init__(self) -> None:
        self.stack: FrameStack[TrackedFrame] = FrameStack()
        self.segments: AutogradSegments | None = None
        self.calls: Counter[str] = Counter()
        # The last backward pass seen here with gradients on, and whether it is one that is itself differentiated
        self.backward = NO_BACKWARD
        self.differentiated = False
        self.writes_gradient = False  # whether the node that ran last in backward was one that writes `.grad`
        self.recomputed_round = -1  # the last round of forward in whose backward modules were entered here
        # Whether the next operator has to begin a segment: nodes were built in backward, or a frame was found abandoned
        self.detour = False
        self.unfollow: Callable[[], None] | None = None  # what to call when the thread has left the tree's modules
        # The optimizer steps that are running, each with the backward pass that it began in; `None` for a step's closure
        self.steps: list[tuple[Optimizer | None, int]] = []


class ThreadLocal(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        self.state = ThreadState()
