"""However a run ends, its window is closed once, what there is is written, and no trace is left.

Every check has a twin that fails it.
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
    """Does something in training_step, once."""

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
    """A validation after a training that failed, within the `except`.

    And one that fails, within the same.
    """
    monitor, failing = (watching(stages=("validate",), ledger=True) for _ in range(2))
    try:
        raise ZeroDivisionError  # noqa: TRY301 - the program's own
    except ZeroDivisionError:
        Trainer(callbacks=[monitor], logger=False, **QUIET).validate(
            Validated(), loader(20), verbose=False
        )
        with pytest.raises(KeyError):
            Trainer(callbacks=[failing], logger=False, **QUIET).validate(
                Validated(), loader(20, look=partial({}.__getitem__, 1))
            )
    assert ["finished", "KeyError"] == [
        each.ledger.starts[-1].ended for each in (monitor, failing) if each.ledger is not None
    ]
    assert [] == [*notes_with("ended_early", monitor.profiles[0].notes)]


class Around(Callback):
    """Takes down what is on the strategy and the profiler before the training starts, and when all is over."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer
        self.before = self.look()

    def look(self) -> Facts:
        """Their own attributes that are functions, and torch's modes and hooks."""
        owners = {"strategy": self.trainer.strategy, "profiler": self.trainer.profiler}
        wraps = {
            f"{name}.{key}": value
            for name, owner in owners.items()
            for key, value in vars(owner).items()
            if callable(value)
        }
        return {
            **wraps,
            **global_hooks(),
            **{key: value for key, value in modes().items() if key != "threads of torch"},
        }  # those `fit` sets

    def left(self) -> list[str]:
        """What is there that was not."""
        return differences(self.before, self.look())


def raises(error: BaseException) -> Callable[[LightningModule], None]:
    """A deed that raises it."""

    def deed(_module: LightningModule) -> None:
        raise error

    return deed


def stop(module: LightningModule) -> None:
    """What early stopping does."""
    module.trainer.should_stop = True


def sigterm(module: LightningModule) -> None:
    """What a cluster's scheduler does."""
    module.trainer._signal_connector.received_sigterm = True


ERRORS: dict[str, tuple[BaseException, type[BaseException]]] = {
    "error": (ValueError("planted"), ValueError),
    "Ctrl-C": (KeyboardInterrupt(), SystemExit),
}


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """After a Ctrl-C Lightning ignores any further one for good."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_failed_search_for_a_learning_rate_leaves_nothing(tmp_path: Path) -> None:
    """Lightning's finder has put a callback of its own in the place of all others, so none of them hears of the error."""
    monitor, around, module = (
        watching(dirpath=tmp_path),
        Around(),
        Ending(1, raises(ValueError("planted"))),
    )
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
    """It is saved, says that it is partial and why, and has the steps up to there."""
    monitor, around = watching(dirpath=tmp_path), Around()
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
    """The forward of it."""
    monitor = watching()
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(COUNTED, raises(ValueError("planted"))), monitor)
    root = monitor.profiles[0].modules[""]
    assert root.forward.macs > 0
    assert 0 == root.backward.macs


def test_an_exception_after_the_window_changes_nothing() -> None:
    """It was told of long before."""
    monitor, around = watching(), Around()
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(LATER, raises(ValueError("planted"))), around, monitor)
    assert [] == around.left()
    assert [False] == [profile.run.partial for profile in monitor.profiles]


def test_sigterm_closes_the_window() -> None:
    """Lightning lets the batch finish, and raises."""
    monitor, around = watching(), Around()
    with pytest.raises(SIGTERMException):
        fit(Ending(ACTIVE, sigterm), around, monitor)
    assert [] == around.left()
    assert [True] == [profile.run.partial for profile in monitor.profiles]
    assert list(range(ACTIVE + 1)) == [step.index for step in monitor.profiles[0].steps]


def test_a_run_that_is_stopped_in_mid_window_is_partial() -> None:
    """Its steps are there, and it says that clean ones are few."""
    monitor, around = watching(), Around()
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
    """Validation after nine batches ends the run."""
    monitor, around = watching(), Around()
    fit(
        Stopping(),
        around,
        monitor,
        EarlyStopping("val_loss", stopping_threshold=1e9),
        val_check_interval=ACTIVE + 1,
    )
    assert [] == around.left()
    assert [(True, ACTIVE + 1)] == [
        (profile.run.partial, len(profile.steps)) for profile in monitor.profiles
    ]


def test_a_run_that_ends_where_the_window_does_is_whole() -> None:
    """Ten batches are what the schedule takes."""
    monitor = watching()
    fit(Classifier(), monitor, max_steps=10)
    assert [(False, 10)] == [
        (profile.run.partial, len(profile.steps)) for profile in monitor.profiles
    ]


