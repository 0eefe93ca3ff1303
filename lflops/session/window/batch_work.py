"""The work of a batch that was not counted, where its sequences are packed: by their lengths, which are read on the host.

Attention costs a square for each sequence, all else a token. What both cost is taken from counted batches, and has to give the work of at
least one more of them to the last MAC; otherwise the work of other batches is not known.
"""

import contextlib
import re
from collections.abc import Hashable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lflops.collect.inputs.batch import BatchReader, BatchTensors
from lflops.collect.torch_private.dispatch_modes import without_modes
from lflops.collect.torch_private.tensors import is_integer, nested_offsets, without_overrides
from lflops.formulas.table import READS
from lflops.profile.model import Profile

Lengths = Mapping[str, int]  # by where in the batch the lengths are read: the sum of their squares
NO_LENGTHS: Lengths = {}

OFFSETS = re.compile(r"cu_?seq_?len", re.IGNORECASE)
LENGTHS = re.compile(r"(seq(uence)?_?)?len(gth)?s$", re.IGNORECASE)
IDENTITIES = re.compile(r"(seq|seq(uence)?s?|doc(ument)?s?|segment|sample)_?(idx|ids?)$", re.IGNORECASE)
POSITIONS, MASK = "position_ids", "attention_mask"

MASKED = frozenset({"flex_attention", "flex_attention_backward"})  # Attention whose lengths are in a mask


class Sample(NamedTuple):
    """A batch that was counted."""

    shapes: Hashable
    tokens: int | None
    lengths: Lengths
    others: int  # MACs that no length decides
    attention: int  # MACs that lengths decide


class BatchWork:
    """What batches cost, forward and backward: those that were counted, and others like them."""

    def __init__(self) -> None:
        self._of_shapes: dict[Hashable, int] = {}
        self._samples: list[Sample] = []
        self.packed: bool | None = None

    @property
    def needs_lengths(self) -> bool:
        """Whether lengths may decide the work of a batch: nothing was counted yet, or they did decide it."""
        return self.packed is not False

    @property
    def needs_samples(self) -> bool:
        """Whether another counted batch would tell what the others cost."""
        return self.packed is True and self._law() is None

    def add(self, shapes: Hashable, tokens: int | None, lengths: Lengths, counted: Profile) -> None:
        if shapes is None:
            return  # of a batch that cannot be read, it is not known which others are like it
        root = counted.modules[""]
        macs = root.forward.macs + root.backward.macs
        attention = sum(cell.macs for cell in counted.cells if cell.phase in ("forward", "backward") and _reads_lengths(cell.operator))
        if self.packed is None or attention:
            self.packed = bool(attention)
        if attention:
            self._samples.append(Sample(shapes, tokens, dict(lengths), macs - attention, attention))
        else:
            self._of_shapes[shapes] = macs

    def of(self, shapes: Hashable, tokens: int | None, lengths: Lengths) -> int | None:
        """MACs of a batch; `None` where they are not known."""
        if shapes is None:
            return None
        if shapes in self._of_shapes:
            return self._of_shapes[shapes]
        for sample in self._samples:
            if (sample.shapes, sample.lengths) == (shapes, lengths) and lengths:
                return sample.others + sample.attention
        law = self._law()
        if law is None or law[0] not in lengths:
            return None
        where, each_square = law
        others = self._others(shapes, tokens)
        attention = each_square * lengths[where]
        return None if others is None or attention.denominator != 1 else others + int(attention)

    def _law(self) -> tuple[str, Fraction] | None:
        """Where the lengths are read that explain every counted batch, and what a square costs; `None` until two batches agree."""
        distinct = {tuple(sorted(sample.lengths.items())): sample for sample in self._samples}
        if len(distinct) < 2:
            return None
        for where in self._samples[0].lengths:
            squares = [sample.lengths.get(where, 0) for sample in self._samples]
            if all(squares):
                each = {Fraction(sample.attention, square) for sample, square in zip(self._samples, squares, strict=True)}
                if len(each) == 1 and len(set(squares)) > 1:
                    return where, each.pop()
        return None

    def _others(self, shapes: Hashable, tokens: int | None) -> int | None:
        """MACs that lengths do not decide: of the same shapes; else for as many tokens, or a token, if two counted batches agree."""
        same = {sample.others for sample in self._samples if sample.shapes == shapes}
        as_many = [sample.others for sample in self._samples if sample.tokens == tokens]
        if len(same) == 1 or (tokens is not None and len(as_many) > 1 and len(set(as_many)) == 1):
            return (same or set(as_many)).pop()
        known = {(sample.tokens, sample.others) for sample in self._samples}
        if tokens is None or len(known) < 2 or any(not counted for counted, _ in known):
            return None
        each = {Fraction(others, counted or 1) for counted, others in known}
        whole = each.pop() * tokens if len(each) == 1 else None
        return None if whole is None or whole.denominator != 1 else int(whole)


