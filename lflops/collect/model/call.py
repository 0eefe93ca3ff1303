"""A model with its arguments, to be run once or often, forward and backward, and left as it was."""

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
"""What is run between two parts, or behind the last, for our own sake: it is in no time."""


class Divide(Protocol):
    """Called in a pass where its next part begins."""

    def __call__(self, part: str, results: Any = None, /) -> None:
        """The part's name; of backward also what is gone backward from."""


@dataclass(kw_only=True)
class ModelCall:
    """What is run.

    Attributes:
        asker: The public function that it is run for, which errors begin with.
        args: Cut off from their history, as `kwargs` are.
        loss: Output to a scalar; `None` is the sum of the floating outputs, which itself is no work of the model's.
    """

    asker: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool
    loss: Callable[[Any], Tensor] | None
    _given: tuple[tuple[Any, ...], dict[str, Any]]
    _gradients: Gradients = field(default_factory=Gradients)

    @classmethod
    def of(cls, asker: str, model: Any, args: Any, kwargs: Any, *, backward: Any, loss: Any) -> "ModelCall":
        """From what somebody gave.

        Raises:
            CountError: Some of it is wrong.
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
        """Undo at the end whatever passes do to the model, to gradients and to the random numbers."""
        with untouched(self.model, self.inputs(), self._gradients):
            yield

    def prepare(self) -> None:
        """Get ready for another pass: without the gradients of the last one, and without what its model wrote to a copy of an argument."""
        self._gradients.clear()
        self.args, self.kwargs = cut_off(self._given)

    def run(self, divide: Divide = lambda *_: None) -> None:
        """One pass.

        Args:
            divide: Called behind forward, with what is gone backward from before backward, and behind it.
        """
        with self._grad_mode():
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
                divide(ASIDE)  # to free the graph is no part of going back through it

    @contextlib.contextmanager
    def _grad_mode(self) -> Iterator[None]:
        """The caller's, unless there has to be a graph."""
        if not self.backward:
            yield
            return
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield

    def _results(self, output: Any) -> list[Tensor]:
        """The tensors to go backward from."""
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
    """Like the tensor, and but one number in memory where torch can do that."""
    # By methods of the tensor: of a fake one they are fake too, without its mode.
    return torch.ones_like(tensor) if tensor.is_nested else tensor.detach().new_ones(()).expand_as(tensor)
