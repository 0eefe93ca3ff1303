"""Compute the cost (MACs, FLOPs and bytes) of an operator in a trace from its input shapes.

The formulas are the same as for operators that are counted while they run (`lflops.formulas`). A
cost is either exact, or `None` if the recorded inputs do not determine it.
"""

import ast
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from lflops.formulas.conventions import PER_INPUT, PER_OUTPUT
from lflops.formulas.table import FORMULAS, PLACES, Cost, Formula, Shape, load_families
from lflops.trace.analysis.categories import category_of_operator
from lflops.trace.recorded import Inputs

load_families()


class _Tables(Struct, forbid_unknown_fields=True):
    """The content of `operator_cost.toml`. Comments in that file explain each table."""

    comparing: str
    selecting: str
    same_as_first: str
    unread: str
    normalised: str
    types: dict[str, tuple[str, int]]
    products: dict[str, tuple[int, int]]
    products_with_vectors: dict[str, int]


_TABLES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Tables)
_COMPARING = frozenset(_TABLES.comparing.split())
_SELECTING = frozenset(_TABLES.selecting.split())
_SAME_AS_FIRST = frozenset(_TABLES.same_as_first.split())
_UNREAD = frozenset(_TABLES.unread.split())
_NORMALISED = frozenset(_TABLES.normalised.split())
_PRODUCTS: dict[str, tuple[int, int]] = {}
for _names, _places in _TABLES.products.items():
    _PRODUCTS |= dict.fromkeys(_names.split(), _places)

BYTES: dict[str, int] = {}
"""Size of an element in bytes, keyed by the name that traces use for the dtype, such as `float`."""
_DTYPES: dict[str, str] = {}
"""Name of each floating-point dtype in `hardware.DTYPES`, keyed by the name that traces use."""
for _name, (_precision, _size) in _TABLES.types.items():
    BYTES[_name] = _size
    if _precision:
        _DTYPES[_name] = _precision

_LARGEST = 1 << 48
"""Upper limit of the size of a tensor dimension."""


class Argument(NamedTuple):
    """One argument of a call.

    Attributes:
        shape: Shape of a tensor, or list of shapes for a list of tensors; `None` for other
            arguments.
        type: Name of the element type. For a list of tensors, the type of the first tensor.
        value: Text of a value that is not a tensor; empty if absent or not recorded.
    """

    shape: Any
    type: str
    value: str


@functools.lru_cache(1 << 16)
def arguments(inputs: Inputs) -> tuple[Argument, ...] | None:
    """Parse the arguments of an operator; return `None` for text that torch did not write."""
    try:
        shapes = msgspec.json.decode(inputs.shapes, type=list[Any])
        types = msgspec.json.decode(inputs.types, type=list[Any])
        values = msgspec.json.decode(inputs.values, type=list[Any])
    except msgspec.MsgspecError:
        return None
    found = []
    for place, shape in enumerate(shapes):
        kind = types[place] if place < len(types) else ""
        value = values[place] if place < len(values) else ""
        is_tensor = _is_tensor(kind, has_shape=bool(shape))
        tensor_shape = _shape(shape) if is_tensor else None
        element_type = kind[0] if isinstance(kind, list) and kind else kind
        found.append(Argument(tensor_shape, str(element_type), str(value)))
    return tuple(found)


def _is_tensor(kind: Any, *, has_shape: bool) -> bool:
    if isinstance(kind, list) or kind in BYTES:
        return True
    return has_shape and kind not in {"", "Scalar", "ScalarList", "GenericList"}


def _shape(value: Any) -> Any:
    if not isinstance(value, list):
        return None
    if value and isinstance(value[0], list):
        return list(map(tuple, value))
    return tuple(value)


@functools.lru_cache(1 << 16)
def precision_of(inputs: Inputs | None) -> str | None:
    """Return the precision of the first floating-point tensor, by its name in `hardware.DTYPES`.

    The result is `None` if no tensor has such a precision, or if shapes were not recorded.
    """
    if inputs is None:
        return None
    for argument in arguments(inputs) or ():
        if argument.shape is not None and argument.type in _DTYPES:
            return _DTYPES[argument.type]
    return None


class TracedCost(NamedTuple):
    """Cost of one call of an operator.

    Attributes:
        macs: Multiply-accumulates, without recomputation.
        executed_macs: Multiply-accumulates with recomputation, without work that a mask skips.
        flops: FLOPs with recomputation: 2 × MACs and all other operations.
        bytes_moved: Bytes moved if inputs are read once and the result is written once; `None` if
            unknown.
        recompute_macs: Multiply-accumulates of recomputation.
    """

    macs: int
    executed_macs: int
    flops: int
    bytes_moved: int | None
    recompute_macs: int = 0

    @property
    def executed_flops(self) -> int:
        """`flops` without work that a mask skips."""
        skipped_macs = max(self.macs - self.executed_macs, 0)
        return self.flops - 2 * skipped_macs


