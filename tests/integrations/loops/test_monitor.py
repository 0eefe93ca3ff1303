"""`lflops.monitor`: a loop of one's own is profiled as a Trainer is, and is the same loop."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops import CountError, Profile, Schedule
from lflops.analysis.analysis import analyze
from lflops.integrations.loops.monitor import LoopMonitor
from lflops.monitoring import window_publisher as results
from lflops.timing.clock import ThreadSchedule, UncontendedClock
from tests.support.process_state import bits
from tests.support.processes import Ranks

WIDTH, HIDDEN, CLASSES, BATCH = 16, 32, 4, 8
FORWARD = BATCH * (WIDTH * HIDDEN + HIDDEN * CLASSES)
"""MACs of the model below, by hand: two products."""
BACKWARD = 2 * FORWARD - BATCH * WIDTH * HIDDEN
"""Each product twice, but for the gradient of the data, which nobody wants."""

SHORT = Schedule(wait=1, warmup=1, active=2, repeat=1)


def model() -> nn.Sequential:
    """Two products with an activation between them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(number)
    ]


def quiet(_message: str) -> None:
    """Log nothing."""


def train(
    watched: nn.Module,
    number: int = 20,
    *,
    seen: list[object] | None = None,
    each: int = 1,
    **options: Any,
) -> LoopMonitor:
    """Train with the monitor on; gradients are accumulated over `each` batches."""
    optimizer = torch.optim.AdamW(watched.parameters(), lr=0.01)
    settings = {"schedule": SHORT, "log": quiet, "on_error": "raise", "hardware": None} | options
    with lflops.monitor(watched, optimizer, accumulation=each, **settings) as monitor:
        for index, batch in enumerate(monitor.data(batches(number))):
            with monitor.step(batch):
                loss = F.cross_entropy(watched(batch[0]), batch[1])
                loss.backward()
                if not (index + 1) % each:
                    optimizer.step()
                    optimizer.zero_grad()
            if seen is not None:
                seen.append(bits(loss))
    return monitor


def macs(profile: Profile) -> tuple[int, int]:
    """Of forward and backward."""
    root = profile.modules[""]
    return root.forward.macs, root.backward.macs


@pytest.mark.parametrize("trace", [True, False])
def test_a_loop_is_counted_and_timed(trace: bool, tmp_path: Path) -> None:
    """Its phases are those that hooks see; its modules are timed."""
    (profile,) = train(model(), trace=trace, dirpath=tmp_path).profiles
    assert (FORWARD, BACKWARD) == macs(profile)
    assert ("train", BATCH, False) == (
        profile.run.stage,
        profile.run.samples_per_step,
        profile.run.partial,
    )
    found = analyze(profile).step_times
    assert {"data", "forward", "backward", "optimizer", "other"} == set(found.phases)
    assert all(profile.modules[name].forward.seconds is not None for name in ("", "0", "1", "2"))
    assert trace == bool(list(tmp_path.glob("lflops_traces/*/*.pt.trace.json.gz")))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    ("is_training", "is_anomaly"), [(True, False), (False, False), (True, True)]
)
def test_what_was_left_on_is_a_cause_of_unknown_cost(
    is_training: bool, is_anomaly: bool, tmp_path: Path
) -> None:
    """A model that stays in eval mode, or anomaly detection.

    With neither of them there is no note.
    """
    codes = {"anomaly_mode": is_anomaly, "eval_mode": not is_training}
    with torch.autograd.set_detect_anomaly(is_anomaly):
        (profile,) = train(model().train(is_training), trace=False, dirpath=tmp_path).profiles
    assert [code for code, is_on in codes.items() if is_on] == [
        note.code for note in profile.notes if note.code in codes
    ]
    left_on = [
        each.cause
        for each in lflops.explain(profile).findings
        if each.cause in codes and each.is_issue and each.seconds is None
    ]
    assert [code for code, is_on in codes.items() if is_on] == left_on


