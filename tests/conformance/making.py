"""Short ways to write a case: a function or a layer, its inputs, and its MACs."""

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
    """An input that is created again for each model."""

    make: Callable[[], Any]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Made:
    """Return an input: a tensor that requires a gradient."""
    return Made(lambda: torch.randn(*shape, dtype=dtype, requires_grad=True))


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Made:
    """Return an input: a tensor that requires no gradient."""
    return Made(lambda: torch.randn(*shape, dtype=dtype))


def words(batch: int, length: int, vocabulary: int) -> Made:
    """Return an input: token ids. The first three ids are reserved, for example for padding."""
    return Made(lambda: torch.randint(3, vocabulary, (batch, length)))


class Function(nn.Module):
    """A model that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Build:
    """Return a `Build` that calls a function with these arguments."""
    return layer(lambda: Function(function), *args, **kwargs)


def layer(model: Callable[[], nn.Module], *args: Any, **kwargs: Any) -> Build:
    """Return a `Build` that calls a model with these arguments. Each `Made` input is created."""

    def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        made_args = tuple(_made(each) for each in args)
        made_kwargs = {name: _made(value) for name, value in kwargs.items()}
        return model(), made_args, made_kwargs

    return build


def _made(value: Any) -> Any:
    """Create an input, also inside lists and tuples."""
    if isinstance(value, Made):
        return value.make()
    if isinstance(value, list | tuple):
        return type(value)(_made(each) for each in value)
    return value


@dataclass(frozen=True)
class Family:
    """Creates the cases of one family.

    Attributes:
        name: Name of the family.
        setting: The `setting` of its cases.
    """

    name: str
    setting: Setting = nullcontext

    def trained(self, name: str, build: Build, macs: Macs, *, executed: int | None = None) -> Case:
        """Return a case with a backward pass."""
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
        """Return a case without gradients and without a backward pass."""
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
