"""Count the scores that attention computes under dense masks and masks of flex attention.

A score is the dot product of one query and one key. Without a mask, each query is multiplied by
each key, so the scores form one square: queries × keys. If several sequences are packed into one
row, the mask separates them, and only one smaller square for each sequence is needed. A causal mask
or a sliding window does not divide the square, because each token still sees the token before it.

For flex attention, the counted work is the sum of these squares. The executed work includes only
the blocks that the kernel does not skip. For a dense mask, the kernel computes the whole square. A
note in the profile reports how many of these scores are needed.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lflops.flop_counter.operator_costs import cost_of_call, known, values_of
from lflops.formulas.attention.fused import (
    Scores,
    attention_backward_of_scores,
    attention_of_scores,
)
from lflops.formulas.table import Cost
from lflops.inputs.tensors import argument
from lflops.torch_private.dispatch_modes import without_modes

MASK_AT = {
    "_scaled_dot_product_flash_attention_for_cpu": (5, "attn_mask"),
    "_scaled_dot_product_efficient_attention": (3, "attn_bias"),
    "_scaled_dot_product_cudnn_attention": (3, "attn_bias"),
    "_scaled_dot_product_fused_attention_overrideable": (3, "attn_bias"),
}
"""For each fused attention operator, the position and the name of its mask argument."""

MOST_READ = 1 << 24
"""Maximum number of elements of a dense mask. The values of a larger mask are not read."""

COUNTS_DIMENSIONS = 3
"""Number of dimensions of a block mask's tensors that contain the number of blocks in each row.

The shape of these tensors is `[batch, heads, rows of blocks]`. `_blocks` recognizes the tensors of
a block mask by their number of dimensions.
"""

INDICES_DIMENSIONS = 4
"""Number of dimensions of the tensors in which a block mask stores the column of each block.

The shape of these tensors is `[batch, heads, rows of blocks, blocks]`.
"""

MOST_EVALUATED = 1 << 26
"""Maximum number of (query, key) pairs for which the mask of a flex attention call is evaluated.

