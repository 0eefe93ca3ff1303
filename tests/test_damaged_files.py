"""Damaged files end in one line or in right numbers, and the judge of that sees planted errors.

`DAMAGED_FILES=4000 pytest tests/test_damaged_files.py` reads more of them.
"""

import os
from pathlib import Path

import pytest

from tests.support.damaged_files import KINDS, Outcome, judge, outcomes

FILES = int(os.environ.get("DAMAGED_FILES", "150"))
WHOLE = "window 1.50 µs\nidle 500 ns 33.3 %"


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_ends_in_no_traceback_and_no_silent_error(name: str, tmp_path: Path) -> None:
    """Whatever is damaged, a command refuses the file, says what is missing, or prints its numbers."""
    wrong = [
        f"file {each.number}: {each.status}: {each.why}"
        for each in outcomes(name, FILES, seed=38, folder=tmp_path)
        if each.why
    ]
    assert [] == wrong


CASES: dict[str, tuple[tuple[int | None, str, str, str], str, str]] = {
    "a traceback": ((None, "", "", "KeyError: 'ts'"), "", "traceback"),
    "an error of two lines": ((2, "", "lflops: a\nb\n", ""), "", "traceback"),
    "Python's bytes": ((2, "", "lflops: a time of b'null'\n", ""), "", "traceback"),
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
    """Each by what a command printed, and by what was damaged."""
    assert expected == judge(Outcome(*outcome), WHOLE, damage, Path("/no/file"))[0]
