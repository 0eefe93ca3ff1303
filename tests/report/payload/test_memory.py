"""Test the part of the page's payload about live memory in a step."""

from typing import Any

from msgspec import json
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.memory.peak import USABLE
from lflops.profile.profile import Allocation, Memory, Moment, Profile
from lflops.profile.records import ByCategory, Rank
from lflops.report.payload.payload import payload
from tests.support.profile_builders import (
    product,
    profile,
    run,
    small_memory,
    small_profile,
)


def as_read(given: Profile) -> Any:
    """Return the memory part of a profile's payload as the page reads it."""
    return json.decode(json.encode(payload(analyze(given))))["memory"]


def holding(memory: Memory, **fields: Any) -> Profile:
    """Return a profile of one matmul with this memory."""
    return profile(
        {"": {}},
        [product("", "aten::mm", "forward", macs=1, bytes_moved=1)],
        memory=memory,
        **fields,
    )


def test_the_peak_lies_behind_the_operator_that_reaches_it() -> None:
    """The peak is a separate point after the operator that reaches it, with the memory by category.

    In `small_profile`, this is the third of four operators. There is a column for each category
    that occurs, with long-lived categories first.
    """
    shown = as_read(small_profile())
    points = shown["points"]
    assert 4 == shown["operators"]
    # `peak` is the index of the peak's point, which is at 2.5: after operator 2.
    assert 3 == shown["peak"]
    assert 3000 == shown["peak_bytes"]
    assert [0, 1, 2, 2.5, 3] == points["at"]
    assert [712, 2000, 3000, 3000, 2500] == points["live"]
    assert ["parameters", "gradients", "activations", "temporary"] == shown["categories"]
    assert [712] * 5 == points["parameters"]
    assert [0, 0, 0, 0, 136] == points["gradients"]
    assert [0, 1288, 2288, 2288, 1288] == points["activations"]
    assert [0, 0, 0, 0, 364] == points["temporary"]
    assert [["parameters", 712], ["activations", 2288]] == shown["by_category"]
    assert ["forward", "forward", "forward", "forward", "backward"] == points["phase"]


def test_what_holds_the_peak_is_listed() -> None:
    """Modules are sorted by their bytes at the peak, without modules that hold nothing.

    The rank is unknown, because no rank has a known peak.
    """
    shown = as_read(small_profile())
    modules = {"name": ["encoder.0", "head"], "modules": [1, 1], "bytes": [2832, 168]}
    assert modules == shown["modules"]
    assert [0, 0] == shown["more"]
    assert shown["rank"] is None


def test_storages_alike_are_one_line() -> None:
    """Equal storages of repeated modules are one line.

    The weights of 8 bytes in two blocks are equal. The activation of 8 bytes and the weight of 4
    bytes differ from them.
    """
    alive = (
        Allocation("parameters", "", "0.linear", "other", 8),
        Allocation("activations", "mm", "0.linear", "forward", 8),
        Allocation("parameters", "", "1.linear", "other", 8),
        Allocation("parameters", "", "1.linear", "other", 4),
    )
    rows = {name: {} for name in ("", "0", "0.linear", "1", "1.linear")}
    shown = as_read(profile(rows, [], memory=replace(small_memory(), alive=alive)))
    assert 4 == shown["largest"]
    assert ["*.linear", "0.linear", "1.linear"] == shown["alive"]["module"]
    assert [2, 1, 1] == shown["alive"]["number"]
    assert [8, 8, 4] == shown["alive"]["each_bytes"]


def test_the_rank_with_the_largest_peak_is_the_one_shown() -> None:
    """A merged profile has the memory of the rank with the largest peak."""
    nothing = Rank(
        rank=0, node=None, host=None, device=None, coordinates={}, status="ok", peak_bytes=2999
    )
    ranks = (nothing, replace(nothing, rank=1, peak_bytes=3000))
    assert 1 == as_read(holding(small_memory(), ranks=ranks))["rank"]


def test_the_room_is_the_chip_s() -> None:
    """The capacity is the usable memory of the chip, or unknown if the chip's memory is unknown."""
    with_memory = Hardware("abacus", {"fp32": 1.0}, memory_bytes=4000.0)
    known = as_read(holding(small_memory(), run=run(hardware=with_memory)))
    assert "abacus" == known["chip"]
    assert int(4000 * USABLE) == known["capacity_bytes"]
    without_memory = Hardware("abacus", {"fp32": 1.0})
    unknown = as_read(holding(small_memory(), run=run(hardware=without_memory)))
    assert unknown["chip"] is None
    assert unknown["capacity_bytes"] is None


def test_a_long_step_is_its_extremes_and_its_peak() -> None:
    """A step of 50,000 operators has at most 2,000 points, among them both ends and the peak.

    The peak is in the middle. The points also include the least and the greatest of all values.
    """
    middle = 25_000
    parts = ByCategory(1, 0, 0, 0, 0, 0)
    moments = tuple(Moment("mm", "", "forward", place % 7, place, parts) for place in range(50_000))
    memory = replace(small_memory(), timeline=moments, peak_index=middle, by_module={})
    shown = as_read(holding(memory))
    at = shown["points"]["at"]
    assert len(at) <= 2_000
    assert 0 == at[0]
    assert 49_999 == at[-1]
    assert middle + 0.5 == at[shown["peak"]]
    assert 50_000 == shown["operators"]
    assert {0, 6} <= set(shown["points"]["live"])


def test_a_count_of_bytes_beyond_what_the_page_can_hold_is_a_text() -> None:
    """Bytes above 2^53 are a string with all digits."""
    memory = replace(small_memory(), peak_bytes=2**53 + 1)
    assert "9007199254740993" == as_read(holding(memory))["peak_bytes"]


def test_what_was_not_counted_is_unknown() -> None:
    """Without counted memory, this part is missing instead of empty."""
    assert as_read(profile({"": {}}, [])) is None
