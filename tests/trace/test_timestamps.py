"""Test that the times of a trace are exact to the nanosecond, early and late in a quarter.

Slices that are nested in a trace must also be nested after it was annotated, merged or copied.
"""

import importlib.util
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from lflops.errors import ProfileError
from lflops.profile.records import Call
from lflops.trace import recorded as times
from lflops.trace.analysis.merge import MERGED, merge
from lflops.trace.annotate import RecordedCalls, annotate
from lflops.trace.convert import convert_for_tb_profiler
from tests.support.quarters import DAY, MOMENTS, exact, span, write
from tests.trace.test_convert import STEP, module

BASE = 1_790_857_026_000_000_000
CALLS = 300
LENGTH = 2999
"""Length of a call in nanoseconds."""

EVERY = 9973
"""Nanoseconds from the beginning of a call to the beginning of the next one.

No two outer calls end at the same fraction of a microsecond.
"""

OWN_TIMES = """
import json, sys, tempfile
from torch_tb_profiler.profiler.data import RunProfileData
data = RunProfileData.parse("host_0", 1, sys.argv[1], tempfile.mkdtemp())
print(json.dumps({each.name: [each.calls, each.self_host_duration] for each in data.op_list_groupby_name}))
"""

PLACES = [pytest.param(moment * 1000, id=name) for name, moment in MOMENTS.items()]


def calls(quarter: int) -> list[tuple[str, int, int]]:
    """Return the name, start and end of each call.

    Each outer call contains an inner call in its first nanosecond and another in its last two
    nanoseconds. The latter contains a call in its last nanosecond.
    """
    found = []
    for number in range(CALLS):
        start = quarter + number * EVERY
        end = start + LENGTH
        found += [
            ("outer", start, end),
            ("first", start, start + 1),
            ("last", end - 2, end),
            ("within", end - 1, end),
        ]
    return found


def written(nanoseconds: int) -> Decimal:
    """Return a time in microseconds, as Kineto writes it."""
    return Decimal(nanoseconds).scaleb(-3)


def operators(quarter: int) -> list[dict[str, Any]]:
    """Return a step, and the calls in it as operators."""
    place = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 5}
    events = [STEP | {"ts": written(quarter), "dur": written(CALLS * EVERY)}]
    for name, start, end in calls(quarter):
        events.append(place | {"name": name, "ts": written(start), "dur": written(end - start)})
    return events


@pytest.mark.parametrize("quarter", PLACES)
def test_what_is_annotated_has_its_own_times(quarter: int, tmp_path: Path) -> None:
    """The slices that `annotate` adds have the exact times of the calls."""
    trace = tmp_path / "trace.json"
    into = tmp_path / "out.gz"
    write({"baseTimeNanoseconds": BASE, "traceEvents": operators(quarter)}, trace)
    told = [
        Call(name, "forward", BASE + start, BASE + end, 0, name != "outer", 0)
        for name, start, end in calls(quarter)
    ]
    annotate(trace, RecordedCalls(batches=1, rank=0, world_size=1, calls=tuple(told)), into)
    found = exact(into)["traceEvents"]
    assert operators(quarter) == found[: 1 + len(told)]
    assert calls(quarter) == [
        (each["name"], *span(each)) for each in found if each.get("cat") == "lflops_module"
    ]


@pytest.mark.parametrize("quarter", PLACES)
def test_what_is_merged_stays_when_it_was(quarter: int, tmp_path: Path) -> None:
    """Merging two traces keeps the exact times.

    The clock of the second rank begins 1,234,567.891 µs later, so its times are smaller by as much.
    """
    later = 1_234_567_891
    for rank in (0, 1):
        content = {
            "baseTimeNanoseconds": BASE + rank * later,
            "traceEvents": operators(quarter - rank * later),
        }
        write(content, tmp_path / f"a_{rank}.1.pt.trace.json")
    merge(tmp_path)
    content = exact(tmp_path / MERGED)
    found = [
        (each["name"], *span(each, content["baseTimeNanoseconds"]))
        for each in content["traceEvents"]
        if each.get("cat") == "cpu_op"
    ]
    assert 2 * calls(BASE + quarter) == found


