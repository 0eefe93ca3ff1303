"""Test `FlopsMonitor` as a Lightning callback: its schedule, its arguments, and unusual Trainers.

Some tests write the kinds of the steps in a window as one string, with two letters for each step:
"un" for unprofiled, "co" for counting, "mo" for module-timing.
"""

import json
import pickle
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lflops
from lflops.errors import CountError, ScheduleError
from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.integrations.lightning.trainer_phases import phases_of
from lflops.monitoring.run import OPEN
from lflops.monitoring.schedule import Schedule
from tests.support.lightning_runs import (
    LIGHTNINGS_WARNINGS,
    QUIET,
    Classifier,
    Validated,
    fit,
    loader,
    watching,
)
from tests.support.warm_python import Script, WarmPython

pytestmark = LIGHTNINGS_WARNINGS


ONE_WINDOW = "un" * 6 + "co" + "mo" * 3 + "un"
"""The steps of a window with the default schedule.

5 steps of waiting and 2 of warm-up, of which the last one counts, and 3 active ones. Two of the
unprofiled steps belong to the warm-up of the run, so the window takes another one after it.
"""


def kinds(monitor: FlopsMonitor) -> list[str]:
    """Return the kinds of the steps of each window, two letters for each step."""
    return ["".join(step.kind[:2] for step in profile.steps) for profile in monitor.profiles]


def test_the_last_warm_up_step_is_counted_and_the_active_ones_are_hooked() -> None:
    """The last warm-up step is the counting step, and the active steps are module-timing steps.

    All other steps are unprofiled. The first two have the mark "warmup".
    """
    monitor = watching()
    fit(Classifier(), monitor)
    assert [ONE_WINDOW] == kinds(monitor)
    assert [("warmup", "new_shapes"), ("warmup",), *[()] * 9] == [
        step.marks for step in monitor.profiles[0].steps
    ]


def test_windows_follow_each_other() -> None:
    """Three windows of five steps follow each other, and each takes unprofiled steps after it.

    Without the steps of the run's warm-up, the windows contain 0, 3 and 3 unprofiled steps, which
    are too few. The second and the third window need no counting step, because the counts are
    known. After the third window, the run has only one step left.
    """
    monitor = watching(schedule=Schedule(wait=2, warmup=1, active=2, repeat=3))
    fit(Classifier(), monitor, batches=16)
    steps = [[step.index for step in profile.steps] for profile in monitor.profiles]
    assert [
        [0, 1, 2, 3, 4, 5, 6, 7, 10, 11],
        [5, 6, 7, 8, 9, 10, 11],
        [10, 11, 12, 13, 14, 15],
    ] == steps
    assert [0, 1, 2] == [profile.run.window for profile in monitor.profiles]


