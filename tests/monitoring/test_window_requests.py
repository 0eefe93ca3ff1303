"""Test windows that are requested during a run: from Python, from the shell, and with ranks."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import nn

import lflops
from lflops.cli.main import main
from lflops.ledger import writer
from lflops.ledger.accountant import StepAccountant
from lflops.ledger.ledger_file import REQUEST
from lflops.monitoring.schedule import Schedule
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, watching
from tests.support.ports import free_port
from tests.support.warm_python import Ended, Script, WarmPython

pytestmark = LIGHTNINGS_WARNINGS
SHORT = Schedule(wait=2, warmup=1, active=2)


class Asking(lightning.pytorch.Callback):
    """A callback that requests a window at the begin of the given batches."""

    def __init__(self, monitor: lflops.FlopsMonitor, *batches: int) -> None:
        self.monitor = monitor
        self.batches = batches

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Request a window if this is one of the batches."""
        if batch_idx in self.batches:
            self.monitor.request_window()


def windows(monitor: lflops.FlopsMonitor) -> list[tuple[int | None, list[int]]]:
    """Return the number of each window, and its counting steps and module-timing steps."""
    found = []
    for profile in monitor.profiles:
        kinds = {"counting", "module_timing"}
        steps = [step.index for step in profile.steps if step.kind in kinds]
        found.append((profile.run.window, steps))
    return found


@pytest.mark.parametrize("track", [True, False])
def test_a_window_opens_after_the_last_scheduled_one(track: bool) -> None:
    """A window that is requested in step 30 counts step 31, and times modules in the next two.

    A third window is requested in step 70. All windows have the same counts as the scheduled one.
    """
    monitor = watching(schedule=SHORT, track=track)
    fit(Classifier(), monitor, Asking(monitor, 30, 70), batches=100)
    assert [(0, [2, 3, 4]), (1, [31, 32, 33]), (2, [71, 72, 73])] == windows(monitor)
    assert 1 == len({tuple(each.by_operator().items()) for each in monitor.profiles})


def test_a_window_that_is_waited_for_comes_earlier() -> None:
    """A request opens the next scheduled window early.

    Two windows are scheduled, each after 40 steps. The request in step 10 opens the first window,
    and the second window still comes 40 steps after the first.
    """
    monitor = watching(schedule=Schedule(wait=40, warmup=1, active=2, repeat=2))
    fit(Classifier(), monitor, Asking(monitor, 10), batches=100)
    assert [(0, [12, 13, 14]), (1, [56, 57])] == windows(monitor)


def test_a_window_that_is_open_is_waited_for() -> None:
    """If a window is requested during a scheduled window, it opens after the scheduled window.

    In between are the unprofiled steps that the scheduled window still needs.
    """
    monitor = watching(schedule=SHORT)
    fit(Classifier(), monitor, Asking(monitor, 3), batches=60)
    first, second = windows(monitor)
    assert ((0, [2, 3, 4]), 1) == (first, second[0])
    assert 3 == len(second[1])


