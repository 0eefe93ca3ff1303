"""No test depends on when it runs: workers that collect tests a second apart collect the same ones."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT


def _packed_with_the_time(source: str) -> Iterator[int]:
    """Lines that call `gzip.compress` without `mtime`.

    Its result holds the second, and in a test's parameter also the test's name does.
    """
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "gzip.compress"
            and "mtime" not in {each.arg for each in node.keywords}
        ):
            yield node.lineno


def test_no_test_packs_with_the_time() -> None:
    """Else `pytest` fails with "Different tests were collected" now and then."""
    found = {
        str(path): list(_packed_with_the_time(path.read_text("utf-8")))
        for path in Path(ROOT, "tests").rglob("*.py")
    }
    assert {} == {path: lines for path, lines in found.items() if lines}


def test_a_planted_one_is_found() -> None:
    """In the second of these lines."""
    assert [2] == list(_packed_with_the_time("gzip.compress(b'x', mtime=0)\ngzip.compress(b'x')"))
