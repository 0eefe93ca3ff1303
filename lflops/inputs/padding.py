"""Find the share of a batch that is padding.

A mask counts as a padding mask if it has one of the usual names, such as `attention_mask`, and if
the masked token ids or features look like padding: they are at the ends of rows, and all have the
same value, such as the id of the padding token. Other masks select tokens for the loss or for
global attention, and do not show padding.

In a batch without a padding mask, the end of a row counts as padding if all token ids there are the
same, or if all features there are zero.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lflops.inputs.batch import BatchTensors
from lflops.inputs.batch_size import INPUT_IDS
from lflops.profile.series import sums
from lflops.torch_private.dispatch_modes import without_modes
from lflops.torch_private.tensors import is_integer, without_overrides

MASK = "attention_mask"
"""Ending of the names of padding masks.

A mask with a prefix, such as `anchor_attention_mask`, applies to the token ids with the same
prefix, such as `anchor_input_ids`.
"""

PADDING_MASK = "padding_mask"
"""Another ending: a tensor with this at the end of its name is a padding mask, too."""

SHORT = 8
"""Minimum length of the rows that are searched for padding."""

MOST_ROWS = 64
"""Maximum number of rows of a batch to search for padding.

There is a limit because the host waits for the GPU when it reads rows from it.
"""

MOST_FEATURES = 16
"""Number of features to read at each position. The position may be padding if all are zero."""

MOST_MARKS = 16
"""Maximum number of different integers in a tensor that holds marks, such as segment ids.

