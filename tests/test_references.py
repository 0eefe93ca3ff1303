"""Names between backticks.

Those in docstrings and comments are in the code, and the files that documents name are there.
"""

import ast
import builtins
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

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
"""Names of torch, its allocator, transformers and engines, and examples."""


def words(text: str) -> list[str]:
    """All identifiers of a text."""
    return re.findall(r"[A-Za-z_]\w*", text)


def python_parts(source: str) -> Iterator[tuple[bool, int, str]]:
    """Each piece of a file.

    Whether it is for people, a docstring or a comment; its line and its text.
    """
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(source)))
    statements = (each for body in bodies if isinstance(body, list) for each in body)
    texts = {
        each.lineno
        for each in statements
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and token.start[0] in texts
        )
        if is_text or token.type in {tokenize.NAME, tokenize.STRING}:
            yield is_text, token.start[0], token.string


def unknown_names(pages: dict[str, str]) -> list[str]:
    """Names that a docstring or a comment of a page has, and no page's code."""
    known, named = {*dir(builtins), *keyword.kwlist, *OF_OTHERS}, []
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
    return [
        f"{path}:{line}: `{name}` is not in the code"
        for path, line, name in named
        if name not in known
    ]


MADE = {"dist/", "site/"}
"""Folders that commands of a document make."""


def unknown_files(text: str, files: set[str]) -> list[str]:
    """Files and folders that a document names, and that are none: a path may begin anywhere."""
    return [
        name
        for name in FILE.findall(text)
        if name not in MADE and not any(f"/{each}".endswith(f"/{name}") for each in files)
    ]


def repository() -> set[str]:
    """Its files and folders, those with a slash at the end."""
    paths = [
        path
        for top in ("lflops", "tests", "benchmarks", "docs", "examples", ".github")
        for path in (ROOT / top).rglob("*")
    ]
    paths += [*ROOT.iterdir()]
    return {path.relative_to(ROOT).as_posix() + ("/" if path.is_dir() else "") for path in paths}


def test_names_in_texts_for_people_are_in_the_code() -> None:
    """What was renamed is renamed in the texts too."""
    paths = [
        path
        for path in (ROOT / "lflops").rglob("*")
        if path.suffix in {".py", ".js", ".ts", ".toml"}
    ]
    assert [] == unknown_names(
        {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}
    )


def test_a_stale_name_would_be_seen() -> None:
    """In a docstring and in a comment; a string is code."""
    source = '"""Compress a head for `told_in`."""\n\n# `head_in` reads it, not `gone()`\nhead_in = "kept_in"\n"""As `kept_in`."""\n'
    assert [
        "a.py:1: `told_in` is not in the code",
        "a.py:3: `gone` is not in the code",
    ] == unknown_names({"a.py": source})


def test_files_that_documents_name_are_there() -> None:
    """By their whole path, or its end."""
    files = repository()
    assert {} == {
        path.name: found
        for path in DOCUMENTS
        if (found := unknown_files(path.read_text("utf-8"), files))
    }


def test_a_file_that_is_gone_would_be_seen() -> None:
    """And a folder."""
    assert ["b.py", "d/"] == unknown_files(
        "`a.py`, `b.py`, `c/` and `d/`", {"lflops/a.py", "lflops/c/"}
    )
