"""Test `Trainer(profiler=LightningProfiler())`, which adds the same monitor as the callback."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler

from lflops import CountError, FlopsMonitor, LightningProfiler, Schedule
from tests.support.lightning_runs import (
    CLASSES,
    LIGHTNINGS_WARNINGS,
    QUIET,
    ROWS,
    WIDTH,
    Classifier,
    loader,
)

pytestmark = LIGHTNINGS_WARNINGS

FORWARD = ROWS * (WIDTH * WIDTH + WIDTH * CLASSES)
"""MACs of the two layers in the forward of a batch."""

SETTINGS: dict[str, Any] = {
    "schedule": Schedule(wait=1, warmup=1, active=2, repeat=1),
    "hardware": None,
    "trace": False,
    "on_error": "raise",
}


def trained(folder: Path, profiler: LightningProfiler, **options: Any) -> Trainer:
    """Train twelve steps with the profiler, and return the Trainer."""
    trainer = Trainer(
        max_epochs=1, logger=False, default_root_dir=folder, profiler=profiler, **QUIET, **options
    )
    trainer.fit(Classifier(), loader(12))
    return trainer


def test_the_profiler_is_the_monitor(tmp_path: Path) -> None:
    """The profiler adds a monitor that counts. Unlike other profilers, it prints no summary."""
    profiler = LightningProfiler(**SETTINGS)
    trainer = trained(tmp_path, profiler)
    assert isinstance(profiler, Profiler)
    assert profiler.monitor in trainer.callbacks
    (profile,) = profiler.monitor.profiles
    assert FORWARD == profile.modules[""].forward.macs
    assert "" == profiler.summary()


def test_a_second_run_has_one_monitor(tmp_path: Path) -> None:
    """A second fit of the same Trainer does not add the monitor again."""
    profiler = LightningProfiler(**SETTINGS)
    trainer = trained(tmp_path, profiler)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Classifier(), loader(12))
    monitors = [each for each in trainer.callbacks if isinstance(each, FlopsMonitor)]
    assert [profiler.monitor] == monitors


def test_a_monitor_among_the_callbacks_stays_the_only_one(tmp_path: Path) -> None:
    """If a callback is a monitor, the profiler adds none: two would profile each other."""
    monitor = FlopsMonitor(**SETTINGS)
    profiler = LightningProfiler(**SETTINGS)
    trained(tmp_path, profiler, callbacks=[monitor])
    assert [1, 0] == [len(monitor.profiles), len(profiler.monitor.profiles)]


def test_a_wrong_setting_is_an_error_where_it_is_written() -> None:
    """An unknown argument raises in the constructor, and not when the run begins."""
    with pytest.raises((CountError, TypeError), match="colour"):
        LightningProfiler(colour=1)
