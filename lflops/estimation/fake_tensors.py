"""Run a model on fake tensors, with the attention kernels that torch would choose on a chip.

Real tensors are replaced with fake tensors, which have a shape but no values. If code needs the
value of a tensor, the error names the line. torch tries its attention kernels in a fixed order, and
uses the first enabled kernel that supports the call.
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

# The code object of `nn.Module.__call__`, which runs in every call of a module.
CALL = nn.Module.__call__.__code__
# The file with torch's functions that send Python objects to other ranks.
OBJECTS_IN = "distributed_c10d.py"

NO_CUDA = re.compile(
    "not compiled with CUDA|not linked with support for cuda|CUDA is not available"
    "|Found no NVIDIA driver"
    "|CUDA driver version is insufficient"
)
"""Pattern of the errors and warnings with which torch reports that CUDA is not available."""

KEEPERS = (
    ("DistributedDataParallel", "buckets as large as the gradients", "mesh={'replica': ranks}"),
    ("FullyShardedDataParallel", "flat parameters", "mesh={'data': ranks} for FSDP2"),
)
"""Wrapper classes that are refused, because they keep tensors that cannot be replaced.

Each entry has the name of the class, a description of its tensors, and the value of `mesh` with
which an estimate has the same parallelism.
"""

# The folders of torch's code and of lflops' code. No line in them is reported as the user's line.
_TORCH_FOLDER = f"{Path(torch.__file__).parent}{os.sep}"
_OUR_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"


class RealOptimizerError(Exception):
    """During an estimate, the model's code runs a step of an optimizer that has real parameters.

    Real parameters get no gradients in an estimate. So the step would do nothing, and the estimated
    work and memory would be too low.
    """


def refuse_what_keeps_tensors(module: nn.Module) -> None:
    """Raise an error for a module whose tensors cannot be replaced with fake tensors.

    Only tensors in the attributes of a module can be replaced. For example, a scripted module keeps
    its tensors in C++.
    """
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if isinstance(module, torch.jit.ScriptModule):
        raise CountError(
            "estimate: the tensors of a scripted module cannot be replaced with fake tensors: "
            "pass the original module instead of the result of torch.jit.script"
        )
    for kind, kept, mesh in KEEPERS:
        if kind in kinds:
            raise CountError(
                f"estimate: {type(module).__name__} has {kept}, which fake tensors cannot replace: "
                f"pass the module inside the wrapper, or pass {mesh} and a function that builds "
                "this module"
            )
    if "FSDPModule" in kinds and not _has_only_fake_parameters(module):
        raise CountError(
            "estimate: the parameters of a module under fully_shard cannot be replaced with fake "
            "tensors: pass a function that builds the module and shards it"
        )


def _has_only_fake_parameters(module: nn.Module) -> bool:
    return all(type(local_part(each)) is FakeTensor for each in module.parameters())


def refuse_real_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise an error if an optimizer that steps during an estimate has real parameters.

    Optimizers in other threads are not checked, because they may train real parameters.
    """
    if not only_shapes_run(()):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Frozen parameters may be small integer tensors, which keep their values.
            if parameter.requires_grad and not isinstance(local_part(parameter), FakeTensor):
                raise RealOptimizerError


@contextlib.contextmanager
def values_refused(caller: str, *, step_of: Optimizer | None = None) -> Iterator[None]:
    """Convert errors about fake tensors to a `CountError` that names the line and a workaround.

    If the context runs the step of an optimizer, pass this optimizer as `step_of`, so that the
    message names the optimizer.
    """
    try:
        yield
    except LflopsError:
        raise
    except Exception as error:
        problem = _problem(error)
        location = _location(error)
        if problem is None:
            if location:
                error.add_note(f"{caller}: {location}")
            raise
        if step_of is not None:
            short = problem.partition(";")[0].removeprefix("this code ")
            raise CountError(
                f"{caller}: the optimizer's step ({type(step_of).__name__}) {short}: pass another "
                "optimizer that has the same state and reads no values of tensors, or use "
                "lflops.counting around a real step"
            ) from error
        parts = (caller, location, problem)
        raise CountError(": ".join(filter(None, parts))) from error


