"""Attributes that are set on a user's object for a while, to hear when a method of it is called."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

__all__ = ["Wrappers"]

_ABSENT = object()


class _Wrapper(partial[Any]):
    """What is set on an owner. Copying and pickling give what was there before, which for a method is that of the owner's copy."""

    before: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.before, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self.before,)


class _Replaced(NamedTuple):
    """An attribute that was set, and what was there before it."""

    owner: Any
    name: str
    wrapper: Any
    before: Any


class Wrappers:
    """The wrappers of one listener. Nothing but attributes of these instances is set: no class, no module."""

    def __init__(self) -> None:
        """There are none."""
        self._replaced: list[_Replaced] = []

    def install(self, owner: Any, name: str, function: Callable[..., Any], *given: Any) -> None:
        """Set a function in the place of a method, with what it is to be given before the method's own arguments."""
        wrapper = _Wrapper(function, *given)
        wrapper.before = getattr(owner, name)
        self._replaced.append(_Replaced(owner, name, wrapper, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, wrapper)

    def uninstall(self) -> None:
        """Put back what was there; a wrapper that somebody else has wrapped since stays below theirs, and goes on to call the method."""
        for owner, name, wrapper, before in reversed(self._replaced):
            if vars(owner).get(name) is wrapper:
                if before is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
        self._replaced.clear()
