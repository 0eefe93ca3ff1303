"""The time of collectives' kernels, by module, phase and kind: from events as CUDA would give them into the profile."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from lflops.collect.kineto.attach_trace import with_trace
from lflops.collect.kineto.device_timeline import communication
from lflops.collect.kineto.events import Communicated, join
from lflops.collect.kineto.tracer import Recording
from lflops.profile.collective_names import collective_kind, is_collective_kernel
from lflops.profile.model import Communication
from lflops.profile.records import ModulePhase
from tests.collect.kineto.test_device_timeline import FORWARD, FORWARD_EVENTS, HOME, TREE, kernel, step
from tests.support.profile_builders import small_profile

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
    assert {2: [Communicated("all_reduce", 80, 40), Communicated("all_reduce", 30, 30)]} == communication(EVENTS)
    assert {} == communication(FORWARD_EVENTS)


def test_their_time_belongs_to_the_module_that_ran() -> None:
    """Both were launched by the operator of the second module."""
    found = join([step(0, 100), *FORWARD_EVENTS, *EVENTS], {HOME: FORWARD}, HOME, TREE, communication(EVENTS))
    assert {(ModulePhase("1", "forward"), "all_reduce"): (110, 70)} == found.communication


def recording(seconds: Mapping[tuple[ModulePhase, str], tuple[float, float]]) -> Recording:
    """A recording that knows of nothing else."""
    return Recording(
        raw=None,
        path=Path("trace"),
        events=0,
        batches=1,
        operators=(),
        device_seconds=None,
        device_idle_seconds=None,
        device_idle_by_phase=None,
        device_compute_seconds=None,
        exposed_comm_seconds=None,
        exposed_copy_seconds=None,
        communication=seconds,
        calls=(),
    )


def row(collective: str, group: str = "0", phase: str = "backward") -> Communication:
    """A collective of the root."""
    return Communication(module="", phase=phase, collective=collective, group=group, group_size=2, calls=1, bytes=8)  # type: ignore[arg-type]


def test_a_collective_gets_the_time_of_its_kind_in_its_place() -> None:
    """An all-to-all is made of sends; what was not traced stays unknown."""
    rows = (row("c10d::allreduce_"), row("c10d::alltoall_base_"), row("c10d::allreduce_", phase="forward"))
    backward = ModulePhase("", "backward")
    seconds = {(backward, "all_reduce"): (3e-3, 1e-3), (backward, "send_recv"): (5e-3, 5e-3)}
    found = with_trace(replace(small_profile(), communication=rows), recording(seconds), {}).communication
    assert [(3e-3, 1e-3), (5e-3, 5e-3), (None, None)] == [(each.seconds, each.exposed_seconds) for each in found]


def test_two_of_a_kind_in_one_place_stay_unknown() -> None:
    """Over two groups: nothing tells whose kernel is whose."""
    rows = (row("c10d::allreduce_", "0"), row("c10d::allreduce_", "1"))
    seconds = {(ModulePhase("", "backward"), "all_reduce"): (3e-3, 1e-3)}
    found = with_trace(replace(small_profile(), communication=rows), recording(seconds), {}).communication
    assert [None, None] == [each.seconds for each in found]
