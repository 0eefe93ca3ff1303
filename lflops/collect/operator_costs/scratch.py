"""Bytes that a kernel allocates for its own use and frees before it returns: they are no operator's result, and may make the peak."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["FLOAT", "PAGE", "SCRATCH", "leading", "rounded_up"]

FLOAT, LINE, PAGE, ALIASING = 4, 64, 4096, 256
"""Bytes of a float32, a cache line and a page. Rows of a multiple of `ALIASING` elements get one more line."""

REGISTRY = 568
"""Bytes that oneDNN adds to the scratchpad of an LSTM, measured with oneDNN 3, besides a page for alignment."""

INPUT, INPUT_WEIGHT, OUT_GRADIENT = 0, 1, 10
"""Places among the arguments of an LSTM layer; of its backward, also the place of the result's gradient."""


def leading(elements: int, each: int) -> int:
    """Elements from a row of a matrix of oneDNN's to the next, of so many bytes each."""
    rounded = rounded_up(elements, LINE // each)
    return rounded if rounded % ALIASING else rounded + LINE // each


def rounded_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def _lstm(args: Sequence[Any]) -> int:
    """The forward of a layer: the sum of its biases, its weights in oneDNN's layout, and the scratchpad."""
    steps, batch, width = args[INPUT].shape
    gates, hidden = args[INPUT_WEIGHT].shape[0], args[INPUT_WEIGHT].shape[0] // 4
    if args[INPUT].dtype is not torch.float32:
        return 0  # other layouts, not measured
    weights = (width + hidden) * leading(gates, FLOAT) * FLOAT
    sums = rounded_up(steps * batch * leading(gates, FLOAT) * FLOAT, PAGE)
    states = 2 * rounded_up(batch * leading(max(width, hidden), FLOAT) * FLOAT, PAGE)
    total: int = gates * FLOAT + weights + sums + states + PAGE + REGISTRY
    return total


def _lstm_backward(args: Sequence[Any]) -> int:
    """The same, the weights once more where oneDNN pads their rows, and a copy of a gradient that is not contiguous."""
    forward = _lstm(args)
    if not forward:
        return 0
    gates, width = args[INPUT_WEIGHT].shape
    padded = sum(leading(size, FLOAT) for size in (width, gates // 4) if leading(size, FLOAT) != size)
    gradient = args[OUT_GRADIENT]
    copied = 0 if gradient is None or gradient.is_contiguous() else gradient.numel() * FLOAT
    total: int = forward + gates * padded * FLOAT + copied
    return total


SCRATCH: Mapping[str, Callable[[Sequence[Any]], int]] = {"mkldnn_rnn_layer": _lstm, "mkldnn_rnn_layer_backward": _lstm_backward}
"""From an operator's name to the bytes for its arguments. Other kernels' are not known; on a CPU they are small."""
