"""Low-rank adapters: the linear layers of a model's blocks, frozen, each with two narrow layers that are trained."""

from torch import Tensor, nn

from lflops.collect.model.blocks import blocks_in
from lflops.errors import CountError

__all__ = ["Adapted", "add_adapters"]

SCALE = 2.0
"""What the adapter's result is multiplied by: alpha over rank. Its value changes neither work nor memory."""


class Adapted(nn.Module):
    """A frozen linear layer and its adapter, as PEFT computes them."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        """Make the adapter in the layer's dtype."""
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result and the adapter's."""
        result: Tensor = self.base(x) + self.up(self.down(x)) * SCALE
        return result


def add_adapters(asker: str, model: nn.Module, rank: int) -> None:
    """Freeze a model, and give each linear layer of its blocks an adapter.

    Raises:
        CountError: The blocks have no linear layer.
    """
    model.requires_grad_(requires_grad=False)
    found = 0
    for block in blocks_in(model).values():
        layers = {name: layer for name, layer in block.named_modules() if name and isinstance(layer, nn.Linear)}
        for name, layer in layers.items():
            container, _, attribute = name.rpartition(".")
            setattr(block.get_submodule(container), attribute, Adapted(layer, rank))
        found += len(layers)
    if not found:
        raise CountError(f"{asker}: {type(model).__name__} has no blocks with linear layers to adapt: give the model with its adapters")
