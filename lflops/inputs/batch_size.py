"""Find the number of samples and tokens of a batch, and how each number was found.

Numbers are never guessed: if none of the following sources exists, a number is unknown. The number
of samples comes from the first source that exists:

* the attribute `num_graphs` of the batch, as graph neural networks use it;
* the length of a list with one entry per sample, such as images of several sizes;
* the batch size of the data loader, checked against the sizes of the tensors;
* the first dimension of the token ids, or the first dimension of all tensors if it is the same.

The number of tokens comes from the tensors named `*input_ids`. If there are none, it comes from the
ids that an embedding looks up.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from lflops.inputs.arguments import is_whole
from lflops.inputs.tensors import (
    Storage,
    attributes_of,
    is_defined_by,
    is_tensor,
    items_of,
    parts_of,
    storage_of,
)
from lflops.torch_private.tensors import is_integer, shape_key, without_overrides

INPUT_IDS = "input_ids"
"""Ending of the names of tensors with token ids."""

IMAGE_CHANNELS = {1, 3, 4}
"""Numbers of channels that an image can have."""

IMAGE_DIMENSIONS = 3
"""Number of dimensions of an image: channels, height and width."""

SMALLEST_IMAGE = 8
"""Minimum height and width of an image."""

MOST_ENTRIES = 4096
"""Maximum number of entries to search for images in a list."""


class BatchSize(NamedTuple):
    """The number of samples and tokens of a batch; `None` if unknown.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens.
        samples_from: How the number of samples was found, such as `dimension 0 of input_ids`;
            `None` if unknown.
        tokens_from: The names of the tensors that hold the token ids.
    """

    samples: int | None = None
    tokens: int | None = None
    samples_from: str | None = None
    tokens_from: tuple[str, ...] = ()


class _Samples(NamedTuple):
    """A number of samples, and how it was found."""

    number: int
    source: str


class _Sized(NamedTuple):
    """A tensor of a batch with at least one dimension.

    Attributes:
        name: Path of the tensor in the batch.
        sizes: Size of each dimension.
        tensor: The tensor itself.
    """

    name: str
    sizes: tuple[int, ...]
    tensor: Tensor

    @property
    def holds_token_ids(self) -> bool:
        return self.name.lower().endswith(INPUT_IDS) and is_integer(self.tensor)


class BatchSizes:
    """Reads the number of samples and tokens of each batch of one stage, such as training.

    Args:
        loader_size: Returns the number of samples that the data loader puts into a batch, or `None`
            if it is unknown.
    """

    def __init__(self, loader_size: Callable[[], int | None] | None = None) -> None:
        self._loader_size = loader_size
        # The name of a tensor, and the number of the dimension whose size was the batch size of the
        # data loader in an earlier batch.
        self._dimension: tuple[str, int] | None = None

    def read(self, batch: Any, names: Iterable[str], tensors: Iterable[Tensor]) -> BatchSize:
        """Return the number of samples and tokens of a batch.

        Args:
            batch: The batch, or `None` if only its tensors are known.
            names: The path of each tensor in the batch.
            tensors: The tensors of the batch.
        """
        with without_overrides():
            found = _with_sizes(names, tensors)
            samples = self._samples(batch, found)
            tokens = None
            token_tensors = []
            for each in found:
                if each.holds_token_ids:
                    tokens = (tokens or 0) + prod(each.sizes)
                    token_tensors.append(each.name)
        return BatchSize(
            samples=None if samples is None else samples.number,
            tokens=tokens,
            samples_from=None if samples is None else samples.source,
            tokens_from=tuple(token_tensors),
        )

    def _samples(self, batch: Any, found: Sequence[_Sized]) -> _Samples | None:
        graphs = _number_of_graphs(batch)
        if graphs is not None:
            return _Samples(graphs, "the attribute num_graphs of the batch")
        loaded = None
        if self._loader_size is not None:
            loaded = self._loader_size()
        listed = _listed_samples(batch, found)
        if loaded is None:
            return listed or _shared_dimension(found)
        if listed is not None and listed.number <= loaded:
            return listed
        return self._loaded_samples(loaded, found)

    def _loaded_samples(self, loaded: int, found: Sequence[_Sized]) -> _Samples:
        """Return the number of samples of a batch, given the data loader's batch size `loaded`.

        Usually, this is `loaded`. It can be less for the last batch of a data set, so the sizes of
        the tensors are checked.
        """
        sizes = {each.name: each.sizes for each in found}
        if self._dimension is not None:
            name, dimension = self._dimension
            if dimension < len(sizes.get(name, ())):
                number = sizes[name][dimension]
                if number <= loaded:
                    return _Samples(number, _dimension_of(name, dimension))
        for dimension in (0, 1):
            for each in found:
                if each.sizes[dimension : dimension + 1] == (loaded,):
                    self._dimension = each.name, dimension
                    return _Samples(loaded, _dimension_of(each.name, dimension))
        shared = _shared_dimension(found)
        if shared is not None and shared.number < loaded:
            # The last batch of a data set is smaller than the other batches.
            return shared
        return _Samples(loaded, "the batch size of the DataLoader")


def batch_size(names: Iterable[str], tensors: Iterable[Tensor]) -> BatchSize:
    """Return the number of samples and tokens of a batch, using only its tensors."""
    return BatchSizes().read(None, names, tensors)


def loader_batch_size(loader: Any) -> int | None:
    """Return the number of samples that a data loader puts into a full batch; `None` if unknown."""
    # A loader of a user's class may raise anything.
    with contextlib.suppress(Exception):
        for holder in (loader, getattr(loader, "batch_sampler", None)):
            size = getattr(holder, "batch_size", None)
            if size is not None and is_whole(size, 1):
                return int(size)
    return None


def tokens_of_shapes(shapes: Hashable, names: Sequence[str]) -> int | None:
    """Return the total number of elements of the named tensors, for a batch with the given shapes.

    `shapes` is a key from `BatchReader.shapes`. Returns `None` if a tensor is missing.
    """
    if not isinstance(shapes, tuple) or not names:
        return None
    sizes = dict(zip(*shapes, strict=True))
    if "" in sizes:
        # If the batch itself is a tensor, it is the model's first argument.
        sizes["0"] = sizes[""]
    total = 0
    for name in names:
        # If the batch is the model's first argument, the name may begin with the position `0`.
        size = sizes.get(name, sizes.get(name.removeprefix("0.")))
        if size is None or not all(map(is_whole, size)):
            return None
        total += prod(size)
    return total


class Lookup(NamedTuple):
    """The layout of the tensor of ids that an embedding looked up.

    Attributes:
        sizes: Size of each dimension.
        strides: Stride of each dimension. A slice of a larger tensor has other strides than a whole
            tensor, so the two are not confused.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def lookup_of(ids: Tensor) -> Lookup:
    return Lookup(tuple(ids.shape), tuple(ids.stride()))


