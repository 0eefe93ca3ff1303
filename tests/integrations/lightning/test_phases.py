"""Test the phases of training steps in Lightning.

The clock of these tests stands still unless the data, the model or the optimizer advances it, so
the expected seconds are exact.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lflops import Schedule
from lflops.error_guard import unguarded
from lflops.integrations.lightning.trainer_phases import phases_of
from tests.support.fake_clock import StillClock, use_clock
from tests.support.lightning_runs import (
    LIGHTNINGS_WARNINGS,
    Classifier,
    fit,
    loader,
    steps,
    watching,
)

pytestmark = LIGHTNINGS_WARNINGS

# the seconds of each part of a step
DATA = 40.0
TRANSFER = 7.0
FORWARD = 20.0
LOSS = 3.0
BACKWARD = 30.0
CLIP = 5.0
OPTIMIZER = 10.0


class Slow(torch.optim.SGD):
    """An optimizer whose step takes `OPTIMIZER` seconds, in addition to its closure."""

    def __init__(self, parameters: Iterator[Any], clock: StillClock) -> None:
        super().__init__(parameters, lr=0.01)
        self.clock = clock

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            result = closure()
        self.clock.advance(OPTIMIZER)
        super().step()
        return result


class Clocked(Classifier):
    """A model that advances the clock in each phase."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.clock.advance(TRANSFER)
        return batch

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.clock.advance(FORWARD)
        loss = super().training_step(batch, batch_idx)
        self.clock.advance(LOSS)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        self.clock.advance(BACKWARD)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clock.advance(CLIP)

    def configure_optimizers(self) -> Any:
        return Slow(self.parameters(), self.clock)


class Manual(Clocked):
    """Manual optimization with two optimizers, each with a forward and a backward."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__(clock)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [Slow(self.body.parameters(), self.clock), Slow(self.head.parameters(), self.clock)]


class WithClosure(Manual):
    """Passes forward and backward as a closure to the optimizers."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.step(
                lambda: self.manual_backward(Clocked.training_step(self, batch, batch_idx))
            )


class Iterated(Clocked):
    """Fetches its batch in `training_step`."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Quasi(Clocked):
    """An optimizer that runs forward and backward three times for one step."""

    def configure_optimizers(self) -> Any:
        return Thrice(self.parameters(), self.clock)


class Thrice(Slow):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        closure()
        closure()
        return super().step(closure)


class OfAPaper(Clocked):
    """Uses an optimizer that still works after the step of its base class."""

    def configure_optimizers(self) -> Any:
        return GoesOn(self.parameters(), self.clock)


class GoesOn(Slow):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = super().step(closure)
        self.clock.advance(2)
        return result


class Idle(Clocked):
    """Returns no loss, so there is no backward."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)


