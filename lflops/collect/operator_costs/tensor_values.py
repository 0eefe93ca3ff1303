"""The numbers in a tensor of integers, for formulas that they decide: where packed sequences begin, where groups end.

Only a counted step reads them. On CUDA that waits for the device, and a counted step is never timed.
"""

from typing import Any

from torch import Tensor

from lflops.collect.torch_private.dispatch_modes import open_modes, without_modes
from lflops.collect.torch_private.tensors import FakeTensor, local_part
from lflops.formulas.table import Values

__all__ = ["KNOWS_VALUES", "known", "values_of"]

KNOWS_VALUES = "knows_values_of"
"""The method of a mode that says whether a real tensor has the numbers that it would have in a real step."""


def known(tensor: Tensor) -> Tensor | None:
    """A plain tensor with the same numbers; `None` where they are unknown: on the meta device, and for tensors that are shapes alone."""
    local: Any = local_part(tensor)
    if local.is_meta or isinstance(local, FakeTensor) or local.shape != tensor.shape:
        return None
    if not all(getattr(mode, KNOWS_VALUES)(local) for mode in open_modes() if hasattr(mode, KNOWS_VALUES)):
        return None
    return local  # type: ignore[no-any-return]


def values_of(tensor: Tensor) -> Values | None:
    """The numbers in a tensor of integers; `None` where they are unknown."""
    local = known(tensor)
    if local is None:
        return None
    with without_modes():
        return Values(local.flatten().tolist())
