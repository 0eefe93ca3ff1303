"""Test the times of Lightning's hooks, with a clock that only the hooks of these tests move."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lflops import FlopsMonitor, Profile
from lflops.integrations.lightning import hook_times
from lflops.integrations.lightning.hook_times import LightningHookTimes
from lflops.integrations.lightning.trainer_phases import phases_of
from tests.support.fake_clock import StillClock
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, QUIET

pytestmark = LIGHTNINGS_WARNINGS


class Net(LightningModule):
    """A linear layer whose hooks take time on the clock of the test."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.clock = clock

    def training_step(self, batch: Tensor) -> Tensor:
        """Take 100 s in a phase, which are in no hook."""
        self.clock.advance(100)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take 7 s."""
        self.clock.advance(7)


class Slow(Callback):
    """A callback that takes time before and after each batch."""

    def __init__(self, clock: StillClock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *args: Any) -> None:
        """Take 2 s."""
        self.clock.advance(2)

    def on_train_batch_end(self, *args: Any) -> None:
        """Take 3 s."""
        self.clock.advance(3)


def trained(
    clock: StillClock, monitor: FlopsMonitor, *callbacks: Callback, **settings: Any
) -> tuple[Trainer, Profile]:
    """Train 40 batches with the callback before the monitor."""
    callbacks = (Slow(clock), *callbacks, monitor)
    trainer = Trainer(max_epochs=1, callbacks=list(callbacks), logger=False, **QUIET, **settings)
    trainer.fit(Net(clock), DataLoader(torch.ones(40, 4)))
    (profile,) = monitor.profiles
    return trainer, profile


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_the_hooks_outside_all_phases_are_timed(
    profiler: str | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile has the mean seconds of the slowest hooks in module-timing steps.

    With another profiler than the default one, its methods are wrapped instead of replaced. The
    time of `training_step` is not the time of a hook.
    """
    clock = StillClock()
    monkeypatch.setattr(hook_times, "perf_counter", clock.mark)
    monitor = FlopsMonitor(trace=False, html=False, dirpath=tmp_path)
    trainer, profile = trained(clock, monitor, profiler=profiler)
    slowest = dict(list(profile.hooks.items())[:3])
    assert slowest == pytest.approx(
        {
            "Net.on_before_optimizer_step": 7.0,
            "Slow.on_train_batch_end": 3.0,
            "Slow.on_train_batch_start": 2.0,
        }
    )
    assert not any(hook.startswith("FlopsMonitor") for hook in profile.hooks)
    # nothing is left behind
    assert "profile" not in vars(trainer.profiler)


def test_hooks_are_timed_in_module_timing_steps_only(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the window, no hook reads the clock."""
    reads: list[int] = [0]

    class Counting(StillClock):
        def mark(self) -> float:
            reads[-1] += 1
            return super().mark()

    class Separates(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            reads.append(0)

    clock = Counting()
    monkeypatch.setattr(hook_times, "perf_counter", clock.mark)
    monitor = FlopsMonitor(trace=False, html=False, dirpath=tmp_path)
    trained(clock, monitor, Separates())
    assert not any(reads[:6])
    assert not any(reads[-4:])
    assert any(reads)


@pytest.mark.parametrize(
    ("action", "label"),
    [
        ("[LightningModule]Net.on_train_batch_end", "Net.on_train_batch_end"),
        ("[Callback]ModelCheckpoint{'mode': 'a.b'}.on_train_end", "ModelCheckpoint.on_train_end"),
        ("[Callback]FlopsMonitor.on_train_batch_end", None),
        ("[LightningModule]Net.configure_gradient_clipping", None),
        ("[Strategy]SingleDeviceStrategy.training_step", None),
        ("run_training_batch", None),
    ],
)
def test_the_name_of_a_hook(action: str, label: str | None) -> None:
    """A hook is named by class and method; phases, other actions and the monitor have no name."""
    trainer = Trainer(callbacks=[FlopsMonitor()], logger=False, accelerator="cpu")
    assert label == LightningHookTimes(trainer, phases_of(trainer)).label_of(action)
