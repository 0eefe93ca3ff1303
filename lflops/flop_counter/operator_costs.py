"""Costs of operators as they were called.

From the formulas' shapes, from the tensors themselves, or from what a user registered.

A few formulas ask for the integers in a tensor: where packed sequences begin, where groups end.
Only a counted step reads them: on CUDA that waits for the device, and a counted step is never
timed.

A mask divides the square of all tokens into those of packed sequences. A dense mask of fused
attention separates sequences, or nothing. Of flex attention, the squares that its mask divides
tokens into are counted, and the blocks that it lets run are executed. A causal mask or a window
divides nothing: each token is connected with the next one. Of packed weights only the packing knows
the kernel's shape.
"""

import inspect
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lflops.errors import CountError
from lflops.formulas.attention.fused import (
    Scores,
    attention_backward_of_scores,
    attention_of_scores,
)
from lflops.formulas.table import FORMULAS, READS, Cost, Formula, SparseShape, Values
from lflops.torch_private.dispatch_modes import open_modes, without_modes
from lflops.torch_private.operators import (
    OpOverload,
    OpOverloadPacket,
    argument_names,
    decomposes,
    overloads_of,
    qualified_name,
    written_arguments,
)
from lflops.torch_private.tensors import FakeTensor, local_part, stored_elements

SPARSE = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)
"""Layouts that store only some of the elements."""

CallCost = Callable[
    [Any, Any, Any], Cost
    # from the arguments, keyword arguments and result of a call
]

_COSTS: dict[str, CallCost] = {}
_USERS: dict[str, Formula] = {}


def cost_of_call(*operators: str) -> Callable[[CallCost], CallCost]:
    """Enter what works a cost out from the tensors themselves, for operators whose shapes do not tell it."""

    def enter(function: CallCost) -> CallCost:
        _COSTS.update(dict.fromkeys(operators, function))
        return function

    return enter


def register_formula(operator: Any, formula: Formula) -> None:
    """Say what an operator costs, in MACs.

    The last formula given for an operator is the one that counts.

    Args:
        operator: `torch.ops.my.op`, one of its overloads, what `torch.library.custom_op` made, or a
            higher-order operator.
        formula: Called as the operator was, with shapes in place of tensors, and `out=`, the
            result's shape. Returns MACs; or `lflops.Cost(macs=..., other_flops=...)`, where there
            is work that is no multiply-accumulate.

    Raises:
        CountError: One of the two is something else, or the operator is never counted itself, but
            what torch makes it of.
    """
    if not callable(formula):  # type: ignore[redundant-expr,unused-ignore]
        raise CountError(
            f"register_formula: formula={formula!r} cannot be called: give a function of shapes that returns MACs"
        )
    packet, overloads = isinstance(operator, OpOverloadPacket), overloads_of(operator)
    if not packet and not overloads:
        raise CountError(
            f"register_formula: operator={operator!r} is no operator: give one of torch.ops, as torch.ops.my.op"
        )
    name = str(operator).replace(".", "::", 1) if packet else qualified_name(overloads[0])
    if (
        name.startswith("aten::")
        and name.split(".")[0] not in FORMULAS
        and _is_taken_apart(overloads)
    ):
        raise CountError(
            f"register_formula: {operator} is decomposed before it is counted: register formulas for the operators in its decomposition"
        )
    if packet:
        for each in [users for users in _USERS if users.split(".")[0] == name]:
            del _USERS[each]
    _USERS[name] = formula


def _is_taken_apart(overloads: list[Any]) -> bool:
    """Whether all of them arrive as other operators.

    The operator's name alone does not mean the overload that writes into an `out`.
    """
    meant = (
        [each for each in overloads if not written_arguments(each)]
        if len(overloads) > 1
        else overloads
    )
    return all(map(decomposes, meant or overloads)) and bool(overloads)


def all_formulas() -> tuple[tuple[str, Any], ...]:
    """The table as it is now, with users' formulas."""
    return (*FORMULAS.items(), *_COSTS.items(), *_USERS.items())


def formula_of(operator: Any) -> CallCost | None:
    """The function that computes an operator's cost; `None` where there is none."""
    name = qualified_name(operator)
    packet = name.split(".")[0]
    users = _USERS.get(name) or _USERS.get(packet)
    if users is not None:
        return _as_called(users)
    return bind(FORMULAS[packet], operator) if packet in FORMULAS else _COSTS.get(packet)


