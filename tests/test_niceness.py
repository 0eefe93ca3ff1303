"""No test makes the process nicer that the others run in: the check of it, which `conftest` has, can fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CULPRIT = """
import os

def test_a_culprit():
    os.nice(1)
"""


def test_a_test_that_changes_its_process_niceness_fails(tmp_path: Path) -> None:
    """As it ends, by its name; here in a pytest of its own."""
    if os.nice(0) == 19:
        pytest.skip("no process can be nicer")
    (tmp_path / "test_planted.py").write_text(CULPRIT)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", "test_planted.py"]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, check=False, capture_output=True, text=True)
    assert "1 passed, 1 error" in done.stdout
    assert "ERROR test_planted.py::test_a_culprit" in done.stdout
    assert "AssertionError: the test has changed the niceness of its process" in done.stdout