class _Unknown(Exception):  # noqa: N818 - it is no error, and is caught here
    """The inputs do not determine the cost."""


_FAILURES = (
    _Unknown,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    SyntaxError,
    NotImplementedError,
    RecursionError,
)
"""Errors that formulas and parsers can raise for unexpected inputs. The cost is then unknown.

Inputs can be arbitrary, because any program may have written the trace.
"""


class _Call(NamedTuple):
    """A call of an operator whose cost a formula computes.

    Attributes:
        name: Name of the operator.
        arguments: The arguments.
        has_values: Whether the trace has the values of arguments that are not tensors.
    """

    name: str
    arguments: Sequence[Argument]
    has_values: bool

    def value(self, index: int) -> Any:
        """Return the argument at a position: its shape if it is a tensor, otherwise its value.

        Returns `None` if the argument was not passed.

        Raises:
            _Unknown: The argument is not a tensor, and the trace has no values.
        """
        argument = self.arguments[index]
        if argument.shape is not None:
            return argument.shape
        if not self.has_values:
            raise _Unknown
        if not argument.value:
            return None
        return ast.literal_eval(argument.value)


@functools.lru_cache(1 << 16)
def cost_of(name: str, inputs: Inputs | None) -> TracedCost | None:
    """Return the cost of one call of an operator.

    Returns `None` if lflops has no formula for the operator, or if the recorded inputs do not
    determine the cost.
    """
    given = None if inputs is None else arguments(inputs)
    if inputs is None or not given or any(map(_has_invalid_size, given)):
        return None
    try:
        if name in FORMULAS:
            call = _Call(name, given, inputs.values != b"[]")
            return _cost_by_formula(call, FORMULAS[name])
        if name.startswith("aten::"):
            return _cost_by_convention(name.removeprefix("aten::"), given)
    except _FAILURES:
        return None
    return None


def _has_invalid_size(argument: Argument) -> bool:
    for size in argument.shape or ():
        sizes = size if isinstance(size, tuple) else (size,)
        if not all(map(_is_valid_size, sizes)):
            return True
    return False


def _is_valid_size(size: Any) -> bool:
    return isinstance(size, int) and 0 <= size < _LARGEST


def _cost_by_formula(call: _Call, function: Formula) -> TracedCost:
    """Compute the cost of a call with a formula.

    The formula receives the shapes of the inputs, and the values of the arguments that it accepts
    as keywords.
    """
    places = PLACES.get(call.name, {})
    positional, keywords = _parameters(function)
    if call.name not in PLACES and any(each.name != "out" for each in keywords):
        raise _Unknown
    out = _result_shape(call, places)
    values = list(map(call.value, range(positional)))
    named: dict[str, Any] = {}
    for keyword in keywords:
        place = places.get(keyword.name)
        if keyword.name == "out":
            if out is None:
                raise _Unknown
            named["out"] = out
        elif place is not None and place < len(call.arguments):
            # `beta` decides whether a bias is added. Without recorded values, it keeps its default.
            if keyword.name != "beta" or call.has_values:
                named[keyword.name] = call.value(place)
        elif keyword.default is keyword.empty:
            raise _Unknown
    found = function(*values, **named)
    if any("complex" in argument.type.lower() for argument in call.arguments):
        raise _Unknown
    return _traced_cost(Cost.of(found), _bytes_moved(call.arguments, out))


def _parameters(function: Formula) -> tuple[int, list[inspect.Parameter]]:
    """Return the number of a formula's positional parameters, and its keyword-only parameters."""
    positional = 0
    keywords = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            positional += 1
        elif parameter.kind is parameter.KEYWORD_ONLY:
            keywords.append(parameter)
    return positional, keywords


def _traced_cost(cost: Cost, bytes_moved: int | None) -> TracedCost:
    if cost.is_upper_bound:
        raise _Unknown
    recompute = cost.recompute or Cost()
    return TracedCost(
        macs=cost.macs,
        executed_macs=cost.macs_left + recompute.macs_left,
        flops=2 * (cost.macs + recompute.macs) + cost.other_flops + recompute.other_flops,
        bytes_moved=bytes_moved,
        recompute_macs=recompute.macs,
    )


def _result_shape(call: _Call, places: Mapping[str, int]) -> Shape | None:
    """Return the shape of the result, or `None` if the inputs do not determine it.

    `places` has the index of each argument that the formula accepts as a keyword.
    """
    base = call.name.removeprefix("aten::").rstrip("_")
    shapes = [argument.shape for argument in call.arguments]
    if base in _PRODUCTS:
        first, second = _PRODUCTS[base]
        return (*shapes[first][:-1], shapes[second][-1])
    if base in _TABLES.products_with_vectors:
        matrix = shapes[_TABLES.products_with_vectors[base]]
        return tuple(matrix[:1])
    if base in _NORMALISED:
        same: Shape | None = shapes[0]
        return same
    if "stride" in places and "backward" not in base:
        return _convolution_result(call, places, is_transposed="transpose" in base)
    return None


