"""Test to which folder the files of a run go, and which runs write no files."""

import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lflops.integrations.lightning.monitor import FlopsMonitor, InjectedMonitor
from lflops.integrations.lightning.training import RUNS
from lflops.monitoring.outputs.paths import OutputPaths, claim, release
from tests.support.lightning_runs import (
    LIGHTNINGS_WARNINGS,
    QUIET,
    Classifier,
    fit,
    loader,
    watching,
)

pytestmark = LIGHTNINGS_WARNINGS


class Shared(Logger):
    """A logger that uses the same folder for all runs."""

    name = property(lambda self: "shared")  # type: ignore[assignment]
    version = property(lambda self: 0)  # type: ignore[assignment]
    save_dir = property(lambda self: self.folder)  # type: ignore[assignment]

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore the hyperparameters."""

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """Ignore the metrics."""


class WithTest(Classifier):
    """A classifier with a `test_step`."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


def files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def trainer(folder: Path, *monitors: FlopsMonitor, **options: Any) -> Trainer:
    """Return a Trainer without a logger."""
    return Trainer(
        callbacks=list(monitors),
        **{**QUIET, "max_epochs": 1, "logger": False, "default_root_dir": folder, **options},
    )


def folders_named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the folders that the log names for runs without a logger."""
    return re.findall(
        r"no logger, so the files of this run go to (\S+);", "\n".join(caplog.messages)
    )


def test_without_a_logger_each_trainer_has_a_folder_which_the_log_names_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fit and test of one Trainer share a new folder, and a second Trainer gets another one.

    So the second Trainer overwrites nothing.
    """
    for _ in range(2):
        one = trainer(tmp_path, watching(stages=("train", "test")))
        one.fit(WithTest(), loader(30))
        one.test(WithTest(), loader(30), verbose=False)
    first, second = map(Path, folders_named(caplog))
    assert (tmp_path / RUNS, tmp_path / RUNS) == (first.parent, second.parent)
    assert first != second
    for folder in (first, second):
        stages = [re.sub(r"-\d+-\d+\.profile\.json", "", name) for name in files(folder)]
        assert ["lflops/test", "lflops/train"] == stages
    assert 4 == len(files(tmp_path))


def test_two_monitors_of_a_trainer_share_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two monitors of a Trainer write different files to one folder; the log names it once."""
    trainer(tmp_path, watching(), watching()).fit(Classifier(), loader(30))
    (folder,) = folders_named(caplog)
    names = files(Path(folder))
    assert ["lflops/2-train-0-9.profile.json", "lflops/train-0-9.profile.json"] == names


def test_a_monitor_from_the_environment_writes_nothing_without_a_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a logger, a monitor from `LFLOPS` only logs its summary."""
    monitor = InjectedMonitor("on_error=raise,stages=train")
    trainer(tmp_path, monitor).fit(Classifier(), loader(30))
    assert [] == list(tmp_path.iterdir())
    assert 1 == len(monitor.profiles)
    assert [] == folders_named(caplog)
    assert "lflops: train window 0 closed at step 9\n" in caplog.text


def test_a_monitor_from_the_environment_writes_where_it_is_asked_to(tmp_path: Path) -> None:
    """A monitor from `LFLOPS` writes to the folder in its setting `dirpath`."""
    monitor = InjectedMonitor(
        "on_error=raise,stages=train,trace=false,html=false,ledger=false,"
        f"dirpath={tmp_path / 'there'}"
    )
    trainer(tmp_path / "here", monitor).fit(Classifier(), loader(30))
    assert ["there/train-0-9.profile.json"] == files(tmp_path)


