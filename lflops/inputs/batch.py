"""The batch: how many samples and tokens it has, and a batch that is made from a shape.

`BatchReader` finds the tensors of one batch after the other, in mappings, sequences and
dataclasses. Where the tensors are in a batch is remembered, so that in the next one of the same
structure nothing else is looked at:

    batch                                   remembered
    {"ids": Tensor, "texts": ["a", …]}      dict of 2: ids is a Tensor, texts is a list without tensors

A batch with a plain object of the user's, or with more values than are worth a look in each step,
is not read.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lflops.errors import CountError
from lflops.inputs.arguments import describe, is_whole
from lflops.inputs.tensors import (
    DEEPEST,
    Storage,
    device_of,
    is_tensor,
    may_hold_tensors,
    storage_of,
)
from lflops.torch_private.dispatch_modes import without_modes
from lflops.torch_private.tensors import is_integer, shape_key, without_overrides

# values of a batch that are looked at
MOST_VALUES = 1_000
LONG, PROBED = (
    64,
    32,
    # a container with more entries than the first is one of plain data if so many of them hold no
    # tensor
)
# structures that are remembered
MOST_STRUCTURES = 64
SHORT, MOST_ROWS, MOST_FEATURES = (
    8,
    64,
    16,
    # padding is looked for in rows of so many positions or more, in so many of them, and features
)
# different integers in a batch of marks, as of segments; one of tokens has more
MOST_MARKS = 16


class BatchTensors(NamedTuple):
    """The tensors of a batch. `names` has the path of each, with dots between the keys."""

    names: tuple[str, ...]
    tensors: list[Tensor]

    def shapes(self) -> Hashable:
        """The shapes by name: two batches where they are equal are the same work.

        `None` where a tensor does not give its shape.
        """
        try:
            with without_overrides():
                return self.names, tuple(map(shape_key, self.tensors))
        except Exception:  # noqa: BLE001 - a tensor of the user's class may raise anything
            return None


class _Unreadable(Exception):  # noqa: N818 - it is caught in this file
    """The batch holds what is not read."""


class _Structure(NamedTuple):
    # its number of entries
    size: int
    # of a mapping or a dataclass; `None` for a sequence
    keys: tuple[Any, ...] | None
    # The type of each entry, and its structure: `_TENSOR` is taken, `None` holds no tensor.
    entries: tuple[tuple[type, "_Structure | bool | None"], ...]


_TENSOR, _UNREADABLE = True, False
_IS_PLAIN = partial(is_, Tensor)
_PLAIN = {
    type(None),
    bool,
    int,
    float,
    str,
    bytes,
    # types of which one may stand in place of another
}


class BatchReader:
    """Reads the batches of one stage of a training."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, int], tuple[tuple[str, ...], _Structure | bool | None]] = {}

    def read(self, batch: Any) -> BatchTensors | None:
        """The tensors of a batch; `None` where it cannot be read."""
        if type(batch) is Tensor:
            return BatchTensors(("",), [batch])
        try:
            storage = storage_of(batch)
            key = type(batch), -1 if storage is None else len(storage)
            known = self._known.get(key)
            if known is not None:
                names, structure = known
                found: list[Tensor] = []
                if structure is _UNREADABLE:
                    return None
                if _follow(batch, storage, structure, found):
                    return BatchTensors(names, found)
            return self._search(key, batch)
        except Exception:  # noqa: BLE001 - whatever a batch of the user's raises
            return None

    def shapes(self, batch: Any) -> Hashable:
        """The shapes of a batch's tensors by name; `None` where they are unknown."""
        kind = type(batch)
        if (
            kind is list or kind is tuple
            # as a loader collates rows; in short, for it is done in each step
        ):
            names, _ = self._known.get((kind, len(batch)), ((), None))
            if len(names) == len(batch) and all(map(_IS_PLAIN, map(type, batch))):
                try:
                    with without_overrides():
                        return names, tuple(map(Tensor.size, batch))
                except RuntimeError:
                    # a nested tensor of the older layout
                    pass
        found = self.read(batch)
        return None if found is None else found.shapes()

    def _search(self, key: tuple[type, int], batch: Any) -> BatchTensors | None:
        """Search a batch of a structure that is not known, and remember it."""
        if len(self._known) >= MOST_STRUCTURES:
            self._known.clear()
        search = _Search()
        try:
            structure = search.structure_of(batch, "", 0)
        except _Unreadable:
            self._known[key] = (), _UNREADABLE
            return None
        self._known[key] = tuple(search.names), structure
        return BatchTensors(tuple(search.names), search.tensors)


def _follow(value: Any, storage: Storage | None, structure: Any, found: list[Tensor]) -> bool:
    """Take the tensors of a batch of a known structure. Returns whether it has that structure."""
    if structure is _TENSOR:
        found.append(value)
        return True
    if structure is None:
        return True
    size, keys, entries = structure
    parts: Any = storage
    if parts is None or len(parts) != size or (keys is None) is (type(parts) is dict):
        return False
    for part, (kind, inner) in zip(
        parts if keys is None else map(parts.get, keys), entries, strict=True
    ):
        if type(part) is not kind and not (kind in _PLAIN and type(part) in _PLAIN):
            return False
        if inner is _TENSOR:
            found.append(part)
        elif inner is not None and not _follow(part, storage_of(part), inner, found):
            return False
    return True