def is_pure(operator: Any) -> bool:
    """Whether the operator's cost is that of a formula of ours that reads no numbers."""
    name = qualified_name(operator)
    packet = name.split(".")[0]
    return packet in FORMULAS and not READS[packet] and name not in _USERS and packet not in _USERS


def shapes(value: Any) -> Any:
    """The same structure with a shape in place of each tensor."""
    if isinstance(value, Tensor):
        return (
            SparseShape(value.shape, stored_elements(value))
            if value.layout in SPARSE
            else tuple(value.shape)
        )
    if isinstance(value, list | tuple):
        return (
            [shapes(each) for each in value]
            if isinstance(value, list)
            else tuple(shapes(each) for each in value)
        )
    return value


def values_or_shape(value: Any) -> Any:
    """The numbers in a tensor of integers; its shape where they are unknown."""
    known = values_of(value) if isinstance(value, Tensor) else None
    return shapes(value) if known is None else known


def bind(function: Formula, operator: OpOverload) -> CallCost:
    """Fit a formula to its operator.

    The first arguments by position, those it names as keywords from wherever the call has them.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    wanted = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    schema = argument_names(operator)
    reads = READS.get(qualified_name(operator).split(".")[0], frozenset())
    keywords = [
        (place, name, default, values_or_shape if name in reads else shapes)
        for place, (name, default) in enumerate(schema)
        if name in wanted
    ]

    def cost(args: Any, kwargs: Any, out: Any) -> Cost:
        given = [
            shapes(args[place] if place < len(args) else kwargs.get(name))
            for place, (name, _) in enumerate(schema[:positional])
        ]
        named = {
            name: of(args[place] if place < len(args) else kwargs.get(name, default))
            for place, name, default, of in keywords
        }
        if "out" in wanted:
            named["out"] = shapes(out)
        found = _cost(function(*given, **named))
        operand = args[0] if args else None
        return _in_reals(found) if isinstance(operand, Tensor) and operand.is_complex() else found

    return cost


def _in_reals(cost: Cost) -> Cost:
    """A complex multiply-accumulate is four real ones, a complex addition two."""
    executed = None if cost.executed_macs is None else 4 * cost.executed_macs
    return cost._replace(
        macs=4 * cost.macs,
        executed_macs=executed,
        other_flops=2 * cost.other_flops if cost.macs else cost.other_flops,
    )


def _as_called(function: Formula) -> CallCost:
    def cost(args: Any, kwargs: Any, out: Any) -> Cost:
        named = {name: shapes(value) for name, value in kwargs.items()}
        found = _cost(function(*shapes(tuple(args)), **{**named, "out": shapes(out)}))
        if not all(
            _is_whole(each) for each in (found.macs, found.other_flops, found.executed_macs or 0)
        ):
            raise TypeError(f"a formula's Cost has whole numbers, not {found!r}")
        return found

    return cost


def _cost(result: Any) -> Cost:
    if isinstance(result, Cost):
        return result
    if not _is_whole(result):
        raise TypeError(f"a formula gives a whole number of MACs, not {result!r}")
    return Cost(result)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# the method of a mode that says whether a real tensor has the numbers that it would have in a real
# step
KNOWS_VALUES = "knows_values_of"


def known(tensor: Tensor) -> Tensor | None:
    """A plain tensor with the same numbers.

    `None` where they are unknown: on the meta device, and for tensors that are shapes alone.
    """
    local: Any = local_part(tensor)
    if local.is_meta or isinstance(local, FakeTensor) or local.shape != tensor.shape:
        return None
    if not all(
        getattr(mode, KNOWS_VALUES)(local) for mode in open_modes() if hasattr(mode, KNOWS_VALUES)
    ):
        return None
    return local  # type: ignore[no-any-return]


def values_of(tensor: Tensor) -> Values | None:
    """The numbers in a tensor of integers; `None` where they are unknown."""
    local = known(tensor)
    if local is None:
        return None
    with without_modes():
        return Values(local.flatten().tolist())


MASK_AT = {
    "_scaled_dot_product_flash_attention_for_cpu": (5, "attn_mask"),
    "_scaled_dot_product_efficient_attention": (3, "attn_bias"),
    "_scaled_dot_product_cudnn_attention": (3, "attn_bias"),
    "_scaled_dot_product_fused_attention_overrideable": (3, "attn_bias"),
}
"""The mask's place and name in fused attention."""
# elements of a mask; a larger mask is not read
MOST_READ = 1 << 24
COUNTS, INDICES = (
    3,
    4,
    # dimensions of a tensor of block counts: batch, heads, rows of blocks. Of one of block indices: the
    # same, blocks.
)
MOST_EVALUATED = (
    1 << 26
    # pairs of a query and a key for which the mask is evaluated; where it is more, what the mask
    # divides is not known
)


