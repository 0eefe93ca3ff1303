"""The kernels that `scaled_dot_product_attention` and `dropout` use on an NVIDIA chip, run on fake CPU tensors.

Torch chooses the kernel in native code, by the device of the tensors. Here the choice follows its rules for CUDA: the first enabled kernel,
in torch's order of preference, that supports the call. The fake kernels of all of them work on any device.
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lflops.collect.estimate.fake_tensors import HOST
from lflops.collect.torch_private.operators import attention_kernels
from lflops.errors import CountError
from lflops.hardware.chips import Hardware, vendor_of
from lflops.profile.notes import Note

ATTENTION = frozenset(
    {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
)
"""The functions and operators that stand for attention."""

HALF = (torch.float16, torch.bfloat16)
WIDEST_FLASH, WIDEST_CUDNN = 256, 128  # the widest heads that the kernels support
WIDTHS, MASK_ROWS = 8, 16  # flash attention pads heads, and efficient attention pads the rows of masks, to a multiple of these

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_CALLERS = (F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""Torch's Python functions that may run attention; backward runs checkpointed code. They dispatch to modes themselves."""


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
            if isinstance(each, Tensor) and each.is_floating_point() and each.dtype is not torch.float64
        }
        return self._replace(**cast)

    def kernel(self, *, ampere: bool) -> tuple[str, Any] | None:
        """Name and operator of the kernel that torch chooses; `None` if no enabled kernel supports the call."""
        # One rule is left out: the smaller chips of a generation do not train heads wider than 192 with dropout
        fused = self._may_be_fused()
        halved = fused and ampere and self.query.dtype in HALF
        width, of_values, mask = self.query.shape[-1], self.value.shape[-1], self.attn_mask
        is_square = not self.is_causal or self.query.shape[-2] == self.key.shape[-2]
        suits_flash = mask is None and is_square and of_values == width <= WIDEST_FLASH
        may_mask = mask is None or (mask.dim() in (2, 4) and not mask.requires_grad)
        are_narrow = all(each <= WIDEST_CUDNN and not each % 8 for each in (width, of_values))
        takes = {
            "flash_attention": halved and suits_flash,
            "efficient_attention": fused and self._suits_efficient(ampere=ampere),
            "cudnn_attention": halved and may_mask and self.key.shape[-2] > 1 and are_narrow,
            "attention_math": True,
        }
        return next(((name, operator) for name, operator in attention_kernels().items() if takes[name]), None)

    def run(self, name: str, operator: Any) -> Tensor:
        """Run one of the kernels, after the same preparation of the arguments as in torch."""
        query, key, value, mask, *how, scale, grouped = self
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
        if name == "attention_math":
            return operator(query, key, value, mask, *how, scale=scale, enable_gqa=grouped)[0]  # type: ignore[no-any-return]
        if name == "flash_attention":
            missing = -query.shape[-1] % WIDTHS
            query, key, value = (F.pad(each, (0, missing)) if missing else each for each in self[:3])
            out: Tensor = operator(query, key, value, *how, scale=scale or 1 / math.sqrt(self.query.shape[-1]))[0]
            return out[..., : self.query.shape[-1]] if missing else out
        if mask is not None and name == "efficient_attention":
            mask = _in_rows(mask).expand(*query.shape[:3], key.shape[-2])
        goes_backward = torch.is_grad_enabled() and any(each.requires_grad for each in self[:3])
        return operator(query, key, value, mask, goes_backward, *how, scale=scale)[0]  # type: ignore[no-any-return]

    def _may_be_fused(self) -> bool:
        if any(each.dim() != 4 or not each.shape[-2] or each.stride(-1) != 1 for each in self[:3]):
            return False
        same = all(each.dtype is self.query.dtype and each.shape[0] == self.query.shape[0] for each in self[:3])
        heads, of_values = self.key.shape[1], self.value.shape[1]
        fits = self._has_all_heads() or (self.enable_gqa and heads == of_values and self.query.shape[1] % heads == 0)
        return same and fits and self.query.shape[-1] == self.key.shape[-1]

    def _has_all_heads(self) -> bool:
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]

    def _suits_efficient(self, *, ampere: bool) -> bool:
        dtypes = (*HALF, torch.float32) if ampere else (torch.float16, torch.float32)
        multiple = 8 if self.query.dtype in HALF else 4 if ampere else 1
        even = not self.query.shape[-1] % multiple and not self.value.shape[-1] % multiple
        masked = self.attn_mask is None or self.attn_mask.stride(-1) == 1
        return self.query.dtype in dtypes and even and masked and self._has_all_heads()


@contextlib.contextmanager
def attention_on(chip: Hardware | None) -> Iterator[list[Note]]:
    """A context in which attention runs as on an NVIDIA chip of the table. At the end, a note lists the kernels."""
    # Without CUDA, autocast for CUDA is an error in it. Torch only warns and ignores autocast, which is right for no chip.
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
        self._ampere = "bf16" in chip.peak_flops_per_second
        self._bodies = {caller: _body(caller) for caller in _CALLERS}
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in ATTENTION:
            return self._attend(function, Attention(*args, **kwargs))
        if function is F.dropout:
            return _dropped(*args, **kwargs)
        body = self._bodies.get(function)
        if body is None:
            return function(*args, **kwargs)
        with self:  # a mode is off while it handles a call, but must see the calls of the body
            return body(*args, **kwargs)

    def _attend(self, function: Any, call: Attention) -> Tensor:
        if call.query.is_nested or call.query.device != HOST:
            return function(**call._asdict())  # type: ignore[no-any-return]
        call = call.autocast()
        found = call.kernel(ampere=self._ampere)
        if found is None:
            raise CountError(f"no kernel of attention that sdpa_kernel leaves on takes this call on {self._chip.name}: leave on MATH")
        self.calls[found[0]] += 1
        with torch.autocast(call.query.device.type, enabled=False):
            return call.run(*found)


def _dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's own
    """Dropout as CUDA's kernel makes it: its mask has a byte an element. A CPU keeps the noise in the dtype of the input."""
    if training and 0 < p < 1 and not inplace and x.device == HOST:
        return torch.native_dropout(x, p, train=True)[0]
    return F.dropout(x, p, training, inplace)


def _in_rows(mask: Tensor) -> Tensor:
    if mask.stride(-1) == 1 and not any(stride % MASK_ROWS for stride in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, MASK_ROWS - mask.shape[-1] % MASK_ROWS))[..., : mask.shape[-1]]


def _body(function: Any) -> FunctionType:
    """The same function without its dispatch to modes. With a mode active, the original would only hand the call to the mode again."""
    plain = dict.fromkeys(_ASKS, lambda *_: False)
    copy = FunctionType(
        function.__code__, {**function.__globals__, **plain}, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
