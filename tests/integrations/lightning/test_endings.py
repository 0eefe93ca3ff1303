"""Test that every end of a run closes its window once, saves its profile and leaves nothing behind.

A run may end by an error, an interrupt, a signal, early stopping, or an error of lflops itself.
Other tests check that these checks can fail.
"""

import contextlib
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

import lflops
from lflops.monitoring import session
from lflops.profile.notes import notes_with
from tests.support.lightning_runs import (
    LIGHTNINGS_WARNINGS,
    QUIET,
    Classifier,
    Validated,
    fit,
    loader,
    watching,
)
from tests.support.process_state import Facts, differences, global_hooks, modes, process, settle

pytestmark = LIGHTNINGS_WARNINGS

WAITING, COUNTED, ACTIVE, LATER = 2, 6, 8, 20
"""Batches of the default schedule: one in each part of the window, and one after it."""


class Ending(Validated):
    """Calls a function in `training_step` of one batch."""

    def __init__(self, batch: int, deed: Callable[[LightningModule], object]) -> None:
        super().__init__()
        self.at = batch
        self.deed = deed
        self.seen = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen += 1
        if self.seen == self.at + 1:
            self.deed(self)
        return loss


def test_an_error_that_the_program_handles_meanwhile_ends_no_run() -> None:
    """A run inside an `except` block is "finished", although an exception is being handled.

    If a run there fails itself, the ledger has its own error.
    """
    monitor = watching(stages=("validate",), ledger=True)
    failing = watching(stages=("validate",), ledger=True)
    try:
        raise ZeroDivisionError  # noqa: TRY301 - the program's own
    except ZeroDivisionError:
        trainer = Trainer(callbacks=[monitor], logger=False, **QUIET)
        trainer.validate(Validated(), loader(20), verbose=False)
        trainer = Trainer(callbacks=[failing], logger=False, **QUIET)
        raises_key_error = partial({}.__getitem__, 1)
        with pytest.raises(KeyError):
            trainer.validate(Validated(), loader(20, look=raises_key_error))
    assert monitor.ledger is not None
    assert "finished" == monitor.ledger.starts[-1].ended
    assert failing.ledger is not None
    assert "KeyError" == failing.ledger.starts[-1].ended
    assert [] == [*notes_with("ended_early", monitor.profiles[0].notes)]


class Around(Callback):
    """Compares the wrappers, hooks and modes before the fit with those that are left after it."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer
        self.before = self.look()

    def look(self) -> Facts:
        """Return the functions set on strategy and profiler, and torch's global hooks and modes."""
        facts: Facts = {}
        owners = {"strategy": self.trainer.strategy, "profiler": self.trainer.profiler}
        for name, owner in owners.items():
            for key, value in vars(owner).items():
                if callable(value):
                    facts[f"{name}.{key}"] = value
        facts.update(global_hooks())
        facts.update(modes())
        # `fit` itself sets the number of threads.
        facts.pop("threads of torch", None)
        return facts

    def left(self) -> list[str]:
        """Return the names of all differences from the state before the fit."""
        return differences(self.before, self.look())


def raises(error: BaseException) -> Callable[[LightningModule], None]:
    """Return a function that raises the error."""

    def deed(_module: LightningModule) -> None:
        raise error

    return deed


def stop(module: LightningModule) -> None:
    """Stop the fit as early stopping does."""
    module.trainer.should_stop = True


def sigterm(module: LightningModule) -> None:
    """Stop the fit as a SIGTERM of a cluster's scheduler does."""
    module.trainer._signal_connector.received_sigterm = True