class MaskedScores(NamedTuple):
    """Scores of one call whose dense mask separates sequences.

    Of the whole squares, and those of two tokens of one sequence.
    """

    computed: int
    within: int


def squares(first: Tensor, last: Tensor, undivided: int) -> int:
    """Queries times keys of each part that sees nothing of the others.

    `undivided` if there is one part only.
    """
    # `first` and `last` are the keys that each query sees; for one that sees none, the last is -1.
    spans = sorted(
        (begin, end) for begin, end in zip(first.tolist(), last.tolist(), strict=True) if end >= 0
    )
    # queries, first key, last key
    parts: list[list[int]] = []
    for begin, end in spans:
        if parts and begin <= parts[-1][2]:
            parts[-1][0] += 1
            parts[-1][2] = max(parts[-1][2], end)
        else:
            parts.append([1, begin, end])
    return (
        undivided
        if len(parts) <= 1
        else sum(queries * (end - begin + 1) for queries, begin, end in parts)
    )


def masked_scores(operator: str, args: Any, kwargs: Any) -> MaskedScores | None:
    """The scores of a call of fused attention.

    `None` if it has no mask, or a mask that separates nothing or is unknown.
    """
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
    # one for all batches or heads
    for dimension in range(mask.dim() - 2):
        if not mask.stride(dimension):
            mask = mask.narrow(dimension, 0, 1)
    # kernels may need longer rows
    mask = mask.reshape(-1, *mask.shape[-2:])[..., :keys]
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


class _Blocks(NamedTuple):
    counts: list[
        Tensor
        # of blocks a row of blocks: those that the mask cuts through, and where there are any those
        # that it leaves whole
    ]
    # their columns, likewise
    indices: list[Tensor]
    # rows and columns of a block
    sizes: tuple[int, int]
    # from batch, head, query and key to whether the query sees the key
    mask: Any
    # further arguments of the mask
    buffers: tuple[Any, ...]


@cost_of_call("flex_attention")
def flex_attention(args: Any, kwargs: Any, out: Any) -> Cost:
    """Forward. The score modification costs nothing."""
    query, key, value = (tuple(each.shape) for each in args[:3])
    return attention_of_scores(_scores(query, key, _blocks(args, kwargs, 4)), query[-1], value[-1])


@cost_of_call("flex_attention_backward")
def flex_attention_backward(args: Any, kwargs: Any, out: Any) -> Cost:
    """Backward, with the scores once more."""
    query, key, value = (tuple(each.shape) for each in args[:3])
    return attention_backward_of_scores(
        _scores(query, key, _blocks(args, kwargs, 9)), query[-1], value[-1]
    )