A tensor with more different integers holds token ids. Only token ids are searched for padding.
"""

ROWS = 2
"""Number of dimensions of a tensor with one value for each position of each row."""

FEATURES = 3
"""Number of dimensions of a tensor with several features for each position of each row."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The number of padding positions of a tensor. A position is one element of a row (a sequence).

    Attributes:
        padded: Number of positions that are padding.
        total: Number of all positions.
    """

    padded: int
    total: int


@dataclass(frozen=True, kw_only=True)
class BatchPadding:
    """The positions of a batch that may be padding, as counted in three kinds of tensors.

    A position is one element of a row (a sequence). `share` uses only one of the three kinds. It is
    called later, when the tensors that hold tokens are known. The keys of the mappings are the
    names of tensors.

    Attributes:
        masks: Positions according to padding masks. Masked positions are padding.
        ids: Positions of integer tensors. A repeated value at the end of a row may be padding.
        features: Positions of tensors with features. Zeros at the end of a row may be padding.
    """

    masks: Mapping[str, Positions]
    ids: Mapping[str, Positions]
    features: Mapping[str, Positions]

    def share(self, token_ids: Collection[str]) -> float | None:
        """Return the share of positions that are padding, from 0 to 1, or `None` if it is unknown.

        Args:
            token_ids: The names of the tensors that hold the tokens.
        """
        tokens = {name: each for name, each in self.ids.items() if _is_one_of(name, token_ids)}
        for positions in (self.masks, tokens, self.features):
            counts = sums(list(positions.values()), "padded", "total")
            if counts["total"]:
                return counts["padded"] / counts["total"]
        return None


def padding_of(batch: BatchTensors | None) -> BatchPadding | None:
    """Find the positions of a batch that may be padding; `None` if the batch cannot be read."""
    if batch is None:
        return None
    masks: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    with without_modes(), without_overrides(), torch.no_grad():
        for name, tensor in zip(*batch, strict=True):
            # Reading a tensor of a batch may raise an error.
            with contextlib.suppress(Exception):
                if not _may_be_padded(tensor):
                    continue
                rows = tensor[:MOST_ROWS]
                if _is_padding_mask(name):
                    masks[name] = rows
                elif not name.lower().endswith("mask"):
                    others[name] = rows
        return BatchPadding(
            masks=_positions_of(masks, lambda name, mask: _masked(name, mask, others)),
            ids=_positions_of(others, lambda _, ids: _repeated(ids)),
            features=_positions_of(others, lambda _, features: _zeros(features)),
        )


def _positions_of(
    tensors: Mapping[str, Tensor], read: Callable[[str, Tensor], Positions | None]
) -> dict[str, Positions]:
    """Return the result of `read` for each tensor, keyed by the name of the tensor.

    Tensors for which `read` fails or returns `None` are left out.
    """
    found = {}
    for name, tensor in tensors.items():
        with contextlib.suppress(Exception):
            positions = read(name, tensor)
            if positions is not None:
                found[name] = positions
    return found


def _is_one_of(name: str, names: Collection[str]) -> bool:
    """Return whether a tensor is named `*input_ids`, or has one of the given names.

    If the batch itself is a tensor, `name` is empty, and `names` has `0` for this tensor.
    """
    return name.lower().endswith(INPUT_IDS) or name in names or (not name and "0" in names)


def _may_be_padded(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.device.type == "meta":
        return False
    return tensor.dim() in {ROWS, FEATURES} and tensor.shape[1] >= SHORT


def _is_padding_mask(path: str) -> bool:
    name = path.lower()
    return name.endswith((MASK, PADDING_MASK))


def _masked(path: str, mask: Tensor, others: Mapping[str, Tensor]) -> Positions | None:
    """Count the masked positions of a mask.

    Returns `None` if no other tensor shows that the masked positions are padding.
    """
    if mask.dim() != ROWS:
        return None
    companions = _companions(path, mask, others)
    is_zero = mask == 0
    if is_zero.all() or not is_zero.any():
        # The mask is constant, so it masks nothing. No training run masks everything.
        if not companions:
            return None
        return Positions(padded=0, total=mask.numel())
    confirmed = []
    for masked in (is_zero, ~is_zero):
        if _is_at_ends(masked) and any(_is_constant(each, masked) for each in companions):
            confirmed.append(masked)
    if len(confirmed) != 1:
        return None
    return Positions(padded=int(confirmed[0].sum()), total=mask.numel())


def _companions(path: str, mask: Tensor, others: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """Return the tensors to which a mask may apply.

    A mask with a prefix, such as `anchor_attention_mask`, applies only to the ids with this prefix.
    If there are no such ids, the mask applies to no tensor. For example, `global_attention_mask` is
    not about padding. A mask without a prefix applies to `input_ids`. If there are no `input_ids`,
    it may apply to any tensor of the same shape.
    """
    name = path.lower()
    if name.endswith(MASK):
        prefix = name.removesuffix(MASK)
        ids = {key: each for key, each in others.items() if key.lower() == prefix + INPUT_IDS}
        is_prefixed = prefix.rpartition(".")[2] != ""
        if ids or is_prefixed:
            others = ids
    return [each for each in others.values() if each.shape[:2] == mask.shape]


def _is_at_ends(masked: Tensor) -> bool:
    """Return whether the masked positions of each row are all at its start or all at its end."""
    changes = (masked[:, 1:] != masked[:, :-1]).sum(1)
    return bool((changes <= 1).all())


def _is_constant(values: Tensor, masked: Tensor) -> bool:
    """Return whether all masked values are the same, and at least one other value is different."""
    inside = values[masked]
    outside = values[~masked]
    first = inside.flatten()[0]
    return bool((inside == first).all()) and bool((outside != first).any())


def _repeated(ids: Tensor) -> Positions | None:
    """Count the positions at the ends of rows that have the same id as the last position.

    Returns `None` if the tensor does not hold token ids.
    """
    if ids.dim() != ROWS or not is_integer(ids) or ids.unique().numel() <= MOST_MARKS:
        return None
    return _runs_at_ends(ids == ids[:, -1:])


def _zeros(features: Tensor) -> Positions | None:
    """Count the positions at the ends of rows at which all features are zero.

    Returns `None` if the last feature is zero everywhere. The tensor may then hold images without a
    dimension for channels. The black border of an image is not padding.
    """
    if features.dim() != FEATURES or not features.is_floating_point():
        return None
    if not features[:, :, -1].any():
        return None
    return _runs_at_ends((features[:, :, :MOST_FEATURES] == 0).all(-1))


def _runs_at_ends(is_equal: Tensor) -> Positions:
    """Count the consecutive true values at the end of each row, and add up the counts.

    A single true value at the end of a row counts as 0, because it does not show a repetition.
    """
    runs = is_equal.flip(1).cumprod(1).sum(1)
    return Positions(padded=int(runs[runs > 1].sum()), total=is_equal.numel())
