"""Batches that gradients are accumulated over, each counted by itself, become one step."""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any, TypeVar

from msgspec.structs import replace

from lflops.profile.model import COUNTS, ModuleProfile, Profile, Work
from lflops.profile.notes import Note
from lflops.profile.records import PHASES
from lflops.profile.series import grouped, sums

_LOGICAL = ("logical_macs", "own_logical_macs")
_CELL, _TRANSFERS = ("calls", "macs", "executed_macs", "flops", "bytes_moved"), ("calls", "bytes")

Row = TypeVar("Row", bound=Any)


def sum_of_batches(profiles: Sequence[Profile]) -> Profile:
    """Merge the profiles of a step's batches. Work and calls are added up; facts are the last batch's, memory that of the highest peak."""
    if len(profiles) == 1:
        return profiles[0]
    last = profiles[-1]
    rows = {name: None for profile in profiles for name in profile.modules}
    memories = [profile.memory for profile in profiles if profile.memory is not None]
    notes = (note for profile in profiles for note in profile.notes)
    return replace(
        last,
        run=replace(last.run, partial=any(profile.run.partial for profile in profiles)),
        modules={name: _row([profile.modules[name] for profile in profiles if name in profile.modules]) for name in rows},
        cells=_sums((each for p in profiles for each in p.cells), "module operator phase dtype", _CELL),
        uncounted=_sums((each for p in profiles for each in p.uncounted), "module operator phase", _TRANSFERS),
        communication=_sums((each for p in profiles for each in p.communication), "module phase collective group", _TRANSFERS),
        waits=tuple(sorted({wait for profile in profiles for wait in profile.waits})),
        memory=max(memories, key=lambda memory: memory.peak_bytes, default=None),
        notes=tuple(reduce(_added, same) for same in grouped(notes, attrgetter("code", "subject")).values()),
    )


def _row(rows: Sequence[ModuleProfile]) -> ModuleProfile:
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    works: dict[str, Any] = {phase: reduce(_work, (row.work(phase) for row in rows)) for phase in PHASES}
    return replace(rows[-1], calls=sum(row.calls for row in rows), peak_bytes=max(peaks, default=None), **works)


def _work(one: Work, other: Work) -> Work:
    counts = {name: getattr(one, name) + getattr(other, name) for count in COUNTS for name in (count, f"own_{count}")}
    logical = {name: None if None in (a := getattr(one, name), b := getattr(other, name)) else a + b for name in _LOGICAL}
    return replace(one, **counts, **logical)


def _sums(rows: Iterable[Row], fields: str, counts: Iterable[str]) -> tuple[Row, ...]:
    """One row for those that are equal in these fields."""
    return tuple(replace(group[0], **sums(group, *counts)) for group in grouped(rows, attrgetter(*fields.split())).values())


def _added(one: Note, other: Note) -> Note:
    values = {
        name: value + before if isinstance(value, int) and isinstance(before := one.values.get(name, 0), int) else value
        for name, value in other.values.items()
    }
    return replace(other, values=values)
