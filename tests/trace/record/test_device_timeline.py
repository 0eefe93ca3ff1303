"""Test to which modules the work of a device belongs, with events like those of CUDA.

Each expected number is a sum of the nanoseconds that are written in the test.
"""

from collections.abc import Sequence

import pytest
from torch import nn

from lflops.model.module_tree import ModuleTree
from lflops.profile.records import ModulePhase
from lflops.trace.record.events import AttributedTrace, join, recorded
from lflops.trace.record.module_log import CLOSURE, LEAVE, OPTIMIZER, STEP, THREAD, LogEntry
from lflops.trace.record.step_timeline import device_seconds
from tests.support.kineto_events import Event
from tests.support.small_models import Block

# The ids of the training thread and of the autograd engine's thread in Python.
HOME = 70
DEVICE_THREAD = 71
# The ids of the same threads in Kineto.
TRAINER = 1
ENGINE = 2

MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
TREE = ModuleTree({"": MODEL})
ONE, TWO = MODEL
FIRST = id(ONE)
SECOND = id(TWO)


def step(start: int, end: int, number: int = 0) -> Event:
    """Return a step of the profiler."""
    return Event(f"ProfilerStep#{number}", start, end, TRAINER, is_named=True)


def operator(name: str, start: int, end: int, key: int, thread: int = TRAINER) -> Event:
    """Return an operator. `key` is the number by which a kernel refers to it."""
    return Event(name, start, end, thread, key=key)


def node(name: str, start: int, end: int, number: int, built_on: int = TRAINER) -> Event:
    """Return an autograd node that runs on the thread of the autograd engine."""
    return Event(
        f"autograd::engine::evaluate_function: {name}", start, end, ENGINE, number, built_on
    )


def kernel(length: int, link: int, start: int = 0, name: str = "gemm") -> Event:
    """Return work of the device that the operator with the key `link` has launched."""
    return Event(name, start, start + length, is_on_device=True, key=9000 + link, link=link)


FORWARD: list[LogEntry] = [
    (0, 0, 0, STEP),
    (10, 0, FIRST, ONE),
    (20, 2, FIRST, LEAVE),
    (30, 2, SECOND, TWO),
    (40, 4, SECOND, LEAVE),
]
"""The log of a forward pass.

Autograd nodes 0 and 1 are built in the first module, and 2 and 3 in the second.
"""

FORWARD_EVENTS = [operator("aten::addmm", 12, 18, key=1), operator("aten::addmm", 32, 38, key=2)]


def joined(
    events: Sequence[Event], boundaries: dict[int, list[LogEntry]] | None = None
) -> AttributedTrace:
    """Assign the events to modules. The default log is that of a forward pass."""
    return join(recorded(events), boundaries or {HOME: FORWARD}, HOME, TREE)


def test_a_kernel_is_the_module_s_that_asked_for_it_whenever_it_runs() -> None:
    """A kernel belongs to the module that launched it, even if it runs long after forward."""
    found = joined(
        [step(0, 100), *FORWARD_EVENTS, kernel(300, 1, start=500), kernel(40, 2, start=800)]
    )
    assert [{ModulePhase("0", "forward"): 300, ModulePhase("1", "forward"): 40}] == found.device


def test_the_engine_s_thread_runs_what_the_trainer_s_built() -> None:
    """An autograd node belongs to the module that built it, and runs on the engine's thread.

    The second module built node 3, and the first built node 0. The node that accumulates a gradient
    runs directly after the node that computed it, and belongs to the same module.
    """
    backward = [
        node("AddmmBackward0", 50, 60, 3),
        operator("aten::mm", 52, 54, key=3, thread=ENGINE),
        node("torch::autograd::AccumulateGrad", 61, 64, -1, built_on=0),
        operator("aten::add_", 62, 63, key=4, thread=ENGINE),
        node("AddmmBackward0", 65, 75, 0),
        operator("aten::mm", 66, 70, key=5, thread=ENGINE),
    ]
    kernels = [kernel(100, 3), kernel(7, 4), kernel(30, 5)]
    found = joined([step(0, 100), *FORWARD_EVENTS, *backward, *kernels])
    assert [{ModulePhase("1", "backward"): 107, ModulePhase("0", "backward"): 30}] == found.device
    runs = [
        (call.fqn, call.start, call.end, call.device, call.thread)
        for call in found.calls
        if call.phase == "backward"
    ]
    assert [("1", 50, 64, 107, 1), ("0", 65, 75, 30, 1)] == runs


