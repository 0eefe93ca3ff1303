"""Test validation, test and prediction as stages, inside a fit or alone.

Each stage has a separate schedule, clock and files. The kinds of the steps in a window are written
as one string, with two letters for each step: "un" for unprofiled, "co" for counting, "tr" for
traced, "mo" for module-timing.
"""

import csv
import gzip
import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import lflops
from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.integrations.lightning.trainer_phases import phases_of
from lflops.monitoring import session
from lflops.monitoring.schedule import Schedule
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from tests.integrations.lightning.test_endings import Around
from tests.integrations.lightning.test_outlets import Recorder
from tests.support.fake_clock import StillClock, use_clock
from tests.support.lightning_runs import (
    CLASSES,
    LIGHTNINGS_WARNINGS,
    QUIET,
    ROWS,
    WIDTH,
    Classifier,
    Validated,
    fit,
    loader,
    watching,
)

pytestmark = LIGHTNINGS_WARNINGS

BODY = ROWS * WIDTH * WIDTH
"""MACs of the layer in `body`, in the forward of a batch."""
HEAD = ROWS * WIDTH * CLASSES
"""MACs of the layer `head`, in the forward of a batch."""

ALONE = ("validate", "test", "predict")
"""The stages that a Trainer can run without `fit`."""

BRIEF = Schedule(wait=1, warmup=1, active=1)


