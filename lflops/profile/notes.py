"""Define the notes of a profile: facts that a reader of its numbers must know.

A note has a code, such as `graph_breaks`, and values. Reports print a sentence for each note. For
each code, notes.toml contains the sentence, the cause, the remedy, and the types of the values. To
add a kind of note, add a table to notes.toml, and create a `Note(code=...)` in the code that finds
the fact.
"""

import functools
import string
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from lflops import units


class Note(Struct, frozen=True, kw_only=True):
    """A note: a fact that a reader of the profile must know.

    Attributes:
        code: The kind of note, such as `graph_breaks`. A file from a later version of lflops may
            have unknown codes.
        subject: The thing that the note is about, such as the name of a module. For each code,
            notes.toml describes the subject. It is empty for codes without a subject.
        values: Values by name, with the types that notes.toml defines.
    """

    code: str
    subject: str
    values: Mapping[str, int | float | str]


class NoteKind(NamedTuple):
    """One kind of note: the contents of a table of notes.toml.

    Attributes:
        sentence: Template of the sentence, in the syntax that `_Words` describes. If the sentence
            is too complex for a template, a function that returns the sentence.
        cause: The reason for the note, for the documentation.
        remedy: The action that a reader can take, for the documentation.
        reasons: Texts that explain the reason in the sentence, keyed by the subject of the note.
            Empty for kinds of notes without such texts.
        values: The type of each value, by name. `*` stands for names that depend on the run.
    """

    sentence: str | Callable[[Note], str]
    cause: str
    remedy: str = "none."
    reasons: Mapping[str, str] = MappingProxyType({})
    values: Mapping[str, type] = MappingProxyType({})


def sentence(note: Note) -> str:
    """Return the sentence of a note.

    If the code is unknown, the sentence lists the code, the subject and the values.
    """
    if note.code not in kinds():
        return _unknown(note)
    template = kinds()[note.code].sentence
    return _fill(template, note) if isinstance(template, str) else template(note)


def notes_with(code: str, notes: Iterable[Note]) -> Iterator[Note]:
    """Yield the notes with the given code."""
    return (note for note in notes if note.code == code)


def names_in(code: str, notes: Iterable[Note]) -> list[str]:
    """Return the names of modules in the value `names` of the notes with the given code."""
    names = []
    for note in notes_with(code, notes):
        names += str(note.values.get("names", "")).split("\n")
    return names


# Maximum factor by which module times may be multiplied or divided and still be reliable.
_FAR = 2


def are_times_far_off(notes: Iterable[Note]) -> bool:
    """Return whether module times are unreliable, because they were scaled by more than `_FAR`."""
    return any(not 1 / _FAR <= factor <= _FAR for factor in time_factors(notes))


def time_factors(notes: Iterable[Note]) -> list[float]:
    """Return the factors by which module times were multiplied to match unprofiled steps."""
    factors: list[float] = []
    for note in notes_with("time_scaled", notes):
        for value in note.values.values():
            if not isinstance(value, str):
                factors.append(value)
    return factors


_UNITS: Mapping[str, Callable[[float | None], str]] = {
    "": units.count,
    "percent": units.percent,
    "duration": units.duration,
    "size": units.size,
    "times": lambda value: "–" if value is None else f"{value:.1f}×",
}


class _Words(string.Formatter):
    """Formats the values in the template of a sentence.

    `{macs}` is formatted as a count, and `{bytes:size}` as a size with a unit. `_UNITS` has all
    formats such as `size`. `{calls:call}` is a count with a noun: "1 call" or "3 calls". A plural
    that is not the singular with an s follows a slash: `{n:entry/entries}`. A missing value is
    shown as a dash.
    """

    def format_field(self, value: float | str | None, format_spec: str) -> str:
        if isinstance(value, str):
            return value
        if format_spec in _UNITS:
            return _UNITS[format_spec](value)
        singular, _, plural = format_spec.partition("/")
        noun = singular if value == 1 else plural or f"{singular}s"
        return f"{units.count(value)} {noun}"


_WORDS = _Words()


def filled(template: str, names: Mapping[str, float | str | None]) -> str:
    """Replace the placeholders of a template. `_Words` describes the syntax of a template.

    Args:
        template: The template.
        names: The values, keyed by the names of the placeholders.
    """
    return _WORDS.vformat(template, (), defaultdict(lambda: None, names))


def _fill(template: str, note: Note) -> str:
    """Replace the placeholders of a template with the values and the subject of a note.

    If the subject is a module, the template contains `{row}` for the name of the module. The name
    of the root is empty, so it is replaced by "the model itself".
    """
    row = note.subject or "the model itself"
    return filled(template, {**note.values, "subject": note.subject, "row": row})


def _ignored(note: Note) -> str:
    took = ""
    if "seconds" in note.values:
        took = ", {seconds:duration}"
    return _fill(
        "{row} is left out of all totals, as requested: {macs} MACs and {flops} FLOPs in "
        f"{{calls:operator call}}{took}",
        note,
    )


def _dense_mask(note: Note) -> str:
    within = note.values.get("within")
    computed = note.values.get("computed")
    share = None
    if isinstance(within, int) and isinstance(computed, int) and computed:
        share = within / computed
    scores = (
        f"only {units.percent(share)} of the attention scores are within a sequence, but all "
        "scores are computed"
    )
    calls = _fill("{calls:call} of {subject} separate packed sequences with a dense mask", note)
    return f"{calls}: {scores}; varlen_attn or flex attention would skip the other scores"


