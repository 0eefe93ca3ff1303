"""Validation, test and prediction.

Each is a stage with a schedule, a clock and files of its own, within a fit or alone.
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
from lflops.integrations.lightning.phase_hooks import phases_of
from lflops.monitoring import session
from lflops.profile.profile import Profile
from lflops.schedule import Schedule
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

BODY, HEAD = ROWS * WIDTH * WIDTH, ROWS * WIDTH * CLASSES
"""MACs of a batch in the two layers' forward."""

ALONE = ("validate", "test", "predict")
"""What a Trainer can be asked for beside `fit`."""

BRIEF = Schedule(wait=1, warmup=1, active=1)


class Staged(Classifier):
    """The same in each stage."""

    def validation_step(
        self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        return self(batch[0])

    test_step = predict_step = validation_step


def ask(
    stage: str, module: LightningModule, *callbacks: Any, data: Any = None, **options: Any
) -> Trainer:
    """Go through a stage alone, as `fit` does."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            callbacks=list(callbacks),
            **{"logger": False, "default_root_dir": directory, **QUIET, **options},
        )
        quiet = {} if stage == "predict" else {"verbose": False}
        getattr(trainer, stage)(module, loader(30) if data is None else data, **quiet)
    return trainer


def kinds(profile: Profile) -> str:
    """Two letters for each step."""
    return "".join(step.kind[:2] for step in profile.steps)


def of_stage(monitor: FlopsMonitor, stage: str) -> list[Profile]:
    """Its windows."""
    return [profile for profile in monitor.profiles if profile.run.stage == stage]


def names(folder: Path) -> list[str]:
    """Of the files below it."""
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
    """OpCount by cell; the products of two layers, and no backward."""
    model, monitor = Staged(), watching(stages=(stage,))
    ask(stage, model, monitor, inference_mode=inference_mode)
    (profile,) = monitor.profiles
    with mode():
        counted = lflops.count(model.eval(), torch.zeros(ROWS, WIDTH))
    assert counted.op_counts == profile.op_counts
    own = {
        name: module.forward.self_macs
        for name, module in profile.modules.items()
        if module.forward.self_macs
    }
    assert {"body.0": BODY, "head": HEAD} == own
    assert {0} == {
        profile.total(phase=phase, metric="flops")
        for phase in ("backward", "recompute", "optimizer", "other")
    }  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ALONE)
def test_a_stage_alone_is_one_window_with_files_of_its_name(stage: str, tmp_path: Path) -> None:
    """As a training is: the same schedule, shrunk to the same ends.

    The loggers' step does not move.
    """
    monitor = watching(stages=(stage,), dirpath=tmp_path)
    ask(stage, Staged(), monitor)
    (profile,) = monitor.profiles
    assert "un" * 6 + "co" + "mo" * 3 + "un" == kinds(profile)
    assert [("warmup", "new_shapes"), ("warmup",), *[()] * 9] == [
        step.marks for step in profile.steps
    ]
    assert ("training", stage, 0, 0, False) == (
        profile.run.kind,
        profile.run.stage,
        profile.run.window,
        profile.run.step,
        profile.run.partial,
    )
    assert [f"{stage}-0-0.profile.json"] == names(tmp_path)
    assert profile == lflops.load(tmp_path / f"{stage}-0-0.profile.json")
    assert profile.run.accumulation is None
    leaves = [profile.modules[name] for name in ("body.0", "head")]
    assert all(
        leaf.forward.seconds is not None and leaf.backward.seconds is None for leaf in leaves
    )


@pytest.mark.parametrize("stage", ALONE)
def test_a_stage_too_short_for_the_schedule_shrinks_it(stage: str) -> None:
    """To its batches, of all its loaders: two and three."""
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
    """A monitor of a fit that validates in two batches after every fifth of thirty."""
    monitor = watching(stages=stages, schedule=schedule)
    fit(Validated(), monitor, val_check_interval=5, **options)
    return monitor


def test_the_schedule_goes_on_from_one_validation_to_the_next() -> None:
    """Twelve batches in six validations.

    The first of each is cold, and so are the first two of all; behind the window none such is
    taken.

    The loggers' step is that of the training's batch behind which it is validated.
    """
    (profile,) = validations(Schedule()).profiles
    assert "un" * 6 + "co" + "mo" * 3 + "un" == kinds(profile)
    assert [4, 4, 9, 9, 14, 14, 19, 19, 24, 24, 29] == [step.index for step in profile.steps]
    assert [True, True, *[True, False] * 4, False] == [
        "warmup" in step.marks for step in profile.steps
    ]
    assert ("validate", 24, False) == (profile.run.stage, profile.run.step, profile.run.partial)


def test_each_stage_has_its_own_schedule() -> None:
    """Windows of three, each twice: in training's steps and in validation's."""
    monitor = validations(
        Schedule(wait=1, warmup=1, active=1, repeat=2), stages=("train", "validate")
    )
    opened = {
        stage: [[step.kind for step in profile.steps][:3] for profile in of_stage(monitor, stage)]
        for stage in ("train", "validate")
    }
    windows = [
        ["unprofiled", "counting", "module_timing"],
        ["unprofiled", "unprofiled", "module_timing"],
    ]  # what the second would count is known
    assert {"train": windows, "validate": windows} == opened


def test_the_sanity_check_is_not_watched() -> None:
    """Its two batches, the first of all, are seen by the model and not by the monitor."""

    class Seen(Validated):
        batches = 0

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.batches += 1
            return super().validation_step(batch, batch_idx)

    monitor, model = watching(stages=("validate",), schedule=BRIEF), Seen()
    fit(model, monitor, val_check_interval=15, num_sanity_val_steps=2)
    assert (2 + 4, "uncomoun") == (model.batches, kinds(monitor.profiles[0]))


def test_several_loaders_are_one_stage() -> None:
    """Two and three batches after each of two halves."""

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
    """Two batches are all that there are in a fit, where nobody knows beforehand.

    One waited for, and the counted one.
    """
    monitor = watching(stages=("validate",), schedule=BRIEF)
    fit(Validated(), monitor)
    (profile,) = monitor.profiles
    assert ("unco", True) == (kinds(profile), profile.run.partial)


DATA, TRANSFER, FORWARD, BACKWARD = 1.0, 2.0, 4.0, 8.0
"""Seconds of a training's batch; a validation's take a hundred times as long."""


class Clocked(Validated):
    """Everything takes its time, in training and in validation."""

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
    """The one that the monitor reads."""
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
    """A validation's steps have nothing of the training that was between them, and a training's clean ones nothing of a validation."""
    monitor = watching(stages=("train", "validate"))
    fit(
        Clocked(clock),
        monitor,
        data=loader(30, look=lambda: clock.advance(DATA)),
        val_check_interval=5,
    )
    (train,), (validate,) = of_stage(monitor, "train"), of_stage(monitor, "validate")
    clean = [step for step in train.steps if step.is_unprofiled]
    assert (5, 15.0) == (len(clean), clean[0].seconds)
    assert all(TRAINING == {name: step.phases[name] for name in TRAINING} for step in clean)
    timed = [step for step in validate.steps if step.kind != "counting"]
    assert 10 == len(timed)
    assert all((VALIDATION, 700.0) == (step.phases, step.seconds) for step in timed)


def test_a_training_step_with_a_validation_in_it_says_so(clock: StillClock) -> None:
    """It took as long as both, of which it fetched, computed and learned in its own time."""
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
    """The checks above can fail.

    Here a validation does not rest, and what is between two is in the first step of the second.
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
    mixed = [
        step.seconds
        for step in monitor.profiles[0].steps
        if step.kind != "counting" and step.seconds != 700
    ]
    assert {700 + 5 * 15} == set(mixed)


def once(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Does so the first time, and then nothing."""
    begun: list[object] = []

    def first(of: Any) -> None:
        if of not in begun:
            begun.append(of)
            function(of)

    return first


def test_figures_and_files_are_named_by_the_stage(tmp_path: Path) -> None:
    """Of two stages each has its own, below the logger's directory."""
    logger, monitor = CSVLogger(tmp_path), watching(stages=("train", "validate"), schedule=BRIEF)
    fit(Validated(), monitor, logger=logger, val_check_interval=5, log_every_n_steps=5)
    assert ["train-0-2.profile.json", "validate-0-9.profile.json"] == names(
        Path(logger.log_dir, "lflops")
    )
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
    """Of a validation there are the figures of its windows, once each.

    Of the training there is a point every fifth step.
    """
    logger, monitor = Recorder(), watching(stages=("train", "validate"), schedule=BRIEF)
    fit(Validated(), monitor, logger=logger, val_check_interval=5, log_every_n_steps=5)
    told = {
        stage: [
            step
            for step, given in logger.given.items()
            if any(name.startswith(f"lflops·{stage}·") for name in given)
        ]
        for stage in ("train", "validate")
    }
    # Training's clean steps are 3, 5, 6, 7 and 8; the window of validation waits for its own to the
    # end.
    assert {"train": [4, 8, 9, 14, 19, 24, 29], "validate": [29]} == told


def test_what_is_not_asked_for_is_not_watched(tmp_path: Path) -> None:
    """A fit of which only the validation is, and the other way round; a test of which neither is."""
    for stages, expected in (
        (("validate",), ["validate-0-29.profile.json"]),
        (("train",), ["train-0-2.profile.json"]),
    ):
        (folder := tmp_path / stages[0]).mkdir()
        monitor, around = watching(stages=stages, schedule=BRIEF, dirpath=folder), Around()
        fit(Validated(), around, monitor, val_check_interval=15)
        assert [] == around.left()
        assert (expected, [stages[0]]) == (
            names(folder),
            [profile.run.stage for profile in monitor.profiles],
        )
        ask("test", Staged(), monitor)
        assert ([], expected) == (monitor.profiles, names(folder))


class Listened(Callback):
    """Takes down, in each batch of the training, whether validations are listened to."""

    def __init__(self) -> None:
        self.seen: set[bool] = set()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        phases = phases_of(trainer)
        reads_log = any(reader._stage == "validate" for reader in phases.log._readers)
        self.seen.add(reads_log or bool(phases._listeners.get("validate")))


def test_between_two_validations_nothing_of_theirs_is_on() -> None:
    """A training that is not watched is not listened to."""
    listened = Listened()
    fit(Validated(), listened, watching(stages=("validate",)), val_check_interval=5)
    assert {False} == listened.seen


def test_a_validation_that_does_not_rest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail."""
    monkeypatch.setattr(session.Session, "pause", lambda _: None)
    listened = Listened()
    fit(Validated(), listened, watching(stages=("validate",)), val_check_interval=5)
    assert {False, True} == listened.seen


def fails(stage: str, batch: int) -> type[Staged]:
    """A model whose step of that stage raises in its batch of that number, not counting those of a sanity check."""

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
    """Each with what there is, and with the reason."""
    monitor, around = watching(stages=("train", "validate"), dirpath=tmp_path), Around()
    with pytest.raises(ValueError, match="planted"):
        fit(fails("validate", 3)(), around, monitor, val_check_interval=2)
    assert [] == around.left()
    assert {"train": "un" * 4, "validate": "un" * 3} == {
        str(profile.run.stage): kinds(profile) for profile in monitor.profiles
    }
    ended = [
        (note.code, note.subject)
        for profile in monitor.profiles
        for note in profile.notes
        if note.code == "ended_early"
    ]
    assert [("ended_early", "ValueError")] * 2 == ended
    assert [True, True] == [profile.run.partial for profile in monitor.profiles]
    assert ["train-0-3.profile.json", "validate-0-3.profile.json"] == names(tmp_path)


@pytest.mark.parametrize("stage", ALONE)
@pytest.mark.parametrize("trace", [False, True])
def test_an_exception_in_a_stage_alone_closes_it(stage: str, trace: bool, tmp_path: Path) -> None:
    """In its ninth batch, which is hooked, or traced."""
    monitor = watching(stages=(stage,), dirpath=tmp_path, trace=trace)
    with pytest.raises(ValueError, match="planted"):
        ask(stage, fails(stage, 8)(), monitor)
    (profile,) = monitor.profiles
    assert ("un" * 6 + "co" + ("tr" if trace else "mo"), True, None) == (
        kinds(profile),
        profile.run.partial,
        profile.trace,
    )
    assert [f"{stage}-0-0.profile.json"] == names(tmp_path)


def traces(monitor: FlopsMonitor) -> list[list[dict[str, Any]]]:
    """What is in the trace of each window."""
    paths = [
        path
        for profile in monitor.profiles
        if profile.trace
        for path in profile.trace.files.values()
    ]
    return [json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"] for path in paths]


@pytest.mark.parametrize("stage", ALONE)
def test_a_stage_alone_is_traced(stage: str, tmp_path: Path) -> None:
    """Three batches, each call with the products of one; the module itself is called as well."""
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
    assert {f"{stage}-0-0"} == folders - {
        f"compat-{stage}-0-0"
    }  # the copy is for torch-tb-profiler, where that is installed


def test_a_validations_trace_ends_with_it(tmp_path: Path) -> None:
    """Of three batches to trace, two are the last of a validation of four.

    Of the training that follows nothing is recorded.
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
    """The check above can fail."""
    monkeypatch.setattr(session.Session, "pause", lambda self: self._logged_phases.disconnect())
    monitor = watching(
        stages=("validate",),
        schedule=Schedule(wait=0, warmup=1, active=3),
        dirpath=tmp_path,
        trace=True,
    )
    fit(Validated(), monitor, val_check_interval=5)
    (found,) = traces(monitor)
    assert [
        name
        for name in {event["name"] for event in found}
        if "Backward" in name or "Optimizer" in name
    ]


def test_traced_batches_that_begin_a_validation_are_recorded(tmp_path: Path) -> None:
    """The last validation has ended with the counted one."""
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
    """The step that the validation is in has the transfer of one batch.

    All of the validation is other.
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
