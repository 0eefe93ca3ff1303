"""Run the code blocks of a documentation page.

Python blocks run one after the other in one namespace. Shell lines run through the `main` of
lflops.

* A Python block whose first line is `# name.py` is written to that file.
* `<!-- setup … -->` has Python code that readers of the page already have.
* `<!-- not run: reason -->` before a block leaves it out.
* A text block with `title="output"` must be exactly the output of the previous block.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lflops.cli.main import main
from tests.support.repository import ROOT

__all__ = ["Block", "blocks", "run_page"]

_PART = re.compile(
    r"^<!-- (?P<comment>setup|not run: [^\n]+?)(?: -->|\n(?P<setup>.*?)-->)$"
    r"|^(?P<indent> *)```(?P<language>[\w-]+)?(?P<options>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_NOT_OURS = {"pip", "make"}
"""Programs whose lines are only checked for what they name."""


class Block(NamedTuple):
    """A fenced block, or a hidden piece of Python (`setup`)."""

    language: str
    code: str
    line: int
    is_output: bool = False
    not_run: str = ""


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page in their order."""
    not_run = ""
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["setup"] is not None:
            yield Block("python", part["setup"], line)
        elif part["comment"]:
            not_run = part["comment"].removeprefix("not run: ")
        else:
            code = re.sub(rf"^{part['indent']}", "", part["code"], flags=re.MULTILINE)
            yield Block(
                part["language"] or "", code, line, 'title="output"' in part["options"], not_run
            )
            not_run = ""


def run_page(text: str, name: str) -> dict[str, Any]:
    """Run a page in the working directory.

    Returns:
        The names that its Python blocks have bound.

    Raises:
        AssertionError: A block fails, or prints something else than the page says. The message has
            the page's line.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    modules = set(sys.modules)
    try:
        for block in blocks(text):
            where = f"{name}:{block.line}"
            if block.is_output:
                assert block.code.strip() == printed.strip(), (
                    f"{where}: the block before it prints\n{printed}"
                )
            elif not block.not_run and block.language in {"python", "sh"}:
                printed = _run(block, names, where)
    finally:
        for module in set(sys.modules) - modules:
            if (getattr(sys.modules[module], "__file__", None) or "").startswith(
                f"{Path.cwd()}{os.sep}"
            ):
                del sys.modules[module]
    return names


def _run(block: Block, names: dict[str, Any], where: str) -> str:
    """What a block prints."""
    first = re.match(r"# (\w+\.(?:py|yaml|toml))\n", block.code)
    if first:
        Path(first[1]).write_text(block.code, "utf-8")
        return ""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "utf-8", newline="\n", write_through=True)
    with contextlib.redirect_stdout(stream):
        try:
            if block.language == "python":
                exec(compile(block.code, where, "exec"), names)  # noqa: S102 - our own page
            else:
                for line in re.sub(r"\\\n", " ", block.code).splitlines():
                    _run_line(line, where)
        except Exception as error:
            raise AssertionError(f"{where}: {error!r}") from error
    return raw.getvalue().decode()


def _run_line(line: str, where: str) -> None:
    """One line of a shell; `# exit status 1` after it says that it fails on purpose."""
    words = shlex.split(line, comments=True)
    settings = [words.pop(0).split("=", 1) for word in list(words) if re.match(r"[A-Z_]+=", word)]
    if not words:
        return
    program, *arguments = (
        match for word in words for match in (_expanded(word) if "*" in word else [word])
    )
    known = {key: os.environ.get(key) for key, _ in settings}
    os.environ.update(dict(settings))
    try:
        if program == "lflops":
            expected = 1 if "exit status 1" in line else 0
            assert expected == main(arguments), f"{where}: {line}"
        elif program == "python":
            argv, sys.argv = sys.argv, arguments
            try:
                runpy.run_path(arguments[0], run_name="__main__")
            finally:
                sys.argv = argv
        else:
            _check(program, arguments, where)
    finally:
        for key, value in known.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def _expanded(pattern: str) -> list[str]:
    """The files that a shell puts in for a pattern."""
    return sorted(map(str, Path().glob(pattern)))


def _check(program: str, arguments: list[str], where: str) -> None:
    """What a line of another program names is there."""
    assert program.rpartition("/")[2] in _NOT_OURS, (
        f"{where}: nothing runs {program} here; say why in <!-- not run: … -->"
    )
    if program == "make":
        targets = {word for word in arguments if "=" not in word}
        assert targets <= set(
            re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        ), where
