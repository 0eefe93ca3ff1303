"""Test which phase takes longer in a run than in its window, with times worked out by hand."""

import pytest

from lflops.findings.longer_phase import joined_phases, longer_phase

WINDOW = {"data": 5.0, "forward": 10.0, "backward": 20.0, "optimizer": 15.0, "other": 3.0}
"""Milliseconds of the phases of a window."""


def longer(mean: float = 60.0, **changed: float) -> tuple[str, float] | None:
    """Return the phase that takes longer, and by how much, if these phases change in the run."""
    found = longer_phase(WINDOW | changed, WINDOW, mean)
    return None if found is None else (found.name, found.excess)


def test_batches_of_twice_the_size_are_not_one_longer_phase() -> None:
    """Forward and backward take twice as long. The optimizer does not depend on the batch."""
    assert longer(forward=20.0, backward=40.0) is None


@pytest.mark.parametrize(
    ("phase", "seconds", "excess"),
    [("forward", 30.0, 20.0), ("backward", 60.0, 40.0), ("optimizer", 45.0, 30.0)],
)
def test_the_only_phase_that_takes_longer_is_found(
    phase: str, seconds: float, excess: float
) -> None:
    """The excess is the difference, because no other phase takes longer."""
    assert (phase, pytest.approx(excess)) == longer(**{phase: seconds})


def test_an_excess_beyond_larger_batches_is_found() -> None:
    """Backward takes 1.5 times as long, and forward 4 times: 25 ms more than 1.5 times 10 ms."""
    assert ("forward", pytest.approx(25.0)) == longer(forward=40.0, backward=30.0)


def test_small_and_variable_parts_are_not_compared() -> None:
    """4 ms of a step of 100 ms are too few. Data wait and other time vary."""
    assert longer(100.0, forward=14.0) is None
    assert longer(data=50.0, other=50.0) is None


def test_all_of_backward_is_one_phase() -> None:
    """A ledger times the wait for other ranks apart, and reports show recomputation apart."""
    joined = joined_phases({"forward": 1.0, "backward": 2.0, "wait": 3.0, "recompute": 4.0})
    assert {"forward": 1.0, "backward": 9.0} == joined
