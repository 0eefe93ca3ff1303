"""What the steps of a stage take: counted once for each shape of batch, with the facts of the run.

The work of packed sequences follows from their lengths: attention costs a square for each, all else
a token. Both are taken from counted batches, and have to give the work of one more to the last MAC;
otherwise the work of other batches is not known.
"""

import contextlib
import re
from collections.abc import Hashable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from lflops.error_guard import CleanupStack, Guard, call_each
from lflops.errors import CountError
from lflops.flop_counter.accumulator import Extent
from lflops.flop_counter.count import Counting, ignored_rows
from lflops.formulas.table import READS
from lflops.hardware.calibrate import hardware_of
from lflops.inputs.batch import BatchReader, BatchTensors, padded_share
from lflops.model.module_tree import ModuleTree, parameter_sizes
from lflops.monitoring.inputs.phases import OutsideModules
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import Stage, Training
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.ranks.collect.topology import Topology
from lflops.ranks.merge.batches import sum_of_batches
from lflops.torch_private.dispatch_modes import passes_dynamo, without_modes
from lflops.torch_private.modules import compilations, graph_breaks
from lflops.torch_private.self_check import check
from lflops.torch_private.tensors import is_integer, nested_offsets, without_overrides

# by where in the batch the lengths are read: the sum of their squares
Lengths = Mapping[str, int]
NO_LENGTHS: Lengths = {}

OFFSETS = re.compile(r"cu_?seq_?len", re.IGNORECASE)
LENGTHS = re.compile(r"(seq(uence)?_?)?len(gth)?s$", re.IGNORECASE)
IDENTITIES = re.compile(
    r"(seq|seq(uence)?s?|doc(ument)?s?|segment|sample)_?(idx|ids?)$", re.IGNORECASE
)
POSITIONS, MASK = "position_ids", "attention_mask"

MASKED = frozenset(
    {"flex_attention", "flex_attention_backward"}
    # Attention whose lengths are in a mask
)


class Sample(NamedTuple):
    """A batch that was counted."""

    shapes: Hashable
    tokens: int | None
    lengths: Lengths
    # MACs that no length decides
    others: int
    # MACs that lengths decide
    attention: int


class BatchWork:
    """What batches cost, forward and backward: those that were counted, and others like them."""

    def __init__(self) -> None:
        self._of_shapes: dict[Hashable, int] = {}
        self._samples: list[Sample] = []
        self.packed: bool | None = None

    @property
    def needs_lengths(self) -> bool:
        """Whether lengths may decide the work of a batch.

        Nothing was counted yet, or they did decide it.
        """
        return self.packed is not False

    @property
    def needs_samples(self) -> bool:
        """Whether another counted batch would tell what the others cost."""
        return self.packed is True and self._law() is None

    def add(self, shapes: Hashable, tokens: int | None, lengths: Lengths, counted: Profile) -> None:
        if shapes is None:
            # of a batch that cannot be read, it is not known which others are like it
            return
        root = counted.modules[""]
        macs = root.forward.macs + root.backward.macs
        attention = sum(
            cell.macs
            for cell in counted.op_counts
            if cell.phase in ("forward", "backward") and _reads_lengths(cell.operator)
        )
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
        """Where the lengths are read that explain every counted batch, and what a square costs.

        `None` until two batches agree.
        """
        distinct = {tuple(sorted(sample.lengths.items())): sample for sample in self._samples}
        if len(distinct) < 2:
            return None
        for where in self._samples[0].lengths:
            squares = [sample.lengths.get(where, 0) for sample in self._samples]
            if all(squares):
                each = {
                    Fraction(sample.attention, square)
                    for sample, square in zip(self._samples, squares, strict=True)
                }
                if len(each) == 1 and len(set(squares)) > 1:
                    return where, each.pop()
        return None

    def _others(self, shapes: Hashable, tokens: int | None) -> int | None:
        """MACs that lengths do not decide.

        Of the same shapes; else for as many tokens, or a token, if two counted batches agree.
        """
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
    """Listens to transfers, and reads each batch before it.

    Afterwards its lengths are on the device, and to read them would be to wait.
    """

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
        """The lengths of the batch that was transferred last.

        From before its transfer, or from what it has on the host.
        """
        return self.lengths or lengths_of(self._reader.read(batch))

    def forget(self) -> None:
        """The batch is over."""
        self.lengths = NO_LENGTHS


