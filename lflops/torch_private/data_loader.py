"""The data loader: when a batch is fetched, and by which of its iterators."""

import functools
from collections.abc import Callable
from typing import Any

from lflops.error_guard import CleanupStack, replace_attribute
from lflops.torch_private.known_torch import known_torch

with known_torch():
    from torch.utils.data.dataloader import _BaseDataLoaderIter


def hear_fetches(
    undo: CleanupStack, begins: Callable[[Any], Any], ends: Callable[[Any, Any, Any], Any]
) -> None:
    """Call one function with the iterator of any `DataLoader` before it fetches, and one after it.

    The second gets what the first returned, the iterator, and the batch or what was raised.

    torch has no hook for that. So the method of their iterators is replaced, until `undo` is
    closed. One that somebody else has put in its place since stays, and goes on to call the
    functions.
    """
    fetch = _BaseDataLoaderIter.__next__

    @functools.wraps(fetch)
    def fetched(iterator: Any) -> Any:
        begun = begins(iterator)
        try:
            batch = fetch(iterator)
        except BaseException as error:
            ends(begun, iterator, error)
            raise
        ends(begun, iterator, batch)
        return batch

    replace_attribute(undo, _BaseDataLoaderIter, "__next__", fetched)


def sampler_of(iterator: Any) -> Any:
    """The sampler that an iterator of a `DataLoader` draws from, or `None`."""
    return getattr(iterator, "_index_sampler", None)