def test_a_barebones_trainer_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `barebones=True`, which serves to measure the speed of a loop, no file is written."""
    monitor = watching(trace=True, html=True)
    barebones = Trainer(
        callbacks=[monitor],
        barebones=True,
        max_epochs=1,
        default_root_dir=tmp_path,
        accelerator="cpu",
        devices=1,
    )
    barebones.fit(Classifier(), loader(30))
    assert [] == list(tmp_path.iterdir())
    assert 1 == len(monitor.profiles)
    assert [] == folders_named(caplog)


def test_a_logger_whose_folder_is_no_text_gives_none(tmp_path: Path) -> None:
    """If a logger's folder is not a string, no file is written, and the run is profiled.

    A `Mock` has every attribute, but the values are not paths.
    """
    monitor = watching()
    logger = Mock(spec=Logger)
    fit(Classifier(), monitor, logger=logger, default_root_dir=tmp_path)
    assert [] == files(tmp_path)
    assert 1 == len(monitor.profiles)


def test_the_text_of_a_test_follows_that_of_the_fit(tmp_path: Path) -> None:
    """A Trainer appends the summary of a test to that of its fit; a new Trainer starts anew."""
    output = tmp_path / "summaries.txt"
    lengths = []
    for _ in range(2):
        monitor = watching(stages=("train", "test"), output_file=output, detailed=False)
        one = trainer(tmp_path, monitor)
        one.fit(WithTest(), loader(30))
        lengths.append(output.read_text().count("Flops Profiler"))
        one.test(WithTest(), loader(30), verbose=False)
        lengths.append(output.read_text().count("Flops Profiler"))
    assert [1, 2, 1, 2] == lengths


def test_two_monitors_may_write_to_one_text(tmp_path: Path) -> None:
    """Two monitors with the same `output_file` both have their summary in it."""
    output = tmp_path / "summaries.txt"
    first = watching(output_file=output, detailed=False)
    second = watching(output_file=output, detailed=False)
    trainer(tmp_path, first, second).fit(Classifier(), loader(30))
    assert 2 == output.read_text().count("Flops Profiler")


def test_a_logger_that_keeps_all_runs_in_one_folder_has_ours_apart(tmp_path: Path) -> None:
    """If a logger uses one folder for all runs, lflops creates a folder for each run inside it.

    The logger of Weights & Biases is such a logger.
    """
    for _ in range(2):
        one = trainer(tmp_path / "root", watching(), logger=Shared(str(tmp_path)))
        one.fit(Classifier(), loader(30))
    first, second = (tmp_path / RUNS).iterdir()
    assert ["lflops/train-0-9.profile.json"] == files(first)
    assert ["lflops/train-0-9.profile.json"] == files(second)


@pytest.mark.parametrize("traced", [True, False])
def test_a_second_run_into_a_folder_replaces_nothing(traced: bool, tmp_path: Path) -> None:
    """Later runs with the same `dirpath` write to subfolders, and their traces are separate."""
    for _ in range(3):
        one = trainer(tmp_path, watching(dirpath=tmp_path / "ours", trace=traced))
        one.fit(Classifier(), loader(30))
    profiles = [name for name in files(tmp_path / "ours") if name.endswith(".profile.json")]
    (first,) = [name for name in profiles if name.startswith("train")]
    assert {first, f"run-2/{first}", f"run-3/{first}"} == set(profiles)
    assert 3 == len(profiles)
    folders_of_traces = set()
    for name in files(tmp_path / "ours"):
        if name.endswith(".pt.trace.json.gz") and "compat" not in name:
            folders_of_traces.add(Path(name).parent)
    assert (3 if traced else 0) == len(folders_of_traces)
    assert [] == [name for name in files(tmp_path) if "writing" in name]


def test_two_runs_at_once_do_not_share_a_part(tmp_path: Path) -> None:
    """Two simultaneous runs claim different subfolders before they write any file.

    A repeated claim of a run returns the same subfolder. `release` removes the markers of the
    claims.
    """
    one = Classifier()
    other = Classifier()
    assert ("", "run-2") == (claim(tmp_path / "ours", one), claim(tmp_path / "ours", other))
    assert ("", "run-2") == (claim(tmp_path / "ours", one), claim(tmp_path / "ours", other))
    for each in (other, one):
        release(tmp_path / "ours", each)
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_marker_of_a_killed_run_does_not_count(tmp_path: Path) -> None:
    """A folder is free if the process that claimed it has ended, and else another part is claimed.

    Process 1 still runs. At the end of a run, markers of processes that have ended are removed.
    """
    folder = tmp_path / "ours"
    marker = folder / ".lflops-is-writing"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    for process, part in ((ended.pid, ""), (1, "run-2")):
        folder.mkdir(exist_ok=True)
        marker.write_text(f"{platform.node()} {process}")
        loop = Classifier()
        assert claim(folder, loop) == part
        release(folder, loop)
    assert marker.exists()
    marker.write_text(f"{platform.node()} {ended.pid}")
    OutputPaths(folder, folder / "traces").remove_leftovers()
    assert not marker.exists()


def test_ranks_agree_on_the_part(tmp_path: Path) -> None:
    """In the second of two runs with two ranks, both ranks use the same new subfolder."""
    for _ in range(2):
        monitor = watching(dirpath=tmp_path / "ours")
        one = trainer(tmp_path, monitor, accelerator="cpu", devices=2, strategy="ddp_fork")
        one.fit(Classifier(), loader(30))
    names = files(tmp_path / "ours")
    assert 2 == len(names)
    assert names[0] == f"run-2/{names[1]}"


def test_a_remote_folder_gets_no_local_namesake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the folder of a logger is a URL, no local folder with this name is created."""
    from lightning.pytorch.loggers import Logger

    class Remote(Logger):
        name, version, log_dir = "remote", 0, "memory://bucket/runs"

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            """Ignore the metrics."""

        def log_hyperparams(self, *_: object) -> None:
            """Ignore the hyperparameters."""

    monkeypatch.chdir(tmp_path)
    monitor = watching()
    fit(Classifier(), monitor, logger=Remote())
    assert [] == list(tmp_path.rglob("*"))
    assert 1 == len(monitor.profiles)
