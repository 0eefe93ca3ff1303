"""Times of a trace to the nanosecond, early and late in a quarter.

What is annotated, merged and copied still nests.
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
LENGTH, EVERY = 2999, 9973
"""Nanoseconds of a call, and from one to the next.

No two of them end at the same part of a microsecond.
"""

OWN_TIMES = """
import json, sys, tempfile
from torch_tb_profiler.profiler.data import RunProfileData
data = RunProfileData.parse("host_0", 1, sys.argv[1], tempfile.mkdtemp())
print(json.dumps({each.name: [each.calls, each.self_host_duration] for each in data.op_list_groupby_name}))
"""

PLACES = [pytest.param(moment * 1000, id=name) for name, moment in MOMENTS.items()]


def calls(quarter: int) -> list[tuple[str, int, int]]:
    """Names, starts and ends.

    In each call others run for a nanosecond at its beginning, for two at its end, and of these for
    the last.
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
    """A time as Kineto writes it."""
    return Decimal(nanoseconds).scaleb(-3)


def operators(quarter: int) -> list[dict[str, Any]]:
    """The calls as operators, in a step."""
    place = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 5}
    step = STEP | {"ts": written(quarter), "dur": written(CALLS * EVERY)}
    return [
        step,
        *(
            place | {"name": name, "ts": written(start), "dur": written(end - start)}
            for name, start, end in calls(quarter)
        ),
    ]


@pytest.mark.parametrize("quarter", PLACES)
def test_what_is_annotated_has_its_own_times(quarter: int, tmp_path: Path) -> None:
    """To the nanosecond, whenever that is."""
    trace, into = tmp_path / "trace.json", tmp_path / "out.gz"
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
    """The second rank's clock begins 1 234 567.891 µs later, and so its times are less by as much."""
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
    """It adds floats, and says that ranges intersect where an operator ends after the one around it.

    Modules are as long as these.

    Each operator is within the one that it ran in: its own time is the nanoseconds without those of
    the others in it.
    """
    (trace := tmp_path / "window" / "host_0.1.pt.trace.json").parent.mkdir()
    modules = [
        module(name, "forward", 0, 0) | {"ts": written(start), "dur": written(end - start)}
        for name, start, end in calls(quarter)
        if name == "outer"
    ]
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
    assert {name: [CALLS, nanoseconds] for name, nanoseconds in own.items()} == {
        name: [calls, round(1000 * microseconds / CALLS)]
        for name, (calls, microseconds) in said.items()
    }


@pytest.mark.parametrize(
    ("ts", "dur", "expected"),
    [
        ("4387374628158.489", "26.597", (4387374628158489, 4387374628185086)),
        ("1", "2.5", (1000, 3500)),
        ("1.0004", "0.0004", (1000, 1001)),  # 1000.4 and 1000.8 ns
        ("1e3", "1E-3", (1_000_000, 1_000_001)),
        ("-1.5", "0.001", (-1500, -1499)),
        ("0.000", "0.000", (0, 0)),
    ],
)
def test_times_are_read_as_integers(ts: str, dur: str, expected: tuple[int, int]) -> None:
    """Whole nanoseconds, however a program writes them."""
    assert expected == times.span(Raw(ts.encode()), Raw(dur.encode()))


@pytest.mark.parametrize(
    ("nanoseconds", "expected"),
    [(91 * DAY * 1000 + 1, b"7862400000000.001"), (999, b"0.999"), (-1500, b"-1.500")],
)
def test_times_are_written_as_decimals(nanoseconds: int, expected: bytes) -> None:
    """Which are read as what they were."""
    assert expected == bytes(times.microseconds(nanoseconds))
    assert (nanoseconds, nanoseconds) == times.span(times.microseconds(nanoseconds))


@pytest.mark.parametrize(
    "ts", ['"soon"', '"nan"', '"-Infinity"', "null", "1e18", "1e999999999999", "9" * 5000]
)
def test_what_is_no_time_is_refused(ts: str, tmp_path: Path) -> None:
    """Of a rank whose clock is moved the event is left out, and counted.

    Else the error names the file and the value.
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
