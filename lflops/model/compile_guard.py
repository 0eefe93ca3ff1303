"""Keep lflops from disturbing torch.compile.

In a training run, compiled functions run unchanged. In a pass that lflops runs itself, they run
eagerly.
"""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lflops.error_guard import CleanupStack

_HOOK_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"


class _Eager:
    """A context that makes all compiled functions of the process run eagerly.

    Several threads may be in the context at the same time. The first thread that enters it sets the
    stance of the compiler, and the last thread that leaves it restores the stance.
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
    """Return a context in which compiled functions run eagerly, without losing their compiled code.

    Use it only for passes that lflops runs itself. In a training run, it would slow down the user's
    steps.
    """
    return _EAGER


def uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Exclude a hook from compilation, and return it.

    Without this, dynamo would compile the hook together with its module. If torch.compile is not
    loaded, the hook is returned unchanged, because an excluded hook is slower to call.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    excluded: Callable[..., None] = torch.compiler.disable(hook)
    return excluded


class KeptGraphs:
    """Keeps a copy of each graph that torch.compile creates between `start` and `stop`.

    The copies are used to count the operators of compiled functions. If `stop` is never called,
    copying stops when this object is freed.
    """

    def start(self) -> None:
        """Start copying, if torch.compile is loaded.

        Call this again if torch.compile may have been loaded since the last call.
        """
        if "torch._dynamo" in sys.modules:
            from lflops.torch_private.dynamo import keep_graphs

            keep_graphs(self)

    def stop(self) -> None:
        """Stop copying. If it has stopped already, do nothing."""
        if "torch._dynamo" in sys.modules:
            from lflops.torch_private.dynamo import release_graphs

            release_graphs(self)


def hide_hook_warning(undo: CleanupStack) -> None:
    """Hide torch's warning about global hooks on compiled modules, until `undo` is closed.

    torch warns that such hooks run an extra time, for the wrapper of the compiled module. The hooks
    of lflops handle this extra call, so the warning would only confuse users.
    """
    before = list(warnings.filters)
    undo.add(_remove_new_filter, before)
    warnings.filterwarnings("ignore", message=_HOOK_WARNING, category=UserWarning)


def _remove_new_filter(before: list[Any]) -> None:
    """Remove the warning filter that `hide_hook_warning` added.

    `before` contains the filters from before it was added. If one of them is identical, the user
    added it, so it stays.
    """
    for entry in list(warnings.filters):
        is_ours = getattr(entry[1], "pattern", None) == _HOOK_WARNING
        if is_ours and entry not in before:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
