"""What a recorded operator computed and moved, from the shapes of its inputs, by the formulas that count live calls.

What the inputs do not tell is unknown: a cost is exact, or it is `None`.
"""

import ast
import functools
import inspect
from collections.abc import Mapping, Sequence
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
    """The tables of `operator_cost.toml`, which explains them."""

    comparing: str
    selecting: str
    same_as_first: str
    unread: str
    normalised: str
    types: dict[str, tuple[str, int]]
    products: dict[str, tuple[int, int]]
    products_with_vectors: dict[str, int]


_TABLES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Tables)
_DTYPES = {name: precision for name, (precision, _) in _TABLES.types.items() if precision}
_COMPARING, _SELECTING = frozenset(_TABLES.comparing.split()), frozenset(_TABLES.selecting.split())
_SAME_AS_FIRST, _UNREAD = (
    frozenset(_TABLES.same_as_first.split()),
    frozenset(_TABLES.unread.split()),
)
_PRODUCTS = {name: places for names, places in _TABLES.products.items() for name in names.split()}

BYTES = {
    name: size
    for name, (_, size) in _TABLES.types.items()
    # of an element, by the type's name in traces
}


class Argument(NamedTuple):
    """One argument of a call."""

    # of a tensor; of a list of tensors, their shapes; `None` where it is no tensor
    shape: Any
    # the element type's name; of a list of tensors, that of the first
    type: str
    # of all else, as text; empty where there is none, or it was not recorded
    value: str


@functools.lru_cache(1 << 16)
def arguments(inputs: Inputs) -> tuple[Argument, ...] | None:
    """The arguments in the schema's order; `None` where the text is none of torch's."""
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
        is_tensor = (
            isinstance(kind, list)
            or kind in BYTES
            or (bool(shape) and kind not in {"", "Scalar", "ScalarList", "GenericList"})
        )
        of_first = kind[0] if isinstance(kind, list) and kind else kind
        found.append(Argument(_shape(shape) if is_tensor else None, str(of_first), str(value)))
    return tuple(found)