class Staged(Classifier):
    """A classifier with the same step in each stage."""

    def validation_step(
        self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        return self(batch[0])

    test_step = predict_step = validation_step


def ask(
    stage: str, module: LightningModule, *callbacks: Any, data: Any = None, **options: Any
) -> Trainer:
    """Run one stage with a new Trainer, and return the Trainer."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            callbacks=list(callbacks),
            **{"logger": False, "default_root_dir": directory, **QUIET, **options},
        )
        quiet = {} if stage == "predict" else {"verbose": False}
        getattr(trainer, stage)(module, loader(30) if data is None else data, **quiet)
    return trainer


def kinds(profile: Profile) -> str:
    """Return the kinds of all steps, two letters for each step."""
    return "".join(step.kind[:2] for step in profile.steps)


def of_stage(monitor: FlopsMonitor, stage: str) -> list[Profile]:
    """Return the profiles of a stage."""
    return [profile for profile in monitor.profiles if profile.run.stage == stage]


def names(folder: Path) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


MODES: dict[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {
    "inference mode": (True, torch.inference_mode),
    "no gradients": (False, torch.no_grad),
}


@pytest.mark.parametrize(("inference_mode", "mode"), MODES.values(), ids=MODES)
@pytest.mark.parametrize("stage", ALONE)
def test_a_step_is_counted_as_count_does(
    stage: str, inference_mode: bool, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    """The op counts of a step equal those of `lflops.count`: two layers, and only forward."""
    model = Staged()
    monitor = watching(stages=(stage,))
    ask(stage, model, monitor, inference_mode=inference_mode)
    (profile,) = monitor.profiles
    with mode():
        counted = lflops.count(model.eval(), torch.zeros(ROWS, WIDTH))
    assert counted.op_counts == profile.op_counts
    own = {name: module.forward.self_macs for name, module in profile.modules.items()}
    assert {"body.0": BODY, "head": HEAD} == {name: macs for name, macs in own.items() if macs}
    others: tuple[Phase, ...] = ("backward", "recompute", "optimizer", "other")
    for phase in others:
        assert 0 == profile.total(phase=phase, metric="flops")


@pytest.mark.parametrize("stage", ALONE)
def test_a_stage_alone_is_one_window_with_files_of_its_name(stage: str, tmp_path: Path) -> None:
    """A stage alone has one window with the default schedule, saved in a file with its name.

    The step in the file name is that of the loggers, which stays 0 without training.
    """
    monitor = watching(stages=(stage,), dirpath=tmp_path)
    ask(stage, Staged(), monitor)
    (profile,) = monitor.profiles
    assert "un" * 6 + "co" + "mo" * 3 + "un" == kinds(profile)
    assert [("warmup", "new_shapes"), ("warmup",), *[()] * 9] == [
        step.marks for step in profile.steps
    ]
    assert "training" == profile.run.kind
    assert stage == profile.run.stage
    assert 0 == profile.run.window
    assert 0 == profile.run.step
    assert not profile.run.partial
    assert [f"{stage}-0-0.profile.json"] == names(tmp_path)
    assert profile == lflops.load(tmp_path / f"{stage}-0-0.profile.json")
    assert profile.run.accumulation is None
    for name in ("body.0", "head"):
        assert profile.modules[name].forward.seconds is not None
        assert profile.modules[name].backward.seconds is None


@pytest.mark.parametrize("stage", ALONE)
def test_a_stage_too_short_for_the_schedule_shrinks_it(stage: str) -> None:
    """If a stage is too short, the schedule is shortened to its batches: 2 and 3 of two loaders."""
    monitor = watching(stages=(stage,))
    ask(stage, Staged(), monitor, data=[loader(2), loader(3)])
    (profile,) = monitor.profiles
    assert "un" + "co" + "mo" * 3 == kinds(profile)
    (note,) = [note for note in profile.notes if note.code == "schedule_shrunk"]
    assert {
        "batches": 5,
        "skip_first": 0,
        "wait": 0,
        "warmup": 2,
        "active": 3,
        "windows": 1,
    } == note.values


def validations(
    schedule: Schedule, *, stages: tuple[str, ...] = ("validate",), **options: Any
) -> FlopsMonitor:
    """Train 30 batches with a validation of 2 batches after every fifth, and return the monitor."""
    monitor = watching(stages=stages, schedule=schedule)
    fit(Validated(), monitor, val_check_interval=5, **options)
    return monitor


def test_the_schedule_goes_on_from_one_validation_to_the_next() -> None:
    """The window of validation continues in later validations: there are 12 batches in 6 of them.

    The first batch of each validation and the first two of all have the mark "warmup", so the
    window takes none of them after its end. The index of a step is the loggers' step of the
    training batch before the validation.
    """
    (profile,) = validations(Schedule()).profiles
    assert "un" * 6 + "co" + "mo" * 3 + "un" == kinds(profile)
    assert [4, 4, 9, 9, 14, 14, 19, 19, 24, 24, 29] == [step.index for step in profile.steps]
    assert [True, True, *[True, False] * 4, False] == [
        "warmup" in step.marks for step in profile.steps
    ]
    assert "validate" == profile.run.stage
    assert 24 == profile.run.step
    assert not profile.run.partial


def test_each_stage_has_its_own_schedule() -> None:
    """Training and validation each have two windows of three steps, counted in their own steps.

    The second window needs no counting step, because the counts are known.
    """
    monitor = validations(
        Schedule(wait=1, warmup=1, active=1, repeat=2), stages=("train", "validate")
    )
    for stage in ("train", "validate"):
        first, second = of_stage(monitor, stage)
        assert "uncomo" == kinds(first)[:6]
        assert "ununmo" == kinds(second)[:6]


def test_the_sanity_check_is_not_watched() -> None:
    """The two batches of the sanity check are not profiled, although the model sees them first."""

    class Seen(Validated):
        batches = 0

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.batches += 1
            return super().validation_step(batch, batch_idx)

    monitor = watching(stages=("validate",), schedule=BRIEF)
    model = Seen()
    fit(model, monitor, val_check_interval=15, num_sanity_val_steps=2)
    assert 2 + 4 == model.batches
    assert "uncomoun" == kinds(monitor.profiles[0])


def test_several_loaders_are_one_stage() -> None:
    """The batches of two validation loaders, 2 and 3 in each of two validations, are one stage.

    The window has the mark "warmup" at the beginning of each validation, but not at the second
    loader.
    """

    class Several(Staged):
        def val_dataloader(self) -> Any:
            return [loader(2), loader(3)]

    monitor = watching(stages=("validate",), schedule=Schedule(wait=3, warmup=1, active=2))
    fit(Several(), monitor, val_check_interval=15)
    (profile,) = monitor.profiles
    assert "un" * 3 + "co" + "mo" * 2 + "un" * 4 == kinds(profile)
    assert [True, True, False, False, False, True, False, False, False, False] == [
        "warmup" in step.marks for step in profile.steps
    ]


def test_an_evaluation_that_is_cut_short_is_partial() -> None:
    """If a fit has only two validation batches, the window of validation is partial.

    Inside a fit, their number is not known before, so the schedule is not shortened.
    """
    monitor = watching(stages=("validate",), schedule=BRIEF)
    fit(Validated(), monitor)
    (profile,) = monitor.profiles
    assert "unco" == kinds(profile)
    assert profile.run.partial


DATA, TRANSFER, FORWARD, BACKWARD = 1.0, 2.0, 4.0, 8.0
"""Seconds of the phases of a training batch. Those of validation take a hundred times as long."""


class Clocked(Validated):
    """A model that advances the clock in each phase of training and of validation."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.clock.advance(TRANSFER if self.training else 100 * TRANSFER)
        return batch

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.clock.advance(FORWARD)
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.clock.advance(BACKWARD)
        loss.backward()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.clock.advance(100 * FORWARD)
        return super().validation_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return loader(2, look=lambda: self.clock.advance(100 * DATA))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """Return the clock that the monitor reads."""
    clock = StillClock()
    use_clock(monkeypatch, clock)
    return clock


TRAINING = {
    "data": DATA,
    "transfer": TRANSFER,
    "forward": FORWARD,
    "backward": BACKWARD,
    "optimizer": 0.0,
    "other": 0.0,
}
VALIDATION = {
    "data": 100 * DATA,
    "transfer": 100 * TRANSFER,
    "forward": 100 * FORWARD,
    "other": 0.0,
}


def test_each_stages_time_is_its_own(clock: StillClock) -> None:
    """Steps of validation contain no time of training, and vice versa.

    A training step takes 15 s, and a validation step 700 s.
    """
    monitor = watching(stages=("train", "validate"))
    fit(
        Clocked(clock),
        monitor,
        data=loader(30, look=lambda: clock.advance(DATA)),
        val_check_interval=5,
    )
    (train,) = of_stage(monitor, "train")
    (validate,) = of_stage(monitor, "validate")
    unprofiled = [step for step in train.steps if step.is_unprofiled]
    assert 5 == len(unprofiled)
    assert 15.0 == unprofiled[0].seconds
    for step in unprofiled:
        assert TRAINING == {name: step.phases[name] for name in TRAINING}
    timed = [step for step in validate.steps if step.kind != "counting"]
    assert 10 == len(timed)
    for step in timed:
        assert VALIDATION == step.phases
        assert 700.0 == step.seconds


def test_a_training_step_with_a_validation_in_it_says_so(clock: StillClock) -> None:
    """A training step that contains a validation is marked and includes the time of the validation.

    Its phases data, forward, backward and optimizer are those of training alone.
    """
    monitor = watching()
    fit(
        Clocked(clock),
        monitor,
        data=loader(30, look=lambda: clock.advance(DATA)),
        val_check_interval=5,
    )
    (step,) = [step for step in monitor.profiles[0].steps if "validation" in step.marks]
    assert 15 + 2 * 700 == step.seconds
    own = ("data", "forward", "backward", "optimizer")
    assert {name: TRAINING[name] for name in own} == {name: step.phases[name] for name in own}


def test_without_listening_to_a_stage_alone_times_would_be_mixed(
    clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the session of validation is never paused, its steps include training: the tests can fail.

    The 5 training steps between two validations are then part of the first step of the second
    one.
    """
    monkeypatch.setattr(session.Session, "pause", lambda _: None)
    monkeypatch.setattr(session.Session, "resume", once(session.Session.resume))
    monitor = watching(stages=("validate",))
    fit(
        Clocked(clock),
        monitor,
        data=loader(30, look=lambda: clock.advance(DATA)),
        val_check_interval=5,
    )
    timed = [step.seconds for step in monitor.profiles[0].steps if step.kind != "counting"]
    assert {700 + 5 * 15} == set(timed) - {700}


def once(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that calls the given one only once for each argument."""
    begun: list[object] = []

    def first(of: Any) -> None:
        if of not in begun:
            begun.append(of)
            function(of)

    return first


def test_figures_and_files_are_named_by_the_stage(tmp_path: Path) -> None:
    """Files and logged values have the name of their stage; only training has a backward."""
    logger = CSVLogger(tmp_path)
    monitor = watching(stages=("train", "validate"), schedule=BRIEF)
    fit(Validated(), monitor, logger=logger, val_check_interval=5, log_every_n_steps=5)
    saved = names(Path(logger.log_dir, "lflops"))
    assert ["train-0-2.profile.json", "validate-0-9.profile.json"] == saved
    with Path(logger.log_dir, "metrics.csv").open(encoding="utf-8") as file:
        columns = next(csv.reader(file))
    assert {
        "lflops/train/step_ms",
        "lflops/train/backward_ms",
        "lflops/validate/step_ms",
        "lflops/validate/forward_ms",
    } <= set(columns)
    assert [] == [
        name for name in columns if name.startswith("lflops/validate/") and "backward" in name
    ]


def test_only_the_training_is_tracked() -> None:
    """Training has a point every fifth step. Validation only has the values of its window."""
    logger = Recorder()
    monitor = watching(stages=("train", "validate"), schedule=BRIEF)
    fit(Validated(), monitor, logger=logger, val_check_interval=5, log_every_n_steps=5)

    def logged_steps(stage: str) -> list[int]:
        steps = []
        for step, given in logger.given.items():
            if any(name.startswith(f"lflops·{stage}·") for name in given):
                steps.append(step)
        return steps

    # The unprofiled steps of training are 3, 5, 6, 7 and 8, so its window closes at step 8. The
    # window of validation waits for unprofiled steps until the end.
    assert [4, 8, 9, 14, 19, 24, 29] == logged_steps("train")
    assert [29] == logged_steps("validate")


def test_what_is_not_asked_for_is_not_watched(tmp_path: Path) -> None:
    """Only the stages in `stages` are profiled, in a fit with validation and in a test."""
    for stage, expected in (
        ("validate", ["validate-0-29.profile.json"]),
        ("train", ["train-0-2.profile.json"]),
    ):
        folder = tmp_path / stage
        folder.mkdir()
        monitor = watching(stages=(stage,), schedule=BRIEF, dirpath=folder)
        around = Around()
        fit(Validated(), around, monitor, val_check_interval=15)
        assert [] == around.left()
        assert expected == names(folder)
        assert [stage] == [profile.run.stage for profile in monitor.profiles]
        ask("test", Staged(), monitor)
        assert [] == monitor.profiles
        assert expected == names(folder)


class Listened(Callback):
    """Records in each training batch whether anything listens to the phases of validation."""

    def __init__(self) -> None:
        self.seen: set[bool] = set()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        phases = phases_of(trainer)
        reads_log = any(reader._stage == "validate" for reader in phases.log._readers)
        self.seen.add(reads_log or bool(phases._listeners.get("validate")))


def test_between_two_validations_nothing_of_theirs_is_on() -> None:
    """Between validations, nothing listens to their phases, so training is not slowed down."""
    listened = Listened()
    fit(Validated(), listened, watching(stages=("validate",)), val_check_interval=5)
    assert {False} == listened.seen


def test_a_validation_that_does_not_rest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the session of validation is never paused, the test above would fail."""
    monkeypatch.setattr(session.Session, "pause", lambda _: None)
    listened = Listened()
    fit(Validated(), listened, watching(stages=("validate",)), val_check_interval=5)
    assert {False, True} == listened.seen


def fails(stage: str, batch: int) -> type[Staged]:
    """Return a model that raises in a batch of a stage. Batches of a sanity check do not count."""

    class Failing(Staged):
        seen = 0

        def fail(self) -> None:
            if not self.trainer.sanity_checking:
                self.seen += 1
                if self.seen == batch + 1:
                    raise ValueError("planted")

        def val_dataloader(self) -> Any:
            return loader(2)

    def step(self: Any, batch_: Any, batch_idx: int) -> Tensor:
        self.fail()
        return self(batch_[0])

    setattr(Failing, {"validate": "validation_step"}.get(stage, f"{stage}_step"), step)
    return Failing


def test_an_exception_in_a_validation_closes_both_stages(tmp_path: Path) -> None:
    """After an exception in validation, both stages have a partial profile and a note about it."""
    monitor = watching(stages=("train", "validate"), dirpath=tmp_path)
    around = Around()
    with pytest.raises(ValueError, match="planted"):
        fit(fails("validate", 3)(), around, monitor, val_check_interval=2)
    assert [] == around.left()
    assert {"train": "un" * 4, "validate": "un" * 3} == {
        str(profile.run.stage): kinds(profile) for profile in monitor.profiles
    }
    for profile in monitor.profiles:
        (ended,) = [note for note in profile.notes if note.code == "ended_early"]
        assert "ValueError" == ended.subject
        assert profile.run.partial
    assert 2 == len(monitor.profiles)
    assert ["train-0-3.profile.json", "validate-0-3.profile.json"] == names(tmp_path)


@pytest.mark.parametrize("stage", ALONE)
@pytest.mark.parametrize("trace", [False, True])
def test_an_exception_in_a_stage_alone_closes_it(stage: str, trace: bool, tmp_path: Path) -> None:
    """After an exception in step 8, a stage has a partial profile and no trace.

    Step 8 is a module-timing or a traced step.
    """
    monitor = watching(stages=(stage,), dirpath=tmp_path, trace=trace)
    with pytest.raises(ValueError, match="planted"):
        ask(stage, fails(stage, 8)(), monitor)
    (profile,) = monitor.profiles
    last = "tr" if trace else "mo"
    assert "un" * 6 + "co" + last == kinds(profile)
    assert profile.run.partial
    assert profile.trace is None
    assert [f"{stage}-0-0.profile.json"] == names(tmp_path)


def traces(monitor: FlopsMonitor) -> list[list[dict[str, Any]]]:
    """Return the events in the trace of each window."""
    found = []
    for profile in monitor.profiles:
        if profile.trace:
            for path in profile.trace.files.values():
                trace = json.loads(gzip.decompress(Path(path).read_bytes()))
                found.append(trace["traceEvents"])
    return found


@pytest.mark.parametrize("stage", ALONE)
def test_a_stage_alone_is_traced(stage: str, tmp_path: Path) -> None:
    """The trace of a stage has three batches, and each call of a module has the MACs of one batch.

    All calls are forward, and the model itself is one of the modules.
    """
    monitor = watching(stages=(stage,), dirpath=tmp_path, trace=True)
    ask(stage, Staged(), monitor)
    (found,) = traces(monitor)
    calls = [event["args"] for event in found if event.get("cat") == "lflops_module"]
    products = {"": BODY + HEAD, "body": BODY, "body.0": BODY, "head": HEAD}
    assert [(name, "forward", macs) for name, macs in products.items()] * 3 == [
        (each["module"], each["phase"], each["MACs"]) for each in calls if each.get("MACs")
    ]
    assert {"forward"} == {each["phase"] for each in calls}
    folders = {path.name for path in (tmp_path / "lflops_traces").iterdir()}
    # If torch-tb-profiler is installed, there is a copy for it.
    folders.discard(f"compat-{stage}-0-0")
    assert {f"{stage}-0-0"} == folders


def test_a_validations_trace_ends_with_it(tmp_path: Path) -> None:
    """A trace ends with the validation, and contains nothing of the training after it.

    Three batches were to be traced, but the validation of four batches ends after two of them.
    """

    class Longer(Validated):
        def val_dataloader(self) -> Any:
            return loader(4)

    monitor = watching(
        stages=("validate",),
        schedule=Schedule(wait=1, warmup=1, active=3),
        dirpath=tmp_path,
        trace=True,
    )
    fit(Longer(), monitor, val_check_interval=5)
    (profile,) = monitor.profiles
    assert "unco" + "tr" * 2 + "un" + "mo" * 3 == kinds(profile)[:16]
    assert profile.trace is not None
    assert 2 == profile.trace.batches
    (found,) = traces(monitor)
    recorded = {event["name"] for event in found}
    assert "aten::addmm" in recorded
    assert [] == [name for name in recorded if "Backward" in name or "Optimizer" in name]
    assert 2 * 2 == sum(event["name"] == "aten::addmm" for event in found)


def test_a_trace_that_does_not_end_with_the_validation_has_the_training_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If tracing is not paused after a validation, the test above would fail."""
    monkeypatch.setattr(session.Session, "pause", lambda self: self._logged_phases.disconnect())
    monitor = watching(
        stages=("validate",),
        schedule=Schedule(wait=0, warmup=1, active=3),
        dirpath=tmp_path,
        trace=True,
    )
    fit(Validated(), monitor, val_check_interval=5)
    (found,) = traces(monitor)
    recorded = {event["name"] for event in found}
    assert [name for name in recorded if "Backward" in name or "Optimizer" in name]


def test_traced_batches_that_begin_a_validation_are_recorded(tmp_path: Path) -> None:
    """If a validation ends with the counting step, the next validation begins with traced steps."""
    monitor = watching(
        stages=("validate",),
        schedule=Schedule(wait=1, warmup=1, active=2),
        dirpath=tmp_path,
        trace=True,
    )
    fit(Validated(), monitor, val_check_interval=5)
    (profile,) = monitor.profiles
    assert profile.trace is not None
    assert 2 == profile.trace.batches


def test_a_validations_transfers_are_none_of_trainings(clock: StillClock) -> None:
    """In a training step that contains a validation, the whole validation is "other".

    So the phase "transfer" has the copy of one training batch. Two validation steps take 1400 s.
    """
    monitor = watching()
    fit(
        Clocked(clock),
        monitor,
        data=loader(30, look=lambda: clock.advance(1.0)),
        val_check_interval=5,
    )
    (step,) = [step for step in monitor.profiles[0].steps if "validation" in step.marks]
    assert TRAINING | {"other": 1400.0} == {name: step.phases[name] for name in TRAINING}
