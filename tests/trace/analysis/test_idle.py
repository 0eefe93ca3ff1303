"""Test the causes of idle time, the launches and the queue, with traces written by hand."""

from pathlib import Path

import pytest

from lflops.trace.analysis.summary import TraceSummary, summarise
from tests.support.traces_by_hand import BACKWARD, MAIN, TraceByHand


def gap(folder: Path) -> TraceSummary:
    """Return the summary of a trace with one long gap.

    A kernel ends at 200, and the next begins at 1000. In between, the host does several things one
    after the other.
    """
    trace = TraceByHand()
    trace.kernel("a", 100, 200, launch=(10, 20))
    trace.call("cudaStreamSynchronize", 150, 260)
    trace.event(
        "user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 260, 300
    )
    trace.operator("aten::stack", 270, 290)
    trace.operator("aten::empty", 350, 960)
    trace.call("cudaMalloc", 400, 500)
    trace.call("cudaEventRecord", 500, 520)
    trace.kernel("b", 1000, 1100, launch=(900, 950))
    trace.kernel("c", 1150, 1200, launch=(960, 970))
    trace.kernel("d", 1230, 1250)
    trace.operator("aten::sort", 200, 900, thread=BACKWARD)
    return summarise(trace.read(folder))


def test_each_nanosecond_of_a_gap_has_one_cause(tmp_path: Path) -> None:
    """Each nanosecond of a gap has one cause.

    From 200, the host synchronizes for 60 ns, is in the data loader for 40 ns, and runs Python for
    50 ns. Then it runs an operator that contains an allocation and two other calls.
    """
    found = gap(tmp_path)
    assert found.device is not None
    assert found.device.idle == 800 + 50 + 30
    assert found.idle == {
        "data_loader": 40,
        "synchronising": 60,
        "allocating": 100,
        "launching": 20 + 50,
        "operators": 50 + 380,
        "python": 50,
        "launch_latency": 50,
        "queued": 50,
        "not_recorded": 30,
    }
    assert sum(found.idle.values()) == found.device.idle


def test_the_thread_that_launches_next_decides(tmp_path: Path) -> None:
    """The cause of idle time is the work of the thread that launches the next kernel.

    The main thread only waits for backward. The device waits for the thread of backward.
    """
    trace = TraceByHand()
    trace.kernel("a", 0, 100, launch=(-20, -10))
    trace.call("cudaDeviceSynchronize", 50, 500, thread=MAIN)
    trace.operator("MmBackward0", 150, 400, thread=BACKWARD)
    trace.kernel("b", 420, 500, launch=(380, 400), thread=BACKWARD)
    assert {"launching": 20, "operators": 230, "python": 50, "launch_latency": 20} == summarise(
        trace.read(tmp_path)
    ).idle


def test_launches_that_reach_into_the_gap_are_cut_at_its_ends(tmp_path: Path) -> None:
    """Only the part of a launch within the gap counts.

    The call begins before the device is idle, and ends after the kernel has begun.
    """
    trace = TraceByHand()
    trace.kernel("a", 0, 100, launch=(-20, -10))
    trace.kernel("b", 150, 200, launch=(90, 170))
    assert {"launching": 50} == summarise(trace.read(tmp_path)).idle


def test_delays_reach_from_the_call_to_its_work(tmp_path: Path) -> None:
    """The delay of a launch is the time from the begin of the call to the begin of its kernel.

    The delays are 20, 40 and 90 ns, and the calls take 10, 10 and 30 ns. One kernel is shorter than
    its call. For a CUDA graph, its first kernel counts.
    """
    trace = TraceByHand()
    trace.kernel("a", 20, 120, launch=(0, 10))
    trace.kernel("b", 140, 240, launch=(100, 110))
    number = trace.kernel("c", 290, 300, launch=(200, 230), call="cudaGraphLaunch")
    trace.event(
        "kernel",
        "d",
        300,
        400,
        pid=0,
        tid=7,
        device=0,
        stream=7,
        correlation=number,
        **{"graph id": 3},
    )
    found = summarise(trace.read(tmp_path)).launches
    assert found is not None
    assert 3 == found.calls
    assert (40, 90) == (found.median, found.longest)
    assert (10, 1) == (found.call_median, found.shorter_than_launch)


def test_the_queue_is_what_was_launched_and_has_not_started(tmp_path: Path) -> None:
    """The queue has the kernels that were launched and have not started.

    In 100 ns, two kernels wait for 40 ns, one waits for another 20 ns, and none waits for 40 ns. So
    one kernel waits on average.
    """
    trace = TraceByHand()
    trace.kernel("a", 0, 50, launch=(-10, -5))
    trace.kernel("b", 50, 70, launch=(10, 11))
    trace.kernel("c", 70, 100, launch=(10, 12))
    found = summarise(trace.read(tmp_path)).devices[0].queue
    assert found is not None
    assert (pytest.approx(100 / 100), 2, 40) == (found.mean, found.largest, found.empty)


def test_a_cpu_trace_has_neither_idle_time_nor_launches(tmp_path: Path) -> None:
    """A trace without a device has no idle time and no launches."""
    trace = TraceByHand()
    trace.operator("aten::mm", 0, 10)
    found = summarise(trace.read(tmp_path))
    assert ({}, None) == (found.idle, found.launches)