def test_what_the_engine_s_thread_enters_is_recompute() -> None:
    """A module that is called on the engine's thread is recompute.

    A checkpoint runs the first module again within node 3. An event on this thread has the id that
    the thread has in Python.
    """
    again: list[LogEntry] = [(52, 0, FIRST, ONE), (56, 2, FIRST, LEAVE)]
    backward = [
        node("CheckpointBackward", 50, 90, 3),
        Event(f"{THREAD}{DEVICE_THREAD}", 51, 52, ENGINE, is_named=True),
        operator("aten::addmm", 53, 55, key=3, thread=ENGINE),
        node("AddmmBackward0", 60, 70, 1, built_on=ENGINE),
        operator("aten::mm", 62, 64, key=4, thread=ENGINE),
        operator("aten::mul", 80, 85, key=5, thread=ENGINE),
    ]
    kernels = [kernel(100, 3), kernel(30, 4), kernel(7, 5)]
    found = joined(
        [step(0, 100), *FORWARD_EVENTS, *backward, *kernels], {HOME: FORWARD, DEVICE_THREAD: again}
    )
    assert [
        {
            ModulePhase("0", "recompute"): 100,
            ModulePhase("0", "backward"): 30,
            ModulePhase("1", "backward"): 7,
        }
    ] == found.device


def test_what_no_operator_asked_for_is_the_root_s() -> None:
    """A kernel without an operator, as in a CUDA graph, belongs to the root.

    A range that the user has named is no work.
    """
    named = Event("mine", 0, 900, is_on_device=True, is_named=True, link=1)
    found = joined(
        [step(0, 100), *FORWARD_EVENTS, kernel(50, 0, start=20), kernel(6, 999, start=30), named]
    )
    assert [{ModulePhase("", "other"): 56}] == found.device


def test_steps_are_told_apart_by_who_asked() -> None:
    """A kernel belongs to the step in which it was launched.

    The kernel of the first step runs during the second step.
    """
    second: list[LogEntry] = [(100, 4, 0, STEP), (110, 4, FIRST, ONE), (120, 6, FIRST, LEAVE)]
    events = [
        step(0, 100),
        step(100, 200, 1),
        *FORWARD_EVENTS,
        operator("aten::addmm", 112, 118, key=3),
    ]
    found = joined(
        [*events, kernel(10, 1, start=150), kernel(20, 3, start=160)], {HOME: FORWARD + second}
    )
    assert [{ModulePhase("0", "forward"): 10}, {ModulePhase("0", "forward"): 20}] == found.device


def test_an_operator_has_its_own_kernels_and_those_of_whom_it_calls() -> None:
    """An operator's time includes the operators that it calls, and its self time does not.

    On the host, `linear` takes 20 ns, of which 12 are its self time. `addmm` takes 8 ns, of which 3
    are the launch. The whole kernel is self time of `addmm` on the device.
    """
    events = [
        operator("aten::linear", 10, 30, key=1),
        operator("aten::addmm", 12, 20, key=2),
        Event("cudaLaunchKernel", 14, 17, 555, key=9002, link=2),
        kernel(100, 2),
    ]
    table = {each.name: each for each in joined([step(0, 100), *events]).operators}
    linear = table["aten::linear"]
    addmm = table["aten::addmm"]
    launch = table["cudaLaunchKernel"]
    assert (20e-9, 12e-9) == (linear.host_seconds, linear.self_host_seconds)
    assert (8e-9, 5e-9) == (addmm.host_seconds, addmm.self_host_seconds)
    assert (3e-9, 3e-9) == (launch.host_seconds, launch.self_host_seconds)
    assert (100e-9, 0) == (linear.device_seconds, linear.self_device_seconds)
    assert (100e-9, 100e-9) == (addmm.device_seconds, addmm.self_device_seconds)


