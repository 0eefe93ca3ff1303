"""The sentences about a profile: three runs with a planted cause, which each of them names first."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from lflops.analyze.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.model import Profile
from lflops.profile.notes import Note
from lflops.profile.records import Phase
from lflops.profile.steps import Step
from lflops.report.lines.verdict import verdict
from tests.support.profile_builders import cell, clocked, product, profile, run, untimed

CHIP = Hardware("abacus", {"fp32": 1e6}, bandwidth_bytes_per_second=1e6, memory_bytes=64 * 2**30)
"""A million FLOP/s, and as many bytes."""

LAYERS = [f"blocks.{block}.{name}" for block in range(4) for name in ("fc", "norm")]


def blocks(milliseconds: Mapping[str, float], step: Mapping[str, float], **facts: Any) -> Profile:
    """4 blocks of a product, 2 ms at the peak, and a norm of 1 ms at the bandwidth; forward only, in a step with these phases."""
    rows = {name: {"kind": "Block"} for name in ["", "blocks", *(f"blocks.{block}" for block in range(4))]}
    rows |= {name: {"kind": "Linear" if name.endswith("fc") else "LayerNorm"} for name in LAYERS}
    cells = [product(name, "aten::mm", "forward", macs=1000, bytes_moved=10) for name in LAYERS if name.endswith("fc")]
    cells += [cell(name, "aten::native_layer_norm", "forward", flops=10, bytes_moved=1000) for name in LAYERS if name.endswith("norm")]
    own: dict[tuple[str, Phase], float] = {(name, "forward"): milliseconds.get(name, 2.0) * 1e-3 for name in LAYERS}
    phases = {name: each * 1e-3 for name, each in step.items()}
    clean = Step(index=0, kind="clean", seconds=sum(phases.values()), phases=phases)
    of = run(**({"kind": "training", "stage": "train", "hardware": CHIP} | facts))
    return clocked(profile(rows, cells, run=of, steps=(clean,)), own)


def test_a_wait_for_data_is_named_first() -> None:
    """16 of 40 ms are the modules', 8 of these at the peak: 20 % MFU; the other 24 are the wait."""
    assert ("20.0 % MFU.", "60.0 % of the step is waiting for data.") == verdict(analyze(blocks({}, {"data": 24, "forward": 16})))


def test_more_than_the_peak_is_no_achievement() -> None:
    """8 ms of products at the peak in 4 ms: a peak that was measured beside other programs. The next sentence says what to do."""
    found = verdict(analyze(blocks({}, {"forward": 4})))
    assert "200.0 % MFU." == found[0]
    assert found[1].startswith("No step can exceed the peak, so the peak of abacus is too low here.")


def test_a_slow_block_is_named() -> None:
    """Its product takes 26 ms where the others take 2: 24 more, all of them below the roof, and so 24 of 40 ms are in that place."""
    found = verdict(analyze(blocks({"blocks.2.fc": 26.0}, {"forward": 40})))
    assert (
        "20.0 % MFU.",
        "70.0 % of the step is below the roofline, mostly in blocks.*.fc.",
        "blocks.2.fc takes 13.0× as long as the 3 others like it: 24.0 ms more a step.",
    ) == found


def test_memory_bound_pointwise_work_is_named() -> None:
    """Norms of 1 ms at the bandwidth, in 1 ms: 4 of 12 ms, and nothing below the roof."""
    given = blocks(dict.fromkeys((name for name in LAYERS if name.endswith("norm")), 1.0), {"forward": 12})
    assert ("66.7 % MFU.", "33.3 % of the step is memory-bound pointwise work, mostly in blocks.*.norm.") == verdict(analyze(given))


def test_times_that_are_far_off_name_no_module() -> None:
    """Their notes say that they are no measure."""
    note = Note(code="time_scaled", subject="", values={"forward": 3.0})
    found = verdict(analyze(replace(blocks({"blocks.2.fc": 26.0}, {"forward": 40}), notes=(note,))))
    doubt = "Cannot tell whether a module is slow among its equals: timing the modules changed their times too much."
    assert ("20.0 % MFU.", "70.0 % of the step is below the roofline.", doubt) == found


def test_without_a_peak_the_time_and_the_wait_are_named() -> None:
    """40 ms a step, 24 of them the wait."""
    found = verdict(analyze(blocks({}, {"data": 24, "forward": 16}, hardware=None)))
    assert ("A step takes 40.0 ms.", "60.0 % of the step is waiting for data.") == found


def test_an_estimate_says_the_least_time_and_what_is_unknown() -> None:
    """4 products of 2 ms and 4 norms of 1: 12 ms at the least; without a chip its work is what is known."""
    planned = untimed(blocks({}, {"forward": 1}, kind="estimate"))
    assert ("A step takes at least 12.0 ms on abacus.",) == verdict(analyze(planned))
    assert ("A step has 4.00 k MACs. Nothing was timed.",) == verdict(analyze(replace(planned, run=replace(planned.run, hardware=None))))
