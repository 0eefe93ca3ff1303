"""The data loader: when a batch is fetched, and by which of its iterators."""

from collections.abc import Callable
from typing import Any

from lflops.boundary import Undo, hear_calls
from lflops.collect.torch_private.known_torch import known_torch

with known_torch():
    from torch.utils.data.dataloader import _BaseDataLoaderIter


def hear_fetches(undo: Undo, begins: Callable[[Any], Any], ends: Callable[[Any, Any, Any], Any]) -> None:
    """Hear when the iterator of any `DataLoader` fetches a batch: torch has no hook for that. `hear_calls` says what is called."""
    hear_calls(undo, _BaseDataLoaderIter, "__next__", begins, ends)
