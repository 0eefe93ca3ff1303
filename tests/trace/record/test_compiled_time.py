"""Test how the time of compiled regions is divided among modules.

A region is one run of a compiled graph. The regions and graphs are written by hand.
"""

from collections.abc import Mapping, Sequence

import pytest
from torch import nn

from lflops.model.module_tree import ModuleTree, names_in_tree
from lflops.profile.profile import SCHEMA_VERSION, Profile
from lflops.profile.records import Call, ModulePhase, TimingStats
from lflops.trace.record.compiled_profile import with_compiled
from lflops.trace.record.compiled_time import (
    CompiledTimes,
    GraphKernels,
    KernelCall,
    Region,
    RegionEvent,
    Share,
    times_of,
)
from lflops.trace.record.tracer import call_times
from tests.support.profile_builders import module_profile, run, work

FORWARD = ModulePhase("net", "forward")
BACKWARD = ModulePhase("net", "backward")
ROWS = ["net.a", "net.b"]


def graph(*calls: tuple[str, Sequence[tuple[int, int | None, str]]]) -> GraphKernels:
    """Return a graph of the modules `a` and `b`.

    Each of `calls` has the name of a kernel and its nodes. A node has the index of its module, its
    bytes and its pass.
    """
    nodes: dict[str, list[str]] = {}
    about = {}
    for number, (name, of_call) in enumerate(calls):
        call = f"{name}:{number}"
        nodes[call] = []
        for index, about_node in enumerate(of_call):
            node = f"{call}, node {index}"
            nodes[call].append(node)
            about[node] = about_node
    modules = [["L['self'].a", "Linear"], ["L['self'].b", "Linear"]]
    record = {"modules": modules, "nodes": about, "kernels": []}
    found = GraphKernels.of(list(nodes), nodes, record)
    assert found is not None
    return found


def region(
    *events: RegionEvent,
    running: ModulePhase = FORWARD,
    kernels: Sequence[tuple[str, int]] = (),
    end: int = 100,
) -> Region:
    """Return a run of a graph from 0 to `end` nanoseconds."""
    return Region(
        key="key",
        start=0,
        end=end,
        batch=0,
        running=running,
        events=list(events),
        kernels=list(kernels),
    )


def times(found: Region, of: GraphKernels | None, *, device: bool = False) -> CompiledTimes:
    """Return the times of one region. `of` is the graph that it runs, if it was recorded."""
    graphs = {} if of is None else {"key": of}
    return times_of([found], graphs, lambda graph, running: ROWS, batches=1, device=device)


def nanoseconds(seconds: float) -> float:
    """Return the nanoseconds, rounded to remove floating-point errors."""
    return round(seconds * 1e9, 6)


def test_a_fused_kernel_is_divided_by_the_bytes_of_its_nodes() -> None:
    """The time of a fused kernel is divided in proportion to the bytes of its nodes.

    Two nodes of `a` move 30 bytes, and one node of `b` moves 10. So `a` gets three quarters of the
    40 ns up to the end of the kernel.
    """
    nodes = [(0, 20, "is_forward"), (0, 10, "is_forward"), (1, 10, "is_forward")]
    of = graph(("cpp_fused_add_0", nodes))
    found = times(region(RegionEvent("graph_0_cpp_fused_add_0", 10, 40)), of)
    assert found.host == [
        {FORWARD: {ModulePhase("net.a", "forward"): 30.0, ModulePhase("net.b", "forward"): 10.0}}
    ]
    code = found.code
    assert [(each.name, each.module, each.modules, each.calls) for each in code.kernels] == [
        ("cpp_fused_add_0", "net.a", 2, 1),
        ("cpp_fused_add_0", "net.b", 2, 1),
    ]
    assert nanoseconds(code.seconds) == 100
    assert nanoseconds(code.unassigned_seconds) == 60
    assert nanoseconds(code.divided_seconds) == 40


def test_parts_and_unassigned_time_add_up_to_the_regions() -> None:
    """The times of the kernels and the unassigned time add up to the time of the region.

    The time between two kernels belongs to the second one. The time of an operator that is no call
    of the graph is unassigned, and so is the time after the last kernel.
    """
    of = graph(
        ("cpp_fused_a_0", [(0, 8, "is_forward")]), ("extern_kernels.mm", [(1, 8, "is_forward")])
    )
    events = [
        RegionEvent("graph_3_cpp_fused_a_0", 5, 20),
        RegionEvent("aten::fill_", 22, 30),
        RegionEvent("aten::mm", 35, 90),
    ]
    code = times(region(*events), of).code
    assert [(each.module, nanoseconds(each.host_seconds)) for each in code.kernels] == [
        ("net.b", 60),
        ("net.a", 20),
    ]
    assert nanoseconds(code.unassigned_seconds) == (30 - 20) + (100 - 90)
    assigned = sum(each.host_seconds for each in code.kernels)
    assert nanoseconds(assigned + code.unassigned_seconds) == nanoseconds(code.seconds) == 100


