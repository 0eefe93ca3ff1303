"""Test that code and `notes.toml` agree: each note has a row, and each row has a producer."""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
import pytest

from lflops.profile.notes import Note, kinds, notes_with, sentence
from tests.support.repository import ROOT

PACKAGE = ROOT / "lflops"
EXAMPLES = {int: 3, float: 2.5, str: "forward"}
UNLISTED = {"no_trace": {"error"}}
"""Values that only some notes of a code have, and that are therefore not in `notes.toml`."""


def literal_strings(nodes: Iterable[ast.expr | None]) -> Iterator[str]:
    """Yield the values of all nodes that are string literals."""
    for node in nodes:
        match node:
            case ast.Constant(value=str(value)):
                yield value


def notes_made(source: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the notes that a file makes by `Note(code="…", values={…})`.

    Each is a code with the names of the values that are written literally in the call.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="Note"), keywords=keywords):
                arguments = {keyword.arg: keyword.value for keyword in keywords}
            case _:
                continue
        match arguments:
            case {"code": ast.Constant(value=str(code)), "values": ast.Dict(keys=keys)}:
                yield code, set(literal_strings(keys))
            case {"code": ast.Constant(value=str(code))}:
                yield code, set()


def codes_read(source: str) -> Iterator[str]:
    """Yield the codes that a file searches for: `notes_with("…", notes)`, `note.code == "…"`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="notes_with"), args=[ast.Constant(value=str(code)), *_]):
                yield code
            case ast.Compare(
                left=ast.Attribute(attr="code"), comparators=[ast.Constant(value=str(code))]
            ):
                yield code


def problems(rows: Mapping[str, Collection[str]], sources: Iterable[str]) -> list[str]:
    """Return a message for each code without a producer, and for each code or value without a row.

    Args:
        rows: The names of values by code, as in `notes.toml`.
        sources: The text of all files of the package.
    """
    made: list[tuple[str, set[str]]] = []
    read: set[str] = set()
    for source in sources:
        made.extend(notes_made(source))
        read.update(codes_read(source))
    produced = {code for code, _ in made}
    unknown_values: set[tuple[str, str]] = set()
    for code, names in made:
        if code in rows and "*" not in rows[code]:
            unknown_values.update((code, name) for name in names - set(rows[code]))
    found = []
    for code in sorted(rows.keys() - produced):
        found.append(
            f"{code!r} has no producer: make a Note(code={code!r}, …) where it arises, or delete it"
        )
    for code in sorted((produced | read) - rows.keys()):
        found.append(f"{code!r} is unknown: add it to lflops/profile/notes.toml")
    for code, name in sorted(unknown_values):
        found.append(f"{code!r} has no value {name!r}: add it to lflops/profile/notes.toml")
    return found


def test_every_code_has_a_producer_and_no_other_code_or_value_is_used() -> None:
    """`notes.toml` and the package have the same codes and values.

    A file that only searches for a note is not its producer.
    """
    rows = {code: row.values.keys() | UNLISTED.get(code, set()) for code, row in kinds().items()}
    assert [] == problems(rows, (path.read_text("utf-8") for path in PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("source", ["any(notes_with('x', notes))", "note.code == 'x'", ""])
def test_a_code_that_nothing_makes_a_note_of_would_be_seen(source: str) -> None:
    """A code without a producer is reported, even if some code searches for it."""
    assert [
        "'x' has no producer: make a Note(code='x', …) where it arises, or delete it"
    ] == problems({"x": []}, [source])
    assert [] == problems({"x": []}, [source, "Note(code='x', subject='', values={})"])


@pytest.mark.parametrize(
    "source",
    ["Note(code='x', subject='', values={})", "any(notes_with('x', notes))", "note.code == 'x'"],
)
def test_an_unknown_code_would_be_seen(source: str) -> None:
    """An unknown code is reported if a note is made with it or if it is searched for."""
    assert ["'x' is unknown: add it to lflops/profile/notes.toml"] == problems({}, [source])


def test_an_unknown_value_would_be_seen() -> None:
    """A value without a row is reported, unless the names of values depend on the run (`*`)."""
    source = "Note(code='x', subject='', values={'calls': 1, 'macs': 2})"
    assert ["'x' has no value 'macs': add it to lflops/profile/notes.toml"] == problems(
        {"x": ["calls"]}, [source]
    )
    assert [] == problems({"x": ["*"]}, [source])


@pytest.mark.parametrize("code", kinds())
def test_the_sentence_takes_the_values_of_its_code(code: str) -> None:
    """Each code makes a sentence from one value of each type that the table lists.

    If the name of a value depends on the run, it is `forward` here. A cause and a remedy are whole
    sentences.
    """
    values = {
        name.replace("*", "forward"): EXAMPLES[kind] for name, kind in kinds()[code].values.items()
    }
    said = sentence(Note(code=code, subject="encoder", values=values))
    assert said
    assert "–" not in said
    assert kinds()[code].cause.endswith(".")
    assert kinds()[code].remedy.endswith(".")


def test_a_code_of_a_later_version_is_read_and_shown() -> None:
    """A note with an unknown code is shown with its code, subject and values."""
    later = msgspec.json.decode(
        b'{"code": "from_the_future", "subject": "head", "values": {"years": 3}}', type=Note
    )
    assert "from the future head: years 3" == sentence(later)
    assert [] == list(notes_with("ignored", [later]))