@pytest.mark.parametrize(("peak", "is_said"), [(1.0, True), (1e30, False)])
def test_a_measured_peak_that_a_step_exceeds_is_forgotten(
    peak: float, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One FLOP a second is exceeded by everything."""
    forgotten: list[object] = []
    monkeypatch.setattr(results, "forget", lambda chip: not forgotten.append(chip))
    chip = lflops.Hardware("this CPU", {"fp32": peak}, source="measured by lflops.calibrate")
    log: list[str] = []
    train(model(), hardware=chip, log=log.append)
    assert is_said == any("so the next run measures the peak again" in line for line in log)
    assert [chip] * is_said == forgotten


def test_training_is_the_same_to_the_bit() -> None:
    """Over clean, counted, traced and hooked steps of three windows."""

    def plain(watched: nn.Module, seen: list[object]) -> None:
        optimizer = torch.optim.AdamW(watched.parameters(), lr=0.01)
        for x, y in batches(50):
            loss = F.cross_entropy(watched(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(bits(loss))

    expected: list[object] = []
    actual: list[object] = []
    first, second = model(), model()
    plain(first, expected)
    train(second, 50, seen=actual, schedule=Schedule(wait=2, warmup=2, active=3, repeat=3))
    assert expected == actual
    assert [bits(each) for each in first.parameters()] == [
        bits(each) for each in second.parameters()
    ]


def hooks(watched: nn.Module) -> int:
    """How many are on the modules."""
    return sum(
        len(each._forward_hooks) + len(each._forward_pre_hooks) + len(each._backward_hooks)
        for each in watched.modules()
    )


@pytest.mark.parametrize("at", range(2, 9))
@pytest.mark.parametrize("how", ["break", "exception", "interrupt"])
def test_however_a_loop_ends_nothing_is_left(at: int, how: str) -> None:
    """In a clean, a counted, a traced and a hooked step. What was counted by then is a profile."""
    watched = model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
    error = {"exception": ZeroDivisionError, "interrupt": KeyboardInterrupt}.get(how)
    monitor = lflops.monitor(watched, optimizer, schedule=SHORT, log=quiet, on_error="raise")

    def loop() -> None:
        with monitor:
            for index, (x, y) in enumerate(monitor.data(batches(20))):
                with monitor.step(x):
                    loss = F.cross_entropy(watched(x), y)
                    if index == at and error is not None:
                        raise error
                    loss.backward()
                    optimizer.step()
                if index == at:
                    break

    if error is None:
        loop()
    else:
        with pytest.raises(error):
            loop()
    assert 0 == hooks(watched)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert all(not each._backward_hooks for each in watched.parameters())
    x = torch.ones(1, WIDTH)
    torch.testing.assert_close(watched(x), watched(x))


def test_gradients_are_accumulated_over_several_batches() -> None:
    """A step is all of them."""
    (profile,) = train(model(), 24, each=3).profiles
    assert (3 * FORWARD, 3 * BACKWARD) == macs(profile)
    assert (3, 3 * BATCH) == (profile.run.accumulation, profile.run.samples_per_step)


def test_several_models_have_their_names() -> None:
    """Both are trained in a step, by optimizers of their own."""
    first, second = model(), model()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    with lflops.monitor(
        {"first": first, "second": second}, optimizers, schedule=SHORT, log=quiet, on_error="raise"
    ) as monitor:
        for x, y in monitor.data(batches(20)):
            with monitor.step(x):
                for each, optimizer in zip((first, second), optimizers, strict=True):
                    F.cross_entropy(each(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    (profile,) = monitor.profiles
    assert (2 * FORWARD, 2 * BACKWARD) == macs(profile)
    assert (
        FORWARD == profile.modules["first"].forward.macs == profile.modules["second"].forward.macs
    )


def test_validation_is_a_stage_of_its_own() -> None:
    """It has a profile of its own, without backward."""
    watched = model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
    with lflops.monitor(
        watched,
        optimizer,
        schedule=SHORT,
        stages=("train", "validate"),
        log=quiet,
        on_error="raise",
        trace=False,
    ) as monitor:
        for index, (x, y) in enumerate(monitor.data(batches(20))):
            with monitor.step(x):
                F.cross_entropy(watched(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if index % 8 == 7:
                with monitor.stage("validate"), torch.no_grad():
                    for batch in monitor.data(batches(5)):
                        with monitor.step(batch):
                            watched(batch[0])
    by_stage = {profile.run.stage: profile for profile in monitor.profiles}
    assert (FORWARD, BACKWARD) == macs(by_stage["train"])
    assert (FORWARD, 0) == macs(by_stage["validate"])


def test_a_writer_has_curves_text_and_files(tmp_path: Path) -> None:
    """Files go where the writer keeps its own."""
    with SummaryWriter(str(tmp_path)) as writer:
        train(model(), logger=writer, log_every=5, trace=False)
    names = {path.name for path in (tmp_path / "lflops").iterdir()}
    (saved,) = [name for name in names if name.endswith(".profile.json")]
    assert (
        FORWARD
        == json.loads((tmp_path / "lflops" / saved).read_text())["modules"][""]["forward"]["macs"]
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert {9, 14, 19} <= {point.step for point in events.Scalars("lflops/train/step_ms")}
    assert "lflops/train/summary/text_summary" in events.Tags()["tensors"]


def test_without_a_logger_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary goes to `log`."""
    monkeypatch.chdir(tmp_path)
    logged: list[str] = []
    (profile,) = train(model(), log=logged.append).profiles
    assert FORWARD == macs(profile)[0]
    assert [] == list(tmp_path.iterdir())
    assert any("window 0 closed" in each for each in logged)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, r"model=3: pass an nn.Module"),
        ({"model": {}}, r"model=\{\}: pass an nn.Module"),
        ({"optimizer": "adam"}, r"optimizer='adam': pass a torch.optim.Optimizer"),
        ({"accumulation": 0}, r"accumulation=0: pass a whole number, 1 or more"),
        ({"steps": 1.5}, r"steps=1.5: pass a whole number, 1 or more"),
        ({"log_every": -1}, r"log_every=-1: pass a whole number, 0 or more"),
        ({"logger": 7}, r"logger=7: pass a SummaryWriter"),
        ({"scheduel": 7}, r"'scheduel' is not an argument of lflops.monitor"),
        ({"trace": 7}, r"trace=7: pass True or False"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    """With its value and what is taken."""
    with pytest.raises(CountError, match=message):
        lflops.monitor(**({"model": model()} | arguments))


def test_a_stage_that_is_not_known_is_named() -> None:
    """With those that are."""
    with (
        lflops.monitor(model(), log=quiet) as monitor,
        pytest.raises(CountError, match="stage='training': pass one of 'validate'"),
        monitor.stage("training"),
    ):
        pass


def of_rank(rank: int) -> tuple[int, tuple[int, int] | None, list[str], float | None]:
    """Train under DDP: the first rank returns what its profile says of both."""
    watched = DistributedDataParallel(model())
    profiles = train(watched, 30).profiles
    if not profiles:
        return rank, None, [], None
    (profile,) = profiles
    return (
        rank,
        macs(profile),
        [each.status for each in profile.ranks],
        profile.run.data_parallel_size,
    )


def on_this_rank() -> Any:
    """Where a process group is."""
    return of_rank(distributed.get_rank())


def test_ranks_meet_as_those_of_a_trainer_do(tmp_path: Path) -> None:
    """The first has the profile of both."""
    with Ranks(2, tmp_path) as ranks:
        first, second = ranks.run(on_this_rank)
    assert (0, (FORWARD, BACKWARD), ["ok", "ok"], 2) == first
    assert (1, None, [], None) == second


def test_the_curves_have_a_point_every_so_many_steps() -> None:
    """The window that is closed behind the last step adds none: a tag is one quantity."""

    class Logger:
        def __init__(self) -> None:
            self.points: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, values: dict[str, float], step: int) -> None:
            self.points.append((step, values))

    logger = Logger()
    train(model(), 40, logger=logger, log_every=10, schedule=Schedule(wait=1000))
    steps = [step for step, values in logger.points if "lflops/train/step_ms" in values]
    assert [9, 19, 29, 39] == steps
    assert all(
        math.isfinite(value) and value > 0
        for _, values in logger.points
        for value in values.values()
    )


