"""A call of a model: forward and backward, once or often, and nothing of the model is changed afterwards."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lflops.collect.inputs.arguments import check_arguments, describe
from lflops.collect.inputs.tensors import cut_off, tensors_in
from lflops.collect.model.restore import Gradients, untouched
from lflops.collect.torch_private import autograd
from lflops.collect.torch_private.dispatch_modes import without_modes
from lflops.errors import CountError

__all__ = ["ASIDE", "Divide", "ModelCall"]

ASIDE = "aside"
"""The name of a part of a pass that is lflops' own work, and in no time."""


class Divide(Protocol):
    """A function that a pass calls where its next part begins."""

    def __call__(self, part: str, results: Any = None, /) -> None:
        """Begin a part: its name, and for backward the tensors that it starts from."""


@dataclass(kw_only=True)
class ModelCall:
    """A model with its arguments.

    Attributes:
        asker: The name of the public function, with which errors begin.
        args: The positional arguments, detached from any graph, as `kwargs` are.
        loss: From the output to a scalar. `None` is the sum of the floating outputs, which is not counted as work of the model.
        step: Runs in place of the call, the loss and backward. It is given the model and the arguments.
    """

    asker: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool
    loss: Callable[[Any], Tensor] | None
    _given: tuple[tuple[Any, ...], dict[str, Any]]
    step: Callable[..., object] | None = None
    _gradients: Gradients = field(default_factory=Gradients)

    @classmethod
    def of(cls, asker: str, model: Any, args: Any, kwargs: Any, *, backward: Any, loss: Any) -> "ModelCall":
        """A call with the arguments that a user gave.

        Raises:
            CountError: One of them is wrong.
        """
        args = (args,) if isinstance(args, Tensor) else args
        check_arguments(asker, model, args, kwargs, loss, backward=backward)
        given: tuple[tuple[Any, ...], dict[str, Any]] = tuple(args), dict(kwargs or {})
        args, kwargs = cut_off(given)
        return cls(asker=asker, model=model, args=args, kwargs=kwargs, backward=backward, loss=loss, _given=given)

    def inputs(self) -> Iterator[Tensor]:
        """The tensors in the arguments."""
        return tensors_in((self.args, self.kwargs))

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """At the end, undo what passes did to the model, to gradients and to the random numbers."""
        with untouched(self.model, self.inputs(), self._gradients):
            yield

    def begin_without_gradients(self) -> None:
        """Set the gradients of the model aside now, so that those of a backward inside of forward are no earlier ones."""
        self._gradients.put_aside((*self.model.parameters(), *self.inputs()))

    def prepare(self) -> None:
        """Prepare another pass: drop the gradients of the last one, and copy the arguments anew, in case the model wrote to them."""
        self._gradients.clear()
        self.args, self.kwargs = cut_off(self._given)

    def run(self, divide: Divide = lambda *_: None) -> None:
        """One pass.

        Args:
            divide: Called after forward, before backward with the tensors that it starts from, and after backward.
        """
        with self._grad_mode():
            if self.step is not None:
                self.step(self.model, *self.args, **self.kwargs)
                return
            output = self.model(*self.args, **self.kwargs)
            if self.backward:
                results = self._results(output)
                del output
                divide(ASIDE)
                self._gradients.put_aside(autograd.leaves(results))
                with without_modes():
                    ones = [_ones(each) for each in results]
                divide("backward", results)
                torch.autograd.backward(results, ones)
                divide(ASIDE)  # freeing the graph is no part of backward

    @contextlib.contextmanager
    def _grad_mode(self) -> Iterator[None]:
        """The caller's grad mode for forward alone; enabled for backward."""
        if not self.backward:
            yield
            return
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield

    def _results(self, output: Any) -> list[Tensor]:
        """The tensors that backward starts from."""
        if self.loss is None:
            found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not found:
                raise CountError(
                    f"{self.asker}: backward=True, but no output requires a gradient: give loss=, or unfreeze what is to be trained"
                )
            return found
        value: Any = self.loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise CountError(f"{self.asker}: loss gave {describe(value)}: it has to give a tensor of one element that requires a gradient")
        return [value]


def _ones(tensor: Tensor) -> Tensor:
    """Ones in the tensor's shape; expanded from a single number where torch can do that."""
    # By methods of the tensor, so that those of a fake tensor are fake without its mode.
    return torch.ones_like(tensor) if tensor.is_nested else tensor.detach().new_ones(()).expand_as(tensor)
