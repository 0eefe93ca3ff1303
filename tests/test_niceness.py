"""Test the fixture in `tests/conftest.py` that reports a test that changes the niceness.

All tests of a worker run in the same process, so a change would make the other tests slower.
"""

import os
from pathlib import Path

import pytest

from tests.support.warm_python import WarmPython

CULPRIT = """
import os

def test_a_culprit():
    os.nice(1)
"""


def test_a_test_that_changes_its_process_niceness_fails(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A test that changes the niceness passes, but its teardown reports an error with its name.

    The planted test runs in a separate pytest process.
    """
    if os.nice(0) == 19:
        pytest.skip("no process can be nicer")
    (tmp_path / "test_planted.py").write_text(CULPRIT)
    script = "import os, sys, pytest; os.chdir(sys.argv.pop()); sys.exit(pytest.main())"
    done = warm_python.run(
        script,
        "-W",
        "ignore",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-q",
        "test_planted.py",
        tmp_path,
    )
    assert "1 passed, 1 error" in done.out
    assert "ERROR test_planted.py::test_a_culprit" in done.out
    assert "AssertionError: the test has changed the niceness of its process" in done.out
