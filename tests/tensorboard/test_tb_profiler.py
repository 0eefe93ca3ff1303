"""Test what torch-tb-profiler 0.4.3 shows of the trace copies that lflops makes for it.

The tests send the HTTP requests that its page sends.
"""

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lflops.monitoring.schedule import Schedule
from lflops.trace.convert import convert_for_tb_profiler
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, watching
from tests.support.quarters import DAY, MOMENTS, exact, moved, span, write
from tests.support.tensorboard_server import Board, profiler_board
from tests.trace.test_convert import STEP, event, module

pytestmark = [
    *LIGHTNINGS_WARNINGS,
    pytest.mark.skipif(
        importlib.util.find_spec("torch_tb_profiler") is None, reason="needs torch_tb_profiler"
    ),
]

BATCHES = 3
# The window has 3 steps of `wait`, 1 of `warmup`, 3 traced and 3 module-timing: its last is step 9.
TRUE = "cpu/lflops_traces/train-0-9"
COPY = "cpu/lflops_traces/compat-train-0-9"
ON_DEVICE = "compat-cuda"
LATE = {f"after-{moment // DAY}-days": moment for moment in MOMENTS.values()}
"""Runs with a copy of the recorded trace, each moved to another time within a quarter of a year.

Kineto counts time from the start of the quarter, so late times have more digits.
"""

OPERATOR = event("aten::mm", "cpu_op", 10, 20, **{"External id": 1})
LAUNCH = event("cudaLaunchKernel", "cuda_runtime", 15, 5, correlation=7, **{"External id": 1})
KERNEL = event(
    "gemm",
    "kernel",
    30,
    50,
    thread=7,
    correlation=7,
    device=0,
    **{"External id": 1, "blocks per SM": 1, "est. achieved occupancy %": 50},
)
AGAIN = event("ProfilerStep#0", "gpu_user_annotation", 30, 50, thread=7)
"""One call of `aten::mm` in the module `head`, with its launch and kernel as CUDA records them.

`AGAIN` is the track of the same step on the device.
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a real CPU run, copies of its trace at other times, and a handmade trace of a GPU."""
    logs = tmp_path_factory.mktemp("logs")
    monitor = watching(
        trace=True,
        profile_memory=True,
        dirpath=logs / "cpu",
        schedule=Schedule(wait=3, warmup=1, active=BATCHES),
    )
    fit(Classifier(), monitor)
    written = logs / "cuda" / "host_0.1.pt.trace.json"
    written.parent.mkdir()
    events = [STEP, AGAIN, module("head", "forward", 5, 35), OPERATOR, LAUNCH, KERNEL]
    written.write_text(
        json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": events})
    )
    convert_for_tb_profiler(written)
    (recorded,) = (logs / TRUE).iterdir()
    for run, moment in LATE.items():
        trace = logs / run / "window" / recorded.name
        write(moved(exact(recorded), moment), trace)
        convert_for_tb_profiler(trace)
        trace.unlink()
    return logs