If there are more pairs, all queries × keys are counted, which is an upper bound.
"""


class MaskedScores(NamedTuple):
    """The numbers of computed and needed scores in one attention call with a dense mask.

    The mask separates packed sequences.

    Attributes:
        computed: The number of scores that the kernel computes: all queries × all keys.
        within: The number of scores that are needed: the scores between tokens of the same
            sequence.
    """

    computed: int
    within: int


def scores_within_sequences(first: Tensor, last: Tensor, undivided: int) -> int:
    """Return the number of scores that are needed if the mask separates packed sequences.

    Queries whose ranges of keys overlap belong to the same sequence. The result is queries × keys
    of each sequence, summed over all sequences.

    Args:
        first: The first key that each query sees.
        last: The last key that each query sees, or -1 if the query sees none.
        undivided: The number to return if the mask does not separate sequences.
    """
    spans = []
    for begin, end in zip(first.tolist(), last.tolist(), strict=True):
        if end >= 0:
            spans.append((begin, end))
    # One group for each sequence: the number of its queries, its first key and its last key.
    groups: list[list[int]] = []
    for begin, end in sorted(spans):
        if groups and begin <= groups[-1][2]:
            group = groups[-1]
            group[0] += 1
            group[2] = max(group[2], end)
        else:
            groups.append([1, begin, end])
    if len(groups) <= 1:
        return undivided
    return sum(queries * (end - begin + 1) for queries, begin, end in groups)


def masked_scores(operator: str, args: Any, kwargs: Any) -> MaskedScores | None:
    """Return the numbers of scores in a fused attention call whose mask separates sequences.

    Return `None` if the call has no mask, if the values of the mask are unknown, or if the mask
    does not separate sequences.
    """
    if operator not in MASK_AT:
        return None
    position, name = MASK_AT[operator]
    passed = argument(args, kwargs, position, name)
    mask = None
    if isinstance(passed, Tensor):
        mask = known(passed)
    if mask is None or mask.dim() < 2:
        return None
    query, key = args[:2]
    try:
        with without_modes(), torch.no_grad():
            return _separated(mask, query.shape[0] * query.shape[1], key.shape[-2])
    except Exception:  # noqa: BLE001 - such as out of memory: the run continues without the note
        return None


def _separated(mask: Tensor, heads: int, keys: int) -> MaskedScores | None:
    """Return the numbers of computed and needed scores under a dense mask.

    Return `None` if the mask separates no sequences, or is larger than `MOST_READ`.

    Args:
        mask: The values of the mask.
        heads: The number of attention heads, times the batch size.
        keys: The number of keys, without padding.
    """
    # A mask that is expanded over batches or heads is read once.
    for dimension in range(mask.dim() - 2):
        if not mask.stride(dimension):
            mask = mask.narrow(dimension, 0, 1)
    # Rows may be padded to the length that the kernel needs.
    mask = mask.reshape(-1, *mask.shape[-2:])[..., :keys]
    count, rows, columns = mask.shape
    if not mask.numel() or mask.numel() > MOST_READ:
        return None
    seen = mask
    if mask.dtype is not torch.bool:
        seen = mask > torch.finfo(mask.dtype).min / 2
    ones = seen.to(torch.uint8)
    first = ones.argmax(-1)
    last = columns - 1 - ones.flip(-1).argmax(-1)
    last = torch.where(seen.any(-1), last, -1)
    within = 0
    for first_keys, last_keys in zip(first, last, strict=True):
        within += scores_within_sequences(first_keys, last_keys, rows * columns)
    computed = count * rows * columns
    if within >= computed:
        return None
    heads_per_mask = heads // count
    return MaskedScores(heads_per_mask * computed, heads_per_mask * within)


class _Blocks(NamedTuple):
    """The block mask of a flex attention call.

    The mask divides the square of queries × keys into blocks. The kernel skips all blocks that the
    mask does not list.

    Attributes:
        counts: One or two tensors with the number of blocks that run in each row of blocks. The
            first tensor counts the blocks that are partly masked. The second tensor, if there is
            one, counts the blocks in which every query sees every key.
        indices: The columns of the blocks in `counts`, one tensor for each tensor of `counts`.
        sizes: The number of queries (rows) and of keys (columns) in a block.
        mask: A function that takes the indices of a batch, head, query and key, and returns whether
            the query sees the key.
        buffers: Additional arguments of `mask`.
    """

    counts: list[Tensor]
    indices: list[Tensor]
    sizes: tuple[int, int]
    mask: Any
    buffers: tuple[Any, ...]


@cost_of_call("flex_attention")
def flex_attention(args: Any, kwargs: Any, out: Any) -> Cost:
    """Return the cost of flex attention's forward pass. A `score_mod` function counts as free."""
    query, key, value = (tuple(operand.shape) for operand in args[:3])
    scores = _scores(query, key, _blocks(args, kwargs, 4))
    return attention_of_scores(scores, query[-1], value[-1])


@cost_of_call("flex_attention_backward")
def flex_attention_backward(args: Any, kwargs: Any, out: Any) -> Cost:
    """Return the cost of flex attention's backward pass, which recomputes the scores."""
    query, key, value = (tuple(operand.shape) for operand in args[:3])
    scores = _scores(query, key, _blocks(args, kwargs, 9))
    return attention_backward_of_scores(scores, query[-1], value[-1])


