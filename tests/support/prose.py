"""How easily the repository's text for people reads.

The length of its sentences, and words that another one says better.

As a program, `python -m tests.support.prose [PATH...]` prints what breaks the rules. PATH is a
document or a folder of `lflops/`.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from tests.support.repository import ROOT

__all__ = [
    "LONGEST",
    "MEAN",
    "Sentence",
    "broken_rules",
    "document_sentences",
    "documents",
    "folders",
    "python_sentences",
    "sentences_of",
]

MEAN = 18
"""Words a sentence, on average over a document or a folder: fewer than that."""
LONGEST = 35
"""Words of the longest sentence."""

WORDS = {
    r"beside": "next to, and, with",
    r"told|tells? apart": "reported, named, distinguished",
    r"said": "reported, named",
    r"whoever": "users who, code that",
    r"whatever": "any, all",
    r"thereof|thereby|hence|merely": "of it, so, only",
    r"lent|dealt": "given",
    r"alike": "equal, the same, both",
    r"of its own|of their own|of one's own|of your own": "its own, your own (before the noun)",
    r"(?:as it is|as they are)(?= *[.,;:)])": "unchanged",
    r"comes? to grief|came to grief|steps? back": "fails; does nothing",
    r"nobody|everybody": "no one",
    r"apart(?! from)": "separate, except",
    r"what lies|what stands": "name the noun",
    r"is behind it|what is behind": "the cause",
}
"""Words of this house's first drafts, as regular expressions, and what a reader understands at once."""

_BANNED = {re.compile(rf"\b(?:{word})\b", re.IGNORECASE): better for word, better in WORDS.items()}
_ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|approx|cf|al|No)\.")
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")
_SECTION = re.compile(r"^(Args|Arguments|Attributes|Returns|Raises|Yields|Example|Examples|Note):$")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
_ENTRY = re.compile(r"^\s*[`*\w.]+(?: \([^)]*\))?: +(?=\S)")


class Sentence(NamedTuple):
    """A sentence, where it stands, and whether it counts into the mean.

    A table's cell, a heading and a label do not.
    """

    path: Path
    line: int
    text: str
    counts: bool = True

    @property
    def words(self) -> int:
        return sum(bool(re.search(r"\w", word)) for word in self.text.split())


