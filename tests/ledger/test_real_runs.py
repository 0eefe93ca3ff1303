"""The ledgers of real trainings: they add up, agree with a clock outside, and survive a kill."""

import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

import lflops
from lflops.integrations.huggingface import FlopsCallback
from lflops.ledger import writer
from lflops.ledger.account import CATEGORIES, CAUSES, Ledger
from lflops.ledger.ledger_file import load_run
from lflops.monitoring.session import Session
from lflops.monitoring.window.step_timer import FastPathSteps
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, QUIET, Validated, loader, watching
from tests.support.warm_python import WarmPython

pytestmark = LIGHTNINGS_WARNINGS

CLOCKS_DIFFER = 0.05
"""Seconds between the system's clock and ours, at the most.

The process's begin is known to a hundredth.
"""


def adds_up(ledger: Ledger | None) -> Ledger:
    """The ledger, whose categories are known, are not negative, and add up to its total, as its spans do."""
    assert ledger is not None
    assert ledger.total == pytest.approx(sum(ledger.seconds.values()), abs=1e-6)
    assert ledger.total == pytest.approx(sum(each.seconds for each in ledger.spans), abs=1e-6)
    groups = {name.partition("/")[0] for name in ledger.seconds}
    assert groups <= CATEGORIES.keys()
    assert {
        name.partition("/")[2] for name in ledger.seconds if name.startswith("slow/")
    } <= CAUSES.keys()
    assert all(value >= 0 for value in ledger.seconds.values())
    return ledger


def loop(monitor: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batches: int) -> None:
    """An epoch of a plain loop."""
    for batch in monitor.data([torch.ones(4, 8)] * batches):
        with monitor.step(batch):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_plain_loop_has_every_second_until_now() -> None:
    """While it runs its account ends between two looks at the system's clock."""
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.monitor(
        model, optimizer, trace=False, hardware=None, log=lambda _: None
    ) as monitor:
        loop(monitor, model, optimizer, 12)
        with monitor.stage("validate"), torch.no_grad():
            model(torch.ones(4, 8))
        with monitor.within("checkpoint_save"):
            model.state_dict()
        loop(monitor, model, optimizer, 12)
        before = time.time()
        running = adds_up(monitor.ledger)
        after = time.time()
        (start,) = running.starts
        assert before - CLOCKS_DIFFER <= start.begin + running.total <= after + CLOCKS_DIFFER
        assert "running" == start.ended
    ledger = adds_up(monitor.ledger)
    assert (24, 0, 24, "finished") == (
        ledger.steps,
        ledger.starts[0].first_step,
        ledger.starts[0].last_step,
        ledger.starts[0].ended,
    )
    phases = {f"training/{name}" for name in ("data", "forward", "backward", "optimizer", "other")}
    assert (
        phases | {"warm_up", "validation", "checkpoint_save", "between_epochs", "lflops"}
        <= ledger.seconds.keys()
    )


def test_nothing_is_left_when_the_run_is_over() -> None:
    """No thread, and no callback of the garbage collector's."""
    before = list(gc.callbacks)
    model = nn.Linear(8, 2)
    with lflops.monitor(model, trace=False, hardware=None, log=lambda _: None) as monitor:
        assert len(gc.callbacks) == len(before) + 1
        with monitor.step():
            model(torch.ones(4, 8))
        assert any(each.name == "lflops: the ledger" for each in threading.enumerate())
    assert before == gc.callbacks
    assert not any(each.name == "lflops: the ledger" for each in threading.enumerate())


def test_a_ledger_can_be_left_out(tmp_path: Path) -> None:
    """Then there is no file, and nothing to ask for."""
    with lflops.monitor(
        nn.Linear(8, 2), ledger=False, dirpath=tmp_path, count=False, log=lambda _: None
    ) as monitor:
        with monitor.step():
            pass
        assert monitor.ledger is None
    assert [] == list(tmp_path.rglob("*.ledger.jsonl"))


def trainer(
    folder: Path, monitor: lflops.FlopsMonitor, **options: Any
) -> lightning.pytorch.Trainer:
    """One that logs, validates and saves."""
    quiet = {**QUIET, "enable_checkpointing": True}
    checkpoint = ModelCheckpoint(folder, save_last=True, save_top_k=1)
    logger = TensorBoardLogger(folder, version=0)
    return lightning.pytorch.Trainer(
        **quiet, callbacks=[monitor, checkpoint], logger=logger, log_every_n_steps=5, **options
    )


