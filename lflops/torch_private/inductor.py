"""Access inductor, the backend that compiles the graphs of torch.compile.

This module reads the kernels of a compiled graph, and the modules that created the graph's nodes.

Import this module only in a function, after the user has requested it, because loading inductor
takes seconds. If torch lacks the private names, the import raises a `CountError`.
"""

import contextlib
import hashlib
import inspect
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lflops.garbage import SearchTimeout, alive
from lflops.profile.series import positions, sum_known
from lflops.torch_private.known_torch import differs, known_torch

with known_torch():
    from torch._inductor import config, debug
    from torch._inductor.codecache import FxGraphHashDetails
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.virtualized import V

aten = torch.ops.aten

RECORD = "lflops"
"""Key under which `RecordGraph` adds its data to inductor's own data about a graph's kernels.

Inductor saves its data in its caches, together with the compiled graph. So the data of
`RecordGraph` is also known if a graph comes from a cache.
"""

_LEVEL = "trace.provenance_tracking_level"
_FUSION_HOOK = "_post_fusion_custom_pass"
_KERNEL_EVENTS = "cpp.enable_kernel_profile"
_BASIC = 2
"""Value of the setting `_LEVEL` with which inductor records the nodes of each kernel."""

_GRAPH = "gm"
"""Name of the argument of `FxGraphHashDetails.__init__` that holds the graph."""

_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_CALL = re.compile(r"\[Provenance debug handles\] (\S+:\d+)\s*$", re.MULTILINE)


class CompiledGraph(NamedTuple):
    """A graph that was compiled in this process.

    Attributes:
        key: The key of the graph in inductor's cache. The events of torch.profiler have the same
            key.
        calls: The kernel calls of the graph in order, such as `extern_kernels.mm:7`. The number
            identifies the call.
        nodes: For each kernel call, the names of the graph nodes that it computes. Empty if they
            were not recorded.
        record: The data that `RecordGraph` has saved; empty if there is none.
    """

    key: str
    calls: tuple[str, ...]
    nodes: Mapping[str, list[str]]
    record: Mapping[str, Any]


class RecordGraph(CustomSchedulerPass):  # type: ignore[misc,unused-ignore]
    """A pass of inductor that records the module of each graph node, and the bytes of each kernel.

    Inductor pickles the pass for its cache keys. The pass must therefore have no state.
    """

    def uuid(self) -> Any:
        """Return the part of inductor's cache key that depends on this pass.

        It contains the version of the recorded data and the modules of the graph. Without the
        modules, two layers with the same code would share one compiled graph, and its data would
        name only one of the layers.
        """
        graph = _graph_of_key()
        modules = []
        if graph is not None:
            modules = [_own_module(node) for node in graph.graph.nodes]
        digest = hashlib.sha256(repr(modules).encode()).hexdigest()
        return f"lflops: modules of nodes, 2, {digest}"

    def __call__(self, nodes: Any) -> Any:
        try:
            kept: dict[str, Any] = debug._inductor_post_to_pre_grad_nodes
            graph: Any = V.graph
            # A graph in another graph adds to the record of the outer graph.
            if getattr(graph, "parent", None) is None:
                # These entries belong to the graph that was compiled before, which has a copy of
                # them.
                kept.pop(RECORD, None)
                debug._inductor_triton_kernel_to_post_grad_node_info.clear()
            record = kept.setdefault(RECORD, {"modules": [], "nodes": {}, "kernels": []})
            _add(record, graph.module.graph.nodes, nodes)
        except Exception:  # noqa: BLE001 - an error must not end the user's compilation
            debug._inductor_post_to_pre_grad_nodes.pop(RECORD, None)
        return nodes


def record_graphs() -> Callable[[], None]:
    """Record each graph that is compiled from now on.

    While graphs are recorded, generated C++ kernels also appear in traces. Returns a function that
    stops the recording and restores inductor's settings.

    Raises:
        CountError: The user has already set a custom pass, or this version of torch does not have
            the settings.
    """
    with known_torch():
        if getattr(config, _FUSION_HOOK) is not None:
            raise differs(f"config.{_FUSION_HOOK} is already set")
        wanted = {
            _FUSION_HOOK: RecordGraph(),
            _LEVEL: getattr(config, _LEVEL) or _BASIC,
            _KERNEL_EVENTS: True,
        }
        entries: dict[str, Any] = config._config  # type: ignore[attr-defined,unused-ignore]
        # For each setting: its value, its default, and the value set by the user. If the user has
        # not set a value, the last item is torch's mark for an unset value.
        before = {}
        for name in wanted:
            entry = entries[name]
            before[name] = (getattr(config, name), entry.default, entry.user_override.get())
        graph_id = debug._pre_grad_graph_id
        if graph_id is None:
            # Without a graph id, nothing is recorded for a backward that is compiled at its first
            # run.
            debug._pre_grad_graph_id = -1
        for name, value in wanted.items():
            _set(name, value)

    def restore() -> None:
        for name, (value, default, user_override) in before.items():
            # This also clears the cached hash of all settings.
            _set(name, value)
            entries[name].default = default
            entries[name].user_override.set(user_override)
        if graph_id is None:
            debug._pre_grad_graph_id = None
        debug._inductor_post_to_pre_grad_nodes.pop(RECORD, None)

    return restore


def is_recording() -> bool:
    """Return whether graphs that this thread compiles are recorded."""
    return (
        isinstance(getattr(config, _FUSION_HOOK), RecordGraph)
        and getattr(config, _LEVEL) > 0
        and getattr(config, _KERNEL_EVENTS)
    )


