"""Text for people: short sentences, and the words that a reader knows.

`tests/support/prose.py` has the rules.
"""

from pathlib import Path

import pytest

from tests.support import prose

NOT_YET: set[str] = set()
"""Documents that still break a rule. This set may only become smaller."""

FOLDERS = prose.folders()
DOCUMENTS = [path.as_posix() for path in prose.documents()]


@pytest.mark.parametrize("name", [*FOLDERS, *sorted(set(DOCUMENTS) - NOT_YET)])
def test_text_for_people_is_easy_to_read(name: str) -> None:
    """Docstrings, comments, messages and documents.

    A mean below 18 words a sentence, none above 35, no word of the list.
    """
    assert [] == list(prose.broken_rules(prose.sentences_of(name)))


def test_documents_that_hold_are_not_listed_as_breaking_a_rule() -> None:
    """Nor documents that no longer exist: what holds once has to hold from then on."""
    assert set() == {
        name
        for name in NOT_YET
        if name not in DOCUMENTS or not list(prose.broken_rules(prose.sentences_of(name)))
    }


def test_the_whole_package_is_read() -> None:
    """A few sentences that are known to be there.

    Of a docstring, of an argument, of a help text, of a message and of a comment.
    """
    lines = "\n".join(each.text for name in FOLDERS for each in prose.sentences_of(name))
    for known in (
        "What chips can do: peaks by dtype, bandwidth and memory, looked up by the name that a driver reports",
        "FLOP/s without sparsity by dtype, the names of CODE; of int8, OP/s",
        "Print the version",
        "X=X: give a positive, finite number",
        "A copy: what the caller does to theirs later is not done to ours",
    ):
        assert known in lines


LONG = " ".join(["word"] * 36)


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        (f'"""{LONG}."""', f"36 words, at most 35: {LONG}."),
        (f'"""One.\n\nArgs:\n    x: {LONG}\n"""', f"36 words, at most 35: {LONG}"),
        (f"# {LONG[:99]}\n# {LONG[100:]}\n", f"36 words, at most 35: {LONG}"),
        (
            'raise ValueError(f"{x} is dealt out to whom it is for")',
            "'dealt', better: given: X is dealt out to whom it is for",
        ),
        (
            '"""Each on a thread of its own."""',
            "'of its own', better: its own, your own (before the noun): Each on a thread of its own.",
        ),
    ],
)
def test_what_breaks_a_rule_in_python_is_seen(source: str, broken: str) -> None:
    """One culprit of each kind, with its file and line."""
    lines = list(prose.broken_rules(list(prose.python_sentences(Path("lflops/a.py"), source))))
    assert broken in lines[0].partition(": ")[2]
    assert lines[0].startswith("lflops/a.py:")


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        (
            f"A [link](https://example.org/a_b) and\n{LONG}",
            "a.md:1: 39 words, at most 35: A link and",
        ),
        (f"| a | b |\n|---|---|\n| x | {LONG} |", "a.md:3: 36 words"),
        (f"- one\n- {LONG}", "a.md:2: 36 words"),
        ("# Heading\n\nBeside that.\n", "a.md:3: 'Beside'"),
        (f"{' '.join(['word'] * 18)}.\n", "a.md: 18.0 words a sentence, must be below 18"),
    ],
)
def test_what_breaks_a_rule_in_a_document_is_seen(source: str, broken: str) -> None:
    """In paragraphs, lists and tables."""
    assert [broken] == [
        line[: len(broken)]
        for line in prose.broken_rules(list(prose.document_sentences(Path("a.md"), source)))
    ][:1]


def test_code_is_not_read() -> None:
    """A block of it in a document or a docstring, a span, a list of names, the value in a message."""
    document = "\n".join(
        ["```python", LONG, "```", "<!-- setup", LONG, "-->", f"`{LONG}` is one word."]
    )
    assert ["CODE is one word."] == [
        each.text for each in prose.document_sentences(Path("a.md"), document)
    ]
    code = "\n".join(
        [
            '"""One.',
            "",
            f">>> {LONG}",
            '"""',
            f'NAMES = "{LONG}".split()',
            'f"one two three {told}"',
        ]
    )
    assert ["One.", "one two three X"] == [
        each.text for each in prose.python_sentences(Path("a.py"), code)
    ]


def test_sentences_end_at_full_stops_and_not_in_numbers() -> None:
    """Words are what stands between spaces and has a letter or a digit."""
    text = "It is 2.5 × 3 long. Is it? See lflops.count, e.g. with `a = b`."
    assert [("It is 2.5 × 3 long.", 5), ("Is it?", 2), ("See lflops.count, eg with CODE.", 5)] == [
        (each.text, each.words) for each in prose.document_sentences(Path("a.md"), text)
    ]