def _reads_lengths(operator: str) -> bool:
    reads = READS.get(operator if "::" in operator else f"aten::{operator}", frozenset())
    return operator in MASKED or any("seq" in name for name in reads)


class HostBatch:
    """Listens to transfers, and reads each batch before it: afterwards its lengths are on the device, and to read them would be to wait."""

    def __init__(self) -> None:
        self.lengths = NO_LENGTHS
        self._reader = BatchReader()

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        """A transfer is given the batch."""
        if phase == "transfer" and given:
            self.lengths = lengths_of(self._reader.read(given[0]))

    def leave(self) -> None:
        """Nothing is timed here."""

    drop = leave

    def of(self, batch: Any) -> Lengths:
        """The lengths of the batch that was transferred last: from before its transfer, or from what it has on the host."""
        return self.lengths or lengths_of(self._reader.read(batch))

    def forget(self) -> None:
        """The batch is over."""
        self.lengths = NO_LENGTHS


def lengths_of(batch: BatchTensors | None) -> Lengths:
    """The sums of squares that a batch's integers on the host may mean; none where the batch could not be read."""
    found: dict[str, int] = {}
    with without_modes(), without_overrides(), torch.inference_mode(mode=False):
        for path, tensor in () if batch is None else zip(*batch, strict=True):
            with contextlib.suppress(Exception):  # a batch may hold anything
                name, integers = _integers(path, tensor)
                lengths = None if integers is None else _lengths(name.rpartition(".")[2], integers)
                if lengths is not None:
                    found[name] = int((lengths.long() ** 2).sum())
    return found


def _integers(name: str, tensor: Tensor) -> tuple[str, Tensor | None]:
    """A tensor of integers on the host, or the offsets of a nested one, with its name; of other tensors, nothing."""
    offsets = nested_offsets(tensor)
    if offsets is not None:
        name, tensor = f"{name}.cu_seqlens", offsets
    is_read = type(tensor) is Tensor and is_integer(tensor) and tensor.device.type == "cpu" and tensor.numel()
    return name, tensor if is_read else None


def _lengths(name: str, tensor: Tensor) -> Tensor | None:
    """The lengths of sequences that a tensor of this name tells, all in one row."""
    flat = tensor.flatten()
    if OFFSETS.search(name) or (name.isdecimal() and _are_offsets(tensor)):
        return flat.diff()
    if name == POSITIONS:
        return _runs(tensor, lambda rows: rows[:, 1:] != rows[:, :-1] + 1)
    if name == MASK and 1 <= tensor.dim() <= 2:
        return _runs(tensor, lambda rows: rows[:, 1:] != rows[:, :-1], counted=tensor.reshape(-1, tensor.shape[-1]) > 0)
    if IDENTITIES.search(name):
        return _runs(tensor, lambda rows: rows[:, 1:] != rows[:, :-1])
    return flat if LENGTHS.search(name) else None


def _are_offsets(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and len(tensor) > 1 and int(tensor[0]) == 0 and bool((tensor.diff() > 0).all())


def _runs(tensor: Tensor, breaks: Any, counted: Tensor | None = None) -> Tensor:
    """The lengths between breaks, row by row; only those that are counted."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    begins = rows.new_ones(rows.shape, dtype=torch.bool)
    begins[:, 1:] = breaks(rows)
    places = begins.flatten().nonzero().flatten()
    lengths: Tensor = places.diff(append=places.new_tensor([rows.numel()]))
    return lengths if counted is None else lengths[counted.flatten()[places]]
