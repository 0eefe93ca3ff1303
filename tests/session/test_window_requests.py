"""Windows that are asked for while a run goes on."""

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import nn

import lflops
from lflops.cli.main import main
from lflops.ledger import keeper
from lflops.ledger.run import REQUEST
from lflops.schedule import Schedule
from lflops.session.run import WindowRequests
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, watching

pytestmark = LIGHTNINGS_WARNINGS
SHORT = Schedule(wait=2, warmup=1, active=2)


class Asking(lightning.pytorch.Callback):
    """Asks for a window at the begin of these batches."""

    def __init__(self, monitor: lflops.FlopsMonitor, *batches: int) -> None:
        self.monitor = monitor
        self.batches = batches

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Ask."""
        if batch_idx in self.batches:
            self.monitor.request_window()


def windows(monitor: lflops.FlopsMonitor) -> list[tuple[int | None, list[int]]]:
    """The number of each window, and its steps that were counted or timed by module."""
    return [(each.run.window, [step.index for step in each.steps if step.kind != "clean"]) for each in monitor.profiles]


@pytest.mark.parametrize("track", [True, False])
def test_a_window_opens_after_the_last_scheduled_one(track: bool) -> None:
    """Asked for in step 30, it counts step 31 and times the two after it; its counts are those of the scheduled one. So is a third."""
    monitor = watching(schedule=SHORT, track=track)
    fit(Classifier(), monitor, Asking(monitor, 30, 50), batches=80)
    assert [(0, [2, 3, 4]), (1, [31, 32, 33]), (2, [51, 52, 53])] == windows(monitor)
    assert 1 == len({tuple(each.by_operator().items()) for each in monitor.profiles})


def test_a_window_that_is_waited_for_comes_earlier() -> None:
    """The first of two, with 40 steps before each: it was asked for in step 10, and the other still comes 40 steps later."""
    monitor = watching(schedule=Schedule(wait=40, warmup=1, active=2, repeat=2))
    fit(Classifier(), monitor, Asking(monitor, 10), batches=100)
    assert [(0, [12, 13, 14]), (1, [56, 57])] == windows(monitor)


def test_a_window_that_is_open_is_waited_for() -> None:
    """Asked for within the scheduled one, another one follows when that is over, with the clean steps that it wants."""
    monitor = watching(schedule=SHORT)
    fit(Classifier(), monitor, Asking(monitor, 3), batches=60)
    first, second = windows(monitor)
    assert ((0, [2, 3, 4]), 1) == (first, second[0])
    assert 3 == len(second[1])


def test_weights_are_those_of_the_training_without_a_window() -> None:
    """To the bit."""
    weights = []
    for asked in ((), (30,)):
        torch.manual_seed(0)
        module, monitor = Classifier(), watching(schedule=SHORT)
        fit(module, monitor, Asking(monitor, *asked), batches=60)
        weights.append([each.detach().clone() for each in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_the_shell_asks_a_loop_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """It leaves a file, which the loop's thread takes; a run that is over is not asked."""
    monkeypatch.setattr(keeper, "LOOK", 0.01)
    model = nn.Linear(8, 2)
    with lflops.monitor(model, dirpath=tmp_path, trace=False, html=False, hardware=None, schedule=SHORT, log=lambda _: None) as monitor:
        for step in range(2_000_000):
            with monitor.step(torch.ones(4, 8)):
                model(torch.ones(4, 8)).sum().backward()
            if step == 20:
                monitor.ledger  # noqa: B018 - the file has its first row
                assert 0 == main(["window", str(tmp_path)])
            if len(monitor.profiles) == 2:
                break
    assert [0, 1] == [each.run.window for each in monitor.profiles]
    assert not (tmp_path / REQUEST).exists()
    assert 2 == main(["window", str(tmp_path)])
    assert b"the run there is not going on: finished" in capsysbinary.readouterr().err


class Store(dict[str, str]):
    """What ranks share."""

    def set(self, key: str, value: str) -> None:
        """As a store of torch."""
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        """As a store of torch."""
        return all(each in self for each in keys)


def test_ranks_meet_at_a_step_that_all_of_them_can(tmp_path: Path) -> None:
    """Rank 0 has done 100 steps of half a second: in 3 s it does six more, and two are for what is under way. The others hear of it."""
    store = Store()
    first, second = WindowRequests(0, store, tmp_path), WindowRequests(1, store, tmp_path)
    second.look(lambda: (99, 0.5))
    (tmp_path / REQUEST).touch()
    second.look(lambda: (100, 0.5))
    assert (None, True) == (second.due, (tmp_path / REQUEST).exists())
    first.look(lambda: (100, 0.5))
    second.look(lambda: (101, 0.5))
    assert (108, 108) == (first.due, second.due)
    first.ask()
    first.look(lambda: (200, 0.5))
    second.look(lambda: (200, 0.5))
    assert (208, 208) == (first.due, second.due)


def test_several_ranks_without_a_ledger_are_told_that_no_window_opens() -> None:
    """Nothing would look for the step that all can meet. One process alone needs nobody to look."""
    model = nn.Linear(8, 2)
    with lflops.monitor(model, ledger=False, trace=False, html=False, hardware=None, schedule=SHORT, log=lambda _: None) as monitor:
        monitor._run.store = Store()
        with pytest.warns(UserWarning, match="request_window: no window opens: with ledger=False nothing looks for the step"):
            monitor.request_window()
        monitor._run.store = None
        for step in range(30):
            with monitor.step(torch.ones(4, 8)):
                model(torch.ones(4, 8)).sum().backward()
            if step == 20:
                monitor.request_window()
    assert [0, 1] == [each.run.window for each in monitor.profiles]


def test_a_monitor_without_stages_opens_a_window_on_request(tmp_path: Path) -> None:
    """And none before: 8 x 4 x 2 MACs forward, as many for the weights' gradient."""
    model = nn.Linear(8, 2)
    with lflops.monitor(model, stages=(), dirpath=tmp_path, trace=False, html=False, hardware=None, log=lambda _: None) as monitor:
        for step in range(30):
            with monitor.step(torch.ones(4, 8)):
                model(torch.ones(4, 8)).sum().backward()
            if step == 10:
                assert [] == monitor.profiles
                monitor.request_window()
    (profile,) = monitor.profiles
    assert (64, 64) == (profile.total(phase="forward"), profile.total(phase="backward"))
    assert 30 == monitor.ledger.steps
