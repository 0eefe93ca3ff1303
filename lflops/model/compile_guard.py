"""Let compiled functions run unchanged in a training run, or eagerly in a pass that lflops runs."""

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
    """Sets the compiler stance of the process to eager.

    The first context that begins sets the stance, and the last context that ends restores it. The
    contexts may end in any order.
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
    """Return a context in which compiled functions run eagerly and keep their compiled code.

    Only for passes that are not part of a training run.
    """
    return _EAGER


def uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Exclude a hook from compilation; otherwise, dynamo would compile it together with its module.

    This makes each call of the hook slower, so the hook is returned unchanged if torch.compile is
    not loaded.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    left_alone: Callable[..., None] = torch.compiler.disable(hook)
    return left_alone


class KeptGraphs:
    """Keeps a copy of each graph that torch.compile creates between `start` and `stop`.

    Copying also stops when this object is freed, because `stop` may never be called.
    """

    def start(self) -> None:
        """Start copying, if torch.compile is loaded.

        Call this again if torch.compile may have been loaded since the last call.
        """
        if "torch._dynamo" in sys.modules:
            from lflops.torch_private.dynamo import keep_graphs

            keep_graphs(self)

    def stop(self) -> None:
        """Stop copying.

        A second call does nothing.
        """
        if "torch._dynamo" in sys.modules:
            from lflops.torch_private.dynamo import release_graphs

            release_graphs(self)


def unremark_hooks(undo: CleanupStack) -> None:
    """Suppress torch's warning about global hooks on compiled modules, until `undo` is closed.

    lflops' hooks expect to be called for the wrapper.
    """
    before = list(warnings.filters)
    undo.add(_remove_new_filter, before)
    warnings.filterwarnings("ignore", message=_REMARK, category=UserWarning)


def _remove_new_filter(before: list[Any]) -> None:
    """Remove the filter that `unremark_hooks` added, unless an equal filter was there before."""
    for entry in list(warnings.filters):
        is_ours = getattr(entry[1], "pattern", None) == _REMARK
        if is_ours and entry not in before:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