def _problem(error: Exception) -> str | None:
    """Describe the operation that an estimate does not support, and a workaround.

    Returns `None` if the error has another cause.
    """
    if isinstance(error, RealParameterError):
        return (
            "this code uses a parameter that does not belong to the model, so the estimate would "
            "overwrite the gradient of this parameter: pass a module that contains the parameter"
        )
    if isinstance(error, RealOptimizerError):
        return (
            "this code steps an optimizer of the real parameters, but an estimate replaces the "
            "parameters of the model with fake tensors: pass a function that builds the model "
            "together with its optimizers"
        )
    if isinstance(error, NO_FAKE_KERNEL):
        return (
            f"this code runs {error.func}, which has no fake kernel, so the shape of the result is "
            "unknown: register a fake kernel with torch.library.register_fake"
        )
    if isinstance(error, AssertionError) and "metadata mutating" in str(error):
        return (
            "this code changes the shape of a real tensor in place, to a large shape or the shape "
            "of a fake tensor, which an estimate does not support: create a new tensor instead"
        )
    if isinstance(error, NoCudaError) or NO_CUDA.search(str(error)):
        return (
            "this code uses CUDA, which is not available here: name no device, or use "
            "the device of an existing tensor; to estimate for a GPU, pass the GPU as hardware="
        )
    return _problem_of_values(error)


def _problem_of_values(error: Exception) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    # Stages of a pipeline send their shapes to each other as Python objects.
    if any(_sends_objects(frame) for frame in frames):
        return (
            "this code sends Python objects to other ranks, but an estimate runs only one rank: "
            "pass input_args and output_args to each PipelineStage"
        )
    needed: object = None
    if isinstance(error, NEEDS_VALUES):
        if any(each.filename == grad_scaler.__file__ for each in frames):
            return (
                "a GradScaler needs the values of the gradients, but an estimate has only shapes: "
                "leave the GradScaler out, and pass grad_scaler=True to lflops.estimate, which "
                "assumes finite gradients"
            )
        needed = error.func
    elif isinstance(error, RuntimeError | TypeError) and _NEEDS_VALUES_MESSAGE.search(str(error)):
        needed = error
    if needed is None:
        return None
    return (
        f"this code needs the value of a tensor ({needed}); an estimate has only shapes: remove "
        "this use of the value, or count a real batch with lflops.count, which also records the "
        "memory of the step"
    )


def _sends_objects(frame: traceback.FrameSummary) -> bool:
    return "object" in frame.name and frame.filename.endswith(OBJECTS_IN)


_NEEDS_VALUES_MESSAGE = re.compile("tensor subclasses|FakeTensor.__format__")


def _location(error: Exception) -> str:
    """Describe the module and the line in which an error occurred.

    The module is the innermost module that was running. The line is the innermost line outside the
    code of torch and lflops. The text is empty if neither is found.
    """
    called: list[nn.Module] = []
    line_of_user = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(_OUR_FOLDER):
            continue
        if code is CALL:
            called.append(frame.f_locals["self"])
        if not code.co_filename.startswith(_TORCH_FOLDER):
            text = linecache.getline(code.co_filename, line).strip()
            line_of_user = f"{code.co_filename}:{line}, in {code.co_name}"
            if text:
                line_of_user += f": `{text}`"
    parts = [line_of_user] if line_of_user else []
    if called:
        parts.insert(0, f"in {_name_in(called[0], called[-1])}")
    return ", ".join(parts)


def _name_in(root: nn.Module, module: nn.Module) -> str:
    name = ""
    for each_name, each in root.named_modules():
        if each is module:
            name = each_name
            break
    return f"{name.replace('_orig_mod.', '') or 'the model'} ({type(module).__name__})"


HOST = torch.device("cpu")
"""The device of the fake tensors that replace tensors on the meta device.

Therefore, code that checks the device of a tensor runs in the same way as for a tensor on the CPU.
"""


