"""Parts of a step that are no modules, named by the user: `lflops.scope`."""

import contextlib
from collections.abc import Iterator

import torch

from lflops.collect.attribution.hooks import LISTENERS

__all__ = ["scope"]


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
    listeners = [each for each in LISTENERS if each.follows_this_thread()]
    key = id(listeners)
    for each in listeners:
        each.enter_scope(key, name)
    try:
        yield
    finally:
        for each in listeners:
            each.leave_scope(key)
