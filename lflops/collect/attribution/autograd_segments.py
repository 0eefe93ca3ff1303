"""Which row built an autograd node: the segments of a thread's numbering, and whose number it is where threads share one."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from lflops.collect.torch_private.autograd import ACCUMULATES_GRADIENT, sequence_number


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
