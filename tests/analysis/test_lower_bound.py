"""Test the least time of a step on a chip, with numbers that are easy to check by hand."""

from typing import Any

import pytest

from lflops.analysis.roofline import LowerBound, lower_bound
from lflops.hardware.chips import Hardware
from lflops.profile.profile import Profile
from tests.support.profile_builders import cell, product, profile, run

CHIP = Hardware("chip", {"fp32": 1000.0, "bf16": 4000.0}, bandwidth_bytes_per_second=100.0)


def estimated(**facts: Any) -> Profile:
    """Return an estimate with three operators.

    On `CHIP`, the matmul of `a` is compute-bound. Its activation, and the matmul of `a.b` in
    backward, are memory-bound.
    """
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
    """An operator takes the time of its FLOPs or of its bytes, whichever is longer.

    Each matmul has 2 * 500 FLOPs, which take 1 s at 1000 FLOP/s. At 100 bytes/s, the 50 bytes of
    the first take less than that, and the 200 bytes of the second take 2 s. Pointwise operators
    only count by their bytes: 300 bytes take 3 s.
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
    """A chip with twice the peak and twice the bandwidth takes half the time."""
    found = lower_bound(estimated(), Hardware("fast", {"fp32": 2000.0}, 200.0))
    assert found is not None
    assert ("fast", 3.0) == (found.hardware, found.seconds)


def test_a_contraction_without_a_peak_counts_by_its_bytes_and_is_named() -> None:
    """Without a peak for its dtype, a matmul counts by its bytes, and is listed as unknown.

    The sum is still a lower bound.
    """
    found = lower_bound(estimated(), Hardware("half", {"bf16": 2000.0}, 100.0))
    assert found is not None
    assert (("mm",), 0.5 + 3.0 + 2.0) == (found.unknown, found.seconds)


@pytest.mark.parametrize(
    "chip", [None, Hardware("no memory", {"fp32": 1000.0})], ids=["no chip", "no bandwidth"]
)
def test_without_a_chip_or_its_bandwidth_nothing_is_known(chip: Hardware | None) -> None:
    """The result is `None`, not a bound of 0 s."""
    assert lower_bound(estimated(hardware=chip)) is None
