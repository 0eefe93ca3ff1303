"""Batches that gradients are accumulated over, each counted by itself, become one step."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from typing import Any, TypeVar

from msgspec.structs import replace

from lflops.profile.model import COUNTS, ModuleProfile, Profile, Work
from lflops.profile.notes import Note
from lflops.profile.records import PHASES

_LOGICAL = ("logical_macs", "own_logical_macs")
_CELL = ("calls", "macs", "executed_macs", "flops", "bytes_moved")

Row = TypeVar("Row", bound=Any)


def sum_of_batches(profiles: Sequence[Profile]) -> Profile:
    """The profiles of a step's batches as one profile.

    Work, calls and uncounted operators are added up. Parameters and facts of the run are the last batch's, memory that of the highest peak.
    """
    if len(profiles) == 1:
        return profiles[0]
    last = profiles[-1]
    rows = {name: None for profile in profiles for name in profile.modules}
    memories = [profile.memory for profile in profiles if profile.memory is not None]
    return replace(
        last,
        run=replace(last.run, partial=any(profile.run.partial for profile in profiles)),
        modules={name: _row([profile.modules[name] for profile in profiles if name in profile.modules]) for name in rows},
        cells=_sums((each for p in profiles for each in p.cells), lambda e: (e.module, e.operator, e.phase, e.dtype), _CELL),
        uncounted=_sums((each for p in profiles for each in p.uncounted), lambda e: (e.module, e.operator, e.phase), ("calls", "bytes")),
        communication=_sums(
            (each for p in profiles for each in p.communication), lambda e: (e.module, e.phase, e.collective, e.group), ("calls", "bytes")
        ),
        waits=tuple(sorted({wait for profile in profiles for wait in profile.waits})),
        memory=max(memories, key=lambda memory: memory.peak_bytes, default=None),
        notes=_notes([note for profile in profiles for note in profile.notes]),
    )


def _row(rows: Sequence[ModuleProfile]) -> ModuleProfile:
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    works: dict[str, Any] = {phase: reduce(_work, (row.work(phase) for row in rows)) for phase in PHASES}
    return replace(rows[-1], calls=sum(row.calls for row in rows), peak_bytes=max(peaks, default=None), **works)


def _work(one: Work, other: Work) -> Work:
    counts = {name: getattr(one, name) + getattr(other, name) for count in COUNTS for name in (count, f"own_{count}")}
    logical = {name: None if None in (a := getattr(one, name), b := getattr(other, name)) else a + b for name in _LOGICAL}
    return replace(one, **counts, **logical)


def _sums(rows: Iterable[Row], key: Callable[[Row], Hashable], counts: Iterable[str]) -> tuple[Row, ...]:
    groups: dict[Hashable, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return tuple(replace(group[0], **{count: sum(getattr(row, count) for row in group) for count in counts}) for group in groups.values())


def _notes(notes: Sequence[Note]) -> tuple[Note, ...]:
    groups: dict[tuple[str, str], Note] = {}
    for note in notes:
        before = groups.get((note.code, note.subject))
        groups[note.code, note.subject] = note if before is None else replace(note, values=_values(before, note))
    return tuple(groups.values())


def _values(one: Note, other: Note) -> dict[str, int | float | str]:
    return {
        name: value + before if isinstance(value, int) and isinstance(before := one.values.get(name, 0), int) else value
        for name, value in other.values.items()
    }
