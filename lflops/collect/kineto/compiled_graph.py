"""The kernels of a compiled graph: whose nodes each of them computes.

    cpp_fused_gelu_1:3        mul_2, erf, mul_4     nodes of `blocks.0`
    extern_kernels.addmm:4    addmm_1               a node of `blocks.0.b`

A module has the name by which the compiled function reaches it, as `L['self'].blocks.0`. Which row that is depends on the module that
runs: a graph may be compiled once and run for each of twelve blocks.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from lflops.collect.model.module_tree import ModuleTree

__all__ = ["GraphKernels", "KernelCall", "Share", "rows_of"]

_ROOT = re.compile(r"^[LG]\['(\w+)'\]")
_ITEM = re.compile(r"\.?(?:_modules)?\[['\"]?([^\]'\"]+)['\"]?\]")


class Share(NamedTuple):
    """A part of a kernel.

    Attributes:
        module: Its number among the graph's modules; -1 for code of the compiled function itself.
        is_of_forward: Whether its nodes are of the forward pass, so that a graph of backward computes them again.
        share: Of the kernel's time, by the bytes that its nodes move. All parts of a kernel add up to 1.
    """

    module: int
    is_of_forward: bool
    share: float


class KernelCall(NamedTuple):
    """A call of a kernel.

    Attributes:
        name: In generated code, as `cpp_fused_gelu_1` or `extern_kernels.mm`.
        event: What Kineto calls it, as `cpp_fused_gelu_1` or `aten::mm`.
        shares: Empty where nothing was recorded of its nodes.
        bytes_moved: What it reads and writes; `None` where that is not known.
    """

    name: str
    event: str
    shares: tuple[Share, ...]
    bytes_moved: int | None


@dataclass(frozen=True, kw_only=True)
class GraphKernels:
    """A compiled graph.

    Attributes:
        modules: The name and the class of each module that has nodes in it.
        calls: In the order of generated code.
    """

    modules: tuple[tuple[str, str], ...]
    calls: tuple[KernelCall, ...]

    @classmethod
    def of(cls, calls: Sequence[str], nodes: Mapping[str, Sequence[str]], record: Mapping[str, Any]) -> "GraphKernels | None":
        """Read a record.

        Args:
            calls: The kernels in their order, each with its number: `extern_kernels.mm:7`.
            nodes: The names of the nodes of each call.
            record: The modules; by node its module, bytes and torch's tag of its pass; of each kernel its bytes, its nodes, and whether it
                is a library's.

        Returns:
            `None` where the graph has no record.
        """
        if not record or not calls:
            return None
        about: Mapping[str, Sequence[Any]] = record["nodes"]
        moved = _bytes_of_calls({call: frozenset(nodes.get(call, ())) for call in calls}, record["kernels"])
        return cls(
            modules=tuple((name, kind) for name, kind in record["modules"]),
            calls=tuple(
                KernelCall(
                    name := call.rpartition(":")[0],
                    _event(name),
                    _shares([about[node] for node in nodes.get(call, ()) if node in about]),
                    moved.get(call),
                )
                for call in calls
            ),
        )


def _shares(nodes: Sequence[Sequence[Any]]) -> tuple[Share, ...]:
    """What each module has of a kernel. Where the bytes of no node are known, nodes have equal parts."""
    known = all(moved is not None for _, moved, _ in nodes) and any(moved for _, moved, _ in nodes)
    parts: defaultdict[tuple[int, bool], float] = defaultdict(float)
    for module, moved, tag in nodes:
        parts[module, tag == "is_forward"] += moved if known else 1
    total = sum(parts.values())
    return tuple(Share(*key, part / total) for key, part in parts.items() if part)


def _bytes_of_calls(nodes: Mapping[str, frozenset[str]], kernels: Sequence[tuple[int | None, Sequence[str], bool]]) -> dict[str, int]:
    """What each call reads and writes: a call may be several of the scheduler's kernels. A call with an unknown one is left out."""
    sums: dict[str, int] = {}
    unknown: set[str] = set()
    for moved, names, of_library in kernels:
        of_kernel = frozenset(names)
        calls = {call: own for call, own in nodes.items() if (_event(call) != call) == of_library}
        exact = [call for call, own in calls.items() if own == of_kernel]
        whole = [call for call, own in calls.items() if own > of_kernel]
        views_left_out = [call for call, own in calls.items() if own and own < of_kernel] if of_library else []
        fitting = exact or views_left_out or whole
        if not fitting:
            continue
        call = min(fitting, key=lambda each: len(nodes[each]))
        if moved is None:
            unknown.add(call)
        else:
            sums[call] = sums.get(call, 0) + moved
    return {call: moved for call, moved in sums.items() if call not in unknown}


def _event(name: str) -> str:
    """The name that Kineto has for a kernel of generated code."""
    parts = name.removeprefix("torch.ops.").split(".")
    if parts[0] == "extern_kernels":
        return f"aten::{parts[1]}"
    return f"{parts[0]}::{parts[1]}" if len(parts) > 1 else name


def rows_of(modules: Sequence[tuple[str, str]], running: str, tree: ModuleTree) -> list[str | None]:
    """The row of each module of a graph while a module runs; `None` where several could be meant, or none.

    The compiled function is the running module's, or that of one below it that is the only one to have such modules.
    """
    named = [_path(name) for name, _ in modules]
    rows: list[str | None] = [None] * len(modules)
    for root in {root for root, _ in named}:
        wanted = [(number, path, modules[number][1]) for number, (at, path) in enumerate(named) if at == root]
        base = _base([(path, kind) for _, path, kind in wanted], running, tree)
        if base is not None:
            for number, path, _ in wanted:
                rows[number] = _row(base, path, tree)
    return rows


def _base(wanted: Sequence[tuple[str, str]], running: str, tree: ModuleTree) -> str | None:
    """The row of the module that has all of these below it."""
    running = tree.nearest(running)
    if _has_all(running, wanted, tree):
        return running
    below = [row for row in tree.modules if row.startswith(f"{running}." if running else "") and row != running]
    fitting = [row for row in below if _has_all(row, wanted, tree)]
    return fitting[0] if len(fitting) == 1 else None


def _has_all(row: str, wanted: Sequence[tuple[str, str]], tree: ModuleTree) -> bool:
    return all(
        (module := _below(tree.modules.get(row), path)) is not None and (not path or type(module).__name__ == kind) for path, kind in wanted
    )


def _row(base: str, path: str, tree: ModuleTree) -> str | None:
    module = _below(tree.modules[base], path)
    return tree.row(module, base) if path and module is not None and module in tree else base


def _below(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in filter(None, path.split(".")):
        child = getattr(module, name, None)
        module = child if isinstance(child, nn.Module) else None
    return module


def _path(name: str) -> tuple[str, str]:
    """The variable that a name begins with, and the path from it: `L['self'].blocks[0]` is `self` and `blocks.0`."""
    begins = _ROOT.match(name)
    path = _ITEM.sub(r".\1", name[begins.end() if begins else 0 :])
    parts = [part for part in path.split(".") if part and part != "_modules"]
    return begins.group(1) if begins else "", ".".join(parts)
