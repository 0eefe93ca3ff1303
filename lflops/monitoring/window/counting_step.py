"""Count the MACs and FLOPs of a step. If several steps have the same shapes, count only one."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from lflops.attribution.module_tracker import ModuleTracker
from lflops.attribution.user_hooks import (
    with_gradient_hooks,
    with_hooks_after_forward,
    with_hooks_before_forward,
)
from lflops.error_guard import CleanupStack, Guard, call_each
from lflops.errors import CountError
from lflops.flop_counter.accumulator import CountOptions
from lflops.flop_counter.count import Counting, ignored_modules
from lflops.formulas.table import READS
from lflops.hardware.calibrate import hardware_of
from lflops.inputs.batch import BatchReader
from lflops.inputs.batch_size import lookups_of
from lflops.inputs.padding import BatchPadding, padding_of
from lflops.inputs.tensors import named_arguments
from lflops.model.module_tree import ModuleTree, parameter_sizes
from lflops.monitoring.inputs.phases import OutsideModules
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import Stage, Training
from lflops.monitoring.window.step_modes import EndedStep, StepMode
from lflops.monitoring.window.window import Window
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.ranks.collect.topology import Topology
from lflops.ranks.merge.batches import sum_of_batches
from lflops.torch_private.dispatch_modes import can_stay_compiled
from lflops.torch_private.modules import compilations, graph_breaks
from lflops.torch_private.self_check import check

# Smallest share of padding in a batch for which the profile gets a note.
PADDED = 0.3

# attention operators that read the lengths of sequences from a mask
MASKED = frozenset({"flex_attention", "flex_attention_backward"})


def depends_on_lengths(counted: Profile) -> bool:
    """Return whether the MACs of the counted step depend on more than the shapes of its inputs.

    For example, if one row of a batch contains several sequences, the MACs of attention depend on
    the lengths of these sequences.
    """
    for op_count in counted.op_counts:
        if op_count.phase not in {"forward", "backward"} or not op_count.macs:
            continue
        if _reads_lengths(op_count.operator):
            return True
    return False


def has_backward(counted: Profile) -> bool:
    """Return whether a counted step ran operators in backward."""
    return any(op_count.phase == "backward" for op_count in counted.op_counts)


def _reads_lengths(operator: str) -> bool:
    if operator in MASKED:
        return True
    name = operator if "::" in operator else f"aten::{operator}"
    return any("seq" in argument for argument in READS.get(name, ()))


class StepCounter:
    """Counts the operators in steps of one stage, such as training.

    If several steps have the same shapes, the first is counted, and the others get its profile.

    The constructor raises an error if a setting does not fit the model.
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
        ignored_modules(ModuleTree({"": self._root}), settings.ignore_modules)
        if isinstance(settings.count, Profile):
            _check_same_model(settings.count, training)
        self._reader = BatchReader()
        self._counted: dict[Hashable, Profile] = {}
        self._empty: Profile | None = None

    def can_count(self) -> bool:
        """Return whether operators can be counted while a step runs.

        This is false if code is compiled, and this version of torch runs compiled code uncompiled
        while operators are counted.
        """
        if can_stay_compiled():
            return True
        is_compiled = self._training.is_compiled or ModuleTree({"": self._root}).compiled
        return not is_compiled and not compilations()

    def key(self, batch: Any) -> Hashable:
        """Return the shapes of a step's first batch, as a key for `known`.

        Steps with the same key are assumed to do the same work. Returns `None` if the shapes cannot
        be read, or if the batch is not known when the step begins.
        """
        if self._stage.fetches_itself:
            return None
        return self._reader.shapes(batch)

    def known(self, key: Hashable) -> Profile | None:
        """Return the profile of an earlier step with this key; `None` if no such step is stored."""
        if key is None:
            return None
        return self._counted.get(key)

    def padding(self, batch: Any) -> BatchPadding | None:
        """Find the parts of a step's first batch that may be padding; `None` if this is unknown."""
        if self._stage.fetches_itself or batch is None:
            return None
        return padding_of(self._reader.read(batch))

    def counting_of(self, batch: Any) -> Counting:
        """Return a context manager that counts one batch, without entering it."""
        return Counting(
            {"": self._root},
            ignore=self._settings.ignore_modules,
            logical=self._settings.logical,
            batch=_arguments(batch),
            tracker=partial(ModuleTracker, follows_update=self._stage.follows_update),
            guard=self._guard,
        )

    def step_profile(
        self, batches: list[Profile], key: Hashable, padding: BatchPadding | None
    ) -> Profile:
        """Return the sum of the profiles of a step's batches.

        The sum is stored for later steps with the same `key`. It is not stored if the work depends
        on more than shapes, or if a training step ran no backward because the loop skipped it.
        """
        counted = self.with_facts(sum_of_batches(batches))
        if self._stage.learns:
            share = None
            if padding is not None:
                share = padding.share(counted.run.tokens_from)
            notes = (*counted.notes, *self._setting_notes(counted, share))
            counted = replace(counted, notes=notes)
        is_skipped = self._stage.learns and not has_backward(counted)
        if key is not None and not is_skipped and not depends_on_lengths(counted):
            self._counted[key] = counted
        return counted

    def with_facts(self, profile: Profile) -> Profile:
        """Return a counted profile with the properties of this run, such as its strategy.

        If the loop reports a precision, it replaces the precision that was found by counting.
        """
        training = self._training
        stage = self._stage
        run = replace(
            profile.run,
            kind="training",
            stage=stage.name,
            precision=training.precision or profile.run.precision,
            accumulation=stage.accumulation() if stage.learns else None,
            monitor=training.monitor,
            strategy=training.strategy,
            hardware=self._hardware,
        )
        return replace(profile, run=self._topology.of(run))

    def uncounted_profile(self) -> Profile:
        """Return the profile to use if no step was counted.

        It is the profile that the user passed as `count`, or else a profile without operators.
        """
        if isinstance(self._settings.count, Profile):
            return self.with_facts(self._settings.count)
        if self._empty is None:
            nothing = Counting({"": self._root}, options=CountOptions(traffic=False, memory=False))
            with torch.no_grad(), nothing:
                # a call instead of `pass`, because an interrupt after `pass` could skip `__exit__`
                nothing.outside("other")
            profile = self.with_facts(nothing.profile)
            reason = "" if self.can_count() else "compiled"
            note = Note(code="not_counted", subject=reason, values={})
            self._empty = replace(profile, notes=(*profile.notes, note))
        return self._empty

    def _setting_notes(self, counted: Profile, padding: float | None) -> Iterator[Note]:
        """Yield notes about settings that make steps slower or the model worse."""
        if torch.is_anomaly_enabled():
            yield Note(code="anomaly_mode", subject="", values={})
        if not self._is_training():
            yield Note(code="eval_mode", subject="", values={})
        if self._training.looks_for_unused and _uses_all_parameters(counted):
            yield Note(code="find_unused", subject="", values={})
        if padding is not None and padding >= PADDED:
            yield Note(code="padding", subject="", values={"share": padding})
        yield from _hook_notes(self._root)
        breaks = graph_breaks() - self._breaks_before
        if breaks:
            yield Note(code="graph_breaks", subject="", values={"places": breaks})

    def _is_training(self) -> bool:
        # Only submodules are checked, because a Trainer switches the root to training mode.
        root, *below = self._root.modules()
        return any(module.training for module in below or [root])


