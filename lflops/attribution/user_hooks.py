"""Find the hooks that the user's code has registered on a model.

The time of these hooks counts as the time of a module: a forward hook as that of the module around
it, and a hook on a parameter as the backward of its module.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from lflops.torch_private.modules import forward_hooks, gradient_hooks

FRAMEWORKS = {
    "accelerate",
    "deepspeed",
    "lflops",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torch",
    "transformers",
}
"""Packages whose hooks are not the user's."""


def with_forward_hooks(model: nn.Module) -> list[str]:
    """Return the names of the modules on which the user has registered forward hooks."""
    names = []
    for name, module in model.named_modules():
        if _has_users(forward_hooks(module)):
            names.append(name)
    return names


def with_gradient_hooks(model: nn.Module) -> list[str]:
    """Return the names of the modules on whose own parameters the user has registered hooks."""
    names = []
    for name, module in model.named_modules():
        if any(_has_users(gradient_hooks(each)) for each in module.parameters(recurse=False)):
            names.append(name)
    return names


def _has_users(hooks: Iterable[Callable[..., Any]]) -> bool:
    return any(not _is_of_framework(hook) for hook in hooks)


def _is_of_framework(hook: Callable[..., Any]) -> bool:
    while type(hook) is partial:
        hook = hook.func
    for owner in (hook, type(hook)):
        module = getattr(owner, "__module__", None) or ""
        if module.partition(".")[0] in FRAMEWORKS:
            return True
    return False
