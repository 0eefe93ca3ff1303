"""Test the times of collectives by module, phase and kind.

Most events of the traces are written by hand, like those of CUDA.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from lflops.profile.collective_names import collective_kind, is_collective_kernel
from lflops.profile.profile import Communication
from lflops.profile.records import ModulePhase, Trace
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.summary import summarise
from lflops.trace.record.attach_trace import with_trace
from lflops.trace.record.events import Communicated, join, recorded
from lflops.trace.record.step_timeline import communication, communication_on_host
from lflops.trace.record.tracer import Recording
from tests.support.kineto_events import Event
from tests.support.profile_builders import small_profile
from tests.support.traces_by_hand import gpu_traces
from tests.trace.record.test_device_timeline import (
    FORWARD,
    FORWARD_EVENTS,
    HOME,
    TREE,
    kernel,
    operator,
    step,
)

NAMES = {
    "c10d::allreduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)": "all_reduce",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "reduce_scatter",
    "ncclDevKernel_SendRecv(ncclDevComm*)": "send_recv",
    "ncclDevKernel_Reduce_Sum_f32": "reduce",
    "aten::mm": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kind_is_known_by_the_name(name: str) -> None:
    """The kind of a collective is known by the name of torch's operator or of NCCL's kernel.

    Only NCCL's names are names of kernels.
    """
    assert NAMES[name] == collective_kind(name)
    assert name.startswith("nccl") == is_collective_kernel(name)


EVENTS = [
    kernel(100, 1, start=500),
    kernel(80, 2, start=560, name="ncclDevKernel_AllReduce_Sum_bf16"),
    kernel(30, 2, start=700, name="ncclDevKernel_AllReduce_Sum_bf16"),
    kernel(20, 2, start=640, name="Memset (Device)"),
]
"""Work in which the second module's collectives run from 560 to 640 and from 700 to 730.