def documents() -> list[Path]:
    """The Markdown files that people read, relative to the repository."""
    return [Path(name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
        path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")
    )


def broken_rules(sentences: list[Sentence]) -> Iterator[str]:
    """A line for each sentence that is too long, for each word that is not used here, and for a mean that is too high."""
    for each in sentences:
        if each.words > LONGEST:
            yield f"{each.path}:{each.line}: {each.words} words, at most {LONGEST}: {each.text}"
        for word, better in _BANNED.items():
            if used := word.search(each.text):
                yield f"{each.path}:{each.line}: {used[0]!r}, better: {better}: {each.text}"
    counted = [each.words for each in sentences if each.counts]
    if counted and mean(counted) >= MEAN:
        path = sentences[0].path
        yield f"{path if path.suffix == '.md' else path.parent}: {mean(counted):.1f} words a sentence, must be below {MEAN}"


def document_sentences(path: Path, source: str) -> Iterator[Sentence]:
    """The sentences of a Markdown file.

    Its code and comments are left out; a code span is one word.
    """
    block: list[str] = []
    first, fenced = 1, False
    source = re.sub(
        r"<!--.*?-->", lambda comment: "\n" * comment[0].count("\n"), source, flags=re.DOTALL
    )
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""  # noqa: PLW2901 - a fence ends a paragraph
        elif fenced:
            continue
        starts = not line.strip() or line.startswith(("#", "|", ">")) or _ITEM.match(line)
        if block and starts:
            yield from _sentences(path, first, " ".join(block))
            block = []
        if line.startswith("|"):
            for cell in line.strip("|").split("|"):
                yield from _sentences(path, number, cell, counts=False)
        elif line.startswith("#"):
            yield from _sentences(path, number, line.lstrip("# "), counts=False)
        elif line.strip():
            first = first if block else number
            block.append(_ITEM.sub("", line).strip())


def python_sentences(path: Path, source: str) -> Iterator[Sentence]:
    """The sentences of a Python file.

    Docstrings, comments, and those strings that people read, as messages and help texts.
    """
    tree = ast.parse(source)
    docs = {
        id(node.value): node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in docs.values():
        if isinstance(node.value, str):
            yield from _docstring_sentences(path, node.lineno, node.value)
    for string, text in _strings(tree):
        if id(string) not in docs and _is_prose(text):
            for paragraph in text.splitlines():
                yield from _sentences(path, string.lineno, paragraph)
    for line, text in _comments(source):
        yield from _sentences(path, line, text)


def _docstring_sentences(path: Path, line: int, text: str) -> Iterator[Sentence]:
    block: list[str] = []
    first, section, indent, fenced = line, "", 0, False
    for number, raw in enumerate([*text.splitlines(), ""], start=line):
        if raw.lstrip().startswith("```"):
            fenced = not fenced
        if (
            fenced or raw.lstrip().startswith(("```", ">>>")) or raw.count("|") > 1
        ):  # code, or a table
            continue
        stripped = raw.strip()
        heading = _SECTION.match(stripped)
        depth = len(raw) - len(raw.lstrip())
        entry = (
            section in {"Args", "Attributes", "Raises"} and _ENTRY.match(raw) and depth <= indent
        )
        if block and (not stripped or heading or entry or _ITEM.match(raw)):
            yield from _sentences(path, first, " ".join(block))
            block = []
        if heading:
            section, indent = heading[1], depth + 4
        elif stripped:
            first = first if block else number
            block.append(_ITEM.sub("", _ENTRY.sub("", raw) if entry else raw).strip())


def _strings(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Every string of the code with its text, in which X stands for a value."""
    if isinstance(tree, ast.JoinedStr):
        yield (
            tree,
            "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in tree.values
            ),
        )
        for part in tree.values:
            if isinstance(part, ast.FormattedValue):
                yield from _strings(part.value)
        return
    if (
        isinstance(tree, ast.Call)
        and isinstance(tree.func, ast.Attribute)
        and tree.func.attr == "split"
    ):
        return  # a list of names, written as one string
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree, tree.value
    for child in ast.iter_child_nodes(tree):
        yield from _strings(child)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Every comment with its first line.

    Lines of nothing but comments, one under the other, are one comment.
    """
    joined: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(noqa|type:|!)", token.string):
            continue
        text, line = re.sub(r"\s*(# )?noqa: .*", "", token.string.lstrip("# ")), token.start[0]
        if joined and (line != last + 1 or token.line.split("#")[0].strip()):
            yield first, " ".join(joined)
            joined = []
        first = first if joined else line
        joined.append(text)
        last = line
    if joined:
        yield first, " ".join(joined)


def _is_prose(text: str) -> bool:
    """Whether a string reads as words: three of them at least, and little that only programs write."""
    if "\n" in text and not re.search(r"[.,:;!?]", text):
        return False  # a list of names
    return len(re.findall(r"(?<![\w.<])[A-Za-z]{2,}(?![\w=(])", text)) >= 3 and not re.search(
        r"[{}<>\\]|\(\?|::|://", text
    )


def _sentences(path: Path, line: int, text: str, *, counts: bool = True) -> Iterator[Sentence]:
    plain = re.sub(r"``?[^`]+``?", "CODE", text)
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", plain)  # a link is its text
    plain = re.sub(r"\*\*|__", "", plain)
    plain = _ABBREVIATIONS.sub(lambda short: short[1].replace(".", ""), plain)
    for sentence in _END.split(plain):
        if sentence.strip():
            yield Sentence(path, line, sentence.strip(), counts)


@cache
def sentences_of(name: str) -> list[Sentence]:
    """The sentences of a document, or of the files of a folder, by its path in the repository."""
    path = ROOT / name
    if path.suffix == ".md":
        return list(document_sentences(Path(name), path.read_text()))
    files = sorted([*path.glob("*.py"), *path.glob("notes.toml")]) if path.is_dir() else [path]
    return [
        each
        for file in files
        for each in python_sentences(file.relative_to(ROOT), _as_python(file))
    ]


def _as_python(file: Path) -> str:
    """A file's text; a line of TOML with a string is one of Python too."""
    text = file.read_text()
    return text if file.suffix == ".py" else re.sub(r"(?m)^values = .*", "", text)


def folders() -> list[str]:
    """The folders of the package that have Python files."""
    return sorted(
        {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "lflops").rglob("*.py")}
    )


def main(arguments: list[str]) -> int:
    """Print what breaks a rule, by document and folder; without arguments only how many."""
    total = 0
    for argument in arguments or [*map(str, documents()), *folders()]:
        sentences = sentences_of(argument)
        broken = list(broken_rules(sentences))
        total += len(broken)
        if arguments:
            print(*broken, sep="\n")  # noqa: T201 - a program's output
        else:
            counted = [each.words for each in sentences if each.counts]
            average = f"{mean(counted):.1f}" if counted else "-"
            print(  # noqa: T201
                f"{argument:32} {len(sentences):5} sentences, {average:>5} words each, {len(broken):4} broken rules"
            )
    print(total, "broken rules")  # noqa: T201
    return bool(total)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
