"""Test the timeline of a device, whose states add up to the window, and those of its steps."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lflops.intervals import joined, length, lengths_inside, outside
from lflops.trace.analysis.summary import summarise
from lflops.trace.device_states import DeviceTimeline, states, timeline
from lflops.trace.recorded import DeviceEvent
from tests.support.traces_by_hand import BACKWARD, TraceByHand, small_gpu_trace


def test_computing_wins_over_communication_and_communication_over_copies(tmp_path: Path) -> None:
    """At each moment, computing comes before communication, and communication before copies.

    Kernels run from 0 to 100 and from 200 to 210, a collective from 50 to 150, and a copy from 140
    to 180. A fill (memset) counts as computing.
    """
    trace = TraceByHand()
    trace.kernel("gemm", 0, 100, launch=(-20, -10))
    trace.kernel("ncclDevKernel_AllGather_RING_LL", 50, 150, launch=(-20, -10), stream=9)
    trace.copy(140, 180, launch=(-20, -10), stream=11)
    trace.kernel("Memset (Device)", 200, 210, launch=(-20, -10), cat="gpu_memset")
    found = summarise(trace.read(tmp_path)).device
    assert found == DeviceTimeline(
        window=210,
        computing=110,
        exposed_communication=50,
        exposed_copies=30,
        idle=20,
        communication=100,
        copies=40,
    )
    assert (190, 50, 10) == (found.busy, found.overlapped_communication, found.overlapped_copies)


WORK = st.lists(
    st.tuples(
        st.sampled_from(["gemm", "ncclKernel", "copy"]),
        st.integers(0, 60),
        st.integers(0, 12),
        st.integers(0, 2),
    ),
    max_size=12,
)


def work_of(rows: list[tuple[str, int, int, int]]) -> list[DeviceEvent]:
    """Return work of a device. Each row has its name, start, length and stream."""
    work = []
    for index, (name, start, took, stream) in enumerate(rows):
        kind = "copy" if name == "copy" else "kernel"
        work.append(DeviceEvent(kind, name, 0, stream, start, start + took, index, 0))
    return work


@given(WORK, st.integers(0, 30), st.integers(31, 70))
def test_the_states_are_those_of_each_nanosecond(
    rows: list[tuple[str, int, int, int]], start: int, end: int
) -> None:
    """The timeline equals a count of the states nanosecond by nanosecond."""
    moments = []
    for moment in range(start, end):
        moments.append({name for name, begin, took, _ in rows if begin <= moment < begin + took})
    found = timeline(states(work_of(rows), start, end))
    assert found.computing == sum("gemm" in each for each in moments)
    assert found.exposed_communication == sum(
        "ncclKernel" in each and "gemm" not in each for each in moments
    )
    assert found.exposed_copies == sum(each == {"copy"} for each in moments)
    assert found.idle == sum(not each for each in moments)
    assert found.communication == sum("ncclKernel" in each for each in moments)
    assert found.copies == sum("copy" in each for each in moments)
    parts = (found.computing, found.exposed_communication, found.exposed_copies, found.idle)
    assert found.window == end - start == sum(parts)


SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(
        lambda span: (span[0], span[0] + span[1])
    ),
    max_size=8,
)


def moments_of(spans: Iterable[tuple[int, int]]) -> set[int]:
    """Return all moments within the spans."""
    moments = set[int]()
    for start, end in spans:
        moments.update(range(start, end))
    return moments


@given(SPANS, SPANS)
def test_stretches_are_sets_of_moments(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    """`joined` is a union, `outside` a difference, and `shares` has the size of an intersection."""
    ours = moments_of(first)
    others = moments_of(second)
    union = joined(first)
    more = joined(second)
    assert ours == moments_of(union)
    assert all(end < start for (_, end), (start, _) in pairwise(union))
    assert (len(ours - others), len(ours & others)) == (
        length(outside(union, more)),
        lengths_inside(union, more)[0],
    )


def test_work_launched_before_the_recording_is_in_no_window(tmp_path: Path) -> None:
    """Work that was launched before the recording began is in no window.

    A kernel runs from 0 to 500, and the trace has no launch of it. The window begins with the next
    work.
    """
    trace = TraceByHand()
    trace.kernel("before", 0, 500)
    trace.kernel("first", 600, 700, launch=(520, 540))
    trace.kernel("beside", 650, 660, stream=8)
    trace.kernel("last", 750, 800, launch=(530, 560))
    found = summarise(trace.read(tmp_path))
    assert found.device is not None
    assert (200, 150, 50) == (found.device.window, found.device.computing, found.device.idle)
    assert (1, 500) == (found.left_out.calls, found.left_out.device)
    assert {"first", "beside", "last"} == {kernel.name for kernel in found.kernels}


def test_a_trace_without_the_hosts_calls_has_all_of_its_work_in_the_window(tmp_path: Path) -> None:
    """If a trace has only the work of a device, without launches, all work is in the window."""
    trace = TraceByHand()
    trace.kernel("a", 0, 500)
    trace.kernel("b", 600, 700)
    found = summarise(trace.read(tmp_path))
    assert found.device is not None
    assert (700, 600, 0) == (found.device.window, found.device.computing, found.left_out.calls)
    assert {"not_recorded": 100} == found.idle


def test_steps_reach_from_one_beginning_to_the_next(tmp_path: Path) -> None:
    """A step lasts from its beginning to the beginning of the next step.

    Each of two steps takes 1000 ns, with 300 ns of computing, 150 ns of exposed communication and
    50 ns of exposed copies.
    """
    found = summarise(small_gpu_trace().read(tmp_path))
    for step in found.steps:
        assert step.device == DeviceTimeline(
            window=1000,
            computing=300,
            exposed_communication=150,
            exposed_copies=50,
            idle=500,
            communication=200,
            copies=50,
        )
    assert ["ProfilerStep#0", "ProfilerStep#1"] == [step.name for step in found.steps]
    assert found.step is not None
    assert (1e-6, 2) == (found.step.median, found.step.n)
    assert 150 == found.before_device
    assert found.device is not None
    assert 2 * 300 == found.device.computing
    assert 1500 == found.device.window


def test_the_last_step_ends_with_the_work_that_it_launched(tmp_path: Path) -> None:
    """The last step ends with the work that it launched.

    On the host it ends at 1000, and its last kernel ends at 1300. A step without work, which the
    profiler opens when it is stopped, is no step.
    """
    trace = TraceByHand()
    trace.step(0, 0, 1000)
    trace.kernel("a", 200, 1300, launch=(100, 110))
    trace.step(1, 1000, 1010)
    found = summarise(trace.read(tmp_path))
    assert [("ProfilerStep#0", 0, 1000)] == [
        (step.name, step.start - found.steps[0].start, step.end - step.start)
        for step in found.steps
    ]
    trace.operator("aten::add", 1001, 1005)
    assert 2 == len(summarise(trace.read(tmp_path)).steps)
    alone = TraceByHand()
    alone.step(0, 0, 1000)
    alone.kernel("a", 200, 1300, launch=(100, 110))
    (step,) = summarise(alone.read(tmp_path)).steps
    assert 1300 == step.end - step.start
    assert step.device is not None
    assert (1100, 200) == (step.device.computing, step.device.idle)


def test_steps_are_cut_on_the_device_where_the_host_runs_ahead(tmp_path: Path) -> None:
    """If the host runs ahead of the device, steps are divided on the device.

    The host is done with both steps at 200. The device works on the first step from 100 to 1100,
    and on the second until 2100. So each step takes 1000 ns and has only its own work.
    """
    trace = TraceByHand()
    for number in range(2):
        trace.step(number, 100 * number, 100 * number + 100)
        begin = 100 + 1000 * number
        launch = 100 * number + 10
        trace.kernel("a", begin, begin + 600, launch=(launch, launch + 5))
        trace.kernel("b", begin + 700, begin + 1000, launch=(launch + 10, launch + 15))
    found = summarise(trace.read(tmp_path))
    assert [1000, 1000] == [step.duration for step in found.steps]
    assert [(900, 100), (900, 100)] == [
        (step.device.computing, step.device.idle) for step in found.steps if step.device
    ]
    assert found.device is not None
    assert found.device.computing == 2 * 900


def test_two_devices_of_a_process_have_a_timeline_each(tmp_path: Path) -> None:
    """Two devices of a process have separate timelines with the same window.

    The total timeline has the sum of both windows.
    """
    trace = TraceByHand(deviceProperties=[{"id": 0, "name": "A"}, {"id": 1, "name": "B"}])
    trace.kernel("a", 0, 100, launch=(-50, -40))
    trace.kernel("b", 50, 150, launch=(-40, -30), device=1)
    trace.kernel("b", 170, 200, launch=(-40, -30), device=1, thread=BACKWARD, stream=8)
    found = summarise(trace.read(tmp_path))
    assert [("A", 100, 100), ("B", 130, 70)] == [
        (each.name, each.timeline.computing, each.timeline.idle) for each in found.devices
    ]
    assert found.device is not None
    assert (400, 230, 170) == (found.device.window, found.device.computing, found.device.idle)
    assert 170 == sum(found.idle.values())
    assert [(0, 7, 100), (1, 7, 100), (1, 8, 30)] == [
        (row.device, row.stream, row.busy) for row in found.streams
    ]


def test_a_device_that_the_list_numbers_otherwise_has_the_name_of_all(tmp_path: Path) -> None:
    """If a device is not in the list of devices, it has the name that all listed devices have.

    A process that sees one of eight GPUs lists it as device 0, but its work runs on device 2. If
    the listed devices have different names, the name is unknown.
    """
    trace = TraceByHand(deviceProperties=[{"id": 0, "name": "A"}])
    trace.kernel("a", 0, 100, device=2)
    assert ["A"] == [each.name for each in summarise(trace.read(tmp_path)).devices]
    trace.header["deviceProperties"] = [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}]
    assert [None] == [each.name for each in summarise(trace.read(tmp_path)).devices]


def test_a_trace_of_the_host_has_no_device(tmp_path: Path) -> None:
    """If a trace has no device, the values of the device are unknown, not 0."""
    trace = TraceByHand()
    trace.step(0, 0, 1000)
    trace.operator("aten::mm", 10, 60)
    found = summarise(trace.read(tmp_path))
    assert (None, ()) == (found.device, found.devices)
    assert (None, None) == (found.before_device, found.launches)
    assert [None] == [step.device for step in found.steps]


def test_times_are_exact_late_in_a_quarter(tmp_path: Path) -> None:
    """Times are exact: 1001 kernels of 1 ns with gaps of 1 ns, which floats could not represent."""
    trace = TraceByHand()
    for number in range(1001):
        trace.kernel("tiny", 2 * number, 2 * number + 1)
    found = summarise(trace.read(tmp_path)).device
    assert found is not None
    assert (2001, 1001, 1000) == (found.window, found.computing, found.idle)


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_f32",
        "ncclKernel_SendRecv_RING",
        "rcclAllGather",
        "cross_device_reduce_1stage",
    ],
)
def test_kernels_of_collective_libraries_communicate(tmp_path: Path, name: str) -> None:
    """Kernels of collective libraries are found by their names, and count as communication."""
    trace = TraceByHand()
    trace.kernel(name, 0, 100)
    found = summarise(trace.read(tmp_path)).device
    assert found is not None
    assert (0, 100) == (found.computing, found.exposed_communication)
