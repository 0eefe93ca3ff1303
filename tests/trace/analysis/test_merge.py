"""Test how the traces of several ranks are merged into one trace.

Each event must have its rank and the right time, and merging must need little memory.
"""

import gzip
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from lflops.cli.main import main
from lflops.errors import ProfileError
from lflops.trace.analysis.merge import MERGED, merge
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.summary import summarise
from tests.support.process_state import settle
from tests.support.traces_by_hand import TraceByHand

BASE = 1_700_000_000_000_000_000


def product(pid: Any = 5, ts: float = 1.5, **more: Any) -> dict[str, Any]:
    """Return a recorded matmul."""
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": pid,
        "tid": 7,
        "ts": ts,
        "dur": 2.0,
    } | more


def named(pid: Any, name: str) -> dict[str, Any]:
    """Return the event with the name of a process."""
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def written(folder: Path, name: str, events: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write a trace, compressed if its name ends with `.gz`."""
    text = json.dumps({"schemaVersion": 1, "traceEvents": list(events), **more}, indent=1).encode()
    if name.endswith(".gz"):
        text = gzip.compress(text, mtime=0)
    (folder / name).write_bytes(text)


def merged(folder: Path) -> dict[str, Any]:
    """Merge the traces in a folder, and return the content of the merged trace."""
    merge(folder)
    content: dict[str, Any] = json.loads(gzip.decompress((folder / MERGED).read_bytes()))
    return content


def of(content: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    """Return the events with this `ph` (the kind of an event)."""
    return [event for event in content["traceEvents"] if event["ph"] == ph]


def processes(content: dict[str, Any]) -> dict[int, str]:
    """Return the names of the processes by their numbers."""
    named_processes = [event for event in of(content, "M") if event["name"] == "process_name"]
    return {event["pid"]: event["args"]["name"] for event in named_processes}


def test_ranks_of_one_process_number_are_told_apart(tmp_path: Path) -> None:
    """Processes with the same number on two ranks get different numbers and names.

    Both ranks ran as process 5, on two machines. The second trace is compressed, and has another
    process without a name.
    """
    written(
        tmp_path,
        "a_0.12.pt.trace.json",
        [named(5, "python"), product()],
        distributedInfo={"rank": 0},
    )
    written(
        tmp_path,
        "b_1.34.pt.trace.json.gz",
        [product(), named(5, "python"), product(pid="Spans")],
        distributedInfo={"rank": 1},
    )
    content = merged(tmp_path)
    assert ["rank 0: python", "rank 1: python", "rank 1: Spans"] == [
        processes(content)[event["pid"]] for event in of(content, "X")
    ]
    assert [1, 2, 3] == sorted(processes(content))


def test_clocks_that_begin_at_other_times_are_one(tmp_path: Path) -> None:
    """Times are converted to one clock.

    The clock of the second trace begins 3 ms later, so its 1.5 µs become 3001.5 µs.
    """
    written(tmp_path, "a_0.1.pt.trace.json", [product(ts=1.5)], baseTimeNanoseconds=BASE)
    written(
        tmp_path, "a_1.1.pt.trace.json", [product(ts=1.5)], baseTimeNanoseconds=BASE + 3_000_000
    )
    content = merged(tmp_path)
    assert BASE == content["baseTimeNanoseconds"]
    assert [1.5, 3001.5] == [event["ts"] for event in of(content, "X")]


def test_arrows_stay_within_their_rank(tmp_path: Path) -> None:
    """Arrows with the same id on two ranks get different ids.

    Both ranks have an arrow with the id 3. Its two ends must have the same new id.
    """
    ends = [
        {"ph": ph, "id": 3, "cat": "fwdbwd", "name": "fwdbwd", "pid": 5, "tid": 7, "ts": 1.0}
        for ph in "sf"
    ]
    named_arrow = [product(bind_id="0x3")]
    for rank in (0, 1):
        written(tmp_path, f"a_{rank}.1.pt.trace.json", [*ends, *named_arrow])
    content = merged(tmp_path)
    begins = [event["id"] for event in of(content, "s")]
    finishes = [event["id"] for event in of(content, "f")]
    assert begins == finishes
    assert 2 == len(set(begins))
    assert ["0.0x3", "1.0x3"] == [event["bind_id"] for event in of(content, "X")]


def test_all_else_of_an_event_stays(tmp_path: Path) -> None:
    """The other fields of an event, such as its arguments and its duration, stay unchanged."""
    event = product(
        args={"External id": 12, "Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"]}
    )
    written(tmp_path, "a_0.1.pt.trace.json", [event])
    assert [event | {"pid": 1}] == of(merged(tmp_path), "X")


def test_the_rank_is_told_by_the_trace_or_else_by_its_name(tmp_path: Path) -> None:
    """The rank of a trace is in its content or, if not, in its file name.

    Torch writes it if there is a process group. The ranks are sorted as numbers, so 10 comes after
    2. A trace without a rank has the name of its file.
    """
    written(
        tmp_path,
        "a_99.1.pt.trace.json",
        [product()],
        distributedInfo={"backend": "nccl", "rank": 10},
    )
    written(tmp_path, "host_2.17.pt.trace.json", [product()])
    written(tmp_path, "host.pt.trace.json", [product()])
    written(tmp_path, "guest.pt.trace.json", [product()])
    assert (2, 10, None, None) == merge(tmp_path).ranks
    assert ["rank 2: 5", "rank 10: 5", "guest.pt.trace.json: 5", "host.pt.trace.json: 5"] == list(
        processes(merged(tmp_path)).values()
    )


def test_to_merge_again_gives_the_same(tmp_path: Path) -> None:
    """Merging again gives the same result, because the merged trace is not merged itself."""
    written(tmp_path, "a_0.1.pt.trace.json", [product()])
    assert merged(tmp_path) == merged(tmp_path)


def test_traces_as_torch_writes_them(tmp_path: Path) -> None:
    """Traces that torch has written are merged, with the operators of both ranks."""
    for rank in (0, 1):
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as recorded:
            torch.ones(2, 2) @ torch.ones(2, 2)
        recorded.export_chrome_trace(str(tmp_path / f"a_{rank}.1.pt.trace.json"))
    content = merged(tmp_path)
    matmuls = [event for event in of(content, "X") if event["name"] == "aten::mm"]
    names = processes(content)
    # The name of the process may also be `python3`.
    owners = [names[event["pid"]].partition(": python")[0] for event in matmuls]
    assert ["rank 0", "rank 1"] == owners


def test_no_more_is_held_than_a_trace_takes(tmp_path: Path) -> None:
    """Merging holds only one trace in memory at a time.

    Merging six traces needs at most 5 % more memory than merging two.
    """
    events = []
    for number in range(5000):
        args = {"External id": number, "Record function id": 0, "Input type": ["float", "float"]}
        events.append(product(ts=float(number), args=args))
    peaks = []
    for ranks in (range(2), range(2, 6)):
        for rank in ranks:
            written(tmp_path, f"a_{rank}.1.pt.trace.json", events)
        merge(tmp_path)
        settle()
        tracemalloc.start()
        merge(tmp_path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (tmp_path / "a_0.1.pt.trace.json").stat().st_size < peaks[1] < 1.05 * peaks[0]


def gpu_rank(late: int, *, group: str = "[0, 1]") -> TraceByHand:
    """Return the trace of a rank whose clock is late by `late` nanoseconds.

    It has two steps of 10 µs, each with a matmul and an all-reduce. The chip has a peak of
    989.5 TFLOP/s in bf16.
    """
    trace = TraceByHand(
        deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}]
    )
    about = {
        "Collective name": "allreduce",
        "Process Group Ranks": group,
        "dtype": "Float",
        "In msg nelems": 8,
        "Out msg nelems": 8,
    }
    for step in (0, 1):
        begin = 10_000 * step - late
        trace.step(step, begin, begin + 10_000)
        trace.operator(
            "aten::mm",
            begin + 100,
            begin + 400,
            shapes=[[1024, 512], [512, 256]],
            types=["c10::BFloat16"] * 2,
        )
        trace.kernel("gemm_bf16", begin + 1000, begin + 3000, launch=(begin + 200, begin + 300))
        # Rank 1 begins the all-reduce 500 ns later, and both ranks end it at the same time.
        trace.kernel(
            "ncclDevKernel_AllReduce",
            begin + 4000 + late % 1000,
            begin + 6000,
            launch=(begin + 500, begin + 600),
            stream=9,
            **about,
        )
    return trace


def test_ranks_are_aligned_by_their_collectives_and_have_an_mfu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clocks of ranks are aligned by the ends of their common collectives.

    The clock of rank 1 is 3,500 ns late. The MFU of 1024 x 512 x 256 MACs in 10 µs is 2.7 %, in the
    trace of each rank and in the merged trace.
    """
    for rank, late in ((0, 0), (1, 3500)):
        gpu_rank(late).write(tmp_path / f"a_{rank}.1.pt.trace.json")
    assert 0 == main(["trace", "merge", str(tmp_path)])
    assert (
        "rank 1: 3.50 µs is added to all times, so that 2 shared collectives end at about the same time on all ranks"
        in capsys.readouterr().out.splitlines()
    )
    found = [
        summarise(read_trace(tmp_path / name))
        for name in ("a_0.1.pt.trace.json", "a_1.1.pt.trace.json", MERGED)
    ]
    rates = [each.utilization.mfu for each in found if each.utilization is not None]
    assert [2 * 1024 * 512 * 256 / 10e-6 / 989.5e12] * 3 == pytest.approx(rates)
    both = found[2]
    assert [(0, "NVIDIA H100 80GB HBM3"), (1, "NVIDIA H100 80GB HBM3")] == [
        (each.device, each.name) for each in both.devices
    ]
    assert [10_000, 10_000] == [step.end - step.start for step in both.steps]
    # Each launch belongs to a kernel of its own rank, so there are 4 kernels of 2 µs.
    gemm = next(row for row in both.operators if row.name == "aten::mm")
    assert (4, 8000) == (gemm.calls, gemm.device)


def test_ranks_of_other_groups_are_left_on_their_clocks(tmp_path: Path) -> None:
    """Ranks without a common collective keep their clocks: their collectives have other groups."""
    for rank, group in enumerate(("[0, 1]", "[2, 3]")):
        gpu_rank(3000 * rank, group=group).write(tmp_path / f"a_{rank}.1.pt.trace.json")
    assert [(1, None, 0)] == [
        (each.rank, each.moved, each.collectives) for each in merge(tmp_path).clocks
    ]


def test_devices_of_other_machines_get_other_numbers(tmp_path: Path) -> None:
    """Devices of other machines get new numbers.

    Devices 0 and 1 of the first machine keep their numbers. Those of the second machine get 2
    and 3.
    """
    for rank, device in enumerate((0, 1, 0, 1)):
        trace = TraceByHand(
            deviceProperties=[{"id": each, "name": f"chip {rank}"} for each in (0, 1)]
        )
        trace.kernel("gemm", 0, 100, device=device)
        trace.write(tmp_path / f"a_{rank}.1.pt.trace.json")
    content = merged(tmp_path)
    assert [0, 1, 2, 3] == [event["args"]["device"] for event in of(content, "X")]
    assert [(0, "chip 0"), (1, "chip 1"), (2, "chip 2"), (3, "chip 3")] == [
        (each["id"], each["name"]) for each in content["deviceProperties"]
    ]


def test_damaged_events_are_left_out_and_counted(tmp_path: Path) -> None:
    """Damaged events are left out and counted: one is no object, and one has an invalid time.

    The clock of the second rank differs, so its times are read.
    """
    written(tmp_path, "a_0.1.pt.trace.json", [product()], baseTimeNanoseconds=BASE)
    damaged: list[Any] = [product(), 5, product() | {"ts": "x"}]
    written(tmp_path, "a_1.1.pt.trace.json", damaged, baseTimeNanoseconds=BASE + 1)
    assert 2 == len(of(merged(tmp_path), "X"))
    assert 2 == merge(tmp_path).damaged


@pytest.mark.parametrize("changes", [{"pid": [1]}, {"pid": None}, {"name": ["a"]}, {"ph": 5}])
def test_an_event_without_names_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    """An event without a valid process, name or kind is left out and counted."""
    written(tmp_path, "a_0.1.pt.trace.json", [product(), product() | changes])
    assert 1 == len(of(merged(tmp_path), "X"))
    assert 1 == merge(tmp_path).damaged


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"traceEvents": 5}', b'{"traceEvents": [5]}']
)
def test_what_is_no_trace_is_named(content: bytes, tmp_path: Path) -> None:
    """A file that is no trace is an error that names the file, and no merged trace remains."""
    (tmp_path / "a_0.1.pt.trace.json").write_bytes(content)
    with pytest.raises(
        ProfileError, match=r"a_0\.1\.pt\.trace\.json: is not a torch.profiler trace"
    ):
        merge(tmp_path)
    assert ["a_0.1.pt.trace.json"] == [path.name for path in tmp_path.iterdir()]