def lookups_of(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Lookup]]:
    """Return the name and the layout of each integer tensor among a model's inputs.

    The layouts show which input an embedding looked up: the input with the same layout as the
    tensor of ids that the embedding received.
    """
    lookups = []
    with without_overrides():
        for name, tensor in named:
            # A tensor of a user's class may raise anything.
            with contextlib.suppress(Exception):
                if is_integer(tensor):
                    lookups.append((name, lookup_of(tensor)))
    return lookups


def looked_up_tokens(
    inputs: Iterable[tuple[str, Lookup]], lookups: Iterable[Lookup], positions: Iterable[int]
) -> BatchSize:
    """Find the model input that holds sequences of token ids, and return its number of tokens.

    Only inputs that an embedding looked up are considered. If none of them holds sequences, the
    number of tokens is `None`.

    Args:
        inputs: The name and layout of each integer input, from `lookups_of`.
        lookups: The layouts of the ids that embeddings looked up.
        positions: For each layer with matmuls, the number of positions (elements of sequences) in
            one call. A tensor of ids holds sequences only if the number of ids is also the number
            of positions of a layer. This excludes tabular data: a row of ids looks like a sequence,
            but the layers process one position per row.
    """
    sequences = set()
    for looked_up in lookups:
        if len(looked_up.sizes) == 2 and looked_up.sizes[1] > 1:
            sequences.add(looked_up)
    worked_on = set(positions)
    for name, lookup in inputs:
        number = prod(lookup.sizes)
        if lookup in sequences and number in worked_on:
            return BatchSize(tokens=number, tokens_from=(name,))
    return BatchSize()


