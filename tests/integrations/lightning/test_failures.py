"""A file or a logger that fails.

It is warned of once, and every other file, logger and figure is there.
"""

import re
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lflops
from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.schedule import Schedule
from tests.integrations.lightning.test_endings import Around
from tests.integrations.lightning.test_outlets import Recorder
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, watching
from tests.support.processes import in_a_fresh_process
from tests.support.trainer_disks import on_a_full_disk, where_the_second_cannot_write
from tests.support.trainer_ranks import BATCHES, Ranks

pytestmark = LIGHTNINGS_WARNINGS

TWO_WINDOWS = Schedule(wait=2, warmup=1, active=2, repeat=2)


class Foreign(Recorder):
    """A logger of somebody's own, with a separator that is no text."""

    group_separator = property(lambda self: 7)  # type: ignore[assignment]


class Raising(Recorder):
    """A logger whose server is away, after so many metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("lflops") for name in metrics):
            self.calls += 1
            raise ConnectionError("the tracking server is away")


def of_ours(warned: pytest.WarningsRecorder) -> list[str]:
    """The monitor's warnings, without the reasons."""
    ours = [text for each in warned if (text := str(each.message)).startswith("FlopsMonitor: ")]
    return [
        re.sub(r"( failed|: its file).*", "", text.removeprefix("FlopsMonitor: ")) for text in ours
    ]


def tolerant(folder: Path | None = None, **options: object) -> FlopsMonitor:
    """A monitor that warns of errors, as it does by default."""
    return watching(**{"on_error": "warn", "dirpath": folder, "schedule": TWO_WINDOWS, **options})


@pytest.mark.parametrize("separator", ["a Mock's", "a number"])
def test_a_separator_that_is_no_text_is_a_slash(separator: str) -> None:
    """Every figure has a key; with a `Mock` for the separator all of them would have the same."""
    mock, foreign, usual = Mock(spec=Logger, group_separator=Mock()), Foreign(), Recorder()
    fit(
        Classifier(),
        watching(),
        logger=[mock if separator == "a Mock's" else foreign, usual],
        log_every_n_steps=5,
    )
    if separator == "a Mock's":
        calls = [
            (call.kwargs["step"], call.kwargs["metrics"])
            for call in mock.log_metrics.call_args_list
            if "step" in call.kwargs
        ]
        given: dict[int, dict[str, float]] = {}
        for step, metrics in calls:
            given.setdefault(step, {}).update(
                {name: value for name, value in metrics.items() if name.startswith("lflops")}
            )
    else:
        given = foreign.given
    expected = {
        step: {name.replace("·", "/"): value for name, value in values.items()}
        for step, values in usual.given.items()
        if values
    }
    assert expected == {step: values for step, values in given.items() if values}


def test_a_logger_that_raises_is_left_out_and_the_others_are_not() -> None:
    """It is asked once; there are two windows and a curve behind them."""
    raising, usual, alone, monitor, around = Raising(), Recorder(), Recorder(), tolerant(), Around()
    with pytest.warns(UserWarning, match="FlopsMonitor") as warned:
        trainer = fit(Classifier(), around, monitor, logger=[raising, usual], log_every_n_steps=5)
    assert ["logger 1, a Raising,"] == of_ours(warned)
    assert (1, 30, 2, []) == (
        raising.calls,
        trainer.global_step,
        len(monitor.profiles),
        around.left(),
    )
    fit(Classifier(), tolerant(), logger=alone, log_every_n_steps=5)
    assert set().union(*alone.given.values()) == set().union(*usual.given.values())


def test_tensorboard_has_the_curves_where_it_takes_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning for two windows."""
    logger, monitor = TensorBoardLogger(tmp_path), tolerant(track=False)
    monkeypatch.setattr(
        logger.experiment, "add_text", Mock(side_effect=RuntimeError("no text is taken"))
    )
    with pytest.warns(UserWarning, match="FlopsMonitor") as warned:
        fit(Classifier(), monitor, logger=logger)
    assert ["the TensorBoard output of a window"] == of_ours(warned)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert 2 == len(events.Scalars("lflops/train/step_ms"))


def test_where_no_file_can_be_written_the_summary_and_the_profiles_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file comes into the place of the folder after setup.

    Each kind of file is warned of once, for two windows.
    """
    way = tmp_path / "file"
    monitor, around, logger = (
        tolerant(way / "folder", trace=True, html=True, output_file=way / "text"),
        Around(),
        Recorder(),
    )
    in_the_way = LambdaCallback(on_fit_start=lambda trainer, module: way.touch())
    with pytest.warns(UserWarning, match="FlopsMonitor") as warned:
        trainer = fit(Classifier(), around, monitor, in_the_way, logger=logger)
    assert sorted(
        [
            "there is no trace",
            "the profile's file",
            "the page",
            f"output_file={str(way / 'text')!r}",
        ]
    ) == sorted(of_ours(warned))
    assert (30, 2, []) == (trainer.global_step, len(monitor.profiles), around.left())
    assert 2 == caplog.text.count("peak live memory")
    assert {"lflops·train·step_ms"} <= {name for given in logger.given.values() for name in given}
    assert [way] == list(tmp_path.rglob("*"))


def test_a_text_that_cannot_be_written_is_no_reason_for_a_profile_not_to_be(tmp_path: Path) -> None:
    """It is a device."""
    monitor = tolerant(tmp_path, output_file="/dev/full")
    with pytest.warns(
        UserWarning,
        match="output_file=./dev/full. failed, but everything else .* is a folder, a pipe or a device",
    ) as warned:
        fit(Classifier(), monitor)
    assert ["output_file='/dev/full'"] == of_ours(warned)
    assert monitor.profiles == [lflops.load(path) for path in sorted(tmp_path.iterdir())]


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    """Neither of a profile, nor of a page, nor what Kineto writes.

    The trace's operators were read all the same.
    """
    left = in_a_fresh_process(partial(on_a_full_disk, tmp_path))
    assert ([], 30) == ([name for name in left.files if name != "summary.txt"], left.steps)
    (profile,) = left.profiles
    assert profile.trace is not None
    assert ({}, True) == (profile.trace.files, bool(profile.trace.operators))
    assert ["not_written"] == [note.subject for note in profile.notes if note.code == "no_trace"]


def test_a_rank_that_cannot_write_is_measured_as_the_others_are(tmp_path: Path) -> None:
    """Its own files are missing, and warned of; its report has reached the first rank."""
    with Ranks(2) as ranks:
        first, second = ranks.run(where_the_second_cannot_write, tmp_path)
    assert (BATCHES, BATCHES, []) == (first.steps, second.steps, first.warned)
    (profile,) = first.profiles
    assert ["ok", "ok"] == [each.status for each in profile.ranks]
    assert profile.trace is not None
    assert ["0"] == list(profile.trace.files)
    assert 1 == len(second.warned)
    assert "there is no trace: its file could not be written" in second.warned[0]