def _hook_notes(model: torch.nn.Module) -> Iterator[Note]:
    """Yield notes about hooks of the user, whose time counts as the time of modules."""
    modules = ModuleTree({"": model}).modules
    before = with_hooks_before_forward(modules)
    if before:
        yield Note(code="forward_pre_hooks", subject="", values=_names(before))
    after = with_hooks_after_forward(modules)
    if after:
        yield Note(code="forward_hooks", subject="", values=_names(after))
    gradient = with_gradient_hooks(modules)
    if gradient:
        yield Note(code="gradient_hooks", subject="", values=_names(gradient))


def _names(hooked: Sequence[str]) -> dict[str, int | float | str]:
    first = hooked[0] or "the model itself"
    return {"modules": len(hooked), "first": first, "names": "\n".join(hooked)}


class CountingStepMode(StepMode):
    """Counts the operators of a step, unless a step with the same shapes was counted before."""

    touches_step = True

    def __init__(self, counter: StepCounter, stage: Stage, window: Window) -> None:
        self._counter = counter
        self._stage = stage
        self._window = window
        self._is_counted = False
        self._batches: list[Profile] = []
        self._key: Hashable = None
        self._padding: BatchPadding | None = None
        # counts the current batch; `None` if no batch is being counted
        self._counting: Counting | None = None
        # Whether the batch was unknown when it began, as in a loop that lflops has detected.
        self._is_unknown = False
        self._listening = CleanupStack()

    def begin_batch(self, batch: Any, *, begins_step: bool) -> None:
        if begins_step:
            self._begin_step(batch)
        self._is_unknown = batch is None
        if self._is_counted:
            self._counting = self._counter.counting_of(batch)
            self._counting.__enter__()
            self._listening.add(self._stage.listen(OutsideModules(self._counting.outside)))

    def _begin_step(self, batch: Any) -> None:
        counter = self._counter
        self._is_counted = False
        if not counter.can_count():
            self._window.counted = counter.uncounted_profile()
            return
        self._batches = []
        self._key = counter.key(batch)
        self._window.counted = counter.known(self._key)
        if self._window.counted is None:
            self._padding = counter.padding(batch)
            self._is_counted = True

    def end_batch(self, batch: Any) -> Profile | None:
        if self._counting is not None and self._is_unknown and batch is not None:
            self._counting.inputs = lookups_of(named_arguments(*_arguments(batch)))
            if self._padding is None:
                self._padding = self._counter.padding(batch)
        profile = self._stop(None)
        if profile is None or not self._is_counted:
            return None
        self._batches.append(profile)
        return self._counter.with_facts(profile)

    def end_step(self) -> EndedStep:
        is_counted = self._is_counted and bool(self._batches)
        self._is_counted = False
        if not is_counted:
            return EndedStep("unprofiled")
        self._window.counted = self._counter.step_profile(self._batches, self._key, self._padding)
        return EndedStep("counting")

    def abandon(self) -> None:
        self._stop(None)
        self._is_counted = False

    def finish(self, error: BaseException | None) -> None:
        profile = self._stop(error)
        if error is not None and profile is not None and self._window.counted is None:
            self._window.counted = self._counter.with_facts(profile)

    def remove(self) -> None:
        if self._counting is not None:
            call_each([self._listening.close, self._counting.stop])
        self._counting = None
        self._is_counted = False

    def _stop(self, error: BaseException | None) -> Profile | None:
        """Stop counting the current batch.

        Returns the profile of the batch, or `None` if no batch is being counted.
        """
        counting = self._counting
        if counting is None:
            return None
        self._listening.close()
        counting.__exit__(None if error is None else type(error), error, None)
        self._counting = None
        return counting.profile


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments of the model."""
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(batch), {}
    return (batch,), {}


def _uses_all_parameters(counted: Profile) -> bool:
    modules = counted.modules.values()
    return all(module.calls for module in modules if module.self_parameters)


def _check_same_model(counted: Profile, training: Training) -> None:
    """Raise a `CountError` if a profile that was counted elsewhere belongs to another model."""
    problem = _difference(counted, training)
    if problem is not None:
        raise CountError(
            f"count: the profile belongs to another model, because it {problem}: "
            "pass a profile of this model from lflops.count or lflops.counting"
        )


def _difference(counted: Profile, training: Training) -> str | None:
    """Describe how a profile differs from the model, or return `None` if it does not.

    The description continues a sentence, for example "has no module 'head'".
    """
    for name, _ in training.model.named_modules():
        if name not in counted.modules:
            return f"has no module {name!r}"
    sizes = parameter_sizes(ModuleTree({"": training.root}))
    parameters = sum(size.elements for size in sizes)
    found = counted.modules[""].parameters
    if found == parameters:
        return None
    return f"has {found} parameters, not {parameters}"