def test_the_nth_event_of_a_name_is_its_nth_call() -> None:
    """The n-th event with a name is the n-th call with this name.

    The graph has two matmuls, of which the first belongs to `a` and the second to `b`.
    """
    of = graph(
        ("extern_kernels.mm", [(0, 1, "is_forward")]), ("extern_kernels.mm", [(1, 1, "is_forward")])
    )
    code = times(region(RegionEvent("aten::mm", 0, 30), RegionEvent("aten::mm", 30, 100)), of).code
    assert {each.module: nanoseconds(each.host_seconds) for each in code.kernels} == {
        "net.a": 30,
        "net.b": 70,
    }


def test_a_name_with_more_events_than_calls_is_of_nobody() -> None:
    """If a name has more events than calls, their time is unassigned.

    It is unknown which of three matmuls are the two calls of the graph.
    """
    of = graph(
        ("extern_kernels.mm", [(0, 1, "is_forward")]), ("extern_kernels.mm", [(1, 1, "is_forward")])
    )
    code = times(region(*(RegionEvent("aten::mm", at, at + 10) for at in (0, 10, 20))), of).code
    assert code.kernels == ()
    assert nanoseconds(code.unassigned_seconds) == 100


def test_what_backward_computes_again_is_recompute() -> None:
    """Forward nodes in a kernel of backward are recompute.

    The partitioner of torch.compile has put them into the graph of backward.
    """
    nodes = [(0, 30, "is_backward"), (0, 10, "is_forward")]
    of = graph(("cpp_fused_0", nodes))
    found = times(region(RegionEvent("cpp_fused_0", 0, 100), running=BACKWARD), of)
    assert found.host == [
        {
            BACKWARD: {
                ModulePhase("net.a", "backward"): 75.0,
                ModulePhase("net.a", "recompute"): 25.0,
            }
        }
    ]
    # The kernel is divided between two phases, but not between modules.
    assert found.code.divided_seconds == 0


def test_what_forward_computes_ahead_for_backward_is_forward() -> None:
    """Backward nodes in the graph of forward count as forward.

    The compiler moves small nodes of backward into the graph of forward, which runs in forward.
    """
    nodes = [(0, 30, "is_backward"), (0, 10, "is_forward")]
    found = times(region(RegionEvent("cpp_fused_0", 0, 100)), graph(("cpp_fused_0", nodes)))
    assert found.host == [{FORWARD: {ModulePhase("net.a", "forward"): 100.0}}]


def test_code_of_the_compiled_function_itself_is_the_running_module_s() -> None:
    """The time of nodes without a module belongs to the running module.

    An example is a loss that is computed in `training_step`.
    """
    of = graph(("cpp_fused_0", [(-1, 4, "is_forward")]))
    found = times(region(RegionEvent("cpp_fused_0", 0, 100)), of)
    assert found.host == [{FORWARD: {FORWARD: 100.0}}]


def test_a_graph_without_a_record_is_of_nobody() -> None:
    """The time of a graph that was not recorded is unassigned, but included in the total."""
    code = times(region(RegionEvent("aten::mm", 0, 100)), None).code
    assert (code.graphs, code.unrecorded_graphs) == (1, 1)
    assert nanoseconds(code.seconds) == 100
    assert nanoseconds(code.unassigned_seconds) == 100


def test_a_device_s_kernels_are_those_of_the_calls_that_launched_them() -> None:
    """A kernel of the device belongs to the call that launched it.

    A kernel below an operator belongs to the call of this operator. A kernel that the region itself
    launched, as in a CUDA graph, is found by its name.
    """
    of = graph(
        ("triton_poi_fused_0", [(0, 1, "is_forward")]),
        ("extern_kernels.mm", [(1, 1, "is_forward")]),
    )
    found = times(
        region(
            RegionEvent("aten::mm", 50, 60, 500),
            kernels=[("triton_poi_fused_0", 300), ("memset", 200)],
        ),
        of,
        device=True,
    )
    assert found.device == [
        {FORWARD: {ModulePhase("net.b", "forward"): 500.0, ModulePhase("net.a", "forward"): 300.0}}
    ]
    code = found.code
    assert code.timed_on == "device"
    assert nanoseconds(code.seconds) == 1000
    assert nanoseconds(code.unassigned_seconds) == 200


