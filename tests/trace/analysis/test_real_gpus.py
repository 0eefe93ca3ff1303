"""Test that lflops reads traces of real GPUs as TraceLens does, which reports on the same files."""

import csv
from collections.abc import Mapping

import pytest

from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.summary import TraceSummary, summarise
from tests.support.traces_by_hand import gpu_traces

COMPARED = [
    "h100_gaunernst_bert-small-uncased__1016001",
    "h100_Falconsai_nsfw_image_detection__1016002",
    "h100_Qwen_Qwen1.5-0.5B-Chat__1016005",
    "h100_facebook_timesformer-base-finetuned-k400__1016002",
    "mi300_Qwen_Qwen1.5-0.5B-Chat__1016005",
]

CATEGORIES = {
    "GEMM": {"gemm"},
    "CONV_fwd": {"convolution"},
    "NORM_fwd": {"normalisation"},
    "reduce": {"reduction"},
}
"""Categories of TraceLens that have the same meaning as some of lflops' categories.

The category `elementwise` of TraceLens includes conversions, which are copies in lflops. Its
category `other` is everything else.
"""


@pytest.fixture(params=COMPARED)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of one of the traces."""
    return str(request.param)


def summary(name: str) -> TraceSummary:
    """Return the summary of a trace."""
    return summarise(read_trace(gpu_traces() / f"{name}.json.gz"))


def answers(name: str, table: str) -> list[Mapping[str, str]]:
    """Return the rows of a table of TraceLens."""
    with (gpu_traces() / f"{name}.tracelens" / table).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_timeline_agrees(name: str) -> None:
    """Each part of the timeline agrees with TraceLens within 0.1 %.

    The parts add up to the window exactly.
    """
    found = summary(name).device
    assert found is not None
    milliseconds = {row["type"]: float(row["time ms"]) for row in answers(name, "gpu_timeline.csv")}
    ours = {
        "computation_time": found.computing,
        "exposed_comm_time": found.exposed_communication,
        "exposed_memcpy_time": found.exposed_copies,
        "busy_time": found.busy,
        "idle_time": found.idle,
        "total_time": found.window,
        "total_comm_time": found.communication,
        "total_memcpy_time": found.copies,
    }
    assert milliseconds == {
        kind: pytest.approx(nanoseconds / 1e6, rel=1e-3) for kind, nanoseconds in ours.items()
    }
    parts = (found.computing, found.exposed_communication, found.exposed_copies, found.idle)
    assert found.window == sum(parts)


def test_categories_agree_where_they_mean_the_same(name: str) -> None:
    """The times of the categories in `CATEGORIES`, and of all together, agree within 0.1 %."""
    rows = {}
    for row in answers(name, "ops_summary_by_category.csv"):
        rows[row["op category"]] = float(row["total_direct_kernel_time_ms"])
    ours = {row.category: row.device / 1e6 for row in summary(name).categories}
    for theirs, of_ours in CATEGORIES.items():
        expected = sum(ours.get(each, 0) for each in of_ours)
        assert rows.get(theirs, 0) == pytest.approx(expected, rel=1e-3), theirs
    assert sum(rows.values()) == pytest.approx(sum(ours.values()), rel=1e-3)


def test_kernels_agree(name: str) -> None:
    """The time and the calls of each kernel agree with TraceLens.

    The table of TraceLens has no copies. Work that was launched before the window has no operator
    there, and is left out.
    """
    rows = [row for row in answers(name, "kernel_summary.csv") if row["Parent cpu_op"]]
    theirs: dict[str, list[float]] = {}
    for row in rows:
        sums = theirs.setdefault(row["Kernel name"], [0.0, 0])
        sums[0] += float(row["Kernel duration (µs)_sum"])
        sums[1] += int(row["Kernel duration (µs)_count"])
    ours = {kernel.name: kernel for kernel in summary(name).kernels}
    for kernel, (microseconds, calls) in theirs.items():
        assert microseconds == pytest.approx(ours[kernel].device / 1e3, rel=1e-3)
        assert calls == ours[kernel].calls


def test_operators_agree(name: str) -> None:
    """The device times of each operator agree, with and without the operators that it calls."""
    ours = {row.name: row for row in summary(name).operators}
    for row in answers(name, "ops_summary.csv"):
        found = ours[row["name"]]
        direct = float(row["total_direct_kernel_time_ms"])
        with_called = float(row["total_subtree_kernel_time_ms"])
        assert found.self_device / 1e6 == pytest.approx(direct, rel=1e-3)
        assert found.device / 1e6 == pytest.approx(with_called, rel=1e-3)


@pytest.mark.parametrize("table", ["GEMM.csv", "CONV_fwd.csv", "SDPA_fwd.csv"])
def test_products_agree(name: str, table: str) -> None:
    """Calls, device time, FLOPs and bytes of each matmul with its shapes agree with TraceLens.

    TraceLens counts neither the bias of a convolution nor the softmax of attention. For a causal
    mask, it counts half of the scores, but lflops counts all of them.
    """
    if not (gpu_traces() / f"{name}.tracelens" / table).exists():
        pytest.skip(f"{name} has no such products")
    ours = {}
    for of_shapes in summary(name).shapes:
        dims = str([list(shape or ()) for shape in of_shapes.shapes])
        ours[of_shapes.name, dims] = of_shapes
    for row in answers(name, table):
        found = ours[row["name"], row["Input Dims_first"]]
        assert int(row["name_count"]) == found.calls
        microseconds = float(row["Kernel Time (µs)_sum"])
        assert found.device / 1e3 == pytest.approx(microseconds, rel=1e-3)
        flops = float(row["GFLOPS_first"]) * 1e9
        moved = float(row["Data Moved (MB)_first"]) * 2**20
        our_flops = found.flops / found.calls
        flops_of_macs = 2 * found.macs / found.calls
        our_bytes = (found.bytes_moved or 0) / found.calls
        if table == "GEMM.csv":
            assert (flops, moved) == pytest.approx((our_flops, our_bytes))
        elif table == "CONV_fwd.csv":
            assert flops == pytest.approx(flops_of_macs)
            bias = (found.shapes[2] or (0,))[0]
            assert moved + 2 * bias == pytest.approx(our_bytes)
        else:
            all_scores = 2 * flops if row["param: causal"] == "True" else flops
            assert (all_scores, moved) == pytest.approx((flops_of_macs, our_bytes))


@pytest.mark.parametrize(
    "name",
    ["hta_nccl_parser_config_nccl_data", "hta_timeline_analysis_sampled_rank-0", *COMPARED],
    indirect=True,
)
def test_idle_time_is_divided_without_a_rest(name: str) -> None:
    """Every nanosecond of idle time has a cause."""
    found = summary(name)
    assert found.device is not None
    assert sum(found.idle.values()) == found.device.idle
    assert all(nanoseconds > 0 for nanoseconds in found.idle.values())
