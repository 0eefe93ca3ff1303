"""Run a model and leave it as it was: gradients, buffers, mode and random numbers."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lflops.collect.model.random_state import same_random_numbers
from lflops.collect.torch_private.modules import buffers_of

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

    def clear(self) -> None:
        """Take away what a pass has made, before the next one."""
        for leaf, _ in self._kept.values():
            leaf.grad = None

    def put_back(self) -> None:
        """Undo it."""
        for leaf, gradient in self._kept.values():
            leaf.grad = gradient
        self._kept.clear()


@contextlib.contextmanager
def untouched(model: nn.Module, inputs: Iterable[Tensor], gradients: Gradients) -> Iterator[None]:
    """Undo, at the end, what passes do to the model, to gradients and to the random numbers.

    Args:
        model: What is run.
        inputs: What it is run on.
        gradients: Puts them aside, also those of leaves that only a pass brings to light.
    """
    with contextlib.ExitStack() as undo:
        inputs = list(inputs)
        undo.enter_context(same_random_numbers((*model.parameters(), *model.buffers(), *inputs)))
        # A frozen script knows no mode.
        undo.callback(_restore_modes, [(module, module.training) for module in model.modules() if hasattr(module, "training")])
        undo.callback(_restore_contents, _contents(model))
        undo.callback(_restore_buffers, [(module, dict(buffers_of(module))) for module in model.modules()])
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
        now = dict(buffers.items())  # a scripted module has something like a mapping, whose keys are a list
        if now.keys() != before.keys() or any(now[name] is not buffer for name, buffer in before.items()):
            buffers.clear()
            buffers.update(before)


def _contents(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Each buffer with a copy of what is in it."""
    with torch.no_grad():
        return [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not is_lazy(buffer)]


def _restore_contents(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, copy in buffers:
            if not _same(buffer, copy):
                with torch.inference_mode(mode=buffer.is_inference()):
                    # By `data`, unseen by autograd: a graph that saved the buffer finds what it saved, and may go backward.
                    buffer.data.copy_(copy)


def _same(buffer: Tensor, copy: Tensor) -> bool:
    try:
        return buffer.device.type == "meta" or (buffer.shape == copy.shape and bool(torch.equal(buffer, copy)))
    except RuntimeError:  # sparse, or of a dtype that knows no comparison
        return False
