"""Traces of real GPUs against what TraceLens reports of the same files."""

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
"""TraceLens's that mean what ours do.

Its `elementwise` has conversions, which are copies here; its `other` is all the rest.
"""


@pytest.fixture(params=COMPARED)
def name(request: pytest.FixtureRequest) -> str:
    """One of the traces."""
    return str(request.param)


def summary(name: str) -> TraceSummary:
    """The analysis of a trace."""
    return summarise(read_trace(gpu_traces() / f"{name}.json.gz"))


def answers(name: str, table: str) -> list[Mapping[str, str]]:
    """TraceLens's rows."""
    with (gpu_traces() / f"{name}.tracelens" / table).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_timeline_agrees(name: str) -> None:
    """Each part of it, to a per mille; the parts add up to the nanosecond."""
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
    assert (
        found.window
        == found.computing + found.exposed_communication + found.exposed_copies + found.idle
    )


def test_categories_agree_where_they_mean_the_same(name: str) -> None:
    """GEMM, convolution, normalisation and reductions, to a per mille; and all categories together."""
    rows = {
        row["op category"]: float(row["total_direct_kernel_time_ms"])
        for row in answers(name, "ops_summary_by_category.csv")
    }
    ours = {row.category: row.device / 1e6 for row in summary(name).categories}
    for theirs, of_ours in CATEGORIES.items():
        assert rows.get(theirs, 0) == pytest.approx(
            sum(ours.get(each, 0) for each in of_ours), rel=1e-3
        ), theirs
    assert sum(rows.values()) == pytest.approx(sum(ours.values()), rel=1e-3)


def test_kernels_agree(name: str) -> None:
    """Each kernel's time and calls.

    TraceLens lists no copies here, and work from before the window without an operator.
    """
    rows = [row for row in answers(name, "kernel_summary.csv") if row["Parent cpu_op"]]
    theirs: dict[str, list[float]] = {}
    for row in rows:
        sums = theirs.setdefault(row["Kernel name"], [0.0, 0])
        sums[0] += float(row["Kernel duration (µs)_sum"])
        sums[1] += int(row["Kernel duration (µs)_count"])
    ours = {kernel.name: [kernel.device / 1e3, kernel.calls] for kernel in summary(name).kernels}
    assert theirs == {
        kernel: [pytest.approx(ours[kernel][0], rel=1e-3), ours[kernel][1]] for kernel in theirs
    }


def test_operators_agree(name: str) -> None:
    """Each operator's own time on the device, with all below it, and its calls that launched something."""
    ours = {row.name: row for row in summary(name).operators}
    for row in answers(name, "ops_summary.csv"):
        found = ours[row["name"]]
        assert found.self_device / 1e6 == pytest.approx(
            float(row["total_direct_kernel_time_ms"]), rel=1e-3
        )
        assert found.device / 1e6 == pytest.approx(
            float(row["total_subtree_kernel_time_ms"]), rel=1e-3
        )


@pytest.mark.parametrize("table", ["GEMM.csv", "CONV_fwd.csv", "SDPA_fwd.csv"])
def test_products_agree(name: str, table: str) -> None:
    """Calls, the device's time, FLOPs and bytes of each product with its shapes.

    TraceLens counts no bias of a convolution, no softmax, and of a causal mask half of the square
    without its diagonal; ours are known.
    """
    if not (gpu_traces() / f"{name}.tracelens" / table).exists():
        pytest.skip(f"{name} has no such products")
    ours = {
        (row.name, str([list(shape or ()) for shape in row.shapes])): row
        for row in summary(name).shapes
    }
    for row in answers(name, table):
        found = ours[row["name"], row["Input Dims_first"]]
        assert (int(row["name_count"]), found.device / 1e3) == (
            found.calls,
            pytest.approx(float(row["Kernel Time (µs)_sum"]), rel=1e-3),
        )
        flops, moved = float(row["GFLOPS_first"]) * 1e9, float(row["Data Moved (MB)_first"]) * 2**20
        if table == "GEMM.csv":
            assert (flops, moved) == pytest.approx(
                (found.flops / found.calls, (found.bytes_moved or 0) / found.calls)
            )
        elif table == "CONV_fwd.csv":
            assert flops == pytest.approx(2 * found.macs / found.calls)
            assert moved + 2 * (found.shapes[2] or (0,))[0] == pytest.approx(
                (found.bytes_moved or 0) / found.calls
            )
        else:
            square = flops * (2 if row["param: causal"] == "True" else 1)
            assert (square, moved) == pytest.approx(
                (2 * found.macs / found.calls, (found.bytes_moved or 0) / found.calls)
            )


@pytest.mark.parametrize(
    "name",
    ["hta_nccl_parser_config_nccl_data", "hta_timeline_analysis_sampled_rank-0", *COMPARED],
    indirect=True,
)
def test_idle_time_is_divided_without_a_rest(name: str) -> None:
    """To the nanosecond."""
    found = summary(name)
    assert found.device is not None
    assert sum(found.idle.values()) == found.device.idle
    assert all(nanoseconds > 0 for nanoseconds in found.idle.values())
