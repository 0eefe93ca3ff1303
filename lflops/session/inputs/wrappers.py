"""Methods of a user's object that are wrapped for a run, where nothing from beneath tells when they are called.

A wrapper looks like the method to a program that asks for attributes, equality, hash, class or signature, or that copies or pickles it.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from lflops.boundary import Undo

_ABSENT = object()


class _Wrapper:
    """Stands in the place of a method, as an attribute of the instance. `around` is called with the method and its arguments."""

    __slots__ = ("_lflops_around", "_lflops_before", "_lflops_bound", "_lflops_ended", "_lflops_found", "_lflops_name", "_lflops_owner")

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._lflops_owner = owner
        self._lflops_name = name
        self._lflops_around = around
        self._lflops_before = vars(owner).get(name, _ABSENT)
        self._lflops_found = self._lflops_bound = _ABSENT
        self._lflops_ended = False

    @property
    def __wrapped__(self) -> Any:
        """The method: what was set on the instance before, else what its class has now, which somebody may have replaced since."""
        if self._lflops_before is not _ABSENT:
            return self._lflops_before
        owner, kind = self._lflops_owner, type(self._lflops_owner)
        found = getattr(kind, self._lflops_name)
        if found is not self._lflops_found:
            static = inspect.getattr_static(kind, self._lflops_name)
            self._lflops_bound = static.__get__(owner, kind) if hasattr(static, "__get__") else static
            self._lflops_found = found
        return self._lflops_bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._lflops_around(self.__wrapped__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == (other.__wrapped__ if type(other) is _Wrapper else other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self.__wrapped__,)


def wrap(undo: Undo, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Wrap a method of one object, until `undo` is closed. Nothing but an attribute of this instance is set: no class, no module.

    `around` is called with the method and what the caller gives. A wrapper that somebody else has wrapped since stays below theirs, and
    goes on to call the method.
    """
    wrapper = _Wrapper(owner, name, around)
    undo.add(_unwrap, owner, name, wrapper)
    setattr(owner, name, wrapper)


def _unwrap(owner: Any, name: str, wrapper: _Wrapper) -> None:
    """Take a wrapper off, and those below it that have ended before: monitors need not end in reverse order."""
    wrapper._lflops_ended = True  # noqa: SLF001 - the two are one
    while type(above := vars(owner).get(name)) is _Wrapper and above._lflops_ended:  # noqa: SLF001
        if above._lflops_before is _ABSENT:  # noqa: SLF001
            delattr(owner, name)
        else:
            setattr(owner, name, above._lflops_before)  # noqa: SLF001