class Logging(Clocked):
    """Has hooks that take time outside of all phases."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.advance(1)

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.clock.advance(2)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clock.advance(4)

    def lr_scheduler_step(self, *args: Any) -> None:
        self.clock.advance(8)

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.advance(16)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "interval": "step"}
        ]


ONCE = {
    "data": DATA,
    "transfer": TRANSFER,
    "forward": FORWARD + LOSS,
    "backward": BACKWARD,
    "clip": CLIP,
    "optimizer": OPTIMIZER,
}
"""The phases of a step with one batch."""
TWICE = {name: 2 * seconds for name, seconds in ONCE.items()}
FETCHED_ONCE = {"data": DATA, "transfer": TRANSFER}
MANUAL = {
    **FETCHED_ONCE,
    "forward": 2 * (FORWARD + LOSS),
    "backward": 2 * BACKWARD,
    "optimizer": 2 * OPTIMIZER,
}
"""The phases of a step with manual optimization: two passes for one batch, without clipping."""
# With the usual scale, a gradient may overflow, and the optimizer step is skipped.
FP16 = {
    "plugins": MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1.0))
}

CASES: dict[str, tuple[type[Clocked], dict[str, Any], dict[str, float]]] = {
    "automatic": (Clocked, {}, ONCE),
    "clipped": (Clocked, {"gradient_clip_val": 1.0}, ONCE),
    "bf16-mixed": (Clocked, {"precision": "bf16-mixed"}, ONCE),
    "16-mixed": (Clocked, FP16, ONCE),
    "accumulate 2": (
        Clocked,
        {"accumulate_grad_batches": 2},
        TWICE | {"clip": CLIP, "optimizer": OPTIMIZER},
    ),
    "manual, two optimizers": (Manual, {}, MANUAL),
    "manual, closures": (WithClosure, {}, MANUAL),
    "manual, 16-mixed": (Manual, FP16, MANUAL),
    "three closures": (
        Quasi,
        {},
        {name: 3 * ONCE[name] for name in ("forward", "backward", "clip")}
        | FETCHED_ONCE
        | {"optimizer": OPTIMIZER},
    ),
    "an optimizer around another": (OfAPaper, {}, ONCE | {"optimizer": OPTIMIZER + 2}),
    "no loss": (Idle, {}, {name: ONCE[name] for name in ONCE if name != "backward"}),
    "iterator": (Iterated, {}, {name: ONCE[name] for name in ONCE if name != "transfer"}),
    "code of the user's": (Logging, {}, ONCE | {"other": 1 + 2 + 4 + 8 + 16.0}),
}
"""The model, the options of the Trainer, and the expected seconds of each phase."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """Return the clock that the monitor reads."""
    clock = StillClock()
    use_clock(monkeypatch, clock)
    return clock


@pytest.mark.parametrize(("model", "options", "expected"), CASES.values(), ids=CASES)
def test_every_phase_has_its_own_time(
    model: type[Clocked], options: dict[str, Any], expected: dict[str, float], clock: StillClock
) -> None:
    """In each unprofiled step, the phases have exactly the expected seconds and add up to the step.

    Unless a case expects time in "other", this phase has none.
    """
    monitor = watching()
    fit(model(clock), monitor, data=loader(40, look=lambda: clock.advance(DATA)), **options)
    told = list(steps(monitor))
    assert len(told) >= 5
    for step in told:
        assert {"other": 0.0} | expected == step.phases
        assert sum(expected.values()) == step.seconds


def test_a_scaled_step_that_is_skipped_is_marked(clock: StillClock) -> None:
    """A step without an update has the mark "no_update" and no time in the optimizer.

    The loss of step 5 is not finite, so 16-mixed precision skips the optimizer step.
    """

    class Overflowing(Clocked):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.trainer.global_step == 5:
                loss = loss * float("inf")
            super().backward(loss)

    monitor = watching()
    fit(Overflowing(clock), monitor, data=loader(40), **FP16)
    times = {step.index: (step.marks, step.phases["optimizer"]) for step in steps(monitor)}
    assert (("no_update",), 0.0) == times.pop(5)
    assert {((), OPTIMIZER)} == set(times.values())


def test_the_strategy_takes_what_it_is_given_by_name(clock: StillClock) -> None:
    """The wrapped `Strategy.optimizer_step` accepts keyword arguments, which plugins may use."""

    class Named(Manual):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers(use_pl_optimizer=False):
                closure = partial(Clocked.training_step, self, batch, batch_idx)
                self.trainer.strategy.optimizer_step(
                    optimizer=optimizer, closure=closure, model=self
                )

    monitor = watching()
    fit(Named(clock), monitor)
    assert {2 * OPTIMIZER} == {step.phases["optimizer"] for step in steps(monitor)}


def test_a_step_without_a_backward_is_marked(clock: StillClock) -> None:
    """A step without a backward has the mark "no_update"."""
    monitor = watching()
    fit(Idle(clock), monitor)
    assert {("no_update",)} == {step.marks for step in steps(monitor)}


@pytest.mark.parametrize("factors", [{0: 1, 1: 2}, {0: 2, 1: 1}])
def test_where_accumulation_changes_within_a_wait_no_half_step_is_one(
    clock: StillClock, factors: dict[int, int]
) -> None:
    """If accumulation changes between epochs, every step is complete: one or two batches.

    This happens while no window is open. A batch without an optimizer step must not count as a
    step.
    """
    monitor = watching(schedule=Schedule(wait=100, warmup=1, active=1))
    data = loader(20)
    fit(Clocked(clock), monitor, GradientAccumulationScheduler(factors), data=data, max_epochs=2)
    found = [(step.seconds, step.marks) for step in steps(monitor)]
    batch = TRANSFER + FORWARD + LOSS + BACKWARD
    once = batch + CLIP + OPTIMIZER
    twice = 2 * batch + CLIP + OPTIMIZER
    assert {(once, ()), (twice, ())} >= set(found)
    assert 10 <= len(found)


def test_hooks_of_a_callback_alone_would_tell_another_story(clock: StillClock) -> None:
    """Callback hooks alone would give other times, so the tests above can fail.

    The time from `on_before_optimizer_step` to the end of the batch includes gradient clipping.
    """

    class Hooks(Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            self.begin = clock.now

        def on_train_batch_end(self, *_: Any) -> None:
            self.optimizer = clock.now - self.begin

    hooks = Hooks()
    fit(Clocked(clock), hooks, gradient_clip_val=1.0)
    assert CLIP + OPTIMIZER == hooks.optimizer


class Event:
    """A mark of a slow device: it is reached when `LateClock.LAG` more marks have been made."""

    def __init__(self, clock: "LateClock") -> None:
        self.clock = clock
        self.made = clock.made
        self.now = clock.now

    def query(self) -> bool:
        return self.clock.made > self.made + LateClock.LAG or self.clock.settled


class LateClock(StillClock):
    """A clock like that of a stream, whose marks are reached later.

    Reading a mark that is not reached would mean to wait for the device, and fails here.
    """

    LAG = 100

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.settled = False

    def mark(self) -> Any:
        self.made += 1
        return Event(self)

    def settle(self) -> None:
        self.settled = True

    def seconds(self, start: Any, end: Any) -> float:
        assert end.query()
        return end.now - start.now


@pytest.mark.parametrize("batches", [10, 40])
def test_marks_that_come_late_are_waited_for_and_never_forced(
    batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the device lags some steps behind, the times are the same, and no step waits for a mark.

    Only the end of the training run waits for the remaining marks.
    """
    clock = LateClock()
    use_clock(monkeypatch, clock)
    monitor = watching()
    fit(Clocked(clock), monitor, data=loader(batches, look=lambda: clock.advance(DATA)))
    (profile,) = monitor.profiles
    timed = [step for step in profile.steps if step.kind != "counting"]
    kinds = ["unprofiled"] * 6 + ["module_timing"] * 3
    if batches == 40:
        # Two of the unprofiled steps belong to the warm-up of the run, so the window takes another
        # one after it if there is one.
        kinds.append("unprofiled")
    assert kinds == [step.kind for step in timed]
    for step in timed:
        assert sum(ONCE.values()) == step.seconds
        assert {"other": 0.0} | ONCE == step.phases
    assert not profile.run.partial
    assert 9 == profile.run.step