def _blocks(args: Any, kwargs: Any, position: int) -> _Blocks:
    """Return the block mask that a call passes at `position` or as the keyword `block_mask`."""
    block_mask = argument(args, kwargs, position, "block_mask")
    buffers = argument(args, kwargs, position + 4, "mask_mod_other_buffers")
    counts: list[Tensor] = []
    indices: list[Tensor] = []
    integers: list[int] = []
    for value in block_mask:
        if isinstance(value, int):
            integers.append(value)
        elif isinstance(value, Tensor) and value.dim() == COUNTS_DIMENSIONS:
            counts.append(value)
        elif isinstance(value, Tensor) and value.dim() == INDICES_DIMENSIONS:
            indices.append(value)
    # The first half of the tensors lists the blocks by query. The second half lists the same blocks
    # by key, for backward.
    counts = counts[: len(counts) // 2]
    indices = indices[: len(indices) // 2]
    rows, columns = integers[-2:]
    return _Blocks(counts, indices, (rows, columns), block_mask[-1], tuple(buffers or ()))


def _scores(query: Any, key: Any, blocks: _Blocks) -> Scores:
    """Return the number of scores to count, and the number that the kernel executes.

    The scores to count are queries × keys of each sequence that the mask separates. The kernel
    executes only the scores in the blocks that it does not skip.
    """
    heads = prod(query[:2])
    rows = query[-2]
    columns = key[-2]
    square = heads * rows * columns
    blocks_to_run = 0
    for counts in blocks.counts:
        numbers = values_of(counts)
        if numbers is None:
            return Scores(square, square, known=False)
        blocks_to_run += sum(numbers)
    heads_per_mask = heads // max(prod(blocks.counts[0].shape[:2]), 1)
    covered = min(square, blocks_to_run * heads_per_mask * prod(blocks.sizes))
    try:
        with without_modes(), torch.no_grad():
            whole = _divided(blocks, rows, columns) * heads_per_mask
    except Exception:  # noqa: BLE001 - the user's mask fails, or reads a value that is unknown
        return Scores(square, covered, known=False)
    # Blocks extend past the ends of sequences, so they may cover more scores than are needed.
    return Scores(whole, min(covered, whole), known=True)


def _divided(blocks: _Blocks, rows: int, columns: int) -> int:
    """Return the number of scores that are needed, given the sequences that the mask separates.

    The result is summed over the batches and heads of the mask. For a mask that separates no
    sequences, it is the number of all queries × keys.

    Raises:
        ValueError: The mask would have to be evaluated for too many (query, key) pairs.
    """
    batches, heads = blocks.counts[0].shape[:2]
    if getattr(blocks.mask, "__name__", "") == "noop_mask":
        return batches * heads * rows * columns
    height, width = blocks.sizes
    evaluated = int(blocks.counts[0].sum()) * min(height, rows) * min(width, columns)
    if evaluated > MOST_EVALUATED:
        raise ValueError(f"the mask has too many query-key pairs: {evaluated}")
    total = 0
    for batch in range(batches):
        for head in range(heads):
            first, last = _seen(blocks, (batch, head), rows, columns)
            total += scores_within_sequences(first, last, rows * columns)
    return total


def _seen(blocks: _Blocks, at: tuple[int, int], rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that each query sees, in one batch and head of the mask.

    `at` has the indices of the batch and the head. If a query sees no key, its last key is -1.
    """
    device = blocks.counts[0].device
    first = torch.full((rows,), columns, device=device)
    last = torch.full((rows,), -1, device=device)
    batch, head = (torch.tensor(index, device=device) for index in at)
    height, width = blocks.sizes
    for is_whole, row, column in _places(blocks, at):
        queries = torch.arange(row * height, min((row + 1) * height, rows), device=device)
        keys = torch.arange(column * width, min((column + 1) * width, columns), device=device)
        if not len(queries) or not len(keys):
            continue
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
        if not is_whole:
            seen = seen & blocks.mask(batch, head, queries[:, None], keys[None, :], *blocks.buffers)
        first[queries] = torch.minimum(first[queries], torch.where(seen, keys, columns).amin(1))
        last[queries] = torch.maximum(last[queries], torch.where(seen, keys, -1).amax(1))
    return first, last


def _places(blocks: _Blocks, at: tuple[int, int]) -> Iterator[tuple[bool, int, int]]:
    """Yield the blocks that run in one batch and head of the mask.

    `at` has the indices of the batch and the head. For each block, yield three values: whether
    every query of the block sees every key of the block, the row of the block, and its column.
    """
    for kind, (counts, indices) in enumerate(zip(blocks.counts, blocks.indices, strict=True)):
        is_whole = kind == 1
        columns_of_rows = indices[at].tolist()
        for row, count in enumerate(counts[at].tolist()):
            for column in columns_of_rows[row][:count]:
                yield is_whole, row, column
