"""Tensors with a shape and no memory: made of real ones, lent to a model, and what is said where code asks for their values."""

import contextlib
import linecache
import logging
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lflops.collect.known import LARGEST, KnownValues, NoCudaError
from lflops.collect.tensors import DEEPEST
from lflops.collect.torch_compat import (
    ASKS_FOR_VALUES,
    KNOWS_NO_SHAPE,
    PLAIN,
    FakeTensor,
    fake_mode,
    local_part,
    pop_mode,
    push_mode,
    runs_nothing,
    unseen,
)
from lflops.errors import CountError, LflopsError

__all__ = ["Fakes", "RealParameterError", "refuse_real_parameters", "values_refused"]

HOST = torch.device("cpu")
"""Where the stand-ins of tensors on `meta` are: code that asks where it is would else go ways of its own."""

CALL = nn.Module.__call__.__code__
"""What runs whenever a module is called."""

NO_CUDA = re.compile("not compiled with CUDA|not linked with support for cuda|CUDA is not available|Found no NVIDIA driver")
"""What torch says of it, in errors and, of autocast, in a warning."""

_TORCHS, _OURS = (f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
"""A line in these is not the one to change."""


class RealParameterError(Exception):
    """A tensor that has memory and wants a gradient met a fake one: the gradient would be fake, and written to it."""


class RealOptimizerError(Exception):
    """An optimizer has tensors with memory: it would find no gradient and do nothing."""


class Fakes:
    """Stand-ins for real tensors, always the same one for the same tensor; small integers are copied, all else is fake."""

    def __init__(self) -> None:
        """Make none yet."""
        self._mode = fake_mode()
        self._made: dict[int, tuple[Any, Any]] = {}  # with what each was made of, so that no other object can have its address

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within it, whatever is made has no memory, and no value but where that is known from numbers and small integers."""
        known, log = KnownValues(), logging.getLogger(FakeTensor.__module__)
        with contextlib.ExitStack() as undo:
            log.addFilter(_is_other_news)
            undo.callback(log.removeFilter, _is_other_news)
            undo.callback(register_optimizer_step_pre_hook(_refuse_real_optimizer).remove)
            undo.enter_context(self._mode)
            push_mode(known)
            undo.callback(pop_mode, known)
            yield

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
            _refuse_what_keeps_tensors(module)
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


def _refuse_what_keeps_tensors(module: nn.Module) -> None:
    """See that a module has its tensors where others have them.

    Raises:
        CountError: It has not, so that its real ones would be used.
    """
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if isinstance(module, torch.jit.ScriptModule):
        raise CountError("estimate: a scripted module keeps its tensors to itself: give the one that it was made from")
    if kinds & {"DistributedDataParallel", "FullyShardedDataParallel"}:
        kept = "buckets as large as the gradients" if "DistributedDataParallel" in kinds else "parameters"
        raise CountError(f"estimate: {type(module).__name__} keeps {kept} to itself: give the module that it wraps")
    if "FSDPModule" in kinds and any(type(local_part(each)) is not FakeTensor for each in module.parameters()):
        raise CountError(
            "estimate: fully_shard keeps a module's parameters to itself: give a function that builds the module and shards it"
        )


def _refuse_real_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """See that an optimizer that makes a step has fake parameters; in other threads real ones may train.

    Raises:
        RealOptimizerError: It has not.
    """
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if runs_nothing(()) and not all(isinstance(local_part(each), FakeTensor) for each in parameters):
        raise RealOptimizerError


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
    with unseen():
        return tensor.clone()


def _has_known_values(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and not tensor.is_meta
        and not tensor.is_floating_point()
        and not tensor.is_complex()
        and tensor.numel() <= LARGEST
    )


def refuse_real_parameters(args: Any) -> None:
    """See that no tensor that wants a gradient has been left real; that others are does no harm.

    Raises:
        RealParameterError: One has.
    """
    for each in args:
        if type(each) in PLAIN and each.requires_grad:
            raise RealParameterError
        if isinstance(each, list):
            refuse_real_parameters(each)


@contextlib.contextmanager
def values_refused(asker: str, *, step_of: Optimizer | None = None) -> Iterator[None]:
    """Say of what fake tensors cannot do on which line it stands, and what there is to do.

    Args:
        asker: What the error begins with.
        step_of: The optimizer whose step it is, if it is one.

    Raises:
        CountError: Something asked for the value of a tensor, met a real parameter, or ran an operator whose result has no known shape.
    """
    try:
        yield
    except LflopsError:
        raise
    except Exception as error:
        wrong, place = _wrong(error), _place(error)
        if wrong is None and place:
            error.add_note(f"{asker}: {place}")
        if wrong is None:
            raise
        if step_of is not None:
            asked = wrong.partition(";")[0].removeprefix("it ")
            advice = "give one that does not and has as much state, or lflops.counting around a real step"
            raise CountError(f"{asker}: the step of {type(step_of).__name__} {asked}: {advice}") from error
        raise CountError(": ".join(filter(None, (asker, place, wrong)))) from error


def _wrong(error: Exception) -> str | None:
    """What was asked of fake tensors that they do not have; `None` for any other error."""
    if isinstance(error, RealParameterError):
        return (
            "it uses a parameter that is none of the model's, so that its gradient would be written: pass a module that holds it, "
            "or take it from the model"
        )
    if isinstance(error, RealOptimizerError):
        return "it steps an optimizer of the real parameters: give a function that builds the model and with it its optimizers"
    if isinstance(error, KNOWS_NO_SHAPE):
        return f"it runs {error.func}, which does not say what its result looks like: register a fake kernel (torch.library.register_fake)"
    if isinstance(error, NoCudaError) or NO_CUDA.search(str(error)):
        return "it asks for CUDA, which is not here: say no device, or that of a tensor, and give the chip as hardware"
    return _value_asked_for(error)


def _value_asked_for(error: Exception) -> str | None:
    if isinstance(error, ASKS_FOR_VALUES):
        if any(each.filename == grad_scaler.__file__ for each in traceback.extract_tb(error.__traceback__)):
            return "a GradScaler asks whether all gradients are finite: leave it out, and lflops.estimate(grad_scaler=True) takes them so"
        asked: object = error.func
    elif isinstance(error, RuntimeError | TypeError) and any(each in str(error) for each in ("tensor subclasses", "FakeTensor.__format__")):
        asked = error
    else:
        return None
    advice = "an estimate has shapes alone: go around it, or count a real batch with lflops.count, which has the same memory timeline"
    return f"it needs the value of a tensor ({asked}); {advice}"


def _place(error: Exception) -> str:
    """The innermost module that was called, and the innermost line that is neither torch's nor ours; empty where there is neither."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not frame.f_code.co_filename.startswith(_OURS)]
    called = [frame.f_locals["self"] for frame, _ in frames if frame.f_code is CALL]
    parts = [f"in {_named(called[-1], called[0])}"] if called else []
    for frame, line in [each for each in frames if not each[0].f_code.co_filename.startswith(_TORCHS)][-1:]:
        code = frame.f_code
        text = linecache.getline(code.co_filename, line).strip()
        parts.append(f"{code.co_filename}:{line}, in {code.co_name}" + (f": `{text}`" if text else ""))
    return ", ".join(parts)


def _named(module: nn.Module, root: nn.Module) -> str:
    name = next((name for name, each in root.named_modules() if each is module), "")
    return f"{name.replace('_orig_mod.', '') or 'the model'} ({type(module).__name__})"
