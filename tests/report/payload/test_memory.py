"""What the page is told of a step's live memory."""

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
    fields_of,
    product,
    profile,
    run,
    small_memory,
    small_profile,
)


def as_read(given: Profile) -> Any:
    """What arrives at the page."""
    return json.decode(json.encode(payload(analyze(given))))["memory"]


def holding(memory: Memory, **fields: Any) -> Profile:
    """A profile of one product with this memory."""
    return profile(
        {"": {}},
        [product("", "aten::mm", "forward", macs=1, bytes_moved=1)],
        memory=memory,
        **fields,
    )


def test_the_peak_lies_behind_the_operator_that_reaches_it() -> None:
    """The third of four, with what the peak is made of.

    A column for each category that is ever there, the lasting ones first.
    """
    shown = as_read(small_profile())
    points = shown["points"]
    assert (4, 3, 3000) == (shown["operators"], shown["peak"], shown["peak_bytes"])
    assert [0, 1, 2, 2.5, 3] == points["at"]
    assert [712, 2000, 3000, 3000, 2500] == points["live"]
    assert ["parameters", "gradients", "activations", "temporary"] == shown["categories"]
    assert ([712] * 5, [0, 0, 0, 0, 136]) == (points["parameters"], points["gradients"])
    assert ([0, 1288, 2288, 2288, 1288], [0, 0, 0, 0, 364]) == (
        points["activations"],
        points["temporary"],
    )
    assert [["parameters", 712], ["activations", 2288]] == shown["by_category"]
    assert ["forward", "forward", "forward", "forward", "backward"] == points["phase"]


def test_what_holds_the_peak_is_listed() -> None:
    """The most first, without what holds nothing.

    Whose memory it is where nobody's peak is known: unknown.
    """
    shown = as_read(small_profile())
    assert {"name": ["encoder.0", "head"], "modules": [1, 1], "bytes": [2832, 168]} == shown[
        "modules"
    ]
    assert ([0, 0], None) == (shown["more"], shown["rank"])


def test_storages_alike_are_one_line() -> None:
    """Two blocks' weights of 8 bytes each, and one activation of 8 that is not like them."""
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
    assert ([2, 1, 1], [8, 8, 4]) == (shown["alive"]["number"], shown["alive"]["each_bytes"])


def test_the_rank_with_the_largest_peak_is_the_one_shown() -> None:
    """A merged profile has the memory of one of its ranks."""
    nothing = Rank(
        rank=0, node=None, host=None, device=None, coordinates={}, status="ok", peak_bytes=2999
    )
    ranks = (nothing, replace(nothing, rank=1, peak_bytes=3000))
    assert 1 == as_read(holding(small_memory(), ranks=ranks))["rank"]


def test_the_room_is_the_chip_s() -> None:
    """Where that is known."""
    known = as_read(
        holding(
            small_memory(), run=run(hardware=Hardware("abacus", {"fp32": 1.0}, memory_bytes=4000.0))
        )
    )
    assert ("abacus", int(4000 * USABLE)) == (known["chip"], known["capacity_bytes"])
    unknown = as_read(holding(small_memory(), run=run(hardware=Hardware("abacus", {"fp32": 1.0}))))
    assert (None, None) == (unknown["chip"], unknown["capacity_bytes"])


def test_a_long_step_is_its_extremes_and_its_peak() -> None:
    """50,000 operators, of which one in the middle needs more than all others.

    2,000 points at most, with both ends.
    """
    middle, parts = 25_000, ByCategory(1, 0, 0, 0, 0, 0)
    moments = tuple(Moment("mm", "", "forward", place % 7, place, parts) for place in range(50_000))
    shown = as_read(
        holding(
            Memory(
                **fields_of(small_memory())
                | {"timeline": moments, "peak_index": middle, "by_module": {}}
            )
        )
    )
    at = shown["points"]["at"]
    assert len(at) <= 2_000
    assert (0, 49_999, middle + 0.5, 50_000) == (
        at[0],
        at[-1],
        at[shown["peak"]],
        shown["operators"],
    )
    assert {0, 6} <= set(shown["points"]["live"])


def test_a_count_of_bytes_beyond_what_the_page_can_hold_is_a_text() -> None:
    """To the last digit."""
    assert (
        "9007199254740993"
        == as_read(holding(replace(small_memory(), peak_bytes=2**53 + 1)))["peak_bytes"]
    )


def test_what_was_not_counted_is_unknown() -> None:
    """Not an empty step."""
    assert as_read(profile({"": {}}, [])) is None
