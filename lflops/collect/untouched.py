"""Run a model and leave it as it was: gradients, buffers, mode and random numbers."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Gradients", "untouched"]


class Gradients:
    """Gradients put aside, so that a pass makes its own and the old ones can be put back."""

    def __init__(self) -> None:
        """Put nothing aside yet."""
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}

    def put_aside(self, leaves: Iterable[Tensor]) -> None:
        """Take each leaf's gradient away and remember it."""
        for leaf in leaves:
            if leaf.requires_grad and leaf.is_leaf and id(leaf) not in self._kept:
                self._kept[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None

    def put_back(self) -> None:
        """Undo it."""
        for leaf, gradient in self._kept.values():
            leaf.grad = gradient
        self._kept.clear()


@contextlib.contextmanager
def untouched(model: nn.Module, inputs: Iterable[Tensor]) -> Iterator[Gradients]:
    """Undo, at the end, what a pass does to the model, to its inputs' gradients and to the random numbers.

    Yields:
        The gradients put aside, for leaves that only the pass brings to light.
    """
    gradients = Gradients()
    with contextlib.ExitStack() as undo:
        undo.enter_context(_same_random_numbers((*model.parameters(), *model.buffers())))
        undo.callback(_restore_modes, [(module, module.training) for module in model.modules()])
        undo.callback(_restore_buffers, _buffers(model))
        undo.callback(gradients.put_back)
        gradients.put_aside((*model.parameters(), *inputs))
        yield gradients


@contextlib.contextmanager
def _same_random_numbers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the generators back that a model may draw from: torch's on its devices, Python's, NumPy's."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    numpy: Any = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with contextlib.ExitStack() as forked:
        forked.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices}:
            places = [device.index or 0 for device in devices if device.type == kind]
            forked.enter_context(torch.random.fork_rng(devices=places, device_type=kind))
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    """Each buffer where it is registered, with a copy of what is in it."""
    with torch.no_grad():
        return [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]


def _restore_buffers(buffers: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for module, name, buffer, copy in buffers:
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)
            # One that is as it was is not written to: somebody's graph may have saved it.
            if not _same(buffer, copy):
                with torch.inference_mode(mode=buffer.is_inference()):
                    buffer.copy_(copy)


def _same(buffer: Tensor, copy: Tensor) -> bool:
    return buffer.device.type == "meta" or (buffer.shape == copy.shape and bool(torch.equal(buffer, copy)))