def test_nodes_of_unknown_sizes_have_equal_parts() -> None:
    """If the size of a node is unknown when the graph is compiled, all nodes get equal shares."""
    call = graph(("cpp_fused_0", [(0, None, "is_forward"), (1, 8, "is_forward")])).calls[0]
    assert call.shares == (Share(0, True, 0.5), Share(1, True, 0.5))


def test_a_kernel_reads_and_writes_what_the_scheduler_s_kernels_do() -> None:
    """The bytes that a kernel moves are those of the scheduler's kernels in it.

    One generated kernel may consist of two scheduler kernels. The transposed weight of a matmul is
    not a node of its call.
    """
    record = {
        "modules": [],
        "nodes": {name: [-1, 4, "is_forward"] for name in ("sum", "mul", "mm", "permute")},
        "kernels": [
            [100, ["sum"], False],
            [20, ["mul", "sum"], False],
            [7, ["mm", "permute"], True],
        ],
    }
    found = GraphKernels.of(
        ["cpp_fused_0:1", "extern_kernels.mm:2"],
        {"cpp_fused_0:1": ["sum", "mul"], "extern_kernels.mm:2": ["mm"]},
        record,
    )
    assert found is not None
    assert [(each.event, each.bytes_moved) for each in found.calls] == [
        ("cpp_fused_0", 120),
        ("aten::mm", 7),
    ]


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("extern_kernels.addmm", "aten::addmm"),
        (
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
        ),
        ("torch.ops.mkldnn._linear_pointwise.default", "mkldnn::_linear_pointwise"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
    ],
)
def test_kernels_are_found_by_the_names_of_their_operators(name: str, event: str) -> None:
    """The name that Kineto shows for a kernel is derived from its name in the generated code."""
    found = GraphKernels.of([f"{name}:1"], {}, {"modules": [], "nodes": {}, "kernels": []})
    assert found is not None
    assert found.calls == (KernelCall(name, event, (), None),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1)
        self.b = nn.ReLU()


OF_BLOCK = [("L['self'].a", "Linear"), ("L['self'].b", "ReLU")]
OF_MODEL = [
    ("L['self'].blocks.1.a", "Linear"),
    ("L['self']._modules['blocks']._modules['0']", "Block"),
]


@pytest.mark.parametrize(
    ("modules", "running", "expected"),
    [
        (OF_MODEL, "", ["blocks.1.a", "blocks.0"]),
        (OF_BLOCK, "blocks.1", ["blocks.1.a", "blocks.1.b"]),
        # Two blocks have such parts.
        (OF_BLOCK, "", [None, None]),
        ([("L['self'].a", "Conv2d")], "blocks.1", [None]),
        ([("L['self'].other.c", "Linear")], "", [None]),
        (
            [("L['model'].blocks[1].a", "Linear"), ("G['model'].blocks.0.b", "ReLU")],
            "",
            ["blocks.1.a", "blocks.0.b"],
        ),
    ],
    ids=[
        "whole model",
        "one graph for each block",
        "ambiguous",
        "another class",
        "no such module",
        "functions",
    ],
)
def test_a_graph_s_modules_are_found_below_the_one_that_runs(
    modules: Sequence[tuple[str, str]], running: str, expected: list[str | None]
) -> None:
    """The modules of a graph are found below the running module.

    A graph may be compiled once and run for every block.
    """
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    assert names_in_tree(modules, running, ModuleTree({"": model})) == expected


def test_a_graph_of_the_only_module_that_has_such_parts_is_found_below_a_wrapper() -> None:
    """The modules of a graph are found below a wrapper if only one module has such parts.

    For example, `DistributedDataParallel` calls the compiled model without running its hooks.
    """
    wrapper = nn.Module()
    wrapper.module = nn.Module()
    wrapper.module.blocks = nn.ModuleList([Block(), Block()])
    assert names_in_tree(OF_MODEL, "", ModuleTree({"": wrapper})) == [
        "module.blocks.1.a",
        "module.blocks.0",
    ]


