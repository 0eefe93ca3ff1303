"""torch-tb-profiler 0.4.3, asked over HTTP as its page asks.

What it shows of the copies that are made for it.
"""

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lflops.schedule import Schedule
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
TRUE, COPY = "cpu/lflops_traces/train-0-9", "cpu/lflops_traces/compat-train-0-9"
"""Three steps waited for, one of warm-up, three traced, three hooked: the last is 9."""
ON_DEVICE = "compat-cuda"
LATE = {f"after-{moment // DAY}-days": moment for moment in MOMENTS.values()}
"""Where the copies are of the same trace as it would have been recorded at these moments of a quarter."""

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
"""A product of the head's, and what CUDA would tell of it."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training on a CPU as the callback leaves it, copies of its trace at other moments, and a trace of a device."""
    logs = tmp_path_factory.mktemp("logs")
    monitor = watching(
        trace=True,
        profile_memory=True,
        dirpath=logs / "cpu",
        schedule=Schedule(wait=3, warmup=1, active=BATCHES),
    )
    fit(Classifier(), monitor)
    (written := logs / "cuda" / "host_0.1.pt.trace.json").parent.mkdir()
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
    """What it shows of them."""
    with profiler_board(logs, tmp_path_factory.mktemp("program"), runs=4 + len(LATE)) as board:
        yield board


def asked(shown: Board, route: str, run: str = COPY, **more: Any) -> Any:
    """What it says of the only worker of a run."""
    (worker,) = shown.json("workers", run=run, view="Overview")
    (span,) = shown.json("spans", run=run, worker=worker)
    return shown.json(route, run=run, worker=worker, span=span, **more)


def table(told: Any) -> list[dict[str, Any]]:
    """Rows by the columns' names."""
    names = [column.get("name", "") for column in told["columns"]]
    return [dict(zip(names, row, strict=True)) for row in told["rows"]]


def lies_in(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    """Of two operators: name, thread, start and end."""
    return inner[1] == outer[1] and bool(outer[2] <= inner[2] and inner[3] <= outer[3])


def recorded_calls(logs: Path) -> Counter[str]:
    """How often the trace has each operator.

    One that does nothing but call another of its name is one with it, as in every table.
    """
    (trace,) = (logs / TRUE).iterdir()
    spans = [
        (each["name"], each["tid"], *span(each))
        for each in exact(trace)["traceEvents"]
        if each.get("cat") == "cpu_op"
    ]
    found = Counter(name for name, *_ in spans)
    for each in spans:
        within = [other for other in spans if other != each and lies_in(other, each)]
        outer = max(within, key=lambda other: other[3] - other[2], default=None)
        if (
            outer is not None
            and outer[0] == each[0]
            and all(lies_in(other, outer) for other in within)
        ):
            found[each[0]] -= 1
    return found


def places(rows: Any, *above: str) -> dict[tuple[str, ...], Any]:
    """Of the tree of modules, each row by the names down to it."""
    found: dict[tuple[str, ...], Any] = {}
    for row in rows:
        found |= {(*above, row["name"]): row} | places(row["children"], *above, row["name"])
    return found


def test_a_run_has_all_views_that_a_trace_of_a_cpu_can_fill(shown: Board) -> None:
    """The copy beside the trace, which has those that need nothing of us.

    In a list the copy comes first.
    """
    runs = shown.json("runs")["runs"]
    assert [COPY, TRUE] == [run for run in runs if run.startswith("cpu")]
    assert ["Overview", "Operator", "Trace", "Memory", "Module"] == shown.json("views", run=COPY)
    assert ["Overview", "Operator", "Trace", "Memory"] == shown.json("views", run=TRUE)


def test_the_overview_has_a_row_for_each_batch_with_the_data_loader_s_time(shown: Board) -> None:
    """Which of the trace itself is 0. The parts of a step add up to it."""
    copied, true = (table(asked(shown, "overview", run)["steps"]) for run in (COPY, TRUE))
    assert [str(number) for number in range(BATCHES)] == [row["Step"] for row in copied]
    assert all(row["DataLoader"] > 0 for row in copied)
    assert {0} == {row["DataLoader"] for row in true}
    for row, plain in zip(copied, true, strict=True):
        parts = "DataLoader", "CPU Exec", "Other"
        assert sum(row[part] for part in parts) == pytest.approx(
            sum(plain[part] for part in parts), abs=0.01
        )


@pytest.mark.parametrize("run", [COPY, *(f"{run}/compat-window" for run in LATE)])
def test_the_operators_are_those_of_the_trace(run: str, shown: Board, logs: Path) -> None:
    """As often, backward of what is in no module among them.

    Two products forward in a batch, three backward, and a loss.

    Whenever in a quarter the trace is recorded.
    """
    copied = {
        row["name"]: row["calls"]
        for row in asked(shown, "operation/table", run, group_by="Operation")["data"]
    }
    assert (2 * BATCHES, 3 * BATCHES, BATCHES) == (
        copied["aten::addmm"],
        copied["aten::mm"],
        copied["NllLossBackward0"],
    )
    assert recorded_calls(logs) == copied


def test_the_modules_have_our_names(shown: Board) -> None:
    """Without a stack of Python's: forward as the modules call each other, and backward."""
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
    assert (
        body["host_duration"]
        >= sum(found["body (Sequential)", name]["host_duration"] for name in names)
        > 0
    )


def test_the_trace_and_the_memory_are_there(shown: Board) -> None:
    """The trace with the modules' tracks; memory by operator, and as a curve."""
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
    """50 µs of a kernel, of which the trace itself tells it nothing.

    A step is one, though the device shows it again.
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
