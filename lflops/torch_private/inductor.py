"""Inductor, which compiles the graphs of torch.compile.

The kernels of a graph, and the modules that their nodes came from.

Import it within a function only, after the user asked for it: to load inductor takes seconds. A
torch without these names raises a `CountError` at the import.
"""

import contextlib
import hashlib
import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lflops.garbage import SearchTimeout, alive
from lflops.profile.series import sum_known
from lflops.torch_private.known_torch import differs, known_torch

with known_torch():
    from torch._inductor import config, debug
    from torch._inductor.codecache import FxGraphHashDetails
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.virtualized import V

aten = torch.ops.aten

RECORD = "lflops"
"""Where our record lies in what inductor writes down of a graph's kernels.

It is saved with the graph in inductor's caches.
"""

_LEVEL, _PASS, _KERNEL_EVENTS = (
    "trace.provenance_tracking_level",
    "_post_fusion_custom_pass",
    "cpp.enable_kernel_profile",
)
_BASIC = 2
# the argument of `FxGraphHashDetails` that is the graph
_GRAPH = "gm"
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_CALL = re.compile(r"\[Provenance debug handles\] (\S+:\d+)\s*$", re.MULTILINE)


class CompiledGraph(NamedTuple):
    """A graph that is compiled in this process."""

    # as in Kineto's event
    key: str
    calls: tuple[
        str, ...
        # the kernels in the order of their calls, as `extern_kernels.mm:7`: each call has a number
    ]
    nodes: Mapping[
        str, list[str]
        # of the graph that each call computes; empty where they were not recorded
    ]
    # of `RecordGraph`; empty where there is none
    record: Mapping[str, Any]


class RecordGraph(CustomSchedulerPass):  # type: ignore[misc,unused-ignore]
    """Writes down a graph's nodes with their modules, and the bytes of each kernel.

    Inductor pickles it into keys, so it has no state.
    """

    def uuid(self) -> Any:
        """What goes into the cache's key: the form of the record, and the graph's modules."""
        # Without these, two layers of equal code would share a graph, and its record names one of
        # them
        graph = _graph_of_key()
        modules = [] if graph is None else [_own_module(node) for node in graph.graph.nodes]
        return f"lflops: modules of nodes, 2, {hashlib.sha256(repr(modules).encode()).hexdigest()}"

    def __call__(self, nodes: Any) -> Any:
        try:
            kept: dict[str, Any] = debug._inductor_post_to_pre_grad_nodes
            graph: Any = V.graph
            # a graph within another adds to its record
            if getattr(graph, "parent", None) is None:
                kept.pop(RECORD, None)
                # of a graph that was compiled before, and has its own copy
                debug._inductor_triton_kernel_to_post_grad_node_info.clear()
            _add(
                kept.setdefault(RECORD, {"modules": [], "nodes": {}, "kernels": []}),
                graph.module.graph.nodes,
                nodes,
            )
        except Exception:  # noqa: BLE001 - whatever it is, it is not to end the user's compilation
            debug._inductor_post_to_pre_grad_nodes.pop(RECORD, None)
        return nodes


def record_graphs() -> Callable[[], None]:
    """Record each graph that is compiled from now on, and give generated C++ kernels an event in Kineto's traces."""
    # Returns what ends that, and restores inductor's settings. A `CountError` where the user has
    # set their own pass in our place, or torch does not have the settings.
    with known_torch():
        if getattr(config, _PASS) is not None:
            raise differs(f"config.{_PASS} is taken")
        wanted = {
            _PASS: RecordGraph(),
            _LEVEL: getattr(config, _LEVEL) or _BASIC,
            _KERNEL_EVENTS: True,
        }
        entries: dict[str, Any] = {name: config._config[name] for name in wanted}  # type: ignore[attr-defined,unused-ignore]
        # Of each setting its value, its default, and what the user gave, or torch's mark for
        # nothing.
        before = {
            name: (getattr(config, name), entry.default, entry.user_override.get())
            for name, entry in entries.items()
        }
        graph_id = debug._pre_grad_graph_id
        if graph_id is None:
            debug._pre_grad_graph_id = (
                -1
                # a backward that is compiled at its first run would write nothing down
            )
        for name, value in wanted.items():
            _set(name, value)

    def restore() -> None:
        for name, (value, default, given) in before.items():
            # it also forgets the hash of all settings
            _set(name, value)
            entries[name].default = default
            entries[name].user_override.set(given)
        if graph_id is None:
            debug._pre_grad_graph_id = None
        debug._inductor_post_to_pre_grad_nodes.pop(RECORD, None)

    return restore


def is_recording() -> bool:
    """Whether graphs that this thread compiles are recorded."""
    return (
        isinstance(getattr(config, _PASS), RecordGraph)
        and getattr(config, _LEVEL) > 0
        and getattr(config, _KERNEL_EVENTS)
    )


def keys_have_graphs() -> bool:
    """Whether inductor has a graph at hand where it makes the graph's key."""
    return _GRAPH in inspect.signature(FxGraphHashDetails.__init__).parameters


