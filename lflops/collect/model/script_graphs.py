"""What a scripted module runs below the dispatcher, where no mode sees it: kernels that torch's rewriting of its graph put there."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["below_dispatcher"]

BELOW = ("prim::mkldnn_", "prim::MKLDNN", "prim::TensorExpr", "prim::CudaFusion", "prim::FusionGroup", "prim::StaticSubgraph")
"""How the names of nodes begin that call kernels at once."""

PACKED = "prim::ConstantMKLDNNTensor"


def below_dispatcher(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Each such node of a scripted module's graph: its name, and the bytes of the weights that are known to it."""
    graph = getattr(module, "inlined_graph", None) if isinstance(module, torch.jit.ScriptModule) else None
    if graph is not None:
        yield from _in_block(graph)


def _in_block(block: Any) -> Iterator[tuple[str, int]]:
    for node in block.nodes():
        name = node.kind()
        if name.startswith(BELOW):
            yield name, sum(_weight_bytes(value.node()) for value in node.inputs())
        else:
            for inner in node.blocks():
                yield from _in_block(inner)


def _weight_bytes(node: Any) -> int:
    if node.kind() != PACKED or not node.hasAttribute("value"):
        return 0
    weight = node.t("value")
    return int(weight.numel() * weight.element_size())
