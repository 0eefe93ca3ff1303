"""Parts of a step that are no modules, named by the user, and who is to be told of them."""

import contextlib
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

import torch

__all__ = ["LISTENERS", "ScopeListener", "listening", "scope"]


class ScopeListener(Protocol):
    """What is told of named parts of a step that are no modules."""

    home: int

    def counts_here(self) -> bool:
        """Whether it follows this thread."""

    def place(self) -> tuple[str, str]:
        """The row that is running, and the nearest row at or above it that is a module."""

    def enter(self, key: int, row: str, module_row: str, caller: FrameType | None) -> None:
        """The part begins."""

    def leave(self, key: int) -> object:
        """The part ends."""


LISTENERS: list[ScopeListener] = []
"""Those of all threads."""


@contextlib.contextmanager
def listening(follower: ScopeListener) -> Iterator[None]:
    """Tell the follower of every `scope` that is entered."""
    LISTENERS.append(follower)
    try:
        yield
    finally:
        LISTENERS.remove(follower)


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Name a part of a step that is no module: it becomes a row under the module that is running.

    Under `torch.compiler.is_compiling()`, and where nothing is being profiled, it does nothing.

    Raises:
        ValueError: The name is empty or has a dot in it.
    """
    if not isinstance(name, str) or not name or "." in name:  # type: ignore[redundant-expr,unused-ignore]
        raise ValueError(f"scope: name={name!r} cannot be: give a name without dots")
    if torch.compiler.is_compiling():
        yield
        return
    entered = [each for each in LISTENERS if each.counts_here()]
    key = id(entered)
    for each in entered:
        row, module_row = each.place()
        each.enter(key, f"{row}.{name}" if row else name, module_row, None)
    try:
        yield
    finally:
        for each in entered:
            each.leave(key)