def test_after_the_last_window_nobody_listens() -> None:
    """After the last window, no reader of the phase log and no session are left.

    Without a logger and a ledger, nothing needs the steps. The window is closed after 10 steps.
    """

    class Look(lightning.pytorch.Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            has_readers = bool(phases_of(trainer).log._readers)
            has_no_session = monitor._run.sessions["train"] is None
            seen.append((has_readers, has_no_session))

    seen: list[tuple[bool, bool]] = []
    monitor = watching()
    fit(Classifier(), monitor, Look())
    assert [(True, False)] * 10 + [(False, True)] * 20 == seen


SHORT = {
    1: (["co"], {"skip_first": 0, "wait": 0, "warmup": 1, "active": 0, "windows": 1}),
    3: (["uncomo"], {"skip_first": 0, "wait": 0, "warmup": 2, "active": 1, "windows": 1}),
    8: (
        ["un" * 4 + "co" + "mo" * 3],
        {"skip_first": 0, "wait": 3, "warmup": 2, "active": 3, "windows": 1},
    ),
}
"""For short runs with so many batches: the kinds of the steps, and the schedule that fits."""


@pytest.mark.parametrize(("batches", "expected"), SHORT.items())
def test_a_run_too_short_for_the_schedule_shrinks_it_and_says_so(
    batches: int, expected: tuple[list[str], dict[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    """If the schedule does not fit, it is shortened, and a note and the log say so once."""
    monitor = watching()
    fit(Classifier(), monitor, batches=batches)
    steps, left = expected
    assert steps == kinds(monitor)
    (note,) = [note for note in monitor.profiles[0].notes if note.code == "schedule_shrunk"]
    assert {"batches": batches, **left} == note.values
    unit = "batch" if batches == 1 else "batches"
    message = f"does not fit into {batches} {unit}; the schedule"
    assert 1 == sum(message in logged for logged in caplog.messages)


@pytest.mark.parametrize(
    "options",
    [{"max_steps": 8}, {"limit_train_batches": 8}, {"max_epochs": 2, "limit_train_batches": 4}],
)
def test_whatever_makes_the_run_short_is_seen(options: dict[str, Any]) -> None:
    """The schedule is shortened to 8 batches, whichever argument of the Trainer limits the run."""
    monitor = watching()
    fit(Classifier(), monitor, **options)
    assert SHORT[8][0] == kinds(monitor)


def test_a_schedule_is_rounded_up_to_whole_steps_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With gradient accumulation, each part of the schedule is rounded up to whole steps.

    The default schedule has 5, 2 and 3 batches, and a step has 4. These are 2, 1 and 1 steps. A
    note and the log say so once.
    """
    monitor = watching()
    fit(Classifier(), monitor, batches=40, accumulate_grad_batches=4)
    assert ["unun" + "co" + "mo" + "un" * 5] == kinds(monitor)
    assert [{"accumulation": 4}] == [
        note.values for note in monitor.profiles[0].notes if note.code == "rounded_to_cycles"
    ]
    said = "lflops: each step accumulates the gradients of 4 batches"
    assert 1 == sum(message.startswith(said) for message in caplog.messages)


def test_a_second_fit_begins_anew() -> None:
    """If a monitor is used for two fits, it holds only the profiles of the last one."""
    monitor = watching()
    for _ in range(2):
        fit(Classifier(), monitor)
        assert [ONE_WINDOW] == kinds(monitor)


def test_a_resumed_run_is_profiled_from_where_it_goes_on(tmp_path: Path) -> None:
    """In a resumed run, the schedule starts again, but the step numbers continue.

    A checkpoint contains no state of the monitor.
    """
    trainer = fit(Classifier(), watching())
    checkpoint = tmp_path / "last.ckpt"
    trainer.save_checkpoint(checkpoint)
    assert {} == torch.load(checkpoint, weights_only=False)["callbacks"]
    monitor = watching()
    resumed = lightning.pytorch.Trainer(
        callbacks=[monitor], max_epochs=2, logger=False, default_root_dir=tmp_path, **QUIET
    )
    resumed.fit(Classifier(), loader(30), ckpt_path=checkpoint)
    assert [ONE_WINDOW] == kinds(monitor)
    assert 30 <= monitor.profiles[0].steps[0].index


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"count": "yes"}, "count='yes': pass True, False, or a Profile"),
    ({"module_depth": -2}, "module_depth=-2: pass a whole number, -1 or more"),
    ({"top_modules": 1.5}, "top_modules=1.5: pass a whole number, 0 or more"),
    ({"module_scalars": -1}, "module_scalars=-1: pass a whole number, 0 or more"),
    ({"module_scalars": True}, "module_scalars=True: pass a whole number, 0 or more"),
    ({"detailed": 1}, "detailed=1: pass True or False"),
    ({"track": None}, "track=None: pass True or False"),
    ({"html": "page"}, "html='page': pass True or False"),
    ({"output_file": 3}, "output_file=3: pass a path, or None"),
    (
        {"dirpath": __file__},
        f"dirpath={__file__!r}: Not a directory: pass a folder in which files can be created",
    ),
    (
        {"dirpath": f"{__file__}/below"},
        "/below': Not a directory: pass a folder in which files can be created",
    ),
    ({"dirpath": True}, "dirpath=True: pass a path, or None"),
    ({"units": {"samples": 3}}, "units={'samples': 3}: pass a function that takes a batch"),
    ({"on_error": "ignore"}, "on_error='ignore': pass 'warn' or 'raise'"),
    ({"trace": 1}, "trace=1: pass True or False"),
    ({"record_shapes": None}, "record_shapes=None: pass True or False"),
    ({"profile_memory": "yes"}, "profile_memory='yes': pass True or False"),
    ({"with_stack": 0}, "with_stack=0: pass True or False"),
    ({"compiled": True}, "compiled=True: pass 'row' or 'modules'"),
    (
        {"compiled": "modules", "trace": False},
        "compiled='modules' needs a trace, but trace=False: pass trace=True, or compiled='row'",
    ),
    (
        {"stages": "train"},
        "stages='train': pass a tuple or a list with some of 'train', 'validate', 'test', 'predict'",
    ),
    (
        {"stages": ["fit"]},
        "stages=['fit']: pass a tuple or a list with some of 'train', 'validate', 'test', 'predict'",
    ),
    (
        {"activities": ["xpu"]},
        "activities=['xpu']: pass a tuple or a list with some of 'cpu', 'device'",
    ),
    ({"activities": None}, "activities=None: pass a tuple or a list with some of 'cpu', 'device'"),
    ({"trace_ranks": "one"}, "trace_ranks='one': pass 'zero', 'all', or a list of ranks"),
    ({"trace_ranks": [-1]}, "trace_ranks=[-1]: pass 'zero', 'all', or a list of ranks"),
    ({"trace_ranks": [True]}, "trace_ranks=[True]: pass 'zero', 'all', or a list of ranks"),
    ({"ignore_modules": ["nobody"]}, "ignore: the model has no module 'nobody'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_argument_is_a_misconfiguration(arguments: dict[str, Any], message: str) -> None:
    """A wrong argument raises the `MisconfigurationException` of both Lightning packages.

    The message contains the argument, its value and the accepted values.
    """
    for exception in (
        MisconfigurationException,
        pytorch_lightning.utilities.exceptions.MisconfigurationException,
    ):
        with pytest.raises(exception, match=re.escape(message)):
            fit(Classifier(), FlopsMonitor(**arguments))


def test_a_schedule_without_a_step_to_count_in_is_refused() -> None:
    """A schedule with `warmup=0` requires `count=False`, and the error explains this."""
    with pytest.raises(
        ScheduleError,
        match="warmup=0 leaves no step for counting: pass warmup >= 1, or count=False",
    ):
        FlopsMonitor(Schedule(warmup=0))
    assert [] == FlopsMonitor(Schedule(warmup=0), count=False).profiles
    with pytest.raises(ScheduleError, match=r"schedule=5: pass an lflops\.Schedule"):
        FlopsMonitor(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ("H2000", "hardware='H2000': 'H2000' is not in the table of chips"),
        (
            312e12,
            "hardware=312000000000000.0: pass 'auto', 'measure', a chip's name, the path of a TOML file",
        ),
    ],
)
def test_an_unknown_chip_is_refused_when_the_monitor_is_made(hardware: Any, message: str) -> None:
    """An unknown chip raises when the monitor is created, for a Trainer and for a custom loop."""
    for make in (FlopsMonitor, partial(lflops.monitor, Classifier())):
        with pytest.raises(lflops.HardwareError, match=re.escape(message)):
            make(hardware=hardware)


def test_it_can_be_pickled_also_in_the_middle_of_a_fit() -> None:
    """A pickled monitor has the settings and the profiles so far, but not the running fit.

    The copies are made before the fit and in its steps 3, 6 and 20, and each works in another fit.
    """

    class Copying(lightning.pytorch.Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx in {3, 6, 20}:
                copies.append(pickled_and_loaded())

    def pickled_and_loaded() -> FlopsMonitor:
        return pickle.loads(pickle.dumps(monitor))  # noqa: S301 - the test made this pickle

    monitor = watching()
    copies = [pickled_and_loaded()]
    fit(Classifier(), monitor, Copying())
    assert [0, 0, 0, 1] == [len(each.profiles) for each in copies]
    for each in copies:
        fit(Classifier(), each)
        assert [ONE_WINDOW] == kinds(each)


class TheirClassifier(pytorch_lightning.LightningModule):
    """A classifier for the package `pytorch_lightning` instead of `lightning.pytorch`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_it_is_a_callback_of_both_lightnings(tmp_path: Path) -> None:
    """The monitor is a callback of `lightning.pytorch` and of `pytorch_lightning`.

    The other tests use the former, so here it runs in a Trainer of the latter.
    """
    monitor = watching()
    assert isinstance(monitor, lightning.pytorch.Callback)
    assert isinstance(monitor, pytorch_lightning.Callback)
    options: dict[str, Any] = {
        **QUIET,
        "max_epochs": 1,
        "logger": False,
        "default_root_dir": tmp_path,
    }
    pytorch_lightning.Trainer(callbacks=[monitor], **options).fit(TheirClassifier(), loader(30))
    assert [ONE_WINDOW] == kinds(monitor)


def test_to_load_it_leaves_the_name_that_lightning_logs_under(warm_python: WarmPython) -> None:
    """Importing the monitor does not change the name of Lightning's logger.

    Each of the two Lightning packages sets this name when it is imported, so the name must stay
    that of the package that the script imported.
    """
    code = (
        "import sys\n"
        "assert not {{'lightning', 'pytorch_lightning', 'lflops'}} & sys.modules.keys()\n"
        "import {first}\n"
        "from lightning_utilities.core import rank_zero\n"
        "before = rank_zero.log.name\n"
        "from lflops.integrations.lightning.monitor import FlopsMonitor\n"
        "print(before == rank_zero.log.name, before)"
    )
    names = ["lightning.pytorch", "pytorch_lightning"]
    all_ended = warm_python.together([Script(code.format(first=first)) for first in names])
    assert len(names) == len(all_ended)
    for first, ended in zip(names, all_ended, strict=True):
        assert (0, f"True {first}.utilities.rank_zero\n") == (ended.status, ended.out)


@pytest.fixture
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the command line arguments of pytest, because `LightningCLI` would read them."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


@pytest.mark.usefixtures("no_arguments")
# Lightning causes deprecation warnings of jsonargparse
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_can_be_written_in_a_config(tmp_path: Path) -> None:
    """`LightningCLI` creates the monitor from a config, with a schedule, a chip and a path."""
    config = {
        "class_path": "lflops.integrations.lightning.monitor.FlopsMonitor",
        "init_args": {
            "schedule": {"wait": 2, "active": 4},
            "hardware": "NVIDIA H200",
            "output_file": "flops.txt",
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"trainer": {"callbacks": [config]}}), "utf-8")
    cli = LightningCLI(
        Classifier,
        run=False,
        args=["--config", str(path)],
        save_config_callback=None,
        seed_everything_default=False,
    )
    (monitor,) = [each for each in cli.trainer.callbacks if isinstance(each, FlopsMonitor)]
    settings = monitor._settings
    assert Schedule(wait=2, warmup=2, active=4) == settings.schedule
    assert "NVIDIA H200" == settings.hardware
    assert "flops.txt" == settings.output_file


@pytest.mark.usefixtures("no_arguments")
# Lightning causes deprecation warnings of jsonargparse
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_schedule_that_cannot_be_is_refused_in_a_config(tmp_path: Path) -> None:
    """An invalid schedule in a config raises an error with the argument and its value."""
    config = {
        "class_path": "lflops.integrations.lightning.monitor.FlopsMonitor",
        "init_args": {"schedule": {"active": 0}},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"trainer": {"callbacks": [config]}}), "utf-8")
    with pytest.raises(ValueError, match="active=0: pass a whole number, 1 or more"):
        LightningCLI(
            Classifier, run=False, args=["--config", str(path)], seed_everything_default=False
        )


DEEPSPEED = {
    "train_batch_size": 8,
    "flops_profiler": {
        "enabled": True,
        "profile_step": 4,
        "module_depth": 2,
        "top_modules": 3,
        "detailed": False,
        "output_file": None,
        "recompute_fwd_factor": 0.0,
    },
}


def test_a_deepspeed_config_says_which_step_to_count_and_how_to_print_it(tmp_path: Path) -> None:
    """`from_deepspeed` reads the step to count and the output options from a dict or a file.

    DeepSpeed's step 4 is the step with index 3.
    """
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DEEPSPEED), "utf-8")
    for config in (DEEPSPEED, path, str(path)):
        monitor = FlopsMonitor.from_deepspeed(config)
        settings = monitor._settings
        assert 2 == settings.module_depth
        assert 3 == settings.top_modules
        assert settings.detailed is False
        assert settings.output_file is None
        fit(Classifier(), monitor)
        assert [3] == [step.index for step in monitor.profiles[0].steps if step.kind == "counting"]


