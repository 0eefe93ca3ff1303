"""Fake tensors: made from real ones, and swapped into a model."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from lflops.collect.counting.known_values import LARGEST, KnownValues
from lflops.collect.estimate.fake_errors import refuse_real_optimizer, refuse_what_keeps_tensors
from lflops.collect.inputs.tensors import DEEPEST
from lflops.collect.torch_private.dispatch_modes import on_stack, without_modes
from lflops.collect.torch_private.tensors import FakeTensor, fake_mode, local_part
from lflops.errors import CountError

HOST = torch.device("cpu")  # the device of fake tensors for tensors on `meta`. Code that branches on the device runs as on a real one.


class Fakes:
    """Fake tensors for real ones, always the same one for the same tensor. Small integer tensors are copied with their values.

    `on_host` is for a step of this CPU, and not of a chip.
    """

    def __init__(self, *, on_host: bool = True) -> None:
        self._on_host = on_host
        self._mode = fake_mode()
        self._made: dict[int, tuple[Any, Any]] = {}  # each with its original, so that no other object gets its id

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which new tensors are fake. Values are known only if they follow from numbers and small integer tensors."""
        known, log = KnownValues(on_host=self._on_host), logging.getLogger(FakeTensor.__module__)
        with contextlib.ExitStack() as undo:
            log.addFilter(_is_no_traceback)
            undo.callback(log.removeFilter, _is_no_traceback)
            undo.callback(register_optimizer_step_pre_hook(refuse_real_optimizer).remove)
            undo.enter_context(self._mode)
            undo.enter_context(on_stack(known))
            yield

    def forget(self) -> None:
        """Forget the fake tensors so far, because the code that ran with them may have written to them."""
        self._made.clear()

    def of(self, value: Any, depth: int = DEEPEST) -> Any:
        """The same structure with fake tensors. Lists, tuples, sets and dictionaries are copied, other objects are not."""
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
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """Replace all tensors of a model by fake ones, and restore them at the end.

        Attributes that the model's code sets meanwhile, such as a cache or a counter, are restored as well.
        """
        for module in model.modules():
            refuse_what_keeps_tensors(module)
        held = [(module, dict(vars(module))) for module in model.modules()]
        fakes = [self.of(attributes) for _, attributes in held]  # copies of torch's tables among them
        try:
            for (module, _), attributes in zip(held, fakes, strict=True):
                vars(module).update(attributes)
            yield
        finally:
            _restore(held)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if is_lazy(tensor):
            raise CountError(
                "estimate: a parameter has no shape yet: run a lazy module once before, on its real batch or on the meta device"
            )
        if isinstance(local_part(tensor), FakeTensor):  # the model was built in the fake mode
            return tensor
        if _has_known_values(tensor):
            with without_modes():
                return tensor.clone()  # for code that writes to it
        with self._mode:
            fake = _like(tensor) if local_part(tensor) is tensor else _like_sharded(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


class Answers(TorchFunctionMode):
    """A context in which these functions, which need values, give these answers."""

    def __init__(self, answers: Mapping[Any, Any]) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._answers[function] if function in self._answers else function(*args, **(kwargs or {}))


def _is_no_traceback(record: logging.LogRecord) -> bool:
    """Whether a record of torch's log is something else than the traceback of an error that is raised anyway."""
    return not record.getMessage().startswith("failed while attempting to run meta")


def _restore(held: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, attributes in held:
        vars(module).clear()
        vars(module).update(attributes)


def _like(tensor: Tensor) -> Tensor:
    """An empty tensor of the same shape. Torch's own conversion to a fake tensor would keep a reference to the real one."""
    device = HOST if tensor.is_meta else tensor.device
    if tensor.layout is not torch.strided:
        return torch.empty_like(tensor, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _like_sharded(tensor: Any) -> Tensor:
    unsharded = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    sharded: Tensor = type(tensor).from_local(_like(local_part(tensor)), tensor.device_mesh, tensor.placements, **unsharded)
    return sharded


def _has_known_values(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and not tensor.is_meta
        and not tensor.is_floating_point()
        and not tensor.is_complex()
        and tensor.numel() <= LARGEST
    )