def _compiled_ran_eager(note: Note) -> str:
    modules = f"{note.subject} compiled modules were"
    if note.subject == "1":
        modules = "1 compiled module was"
    return (
        f"{modules} counted without compilation: the counts describe the original code, not the "
        "compiled code"
    )


def _time_scaled(note: Note) -> str:
    factors = []
    for phase, factor in note.values.items():
        factors.append(f"{_WORDS.format_field(factor, '')} in {phase}")
    errors = [abs(factor - 1) for factor in time_factors([note])]
    error = ""
    if errors:
        error = f" (± {round(100 * max(errors))} %)"
    reliability = "approximate"
    if are_times_far_off([note]):
        reliability = "unreliable"
    return (
        f"module times are {reliability}{error}: to match unprofiled passes, they are multiplied "
        f"by {', '.join(factors) or units.UNKNOWN}"
    )


def _no_timed_events(note: Note) -> str:
    sentence = _fill("torch cannot time events on {subject}, so steps are timed on the host", note)
    if note.values.get("waits"):
        sentence += ", which waits for the device at the end of each step"
    return f"{sentence}; the times of a step's phases are measured on the host"


def _schedule_shrunk(note: Note) -> str:
    parts = []
    for name, number in note.values.items():
        if name != "batches":
            parts.append(f"{name.replace('_', ' ')} {number}")
    schedule = ", ".join(parts) or units.UNKNOWN
    sentence = _fill("the schedule is shortened, because the run has {batches:batch/batches}", note)
    return f"{sentence}; the new profiling schedule, in steps: {schedule}"


def _no_trace(note: Note) -> str:
    reason = kinds()[note.code].reasons.get(note.subject, note.subject)
    error = ""
    if "error" in note.values:
        error = f" ({note.values['error']})"
    return f"there is no trace: {reason or 'the reason is unknown'}{error}"


def _not_counted(note: Note) -> str:
    sentence = "no step was counted, so the profile has times, but no MACs or FLOPs"
    if note.subject:
        sentence += (
            "; with this version of torch, compiled code would run differently in a counting step, "
            "so use lflops.count to count this code"
        )
    return sentence


def _ended_early(note: Note) -> str:
    return f"{note.subject or 'an exception'} ended the training run before the end of the window"


def _ranks_differ(note: Note) -> str:
    leading = note.values.get("leading_rank", units.UNKNOWN)
    others = ""
    if note.values.get("rows_of_others"):
        others = _fill(", and {rows_of_others:module is/modules are} from other ranks", note)
    work = _fill("ranks do different work: {least_macs} to {most_macs} MACs", note)
    if _fill("{least_macs}", note) == _fill("{most_macs}", note):
        work = _fill("ranks run different operators, but all have {most_macs} MACs", note)
    return f"{work}; the counts are from rank {leading}{others}"


def _only_on(note: Note) -> str:
    first = note.values.get("first", units.UNKNOWN)
    last = note.values.get("last", units.UNKNOWN)
    modules = f"{first} to {last}" + _fill(" ({modules} modules)", note)
    if note.values.get("modules") == 1:
        modules = str(first)
    if note.subject.isdecimal():
        return f"only rank {note.subject} has {modules}"
    return f"only ranks {note.subject} have {modules}"


def _attention_on_cuda(note: Note) -> str:
    kernels = []
    for name, calls in note.values.items():
        times = "time" if calls == 1 else "times"
        kernels.append(f"{name.replace('_', ' ')} {calls} {times}")
    listed = ", ".join(kernels)
    return (
        "scaled_dot_product_attention is counted as the kernel that torch selects on "
        f"{note.subject}: {listed}"
    )


def _lstm_workspace(note: Note) -> str:
    workspaces = _fill("the workspaces of {calls:LSTM call}", note)
    if note.subject:
        return (
            f"{workspaces} on {note.subject} are not included in the memory, because their size is "
            "unknown before a run: keep some memory free for them"
        )
    return (
        f"{workspaces} are included in the memory, with the sizes that oneDNN 3 needs on a CPU; "
        "other versions of oneDNN may need other sizes"
    )


_SENTENCES: Mapping[str, Callable[[Note], str]] = {
    "attention_on_cuda": _attention_on_cuda,
    "compiled_ran_eager": _compiled_ran_eager,
    "dense_mask": _dense_mask,
    "ended_early": _ended_early,
    "ignored": _ignored,
    "lstm_workspace": _lstm_workspace,
    "no_timed_events": _no_timed_events,
    "no_trace": _no_trace,
    "not_counted": _not_counted,
    "only_on": _only_on,
    "ranks_differ": _ranks_differ,
    "schedule_shrunk": _schedule_shrunk,
    "time_scaled": _time_scaled,
}
"""Functions that return the sentence of a note, keyed by the code of the note.

These sentences are too complex for a template. All other notes have a template in notes.toml.
"""


def _unknown(note: Note) -> str:
    values = ", ".join(f"{name} {value}" for name, value in note.values.items())
    head = " ".join(filter(None, [note.code.replace("_", " "), note.subject]))
    return f"{head}: {values}" if values else head


@functools.cache
def kinds() -> Mapping[str, NoteKind]:
    """Return all kinds of notes by code."""
    types = {"int": int, "float": float, "str": str}
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found = {}
    for code, row in rows.items():
        found[code] = NoteKind(
            sentence=row["sentence"] if "sentence" in row else _SENTENCES[code],
            cause=row["cause"],
            remedy=row.get("remedy", "none."),
            reasons=row.get("reasons", {}),
            values={name: types[kind] for name, kind in row.get("values", {}).items()},
        )
    return found