def test_a_module_s_own_time_in_a_batch_is_without_the_calls_inside() -> None:
    """The self time of a module in a batch excludes the calls in it.

    `net` takes 100 ns, of which `net.a` takes 30. In the next batch, `net.a` takes 5 ns on another
    thread.
    """
    calls = [
        Call("net", "forward", 0, 100, 0, innermost=False, thread=0),
        Call("net.a", "forward", 10, 40, 0, innermost=True, thread=0),
        Call("net.a", "forward", 200, 205, 0, innermost=True, thread=1),
    ]
    own = call_times(calls, lambda moment: moment // 150, 2)
    assert own == (
        {FORWARD: 70, ModulePhase("net.a", "forward"): 30},
        {ModulePhase("net.a", "forward"): 5},
    )


def spread(median: float) -> TimingStats:
    """Return the statistics of three steps."""
    return TimingStats(median=median, low=median - 1, high=median + 1, n=3)


def measured() -> Profile:
    """Return a profile in which a compiled `net` has 80 of 100 s forward and 160 of 200 s backward.

    The times of its submodules are unknown.
    """
    whole = {
        "forward": work(seconds=spread(100.0), self_seconds=spread(20.0)),
        "backward": work(seconds=spread(200.0), self_seconds=spread(40.0)),
    }
    compiled = {
        "forward": work(seconds=spread(80.0), self_seconds=spread(80.0)),
        "backward": work(seconds=spread(160.0), self_seconds=spread(160.0)),
    }
    rows = {"": whole, "net": {"compiled": True, **compiled}, "net.a": {}, "net.b": {}}
    modules = {name: module_profile(**fields) for name, fields in rows.items()}
    return Profile(
        schema_version=SCHEMA_VERSION, run=run(), modules=modules, op_counts=(), unsupported=()
    )


def opened(
    host: Sequence[Mapping[ModulePhase, Mapping[ModulePhase, float]]],
    called: Mapping[ModulePhase, float],
) -> Profile:
    """Return the profile of `measured` with the times of the submodules of `net`.

    `host` has for each batch the traced nanoseconds by module in the compiled code, and `called`
    has the nanoseconds of all calls.
    """
    code = times(region(), None).code
    found = CompiledTimes(code=code, host=[dict(each) for each in host], device=[{}] * len(host))
    return with_compiled(measured(), found, [called] * len(host))


def medians(found: Profile, phase: str) -> dict[str, tuple[float | None, float | None]]:
    """Return the inclusive seconds and the self seconds of each module."""

    def median(spread: TimingStats | None) -> float | None:
        return None if spread is None else round(spread.median, 9)

    seconds = {}
    for name, module in found.modules.items():
        of_phase = getattr(module, phase)
        seconds[name] = (median(of_phase.seconds), median(of_phase.self_seconds))
    return seconds


A = ModulePhase("net.a", "forward")
B = ModulePhase("net.b", "forward")


def test_a_compiled_row_s_clean_time_is_divided_as_in_the_trace() -> None:
    """The time of a compiled module in unprofiled steps is divided as in the trace.

    Of 1000 traced ns in `net`, `a` has 500 and `b` 250. So they get a half and a quarter of its
    80 s. The rest stays self time of `net`.
    """
    found = opened([{FORWARD: {A: 500.0, B: 250.0}}], {FORWARD: 1000.0})
    assert medians(found, "forward") == {
        "": (100, 20),
        "net": (80, 20),
        "net.a": (40, 40),
        "net.b": (20, 20),
    }
    assert medians(found, "backward") == medians(measured(), "backward")


def test_a_batch_that_was_interrupted_is_not_the_one_that_counts() -> None:
    """A single slow batch does not change the result: the second of three was interrupted."""
    usual = {FORWARD: {A: 500.0, B: 250.0}}
    found = opened([usual, {FORWARD: {A: 75_000.0, B: 1.0}}, usual], {FORWARD: 1000.0})
    assert medians(found, "forward")["net.a"] == (40, 40)


def test_recomputed_time_moves_from_backward_to_recompute_all_the_way_up() -> None:
    """Recomputed time moves from backward to recompute, in all modules above as well.

    A tenth of the 160 s backward of `net` is recomputed in `a`, and another tenth in `net` itself.
    """
    inside = {
        ModulePhase("net.a", "backward"): 500.0,
        ModulePhase("net.a", "recompute"): 100.0,
        ModulePhase("net", "recompute"): 100.0,
    }
    found = opened([{BACKWARD: inside}], {BACKWARD: 1000.0})
    assert medians(found, "backward") == {
        "": (168, 40),
        "net": (128, 48),
        "net.a": (80, 80),
        "net.b": (None, None),
    }
    assert medians(found, "recompute") == {
        "": (32, None),
        "net": (32, 16),
        "net.a": (16, 16),
        "net.b": (None, None),
    }


def test_the_notes_say_what_is_known_and_what_is_not() -> None:
    """If no graph was recorded, a note has the number of graphs, and there is no other note."""
    assert [(note.code, dict(note.values)) for note in opened([{}], {}).notes] == [
        ("compiled_unrecorded", {"graphs": 1})
    ]
