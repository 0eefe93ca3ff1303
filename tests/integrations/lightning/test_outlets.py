"""What people get to read: the log, files, and figures in every logger."""

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
from lflops.monitoring.window import step_timer
from lflops.profile.profile import Profile
from lflops.report.html import page
from lflops.report.log_text import log_text
from lflops.report.payload.payload import payload
from lflops.schedule import Schedule
from lflops.tensorboard.payload_event import unpacked
from tests.integrations.lightning.test_endings import Ending, raises
from tests.support.fake_clock import StillClock, TickingClock, use_clock
from tests.support.lightning_runs import (
    CLASSES,
    LIGHTNINGS_WARNINGS,
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

    def log_metrics(self, *, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        """By names alone, as Lightning calls it."""
        assert step is not None
        self.given.setdefault(step, {}).update(
            {key: value for key, value in metrics.items() if key.startswith("lflops")}
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """The one that the monitor reads."""
    clock = StillClock()
    use_clock(monkeypatch, clock)
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
    "mfu": MFU,
    "tflops_per_device": 2 * MACS / 8 / 1e12,
    "samples_per_second": ROWS / 8,
}
POINT = {
    name: WINDOW[name] for name in ("step_ms", "mfu", "tflops_per_device", "samples_per_second")
}


def test_a_window_gives_its_figures_to_the_logger(clock: StillClock) -> None:
    """Once, at the step that it is closed at, by the logger's own separator; the memory's peak is what was counted.

    Hooks take no time.
    """
    monitor = watching(hardware=CHIP, track=False)
    given = recorded(clock, monitor)
    assert {10} == given.keys()
    memory = monitor.profiles[0].memory
    assert memory is not None
    expected = WINDOW | {"peak_memory_gib": memory.peak_bytes / 2**30}
    assert (
        pytest.approx({f"lflops·train·{name}": value for name, value in expected.items()})
        == given[10]
    )


def test_the_whole_run_is_tracked(clock: StillClock) -> None:
    """Every fifth step, from the steps since the last.

    Before something was counted only the time of a step is known.
    """
    given = recorded(clock, watching(hardware=CHIP))
    assert {4, 9, 10, 14, 19, 24, 29} == given.keys()
    for step in (14, 19, 24, 29):
        assert (
            pytest.approx({f"lflops·train·{name}": value for name, value in POINT.items()})
            == given[step]
        )


@pytest.mark.parametrize(
    "options", [{"log_every_n_steps": 0}, {"fast_dev_run": 3}, {"log_every_n_steps": 50}]
)
def test_where_nothing_is_to_be_logged_nothing_is(
    options: dict[str, Any], clock: StillClock
) -> None:
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
    """Of the last five steps two are of a size that was never counted.

    The share is said, and MFU is that of the three.
    """
    sizes = (
        [ROWS] * 10
        + [ROWS, 2 * ROWS, ROWS, ROWS, 2 * ROWS]
        + [ROWS, 2 * ROWS, ROWS, ROWS, 2 * ROWS]
    )
    logger = Recorder()
    data = torch.utils.data.DataLoader(Sized(sizes, clock), batch_size=None)
    fit(Timed(clock), watching(hardware=CHIP), data=data, logger=logger, log_every_n_steps=5)
    assert pytest.approx(3 / 5) == logger.given[19]["lflops·train·counted_share"]
    assert pytest.approx(MFU) == logger.given[19]["lflops·train·mfu"]
    # The first batch of a new size is no measure of the others: four steps are left of the third
    # point.
    assert pytest.approx(3 / 4) == logger.given[14]["lflops·train·counted_share"]


def test_disturbed_steps_are_in_no_point(clock: StillClock) -> None:
    """Validation every three steps and a checkpoint in between.

    What is left is as ever, and the marks say what was disturbed.
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
    assert {8e3} == {
        given["lflops·train·step_ms"]
        for given in logger.given.values()
        if "lflops·train·step_ms" in given
    }
    marks = {
        step.index: set(step.marks) - {"warmup", "new_shapes"} for step in monitor.profiles[0].steps
    }
    assert {3, 6, 9} == {index for index, each in marks.items() if "validation" in each}
    assert {"validation", "checkpoint"} >= set().union(*marks.values())


def test_without_a_peak_there_is_no_mfu(clock: StillClock) -> None:
    """Nor a dash, nor a zero."""
    given = recorded(clock, watching(hardware=None))
    assert {"mfu", "hfu"}.isdisjoint(
        name.rpartition("·")[2] for each in given.values() for name in each
    )


def test_tokens_are_what_the_user_says_they_are(clock: StillClock) -> None:
    """Seven to a batch, of which samples are as many as its shapes say."""
    monitor = watching(units=lambda batch: {"tokens": 7})
    given = recorded(clock, monitor)
    assert pytest.approx(7 / 8) == given[9]["lflops·train·tokens_per_second"]
    assert pytest.approx(ROWS / 8) == given[9]["lflops·train·samples_per_second"]
    assert (ROWS, 7) == (
        monitor.profiles[0].run.samples_per_step,
        monitor.profiles[0].run.tokens_per_step,
    )


def test_a_second_monitor_writes_beside_the_first(tmp_path: Path) -> None:
    """Under names of its own."""
    logger = CSVLogger(tmp_path)
    fit(
        Classifier(),
        watching(),
        watching(schedule=Schedule(wait=7)),
        logger=logger,
        log_every_n_steps=5,
    )
    assert ["2-train-0-11.profile.json", "train-0-9.profile.json"] == sorted(
        path.name for path in tmp_path.rglob("*.profile.json")
    )
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


def test_with_dirpath_they_are_right_there(tmp_path: Path) -> None:
    """Whatever the logger; nothing is written elsewhere."""
    fit(Classifier(), watching(dirpath=tmp_path / "there"), default_root_dir=tmp_path)
    assert ["there/train-0-9.profile.json"] == [
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()
    ]


def test_a_page_lies_beside_each_profile(tmp_path: Path) -> None:
    """Under its name, and it is the one that `lflops html` would write."""
    monitor = watching(dirpath=tmp_path, html=True)
    fit(Classifier(), monitor)
    assert ["train-0-9.profile.html", "train-0-9.profile.json"] == sorted(
        path.name for path in tmp_path.iterdir()
    )
    assert page(analyze(monitor.profiles[0])) == (tmp_path / "train-0-9.profile.html").read_text(
        "utf-8"
    )


def test_a_trial_run_writes_nothing(tmp_path: Path) -> None:
    """But it is profiled, in the batches that it has."""
    monitor = watching()
    fit(Classifier(), monitor, fast_dev_run=3, default_root_dir=tmp_path)
    assert [] == list(tmp_path.rglob("*"))
    assert ["unprofiled", "counting", "module_timing"] == [
        step.kind for step in monitor.profiles[0].steps
    ]


def drawn_by_layout(events: EventAccumulator) -> Counter[str]:
    """On how many charts of the layout each curve is."""
    (layout,) = events.Tensors("custom_scalars__config__")
    charts = [
        chart
        for each in layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0]).category
        for chart in each.chart
    ]
    drawn: Counter[str] = Counter()
    for tag in (tag for tag in events.Tags()["scalars"] if tag.startswith("lflops")):
        drawn[tag] += sum(
            bool(re.search(pattern, tag)) for chart in charts for pattern in chart.multiline.tag
        )
    return drawn


def test_tensorboard_gets_curves_the_summary_and_a_layout(tmp_path: Path) -> None:
    """Its charts are of all curves but those that are no rate and no time.

    The window at step 10 adds no point.
    """
    monitor, logger = watching(), TensorBoardLogger(tmp_path)
    fit(Classifier(), monitor, logger=logger, log_every_n_steps=5)
    events = told(logger)
    assert [4, 9, 14, 19, 24, 29] == [
        event.step for event in events.Scalars("lflops/train/step_ms")
    ]
    (text,) = events.Tensors("lflops/train/summary/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert markdown_of(analyze(monitor.profiles[0])) == shown
    assert shown.startswith("**Classifier** ")
    assert "| step | **" in shown
    assert "Confidence: " in shown
    drawn = drawn_by_layout(events)
    assert {"lflops/train/peak_memory_gib"} == {
        tag for tag, number in drawn.items() if not number and tag.startswith("lflops/train")
    }
    assert 1 == max(drawn.values())
    assert 12 >= sum(tag.startswith("lflops") for tag in drawn)
    assert all(any(point.value for point in events.Scalars(tag)) for tag in drawn)


def test_curves_of_modules_are_on_charts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third window on. The model itself multiplies nothing, so it has no rate."""
    clock = TickingClock()
    use_clock(monkeypatch, clock)
    monitor, logger = (
        watching(module_scalars=1, schedule=Schedule(wait=1, warmup=1, active=1, repeat=3)),
        TensorBoardLogger(tmp_path),
    )
    fit(Classifier(), monitor, logger=logger)
    first = monitor.profiles[0]
    name = analyze(first).busiest[0].pattern
    assert {
        f"lflops_modules/train/{figure}/{name or 'root'}": 1
        for figure in ("forward_ms", "backward_ms")
    } == {
        tag: number
        for tag, number in drawn_by_layout(told(logger)).items()
        if tag.startswith("lflops_modules/")
    }


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
    assert msgspec.json.encode(payload(analyze(monitor.profiles[0]))) == unpacked(
        window.tensor_proto.string_val[0]
    )


def test_what_is_shown_of_a_large_model_is_made_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training's thread logs it, the windows in their order.

    At the end nothing is missing and no thread is left.
    """
    made_in: list[str] = []

    def made(self: TensorBoardOutput, *given: Any) -> Any:
        made_in.append(threading.current_thread().name)
        log = window(self, *given)
        return lambda: logged_in.append(threading.current_thread().name) or log()

    logged_in: list[str] = []
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
    assert [
        f"lflops: train window {number}" for number in range(3)
    ] == made_in  # one after the other
    assert ["MainThread"] * 3 == logged_in
    assert 3 == len(list((tmp_path / "profiles").glob("*.html")))
    steps = [
        event.step
        for event in EventAccumulator(logger.log_dir).Reload().Tensors("lflops/train/profile")
    ]
    assert 3 == len(steps)
    assert sorted(steps) == steps
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("lflops: train window")
    ]


def test_an_error_in_that_thread_is_raised_in_the_training_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where errors are to be raised; else it is warned of, once, and the text is logged as it was."""

    def failing(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(results, "LARGE", 1)
    monkeypatch.setattr(TensorBoardOutput, "window", failing)
    with pytest.raises(ZeroDivisionError, match="planted"):
        fit(Classifier(), watching(), logger=TensorBoardLogger(tmp_path))
    with pytest.warns(
        UserWarning, match="the TensorBoard output of a window failed.*planted"
    ) as warned:
        fit(
            Classifier(),
            watching(on_error="warn", schedule=Schedule(wait=1, warmup=1, active=1, repeat=2)),
            logger=TensorBoardLogger(tmp_path),
        )
    assert 1 == sum("planted" in str(each.message) for each in warned)


def test_the_text_for_tensorboard_is_short_for_any_model(tmp_path: Path) -> None:
    """TensorBoard renders all of it on every request."""

    class Deep(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Sequential(*[torch.nn.Dropout(n / 240) for n in range(120)])

    monitor, logger = watching(), TensorBoardLogger(tmp_path)
    fit(Deep(), monitor, logger=logger)
    (text,) = told(logger).Tensors("lflops/train/summary/text_summary")
    assert 60 >= len(text.tensor_proto.string_val[0].decode().splitlines())


def told(logger: TensorBoardLogger) -> EventAccumulator:
    """What is in the one file that there is.

    A second would keep TensorBoard from reading the first.
    """
    assert 1 == len(list(Path(logger.log_dir).rglob("events*")))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


def test_tensorboard_gets_the_roofline_and_the_memory_as_figures(tmp_path: Path) -> None:
    """At the step of the summary. Where the chip's peak is not known there is no roof to draw."""
    for name, chip, expected in (
        ("known", CHIP, {"roofline", "memory"}),
        ("unknown", None, {"memory"}),
    ):
        monitor, logger = watching(hardware=chip), TensorBoardLogger(tmp_path, name=name)
        fit(Classifier(), monitor, logger=logger)
        events = told(logger)
        assert {f"lflops/train/{each}" for each in expected} == set(events.Tags()["images"])
        for figure in expected:
            (image,) = events.Images(f"lflops/train/{figure}")
            assert b"\x89PNG" == image.encoded_image_string[:4]
            assert struct.unpack(">II", image.encoded_image_string[16:24]) == (
                image.width,
                image.height,
            )
            assert events.Tensors("lflops/train/profile")[0].step == image.step


def test_figures_leave_matplotlib_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings, and the figures that the training has open; nothing chooses a backend."""
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
    assert {"lflops/fit/memory", "others/memory"} == {
        tag for tag in events.Tags()["images"] if tag.endswith("memory")
    }


class Tuned(Classifier):
    """Has hyperparameters, one of which is no figure."""

    def __init__(self, lr: float = 0.5, sizes: tuple[int, int] = (2, 3)) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_run_ends_as_a_row_of_the_table_of_hyperparameters(tmp_path: Path) -> None:
    """With those of the logger, what a step totals, and all curves; also where there are none."""
    for name, module in ("tuned", Tuned()), ("plain", Classifier()):
        logger = TensorBoardLogger(tmp_path, name=name, version="", default_hp_metric=False)
        fit(module, monitor := watching(), logger=logger)
        events = told(logger)
        assert events.Scalars("lflops/train/step_ms")
    macs = ROWS * WIDTH * WIDTH, ROWS * WIDTH * CLASSES
    totals = {
        "parameters": sum(each.numel() for each in Classifier().parameters()),
        "forward_gmacs": sum(macs) / 1e9,
        "backward_gmacs": (macs[0] + 2 * macs[1]) / 1e9,
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
    """What Lightning, or the user, has written of the table stands.

    A run that fails has no row of ours.
    """
    logger = TensorBoardLogger(tmp_path / "tuned")
    fit(Tuned(), watching(), logger=logger)
    written = told(logger).summary_metadata["_hparams_/experiment"].plugin_data.content
    assert ["hp_metric"] == [
        each.name.tag for each in HParamsPluginData.FromString(written).experiment.metric_infos
    ]
    failing = TensorBoardLogger(tmp_path / "failing")
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(8, raises(ValueError("planted"))), watching(), logger=failing)
    assert [] == [
        tag
        for tag in told(failing).summary_metadata
        if tag.startswith(("_hparams_", "lflops_totals"))
    ]


def test_modules_that_repeat_are_one_curve() -> None:
    """Their times and their work are added up."""
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
    """1024 MACs of the encoder's in 200 µs, 384 of the head's.

    The activation has none, and the root ran nothing.
    """
    expected = {
        (f"{phase}_ms", name): 0.1
        for phase in ("forward", "backward")
        for name in ("encoder.0", "encoder.1", "head")
    }
    expected |= {
        ("tflops", "encoder.0"): 2 * 1024 / 2e-4 / 1e12,
        ("tflops", "head"): 2 * 384 / 2e-4 / 1e12,
    }
    given = small_profile()
    assert pytest.approx(expected) == module_scalars(
        given,
        {name: name for name in given.modules} | {"gone": "gone"},
        ["encoder.0", "encoder.1", "head", "", "gone"],
    )


def test_every_logger_gets_the_busiest_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all windows those of the first, and none before there are three.

    None where none are asked for.
    """
    clock, logger = TickingClock(), Recorder()
    use_clock(monkeypatch, clock)
    monitor = watching(
        module_scalars=2, schedule=Schedule(wait=3, warmup=1, active=2, repeat=3), track=False
    )
    fit(Classifier(), monitor, logger=logger)
    first = [each.pattern for each in analyze(monitor.profiles[0]).busiest[:2]]
    assert 2 == len(first)
    windows = [
        {name for name in given if name.startswith("lflops_modules")}
        for given in logger.given.values()
        if given
    ]
    names = {
        f"lflops_modules·train·{metric}·{name or 'root'}"
        for metric in ("forward_ms", "backward_ms")
        for name in first
    }
    assert [
        names - {"lflops_modules·train·backward_ms·body"}
    ] * 3 == windows  # a Sequential has no node of its own in backward
    fit(Classifier(), watching(), logger=(without := Recorder()))
    assert not [
        name
        for given in without.given.values()
        for name in given
        if name.startswith("lflops_modules")
    ]


def test_the_summary_is_logged_and_goes_to_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line when the window opens, and one with the names of the files when it closes."""
    path = tmp_path / "reports" / "flops.txt"
    monitor = watching(
        output_file=path,
        dirpath=tmp_path,
        schedule=Schedule(wait=2, warmup=1, active=2, repeat=2),
        module_depth=1,
    )
    fit(Classifier(), monitor)
    texts = [
        summary(analyze(profile), module_depth=1, top_modules=3, fold=True)
        for profile in monitor.profiles
    ]
    assert "".join(f"{text}\n" for text in texts) == path.read_text("utf-8")
    said = [message for message in caplog.messages if message.startswith("lflops:")]
    opened = [
        "lflops: train window 0 opens after 2 batches, at step 2",
        "lflops: train window 1 opens after 7 batches, at step 7",
    ]
    assert opened == [line for line in said if "opens" in line]
    first, second = monitor.profiles
    assert [closing(first, None, tmp_path, path), closing(second, first, tmp_path, path)] == [
        line for line in said if "closed" in line
    ]


def closing(profile: Profile, before: Profile | None, folder: Path, output: Path) -> str:
    """The log's message: the text, and each file once: the first window says what to do with some."""
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
    """As DeepSpeed's is."""
    path = tmp_path / "flops.txt"
    monitor = watching(output_file=path)
    fit(Classifier(), monitor)
    fit(Classifier(), monitor)
    assert 1 == path.read_text("utf-8").count("Profile Summary")


def test_the_clean_steps_are_waited_for(clock: StillClock) -> None:
    """With a wait of one there are too few in the window.

    Five that are neither cold, counted nor hooked follow.
    """
    monitor = watching(schedule=Schedule(wait=1, warmup=1, active=1))
    given = recorded(clock, monitor, log_every_n_steps=50)
    (profile,) = monitor.profiles
    assert [0, 1, 2, 3, 4, 5, 6, 7] == [step.index for step in profile.steps]
    assert ({7}, 2) == (given.keys(), profile.run.step)
    assert not profile.run.partial


def test_a_window_does_not_wait_for_ever(
    clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty steps behind its end it is told of with what there is, where every step is disturbed."""
    monkeypatch.setattr(step_timer, "USUAL_AFTER", 10**9)

    class Always(Timed, Validated):
        pass

    monitor, logger = watching(), Recorder()
    fit(Always(clock), monitor, logger=logger, val_check_interval=1, batches=40)
    (profile,) = monitor.profiles
    assert {9, 29} == {profile.run.step, max(logger.given)}
    assert {"few_unprofiled_steps": {"steps": 0}} == {
        note.code: note.values for note in profile.notes
    }


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