def test_a_loop_that_names_no_step_is_told() -> None:
    """Else nothing is said at all, and nobody knows why."""
    model = nn.Linear(4, 1)
    with (
        pytest.warns(UserWarning, match=r"received no batch.*with monitor\.step\(batch\)"),
        lflops.monitor(model, trace=False),
    ):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("each", [1, 2])
def test_beside_busy_programs_the_phases_of_hooked_steps_are_without_what_others_took(
    monkeypatch: pytest.MonkeyPatch, each: int
) -> None:
    """Together they are no longer than the step.

    If others had the core all of the time, nothing is left.
    """
    monkeypatch.setattr(UncontendedClock, "is_needed", True)
    hooked = [
        step for step in train(model(), each=each).profiles[0].steps if step.kind == "module_timing"
    ]
    assert hooked
    assert all(
        {"data", "forward", "backward", "optimizer", "other"} <= step.uncontended_phases.keys()
        for step in hooked
    )
    assert all(sum(step.uncontended_phases.values()) <= (step.seconds or 0.0) for step in hooked)
    monkeypatch.setattr(ThreadSchedule, "read", lambda _: f"0 {time.perf_counter_ns()} 1".encode())
    hooked = [
        step for step in train(model(), each=each).profiles[0].steps if step.kind == "module_timing"
    ]
    # The beginning of a step, with the callbacks and the batch, begins at the step's own mark, which
    # is made a moment before the system is asked.
    assert {0.0} == {
        seconds
        for step in hooked
        for name, seconds in step.uncontended_phases.items()
        if name not in {"data", "other"}
    }


