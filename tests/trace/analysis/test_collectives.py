"""Test collectives in traces: bytes, bandwidth, and the waits of ranks for each other."""

from pathlib import Path
from typing import Any

import pytest

from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.summary import summarise, summarise_all
from lflops.trace.recorded import RecordedTrace
from tests.support.traces_by_hand import TraceByHand


def about(name: str, inputs: int, outputs: int, ranks: int, dtype: str = "Float") -> dict[str, Any]:
    """Return the arguments that newer versions of torch write to a kernel of NCCL."""
    return {
        "Collective name": name,
        "In msg nelems": inputs,
        "Out msg nelems": outputs,
        "Group size": ranks,
        "dtype": dtype,
        "Process Group Name": "0",
        "Process Group Ranks": str(list(range(ranks))),
    }


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "kind", "message", "factor"),
    [
        ("allreduce", 1000, 1000, "all_reduce", 4000, 2 * 3 / 4),
        ("_allgather_base", 250, 1000, "all_gather", 4000, 3 / 4),
        ("_reduce_scatter_base", 1000, 250, "reduce_scatter", 4000, 3 / 4),
        ("all_to_allv", 1000, 1000, "all_to_all", 4000, 3 / 4),
        ("broadcast", 1000, 1000, "broadcast", 4000, 1),
        ("send", 1000, 1000, "send", 4000, 1),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(  # noqa: PLR0917
    tmp_path: Path, name: str, inputs: int, outputs: int, kind: str, message: int, factor: float
) -> None:
    """The bandwidths are those of nccl-tests.

    A message of 1000 floats in 2000 ns is 2 GB/s. For the bus bandwidth, it is multiplied by a
    factor for this kind of collective over 4 ranks.
    """
    trace = TraceByHand()
    trace.kernel("ncclDevKernel_X", 0, 2000, **about(name, inputs, outputs, 4))
    (row,) = summarise(trace.read(tmp_path)).collectives
    assert (kind, "[0, 1, 2, 3]", 4) == (row.kind, row.group, row.group_size)
    assert (1, 2000, message) == (row.calls, row.device, row.bytes)
    assert (2e9, 2e9 * factor) == pytest.approx(
        (row.algorithmic_bytes_per_second, row.bus_bytes_per_second)
    )


def test_calls_of_a_kind_in_a_group_are_one_row(tmp_path: Path) -> None:
    """Collectives of one kind in one group are one row, and another group has its own row.

    During half of one of the all-reduces, another kernel runs, so this half is not exposed.
    """
    trace = TraceByHand()
    trace.kernel("gemm", 0, 150)
    for start in (100, 300):
        trace.kernel(
            "ncclDevKernel_AllReduce_Sum_bf16",
            start,
            start + 100,
            stream=9,
            **about("allreduce", 50, 50, 2, "BFloat16"),
        )
    trace.kernel(
        "ncclDevKernel_AllReduce_Sum_bf16",
        500,
        600,
        stream=9,
        **about("allreduce", 50, 50, 8, "BFloat16"),
    )
    rows = summarise(trace.read(tmp_path)).collectives
    assert [(2, 2, 200, 150, 200), (8, 1, 100, 100, 100)] == [
        (row.group_size, row.calls, row.device, row.exposed, row.bytes) for row in rows
    ]


def test_a_kernel_is_described_by_the_operator_around_its_launch(tmp_path: Path) -> None:
    """If a kernel has no arguments, those of `record_param_comms` around its launch are used."""
    trace = TraceByHand()
    trace.operator("record_param_comms", 0, 100, **about("allreduce", 1000, 1000, 2))
    trace.kernel("ncclKernel_AllReduce_RING", 200, 300, launch=(10, 20))
    (row,) = summarise(trace.read(tmp_path)).collectives
    assert ("all_reduce", 2, 4000) == (row.kind, row.group_size, row.bytes)


def test_older_traces_tell_the_message_by_the_scopes_inputs(tmp_path: Path) -> None:
    """In older traces, the message is read from the inputs of the range around the collective.

    These traces do not have the group. If there is only one group, it has all ranks. Otherwise, the
    size of the group is unknown.
    """
    sizes: dict[int, tuple[int | None, float | None]] = {}
    for groups in (1, 2):
        trace = TraceByHand(distributedInfo={"rank": 0, "world_size": 8, "pg_count": groups})
        trace.event(
            "user_annotation",
            "nccl:all_reduce",
            0,
            100,
            **{"Input Dims": [[100], [5, 5]], "Input type": ["float", "float"]},
        )
        trace.kernel("ncclKernel_AllReduce_RING", 200, 300, launch=(10, 20))
        (row,) = summarise(trace.read(tmp_path)).collectives
        assert ("all_reduce", 500) == (row.kind, row.bytes)
        assert 5e9 == pytest.approx(row.algorithmic_bytes_per_second)
        sizes[groups] = row.group_size, row.bus_bytes_per_second
    assert {1: (8, pytest.approx(5e9 * 2 * 7 / 8)), 2: (None, None)} == sizes


def test_what_is_not_described_is_unknown(tmp_path: Path) -> None:
    """Without any description, only the kind is known, from the name of the kernel.

    The bytes and the bandwidth are unknown, not 0.
    """
    trace = TraceByHand()
    trace.kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 0, 100)
    (row,) = summarise(trace.read(tmp_path)).collectives
    assert ("reduce_scatter", "") == (row.kind, row.group)
    assert (None, None) == (row.group_size, row.bytes)
    assert (None, None) == (row.algorithmic_bytes_per_second, row.bus_bytes_per_second)