def test_the_time_of_an_operator_that_calls_its_like_counts_once() -> None:
    """`logsumexp` calls its variant with `out=` and an allocation. It takes 20 ns, not 28 ns."""
    events = [
        operator("aten::logsumexp", 10, 30, key=1),
        operator("aten::empty", 11, 12, key=2),
        operator("aten::logsumexp", 14, 22, key=3),
        Event("cudaLaunchKernel", 15, 16, 555, key=9002, link=3),
        kernel(100, 3),
    ]
    table = {each.name: each for each in joined([step(0, 100), *events]).operators}
    found = table["aten::logsumexp"]
    assert (2, 20e-9, 18e-9) == (found.calls, found.host_seconds, found.self_host_seconds)
    assert 100e-9 == found.device_seconds


def test_an_operator_that_only_calls_its_like_is_one_with_it() -> None:
    """An operator that calls only itself counts once, with the time of the outer call.

    Torch's table does the same.
    """
    table = joined(
        [step(0, 100), operator("aten::to", 10, 30, key=1), operator("aten::to", 12, 20, key=2)]
    ).operators
    assert [("aten::to", 1, 20e-9, 20e-9)] == [
        (each.name, each.calls, each.host_seconds, each.self_host_seconds) for each in table
    ]


def test_the_table_has_a_hundred_of_the_host_s_and_a_hundred_of_the_device_s() -> None:
    """The table has the 100 longest operators on the device, and then the 100 longest on the host.

    Of 250 operators, the last take longest on the device, and the first take longest on the host.
    """
    host = [
        operator(f"op{each}", 1000 * each, 1000 * each + 300 - each, key=1 + each)
        for each in range(250)
    ]
    device = [kernel(each, 1 + each) for each in range(250)]
    names = [each.name for each in joined([step(0, 500_000), *host, *device]).operators]
    longest_on_device = [f"op{each}" for each in range(249, 149, -1)]
    longest_on_host = [f"op{each}" for each in range(100)]
    assert longest_on_device + longest_on_host == names


def test_an_optimizer_s_closure_is_not_the_optimizer_s() -> None:
    """Kernels in the closure of an optimizer do not belong to the optimizer.

    Kernels before and after the closure belong to it.
    """
    told: list[LogEntry] = [
        (0, 0, 0, STEP),
        (10, 0, 5, OPTIMIZER),
        (20, 0, 6, CLOSURE),
        (30, 0, 6, LEAVE),
        (50, 0, 5, LEAVE),
    ]
    events = [
        operator("a", 15, 16, key=15),
        operator("b", 25, 26, key=25),
        operator("c", 35, 36, key=35),
        operator("d", 55, 56, key=55),
    ]
    kernels = [kernel(10 * event.key, event.key) for event in events]
    found = joined([step(0, 100), *events, *kernels], {HOME: told})
    assert [{ModulePhase("", "optimizer"): 500, ModulePhase("", "other"): 800}] == found.device


def test_a_frame_that_was_left_unsaid_ends_with_its_step() -> None:
    """A call without an end, because of an interrupt, ends with its step.

    In the next step, no work belongs to the module.
    """
    told: list[LogEntry] = [(0, 0, 0, STEP), (10, 0, FIRST, ONE), (100, 2, 0, STEP)]
    events = [step(0, 100), step(100, 200, 1), operator("aten::mul", 110, 120, key=1), kernel(5, 1)]
    found = joined(events, {HOME: told})
    assert [{}, {ModulePhase("", "other"): 5}] == found.device
    assert [("0", 10, 100)] == [(call.fqn, call.start, call.end) for call in found.calls]