def lengths_of(batch: BatchTensors | None) -> Lengths:
    """The sums of squares that a batch's integers on the host may mean.

    None where the batch could not be read.
    """
    found: dict[str, int] = {}
    with without_modes(), without_overrides(), torch.inference_mode(mode=False):
        for path, tensor in () if batch is None else zip(*batch, strict=True):
            # a batch may hold anything
            with contextlib.suppress(Exception):
                name, integers = _integers(path, tensor)
                lengths = None if integers is None else _lengths(name.rpartition(".")[2], integers)
                if lengths is not None:
                    found[name] = int((lengths.long() ** 2).sum())
    return found


def _integers(name: str, tensor: Tensor) -> tuple[str, Tensor | None]:
    """A tensor of integers on the host, or the offsets of a nested one, with its name.

    Of other tensors, nothing.
    """
    offsets = nested_offsets(tensor)
    if offsets is not None:
        name, tensor = f"{name}.cu_seqlens", offsets
    is_read = (
        type(tensor) is Tensor
        and is_integer(tensor)
        and tensor.device.type == "cpu"
        and tensor.numel()
    )
    return name, tensor if is_read else None


def _lengths(name: str, tensor: Tensor) -> Tensor | None:
    """The lengths of sequences that a tensor of this name tells, all in one row."""
    flat = tensor.flatten()
    if OFFSETS.search(name) or (name.isdecimal() and _are_offsets(tensor)):
        return flat.diff()
    if name == POSITIONS:
        return _runs(tensor, lambda rows: rows[:, 1:] != rows[:, :-1] + 1)
    if name == MASK and 1 <= tensor.dim() <= 2:
        return _runs(
            tensor,
            lambda rows: rows[:, 1:] != rows[:, :-1],
            counted=tensor.reshape(-1, tensor.shape[-1]) > 0,
        )
    if IDENTITIES.search(name):
        return _runs(tensor, lambda rows: rows[:, 1:] != rows[:, :-1])
    return flat if LENGTHS.search(name) else None


def _are_offsets(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 1
        and len(tensor) > 1
        and int(tensor[0]) == 0
        and bool((tensor.diff() > 0).all())
    )


