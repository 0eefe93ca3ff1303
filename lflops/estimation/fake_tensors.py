"""Fake tensors: made from real ones, and swapped into a model.

And errors that name the line of code that they cannot run.

On a chip, attention and dropout use the kernels that torch takes there: the first enabled one, in
torch's order, that supports the call.
"""

import contextlib
import linecache
import logging
import math
import os
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from lflops.errors import CountError, LflopsError
from lflops.flop_counter.dispatch_mode import RealParameterError
from lflops.flop_counter.known_values import LARGEST, KnownValues, NoCudaError
from lflops.hardware.chips import BLACKWELL, HOPPER, Hardware, vendor_of
from lflops.inputs.tensors import DEEPEST
from lflops.profile.notes import Note
from lflops.torch_private.dispatch_modes import on_stack, without_modes
from lflops.torch_private.operators import attention_kernels
from lflops.torch_private.tensors import (
    NEEDS_VALUES,
    NO_FAKE_KERNEL,
    FakeTensor,
    fake_mode,
    local_part,
    only_shapes_run,
)

# the code object of every call of a module
CALL = nn.Module.__call__.__code__
# the name of the file in which torch sends Python objects
OBJECTS_IN = "distributed_c10d.py"

NO_CUDA = re.compile(
    "not compiled with CUDA|not linked with support for cuda|CUDA is not available|Found no NVIDIA driver"
    "|CUDA driver version is insufficient"
)
"""Torch's messages about missing CUDA, in errors and in autocast's warning."""

KEEPERS = (
    ("DistributedDataParallel", "buckets as large as the gradients", "mesh={'replica': ranks}"),
    ("FullyShardedDataParallel", "parameters", "mesh={'data': ranks} for FSDP2"),
)
"""Wrappers whose memory is outside of what fake tensors can replace.

What that is, and the mesh to give.
"""

_TORCHS, _OURS = (
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)
"""Folders whose lines a user does not change."""


class RealOptimizerError(Exception):
    """An optimizer has real parameters: it would find no gradient and do nothing."""


def refuse_what_keeps_tensors(module: nn.Module) -> None:
    """Check that a module has its tensors as attributes, where they can be replaced by fake ones."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if isinstance(module, torch.jit.ScriptModule):
        raise CountError(
            "estimate: a scripted module keeps its tensors to itself: give the one that it was made from"
        )
    for kind, kept, mesh in KEEPERS:
        if kind in kinds:
            raise CountError(
                f"estimate: {type(module).__name__} keeps {kept} to itself: give the module that it wraps, or a function that builds that "
                f"module and {mesh}"
            )
    if "FSDPModule" in kinds and any(
        type(local_part(each)) is not FakeTensor for each in module.parameters()
    ):
        raise CountError(
            "estimate: fully_shard keeps a module's parameters to itself: give a function that builds the module and shards it"
        )


def refuse_real_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Check that an optimizer that makes a step in an estimate has fake parameters.

    Other threads may train real ones.
    """
    # A frozen one may have whole numbers, as packed weights, which keep their values.
    parameters = (
        each for group in optimizer.param_groups for each in group["params"] if each.requires_grad
    )
    if only_shapes_run(()) and not all(
        isinstance(local_part(each), FakeTensor) for each in parameters
    ):
        raise RealOptimizerError


@contextlib.contextmanager
def values_refused(caller: str, *, step_of: Optimizer | None = None) -> Iterator[None]:
    """Turn the errors of fake tensors into a `CountError` that names the line and what to do.

    `step_of` is the optimizer that steps.
    """
    try:
        yield
    except LflopsError:
        raise
    except Exception as error:
        wrong, location = _wrong(error), _location(error)
        if wrong is None and location:
            error.add_note(f"{caller}: {location}")
        if wrong is None:
            raise
        if step_of is not None:
            asked = wrong.partition(";")[0].removeprefix("it ")
            advice = "give one that does not and has as much state, or lflops.counting around a real step"
            raise CountError(
                f"{caller}: the step of {type(step_of).__name__} {asked}: {advice}"
            ) from error
        raise CountError(": ".join(filter(None, (caller, location, wrong)))) from error


def _wrong(error: Exception) -> str | None:
    """Say what the code does that fake tensors do not support; `None` for any other error."""
    if isinstance(error, RealParameterError):
        return (
            "it uses a parameter that is none of the model's, so that its gradient would be written: pass a module that holds it, "
            "or take it from the model"
        )
    if isinstance(error, RealOptimizerError):
        return "it steps an optimizer of the real parameters: give a function that builds the model and with it its optimizers"
    if isinstance(error, NO_FAKE_KERNEL):
        return f"it runs {error.func}, which does not say what its result looks like: register a fake kernel (torch.library.register_fake)"
    if isinstance(error, AssertionError) and "metadata mutating" in str(error):
        return "it changes in place the shape of a tensor that has memory, by a fake one or to a large one: make a new tensor"
    if isinstance(error, NoCudaError) or NO_CUDA.search(str(error)):
        return "it asks for CUDA, which is not here: say no device, or that of a tensor, and give the chip as hardware"
    return _asked_for(error)


