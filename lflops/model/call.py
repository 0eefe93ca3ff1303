"""Run a model forward and backward, once or repeatedly, without lasting effects.

Each such run is called a pass. Afterwards, gradients, buffers, training mode and random number
states are restored.
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
    """Keeps the user's gradients while lflops runs passes, which compute other gradients."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Tensor, Tensor | None]] = {}

    def save_and_clear(self, leaves: Iterable[Tensor]) -> None:
        """Store the gradient of each leaf tensor, and set it to `None`."""
        for leaf in leaves:
            if leaf.requires_grad and leaf.is_leaf and id(leaf) not in self._saved:
                self._saved[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None

    def clear(self) -> None:
        """Set the gradients that the last pass computed to `None`."""
        for leaf, _ in self._saved.values():
            leaf.grad = None

    def put_back(self) -> None:
        """Restore the user's gradients."""
        for leaf, gradient in self._saved.values():
            leaf.grad = gradient
        self._saved.clear()


@contextlib.contextmanager
def untouched(model: nn.Module, inputs: Iterable[Tensor], gradients: Gradients) -> Iterator[None]:
    """Restore the model, gradients and random number states at the end of the context.

    Gradients are restored for the parameters, for the inputs, and for other leaf tensors that were
    put aside in `gradients` while the context was open.
    """
    inputs = list(inputs)
    contents = []
    with torch.no_grad():
        for buffer in model.buffers():
            if not is_lazy(buffer):
                contents.append((buffer, buffer.detach().clone()))
    modes = []
    registered = []
    for module in model.modules():
        # A frozen script has no training mode.
        if hasattr(module, "training"):
            modes.append((module, module.training))
        registered.append((module, dict(buffers_of(module))))
    with contextlib.ExitStack() as undo:
        undo.enter_context(same_random_numbers((*model.parameters(), *model.buffers(), *inputs)))
        undo.callback(_restore_modes, modes)
        undo.callback(_restore_contents, contents)
        undo.callback(_restore_buffers, registered)
        undo.callback(gradients.put_back)
        gradients.save_and_clear((*model.parameters(), *inputs))
        yield


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training


def _restore_buffers(registered: list[tuple[nn.Module, dict[str, Tensor | None]]]) -> None:
    for module, before in registered:
        buffers = buffers_of(module)
        # The registry of a scripted module is not a dict: its `keys()` returns a list.
        now = dict(buffers.items())
        are_same = now.keys() == before.keys()
        if are_same and all(now[name] is buffer for name, buffer in before.items()):
            continue
        buffers.clear()
        buffers.update(before)


def _restore_contents(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, copy in buffers:
            if not _same(buffer, copy):
                with torch.inference_mode(mode=buffer.is_inference()):
                    # Autograd does not record a write to `data`, so a graph that saved the buffer
                    # can still run backward.
                    buffer.data.copy_(copy)


def _same(buffer: Tensor, copy: Tensor) -> bool:
    if buffer.device.type == "meta":
        return True
    try:
        return buffer.shape == copy.shape and bool(torch.equal(buffer, copy))
    except RuntimeError:
        # Sparse tensors and some dtypes cannot be compared.
        return False


@dataclass
class _States:
    """The states of all random number generators.

    Attributes:
        python: The state of Python's generator.
        numpy: The state of numpy's global generator, if numpy is loaded.
        cpu: The state of torch's generator for the CPU.
        devices: The states of torch's generators for other devices.
    """

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


class _OpenContext:
    """An open `same_random_numbers` context, with the states that it restores at its end."""

    def __init__(self, states: _States) -> None:
        self.states = states


_lock = threading.Lock()
_open_contexts: list[_OpenContext] = []


@contextlib.contextmanager
def same_random_numbers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the states of all random number generators at the end of the context.

    The generators of the tensors' devices are included. All threads of a process share the
    generators. If contexts in two threads overlap, the context that ends last restores the states
    from before both.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    with _lock:
        context = _OpenContext(_States.now(devices))
        _open_contexts.append(context)
    try:
        yield
    finally:
        with _lock:
            later = _open_contexts[_open_contexts.index(context) + 1 :]
            _open_contexts.remove(context)
            if later:
                later[0].states = context.states
            else:
                context.states.restore()


ASIDE = "aside"
"""Name of the parts of a pass in which lflops itself works. Their time is not counted.

One such part is between forward and backward, and one is after backward.
"""

Divide = Callable[..., None]
"""A function that is called when the next part of a pass begins, for example to note the time.

Its arguments are the name of the part and, for backward, the tensors from which backward starts.
"""


@dataclass(kw_only=True)
class ModelCall:
    """A model with its arguments, which can be run repeatedly.

    Attributes:
        caller: Name of the public function; error messages begin with it.
        model: The model.
        args: The positional arguments, detached from any graph.
        kwargs: The keyword arguments, detached from any graph.
        backward: Whether a pass runs backward.
        loss: Computes a scalar from the output. `None` means the sum of all outputs that require a
            gradient. Computing this sum is not counted as work of the model.
        step: A function that is called with the model and its arguments. It replaces the call of
            the model, the loss and backward.
    """

    caller: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool
    loss: Callable[[Any], Tensor] | None
    _given: tuple[tuple[Any, ...], dict[str, Any]]
    step: Callable[..., object] | None = None
    _gradients: Gradients = field(default_factory=Gradients)

    @classmethod
    def of(
        cls, caller: str, model: Any, args: Any, kwargs: Any, *, backward: Any, loss: Any
    ) -> "ModelCall":
        """Check the arguments of a public function, and create a `ModelCall` from them."""
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
        """Return the tensors in the arguments."""
        return tensors_in((self.args, self.kwargs))

    def untouched(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that restores the model, gradients and random states at its end."""
        return untouched(self.model, self.inputs(), self._gradients)

    def begin_without_gradients(self) -> None:
        """Store the user's gradients and set them to `None` before a pass.

        `run` also does this before backward, but that is too late if forward itself runs a backward
        pass.
        """
        self._gradients.save_and_clear((*self.model.parameters(), *self.inputs()))

    def prepare(self) -> None:
        """Prepare the next pass.

        The gradients of the last pass are dropped. The arguments are copied again, because the
        model may have written to the copies.
        """
        self._gradients.clear()
        self.args, self.kwargs = changed(self._given, Tensor, cut_off)

    def run(self, divide: Divide = lambda *_: None) -> None:
        """Run one pass: forward and, if `backward` is set, backward.

        `divide` is called after forward, before backward and after backward, so that the caller can
        measure these parts separately. It is not called if the pass has no backward or runs `step`.
        """
        with contextlib.ExitStack() as modes:
            # A pass without backward keeps the caller's grad mode.
            if self.backward:
                modes.enter_context(torch.inference_mode(mode=False))
                modes.enter_context(torch.enable_grad())
            if self.step is not None:
                self.step(self.model, *self.args, **self.kwargs)
                return
            output = self.model(*self.args, **self.kwargs)
            if not self.backward:
                return
            results = self._results(output)
            del output
            divide(ASIDE)
            self._gradients.save_and_clear(autograd.leaves(results))
            # A fake tensor's methods return fake tensors even outside the fake mode.
            with without_modes():
                ones = [_ones_like(result) for result in results]
            divide("backward", results)
            torch.autograd.backward(results, ones)
            # Freeing the graph is not part of backward.
            divide(ASIDE)

    def _results(self, output: Any) -> list[Tensor]:
        """Return the tensors from which backward starts.

        These are the loss or, without a loss function, all outputs that require a gradient.
        """
        if self.loss is None:
            results = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not results:
                raise CountError(
                    f"{self.caller}: backward=True, but no output requires a gradient: "
                    "pass loss=, or unfreeze the parameters that are to be trained"
                )
            return results
        value: Any = self.loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise CountError(
                f"{self.caller}: loss returned {describe(value)}: it must return a tensor of one "
                "element that requires a gradient"
            )
        return [value]


def _ones_like(tensor: Tensor) -> Tensor:
    """Return a tensor of ones with the shape of `tensor`, as the gradient to start backward from.

    It is expanded from a single element to need no memory, except for nested tensors.
    """
    if tensor.is_nested:
        return torch.ones_like(tensor)
    return tensor.detach().new_ones(()).expand_as(tensor)
