"""Find the hooks that the user's code has registered on a model.

The time of these hooks counts as the time of a module: a hook before the forward of a module counts
in this module, a hook after it counts in the module that calls it, and a hook on a parameter counts
in backward of its module.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from lflops.torch_private.modules import gradient_hooks, hooks_after_forward, hooks_before_forward

LIBRARY_FOLDERS = ("site-packages", "dist-packages")
"""Folders of installed packages. Their hooks are not the user's, and packages may need them."""


def with_hooks_before_forward(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules on which the user has registered forward pre-hooks."""
    return [
        name for name, module in modules.items() if _is_any_of_user(hooks_before_forward(module))
    ]


def with_hooks_after_forward(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules on which the user has registered forward hooks."""
    return [
        name for name, module in modules.items() if _is_any_of_user(hooks_after_forward(module))
    ]


def with_gradient_hooks(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules on whose own parameters the user has registered hooks."""
    names = []
    for name, module in modules.items():
        if any(_is_any_of_user(gradient_hooks(each)) for each in module.parameters(recurse=False)):
            names.append(name)
    return names


def _is_any_of_user(hooks: Iterable[Callable[..., Any]]) -> bool:
    return any(not _is_of_library(hook) for hook in hooks)


def _is_of_library(hook: Callable[..., Any]) -> bool:
    while type(hook) is partial:
        hook = hook.func
    for owner in (hook, type(hook)):
        name = getattr(owner, "__module__", None) or ""
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if name.partition(".")[0] == "lflops" or any(each in file for each in LIBRARY_FOLDERS):
            return True
    return False
