"""Notes: every row has a sentence and a producer, and the package uses no other codes and values."""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
import pytest

from lflops.profile.notes import Note, kinds, notes_with, sentence
from tests.support.repository import ROOT

PACKAGE = ROOT / "lflops"
EXAMPLES = {int: 3, float: 2.5, str: "forward"}
UNLISTED = {"no_trace": {"error"}}
"""Values that only some notes of a code have."""


def notes_made(source: str) -> Iterator[tuple[str, set[str]]]:
    """The notes that a file makes, `Note(code="…", values={…})`.

    Their codes, and the names of values that it writes out.
    """
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "Note"
        ):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            match given:
                case {"code": ast.Constant(value=str(code)), "values": ast.Dict(keys=keys)}:
                    yield (
                        code,
                        {
                            key.value
                            for key in keys
                            if isinstance(key, ast.Constant) and isinstance(key.value, str)
                        },
                    )
                case {"code": ast.Constant(value=str(code))}:
                    yield code, set()


def codes_read(source: str) -> Iterator[str]:
    """The codes that a file looks for: `notes_with("…", notes)`, `note.code == "…"`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="notes_with"), args=[ast.Constant(value=str(code)), *_]):
                yield code
            case ast.Compare(
                left=ast.Attribute(attr="code"), comparators=[ast.Constant(value=str(code))]
            ):
                yield code


def problems(rows: Mapping[str, Collection[str]], sources: Iterable[str]) -> list[str]:
    """What to do about each code that nothing makes a note of, and about each code and value that has no row."""
    sources = list(sources)
    made = [note for source in sources for note in notes_made(source)]
    codes = {code for code, _ in made}
    used = codes | {code for source in sources for code in codes_read(source)}
    strange = {
        (code, name)
        for code, names in made
        for name in names - set(rows.get(code, names))
        if "*" not in rows[code]
    }
    return [
        *[
            f"{code!r} has no producer: make a Note(code={code!r}, …) where it arises, or delete it"
            for code in sorted(rows.keys() - codes)
        ],
        *[
            f"{code!r} is unknown: add it to lflops/profile/notes.toml"
            for code in sorted(used - rows.keys())
        ],
        *[
            f"{code!r} has no value {name!r}: add it to lflops/profile/notes.toml"
            for code, name in sorted(strange)
        ],
    ]


def test_every_code_has_a_producer_and_no_other_code_or_value_is_used() -> None:
    """A file that only looks for a note is no producer."""
    rows = {code: row.values.keys() | UNLISTED.get(code, set()) for code, row in kinds().items()}
    assert [] == problems(rows, (path.read_text("utf-8") for path in PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("source", ["any(notes_with('x', notes))", "note.code == 'x'", ""])
def test_a_code_that_nothing_makes_a_note_of_would_be_seen(source: str) -> None:
    """Whether it is looked for or not."""
    assert [
        "'x' has no producer: make a Note(code='x', …) where it arises, or delete it"
    ] == problems({"x": []}, [source])
    assert [] == problems({"x": []}, [source, "Note(code='x', subject='', values={})"])


@pytest.mark.parametrize(
    "source",
    ["Note(code='x', subject='', values={})", "any(notes_with('x', notes))", "note.code == 'x'"],
)
def test_an_unknown_code_would_be_seen(source: str) -> None:
    """Whether a note is made of it or looked for."""
    assert ["'x' is unknown: add it to lflops/profile/notes.toml"] == problems({}, [source])


def test_an_unknown_value_would_be_seen() -> None:
    """A name that the row does not have, unless its names depend on the run."""
    source = "Note(code='x', subject='', values={'calls': 1, 'macs': 2})"
    assert ["'x' has no value 'macs': add it to lflops/profile/notes.toml"] == problems(
        {"x": ["calls"]}, [source]
    )
    assert [] == problems({"x": ["*"]}, [source])


@pytest.mark.parametrize("code", kinds())
def test_the_sentence_takes_the_values_of_its_code(code: str) -> None:
    """One of the types that the table says; a name that depends on the run is `forward` here."""
    values = {
        name.replace("*", "forward"): EXAMPLES[kind] for name, kind in kinds()[code].values.items()
    }
    said = sentence(Note(code=code, subject="encoder", values=values))
    assert said
    assert "–" not in said
    assert kinds()[code].cause.endswith(".")
    assert kinds()[code].remedy.endswith(".")


def test_a_code_of_a_later_version_is_read_and_shown() -> None:
    """With all that it holds."""
    later = msgspec.json.decode(
        b'{"code": "from_the_future", "subject": "head", "values": {"years": 3}}', type=Note
    )
    assert "from the future head: years 3" == sentence(later)
    assert [] == list(notes_with("ignored", [later]))
