"""Correct fake tensors whose strides or memory differ from the results of real CPU kernels.

On fake tensors, torch computes the shape and the strides of a result without running the kernel. In
some cases, the result of the real kernel has other strides or a larger storage. The strides
determine whether the next operators copy the result, so wrong strides make the memory peak wrong.
`benchmarks/strides.py` runs every operator on torch's sample inputs, contiguous and non-contiguous,
and lists the differences. `cpu_kernels.toml` has a correction for each difference.

The functions in `SCRATCH` compute the bytes that a kernel allocates and frees before it returns.
These bytes belong to no result, but they may cause the memory peak.
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

LSTM_LAYER: Any = torch.ops.aten.mkldnn_rnn_layer.default
"""One layer of an LSTM in one direction, computed by oneDNN."""

Rule = Callable[[Tensor, Sequence[Any]], Tensor | None]
"""A function that corrects the strides and memory of a fake result of an operator.

The arguments are the fake result and the operator's arguments. The function returns the corrected
result, or `None` if the result is a gradient that is not requested.
"""


class Correction(Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `cpu_kernels.toml`: how to correct the fake results of some operators.

    Attributes:
        operators: The names of ATen operators, separated by spaces. Names that this torch does
            not have are ignored.
        results: The indices of the results to correct.
        rule: The key in `_RULES` of the function that corrects the results.
        reason: How the CPU's kernel differs from the fake kernel.
    """

    operators: str
    results: tuple[int, ...]
    rule: str
    reason: str


def corrected(function: OpOverload, args: Sequence[Any], out: Any) -> Any:
    """Return an operator's fake results with the strides and memory that its CPU kernel produces.

    Results of operators without a correction are returned unchanged. A fake mode must be active.
    """
    correction = _TABLE.get(function)
    if correction is None:
        return out
    rule = _RULES[correction.rule]
    if isinstance(out, Tensor):
        return rule(out, args)
    results = list(out)
    for index in correction.results:
        if isinstance(results[index], Tensor):
            results[index] = rule(results[index], args)
    return type(out)(results)


def _with_strides_of(result: Tensor, example: Tensor) -> Tensor:
    if result.stride() == example.stride():
        return result
    return torch.empty_strided(
        result.shape, example.stride(), dtype=result.dtype, device=result.device
    )


def _in_format_of(position: int) -> Rule:
    """Return a rule that gives the result the memory format of the argument at `position`.

    The result becomes channels-last if the argument is channels-last, and contiguous otherwise.
    """
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}

    def rule(result: Tensor, args: Sequence[Any]) -> Tensor:
        argument = args[position]
        layout = channels_last.get(argument.dim(), torch.contiguous_format)
        if argument.is_contiguous() or not argument.is_contiguous(memory_format=layout):
            layout = torch.contiguous_format
        return result.contiguous(memory_format=layout)

    return rule


def _like(position: int) -> Rule:
    """Return a rule that gives the result the strides of `torch.empty_like(args[position])`."""
    return lambda result, args: _with_strides_of(result, torch.empty_like(args[position]))


def _elementwise(result: Tensor, args: Sequence[Any]) -> Tensor:
    """Give the result the strides that any elementwise kernel chooses for the first two arguments.

    All elementwise kernels choose the strides in the same way. Therefore the strides are read from
    the fake result of adding the two arguments.
    """
    operands = [operand for operand in args[:2] if isinstance(operand, Tensor)]
    example = torch.add(*operands) if len(operands) > 1 else torch.neg(operands[0])
    return _with_strides_of(result, example)


def _elementwise_second_first(result: Tensor, args: Sequence[Any]) -> Tensor:
    return _elementwise(result, (args[1], args[0]))


def _elementwise_second_contiguous(result: Tensor, args: Sequence[Any]) -> Tensor:
    return _elementwise(result, (args[0], args[1].contiguous()))


def _if_in_mask(rule: Rule) -> Rule:
    """Return a rule that applies `rule` to the gradient of an input, if this gradient is requested.

    The first list among the operator's arguments is the output mask. The first entry of the mask
    shows whether the gradient is requested. If not, the rule returns `None`.
    """

    def masked(result: Tensor, args: Sequence[Any]) -> Tensor | None:
        output_mask = next(value for value in args if isinstance(value, list))
        if output_mask[0]:
            return rule(result, args)
        return None

    return masked


def _reduced_in_place(result: Tensor, args: Sequence[Any]) -> Tensor:
    """Give a scalar loss a storage with room for all terms, which the kernel reduces in place.

    With `reduction='none'`, the result is not a scalar and gets the strides of an elementwise
    kernel.
    """
    if result.dim():
        return _elementwise(result, args)
    terms = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return result.new_empty(terms).as_strided((), ()) if terms else result


