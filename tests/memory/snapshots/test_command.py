"""Test `lflops memory` as it runs in a shell."""

import json
import pickle
from pathlib import Path

import pytest

from lflops.cli.main import main
from tests.memory.snapshots.test_causes import GIB, logits


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    """Write a snapshot in which 8 GiB of logits did not fit, and return its path."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(logits().snapshot()))
    return str(file)


def test_the_text_begins_with_the_cause(snapshot: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The text begins with the cause, then come the request, the memory by holder, and remedies."""
    assert 0 == main(["memory", snapshot])
    lines = capsys.readouterr().out.splitlines()
    assert "One tensor takes 8.00 GiB (train.py:14 training_step)." == lines[0]
    assert (
        "device 0 ran out of memory: 8.00 GiB were requested at train.py:14 training_step; the device had 3.00 GiB free"
        == lines[2]
    )
    assert "by category" in lines
    assert "what would free memory" in lines


def test_json_has_the_same(snapshot: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has the same content in bytes.

    An A100 has far more memory than the reserved bytes and 3 GiB, so another process must hold the
    rest.
    """
    assert 0 == main(["memory", snapshot, "--json", "--hardware", "NVIDIA A100-SXM4-80GB"])
    found = json.loads(capsys.readouterr().out)
    assert 8 * GIB == found["failed_bytes"]
    assert found["ran_out"] is True
    assert {"huge_tensor", "other_process"} <= {each["code"] for each in found["causes"]}


def test_a_wrong_call_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong call prints one line, and the exit status is 2."""
    (tmp_path / "text").write_text("no pickle")
    for args, said in (
        ([str(tmp_path / "text")], "is not a pickle"),
        ([str(tmp_path / "none")], "No such file"),
        (["x", "--hardware", "y"], "'y'"),
    ):
        assert 2 == main(["memory", *args])
        error = capsys.readouterr().err
        assert said in error
        assert 1 == error.count("\n")
