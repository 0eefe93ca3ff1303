"""How far an estimate is, for whoever waits for a long one."""

import sys
from collections.abc import Callable
from typing import Any, Self

from lflops.collect.attribution.module_tracker import ModuleTracker
from lflops.collect.counting.accumulator import Call, Extent
from lflops.collect.counting.dispatch_mode import OperatorCounter
from lflops.collect.inputs.arguments import describe
from lflops.errors import CountError

__all__ = ["Meter", "Progress"]

Progress = Callable[[int, int | None], object]
"""Told the operators that are done, and of how many where that is known; once more at the end, when it is."""

TOLD_EVERY = 500
"""Operators."""


class Meter:
    """Counts the operators of all steps.

    Args:
        progress: Whom to tell; `True` is a line on stderr, `False` is nobody.
    """

    def __init__(self, progress: bool | Progress) -> None:  # noqa: FBT001 - the user's own argument, handed on
        """Begin at 0.

        Raises:
            CountError: It is none of these.
        """
        if not isinstance(progress, bool) and not callable(progress):
            raise CountError(f"estimate: progress={describe(progress)}: give True, False or a function of (done, total)")
        self._tell = _write if progress is True else progress or None
        self._done = 0
        self._total: int | None = None

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Say that this was all, if it was."""
        if self._tell is not None and kind is None:
            self._tell(self._done, self._done)

    def expect(self, times: int) -> None:
        """Say that it will be so many times as much as until now."""
        self._total = times * self._done

    def add(self) -> None:
        """One more is done."""
        self._done += 1
        if self._tell is not None and self._done % TOLD_EVERY == 0:
            self._tell(self._done, self._total)

    def counter(self, scopes: ModuleTracker, extent: Extent) -> OperatorCounter:
        """One that says what it has counted."""
        return _Counter(scopes, extent, self)


class _Counter(OperatorCounter):
    def __init__(self, scopes: ModuleTracker, extent: Extent, meter: Meter) -> None:
        super().__init__(scopes, extent)
        self._meter = meter

    def record(self, call: Call) -> Any:
        super().record(call)
        self._meter.add()


def _write(done: int, total: int | None) -> None:
    """On one line, which the last word ends."""
    of = "" if total is None else f" of {total:,} ({done / total:.0%})" if total else ""
    sys.stderr.write(f"\restimate: {done:,} operators{of}" + ("\n" if done == total else ""))
    sys.stderr.flush()
