"""No test makes the process nicer that the others run in.

The check of it, which `conftest` has, can fail.
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
    """As it ends, by its name; here in a pytest of its own."""
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