ERRORS: dict[str, tuple[BaseException, type[BaseException]]] = {
    "error": (ValueError("planted"), ValueError),
    "Ctrl-C": (KeyboardInterrupt(), SystemExit),
}
"""Errors that are raised in a batch, and the errors that Lightning raises for them."""


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Restore the handler of SIGINT: after a Ctrl-C, Lightning ignores all later ones."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_failed_search_for_a_learning_rate_leaves_nothing(tmp_path: Path) -> None:
    """If Lightning's learning rate finder fails, no hook and no thread of lflops is left.

    The finder replaces all other callbacks during its search, so none of them receives the error.
    """
    monitor = watching(dirpath=tmp_path)
    around = Around()
    module = Ending(1, raises(ValueError("planted")))
    module.lr = 0.1
    with pytest.raises(ValueError, match="planted"):
        fit(module, LearningRateFinder(num_training_steps=5), around, monitor)
    assert around.left() == []
    assert [] == [each.name for each in threading.enumerate() if each.name.startswith("lflops")]


@pytest.mark.parametrize(("error", "comes_out"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("batch", [WAITING, COUNTED, ACTIVE])
def test_an_exception_closes_the_window_with_what_there_is(
    batch: int, error: BaseException, comes_out: type[BaseException], tmp_path: Path
) -> None:
    """The profile is saved with the steps before the exception, is partial, and has a note.

    The exception is raised in a waiting, a counting or an active step.
    """
    monitor = watching(dirpath=tmp_path)
    around = Around()
    with signals_kept(), pytest.raises(comes_out):
        fit(Ending(batch, raises(error)), around, monitor)
    assert [] == around.left()
    (profile,) = monitor.profiles
    assert profile.run.partial
    assert [("ended_early", type(error).__name__)] == [
        (note.code, note.subject) for note in profile.notes if note.code == "ended_early"
    ]
    assert list(range(batch)) == [step.index for step in profile.steps]
    (path,) = tmp_path.iterdir()
    assert f"train-0-{batch - 1}.profile.json" == path.name
    assert profile == lflops.load(path)


def test_an_exception_in_the_counted_batch_leaves_what_was_counted() -> None:
    """The profile has the forward of that batch, which ran before the exception."""
    monitor = watching()
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(COUNTED, raises(ValueError("planted"))), monitor)
    root = monitor.profiles[0].modules[""]
    assert root.forward.macs > 0
    assert 0 == root.backward.macs


def test_an_exception_after_the_window_changes_nothing() -> None:
    """The window was closed before the exception, so its profile is complete."""
    monitor = watching()
    around = Around()
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(LATER, raises(ValueError("planted"))), around, monitor)
    assert [] == around.left()
    assert [False] == [profile.run.partial for profile in monitor.profiles]


def test_sigterm_closes_the_window() -> None:
    """After a SIGTERM, the profile is partial and has the steps up to the running batch.

    Lightning finishes this batch and then raises.
    """
    monitor = watching()
    around = Around()
    with pytest.raises(SIGTERMException):
        fit(Ending(ACTIVE, sigterm), around, monitor)
    assert [] == around.left()
    assert [True] == [profile.run.partial for profile in monitor.profiles]
    assert list(range(ACTIVE + 1)) == [step.index for step in monitor.profiles[0].steps]


def test_a_run_that_is_stopped_in_mid_window_is_partial() -> None:
    """If a run is stopped inside a window, its profile is partial and has the steps so far."""
    monitor = watching()
    around = Around()
    fit(Ending(ACTIVE, stop), around, monitor)
    assert [] == around.left()
    (profile,) = monitor.profiles
    assert profile.run.partial
    assert ACTIVE + 1 == len(profile.steps)


class Stopping(Validated):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().validation_step(batch, batch_idx)
        self.log("val_loss", loss)
        return loss


def test_early_stopping_closes_the_window() -> None:
    """If early stopping ends the run after 9 batches, the profile is partial and has 9 steps."""
    monitor = watching()
    around = Around()
    stopping = EarlyStopping("val_loss", stopping_threshold=1e9)
    fit(Stopping(), around, monitor, stopping, val_check_interval=ACTIVE + 1)
    assert [] == around.left()
    (profile,) = monitor.profiles
    assert profile.run.partial
    assert ACTIVE + 1 == len(profile.steps)


