"""Test the comparison of two traces: per step if both have steps, and with limits."""

from pathlib import Path

import pytest

from lflops.analysis.compare.diff import Limit
from lflops.trace.analysis.compare import TraceDiff, compare, trace_limits
from lflops.trace.analysis.summary import TraceSummary, summarise
from tests.support.traces_by_hand import TraceByHand


def trace(folder: Path, *, steps: int, length: int, kernel: int, jitter: int = 0) -> TraceSummary:
    """Return the summary of a trace, with a matmul and a copy of 10 ns in each step.

    Args:
        folder: The folder for the trace.
        steps: The number of steps.
        length: The length of a step in nanoseconds.
        kernel: The length of the matmul's kernel.
        jitter: The additional length of every second step.
    """
    by_hand = TraceByHand(deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    begin = 0
    for number in range(steps):
        end = begin + length + jitter * (number % 2)
        by_hand.step(number, begin, end)
        by_hand.operator(
            "aten::mm", begin, begin + 50, shapes=[[2, 3], [3, 4]], types=["c10::BFloat16"] * 2
        )
        by_hand.kernel("gemm", begin + 100, begin + 100 + kernel, launch=(begin + 10, begin + 20))
        by_hand.copy(begin + 100 + kernel, begin + 110 + kernel, launch=(begin + 30, begin + 40))
        begin = end
    return summarise(by_hand.read(folder))


@pytest.fixture
def diff(tmp_path: Path) -> TraceDiff:
    """Return the difference of four steps of 1000 ns and two of 1500 ns.

    The kernels of their matmuls take 300 and 600 ns.
    """
    return compare(
        trace(tmp_path, steps=4, length=1000, kernel=300),
        trace(tmp_path, steps=2, length=1500, kernel=600),
    )


def test_times_are_those_of_a_step(diff: TraceDiff) -> None:
    """The compared times are those of one step, however many steps each trace has."""
    assert (1000, 1500) == (diff.window.before, diff.window.after)
    assert (True, True) == (diff.per_step, diff.is_beyond_noise)
    states = {row.name: (row.before, row.after) for row in diff.states}
    assert {
        "computing": (300, 600),
        "exposed_communication": (0, 0),
        "exposed_copies": (10, 10),
        "idle": (690, 890),
    } == states
    assert [("gemm", 300, 600), ("copy", 10, 10)] == [
        (row.name, row.before, row.after) for row in diff.categories
    ]
    assert ["aten::mm"] == [row.name for row in diff.operators]
    before, after = diff.mfu
    assert before is not None
    assert after is not None
    assert before * 1000 == pytest.approx(after * 1500)


def test_without_steps_the_windows_are_compared(tmp_path: Path) -> None:
    """If one of the traces has no steps, the whole windows are compared."""
    alone = TraceByHand()
    alone.kernel("gemm", 0, 100, launch=(-20, -10))
    with_step = trace(tmp_path, steps=1, length=1000, kernel=300)
    found = compare(summarise(alone.read(tmp_path)), with_step)
    assert (100, 310) == (found.window.before, found.window.after)
    assert (False, None) == (found.per_step, found.is_beyond_noise)
    assert ("device 0", "NVIDIA H100 80GB HBM3") == found.hardware


def test_what_is_new_and_what_is_gone_are_rows(tmp_path: Path) -> None:
    """A kernel that only one of the traces has is a row, with 0 for the other trace."""
    one = TraceByHand()
    other = TraceByHand()
    one.kernel("old", 0, 100)
    other.kernel("new", 0, 70)
    found = compare(summarise(one.read(tmp_path)), summarise(other.read(tmp_path)))
    assert [("old", 100, 0), ("new", 0, 70)] == [
        (row.name, row.before, row.after) for row in found.kernels
    ]


def test_a_longer_step_breaks_its_limit_only_beyond_the_spread(
    tmp_path: Path, diff: TraceDiff
) -> None:
    """A longer step breaks the limit only if the difference is more than the spread of the steps.

    Steps that are 50 % longer break a limit of 40 %, but not of 60 %. Steps that are 10 % longer,
    but vary by more, break no limit. With one step in each trace, the spread is unknown.
    """
    assert (Limit(name="max_regress", allowed=0.4, found=0.5, is_broken=True),) == trace_limits(
        diff, max_regress=0.4
    )
    assert (Limit(name="max_regress", allowed=0.6, found=0.5, is_broken=False),) == trace_limits(
        diff, max_regress=0.6
    )
    noisy = compare(
        trace(tmp_path, steps=4, length=1000, kernel=300, jitter=400),
        trace(tmp_path, steps=4, length=1100, kernel=300, jitter=400),
    )
    (limit,) = trace_limits(noisy, max_regress=0.01)
    assert (False, False) == (noisy.is_beyond_noise, limit.is_broken)
    single = compare(
        trace(tmp_path, steps=1, length=1000, kernel=300),
        trace(tmp_path, steps=1, length=1500, kernel=300),
    )
    assert [None] == [limit.is_broken for limit in trace_limits(single, max_regress=0.1)]


def test_mfu_and_memory_are_held_to_limits(diff: TraceDiff) -> None:
    """The MFU of 48 FLOPs in 1500 ns breaks its limit. The limit of memory cannot be checked.

    The trace does not have the peak of memory.
    """
    mfu, memory = trace_limits(diff, min_mfu=0.1, max_memory=1e9)
    assert (True, 48 / 1500e-9 / 989.5e12) == (mfu.is_broken, pytest.approx(mfu.found))
    assert (None, None) == (memory.found, memory.is_broken)
