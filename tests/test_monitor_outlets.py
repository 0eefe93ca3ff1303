"""What people get to read: the log, files, and figures in every logger."""

import csv
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from clocks import StillClock
from fits import CLASSES, LIGHTNINGS_WARNINGS, ROWS, WIDTH, Classifier, Validated, fit, loader, watching
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch import Tensor

import lflops
from lflops import Hardware
from lflops.callback import session
from lflops.report.page import page
from lflops.report.payload import payload
from lflops.report.summary import summary
from lflops.schedule import Schedule
from lflops.tensorboard.stored import checked

pytestmark = LIGHTNINGS_WARNINGS

DATA, FORWARD, BACKWARD = 1.0, 2.0, 5.0
"""Seconds; a step is 8, without the optimizer, which takes no time here."""

MACS = ROWS * WIDTH * WIDTH * 2 + ROWS * WIDTH * CLASSES * 3
"""Of a batch, forward and backward."""

CHIP = Hardware("abacus", {"fp32": 1000.0})
MFU = 2 * MACS / 8 / 1000


class Timed(Classifier):
    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.clock.advance(FORWARD)
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.clock.advance(BACKWARD)
        loss.backward()


class Recorder(Logger):
    """Keeps the scalars that it is given, under the step they are given for."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, dict[str, float]] = {}

    name = property(lambda self: "recorder")  # type: ignore[assignment]
    version = property(lambda self: 0)  # type: ignore[assignment]
    group_separator = property(lambda self: "·")  # type: ignore[assignment]

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Not looked at."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.given.setdefault(step, {}).update({key: value for key, value in metrics.items() if key.startswith("lflops")})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """The one that the monitor reads."""
    clock = StillClock()
    monkeypatch.setattr(session, "HostClock", lambda: clock)
    return clock


def recorded(clock: StillClock, monitor: Any, **options: Any) -> dict[int, dict[str, float]]:
    """What a logger is given, by its step."""
    logger = Recorder()
    data = loader(30, look=lambda: clock.advance(DATA))
    fit(Timed(clock), monitor, data=data, logger=logger, **{"log_every_n_steps": 5, **options})
    return {step: given for step, given in logger.given.items() if given}


WINDOW = {
    "step_ms": 8e3,
    "data_ms": 1e3,
    "forward_ms": 2e3,
    "backward_ms": 5e3,
    "optimizer_ms": 0.0,
    "mfu": MFU,
    "hfu": MFU,
    "tflops_per_device": 2 * MACS / 8 / 1e12,
    "samples_per_second": ROWS / 8,
}
POINT = {name: WINDOW[name] for name in ("step_ms", "mfu", "tflops_per_device", "samples_per_second")} | {"counted_share": 1.0}


def test_a_window_gives_its_figures_to_the_logger(clock: StillClock) -> None:
    """Once, at the step that it is closed at, by the logger's own separator; the memory's peak is what was counted. Hooks take no time."""
    monitor = watching(hardware=CHIP, track=False)
    given = recorded(clock, monitor)
    assert {10} == given.keys()
    memory = monitor.profiles[0].memory
    assert memory is not None
    expected = WINDOW | {"peak_memory_gib": memory.peak_bytes / 2**30, "observer_overhead": 0.0}
    assert pytest.approx({f"lflops·train·{name}": value for name, value in expected.items()}) == given[10]


def test_the_whole_run_is_tracked(clock: StillClock) -> None:
    """Every fifth step, from the steps since the last; before something was counted only the time of a step is known."""
    given = recorded(clock, watching(hardware=CHIP))
    assert {4, 9, 10, 14, 19, 24, 29} == given.keys()
    for step in (14, 19, 24, 29):
        assert pytest.approx({f"lflops·train·{name}": value for name, value in POINT.items()}) == given[step]


@pytest.mark.parametrize("options", [{"log_every_n_steps": 0}, {"fast_dev_run": 3}, {"log_every_n_steps": 50}])
def test_where_nothing_is_to_be_logged_nothing_is(options: dict[str, Any], clock: StillClock) -> None:
    """No point comes before its time, and a window's figures come all the same, but in a trial run."""
    given = recorded(clock, watching(), **options)
    assert (set() if "fast_dev_run" in options else {10}) == given.keys()