def test_a_run_that_ends_where_the_window_does_is_whole() -> None:
    """If a run has exactly the 10 batches of the schedule, its profile is complete."""
    monitor = watching()
    fit(Classifier(), monitor, max_steps=10)
    (profile,) = monitor.profiles
    assert not profile.run.partial
    assert 10 == len(profile.steps)


def skip(batch: int) -> type[Classifier]:
    """Return a module that ends the first epoch at a batch, as `on_train_batch_start` allows."""

    class Skipping(Classifier):
        def on_train_batch_start(self, _batch: Any, batch_idx: int) -> int | None:
            if batch_idx == batch and self.current_epoch == 0:
                return -1
            return None

    return Skipping


def exhaust(batch: int) -> type[Classifier]:
    """Return a module that ends the first epoch by `StopIteration` in `training_step`."""

    class Exhausted(Classifier):
        def training_step(self, batch_: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            if batch_idx == batch and self.current_epoch == 0:
                raise StopIteration
            return super().training_step(batch_, batch_idx)

    return Exhausted


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("leave", [skip, exhaust])
@pytest.mark.parametrize("batch", [WAITING, COUNTED, ACTIVE])
def test_an_epoch_that_is_left_early_does_not_end_the_window(
    leave: Callable[[int], type[Classifier]], batch: int, accumulation: int
) -> None:
    """If an epoch ends early, the window continues in the next epoch and has one counting step.

    The step that did not end is not in the profile, and all counts are those of a usual run.
    """
    monitor = watching()
    around = Around()
    fit(leave(batch)(), around, monitor, max_epochs=2, accumulate_grad_batches=accumulation)
    assert [] == around.left()
    (profile,) = monitor.profiles
    assert 1 == sum(step.kind == "counting" for step in profile.steps)
    once = watching()
    fit(Classifier(), once, accumulate_grad_batches=accumulation)
    assert once.profiles[0].total() == profile.total()
    assert not profile.run.partial


def test_a_process_is_left_as_it_was() -> None:
    """Files, threads, handlers and warnings are the same after a fit with or without lflops."""
    # The first fits load modules, which stay loaded.
    fit(Classifier(), watching())
    fit(Classifier())
    settle()
    before = process()
    fit(Classifier())
    plain = differences(before, process())
    settle()
    before = process()
    fit(Classifier(), watching())
    assert plain == differences(before, process())


class Careless(Callback):
    """Leaves a wrapper on the strategy and a global hook."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        method = trainer.strategy.training_step
        trainer.strategy.training_step = partial(method)
        self.handle = register_module_forward_hook(lambda *_: None)


def test_a_wrap_that_is_left_is_found() -> None:
    """`Around` reports the wrapper and the hook of `Careless`, so the tests above can fail."""
    careless = Careless()
    around = Around()
    fit(Classifier(), around, careless)
    assert [
        "hooks on every module: _global_forward_hooks",
        "strategy.training_step",
    ] == around.left()
    careless.handle.remove()


def test_somebody_elses_wrap_above_ours_stays_theirs() -> None:
    """A wrapper that a user sets around a wrapper of lflops stays and keeps working."""
    careless = Careless()
    around = Around()
    monitor = watching()
    fit(Classifier(), around, monitor, careless)
    assert [
        "hooks on every module: _global_forward_hooks",
        "strategy.training_step",
    ] == around.left()
    careless.handle.remove()
    assert [False] == [profile.run.partial for profile in monitor.profiles]


PLANTED = "FlopsMonitor has failed .* ZeroDivisionError: planted"
"""The warning of the monitor after an error that a test has caused."""

BREAKS = {
    "begin": "batch_begins",
    "end": "batch_ends",
    "mark": "mark",
    "close": "close",
}


@pytest.mark.parametrize("method", BREAKS.values(), ids=BREAKS)
def test_an_error_of_our_own_is_warned_of_once_and_the_training_goes_on(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a method of `Session` fails, lflops warns once, training continues, no hooks are left."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(f"lflops.monitoring.session.Session.{method}", broken)
    monitor = watching(on_error="warn")
    around = Around()
    with pytest.warns(UserWarning, match=PLANTED) as warned:
        trainer = fit(Validated(), around, monitor, max_steps=9, val_check_interval=3)
    assert 1 == sum("FlopsMonitor" in str(each.message) for each in warned)
    assert 9 == trainer.global_step
    assert [] == around.left()


def test_an_error_in_the_middle_of_counting_leaves_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user's `units` fails in the counting step, no dispatch mode and no hooks are left."""
    seen = iter(range(100))

    def units(batch: Any) -> dict[str, int]:
        # divides by zero in the counting step
        return {"samples": 1 // (COUNTED - next(seen))}

    monitor = watching(on_error="warn", units=units)
    around = Around()
    with pytest.warns(UserWarning, match="FlopsMonitor has failed"):
        trainer = fit(Classifier(), around, monitor)
    assert 30 == trainer.global_step
    assert [] == around.left()


def test_where_warnings_are_errors_the_training_still_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If warnings are errors, as in all tests, an error of lflops is logged instead."""
    monkeypatch.setattr("lflops.monitoring.session.Session.batch_ends", lambda *_: 1 / 0)
    trainer = fit(Classifier(), watching(on_error="warn"))
    assert 30 == trainer.global_step
    assert "FlopsMonitor has failed" in caplog.text


def test_an_error_at_the_beginning_leaves_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a session fails after its wrappers are installed, they are removed; training continues."""
    resume = session.Session.resume

    def broken(self: session.Session) -> None:
        resume(self)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(session.Session, "resume", broken)
    around = Around()
    with pytest.warns(UserWarning, match=PLANTED):
        trainer = fit(Classifier(), around, watching(on_error="warn"))
    assert 30 == trainer.global_step
    assert [] == around.left()


def test_an_error_as_the_counting_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If counting fails after its dispatch mode and hooks are installed, they are removed."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("lflops.monitoring.window.counting_step.OutsideModules", broken)
    around = Around()
    with pytest.warns(UserWarning, match=PLANTED):
        trainer = fit(Classifier(), around, watching(on_error="warn"))
    assert 30 == trainer.global_step
    assert [] == around.left()


def test_wraps_that_cannot_all_be_put_on_are_taken_off() -> None:
    """If the second wrapper cannot be installed, the first is removed, and training continues."""

    class Refusing(SimpleProfiler):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "stop":
                raise AttributeError("planted")
            super().__setattr__(name, value)

    around = Around()
    with pytest.warns(UserWarning, match="FlopsMonitor has failed .* AttributeError: planted"):
        trainer = fit(Classifier(), around, watching(on_error="warn"), profiler=Refusing())
    assert 30 == trainer.global_step
    assert [] == around.left()


def test_an_error_of_our_own_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `on_error="raise"`, an error of lflops reaches the caller, and no hooks are left."""
    monkeypatch.setattr("lflops.monitoring.session.Session.batch_ends", lambda *_: 1 / 0)
    around = Around()
    with pytest.raises(ZeroDivisionError):
        fit(Classifier(), around, watching())
    assert [] == around.left()


def test_the_data_of_a_fit_is_let_go() -> None:
    """After a fit, the monitor keeps neither the model nor the Trainer alive."""
    monitor = watching()
    module = Classifier()
    trainer = fit(module, monitor, data=loader(30))
    of_module = weakref.ref(module)
    of_trainer = weakref.ref(trainer)
    # Lightning sets these two attributes on every callback.
    del monitor.log, monitor.log_dict
    del module, trainer
    gc.collect()
    assert of_module() is None
    assert of_trainer() is None
    assert 1 == len(monitor.profiles)
