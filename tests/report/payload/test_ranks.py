"""What the page is told of the ranks."""

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
    """What arrives at the page."""
    return json.decode(json.encode(payload(analyze(given))))["ranks"]


def test_every_rank_is_a_line() -> None:
    """Medians of what it took; of the one that is missing its place alone is known."""
    table = as_read(four_ranks())["ranks"]
    assert [0, 1, 2, 3] == table["rank"]
    assert ["ok", "ok", "ok", "missing"] == table["status"]
    assert [3e-3, 2e-3, 5e-3, None] == table["step"]
    assert (["data 0", "data 1", "data 2", "data 3"], [3000, 2000, 1000, None]) == (
        table["place"],
        table["peak_bytes"],
    )
    assert (["node0", "node0", "node0", None], [0, 1, 2, None]) == (table["host"], table["slowest"])


def test_places_are_those_that_lose_the_most() -> None:
    """The head 1 ms, the encoder's layer 0.1 ms.

    Each with the ranks' times in their order, and without a place that kept none.
    """
    shown = as_read(four_ranks())
    assert ["head", "encoder.0"] == shown["places"]["module"]
    assert pytest.approx([1e-3, 1e-4]) == shown["places"]["spread"]
    assert [[1e-3, 1e-3, 2e-3, None], [1.1e-3, 0.9e-3, 1e-3, None]] == shown["seconds"]


def order(given: Profile) -> tuple[int, ...]:
    """The ranks, the slowest first."""
    return slowest_first(given, stragglers(given))


def test_ranks_are_ordered_by_what_they_take_longer() -> None:
    """The third is 1 ms late in all, the first 0.1 ms, the second 0.1 ms early.

    Who told nothing comes last.
    """
    assert (2, 0, 1, 3) == order(four_ranks())


def test_a_culprit_comes_first_and_who_waits_does_not() -> None:
    """The first waits longest; the second, which it waits for, is 0.2 ms late in the head."""
    ranks, waited = (answered(0), answered(1)), stat("", {0: 9.0, 1: 1.0}, waits=True)
    assert (1, 0) == order(replace(small_profile(), ranks=ranks, rank_stats=(waited,)))
    assert (0, 1) == order(
        replace(
            small_profile(),
            ranks=ranks,
            rank_stats=(waited,),
            rank_comparison=None,
            unprofiled_comparison=None,
        )
    )


def test_what_is_unknown_is_told_apart() -> None:
    """A file that kept no rank's own times, one without any times, and a run of one rank."""
    assert (True, []) == (as_read(small_profile())["compared"], as_read(small_profile())["seconds"])
    assert not as_read(replace(small_profile(), rank_stats=()))["compared"]
    assert as_read(replace(small_profile(), ranks=())) is None