def _asked_for(error: Exception) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    if any("object" in each.name and each.filename.endswith(OBJECTS_IN) for each in frames):
        # Stages of a pipeline send each other their shapes by these.
        return "it sends Python objects to other ranks, which do not exist here: give each PipelineStage its input_args and output_args"
    if isinstance(error, NEEDS_VALUES):
        if any(each.filename == grad_scaler.__file__ for each in frames):
            return "a GradScaler asks whether all gradients are finite: leave it out, and lflops.estimate(grad_scaler=True) takes them so"
        asked: object = error.func
    elif isinstance(error, RuntimeError | TypeError) and any(
        each in str(error) for each in ("tensor subclasses", "FakeTensor.__format__")
    ):
        asked = error
    else:
        return None
    advice = "an estimate has shapes alone: go around it, or count a real batch with lflops.count, which has the same memory timeline"
    return f"it needs the value of a tensor ({asked}); {advice}"


def _location(error: Exception) -> str:
    """The innermost called module and the innermost line that is neither torch's nor ours.

    Empty if there is neither.
    """
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_OURS)
    ]
    called = [frame.f_locals["self"] for frame, _ in frames if frame.f_code is CALL]
    parts = [f"in {_named(called[-1], called[0])}"] if called else []
    for frame, line in [
        each for each in frames if not each[0].f_code.co_filename.startswith(_TORCHS)
    ][-1:]:
        code = frame.f_code
        text = linecache.getline(code.co_filename, line).strip()
        parts.append(
            f"{code.co_filename}:{line}, in {code.co_name}" + (f": `{text}`" if text else "")
        )
    return ", ".join(parts)


def _named(module: nn.Module, root: nn.Module) -> str:
    name = next((name for name, each in root.named_modules() if each is module), "")
    return f"{name.replace('_orig_mod.', '') or 'the model'} ({type(module).__name__})"


HOST = torch.device(
    "cpu"
    # the device of fake tensors for tensors on `meta`. Code that branches on the device runs as on a
    # real one.
)


class Fakes:
    """Fake tensors for real ones, always the same one for the same tensor.

    Small integer tensors are copied with their values.

    `on_host` is for a step of this CPU, and not of a chip.
    """

    def __init__(self, *, on_host: bool = True) -> None:
        self._on_host = on_host
        self._mode = fake_mode()
        self._made: dict[
            int, tuple[Any, Any]
            # each with its original, so that no other object gets its id
        ] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which new tensors are fake.

        Values are known only if they follow from numbers and small integer tensors.
        """
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
        """The same structure with fake tensors.

        Lists, tuples, sets and dictionaries are copied, other objects are not.
        """
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        made = value
        if isinstance(value, Tensor):
            with torch.inference_mode(
                mode=False
                # what is made in inference mode takes no gradient later
            ):
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
        """Replace all tensors of a model by fake ones.

        The end restores them, and attributes that its code sets, as a cache.
        """
        for module in model.modules():
            refuse_what_keeps_tensors(module)
        held = [(module, dict(vars(module))) for module in model.modules()]
        fakes = [
            self.of(attributes)
            for _, attributes in held
            # copies of torch's tables among them
        ]
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
        # the model was built in the fake mode
        if isinstance(local_part(tensor), FakeTensor):
            return tensor
        whole = type(tensor) is Tensor and not (
            tensor.is_meta or tensor.is_floating_point() or tensor.is_complex()
        )
        # its values are known
        if whole and tensor.numel() <= LARGEST:
            with without_modes():
                # for code that writes to it
                return tensor.clone()
        with self._mode:
            fake = _like(tensor) if local_part(tensor) is tensor else like_sharded(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


class Answers(TorchFunctionMode):
    """A context in which these functions, which need values, give these answers."""

    def __init__(self, answers: Mapping[Any, Any]) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return (
            self._answers[function]
            if function in self._answers
            else function(*args, **(kwargs or {}))
        )


# of an error that is raised anyway
def _is_no_traceback(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("failed while attempting to run meta")


def _restore(held: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, attributes in held:
        vars(module).clear()
        vars(module).update(attributes)


def _like(tensor: Tensor) -> Tensor:
    """An empty tensor of the same shape.

    Torch's own conversion to a fake tensor would keep a reference to the real one.
    """
    device = HOST if tensor.is_meta else tensor.device
    if tensor.layout is not torch.strided:
        return torch.empty_like(tensor, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def like_sharded(tensor: Any) -> Tensor:
    """An empty DTensor with the same shards."""
    unsharded = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    sharded: Tensor = type(tensor).from_local(
        _like(local_part(tensor)), tensor.device_mesh, tensor.placements, **unsharded
    )
    return sharded


ATTENTION = frozenset(
    {
        F.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)
"""The functions and operators that stand for attention."""

HALF = (torch.float16, torch.bfloat16)
WIDEST_FLASH, WIDTHS, MASK_ROWS = (
    256,
    8,
    16,
    # flash attention's widest heads; it pads heads, and efficient attention masks, to multiples
)

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_CALLERS = (
    F.multi_head_attention_forward,
    Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
)
"""Torch's Python functions that may run attention; backward runs checkpointed code.

