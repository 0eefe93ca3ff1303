"""Points together whose modules differ in numbers alone, by hand."""

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
    """Two norms of 500 FLOPs and 1000 bytes take 10 s each at the roof, and took 12 and 15.

    20 of 27, 7 s to win; another is not alike.
    """
    norms = [
        cell(f"layers.{layer}.norm", "aten::norm", "forward", flops=500, bytes_moved=1000)
        for layer in range(2)
    ]
    rows = {
        name: {}
        for name in ("", "layers", "layers.0", "layers.0.norm", "layers.1", "layers.1.norm", "norm")
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
    """The first took 5 s where its bytes take 10, the second 15.

    Both together are on their roof, and one of them cannot be right.
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
    """The layers of a Sequential differ in their numbers alone, and in what they do."""
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
    """The first and the third layer of each MLP do the same work, and are not the same layer.

    2 blocks, 2 lines of 2.
    """
    layers = [f"blocks.{block}.mlp.{layer}" for block in range(2) for layer in range(3)]
    names = [
        "",
        "blocks",
        *(each for block in range(2) for each in (f"blocks.{block}", f"blocks.{block}.mlp")),
        *layers,
    ]
    rows: dict[str, dict[str, Any]] = {
        name: {"class_name": "GELU" if name.endswith("1") and name in layers else "Linear"}
        for name in names
    }
    cells = [
        cell(name, "aten::addmm", "forward", flops=500, bytes_moved=1000)
        for name in layers
        if not name.endswith("p.1")
    ]
    given = profile(rows, cells, run=run(hardware=CHIP))
    found = {
        each.label: len(each.parts)
        for each in fold_parts(LazyRoofline(given, CHIP).self_work, given.patterns())
    }
    assert {"blocks.*.mlp.0": 2, "blocks.*.mlp.2": 2} == found
