"""Compiled regions by module, on regions and graphs made by hand."""

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

FORWARD, BACKWARD = ModulePhase("net", "forward"), ModulePhase("net", "backward")
ROWS = ["net.a", "net.b"]


def graph(*calls: tuple[str, Sequence[tuple[int, int | None, str]]]) -> GraphKernels:
    """A graph of the modules `a` and `b`.

    Its calls, and the nodes of each with their module, bytes and pass.
    """
    numbered = {f"{name}:{number}": given for number, (name, given) in enumerate(calls)}
    nodes = {
        call: [f"{call}, node {index}" for index in range(len(given))]
        for call, given in numbered.items()
    }
    about = {
        node: each
        for call, given in numbered.items()
        for node, each in zip(nodes[call], given, strict=True)
    }
    modules = [["L['self'].a", "Linear"], ["L['self'].b", "Linear"]]
    found = GraphKernels.of(
        list(numbered), nodes, {"modules": modules, "nodes": about, "kernels": []}
    )
    assert found is not None
    return found


def region(
    *events: RegionEvent,
    running: ModulePhase = FORWARD,
    kernels: Sequence[tuple[str, int]] = (),
    end: int = 100,
) -> Region:
    """A run of a graph from 0 to 100 ns."""
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
    """The region's time, with the graph that it runs."""
    return times_of(
        [found],
        {} if of is None else {"key": of},
        lambda graph, running: ROWS,
        batches=1,
        device=device,
    )


def nanoseconds(seconds: float) -> float:
    """Without the rounding of floats."""
    return round(seconds * 1e9, 6)


def test_a_fused_kernel_is_divided_by_the_bytes_of_its_nodes() -> None:
    """Two nodes of `a` move 30 bytes, one of `b` moves 10.

    `a` has three quarters of the 40 ns up to the kernel's end.
    """
    nodes = [(0, 20, "is_forward"), (0, 10, "is_forward"), (1, 10, "is_forward")]
    found = times(
        region(RegionEvent("graph_0_cpp_fused_add_0", 10, 40)), graph(("cpp_fused_add_0", nodes))
    )
    assert found.host == [
        {FORWARD: {ModulePhase("net.a", "forward"): 30.0, ModulePhase("net.b", "forward"): 10.0}}
    ]
    code = found.code
    assert [(each.name, each.module, each.modules, each.calls) for each in code.kernels] == [
        ("cpp_fused_add_0", "net.a", 2, 1),
        ("cpp_fused_add_0", "net.b", 2, 1),
    ]
    assert (
        nanoseconds(code.seconds),
        nanoseconds(code.unassigned_seconds),
        nanoseconds(code.divided_seconds),
    ) == (100, 60, 40)


def test_parts_and_unassigned_time_add_up_to_the_regions() -> None:
    """What is between two kernels belongs to the second, an operator of no call to nobody, and so does the end."""
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
    assert (
        nanoseconds(sum(each.host_seconds for each in code.kernels) + code.unassigned_seconds)
        == nanoseconds(code.seconds)
        == 100
    )


def test_the_nth_event_of_a_name_is_its_nth_call() -> None:
    """Two products: the first is `a`'s, whatever runs between."""
    of = graph(
        ("extern_kernels.mm", [(0, 1, "is_forward")]), ("extern_kernels.mm", [(1, 1, "is_forward")])
    )
    code = times(region(RegionEvent("aten::mm", 0, 30), RegionEvent("aten::mm", 30, 100)), of).code
    assert {each.module: nanoseconds(each.host_seconds) for each in code.kernels} == {
        "net.a": 30,
        "net.b": 70,
    }


def test_a_name_with_more_events_than_calls_is_of_nobody() -> None:
    """Which of three products is which cannot be said."""
    of = graph(
        ("extern_kernels.mm", [(0, 1, "is_forward")]), ("extern_kernels.mm", [(1, 1, "is_forward")])
    )
    code = times(region(*(RegionEvent("aten::mm", at, at + 10) for at in (0, 10, 20))), of).code
    assert code.kernels == ()
    assert nanoseconds(code.unassigned_seconds) == 100


def test_what_backward_computes_again_is_recompute() -> None:
    """Of a kernel of backward, the nodes of forward.

    They were partitioned into the graph of backward.
    """
    nodes = [(0, 30, "is_backward"), (0, 10, "is_forward")]
    found = times(
        region(RegionEvent("cpp_fused_0", 0, 100), running=BACKWARD), graph(("cpp_fused_0", nodes))
    )
    assert found.host == [
        {
            BACKWARD: {
                ModulePhase("net.a", "backward"): 75.0,
                ModulePhase("net.a", "recompute"): 25.0,
            }
        }
    ]
    assert found.code.divided_seconds == 0  # two phases of one module


def test_what_forward_computes_ahead_for_backward_is_forward() -> None:
    """The compiler moves small nodes of backward into the graph of forward.

    That graph is no backward.
    """
    nodes = [(0, 30, "is_backward"), (0, 10, "is_forward")]
    found = times(region(RegionEvent("cpp_fused_0", 0, 100)), graph(("cpp_fused_0", nodes)))
    assert found.host == [{FORWARD: {ModulePhase("net.a", "forward"): 100.0}}]