They dispatch to modes themselves.
"""


class Attention(NamedTuple):
    """The arguments of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def autocast(self) -> "Attention":
        """The call with the dtypes that autocast gives it, which happens below this mode."""
        device = self.query.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        cast: dict[str, Any] = {
            name: each.to(dtype)
            for name, each in self._asdict().items()
            if isinstance(each, Tensor)
            and each.is_floating_point()
            and each.dtype is not torch.float64
        }
        return self._replace(**cast)

    def kernel(self, *, ampere: bool, family: str = "") -> tuple[str, Any] | None:
        """Name and operator of the kernel that torch chooses.

        `None` if no enabled kernel supports the call.
        """
        # One rule is left out: the smaller chips of a generation do not train heads wider than 192
        # with dropout
        fused = self._may_be_fused()
        halved = fused and ampere and self.query.dtype in HALF
        width, of_values, mask = self.query.shape[-1], self.value.shape[-1], self.attn_mask
        is_square = not self.is_causal or self.query.shape[-2] == self.key.shape[-2]
        suits_flash = mask is None and is_square and of_values == width <= WIDEST_FLASH
        takes = {
            "flash_attention": halved and suits_flash,
            "efficient_attention": fused and self._suits_efficient(ampere=ampere),
            "cudnn_attention": halved and self._suits_cudnn(family),
            "attention_math": True,
        }
        return next(
            (
                each
                for each in attention_kernels(cudnn_first=prefers_cudnn(family)).items()
                if takes[each[0]]
            ),
            None,
        )

    def run(self, name: str, operator: Any) -> Tensor:
        """Run one of the kernels, after the same preparation of the arguments as in torch."""
        query, key, value, mask, *how, scale, grouped = self
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
                mask.logical_not(), -math.inf
            )
        if name == "attention_math":
            return operator(query, key, value, mask, *how, scale=scale, enable_gqa=grouped)[0]  # type: ignore[no-any-return]
        if name == "flash_attention":
            missing = -query.shape[-1] % WIDTHS
            query, key, value = (
                F.pad(each, (0, missing)) if missing else each for each in self[:3]
            )
            out: Tensor = operator(
                query, key, value, *how, scale=scale or 1 / math.sqrt(self.query.shape[-1])
            )[0]
            return out[..., : self.query.shape[-1]] if missing else out
        if mask is not None and name == "efficient_attention":
            if mask.stride(-1) != 1 or any(stride % MASK_ROWS for stride in mask.stride()[:-1]):
                mask = F.pad(mask, (0, MASK_ROWS - mask.shape[-1] % MASK_ROWS))[
                    ..., : mask.shape[-1]
                ]
            mask = mask.expand(*query.shape[:3], key.shape[-2])
        goes_backward = torch.is_grad_enabled() and any(each.requires_grad for each in self[:3])
        return operator(query, key, value, mask, goes_backward, *how, scale=scale)[0]  # type: ignore[no-any-return]

    def _may_be_fused(self) -> bool:
        if any(each.dim() != 4 or not each.shape[-2] or each.stride(-1) != 1 for each in self[:3]):
            return False
        same = all(
            each.dtype is self.query.dtype and each.shape[0] == self.query.shape[0]
            for each in self[:3]
        )
        heads, of_values = self.key.shape[1], self.value.shape[1]
        fits = self._has_all_heads() or (
            self.enable_gqa and heads == of_values and self.query.shape[1] % heads == 0
        )
        return same and fits and self.query.shape[-1] == self.key.shape[-1]

    def _has_all_heads(self) -> bool:
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]

    def _suits_cudnn(
        self,
        family: str,
        # as in sdp_utils.cpp, which pull requests 161210, 172621 and 174245 changed
    ) -> bool:
        widths, mask, release = (
            (self.query.shape[-1], self.value.shape[-1]),
            self.attn_mask,
            torch.__version__,
        )
        widest = 256 if family in HOPPER and release >= "2.9" else 128
        fit = max(widths) <= widest or (
            widths == (192, 128) and family in BLACKWELL and release >= "2.11"
        )
        may_mask = mask is None or (mask.dim() in (2, 4) and not mask.requires_grad)
        may_drop = not self.dropout_p or (
            self.query.shape[-2] > 1 and (release < "2.12" or self.dropout_p * 16 % 1 == 0)
        )
        may_vary = (
            not torch.are_deterministic_algorithms_enabled()
            or torch.is_deterministic_algorithms_warn_only_enabled()
        )
        return (
            fit
            and not any(each % 8 for each in widths)
            and may_mask
            and may_drop
            and may_vary
            and self.key.shape[-2] > 1
        )

    def _suits_efficient(self, *, ampere: bool) -> bool:
        dtypes = (*HALF, torch.float32) if ampere else (torch.float16, torch.float32)
        multiple = 8 if self.query.dtype in HALF else 4 if ampere else 1
        even = not self.query.shape[-1] % multiple and not self.value.shape[-1] % multiple
        masked = self.attn_mask is None or self.attn_mask.stride(-1) == 1
        return self.query.dtype in dtypes and even and masked and self._has_all_heads()


