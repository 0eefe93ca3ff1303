"""What kind of work an operator or a kernel is, and what a kernel's name says about precision and tensor cores.

An operator's name decides where it is known, a kernel's name elsewhere: a conversion of layouts
inside of a convolution is convolution. `categories.toml` has the names.
"""

import functools
import re
from collections.abc import Mapping
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
    """The tables of `categories.toml`, which explains them."""

    operators: dict[Category, str]
    operator_patterns: dict[str, Category]
    kernel_patterns: dict[str, Category]
    tensor_core_patterns: dict[str, bool]
    precision_patterns: dict[str, str]


def _compiled(patterns: Mapping[str, Meaning]) -> tuple[tuple[re.Pattern[str], Meaning], ...]:
    return tuple(
        (re.compile(pattern, re.IGNORECASE), meaning) for pattern, meaning in patterns.items()
    )


_TABLES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Tables)
_OPERATORS = {
    name: category for category, names in _TABLES.operators.items() for name in names.split()
}
_OPERATOR_PATTERNS = tuple(
    (re.compile(pattern), category) for pattern, category in _TABLES.operator_patterns.items()
)
_KERNEL_PATTERNS = _compiled(_TABLES.kernel_patterns)
_TENSOR_CORE_PATTERNS = _compiled(_TABLES.tensor_core_patterns)
_PRECISION_PATTERNS = _compiled(_TABLES.precision_patterns)


@functools.lru_cache(1 << 16)
def category_of_operator(name: str) -> Category:
    """The kind of work of an operator, by its name; `other` where it is unknown."""
    base = name.removeprefix("aten::")
    known = base if base in _OPERATORS else base.rstrip("_")
    if known in _OPERATORS:
        return _OPERATORS[known]
    return next(
        (category for pattern, category in _OPERATOR_PATTERNS if pattern.search(base)), "other"
    )


def category_of_kernel(work: DeviceEvent, operator: str | None) -> Category:
    """The kind of work of a kernel, by the operator that launched it or else by its own name."""
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
    return next(
        (category for pattern, category in _KERNEL_PATTERNS if pattern.search(name)), "other"
    )


@functools.lru_cache(1 << 16)
def tensor_cores_by_name(name: str) -> bool | None:
    """Whether a kernel runs on tensor or matrix cores; `None` where its name does not tell."""
    return next(
        (has_them for pattern, has_them in _TENSOR_CORE_PATTERNS if pattern.search(name)), None
    )


@functools.lru_cache(1 << 16)
def precision_by_name(name: str) -> str | None:
    """The precision that a kernel's name tells, as `hardware.DTYPES` call it."""
    return next(
        (precision for pattern, precision in _PRECISION_PATTERNS if pattern.search(name)), None
    )
