"""Test `outer_first`, and that events in memory equal the events of their file."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.record.events import NO_OPERATORS, read
from lflops.trace.record.tracer import recorded_events
from lflops.trace.recorded import OperatorCall, outer_first


class Named(NamedTuple):
    """A slice with a name."""

    name: str
    start: int
    end: int


SLICES = [
    Named("inner", 10, 20),
    Named("later", 30, 35),
    Named("outer", 10, 30),
    Named("crossing", 25, 40),
]
"""Slices of which some overlap.

`crossing` begins in `outer` and ends after it. `later` begins when `outer` ends, within `crossing`.
"""


@pytest.mark.parametrize(("may_cross", "around_crossing"), [(True, ["outer"]), (False, [])])
def test_slices_come_the_outer_ones_first(may_cross: bool, around_crossing: list[str]) -> None:
    """`outer_first` yields outer slices before inner ones, with the open slices around each.

    With `may_cross`, a slice that ends after the slice in which it begins counts as inside it.
    """
    opened: list[Named] = []
    around = {}
    for each in outer_first(SLICES, opened, may_cross=may_cross):
        around[each.name] = [other.name for other in opened]
        opened.append(each)
    expected = {
        "outer": [],
        "inner": ["outer"],
        "crossing": around_crossing,
        "later": [*around_crossing, "crossing"],
    }
    assert list(expected) == list(around)
    assert expected == around


def figures(calls: list[OperatorCall]) -> list[tuple[int, str, int, int]]:
    """Return the start, name, length and sequence number of each call, in the order of the starts.

    The starts are nanoseconds since the first call began.
    """
    known = [call for call in calls if call.name not in NO_OPERATORS]
    begin = min(call.start for call in known)
    return sorted(
        (call.start - begin, call.name, call.end - call.start, max(call.sequence, -1))
        for call in known
    )


def test_events_in_memory_are_the_value_that_their_file_gives(tmp_path: Path) -> None:
    """The operators that are read from memory equal those of the file that torch exports.

    They are all operators of a forward and a backward pass, with times in nanoseconds.
    """
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with profile(activities=[ProfilerActivity.CPU]) as recorder:
        model(torch.randn(4, 8)).sum().backward()
    recorder.export_chrome_trace(str(tmp_path / "trace.json"))
    in_memory = figures(read(recorded_events(recorder), device=False, stack=False).operators)
    assert "aten::addmm" in {name for _, name, _, _ in in_memory}
    assert figures(read_trace(tmp_path / "trace.json").operators) == in_memory
