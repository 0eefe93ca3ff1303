"""Two traces compared: by step where both have steps, and held to limits."""

from pathlib import Path

import pytest

from lflops.analysis.compare.diff import Limit
from lflops.trace.analysis.compare import TraceDiff, compare, trace_limits
from lflops.trace.analysis.summary import TraceSummary, summarise
from tests.support.traces_by_hand import TraceByHand


def trace(folder: Path, *, steps: int, length: int, kernel: int, jitter: int = 0) -> TraceSummary:
    """Steps of so many nanoseconds, every second one longer by the jitter, each with a product and a copy of 10."""
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
    """From four steps of 1000 ns to two of 1500, with products of 300 and of 600 ns."""
    return compare(
        trace(tmp_path, steps=4, length=1000, kernel=300),
        trace(tmp_path, steps=2, length=1500, kernel=600),
    )


def test_times_are_those_of_a_step(diff: TraceDiff) -> None:
    """However many each trace has."""
    assert (True, 1000, 1500, True) == (
        diff.per_step,
        diff.window.before,
        diff.window.after,
        diff.is_beyond_noise,
    )
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
    """One of the two has no steps."""
    alone = TraceByHand()
    alone.kernel("gemm", 0, 100, launch=(-20, -10))
    found = compare(
        summarise(alone.read(tmp_path)), trace(tmp_path, steps=1, length=1000, kernel=300)
    )
    assert (False, 100, 310, None) == (
        found.per_step,
        found.window.before,
        found.window.after,
        found.is_beyond_noise,
    )
    assert ("device 0", "NVIDIA H100 80GB HBM3") == found.hardware


def test_what_is_new_and_what_is_gone_are_rows(tmp_path: Path) -> None:
    """A kernel of one trace alone, and nothing that both do not have."""
    one, other = TraceByHand(), TraceByHand()
    one.kernel("old", 0, 100)
    other.kernel("new", 0, 70)
    found = compare(summarise(one.read(tmp_path)), summarise(other.read(tmp_path)))
    assert [("old", 100, 0), ("new", 0, 70)] == [
        (row.name, row.before, row.after) for row in found.kernels
    ]


def test_a_longer_step_breaks_its_limit_only_beyond_the_spread(
    tmp_path: Path, diff: TraceDiff
) -> None:
    """Half as long again, of steps that are all the same; and a tenth, of steps that vary by more."""
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
    """48 FLOPs in 1500 ns are far from an H100's peak; the peak of memory was not recorded."""
    mfu, memory = trace_limits(diff, min_mfu=0.1, max_memory=1e9)
    assert (True, 48 / 1500e-9 / 989.5e12) == (mfu.is_broken, pytest.approx(mfu.found))
    assert (None, None) == (memory.found, memory.is_broken)
