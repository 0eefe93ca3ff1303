"""Test that `lflops.monitor` profiles a custom loop like a Trainer and does not change the loop."""

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
from lflops.profile.steps import Step
from lflops.timing.clock import ThreadSchedule, UncontendedClock
from tests.support.process_state import bits
from tests.support.processes import Ranks

WIDTH, HIDDEN, CLASSES, BATCH = 16, 32, 4, 8
FORWARD = BATCH * (WIDTH * HIDDEN + HIDDEN * CLASSES)
"""MACs of one forward pass of `model()`, worked out by hand: one matmul for each layer."""
BACKWARD = 2 * FORWARD - BATCH * WIDTH * HIDDEN
"""MACs of one backward pass: two matmuls for each layer, except that the data has no gradient."""

SHORT = Schedule(wait=1, warmup=1, active=2, repeat=1)


def model() -> nn.Sequential:
    """Return two linear layers with an activation between them, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of inputs and classes, the same in each call."""
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
    """Train a model under `lflops.monitor` and return the monitor.

    Args:
        watched: The model.
        number: Number of batches.
        seen: List to which the bits of each loss are appended.
        each: Number of batches over which gradients are accumulated.
        options: Arguments of `lflops.monitor` that override the defaults.
    """
    optimizer = torch.optim.AdamW(watched.parameters(), lr=0.01)
    defaults = {"schedule": SHORT, "log": quiet, "on_error": "raise", "hardware": None}
    settings = defaults | options
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
    """Return the MACs of forward and of backward."""
    root = profile.modules[""]
    return root.forward.macs, root.backward.macs


@pytest.mark.parametrize("trace", [True, False])
def test_a_loop_is_counted_and_timed(trace: bool, tmp_path: Path) -> None:
    """The profile has MACs, detected phases and times of modules, and a trace file if requested."""
    (profile,) = train(model(), trace=trace, dirpath=tmp_path).profiles
    assert (FORWARD, BACKWARD) == macs(profile)
    run = profile.run
    assert ("train", BATCH, False) == (run.stage, run.samples_per_step, run.partial)
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
    """Anomaly detection and a model in eval mode each cause a note and an issue without a cost.

    If neither is the case, there is no such note and no such finding.
    """
    codes = {"anomaly_mode": is_anomaly, "eval_mode": not is_training}
    expected = [code for code, is_on in codes.items() if is_on]
    with torch.autograd.set_detect_anomaly(is_anomaly):
        (profile,) = train(model().train(is_training), trace=False, dirpath=tmp_path).profiles
    assert expected == [note.code for note in profile.notes if note.code in codes]
    left_on = [
        each.cause
        for each in lflops.explain(profile).findings
        if each.cause in codes and each.is_issue and each.seconds is None
    ]
    assert expected == left_on


