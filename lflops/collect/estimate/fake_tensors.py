"""Tensors with a shape and no memory: made of real ones, and lent to a model."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lflops.collect.estimate.fake_errors import refuse_real_optimizer, refuse_what_keeps_tensors
from lflops.collect.estimate.known_values import LARGEST, KnownValues
from lflops.collect.inputs.tensors import DEEPEST
from lflops.collect.torch_private.dispatch_modes import pop_mode, push_mode, without_modes
from lflops.collect.torch_private.tensors import FakeTensor, fake_mode, local_part
from lflops.errors import CountError

__all__ = ["HOST", "Fakes"]

HOST = torch.device("cpu")
"""Where the stand-ins of tensors on `meta` are: code that asks where it is would else go ways of its own."""


class Fakes:
    """Stand-ins for real tensors, always the same one for the same tensor; small integers are copied, all else is fake."""

    def __init__(self, *, on_host: bool = True) -> None:
        """Make none yet.

        Args:
            on_host: Whether the step is for this CPU, and not for a chip.
        """
        self._on_host = on_host
        self._mode = fake_mode()
        self._made: dict[int, tuple[Any, Any]] = {}  # with what each was made of, so that no other object can have its address

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within it, whatever is made has no memory, and no value but where that is known from numbers and small integers."""
        known, log = KnownValues(on_host=self._on_host), logging.getLogger(FakeTensor.__module__)
        with contextlib.ExitStack() as undo:
            log.addFilter(_is_other_news)
            undo.callback(log.removeFilter, _is_other_news)
            undo.callback(register_optimizer_step_pre_hook(refuse_real_optimizer).remove)
            undo.enter_context(self._mode)
            push_mode(known)
            undo.callback(pop_mode, known)
            yield

    def forget(self) -> None:
        """Make new stand-ins from now on: what ran with the old ones may have written to them."""
        self._made.clear()

    def of(self, value: Any, depth: int = DEEPEST) -> Any:
        """The same with stand-ins for the tensors in it; lists, tuples, sets and dictionaries are copies, everything else is itself.

        Raises:
            CountError: A parameter has no shape yet.
        """
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        made = value
        if isinstance(value, Tensor):
            with torch.inference_mode(mode=False):  # what is made in inference mode takes no gradient later
                made = self._tensor(value)
        elif depth and type(value) is dict:
            made = {key: self.of(part, depth - 1) for key, part in value.items()}
        elif depth and type(value) in (list, tuple, set):
            made = type(value)(self.of(part, depth - 1) for part in value)
        elif depth and isinstance(value, tuple) and hasattr(value, "_fields"):
            made = type(value)(*(self.of(part, depth - 1) for part in value))
        if made is not value:
            self._made[id(value)] = (value, made)
        return made

    @contextlib.contextmanager
    def lent_to(self, model: nn.Module) -> Iterator[None]:
        """Give a model stand-ins for all tensors that it and its parts hold, and at the end what they held before.

        What the model's code then writes on itself, a cache or a counter, is undone as well.

        Raises:
            CountError: A part of it is a script, or has no shape yet.
        """
        for module in model.modules():
            refuse_what_keeps_tensors(module)
        held = [(module, dict(vars(module))) for module in model.modules()]
        lent = [self.of(attributes) for _, attributes in held]  # copies of torch's tables among them
        try:
            for (module, _), attributes in zip(held, lent, strict=True):
                vars(module).update(attributes)
            yield
        finally:
            _give_back(held)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if is_lazy(tensor):
            raise CountError(
                "estimate: a parameter has no shape yet: run a lazy module once before, on its real batch or on the meta device"
            )
        if isinstance(local_part(tensor), FakeTensor):  # of a model that was built in the mode
            return tensor
        if _has_known_values(tensor):
            return _copy(tensor)
        with self._mode:
            fake = _like(tensor) if local_part(tensor) is tensor else _like_spread(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def _is_other_news(record: logging.LogRecord) -> bool:
    """Whether a line of torch's log is more than the traceback of an error that is raised as well."""
    return not record.getMessage().startswith("failed while attempting to run meta")


def _give_back(held: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, attributes in held:
        vars(module).clear()
        vars(module).update(attributes)


def _like(tensor: Tensor) -> Tensor:
    """One of the same shape, made from nothing: torch's own way from a real tensor to a fake one keeps a reference to the real."""
    device = HOST if tensor.is_meta else tensor.device
    if tensor.layout is not torch.strided:
        return torch.empty_like(tensor, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _like_spread(tensor: Any) -> Tensor:
    """What this rank has of a tensor that is spread over ranks."""
    whole = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    spread: Tensor = type(tensor).from_local(_like(local_part(tensor)), tensor.device_mesh, tensor.placements, **whole)
    return spread


def _copy(tensor: Tensor) -> Tensor:
    """Real, for code that writes to it."""
    with without_modes():
        return tensor.clone()


def _has_known_values(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and not tensor.is_meta
        and not tensor.is_floating_point()
        and not tensor.is_complex()
        and tensor.numel() <= LARGEST
    )
