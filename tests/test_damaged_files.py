"""The judge of damaged files, by which `benchmarks/mutated.py` finds tracebacks and silent wrong numbers, sees planted ones."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

WHOLE = "window 1.50 µs\nidle 500 ns 33.3 %"


@pytest.fixture
def mutated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("mutated")


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
    mutated: ModuleType, outcome: tuple[int | None, str, str, str], damage: str, expected: str
) -> None:
    """Each by what a command printed, and by what was damaged."""
    assert expected == mutated.judge(mutated.Outcome(*outcome), WHOLE, damage, Path("/no/file"))[0]
