"""Call functions before and after each fetch of a batch from a data loader."""

import functools
from collections.abc import Callable
from typing import Any

from lflops.error_guard import CleanupStack, replace_attribute
from lflops.torch_private.known_torch import known_torch

with known_torch():
    from torch.utils.data.dataloader import _BaseDataLoaderIter


def wrap_fetches(
    undo: CleanupStack, begins: Callable[[Any], Any], ends: Callable[[Any, Any, Any], Any]
) -> None:
    """Call functions before and after each fetch of a batch by any `DataLoader`.

    Torch has no hook for this, so `__next__` of the iterators is replaced until `undo` is closed.
    If other code also replaces `__next__` before that, the method cannot be restored, and later
    fetches still call the functions.

    Args:
        undo: Restores the method.
        begins: Called with the iterator.
        ends: Called with the result of `begins`, the iterator, and the batch or the error.
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
    """Return the sampler that an iterator of a `DataLoader` draws from, or `None`."""
    return getattr(iterator, "_index_sampler", None)