def _graph_of_key() -> fx.GraphModule | None:
    """The graph whose key is being made: `RecordGraph.uuid` is not given it."""
    makes_key = FxGraphHashDetails.__init__.__code__
    graph = next(
        (
            frame.f_locals.get(_GRAPH)
            for frame, _ in walk_stack(inspect.currentframe())
            if frame.f_code is makes_key
        ),
        None,
    )
    return graph if isinstance(graph, fx.GraphModule) else None


def compiled_graphs(keys: Iterable[str]) -> Iterator[CompiledGraph]:
    """The graphs with these keys that are alive, as far as they are found in a second."""
    wanted = set(keys)
    with contextlib.suppress(SearchTimeout):
        for each in alive((CompiledFxGraph,)):
            if each._fx_graph_cache_key in wanted:
                wanted.discard(each._fx_graph_cache_key)
                nodes, record = recorded_names(each.inductor_provenance_mapping_str)
                yield CompiledGraph(
                    each._fx_graph_cache_key, kernel_calls(each.source_code), nodes, record
                )


def kernel_calls(source: str) -> tuple[str, ...]:
    """The kernels that generated code calls, in their order, each with its number."""
    return tuple(_CALL.findall(source))


def recorded_names(text: str | None) -> tuple[Mapping[str, list[str]], Mapping[str, Any]]:
    """The nodes of each kernel call, and our record, from what inductor wrote down of a graph."""
    kept = json.loads(text or "{}")
    return kept.get("cppCodeToPost", {}), kept.get(RECORD, {})


def _set(name: str, value: Any) -> None:
    """Set it in this thread, and for threads that begin later.

    Settings are by thread, and a backward may be compiled in another.
    """
    config._config[name].default = value  # type: ignore[attr-defined,unused-ignore]
    setattr(config, name, value)


def _add(record: dict[str, Any], nodes: Iterable[fx.Node], kernels: Iterable[Any]) -> None:
    """Add a graph to a record.

    Its modules by name and class, its nodes, and the bytes of each kernel.
    """
    numbers = {tuple(module): number for number, module in enumerate(record["modules"])}
    for node in nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            module = _module(node)
            number = -1 if module is None else numbers.setdefault(module, len(numbers))
            record["nodes"][node.name] = [
                number,
                _moved(node),
                str(node.meta.get("partitioner_tag") or ""),
            ]
    record["modules"] = list(numbers)
    for kernel in kernels:
        origins = {
            origin.name
            for part in kernel.get_nodes()
            if part.node is not None
            for origin in part.node.origins
        }
        record["kernels"].append(
            [_read_and_written(kernel), sorted(origins), bool(kernel.is_extern())]
        )


def _module(node: fx.Node) -> tuple[str, str] | None:
    """The module of a node, by name and class."""
    # A product that inductor made of a product and a sum has lost its own, or has that of the sum,
    # as of a residual around a layer without a bias. It has the module whose weight it takes.
    own = _own_module(node)
    if node.target not in _PRODUCTS:
        return own
    of_weights = {
        module
        for each in node.all_input_nodes
        if _is_view_of_input(each) and (module := _own_module(each)) is not None
    }
    of_weight = of_weights.pop() if len(of_weights) == 1 else None
    # As `L['self'].a.b` is one of the modules of `L['self'].a`.
    return (
        of_weight
        if of_weight is not None
        and (own is None or of_weight[0].startswith((f"{own[0]}.", f"{own[0]}[")))
        else own
    )


def _is_view_of_input(node: fx.Node) -> bool:
    """Whether a node is a view, or a view of a view, of what the graph is given.

    Of a weight, not of a result.
    """
    while getattr(node.target, "is_view", False) and node.all_input_nodes:
        node = node.all_input_nodes[0]
        if node.op == "placeholder":
            return True
    return False


def _own_module(node: fx.Node) -> tuple[str, str] | None:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    name, kind = list(stack.values())[-1]
    return name, kind if isinstance(kind, str) else kind.__name__


def _moved(node: fx.Node) -> int | None:
    """Bytes of a node's inputs and outputs; 0 for a view, `None` where a size is not known."""
    if getattr(node.target, "is_view", False):
        return 0
    values = [each.meta.get("val") for each in (*node.all_input_nodes, node)]
    return sum_known(
        _bytes(tensor)
        for value in values
        for tensor in (value if isinstance(value, list | tuple) else [value])
    )


def _bytes(value: Any) -> int | None:
    """Bytes of a tensor.

    A size that varies is the one that was compiled for: to ask for its value would compile for that
    value alone.
    """
    if not isinstance(value, Tensor):
        return 0
    shape: tuple[Any, ...] = tuple(value.shape)
    sizes: list[Any] = [
        size if isinstance(size, int) else getattr(size.node, "hint", None) for size in shape
    ]
    return None if None in sizes else math.prod(map(int, sizes), start=value.dtype.itemsize)


def _read_and_written(kernel: Any) -> int | None:
    try:
        return int(
            sum(
                kernel.get_read_write_buffer_accesses(
                    include_reads=True, include_writes=True
                ).values()
            )
        )
    except Exception:  # noqa: BLE001 - inductor does not know of every kernel, nor for sizes that vary
        return None
