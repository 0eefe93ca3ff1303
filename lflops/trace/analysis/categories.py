"""Classify operators and kernels by category, precision and use of tensor cores.

A category is, for example, `gemm`, `convolution` or `communication`. If the operator that launched
a kernel is known, the kernel has the category of that operator. So a layout conversion that a
convolution launches counts as convolution. Otherwise, the kernel's name determines the category.
`categories.toml` lists the names of operators, and patterns for the names of kernels.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, get_args

import msgspec
from msgspec import Struct

from lflops.trace.device_states import communicates
from lflops.trace.recorded import DeviceEvent

_Computing = Literal[
    "gemm",
    "convolution",
    "attention",
    "normalisation",
    "softmax",
    "reduction",
    "pointwise",
    "indexing",
    "optimizer",
]
Category = Literal[_Computing, "communication", "copy", "fill", "other"]
CATEGORIES: tuple[Category, ...] = get_args(Category)

Meaning = TypeVar("Meaning")


class _Tables(Struct, forbid_unknown_fields=True):
    """The content of `categories.toml`. Comments in that file explain each table."""

    operators: dict[Category, str]
    operator_patterns: dict[str, Category]
    kernel_patterns: dict[str, Category]
    tensor_core_patterns: dict[str, bool]
    precision_patterns: dict[str, str]


_Patterns = Sequence[tuple[re.Pattern[str], Meaning]]


def _compiled(
    patterns: Mapping[str, Meaning], flags: re.RegexFlag = re.NOFLAG
) -> _Patterns[Meaning]:
    return [(re.compile(pattern, flags), meaning) for pattern, meaning in patterns.items()]


def _first_match(patterns: _Patterns[Meaning], name: str) -> Meaning | None:
    """Return the meaning (such as a category) of the first pattern that matches a name.

    Returns `None` if no pattern matches.
    """
    for pattern, meaning in patterns:
        if pattern.search(name):
            return meaning
    return None


_TABLES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Tables)
_OPERATORS: dict[str, Category] = {}
for _category, _names in _TABLES.operators.items():
    _OPERATORS |= dict.fromkeys(_names.split(), _category)
_OPERATOR_PATTERNS = _compiled(_TABLES.operator_patterns)
_KERNEL_PATTERNS = _compiled(_TABLES.kernel_patterns, re.IGNORECASE)
_TENSOR_CORE_PATTERNS = _compiled(_TABLES.tensor_core_patterns, re.IGNORECASE)
_PRECISION_PATTERNS = _compiled(_TABLES.precision_patterns, re.IGNORECASE)


@functools.lru_cache(1 << 16)
def category_of_operator(name: str) -> Category:
    """Return the category of an operator by its name, or `other` if the name is unknown."""
    base = name.removeprefix("aten::")
    known = base if base in _OPERATORS else base.rstrip("_")
    if known in _OPERATORS:
        return _OPERATORS[known]
    return _first_match(_OPERATOR_PATTERNS, base) or "other"


def category_of_kernel(work: DeviceEvent, operator: str | None) -> Category:
    """Return the category, for example `gemm`, of a kernel, copy or fill.

    Communication and copies have their own categories. All other work has the category of the
    operator that launched it. If the operator is unknown or has no category, the name of the work
    determines the category.
    """
    if communicates(work):
        return "communication"
    if work.kind == "copy":
        return "copy"
    by_operator = category_of_operator(operator) if operator else "other"
    if by_operator != "other":
        return by_operator
    return "fill" if work.kind == "fill" else _category_by_name(work.name)


@functools.lru_cache(1 << 16)
def _category_by_name(name: str) -> Category:
    return _first_match(_KERNEL_PATTERNS, name) or "other"


@functools.lru_cache(1 << 16)
def tensor_cores_by_name(name: str) -> bool | None:
    """Return whether a kernel runs on tensor or matrix cores, by its name; `None` if unknown."""
    return _first_match(_TENSOR_CORE_PATTERNS, name)


_NARROW = re.compile(
    r"(mx|nv)?(?:fp([468])(?![0-9])|float([68])(?![0-9])|e(2m1|2m3|3m2|4m3|5m2))", re.IGNORECASE
)
"""Matches a floating-point format of at most 8 bits in a kernel's name, such as fp8.

CUDA's `float4` does not match, because it is four numbers of 32 bits.
"""

_BITS = {"2m1": "4", "2m3": "6", "3m2": "6", "4m3": "8", "5m2": "8"}
"""Number of bits of a format, keyed by the sizes of its exponent and mantissa.

For example, `4m3` is a 4-bit exponent and a 3-bit mantissa. With the sign, these are 8 bits.
"""

_OPERANDS = re.compile(r"^(?:bmm|gemm)_[A-Za-z0-9]+_([A-Za-z0-9]+)_")
"""Matches the names of TensorRT-LLM's matmul kernels.

The regular expression has one group, with the formats of the two operands. The format of the result
comes before this group.
"""


def narrow_formats(name: str) -> str | None:
    """Return the formats of at most 8 bits in a kernel's name, such as `mxfp4 × mxfp8`.

    If the name shows the formats of the operands and of the result separately, the format of the
    result is ignored. If the name shows no such format, the result is `None`.
    """
    operands = _OPERANDS.match(name)
    found = set()
    for prefix, *sizes in _NARROW.findall(operands[1] if operands else name):
        size = "".join(sizes).lower()
        found.add((_BITS.get(size, size), prefix.lower()))
    names = [f"{prefix}fp{bits}" for bits, prefix in sorted(found)]
    return " × ".join(names) or None


@functools.lru_cache(1 << 16)
def precision_by_name(name: str) -> str | None:
    """Return the precision that a kernel's name shows, or `None` if it shows none.

    The precision is a name in `hardware.DTYPES`, or the name of a format of at most 8 bits.
    """
    return narrow_formats(name) or _first_match(_PRECISION_PATTERNS, name)
