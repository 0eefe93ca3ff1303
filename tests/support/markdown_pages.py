"""Run the code blocks of a documentation page.

Python blocks run one after the other in one namespace. Lines of shell blocks that begin with
`lflops` are passed to the `main` of lflops.

* A block whose first line is `# name.py` (or `.yaml`, `.toml`) is written to this file instead.
* `<!-- setup … -->` contains Python code that a reader of the page already has. It is run as well.
* `<!-- not run: reason -->` before a block means that the block is not run.
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
"""Programs that are not run. Only the targets of `make` are checked."""


class Block(NamedTuple):
    """A fenced code block, or the Python code of a `setup` comment.

    Attributes:
        language: The language of the block; empty if there is none.
        code: The code.
        line: Its first line in the page.
        is_output: Whether it is the output of the previous block.
        not_run: The reason why it is not run; empty if it is run.
    """

    language: str
    code: str
    line: int
    is_output: bool = False
    not_run: str = ""


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    not_run = ""
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["setup"] is not None:
            yield Block("python", part["setup"], line)
        elif part["comment"]:
            not_run = part["comment"].removeprefix("not run: ")
        else:
            code = re.sub(rf"^{part['indent']}", "", part["code"], flags=re.MULTILINE)
            is_output = 'title="output"' in part["options"]
            yield Block(part["language"] or "", code, line, is_output, not_run)
            not_run = ""


def run_page(text: str, name: str) -> dict[str, Any]:
    """Run the blocks of a page in the working directory.

    Returns:
        The namespace of its Python blocks.

    Raises:
        AssertionError: A block fails, or its output differs from the output in the page. The
            message contains the line of the page.
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
        # Forget the modules that blocks of the page have written and imported.
        folder = f"{Path.cwd()}{os.sep}"
        for module in set(sys.modules) - modules:
            file = getattr(sys.modules[module], "__file__", None) or ""
            if file.startswith(folder):
                del sys.modules[module]
    return names


def _run(block: Block, names: dict[str, Any], where: str) -> str:
    """Run a block or write it to its file, and return its output."""
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
    """Run one line of a shell block.

    A comment `# exit status 1` at its end means that the command should fail.
    """
    words = shlex.split(line, comments=True)
    # Words like `NAME=value` before the command set environment variables.
    settings = []
    while words and re.match(r"[A-Z_]+=", words[0]):
        settings.append(words.pop(0).split("=", 1))
    if not words:
        return
    expanded: list[str] = []
    for word in words:
        expanded += _expanded(word) if "*" in word else [word]
    program, *arguments = expanded
    known = {key: os.environ.get(key) for key, _ in settings}
    os.environ.update(dict(settings))
    try:
        if program == "lflops":
            expected = 1 if "exit status 1" in line else 0
            assert expected == main(arguments), f"{where}: {line}"
        elif program == "python":
            argv = sys.argv
            sys.argv = arguments
            try:
                runpy.run_path(arguments[0], run_name="__main__")
            finally:
                sys.argv = argv
        else:
            _check(program, arguments, where)
    finally:
        for key, value in known.items():
            if value is None:
                os.environ.pop(key)
            else:
                os.environ[key] = value


def _expanded(pattern: str) -> list[str]:
    """Return the files that match a pattern, as a shell does."""
    return sorted(map(str, Path().glob(pattern)))


def _check(program: str, arguments: list[str], where: str) -> None:
    """Check that another program is in `_NOT_OURS`, and that the targets of `make` exist."""
    assert program.rpartition("/")[2] in _NOT_OURS, (
        f"{where}: nothing runs {program} here; say why in <!-- not run: … -->"
    )
    if program == "make":
        makefile = (ROOT / "Makefile").read_text("utf-8")
        known = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
        targets = {word for word in arguments if "=" not in word}
        assert targets <= known, where
