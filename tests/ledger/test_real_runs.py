"""Test the ledgers of real training runs.

They must add up, agree with the system clock, and be readable after the process was killed.
"""

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
"""Maximum difference in seconds between the ledger and the system clock.

The begin of the process is known to a hundredth of a second.
"""


def adds_up(ledger: Ledger | None) -> Ledger:
    """Check a ledger, and return it.

    All categories must be known, no time may be negative, and both the categories and the spans
    must add up to the total.
    """
    assert ledger is not None
    assert ledger.total == pytest.approx(sum(ledger.seconds.values()), abs=1e-6)
    assert ledger.total == pytest.approx(sum(each.seconds for each in ledger.spans), abs=1e-6)
    for name in ledger.seconds:
        group, _, cause = name.partition("/")
        assert group in CATEGORIES
        if name.startswith("slow/"):
            assert cause in CAUSES
    assert all(value >= 0 for value in ledger.seconds.values())
    return ledger


def loop(monitor: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batches: int) -> None:
    """Train one epoch in a custom loop."""
    for batch in monitor.data([torch.ones(4, 8)] * batches):
        with monitor.step(batch):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_plain_loop_has_every_second_until_now() -> None:
    """The ledger of a custom loop covers every second from the begin of the process.

    While the loop runs, the ledger is read between two readings of the system clock, so its end
    must lie between these two times.
    """
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
    start = ledger.starts[0]
    assert 24 == ledger.steps
    assert (0, 24, "finished") == (start.first_step, start.last_step, start.ended)
    phases = {f"training/{name}" for name in ("data", "forward", "backward", "optimizer", "other")}
    others = {"warm_up", "validation", "checkpoint_save", "between_epochs", "lflops"}
    assert phases | others <= ledger.seconds.keys()


def test_nothing_is_left_when_the_run_is_over() -> None:
    """After the run, neither the ledger's thread nor its callback in `gc.callbacks` remains."""
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
    """With `ledger=False`, there is no file, and `monitor.ledger` is `None`."""
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
    """Return a trainer that logs, validates and saves checkpoints in `folder`."""
    quiet = {**QUIET, "enable_checkpointing": True}
    checkpoint = ModelCheckpoint(folder, save_last=True, save_top_k=1)
    logger = TensorBoardLogger(folder, version=0)
    return lightning.pytorch.Trainer(
        **quiet, callbacks=[monitor, checkpoint], logger=logger, log_every_n_steps=5, **options
    )


@pytest.mark.parametrize(("every", "is_validated"), [(4, True), (1000, False)])
def test_a_sanity_check_is_no_validation(every: int, is_validated: bool, tmp_path: Path) -> None:
    """The sanity check before the first step belongs to the start-up, not to validation.

    It has two batches. In one of the cases, the ten steps are also validated after every fourth
    step.
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
    """A module that raises an exception in its second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and batch_idx == 7:
            raise RuntimeError("planted")
        return super().training_step(batch, batch_idx)


def test_a_trainer_that_fails_and_goes_on_is_one_run(tmp_path: Path) -> None:
    """A training run that fails and is resumed by another trainer is one run with two starts.

    The first trainer does an epoch of ten steps and seven steps of the next epoch. The second
    trainer resumes from the checkpoint after step 10, repeats the seven steps, and does three more.
    """
    first = watching(ledger=True)
    second = watching(ledger=True)
    with pytest.raises(RuntimeError, match="planted"):
        trainer(tmp_path, first, max_epochs=2).fit(Failing(), loader(10))
    trainer(tmp_path, second, max_epochs=2).fit(
        Validated(), loader(10), ckpt_path=tmp_path / "last.ckpt"
    )
    expected = {"validation", "checkpoint_save", "logging", "lflops", "warm_up"}
    for monitor in (first, second):
        assert expected <= adds_up(monitor.ledger).seconds.keys()
    ledger = adds_up(load_run(tmp_path))
    assert [(0, 17, "RuntimeError"), (10, 20, "finished")] == [
        (each.first_step, each.last_step, each.ended) for each in ledger.starts
    ]
    assert ledger.seconds["repeated"] > 0
    assert {"down", "checkpoint_load"} <= ledger.seconds.keys()
    assert 20 == ledger.steps


