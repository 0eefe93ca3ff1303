"""Test runs in which Lightning skips or reorders hooks, and runs with several monitors."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lflops import FlopsMonitor, Schedule
from lflops.integrations.lightning.training import _batches_left
from tests.support.lightning_runs import (
    LIGHTNINGS_WARNINGS,
    QUIET,
    Classifier,
    fit,
    loader,
    watching,
)

pytestmark = LIGHTNINGS_WARNINGS


def test_two_monitors_leave_the_profiler_as_it_was() -> None:
    """After a run with two monitors whose windows overlap, a second run still has all phases.

    Both monitors time hooks in the same steps, and stop in the order in which they started.
    """
    first = watching()
    second = watching()
    trainer = fit(Classifier(), first, second)
    assert set() == {"profile", "start", "stop"} & vars(trainer.profiler).keys()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Classifier(), loader(30))
    for monitor in (first, second):
        assert "forward" in monitor.profiles[0].steps[3].phases


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_step_with_a_checkpoint_is_marked(tmp_path: Path, weights_only: bool) -> None:
    """Each third step saves a checkpoint; Lightning calls no callback for one with weights only."""
    saving = ModelCheckpoint(
        tmp_path, every_n_train_steps=3, save_top_k=-1, save_weights_only=weights_only
    )
    monitor = watching()
    fit(Classifier(), monitor, saving, enable_checkpointing=True)
    steps = enumerate(monitor.profiles[0].steps)
    marked = [number for number, step in steps if "checkpoint" in step.marks]
    # The checkpoint is saved after lflops has ended the step, so the next step contains it.
    assert [3, 6, 9] == marked[:3]


def test_the_epoch_that_updates_batch_norms_has_no_step() -> None:
    """After two epochs of five steps, stochastic weight averaging runs a third one.

    In this epoch, Lightning calls neither backward nor the optimizer.
    """
    monitor = watching(ledger=True)
    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    trainer = fit(Classifier(), monitor, averaging, data=loader(5), max_epochs=2)
    assert 10 == trainer.global_step
    assert monitor.ledger is not None
    assert 10 == monitor.ledger.steps
    assert 9 == monitor.ledger.step_groups[-1].last


class Skipping(Classifier):
    """Lightning skips the rest of an epoch if this hook returns -1."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 6 else None


def test_a_hook_can_end_an_epoch_in_the_counting_step() -> None:
    """The seventh batch would be counted, but each epoch ends before it. Training continues.

    A later step of the next epoch is counted instead: two linear layers of 8 x 8 and 8 x 3 for
    four rows.
    """
    monitor = watching(schedule=Schedule(wait=5, warmup=2, active=3))
    fit(Skipping(), monitor, max_epochs=4)
    (profile,) = monitor.profiles
    assert 4 * (8 * 8 + 8 * 3) == profile.modules[""].forward.macs


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_only_the_rest_of_a_resumed_epoch_is_left(tmp_path: Path) -> None:
    """A run that resumes after 15 of 20 batches has 5 batches left in its only epoch."""
    path = tmp_path / "middle.ckpt"

    class Saves(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 14:
                trainer.save_checkpoint(path)

    class Asks(Callback):
        left: float = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.left = _batches_left(trainer, pl_module)

    asks = Asks()
    fit(Classifier(), asks, Saves(), batches=20)
    assert 20 == asks.left
    trainer = Trainer(
        max_epochs=1, logger=False, default_root_dir=tmp_path, callbacks=[asks], **QUIET
    )
    trainer.fit(Classifier(), loader(20), ckpt_path=path)
    # Lightning counts the batch in which the checkpoint was saved as not completed.
    assert 6 == asks.left


def test_a_second_fit_does_not_continue_the_epoch_of_the_first(tmp_path: Path) -> None:
    """The first fit ends after 15 of 20 batches. The second one trains a whole epoch."""

    class Asks(Callback):
        left: float = 0
        trained = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.trained = 0
            self.left = _batches_left(trainer, pl_module)

        def on_train_batch_end(self, *_: Any) -> None:
            self.trained += 1

    asks = Asks()
    trainer = Trainer(
        max_steps=15, logger=False, default_root_dir=tmp_path, callbacks=[asks], **QUIET
    )
    trainer.fit(Classifier(), loader(20))
    assert (15, 15) == (asks.left, asks.trained)
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Classifier(), loader(20))
    assert (20, 20) == (asks.left, asks.trained)


def test_every_rank_raises_the_error_of_the_main_process(tmp_path: Path) -> None:
    """A folder that only the main process cannot write to ends all ranks with the same error."""
    file = tmp_path / "file"
    file.touch()
    sent: list[Any] = []

    def broadcast(value: Any) -> Any:
        sent.append(value)
        return value

    trainer = Trainer(logger=False, default_root_dir=tmp_path, **QUIET)
    trainer.strategy.broadcast = broadcast
    with pytest.raises(MisconfigurationException, match="pass a folder in which files can be"):
        FlopsMonitor(dirpath=file / "below").setup(trainer, Classifier(), "fit")
    ((_, problem),) = sent
    assert "Not a directory" in problem


class Unreachable(DummyLogger):
    @property
    def log_dir(self) -> str:
        raise OSError("the disk of the logger is gone")


def test_an_error_of_the_logger_is_raised_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    """The main process broadcasts the error, so that no other rank waits for it."""
    trainer = Trainer(logger=Unreachable(), default_root_dir=tmp_path, **QUIET)
    sent: list[Any] = []

    def broadcast(value: Any) -> Any:
        sent.append(value)
        return value

    trainer.strategy.broadcast = broadcast
    with pytest.raises(MisconfigurationException, match="OSError: the disk of the logger is gone"):
        FlopsMonitor(on_error="raise").setup(trainer, Classifier(), "fit")
    assert [(None, "OSError: the disk of the logger is gone")] == sent
    tolerant = FlopsMonitor()
    with pytest.warns(UserWarning, match="the disk of the logger is gone"):
        tolerant.setup(trainer, Classifier(), "fit")
    tolerant.teardown(trainer, Classifier(), "fit")
    assert (None, "") == sent[-1]
