"""Flex attention: the full square is counted, the blocks that its mask lets run are executed."""

from math import prod
from typing import Any

from torch import Tensor

from lflops.collect.operator_costs.table import cost_of_call
from lflops.formulas.attention import Mask, attention, attention_backward
from lflops.formulas.table import Cost

BLOCKS = 3
"""Dimensions of a count of blocks: batch, heads, rows of blocks. A 1 stands for all alike."""


@cost_of_call("flex_attention")
def flex_attention(args: Any, kwargs: Any, out: Any) -> Cost:
    """Forward, whatever the score modification does."""
    query, key, value = (tuple(each.shape) for each in args[:3])
    return _masked(attention(query, key, value, Mask.NONE), query, key, _mask(args, kwargs, 4))


@cost_of_call("flex_attention_backward")
def flex_attention_backward(args: Any, kwargs: Any, out: Any) -> Cost:
    """Backward, with the scores once more."""
    query, key, value = (tuple(each.shape) for each in args[:3])
    return _masked(attention_backward(query, key, value, Mask.NONE), query, key, _mask(args, kwargs, 9))


def _mask(args: Any, kwargs: Any, place: int) -> Any:
    return args[place] if len(args) > place else kwargs["block_mask"]


def _masked(cost: Cost, query: Any, key: Any, mask: Any) -> Cost:
    """Scale what is executed to the part of the square that the blocks cover."""
    square = prod(query[:2]) * query[-2] * key[-2]
    covered = min(square, _covered(mask, query))
    again = cost.recompute
    if again is not None:
        again = again._replace(executed_macs=again.macs // square * covered)
    return cost._replace(executed_macs=cost.macs // square * covered, recompute=again)


def _covered(mask: Any, query: Any) -> int:
    """Scores in the blocks that run: those a mask cuts through, which come first, and those it leaves whole."""
    counts = [each for each in mask if isinstance(each, Tensor) and each.dim() == BLOCKS]
    rows, columns = [each for each in mask if isinstance(each, int)][-2:]
    # The same two counts follow for the backward's columns; queries come first. The second is missing where no block is whole.
    whole = counts[1:2] if len(counts) > BLOCKS else []
    blocks: int = sum(int(each.sum()) * prod(query[:2]) // prod(each.shape[:2]) for each in [counts[0], *whole])
    return blocks * rows * columns
