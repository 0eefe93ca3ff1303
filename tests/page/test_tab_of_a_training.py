"""Test that TensorBoard shows for each module of a real training run what its profile file has."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lflops.monitoring.schedule import Schedule
from tests.support.browser import ROW, Seen, tab
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, watching
from tests.support.tensorboard_server import board

pytestmark = LIGHTNINGS_WARNINGS

# The fields of a phase, by the labels of their columns
FIELDS = {
    "MACs": "macs",
    "FLOPs": "flops",
    "bytes": "bytes_moved",
    "communicated": "comm_bytes",
    "time": "seconds",
}


def expected(modules: Mapping[str, Any], column: str) -> Iterator[float | None]:
    """Yield the value of each module in the profile file, for a column of the page."""
    phase, _, name = column.partition(" ")
    for module in modules.values():
        if name in FIELDS:
            value = module[phase][FIELDS[name]]
            yield value["median"] if isinstance(value, dict) else value
        elif column == "trainable":
            yield module["trainable_parameters"]
        elif column == "peak memory":
            yield module["peak_bytes"]
        else:
            yield module[column]


def read(text: str) -> float | None:
    """Return the exact value of a cell from its tooltip."""
    if text.startswith("unknown"):
        return None
    return float(text.replace(",", ""))


def test_the_tab_has_the_numbers_of_the_file(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """All cells of the table equal the values of the profile file.

    The run uses a real Trainer with a TensorBoardLogger. Columns that are computed from several
    values are left out.
    """
    fit(
        Classifier(),
        watching(schedule=Schedule(wait=1, warmup=1, active=2)),
        logger=TensorBoardLogger(tmp_path),
    )
    (file,) = tmp_path.rglob("*.profile.json")
    modules = json.loads(file.read_text())["modules"]
    with tab(opening, tmp_path, expected=1) as (_, frame, _):
        frame.get_by_role("tab", name="Modules").click()
        frame.locator(".chooser summary").click()
        for box in frame.locator(".chooser input").all():
            box.check()
        rows = frame.locator(ROW).all()
        # The modules with the most time come first.
        names = [row.locator(".name").get_attribute("title") for row in rows]
        assert sorted(modules) == sorted(names)
        modules = {name: modules[name] for name in names}
        # Each row is a dictionary from the labels of columns to exact values.
        cells = []
        for row in rows:
            titles = "cells => cells.map((cell) => cell.title.split(': '))"
            cells.append(dict(row.locator(".number").evaluate_all(titles)))
    shown = {column: [read(row[column]) for row in cells] for column in cells[0]}
    derived = {"total time", "share of the step", "MFU"}
    for column in shown:
        if column.endswith(("FLOP/s", "FLOPs/byte")):
            derived.add(column)
    assert {
        "parameters",
        "calls",
        "forward MACs",
        "backward MACs",
        "optimizer FLOPs",
        "forward time",
        "backward time",
    } < {*shown}
    for column, values in shown.items():
        if column not in derived:
            assert list(expected(modules, column)) == values, column


def test_the_tab_serves_the_trace_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends the trace file unchanged, and its path is relative to the run's folder.

    The logger has a path that is relative to the working directory of the training run.
    """
    monkeypatch.chdir(tmp_path)
    monitor = watching(trace=True, schedule=Schedule(wait=1, warmup=1, active=2))
    fit(Classifier(), monitor, logger=TensorBoardLogger("logs"))
    (trace,) = tmp_path.rglob("train-*/*.pt.trace.json.gz")
    with board(tmp_path / "logs") as server:
        (window,) = server.windows(expected=1)["windows"]
        place = {name: window[name] for name in ("run", "tag", "step")}
        file = f"lflops_traces/{trace.parent.name}/{trace.name}"
        assert [{"rank": "0", "file": file}] == server.json("window", **place)["traces"]
        assert trace.read_bytes() == server.get("trace", **place, index=0)[2]
