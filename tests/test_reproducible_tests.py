"""Test that the collected tests do not depend on the time of collection.

Several workers collect the tests, and must find the same tests.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT


def _packed_with_the_time(source: str) -> Iterator[int]:
    """Yield the lines that call `gzip.compress` without `mtime`.

    Without `mtime`, the result contains the current second. If it is a parameter of a test, the
    name of the test also changes every second.
    """
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "gzip.compress"
            and "mtime" not in {each.arg for each in node.keywords}
        ):
            yield node.lineno


def test_no_test_packs_with_the_time() -> None:
    """No test calls `gzip.compress` without `mtime`.

    Otherwise, pytest sometimes fails with "Different tests were collected".
    """
    found = {}
    for path in Path(ROOT, "tests").rglob("*.py"):
        lines = list(_packed_with_the_time(path.read_text("utf-8")))
        if lines:
            found[str(path)] = lines
    assert {} == found


def test_a_planted_one_is_found() -> None:
    """The check above can fail: it finds the second of two calls, which has no `mtime`."""
    assert [2] == list(_packed_with_the_time("gzip.compress(b'x', mtime=0)\ngzip.compress(b'x')"))
