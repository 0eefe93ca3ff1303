"""What the page's Roofline is given: every roof is worked out by hand."""

from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.report.payload.payload import payload
from lflops.report.payload.roofline import MAX_POINTS
from tests.support.compiled_profiles import compiled_profile
from tests.support.profile_builders import (
    cell,
    clocked,
    product,
    profile,
    profile_of,
    run,
    small_profile,
)

CHIP = Hardware("chip", {"fp32": 1000.0}, 100.0, None, "a pencil", 400.0)
"""Turns at 10 FLOPs a byte. What moves 400 bytes in a call stays in its cache."""


def shown(given: Profile) -> Any:
    """What arrives at the page."""
    return json.decode(json.encode(payload(analyze(given))))["roofline"]


def blocks(chip: Hardware | None = CHIP) -> Profile:
    """Two alike products of 20,000 FLOPs in 40 s and in 10 s, and a norm of 500 FLOPs, each of 1000 bytes; the norm was not timed."""
    rows: dict[str, dict[str, Any]] = {
        "": {},
        "blocks": {},
        "blocks.0": {},
        "blocks.1": {},
        "norm": {},
    }
    cells = [
        *(
            product(name, "mm", "forward", macs=10_000, bytes_moved=1000)
            for name in ("blocks.0", "blocks.1")
        ),
        cell("norm", "native_layer_norm", "backward", flops=500, bytes_moved=1000),
    ]
    return clocked(
        profile(rows, cells, run=run(hardware=chip)),
        {("blocks.0", "forward"): 40.0, ("blocks.1", "forward"): 10.0},
    )


def test_a_point_has_its_row_and_its_figures() -> None:
    """20 s at the roof of 1000 FLOP/s.

    Half of the first product's time, twice the second's; the norm needs 10 s for its bytes.
    """
    table = shown(blocks())["modules"]["table"]
    assert [2, 3, 4] == table["module"]
    assert ["forward", "forward", "backward"] == table["phase"]
    assert ([20, 20, 0.5], [500, 2000, None], [1000, 1000, 50]) == (
        table["intensity"],
        table["flops_per_second"],
        table["roof_flops_per_second"],
    )
    assert ([0.5, 2, None], [20, 0, None], ["compute", "compute", "memory"]) == (
        table["share"],
        table["potential_seconds"],
        table["bound"],
    )
    assert [None, "above its roofline limit: a count, a time or a peak is wrong", None] == table[
        "over"
    ]


def test_what_repeats_is_one_point() -> None:
    """40,000 FLOPs in 50 s; the first one has 20 s to win, the other none; the norm as it is."""
    table = shown(blocks())["repeats"]["table"]
    assert (["blocks.*", None], [2, 1], [2, 4]) == (table["label"], table["times"], table["module"])
    assert ([800, None], [20, None]) == (table["flops_per_second"], table["potential_seconds"])


def test_operators_are_points_without_a_time() -> None:
    """Both products together need 40 s, the norm 10: that is their order."""
    table = shown(blocks())["operators"]["table"]
    assert (["mm float32", "native_layer_norm float32"], [40, 10]) == (
        table["label"],
        table["roof_seconds"],
    )
    assert (None, None) == (table["seconds"], table["over"])


def test_what_has_modules_below_it_is_marked() -> None:
    """The loss of the root's own is not all of the root."""
    given = small_profile()
    table = shown(given)["modules"]["table"]
    names = [list(given.modules)[row] for row in table["module"]]
    assert {""} == {
        name for name, has_below in zip(names, table["has_below"], strict=True) if has_below
    }


def test_the_roofs_come_with_the_chip() -> None:
    """And no reason why there were none."""
    given = shown(blocks())
    (ceiling,) = given["ceilings"]
    assert ("chip", "a pencil", "fp32", 1000, 100, True) == tuple(ceiling.values())
    assert "" == given["why_unknown"]


@pytest.mark.parametrize(
    ("chip", "why"),
    [
        (None, "the peak of cpu is not known"),
        (Hardware("chip", {"bf16": 1.0}, 100.0), "chip has no known peak for any dtype"),
        (Hardware("chip", {"fp32": 1.0}), "the bandwidth of chip is not known"),
    ],
    ids=["chip", "peak", "bandwidth"],
)
def test_an_unknown_roof_has_its_reason(chip: Hardware | None, why: str) -> None:
    """What was achieved is known all the same."""
    given = shown(blocks(chip))
    assert given["why_unknown"].startswith(why)
    assert [500, 2000, None] == given["modules"]["table"]["flops_per_second"]


def test_what_fusion_saves_is_said() -> None:
    """1216 + 576 bytes in place of 1472 + 768: a fifth less. By point the bytes of its kernels."""
    given = shown(compiled_profile())
    sentence = "compiled code moves 1.75 KiB instead of 2.19 KiB: fusion saves 20.0 % (forward 17.4 %, backward 25.0 %)"
    assert (
        given["fusion"]
        == f"{sentence}; this leaves out 1 module, because the bytes of some of their kernels are unknown"
    )
    assert {960, 256, 576} <= set(given["modules"]["table"]["fused_bytes"])
    assert (shown(blocks())["fusion"], shown(blocks())["modules"]["table"]["fused_bytes"]) == (
        "",
        None,
    )


def test_the_points_with_the_least_time_are_left_out() -> None:
    """Each of 600 modules did something in 4 phases; those that repeat are few."""
    found = shown(profile_of(600))
    assert 2400 - MAX_POINTS == found["modules"]["left_out"]
    assert MAX_POINTS == len(found["modules"]["table"]["phase"])
    assert 0 == found["repeats"]["left_out"]


def test_where_nothing_was_counted_there_is_none() -> None:
    """Neither for a window of times alone, nor for a model that ran nothing."""
    assert (
        shown(replace(small_profile(), notes=(Note(code="not_counted", subject="", values={}),)))
        is None
    )
    assert shown(profile({"": {}}, [])) is None