@pytest.mark.parametrize(("every", "is_validated"), [(4, True), (1000, False)])
def test_a_sanity_check_is_no_validation(every: int, is_validated: bool, tmp_path: Path) -> None:
    """It is a part of the start.

    Two batches before the first of ten steps, and none after them, or all of them after each
    fourth.
    """
    monitor = watching(ledger=True)
    how: dict[str, Any] = {
        "max_epochs": 1,
        "num_sanity_val_steps": 2,
        "val_check_interval": every,
        "check_val_every_n_epoch": None,
    }
    trainer(tmp_path, monitor, **how).fit(Validated(), loader(10))
    assert is_validated == ("validation" in adds_up(monitor.ledger).seconds)


class Failing(Validated):
    """Raises in its second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and batch_idx == 7:
            raise RuntimeError("planted")
        return super().training_step(batch, batch_idx)


def test_a_trainer_that_fails_and_goes_on_is_one_run(tmp_path: Path) -> None:
    """An epoch of ten steps, seven steps of the next, and from the checkpoint these again, and three more."""
    first, second = watching(ledger=True), watching(ledger=True)
    with pytest.raises(RuntimeError, match="planted"):
        trainer(tmp_path, first, max_epochs=2).fit(Failing(), loader(10))
    trainer(tmp_path, second, max_epochs=2).fit(
        Validated(), loader(10), ckpt_path=tmp_path / "last.ckpt"
    )
    for monitor in (first, second):
        assert {"validation", "checkpoint_save", "logging", "lflops", "warm_up"} <= adds_up(
            monitor.ledger
        ).seconds.keys()
    ledger = adds_up(load_run(tmp_path))
    assert [(0, 17, "RuntimeError"), (10, 20, "finished")] == [
        (each.first_step, each.last_step, each.ended) for each in ledger.starts
    ]
    assert ledger.seconds["repeated"] > 0
    assert {"down", "checkpoint_load"} <= ledger.seconds.keys()
    assert 20 == ledger.steps


def test_transformers_has_one_too(tmp_path: Path) -> None:
    """With an evaluation and a checkpoint in every fourth of eight steps."""
    config = transformers.BertConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=16,
    )
    arguments = transformers.TrainingArguments(
        tmp_path,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [
        {"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.ones(4, dtype=torch.long)}
    ] * 16
    callback = FlopsCallback(trace=False, hardware=None, html=False, log=lambda _: None)
    model = transformers.BertForMaskedLM(config)
    transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback]
    ).train()
    ledger = adds_up(callback.ledger)
    assert (8, "finished") == (ledger.steps, ledger.starts[0].ended)
    assert {
        "validation",
        "checkpoint_save",
        "logging",
        "training/forward",
        "training/data",
    } <= ledger.seconds.keys()
    assert ledger == load_run(tmp_path)


TRAINING = """
import os, signal, sys, torch, lflops
from lflops.ledger import writer
writer.LOOK = writer.WRITE = 0.005
first, last, folder, deadly = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], len(sys.argv) > 4
model = torch.nn.Linear(8, 2)
with lflops.monitor(model, dirpath=folder, trace=False, count=False, hardware=None, log=lambda _: None) as monitor:
    monitor.resume_from(first)
    for step in range(first, last):
        with monitor.step(torch.ones(4, 8)):
            model(torch.ones(4, 8)).sum().backward()
        while deadly and not monitor.ledger.steps:
            pass
    if deadly:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_its_ledger(warm_python: WarmPython, tmp_path: Path) -> None:
    """Killed after forty steps, it goes on from the thirtieth: what is read adds up, over both."""
    assert -9 == warm_python.run(TRAINING, 0, 40, tmp_path, "deadly").status
    killed = adds_up(load_run(tmp_path))
    assert 0 < killed.steps <= 40
    ended = warm_python.run(TRAINING, 30, 60, tmp_path)
    assert (0, "") == (ended.status, ended.err)
    ledger = adds_up(load_run(tmp_path))
    assert [(0, "killed"), (30, "finished")] == [
        (each.first_step, each.ended) for each in ledger.starts
    ]
    assert ledger.seconds["after_run"] > 0  # what the process did until its end
    assert ledger.starts[0].seconds == pytest.approx(killed.total, abs=1e-6)


