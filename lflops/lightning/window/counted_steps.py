"""What the steps of a stage take: counted once for each shape of batch, with the facts of the run."""

import contextlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from msgspec.structs import replace

from lflops.collect.calibration.calibrate import hardware_of
from lflops.collect.count import Counting, Ignored
from lflops.collect.counting.accumulator import Extent
from lflops.collect.ranks.topology import Topology
from lflops.lightning.trainer.facts import check_same_model, facts_of, is_compiled_whole, root_of
from lflops.lightning.trainer.settings import Settings
from lflops.lightning.trainer.stages import Stage
from lflops.lightning.window.phase_hooks import OutsideModules, listen
from lflops.lightning.window.step_clock import signature
from lflops.merging.accumulation import sum_of_batches
from lflops.profile.model import Profile
from lflops.profile.notes import Note

__all__ = ["CountedBatch", "CountedSteps"]


class CountedSteps:
    """Counts the batches of a step, which gradients may be accumulated over, one by one.

    Args:
        settings: What is asked for.
        stage: Whose steps they are.
        trainer: The one that goes through it.
        pl_module: What is trained, or asked.
        topology: Where the ranks stand.
    """

    def __init__(self, settings: Settings, stage: Stage, trainer: Any, pl_module: Any, topology: Topology) -> None:
        """Count nothing yet; what is wrong with the arguments is said now."""
        self._settings = settings
        self._stage = stage
        self._trainer = trainer
        self._module = pl_module
        self._topology = topology
        self._hardware = hardware_of(settings.hardware, trainer.strategy.root_device)
        self._root = root_of(trainer, pl_module)
        Counting({"": self._root}, ignore=settings.ignore_modules)
        if isinstance(settings.count, Profile):
            check_same_model(settings.count, pl_module, self._root)
        self._counted_by_shapes: dict[Hashable, Profile] = {}
        self._nothing: Profile | None = None
        self._step: list[Profile] | None = None
        self._batch: CountedBatch | None = None

    def begin_step(self, batch: Any) -> Profile | None:
        """Count the step that begins with this batch, unless one like it was counted: then return that one."""
        known = None if self._stage.fetches_itself(self._module) else self._counted_by_shapes.get(signature(batch))
        self._step = [] if known is None else None
        return known

    def begin_batch(self, batch: Any) -> None:
        """Count this batch, if its step is counted."""
        if self._step is not None:
            settings = self._settings
            self._batch = CountedBatch(
                self._trainer, self._stage.name, self._root, batch, ignore=settings.ignore_modules, logical=settings.logical
            )

    def end_batch(self) -> Profile | None:
        """Returns what was counted of the batch, with the run's facts."""
        profile = self.stop()
        if profile is None or self._step is None:
            return None
        self._step.append(profile)
        return self.with_facts(profile)

    def end_step(self, shapes: Hashable) -> Profile | None:
        """Returns what was counted of the step, whose first batch has these shapes."""
        batches, self._step = self._step, None
        if not batches:
            return None
        counted = self._counted_by_shapes[shapes] = self.with_facts(sum_of_batches(batches))
        return counted

    def abandon(self) -> None:
        """The step was left before it was over."""
        self.stop()
        self._step = None

    def stop(self, error: BaseException | None = None) -> Profile | None:
        """Take the count off, if one is on, and return it."""
        batch, self._batch = self._batch, None
        return None if batch is None else batch.stop(error)

    def with_facts(self, profile: Profile) -> Profile:
        """What was counted, as part of this run."""
        notes = profile.notes
        if is_compiled_whole(self._module) and all(note.code != "compiled_ran_eager" for note in notes) and profile.cells:
            notes = (*notes, Note(code="compiled_ran_eager", subject="1", values={}))
        run = replace(facts_of(profile, self._stage, self._trainer, self._module), hardware=self._hardware)
        return replace(profile, run=self._topology.of(run), notes=notes)

    def without(self) -> Profile:
        """The profile of a run that was not counted here: what was counted elsewhere, or nothing at all."""
        if isinstance(self._settings.count, Profile):
            return self.with_facts(self._settings.count)
        if self._nothing is None:
            with torch.no_grad(), Counting({"": self._root}, extent=Extent(traffic=False, memory=False)) as nothing:
                pass
            profile = self.with_facts(nothing.profile)
            notes = (note for note in profile.notes if note.code != "compiled_ran_eager")
            self._nothing = replace(profile, notes=(*notes, Note(code="not_counted", subject="", values={})))
        return self._nothing


class CountedBatch:
    """Counts what runs on this thread from when it is made until it is stopped. The LightningModule is the root.

    Args:
        trainer: Tells when training_step, or what stands for it, runs.
        stage: Which of the Trainer's it is.
        root: What is trained.
        batch: What it is trained on.
        ignore: As `count` takes it.
        logical: As `count` takes it.
    """

    def __init__(self, trainer: Any, stage: str, root: Any, batch: Any, *, ignore: Ignored, logical: Profile | None) -> None:
        """Begin."""
        positional = tuple(batch) if isinstance(batch, list | tuple) else () if isinstance(batch, Mapping) else (batch,)
        named = {str(name): value for name, value in batch.items()} if isinstance(batch, Mapping) else {}
        self._counting = Counting({"": root}, ignore=ignore, logical=logical, batch=(positional, named))
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._counting)
            self._stop_listening: Callable[[], None] = listen(trainer, stage, OutsideModules(self._counting.outside))
            undo.pop_all()

    def stop(self, error: BaseException | None = None) -> Profile:
        """End, by an error or without one, and tell what was counted."""
        self._stop_listening()
        self._counting.__exit__(None if error is None else type(error), error, None)
        return self._counting.profile
