"""The progress of a long estimate."""

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
"""Called with the finished operators and their total, which is `None` while unknown; once more at the end, with the total."""

REPORT_EVERY = 500
"""Operators between two reports."""


class Meter:
    """Counts the finished operators of all steps. `progress` is called with them; `True` writes a line to stderr, `False` is silent."""

    def __init__(self, progress: bool | Progress) -> None:  # noqa: FBT001 - the user's own argument, handed on
        if not isinstance(progress, bool) and not callable(progress):
            raise CountError(f"estimate: progress={describe(progress)}: give True, False or a function of (done, total)")
        self._report = _write if progress is True else progress or None
        self._done = 0
        self._total: int | None = None

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._report is not None and kind is None:
            self._report(self._done, self._done)

    def expect(self, times: int) -> None:
        """Set the total to a multiple of the operators finished so far."""
        self._total = times * self._done

    def add(self) -> None:
        """Count one more operator."""
        self._done += 1
        if self._report is not None and self._done % REPORT_EVERY == 0:
            self._report(self._done, self._total)

    def counter(self, scopes: ModuleTracker, extent: Extent) -> OperatorCounter:
        """An operator counter that reports to this meter."""
        return _Counter(scopes, extent, self)


class _Counter(OperatorCounter):
    def __init__(self, scopes: ModuleTracker, extent: Extent, meter: Meter) -> None:
        super().__init__(scopes, extent)
        self._meter = meter

    def record(self, call: Call) -> Any:
        super().record(call)
        self._meter.add()


def _write(done: int, total: int | None) -> None:
    """Write the progress on one line, which the last call ends."""
    of = "" if total is None else f" of {total:,} ({done / total:.0%})" if total else ""
    sys.stderr.write(f"\restimate: {done:,} operators{of}" + ("\n" if done == total else ""))
    sys.stderr.flush()