@pytest.fixture(scope="module")
def shown(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """Start TensorBoard with torch-tb-profiler on these logs."""
    with profiler_board(logs, tmp_path_factory.mktemp("program"), runs=4 + len(LATE)) as board:
        yield board


def asked(shown: Board, route: str, run: str = COPY, **more: Any) -> Any:
    """Return the reply of a route for the only worker and the only span of a run."""
    (worker,) = shown.json("workers", run=run, view="Overview")
    (span,) = shown.json("spans", run=run, worker=worker)
    return shown.json(route, run=run, worker=worker, span=span, **more)


def table(told: Any) -> list[dict[str, Any]]:
    """Return each row of a table as a dictionary from column names to values."""
    names = [column.get("name", "") for column in told["columns"]]
    return [dict(zip(names, row, strict=True)) for row in told["rows"]]


def lies_in(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    """Return whether one operator runs within another operator of the same thread.

    An operator is a tuple of name, thread, start and end.
    """
    return inner[1] == outer[1] and bool(outer[2] <= inner[2] and inner[3] <= outer[3])


def recorded_calls(logs: Path) -> Counter[str]:
    """Return the number of calls of each operator in the recorded trace.

    An outermost operator and an operator of the same name directly inside it are one call, as in
    the tables of torch-tb-profiler.
    """
    (trace,) = (logs / TRUE).iterdir()
    spans = []
    for recorded in exact(trace)["traceEvents"]:
        if recorded.get("cat") == "cpu_op":
            start, end = span(recorded)
            spans.append((recorded["name"], recorded["tid"], start, end))
    found = Counter(name for name, *_ in spans)
    for outer in spans:
        name = outer[0]
        inside = [other for other in spans if other != outer and lies_in(other, outer)]
        if not inside:
            continue
        longest = max(inside, key=lambda other: other[3] - other[2])
        contains_the_rest = all(lies_in(other, longest) for other in inside)
        if longest[0] == name and contains_the_rest:
            found[name] -= 1
    return found


def places(rows: Any, *above: str) -> dict[tuple[str, ...], Any]:
    """Return the rows of a module tree by the path of names from the root to the row."""
    found: dict[tuple[str, ...], Any] = {}
    for row in rows:
        path = (*above, row["name"])
        found[path] = row
        found |= places(row["children"], *path)
    return found


def test_a_run_has_all_views_that_a_trace_of_a_cpu_can_fill(shown: Board) -> None:
    """The copy has the Module view in addition to the views of the original trace.

    In the list of runs, the copy comes first.
    """
    runs = shown.json("runs")["runs"]
    assert [COPY, TRUE] == [run for run in runs if run.startswith("cpu")]
    assert ["Overview", "Operator", "Trace", "Memory", "Module"] == shown.json("views", run=COPY)
    assert ["Overview", "Operator", "Trace", "Memory"] == shown.json("views", run=TRUE)


def test_the_overview_has_a_row_for_each_batch_with_the_data_loader_s_time(shown: Board) -> None:
    """The copy shows a data loader time for each batch; for the original trace it is 0.

    In both, the parts of a step have the same sum.
    """
    copied = table(asked(shown, "overview", COPY)["steps"])
    true = table(asked(shown, "overview", TRUE)["steps"])
    assert [str(number) for number in range(BATCHES)] == [row["Step"] for row in copied]
    assert all(row["DataLoader"] > 0 for row in copied)
    assert {0} == {row["DataLoader"] for row in true}
    parts = ("DataLoader", "CPU Exec", "Other")
    for row, plain in zip(copied, true, strict=True):
        expected = sum(plain[part] for part in parts)
        assert sum(row[part] for part in parts) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("run", [COPY, *(f"{run}/compat-window" for run in LATE)])
def test_the_operators_are_those_of_the_trace(run: str, shown: Board, logs: Path) -> None:
    """Every operator of the copy has as many calls as in the trace, at any time of a quarter.

    In each batch, forward has two matmuls, backward has three, and there is one loss. The backward
    of the loss belongs to no module.
    """
    rows = asked(shown, "operation/table", run, group_by="Operation")["data"]
    copied = {row["name"]: row["calls"] for row in rows}
    assert 2 * BATCHES == copied["aten::addmm"]
    assert 3 * BATCHES == copied["aten::mm"]
    assert BATCHES == copied["NllLossBackward0"]
    assert recorded_calls(logs) == copied


def test_the_modules_have_our_names(shown: Board) -> None:
    """Modules have their dotted names, although no Python stack was recorded.

    Forward is a tree of calls, and backward is one more tree.
    """
    found = places(asked(shown, "module")["data"])
    names = "body.0 (Linear)", "body.1 (ReLU)", "body.2 (Dropout)"
    forward = {
        ("body (Sequential)",),
        ("head (Linear)",),
        *(("body (Sequential)", name) for name in names),
    }
    backward = {
        ("backward", f"{name} backward")
        for name in ("(model) (Classifier)", "head (Linear)", *names)
    }
    assert forward | backward | {("backward",)} == found.keys()
    assert {BATCHES} == {row["occurences"] for row in found.values()}
    body = found["body (Sequential)",]
    inside = sum(found["body (Sequential)", name]["host_duration"] for name in names)
    assert body["host_duration"] >= inside > 0


def test_the_trace_and_the_memory_are_there(shown: Board) -> None:
    """The trace view has the tracks of the modules, and the memory views have rows for the CPU."""
    drawn = {
        each["name"]
        for each in asked(shown, "trace")["traceEvents"]
        if each.get("cat") == "lflops_module"
    }
    assert {"body", "body.0", "body.1", "body.2", "head", "(model)"} == drawn
    assert asked(shown, "memory")["rows"]["CPU"]
    assert asked(shown, "memory_curve")["rows"]["CPU"]
    assert asked(shown, "memory_events")["rows"]["CPU"]


def test_the_device_s_time_is_the_operator_s_and_the_module_s(shown: Board) -> None:
    """The 50 µs of the kernel belong to its operator and its module.

    For the original trace, torch-tb-profiler shows 0. The step is listed once, although the device
    has a second track of it.
    """
    assert ["Overview", "Operator", "Kernel", "Trace", "Module"] == shown.json(
        "views", run=ON_DEVICE
    )
    (operator,) = asked(shown, "operation/table", ON_DEVICE, group_by="Operation")["data"]
    assert ("aten::mm", 50, 50) == (
        operator["name"],
        operator["device_total_duration"],
        operator["device_self_duration"],
    )
    (plain,) = asked(shown, "operation/table", "cuda", group_by="Operation")["data"]
    assert 0 == plain["device_total_duration"]
    (row,) = asked(shown, "module", ON_DEVICE)["data"]
    assert ("head (Linear)", 50, 35) == (row["name"], row["device_duration"], row["host_duration"])
    (step,) = table(asked(shown, "overview", ON_DEVICE)["steps"])
    assert (50, 5) == (step["Kernel"], step["Runtime"])
    (kernel,) = asked(shown, "kernel/table", ON_DEVICE)["data"]["rows"]
    assert {"gemm", "aten::mm"} <= set(kernel)
