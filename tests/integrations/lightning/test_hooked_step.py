"""Test the module times of a Lightning run.

Only modules and autograd functions advance the clock of these tests, so every second must be
assigned exactly to the right module and phase.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.analysis.analysis import analyze
from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.monitoring.schedule import Schedule
from lflops.monitoring.window import step_timer
from lflops.monitoring.window.module_timing_step import ModuleTimingStep
from lflops.profile.profile import Profile
from lflops.timing import clock as module_clock
from lflops.timing.clock import ThreadSchedule, UncontendedClock
from lflops.timing.module_hooks import ModuleTimer
from tests.support.fake_clock import StillClock, use_clock
from tests.support.lightning_runs import (
    LIGHTNINGS_WARNINGS,
    Classifier,
    fit,
    loader,
    watching,
)
from tests.support.process_state import Facts, differences, global_hooks
from tests.support.timed_modules import Part, Takes

pytestmark = LIGHTNINGS_WARNINGS

Times = Mapping[str, Mapping[str, float]]
"""Self seconds by phase and module. The name of the model itself is empty."""

ACTIVE = {7, 8, 9}
"""The module-timing steps of the default schedule."""


class Changing(StillClock):
    """A clock whose speed can be changed. It counts how often it was read."""

    speed = 1
    looks = 0

    def mark(self) -> float:
        self.looks += 1
        return super().mark()

    def advance(self, seconds: float) -> None:
        super().advance(seconds * self.speed)


class Timed(LightningModule):
    """A model with two modules that take a known time, and a loss that takes time as well.

    In forward, the encoder takes 1 s, the head 4 s and the loss 16 s. Backward takes twice as long.
    """

    def __init__(self, clock: Changing) -> None:
        super().__init__()
        self.clock = clock
        self.encoder = Part(clock, 1, 2)
        self.head = Part(clock, 4, 8)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(self.head(self.encoder(batch[0])))

    def loss(self, x: Tensor) -> Tensor:
        """Return a loss whose time belongs to the model itself."""
        return Takes.apply(x, None, self.clock, (16, 32)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


ONCE = {
    "forward": {"encoder": 1.0, "head": 4.0, "": 16.0},
    "backward": {"encoder": 2.0, "head": 8.0, "": 32.0},
}
"""The times of one forward and one backward of `Timed`."""


def times(once: Times, number: int) -> Times:
    """Return all times multiplied by a number of passes."""
    multiplied = {}
    for phase, rows in once.items():
        multiplied[phase] = {row: number * seconds for row, seconds in rows.items()}
    return multiplied


class Adversaries(Timed):
    """Manual optimization with two passes: one with both modules, and one with only the head."""

    def __init__(self, clock: Changing) -> None:
        super().__init__(clock)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        both, one = self.optimizers()
        self.learn(both, lambda: self.loss(self.head(self.encoder(batch[0]))))
        self.learn(one, lambda: self.loss(self.head(batch[0])))

    def learn(self, optimizer: Any, forward: Callable[[], Tensor]) -> None:
        """Run forward, backward and the optimizer step."""
        loss = forward()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.parameters(), lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.1),
        ]


class Closures(Adversaries):
    """Passes forward and backward as a closure to the optimizers."""

    def learn(self, optimizer: Any, forward: Callable[[], Tensor]) -> None:
        optimizer.step(lambda: self.manual_backward(forward()))


ADVERSARIES = {
    "forward": {"encoder": 1.0, "head": 8.0, "": 32.0},
    "backward": {"encoder": 2.0, "head": 16.0, "": 64.0},
}
"""The times of a step of `Adversaries`."""


class Twice(Adversaries):
    """Runs backward twice through the same graph."""

    def learn(self, optimizer: Any, forward: Callable[[], Tensor]) -> None:
        loss = forward()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()


class Quasi(Timed):
    """Uses L-BFGS with three iterations, each of which computes the loss once."""

    def __init__(self, clock: Changing) -> None:
        super().__init__(clock)
        self.shift = nn.Parameter(torch.ones(()))

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) + self.shift.square()

    def configure_optimizers(self) -> Any:
        options = {"max_iter": 3, "max_eval": 100, "tolerance_grad": 0, "tolerance_change": 0}
        return torch.optim.LBFGS([self.shift], lr=0.01, **options)  # type: ignore[arg-type]


class Idle(Timed):
    """Returns no loss, so there is no backward."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class Recomputing(Timed):
    """Checkpoints the encoder. `exp` saves its output, so the encoder runs again in backward."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        encoded = checkpoint(lambda x: self.encoder(x).exp(), batch[0], use_reentrant=False)
        return self.loss(self.head(encoded))


class Sharing(Timed):
    """Two containers share the encoder, which has a separate time in each of them."""

    def __init__(self, clock: Changing) -> None:
        super().__init__(clock)
        self.left = nn.Sequential(self.encoder)
        self.right = nn.Sequential(self.encoder)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(self.head(self.right(self.left(batch[0]))))


SHARING = {
    "forward": {"left.0": 1.0, "right.0": 1.0, "head": 4.0, "": 16.0},
    "backward": {"left.0": 2.0, "right.0": 2.0, "head": 8.0, "": 32.0},
}


class Scoped(Timed):
    """Computes the loss in a scope."""

    def loss(self, x: Tensor) -> Tensor:
        with lflops.scope("loss"):
            return super().loss(x)


SCOPED = {
    phase: {"encoder": rows["encoder"], "head": rows["head"], "loss": rows[""]}
    for phase, rows in ONCE.items()
}


class Named(Adversaries):
    """Runs forward and backward in a scope."""

    def learn(self, optimizer: Any, forward: Callable[[], Tensor]) -> None:
        with lflops.scope("learn"):
            super().learn(optimizer, forward)


NAMED = {
    phase: {"encoder": rows["encoder"], "head": rows["head"], "learn": rows[""]}
    for phase, rows in ADVERSARIES.items()
}


class Called(Timed):
    """Calls itself in `training_step`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.head(self.encoder(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self(batch[0])


class Beside(Timed):
    """Runs the head outside of forward and backward: between them, and after each batch."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.head(torch.ones(2))

    def on_train_batch_end(self, *_: Any) -> None:
        self.head(torch.ones(2))


class Penalized(Timed):
    """Computes a gradient outside of forward and backward."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.between = self.encoder(batch[0])
        self.kept = self.loss(self.head(self.between))
        return self.kept

    def on_before_zero_grad(self, optimizer: Any) -> None:
        torch.autograd.grad(self.kept, self.between, retain_graph=True)


CASES: dict[str, tuple[type[Timed], dict[str, Any], Times]] = {
    "automatic": (Timed, {}, ONCE),
    "accumulate 2": (Timed, {"accumulate_grad_batches": 2}, times(ONCE, 2)),
    "manual, two optimizers": (Adversaries, {}, ADVERSARIES),
    "manual, closures": (Closures, {}, ADVERSARIES),
    "manual, backward twice": (
        Twice,
        {},
        {"forward": ADVERSARIES["forward"], "backward": times(ADVERSARIES, 2)["backward"]},
    ),
    "LBFGS": (Quasi, {}, times(ONCE, 3)),
    "no loss": (Idle, {}, {"forward": ONCE["forward"]}),
    "recomputed": (Recomputing, {}, {**ONCE, "recompute": {"encoder": 1.0}}),
    "shared": (Sharing, {}, SHARING),
    "scope": (Scoped, {}, SCOPED),
    "scope around a backward": (Named, {}, NAMED),
    "bf16-mixed": (Timed, {"precision": "bf16-mixed"}, ONCE),
    "clipped": (Timed, {"gradient_clip_val": 1.0}, ONCE),
    "called": (Called, {}, ONCE),
    "a gradient beside": (Penalized, {}, ONCE),
    "modules beside": (Beside, {}, ONCE),
    "modules beside, accumulate 2": (Beside, {"accumulate_grad_batches": 2}, times(ONCE, 2)),
}
"""The model, the options of the Trainer, and the expected self times."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Changing:
    """Return the clock that the monitor reads."""
    clock = Changing()
    use_clock(monkeypatch, clock)
    return clock


def own(profile: Profile) -> Times:
    """Return the median self seconds of each module, by phase, if there are any."""
    found: dict[str, dict[str, float]] = {}
    for name, module in profile.modules.items():
        for phase in ("forward", "backward", "recompute"):
            spread = module.work(phase).self_seconds  # type: ignore[arg-type]
            if spread is not None and spread.median:
                found.setdefault(phase, {})[name] = spread.median
    return found


def whole(profile: Profile, *phases: Any) -> float:
    """Return the inclusive seconds of the model, summed over phases."""
    total = 0.0
    for phase in phases:
        spread = profile.modules[""].work(phase).seconds
        if spread is not None:
            total += spread.median
    return total


def fitted(module: LightningModule, monitor: FlopsMonitor | None = None, **options: Any) -> Profile:
    """Train, and return the profile of the only window."""
    monitor = monitor or watching()
    fit(module, monitor, **options)
    (profile,) = monitor.profiles
    return profile


@pytest.mark.parametrize(("model", "options", "expected"), CASES.values(), ids=CASES)
def test_every_second_is_in_the_row_and_the_phase_that_it_was_spent_in(
    model: type[Timed], options: dict[str, Any], expected: Times, clock: Changing
) -> None:
    """Self times are exact, and add up to the inclusive times of the model.

    The latter equal the phases forward and backward of all unprofiled steps. Recomputation is part
    of the phase backward.
    """
    profile = fitted(model(clock), **options)
    assert expected == own(profile)
    forward = sum(expected["forward"].values())
    backward = sum(expected.get("backward", {}).values())
    backward += sum(expected.get("recompute", {}).values())
    assert forward == whole(profile, "forward")
    assert backward == whole(profile, "backward", "recompute")
    unprofiled = [step.phases for step in profile.steps if step.is_unprofiled]
    assert {forward} == {phases.get("forward", 0.0) for phases in unprofiled}
    assert {backward} == {phases.get("backward", 0.0) for phases in unprofiled}
    assert 1 == profile.run.observer_ratio
    assert "time_scaled" not in {note.code for note in profile.notes}


def test_what_never_ran_has_no_time(clock: Changing) -> None:
    """Without a loss, the times of backward are `None` instead of 0."""
    profile = fitted(Idle(clock))
    assert profile.modules[""].backward.seconds is None
    assert profile.modules["head"].backward.seconds is None


class Watched(Timed):
    """In module-timing steps, the encoder's forward takes 22 s instead of 1 s.

    The additional 21 s are as long as the whole forward of an unprofiled step.
    """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.encoder.seconds = (22, 2) if batch_idx in ACTIVE else (1, 2)


def test_hooked_steps_say_only_how_the_clean_ones_divide(clock: Changing) -> None:
    """Each phase of the module times is scaled to its time in unprofiled steps.

    In module-timing steps, forward takes 42 s instead of 21 s, so all its times are halved, and a
    note says so. Backward is not scaled. These steps take 84 s instead of 63 s.
    """
    profile = fitted(Watched(clock))
    forward = {"encoder": 11.0, "head": 2.0, "": 8.0}
    assert {"forward": forward, "backward": ONCE["backward"]} == own(profile)
    assert 84 / 63 == profile.run.observer_ratio
    scaled = [note.values for note in profile.notes if note.code == "time_scaled"]
    assert [{"forward": 0.5}] == scaled
    assert {("unprofiled", 63.0), ("module_timing", 84.0), ("counting", None)} == {
        (step.kind, step.seconds) for step in profile.steps
    }


class Validated(Timed):
    """Has a validation that takes 100 s and runs the head, which takes 4 s."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.advance(100)
        self.head(batch[0])

    def val_dataloader(self) -> Any:
        return loader(1)


class Slowed(Validated):
    """In module-timing steps, everything takes twice as long."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.speed = 2 if batch_idx in ACTIVE else 1


def test_without_a_clean_step_times_are_as_they_were_stamped(
    clock: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every step has a validation, there is no unprofiled step to which times could be scaled.

    Usually, a validation in each of several steps is treated as part of a typical step. This test
    switches this off.
    """
    monkeypatch.setattr(step_timer, "USUAL_AFTER", 10**9)
    profile = fitted(Slowed(clock), val_check_interval=1)
    assert times(ONCE, 2) == own(profile)
    assert profile.run.observer_ratio is None
    assert [] == [note for note in profile.notes if note.code == "time_scaled"]


def test_a_validation_between_the_batches_of_a_step_is_in_no_row(
    clock: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation inside a step adds no time to any module.

    A step has two batches, and a validation runs after each. Without an unprofiled step, the times
    are not scaled, so scaling cannot hide an error.
    """
    monkeypatch.setattr(step_timer, "USUAL_AFTER", 10**9)
    profile = fitted(Validated(clock), val_check_interval=1, accumulate_grad_batches=2)
    timed = [step for step in profile.steps if step.kind == "module_timing"]
    assert {("validation",)} == {step.marks for step in timed}
    assert times(ONCE, 2) == own(profile)


def test_a_validation_in_every_step_is_part_of_a_step(clock: Changing) -> None:
    """If every step has a validation, it is part of a typical step, so there are unprofiled steps.

    The module-timing steps, which take twice as long, are scaled to them.
    """
    profile = fitted(Slowed(clock), val_check_interval=1)
    assert own(profile) == ONCE
    assert 2 == profile.run.observer_ratio


def test_a_hooked_step_that_was_disturbed_is_in_no_ratio(clock: Changing) -> None:
    """A module-timing step that contains a validation does not change the observer ratio.

    This is the second of two such steps.
    """
    monitor = watching(schedule=Schedule(wait=6, active=2))
    profile = fitted(Validated(clock), monitor, val_check_interval=9)
    timed = [step for step in profile.steps if step.kind == "module_timing"]
    assert [(8, 63.0), (9, 63.0 + 104)] == [(step.index, step.seconds) for step in timed]
    assert 1 == profile.run.observer_ratio
    assert own(profile) == ONCE


def test_an_ignored_modules_time_is_in_no_total(clock: Changing) -> None:
    """The time of an ignored module is in no total, but in a note; other times do not change."""
    profile = fitted(Timed(clock), watching(ignore_modules=["head"]))
    forward = {"encoder": 1.0, "": 16.0}
    backward = {"encoder": 2.0, "": 32.0}
    assert {"forward": forward, "backward": backward} == own(profile)
    assert 17 == whole(profile, "forward")
    assert 34 == whole(profile, "backward")
    (note,) = [note for note in profile.notes if note.code == "ignored"]
    assert "head" == note.subject
    assert 4 + 8 == note.values["seconds"]


@pytest.mark.parametrize("model", [Timed, Adversaries])
def test_times_need_no_count(model: type[Timed], clock: Changing) -> None:
    """With `count=False`, modules have times, but no FLOPs."""
    profile = fitted(model(clock), watching(count=False))
    assert own(profile) == (ONCE if model is Timed else ADVERSARIES)
    assert {0} == {module.forward.flops for module in profile.modules.values()}


class Looking(Timed):
    """Records in each `training_step` which global hooks are installed."""

    def __init__(self, clock: Changing) -> None:
        super().__init__(clock)
        self.before = global_hooks()
        self.seen: dict[int, list[str]] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.seen[batch_idx] = differences(self.before, global_hooks())
        return super().training_step(batch, batch_idx)

    def hooked(self) -> set[int]:
        """Return the steps in which there were global module hooks."""
        steps = set()
        for step, hooks in self.seen.items():
            if any("module" in each for each in hooks):
                steps.add(step)
        return steps


TIMES_ALONE: dict[str, Any] = {"count": False, "schedule": Schedule(wait=7, warmup=0, active=3)}


def test_no_step_has_hooks_but_the_active_ones(clock: Changing) -> None:
    """Only active steps have hooks, and none is left after training."""
    model = Looking(clock)
    fit(model, watching(**TIMES_ALONE))
    assert model.hooked() == ACTIVE
    assert [] == differences(model.before, global_hooks())


class Stack(Looking):
    """An encoder of four blocks, whose forward takes 1 s, except for the third: `third` seconds."""

    def __init__(self, clock: Changing, third: float) -> None:
        super().__init__(clock)
        seconds = (1.0, 1.0, third, 1.0)
        blocks = [Part(clock, forward, 2 * forward) for forward in seconds]
        self.encoder = nn.Sequential(*blocks)  # type: ignore[assignment]


@pytest.mark.parametrize(("third", "hooked", "accused"), [(1.0, 3, []), (3.0, 8, ["encoder.2"])])
def test_more_steps_are_hooked_where_a_module_seems_slow(
    clock: Changing, monkeypatch: pytest.MonkeyPatch, third: float, hooked: int, accused: list[str]
) -> None:
    """If a module seems slower than identical modules, 8 steps are timed instead of 3.

    3 steps are too few to decide this. The additional steps follow the window, which stays open for
    them.
    """
    monkeypatch.setattr(module_clock, "_waited", lambda: None)
    model = Stack(clock, third)
    monitor = watching(trace=False, count=False)
    fit(model, monitor)
    (made,) = monitor.profiles
    analysis = analyze(made)
    assert hooked == sum(step.kind == "module_timing" for step in made.steps)
    assert accused == [each.module for each in analysis.outliers.found]
    assert analysis.outliers.caveat is None
    assert len(model.hooked()) == hooked


def test_hooks_that_stay_on_are_seen(clock: Changing, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first module-timing step does not remove its hooks, all later steps have hooks.

    So `test_no_step_has_hooks_but_the_active_ones` can fail.
    """
    stop = ModuleTimingStep.stop
    kept: list[ModuleTimingStep] = []

    def stay(hooked: ModuleTimingStep) -> None:
        kept.append(hooked)

    monkeypatch.setattr(ModuleTimingStep, "stop", stay)
    model = Looking(clock)
    fit(model, watching(**TIMES_ALONE))
    for each in reversed(kept):
        stop(each)
    assert model.hooked() == set(range(7, 30))
    assert [] == differences(model.before, global_hooks())


class Failing(Timed):
    """Keeps the autograd graph of an active step, and raises."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.kept = super().training_step(batch, batch_idx)
        if batch_idx in ACTIVE:
            raise ValueError("planted")
        return self.kept


class Around(Callback):
    """Records the functions set on strategy and profiler and the global hooks, before the fit."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer
        self.before = self.look()

    def look(self) -> Facts:
        """Return the functions and hooks at this moment."""
        functions: Facts = {}
        owners = {"strategy": self.trainer.strategy, "profiler": self.trainer.profiler}
        for name, owner in owners.items():
            for key, value in vars(owner).items():
                if callable(value):
                    functions[f"{name}.{key}"] = value
        return functions | global_hooks()


def looks_behind(clock: Changing) -> int:
    """Return how often hooks on the graph of a failed run read the clock in a later backward.

    Nothing else may be left after the failed run.
    """
    model = Failing(clock)
    around = Around()
    with pytest.raises(ValueError, match="planted"):
        fit(model, around, watching())
    assert [] == differences(around.before, around.look())
    before = clock.looks
    model.kept.backward()
    return clock.looks - before


def test_an_exception_in_an_active_step_leaves_nothing(clock: Changing) -> None:
    """No hooks remain on modules, the Trainer and the graph."""
    assert 0 == looks_behind(clock)


def test_a_hook_that_is_left_on_a_graph_is_seen(
    clock: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If hooks on the graph are not released, they read the clock, so the test above can fail."""
    monkeypatch.setattr(ModuleTimer, "_release", lambda _: None)
    assert looks_behind(clock) >= 2


class Counting(Callback):
    """A callback of the user that computes for some time after each batch."""

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Add up three million numbers."""
        sum(range(3_000_000))


def test_beside_busy_programs_callbacks_keep_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In module-timing steps, the time of callbacks is part of `uncontended_phases`.

    Callbacks run after the hooks of the step were removed. The system's counters say here that the
    thread never waited for a core, so the phase should keep its whole time.
    """
    monkeypatch.setattr(UncontendedClock, "is_needed", True)
    monkeypatch.setattr(ThreadSchedule, "read", lambda _: b"0 0 1")
    monitor = watching()
    fit(Classifier(), monitor, Counting())
    timed = [step for step in monitor.profiles[0].steps if step.kind == "module_timing"]
    assert timed
    for step in timed:
        # The time in which hooks are removed is missing. Without the time of the callback, only a
        # tenth would remain.
        assert step.uncontended_phases["other"] > 0.5 * step.phases["other"]
