"""What a collective carries, and on which group."""

from typing import Any

import torch
from torch import distributed

from lflops.collect.counting.traffic import size, tensors_of
from lflops.collect.torch_private.distributed import group_named

__all__ = ["Collective", "collective_of"]

Collective = tuple[str, str, int | None, int]
"""Name, group, the group's size, bytes."""


def collective_of(name: str, args: Any, kwargs: Any, out: Any) -> Collective:
    """The larger of what this rank gives and gets, and the group as torch names it."""
    # What is gotten may be written into an argument, so each is taken for itself.
    carried = max(sum(map(size, tensors_of((each,)))) for each in (*args, *kwargs.values(), out))
    group = next((found for found in map(_group, (*args, *kwargs.values())) if found is not None), None)
    return name.rpartition("::")[2], "" if group is None else group.group_name, None if group is None else group.size(), carried


def _group(value: Any) -> Any:
    """The process group, where the argument is one or names one."""
    if isinstance(value, str):
        return group_named(value)
    if isinstance(value, torch.ScriptObject) and distributed.is_available():
        try:
            return distributed.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return None
