"""Test the part of the page's payload about ranks, and the order of ranks."""

from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.profile.profile import Profile
from lflops.ranks.stragglers import slowest_first, stragglers
from lflops.report.payload.payload import payload
from tests.support.profile_builders import small_profile
from tests.support.rank_profiles import answered, four_ranks, stat


def as_read(given: Profile) -> Any:
    """Return the rank part of a profile's payload as the page reads it."""
    return json.decode(json.encode(payload(analyze(given))))["ranks"]


def test_every_rank_is_a_line() -> None:
    """Every rank has a row with its median times; a missing rank only has its coordinates."""
    table = as_read(four_ranks())["ranks"]
    assert [0, 1, 2, 3] == table["rank"]
    assert ["ok", "ok", "ok", "missing"] == table["status"]
    assert [3e-3, 2e-3, 5e-3, None] == table["step"]
    assert ["data 0", "data 1", "data 2", "data 3"] == table["place"]
    assert [3000, 2000, 1000, None] == table["peak_bytes"]
    assert ["node0", "node0", "node0", None] == table["host"]
    assert [0, 1, 2, None] == table["slowest"]


def test_places_are_those_that_lose_the_most() -> None:
    """Modules are sorted by their loss and have the times of all ranks.

    The head loses 1 ms and the linear layer of the encoder loses 0.1 ms. A module without times by
    rank is left out.
    """
    shown = as_read(four_ranks())
    assert ["head", "encoder.0"] == shown["places"]["module"]
    assert pytest.approx([1e-3, 1e-4]) == shown["places"]["spread"]
    assert [[1e-3, 1e-3, 2e-3, None], [1.1e-3, 0.9e-3, 1e-3, None]] == shown["seconds"]


def order(given: Profile) -> tuple[int, ...]:
    """Return the ranks of a profile, the slowest first."""
    return slowest_first(given, stragglers(given))


def test_ranks_are_ordered_by_what_they_take_longer() -> None:
    """Ranks are sorted by their excess over the median rank; missing ranks come last.

    Rank 2 takes 1 ms longer, rank 0 takes 0.1 ms longer, and rank 1 is 0.1 ms faster.
    """
    assert (2, 0, 1, 3) == order(four_ranks())


def test_a_culprit_comes_first_and_who_waits_does_not() -> None:
    """A rank that others wait for comes before a rank that waits.

    Rank 0 has the longer time, but it waits for rank 1, which is 0.2 ms late in the head. Without a
    comparison of ranks, only the times count.
    """
    waited = stat("", {0: 9.0, 1: 1.0}, waits=True)
    given = replace(small_profile(), ranks=(answered(0), answered(1)), rank_stats=(waited,))
    assert (1, 0) == order(given)
    assert (0, 1) == order(replace(given, rank_comparison=None, unprofiled_comparison=None))


def test_what_is_unknown_is_told_apart() -> None:
    """The payload distinguishes three reasons for missing times.

    The file has no times of single ranks, or no times at all, or the run has one rank.
    """
    assert as_read(small_profile())["compared"] is True
    assert [] == as_read(small_profile())["seconds"]
    assert not as_read(replace(small_profile(), rank_stats=()))["compared"]
    assert as_read(replace(small_profile(), ranks=())) is None
