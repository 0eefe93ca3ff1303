"""Test which hooks on a model are found to be the user's."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lflops.attribution.hooks import hook_models
from lflops.attribution.user_hooks import (
    with_gradient_hooks,
    with_hooks_after_forward,
    with_hooks_before_forward,
)
from lflops.error_guard import CleanupStack
from lflops.model.module_tree import ModuleTree


def modules_of(model: nn.Module) -> Mapping[str, nn.Module]:
    """Return the modules of a model, by name."""
    return ModuleTree({"": model}).modules


def on_call(*_: Any) -> None:
    """Do nothing, as a hook of the user."""


class Watcher:
    def __call__(self, *_: Any) -> None:
        """Do nothing, as a hook of the user that is an object."""

    def method(self, *_: Any) -> None:
        """Do nothing, as a hook of the user that is a method."""


def test_forward_hooks_of_the_user_are_found() -> None:
    """They may be functions, methods, objects, or functions with some of their arguments."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)])
    model[1].register_forward_hook(on_call)
    model[2].register_forward_pre_hook(Watcher().method)
    model[3].register_forward_hook(Watcher())
    model[4].register_forward_hook(partial(on_call, 1))
    assert ["1", "3", "4"] == with_hooks_after_forward(modules_of(model))
    assert ["2"] == with_hooks_before_forward(modules_of(model))
    model.register_forward_hook(on_call)
    assert "" == with_hooks_after_forward(modules_of(model))[0]


def test_hooks_of_frameworks_are_not_the_users() -> None:
    """The hooks of lflops and of torch's spectral normalization are left out."""

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.spectral_norm(nn.Linear(2, 2))

    model = Module()
    with CleanupStack() as undo:
        hook_models(undo, [model, model.layer], lambda *_: None)
        assert model.layer._forward_pre_hooks
        assert model._forward_pre_hooks
        assert [] == with_hooks_before_forward(modules_of(model))
        assert [] == with_hooks_after_forward(modules_of(model))


def test_the_names_are_those_of_the_profile() -> None:
    """A layer in a checkpoint wrapper has the name that it has without the wrapper."""
    inner = nn.Linear(2, 2)
    inner.weight.register_hook(on_call)
    model = nn.Sequential(checkpoint_wrapper(inner))
    assert ["0"] == with_gradient_hooks(modules_of(model))


def test_hooks_on_parameters_are_found() -> None:
    """There are two kinds of them. A hook on an activation is not on a parameter."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    model[0].weight.register_hook(on_call)
    model[2].bias.register_post_accumulate_grad_hook(on_call)
    result = model(torch.ones(1, 2))
    result.register_hook(on_call)
    assert ["0", "2"] == with_gradient_hooks(modules_of(model))
