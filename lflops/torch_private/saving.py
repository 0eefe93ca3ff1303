"""Call functions before and after `torch.save`."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lflops.error_guard import CleanupStack, replace_attribute
from lflops.torch_private.known_torch import known_torch


def wrap_saves(undo: CleanupStack, begins: Callable[[], Any], ends: Callable[[Any], Any]) -> None:
    """Call functions before and after each `torch.save`, until `undo` is closed.

    torch has no hook for this. `torch.save` itself is not replaced, because user code may have
    imported it already, and may pickle it. The function with which it opens the file is replaced
    instead: its result is a context manager, which torch closes when the file is written.

    Args:
        undo: Restores the function.
        begins: Called before torch opens the file.
        ends: Called with the result of `begins` after torch has closed the file.
    """
    with known_torch():
        open_writer: Any = torch.serialization._open_zipfile_writer

    def opened(*args: Any, **kwargs: Any) -> ExitStack:
        with ExitStack() as stack:
            stack.callback(ends, begins())
            writer = _Opened(open_writer(*args, **kwargs))
            writer.push(stack.pop_all())
        return writer

    replace_attribute(undo, torch.serialization, "_open_zipfile_writer", opened)


class _Opened(ExitStack):
    """The context manager of torch, followed by the call that reports the end."""

    def __init__(self, writer: Any) -> None:
        super().__init__()
        self._writer = writer

    def __enter__(self) -> Any:
        return self.enter_context(self._writer)
