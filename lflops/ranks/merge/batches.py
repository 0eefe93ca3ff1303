"""Merge the profiles of the batches over which one optimizer step accumulates gradients."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from msgspec.structs import replace

from lflops.profile.notes import Note
from lflops.profile.profile import (
    COUNTS,
    OP_COUNT_FIELDS,
    Communication,
    Memory,
    ModuleProfile,
    OpCount,
    OptimizerSettings,
    Profile,
    UnsupportedCall,
    Work,
)
from lflops.profile.records import PHASES, ModulePhase
from lflops.profile.series import dtype_of, grouped, largest_known, sum_known, sums

_WORK_COUNTS = (*COUNTS, *(f"self_{count}" for count in COUNTS))
_TRANSFERS = ("calls", "bytes")

Entry = TypeVar("Entry", bound=Any)


def sum_of_batches(profiles: Sequence[Profile]) -> Profile:
    """Merge the profiles of all batches of one optimizer step into the profile of the step.

    Work and calls are added up. Most properties of the run are from the last batch, and memory is
    from the batch with the highest peak.
    """
    if len(profiles) == 1:
        return profiles[0]
    last = profiles[-1]
    is_partial = False
    takes_derivatives = False
    optimizers: dict[OptimizerSettings, None] = {}
    op_counts: list[OpCount] = []
    unsupported: list[UnsupportedCall] = []
    communication: list[Communication] = []
    memories: list[Memory] = []
    waits: set[ModulePhase] = set()
    for profile in profiles:
        is_partial = is_partial or profile.run.partial
        takes_derivatives = takes_derivatives or profile.run.takes_derivatives
        # The optimizers may make one step for each batch.
        optimizers |= dict.fromkeys(profile.run.optimizers)
        op_counts += profile.op_counts
        unsupported += profile.unsupported
        communication += profile.communication
        waits.update(profile.waits)
        if profile.memory is not None:
            memories.append(profile.memory)
    op_counts = _summed(op_counts, ("module", "operator", "phase", "dtype"), OP_COUNT_FIELDS)
    unsupported = _summed(unsupported, ("module", "operator", "phase"), _TRANSFERS)
    communication = _summed(communication, ("module", "phase", "collective", "group"), _TRANSFERS)
    run = replace(
        last.run,
        partial=is_partial,
        dtype=dtype_of(op_counts) or last.run.dtype,
        takes_derivatives=takes_derivatives,
        optimizers=tuple(optimizers),
        optimized_parameters=largest_known(
            profile.run.optimized_parameters for profile in profiles
        ),
    )
    return replace(
        last,
        run=run,
        modules=_modules(profiles),
        op_counts=tuple(op_counts),
        unsupported=tuple(unsupported),
        communication=tuple(communication),
        waits=tuple(sorted(waits)),
        memory=max(memories, key=lambda memory: memory.peak_bytes, default=None),
        notes=_notes(profiles),
    )


def _modules(profiles: Iterable[Profile]) -> dict[str, ModuleProfile]:
    """Merge the modules of all batches: add up the work of each module."""
    rows: dict[str, list[ModuleProfile]] = {}
    for profile in profiles:
        for name, module in profile.modules.items():
            rows.setdefault(name, []).append(module)
    merged = {}
    for name, same in rows.items():
        merged[name] = _module(same)
    return merged


def _module(rows: Sequence[ModuleProfile]) -> ModuleProfile:
    """Add up the work of one module over several batches.

    `rows` has the module's profile in each batch.
    """
    works: dict[str, Any] = {}
    for phase in PHASES:
        works[phase] = _work([row.work(phase) for row in rows])
    peak_bytes = largest_known(row.peak_bytes for row in rows)
    return replace(rows[-1], **sums(rows, "calls"), peak_bytes=peak_bytes, **works)


def _work(works: Sequence[Work]) -> Work:
    """Add up the counts of one module in one phase over all batches.

    The times are copied from the first batch.
    """
    return replace(
        works[0],
        **sums(works, *_WORK_COUNTS),
        logical_macs=sum_known(work.logical_macs for work in works),
        self_logical_macs=sum_known(work.self_logical_macs for work in works),
    )


def _summed(entries: Iterable[Entry], key: tuple[str, ...], counts: Iterable[str]) -> list[Entry]:
    """Merge the entries that have the same values in all `key` fields.

    The entries are, for example, the `OpCount`s of all batches. The fields `counts` of merged
    entries are added up.
    """
    merged = []
    for same in grouped(entries, attrgetter(*key)).values():
        merged.append(replace(same[0], **sums(same, *counts)))
    return merged


def _notes(profiles: Iterable[Profile]) -> tuple[Note, ...]:
    """Merge the notes of all batches.

    Notes with the same code and subject become one note, and their integer values are added up.
    """
    notes: dict[tuple[str, str], Note] = {}
    for profile in profiles:
        for note in profile.notes:
            key = (note.code, note.subject)
            if key in notes:
                note = _plus(notes[key], note)  # noqa: PLW2901
            notes[key] = note
    return tuple(notes.values())


def _plus(before: Note, note: Note) -> Note:
    values = dict(note.values)
    for name, value in note.values.items():
        known = before.values.get(name, 0)
        if isinstance(value, int) and isinstance(known, int):
            values[name] = value + known
    return replace(note, values=values)
