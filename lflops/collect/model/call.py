"""A call of a model: forward and backward, once or often, and nothing of the model is changed afterwards."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lflops.collect.inputs.arguments import check_arguments, describe
from lflops.collect.inputs.tensors import cut_off, tensors_in
from lflops.collect.model.restore import Gradients, untouched
from lflops.collect.torch_private import autograd
from lflops.collect.torch_private.dispatch_modes import without_modes
from lflops.errors import CountError

ASIDE = "aside"  # the name of a part of a pass that is lflops' own work, and in no time


Divide = Callable[..., None]
"""What a pass calls where its next part begins, with the name of that, and for backward with the tensors that it starts from."""


@dataclass(kw_only=True)
class ModelCall:
    """A model with its arguments."""

    caller: str  # the name of the public function, with which errors begin
    model: nn.Module
    args: tuple[Any, ...]  # the positional arguments, detached from any graph, as `kwargs` are
    kwargs: dict[str, Any]
    backward: bool
    # From the output to a scalar. `None` is the sum of the floating outputs, which is not counted as work of the model.
    loss: Callable[[Any], Tensor] | None
    _given: tuple[tuple[Any, ...], dict[str, Any]]
    step: Callable[..., object] | None = None  # runs in place of the call, the loss and backward. It is given the model and the arguments
    _gradients: Gradients = field(default_factory=Gradients)

    @classmethod
    def of(cls, caller: str, model: Any, args: Any, kwargs: Any, *, backward: Any, loss: Any) -> "ModelCall":
        """A call with the arguments that a user gave."""
        args = (args,) if isinstance(args, Tensor) else args
        check_arguments(caller, model, args, kwargs, loss, backward=backward)
        given: tuple[tuple[Any, ...], dict[str, Any]] = tuple(args), dict(kwargs or {})
        args, kwargs = cut_off(given)
        return cls(caller=caller, model=model, args=args, kwargs=kwargs, backward=backward, loss=loss, _given=given)

    def inputs(self) -> Iterator[Tensor]:
        """The tensors in the arguments."""
        return tensors_in((self.args, self.kwargs))

    def untouched(self) -> contextlib.AbstractContextManager[None]:
        """At the end, undo what passes did to the model, to gradients and to the random numbers."""
        return untouched(self.model, self.inputs(), self._gradients)

    def begin_without_gradients(self) -> None:
        """Set the gradients of the model aside now, so that those of a backward inside of forward are no earlier ones."""
        self._gradients.put_aside((*self.model.parameters(), *self.inputs()))

    def prepare(self) -> None:
        """Prepare another pass: drop the gradients of the last one, and copy the arguments anew, in case the model wrote to them."""
        self._gradients.clear()
        self.args, self.kwargs = cut_off(self._given)

    def run(self, divide: Divide = lambda *_: None) -> None:
        """One pass. `divide` is called after forward, before backward and after backward."""
        with contextlib.ExitStack() as modes:
            if self.backward:  # forward alone has the caller's grad mode
                modes.enter_context(torch.inference_mode(mode=False))
                modes.enter_context(torch.enable_grad())
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
                    # Expanded from one number where torch can do that. The methods of a fake tensor are fake without its mode.
                    ones = [torch.ones_like(each) if each.is_nested else each.detach().new_ones(()).expand_as(each) for each in results]
                divide("backward", results)
                torch.autograd.backward(results, ones)
                divide(ASIDE)  # freeing the graph is no part of backward

    def _results(self, output: Any) -> list[Tensor]:
        if self.loss is None:
            found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not found:
                raise CountError(
                    f"{self.caller}: backward=True, but no output requires a gradient: give loss=, or unfreeze what is to be trained"
                )
            return found
        value: Any = self.loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise CountError(f"{self.caller}: loss gave {describe(value)}: it has to give a tensor of one element that requires a gradient")
        return [value]