def test_work_lost_by_a_restart_is_unknown_if_the_loop_counts_from_0_again(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """A loop that loads its own checkpoint tells nobody its step: nothing counts as lost."""
    plain = TRAINING.replace("    monitor.resume_from(first)\n", "")
    assert -9 == warm_python.run(plain, 0, 40, tmp_path, "deadly").status
    assert 0 == warm_python.run(plain, 30, 60, tmp_path).status
    ledger = adds_up(load_run(tmp_path))
    assert ["killed", "finished"] == [each.ended for each in ledger.starts]
    assert "repeated" not in ledger.seconds


def test_a_file_is_lines_of_json(tmp_path: Path) -> None:
    """For other programs: nanoseconds by category add up to the last row's end."""
    with (
        lflops.monitor(
            nn.Linear(8, 2), dirpath=tmp_path, count=False, log=lambda _: None
        ) as monitor,
        monitor.step(),
    ):
        pass
    (path,) = tmp_path.rglob("*.ledger.jsonl")
    head, *rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert {"head", "row", "steps"} == {head["kind"], *(each["kind"] for each in rows)}
    rows = [each for each in rows if each["kind"] == "row"]
    assert rows[-1]["end"] == sum(sum(each["spent"].values()) for each in rows)


def test_a_monitor_that_has_failed_marks_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training goes on, and what no one reads any more does not fill the memory."""

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    model = nn.Linear(8, 2)
    with lflops.monitor(
        model, trace=False, count=False, hardware=None, log=lambda _: None
    ) as monitor:
        loop(monitor, model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
        monkeypatch.setattr(Session, "batch_ends", fail)
        monkeypatch.setattr(FastPathSteps, "note", fail)
        with pytest.warns(UserWarning, match="planted"):
            loop(monitor, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        log = monitor._phases.log
        loop(monitor, model, torch.optim.SGD(model.parameters(), lr=0.1), 5)
        assert [] == log.events
    assert 4 == adds_up(monitor.ledger).steps  # the last one is that in which it failed


UNCLOSED = """
import os, sys, torch, lflops
model = torch.nn.Linear(8, 2)
monitor = lflops.monitor(model, dirpath=sys.argv[1], trace=False, count=False, hardware=None, log=lambda _: None)
monitor.__enter__()
with monitor.step():
    model(torch.ones(4, 8))
if not os.fork():
    sys.exit()  # a child of the user's has no part in the ledger
os.wait()
"""


def test_a_program_that_ends_without_closing_its_run_has_a_ledger(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Until its exit; a process that it has forked writes nothing."""
    assert 0 == warm_python.run(UNCLOSED, tmp_path).status
    ledger = adds_up(load_run(tmp_path))
    assert ["exit"] == [each.ended for each in ledger.starts]
    assert 1 == sum(
        '"ended":"exit"' in line
        for path in tmp_path.rglob("*.ledger.jsonl")
        for line in path.read_text("utf-8").splitlines()
    )


def test_the_thread_ends_with_the_account(tmp_path: Path) -> None:
    """A process that takes long to exit has no second last row."""
    ended = writer.LedgerWriter()
    ended.start(tmp_path)
    ended.end()
    ended._thread.join(60)
    assert not ended._thread.is_alive()
    assert 1 == sum(
        '"ended":"exit"' in line
        for path in tmp_path.iterdir()
        for line in path.read_text("utf-8").splitlines()
    )


def test_a_file_system_that_hangs_holds_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that never gives the lock back stands for it.

    The run ends after the patience, and says why.
    """
    monkeypatch.setattr(writer, "PATIENCE", 0.01)
    hanging = writer.LedgerWriter()
    hanging.start(None)
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with hanging._lock:
            is_held.set()
            may_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    hanging.stop("finished")
    may_go.set()
    thread.join()
    assert isinstance(hanging.error, TimeoutError)


class Logger:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: dict[int, dict[str, float]] = {}

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.given[step] = values


def test_loggers_get_curves_of_it(tmp_path: Path) -> None:
    """From its first row on, with each point of the training's curves.

    Here all but nothing of the time is start-up.
    """
    model, logger = nn.Linear(8, 2), Logger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.monitor(
        model,
        optimizer,
        logger=logger,
        log_every=10,
        trace=False,
        html=False,
        hardware=None,
        log=lambda _: None,
    ) as monitor:
        loop(monitor, model, optimizer, 20)
        monitor.ledger  # noqa: B018 - the account has a row now
        loop(monitor, model, optimizer, 20)
    last = logger.given[39]
    assert 0 < last["lflops/train/lost_share"] < 1
    # a curve of zeros is not logged
    slow = last.get("lflops/train/slow_steps", 0)
    assert slow == int(slow) >= 0
