"""The least time of a step on a chip: cells of a pencil's size, on a chip of round figures."""

from typing import Any

import pytest

from lflops.analysis.roofline import LowerBound, lower_bound
from lflops.hardware.chips import Hardware
from lflops.profile.profile import Profile
from tests.support.profile_builders import cell, product, profile, run

CHIP = Hardware("chip", {"fp32": 1000.0, "bf16": 4000.0}, bandwidth_bytes_per_second=100.0)


def estimated(**facts: Any) -> Profile:
    """In `a` a product that computes long and an activation that moves long, in `a.b` one that moves longer than it computes, backward."""
    cells = (
        product("a", "mm", "forward", macs=500, bytes_moved=50),
        cell("a", "gelu", "forward", flops=10**6, bytes_moved=300),
        product("a.b", "mm", "backward", macs=500, bytes_moved=200),
    )
    return profile(
        {"": {}, "a": {}, "a.b": {}, "c": {}},
        cells,
        run=run(**({"kind": "estimate", "hardware": CHIP} | facts)),
    )


def test_each_operator_takes_as_long_as_the_slower_of_its_two_needs() -> None:
    """2 * 500 FLOPs of 1000 a second are a second, which 50 bytes of 100 are not, and 200 are two.

    Pointwise work counts by its bytes.
    """
    expected = LowerBound(
        hardware="chip",
        seconds=1.0 + 3.0 + 2.0,
        by_phase={"forward": 4.0, "backward": 2.0},
        by_module={"": 6.0, "a": 6.0, "a.b": 2.0, "c": 0.0},
        unknown=(),
    )
    assert expected == lower_bound(estimated())


def test_another_chip_may_be_given() -> None:
    """Twice as fast in both."""
    found = lower_bound(estimated(), Hardware("fast", {"fp32": 2000.0}, 200.0))
    assert found is not None
    assert ("fast", 3.0) == (found.hardware, found.seconds)


def test_a_contraction_without_a_peak_counts_by_its_bytes_and_is_named() -> None:
    """Of what is known the sum is still a bound."""
    found = lower_bound(estimated(), Hardware("half", {"bf16": 2000.0}, 100.0))
    assert found is not None
    assert (("mm",), 0.5 + 3.0 + 2.0) == (found.unknown, found.seconds)


@pytest.mark.parametrize(
    "chip", [None, Hardware("no memory", {"fp32": 1000.0})], ids=["no chip", "no bandwidth"]
)
def test_without_a_chip_or_its_bandwidth_nothing_is_known(chip: Hardware | None) -> None:
    """None, which is not 0."""
    assert lower_bound(estimated(hardware=chip)) is None
