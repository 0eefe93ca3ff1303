"""What the steps of a stage take: counted once for each shape of batch, with the facts of the run."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from msgspec.structs import replace

from lflops.boundary import Guard, Undo, call_each
from lflops.collect.calibration.calibrate import hardware_of
from lflops.collect.count import Counting, ignored_rows
from lflops.collect.counting.accumulator import Extent
from lflops.collect.inputs.batch import BatchReader, padded_share
from lflops.collect.model.module_tree import ModuleTree, parameter_sizes
from lflops.collect.ranks.topology import Topology
from lflops.collect.torch_private.dispatch_modes import passes_dynamo
from lflops.collect.torch_private.modules import compilations, graph_breaks
from lflops.collect.torch_private.self_check import check
from lflops.errors import CountError
from lflops.merging.merge import sum_of_batches
from lflops.profile.model import Profile
from lflops.profile.notes import Note
from lflops.profile.series import summed
from lflops.session.inputs.phases import OutsideModules
from lflops.session.inputs.settings import Settings
from lflops.session.inputs.training import Stage, Training
from lflops.session.window.batch_work import Lengths

PADDED = 0.3  # of the positions of a batch: as much padding is worth a word


class CountedSteps:
    """Counts the batches of a step, which gradients may be accumulated over, one by one. Wrong settings raise at once."""

    def __init__(self, settings: Settings, training: Training, stage: Stage, topology: Topology, guard: Guard) -> None:
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
        self._counted: dict[Hashable, Profile] = {}  # by the first batch's shapes, and its lengths where they decide its work
        self._key: Hashable = None
        self._reader = BatchReader()
        self._nothing: Profile | None = None
        self._step: list[Profile] | None = None
        self._padded: float | None = None  # the share of padding in the first batch of the step
        self._counting: Counting | None = None  # on this thread, while a batch is counted
        self._listening = Undo()

    def begin_step(self, batch: Any, lengths: Lengths) -> Profile | None:
        """Count the step that begins with this batch, unless one like it was counted: then return that one."""
        if not self._can_count():
            self._step = None
            return self.uncounted_profile()
        shapes = self._reader.shapes(batch)
        self._key = (shapes, frozenset(lengths.items()))
        known = None if shapes is None or self._stage.fetches_itself else self._counted.get(self._key)
        self._step = [] if known is None else None
        self._padded = None if known is not None or self._stage.fetches_itself else padded_share(self._reader.read(batch))
        return known

    def begin_batch(self, batch: Any) -> None:
        """Count this batch, if its step is counted. The LightningModule is the root."""
        if self._step is not None:
            positional = tuple(batch) if isinstance(batch, list | tuple) else () if isinstance(batch, Mapping) else (batch,)
            named = {str(name): value for name, value in batch.items()} if isinstance(batch, Mapping) else {}
            settings, given = self._settings, (positional, named)
            self._counting = Counting(
                {"": self._root}, ignore=settings.ignore_modules, logical=settings.logical, batch=given, guard=self._guard
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
        if not any(module.training for module in modules[1:] or modules):  # a Trainer sets its own module alone
            yield Note(code="eval_mode", subject="", values={})
        if self._training.looks_for_unused and all(each.calls for each in counted.modules.values() if each.own_parameters):
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
            dtype=_dtype(profile) or profile.run.dtype,
            precision=training.precision or profile.run.precision,
            accumulation=stage.accumulation() if stage.learns else None,
            strategy=training.strategy,
            hardware=self._hardware,
        )
        return replace(profile, run=self._topology.of(run))

    def _can_count(self) -> bool:
        """Whether a step can be counted as it runs: under this torch, what is compiled would not run compiled meanwhile."""
        return passes_dynamo() or not (self._training.is_compiled or ModuleTree({"": self._root}).compiled or compilations())

    def uncounted_profile(self) -> Profile:
        """The profile of a run that was not counted here: what was counted elsewhere, or nothing at all."""
        if isinstance(self._settings.count, Profile):
            return self.with_facts(self._settings.count)
        if self._nothing is None:
            nothing = Counting({"": self._root}, extent=Extent(traffic=False, memory=False))
            with torch.no_grad(), nothing:
                nothing.outside("other")  # a `pass` is no part of what Python leaves the `with` after
            profile = self.with_facts(nothing.profile)
            note = Note(code="not_counted", subject="" if self._can_count() else "compiled", values={})
            self._nothing = replace(profile, notes=(*profile.notes, note))
        return self._nothing


def _check_same_model(counted: Profile, training: Training) -> None:
    """Raise a `CountError` unless a profile from elsewhere is one of this model."""
    parameters = sum(each.elements for each in parameter_sizes(ModuleTree({"": training.root})))
    strange = next((name for name, _ in training.model.named_modules() if name not in counted.modules), None)
    if strange is not None or counted.modules[""].parameters != parameters:
        size = f"has {counted.modules[''].parameters} parameters, not {parameters}"
        other = size if strange is None else f"has no module {strange!r}"
        raise CountError(f"count: the profile is of another model: it {other}: give one of lflops.count or lflops.counting of this module")


def _dtype(profile: Profile) -> str | None:
    """The dtype of most contractions: autocast is the loop's business, or the user's, and over when one could ask for it."""
    macs = summed((cell.dtype, cell.macs) for cell in profile.cells if cell.phase in {"forward", "backward"} and cell.macs)
    return max(macs, key=macs.__getitem__, default=None)