def _with_sizes(names: Iterable[str], tensors: Iterable[Tensor]) -> list[_Sized]:
    """Return the tensors with at least one dimension, except tensors with unreadable sizes."""
    found = []
    for name, tensor in zip(names, tensors, strict=True):
        # A tensor of a user's class may raise anything.
        with contextlib.suppress(Exception):
            sizes = _sizes(tensor)
            if sizes:
                found.append(_Sized(name, sizes, tensor))
    return found


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the size of each dimension of a tensor.

    For a nested tensor, return only the number of tensors in it.
    """
    sizes = shape_key(tensor)
    if isinstance(sizes, tuple) and all(map(is_whole, sizes)):
        return tuple(sizes)
    return (int(Tensor.size(tensor, 0)),)


def _dimension_of(name: str, dimension: int) -> str:
    return f"dimension {dimension} of {name_of_input(name)}"


def name_of_input(name: str) -> str:
    """Describe where a tensor of a batch is, such as `input 0` for the path `0`."""
    if not name:
        return "the batch"
    return f"input {name}" if name[0].isdecimal() else name


def _shared_dimension(found: Sequence[_Sized]) -> _Samples | None:
    """Return the size of dimension 0 that all tensors of token ids have in common.

    Without token ids, this is the size that all tensors have in common. Returns `None` if the sizes
    differ, or if there are several tensors and all of them look like images.
    """
    ids = [each for each in found if each.holds_token_ids]
    if len(found) > 1 and all(_is_image(each.tensor) for each in found):
        # Each of these tensors may be the image of one sample, or a batch of sequences.
        return None
    for group in (ids, found):
        sizes = {each.sizes[0] for each in group}
        if len(sizes) == 1:
            where = f"dimension 0 of {name_of_input(group[0].name)}"
            return _Samples(sizes.pop(), where)
        if sizes:
            return None
    return None


def _number_of_graphs(batch: Any) -> int | None:
    """Return the attribute `num_graphs` of a batch or of one of its entries, or `None`."""
    entries = [batch]
    storage = _storage(batch)
    if storage is not None:
        entries += parts_of(storage)[:MOST_PARTS]
    for entry in entries:
        if not is_tensor(entry) and _defines(entry, "num_graphs"):
            # The attribute may be a property of a user's class.
            with contextlib.suppress(Exception):
                number = entry.num_graphs
                if is_whole(number):
                    return int(number)
    return None


def _storage(value: Any) -> Storage | None:
    """Return the entries of a container, or `None` for a tensor or any other value."""
    if is_tensor(value):
        return None
    return storage_of(value)


MOST_PARTS = 8
"""Largest number of entries of a batch that are searched for the attribute `num_graphs`."""


def _defines(value: Any, name: str) -> bool:
    """Return whether an object has an attribute, without running user code."""
    return is_defined_by(type(value), name) or name in attributes_of(value)


def _listed_samples(batch: Any, found: Sequence[_Sized]) -> _Samples | None:
    """Return the number of samples of a batch that is, or has, a list with one entry per sample.

    Return `None` if there is no such list.
    """
    storage = _storage(batch)
    if not storage:
        return None
    if not isinstance(storage, dict):
        if not found and _are_records(storage):
            return _Samples(len(storage), "len(batch)")
        if all(map(_has_image, storage[:MOST_ENTRIES])):
            return _Samples(len(storage), "len(batch)")
    for key, part in items_of(storage):
        if isinstance(part, list | tuple) and _is_list_of_samples(part[:MOST_ENTRIES]):
            return _Samples(len(part), f"the number of entries in {name_of_input(str(key))}")
    return None


def _are_records(entries: Sequence[Any]) -> bool:
    """Return whether all entries are dictionaries, such as samples that are not yet collated."""
    return all(isinstance(entry, dict) for entry in entries)


def _has_image(entry: Any) -> bool:
    """Return whether an entry of a batch contains exactly one image, as in `(image, label)`."""
    storage = _storage(entry)
    if not storage:
        return False
    return sum(map(_is_image, parts_of(storage))) == 1


def _is_list_of_samples(entries: Sequence[Any]) -> bool:
    """Return whether a list has one tensor for each sample.

    This is assumed if all entries are images, or tensors of different lengths.
    """
    if not entries or not all(map(is_tensor, entries)):
        return False
    if all(map(_is_image, entries)):
        return True
    sizes = [_sizes(entry) for entry in entries]
    return all(sizes) and len({size[0] for size in sizes}) > 1


def _is_image(value: Any) -> bool:
    if not is_tensor(value):
        return False
    sizes = _sizes(value)
    if len(sizes) != IMAGE_DIMENSIONS:
        return False
    channels, height, width = sizes
    return channels in IMAGE_CHANNELS and min(height, width) >= SMALLEST_IMAGE
