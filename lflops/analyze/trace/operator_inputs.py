"""The inputs of an operator as a trace has them: shapes, types, and the values of all that is no tensor."""

import functools
from typing import Any, NamedTuple

import msgspec

from lflops.traces.recorded import Inputs

__all__ = ["BYTES", "Argument", "arguments", "is_complex", "is_floating", "precision_of"]

_DTYPES = {
    "double": ("fp64", 8),
    "float": ("fp32", 4),
    "c10::Half": ("fp16", 2),
    "c10::BFloat16": ("bf16", 2),
    "c10::Float8_e4m3fn": ("fp8", 1),
    "c10::Float8_e5m2": ("fp8", 1),
    "c10::Float8_e4m3fnuz": ("fp8", 1),
    "c10::Float8_e5m2fnuz": ("fp8", 1),
    "c10::complex<float>": ("fp32", 8),
    "c10::complex<double>": ("fp64", 16),
}
_INTEGERS = {"long int": 8, "long": 8, "int": 4, "short": 2, "short int": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "char": 1}

BYTES = {name: size for name, (_, size) in _DTYPES.items()} | _INTEGERS
"""Of an element, by the type's name in traces."""


class Argument(NamedTuple):
    """One argument of a call.

    Attributes:
        shape: Of a tensor; of a list of tensors, their shapes; `None` where it is no tensor.
        type: The element type's name; of a list of tensors, that of the first.
        value: Of all else, as text; empty where there is none, or it was not recorded.
    """

    shape: Any
    type: str
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
        is_tensor = kind in BYTES or kind == "TensorList" or (kind not in ("", "Scalar", "ScalarList", "GenericList") and bool(shape))
        of_first = kind[0] if isinstance(kind, list) and kind else kind
        found.append(Argument(_shape(shape) if is_tensor or isinstance(kind, list) else None, str(of_first), str(value)))
    return tuple(found)


def _shape(value: Any) -> Any:
    """A shape as a tuple, and a list of shapes as a list."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [tuple(each) for each in value]
    return tuple(value) if isinstance(value, list) else None


@functools.lru_cache(1 << 16)
def precision_of(inputs: Inputs | None) -> str | None:
    """The precision of the first floating tensor, as `hardware.DTYPES` call it."""
    for argument in (arguments(inputs) or ()) if inputs is not None else ():
        if argument.shape is not None and argument.type in _DTYPES:
            return _DTYPES[argument.type][0]
    return None


def is_floating(kind: str) -> bool:
    """Whether a type has floating elements."""
    return kind in _DTYPES


def is_complex(kind: str) -> bool:
    """Whether a type has complex elements."""
    return "complex" in kind.lower()
