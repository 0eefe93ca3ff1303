"""Print a random sample of docstrings, comments, messages, or sentences of the documentation.

`python -m tests.support.sample_prose docstrings 100 --seed 7` prints a hundred docstrings, each
below the line of code that it documents. A reader marks the docstrings that need a second reading;
at most five of a hundred may need it. The same seed prints the same sample.
"""

import argparse
import ast
import functools
import io
import random
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.repository import ROOT

DOCUMENTS = ("*.md", "docs/**/*.md")
WORDS_OF_A_MESSAGE = 4


class Text(NamedTuple):
    """A piece of prose, and the file and line where it begins."""

    path: Path
    line: int
    text: str
    code: str = ""
    """What a docstring documents, such as the signature of a function."""


def docstrings() -> Iterator[Text]:
    """Yield every docstring of the package, and every string that documents a constant."""
    for path, tree in _modules():
        yield from _docstrings_in(tree, path, "")


def _docstrings_in(owner: ast.AST, path: Path, name: str) -> Iterator[Text]:
    """Yield the docstrings in a module, class or function, whose full name is `name`."""
    code = _code_of(owner, name)
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.Expr) and _is_string(node.value):
            yield Text(path, node.lineno, ast.literal_eval(node.value), code)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_in(node, path, f"{name}.{node.name}".lstrip("."))
        else:
            yield from _docstrings_in(node, path, name)
        if isinstance(node, ast.stmt):
            # a string below a constant documents the constant
            code = _code_of(node, name)


def _code_of(node: ast.AST, name: str) -> str:
    """Return the line that a docstring documents, with the full name of a class or function."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases})"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
        return f"def {name}({ast.unparse(node.args)}){returns}"
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return f"{name}.{ast.unparse(node)}".lstrip(".")
    return ""


def comments() -> Iterator[Text]:
    """Yield every comment of the package. Consecutive comment lines are one comment."""
    for path in _files("lflops/**/*.py"):
        lines: list[str] = []
        last = 0
        source = (ROOT / path).read_text("utf-8")
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT:
                continue
            row = token.start[0]
            if lines and row != last + 1:
                yield Text(path, last, " ".join(lines))
                lines = []
            lines.append(token.string.lstrip("# "))
            last = row
        if lines:
            yield Text(path, last, " ".join(lines))


def messages() -> Iterator[Text]:
    """Yield every string of the package that contains words, such as errors, help and notes.

    Docstrings are left out, and an f-string is one message.
    """
    for path, tree in _modules():
        left_out = _no_messages(tree)
        for node in ast.walk(tree):
            if id(node) in left_out:
                continue
            text = _text_of(node)
            if text is not None and _is_message(text):
                yield Text(path, getattr(node, "lineno", 0), text)
    for path in _files("lflops/**/*.toml"):
        for text in _strings_in(tomllib.loads((ROOT / path).read_text("utf-8"))):
            if _is_message(text):
                yield Text(path, 1, text)


def sentences() -> Iterator[Text]:
    """Yield every sentence of the documentation, without code, headings and tables."""
    for pattern in DOCUMENTS:
        for path in _files(pattern):
            source = (ROOT / path).read_text("utf-8")
            prose = re.sub(
                r"<!--.*?-->|^ *```.*?^ *```", _blank, source, flags=re.DOTALL | re.MULTILINE
            )
            line = 1
            for paragraph in re.split(r"(\n\s*\n)", prose):
                if paragraph.strip() and not paragraph.lstrip().startswith(("#", "|", "<", ":::")):
                    flat = " ".join(paragraph.split())
                    for sentence in re.split(r"(?<=[.!?])\s+", flat):
                        yield Text(path, line, sentence)
                line += paragraph.count("\n")


KINDS: dict[str, Callable[[], Iterator[Text]]] = {
    "docstrings": docstrings,
    "comments": comments,
    "messages": messages,
    "sentences": sentences,
}


def sample(kind: str, number: int, seed: int) -> list[Text]:
    """Return a random sample of one kind. It is the same for the same seed and the same sources."""
    everything = _everything(kind)
    return random.Random(seed).sample(everything, min(number, len(everything)))  # noqa: S311


@functools.cache
def _everything(kind: str) -> list[Text]:
    """Return all texts of one kind, sorted. They are cached, because reading takes seconds."""
    return sorted(KINDS[kind]())


def _files(pattern: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in _files("lflops/**/*.py"):
        yield path, ast.parse((ROOT / path).read_text("utf-8"))


def _no_messages(tree: ast.Module) -> set[int]:
    """Return the ids of the nodes that are docstrings or parts of f-strings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            found.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            found.update(id(part) for part in node.values)
    return found


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _text_of(node: ast.AST) -> str | None:
    """Return the text of a string or an f-string, with `{…}` for each value.

    For other nodes, return `None`.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        parts.append(str(part.value) if isinstance(part, ast.Constant) else "{…}")
    return "".join(parts)


def _strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in a value of a TOML file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings_in(item)


def _is_message(text: str) -> bool:
    """Return True if a string has words for people and is no pattern, list of names, or code."""
    words = re.findall(r"(?<![\w.<])[A-Za-z]{2,}(?![\w=(])", text)
    is_code = re.search(r"[<>\\]|\(\?|::|://", text) is not None
    return len(words) >= WORDS_OF_A_MESSAGE and not is_code


def _blank(match: re.Match[str]) -> str:
    """Return only the newlines of a match, so that line numbers stay correct."""
    return "\n" * match[0].count("\n")


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    for number, each in enumerate(sample(given.kind, given.number, given.seed), start=1):
        code = f"{each.code}\n" if each.code else ""
        print(f"--- {number}. {each.path}:{each.line}\n{code}{each.text.strip()}\n")  # noqa: T201


if __name__ == "__main__":
    main()
