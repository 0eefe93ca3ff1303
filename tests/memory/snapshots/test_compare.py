"""Test the comparison of two snapshots by the command."""

import json
import pickle
from pathlib import Path

import pytest

from lflops.cli.main import main
from tests.support.memory_snapshots import BUILD, STATE, Recorder, forward

MIB = 2**20


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Write snapshots of before and after, and return their paths.

    The model has 8 MiB. Line 31 has 3 tensors of a MiB before and 5 after. Before, line 40 has one
    such tensor; after, there are 16 MiB of optimizer state.
    """
    before = Recorder()
    after = Recorder()
    for recorder, activations in ((before, 3), (after, 5)):
        recorder.allocate(8 * MIB, BUILD)
        recorder.allocate(MIB, forward(31), activations)
    before.allocate(MIB, forward(40))
    after.allocate(16 * MIB, STATE)
    after.fail(MIB, STATE)
    for name, recorder in (("before", before), ("after", after)):
        (tmp_path / name).write_bytes(pickle.dumps(recorder.snapshot()))
    return [str(tmp_path / "before"), str(tmp_path / "after")]


def test_it_says_what_grew_and_what_went(
    two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """12 MiB grew to 29 MiB; only lines of code whose memory changed are listed."""
    assert 0 == main(["memory", *two])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [
        "requested by tensors 12.00 MiB → 29.00 MiB, reserved 12.00 MiB → 29.00 MiB",
        "first snapshot: at its peak; second snapshot: when memory ran out",
    ] == lines[:2]
    assert [
        "+16.00 MiB  optimizer state, 0 → 1 × train.py:50 train",
        "+2.00 MiB  activations, 3 → 5 × model.py:31 forward",
    ] == lines[lines.index("grew, by line of code") + 1 :][:2]
    assert ["-1.00 MiB  activations, 1 → 0 × model.py:40 forward"] == lines[
        lines.index("shrank, by line of code") + 1 :
    ]
    assert "+1.00 MiB  activations, 4.00 MiB → 5.00 MiB" in lines


def test_a_snapshot_has_the_same_as_itself(
    two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot compared with itself lists no lines, and both values of each pair are equal."""
    assert 0 == main(["memory", two[0], two[0], "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [] == found["holders"]
    assert [12 * MIB, 12 * MIB] == found["requested_bytes"]
    assert [8 * MIB, 8 * MIB] == found["by_category"]["parameters"]


def test_two_snapshots_make_no_page(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A page of two snapshots is an error of one line that says which options to leave out."""
    assert 2 == main(["memory", *two, "--html", "page.html"])
    assert "--html and --hardware apply only to a single snapshot" in capsys.readouterr().err
