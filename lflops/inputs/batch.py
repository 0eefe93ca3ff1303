"""Find the tensors of a batch, check the batch size that a user passes, and make a batch.

`BatchReader` finds the tensors of each batch in mappings, sequences and dataclasses, and remembers
where they are. In the next batch with the same structure, it reads only those entries:

    batch                                   remembered
    {"ids": Tensor, "texts": ["a", …]}      dict of 2: ids is a Tensor, texts has no tensors

Some batches are not read: batches that contain an object of a user's class that may hold tensors,
and batches with too many values to read in every step.
"""

from collections.abc import Callable, Hashable, Mapping
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
    items_of,
    may_hold_tensors,
    storage_of,
)
from lflops.profile.module_names import name_below
from lflops.torch_private.tensors import shape_key, without_overrides

MOST_VALUES = 1_000
"""Maximum number of values to search in a batch."""

LONG = 64
"""Maximum length of a short container. Short containers are always searched completely.

In a longer container, the first `PROBED` entries are searched first. If they have no tensors, the
other entries are not searched.
"""

PROBED = 32
"""Number of entries at the start of a long container that are searched for tensors."""

MOST_STRUCTURES = 64
"""Maximum number of batch structures to remember.

Before one more structure is added, all remembered structures are dropped.
"""


class BatchTensors(NamedTuple):
    """The tensors of a batch.

    Attributes:
        names: The path of each tensor in the batch, such as `inputs.ids`; empty if the batch is a
            tensor.
        tensors: The tensors, in the same order.
    """

    names: tuple[str, ...]
    tensors: list[Tensor]

    def shapes(self) -> Hashable:
        """Return a key that is the same for all batches with the same names and shapes of tensors.

        The model does the same work for batches with the same key. The key is `None` if a tensor's
        shape cannot be read.
        """
        try:
            with without_overrides():
                return self.names, tuple(map(shape_key, self.tensors))
        except Exception:  # noqa: BLE001 - a tensor of a user's class may raise anything
            return None


class _Unreadable(Exception):  # noqa: N818 - it is caught in this file
    """The batch contains a value that may hold tensors but cannot be searched."""


class _Structure(NamedTuple):
    """The positions of the tensors in a container.

    Attributes:
        size: Number of entries of the container.
        keys: The keys of a mapping, or the attributes of a dataclass; `None` for a sequence.
        entries: The type and the structure of each entry. The structure is `_TENSOR` if the entry
            is a tensor, and `None` if it has no tensors.
    """

    size: int
    keys: tuple[Any, ...] | None
    entries: tuple[tuple[type, "_Structure | bool | None"], ...]


_TENSOR = True
"""The structure of a tensor."""

_UNREADABLE = False
"""The structure of a batch that cannot be searched."""

_IS_TENSOR_CLASS = partial(is_, Tensor)
_IS_STR_CLASS = partial(is_, str)
_PLAIN = {type(None), bool, int, float, str, bytes}
"""Types that are interchangeable when a batch is compared with the remembered structure.

For example, a label may be `None` in one batch and a string in the next.
"""


class BatchReader:
    """Finds the tensors of the batches of one stage, such as training or validation."""

    def __init__(self) -> None:
        # The names of the tensors and the structure of the batch, keyed by the type and the length
        # of the batch.
        self._known: dict[tuple[type, int], tuple[tuple[str, ...], _Structure | bool | None]] = {}

    def read(self, batch: Any) -> BatchTensors | None:
        """Return the tensors of a batch, or `None` if it cannot be read."""
        if type(batch) is Tensor:
            return BatchTensors(("",), [batch])
        try:
            storage = storage_of(batch)
            key = type(batch), -1 if storage is None else len(storage)
            known = self._known.get(key)
            if known is not None:
                names, structure = known
                if structure is _UNREADABLE:
                    return None
                found: list[Tensor] = []
                if _follow(batch, storage, structure, found):
                    return BatchTensors(names, found)
            return self._search(key, batch)
        except Exception:  # noqa: BLE001 - a user's batch may raise anything
            return None

    def shapes(self, batch: Any) -> Hashable:
        """Return a key for the names and shapes of a batch's tensors; see `BatchTensors.shapes`.

        Returns `None` if the batch cannot be read.
        """
        kind = type(batch)
        # A fast path for tensors and for the results of a data loader's default collate function.
        # It is needed because every step calls this method.
        names: tuple[str, ...] = ()
        tensors: Any = ()
        if kind is Tensor:
            names = ("",)
            tensors = (batch,)
        elif kind is list or kind is tuple:
            names, _ = self._known.get((kind, len(batch)), ((), None))
            tensors = batch
        elif kind is dict and all(map(_IS_STR_CLASS, map(type, batch))):
            names, _ = self._known.get((kind, len(batch)), ((), None))
            tensors = batch.values() if names == tuple(batch) else ()
        if names and len(names) == len(tensors) and all(map(_IS_TENSOR_CLASS, map(type, tensors))):
            try:
                with without_overrides():
                    return names, tuple(map(Tensor.size, tensors))
            except RuntimeError:
                # `Tensor.size` fails for a nested tensor of the older layout.
                pass
        found = self.read(batch)
        return None if found is None else found.shapes()

    def _search(self, key: tuple[type, int], batch: Any) -> BatchTensors | None:
        """Find the tensors of a batch whose structure is not known, and remember the structure."""
        if len(self._known) >= MOST_STRUCTURES:
            self._known.clear()
        search = _Search()
        try:
            structure = search.structure_of(batch, "", 0)
        except _Unreadable:
            self._known[key] = ((), _UNREADABLE)
            return None
        names = tuple(search.names)
        self._known[key] = (names, structure)
        return BatchTensors(names, search.tensors)


