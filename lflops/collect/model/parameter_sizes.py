"""How large a model's parameters are, as a whole and on this rank, whatever spreads them over ranks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.torch_private.distributed import flat_parts
from lflops.collect.torch_private.tensors import local_part

__all__ = ["Holding", "holdings"]


class Holding(NamedTuple):
    """A parameter of the model.

    Attributes:
        row: That counts it.
        stored_in: What it is, or is a part of.
        whole: Its elements.
        here: Those of them that this rank has.
    """

    row: str
    stored_in: Tensor
    whole: int
    here: int


def holdings(tree: ModuleTree) -> Iterator[Holding]:
    """Every parameter once, but those that have no shape yet."""
    flat = [part for wrapper in tree.wrappers.values() for part in flat_parts(wrapper)]
    for parameter, module, whole, here in flat:
        yield Holding(tree.first_row(module), parameter, whole, here)
    flattened = {id(parameter) for parameter, *_ in flat}
    for parameter, row in tree.parameters():
        if id(parameter) not in flattened and not isinstance(parameter, UninitializedParameter):
            yield Holding(row, parameter, *_sizes(parameter))


def _sizes(parameter: Any) -> tuple[int, int]:
    """DeepSpeed leaves an empty tensor where it has dealt a parameter out, and says on it what it was and where its part is."""
    whole = getattr(parameter, "ds_numel", None)
    if whole is None:
        return parameter.numel(), local_part(parameter).numel()
    part = getattr(parameter, "ds_tensor", None)
    return whole, parameter.numel() if part is None else min(part.numel(), whole)
