"""Note codes: every code has values and a sentence, and the package uses no other."""

import ast
from collections.abc import Iterable, Iterator
from typing import get_args

import msgspec
import pytest

from lflops.profile.notes import NOTE_VALUES, Note, NoteCode, notes_with
from lflops.report.lines.notes import SENTENCES, sentence
from tests.support.repository import ROOT

CODES = get_args(NoteCode)
PACKAGE = ROOT / "lflops"
EXAMPLES = {int: 3, float: 2.5, str: "forward"}


def codes_made(source: str) -> Iterator[str]:
    """The codes that a file makes notes with: `Note(code="…", …)`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="Note"), keywords=keywords):
                yield from (
                    keyword.value.value for keyword in keywords if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
                )


def codes_read(source: str) -> Iterator[str]:
    """The codes that a file looks for: `notes_with("…", notes)`, `note.code == "…"`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="notes_with"), args=[ast.Constant(value=str(code)), *_]):
                yield code
            case ast.Compare(left=ast.Attribute(attr="code"), comparators=[ast.Constant(value=str(code))]):
                yield code


def problems(codes: Iterable[str], sources: Iterable[str]) -> list[str]:
    """What to do about each code that nothing makes a note of, and each that is not in the list."""
    sources, listed = list(sources), set(codes)
    made = {code for source in sources for code in codes_made(source)}
    used = made | {code for source in sources for code in codes_read(source)}
    return [
        *[f"{code!r} has no producer: make a Note(code={code!r}, …) where it arises, or delete the code" for code in sorted(listed - made)],
        *[f"{code!r} is unknown: add it to NoteCode and NOTE_VALUES in lflops/profile/notes.py" for code in sorted(used - listed)],
    ]


def test_every_code_has_a_producer_and_no_other_code_is_used() -> None:
    """A file that only looks for a note is no producer."""
    assert [] == problems(CODES, (path.read_text("utf-8") for path in PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("source", ["any(notes_with('x', notes))", "note.code == 'x'", ""])
def test_a_code_that_nothing_makes_a_note_of_would_be_seen(source: str) -> None:
    """Whether it is looked for or not."""
    assert ["'x' has no producer: make a Note(code='x', …) where it arises, or delete the code"] == problems(["x"], [source])
    assert [] == problems(["x"], [source, "Note(code='x', subject='', values={})"])


@pytest.mark.parametrize("source", ["Note(code='x', subject='', values={})", "any(notes_with('x', notes))", "note.code == 'x'"])
def test_an_unknown_code_would_be_seen(source: str) -> None:
    """Whether a note is made of it or looked for."""
    assert ["'x' is unknown: add it to NoteCode and NOTE_VALUES in lflops/profile/notes.py"] == problems([], [source])


def test_every_code_has_values_and_a_sentence() -> None:
    """In the tables of both."""
    codes = set(CODES)
    assert codes == set(NOTE_VALUES), f"NOTE_VALUES in lflops/profile/notes.py: {sorted(codes ^ set(NOTE_VALUES))}"
    assert codes == set(SENTENCES), f"SENTENCES in lflops/report/lines/notes.py: {sorted(codes ^ set(SENTENCES))}"


@pytest.mark.parametrize("code", CODES)
def test_the_sentence_takes_the_values_of_its_code(code: NoteCode) -> None:
    """One of the types that the table says; a name that depends on the run is `forward` here."""
    values = {name.replace("*", "forward"): EXAMPLES[kind] for name, kind in NOTE_VALUES[code].items()}
    said = sentence(Note(code=code, subject="encoder", values=values))
    assert said
    assert "–" not in said


def test_a_code_of_a_later_version_is_read_and_shown() -> None:
    """With all that it holds."""
    later = msgspec.json.decode(b'{"code": "from_the_future", "subject": "head", "values": {"years": 3}}', type=Note)
    assert "from the future head: years 3" == sentence(later)
    assert [] == list(notes_with("ignored", [later]))