def test_after_an_exception_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an exception, the profile has the steps that the device has reached by then.

    lflops must not wait for the others, because the device may never reach them.
    """

    class Failing(Clocked):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 9:
                raise ValueError("planted")

    clock = LateClock()
    use_clock(monkeypatch, clock)
    monitor = watching()
    with pytest.raises(ValueError, match="planted"):
        fit(Failing(clock), monitor)
    assert not clock.settled
    assert 0 < len(monitor.profiles[0].steps) < 9


def test_the_cpu_time_of_the_process_stands_beside_the_steps() -> None:
    """Steps have the CPU time of the process, in user and system mode, over all threads."""
    monitor = watching()
    fit(Classifier(), monitor)
    assert sum(step.cpu_user + step.cpu_system for step in monitor.profiles[0].steps) > 0


class FollowsNoPhase:
    """A listener to phases that does nothing."""

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        """Ignore the beginning of a phase."""

    def leave(self) -> None:
        """Ignore the end of a phase."""

    drop = leave


class ListensFirst(Callback):
    """Registers a `FollowsNoPhase` before the monitor registers its listeners."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.undo = phases_of(trainer).listen("train", FollowsNoPhase(), unguarded)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.undo()


def test_every_phase_has_a_name() -> None:
    """All phases have a name, even if another listener is registered before the monitor.

    Once, a part of the step had no name in the summary in this case.
    """
    monitor = watching()
    fit(Classifier(), ListensFirst(), monitor)
    phases = set()
    for step in monitor.profiles[0].steps:
        phases.update(step.phases)
    assert {"data", "transfer", "forward", "backward", "optimizer", "other"} == phases
