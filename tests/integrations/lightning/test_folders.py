"""Which folder a run's files go to, and which runs write none."""

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
    """Keeps the files of all runs in one folder."""

    name = property(lambda self: "shared")  # type: ignore[assignment]
    version = property(lambda self: 0)  # type: ignore[assignment]
    save_dir = property(lambda self: self.folder)  # type: ignore[assignment]

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Not looked at."""

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """The same."""


class WithTest(Classifier):
    """Has a test."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


def files(folder: Path) -> list[str]:
    """Below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def trainer(folder: Path, *monitors: FlopsMonitor, **options: Any) -> Trainer:
    """One without a logger."""
    return Trainer(
        callbacks=list(monitors),
        **{**QUIET, "max_epochs": 1, "logger": False, "default_root_dir": folder, **options},
    )


def folders_named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says about where files go."""
    return [
        found[1]
        for message in caplog.messages
        if (found := re.search(r"no logger, so the files of this run go to (\S+);", message))
    ]


def test_without_a_logger_each_trainer_has_a_folder_which_the_log_names_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fit and test of one Trainer share it; a second Trainer overwrites nothing."""
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
    """One line says where it is."""
    trainer(tmp_path, watching(), watching()).fit(Classifier(), loader(30))
    (folder,) = folders_named(caplog)
    assert ["lflops/2-train-0-9.profile.json", "lflops/train-0-9.profile.json"] == files(
        Path(folder)
    )


def test_a_monitor_from_the_environment_writes_nothing_without_a_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The summary is in the log."""
    monitor = InjectedMonitor("on_error=raise,stages=train")
    trainer(tmp_path, monitor).fit(Classifier(), loader(30))
    assert [] == list(tmp_path.iterdir())
    assert (1, []) == (len(monitor.profiles), folders_named(caplog))
    assert "lflops: train window 0 closed at step 9\n" in caplog.text


def test_a_monitor_from_the_environment_writes_where_it_is_asked_to(tmp_path: Path) -> None:
    """By its `dirpath`, or to the logger's folder."""
    trainer(
        tmp_path / "here",
        InjectedMonitor(
            f"on_error=raise,stages=train,trace=false,html=false,ledger=false,dirpath={tmp_path / 'there'}"
        ),
    ).fit(Classifier(), loader(30))
    assert ["there/train-0-9.profile.json"] == files(tmp_path)


def test_a_barebones_trainer_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It measures the speed of a loop."""
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
    assert (1, []) == (len(monitor.profiles), folders_named(caplog))


def test_a_logger_whose_folder_is_no_text_gives_none(tmp_path: Path) -> None:
    """A `Mock` has any attribute: its values are no paths, and a monitor of ours needs none."""
    monitor, logger = watching(), Mock(spec=Logger)
    fit(Classifier(), monitor, logger=logger, default_root_dir=tmp_path)
    assert [] == files(tmp_path)
    assert 1 == len(monitor.profiles)


def test_the_text_of_a_test_follows_that_of_the_fit(tmp_path: Path) -> None:
    """One Trainer keeps what it wrote, of any monitor; the next Trainer begins the file anew."""
    output = tmp_path / "summaries.txt"
    lengths = []
    for _ in range(2):
        one = trainer(
            tmp_path, watching(stages=("train", "test"), output_file=output, detailed=False)
        )
        one.fit(WithTest(), loader(30))
        lengths.append(output.read_text().count("Flops Profiler"))
        one.test(WithTest(), loader(30), verbose=False)
        lengths.append(output.read_text().count("Flops Profiler"))
    assert [1, 2, 1, 2] == lengths


def test_two_monitors_may_write_to_one_text(tmp_path: Path) -> None:
    """The second does not overwrite the first."""
    output = tmp_path / "summaries.txt"
    trainer(tmp_path, *(watching(output_file=output, detailed=False) for _ in range(2))).fit(
        Classifier(), loader(30)
    )
    assert 2 == output.read_text().count("Flops Profiler")


def test_a_logger_that_keeps_all_runs_in_one_folder_has_ours_apart(tmp_path: Path) -> None:
    """As that of Weights & Biases: each run has a folder of its own there."""
    for _ in range(2):
        trainer(tmp_path / "root", watching(), logger=Shared(str(tmp_path))).fit(
            Classifier(), loader(30)
        )
    first, second = (tmp_path / RUNS).iterdir()
    assert ["lflops/train-0-9.profile.json"] == files(first) == files(second)


@pytest.mark.parametrize("traced", [True, False])
def test_a_second_run_into_a_folder_replaces_nothing(traced: bool, tmp_path: Path) -> None:
    """One after the other: it has a part of the folder, and the traces of both are apart."""
    for _ in range(3):
        trainer(tmp_path, watching(dirpath=tmp_path / "ours", trace=traced)).fit(
            Classifier(), loader(30)
        )
    profiles = [name for name in files(tmp_path / "ours") if name.endswith(".profile.json")]
    (first, second, third) = (
        profiles if profiles[0].startswith("train") else [profiles[2], *profiles[:2]]
    )
    assert (f"run-2/{first}", f"run-3/{first}") == (second, third)
    traces = [
        Path(name).parent
        for name in files(tmp_path / "ours")
        if name.endswith(".pt.trace.json.gz") and "compat" not in name
    ]
    assert ({3} if traced else {0}) == {len(set(traces))}
    assert [] == [name for name in files(tmp_path) if "writing" in name]


def test_two_runs_at_once_do_not_share_a_part(tmp_path: Path) -> None:
    """What one has claimed the other leaves alone, before either has written a file.

    What is empty in the end goes.
    """
    one, other = Classifier(), Classifier()
    assert ("", "run-2") == (claim(tmp_path / "ours", one), claim(tmp_path / "ours", other))
    assert ("", "run-2") == (claim(tmp_path / "ours", one), claim(tmp_path / "ours", other))
    for each in (other, one):
        release(tmp_path / "ours", each)
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_marker_of_a_killed_run_does_not_count(tmp_path: Path) -> None:
    """The twin's process still runs."""
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
    """The second run of two ranks: no rank writes beside the first run."""
    for _ in range(2):
        trainer(
            tmp_path,
            watching(dirpath=tmp_path / "ours"),
            accelerator="cpu",
            devices=2,
            strategy="ddp_fork",
        ).fit(Classifier(), loader(30))
    names = files(tmp_path / "ours")
    assert 2 == len(names)
    assert names[0] == f"run-2/{names[1]}"


def test_a_remote_folder_gets_no_local_namesake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a logger whose address is no path. The log says what to do."""
    from lightning.pytorch.loggers import Logger

    class Remote(Logger):
        name, version, log_dir = "remote", 0, "memory://bucket/runs"

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            """Keep nothing."""

        def log_hyperparams(self, *_: object) -> None:
            """Keep nothing."""

    monkeypatch.chdir(tmp_path)
    monitor = watching()
    fit(Classifier(), monitor, logger=Remote())
    assert ([], 1) == (list(tmp_path.rglob("*")), len(monitor.profiles))
