"""A Trainer that is copied or pickled while a monitor watches it.

The copy runs by itself, and has a monitor that has not begun.
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

COUNTED, HOOKED = 6, 8
"""Batches of the default schedule, in which the most is put on."""


def pickled(trainer: Trainer) -> Trainer:
    """What another process would get."""
    copied: Trainer = pickle.loads(pickle.dumps(trainer))  # noqa: S301 - our own
    return copied


class Copies(Callback):
    """Copies the Trainer once, within a batch."""

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
    """Counts the batches that it is trained with."""

    batches = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        return super().training_step(batch, batch_idx)


class Asked(Validated):
    """Counts the batches that it is validated with."""

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
    """Two batches to be validated with; the original's training ends as ever."""
    monitor, copies, module = watching(), Copies(make, batch), Trained()
    fit(module, copies, monitor, profiler=profiler)
    assert (30, [False]) == (module.batches, [profile.run.partial for profile in monitor.profiles])
    (copied,) = copies.copied
    other = Asked()
    copied.validate(other, loader(2), verbose=False)
    assert (2, 30) == (other.batches, module.batches)


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_copy_of_the_trainer_has_nothing_of_ours_on_it(
    make: Callable[[Trainer], Trainer],
) -> None:
    """Neither on the strategy nor on the profiler.

    Its methods are those of their classes, of the copies themselves.
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
    """It has the settings and the profiles so far, which are none, and keeps no model.

    It watches another fit.
    """
    copies = Copies(make, HOOKED)
    monitor = watching(track=False)
    fit(Classifier(), copies, monitor)
    (copied,) = copies.copied
    (other,) = (each for each in copied.callbacks if isinstance(each, FlopsMonitor))
    assert (monitor._settings, [], NO_RUN) == (other._settings, other.profiles, other._run)
    assert {"log", "log_dict"}.isdisjoint(vars(other))
    fit(Classifier(), other)
    assert (1, 1) == (len(other.profiles), len(monitor.profiles))
