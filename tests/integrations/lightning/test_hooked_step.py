"""Module times of a training.

On a clock that only modules and autograd Functions advance, each second is in its row and its
phase.
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
from lflops.monitoring.window import step_timer
from lflops.monitoring.window.module_timing_step import ModuleTimingStep
from lflops.profile.profile import Profile
from lflops.schedule import Schedule
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

ACTIVE = {7, 8, 9}
"""Steps of the default schedule that are hooked."""


class Changing(StillClock):
    """Time passes so many times as fast. It knows how often it was looked at."""

    speed = 1
    looks = 0

    def mark(self) -> float:
        self.looks += 1
        return super().mark()

    def advance(self, seconds: float) -> None:
        super().advance(seconds * self.speed)


class Timed(LightningModule):
    """Two modules, and work of its own behind them."""

    def __init__(self, clock: Changing) -> None:
        super().__init__()
        self.clock = clock
        self.encoder = Part(clock, 1, 2)
        self.head = Part(clock, 4, 8)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(self.head(self.encoder(batch[0])))

    def loss(self, x: Tensor) -> Tensor:
        """What belongs to no child."""
        return Takes.apply(x, None, self.clock, (16, 32)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


ONCE = {
    "forward": {"encoder": 1.0, "head": 4.0, "": 16.0},
    "backward": {"encoder": 2.0, "head": 8.0, "": 32.0},
}


def times(once: Times, number: int) -> Times:
    """So many passes together."""
    return {
        phase: {row: number * seconds for row, seconds in rows.items()}
        for phase, rows in once.items()
    }


class Adversaries(Timed):
    """By hand: first both modules learn, then the head alone."""

    def __init__(self, clock: Changing) -> None:
        super().__init__(clock)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        both, one = self.optimizers()
        self.learn(both, lambda: self.loss(self.head(self.encoder(batch[0]))))
        self.learn(one, lambda: self.loss(self.head(batch[0])))

    def learn(self, optimizer: Any, forward: Callable[[], Tensor]) -> None:
        """Forward, backward, and a step."""
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
    """The optimizers are given forward and backward to run."""

    def learn(self, optimizer: Any, forward: Callable[[], Tensor]) -> None:
        optimizer.step(lambda: self.manual_backward(forward()))


ADVERSARIES = {
    "forward": {"encoder": 1.0, "head": 8.0, "": 32.0},
    "backward": {"encoder": 2.0, "head": 16.0, "": 64.0},
}


class Twice(Adversaries):
    """One graph that goes backward twice."""

    def learn(self, optimizer: Any, forward: Callable[[], Tensor]) -> None:
        loss = forward()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()


class Quasi(Timed):
    """An optimizer that looks at the loss three times.

    Before, and after each of its three moves but the last.
    """

    def __init__(self, clock: Changing) -> None:
        super().__init__(clock)
        self.shift = nn.Parameter(torch.ones(()))

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) + self.shift.square()

    def configure_optimizers(self) -> Any:
        options = {"max_iter": 3, "max_eval": 100, "tolerance_grad": 0, "tolerance_change": 0}
        return torch.optim.LBFGS([self.shift], lr=0.01, **options)  # type: ignore[arg-type]


class Idle(Timed):
    """No loss, so nothing to go backward from."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class Recomputing(Timed):
    """The exponential saves a tensor, for which the encoder runs again."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(
            self.head(checkpoint(lambda x: self.encoder(x).exp(), batch[0], use_reentrant=False))
        )


class Sharing(Timed):
    """Two callers have the encoder in common."""

    def __init__(self, clock: Changing) -> None:
        super().__init__(clock)
        self.left, self.right = nn.Sequential(self.encoder), nn.Sequential(self.encoder)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(self.head(self.right(self.left(batch[0]))))


SHARING = {
    "forward": {"left.0": 1.0, "right.0": 1.0, "head": 4.0, "": 16.0},
    "backward": {"left.0": 2.0, "right.0": 2.0, "head": 8.0, "": 32.0},
}


class Scoped(Timed):
    """The loss has a name."""

    def loss(self, x: Tensor) -> Tensor:
        with lflops.scope("loss"):
            return super().loss(x)


SCOPED = {
    phase: {"encoder": rows["encoder"], "head": rows["head"], "loss": rows[""]}
    for phase, rows in ONCE.items()
}


class Named(Adversaries):
    """All of a pass has a name, backward as well."""

    def learn(self, optimizer: Any, forward: Callable[[], Tensor]) -> None:
        with lflops.scope("learn"):
            super().learn(optimizer, forward)


NAMED = {
    phase: {"encoder": rows["encoder"], "head": rows["head"], "learn": rows[""]}
    for phase, rows in ADVERSARIES.items()
}


class Called(Timed):
    """training_step calls the module itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.head(self.encoder(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self(batch[0])


class Beside(Timed):
    """Runs the head where neither forward nor backward is: between the two, and behind each batch."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.head(torch.ones(2))

    def on_train_batch_end(self, *_: Any) -> None:
        self.head(torch.ones(2))


class Penalized(Timed):
    """Takes a gradient of its own, where neither forward nor backward is."""

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Changing:
    """The one that the monitor reads."""
    clock = Changing()
    use_clock(monkeypatch, clock)
    return clock


def own(profile: Profile) -> Times:
    """The median seconds of every row's own that took any."""
    found: dict[str, dict[str, float]] = {}
    for name, module in profile.modules.items():
        for phase in ("forward", "backward", "recompute"):
            spread = module.work(phase).self_seconds  # type: ignore[arg-type]
            if spread is not None and spread.median:
                found.setdefault(phase, {})[name] = spread.median
    return found


def whole(profile: Profile, *phases: Any) -> float:
    """The root's seconds."""
    return sum(
        spread.median
        for phase in phases
        if (spread := profile.modules[""].work(phase).seconds) is not None
    )


def fitted(module: LightningModule, monitor: FlopsMonitor | None = None, **options: Any) -> Profile:
    """The only window of a training."""
    monitor = monitor or watching()
    fit(module, monitor, **options)
    (profile,) = monitor.profiles
    return profile


@pytest.mark.parametrize(("model", "options", "expected"), CASES.values(), ids=CASES)
def test_every_second_is_in_the_row_and_the_phase_that_it_was_spent_in(
    model: type[Timed], options: dict[str, Any], expected: Times, clock: Changing
) -> None:
    """Rows add up to the root, and the root's seconds are the clean steps' forward and backward, in which something may be recomputed."""
    profile = fitted(model(clock), **options)
    assert expected == own(profile)
    assert whole(profile, "forward") == sum(expected["forward"].values())
    going_back = [*expected.get("backward", {}).values(), *expected.get("recompute", {}).values()]
    assert whole(profile, "backward", "recompute") == sum(going_back)
    (phases,) = {
        tuple(step.phases.get(name, 0.0) for name in ("forward", "backward"))
        for step in profile.steps
        if step.is_unprofiled
    }
    assert (sum(expected["forward"].values()), sum(going_back)) == phases
    assert 1 == profile.run.observer_ratio
    assert "time_scaled" not in {note.code for note in profile.notes}


def test_what_never_ran_has_no_time(clock: Changing) -> None:
    """Unknown is not nothing: without a loss there is no backward."""
    profile = fitted(Idle(clock))
    assert [None, None] == [profile.modules[name].backward.seconds for name in ("", "head")]


class Watched(Timed):
    """While it is hooked the encoder takes longer forward, by as much as all of a clean forward."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.encoder.seconds = (22, 2) if batch_idx in ACTIVE else (1, 2)


def test_hooked_steps_say_only_how_the_clean_ones_divide(clock: Changing) -> None:
    """Forward took 42 seconds instead of 21, so each row's are halved; backward is as it was.

    Hooked steps took 84 instead of 63.
    """
    profile = fitted(Watched(clock))
    assert {
        "forward": {"encoder": 11.0, "head": 2.0, "": 8.0},
        "backward": ONCE["backward"],
    } == own(profile)
    assert 84 / 63 == profile.run.observer_ratio
    assert [{"forward": 0.5}] == [
        note.values for note in profile.notes if note.code == "time_scaled"
    ]
    assert {("unprofiled", 63.0), ("module_timing", 84.0), ("counting", None)} == {
        (step.kind, step.seconds) for step in profile.steps
    }


class Validated(Timed):
    """Has a validation, which runs one of its modules."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.advance(100)
        self.head(batch[0])

    def val_dataloader(self) -> Any:
        return loader(1)


class Slowed(Validated):
    """Everything is twice as slow while it is hooked."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.speed = 2 if batch_idx in ACTIVE else 1


def test_without_a_clean_step_times_are_as_they_were_stamped(
    clock: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to scale them to, and no ratio."""
    monkeypatch.setattr(step_timer, "USUAL_AFTER", 10**9)
    profile = fitted(Slowed(clock), val_check_interval=1)
    assert times(ONCE, 2) == own(profile)
    assert profile.run.observer_ratio is None
    assert [] == [note for note in profile.notes if note.code == "time_scaled"]


def test_a_validation_between_the_batches_of_a_step_is_in_no_row(
    clock: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches make a step, and each is validated behind.

    No step is clean, so nothing scales away what does not belong here.
    """
    monkeypatch.setattr(step_timer, "USUAL_AFTER", 10**9)
    profile = fitted(Validated(clock), val_check_interval=1, accumulate_grad_batches=2)
    assert {("validation",)} == {
        step.marks for step in profile.steps if step.kind == "module_timing"
    }
    assert times(ONCE, 2) == own(profile)


def test_a_validation_in_every_step_is_part_of_a_step(clock: Changing) -> None:
    """The hooked steps take twice as long, and are scaled to the others."""
    profile = fitted(Slowed(clock), val_check_interval=1)
    assert own(profile) == ONCE
    assert 2 == profile.run.observer_ratio


def test_a_hooked_step_that_was_disturbed_is_in_no_ratio(clock: Changing) -> None:
    """Of two, the second has the validation in it."""
    profile = fitted(
        Validated(clock), watching(schedule=Schedule(wait=6, active=2)), val_check_interval=9
    )
    assert [(8, 63.0), (9, 63.0 + 104)] == [
        (step.index, step.seconds) for step in profile.steps if step.kind == "module_timing"
    ]
    assert 1 == profile.run.observer_ratio
    assert own(profile) == ONCE


def test_an_ignored_modules_time_is_in_no_total(clock: Changing) -> None:
    """Forward and backward of it are in a note; the others' are what they are."""
    profile = fitted(Timed(clock), watching(ignore_modules=["head"]))
    assert {"forward": {"encoder": 1.0, "": 16.0}, "backward": {"encoder": 2.0, "": 32.0}} == own(
        profile
    )
    assert (17, 34) == (whole(profile, "forward"), whole(profile, "backward"))
    assert [("head", 4 + 8)] == [
        (note.subject, note.values["seconds"]) for note in profile.notes if note.code == "ignored"
    ]


@pytest.mark.parametrize("model", [Timed, Adversaries])
def test_times_need_no_count(model: type[Timed], clock: Changing) -> None:
    """Rows have seconds, and no work."""
    profile = fitted(model(clock), watching(count=False))
    assert own(profile) == (ONCE if model is Timed else ADVERSARIES)
    assert {0} == {module.forward.flops for module in profile.modules.values()}


class Looking(Timed):
    """Takes down in each training_step what hooks are on every module."""

    def __init__(self, clock: Changing) -> None:
        super().__init__(clock)
        self.before = global_hooks()
        self.seen: dict[int, list[str]] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.seen[batch_idx] = differences(self.before, global_hooks())
        return super().training_step(batch, batch_idx)

    def hooked(self) -> set[int]:
        """The steps that had any."""
        return {
            step for step, hooks in self.seen.items() if any("module" in each for each in hooks)
        }


TIMES_ALONE: dict[str, Any] = {"count": False, "schedule": Schedule(wait=7, warmup=0, active=3)}


def test_no_step_has_hooks_but_the_active_ones(clock: Changing) -> None:
    """Nor has anything after the training."""
    model = Looking(clock)
    fit(model, watching(**TIMES_ALONE))
    assert model.hooked() == ACTIVE
    assert [] == differences(model.before, global_hooks())


class Stack(Looking):
    """Four equal blocks, of which the third takes longer."""

    def __init__(self, clock: Changing, third: float) -> None:
        super().__init__(clock)
        blocks = (
            Part(clock, *((third, 2 * third) if number == 2 else (1, 2))) for number in range(4)
        )
        self.encoder = nn.Sequential(*blocks)  # type: ignore[assignment]


@pytest.mark.parametrize(("third", "hooked", "accused"), [(1.0, 3, []), (3.0, 8, ["encoder.2"])])
def test_more_steps_are_hooked_where_a_module_seems_slow(
    clock: Changing, monkeypatch: pytest.MonkeyPatch, third: float, hooked: int, accused: list[str]
) -> None:
    """Three steps cannot tell, eight can. They follow the window, and the window waits for them."""
    monkeypatch.setattr(module_clock, "_waited", lambda: None)
    model, monitor = Stack(clock, third), watching(trace=False, count=False)
    fit(model, monitor)
    (made,) = monitor.profiles
    analysis = analyze(made)
    assert hooked == sum(step.kind == "module_timing" for step in made.steps)
    assert (accused, None) == (
        [each.module for each in analysis.outliers.found],
        analysis.outliers.caveat,
    )
    assert len(model.hooked()) == hooked


def test_hooks_that_stay_on_are_seen(clock: Changing, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: here the first step that is hooked does not end."""
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
    """Keeps the graph of an active step, and fails."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.kept = super().training_step(batch, batch_idx)
        if batch_idx in ACTIVE:
            raise ValueError("planted")
        return self.kept


class Around(Callback):
    """Takes down what the strategy and the profiler have of their own, and all hooks."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer
        self.before = self.look()

    def look(self) -> Facts:
        """Now."""
        owners = {"strategy": self.trainer.strategy, "profiler": self.trainer.profiler}
        functions = {
            f"{name}.{key}": value
            for name, owner in owners.items()
            for key, value in vars(owner).items()
            if callable(value)
        }
        return functions | global_hooks()


def looks_behind(clock: Changing) -> int:
    """How often the clock is looked at when the graph that a failed training has kept goes backward; nothing else is left."""
    model, around = Failing(clock), Around()
    with pytest.raises(ValueError, match="planted"):
        fit(model, around, watching())
    assert [] == differences(around.before, around.look())
    before = clock.looks
    model.kept.backward()
    return clock.looks - before


def test_an_exception_in_an_active_step_leaves_nothing(clock: Changing) -> None:
    """On modules, on the Trainer, and on the graph."""
    assert 0 == looks_behind(clock)


def test_a_hook_that_is_left_on_a_graph_is_seen(
    clock: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above can fail: each of the two modules has one, and the work behind them."""
    monkeypatch.setattr(ModuleTimer, "_release", lambda _: None)
    assert looks_behind(clock) >= 2


class Counting(Callback):
    """A callback of the user that takes its time after each batch."""

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Count to three millions."""
        sum(range(3_000_000))


def test_beside_busy_programs_callbacks_keep_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run when the hooks of the step are gone. Nothing waited for a core here."""
    monkeypatch.setattr(UncontendedClock, "is_needed", True)
    monkeypatch.setattr(ThreadSchedule, "read", lambda _: b"0 0 1")
    monitor = watching()
    fit(Classifier(), monitor, Counting())
    hooked = [step for step in monitor.profiles[0].steps if step.kind == "module_timing"]
    assert hooked
    for step in hooked:
        # What is missing are the moments in which the hooks are removed. Without the callback's
        # time, a tenth would remain.
        assert step.uncontended_phases["other"] > 0.5 * step.phases["other"]
