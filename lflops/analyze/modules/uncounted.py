"""The operators that no total holds, because they ran without a formula."""

from collections.abc import Iterable
from itertools import groupby

from msgspec import Struct

from lflops.profile.model import Profile
from lflops.profile.records import Trace

__all__ = ["UncountedOperator", "uncounted_operators"]


class UncountedOperator(Struct, frozen=True, kw_only=True):
    """An operator that is in no total: what it did in all modules and phases.

    Attributes:
        seconds: Of its own in a step: of all its calls, or as a trace has it, on the device where one was recorded; `None` where neither is
            known.
    """

    operator: str
    modules: tuple[str, ...]
    calls: int
    bytes: int
    seconds: float | None


def uncounted_operators(profile: Profile) -> tuple[UncountedOperator, ...]:
    """The operators that ran without a formula, those that moved the most bytes first."""
    entries = sorted(profile.uncounted, key=lambda entry: entry.operator)
    traced = {} if profile.trace is None else _traced(profile.trace, profile.run.accumulation or 1)
    lines = []
    for operator, group in groupby(entries, key=lambda entry: entry.operator):
        found = list(group)
        seconds = _sum(entry.seconds for entry in found)
        lines.append(
            UncountedOperator(
                operator=operator,
                modules=tuple(dict.fromkeys(entry.module for entry in found)),
                calls=sum(entry.calls for entry in found),
                bytes=sum(entry.bytes for entry in found),
                seconds=traced.get(operator) if seconds is None else seconds,
            )
        )
    return tuple(sorted(lines, key=lambda line: -line.bytes))


def _traced(trace: Trace, batches: int) -> dict[str, float]:
    """Own seconds of so many batches."""
    if not trace.batches:
        return {}
    field = "own_device_seconds" if any(each.own_device_seconds for each in trace.operators) else "own_host_seconds"
    return {each.name: getattr(each, field) * batches / trace.batches for each in trace.operators}


def _sum(seconds: Iterable[float | None]) -> float | None:
    known = list(seconds)
    return None if None in known else sum(each for each in known if each is not None)