def _convolution_result(
    call: _Call, places: Mapping[str, int], *, is_transposed: bool
) -> Shape | None:
    batch, _, *sizes = call.arguments[0].shape
    weight = call.arguments[1].shape
    kernel = weight[2:]
    dimensions = len(sizes)

    def option(name: str, default: int) -> list[int]:
        """Return one value of an option such as `stride` for each spatial dimension."""
        if name not in places:
            return [default] * dimensions
        value = call.value(places[name])
        values = value if isinstance(value, list | tuple) else [value]
        numbers = list(map(int, values))
        return numbers * dimensions if len(numbers) == 1 else numbers

    stride = option("stride", 1)
    padding = option("padding", 0)
    dilation = option("dilation", 1)
    output_padding = option("output_padding", 0)
    groups = option("groups", 1)
    if "transposed" in places:
        is_transposed = is_transposed or bool(call.value(places["transposed"]))
    result = []
    for i, size in enumerate(sizes):
        reach = dilation[i] * (kernel[i] - 1)
        if is_transposed:
            result.append((size - 1) * stride[i] - 2 * padding[i] + reach + output_padding[i] + 1)
        else:
            result.append((size + 2 * padding[i] - reach - 1) // stride[i] + 1)
    channels = weight[1] * groups[0] if is_transposed else weight[0]
    return (batch, channels, *result)


def _tensors(given: Iterable[Argument]) -> list[Argument]:
    return [argument for argument in given if argument.shape is not None]


def _first_tensor(given: Iterable[Argument]) -> Argument | None:
    for argument in _tensors(given):
        if argument.type in BYTES:
            return argument
    return None


def _bytes_moved(given: Sequence[Argument], out: Shape | None) -> int | None:
    """Return the total size of all input tensors and the result, in bytes.

    The result is assumed to have the dtype of the first tensor.
    """
    read = _bytes_read(given)
    first = _first_tensor(given)
    if out is None or read is None or first is None:
        return None
    return int(read + prod(out) * BYTES[first.type])


def _bytes_read(given: Iterable[Argument]) -> int | None:
    read = 0
    for argument in _tensors(given):
        is_list = bool(argument.shape) and isinstance(argument.shape[0], tuple)
        if is_list or argument.type not in BYTES:
            return None
        read += int(prod(argument.shape)) * BYTES[argument.type]
    return read


def _cost_by_convention(base: str, given: Sequence[Argument]) -> TracedCost | None:
    """Return the cost of a pointwise operator, reduction, copy or fill; `None` for other operators.

    A pointwise operator or reduction is assumed to need a fixed number of FLOPs per element.
    """
    plain = base.rstrip("_")
    first = _first_tensor(given)
    if first is None:
        return None
    if plain in PER_INPUT:
        flops = 0
        if first.type in _DTYPES:
            flops = PER_INPUT[plain] * prod(first.shape)
        moved = None
        if base in _SAME_AS_FIRST:
            moved = _bytes_moved(given, first.shape)
        return TracedCost(0, 0, flops, moved)
    if base in _SAME_AS_FIRST:
        read = _bytes_read(given[1:] if base in _UNREAD else given)
        written = prod(first.shape) * BYTES[first.type]
        return TracedCost(0, 0, 0, None if read is None else read + written)
    if category_of_operator(base) == "pointwise":
        return _pointwise_cost(base, given, first)
    return None


def _pointwise_cost(base: str, given: Sequence[Argument], first: Argument) -> TracedCost:
    plain = base.rstrip("_")
    tensors = _tensors(given)
    out: Shape = first.shape
    if not base.endswith("_"):
        out = tensors[0].shape
        for tensor in tensors[1:]:
            out = _broadcast(out, tensor.shape)
    floating = [tensor for tensor in tensors if tensor.type in _DTYPES]
    sizes = []
    for tensor in floating:
        if tensor.shape == out:
            sizes.append(BYTES[tensor.type])
    result_size = max(sizes, default=BYTES[first.type])
    if plain in _COMPARING:
        result_size = 1
    flops = 0
    if floating and plain not in _COMPARING and plain not in _SELECTING:
        flops = PER_OUTPUT.get(plain, 1) * prod(out)
    read = _bytes_read(given)
    return TracedCost(0, 0, flops, None if read is None else read + prod(out) * result_size)


def _broadcast(a: Shape, b: Shape) -> Shape:
    """Return the shape to which a pointwise operator broadcasts inputs of two shapes."""
    longest = max(len(a), len(b))
    a = (1,) * (longest - len(a)) + a
    b = (1,) * (longest - len(b)) + b
    sizes = []
    for size_a, size_b in zip(a, b, strict=True):
        sizes.append(size_b if size_a == 1 else size_a)
    return tuple(sizes)