def _runs(tensor: Tensor, breaks: Any, counted: Tensor | None = None) -> Tensor:
    """The lengths between breaks, row by row; only those that are counted."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    begins = rows.new_ones(rows.shape, dtype=torch.bool)
    begins[:, 1:] = breaks(rows)
    places = begins.flatten().nonzero().flatten()
    lengths: Tensor = places.diff(append=places.new_tensor([rows.numel()]))
    return lengths if counted is None else lengths[counted.flatten()[places]]


# of the positions of a batch: as much padding is worth a word
PADDED = 0.3


class CountingSteps:
    """Counts the batches of a step, which gradients may be accumulated over, one by one.

    Wrong settings raise at once.
    """

    def __init__(
        self, settings: Settings, training: Training, stage: Stage, topology: Topology, guard: Guard
    ) -> None:
        self._guard = guard
        self._settings = settings
        self._stage = stage
        self._training = training
        self._topology = topology
        self._hardware = hardware_of(settings.hardware, training.device)
        self._root = training.root
        self._breaks_before = graph_breaks()
        check()
        ignored_rows(ModuleTree({"": self._root}), settings.ignore_modules)
        if isinstance(settings.count, Profile):
            _check_same_model(settings.count, training)
        self._counted: dict[
            Hashable, Profile
            # by the first batch's shapes, and its lengths where they decide its work
        ] = {}
        self._key: Hashable = None
        self._reader = BatchReader()
        self._nothing: Profile | None = None
        self._step: list[Profile] | None = None
        # the share of padding in the first batch of the step
        self._padded: float | None = None
        # on this thread, while a batch is counted
        self._counting: Counting | None = None
        self._listening = CleanupStack()

    def begin_step(self, batch: Any, lengths: Lengths) -> Profile | None:
        """Count the step that begins with this batch, unless one like it was counted.

        Then return that one.
        """
        if not self._can_count():
            self._step = None
            return self.empty_profile()
        shapes = self._reader.shapes(batch)
        self._key = (shapes, frozenset(lengths.items()))
        known = (
            None if shapes is None or self._stage.fetches_itself else self._counted.get(self._key)
        )
        self._step = [] if known is None else None
        self._padded = (
            None
            if known is not None or self._stage.fetches_itself
            else padded_share(self._reader.read(batch))
        )
        return known

    def begin_batch(self, batch: Any) -> None:
        """Count this batch, if its step is counted. The LightningModule is the root."""
        if self._step is not None:
            positional = (
                tuple(batch)
                if isinstance(batch, list | tuple)
                else ()
                if isinstance(batch, Mapping)
                else (batch,)
            )
            named = (
                {str(name): value for name, value in batch.items()}
                if isinstance(batch, Mapping)
                else {}
            )
            settings, given = self._settings, (positional, named)
            self._counting = Counting(
                {"": self._root},
                ignore=settings.ignore_modules,
                logical=settings.logical,
                batch=given,
                guard=self._guard,
            )
            self._counting.__enter__()
            self._listening.add(self._stage.listen(OutsideModules(self._counting.outside)))

    def end_batch(self) -> Profile | None:
        """Returns what was counted of the batch, with the run's facts."""
        profile = self.stop()
        if profile is None or self._step is None:
            return None
        self._step.append(profile)
        return self.with_facts(profile)

    def end_step(self) -> Profile | None:
        batches, self._step = self._step, None
        if not batches:
            return None
        counted = self.with_facts(sum_of_batches(batches))
        if self._stage.learns:
            counted = replace(counted, notes=(*counted.notes, *self._left_on(counted)))
        self._counted[self._key] = counted
        return counted

    def _left_on(self, counted: Profile) -> Iterator[Note]:
        """Note the settings that make steps longer, or the model worse."""
        if torch.is_anomaly_enabled():
            yield Note(code="anomaly_mode", subject="", values={})
        modules = [*self._root.modules()]
        if not any(
            module.training
            for module in modules[1:] or modules
            # a Trainer sets its own module alone
        ):
            yield Note(code="eval_mode", subject="", values={})
        if self._training.looks_for_unused and all(
            each.calls for each in counted.modules.values() if each.self_parameters
        ):
            yield Note(code="find_unused", subject="", values={})
        if self._padded is not None and self._padded >= PADDED:
            yield Note(code="padding", subject="", values={"share": self._padded})
        if places := graph_breaks() - self._breaks_before:
            yield Note(code="graph_breaks", subject="", values={"places": places})

    def abandon(self) -> None:
        """The step was left before it was over."""
        self.stop()
        self._step = None

    def stop(self, error: BaseException | None = None) -> Profile | None:
        """Take the count off, if one is on, and return it."""
        counting = self._counting
        if counting is None:
            return None
        self._listening.close()
        counting.__exit__(None if error is None else type(error), error, None)
        self._counting = None
        return counting.profile

    def take_off(self) -> None:
        """Count no further, and make nothing of what was counted. It can be called again."""
        if self._counting is not None:
            call_each([self._listening.close, self._counting.stop])
        self._counting = self._step = None

    def with_facts(self, profile: Profile) -> Profile:
        """Add the facts of this run to what was counted: what the loop knows better goes first."""
        training, stage = self._training, self._stage
        run = replace(
            profile.run,
            kind="training",
            stage=stage.name,
            precision=training.precision or profile.run.precision,
            accumulation=stage.accumulation() if stage.learns else None,
            strategy=training.strategy,
            hardware=self._hardware,
        )
        return replace(profile, run=self._topology.of(run))

    def _can_count(self) -> bool:
        """Whether a step can be counted as it runs.

        Under this torch, what is compiled would not run compiled meanwhile.
        """
        return passes_dynamo() or not (
            self._training.is_compiled or ModuleTree({"": self._root}).compiled or compilations()
        )

    def empty_profile(self) -> Profile:
        """The profile of a run that was not counted here.

        What was counted elsewhere, or nothing at all.
        """
        if isinstance(self._settings.count, Profile):
            return self.with_facts(self._settings.count)
        if self._nothing is None:
            nothing = Counting({"": self._root}, extent=Extent(traffic=False, memory=False))
            with torch.no_grad(), nothing:
                nothing.outside(
                    "other"
                    # a `pass` is no part of what Python leaves the `with` after
                )
            profile = self.with_facts(nothing.profile)
            note = Note(
                code="not_counted", subject="" if self._can_count() else "compiled", values={}
            )
            self._nothing = replace(profile, notes=(*profile.notes, note))
        return self._nothing


def _check_same_model(counted: Profile, training: Training) -> None:
    """Raise a `CountError` unless a profile from elsewhere is one of this model."""
    parameters = sum(each.elements for each in parameter_sizes(ModuleTree({"": training.root})))
    strange = next(
        (name for name, _ in training.model.named_modules() if name not in counted.modules), None
    )
    if strange is not None or counted.modules[""].parameters != parameters:
        size = f"has {counted.modules[''].parameters} parameters, not {parameters}"
        other = size if strange is None else f"has no module {strange!r}"
        raise CountError(
            f"count: the profile is of another model: it {other}: give one of lflops.count or lflops.counting of this module"
        )
