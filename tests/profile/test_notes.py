"""Note codes: every code has values and a sentence, and the package uses no other."""

import ast
from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

from lflops.profile.notes import NOTE_VALUES, Note, NoteCode, notes_with
from lflops.report.lines.notes import SENTENCES, sentence
from tests.support.repository import ROOT

CODES = get_args(NoteCode)
PACKAGE = ROOT / "lflops"
EXAMPLES = {int: 3, float: 2.5, str: "forward"}


def codes_used(source: str) -> Iterator[str]:
    """The codes that a file makes notes with, or asks for."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="Note"), keywords=keywords):
                yield from (
                    keyword.value.value for keyword in keywords if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
                )
            case ast.Call(func=ast.Name(id="notes_with"), args=[ast.Constant(value=str(code)), *_]):
                yield code
            case ast.Compare(left=ast.Attribute(attr="code"), comparators=[ast.Constant(value=str(code))]):
                yield code


def test_the_package_uses_known_codes_and_all_of_them() -> None:
    """A code without a producer is not one."""
    used = {code for path in PACKAGE.rglob("*.py") for code in codes_used(path.read_text("utf-8"))}
    assert set(CODES) == used


@pytest.mark.parametrize("source", ["Note(code='x', subject='', values={})", "any(notes_with('x', notes))", "note.code == 'x'"])
def test_an_unknown_code_would_be_seen(source: str) -> None:
    """The check above can fail."""
    assert ["x"] == list(codes_used(source))


def test_every_code_has_values_and_a_sentence() -> None:
    """In the tables of both."""
    assert set(CODES) == set(NOTE_VALUES) == set(SENTENCES)


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