def test_transformers_has_one_too(tmp_path: Path) -> None:
    """A run of transformers' `Trainer` has the same ledger in memory and in its file.

    The run has eight steps. It evaluates and saves a checkpoint after every fourth step.
    """
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
    """The ledger of a process that was killed can be read, and continues when the run is resumed.

    The first process is killed after step 40. The second resumes from step 30 and ends normally.
    """
    assert -9 == warm_python.run(TRAINING, 0, 40, tmp_path, "deadly").status
    killed = adds_up(load_run(tmp_path))
    assert 0 < killed.steps <= 40
    ended = warm_python.run(TRAINING, 30, 60, tmp_path)
    assert (0, "") == (ended.status, ended.err)
    ledger = adds_up(load_run(tmp_path))
    assert [(0, "killed"), (30, "finished")] == [
        (each.first_step, each.ended) for each in ledger.starts
    ]
    # The time of the process after the run has ended.
    assert ledger.seconds["after_run"] > 0
    assert ledger.starts[0].seconds == pytest.approx(killed.total, abs=1e-6)


def test_work_lost_by_a_restart_is_unknown_if_the_loop_counts_from_0_again(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """If a custom loop does not report the step from which it resumes, no work counts as lost.

    The scripts are the same as above, but without the call of `resume_from`.
    """
    plain = TRAINING.replace("    monitor.resume_from(first)\n", "")
    assert -9 == warm_python.run(plain, 0, 40, tmp_path, "deadly").status
    assert 0 == warm_python.run(plain, 30, 60, tmp_path).status
    ledger = adds_up(load_run(tmp_path))
    assert ["killed", "finished"] == [each.ended for each in ledger.starts]
    assert "repeated" not in ledger.seconds


def test_a_file_is_lines_of_json(tmp_path: Path) -> None:
    """Other programs can read the file: each line is JSON.

    The nanoseconds by category in all rows add up to the end of the last row.
    """
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
    """After an error of lflops, the training run continues and logs no events.

    Otherwise events that no thread reads would fill the memory.
    """

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
    # Step 4 is the step in which the monitor failed.
    assert 4 == adds_up(monitor.ledger).steps


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
    """If a program never closes its monitor, the ledger ends when the process exits.

    A forked child of the program writes no ledger, so only one line has this end.
    """
    assert 0 == warm_python.run(UNCLOSED, tmp_path, destroys_objects=True).status
    ledger = adds_up(load_run(tmp_path))
    assert ["exit"] == [each.ended for each in ledger.starts]
    assert 1 == count_of_exits(tmp_path)


def count_of_exits(folder: Path) -> int:
    """Return how many lines of all ledger files say that the run ended with the process."""
    count = 0
    for path in folder.rglob("*.ledger.jsonl"):
        count += sum('"ended":"exit"' in line for line in path.read_text("utf-8").splitlines())
    return count


def test_the_thread_ends_with_the_account(tmp_path: Path) -> None:
    """The ledger's thread ends with the account, and writes no second last row.

    It could write one if the process takes long to exit.
    """
    ended = writer.LedgerWriter()
    ended.start(tmp_path)
    ended.end()
    ended._thread.join(60)
    assert not ended._thread.is_alive()
    assert 1 == count_of_exits(tmp_path)


def test_a_file_system_that_hangs_holds_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing the file hangs, the run ends after `PATIENCE` seconds and records the reason.

    In this test, a thread that holds the lock takes the place of the hanging file system.
    """
    monkeypatch.setattr(writer, "PATIENCE", 0.01)
    hanging = writer.LedgerWriter()
    hanging.start(None)
    is_held = threading.Event()
    may_go = threading.Event()

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
    """A logger that keeps the values of each step in `given`."""

    def __init__(self) -> None:
        self.given: dict[int, dict[str, float]] = {}

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.given[step] = values


def test_loggers_get_curves_of_it(tmp_path: Path) -> None:
    """Loggers receive the share of lost time and the number of slow steps.

    After the first row of the ledger, each point of the training curves has these values. In this
    test, almost all of the time is start-up.
    """
    model = nn.Linear(8, 2)
    logger = Logger()
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
        # Reading the ledger writes a row.
        monitor.ledger  # noqa: B018
        loop(monitor, model, optimizer, 20)
    last = logger.given[39]
    assert 0 < last["lflops/train/lost_share"] < 1
    # A curve that has only zeros is not logged.
    slow = last.get("lflops/train/slow_steps", 0)
    assert slow == int(slow) >= 0
