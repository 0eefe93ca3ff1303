"""Test the outputs of the monitor: the log, files, and values in loggers such as TensorBoard.

Where the expected values are times, a test clock stands still except where the data and the model
advance it.
"""

import csv
import json
import re
import struct
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops import Hardware
from lflops.analysis.analysis import analyze
from lflops.integrations.deepspeed.text.summary import summary
from lflops.monitoring import window_publisher as results
from lflops.monitoring.outputs.loggers import TensorBoardOutput, markdown_of, module_scalars
from lflops.monitoring.schedule import Schedule
from lflops.monitoring.window import step_timer
from lflops.profile.profile import Profile
from lflops.report.html import page
from lflops.report.log_text import log_text
from lflops.report.payload.payload import payload
from lflops.tensorboard.payload_event import unpacked
from tests.integrations.lightning.test_endings import Ending, raises
from tests.support.fake_clock import StillClock, TickingClock, use_clock
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
from tests.support.profile_builders import small_profile
from tests.support.tensorboard_server import Board, board

pytestmark = LIGHTNINGS_WARNINGS

DATA, FORWARD, BACKWARD = 1.0, 2.0, 5.0
"""Seconds of the phases of a step. A step takes 8 s, because the optimizer takes no time."""

MACS = ROWS * WIDTH * WIDTH * 2 + ROWS * WIDTH * CLASSES * 3
"""MACs of forward and backward of a batch. The input of the first layer needs no gradient."""

