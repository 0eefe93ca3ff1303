"""Test that names between backticks exist.

Names in docstrings and comments must be in the code. Files that documents name must exist.
"""

import ast
import builtins
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from lflops import FlopsMonitor
from lflops.integrations.loops.monitor import LoopMonitor
from tests.support.repository import ROOT

DOCUMENTS = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*)(?:\(\))?`(?!`)")
FILE = re.compile(r"(?<!`)`([\w/.]+(?:\.(?:py|js|md|toml|ts)|/))`(?!`)")

OF_OTHERS = {
    "cudaMalloc",
    "cpp_fused_gelu_1",
    "host_3",
    "report_to",
    "log_history",
    "Fabric",
    "Accelerator",
    "out_proj",
    "active_awaiting_free",
    "free_completed",
    "create_graph",
    "Linear_3",
    "AdamW",
    "LBFGS",
    "key_averages",
    "cudaLaunchKernel",
    "MultiheadAttention",
    "decoder",
    "_foreach_add_",
    "score_mod",
    "block_size",
    "anchor_attention_mask",
    "anchor_input_ids",
    "global_attention_mask",
}
"""Names from torch, its allocator, transformers and other packages, and names in examples."""


def words(text: str) -> list[str]:
    """Return all identifiers in a text."""
    return re.findall(r"[A-Za-z_]\w*", text)


def python_parts(source: str) -> Iterator[tuple[bool, int, str]]:
    """Yield the names, strings and comments of a file.

    Each is a tuple of three values: whether it is a docstring or a comment, its line, and its text.
    """
    docstring_lines = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                docstring_lines.add(each.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstring_lines
        is_text = token.type == tokenize.COMMENT or is_docstring
        if is_text or token.type in {tokenize.NAME, tokenize.STRING}:
            yield is_text, token.start[0], token.string


def unknown_names(pages: dict[str, str]) -> list[str]:
    """Return the names in docstrings and comments that are in no page's code."""
    known = {*dir(builtins), *keyword.kwlist, *OF_OTHERS}
    named = []
    for path, source in pages.items():
        known.add(Path(path).stem)
        if not path.endswith(".py"):
            known.update(words(source))
            continue
        for is_text, line, text in python_parts(source):
            if is_text:
                named += [(path, line, name) for name in NAME.findall(text)]
            else:
                known.update(words(text))
    unknown = []
    for path, line, name in named:
        if name not in known:
            unknown.append(f"{path}:{line}: `{name}` is not in the code")
    return unknown


MADE = {"dist/", "site/"}
"""Folders that the commands in a document create."""


def unknown_files(text: str, files: set[str]) -> list[str]:
    """Return the files and folders that a document names, but that do not exist.

    A document may omit the first folders of a path.
    """
    unknown = []
    for name in FILE.findall(text):
        exists = any(f"/{each}".endswith(f"/{name}") for each in files)
        if not exists and name not in MADE:
            unknown.append(name)
    return unknown


def repository() -> set[str]:
    """Return all files and folders of the repository. Folders end with a slash."""
    paths = [*ROOT.iterdir()]
    for top in ("lflops", "tests", "benchmarks", "docs", "examples", ".github"):
        paths += (ROOT / top).rglob("*")
    found = set()
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        found.add(f"{name}/" if path.is_dir() else name)
    return found


def test_names_in_texts_for_people_are_in_the_code() -> None:
    """Names in docstrings and comments of lflops exist, also after an object is renamed."""
    pages = {}
    for path in (ROOT / "lflops").rglob("*"):
        if path.suffix in {".py", ".js", ".ts", ".toml"}:
            pages[path.relative_to(ROOT).as_posix()] = path.read_text("utf-8")
    assert [] == unknown_names(pages)


def test_a_stale_name_would_be_seen() -> None:
    """The check above can fail: it finds stale names in a docstring and in a comment.

    A string that is not a docstring is code, so its words exist.
    """
    source = (
        '"""Compress a head for `told_in`."""\n\n'
        "# `head_in` reads it, not `gone()`\n"
        'head_in = "kept_in"\n"""As `kept_in`."""\n'
    )
    assert [
        "a.py:1: `told_in` is not in the code",
        "a.py:3: `gone` is not in the code",
    ] == unknown_names({"a.py": source})


def test_files_that_documents_name_are_there() -> None:
    """Files in the text of `DOCUMENTS` exist.

    They are named by their path or the end of their path.
    """
    files = repository()
    found = {}
    for path in DOCUMENTS:
        unknown = unknown_files(path.read_text("utf-8"), files)
        if unknown:
            found[path.name] = unknown
    assert {} == found


MONITOR = re.compile(r"(?<![\w/.-])monitor\.(\w+)")
"""An attribute of a monitor in an example. Links to files such as `how-to/monitor.md` are none."""


def unknown_attributes(text: str) -> set[str]:
    """Return the attributes of monitors in a document that no monitor has."""
    unknown = set()
    for name in MONITOR.findall(text):
        attributes = {*dir(LoopMonitor), *dir(FlopsMonitor), "profiles"}
        if name not in attributes and name not in {"md", "py"}:
            unknown.add(name)
    return unknown


def test_monitors_have_the_methods_that_documents_call() -> None:
    """Documents call methods of `monitor` that exist, also after a method is renamed."""
    found = {}
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        unknown = unknown_attributes(path.read_text("utf-8"))
        if unknown:
            found[path.name] = unknown
    assert {} == found


def test_a_method_that_is_gone_would_be_seen() -> None:
    """The check above can fail: it finds a method that no monitor has."""
    text = "`monitor.step(batch)`, `monitor.go_on_from(5)`, `monitoring/monitor.gone`, monitor.py"
    assert {"go_on_from"} == unknown_attributes(text)


def test_a_file_that_is_gone_would_be_seen() -> None:
    """The check above can fail: it finds a file and a folder that do not exist."""
    assert ["b.py", "d/"] == unknown_files(
        "`a.py`, `b.py`, `c/` and `d/`", {"lflops/a.py", "lflops/c/"}
    )