@pytest.mark.skipif(
    importlib.util.find_spec("torch_tb_profiler") is None, reason="needs torch_tb_profiler"
)
@pytest.mark.parametrize("quarter", PLACES)
def test_torch_tb_profiler_drops_nothing_of_the_copy(quarter: int, tmp_path: Path) -> None:
    """torch-tb-profiler reads all operators of the copy with correct self times.

    It adds floats, and reports that ranges intersect if an inner operator seems to end after the
    outer one. The modules in the trace are as long as the outer operators.
    """
    trace = tmp_path / "window" / "host_0.1.pt.trace.json"
    trace.parent.mkdir()
    modules = []
    for name, start, end in calls(quarter):
        if name == "outer":
            times_of_call = {"ts": written(start), "dur": written(end - start)}
            modules.append(module(name, "forward", 0, 0) | times_of_call)
    header = {"schemaVersion": 1, "distributedInfo": {"rank": 0}, "baseTimeNanoseconds": BASE}
    write(header | {"traceEvents": operators(quarter) + modules}, trace)
    copy, _ = convert_for_tb_profiler(trace)
    assert CALLS == sum(
        event["name"].startswith("nn.Module: outer") for event in exact(copy)["traceEvents"]
    )
    command = [sys.executable, "-W", "ignore", "-c", OWN_TIMES, str(copy)]
    read = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "intersect" not in read.stdout + read.stderr
    own = {"outer": LENGTH - 3, "first": 1, "last": 1, "within": 1}
    said = json.loads(read.stdout.splitlines()[-1])
    assert own.keys() == said.keys()
    for name, (number, microseconds) in said.items():
        assert CALLS == number
        assert own[name] == round(1000 * microseconds / CALLS)


@pytest.mark.parametrize(
    ("ts", "dur", "expected"),
    [
        ("4387374628158.489", "26.597", (4387374628158489, 4387374628185086)),
        ("1", "2.5", (1000, 3500)),
        # From 1000.4 to 1000.8 ns.
        ("1.0004", "0.0004", (1000, 1001)),
        ("1e3", "1E-3", (1_000_000, 1_000_001)),
        ("-1.5", "0.001", (-1500, -1499)),
        ("0.000", "0.000", (0, 0)),
    ],
)
def test_times_are_read_as_integers(ts: str, dur: str, expected: tuple[int, int]) -> None:
    """The start and the length of an event are read as whole nanoseconds, in any number format."""
    assert expected == times.span(Raw(ts.encode()), Raw(dur.encode()))


@pytest.mark.parametrize(
    ("nanoseconds", "expected"),
    [(91 * DAY * 1000 + 1, b"7862400000000.001"), (999, b"0.999"), (-1500, b"-1.500")],
)
def test_times_are_written_as_decimals(nanoseconds: int, expected: bytes) -> None:
    """Nanoseconds are written as decimal microseconds, which are read as the same nanoseconds."""
    assert expected == bytes(times.microseconds(nanoseconds))
    assert (nanoseconds, nanoseconds) == times.span(times.microseconds(nanoseconds))


@pytest.mark.parametrize(
    "ts", ['"soon"', '"nan"', '"-Infinity"', "null", "1e18", "1e999999999999", "9" * 5000]
)
def test_what_is_no_time_is_refused(ts: str, tmp_path: Path) -> None:
    """An event with an invalid time is left out if the clocks of ranks are aligned, and is counted.

    For the copy for torch-tb-profiler, it is an error that names the file.
    """
    event = f'{{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": {ts}, "dur": 1.0}}'
    for rank in (0, 1):
        text = f'{{"baseTimeNanoseconds": {BASE + rank}, "traceEvents": [{event}]}}'
        (tmp_path / f"a_{rank}.1.pt.trace.json").write_text(text)
    assert 1 == merge(tmp_path).damaged
    with pytest.raises(
        ProfileError, match=r"a_0\.1\.pt\.trace\.json: is not a torch.profiler trace"
    ):
        convert_for_tb_profiler(tmp_path / "a_0.1.pt.trace.json")
