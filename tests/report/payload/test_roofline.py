"""Test the part of the page's payload about the roofline; all limits are computed by hand."""

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
"""A chip with the corner of its roofline at 10 FLOPs per byte.

A call that moves 400 bytes or less stays in its cache.
"""


def shown(given: Profile) -> Any:
    """Return the roofline part of a profile's payload as the page reads it."""
    return json.decode(json.encode(payload(analyze(given))))["roofline"]


def blocks(chip: Hardware | None = CHIP) -> Profile:
    """Return a profile of two equal matmuls and an untimed norm, each of 1,000 bytes.

    The matmuls have 20,000 FLOPs each and take 40 s and 10 s. The norm has 500 FLOPs.
    """
    rows: dict[str, dict[str, Any]] = {
        "": {},
        "blocks": {},
        "blocks.0": {},
        "blocks.1": {},
        "norm": {},
    }
    cells = [
        product("blocks.0", "mm", "forward", macs=10_000, bytes_moved=1000),
        product("blocks.1", "mm", "forward", macs=10_000, bytes_moved=1000),
        cell("norm", "native_layer_norm", "backward", flops=500, bytes_moved=1000),
    ]
    return clocked(
        profile(rows, cells, run=run(hardware=chip)),
        {("blocks.0", "forward"): 40.0, ("blocks.1", "forward"): 10.0},
    )


def test_a_point_has_its_row_and_its_figures() -> None:
    """A point has its module, its rates and its limits.

    At the peak of 1,000 FLOP/s, a matmul needs 20 s. This is half the time of the first matmul and
    twice the time of the second. The norm needs 10 s for its bytes.
    """
    table = shown(blocks())["modules"]["table"]
    assert [2, 3, 4] == table["module"]
    assert ["forward", "forward", "backward"] == table["phase"]
    assert [20, 20, 0.5] == table["intensity"]
    assert [500, 2000, None] == table["flops_per_second"]
    assert [1000, 1000, 50] == table["roof_flops_per_second"]
    assert [0.5, 2, None] == table["share"]
    assert [20, 0, None] == table["potential_seconds"]
    assert ["compute", "compute", "memory"] == table["bound"]
    over = "above its roofline limit: the counted work, the measured time or the peak is wrong"
    assert [None, over, None] == table["over"]


def test_what_repeats_is_one_point() -> None:
    """Repeated modules are one point with their sums.

    Both matmuls have 40,000 FLOPs and take 50 s. Only the first could be faster, by 20 s.
    """
    table = shown(blocks())["repeats"]["table"]
    assert ["blocks.*", None] == table["label"]
    assert [2, 1] == table["times"]
    assert [2, 4] == table["module"]
    assert [800, None] == table["flops_per_second"]
    assert [20, None] == table["potential_seconds"]


def test_operators_are_points_without_a_time() -> None:
    """Operators are points sorted by their least time: 40 s for both matmuls, 10 s for the norm."""
    table = shown(blocks())["operators"]["table"]
    assert ["mm float32", "native_layer_norm float32"] == table["label"]
    assert [40, 10] == table["roof_seconds"]
    assert table["seconds"] is None
    assert table["over"] is None


def test_what_has_modules_below_it_is_marked() -> None:
    """A module with submodules is marked, because its point has only its self work.

    Here this is the root with the loss.
    """
    given = small_profile()
    table = shown(given)["modules"]["table"]
    names = list(given.modules)
    marked = set()
    for number, has_below in zip(table["module"], table["has_below"], strict=True):
        if has_below:
            marked.add(names[number])
    assert {""} == marked


def test_the_roofs_come_with_the_chip() -> None:
    """The limits have the chip's name and the source of its numbers."""
    given = shown(blocks())
    (ceiling,) = given["ceilings"]
    assert ("chip", "a pencil", "fp32", 1000, 100, True) == tuple(ceiling.values())
    assert "" == given["why_unknown"]


@pytest.mark.parametrize(
    ("chip", "why"),
    [
        (None, "the peak of cpu is unknown"),
        (
            Hardware("chip", {"bf16": 1.0}, 100.0),
            "the peak of chip is unknown for the dtypes of the matmuls",
        ),
        (Hardware("chip", {"fp32": 1.0}), "the bandwidth of chip is unknown"),
    ],
    ids=["chip", "peak", "bandwidth"],
)
def test_an_unknown_roof_has_its_reason(chip: Hardware | None, why: str) -> None:
    """An unknown chip, peak or bandwidth has a reason; achieved rates are known nevertheless."""
    given = shown(blocks(chip))
    assert given["why_unknown"].startswith(why)
    assert [500, 2000, None] == given["modules"]["table"]["flops_per_second"]


def test_what_fusion_saves_is_said() -> None:
    """A sentence says what fusion saves, and each point has the bytes of its kernels.

    The kernels move 1,216 + 576 bytes instead of 1,472 + 768, which is a fifth less.
    """
    given = shown(compiled_profile())
    assert given["fusion"] == (
        "compiled code moves 1.75 KiB instead of 2.19 KiB: fusion saves 20.0 % (forward 17.4 %, "
        "backward 25.0 %); this does not include 1 module with kernels that move an unknown "
        "number of bytes"
    )
    assert {960, 256, 576} <= set(given["modules"]["table"]["fused_bytes"])
    not_compiled = shown(blocks())
    assert not_compiled["fusion"] == ""
    assert not_compiled["modules"]["table"]["fused_bytes"] is None


def test_the_points_with_the_least_time_are_left_out() -> None:
    """Of 600 modules with 4 phases, only the `MAX_POINTS` points with the most time are kept.

    Repeated modules are few points, so none of these is left out.
    """
    found = shown(profile_of(600))
    assert 2400 - MAX_POINTS == found["modules"]["left_out"]
    assert MAX_POINTS == len(found["modules"]["table"]["phase"])
    assert 0 == found["repeats"]["left_out"]


def test_where_nothing_was_counted_there_is_none() -> None:
    """Without counts, or for a model that ran nothing, this part is missing."""
    not_counted = Note(code="not_counted", subject="", values={})
    assert shown(replace(small_profile(), notes=(not_counted,))) is None
    assert shown(profile({"": {}}, [])) is None
