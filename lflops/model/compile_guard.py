"""What is done so that compiled functions run as without lflops.

Or eagerly, in a pass of lflops' own.
"""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lflops.error_guard import CleanupStack

_REMARK = r"Using `torch\.compile\(module\)` when there are global hooks"


class _Eager:
    """The compiler stance of the process.

    The first user sets it and the last restores it, in any order of ending.
    """

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
    """A context in which compiled functions run eagerly and keep their compiled code.

    It is for a pass that no training depends on.
    """
    return _EAGER


def uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, excluded from compilation.

    Dynamo would compile it together with the module that it is called for.
    """
    # That makes each call of the hook slower. So the hook itself is returned where torch.compile is
    # not loaded.
    if "torch._dynamo" not in sys.modules:
        return hook
    left_alone: Callable[..., None] = torch.compiler.disable(hook)
    return left_alone


class KeptGraphs:
    """Keeps a copy of each graph that torch.compile makes from `start` to `stop`, or to the object's end: a count may never be entered."""

    def start(self) -> None:
        """Begin, if torch.compile is loaded.

        To be called again where it may have been loaded since.
        """
        if "torch._dynamo" in sys.modules:
            from lflops.torch_private.dynamo import keep_graphs

            keep_graphs(self)

    def stop(self) -> None:
        """End. It can be called again."""
        if "torch._dynamo" in sys.modules:
            from lflops.torch_private.dynamo import release_graphs

            release_graphs(self)


def unremark_hooks(undo: CleanupStack) -> None:
    """Suppress torch's warning about global hooks on compiled modules, until `undo` is closed.

    Ours expect to be called for the wrapper.
    """
    before = list(warnings.filters)
    undo.add(_remove_new_filter, before)
    warnings.filterwarnings("ignore", message=_REMARK, category=UserWarning)


def _remove_new_filter(before: list[Any]) -> None:
    """Remove our filter, unless it, or one like it, was there before."""
    for each in list(warnings.filters):
        if (
            each not in before
            and each[1] is not None
            and getattr(each[1], "pattern", None) == _REMARK
        ):
            warnings.filters.remove(each)  # type: ignore[attr-defined]