def _workspace(result: Tensor, args: Sequence[Any]) -> Tensor:
    """Return a tensor that is as large as oneDNN's workspace for an LSTM layer.

    If gradients are enabled, torch keeps the workspace for backward. If not, return `result`.
    """
    if not torch.is_grad_enabled():
        return result
    x = args[0]
    hidden = args[10]
    steps, batch, width = x.shape
    itemsize = x.element_size()
    widest = max(width, hidden)
    gates = steps * batch * leading(4 * hidden, itemsize) * itemsize
    states = steps * batch * leading(hidden, itemsize) * itemsize
    # Rows of the layer's input and output, before the first step and after each step.
    rows = 2 * (steps + 1) * batch
    layer = rows * leading(widest, itemsize) * itemsize
    cell = rows * hidden * itemsize
    # Gradients are always float32.
    gradient = rows * leading(widest, FLOAT) * FLOAT
    cell_gradient = rows * hidden * FLOAT
    parts = (gates, states, layer, cell, gradient, gradient, cell_gradient)
    size = sum(rounded_up(part, PAGE) for part in parts)
    return torch.empty(size, dtype=torch.uint8, device=x.device)


_RULES: Mapping[str, Rule] = {
    "contiguous": lambda result, _: result.contiguous(),
    "like the first argument": _like(0),
    "like the second argument": _like(1),
    "memory format of the first argument": _in_format_of(0),
    "memory format of the second argument": _in_format_of(1),
    "memory format of the second argument, if its gradient is requested": _if_in_mask(
        _in_format_of(1)
    ),
    "reduced in place": _reduced_in_place,
    "elementwise": _elementwise,
    "elementwise, the second argument first": _elementwise_second_first,
    "elementwise, the second argument contiguous": _elementwise_second_contiguous,
    "workspace": _workspace,
    "a separate tensor": lambda result, _: torch.empty_like(result),
    "the first argument": lambda _, args: args[0],
}

CORRECTIONS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, tuple[Correction, ...]]
)["corrections"]

WAIT = Correction(
    operators="wait_tensor",
    results=(0,),
    rule="the first argument",
    reason="the result is the tensor that was waited for, but the fake kernel returns a copy",
)
"""The correction for the operator that waits for a collective.

This correction is not in `cpu_kernels.toml`, because the operator does not belong to ATen.
"""


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

FLOAT = 4
"""Size of a float32 in bytes."""

LINE = 64
"""Size of a cache line in bytes."""

PAGE = 4096
"""Size of a memory page in bytes."""

ALIASING = 256
"""Number of elements in a row for which oneDNN pads the row with one more cache line.

Rows whose length is a multiple of this number are padded, too. The padding avoids 4K aliasing:
accesses to addresses 4096 bytes apart slow each other down.
"""

REGISTRY = 568
"""Bytes of administrative data in oneDNN's scratchpad for an LSTM, measured with oneDNN 3.

The scratchpad also contains one page (`PAGE`) for alignment.
"""

INPUT = 0
"""Position of the input among the arguments of an LSTM layer and of its backward."""

INPUT_WEIGHT = 1
"""Position of the input's weight matrix among the arguments of an LSTM layer and its backward."""

OUT_GRADIENT = 10
"""Position of the result's gradient among the arguments of an LSTM layer's backward."""


def leading(elements: int, itemsize: int) -> int:
    """Return the distance between consecutive rows of a oneDNN matrix, as a number of elements.

    The distance may be larger than the length of a row (`elements`), because oneDNN pads rows to
    whole cache lines.
    """
    rounded = rounded_up(elements, LINE // itemsize)
    return rounded if rounded % ALIASING else rounded + LINE // itemsize


def _lstm(args: Sequence[Any]) -> int:
    """Return the scratch bytes of an LSTM layer's forward.

    The scratch memory contains the summed biases, the weights in oneDNN's layout, and a scratchpad.
    Only float32 has been measured. For other dtypes, return 0.
    """
    x = args[INPUT]
    if x.dtype is not torch.float32:
        return 0
    steps, batch, width = x.shape
    gates: int = args[INPUT_WEIGHT].shape[0]
    hidden = gates // 4
    biases = gates * FLOAT
    weights = (width + hidden) * leading(gates, FLOAT) * FLOAT
    sums = rounded_up(steps * batch * leading(gates, FLOAT) * FLOAT, PAGE)
    states = 2 * rounded_up(batch * leading(max(width, hidden), FLOAT) * FLOAT, PAGE)
    total: int = biases + weights + sums + states + PAGE + REGISTRY
    return total


def _lstm_backward(args: Sequence[Any]) -> int:
    """Return the scratch bytes of an LSTM layer's backward.

    In addition to the bytes of forward, backward needs another copy of the weights if their rows
    are padded, and a copy of the gradient if it is not contiguous.
    """
    total = _lstm(args)
    if not total:
        return 0
    gates, width = args[INPUT_WEIGHT].shape
    for size in (width, gates // 4):
        padded = leading(size, FLOAT)
        if padded != size:
            total += gates * padded * FLOAT
    gradient = args[OUT_GRADIENT]
    if gradient is not None and not gradient.is_contiguous():
        total += gradient.numel() * FLOAT
    return total


SCRATCH: Mapping[str, Callable[[Sequence[Any]], int]] = {
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": _lstm_backward,
}
"""For each operator, a function that takes a call's arguments and returns the scratch bytes.

The scratch bytes of other kernels are unknown. On a CPU they are small.
"""