The kernel of the first module runs during 40 ns of the first collective.
"""


def test_kernels_of_collectives_are_those_of_what_launched_them() -> None:
    """The time of a collective's kernel belongs to the operator that launched it.

    The time in which another kernel runs is not exposed. A fill (memset) counts as a kernel, too;
    here, it begins when the first collective ends.
    """
    assert {
        2: [Communicated("all_reduce", 80, 40), Communicated("all_reduce", 30, 30)]
    } == communication(recorded(EVENTS).work)
    assert {} == communication(recorded(FORWARD_EVENTS).work)


def test_their_time_belongs_to_the_module_that_ran() -> None:
    """The time of a collective belongs to the module whose operator launched it."""
    trace = recorded([step(0, 100), *FORWARD_EVENTS, *EVENTS])
    found = join(trace, {HOME: FORWARD}, HOME, TREE, communication(trace.work))
    assert {(ModulePhase("1", "forward"), "all_reduce"): (110, 70)} == found.communication


def recording(seconds: Mapping[tuple[ModulePhase, str], tuple[float, float]]) -> Recording:
    """Return a recording with these times of collectives, and nothing else."""
    return Recording(
        raw=None,
        path=Path("trace"),
        events=0,
        trace=Trace(files={}, batches=1),
        device_seconds=None,
        kernels={},
        communication=seconds,
        calls=(),
    )


def row(collective: str, group: str = "0", phase: str = "backward") -> Communication:
    """Return a collective of the root."""
    return Communication(
        module="",
        phase=phase,  # type: ignore[arg-type]
        collective=collective,
        group=group,
        group_size=2,
        calls=1,
        bytes=8,
    )


def attached(
    rows: tuple[Communication, ...], seconds: Mapping[tuple[ModulePhase, str], tuple[float, float]]
) -> tuple[Communication, ...]:
    """Return the collectives `rows` with the traced times of their kinds."""
    counted = replace(small_profile(), communication=rows)
    return with_trace(counted, recording(seconds), {}).communication


def test_a_collective_gets_the_time_of_its_kind_in_its_place() -> None:
    """A collective gets the traced time of its kind in its module and phase.

    An all-to-all consists of sends. The time of a collective that was not traced stays unknown.
    """
    rows = (
        row("c10d::allreduce_"),
        row("c10d::alltoall_base_"),
        row("c10d::allreduce_", phase="forward"),
    )
    backward = ModulePhase("", "backward")
    seconds = {(backward, "all_reduce"): (3e-3, 1e-3), (backward, "send_recv"): (5e-3, 5e-3)}
    assert [(3e-3, 1e-3), (5e-3, 5e-3), (None, None)] == [
        (each.seconds, each.exposed_seconds) for each in attached(rows, seconds)
    ]


def test_two_of_a_kind_in_one_place_stay_unknown() -> None:
    """The times of two collectives of one kind in one place stay unknown.

    They have different groups, and a kernel does not show its group.
    """
    rows = (row("c10d::allreduce_", "0"), row("c10d::allreduce_", "1"))
    seconds = {(ModulePhase("", "backward"), "all_reduce"): (3e-3, 1e-3)}
    assert [None, None] == [each.seconds for each in attached(rows, seconds)]


def test_a_kind_that_one_collective_alone_has_is_its_in_any_place() -> None:
    """If only one collective has a kind, it gets all time of this kind, in any module.

    In one of two steps, its launch was recorded in another module. If two collectives have the same
    kind, the time in the other module belongs to neither.
    """
    seconds = {
        (ModulePhase("", "backward"), "all_reduce"): (2e-3, 1e-3),
        (ModulePhase("body", "backward"), "all_reduce"): (3e-3, 1e-3),
    }

    def found(*rows: Communication) -> list[float | None]:
        return [each.seconds for each in attached(rows, seconds)]

    assert [5e-3, None] == found(row("c10d::allreduce_"), row("c10d::broadcast_"))
    assert [2e-3, None] == found(row("c10d::allreduce_"), row("c10d::allreduce_", phase="forward"))


def test_what_the_engine_calls_last_is_the_root_s_backward() -> None:
    """The collective at the end of backward, which the autograd engine calls, belongs to backward.

    In a trace, it comes after the last autograd node, so it has the phase `other` there. If a
    collective was counted in `other`, too, the time belongs to that collective.
    """
    sums = row("c10d::_reduce_scatter_base_"), row("c10d::_reduce_scatter_base_", phase="other")
    seconds = {(ModulePhase("", "other"), "reduce_scatter"): (3e-3, 1e-3)}

    def found(rows: tuple[Communication, ...]) -> list[float | None]:
        return [each.seconds for each in attached(rows, seconds)]

    assert [3e-3] == found(sums[:1])
    assert [None, 3e-3] == found(sums)


def on_host(name: str, start: int, end: int) -> Event:
    """Return a collective that runs on a thread of gloo."""
    return Event(name, start, end, 3, is_named=True)


LAUNCHES = [
    operator("c10d::allreduce_", 13, 14, key=0),
    operator("c10d::_reduce_scatter_base_", 33, 90, key=0),
]
RAN = [on_host("gloo:all_reduce", 14, 54), on_host("gloo:all_reduce", 55, 88)]
"""The collectives of `LAUNCHES` as gloo runs them. It runs the reduce-scatter as an all-reduce."""


def test_collectives_on_the_host_belong_to_what_launched_them_in_turn() -> None:
    """Collectives on the host belong to their launches in the same order.

    The first one takes 40 ns, in which operators run from 14 to 18 and from 32 to 33. The launch of
    the second one waits and computes nothing.
    """
    trace = recorded([step(0, 100), *FORWARD_EVENTS, *LAUNCHES, *RAN])
    found = communication_on_host(trace)
    assert {
        13: Communicated("all_reduce", 40, 40 - 4 - 1),
        33: Communicated("reduce_scatter", 33, 33),
    } == found
    both = join(trace, {HOME: FORWARD}, HOME, TREE, on_host=found).communication
    first = ModulePhase("0", "forward")
    second = ModulePhase("1", "forward")
    assert {(first, "all_reduce"): (40, 35), (second, "reduce_scatter"): (33, 33)} == both


def test_what_an_operator_waits_for_is_not_computed() -> None:
    """The time in which an operator waits for a collective is not computation.

    A matmul waits for its input from 32 to 37, so only 1 of its 6 ns is computation. A collective
    without a launch is left out.
    """
    wait = operator("_c10d_functional::wait_tensor", 32, 37, key=0)
    early = on_host("gloo:broadcast", 2, 5)
    reduce = on_host("gloo:all_reduce", 30, 40)
    events = [step(0, 100), *FORWARD_EVENTS, wait, LAUNCHES[0], early, reduce]
    found = communication_on_host(recorded(events))
    assert {13: Communicated("all_reduce", 10, 9)} == found
    assert {} == communication_on_host(recorded(FORWARD_EVENTS))


def test_a_reduce_scatter_that_waits_for_its_turn_keeps_it() -> None:
    """Collectives run in the order of their launches, also if both are launched before one runs.

    Both run as an all-reduce, although the first launch is a reduce-scatter.
    """
    launches = [
        operator("c10d::_reduce_scatter_base_", 11, 12, key=0),
        operator("c10d::allreduce_", 13, 14, key=0),
    ]
    found = communication_on_host(recorded([step(0, 100), *FORWARD_EVENTS, *launches, *RAN]))
    assert {11: ("reduce_scatter", 40), 13: ("all_reduce", 33)} == {
        start: (each.kind, each.nanoseconds) for start, each in found.items()
    }


def test_two_that_wait_at_once_are_exposed_for_one_time() -> None:
    """The exposed time of two collectives that run at the same time counts once.

    Both run from 40 to 60, in which nothing is computed, so the first is exposed for 20 ns. The
    second runs for 25 ns, of which only the last 5 ns are exposed in addition.
    """
    launches = [
        operator("c10d::allreduce_", 35, 36, key=0),
        operator("c10d::allreduce_", 36, 37, key=0),
    ]
    ran = [on_host("gloo:all_reduce", 40, 60), on_host("gloo:all_reduce", 40, 65)]
    found = communication_on_host(recorded([step(0, 100), *launches, *ran]))
    assert [(20, 20), (25, 5)] == [(each.nanoseconds, each.exposed) for each in found.values()]


def test_a_launch_whose_event_was_missed_takes_no_other_s_time() -> None:
    """A launch without a recorded collective does not get the time of another collective.

    The recording has no event of the broadcast, so the other launches get the two events.
    """
    missed = operator("c10d::broadcast_", 11, 12, key=0)
    found = communication_on_host(
        recorded([step(0, 100), *FORWARD_EVENTS, missed, *LAUNCHES, *RAN])
    )
    assert {13: 40, 33: 33} == {start: each.nanoseconds for start, each in found.items()}


@pytest.mark.parametrize(
    ("name", "kinds_by_name"),
    [("hta_nccl_parser_config_nccl_data", True), ("hta_timeline_analysis_sampled_rank-0", False)],
)
def test_seconds_and_exposed_seconds_are_those_that_the_reader_of_traces_has(
    name: str, *, kinds_by_name: bool
) -> None:
    """The times of collectives are the same as those that the reader of trace files computes.

    The traces are from real GPUs, and the times agree to the nanosecond. In the second trace, all
    kernels have the name SendRecv, so only the reader knows their kinds.
    """
    trace = read_trace(gpu_traces() / f"{name}.json.gz")
    names = {"copy": "Memcpy", "fill": "Memset"}
    work = []
    for number, each in enumerate(trace.work):
        kind_or_name = names.get(each.kind, each.name)
        event = Event(kind_or_name, each.start, each.end, is_on_device=True, link=number)
        work.append(event)
    ours = Counter[tuple[str, str]]()
    for (each,) in communication(recorded(work).work).values():
        kind = each.kind if kinds_by_name else ""
        ours.update(figures(kind, 1, each.nanoseconds, each.exposed))
    theirs = Counter[tuple[str, str]]()
    for row in summarise(trace).collectives:
        kind = row.kind if kinds_by_name else ""
        theirs.update(figures(kind, row.calls, row.device, row.exposed))
    assert theirs
    assert theirs == ours


def figures(kind: str, calls: int, device: int, exposed: int) -> dict[tuple[str, str], int]:
    """Return the numbers of a collective, keyed by its kind and the name of the number."""
    return {(kind, "calls"): calls, (kind, "device"): device, (kind, "exposed"): exposed}
