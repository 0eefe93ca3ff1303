"""Packed sequences that a dense mask of attention separates: how many scores are within a sequence."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lflops.collect.operator_costs.table import known
from lflops.collect.torch_private.dispatch_modes import without_modes

__all__ = ["masked_scores", "squares"]

MASK_AT = {
    "_scaled_dot_product_flash_attention_for_cpu": (5, "attn_mask"),
    "_scaled_dot_product_efficient_attention": (3, "attn_bias"),
    "_scaled_dot_product_cudnn_attention": (3, "attn_bias"),
    "_scaled_dot_product_fused_attention_overrideable": (3, "attn_bias"),
}
"""The mask's place and name in fused attention."""
MOST_READ = 1 << 24
"""Elements of a mask; a larger mask is not read."""


class MaskedScores(NamedTuple):
    """Scores of one call whose dense mask separates sequences: of the whole squares, and those of two tokens of one sequence."""

    computed: int
    within: int


def squares(first: Tensor, last: Tensor, undivided: int) -> int:
    """Queries times keys of each part that sees nothing of the others; `undivided` if there is one part only.

    `first` and `last` are the keys that each query sees; for one that sees none, the last is -1.
    """
    spans = sorted((begin, end) for begin, end in zip(first.tolist(), last.tolist(), strict=True) if end >= 0)
    parts: list[list[int]] = []  # queries, first key, last key
    for begin, end in spans:
        if parts and begin <= parts[-1][2]:
            parts[-1][0] += 1
            parts[-1][2] = max(parts[-1][2], end)
        else:
            parts.append([1, begin, end])
    return undivided if len(parts) <= 1 else sum(queries * (end - begin + 1) for queries, begin, end in parts)


def masked_scores(operator: str, args: Any, kwargs: Any) -> MaskedScores | None:
    """The scores of a call of fused attention; `None` if it has no mask, or a mask that separates nothing or is unknown."""
    if operator not in MASK_AT:
        return None
    place, name = MASK_AT[operator]
    given = args[place] if len(args) > place else kwargs.get(name)
    mask = known(given) if isinstance(given, Tensor) else None
    if mask is None or mask.dim() < 2:
        return None
    try:
        with without_modes(), torch.no_grad():
            return _separated(mask, args[0].shape[0] * args[0].shape[1], args[1].shape[-2])
    except Exception:  # noqa: BLE001 - as out of memory: the run goes on without the note
        return None


def _separated(mask: Tensor, heads: int, keys: int) -> MaskedScores | None:
    for dimension in range(mask.dim() - 2):  # one for all batches or heads
        if not mask.stride(dimension):
            mask = mask.narrow(dimension, 0, 1)
    mask = mask.reshape(-1, *mask.shape[-2:])[..., :keys]  # kernels may need longer rows
    count, rows, columns = mask.shape
    if not mask.numel() or mask.numel() > MOST_READ:
        return None
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    ones = seen.to(torch.uint8)
    first, last = ones.argmax(-1), columns - 1 - ones.flip(-1).argmax(-1)
    last = torch.where(seen.any(-1), last, -1)
    within = sum(squares(*each, rows * columns) for each in zip(first, last, strict=True))
    each, computed = heads // count, count * rows * columns
    return MaskedScores(each * computed, each * within) if within < computed else None