def test_the_shell_says_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lflops trace merge` prints the written file, as text or as JSON.

    Each of two traces has one operator, and two more events for the name and position of its
    process.
    """
    for rank in (0, 1):
        written(tmp_path, f"a_{rank}.1.pt.trace.json", [product()])
    into = tmp_path / "all.json.gz"
    assert 0 == main(["trace", "merge", str(tmp_path), "--into", str(into)])
    alone = (
        "rank 1: the clock is not aligned with the clocks of other ranks, because no collective is "
        "in this trace and in the trace of an aligned rank"
    )
    assert f"{into}: 2 traces, 6 events\n{alone}\n" == capsys.readouterr().out
    assert 0 == main(["trace", "merge", str(tmp_path), "--json"])
    expected = {"file": str(tmp_path / MERGED), "ranks": [0, 1], "events": 6, "damaged": 0}
    assert expected | {"clocks": [{"rank": 1, "moved": None, "collectives": 0}]} == json.loads(
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("given", "problem"), [([], "contains no trace"), (["nowhere"], "is not a folder")]
)
def test_a_folder_without_traces_is_wrong_usage(
    given: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without traces, or a missing folder, is an error with exit status 2."""
    assert 2 == main(["trace", "merge", str(tmp_path.joinpath(*given))])
    assert problem in capsys.readouterr().err