def _follow(value: Any, storage: Storage | None, structure: Any, found: list[Tensor]) -> bool:
    """Append the tensors in a nested value to `found`.

    `structure` says where they are. It was recorded from an earlier batch of the same type.
    Returns `False` if the value has a different structure. `found` is then incomplete.
    """
    if structure is _TENSOR:
        found.append(value)
        return True
    if structure is None:
        return True
    size, keys, entries = structure
    parts: Any = storage
    has_keys = type(parts) is dict
    expects_keys = keys is not None
    if parts is None or len(parts) != size or has_keys != expects_keys:
        return False
    if keys is not None:
        parts = map(parts.get, keys)
    for part, (kind, inner) in zip(parts, entries, strict=True):
        if type(part) is not kind and not (kind in _PLAIN and type(part) in _PLAIN):
            return False
        if inner is _TENSOR:
            found.append(part)
        elif inner is not None and not _follow(part, storage_of(part), inner, found):
            return False
    return True


class _Search:
    """Searches one batch for tensors.

    Attributes:
        names: The paths of the tensors found so far.
        tensors: The tensors found so far.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self._left = MOST_VALUES

    def structure_of(self, value: Any, name: str, depth: int) -> "_Structure | bool | None":
        """Search a value for tensors, and return its structure.

        The tensors are added to the attributes `names` and `tensors`.

        Raises:
            _Unreadable: The value may hold tensors but cannot be searched.
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
        if len(storage) > LONG and self._begins_without_tensors(storage, depth):
            return None
        if len(storage) > self._left:
            raise _Unreadable
        entries = []
        for key, part in items_of(storage):
            inner = self.structure_of(part, _path(name, key), depth + 1)
            entries.append((type(part), inner))
        if type(storage) is dict:
            return _Structure(len(storage), tuple(storage), tuple(entries))
        if entries and all(inner is None for _, inner in entries):
            return None
        return _Structure(len(storage), None, tuple(entries))

    def _begins_without_tensors(self, storage: Storage, depth: int) -> bool:
        """Return whether the first `PROBED` entries of a long container have no tensors."""
        values = storage.values() if type(storage) is dict else storage
        before = len(self.tensors)
        for _, part in zip(range(PROBED), values, strict=False):
            self.structure_of(part, "", depth + 1)
            if len(self.tensors) > before:
                del self.tensors[before:]
                del self.names[before:]
                return False
        return True


def _path(name: str, key: Any) -> str:
    """Return the path of the entry `key` in the container with the path `name`.

    Raises:
        _Unreadable: The key is not a string, an integer or an enum member. Looking up any other key
            could run user code.
    """
    if isinstance(key, Enum):
        key = key.name
    if type(key) not in (str, int, bool):
        raise _Unreadable
    return name_below(name, str(key))


Units = Mapping[str, int] | Callable[..., Mapping[str, int]]
"""The number of samples and tokens of a batch, as a user passes them.

This is `{"samples": n, "tokens": n}` with one or both keys, or a function that returns such a dict.
"""


GIVEN = "units="
"""Says in a profile that the user passed the number of samples or tokens. Otherwise, the name of
the tensor stands there that lflops counted."""


def units_of(caller: str, units: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the number of samples and the number of tokens that a user passed, as fields of `Run`.

    The fields also name the source of each number.
    """
    if units is None:
        return {}
    try:
        given = units(*args, **kwargs) if callable(units) else units
    except Exception as error:
        raise CountError(
            f"{caller}: the function passed as units= failed on the batch: {type(error).__name__}: "
            f"{error}"
        ) from error
    if (
        not isinstance(given, Mapping)
        or not given.keys() <= {"samples", "tokens"}
        or not all(map(is_whole, given.values()))
    ):
        raise CountError(
            f"{caller}: units is {describe(given)}: pass {{'samples': n, 'tokens': n}}, "
            "or a function that returns such a dict"
        )
    fields: dict[str, Any] = {}
    if "samples" in given:
        fields |= {"samples_per_step": int(given["samples"]), "samples_from": GIVEN}
    if "tokens" in given:
        fields |= {"tokens_per_step": int(given["tokens"]), "tokens_from": (GIVEN,)}
    return fields


def tensor_of_shape(caller: str, model: nn.Module, shape: Any) -> Tensor:
    """Create a tensor of random numbers from 0 to 1, as an input for a model.

    The tensor has the model's device and the dtype of the model's first floating-point parameter.
    The user's random number generators are not used.
    """
    is_shape = (
        isinstance(shape, tuple | list)
        and bool(shape)
        and all(isinstance(size, int) and size >= 0 for size in shape)
    )
    if not is_shape:
        raise CountError(
            f"{caller}: input_shape={describe(shape)}: "
            "pass the sizes of one tensor, such as (8, 3, 224, 224)"
        )
    tensors = [*model.parameters(), *model.buffers()]
    floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    dtype = floating[0] if floating else torch.get_default_dtype()
    device = device_of(tensors)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(shape, generator=generator, device=device).to(dtype)
