"""A call of a model: forward and backward, once or often.

Afterwards gradients, buffers, mode and random numbers are what they were.
"""

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lflops.errors import CountError
from lflops.inputs.arguments import check_arguments, describe
from lflops.inputs.devices import random_state, set_random_state
from lflops.inputs.tensors import changed, cut_off, tensors_in
from lflops.torch_private import autograd
from lflops.torch_private.dispatch_modes import without_modes
from lflops.torch_private.modules import buffers_of


class Gradients:
    """The user's gradients, set aside while passes make their own."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Tensor, Tensor | None]] = {}

    def put_aside(self, leaves: Iterable[Tensor]) -> None:
        """Save each leaf's gradient, and set it to `None`."""
        for leaf in leaves:
            if leaf.requires_grad and leaf.is_leaf and id(leaf) not in self._saved:
                self._saved[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None

    def clear(self) -> None:
        """Remove the gradients that a pass has made, before the next pass."""
        for leaf, _ in self._saved.values():
            leaf.grad = None

    def put_back(self) -> None:
        for leaf, gradient in self._saved.values():
            leaf.grad = gradient
        self._saved.clear()


@contextlib.contextmanager
def untouched(model: nn.Module, inputs: Iterable[Tensor], gradients: Gradients) -> Iterator[None]:
    """At the end, undo what passes did to the model, to gradients, also of the leaves added to `gradients`, and to random numbers."""
    with contextlib.ExitStack() as undo:
        inputs = list(inputs)
        with torch.no_grad():
            contents = [
                (buffer, buffer.detach().clone())
                for buffer in model.buffers()
                if not is_lazy(buffer)
            ]
        undo.enter_context(same_random_numbers((*model.parameters(), *model.buffers(), *inputs)))
        # A frozen script has no training mode.
        undo.callback(
            _restore_modes,
            [
                (module, module.training)
                for module in model.modules()
                if hasattr(module, "training")
            ],
        )
        undo.callback(_restore_contents, contents)
        undo.callback(
            _restore_buffers, [(module, dict(buffers_of(module))) for module in model.modules()]
        )
        undo.callback(gradients.put_back)
        gradients.put_aside((*model.parameters(), *inputs))
        yield


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training


def _restore_buffers(registered: list[tuple[nn.Module, dict[str, Tensor | None]]]) -> None:
    for module, before in registered:
        buffers = buffers_of(module)
        # of a scripted module it is no dict: its `keys()` is a list
        now = dict(buffers.items())
        if now.keys() != before.keys() or any(
            now[name] is not buffer for name, buffer in before.items()
        ):
            buffers.clear()
            buffers.update(before)


def _restore_contents(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, copy in buffers:
            if not _same(buffer, copy):
                with torch.inference_mode(mode=buffer.is_inference()):
                    # By `data`, which autograd does not see: a graph that saved the buffer can
                    # still go backward.
                    buffer.data.copy_(copy)


def _same(buffer: Tensor, copy: Tensor) -> bool:
    try:
        return buffer.device.type == "meta" or (
            buffer.shape == copy.shape and bool(torch.equal(buffer, copy))
        )
    except RuntimeError:
        # sparse, or of a dtype without comparison
        return False


@dataclass
class _States:
    python: Any
    numpy: Any
    cpu: Tensor
    devices: dict[torch.device, Tensor]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> Self:
        numpy: Any = sys.modules.get("numpy")
        of_devices = {device: random_state(device) for device in devices}
        return cls(
            random.getstate(),
            numpy.random.get_state() if numpy else None,
            torch.get_rng_state(),
            of_devices,
        )

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            numpy: Any = sys.modules["numpy"]
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            set_random_state(device, state)


class _Pass:
    def __init__(self, states: _States) -> None:
        self.states = states


_lock = threading.Lock()
_running: list[_Pass] = []


@contextlib.contextmanager
def same_random_numbers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore all generators at the end, also those of the tensors' devices."""
    # All threads of a process share them. If the first of two passes in two threads ends first, the
    # second one restores what was there before both.
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    with _lock:
        mine = _Pass(_States.now(devices))
        _running.append(mine)
    try:
        yield
    finally:
        with _lock:
            later = _running[_running.index(mine) + 1 :]
            _running.remove(mine)
            if later:
                later[0].states = mine.states
            else:
                mine.states.restore()


# the name of a part of a pass that is lflops' own work, and in no time
ASIDE = "aside"

Divide = Callable[..., None]
"""What a pass calls where its next part begins, with the name of that, and for backward with the tensors that it starts from."""


@dataclass(kw_only=True)
class ModelCall:
    """A model with its arguments."""

    # the name of the public function, with which errors begin
    caller: str
    model: nn.Module
    # the positional arguments, detached from any graph, as `kwargs` are
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool
    # From the output to a scalar. `None` is the sum of the floating outputs, which is not counted
    # as work of the model.
    loss: Callable[[Any], Tensor] | None
    _given: tuple[tuple[Any, ...], dict[str, Any]]
    step: Callable[..., object] | None = (
        # runs in place of the call, the loss and backward. It is given the model and the arguments
        None
    )
    _gradients: Gradients = field(default_factory=Gradients)

    @classmethod
    def of(
        cls, caller: str, model: Any, args: Any, kwargs: Any, *, backward: Any, loss: Any
    ) -> "ModelCall":
        args = (args,) if isinstance(args, Tensor) else args
        check_arguments(caller, model, args, kwargs, loss, backward=backward)
        given: tuple[tuple[Any, ...], dict[str, Any]] = tuple(args), dict(kwargs or {})
        args, kwargs = changed(given, Tensor, cut_off)
        return cls(
            caller=caller,
            model=model,
            args=args,
            kwargs=kwargs,
            backward=backward,
            loss=loss,
            _given=given,
        )

    def inputs(self) -> Iterable[Tensor]:
        return tensors_in((self.args, self.kwargs))

    def untouched(self) -> contextlib.AbstractContextManager[None]:
        """At the end, undo what passes did to the model, to gradients and to the random numbers."""
        return untouched(self.model, self.inputs(), self._gradients)

    def begin_without_gradients(self) -> None:
        """Set the gradients of the model aside now, so that those of a backward inside of forward are no earlier ones."""
        self._gradients.put_aside((*self.model.parameters(), *self.inputs()))

    def prepare(self) -> None:
        """Prepare another pass.

        Drop the gradients of the last one, and copy the arguments anew, in case the model wrote to
        them.
        """
        self._gradients.clear()
        self.args, self.kwargs = changed(self._given, Tensor, cut_off)

    def run(self, divide: Divide = lambda *_: None) -> None:
        """One pass. `divide` is called after forward, before backward and after backward."""
        with contextlib.ExitStack() as modes:
            # forward alone has the caller's grad mode
            if self.backward:
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
                    # Expanded from one number where torch can do that. The methods of a fake tensor
                    # are fake without its mode.
                    ones = [
                        torch.ones_like(each)
                        if each.is_nested
                        else each.detach().new_ones(()).expand_as(each)
                        for each in results
                    ]
                divide("backward", results)
                torch.autograd.backward(results, ones)
                # freeing the graph is no part of backward
                divide(ASIDE)

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
            raise CountError(
                f"{self.caller}: loss gave {describe(value)}: it has to give a tensor of one element that requires a gradient"
            )
        return [value]