def test_points_follow_the_steps_of_the_optimizer(clock: StillClock) -> None:
    """With two batches to a step a step takes twice as long, and there are half as many."""
    given = recorded(clock, watching(hardware=CHIP), accumulate_grad_batches=2)
    assert 14 == max(given)
    assert pytest.approx(2 * 8e3) == given[14]["lflops·train·step_ms"]
    assert pytest.approx(MFU) == given[14]["lflops·train·mfu"]
    assert pytest.approx(ROWS / 8) == given[14]["lflops·train·samples_per_second"]


class Sized(torch.utils.data.IterableDataset[Any]):
    """Batches of the sizes given, each of which takes its time to come."""

    def __init__(self, sizes: list[int], clock: StillClock) -> None:
        self.sizes = sizes
        self.clock = clock

    def __iter__(self) -> Any:
        for size in self.sizes:
            yield torch.zeros(size, WIDTH), torch.zeros(size, dtype=torch.long)
            self.clock.advance(DATA)


def test_a_point_rests_on_the_steps_whose_shapes_were_counted(clock: StillClock) -> None:
    """Of the last five steps two are of a size that was never counted: the share is said, and MFU is that of the three."""
    sizes = [ROWS] * 10 + [ROWS, 2 * ROWS, ROWS, ROWS, 2 * ROWS] + [ROWS, 2 * ROWS, ROWS, ROWS, 2 * ROWS]
    logger = Recorder()
    data = torch.utils.data.DataLoader(Sized(sizes, clock), batch_size=None)
    fit(Timed(clock), watching(hardware=CHIP), data=data, logger=logger, log_every_n_steps=5)
    assert pytest.approx(3 / 5) == logger.given[19]["lflops·train·counted_share"]
    assert pytest.approx(MFU) == logger.given[19]["lflops·train·mfu"]
    # The first batch of a new size is no measure of the others: four steps are left of the third point.
    assert pytest.approx(3 / 4) == logger.given[14]["lflops·train·counted_share"]


def test_disturbed_steps_are_in_no_point(clock: StillClock) -> None:
    """Validation every three steps and a checkpoint in between: what is left is as ever, and the marks say what was disturbed."""

    class Checked(Timed, Validated):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
            self.clock.advance(100)

    monitor = watching(hardware=CHIP)
    logger = Recorder()
    fit(
        Checked(clock),
        monitor,
        data=loader(30, look=lambda: clock.advance(DATA)),
        logger=logger,
        log_every_n_steps=5,
        val_check_interval=3,
        enable_checkpointing=True,
    )
    assert {8e3} == {given["lflops·train·step_ms"] for given in logger.given.values() if "lflops·train·step_ms" in given}
    marks = {step.index: set(step.marks) - {"cold", "new_shapes"} for step in monitor.profiles[0].steps}
    assert {3, 6, 9} == {index for index, each in marks.items() if "validation" in each}
    assert {"validation", "checkpoint"} >= set().union(*marks.values())


def test_without_a_peak_there_is_no_mfu(clock: StillClock) -> None:
    """Nor a dash, nor a zero."""
    given = recorded(clock, watching(hardware=None))
    assert {"mfu", "hfu"}.isdisjoint(name.rpartition("·")[2] for each in given.values() for name in each)


def test_tokens_are_what_the_user_says_they_are(clock: StillClock) -> None:
    """Seven to a batch, of which samples are as many as its shapes say."""
    monitor = watching(units=lambda batch: {"tokens": 7})
    given = recorded(clock, monitor)
    assert pytest.approx(7 / 8) == given[10]["lflops·train·tokens_per_second"]
    assert pytest.approx(ROWS / 8) == given[10]["lflops·train·samples_per_second"]
    assert (ROWS, 7) == (monitor.profiles[0].run.samples_per_step, monitor.profiles[0].run.tokens_per_step)


