"""From a training to the tab.

What TensorBoard shows of it is what its profile has, module by module.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lflops.schedule import Schedule
from tests.support.browser import ROW, Seen, tab
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, watching
from tests.support.tensorboard_server import board

pytestmark = LIGHTNINGS_WARNINGS

FIELDS = {
    "MACs": "macs",
    "FLOPs": "flops",
    "bytes": "bytes_moved",
    "communicated": "comm_bytes",
    "time": "seconds",
}


def expected(modules: Mapping[str, Any], column: str) -> Iterator[float | None]:
    """What a column has of each module, in the file."""
    phase, _, name = column.partition(" ")
    for module in modules.values():
        if name in FIELDS:
            value = module[phase][FIELDS[name]]
            yield value["median"] if isinstance(value, dict) else value
        else:
            yield module[
                {"trainable": "trainable_parameters", "peak memory": "peak_bytes"}.get(
                    column, column
                )
            ]


def read(text: str) -> float | None:
    """The exact value that a cell is titled with."""
    return None if text.startswith("unknown") else float(text.replace(",", ""))


def test_the_tab_has_the_numbers_of_the_file(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """Every module in every column, of a real Trainer with a TensorBoardLogger.

    What is derived of two columns is left out.
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
        names = [
            row.locator(".name").get_attribute("title") for row in rows
        ]  # those with the most time first
        assert sorted(modules) == sorted(names)
        modules = {name: modules[name] for name in names}
        cells = [
            row.locator(".number").evaluate_all(
                "cells => cells.map((cell) => cell.title.split(': '))"
            )
            for row in rows
        ]
    shown = {column: [read(dict(row)[column]) for row in cells] for column, _ in cells[0]}
    derived = {column for column in shown if column.endswith(("FLOP/s", "FLOPs/byte"))} | {
        "total time",
        "share of the step",
        "MFU",
    }
    assert {
        "parameters",
        "calls",
        "forward MACs",
        "backward MACs",
        "optimizer FLOPs",
        "forward time",
        "backward time",
    } < {*shown}
    assert {
        column: list(expected(modules, column)) for column in shown if column not in derived
    } == {column: values for column, values in shown.items() if column not in derived}


def test_the_tab_serves_the_trace_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the callback left it, named from the run's folder.

    The logger's was given from where the training ran.
    """
    monkeypatch.chdir(tmp_path)
    monitor = watching(trace=True, schedule=Schedule(wait=1, warmup=1, active=2))
    fit(Classifier(), monitor, logger=TensorBoardLogger("logs"))
    (trace,) = tmp_path.rglob("train-*/*.pt.trace.json.gz")
    with board(tmp_path / "logs") as server:
        (window,) = server.windows(expected=1)["windows"]
        place = {name: window[name] for name in ("run", "tag", "step")}
        assert [
            {"rank": "0", "file": f"lflops_traces/{trace.parent.name}/{trace.name}"}
        ] == server.json("window", **place)["traces"]
        assert trace.read_bytes() == server.get("trace", **place, index=0)[2]