def skip(batch: int) -> type[Classifier]:
    """A module that leaves the first epoch at that batch, as Lightning lets it."""

    class Skipping(Classifier):
        def on_train_batch_start(self, _batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == batch and self.current_epoch == 0 else None

    return Skipping


def exhaust(batch: int) -> type[Classifier]:
    """A module whose training_step says in the first epoch that there is no more."""

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
    """The step that was left is in no profile; the next epoch's are, and one of them is counted."""
    monitor, around = watching(), Around()
    fit(leave(batch)(), around, monitor, max_epochs=2, accumulate_grad_batches=accumulation)
    assert [] == around.left()
    (profile,) = monitor.profiles
    assert 1 == sum(step.kind == "counting" for step in profile.steps)
    once = watching()
    fit(Classifier(), once, accumulate_grad_batches=accumulation)
    assert once.profiles[0].total() == profile.total()
    assert not profile.run.partial


def test_a_process_is_left_as_it_was() -> None:
    """Files, threads, handlers, warnings.

    A watched training changes nothing of these that a plain one does not.
    """
    fit(Classifier(), watching())  # what is loaded once is loaded
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
    """Leaves its wrap on, and a hook."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        method = trainer.strategy.training_step
        trainer.strategy.training_step = partial(method)
        self.handle = register_module_forward_hook(lambda *_: None)


def test_a_wrap_that_is_left_is_found() -> None:
    """The checks above can fail, and say what it is."""
    careless, around = Careless(), Around()
    fit(Classifier(), around, careless)
    assert [
        "hooks on every module: _global_forward_hooks",
        "strategy.training_step",
    ] == around.left()
    careless.handle.remove()


def test_somebody_elses_wrap_above_ours_stays_theirs() -> None:
    """What was put on ours later is not taken off with it, and goes on working."""
    careless, around, monitor = Careless(), Around(), watching()
    fit(Classifier(), around, monitor, careless)
    assert [
        "hooks on every module: _global_forward_hooks",
        "strategy.training_step",
    ] == around.left()
    careless.handle.remove()
    assert [False] == [profile.run.partial for profile in monitor.profiles]


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
    """Nothing of the monitor is left on."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(f"lflops.monitoring.session.Session.{method}", broken)
    monitor, around = watching(on_error="warn"), Around()
    with pytest.warns(
        UserWarning, match="FlopsMonitor has failed .* ZeroDivisionError: planted"
    ) as warned:
        trainer = fit(Validated(), around, monitor, max_steps=9, val_check_interval=3)
    assert 1 == sum("FlopsMonitor" in str(each.message) for each in warned)
    assert (9, []) == (trainer.global_step, around.left())


def test_an_error_in_the_middle_of_counting_leaves_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's function that tells a batch's samples fails in the counted batch."""
    seen = iter(range(100))

    def units(batch: Any) -> dict[str, int]:
        return {"samples": 1 // (COUNTED - next(seen))}

    monitor, around = watching(on_error="warn", units=units), Around()
    with pytest.warns(UserWarning, match="FlopsMonitor has failed"):
        trainer = fit(Classifier(), around, monitor)
    assert (30, []) == (trainer.global_step, around.left())


def test_where_warnings_are_errors_the_training_still_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be warned of is logged."""
    monkeypatch.setattr("lflops.monitoring.session.Session.batch_ends", lambda *_: 1 / 0)
    trainer = fit(Classifier(), watching(on_error="warn"))
    assert 30 == trainer.global_step
    assert "FlopsMonitor has failed" in caplog.text


def test_an_error_at_the_beginning_leaves_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wraps are on by then."""
    resume = session.Session.resume

    def broken(self: session.Session) -> None:
        resume(self)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(session.Session, "resume", broken)
    around = Around()
    with pytest.warns(UserWarning, match="FlopsMonitor has failed .* ZeroDivisionError: planted"):
        trainer = fit(Classifier(), around, watching(on_error="warn"))
    assert (30, []) == (trainer.global_step, around.left())


def test_an_error_as_the_counting_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dispatch mode and its hooks are on by then."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("lflops.monitoring.window.counting_step.OutsideModules", broken)
    around = Around()
    with pytest.warns(UserWarning, match="FlopsMonitor has failed .* ZeroDivisionError: planted"):
        trainer = fit(Classifier(), around, watching(on_error="warn"))
    assert (30, []) == (trainer.global_step, around.left())


def test_wraps_that_cannot_all_be_put_on_are_taken_off() -> None:
    """A profiler that refuses the second of ours."""

    class Refusing(SimpleProfiler):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "stop":
                raise AttributeError("planted")
            super().__setattr__(name, value)

    around = Around()
    with pytest.warns(UserWarning, match="FlopsMonitor has failed .* AttributeError: planted"):
        trainer = fit(Classifier(), around, watching(on_error="warn"), profiler=Refusing())
    assert (30, []) == (trainer.global_step, around.left())


def test_an_error_of_our_own_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """As these tests do; also then nothing is left on."""
    monkeypatch.setattr("lflops.monitoring.session.Session.batch_ends", lambda *_: 1 / 0)
    around = Around()
    with pytest.raises(ZeroDivisionError):
        fit(Classifier(), around, watching())
    assert [] == around.left()


def test_the_data_of_a_fit_is_let_go() -> None:
    """The monitor keeps no model, no trainer and no batch once the fit is over."""
    monitor, module = watching(), Classifier()
    trainer = fit(module, monitor, data=loader(30))
    models = [weakref.ref(module), weakref.ref(trainer)]
    del (
        module,
        trainer,
        monitor.log,
        monitor.log_dict,
    )  # the last two are Lightning's, which leaves them on every callback
    gc.collect()
    assert [None, None] == [each() for each in models]
    assert 1 == len(monitor.profiles)