def _shape(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [tuple(each) for each in value]
    return tuple(value) if isinstance(value, list) else None


@functools.lru_cache(1 << 16)
def precision_of(inputs: Inputs | None) -> str | None:
    """The precision of the first floating tensor, as `hardware.DTYPES` call it."""
    for argument in (arguments(inputs) or ()) if inputs is not None else ():
        if argument.shape is not None and argument.type in _DTYPES:
            return _DTYPES[argument.type]
    return None


# a dimension over it is none of a tensor's
_LARGEST = 1 << 48


class TracedCost(NamedTuple):
    """One call."""

    # Multiply-accumulates; what is computed once more is not in them
    macs: int
    # without what a mask leaves out, and with what is computed once more
    executed_macs: int
    # 2 x `macs`, with what is computed once more and what is no multiply-accumulate
    flops: int
    # inputs read once and the result written once; `None` is unknown
    bytes_moved: int | None
    # what is computed once more, with what a mask leaves out
    recompute_macs: int = 0

    @property
    def executed_flops(self) -> int:
        """`flops` without what a mask leaves out."""
        return (
            self.flops - 2 * (self.macs - self.executed_macs)
            if self.executed_macs < self.macs
            else self.flops
        )


class _Unknown(Exception):  # noqa: N818 - it says that something is unknown, and is caught here
    """The trace does not tell."""


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
"""What formulas and the reading of values raise for inputs that do not fit.

A trace is a file from anywhere.
"""


@functools.lru_cache(1 << 16)
def cost_of(name: str, inputs: Inputs | None) -> TracedCost | None:
    """The cost of one call; `None` where it is unknown, or nothing is computed."""
    given = arguments(inputs) if inputs is not None else None
    if not given or inputs is None or any(_is_too_large(argument.shape) for argument in given):
        return None
    has_values = inputs.values != b"[]"
    try:
        if name in FORMULAS:
            return _by_formula(name, FORMULAS[name], given, has_values=has_values)
        return (
            _by_convention(name.removeprefix("aten::"), given)
            if name.startswith("aten::")
            else None
        )
    except _FAILURES:
        return None


def _is_too_large(shape: Any) -> bool:
    flat = (
        [size for each in shape for size in (each if isinstance(each, tuple) else (each,))]
        if shape
        else []
    )
    return not all(isinstance(size, int) and 0 <= size < _LARGEST for size in flat)


def _by_formula(
    name: str, function: Formula, given: Sequence[Argument], *, has_values: bool
) -> TracedCost:
    """The formula's result for the shapes, with what it asks for by name from where the schema has it."""
    places = PLACES.get(name, {})
    parameters = inspect.signature(function).parameters.values()
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    values = [_value(given[place], has_values=has_values) for place, _ in enumerate(positional)]
    if name not in PLACES and any(
        each.kind is each.KEYWORD_ONLY and each.name != "out" for each in parameters
    ):
        raise _Unknown
    out = _result(name, given, places, has_values=has_values)
    named: dict[str, Any] = {}
    for each in parameters:
        if each.kind is not each.KEYWORD_ONLY:
            continue
        if each.name == "out":
            if out is None:
                raise _Unknown
            named["out"] = out
        elif each.name in places and places[each.name] < len(given):
            if each.name == "beta" and not has_values:
                # it decides whether a bias is added, and 1 is the usual value
                continue
            named[each.name] = _value(given[places[each.name]], has_values=has_values)
        elif each.default is each.empty:
            raise _Unknown
    found = function(*values, **named)
    if any("complex" in argument.type.lower() for argument in given):
        raise _Unknown
    return _traced(found if isinstance(found, Cost) else Cost(found), _bytes(given, out))


def _traced(cost: Cost, moved: int | None) -> TracedCost:
    if cost.is_upper_bound:
        raise _Unknown
    again = cost.recompute or Cost()
    executed = sum(
        each.macs if each.executed_macs is None else each.executed_macs for each in (cost, again)
    )
    return TracedCost(
        cost.macs,
        executed,
        2 * (cost.macs + again.macs) + cost.other_flops + again.other_flops,
        moved,
        again.macs,
    )


def _value(argument: Argument, *, has_values: bool) -> Any:
    """A shape, a value, or `None` where the argument was not given."""
    if argument.shape is not None:
        return argument.shape
    if not has_values:
        raise _Unknown
    return ast.literal_eval(argument.value) if argument.value else None


def _result(
    name: str, given: Sequence[Argument], places: Mapping[str, int], *, has_values: bool
) -> Shape | None:
    """The shape of the result, where it is known how it follows from the inputs."""
    base = name.removeprefix("aten::").rstrip("_")
    if base in _PRODUCTS:
        first, second = (given[place].shape for place in _PRODUCTS[base])
        return (*first[:-1], second[-1])
    if base in _TABLES.products_with_vectors:
        return tuple(given[_TABLES.products_with_vectors[base]].shape[:1])
    if base in _TABLES.normalised.split():
        same: Shape | None = given[0].shape
        return same
    if "backward" in base or "stride" not in places:
        return None
    transposed = "transpose" in base or (
        "transposed" in places and _value(given[places["transposed"]], has_values=has_values)
    )
    x, weight = given[0].shape, given[1].shape
    space = len(x) - 2
    stride, padding, dilation, more, groups = (
        _geometry(given[places[key]], space, has_values=has_values)
        if key in places
        else [default] * space
        for key, default in (
            ("stride", 1),
            ("padding", 0),
            ("dilation", 1),
            ("output_padding", 0),
            ("groups", 1),
        )
    )
    kernel = weight[2:]
    if transposed:
        sizes = [
            (x[2 + i] - 1) * stride[i]
            - 2 * padding[i]
            + dilation[i] * (kernel[i] - 1)
            + more[i]
            + 1
            for i in range(space)
        ]
        return (x[0], weight[1] * groups[0], *sizes)
    return (
        x[0],
        weight[0],
        *(
            (x[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
            for i in range(space)
        ),
    )


def _geometry(argument: Argument, space: int, *, has_values: bool) -> list[int]:
    value = _value(argument, has_values=has_values)
    numbers = [int(each) for each in value] if isinstance(value, list | tuple) else [int(value)]
    return numbers * space if len(numbers) == 1 else numbers


def _bytes(given: Sequence[Argument], out: Shape | None) -> int | None:
    """Each tensor once, and the result in the type of the first."""
    if out is None:
        return None
    read = _read(given)
    size = next(
        (
            BYTES[argument.type]
            for argument in given
            if argument.shape is not None and argument.type in BYTES
        ),
        None,
    )
    return None if read is None or size is None else int(read + prod(out) * size)


def _read(given: Sequence[Argument]) -> int | None:
    tensors = [argument for argument in given if argument.shape is not None]
    if any(
        argument.type not in BYTES or (argument.shape and isinstance(argument.shape[0], tuple))
        for argument in tensors
    ):
        return None
    return sum(int(prod(argument.shape)) * BYTES[argument.type] for argument in tensors)


def _by_convention(base: str, given: Sequence[Argument]) -> TracedCost | None:
    """Pointwise operators and reductions: so many operations an element."""
    plain = base.rstrip("_")
    first = next(
        (argument for argument in given if argument.shape is not None and argument.type in BYTES),
        None,
    )
    if first is None:
        return None
    if plain in PER_INPUT:
        flops = PER_INPUT[plain] * prod(first.shape) if first.type in _DTYPES else 0
        return TracedCost(
            0, 0, flops, _bytes(given, first.shape) if base in _SAME_AS_FIRST else None
        )
    if base in _SAME_AS_FIRST:
        read = _read(given[1:] if base in _UNREAD else given)
        return TracedCost(
            0, 0, 0, None if read is None else read + prod(first.shape) * BYTES[first.type]
        )
    return _pointwise(base, given, first) if category_of_operator(base) == "pointwise" else None


def _pointwise(base: str, given: Sequence[Argument], first: Argument) -> TracedCost:
    plain = base.rstrip("_")
    tensors = [argument for argument in given if argument.shape is not None]
    out: Shape = (
        first.shape
        if base.endswith("_")
        else functools.reduce(_broadcast, (argument.shape for argument in tensors))
    )
    same = [
        BYTES[argument.type]
        for argument in tensors
        if argument.shape == out and argument.type in _DTYPES
    ]
    size = 1 if plain in _COMPARING else max(same, default=BYTES[first.type])
    floating = (
        any(argument.type in _DTYPES for argument in tensors)
        and plain not in _COMPARING | _SELECTING
    )
    flops = PER_OUTPUT.get(plain, 1) * prod(out) if floating else 0
    read = _read(given)
    return TracedCost(0, 0, flops, None if read is None else read + prod(out) * size)


def _broadcast(a: Shape, b: Shape) -> Shape:
    longest = max(len(a), len(b))
    pairs = zip((1,) * (longest - len(a)) + a, (1,) * (longest - len(b)) + b, strict=True)
    return tuple(second if one == 1 else one for one, second in pairs)
