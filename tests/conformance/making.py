"""Short ways to write a case: a function or a layer, its inputs, and what the pencil says."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.conformance.case import Build, Case, Setting
from tests.conformance.pencil import Macs

__all__ = ["Family", "Function", "Made", "data", "layer", "leaf", "of", "words"]


@dataclass(frozen=True)
class Made:
    """An input that is made anew for each model."""

    make: Callable[[], Any]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Made:
    """A tensor that wants its gradient."""
    return Made(lambda: torch.randn(*shape, dtype=dtype, requires_grad=True))


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Made:
    """A tensor that wants none."""
    return Made(lambda: torch.randn(*shape, dtype=dtype))


def words(batch: int, length: int, vocabulary: int) -> Made:
    """Indices of words; the first three are left for padding and the like."""
    return Made(lambda: torch.randint(3, vocabulary, (batch, length)))


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Build:
    """A function of inputs."""
    return layer(lambda: Function(function), *args, **kwargs)


def layer(model: Callable[[], nn.Module], *args: Any, **kwargs: Any) -> Build:
    """A model on inputs."""
    return lambda: (
        model(),
        tuple(_made(each) for each in args),
        {name: _made(value) for name, value in kwargs.items()},
    )


def _made(value: Any) -> Any:
    if isinstance(value, Made):
        return value.make()
    if isinstance(value, list | tuple):
        return type(value)(_made(each) for each in value)
    return value


@dataclass(frozen=True)
class Family:
    """Makes the cases of one kind.

    Attributes:
        name: Of the kind.
        setting: What its cases are built and counted in.
    """

    name: str
    setting: Setting = nullcontext

    def trained(self, name: str, build: Build, macs: Macs, *, executed: int | None = None) -> Case:
        """A case that goes backward."""
        return Case(
            name=name,
            family=self.name,
            build=build,
            forward=macs.forward,
            backward=macs.backward,
            recompute=macs.recompute,
            executed=executed,
            setting=self.setting,
        )

    def inference(
        self, name: str, build: Build, macs: Macs, *, executed: int | None = None
    ) -> Case:
        """A case without gradients."""
        return Case(
            name=name,
            family=self.name,
            build=build,
            forward=macs.forward,
            backward=None,
            grad=False,
            executed=executed,
            setting=self.setting,
        )
