"""`lflops memory` as a shell runs it."""

import json
import pickle
from pathlib import Path

import pytest

from lflops.cli.main import main
from tests.memory.snapshots.test_causes import GIB, logits


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    """One in which 8 GiB of logits did not fit."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(logits().snapshot()))
    return str(file)


def test_the_text_begins_with_the_cause(snapshot: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Then the request, the memory, who holds it, and what can be done."""
    assert 0 == main(["memory", snapshot])
    lines = capsys.readouterr().out.splitlines()
    assert "One tensor takes 8.00 GiB (train.py:14 training_step)." == lines[0]
    assert (
        "device 0 ran out of memory: 8.00 GiB were requested at train.py:14 training_step; the device had 3.00 GiB free"
        == lines[2]
    )
    assert [] == [each for each in ("by category", "what would free memory") if each not in lines]


def test_json_has_the_same(snapshot: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In bytes. An A100 has much more than what is reserved and 3 GiB."""
    assert 0 == main(["memory", snapshot, "--json", "--hardware", "NVIDIA A100-SXM4-80GB"])
    found = json.loads(capsys.readouterr().out)
    assert (8 * GIB, True) == (found["failed_bytes"], found["ran_out"])
    assert {"huge_tensor", "other_process"} <= {each["code"] for each in found["causes"]}, (
        "an A100 has much more than 3 GiB and what is reserved"
    )


def test_a_wrong_call_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2."""
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
