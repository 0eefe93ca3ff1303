"""Test the list of the modules with the most time.

The expected times are worked out by hand: in `small_profile`, every operator call takes 100 µs.
"""

import pytest

from lflops.analysis.tree import busiest, total_seconds
from tests.support.profile_builders import clocked, small_profile, untimed


def test_a_module_s_total_time_is_that_of_its_phases() -> None:
    """The total time of a module is the sum of its phases, with or without its submodules.

    The encoder has 2 operator calls in forward, 2 in backward and 1 in the optimizer. Three of
    these calls are from its first layer.
    """
    modules = small_profile().modules
    assert pytest.approx((5e-4, 3e-4)) == (
        total_seconds(modules["encoder"]),
        total_seconds(modules["encoder.0"], own=True),
    )


def test_an_unknown_phase_hides_none_that_is_known() -> None:
    """Phases without a time are left out of the sum. Without any time, the sum is unknown.

    Backward and the optimizer ran, but were not timed.
    """
    given = clocked(untimed(small_profile()), {("head", "forward"): 1e-3})
    assert 1e-3 == total_seconds(given.modules["head"])
    assert total_seconds(given.modules["encoder"]) is None


def test_the_places_are_in_the_order_of_their_own_time() -> None:
    """The modules are sorted by self time: two layers have 3 calls each, and the GELU has 2.

    The containers have no self time. An untimed profile has an empty list.
    """
    given = small_profile()
    names = {name: name for name in given.modules}
    assert [("encoder.0", "Linear", 1), ("head", "Linear", 1), ("encoder.1", "GELU", 1)] == [
        (each.pattern, each.kind, each.modules) for each in busiest(given, names)
    ]
    assert () == busiest(untimed(given), names)


def test_modules_that_repeat_are_one_place() -> None:
    """Repeated modules are one entry with the sum of their times and MACs.

    The two modules have 5 calls. One of them has 512 MACs in forward and 512 in backward.
    """
    given = small_profile()
    names = {name: name for name in given.modules} | {
        "encoder.0": "encoder.*",
        "encoder.1": "encoder.*",
    }
    first = busiest(given, names)[0]
    assert ("encoder.*", "encoder.*", 2, 1024) == (
        first.pattern,
        first.name,
        first.modules,
        first.macs,
    )
    assert pytest.approx(5e-4) == first.seconds


def test_a_place_is_named_by_the_modules_that_have_a_time() -> None:
    """If only one of two repeated modules was timed, the entry has the name of this module.

    The pattern still covers both modules.
    """
    given = clocked(untimed(small_profile()), {("encoder.1", "forward"): 1e-3})
    names = {name: name for name in given.modules} | {
        "encoder.0": "encoder.*",
        "encoder.1": "encoder.*",
    }
    (only,) = busiest(given, names)
    assert ("encoder.*", "encoder.1", "GELU", 1) == (
        only.pattern,
        only.name,
        only.kind,
        only.modules,
    )