def test_modules_on_threads_that_kineto_does_not_follow_are_calls_all_the_same() -> None:
    """Calls of modules on other threads are kept, although Kineto records no operators there.

    Kineto records only the threads of training and backward.
    """
    other: list[LogEntry] = [(10, 0, SECOND, TWO), (20, 0, SECOND, LEAVE)]
    calls = joined([step(0, 100), *FORWARD_EVENTS], {HOME: FORWARD, 99: other}).calls
    assert [("0", 0), ("1", 0), ("1", 1)] == [(call.fqn, call.thread) for call in calls]


def test_work_within_calls_is_that_of_all_of_them() -> None:
    """The device time of a call includes the kernels of the calls in it.

    Only the inner call is marked as innermost.
    """
    block = Block()
    told: list[LogEntry] = [
        (0, 0, 0, STEP),
        (10, 0, id(block), block),
        (20, 0, id(block.up), block.up),
        (30, 1, id(block.up), LEAVE),
        (40, 2, id(block), LEAVE),
    ]
    events = [
        step(0, 100),
        operator("aten::addmm", 22, 28, key=1),
        operator("aten::relu", 32, 36, key=2),
        kernel(50, 1),
        kernel(4, 2),
    ]
    calls = join(recorded(events), {HOME: told}, HOME, ModuleTree({"": block})).calls
    assert [("up", 50, True), ("", 54, False)] == [
        (call.fqn, call.device, call.innermost) for call in calls
    ]


WORK = [
    kernel(10, 1, start=100),
    kernel(10, 2, start=105),
    kernel(20, 3, start=130, name="ncclDevKernel_AllReduce"),
    kernel(8, 4, start=145),
]
"""Work of a device that is busy from 100 to 115 and from 130 to 153, which is 38 of 53 ns.

From 130 to 145, only the collective runs.
"""


@pytest.mark.parametrize(("figure", "nanoseconds"), [("idle", 15), ("exposed_communication", 15)])
def test_the_device_waits_or_only_communicates(figure: str, nanoseconds: int) -> None:
    """The device is idle for 15 ns, and only communicates for 15 ns.

    Kernels that overlap count once. A range that a user has named is no work.
    """
    named = Event("mine", 0, 900, is_on_device=True, is_named=True)
    work = recorded([*WORK, named, *FORWARD_EVENTS]).work
    assert nanoseconds / 1e9 == device_seconds(work)[figure]


@pytest.mark.parametrize(
    ("figure", "nanoseconds"),
    [("computing", 30), ("exposed_communication", 12), ("exposed_copies", 5), ("idle", 13)],
)
def test_each_instant_belongs_to_the_first_of_kernel_communication_copy_and_idle(
    figure: str, nanoseconds: int
) -> None:
    """Each moment belongs to kernels, else to communication, else to copies, else it is idle.

    Kernels run from 0 to 20, from 40 to 45 and from 55 to 60, which is 30 ns. Only a collective
    runs from 20 to 30 and from 45 to 47, and only a copy runs from 30 to 35. Nothing runs from 35
    to 40 and from 47 to 55.
    """
    work = [
        kernel(20, 1, start=0),
        kernel(5, 2, start=40),
        kernel(5, 3, start=55),
        kernel(20, 4, start=10, name="ncclDevKernel_AllReduce"),
        kernel(2, 5, start=45, name="ncclDevKernel_AllGather"),
        kernel(10, 6, start=25, name="Memcpy HtoD (Pinned -> Device)"),
    ]
    assert nanoseconds / 1e9 == device_seconds(recorded(work).work)[figure]


def test_without_a_device_nothing_is_known_of_it() -> None:
    """Without events of a device, its times are unknown, not 0."""
    assert {} == device_seconds(recorded(FORWARD_EVENTS).work)