def test_a_second_monitor_writes_beside_the_first(tmp_path: Path) -> None:
    """Under names of its own."""
    logger = CSVLogger(tmp_path)
    fit(Classifier(), watching(), watching(schedule=Schedule(wait=7)), logger=logger, log_every_n_steps=5)
    assert ["2-train-0-11.profile.json", "train-0-9.profile.json"] == sorted(path.name for path in tmp_path.rglob("*.profile.json"))
    with Path(logger.log_dir, "metrics.csv").open(encoding="utf-8") as file:
        columns = next(csv.reader(file))
    assert {"lflops/train/step_ms", "lflops_2/train/step_ms"} <= set(columns)


def test_profiles_are_saved_below_the_loggers_directory(tmp_path: Path) -> None:
    """Each is the value that the monitor keeps."""
    monitor = watching(schedule=Schedule(wait=2, warmup=1, active=2, repeat=2))
    trainer = fit(Classifier(), monitor, logger=CSVLogger(tmp_path))
    paths = sorted(Path(trainer.log_dir, "lflops").iterdir())
    assert [0, 1] == [lflops.load(path).run.window for path in paths]
    assert monitor.profiles == [lflops.load(path) for path in paths]


def test_without_a_logger_they_are_below_the_trainers_directory(tmp_path: Path) -> None:
    """And with `dirpath` right there."""
    fit(Classifier(), watching(), default_root_dir=tmp_path)
    fit(Classifier(), watching(dirpath=tmp_path / "there"))
    assert ["lflops/train-0-9.profile.json", "there/train-0-9.profile.json"] == sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")
    )


def test_a_page_lies_beside_each_profile(tmp_path: Path) -> None:
    """Under its name, and it is the one that `lflops html` would write."""
    monitor = watching(dirpath=tmp_path, html=True)
    fit(Classifier(), monitor)
    assert ["train-0-9.profile.html", "train-0-9.profile.json"] == sorted(path.name for path in tmp_path.iterdir())
    assert page(monitor.profiles[0]) == (tmp_path / "train-0-9.profile.html").read_text("utf-8")


def test_a_trial_run_writes_nothing(tmp_path: Path) -> None:
    """But it is profiled, in the batches that it has."""
    monitor = watching()
    fit(Classifier(), monitor, fast_dev_run=3, default_root_dir=tmp_path)
    assert [] == list(tmp_path.rglob("*"))
    assert ["clean", "counted", "hooked"] == [step.kind for step in monitor.profiles[0].steps]


def test_tensorboard_gets_curves_the_summary_and_a_layout(tmp_path: Path) -> None:
    """One file for all of it: a second would keep TensorBoard from reading the first."""
    monitor = watching()
    logger = TensorBoardLogger(tmp_path)
    fit(Classifier(), monitor, logger=logger, log_every_n_steps=5)
    assert 1 == len(list(Path(logger.log_dir).glob("events*")))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [4, 9, 10, 14, 19, 24, 29] == [event.step for event in events.Scalars("lflops/train/step_ms")]
    (text,) = events.Tensors("lflops/train/summary/text_summary")
    fenced = text.tensor_proto.string_val[0].decode()
    assert f"```\n{summary(monitor.profiles[0], top_modules=3)}\n```" == fenced
    (layout,) = events.Tensors("custom_scalars__config__")
    charts = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0]).category[0].chart
    patterns = [pattern for chart in charts for pattern in chart.multiline.tag]
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("lflops")}
    unseen = {tag for tag in tags if not any(re.search(pattern, tag) for pattern in patterns)}
    assert {f"lflops/train/{name}" for name in ("peak_memory_gib", "counted_share", "observer_overhead")} == unseen


def test_tensorboard_gets_the_window_for_its_tab(tmp_path: Path) -> None:
    """All of what the page draws, at the step of the summary."""
    monitor = watching()
    logger = TensorBoardLogger(tmp_path)
    fit(Classifier(), monitor, logger=logger)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (window,) = events.Tensors("lflops/train/profile")
    (text,) = events.Tensors("lflops/train/summary/text_summary")
    assert text.step == window.step
    assert msgspec.json.encode(payload(monitor.profiles[0])) == checked(window.tensor_proto.string_val[0])


