"""The sentences for a profile's notes: a note is a code with values, and this is where it learns to speak."""

from collections.abc import Callable

from lflops import units
from lflops.profile import Note

__all__ = ["sentence"]


def sentence(note: Note) -> str:
    """What a note says to a reader. A code that is not known here still shows all that the note holds."""
    return _SENTENCES.get(note.code, _unknown)(note)


def _ignored(note: Note) -> str:
    work = f"{_count(note, 'macs')} MACs and {_count(note, 'flops')} FLOPs in {_calls(note)}"
    return f"{note.subject or 'the root'} is left out of every total, as asked: {work}"


def _ambiguous_threads(note: Note) -> str:
    return f"the work of {_calls(note)} in backward is the root's own: which module's it is could not be told"


def _formula_failed(note: Note) -> str:
    return f"the formula of {note.subject} failed, so its calls are not counted: {note.values.get('error', units.UNKNOWN)}"


def _compiled_ran_eager(note: Note) -> str:
    modules = "1 compiled module was" if note.subject == "1" else f"{note.subject} compiled modules were"
    return f"{modules} counted eagerly: the work is that of the code as written, not as compiled"


def _scripted(note: Note) -> str:
    return f"the parts of {note.subject or 'the root'} run as a script: their work is its own"


def _unknown(note: Note) -> str:
    values = ", ".join(f"{name} {value}" for name, value in note.values.items())
    head = " ".join(filter(None, [note.code.replace("_", " "), note.subject]))
    return f"{head}: {values}" if values else head


def _calls(note: Note) -> str:
    return f"{_count(note, 'calls')} operator call{'' if note.values.get('calls') == 1 else 's'}"


def _count(note: Note, name: str) -> str:
    value = note.values.get(name)
    return value if isinstance(value, str) else units.count(value)


_SENTENCES: dict[str, Callable[[Note], str]] = {
    "ignored": _ignored,
    "ambiguous_threads": _ambiguous_threads,
    "formula_failed": _formula_failed,
    "compiled_ran_eager": _compiled_ran_eager,
    "scripted": _scripted,
}