def test_a_deepspeed_profiler_that_is_not_enabled_is_no_monitor() -> None:
    """If DeepSpeed's profiler is not enabled, as by default, the monitor profiles nothing."""
    for section in ({"enabled": False}, {}):
        monitor = FlopsMonitor.from_deepspeed({"flops_profiler": section})
        fit(Classifier(), monitor)
        assert [] == monitor.profiles


WRONG_CONFIGS: list[tuple[Any, str]] = [
    ({}, 'the config has no "flops_profiler" section'),
    (
        {"flops_profiler": {"depth": 2, "top": 1}},
        "has unknown keys: 'depth', 'top'; DeepSpeed accepts enabled, ",
    ),
    (
        {"flops_profiler": {"module_depth": "all"}},
        "module_depth='all': DeepSpeed accepts only values of the type int",
    ),
    (
        {"flops_profiler": {"profile_step": True}},
        "profile_step=True: DeepSpeed accepts only values of the type int",
    ),
    ("/nowhere.json", "/nowhere.json: "),
]


@pytest.mark.parametrize(("config", "message"), WRONG_CONFIGS)
def test_a_deepspeed_config_that_cannot_be_is_refused(config: Any, message: str) -> None:
    """The error for an invalid DeepSpeed config contains the wrong key or the missing section."""
    with pytest.raises(CountError, match=re.escape(message)):
        FlopsMonitor.from_deepspeed(config)


