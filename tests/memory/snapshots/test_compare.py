"""Two snapshots compared, as a shell does."""

import json
import pickle
from pathlib import Path

import pytest

from lflops.cli.main import main
from tests.support.memory_snapshots import BUILD, STATE, Recorder, forward

MIB = 2**20


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """A model of 8 MiB.

    Line 31 has 3 tensors of a MiB, then 5. Before, line 40 has one; after, there are 16 MiB of
    state.
    """
    before, after = Recorder(), Recorder()
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
    """12 MiB before, 29 after. What is the same is not listed by line."""
    assert 0 == main(["memory", *two])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert (
        "requested 12.00 MiB → 29.00 MiB, reserved 12.00 MiB → 29.00 MiB (peak → ran out of memory)"
        == lines[0]
    )
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
    """No line is listed; as JSON the list is empty, and each pair has equal halves."""
    assert 0 == main(["memory", two[0], two[0], "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ([], [12 * MIB, 12 * MIB], [8 * MIB, 8 * MIB]) == (
        found["holders"],
        found["requested_bytes"],
        found["by_category"]["parameters"],
    )


def test_two_snapshots_make_no_page(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It is one line that says what to leave out."""
    assert 2 == main(["memory", *two, "--html", "page.html"])
    assert (
        "two snapshots are compared as text or --json: leave --html and --hardware out"
        in capsys.readouterr().err
    )
