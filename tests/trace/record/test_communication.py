"""The time of collectives' kernels, by module, phase and kind.

From events as CUDA would give them into the profile.
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
    """Of torch's operators and of NCCL's kernels; only the latter are kernels."""
    assert NAMES[name] == collective_kind(name)
    assert name.startswith("nccl") == is_collective_kernel(name)


EVENTS = [
    kernel(100, 1, start=500),
    kernel(80, 2, start=560, name="ncclDevKernel_AllReduce_Sum_bf16"),
    kernel(30, 2, start=700, name="ncclDevKernel_AllReduce_Sum_bf16"),
    kernel(20, 2, start=640, name="Memset (Device)"),
]
"""The second module's collectives run from 560 to 640, of which the first module's kernel hides 40, and from 700 to 730."""


def test_kernels_of_collectives_are_those_of_what_launched_them() -> None:
    """A fill computes, so it hides a collective too; these end where it begins."""
    assert {
        2: [Communicated("all_reduce", 80, 40), Communicated("all_reduce", 30, 30)]
    } == communication(recorded(EVENTS).work)
    assert {} == communication(recorded(FORWARD_EVENTS).work)


def test_their_time_belongs_to_the_module_that_ran() -> None:
    """Both were launched by the operator of the second module."""
    trace = recorded([step(0, 100), *FORWARD_EVENTS, *EVENTS])
    found = join(trace, {HOME: FORWARD}, HOME, TREE, communication(trace.work))
    assert {(ModulePhase("1", "forward"), "all_reduce"): (110, 70)} == found.communication


def recording(seconds: Mapping[tuple[ModulePhase, str], tuple[float, float]]) -> Recording:
    """A recording that knows of nothing else."""
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
    """A collective of the root."""
    return Communication(
        module="", phase=phase, collective=collective, group=group, group_size=2, calls=1, bytes=8
    )  # type: ignore[arg-type]


def test_a_collective_gets_the_time_of_its_kind_in_its_place() -> None:
    """An all-to-all is made of sends; what was not traced stays unknown."""
    rows = (
        row("c10d::allreduce_"),
        row("c10d::alltoall_base_"),
        row("c10d::allreduce_", phase="forward"),
    )
    backward = ModulePhase("", "backward")
    seconds = {(backward, "all_reduce"): (3e-3, 1e-3), (backward, "send_recv"): (5e-3, 5e-3)}
    found = with_trace(
        replace(small_profile(), communication=rows), recording(seconds), {}
    ).communication
    assert [(3e-3, 1e-3), (5e-3, 5e-3), (None, None)] == [
        (each.seconds, each.exposed_seconds) for each in found
    ]


def test_two_of_a_kind_in_one_place_stay_unknown() -> None:
    """Over two groups: nothing tells whose kernel is whose."""
    rows = (row("c10d::allreduce_", "0"), row("c10d::allreduce_", "1"))
    seconds = {(ModulePhase("", "backward"), "all_reduce"): (3e-3, 1e-3)}
    found = with_trace(
        replace(small_profile(), communication=rows), recording(seconds), {}
    ).communication
    assert [None, None] == [each.seconds for each in found]


def test_a_kind_that_one_collective_alone_has_is_its_in_any_place() -> None:
    """Of two steps one launch was seen in another module.

    With a second collective of the kind that would be anyone's.
    """
    seconds = {
        (ModulePhase("", "backward"), "all_reduce"): (2e-3, 1e-3),
        (ModulePhase("body", "backward"), "all_reduce"): (3e-3, 1e-3),
    }

    def found(*rows: Communication) -> list[float | None]:
        return [
            each.seconds
            for each in with_trace(
                replace(small_profile(), communication=rows), recording(seconds), {}
            ).communication
        ]

    assert [5e-3, None] == found(row("c10d::allreduce_"), row("c10d::broadcast_"))
    assert [2e-3, None] == found(row("c10d::allreduce_"), row("c10d::allreduce_", phase="forward"))


def test_what_the_engine_calls_last_is_the_root_s_backward() -> None:
    """A trace has it after the last node, which is `other`.

    So a count of `other` keeps what is its own.
    """
    sums = row("c10d::_reduce_scatter_base_"), row("c10d::_reduce_scatter_base_", phase="other")
    seconds = {(ModulePhase("", "other"), "reduce_scatter"): (3e-3, 1e-3)}

    def found(rows: tuple[Communication, ...]) -> list[float | None]:
        return [
            each.seconds
            for each in with_trace(
                replace(small_profile(), communication=rows), recording(seconds), {}
            ).communication
        ]

    assert [3e-3] == found(sums[:1])
    assert [None, 3e-3] == found(sums)


def on_host(name: str, start: int, end: int) -> Event:
    """A collective on one of gloo's threads."""
    return Event(name, start, end, 3, is_named=True)