@pytest.mark.parametrize("profiler", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_the_trainers_own_profiler_goes_on(profiler: Any, tmp_path: Path) -> None:
    """The Trainer's profiler receives the same actions as without the monitor.

    Only the actions of the callback itself are additional.
    """

    class Telling(profiler):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__(dirpath=tmp_path, filename="report")
            self.told: list[str] = []

        def start(self, action_name: str) -> None:
            self.told.append(action_name)
            super().start(action_name)

        def stop(self, action_name: str) -> None:
            self.told.append(f"not {action_name}")
            super().stop(action_name)

    plain = Telling()
    watched = Telling()
    fit(Classifier(), profiler=plain)
    monitor = watching()
    fit(Classifier(), monitor, profiler=watched)
    assert plain.told == [action for action in watched.told if "FlopsMonitor" not in action]
    assert [ONE_WINDOW] == kinds(monitor)


def test_it_works_in_a_bare_trainer(tmp_path: Path) -> None:
    """The monitor works with `barebones=True`, which forbids loggers, checkpoints and profilers."""
    monitor = watching(dirpath=tmp_path)
    trainer = lightning.pytorch.Trainer(
        barebones=True, callbacks=[monitor], max_epochs=1, accelerator="cpu", devices=1
    )
    trainer.fit(Classifier(), loader(30))
    assert [ONE_WINDOW] == kinds(monitor)
    assert 1 == len(list(tmp_path.iterdir()))


def test_two_monitors_do_not_disturb_each_other() -> None:
    """Several monitors in one run each have the right counts and windows.

    Two of them count the same batch at the same time, and the third one has another schedule.
    """
    first = watching()
    second = watching()
    third = watching(schedule=Schedule(wait=1, warmup=1, active=1))
    fit(Classifier(), first, second, third)
    assert first.profiles[0].op_counts == second.profiles[0].op_counts
    assert first.profiles[0].total(phase="backward") == third.profiles[0].total(phase="backward")
    assert [ONE_WINDOW] == kinds(first)
    assert [ONE_WINDOW] == kinds(second)


def test_the_first_monitor_that_wants_the_ledger_keeps_it() -> None:
    """The monitor with `ledger=True` keeps the ledger, although a monitor without one comes before.

    Both monitors open a window that is requested in batch 10.
    """
    monitors = [watching(stages=()), watching(stages=(), ledger=True)]

    class Asks(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 10:
                for each in monitors:
                    each.request_window()

    fit(Classifier(), *monitors, Asks())
    assert [False, True] == [each.ledger is not None for each in monitors]
    assert [1, 1] == [len(each.profiles) for each in monitors]


def test_a_monitor_that_another_callback_calls_watches_the_training() -> None:
    """A monitor outside the Trainer's callbacks works if another callback calls its hooks."""
    monitor = watching()

    class Calls(Callback):
        pass

    def call_monitor(hook: str) -> Callable[..., None]:
        def call(_: Callback, *given: Any, **named: Any) -> None:
            getattr(monitor, hook)(*given, **named)

        return call

    for hook in (
        "setup",
        "on_train_start",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_train_end",
        "teardown",
    ):
        setattr(Calls, hook, call_monitor(hook))
    fit(Classifier(), Calls())
    assert [ONE_WINDOW] == kinds(monitor)


def test_one_monitor_watches_a_training_and_a_validation_within_it(tmp_path: Path) -> None:
    """A monitor works in a training run and in another Trainer that validates within a step.

    The validation ends before training continues. It has a separate folder, and in the end neither
    run is open.
    """
    monitor = watching(stages=("train", "validate"), dirpath=tmp_path)
    inner: list[str] = []

    class Validates(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 3:
                other = lightning.pytorch.Trainer(callbacks=[monitor], logger=False, **QUIET)
                other.validate(Validated(), loader(20), verbose=False)
                inner.extend(profile.run.stage for profile in monitor.profiles)

    fit(Classifier(), Validates(), monitor)
    assert [] == inner
    assert [ONE_WINDOW] == kinds(monitor)
    paths = [str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*.profile.json")]
    files = {path.partition("-0-")[0] for path in paths}
    assert {"run-2/validate", "train"} == files
    assert not OPEN


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_run_within_a_run_leaves_a_monitor_its_files(tmp_path: Path, *, is_nested: bool) -> None:
    """Two monitors write different files, even if the second one also watches an inner run.

    The Trainer's validations come after the run of the other Trainer.
    """
    first, second = (watching(stages=("validate",), dirpath=tmp_path) for _ in range(2))

    class Validates(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if is_nested and batch_idx == 2:
                other = lightning.pytorch.Trainer(callbacks=[second], logger=False, **QUIET)
                other.validate(Validated(), loader(3), verbose=False)

    class LongValidation(Validated):
        def val_dataloader(self) -> DataLoader[Any]:
            return loader(30)

    fit(LongValidation(), Validates(), first, second, batches=10)
    assert [ONE_WINDOW] == kinds(first) == kinds(second)
    names = [each.name for each in tmp_path.rglob("*validate-0-9.profile.json")]
    assert {"validate-0-9.profile.json", "2-validate-0-9.profile.json"} == set(names)


def test_the_tuner_is_not_watched(tmp_path: Path) -> None:
    """Trial runs of a `Tuner` are not profiled, because it removes callbacks; a later fit is."""

    class Tuned(Classifier):
        lr = 0.1

        def train_dataloader(self) -> Any:
            return loader(30)

    monitor = watching()
    module = Tuned()
    trainer = lightning.pytorch.Trainer(
        callbacks=[monitor],
        max_epochs=1,
        logger=False,
        default_root_dir=tmp_path,
        **{**QUIET, "enable_checkpointing": True},
    )
    Tuner(trainer).lr_find(module, num_training=5)
    assert [] == monitor.profiles
    trainer.fit(module)
    assert [ONE_WINDOW] == kinds(monitor)


class Raising(Classifier):
    """Raises in batch 3."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise ValueError("planted")
        return super().training_step(batch, batch_idx)


def test_on_several_ranks_the_first_writes(tmp_path: Path) -> None:
    """Under DDP, only rank 0 writes a profile, whose MACs are those of a run with one rank.

    DDP calls the module inside its wrapper's forward, and this must be counted once.
    """
    alone = watching()
    fit(Classifier(), alone)
    monitor = watching(dirpath=tmp_path)
    fit(Classifier(), monitor, batches=40, strategy="ddp_fork", devices=2)
    (path,) = tmp_path.iterdir()
    profile = lflops.load(path)
    for phase in ("forward", "backward"):
        assert alone.profiles[0].by_module(phase) == profile.by_module(phase)
    assert 2 == profile.run.world_size
    assert 2 == profile.run.data_parallel_size
    assert "DDPStrategy" == profile.run.strategy
    for name in ("body.0", "body.1", "body.2", "head"):
        leaf = profile.modules[name]
        assert leaf.forward.seconds is not None
        assert leaf.backward.seconds is not None
    assert {("backward", 2)} == {(each.phase, each.group_size) for each in profile.communication}


def test_an_error_on_forked_ranks_comes_out_as_it_was(tmp_path: Path) -> None:
    """An error on forked ranks reaches the caller unchanged.

    The monitor of the main process was never set up, and must not add an error.
    """
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="planted"):
        fit(Raising(), watching(dirpath=tmp_path), strategy="ddp_fork", devices=2)