def test_weights_are_those_of_the_training_without_a_window() -> None:
    """A requested window does not change the weights: they are equal bit by bit."""
    weights = []
    for asked in ((), (30,)):
        torch.manual_seed(0)
        module = Classifier()
        monitor = watching(schedule=SHORT)
        fit(module, monitor, Asking(monitor, *asked), batches=60)
        weights.append([each.detach().clone() for each in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_the_shell_asks_a_loop_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`lflops window` requests a window of a running loop, and refuses if the run has ended.

    The command leaves a file, which the ledger's thread of the run removes.
    """
    monkeypatch.setattr(writer, "LOOK", 0.01)
    model = nn.Linear(8, 2)
    with lflops.monitor(
        model,
        dirpath=tmp_path,
        trace=False,
        html=False,
        hardware=None,
        schedule=SHORT,
        log=lambda _: None,
    ) as monitor:
        for step in range(2_000_000):
            with monitor.step(torch.ones(4, 8)):
                model(torch.ones(4, 8)).sum().backward()
            if step == 20:
                # Reading the ledger writes the first row of its file.
                monitor.ledger  # noqa: B018
                assert 0 == main(["window", str(tmp_path)])
            if len(monitor.profiles) == 2:
                break
    assert [0, 1] == [each.run.window for each in monitor.profiles]
    assert not (tmp_path / REQUEST).exists()
    assert 2 == main(["window", str(tmp_path)])
    assert b"this run has ended (finished)" in capsysbinary.readouterr().err


RANKS = """
import os, signal, sys, time, torch, lflops
from torch import distributed, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes
from lflops.monitoring import window_requests
init, folder, rank, ranks, kind = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
# Where each rank waits until it knows the step, the next one will do. Else a busy machine needs time to tell it.
window_requests.NOTICE = 0.5 if kind == "within" else 0.0
distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks)
counted, step = [], 0
class Model(nn.Linear):
    def forward(self, x):
        if modes():
            counted.append(step)
        return super().forward(x)
torch.manual_seed(0)
layer = Model(8, 2)
model = nn.parallel.DistributedDataParallel(layer) if kind in {"together", "within"} else layer
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
def passed(what):
    open(f"{folder}/{what}{rank}", "w").close()
def wait_for(what, of):
    while not os.path.exists(f"{folder}/{what}{of}"):
        time.sleep(.001)
schedule = lflops.Schedule(wait=2, warmup=1, active=2) if kind != "within" else lflops.Schedule(wait=17, warmup=1, active=8)
stages = ("train",) if kind == "within" else ()
settings = dict(stages=stages, schedule=schedule, trace=False, html=False, hardware=None, log=lambda _: None, gather_timeout=2.0)
with lflops.monitor(model, optimizer, dirpath=folder + "/run", **settings) as monitor:
    requests = monitor._run._requests
    for step in range(100 if kind != "within" else 100_000):
        if kind == "within":
            distributed.all_reduce(windows := torch.tensor(len(counted)), op=distributed.ReduceOp.MIN)
            if windows == 2:
                break
        if rank and kind in {"ended", "killed", "failed"} and step == 10:
            passed("left")
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            break
        if not rank and kind == "gone" and step == 10:
            wait_for("here", 1)
            os.kill(os.getpid(), signal.SIGKILL)
        with monitor.step(torch.ones(4, 8)):
            model(torch.ones(4, 8)).sum().backward()
            if not rank and step == 20:
                wait_for("here" if kind == "apart" else "left", 1) if kind not in {"together", "within"} else None
                monitor.request_window()
            if kind != "within" and step == (60 if rank and kind == "apart" else 20):
                passed("here")
                while requests.due is None and kind != "gone":
                    time.sleep(.001)
                print(requests.due)
            optimizer.step()
            optimizer.zero_grad()
print(*counted, layer.weight.detach().double().sum().item().hex())
"""


def ranks_of(
    python: WarmPython, folder: Path, kind: str, ranks: int = 2, *, hosts: bool = True
) -> list[Ended]:
    """Run `RANKS` in one process for each rank, and return how the processes ended.

    Rank 0 requests a window in its step 20. The store of the ranks is a `TCPStore` in the process
    of rank 0 if `hosts` is set, and a file otherwise. `kind` says what else happens; see `RANKS`.
    """
    init = f"tcp://localhost:{free_port()}" if hosts else f"file://{folder}/store"
    return python.together(
        [Script(RANKS, (init, folder, rank, ranks, kind)) for rank in range(ranks)]
    )


@pytest.mark.parametrize(("ranks", "hosts"), [(2, True), (4, True), (2, False)])
def test_ranks_meet_at_most_two_steps_later(
    ranks: int, hosts: bool, tmp_path: Path, warm_python: WarmPython
) -> None:
    """All ranks open the window at the same step, at most two steps after the request.

    Rank 0 requests the window in step 20 and chooses step 21 or 22. Afterwards, all ranks have the
    same weights.
    """
    said = {each.out for each in ranks_of(warm_python, tmp_path, "together", ranks, hosts=hosts)}
    assert 1 == len(said), said
    due, counted, *_ = said.pop().split()
    assert (True, True) == (due in {"21", "22"}, due == counted)


def test_ranks_meet_when_the_window_that_is_open_is_reported(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """If a window is requested during a scheduled window, all ranks open it later at the same step.

    The scheduled window counts step 17, and times modules until step 25 or later. Rank 0 merges the
    windows of all ranks, so it is the last rank that can open the next window.
    """
    said = {each.out for each in ranks_of(warm_python, tmp_path, "within")}
    assert 1 == len(said), said
    first, second, _ = said.pop().split()
    assert ("17", True) == (first, int(second) > 25)


def test_ranks_that_are_apart_meet_at_a_step_that_none_has_passed(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """Ranks at different steps open the window at a step that no rank has passed yet.

    Without collective operations, rank 1 may be in step 60 when rank 0 requests a window in step
    20. Both count step 61 or 62.
    """
    said = {each.out for each in ranks_of(warm_python, tmp_path, "apart")}
    assert 1 == len(said), said
    due, counted, *_ = said.pop().split()
    assert (True, True) == (due in {"61", "62"}, due == counted)


@pytest.mark.parametrize("kind", ["ended", "killed"])
def test_of_ranks_that_have_left_nobody_waits(
    kind: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    """If rank 1 has ended or was killed, rank 0 waits only a limited time for its answer.

    Then rank 0 opens its window, and its run ends normally.
    """
    first, other = ranks_of(warm_python, tmp_path, kind, hosts=False)
    assert (0, -9 if kind == "killed" else 0) == (first.status, other.status)
    due, counted, _ = first.out.split()
    assert (True, True) == (due in {"21", "22"}, due == counted)


def test_where_the_store_is_gone_the_training_goes_on(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """If rank 0, which hosts the store, is killed, rank 1 does all of its steps.

    No requested window opens on rank 1, and it prints no traceback.
    """
    first, other = ranks_of(warm_python, tmp_path, "gone")
    assert (-9, 0) == (first.status, other.status), other.err
    assert ["None", "0"] == [other.out.split()[0], str(other.out.count("Traceback"))]


@pytest.mark.parametrize(
    ("usual", "ago", "step"),
    [(1000.0, 0, 8), (30.0, 0, 9), (1000.0, 5000, 9), (10.0, 5000, 11), (0.0, 5000, 9)],
    ids=["it is long", "it ends in time", "it is overdue", "three more follow", "nothing is known"],
)
def test_a_rank_names_the_first_step_that_ends_later(
    usual: float, ago: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`step_after(30)` returns the first step that ends more than 30 s from now.

    Seven steps have ended, so step 8 is running. If the usual step takes 1,000 s, step 8 ends
    later. If it takes 30 s, step 8 ends in time. If step 8 is overdue, it is expected to end now;
    then steps 9 and 10 of 10 s each end earlier than in 30 s, but step 11 does not. Without a usual
    step, the result is two steps after the last one; before the first step, it is 0.
    """
    monkeypatch.setattr(StepAccountant, "usual", usual)
    watched = writer.LedgerWriter()
    assert 0 == watched.step_after(30.0)
    watched.counters.last_end = time.perf_counter_ns() - ago * 10**9, 7
    assert step == watched.step_after(30.0)


def test_a_request_that_an_earlier_run_did_not_hear_opens_no_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run removes the request file of an earlier run when it begins, and opens no window."""
    monkeypatch.setattr(writer, "REQUEST_PERIOD", 0.001)
    (tmp_path / REQUEST).touch()
    with lflops.monitor(
        nn.Linear(8, 2), dirpath=tmp_path, stages=(), html=False, hardware=None, log=lambda _: None
    ) as monitor:
        assert not (tmp_path / REQUEST).exists()
    assert [] == monitor.profiles


def test_a_rank_that_hears_too_late_says_so() -> None:
    """A rank that receives the chosen step too late warns, and opens its window immediately.

    It must open the window, because the other ranks have opened theirs.
    """
    model = nn.Linear(8, 2)
    settings = {
        "stages": (),
        "schedule": SHORT,
        "trace": False,
        "html": False,
        "hardware": None,
        "log": lambda _: None,
    }
    words = (
        "on rank 0, the requested window opens after step 11, not after step 5 as on the other "
        "ranks, because the request arrived too late"
    )
    with lflops.monitor(model, **settings) as monitor:
        for step in range(30):
            warns: Any = nullcontext()
            if step == 10:
                warns = pytest.warns(UserWarning, match=words)
            with warns, monitor.step(torch.ones(4, 8)):
                if step == 10:
                    monitor._run._requests.due = 5
                model(torch.ones(4, 8)).sum().backward()
    (profile,) = monitor.profiles
    assert [11] == [step.index for step in profile.steps if step.kind == "counting"]


def test_several_ranks_without_a_ledger_are_told_that_no_window_opens() -> None:
    """With several ranks and `ledger=False`, a request only warns, and no window opens.

    Only the ledger can predict a step at which all ranks can open the window. With one process, no
    prediction is needed, so a request opens a window.
    """
    model = nn.Linear(8, 2)
    with lflops.monitor(
        model,
        ledger=False,
        trace=False,
        html=False,
        hardware=None,
        schedule=SHORT,
        log=lambda _: None,
    ) as monitor:
        monitor._run.store = object()
        with pytest.warns(
            UserWarning, match="with several ranks, a window can only be requested with ledger=True"
        ):
            monitor.request_window()
        monitor._run.store = None
        for step in range(30):
            with monitor.step(torch.ones(4, 8)):
                model(torch.ones(4, 8)).sum().backward()
            if step == 20:
                monitor.request_window()
    assert [0, 1] == [each.run.window for each in monitor.profiles]


def test_a_monitor_without_stages_opens_a_window_on_request(tmp_path: Path) -> None:
    """With `stages=()`, a window opens only on request.

    Forward has 8 x 4 x 2 = 64 MACs, and so has the gradient of the weights in backward.
    """
    model = nn.Linear(8, 2)
    with lflops.monitor(
        model,
        stages=(),
        dirpath=tmp_path,
        trace=False,
        html=False,
        hardware=None,
        log=lambda _: None,
    ) as monitor:
        for step in range(30):
            with monitor.step(torch.ones(4, 8)):
                model(torch.ones(4, 8)).sum().backward()
            if step == 10:
                assert [] == monitor.profiles
                monitor.request_window()
    (profile,) = monitor.profiles
    assert (64, 64) == (profile.total(phase="forward"), profile.total(phase="backward"))
    assert 30 == monitor.ledger.steps
