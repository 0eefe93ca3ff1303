"""Test that a Trainer can be copied or pickled during a monitored fit.

The copy must work independently, and its monitor must not have begun.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor

from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.monitoring.run import NO_RUN
from tests.support.lightning_runs import (
    LIGHTNINGS_WARNINGS,
    Classifier,
    Validated,
    fit,
    loader,
    watching,
)

pytestmark = LIGHTNINGS_WARNINGS

COUNTED = 6
"""The counting step of the default schedule."""
HOOKED = 8
"""A module-timing step of the default schedule."""


def pickled(trainer: Trainer) -> Trainer:
    """Return the Trainer as another process would receive it."""
    copied: Trainer = pickle.loads(pickle.dumps(trainer))  # noqa: S301 - the test made this pickle
    return copied


class Copies(Callback):
    """Copies the Trainer once, in the middle of a batch."""

    def __init__(self, make: Callable[[Trainer], Trainer], batch: int) -> None:
        self.make = make
        self.batch = batch
        self.copied: list[Trainer] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"make": None, "copied": []}

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.batch and not self.copied:
            self.copied.append(self.make(trainer))


class Trained(Classifier):
    """Counts its training batches."""

    batches = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        return super().training_step(batch, batch_idx)


class Asked(Validated):
    """Counts its validation batches."""

    batches = 0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
@pytest.mark.parametrize("batch", [COUNTED, HOOKED])
@pytest.mark.parametrize("profiler", [None, "simple"])
def test_a_copy_of_the_trainer_in_the_middle_of_a_fit_runs_its_own_model(
    make: Callable[[Trainer], Trainer], batch: int, profiler: str | None
) -> None:
    """The copy validates another model with 2 batches, and the original fit is complete."""
    monitor = watching()
    copies = Copies(make, batch)
    module = Trained()
    fit(module, copies, monitor, profiler=profiler)
    assert 30 == module.batches
    assert [False] == [profile.run.partial for profile in monitor.profiles]
    (copied,) = copies.copied
    other = Asked()
    copied.validate(other, loader(2), verbose=False)
    assert 2 == other.batches
    assert 30 == module.batches


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_copy_of_the_trainer_has_nothing_of_ours_on_it(
    make: Callable[[Trainer], Trainer],
) -> None:
    """Strategy and profiler of the copy have no wrappers of lflops.

    All their methods are those of their classes, bound to the copies and not to the originals.
    """
    copies = Copies(make, COUNTED)
    fit(Classifier(), copies, watching(), profiler=SimpleProfiler())
    (copied,) = copies.copied
    for owner in (copied.strategy, copied.profiler):
        for name, value in vars(owner).items():
            if callable(getattr(type(owner), name, None)):
                assert getattr(type(owner), name).__get__(owner) == value


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_the_monitor_of_the_copy_has_not_begun(make: Callable[[Trainer], Trainer]) -> None:
    """The monitor of the copy has the settings and the profiles so far, but no run and no model.

    It can monitor another fit.
    """
    copies = Copies(make, HOOKED)
    monitor = watching(track=False)
    fit(Classifier(), copies, monitor)
    (copied,) = copies.copied
    (other,) = [each for each in copied.callbacks if isinstance(each, FlopsMonitor)]
    assert monitor._settings == other._settings
    assert [] == other.profiles
    assert NO_RUN == other._run
    assert {"log", "log_dict"}.isdisjoint(vars(other))
    fit(Classifier(), other)
    assert 1 == len(other.profiles)
    assert 1 == len(monitor.profiles)