def _blocks(args: Any, kwargs: Any, place: int) -> _Blocks:
    mask = args[place] if len(args) > place else kwargs["block_mask"]
    buffers = args[place + 4] if len(args) > place + 4 else kwargs.get("mask_mod_other_buffers", ())
    tensors = [each for each in mask if isinstance(each, Tensor)]
    counts, indices = (
        [each for each in tensors if each.dim() == dimensions] for dimensions in (COUNTS, INDICES)
    )
    # The same follow for the backward's columns; queries come first.
    counts, indices = counts[: len(counts) // 2], indices[: len(indices) // 2]
    rows, columns = [each for each in mask if isinstance(each, int)][-2:]
    return _Blocks(counts, indices, (rows, columns), mask[-1], tuple(buffers or ()))


def _scores(query: Any, key: Any, blocks: _Blocks) -> Scores:
    heads, rows, columns = prod(query[:2]), query[-2], key[-2]
    square = heads * rows * columns
    numbers = [values_of(each) for each in blocks.counts]
    if any(each is None for each in numbers):
        return Scores(square, square, known=False)
    alike = heads // max(prod(blocks.counts[0].shape[:2]), 1)
    covered = min(square, sum(sum(each or ()) for each in numbers) * alike * prod(blocks.sizes))
    try:
        with without_modes(), torch.no_grad():
            whole = _divided(blocks, rows, columns) * alike
    except Exception:  # noqa: BLE001 - the user's mask, or a value in it that is not known
        return Scores(square, covered, known=False)
    # Blocks reach over the sequences' ends.
    return Scores(whole, min(covered, whole), known=True)


def _divided(blocks: _Blocks, rows: int, columns: int) -> int:
    """The squares into which the mask divides the tokens, over the batches and heads that differ."""
    batches, heads = blocks.counts[0].shape[:2]
    if getattr(blocks.mask, "__name__", "") == "noop_mask":
        return batches * heads * rows * columns
    evaluated = (
        int(blocks.counts[0].sum()) * min(blocks.sizes[0], rows) * min(blocks.sizes[1], columns)
    )
    if evaluated > MOST_EVALUATED:
        raise ValueError(f"{evaluated} pairs of a query and a key")
    return sum(
        squares(*_seen(blocks, (batch, head), rows, columns), rows * columns)
        for batch in range(batches)
        for head in range(heads)
    )


def _seen(blocks: _Blocks, at: tuple[int, int], rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The first and the last key that each query sees; of one that sees none the last is -1."""
    device = blocks.counts[0].device
    first, last = (
        torch.full((rows,), columns, device=device),
        torch.full((rows,), -1, device=device),
    )
    for is_whole, row, column in _places(blocks, at):
        height, width = blocks.sizes
        queries = torch.arange(row * height, min((row + 1) * height, rows), device=device)
        keys = torch.arange(column * width, min((column + 1) * width, columns), device=device)
        if not len(queries) or not len(keys):
            continue
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
        if not is_whole:
            batch, head = (torch.tensor(each, device=device) for each in at)
            seen = seen & blocks.mask(batch, head, queries[:, None], keys[None, :], *blocks.buffers)
        first[queries] = torch.minimum(first[queries], torch.where(seen, keys, columns).amin(1))
        last[queries] = torch.maximum(last[queries], torch.where(seen, keys, -1).amax(1))
    return first, last


def _places(blocks: _Blocks, at: tuple[int, int]) -> Iterator[tuple[bool, int, int]]:
    """List each block that runs: whether the mask leaves it whole, its row and its column."""
    for kind, (counts, indices) in enumerate(zip(blocks.counts, blocks.indices, strict=True)):
        columns_of_rows = indices[at].tolist()
        for row, count in enumerate(counts[at].tolist()):
            yield from ((bool(kind), row, column) for column in columns_of_rows[row][:count])


@cost_of_call(
    *(
        f"quantized::conv{dimensions}d{kind}"
        for dimensions in (1, 2, 3)
        for kind in ("", "_relu", "_dynamic")
    )
)
def packed_convolution(args: Any, kwargs: Any, out: Any) -> Cost:
    """A kernel's products at each position of the output.

    Only the packed weight itself knows the kernel.
    """
    weight, _ = args[1].unpack()
    return Cost(out.numel() // out.shape[1] * weight.numel())


@cost_of_call("quantized::conv2d_add", "quantized::conv2d_add_relu")
def packed_convolution_with_addition(args: Any, kwargs: Any, out: Any) -> Cost:
    """The same, after what is added to it."""
    return packed_convolution([args[0], *args[2:]], kwargs, out)


@cost_of_call(
    *(
        f"quantized::conv_transpose{dimensions}d{kind}"
        for dimensions in (1, 2, 3)
        for kind in ("", "_dynamic")
    )
)
def packed_transposed_convolution(args: Any, kwargs: Any, out: Any) -> Cost:
    """A kernel's products at each position of the input."""
    weight, _ = args[1].unpack()
    return Cost(args[0].numel() // args[0].shape[1] * weight.numel())
