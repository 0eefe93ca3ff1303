"""The notes of a profile: every code, with what its subject names and the types of its values.

A note says something that a reader of the numbers has to know. It holds a code and values; its sentence is made in `report/lines/notes.py`.
A new note is a code here, a sentence there, and a `Note(code=...)` where it arises.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

__all__ = ["NOTE_VALUES", "Note", "NoteCode", "are_times_far_off", "notes_with"]

NoteCode = Literal[
    "ambiguous_threads",
    "attention_on_cuda",
    "backward_assumed",
    "communication_hook",
    "compiled_by_module",
    "compiled_differs",
    "compiled_ran_eager",
    "compiled_uncounted",
    "compiled_unopened",
    "compiled_unrecorded",
    "counted_inside",
    "ddp_buckets",
    "dense_mask",
    "ended_early",
    "experts",
    "few_clean_steps",
    "foreach_assumed",
    "formula_failed",
    "gather_failed",
    "generated",
    "gradients_taken_for_finite",
    "ignored",
    "logical_differs",
    "lstm_workspace",
    "no_trace",
    "not_captured",
    "not_counted",
    "only_on",
    "ranks_differ",
    "ranks_missing",
    "rounded_to_cycles",
    "rounded_up",
    "schedule_shrunk",
    "scripted",
    "time_scaled",
    "upper_bound",
]

NOTE_VALUES: Mapping[NoteCode, Mapping[str, type]] = {
    # Counting.
    "ambiguous_threads": {"calls": int},  # operator calls in backward whose module is unknown; they are the root's own
    "communication_hook": {"calls": int},  # operator calls of a communication hook of DDP, counted as `other`
    "compiled_differs": {"seen": int, "counted": int},  # subject: the row; MACs seen while compiled code ran, and those of its graph
    "compiled_ran_eager": {},  # subject: how many compiled modules
    "compiled_uncounted": {"calls": int},  # subject: why the work of these calls of compiled graphs is not known
    "counted_inside": {"calls": int},  # subject: a custom operator without a formula, counted by the operators that run inside it
    "dense_mask": {"calls": int, "computed": int, "within": int},  # subject: attention; scores computed, and those within a sequence
    "formula_failed": {"error": str},  # subject: the operator
    "generated": {"prefill_macs": int, "prefill_flops": int, "decode_macs": int, "decode_flops": int, "decode_calls": int},
    "ignored": {"calls": int, "macs": int, "flops": int, "seconds": float},  # subject: the row; seconds only where it was timed
    "logical_differs": {"phase": str},  # subject: the first row that differs from the model given as `logical=`
    "not_counted": {},  # there are times and no counts; subject: `compiled` where this torch cannot count compiled code as it runs
    "scripted": {},  # subject: the row of a ScriptModule
    "upper_bound": {"calls": int},  # subject: the operator; values that decide its cost were not known
    # Timing.
    "backward_assumed": {"forwards": float},  # backward's cost in forwards, where it was timed and not counted
    "few_clean_steps": {"steps": int},
    "time_scaled": {"*": float},  # by phase: the factor that hooked times were scaled by
    "compiled_by_module": {"graphs": int, "assigned": float, "divided": float},  # shares of the time inside of compiled graphs
    "compiled_unopened": {"error": str},  # modules inside of compiled ones were asked for, and cannot be had
    "compiled_unrecorded": {"graphs": int},  # compiled graphs that ran, and whose modules are not known
    # Estimates.
    "ddp_buckets": {"buckets": int, "bytes": int},  # made by lflops in place of torch's
    "attention_on_cuda": {"*": int},  # subject: the chip; by kernel: calls
    "foreach_assumed": {},  # subject: the chip
    "gradients_taken_for_finite": {},  # subject: the optimizer's class
    "lstm_workspace": {"calls": int},  # subject: the chip of the table that is asked for, where the size is not known
    "not_captured": {},  # subject: the optimizer's class
    "rounded_up": {"bytes": int},
    # The callback's window.
    "ended_early": {},  # subject: the exception's class
    "no_trace": {},  # subject: a reason of the tracer
    "rounded_to_cycles": {"accumulation": int},
    "schedule_shrunk": {"batches": int, "skip_first": int, "wait": int, "warmup": int, "active": int, "windows": int},
    # Ranks.
    "experts": {"expert_parameters": int, "non_expert_parameters": int, "tensor_parallel": int},  # of all ranks together
    "gather_failed": {"error": str},
    "only_on": {"modules": int, "first": str, "last": str},  # subject: the ranks that have these modules
    "ranks_differ": {
        "leading_rank": int,
        "least_macs": int,
        "most_macs": int,
        "least_flops": int,
        "most_flops": int,
        "rows_of_others": int,
    },
    "ranks_missing": {"missing": int, "world_size": int},  # subject: the ranks
}
"""The values of each code; `*` stands for names that depend on the run."""


class Note(Struct, frozen=True, kw_only=True):
    """One note.

    Attributes:
        code: What the note says. A file of a later version may have codes that are not in `NoteCode`.
        subject: What it is about, as `NOTE_VALUES` says; may be empty.
        values: By name, of the types in `NOTE_VALUES`.
    """

    if TYPE_CHECKING:
        code: NoteCode
    else:
        code: str
    subject: str
    values: Mapping[str, int | float | str]


def notes_with(code: NoteCode, notes: Iterable[Note]) -> Iterator[Note]:
    """The notes that have a code."""
    return (note for note in notes if note.code == code)


_FAR = 2
"""Beyond this factor the modules' times are no measure any more."""


def are_times_far_off(notes: Iterable[Note]) -> bool:
    """Whether the modules' times had to be scaled so much that they are no measure of anything."""
    factors = [value for note in notes_with("time_scaled", notes) for value in note.values.values() if not isinstance(value, str)]
    return any(not 1 / _FAR <= value <= _FAR for value in factors)
