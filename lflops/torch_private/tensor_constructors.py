"""Run constructors of tensor subclasses without dispatch modes, under which they would fail.

The constructor `Subclass(tensor)` calls an operator that returns an alias of the tensor, and then
creates the Python object of the subclass for this alias. Under a dispatch mode, the alias already
has a Python object, because the mode has returned it from Python. Therefore torch raises an error.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lflops.error_guard import CleanupStack, unguarded
from lflops.torch_private.dispatch_modes import without_own_modes
from lflops.torch_private.modules import Compilations, never_compiled

_ABSENT = object()


class _HiddenConstructor:
    """A wrapper that replaces `torch.Tensor.__new__` while lflops counts operators.

    During each call of the original constructor, the modes of lflops are not on the stack.
    """

    def __init__(self, constructor: Callable[..., Any]) -> None:
        def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
            # For a plain tensor, the Python object that the mode returns already has the right
            # class, so torch raises no error.
            if kind is Tensor:
                return constructor(kind, *args, **kwargs)
            with without_own_modes() as modes:
                made = constructor(kind, *args, **kwargs)
            for mode in modes:
                mode.record_constructed(args, made)
            return made

        never_compiled(new, within=False)
        self._constructor = constructor
        self._new = new

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the wrapper, or the original constructor if dynamo reads the attribute.

        Dynamo checks by identity whether a class has the constructor of `torch.Tensor`.
        """
        reader = sys._getframe(1).f_globals.get("__name__", "")
        return self._constructor if reader.startswith("torch._dynamo.") else self._new


class _Installation:
    """Installs a `_HiddenConstructor` on `torch.Tensor` while lflops counts operators.

    If several counts run at the same time, in different threads, they share this wrapper. It is
    removed while torch.compile compiles.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: list[object] = []
        self._before: Any = _ABSENT
        self._hidden: _HiddenConstructor | None = None
        self._compilations = Compilations(self._remove, self._install)

    def add(self, user: object) -> None:
        with self._lock:
            self._users.append(user)
            if len(self._users) == 1:
                self._compilations.listen(unguarded)
                self._install()

    def remove(self, user: object) -> None:
        with self._lock:
            self._users[:] = [each for each in self._users if each is not user]
            if not self._users:
                self._compilations.stop()
                self._remove()

    def _install(self) -> None:
        with self._lock:
            if not self._users or self._hidden is not None:
                return
            self._before = vars(Tensor).get("__new__", _ABSENT)
            self._hidden = _HiddenConstructor(Tensor.__new__)
            Tensor.__new__ = self._hidden  # type: ignore[method-assign,assignment]

    def _remove(self) -> None:
        with self._lock:
            hidden = self._hidden
            self._hidden = None
            # If other code has wrapped the wrapper since, the wrapper stays. It does nothing
            # without a mode.
            if hidden is None or vars(Tensor).get("__new__") is not hidden:
                return
            if self._before is _ABSENT:
                del Tensor.__new__
            else:
                Tensor.__new__ = self._before  # type: ignore[method-assign]


_INSTALLATION = _Installation()


def construct_without_modes(undo: CleanupStack) -> None:
    """Construct tensor subclasses without lflops' dispatch modes, until `undo` is closed."""
    user = object()
    undo.add(_INSTALLATION.remove, user)
    _INSTALLATION.add(user)
