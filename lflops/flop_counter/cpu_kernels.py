"""Corrections of fake results whose strides or memory differ from those of the CPU's kernels.

The next operators copy a result, or do not, by its layout, so a wrong layout makes the peak wrong.
`benchmarks/strides.py` runs torch's own samples of every operator, contiguous and not, and lists
the differences. `cpu_kernels.toml` has all that it listed.

`SCRATCH` has bytes that a kernel takes for its own use and frees before it returns: they are no
operator's result, and may make the peak.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from lflops.memory.allocator.simulation import rounded_up
from lflops.torch_private.distributed import wait_operator
from lflops.torch_private.operators import OpOverload

# one layer in one direction, by oneDNN
LSTM_LAYER: Any = torch.ops.aten.mkldnn_rnn_layer.default

Rule = Callable[[Tensor, Sequence[Any]], Tensor | None]
"""From a fake result and the operator's arguments to the result that the kernel gives."""


class Correction(Struct, frozen=True, forbid_unknown_fields=True):
    """How the fake results of some operators are corrected.

    A row of `cpu_kernels.toml`, which explains the fields.
    """

    operators: str
    results: tuple[int, ...]
    rule: str
    reason: str


def corrected(function: OpOverload, args: Sequence[Any], out: Any) -> Any:
    """The results of an operator with the layout that the kernel gives them.

    `out` are its fake ones, and the fake mode is still active.
    """
    correction = _TABLE.get(function)
    if correction is None:
        return out
    results = [out] if isinstance(out, Tensor) else list(out)
    for index in correction.results:
        if isinstance(results[index], Tensor):
            results[index] = _RULES[correction.rule](results[index], args)
    return results[0] if isinstance(out, Tensor) else type(out)(results)


def _with_strides_of(result: Tensor, model: Tensor) -> Tensor:
    if result.stride() == model.stride():
        return result
    return torch.empty_strided(
        result.shape, model.stride(), dtype=result.dtype, device=result.device
    )


def _in_format_of(position: int) -> Rule:
    """Channels last if the argument is, else contiguous."""

    def rule(result: Tensor, args: Sequence[Any]) -> Tensor:
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(
            args[position].dim(), torch.contiguous_format
        )
        is_last = not args[position].is_contiguous() and args[position].is_contiguous(
            memory_format=last
        )
        return result.contiguous(memory_format=last if is_last else torch.contiguous_format)

    return rule


def _like(position: int) -> Rule:
    return lambda result, args: _with_strides_of(result, torch.empty_like(args[position]))


def _element_by_element(result: Tensor, args: Sequence[Any]) -> Tensor:
    """The strides of the sum of the first two arguments.

    All kernels of this kind share one iterator.
    """
    operands = [each for each in args[:2] if isinstance(each, Tensor)]
    return _with_strides_of(
        result, torch.add(*operands) if len(operands) > 1 else torch.neg(operands[0])
    )


def _if_in_mask(rule: Rule) -> Rule:
    """The gradient of the input only if the output mask, the only list among the arguments, includes it."""
    return lambda result, args: (
        rule(result, args) if next(each for each in args if isinstance(each, list))[0] else None
    )


def _reduced_in_place(result: Tensor, args: Sequence[Any]) -> Tensor:
    """A scalar in the storage of the terms that it was reduced from.

    Without reduction the terms keep their layout.
    """
    if result.dim():
        return _element_by_element(result, args)
    terms = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return result.new_empty(terms).as_strided((), ()) if terms else result


def _workspace(result: Tensor, args: Sequence[Any]) -> Tensor:
    """OneDNN's workspace of an LSTM layer, which torch keeps whenever gradients are enabled."""
    if not torch.is_grad_enabled():
        return result
    x, hidden = args[0], args[10]
    steps, batch, width = x.shape
    each, widest = x.element_size(), max(width, hidden)
    gates, states = (steps * batch * leading(size, each) * each for size in (4 * hidden, hidden))
    rows = (
        2 * (steps + 1) * batch
        # of the layer's input and output, before the first step and after each
    )
    layer, cell = rows * leading(widest, each) * each, rows * hidden * each
    # gradients are always float32
    gradient = rows * leading(widest, FLOAT) * FLOAT
    parts = (gates, states, layer, cell, gradient, gradient, rows * hidden * FLOAT)
    return torch.empty(
        sum(rounded_up(part, PAGE) for part in parts), dtype=torch.uint8, device=x.device
    )


_RULES: Mapping[str, Rule] = {
    "contiguous": lambda result, _: result.contiguous(),
    "like the first argument": _like(0),
    "like the second argument": _like(1),
    "format of the first argument": _in_format_of(0),
    "format of the second argument": _in_format_of(1),
    "format of the second argument, if its gradient is asked for": _if_in_mask(_in_format_of(1)),
    "reduced in place": _reduced_in_place,
    "element by element": _element_by_element,
    "element by element, the second argument first": lambda result, args: _element_by_element(
        result, (args[1], args[0])
    ),
    "element by element, the second argument contiguous": lambda result, args: _element_by_element(
        result, (args[0], args[1].contiguous())
    ),
    "workspace": _workspace,
    "a tensor for each": lambda result, _: torch.empty_like(result),
    "what was waited for": lambda _, args: args[0],
}

CORRECTIONS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, tuple[Correction, ...]]
)["corrections"]

WAIT = Correction(
    "wait_tensor",
    (0,),
    "what was waited for",
    "a collective's result is what was waited for; the fake one is a copy",
)
"""Of collectives, and no operator of ATen's."""


def _table() -> dict[Any, Correction]:
    found: dict[Any, Correction] = {}
    for correction in CORRECTIONS:
        for words in correction.operators.split():
            name, _, overload = words.partition(".")
            operator = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
            if operator is not None:
                found[operator] = correction
    return found | {wait_operator(): WAIT}


_TABLE = _table()

FLOAT, LINE, PAGE, ALIASING = 4, 64, 4096, 256
"""Bytes of a float32, a cache line and a page.

Rows of a multiple of `ALIASING` elements get one more line.
"""

# bytes that oneDNN adds to the scratchpad of an LSTM, measured with oneDNN 3, besides a page for
# alignment
REGISTRY = 568

INPUT, INPUT_WEIGHT, OUT_GRADIENT = 0, 1, 10
"""Places among the arguments of an LSTM layer.

Of its backward, also the place of the result's gradient.
"""


def leading(elements: int, each: int) -> int:
    """Elements from a row of a matrix of oneDNN's to the next, of so many bytes each."""
    rounded = rounded_up(elements, LINE // each)
    return rounded if rounded % ALIASING else rounded + LINE // each


def _lstm(args: Sequence[Any]) -> int:
    """The forward of a layer.

    The sum of its biases, its weights in oneDNN's layout, and the scratchpad.
    """
    steps, batch, width = args[INPUT].shape
    gates, hidden = args[INPUT_WEIGHT].shape[0], args[INPUT_WEIGHT].shape[0] // 4
    if args[INPUT].dtype is not torch.float32:
        # other layouts, not measured
        return 0
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
    padded = sum(
        leading(size, FLOAT) for size in (width, gates // 4) if leading(size, FLOAT) != size
    )
    gradient = args[OUT_GRADIENT]
    copied = 0 if gradient is None or gradient.is_contiguous() else gradient.numel() * FLOAT
    total: int = forward + gates * padded * FLOAT + copied
    return total


SCRATCH: Mapping[str, Callable[[Sequence[Any]], int]] = {
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": _lstm_backward,
}
"""From an operator's name to the bytes for its arguments.

Other kernels' are not known; on a CPU they are small.
"""