def test_a_long_summary_is_cut_for_tensorboard() -> None:
    """Which would render all of it on every request: without the details, and then at a hundred lines."""
    from lflops.callback.loggers import LONGEST_TEXT, Outlets

    class Deep(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Sequential(*[torch.nn.Sequential() for _ in range(120)])

    monitor = watching()
    fit(Deep(), monitor)
    writer = Mock()
    writer.file_writer.get_logdir.return_value = "logs"
    outlets = Outlets(Mock(), monitor._settings, 1)
    outlets._to_tensorboard(writer, summary(monitor.profiles[0]), monitor.profiles[0], 9)
    (_, text), _ = writer.add_text.call_args
    assert summary(monitor.profiles[0], top_modules=3, detailed=False) == text.removeprefix("```\n").removesuffix("\n```")
    assert LONGEST_TEXT >= len(text.splitlines()) - 2


def test_the_summary_is_logged_and_goes_to_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a line when the window opens, and one with the names of the files when it closes."""
    path = tmp_path / "reports" / "flops.txt"
    monitor = watching(output_file=path, dirpath=tmp_path, schedule=Schedule(wait=2, warmup=1, active=2, repeat=2), module_depth=1)
    fit(Classifier(), monitor)
    texts = [summary(profile, module_depth=1, top_modules=3) for profile in monitor.profiles]
    assert "".join(f"{text}\n" for text in texts) == path.read_text("utf-8")
    said = [message for message in caplog.messages if message.startswith("lflops:")]
    closed = [profile.run.step for profile in monitor.profiles]
    files = [f"{tmp_path}/train-{window}-{step}.profile.json, {path}" for window, step in enumerate(closed)]
    assert [
        "lflops: train window 0 opens at step 2",
        "lflops: train window 1 opens at step 7",
        f"lflops: train window 0 closed at step {closed[0]}: {files[0]}\n{texts[0]}",
        f"lflops: train window 1 closed at step {closed[1]}: {files[1]}\n{texts[1]}",
    ] == sorted(said, key=lambda line: ("closed" in line, line))


def test_the_file_is_begun_anew_by_each_run(tmp_path: Path) -> None:
    """As DeepSpeed's is."""
    path = tmp_path / "flops.txt"
    monitor = watching(output_file=path)
    fit(Classifier(), monitor)
    fit(Classifier(), monitor)
    assert 1 == path.read_text("utf-8").count("Profile Summary")


def test_the_clean_steps_are_waited_for(clock: StillClock) -> None:
    """With a wait of one there are too few in the window: five that are neither cold, counted nor hooked follow."""
    monitor = watching(schedule=Schedule(wait=1, warmup=1, active=1))
    given = recorded(clock, monitor, log_every_n_steps=50)
    (profile,) = monitor.profiles
    assert [0, 1, 2, 3, 4, 5, 6, 7] == [step.index for step in profile.steps]
    assert ({7}, 2) == (given.keys(), profile.run.step)
    assert not profile.run.partial


def test_a_window_does_not_wait_for_ever(clock: StillClock) -> None:
    """Twenty steps behind its end it is told of with what there is, where every step is disturbed."""

    class Always(Timed, Validated):
        pass

    monitor, logger = watching(), Recorder()
    fit(Always(clock), monitor, logger=logger, val_check_interval=1, batches=40)
    (profile,) = monitor.profiles
    assert {9, 29} == {profile.run.step, max(logger.given)}
    assert {"few_clean_steps": {"steps": 0}} == {note.code: note.values for note in profile.notes}


def test_a_saved_window_says_all_that_it_is(tmp_path: Path) -> None:
    """In the file, without a word of torch's."""
    fit(Classifier(), watching(dirpath=tmp_path, hardware=CHIP), accumulate_grad_batches=2)
    (path,) = tmp_path.iterdir()
    run = json.loads(path.read_text("utf-8"))["run"]
    expected = {
        "kind": "training",
        "stage": "train",
        "window": 0,
        "step": 5,
        "accumulation": 2,
        "samples_per_step": 2 * ROWS,
        "strategy": "SingleDeviceStrategy",
        "world_size": 1,
        "data_parallel_size": 1,
        "precision": "32-true",
        "dtype": "float32",
        "shapes": {"0": [ROWS, WIDTH], "1": [ROWS]},
    }
    assert expected == {name: run[name] for name in expected}
    assert "abacus" == run["hardware"]["name"]