def test_code_of_the_compiled_function_itself_is_the_running_module_s() -> None:
    """As a loss that is computed in `training_step`."""
    found = times(
        region(RegionEvent("cpp_fused_0", 0, 100)), graph(("cpp_fused_0", [(-1, 4, "is_forward")]))
    )
    assert found.host == [{FORWARD: {FORWARD: 100.0}}]


def test_a_graph_without_a_record_is_of_nobody() -> None:
    """Its time is in the total all the same."""
    code = times(region(RegionEvent("aten::mm", 0, 100)), None).code
    assert (
        code.graphs,
        code.unrecorded_graphs,
        nanoseconds(code.seconds),
        nanoseconds(code.unassigned_seconds),
    ) == (1, 1, 100, 100)


def test_a_device_s_kernels_are_those_of_the_calls_that_launched_them() -> None:
    """One below an operator is that call's.

    One that the region launched itself is found by its name, as in a CUDA graph.
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
    assert (code.timed_on, nanoseconds(code.seconds), nanoseconds(code.unassigned_seconds)) == (
        "device",
        1000,
        200,
    )


def test_nodes_of_unknown_sizes_have_equal_parts() -> None:
    """A size that is not known when the graph is compiled."""
    call = graph(("cpp_fused_0", [(0, None, "is_forward"), (1, 8, "is_forward")])).calls[0]
    assert call.shares == (Share(0, True, 0.5), Share(1, True, 0.5))


def test_a_kernel_reads_and_writes_what_the_scheduler_s_kernels_do() -> None:
    """One generated loop nest may be two of them.

    A product's transposed weight is no node of its call.
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
    """Generated code calls a kernel by a Python name, and Kineto shows the operator's."""
    found = GraphKernels.of([f"{name}:1"], {}, {"modules": [], "nodes": {}, "kernels": []})
    assert found is not None
    assert found.calls == (KernelCall(name, event, (), None),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.ReLU()


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
        (OF_BLOCK, "", [None, None]),  # two blocks could be meant
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
    """A graph may be compiled once and run for every block."""
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    assert names_in_tree(modules, running, ModuleTree({"": model})) == expected


def test_a_graph_of_the_only_module_that_has_such_parts_is_found_below_a_wrapper() -> None:
    """DistributedDataParallel calls the compiled model without a hook between."""
    wrapper = nn.Module()
    wrapper.module = nn.Module()
    wrapper.module.blocks = nn.ModuleList([Block(), Block()])
    assert names_in_tree(OF_MODEL, "", ModuleTree({"": wrapper})) == [
        "module.blocks.1.a",
        "module.blocks.0",
    ]


def test_a_module_s_own_time_in_a_batch_is_without_the_calls_inside() -> None:
    """70 ns in `net` around 30 in `net.a`, and 5 in the next batch, on two threads."""
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
    """Three steps."""
    return TimingStats(median=median, low=median - 1, high=median + 1, n=3)


def measured() -> Profile:
    """A compiled `net` with 80 s of 100 in forward, and 160 of 200 in backward.

    Nothing is known of `net.a`.
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
    """The same with `net` opened: by batch its traced time inside, and what its calls took."""
    code = times(region(), None).code
    found = CompiledTimes(code=code, host=[dict(each) for each in host], device=[{}] * len(host))
    return with_compiled(measured(), found, [called] * len(host))


def medians(found: Profile, phase: str) -> dict[str, tuple[float | None, float | None]]:
    """Inclusive and own seconds."""
    works = {name: getattr(each, phase) for name, each in found.modules.items()}

    def median(spread: TimingStats | None) -> float | None:
        return None if spread is None else round(spread.median, 9)

    return {name: (median(each.seconds), median(each.self_seconds)) for name, each in works.items()}


A, B = ModulePhase("net.a", "forward"), ModulePhase("net.b", "forward")


def test_a_compiled_row_s_clean_time_is_divided_as_in_the_trace() -> None:
    """Of 1000 ns in `net`, `a` has 500 and `b` 250.

    Half and a quarter of its 80 s; the rest stays its own.
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
    """The second of three took a hundred times as long."""
    usual = {FORWARD: {A: 500.0, B: 250.0}}
    found = opened([usual, {FORWARD: {A: 75_000.0, B: 1.0}}, usual], {FORWARD: 1000.0})
    assert medians(found, "forward")["net.a"] == (40, 40)


def test_recomputed_time_moves_from_backward_to_recompute_all_the_way_up() -> None:
    """A tenth of `net`'s 160 s of backward is computed again in `a`, a tenth in `net` itself."""
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
    """A graph without a record is named, and no share is given where no graph has one."""
    assert [(note.code, dict(note.values)) for note in opened([{}], {}).notes] == [
        ("compiled_unrecorded", {"graphs": 1})
    ]
