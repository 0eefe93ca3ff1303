"""Test traces of devices that are neither from NVIDIA nor from AMD. They are written by hand.

The devices are MTIA and Ascend. Other traces have events as pairs of a begin and an end.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lflops.errors import ProfileError
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.summary import summarise
from lflops.trace.recorded import RecordedTrace
from tests.support.traces_by_hand import MAIN, TraceByHand


def read(folder: Path, *events: dict[str, Any]) -> RecordedTrace:
    """Write a trace with these events, and read it."""
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}), "utf-8")
    return read_trace(path)


def test_kernels_of_mtia_are_work_of_a_device(tmp_path: Path) -> None:
    """Kernels of MTIA are work of a device: two kernels of 3 and 5 µs, with a gap of 2 µs."""
    trace = TraceByHand()
    trace.event("cpu_op", "aten::mm", 0, 9000)
    trace.event("mtia_runtime", "launch", 500, 900, correlation=1)
    trace.event("mtia_ccp_events", "fc", 1000, 4000, pid=0, tid=1, correlation=1)
    trace.event("mtia_ccp_events", "relu", 6000, 11000, pid=0, tid=1)
    found = trace.read(tmp_path)
    assert [("kernel", "fc", 3000), ("kernel", "relu", 5000)] == [
        (each.kind, each.name, each.end - each.start) for each in found.work
    ]
    assert {} == found.unread
    device = summarise(found).device
    assert device is not None
    assert (8000, 2000) == (device.computing, device.idle)


def ascend(name: str, start: float, took: float, task: str, *, pid: int = 4) -> dict[str, Any]:
    """Return a slice as torch_npu writes it: without a category, and with its time as text."""
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": 3,
        "ts": f"{1_699_529_623_106_750 + start}",
        "dur": took,
        "args": {"Task Type": task},
    }


def named(process: str, pid: int) -> dict[str, Any]:
    """Return the event with the name of a process."""
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}


def test_slices_of_an_ascend_device_are_its_work(tmp_path: Path) -> None:
    """The slices in the process of an Ascend device are its work, except for waits.

    They are a matmul, a copy, and a wait for an event. Slices of another process are no work of the
    device. The names of the processes may come after the slices.
    """
    found = read(
        tmp_path,
        ascend("MatMulV2", 0, 10.5, "AI_CORE"),
        ascend("MEMCPY_ASYNC", 11, 2, "MEMCPY_ASYNC"),
        ascend("EVENT_WAIT", 13, 7, "EVENT_WAIT"),
        ascend("hcom_allReduce", 0, 5, "HCCL", pid=7),
        named("Ascend Hardware", 4),
        named("Communication", 7),
    )
    assert [("kernel", "MatMulV2", 10500), ("copy", "MEMCPY_ASYNC", 2000)] == [
        (each.kind, each.name, each.end - each.start) for each in found.work
    ]


def test_a_begin_and_its_end_are_one_event(tmp_path: Path) -> None:
    """A begin and an end are one event.

    They are nested and on two threads. An event without an end is counted as unread.
    """

    def event(ph: str, at: float, name: str = "", *, tid: int = MAIN) -> dict[str, Any]:
        return {"ph": ph, "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": at}

    found = read(
        tmp_path,
        event("B", 1, "aten::linear"),
        event("B", 2, "aten::addmm"),
        event("B", 2.5, "aten::relu", tid=7),
        event("E", 4),
        event("E", 5, tid=7),
        event("E", 6.25),
        event("B", 8, "aten::mul"),
    )
    operators = [(each.name, each.thread, each.start, each.end) for each in found.operators]
    assert [
        ("aten::addmm", 0, 2000, 4000),
        ("aten::relu", 1, 2500, 5000),
        ("aten::linear", 0, 1000, 6250),
    ] == operators
    assert {"cpu_op": 1} == found.unread


def test_a_time_that_is_no_number_is_still_an_error(tmp_path: Path) -> None:
    """A time that is a text but no number is an error."""
    with pytest.raises(ProfileError, match="`ts` and `dur` must be numbers of microseconds"):
        read(
            tmp_path,
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": "aten::mm",
                "pid": 1,
                "tid": 1,
                "ts": "soon",
                "dur": 1,
            },
        )