class Fakes:
    """Creates fake tensors for real tensors.

    Until `forget` is called, a real tensor always gives the same fake tensor. Small integer tensors
    are not made fake. They are copied with their values, because code often needs these values, for
    example as indexes.

    If `on_host` is true, the estimated step would run on a CPU, and the memory includes the
    workspace that the CPU's kernel needs for an LSTM. For a GPU, the size of this workspace is
    unknown.
    """

    def __init__(self, *, on_host: bool = True) -> None:
        self._on_host = on_host
        self._mode = fake_mode()
        # The original and its copy, keyed by the id of the original. The original is kept so that
        # no new object can get the same id.
        self._made: dict[int, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Make new tensors fake inside a context.

        Small tensors that are computed only from Python numbers and small integer tensors stay
        real, so their values are known.
        """
        known = KnownValues(on_host=self._on_host)
        log = logging.getLogger(FakeTensor.__module__)
        with contextlib.ExitStack() as undo:
            log.addFilter(_is_no_traceback)
            undo.callback(log.removeFilter, _is_no_traceback)
            undo.callback(register_optimizer_step_pre_hook(refuse_real_optimizer).remove)
            undo.enter_context(self._mode)
            undo.enter_context(on_stack(known))
            yield

    def forget(self) -> None:
        """Drop all fake tensors that were created so far.

        The code that used them may have changed them, so the next run needs new fake tensors.
        """
        self._made.clear()

    def of(self, value: Any, depth: int = DEEPEST) -> Any:
        """Return a copy of a value in which all tensors are replaced with fake tensors.

        Lists, tuples, sets and dictionaries are copied, up to `depth` levels deep. Other objects
        are not copied.
        """
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        made = value
        if isinstance(value, Tensor):
            # Tensors that are created in inference mode cannot have a gradient later.
            with torch.inference_mode(mode=False):
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
        """Replace all tensors of a model with fake tensors inside a context.

        At the end, all attributes of the modules are restored. This includes attributes that the
        model's code has set during the run, such as caches.
        """
        held: list[tuple[nn.Module, dict[str, Any]]] = []
        for module in model.modules():
            refuse_what_keeps_tensors(module)
            held.append((module, dict(vars(module))))
        # This also copies torch's tables of parameters, buffers and submodules.
        fakes = [self.of(attributes) for _, attributes in held]
        try:
            for (module, _), attributes in zip(held, fakes, strict=True):
                vars(module).update(attributes)
            yield
        finally:
            _restore(held)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if is_lazy(tensor):
            raise CountError(
                "estimate: a parameter has no shape yet: "
                "run the lazy module once before the estimate, on a real batch or on the meta "
                "device"
            )
        # The tensor is already fake if the model was built in fake mode.
        if isinstance(local_part(tensor), FakeTensor):
            return tensor
        has_values = type(tensor) is Tensor and not tensor.is_meta
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        if has_values and is_integer and tensor.numel() <= LARGEST:
            # A copy is returned because the model's code may write to it.
            with without_modes():
                return tensor.clone()
        with self._mode:
            fake = _like(tensor) if local_part(tensor) is tensor else like_sharded(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


class Answers(TorchFunctionMode):
    """Makes some functions return fixed values inside a context, whatever their arguments are.

    An example is `torch.isfinite`, because the result would depend on values that fake tensors do
    not have. `answers` maps each function to its result.
    """

    def __init__(self, answers: Mapping[Any, Any]) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self._answers:
            return self._answers[function]
        return function(*args, **(kwargs or {}))


def _is_no_traceback(record: logging.LogRecord) -> bool:
    """Return false for the log record that torch writes when a fake kernel fails.

    As a filter of a logger, this function hides the record. torch raises the same error, so the
    record would only repeat it.
    """
    return not record.getMessage().startswith("failed while attempting to run meta")


def _restore(held: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, attributes in held:
        vars(module).clear()
        vars(module).update(attributes)


def _like(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the shape and dtype of a tensor.

    In fake mode, the empty tensor is fake. torch's own conversion is not used, because it keeps a
    reference to the real tensor, so the memory of the real tensor would stay alive.
    """
    device = HOST if tensor.is_meta else tensor.device
    if tensor.layout is not torch.strided:
        return torch.empty_like(tensor, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def like_sharded(tensor: Any) -> Tensor:
    """Return an empty DTensor with the shape, mesh and placements of the given DTensor."""
    sharded: Tensor = type(tensor).from_local(
        _like(local_part(tensor)),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return sharded


ATTENTION = frozenset(
    {
        F.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)
"""The functions and operators of torch that compute scaled dot product attention."""

HALF = (torch.float16, torch.bfloat16)
# The largest width of a head that flash attention supports.
WIDEST_FLASH = 256
# Multiple to which flash attention pads the width of heads, in elements.
WIDTHS = 8
# Multiple to which efficient attention pads the rows of masks, in elements.
MASK_ROWS = 16

# With these functions, torch's Python functions check whether a `TorchFunctionMode` has to handle
# the call.
_DISPATCHES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_CALLERS = (
    F.multi_head_attention_forward,
    Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
)
"""Functions of torch that can call attention.

A `TorchFunctionMode` does not receive this inner call, because torch turns the mode off while the
mode handles the call of the outer function. To receive the inner call as well, `_AttentionMode`
runs a copy of the outer function, which `_body` creates. Backward is included because it runs
attention again in checkpointed code.
"""


class Attention(NamedTuple):
    """A call of scaled dot product attention, with the arguments of torch's function."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def autocast(self) -> "Attention":
        """Return the call with its tensors cast to the dtype of autocast, if autocast is enabled.

        torch would cast them only after `_AttentionMode` has handled the call, but this mode needs
        the dtype to choose a kernel.
        """
        device = self.query.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        cast: dict[str, Any] = {}
        for name, value in self._asdict().items():
            is_cast = isinstance(value, Tensor) and value.is_floating_point()
            if is_cast and value.dtype is not torch.float64:
                cast[name] = value.to(dtype)
        return self._replace(**cast)

    def kernel(self, *, ampere: bool, family: str = "") -> tuple[str, Any] | None:
        """Return the name and the operator of the kernel that torch would choose on a chip.

        Returns `None` if no enabled kernel supports the call. `ampere` is true for chips of the
        Ampere generation and later generations. `family` is the first word of the chip's name, such
        as `H100`. One rule of torch is ignored: on the smaller chips of a generation, flash
        attention with dropout does not support training with heads wider than 192.
        """
        for name, operator in attention_kernels(cudnn_first=prefers_cudnn(family)).items():
            if self._is_supported_by(name, ampere=ampere, family=family):
                return name, operator
        return None

    def _is_supported_by(self, kernel: str, *, ampere: bool, family: str) -> bool:
        if kernel == "attention_math":
            return True
        if not self._may_be_fused():
            return False
        if kernel == "efficient_attention":
            return self._suits_efficient(ampere=ampere)
        if not ampere or self.query.dtype not in HALF:
            return False
        return self._suits_cudnn(family) if kernel == "cudnn_attention" else self._suits_flash()

    def run(self, name: str, operator: Any) -> Tensor:
        """Run a kernel on this call. As in torch, the arguments are first converted and padded."""
        mask = self.attn_mask
        if mask is not None and mask.dtype is torch.bool:
            zeros = torch.zeros_like(mask, dtype=self.query.dtype)
            mask = zeros.masked_fill_(mask.logical_not(), -math.inf)
        if name == "flash_attention":
            return self._run_flash(operator)
        inputs = (self.query, self.key, self.value)
        settings = (self.dropout_p, self.is_causal)
        if name == "attention_math":
            grouped = self.enable_gqa
            return operator(*inputs, mask, *settings, scale=self.scale, enable_gqa=grouped)[0]  # type: ignore[no-any-return]
        if mask is not None and name == "efficient_attention":
            mask = _with_aligned_rows(mask).expand(*self.query.shape[:3], self.key.shape[-2])
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
        return operator(*inputs, mask, trains, *settings, scale=self.scale)[0]  # type: ignore[no-any-return]

    def _run_flash(self, operator: Any) -> Tensor:
        width = self.query.shape[-1]
        missing = -width % WIDTHS
        inputs = [self.query, self.key, self.value]
        if missing:
            inputs = [F.pad(each, (0, missing)) for each in inputs]
        scale = self.scale or 1 / math.sqrt(width)
        out: Tensor = operator(*inputs, self.dropout_p, self.is_causal, scale=scale)[0]
        return out[..., :width] if missing else out

    def _may_be_fused(self) -> bool:
        query = self.query
        for each in (query, self.key, self.value):
            if each.dim() != 4 or not each.shape[-2] or each.stride(-1) != 1:
                return False
            if each.dtype is not query.dtype or each.shape[0] != query.shape[0]:
                return False
        if query.shape[-1] != self.key.shape[-1]:
            return False
        return self._has_equal_heads() or self._has_grouped_heads()

    def _has_equal_heads(self) -> bool:
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]

    def _has_grouped_heads(self) -> bool:
        heads = self.key.shape[1]
        divides = heads == self.value.shape[1] and self.query.shape[1] % heads == 0
        return self.enable_gqa and divides

    def _suits_flash(self) -> bool:
        is_square = self.query.shape[-2] == self.key.shape[-2]
        suits_mask = self.attn_mask is None and (is_square or not self.is_causal)
        return suits_mask and self.value.shape[-1] == self.query.shape[-1] <= WIDEST_FLASH

    def _suits_cudnn(self, family: str) -> bool:
        # The same rules as in torch's sdp_utils.cpp, which pull requests 161210, 172621 and 174245
        # have changed.
        if self.key.shape[-2] <= 1:
            return False
        release = torch.__version__
        width = self.query.shape[-1]
        value_width = self.value.shape[-1]
        if width % 8 or value_width % 8:
            return False
        widest = 256 if family in HOPPER and release >= "2.9" else 128
        is_latent = (width, value_width) == (192, 128)
        suits_latent = is_latent and family in BLACKWELL and release >= "2.11"
        if max(width, value_width) > widest and not suits_latent:
            return False
        mask = self.attn_mask
        if mask is not None and (mask.dim() not in (2, 4) or mask.requires_grad):
            return False
        suits_dropout = release < "2.12" or self.dropout_p * 16 % 1 == 0
        if self.dropout_p and (self.query.shape[-2] <= 1 or not suits_dropout):
            return False
        warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        return warns_only or not torch.are_deterministic_algorithms_enabled()

    def _suits_efficient(self, *, ampere: bool) -> bool:
        dtype = self.query.dtype
        if dtype not in (*HALF, torch.float32) or (dtype is torch.bfloat16 and not ampere):
            return False
        multiple = 4 if ampere else 1
        if dtype in HALF:
            multiple = 8
        if self.query.shape[-1] % multiple or self.value.shape[-1] % multiple:
            return False
        suits_mask = self.attn_mask is None or self.attn_mask.stride(-1) == 1
        return suits_mask and self._has_equal_heads()


def _with_aligned_rows(mask: Tensor) -> Tensor:
    """Return a mask with the alignment of rows that efficient attention requires.

    The mask is padded if necessary.
    """
    columns = mask.shape[-1]
    is_aligned = not any(stride % MASK_ROWS for stride in mask.stride()[:-1])
    if is_aligned and mask.stride(-1) == 1:
        return mask
    return F.pad(mask, (0, MASK_ROWS - columns % MASK_ROWS))[..., :columns]


def prefers_cudnn(family: str) -> bool:
    """Return whether torch tries cuDNN's attention before all other kernels on a chip.

    `family` is the first word of the chip's name, such as `H100`. If torch was built without CUDA,
    the result is the same as for torch's wheel on PyPI.
    """
    # The same rules as in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. torch 2.9 prefers
    # cuDNN on compute capability 9.0 and 10.0 if its version is at least 9.9. Since torch 2.10,
    # torch prefers cuDNN also on compute capability 10.3, but only a version later than 9.15.0
    # (pull requests 162073, 170800 and 171627).
    release = torch.__version__
    if release < "2.9" or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    cudnn = None
    if torch.version.cuda:
        cudnn = torch.backends.cudnn.version()
    if release < "2.11":
        cudnn = cudnn or 91002
    else:
        cudnn = cudnn or 91900
    if release < "2.10":
        return family in (*HOPPER, "B200", "GB200") and cudnn >= 90900
    return family in HOPPER + BLACKWELL and cudnn >= 91501


@contextlib.contextmanager
def attention_on(chip: Hardware | None) -> Iterator[list[Note]]:
    """Make attention use the kernels of an NVIDIA chip inside a context.

    For a chip that is not in the table or not from NVIDIA, nothing changes. At the end of the
    context, a note with the names of the kernels is added to the list that the context provides. If
    CUDA is not available, autocast for CUDA raises an error in this context. torch would only warn
    and turn autocast off, so the estimate would be wrong.
    """
    notes: list[Note] = []
    if chip is None or vendor_of(chip.name) != "NVIDIA":
        yield notes
        return
    with warnings.catch_warnings(), _AttentionMode(chip) as mode:
        warnings.filterwarnings("error", ".*CUDA is not available.*Disabling")
        yield notes
    if mode.calls:
        notes.append(Note(code="attention_on_cuda", subject=chip.name, values=dict(mode.calls)))


class _AttentionMode(TorchFunctionMode):
    """Runs attention and dropout with the kernels of a chip.

    This mode also counts the calls of each attention kernel, for a note in the profile.
    """

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
        # torch turns a mode off while the mode handles a call. The mode is turned on again to
        # receive the calls in the body of the function.
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
                "the attention kernels that sdpa_kernel enables do not support this call on "
                f"{self._chip.name}: enable SDPBackend.MATH as well"
            )
        name, operator = found
        self.calls[name] += 1
        with torch.autocast(call.query.device.type, enabled=False):
            return call.run(name, operator)


def _dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's own
    """Run dropout with CUDA's kernel, which keeps a mask of one byte per element for backward.

    The mask of the CPU's kernel has the dtype of the input, so its memory would be wrong for a GPU.
    """
    if training and 0 < p < 1 and not inplace and x.device == HOST:
        return torch.native_dropout(x, p, train=True)[0]
    return F.dropout(x, p, training, inplace)


def _body(function: Any) -> FunctionType:
    """Return a copy of a torch function that runs its body even while a mode is active.

    The original function would pass the call to the mode again, in an endless recursion.
    """
    plain = dict.fromkeys(_DISPATCHES, lambda *_: False)
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **plain},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