def keys_have_graphs() -> bool:
    """Return whether `_graph_of_key` can find the graph for which inductor creates a cache key."""
    return _GRAPH in inspect.signature(FxGraphHashDetails.__init__).parameters


def _graph_of_key() -> fx.GraphModule | None:
    """Return the graph for which inductor is creating a cache key.

    Inductor does not pass it to `RecordGraph.uuid`, so it is read from the calling frame.
    """
    creates_key = FxGraphHashDetails.__init__.__code__
    for frame, _ in walk_stack(inspect.currentframe()):
        if frame.f_code is creates_key:
            graph = frame.f_locals.get(_GRAPH)
            if not isinstance(graph, fx.GraphModule):
                return None
            return graph
    return None


def compiled_graphs(keys: Iterable[str]) -> Iterator[CompiledGraph]:
    """Yield the compiled graphs with the given cache keys.

    The graphs are searched among all live objects for at most one second, so some may be missing.
    """
    wanted = set(keys)
    with contextlib.suppress(SearchTimeout):
        for graph in alive((CompiledFxGraph,)):
            key = graph._fx_graph_cache_key
            if key in wanted:
                wanted.discard(key)
                nodes, record = recorded_names(graph.inductor_provenance_mapping_str)
                yield CompiledGraph(key, kernel_calls(graph.source_code), nodes, record)


def kernel_calls(source: str) -> tuple[str, ...]:
    """Return the kernel calls in generated code in order, such as `extern_kernels.mm:7`."""
    return tuple(_CALL.findall(source))


def recorded_names(text: str | None) -> tuple[Mapping[str, list[str]], Mapping[str, Any]]:
    """Return the graph nodes of each kernel call, and the data that `RecordGraph` has saved.

    Args:
        text: Inductor's data about a graph's kernels, as JSON.
    """
    kept = json.loads(text or "{}")
    return kept.get("cppCodeToPost", {}), kept.get(RECORD, {})


def _set(name: str, value: Any) -> None:
    """Change a setting of inductor in this thread and in threads that start later.

    Each thread has its own settings, and a backward graph may be compiled in another thread.
    """
    config._config[name].default = value  # type: ignore[attr-defined,unused-ignore]
    setattr(config, name, value)


def _add(record: dict[str, Any], nodes: Iterable[fx.Node], kernels: Iterable[Any]) -> None:
    """Add the nodes and the kernels of a graph to the data of `RecordGraph`.

    Args:
        record: The data, which is changed. `modules` has the name and the class of each module.
            `nodes` has, for each node, the index of its module, its bytes and its tag. `kernels`
            has, for each kernel, its bytes, its nodes, and whether it calls a library.
        nodes: The nodes of the graph.
        kernels: The kernels that inductor makes from the nodes.
    """
    numbers = positions(map(tuple, record["modules"]))
    for node in nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            module = _module(node)
            number = -1 if module is None else numbers.setdefault(module, len(numbers))
            tag = str(node.meta.get("partitioner_tag") or "")
            record["nodes"][node.name] = [number, _moved(node), tag]
    record["modules"] = list(numbers)
    for kernel in kernels:
        origins: set[str] = set()
        for part in kernel.get_nodes():
            if part.node is not None:
                origins.update(origin.name for origin in part.node.origins)
        entry = [_read_and_written(kernel), sorted(origins), bool(kernel.is_extern())]
        record["kernels"].append(entry)


def _module(node: fx.Node) -> tuple[str, str] | None:
    """Return the name and the class of the module to which a graph node belongs.

    Inductor may fuse a matmul with a sum, for example with the residual connection around a layer
    without a bias. The metadata of the fused node has no module or the module of the sum. The node
    is therefore assigned to the module that owns the weight of the matmul.
    """
    module = _own_module(node)
    if node.target not in _MATMULS:
        return module
    of_weights = set()
    for operand in node.all_input_nodes:
        if _is_view_of_input(operand):
            of_weights.add(_own_module(operand))
    of_weights.discard(None)
    if len(of_weights) != 1:
        return module
    of_weight = of_weights.pop()
    if module is None or of_weight is None:
        return of_weight
    # `L['self'].a.b` is a submodule of `L['self'].a`.
    is_submodule = of_weight[0].startswith((f"{module[0]}.", f"{module[0]}["))
    return of_weight if is_submodule else module


def _is_view_of_input(node: fx.Node) -> bool:
    """Return whether a node is a view of an input of the graph, such as a transposed weight.

    Returns false for a view of a result that was computed in the graph.
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
    """Return the bytes of a node's inputs and outputs, or `None` if a size is unknown.

    Returns 0 for a view, because it moves no bytes.
    """
    if getattr(node.target, "is_view", False):
        return 0
    sizes: list[int | None] = []
    for each in (*node.all_input_nodes, node):
        value = each.meta.get("val")
        tensors = value if isinstance(value, list | tuple) else [value]
        sizes.extend(map(_bytes, tensors))
    return sum_known(sizes)


def _bytes(value: Any) -> int | None:
    """Return the bytes of a tensor, `None` if a size is unknown, or 0 if the value is no tensor.

    For a dynamic size, the value that it had during the compilation is used. Converting the size
    itself to an integer would make torch specialize the graph for that value.
    """
    if not isinstance(value, Tensor):
        return 0
    number = value.dtype.itemsize
    shape: tuple[Any, ...] = tuple(value.shape)
    for size in shape:
        known = size if isinstance(size, int) else getattr(size.node, "hint", None)
        if known is None:
            return None
        number *= int(known)
    return number


def _read_and_written(kernel: Any) -> int | None:
    try:
        accesses = kernel.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
        return int(sum(accesses.values()))
    except Exception:  # noqa: BLE001 - inductor fails for some kernels and for dynamic sizes
        return None
