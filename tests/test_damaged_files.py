"""Test how commands respond to damaged files, and that the checker detects planted defects.

For a damaged file, a command must print one error line or correct numbers. `DAMAGED_FILES=4000
pytest tests/test_damaged_files.py` tests more files.
"""

import os
from pathlib import Path

import pytest

from tests.support.damaged_files import KINDS, Outcome, judge, outcomes

FILES = int(os.environ.get("DAMAGED_FILES", "150"))
WHOLE = "window 1.50 µs\nidle 500 ns 33.3 %"
"""Output of a command for the undamaged file."""


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_ends_in_no_traceback_and_no_silent_error(name: str, tmp_path: Path) -> None:
    """The command refuses the file, reports what is missing, or prints the numbers in the file.

    For the possible results, see the docstring of `tests/support/damaged_files.py`.
    """
    wrong = []
    for each in outcomes(name, FILES, seed=38, folder=tmp_path):
        if each.why:
            wrong.append(f"file {each.number}: {each.status}: {each.why}")
    assert [] == wrong


# For each case: the fields of the `Outcome`, a description of the damage, and the expected result.
# The description is empty if the damaged value may still be valid.
CASES: dict[str, tuple[tuple[int | None, str, str, str], str, str]] = {
    "a traceback": ((None, "", "", "KeyError: 'ts'"), "", "traceback"),
    "an error of two lines": ((2, "", "lflops: a\nb\n", ""), "", "traceback"),
    "Python's bytes": ((2, "", "lflops: invalid time b'null'\n", ""), "", "traceback"),
    "an error": ((2, "", "lflops: a: is no trace\n", ""), "", "refused"),
    "another number": ((0, "window 1.60 µs\nidle 500 ns 31.3 %", "", ""), "", "other"),
    "another number, of what is none": (
        (0, "window 1.60 µs\nidle 500 ns 31.3 %", "", ""),
        "ts is str",
        "silent",
    ),
    "the same with a remark": (
        (0, "window 1.60 µs\nleft out 1 event", "", ""),
        "ts is str",
        "remarked",
    ),
    "the same": ((0, WHOLE, "", ""), "ts is str", "same"),
    "a part": ((0, "idle 500 ns", "", ""), "ts is str", "less"),
    "more than all": ((0, "idle 500 ns 133.3 %", "", ""), "", "silent"),
    "less than nothing": ((0, "idle -5 ns 33.3 %", "", ""), "", "silent"),
}


@pytest.mark.parametrize(("outcome", "damage", "expected"), CASES.values(), ids=CASES)
def test_what_came_of_a_file_is_judged(
    outcome: tuple[int | None, str, str, str], damage: str, expected: str
) -> None:
    """`judge` classifies an outcome from the output of the command and the kind of the damage."""
    status, _ = judge(Outcome(*outcome), WHOLE, damage, Path("/no/file"))
    assert expected == status