def prefers_cudnn(family: str) -> bool:
    """Whether torch tries cuDNN's attention first on chips whose names begin so.

    A torch without CUDA stands for its wheel on PyPI.
    """
    # By aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: in 2.9 with cuDNN 9.9 on compute
    # capability 9.0 and 10.0, since 2.10 also on 10.3, but with a cuDNN later than 9.15.0 (pull
    # requests 162073, 170800 and 171627).
    release = torch.__version__
    cudnn = (torch.backends.cudnn.version() if torch.version.cuda else None) or (
        91002 if release < "2.11" else 91900
    )
    families, least = (
        ((*HOPPER, "B200", "GB200"), 90900) if release < "2.10" else (HOPPER + BLACKWELL, 91501)
    )
    return (
        family in families
        and cudnn >= least
        and release >= "2.9"
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    )


@contextlib.contextmanager
def attention_on(chip: Hardware | None) -> Iterator[list[Note]]:
    """A context in which attention runs as on an NVIDIA chip of the table.

    At the end, a note lists the kernels.
    """
    # Without CUDA, autocast for CUDA is an error in it. Torch only warns and ignores autocast,
    # which is right for no chip.
    notes: list[Note] = []
    if chip is None or vendor_of(chip.name) != "NVIDIA":
        yield notes
        return
    with warnings.catch_warnings(), _Choice(chip) as choice:
        warnings.filterwarnings("error", ".*CUDA is not available.*Disabling")
        yield notes
    if choice.calls:
        notes.append(Note(code="attention_on_cuda", subject=chip.name, values=dict(choice.calls)))


class _Choice(TorchFunctionMode):
    def __init__(self, chip: Hardware) -> None:
        super().__init__()
        self._chip = chip
        self._bodies = {caller: _body(caller) for caller in _CALLERS}
        self.calls: Counter[str] = Counter()

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ATTENTION:
            return self._attend(function, Attention(*args, **kwargs))
        if function is F.dropout:
            return _dropped(*args, **kwargs)
        body = self._bodies.get(function)
        if body is None:
            return function(*args, **kwargs)
        # a mode is off while it handles a call, but must see the calls of the body
        with self:
            return body(*args, **kwargs)

    def _attend(self, function: Any, call: Attention) -> Tensor:
        if call.query.is_nested or call.query.device != HOST:
            return function(**call._asdict())  # type: ignore[no-any-return]
        call = call.autocast()
        found = call.kernel(
            ampere="bf16" in self._chip.peak_flops_per_second, family=self._chip.name.split()[0]
        )
        if found is None:
            raise CountError(
                f"no kernel of attention that sdpa_kernel leaves on takes this call on {self._chip.name}: leave on MATH"
            )
        self.calls[found[0]] += 1
        with torch.autocast(call.query.device.type, enabled=False):
            return call.run(*found)


def _dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's own
    """Dropout as CUDA's kernel makes it: its mask has a byte an element.

    A CPU keeps the noise in the dtype of the input.
    """
    if training and 0 < p < 1 and not inplace and x.device == HOST:
        return torch.native_dropout(x, p, train=True)[0]
    return F.dropout(x, p, training, inplace)


def _body(function: Any) -> FunctionType:
    """The same function without its dispatch to modes.

    With a mode active, the original would only hand the call to the mode again.
    """
    plain = dict.fromkeys(_ASKS, lambda *_: False)
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **plain},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