def rank(
    folder: Path, number: int, times: list[tuple[int, int]], *, steps: int = 1
) -> RecordedTrace:
    """Return the trace of a rank with steps of 1000 ns.

    `times` are the starts and the lengths of its all-reduces.
    """
    trace = TraceByHand(distributedInfo={"rank": number, "world_size": 3})
    for step in range(steps):
        trace.step(step, 1000 * step, 1000 * step + 1000)
    for start, length in times:
        trace.kernel(
            "ncclDevKernel_AllReduce",
            start + 5000,
            start + 5000 + length,
            launch=(start, start + 5),
            **about("allreduce", 10, 10, 3),
        )
    return trace.read(folder)


def test_the_shortest_kernel_is_the_transfer_and_the_rest_is_waiting(tmp_path: Path) -> None:
    """The shortest kernel of a collective is the transfer, and the rest of the others is waiting.

    The transfers take 100 + 50 + 80 ns. Rank 2 comes last twice, and rank 0 once. The clocks of the
    ranks are not compared.
    """
    ranks = [
        rank(tmp_path, 0, [(0, 300), (400, 150), (800, 80)]),
        rank(tmp_path, 1, [(50, 250), (450, 100), (820, 90)]),
        rank(tmp_path, 2, [(200, 100), (500, 50), (700, 180)]),
    ]
    found = summarise_all(ranks).ranks
    assert found is not None
    assert ((0, 1, 2), 230, 0) == (found.ranks, found.transfer, found.unmatched)
    assert {0: 300, 1: 210, 2: 100} == found.waiting
    assert {0: 1, 1: 0, 2: 2} == found.last
    (row,) = found.collectives
    assert ("all_reduce", "[0, 1, 2]", 3) == (row.kind, row.group, row.calls)
    assert (100, 200) == (row.skew_median, row.skew_longest)


def test_collectives_are_matched_within_their_step(tmp_path: Path) -> None:
    """Collectives of several ranks are matched within their step.

    The trace of rank 1 lacks an all-reduce of step 0, so one collective is unmatched. Those of step
    1 are still matched with each other.
    """
    ranks = [
        rank(tmp_path, 0, [(0, 300), (500, 200), (1100, 70)], steps=2),
        rank(tmp_path, 1, [(500, 100), (1100, 50)], steps=2),
    ]
    found = summarise_all(ranks).ranks
    assert found is not None
    assert (2, 1) == (sum(row.calls for row in found.collectives), found.unmatched)
    assert 100 + 50 == found.transfer


def test_traces_that_are_not_of_different_ranks_are_not_compared(tmp_path: Path) -> None:
    """One trace, two traces of the same rank, and a trace without a rank are not compared."""
    one = rank(tmp_path, 0, [(0, 300)])
    assert summarise_all([one]).ranks is None
    assert summarise_all([one, one]).ranks is None
    nameless = TraceByHand()
    nameless.kernel("a", 0, 1)
    assert summarise_all([one, nameless.read(tmp_path)]).ranks is None


def test_the_rank_is_told_by_the_name_where_the_file_does_not(tmp_path: Path) -> None:
    """If the content of a trace has no rank, the rank is read from the file's name.

    lflops and torch's TensorBoard handler use such names.
    """
    trace = TraceByHand()
    trace.kernel("a", 0, 1)
    read = read_trace(trace.write(tmp_path / "host_3.1234.pt.trace.json.gz"))
    assert [3] == [summary.rank for summary in summarise_all([read]).traces]