CHIP = Hardware("abacus", {"fp32": 1000.0})
MFU = 2 * MACS / 8 / 1000
"""The MFU of a step of 8 s on `CHIP`."""


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
    """A logger that keeps the scalars of lflops by step. Its separator is "·"."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, dict[str, float]] = {}

    name = property(lambda self: "recorder")  # type: ignore[assignment]
    version = property(lambda self: 0)  # type: ignore[assignment]
    group_separator = property(lambda self: "·")  # type: ignore[assignment]

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore the hyperparameters."""

    def log_metrics(self, *, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        """Keep the scalars. Only keyword arguments are accepted, because Lightning passes these."""
        assert step is not None
        values = self.given.setdefault(step, {})
        for key, value in metrics.items():
            if key.startswith("lflops"):
                values[key] = value


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """Return the clock that the monitor reads."""
    clock = StillClock()
    use_clock(monkeypatch, clock)
    return clock


def recorded(clock: StillClock, monitor: Any, **options: Any) -> dict[int, dict[str, float]]:
    """Train, and return the values that a logger receives, by step."""
    logger = Recorder()
    data = loader(30, look=lambda: clock.advance(DATA))
    fit(Timed(clock), monitor, data=data, logger=logger, **{"log_every_n_steps": 5, **options})
    return {step: given for step, given in logger.given.items() if given}


WINDOW = {
    "step_ms": 8e3,
    "data_ms": 1e3,
    "forward_ms": 2e3,
    "backward_ms": 5e3,
    "mfu": MFU,
    "tflops_per_device": 2 * MACS / 8 / 1e12,
    "samples_per_second": ROWS / 8,
}
"""The values of a window, except for its memory."""
POINT = {
    name: WINDOW[name] for name in ("step_ms", "mfu", "tflops_per_device", "samples_per_second")
}
"""The values of a point of the curves."""


def named(values: dict[str, float]) -> dict[str, float]:
    """Return the values with the tags that `Recorder` receives."""
    return {f"lflops·train·{name}": value for name, value in values.items()}


def test_a_window_gives_its_figures_to_the_logger(clock: StillClock) -> None:
    """A window logs its values once, at the step at which it closes, with the logger's separator.

    The peak of the memory is that of the counting step.
    """
    monitor = watching(hardware=CHIP, track=False)
    given = recorded(clock, monitor)
    assert {10} == given.keys()
    memory = monitor.profiles[0].memory
    assert memory is not None
    expected = WINDOW | {"peak_memory_gib": memory.peak_bytes / 2**30}
    assert pytest.approx(named(expected)) == given[10]


def test_the_whole_run_is_tracked(clock: StillClock) -> None:
    """The curves have a point every fifth step, computed from the steps since the previous point.

    Points after the window have MFU as well: before it, nothing is counted. The window closes at
    step 10.
    """
    given = recorded(clock, watching(hardware=CHIP))
    assert {4, 9, 10, 14, 19, 24, 29} == given.keys()
    for step in (14, 19, 24, 29):
        assert pytest.approx(named(POINT)) == given[step]


@pytest.mark.parametrize(
    "options", [{"log_every_n_steps": 0}, {"fast_dev_run": 3}, {"log_every_n_steps": 50}]
)
def test_where_nothing_is_to_be_logged_nothing_is(
    options: dict[str, Any], clock: StillClock
) -> None:
    """Without points of curves, only the values of the window are logged; in a trial run, none."""
    given = recorded(clock, watching(), **options)
    assert (set() if "fast_dev_run" in options else {10}) == given.keys()


def test_points_follow_the_steps_of_the_optimizer(clock: StillClock) -> None:
    """With accumulation over two batches, a point refers to optimizer steps.

    A step takes twice as long, and there are half as many steps.
    """
    given = recorded(clock, watching(hardware=CHIP), accumulate_grad_batches=2)
    assert 14 == max(given)
    assert pytest.approx(2 * 8e3) == given[14]["lflops·train·step_ms"]
    assert pytest.approx(MFU) == given[14]["lflops·train·mfu"]
    assert pytest.approx(ROWS / 8) == given[14]["lflops·train·samples_per_second"]


class Sized(torch.utils.data.IterableDataset[Any]):
    """Batches with the given sizes. Fetching each batch takes `DATA` seconds."""

    def __init__(self, sizes: list[int], clock: StillClock) -> None:
        self.sizes = sizes
        self.clock = clock

    def __iter__(self) -> Any:
        for size in self.sizes:
            yield torch.zeros(size, WIDTH), torch.zeros(size, dtype=torch.long)
            self.clock.advance(DATA)


def test_a_point_rests_on_the_steps_whose_shapes_were_counted(clock: StillClock) -> None:
    """The MFU of a point comes from steps whose shapes were counted, and their share is logged.

    Of the last five steps, two have a batch size that was never counted.
    """
    changing = [ROWS, 2 * ROWS, ROWS, ROWS, 2 * ROWS]
    sizes = [ROWS] * 10 + changing + changing
    logger = Recorder()
    data = torch.utils.data.DataLoader(Sized(sizes, clock), batch_size=None)
    fit(Timed(clock), watching(hardware=CHIP), data=data, logger=logger, log_every_n_steps=5)
    assert pytest.approx(3 / 5) == logger.given[19]["lflops·train·counted_share"]
    assert pytest.approx(MFU) == logger.given[19]["lflops·train·mfu"]
    # The first step with a new shape is left out, so 4 steps remain for the third point.
    assert pytest.approx(3 / 4) == logger.given[14]["lflops·train·counted_share"]


def test_disturbed_steps_are_in_no_point(clock: StillClock) -> None:
    """Steps with a validation or a checkpoint are marked, and do not change the points.

    There is a validation every three steps, and a checkpoint after it.
    """

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
    times = set()
    for given in logger.given.values():
        if "lflops·train·step_ms" in given:
            times.add(given["lflops·train·step_ms"])
    assert {8e3} == times
    steps = monitor.profiles[0].steps
    marks = {step.index: set(step.marks) - {"warmup", "new_shapes"} for step in steps}
    assert {3, 6, 9} == {index for index, each in marks.items() if "validation" in each}
    assert {"validation", "checkpoint"} >= set().union(*marks.values())


def test_without_a_peak_there_is_no_mfu(clock: StillClock) -> None:
    """If the peak is unknown, no values for MFU and HFU are logged, not even 0."""
    given = recorded(clock, watching(hardware=None))
    names = set().union(*given.values())
    assert {"mfu", "hfu"}.isdisjoint(name.rpartition("·")[2] for name in names)


def test_tokens_are_what_the_user_says_they_are(clock: StillClock) -> None:
    """The number of tokens is what `units` returns, here 7; samples still come from the shapes."""
    monitor = watching(units=lambda batch: {"tokens": 7})
    given = recorded(clock, monitor)
    assert pytest.approx(7 / 8) == given[9]["lflops·train·tokens_per_second"]
    assert pytest.approx(ROWS / 8) == given[9]["lflops·train·samples_per_second"]
    run = monitor.profiles[0].run
    assert (ROWS, 7) == (run.samples_per_step, run.tokens_per_step)


def test_a_second_monitor_writes_beside_the_first(tmp_path: Path) -> None:
    """Files and tags of a second monitor have other names than those of the first one."""
    logger = CSVLogger(tmp_path)
    second = watching(schedule=Schedule(wait=7))
    fit(Classifier(), watching(), second, logger=logger, log_every_n_steps=5)
    assert ["2-train-0-11.profile.json", "train-0-9.profile.json"] == sorted(
        path.name for path in tmp_path.rglob("*.profile.json")
    )
    with Path(logger.log_dir, "metrics.csv").open(encoding="utf-8") as file:
        columns = next(csv.reader(file))
    assert {"lflops/train/step_ms", "lflops_2/train/step_ms"} <= set(columns)


def test_profiles_are_saved_below_the_loggers_directory(tmp_path: Path) -> None:
    """Profiles are saved in `lflops` below the logger's folder, and equal those of the monitor."""
    monitor = watching(schedule=Schedule(wait=2, warmup=1, active=2, repeat=2))
    trainer = fit(Classifier(), monitor, logger=CSVLogger(tmp_path))
    paths = sorted(Path(trainer.log_dir, "lflops").iterdir())
    assert [0, 1] == [lflops.load(path).run.window for path in paths]
    assert monitor.profiles == [lflops.load(path) for path in paths]


def test_with_dirpath_they_are_right_there(tmp_path: Path) -> None:
    """With `dirpath`, profiles are saved in exactly this folder, and nothing elsewhere."""
    fit(Classifier(), watching(dirpath=tmp_path / "there"), default_root_dir=tmp_path)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [tmp_path / "there/train-0-9.profile.json"] == written


def test_a_page_lies_beside_each_profile(tmp_path: Path) -> None:
    """With `html=True`, a page with the same name as the profile is written next to it."""
    monitor = watching(dirpath=tmp_path, html=True)
    fit(Classifier(), monitor)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert ["train-0-9.profile.html", "train-0-9.profile.json"] == names
    written = (tmp_path / "train-0-9.profile.html").read_text("utf-8")
    assert page(analyze(monitor.profiles[0])) == written


def test_a_trial_run_writes_nothing(tmp_path: Path) -> None:
    """With `fast_dev_run`, no file is written, but its batches are profiled."""
    monitor = watching()
    fit(Classifier(), monitor, fast_dev_run=3, default_root_dir=tmp_path)
    assert [] == list(tmp_path.rglob("*"))
    assert ["unprofiled", "counting", "module_timing"] == [
        step.kind for step in monitor.profiles[0].steps
    ]


def drawn_by_layout(events: EventAccumulator) -> Counter[str]:
    """Return for each tag the number of charts in the layout that show it."""
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    patterns: list[str] = []
    for category in layout.category:
        for chart in category.chart:
            patterns += chart.multiline.tag
    drawn: Counter[str] = Counter()
    for tag in events.Tags()["scalars"]:
        if tag.startswith("lflops"):
            drawn[tag] += sum(bool(re.search(pattern, tag)) for pattern in patterns)
    return drawn


def test_tensorboard_gets_curves_the_summary_and_a_layout(tmp_path: Path) -> None:
    """TensorBoard gets at most 12 curves, the summary as text, and a layout of charts.

    Each curve is on one chart, except for the peak memory, which is on none. The window, which
    closes at step 10, adds no point.
    """
    monitor = watching()
    logger = TensorBoardLogger(tmp_path)
    fit(Classifier(), monitor, logger=logger, log_every_n_steps=5)
    events = told(logger)
    steps = [event.step for event in events.Scalars("lflops/train/step_ms")]
    assert [4, 9, 14, 19, 24, 29] == steps
    (text,) = events.Tensors("lflops/train/summary/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert markdown_of(analyze(monitor.profiles[0])) == shown
    assert shown.startswith("**Classifier** ")
    assert "| step | **" in shown
    assert "Confidence: " in shown
    drawn = drawn_by_layout(events)
    of_training = {tag: number for tag, number in drawn.items() if tag.startswith("lflops/train")}
    on_no_chart = {tag for tag, number in of_training.items() if not number}
    assert {"lflops/train/peak_memory_gib"} == on_no_chart
    assert 1 == max(drawn.values())
    assert 12 >= sum(tag.startswith("lflops") for tag in drawn)
    for tag in drawn:
        assert any(point.value for point in events.Scalars(tag))


def test_tensorboard_gets_the_window_of_a_trainers_second_run(tmp_path: Path) -> None:
    """A validation comes first. At its end, Lightning closes the writer of its logger.

    Nothing else is logged before the window of the training, which opens the writer again.
    """
    logger = TensorBoardLogger(tmp_path)
    trainer = Trainer(
        callbacks=[watching()], max_epochs=1, logger=logger, log_every_n_steps=50, **QUIET
    )
    model = Validated()
    trainer.validate(model, loader(2), verbose=False)
    trainer.fit(model, loader(30))
    events = EventAccumulator(str(logger.log_dir)).Reload()
    assert "lflops/train/profile" in events.Tags()["tensors"]


def test_curves_of_modules_are_on_charts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each curve of a module is on one chart. Curves of modules need three windows.

    The busiest module is the model itself. It has no matmuls, so it has no curve for its rate.
    """
    clock = TickingClock()
    use_clock(monkeypatch, clock)
    schedule = Schedule(wait=1, warmup=1, active=1, repeat=3)
    monitor = watching(module_scalars=1, schedule=schedule)
    logger = TensorBoardLogger(tmp_path)
    fit(Classifier(), monitor, logger=logger)
    first = monitor.profiles[0]
    name = analyze(first).busiest[0].pattern or "root"
    expected = {
        f"lflops_modules/train/forward_ms/{name}": 1,
        f"lflops_modules/train/backward_ms/{name}": 1,
    }
    drawn = drawn_by_layout(told(logger))
    of_modules = {tag: drawn[tag] for tag in drawn if tag.startswith("lflops_modules/")}
    assert expected == of_modules


def test_tensorboard_gets_the_window_for_its_tab(tmp_path: Path) -> None:
    """The LFLOPS tab of TensorBoard gets the payload of the page, at the step of the summary."""
    monitor = watching()
    logger = TensorBoardLogger(tmp_path)
    fit(Classifier(), monitor, logger=logger)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (window,) = events.Tensors("lflops/train/profile")
    (text,) = events.Tensors("lflops/train/summary/text_summary")
    assert text.step == window.step
    assert msgspec.json.encode(payload(analyze(monitor.profiles[0]))) == unpacked(
        window.tensor_proto.string_val[0]
    )


def test_what_is_shown_of_a_large_model_is_made_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a large model, a thread prepares the outputs of a window; the main thread logs them.

    The windows keep their order. At the end, no output is missing, and no thread is left.
    """
    made_in: list[str] = []
    logged_in: list[str] = []

    def made(self: TensorBoardOutput, *given: Any) -> Any:
        made_in.append(threading.current_thread().name)
        log = window(self, *given)

        def noted_log() -> Any:
            logged_in.append(threading.current_thread().name)
            return log()

        return noted_log

    window = TensorBoardOutput.window
    monkeypatch.setattr(TensorBoardOutput, "window", made)
    monkeypatch.setattr(results, "LARGE", 1)
    logger = TensorBoardLogger(tmp_path / "logs")
    monitor = watching(
        html=True,
        dirpath=tmp_path / "profiles",
        schedule=Schedule(wait=1, warmup=1, active=1, repeat=3),
        module_scalars=1,
    )
    fit(Classifier(), monitor, logger=logger)
    assert [f"lflops: train window {number}" for number in range(3)] == made_in
    assert ["MainThread"] * 3 == logged_in
    assert 3 == len(list((tmp_path / "profiles").glob("*.html")))
    events = EventAccumulator(logger.log_dir).Reload()
    steps = [event.step for event in events.Tensors("lflops/train/profile")]
    assert 3 == len(steps)
    assert sorted(steps) == steps
    running = [thread.name for thread in threading.enumerate()]
    assert not [name for name in running if name.startswith("lflops: train window")]


def test_an_error_in_that_thread_is_raised_in_the_training_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `on_error="raise"`, an error in that thread is raised; otherwise lflops warns once."""

    def failing(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(results, "LARGE", 1)
    monkeypatch.setattr(TensorBoardOutput, "window", failing)
    with pytest.raises(ZeroDivisionError, match="planted"):
        fit(Classifier(), watching(), logger=TensorBoardLogger(tmp_path))
    two_windows = Schedule(wait=1, warmup=1, active=1, repeat=2)
    monitor = watching(on_error="warn", schedule=two_windows)
    message = "the TensorBoard output of a profile could not be written.*planted"
    with pytest.warns(UserWarning, match=message) as warned:
        fit(Classifier(), monitor, logger=TensorBoardLogger(tmp_path))
    assert 1 == sum("planted" in str(each.message) for each in warned)


def test_the_text_for_tensorboard_is_short_for_any_model(tmp_path: Path) -> None:
    """The summary text has at most 60 lines.

    TensorBoard renders all of it on every request. The model has more than 120 modules.
    """

    class Deep(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Sequential(*[torch.nn.Dropout(n / 240) for n in range(120)])

    logger = TensorBoardLogger(tmp_path)
    fit(Deep(), watching(), logger=logger)
    (text,) = told(logger).Tensors("lflops/train/summary/text_summary")
    assert 60 >= len(text.tensor_proto.string_val[0].decode().splitlines())


def told(logger: TensorBoardLogger) -> EventAccumulator:
    """Return the events in the only event file.

    A second file would prevent TensorBoard from reading the first one.
    """
    assert 1 == len(list(Path(logger.log_dir).rglob("events*")))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


def test_tensorboard_gets_the_roofline_and_the_memory_as_figures(tmp_path: Path) -> None:
    """TensorBoard gets the roofline and the memory as PNG images, at the step of the summary.

    If the peak of the chip is unknown, there is no roofline.
    """
    for name, chip, expected in (
        ("known", CHIP, {"roofline", "memory"}),
        ("unknown", None, {"memory"}),
    ):
        monitor = watching(hardware=chip)
        logger = TensorBoardLogger(tmp_path, name=name)
        fit(Classifier(), monitor, logger=logger)
        events = told(logger)
        assert {f"lflops/train/{each}" for each in expected} == set(events.Tags()["images"])
        for figure in expected:
            (image,) = events.Images(f"lflops/train/{figure}")
            assert b"\x89PNG" == image.encoded_image_string[:4]
            size = struct.unpack(">II", image.encoded_image_string[16:24])
            assert (image.width, image.height) == size
            assert events.Tensors("lflops/train/profile")[0].step == image.step


def test_figures_leave_matplotlib_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures change no setting of matplotlib, and do not import `pyplot`.

    `pyplot` would select a backend, and has the figures that the user has open.
    """
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    before = dict(mpl.rcParams)
    with SummaryWriter(tmp_path) as writer:
        lflops.tensorboard.log(writer, small_profile(), 8)
        lflops.tensorboard.log(writer, small_profile(), 9, tag="mine", figures=False)
        lflops.tensorboard.log(writer, small_profile(), 9, tag="others/profile")
    assert before == dict(mpl.rcParams)
    assert "matplotlib.pyplot" not in sys.modules
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    images = {tag for tag in events.Tags()["images"] if tag.endswith("memory")}
    assert {"lflops/fit/memory", "others/memory"} == images


class Tuned(Classifier):
    """A model with two hyperparameters, one of which is not a number."""

    def __init__(self, lr: float = 0.5, sizes: tuple[int, int] = (2, 3)) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_run_ends_as_a_row_of_the_table_of_hyperparameters(tmp_path: Path) -> None:
    """Each run is a row in TensorBoard's table of hyperparameters, with totals and facts of lflops.

    The user's hyperparameters are in the same row. The table can show all curves. A run without
    hyperparameters has a row as well.
    """
    for name, module in ("tuned", Tuned()), ("plain", Classifier()):
        logger = TensorBoardLogger(tmp_path, name=name, version="", default_hp_metric=False)
        monitor = watching()
        fit(module, monitor, logger=logger)
        events = told(logger)
        assert events.Scalars("lflops/train/step_ms")
    body = ROWS * WIDTH * WIDTH
    head = ROWS * WIDTH * CLASSES
    totals = {
        "parameters": sum(each.numel() for each in Classifier().parameters()),
        "forward_gmacs": (body + head) / 1e9,
        "backward_gmacs": (body + 2 * head) / 1e9,
    }
    with board(tmp_path) as server:
        server.windows(expected=2)
        table = Board(server.address, "hparams")
        columns = table.json("experiment", request="{}")["metricInfos"]
        assert {"lflops/train/step_ms"} <= {column["name"]["tag"] for column in columns}
        asked = {
            "allowedStatuses": ["STATUS_SUCCESS"],
            "colParams": [],
            "startIndex": 0,
            "sliceSize": 9,
        }
        rows = table.json("session_groups", request=json.dumps(asked))["sessionGroups"]
        (profile,) = monitor.profiles
        ours = {
            "precision": "32-true",
            "batch_size": ROWS,
            "world_size": 1,
            "strategy": "SingleDeviceStrategy",
            "device": profile.run.device_name,
        } | {name: pytest.approx(value) for name, value in totals.items()}
        assert {"tuned": ours | {"lr": 0.5, "sizes": "(2, 3)"}, "plain": ours} == {
            row["name"]: row["hparams"] for row in rows
        }


def test_the_table_s_columns_stay_the_user_s(tmp_path: Path) -> None:
    """If Lightning or the user has already defined the table of hyperparameters, it is not changed.

    A run that fails gets no row of lflops.
    """
    logger = TensorBoardLogger(tmp_path / "tuned")
    fit(Tuned(), watching(), logger=logger)
    written = told(logger).summary_metadata["_hparams_/experiment"].plugin_data.content
    columns = HParamsPluginData.FromString(written).experiment.metric_infos
    assert ["hp_metric"] == [each.name.tag for each in columns]
    failing = TensorBoardLogger(tmp_path / "failing")
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(8, raises(ValueError("planted"))), watching(), logger=failing)
    tags = told(failing).summary_metadata
    assert [] == [tag for tag in tags if tag.startswith(("_hparams_", "lflops_totals"))]


def test_modules_that_repeat_are_one_curve() -> None:
    """Modules with the same pattern share a curve, for which their times and work are added up."""
    given = small_profile()
    names = {name: name for name in given.modules} | {
        "encoder.0": "encoder.*",
        "encoder.1": "encoder.*",
    }
    expected = {
        ("forward_ms", "encoder.*"): 0.2,
        ("backward_ms", "encoder.*"): 0.2,
        ("tflops", "encoder.*"): 2 * 1024 / 4e-4 / 1e12,
    }
    assert pytest.approx(expected) == module_scalars(given, names, ["encoder.*"])


def test_a_module_s_figures_are_its_own() -> None:
    """The values of a module are its self times and the rate of its self work.

    `encoder.0` has 1024 MACs in 200 µs, and the head 384. The activation `encoder.1` has no MACs
    and so no rate. The model itself and unknown modules have no values.
    """
    expected = {
        ("forward_ms", "encoder.0"): 0.1,
        ("forward_ms", "encoder.1"): 0.1,
        ("forward_ms", "head"): 0.1,
        ("backward_ms", "encoder.0"): 0.1,
        ("backward_ms", "encoder.1"): 0.1,
        ("backward_ms", "head"): 0.1,
        ("tflops", "encoder.0"): 2 * 1024 / 2e-4 / 1e12,
        ("tflops", "head"): 2 * 384 / 2e-4 / 1e12,
    }
    given = small_profile()
    patterns = {name: name for name in given.modules} | {"gone": "gone"}
    asked = ["encoder.0", "encoder.1", "head", "", "gone"]
    assert pytest.approx(expected) == module_scalars(given, patterns, asked)


def test_every_logger_gets_the_busiest_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers get the times of the busiest modules of the first window, in all three windows.

    With `module_scalars=0`, they get none.
    """
    clock = TickingClock()
    logger = Recorder()
    use_clock(monkeypatch, clock)
    schedule = Schedule(wait=3, warmup=1, active=2, repeat=3)
    monitor = watching(module_scalars=2, schedule=schedule, track=False)
    fit(Classifier(), monitor, logger=logger)
    first = [each.pattern for each in analyze(monitor.profiles[0]).busiest[:2]]
    assert 2 == len(first)

    def of_modules(given: dict[str, float]) -> set[str]:
        return {name for name in given if name.startswith("lflops_modules")}

    names = set()
    for name in first:
        names.add(f"lflops_modules·train·forward_ms·{name or 'root'}")
        names.add(f"lflops_modules·train·backward_ms·{name or 'root'}")
    # A `Sequential` runs no operators itself, so it has no self time in backward.
    names.discard("lflops_modules·train·backward_ms·body")
    assert [names] * 3 == [of_modules(given) for given in logger.given.values() if given]
    without = Recorder()
    fit(Classifier(), watching(), logger=without)
    for given in without.given.values():
        assert set() == of_modules(given)


def test_the_summary_is_logged_and_goes_to_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The summary of each window is logged, and goes to `output_file` in DeepSpeed's format.

    The log also has a line when a window opens, and the paths of the files when it closes.
    """
    path = tmp_path / "reports" / "flops.txt"
    monitor = watching(
        output_file=path,
        dirpath=tmp_path,
        schedule=Schedule(wait=2, warmup=1, active=2, repeat=2),
        module_depth=1,
    )
    fit(Classifier(), monitor)
    first, second = monitor.profiles
    expected = ""
    for profile in (first, second):
        expected += summary(analyze(profile), module_depth=1, top_modules=3, fold=True) + "\n"
    assert expected == path.read_text("utf-8")
    said = [message for message in caplog.messages if message.startswith("lflops:")]
    opened = [
        "lflops: train window 0 opens after 2 batches, at step 2",
        "lflops: train window 1 opens after 7 batches, at step 7",
    ]
    assert opened == [line for line in said if "opens" in line]
    closed = [closing(first, None, tmp_path, path), closing(second, first, tmp_path, path)]
    assert closed == [line for line in said if "closed" in line]


def closing(profile: Profile, before: Profile | None, folder: Path, output: Path) -> str:
    """Return the message when a window closes: its summary and the paths of its files.

    The message of the first window also says how to use the profile, so it names that file there.
    """
    window = profile.run.window
    file = f"{folder}/train-{window}-{profile.run.step}.profile.json"
    files = [f"files             {file}", f"                  {output}"]
    if before is None:
        files = [
            f"files             {output}",
            f"to see more       on a terminal: lflops show {file}",
        ]
    head = f"lflops: train window {window} closed at step {profile.run.step}"
    return "\n".join([head, log_text(analyze(profile), before), *files])


def test_the_file_is_begun_anew_by_each_run(tmp_path: Path) -> None:
    """A second run replaces the contents of `output_file`, as in DeepSpeed."""
    path = tmp_path / "flops.txt"
    monitor = watching(output_file=path)
    fit(Classifier(), monitor)
    fit(Classifier(), monitor)
    assert 1 == path.read_text("utf-8").count("Profile Summary")


def test_the_clean_steps_are_waited_for(clock: StillClock) -> None:
    """If a window has too few unprofiled steps, it takes five more after its last step.

    So its values are logged at step 7, although its last step is step 2.
    """
    monitor = watching(schedule=Schedule(wait=1, warmup=1, active=1))
    given = recorded(clock, monitor, log_every_n_steps=50)
    (profile,) = monitor.profiles
    assert [0, 1, 2, 3, 4, 5, 6, 7] == [step.index for step in profile.steps]
    assert {7} == given.keys()
    assert 2 == profile.run.step
    assert not profile.run.partial


def test_a_window_does_not_wait_for_ever(
    clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every step is disturbed, a window waits at most 20 steps for unprofiled steps.

    Then it closes without any, and a note says so.
    """
    monkeypatch.setattr(step_timer, "USUAL_AFTER", 10**9)

    class Always(Timed, Validated):
        pass

    monitor = watching()
    logger = Recorder()
    fit(Always(clock), monitor, logger=logger, val_check_interval=1, batches=40)
    (profile,) = monitor.profiles
    assert {9, 29} == {profile.run.step, max(logger.given)}
    notes = {note.code: note.values for note in profile.notes}
    assert {"few_unprofiled_steps": {"steps": 0}} == notes


def test_a_saved_window_says_all_that_it_is(tmp_path: Path) -> None:
    """The JSON file of a profile has all facts about the run, as plain values."""
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
