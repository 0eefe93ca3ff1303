"""Test that points of modules that only differ in numbers of their names are added up.

The expected values are worked out by hand.
"""

from typing import Any

from lflops.analysis.roofline import LazyRoofline
from lflops.analysis.tree import fold_parts
from lflops.hardware.chips import Hardware
from tests.support.profile_builders import cell, clocked, profile, run

CHIP = Hardware(
    name="chip",
    peak_flops_per_second={"fp32": 1000.0},
    bandwidth_bytes_per_second=100.0,
    memory_bytes=None,
    source="a pencil",
)


def test_layers_are_one_line() -> None:
    """Two norms of repeated layers are one point, and a norm at another place is a separate one.

    Each norm has 500 FLOPs and 1000 bytes. The roofline is 10 s each, and they took 12 s and 15 s:
    20 s of 27 s, so 7 s can be saved.
    """
    norms = [
        cell(f"layers.{layer}.norm", "aten::norm", "forward", flops=500, bytes_moved=1000)
        for layer in range(2)
    ]
    rows: dict[str, dict[str, Any]] = {
        "": {},
        "layers": {},
        "layers.0": {},
        "layers.0.norm": {},
        "layers.1": {},
        "layers.1.norm": {},
        "norm": {},
    }
    last = cell("norm", "aten::norm", "forward", flops=500, bytes_moved=1000)
    took = {
        ("layers.0.norm", "forward"): 12.0,
        ("layers.1.norm", "forward"): 15.0,
        ("norm", "forward"): 10.0,
    }
    given = clocked(profile(rows, [*norms, last], run=run(kind="measure", hardware=CHIP)), took)
    found = {
        each.label: (len(each.parts), each.point)
        for each in fold_parts(LazyRoofline(given, CHIP).modules, given.patterns())
    }
    assert ["", "layers", "layers.*", "layers.*.norm", "norm"] == list(found)
    number, both = found["layers.*.norm"]
    assert (2, 2, 1000, 2000, 0.5) == (
        number,
        both.calls,
        both.flops,
        both.bytes_moved,
        both.intensity,
    )
    assert (27.0, 20.0, 7.0, 20 / 27, 50.0) == (
        both.seconds,
        both.roof_seconds,
        both.potential_seconds,
        both.share,
        both.roof_flops_per_second,
    )
    assert ("memory", None) == (both.bound, both.over)
    assert (1, 10.0) == (found["norm"][0], found["norm"][1].seconds)


def test_one_over_its_roof_is_told_of() -> None:
    """If one of the modules is faster than its roofline, the sum is marked as well.

    The bytes of each norm take 10 s. One norm took 5 s, which is impossible, and the other 15 s.
    Together they are exactly on the roofline, which hides the error.
    """
    norms = [
        cell(f"{layer}.norm", "aten::norm", "forward", flops=500, bytes_moved=1000)
        for layer in range(2)
    ]
    rows = {name: {} for name in ("", "0", "0.norm", "1", "1.norm")}
    took = {("0.norm", "forward"): 5.0, ("1.norm", "forward"): 15.0}
    given = clocked(profile(rows, norms, run=run(kind="measure", hardware=CHIP)), took)
    (both,) = [
        each.point
        for each in fold_parts(LazyRoofline(given, CHIP).modules, given.patterns())
        if each.label == "*.norm"
    ]
    assert (1.0, "cache_unknown") == (both.share, both.over)


def test_what_did_other_work_is_not_alike() -> None:
    """Two layers of a Sequential differ in their work, so each of them is a separate point."""
    cells = [
        cell(str(layer), "aten::norm", "forward", flops=500 * (layer + 1), bytes_moved=1000)
        for layer in range(2)
    ]
    given = profile({name: {} for name in ("", "0", "1")}, cells, run=run(hardware=CHIP))
    found = fold_parts(LazyRoofline(given, CHIP).modules, given.patterns())
    assert [(1, "", 1500), (1, "0", 500), (1, "1", 1000)] == [
        (len(each.parts), each.label, each.point.flops) for each in found
    ]


def test_layers_at_two_places_of_a_block_are_two_lines() -> None:
    """The first and the third layer of each MLP do the same work, but are two lines.

    There are two blocks, so each line stands for two modules.
    """
    rows: dict[str, dict[str, Any]] = {
        "": {"class_name": "Linear"},
        "blocks": {"class_name": "Linear"},
    }
    cells = []
    for block in ("blocks.0", "blocks.1"):
        rows[block] = {"class_name": "Linear"}
        rows[f"{block}.mlp"] = {"class_name": "Linear"}
        rows[f"{block}.mlp.0"] = {"class_name": "Linear"}
        rows[f"{block}.mlp.1"] = {"class_name": "GELU"}
        rows[f"{block}.mlp.2"] = {"class_name": "Linear"}
        for name in (f"{block}.mlp.0", f"{block}.mlp.2"):
            cells.append(cell(name, "aten::addmm", "forward", flops=500, bytes_moved=1000))
    given = profile(rows, cells, run=run(hardware=CHIP))
    found = {
        each.label: len(each.parts)
        for each in fold_parts(LazyRoofline(given, CHIP).self_work, given.patterns())
    }
    assert {"blocks.*.mlp.0": 2, "blocks.*.mlp.2": 2} == found
