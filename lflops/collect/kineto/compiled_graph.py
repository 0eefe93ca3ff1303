"""The kernels of a compiled graph: whose nodes each of them computes.

    cpp_fused_gelu_1:3        mul_2, erf, mul_4     nodes of `blocks.0`
    extern_kernels.addmm:4    addmm_1               a node of `blocks.0.b`

A module has the name by which the compiled function reaches it, as `L['self'].blocks.0`. Which row that is depends on the module that
runs: a graph may be compiled once and run for each of twelve blocks.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["GraphKernels", "KernelCall", "Share"]


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