@pytest.mark.parametrize(("peak", "is_said"), [(1.0, True), (1e30, False)])
def test_a_measured_peak_that_a_step_exceeds_is_forgotten(
    peak: float, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a step is faster than the measured peak, lflops deletes the peak and logs this.

    Every step exceeds a peak of one FLOP/s, and no step exceeds 1e30.
    """
    forgotten: list[object] = []

    def forget(chip: object) -> bool:
        forgotten.append(chip)
        return True

    monkeypatch.setattr(results, "forget", forget)
    chip = lflops.Hardware("this CPU", {"fp32": peak}, source="measured by lflops.calibrate")
    log: list[str] = []
    train(model(), hardware=chip, log=log.append)
    assert is_said == any("so the next run measures the peak again" in line for line in log)
    assert ([chip] if is_said else []) == forgotten


def test_training_is_the_same_to_the_bit() -> None:
    """Losses and weights equal those of a loop without the monitor, to the bit.

    The 50 steps contain three windows with every kind of step.
    """

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
    weights = [bits(each) for each in first.parameters()]
    assert weights == [bits(each) for each in second.parameters()]


def hooks(watched: nn.Module) -> int:
    """Return the number of hooks on all modules."""
    return sum(
        len(each._forward_hooks) + len(each._forward_pre_hooks) + len(each._backward_hooks)
        for each in watched.modules()
    )


@pytest.mark.parametrize("at", range(2, 9))
@pytest.mark.parametrize("how", ["break", "exception", "interrupt"])
def test_however_a_loop_ends_nothing_is_left(at: int, how: str) -> None:
    """All hooks are removed if the loop ends by `break`, an exception or an interrupt.

    The steps 2 to 8 include every kind of step.
    """
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
    """A step includes all batches of one optimizer update, here three."""
    (profile,) = train(model(), 24, each=3).profiles
    assert (3 * FORWARD, 3 * BACKWARD) == macs(profile)
    assert (3, 3 * BATCH) == (profile.run.accumulation, profile.run.samples_per_step)


def _each(numbers: set[int], number: int, optimizer: torch.optim.Optimizer) -> None:
    """Make a step after the batches with the given numbers."""
    if number in numbers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("updates", "number", "ends"),
    [
        # the end of an epoch of 6 batches: a step of 2 batches
        ([{4, 6, 10, 12}], 12, [4, 6, 10, 12]),
        # the same without any optimizer in sight, where only the number is known
        ([], 12, [4, 8, 12]),
        # a `GradScaler` skips the second of three steps
        ([{4, 12}], 12, [4, 8, 12]),
        # a critic is updated with each batch, its generator with each fourth batch
        ([{1, 2, 3, 4, 5, 6, 7, 8}, {4, 8}], 8, [4, 8]),
        # two optimizers in the same batches, and the end of an epoch of 5 batches
        ([{4, 5, 9}, {4, 5, 9}], 9, [4, 5, 9]),
    ],
    ids=["epoch", "unseen", "skipped", "critic", "two"],
)
def test_a_step_that_accumulates_ends_when_all_optimizers_have_made_a_step(
    updates: list[set[int]], number: int, ends: list[int]
) -> None:
    """It ends after `accumulation` batches (here 4) at the latest.

    `updates` has the numbers of the batches in which each optimizer makes a step, and `ends` has
    the numbers of the batches that end a step.
    """
    watched = model()
    optimizers = [torch.optim.SGD(watched.parameters(), lr=0.01) for _ in updates]
    schedule = Schedule(wait=1000)
    ended = []
    with lflops.monitor(
        watched, optimizers, accumulation=4, schedule=schedule, log=quiet, on_error="raise"
    ) as monitor:
        for place, (x, y) in enumerate(batches(number), start=1):
            before = monitor._steps_done
            with monitor.step(x):
                F.cross_entropy(watched(x), y).backward()
                for optimizer, numbers in zip(optimizers, updates, strict=True):
                    _each(numbers, place, optimizer)
            if monitor._steps_done > before:
                ended.append(place)
    assert ends == ended
    assert monitor.ledger is not None
    assert len(ends) == monitor.ledger.steps


def test_several_models_have_their_names() -> None:
    """Models passed in a dict appear in the profile under their keys, with their MACs.

    One step trains both models, each with a separate optimizer.
    """
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
    assert FORWARD == profile.modules["first"].forward.macs
    assert FORWARD == profile.modules["second"].forward.macs


def test_validation_is_a_stage_of_its_own() -> None:
    """Validation gets a separate profile, in which backward has no MACs."""
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
    """With a `SummaryWriter` as logger, curves and the summary text go to its event files.

    The profile is saved in the folder `lflops` below the writer's folder.
    """
    with SummaryWriter(str(tmp_path)) as writer:
        train(model(), logger=writer, log_every=5, trace=False)
    (saved,) = (tmp_path / "lflops").glob("*.profile.json")
    modules = json.loads(saved.read_text())["modules"]
    assert FORWARD == modules[""]["forward"]["macs"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert {9, 14, 19} <= {point.step for point in events.Scalars("lflops/train/step_ms")}
    assert "lflops/train/summary/text_summary" in events.Tags()["tensors"]


def test_without_a_logger_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a logger and `dirpath`, lflops writes no file; the summary goes to `log`."""
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
    """The error contains the argument, its value and the accepted values."""
    with pytest.raises(CountError, match=message):
        lflops.monitor(**({"model": model()} | arguments))


def test_a_stage_that_is_not_known_is_named() -> None:
    """The error for an unknown stage contains the stage and the accepted names."""
    with (
        lflops.monitor(model(), log=quiet) as monitor,
        pytest.raises(CountError, match="stage='training': pass one of 'validate'"),
        monitor.stage("training"),
    ):
        pass


def of_rank(rank: int) -> tuple[int, tuple[int, int] | None, list[str], float | None]:
    """Train under DDP, and return the rank, MACs, status of all ranks and data-parallel size.

    All but the rank is empty if this rank has no profile.
    """
    watched = DistributedDataParallel(model())
    profiles = train(watched, 30).profiles
    if not profiles:
        return rank, None, [], None
    (profile,) = profiles
    statuses = [each.status for each in profile.ranks]
    return rank, macs(profile), statuses, profile.run.data_parallel_size


def on_this_rank() -> Any:
    """Call `of_rank` with the rank of this process."""
    return of_rank(distributed.get_rank())


def test_ranks_meet_as_those_of_a_trainer_do(tmp_path: Path) -> None:
    """Under DDP, rank 0 has one profile that covers both ranks, and rank 1 has none."""
    with Ranks(2, tmp_path) as ranks:
        first, second = ranks.run(on_this_rank)
    assert (0, (FORWARD, BACKWARD), ["ok", "ok"], 2) == first
    assert (1, None, [], None) == second


def test_the_curves_have_a_point_every_so_many_steps() -> None:
    """Curves have one point every `log_every` steps.

    The window that closes after the last step adds no point, so all points of a tag are the same
    quantity.
    """

    class Logger:
        def __init__(self) -> None:
            self.points: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, values: dict[str, float], step: int) -> None:
            self.points.append((step, values))

    logger = Logger()
    train(model(), 40, logger=logger, log_every=10, schedule=Schedule(wait=1000))
    steps = [step for step, values in logger.points if "lflops/train/step_ms" in values]
    assert [9, 19, 29, 39] == steps
    for _, values in logger.points:
        for value in values.values():
            assert math.isfinite(value)
            assert value > 0