LAUNCHES = [
    operator("c10d::allreduce_", 13, 14, key=0),
    operator("c10d::_reduce_scatter_base_", 33, 90, key=0),
]
RAN = [on_host("gloo:all_reduce", 14, 54), on_host("gloo:all_reduce", 55, 88)]
"""The second is a reduce-scatter, which gloo runs as an all-reduce."""


def test_collectives_on_the_host_belong_to_what_launched_them_in_turn() -> None:
    """Of the first 40 ns operators ran for 16 to 18 and for 32 to 33.

    What waits inside of the second one's launch computes nothing.
    """
    trace = recorded([step(0, 100), *FORWARD_EVENTS, *LAUNCHES, *RAN])
    found = communication_on_host(trace)
    assert {
        13: Communicated("all_reduce", 40, 40 - 4 - 1),
        33: Communicated("reduce_scatter", 33, 33),
    } == found
    both = join(trace, {HOME: FORWARD}, HOME, TREE, on_host=found).communication
    first, second = ModulePhase("0", "forward"), ModulePhase("1", "forward")
    assert {(first, "all_reduce"): (40, 35), (second, "reduce_scatter"): (33, 33)} == both


def test_what_an_operator_waits_for_is_not_computed() -> None:
    """A product that begins with the wait for its input, from 32 to 37: of its 6 ns one is computed.

    What nobody launched is left out.
    """
    wait = operator("_c10d_functional::wait_tensor", 32, 37, key=0)
    early = on_host("gloo:broadcast", 2, 5)
    found = communication_on_host(
        recorded(
            [
                step(0, 100),
                *FORWARD_EVENTS,
                wait,
                LAUNCHES[0],
                early,
                on_host("gloo:all_reduce", 30, 40),
            ]
        )
    )
    assert {13: Communicated("all_reduce", 10, 9)} == found
    assert {} == communication_on_host(recorded(FORWARD_EVENTS))


def test_a_reduce_scatter_that_waits_for_its_turn_keeps_it() -> None:
    """Both are launched before the first of them runs, each as an all-reduce."""
    launches = [
        operator("c10d::_reduce_scatter_base_", 11, 12, key=0),
        operator("c10d::allreduce_", 13, 14, key=0),
    ]
    found = communication_on_host(recorded([step(0, 100), *FORWARD_EVENTS, *launches, *RAN]))
    assert {11: ("reduce_scatter", 40), 13: ("all_reduce", 33)} == {
        start: (each.kind, each.nanoseconds) for start, each in found.items()
    }


def test_two_that_wait_at_once_are_exposed_for_one_time() -> None:
    """Both run from 40 to 60 ns, in which nothing is computed.

    20 ns, and no more of the second one's 25 ns than the 5 behind.
    """
    launches = [
        operator("c10d::allreduce_", 35, 36, key=0),
        operator("c10d::allreduce_", 36, 37, key=0),
    ]
    ran = [on_host("gloo:all_reduce", 40, 60), on_host("gloo:all_reduce", 40, 65)]
    found = communication_on_host(recorded([step(0, 100), *launches, *ran]))
    assert [(20, 20), (25, 5)] == [(each.nanoseconds, each.exposed) for each in found.values()]


def test_a_launch_whose_event_was_missed_takes_no_other_s_time() -> None:
    """The recording has no event of the broadcast, so the all-reduce stays the all-reduce's."""
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
    """Of traces of real GPUs, to the nanosecond.

    In the second all kernels are called SendRecv, and only the reader knows their kinds.
    """
    trace = read_trace(gpu_traces() / f"{name}.json.gz")
    names = {"copy": "Memcpy", "fill": "Memset"}
    work = [
        Event(names.get(each.kind, each.name), each.start, each.end, is_on_device=True, link=number)
        for number, each in enumerate(trace.work)
    ]
    ours, theirs = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for (each,) in communication(recorded(work).work).values():
        ours.update(figures(each.kind if kinds_by_name else "", 1, each.nanoseconds, each.exposed))
    for row in summarise(trace).collectives:
        theirs.update(
            figures(row.kind if kinds_by_name else "", row.calls, row.device, row.exposed)
        )
    assert theirs
    assert theirs == ours


def figures(kind: str, calls: int, device: int, exposed: int) -> dict[tuple[str, str], int]:
    """By kind and name."""
    return {(kind, "calls"): calls, (kind, "device"): device, (kind, "exposed"): exposed}
