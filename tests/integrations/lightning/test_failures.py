"""Test that a file or a logger that fails causes one warning and nothing else.

All other files, loggers and figures of the run must be complete.
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
from lflops.monitoring.schedule import Schedule
from tests.integrations.lightning.test_endings import Around
from tests.integrations.lightning.test_outlets import Recorder
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, watching
from tests.support.processes import in_a_fresh_process
from tests.support.trainer_disks import on_a_full_disk, where_the_second_cannot_write
from tests.support.trainer_ranks import BATCHES, Ranks

pytestmark = LIGHTNINGS_WARNINGS

TWO_WINDOWS = Schedule(wait=2, warmup=1, active=2, repeat=2)


class Foreign(Recorder):
    """A custom logger whose `group_separator` is a number instead of a string."""

    group_separator = property(lambda self: 7)  # type: ignore[assignment]


class Raising(Recorder):
    """A logger that raises when it receives metrics of lflops. Counts these calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("lflops") for name in metrics):
            self.calls += 1
            raise ConnectionError("the tracking server is away")


def of_ours(warned: pytest.WarningsRecorder) -> list[str]:
    """Return what failed according to each warning of the monitor, without the reason."""
    failed = []
    for each in warned:
        text = str(each.message)
        if text.startswith("FlopsMonitor: "):
            text = text.removeprefix("FlopsMonitor: ")
            failed.append(re.sub(r"( could not be written|: its file).*", "", text))
    return failed


def tolerant(folder: Path | None = None, **options: object) -> FlopsMonitor:
    """Return a monitor with two windows that warns about its errors, which is the default."""
    return watching(**{"on_error": "warn", "dirpath": folder, "schedule": TWO_WINDOWS, **options})


@pytest.mark.parametrize("separator", ["a Mock's", "a number"])
def test_a_separator_that_is_no_text_is_a_slash(separator: str) -> None:
    """If a logger's separator is not a string, its keys contain "/" and all values are logged.

    The values are compared with those of a usual logger in the same run. If a `Mock` were used as
    the separator, all keys would be the same.
    """
    mock = Mock(spec=Logger, group_separator=Mock())
    foreign = Foreign()
    usual = Recorder()
    logger = mock if separator == "a Mock's" else foreign
    fit(Classifier(), watching(), logger=[logger, usual], log_every_n_steps=5)
    given: dict[int, dict[str, float]] = {}
    if separator == "a Mock's":
        for call in mock.log_metrics.call_args_list:
            if "step" not in call.kwargs:
                continue
            values = given.setdefault(call.kwargs["step"], {})
            for name, value in call.kwargs["metrics"].items():
                if name.startswith("lflops"):
                    values[name] = value
    else:
        given = foreign.given
    expected = {}
    for step, values in usual.given.items():
        if values:
            expected[step] = {name.replace("·", "/"): value for name, value in values.items()}
    assert expected == {step: values for step, values in given.items() if values}


def test_a_logger_that_raises_is_left_out_and_the_others_are_not() -> None:
    """After its first error, a logger receives no more values; the other logger receives all.

    The run has two windows and curves after them. The training run is complete, no hooks are left,
    and the other logger has the same names as a logger that is alone.
    """
    raising = Raising()
    usual = Recorder()
    monitor = tolerant()
    around = Around()
    with pytest.warns(UserWarning, match="FlopsMonitor") as warned:
        trainer = fit(Classifier(), around, monitor, logger=[raising, usual], log_every_n_steps=5)
    assert ["the output of logger 1, a Raising,"] == of_ours(warned)
    assert 1 == raising.calls
    assert 30 == trainer.global_step
    assert 2 == len(monitor.profiles)
    assert [] == around.left()
    alone = Recorder()
    fit(Classifier(), tolerant(), logger=alone, log_every_n_steps=5)
    assert set().union(*alone.given.values()) == set().union(*usual.given.values())


def test_tensorboard_has_the_curves_where_it_takes_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If TensorBoard rejects text, it still gets the curves, with one warning for two windows."""
    logger = TensorBoardLogger(tmp_path)
    monitor = tolerant(track=False)
    monkeypatch.setattr(
        logger.experiment, "add_text", Mock(side_effect=RuntimeError("no text is taken"))
    )
    with pytest.warns(UserWarning, match="FlopsMonitor") as warned:
        fit(Classifier(), monitor, logger=logger)
    assert ["the TensorBoard output of a profile"] == of_ours(warned)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert 2 == len(events.Scalars("lflops/train/step_ms"))


def test_where_no_file_can_be_written_the_summary_and_the_profiles_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If no file can be written, the log has the summaries, and profiles and logged values exist.

    After setup, a file is created where the folder should be. In two windows, there is one warning
    for each kind of file.
    """
    way = tmp_path / "file"
    monitor = tolerant(way / "folder", trace=True, html=True, output_file=way / "text")
    around = Around()
    logger = Recorder()
    in_the_way = LambdaCallback(on_fit_start=lambda trainer, module: way.touch())
    with pytest.warns(UserWarning, match="FlopsMonitor") as warned:
        trainer = fit(Classifier(), around, monitor, in_the_way, logger=logger)
    assert sorted(
        [
            "there is no trace: the trace file",
            "the profile's file",
            "the page",
            f"output_file={str(way / 'text')!r}",
        ]
    ) == sorted(of_ours(warned))
    assert 30 == trainer.global_step
    assert 2 == len(monitor.profiles)
    assert [] == around.left()
    assert 2 == caplog.text.count("peak live memory")
    assert any("lflops·train·step_ms" in given for given in logger.given.values())
    assert [way] == list(tmp_path.rglob("*"))


def test_a_text_that_cannot_be_written_is_no_reason_for_a_profile_not_to_be(tmp_path: Path) -> None:
    """If `output_file` cannot be written, the profiles are still saved.

    `/dev/full` is a device on which every write fails.
    """
    monitor = tolerant(tmp_path, output_file="/dev/full")
    message = "output_file=./dev/full. could not be written, but training .* not a regular file, but a folder, a pipe or a device"
    with pytest.warns(UserWarning, match=message) as warned:
        fit(Classifier(), monitor)
    assert ["output_file='/dev/full'"] == of_ours(warned)
    assert monitor.profiles == [lflops.load(path) for path in sorted(tmp_path.iterdir())]


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    """On a full disk, no partial profile, page or trace remains, and training continues.

    A limit on the size of files stands for the full disk. The profile in memory still has the
    operators of the trace, and a note about the missing file.
    """
    left = in_a_fresh_process(partial(on_a_full_disk, tmp_path))
    assert [] == [name for name in left.files if name != "summary.txt"]
    assert 30 == left.steps
    (profile,) = left.profiles
    assert profile.trace is not None
    assert {} == profile.trace.files
    assert profile.trace.operators
    assert ["not_written"] == [note.subject for note in profile.notes if note.code == "no_trace"]


def test_a_rank_that_cannot_write_is_measured_as_the_others_are(tmp_path: Path) -> None:
    """If rank 1 cannot write its trace, it warns once, and rank 0 still receives its profile."""
    with Ranks(2) as ranks:
        first, second = ranks.run(where_the_second_cannot_write, tmp_path)
    assert (BATCHES, BATCHES) == (first.steps, second.steps)
    assert [] == first.warned
    (profile,) = first.profiles
    assert ["ok", "ok"] == [each.status for each in profile.ranks]
    assert profile.trace is not None
    assert ["0"] == list(profile.trace.files)
    assert 1 == len(second.warned)
    assert "there is no trace: the trace file could not be written" in second.warned[0]