def test_a_loop_that_names_no_step_is_told() -> None:
    """A loop that never calls `monitor.step` gets a warning.

    Without it, lflops would report nothing, and the user would not know why.
    """
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
    """`uncontended_phases` of module-timing steps leave out the time in which other programs ran.

    Their sum is at most the step time. In the second run, the system's counters are replaced: they
    say that this thread waited for a core all the time, so nothing is left.
    """

    def module_timing_steps() -> list[Step]:
        profile = train(model(), each=each).profiles[0]
        return [step for step in profile.steps if step.kind == "module_timing"]

    monkeypatch.setattr(UncontendedClock, "is_needed", True)
    steps = module_timing_steps()
    assert steps
    for step in steps:
        phases = step.uncontended_phases
        assert {"data", "forward", "backward", "optimizer", "other"} <= phases.keys()
        assert sum(phases.values()) <= (step.seconds or 0.0)
    monkeypatch.setattr(ThreadSchedule, "read", lambda _: f"0 {time.perf_counter_ns()} 1".encode())
    # The first phases of a step, "data" and "other", may keep some time: they begin at the mark of
    # the step, which is made a moment before the system's counters are read.
    remaining = set()
    for step in module_timing_steps():
        for name, seconds in step.uncontended_phases.items():
            if name not in {"data", "other"}:
                remaining.add(seconds)
    assert {0.0} == remaining


def test_the_phases_of_a_quiet_machine_are_what_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If no other program needs the cores, no step has `uncontended_phases`.

    Then lflops does not read the system's counters at each module.
    """
    monkeypatch.setattr(UncontendedClock, "is_needed", False)
    assert all(not step.uncontended_phases for step in train(model()).profiles[0].steps)


def test_processes_that_a_loader_has_started_are_known() -> None:
    """The profile has the number of DataLoader workers: one, and zero for a list of batches.

    Module-timing steps also have the scheduling figures of the fetching thread.
    """
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