def test_the_phases_of_a_quiet_machine_are_what_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is read at each module where others took nothing."""
    monkeypatch.setattr(UncontendedClock, "is_needed", False)
    assert all(not step.uncontended_phases for step in train(model()).profiles[0].steps)


def test_processes_that_a_loader_has_started_are_known() -> None:
    """One worker, and none."""
    data = DataLoader(batches(12), batch_size=None, num_workers=1)  # type: ignore[arg-type]
    watched = model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.01)
    with lflops.monitor(
        watched, optimizer, schedule=SHORT, log=quiet, on_error="raise", hardware=None
    ) as monitor:
        for x, y in monitor.data(data):
            with monitor.step((x, y)):
                F.cross_entropy(watched(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert 1 == monitor.profiles[0].run.workers
    assert 0 == train(model()).profiles[0].run.workers
    hooked = [step for step in monitor.profiles[0].steps if step.kind == "module_timing"]
    assert hooked
    assert all(step.fetching_cpu is not None for step in hooked)
    for step in hooked:
        assert step.fetching_waited is not None
        assert step.thread_waited is not None
        assert 0 <= step.fetching_waited <= step.thread_waited


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_model_that_the_loop_has_compiled_is_compiled_once(tmp_path: Path) -> None:
    """The monitor is passed the model, and the loop calls what torch.compile returned for it."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fast = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Schedule(wait=3, warmup=1, active=3, repeat=1)
    with lflops.monitor(
        model,
        optimizer,
        schedule=schedule,
        dirpath=tmp_path,
        html=False,
        hardware=None,
        on_error="raise",
        log=list[str]().append,
    ) as monitor:
        for _ in range(14):
            batch = torch.ones(4, 8)
            with monitor.step(batch):
                fast(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    torch.compiler.reset()
    assert 1 == len(compiled)
    root = monitor.profiles[-1].modules[""]
    assert root.compiled
    assert 4 * 2 * 8 * 8 == root.forward.macs
