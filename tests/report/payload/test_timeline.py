"""The page's Timeline: names once, and memory where its modules ran."""

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
    """The view, as the page reads it."""
    analysis = analyze(given)
    return json.decode(json.encode(timeline(analysis, memory(analysis))))


def test_a_name_is_there_once() -> None:
    """Of modules, operators and kernels; the columns have numbers."""
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
    assert ([0, 1, 2, 3, 4, 0, 4, 1, 0], [5, 5], [6, 6, 7]) == tuple(
        first[kind]["name"] for kind in ("slices", "operators", "kernels")
    )
    assert ("traced", 3_000_000, [0, 2, 0], "module_timing") == (
        first["source"],
        first["length"],
        first["left_out"],
        second["source"],
    )


def test_without_a_step_in_time_there_is_no_view() -> None:
    """A count has none."""
    assert timeline(analyze(replace(small_profile(), timelines=())), None) is None


def counted(*places: tuple[str, Phase], slices: list[tuple[str, str, int, int]]) -> Profile:
    """A profile whose counted step ran one operator in each of these places, and whose timed one had these slices, of 100 ns."""
    moments = tuple(
        Moment("mm", row, phase, 10, index, ByCategory(10, 0, 0, 0, 0, 0))
        for index, (row, phase) in enumerate(places)
    )
    given = tuple(ModuleSlice(row, phase, start, length, 1) for row, phase, start, length in slices)
    step = StepTimeline(source="traced", length=100, slices=given)
    live = replace(small_memory(), timeline=moments, peak_index=0, peak_bytes=10)
    return replace(small_profile(), memory=live, timelines=(step,))


def at(given: Profile) -> dict[float, int]:
    """When each operator was, without the peak's own point."""
    analysis = analyze(given)
    points: Any = json.decode(json.encode(memory(analysis)))["points"]["at"]
    return {
        index: moment
        for index, moment in zip(points, shown(given)["memory_at"], strict=True)
        if not index % 1
    }


def test_memory_is_where_its_module_ran() -> None:
    """`a` has operators 0 and 1, and 40 ns from 20 on: they begin at 20 and 40.

    `b` has operator 2, and begins at 70.
    """
    places: list[tuple[str, Phase]] = [("a", "forward"), ("a", "forward"), ("b", "forward")]
    given = counted(*places, slices=[("a", "forward", 20, 40), ("b", "forward", 70, 20)])
    assert {0: 20, 1: 40, 2: 70} == at(given)


def test_what_ran_in_no_module_is_between_its_neighbours() -> None:
    """The root's operators 1 and 2 lie between the end of `a` at 30 and the beginning of `b` at 90.

    At 30 and 60.
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
    """`c` ran first in the timed step and last in the counted one.

    `a` and `b` are in order, and are the most.
    """
    places: list[tuple[str, Phase]] = [("a", "forward"), ("b", "forward"), ("c", "forward")]
    given = counted(
        *places,
        slices=[("c", "forward", 0, 10), ("a", "forward", 20, 10), ("b", "forward", 50, 10)],
    )
    assert {0: 20, 1: pytest.approx(50)} == {
        index: moment for index, moment in at(given).items() if index < 2
    }
    assert 60 == at(given)[2]


def test_memory_that_fits_no_module_is_unknown() -> None:
    """No module ran in both."""
    assert shown(counted(("a", "forward"), slices=[("b", "forward", 0, 10)]))["memory_at"] is None