class _Search:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self._left = MOST_VALUES

    def structure_of(self, value: Any, name: str, depth: int) -> "_Structure | bool | None":
        """The structure of a value, whose tensors are added to those that were found.

        Unreadable if it may hold others.
        """
        self._left -= 1
        if is_tensor(value):
            self.names.append(name)
            self.tensors.append(value)
            return _TENSOR
        storage = storage_of(value)
        if storage is None:
            if may_hold_tensors(value):
                raise _Unreadable
            return None
        if depth == DEEPEST:
            raise _Unreadable
        if len(storage) > LONG and self._is_plain(storage, depth):
            return None
        if len(storage) > self._left:
            raise _Unreadable
        pairs = storage.items() if type(storage) is dict else enumerate(storage)
        entries = tuple(
            [
                (type(part), self.structure_of(part, _path(name, key), depth + 1))
                for key, part in pairs
            ]
        )
        if type(storage) is dict:
            return _Structure(len(storage), tuple(storage), entries)
        return (
            _Structure(len(storage), None, entries)
            if not entries or any(structure is not None for _, structure in entries)
            else None
        )

    def _is_plain(self, storage: Storage, depth: int) -> bool:
        """Whether the first entries of a long container hold no tensor."""
        values = storage.values() if type(storage) is dict else storage
        before = len(self.tensors)
        for _, part in zip(range(PROBED), values, strict=False):
            self.structure_of(part, "", depth + 1)
            if len(self.tensors) > before:
                del self.tensors[before:], self.names[before:]
                return False
        return True


def _path(name: str, key: Any) -> str:
    """The path of an entry.

    A key that is an object of the user's is unreadable: to look it up again would run its code.
    """
    if isinstance(key, Enum):
        key = key.name
    if type(key) not in (str, int, bool):
        raise _Unreadable
    return f"{name}.{key}" if name else str(key)


Units = Mapping[str, int] | Callable[..., Mapping[str, int]]
"""`{"samples": n, "tokens": n}`, one of them or both, or a function that returns it."""


def units_of(caller: str, units: Any, args: Any, kwargs: Any) -> dict[str, int]:
    """The user's sizes of a batch, as fields of `Run`; empty if none are given."""
    if units is None:
        return {}
    try:
        given = units(*args, **kwargs) if callable(units) else units
    except Exception as error:
        raise CountError(
            f"{caller}: units failed on the batch: {type(error).__name__}: {error}"
        ) from error
    if (
        not isinstance(given, Mapping)
        or not given.keys() <= {"samples", "tokens"}
        or not all(map(is_whole, given.values()))
    ):
        raise CountError(
            f"{caller}: units gave {describe(given)}: give {{'samples': n, 'tokens': n}} or a function that returns it"
        )
    return {f"{name}_per_step": int(number) for name, number in given.items()}


def samples_and_tokens(tensors: Iterable[Tensor]) -> tuple[int | None, int | None]:
    """Samples: the size of dimension 0 of most tensors; tokens: that of the first 2-d integer tensor.

    Some tensors do not give a shape.
    """
    first: list[int] = []
    tokens: int | None = None
    with without_overrides():
        for tensor in tensors:
            # a tensor of the user's class may raise anything
            with contextlib.suppress(Exception):
                dimensions = Tensor.dim(tensor)
                first += [int(Tensor.size(tensor, 0))] * bool(dimensions)
                if tokens is None and dimensions == 2 and is_integer(tensor):
                    tokens = int(Tensor.numel(tensor))
    return max(first, key=first.count) if first else None, tokens


def padded_share(batch: BatchTensors | None) -> float | None:
    """The share of a batch's positions that is padding: by its mask, else by the value that its rows end with.

    `None` if nothing tells.
    """
    # A bounded part of the batch is read. On a device that waits for the device.
    by_mask, by_rows = [], []
    with without_modes(), without_overrides(), torch.no_grad():
        for path, tensor in () if batch is None else zip(*batch, strict=True):
            # a batch may hold anything
            with contextlib.suppress(Exception):
                name = path.rpartition(".")[2].lower()
                if (
                    type(tensor) is not Tensor
                    or tensor.device.type == "meta"
                    or tensor.dim() not in {2, 3}
                    or tensor.shape[1] < SHORT
                ):
                    continue
                part = (
                    tensor[:MOST_ROWS]
                    if tensor.dim() == 2
                    else tensor[:MOST_ROWS, :, :MOST_FEATURES]
                )
                if name.endswith("mask") and part.dim() == 2:
                    there = (part != 0).double().mean().item()
                    by_mask.append(there if "padding" in name else 1 - there)
                elif part.dim() == 3 and part.is_floating_point():
                    by_rows.append(_trailing((part == 0).all(-1)))
                elif part.dim() == 2 and is_integer(part) and part.unique().numel() > MOST_MARKS:
                    by_rows.append(_trailing(part == part[:, -1:]))
    return max(by_mask or by_rows, default=None)


def _trailing(is_equal: Tensor) -> float:
    """The share of positions in the runs that end the rows; a run of one is none."""
    runs = is_equal.flip(1).cumprod(1).sum(1)
    return float(runs[runs > 1].sum()) / is_equal.numel()


def tensor_of_shape(caller: str, model: nn.Module, shape: Any) -> Tensor:
    """A tensor of random numbers from 0 to 1, on the model's device, in the dtype of its first floating parameter, by its own generator."""
    if (
        not isinstance(shape, tuple | list)
        or not shape
        or not all(isinstance(size, int) and size >= 0 for size in shape)
    ):
        raise CountError(
            f"{caller}: input_shape={describe(shape)}: give the sizes of one tensor, as (8, 3, 224, 224)"
        )
    tensors = [*model.parameters(), *model.buffers()]
    dtype = next(
        (each.dtype for each in tensors if each.is_floating_point()), torch.get_default_dtype()
    )
    device = device_of(tensors)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(shape, generator=generator, device=device).to(dtype)
