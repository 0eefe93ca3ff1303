"""Differences between the installed version of torch and other versions.

These are the kinds of attention with a fused kernel on the CPU, and the cases that cannot run.
"""

import inspect

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

__all__ = ["FUSES_GROUPS", "FUSES_WITHOUT_HEADS", "LACKING", "runs_here"]


def _fuses(queries: torch.Tensor, keys: torch.Tensor, **options: bool) -> bool:
    return torch._fused_sdp_choice(queries, keys, keys, **options) != SDPBackend.MATH.value


FUSES_GROUPS = _fuses(torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), enable_gqa=True)
"""Whether attention has a fused kernel if groups of heads share keys.

Without a fused kernel, the scores are kept for backward, and nothing is skipped for a mask.
"""

FUSES_WITHOUT_HEADS = _fuses(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
"""Whether attention has a fused kernel if there is no dimension for heads."""

_KERNELS = {
    *torch._C._dispatch_get_registrations_for_dispatch_key("CPU"),
    *torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd"),
}


def runs_here(operator: str) -> bool:
    """Return whether the CPU has a kernel for an ATen operator."""
    return f"aten::{operator}" in _KERNELS


def _transforms_back() -> bool:
    try:
        torch.fft.irfft(torch.fft.rfft(torch.ones(2, 8, requires_grad=True))).sum().backward()
    except RuntimeError:
        return False
    return True


def _parameters_of_varlen() -> set[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return set()
    return set(inspect.signature(varlen_attn).parameters)


_VARLEN = _parameters_of_varlen()

LACKING: dict[str, str] = {}
"""For each case that cannot run with the installed version of torch, the reason."""


def _need(has_it: bool, reason: str, *cases: str) -> None:
    """Add cases to `LACKING` if torch does not have something that they need."""
    if not has_it:
        for case in cases:
            LACKING[case] = f"torch {torch.__version__} {reason}"


_need(runs_here("_foreach_mm"), "has no _foreach_mm", "foreach_mm")
_need(
    runs_here("_grouped_mm") and hasattr(F, "grouped_mm"),
    "has no grouped product on the CPU",
    "grouped_mm of rows that go to experts",
    "grouped_mm of a batch",
    "grouped_mm over parts of the inner dimension",
    "grouped_mm to parts of the columns",
    "Mixtral, its experts one product",
)
_need(
    runs_here("_scaled_mm_v2"),
    "has no _scaled_mm_v2 on the CPU",
    "linear of floats of eight bits by its public name",
)
_need(
    _VARLEN >= {"window_size", "enable_gqa"},
    "has no varlen_attn with windows and groups",
    "varlen_attn",
    "varlen_attn, causal",
    "varlen_attn in a window",
    "varlen_attn to other sequences",
    "varlen_attn of groups of heads",
    "varlen_attn without gradients",
    "an attention layer on packed sequences",
    "Llama, packed, by flash attention",
)
_need(
    hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"),
    "has no attention into a tensor",
    "varlen_attn into a tensor",
    "flash attention into a tensor",
)
_need(
    _transforms_back(),
    "cannot compute the backward of irfft, because MKL fails",
    "Fourier transforms",
)
