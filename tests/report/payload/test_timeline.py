"""Test the part of the page's payload about a step over time, and the memory on its axis."""

from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.profile.profile import Moment, Profile
from lflops.profile.records import ByCategory, Phase
from lflops.profile.timeline import ModuleSlice, StepTimeline
from lflops.report.payload.memory import memory, timeline
from tests.support.profile_builders import small_memory, small_profile


def shown(given: Profile) -> Any:
    """Return the timeline of a profile as the page reads it."""
    analysis = analyze(given)
    return json.decode(json.encode(timeline(analysis, memory(analysis))))


def test_a_name_is_there_once() -> None:
    """Names of modules, operators and kernels are stored once; columns refer to them by number."""
    first, second = shown(small_profile())["ranks"]
    assert [
        "",
        "encoder",
        "encoder.0",
        "encoder.1",
        "head",
        "aten::addmm",
        "gemm",
        "copy",
    ] == first["names"]
    assert [0, 1, 2, 3, 4, 0, 4, 1, 0] == first["slices"]["name"]
    assert [5, 5] == first["operators"]["name"]
    assert [6, 6, 7] == first["kernels"]["name"]
    assert "traced" == first["source"]
    assert 3_000_000 == first["length"]
    assert [0, 2, 0] == first["left_out"]
    assert "module_timing" == second["source"]


def test_without_a_step_in_time_there_is_no_view() -> None:
    """Without a recorded step, as in a count, there is no timeline."""
    assert timeline(analyze(replace(small_profile(), timelines=())), None) is None


def counted(*places: tuple[str, Phase], slices: list[tuple[str, str, int, int]]) -> Profile:
    """Return a profile with a counting step and a traced step of 100 ns.

    Args:
        places: Module and phase of each operator of the counting step.
        slices: Module, phase, start and length of each slice of the traced step.
    """
    moments = tuple(
        Moment("mm", row, phase, 10, index, ByCategory(10, 0, 0, 0, 0, 0))
        for index, (row, phase) in enumerate(places)
    )
    given = tuple(ModuleSlice(row, phase, start, length, 1) for row, phase, start, length in slices)
    step = StepTimeline(source="traced", length=100, slices=given)
    live = replace(small_memory(), timeline=moments, peak_index=0, peak_bytes=10)
    return replace(small_profile(), memory=live, timelines=(step,))


def at(given: Profile) -> dict[float, int]:
    """Return the time of each operator, without the separate point of the peak."""
    analysis = analyze(given)
    points: Any = json.decode(json.encode(memory(analysis)))["points"]["at"]
    times = zip(points, shown(given)["memory_at"], strict=True)
    # The peak is between two operators, so its index is not a whole number.
    return {index: moment for index, moment in times if index % 1 == 0}


def test_memory_is_where_its_module_ran() -> None:
    """Operators of the counting step are spread evenly over the time of their module.

    `a` has operators 0 and 1 and runs for 40 ns from 20 on, so they start at 20 and 40. `b` has
    operator 2 and starts at 70.
    """
    places: list[tuple[str, Phase]] = [("a", "forward"), ("a", "forward"), ("b", "forward")]
    given = counted(*places, slices=[("a", "forward", 20, 40), ("b", "forward", 70, 20)])
    assert {0: 20, 1: 40, 2: 70} == at(given)


def test_what_ran_in_no_module_is_between_its_neighbours() -> None:
    """Operators of the root are spread evenly between their neighbours.

    `a` ends at 30 and `b` starts at 90, so operators 1 and 2 are at 30 and 60.
    """
    places: list[tuple[str, Phase]] = [
        ("a", "forward"),
        ("", "forward"),
        ("", "forward"),
        ("b", "forward"),
    ]
    given = counted(*places, slices=[("a", "forward", 20, 10), ("b", "forward", 90, 10)])
    assert {0: 20, 1: 30, 2: 60, 3: 90} == at(given)


def test_a_module_that_ran_in_another_order_is_no_anchor() -> None:
    """Modules that ran in different orders in both steps give no times.

    `c` ran last in the counting step and first in the traced step. `a` and `b` have the same order
    in both.
    """
    places: list[tuple[str, Phase]] = [("a", "forward"), ("b", "forward"), ("c", "forward")]
    given = counted(
        *places,
        slices=[("c", "forward", 0, 10), ("a", "forward", 20, 10), ("b", "forward", 50, 10)],
    )
    found = at(given)
    assert {0, 1, 2} == found.keys()
    assert 20 == found[0]
    assert pytest.approx(50) == found[1]
    assert 60 == found[2]


def test_memory_that_fits_no_module_is_unknown() -> None:
    """If no module ran in both steps, the times are unknown."""
    assert shown(counted(("a", "forward"), slices=[("b", "forward", 0, 10)]))["memory_at"] is None
