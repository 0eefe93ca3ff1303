"""The modules with the most time.

By hand, of the small profile, in which every operator call takes 100 µs.
"""

import pytest

from lflops.analysis.tree import busiest, total_seconds
from tests.support.profile_builders import clocked, small_profile, untimed


def test_a_module_s_total_time_is_that_of_its_phases() -> None:
    """The encoder ran 2 calls forward, 2 backward and 1 in the optimizer, of which the layer itself had 3."""
    modules = small_profile().modules
    assert pytest.approx((5e-4, 3e-4)) == (
        total_seconds(modules["encoder"]),
        total_seconds(modules["encoder.0"], own=True),
    )


def test_an_unknown_phase_hides_none_that_is_known() -> None:
    """Backward and the optimizer ran and were not timed; a module without any time has none."""
    given = clocked(untimed(small_profile()), {("head", "forward"): 1e-3})
    assert 1e-3 == total_seconds(given.modules["head"])
    assert total_seconds(given.modules["encoder"]) is None


def test_the_places_are_in_the_order_of_their_own_time() -> None:
    """Two layers with 3 calls, one with 2.

    The containers took nothing themselves, and an untimed profile has no place.
    """
    given = small_profile()
    names = {name: name for name in given.modules}
    assert [("encoder.0", "Linear", 1), ("head", "Linear", 1), ("encoder.1", "GELU", 1)] == [
        (each.pattern, each.kind, each.modules) for each in busiest(given, names)
    ]
    assert () == busiest(untimed(given), names)


def test_modules_that_repeat_are_one_place() -> None:
    """5 calls, and the 512 MACs of the one of them forward and again backward."""
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
    """Of two that repeat, one was never timed.

    The time is that of the other alone, though its curve is that of the place.
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
