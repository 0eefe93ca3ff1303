"""Compiled functions while they are counted or timed: counted they run eagerly, and their compiled code stays what it is."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from lflops.collect.torch_private.modules import compilations

__all__ = ["force_eager", "uncompiled", "unremarked_hooks"]


class _Eager:
    """The stance of the process, set by the first who needs it and put back by the last: they need not end in reverse order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._stance.__exit__(None, None, None)


_EAGER = _Eager()


def force_eager() -> contextlib.AbstractContextManager[None]:
    """Run compiled functions eagerly, and leave their compiled code as it is.

    Also where nothing is compiled yet: what a model compiles when it is first called would else be compiled under our mode.
    """
    return _EAGER


def uncompiled(hook: Callable[..., None], compiled: Collection[str] | None = None) -> Callable[..., None]:
    """The hook, left alone by dynamo: whatever is called on the way into a compiled module would else be compiled as well.

    That makes every call of the hook longer, so it is done only where a module is compiled, or anything has been.

    Args:
        hook: Of modules.
        compiled: Which of them are; `None` where nobody has looked.
    """
    if "torch._dynamo" not in sys.modules or (compiled is not None and not compiled and not compilations()):
        return hook
    left_alone: Callable[..., None] = torch.compiler.disable(hook)
    return left_alone


@contextlib.contextmanager
def unremarked_hooks() -> Iterator[None]:
    """Keep torch from warning of global hooks on compiled modules: they are ours, and know that they are called for the wrapper too."""
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks", category=UserWarning)
    ours = warnings.filters[0]
    try:
        yield
    finally:
        if ours in warnings.filters and ours not in before:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]
