"""What the torch at hand does otherwise than the one that CI runs.

Which attention it fuses on this processor, and what it lacks.
"""

import inspect

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

__all__ = ["FUSES_GROUPS", "FUSES_WITHOUT_HEADS", "LACKING", "runs_here"]


def _fuses(queries: torch.Tensor, keys: torch.Tensor, **options: bool) -> bool:
    return torch._fused_sdp_choice(queries, keys, keys, **options) != SDPBackend.MATH.value


FUSES_GROUPS = _fuses(torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), enable_gqa=True)
"""Whether heads that share keys have a fused kernel.

Matrix products keep the scores, and leave nothing out for a mask.
"""

FUSES_WITHOUT_HEADS = _fuses(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
"""Whether queries of one head without its dimension have one."""

_KERNELS = {
    name
    for key in ("CPU", "CompositeExplicitAutograd")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
}


def runs_here(operator: str) -> bool:
    """Whether the processor has a kernel for an operator of ATen's."""
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

LACKING = {
    case: f"torch {torch.__version__} {lack}"
    for lack, is_there, cases in (
        ("has no _foreach_mm", runs_here("_foreach_mm"), ("foreach_mm",)),
        (
            "has no grouped product on the CPU",
            runs_here("_grouped_mm") and hasattr(F, "grouped_mm"),
            (
                "grouped_mm of rows that go to experts",
                "grouped_mm of a batch",
                "grouped_mm over parts of the inner dimension",
                "grouped_mm to parts of the columns",
                "Mixtral, its experts one product",
            ),
        ),
        (
            "has no _scaled_mm_v2 on the CPU",
            runs_here("_scaled_mm_v2"),
            ("linear of floats of eight bits by its public name",),
        ),
        (
            "has no varlen_attn with windows and groups",
            _VARLEN >= {"window_size", "enable_gqa"},
            (
                *(
                    f"varlen_attn{kind}"
                    for kind in (
                        "",
                        ", causal",
                        " in a window",
                        " to other sequences",
                        " of groups of heads",
                    )
                ),
                "varlen_attn without gradients",
                "an attention layer on packed sequences",
                "Llama, packed, by flash attention",
            ),
        ),
        (
            "has no attention into a tensor",
            hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"),
            ("varlen_attn into a tensor", "flash attention into a tensor"),
        ),
        ("cannot go backward from irfft: MKL refuses", _transforms_back(), ("Fourier transforms",)),
    )
    if not is_there
    for case in cases
}
"""Cases that cannot run, with the reason."""
