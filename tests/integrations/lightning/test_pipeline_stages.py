"""Test a pipeline under a Trainer: two ranks run different modules, one profile has all of them.

Rank 0 has the stage `up` and rank 1 the stage `down`. The expected MACs are worked out by hand.
"""

from collections.abc import Iterator

import pytest

from lflops.profile.notes import sentence
from lflops.profile.profile import Profile
from tests.support.lightning_runs import CLASSES, LIGHTNINGS_WARNINGS, ROWS, WIDTH
from tests.support.pipeline_trainer import staged
from tests.support.process_state import Facts, differences
from tests.support.profile_checks import macs
from tests.support.trainer_ranks import WIDE, Ranks

pytestmark = LIGHTNINGS_WARNINGS

Told = tuple[list[Profile], Facts, Facts]
"""The profiles of a rank, and the results of training with and without the monitor."""

UP = ROWS * WIDTH * WIDE
DOWN = ROWS * WIDE * CLASSES
FLOAT32 = 4
"""Bytes of a number."""


@pytest.fixture(scope="module")
def both() -> Iterator[list[Told]]:
    """Train, and return the results of the two ranks."""
    with Ranks(2) as ranks:
        yield ranks.run(staged)


@pytest.fixture(scope="module")
def whole(both: list[Told]) -> Profile:
    """Return the profile of rank 0. Rank 1 must not have one."""
    ((profile,), *_), (nothing, *_) = both
    assert [] == nothing
    return profile


def test_the_profile_has_the_modules_of_all_ranks(whole: Profile) -> None:
    """The profile has the modules of both ranks with their MACs, and the parameters of all of them.

    In backward, `up` has one matmul, because its input needs no gradient. `down` has two: the
    gradient of its input is sent back to `up`.
    """
    assert {"up": UP, "down": DOWN} == macs(whole, "forward")
    assert {"up": UP, "down": 2 * DOWN} == macs(whole, "backward")
    assert WIDTH * WIDE + WIDE + WIDE * CLASSES + CLASSES == whole.modules[""].parameters
    assert UP + DOWN == whole.modules[""].forward.logical_macs


def test_each_rank_stands_at_its_stage(whole: Profile) -> None:
    """The profile has the pipeline stage, the status and the MACs of each rank.

    The profile is complete, because both ranks sent their part.
    """
    assert [
        ({"data": 0, "pipeline": 0}, "ok", 2 * UP),
        ({"data": 0, "pipeline": 1}, "ok", 3 * DOWN),
    ] == [(rank.coordinates, rank.status, rank.macs) for rank in whole.ranks]
    assert 2 == whole.run.world_size
    assert 1 == whole.run.data_parallel_size
    assert 2 == whole.run.pipeline_parallel_size
    assert not whole.run.partial


def test_the_notes_say_which_rank_has_what(whole: Profile) -> None:
    """Notes name the modules that only one rank has, and say that the ranks differ."""
    assert ["only rank 0 has up", "only rank 1 has down"] == [
        sentence(note) for note in whole.notes if note.code == "only_on"
    ]
    assert ["ranks_differ"] == [note.code for note in whole.notes if note.code == "ranks_differ"]


def test_what_goes_from_stage_to_stage_is_communication(whole: Profile) -> None:
    """The profile has the communication of rank 0: it sends activations and receives a gradient."""
    once = FLOAT32 * ROWS * WIDE
    found = {each.collective: (each.calls, each.bytes) for each in whole.communication}
    assert {"send": (1, once), "recv_": (1, once)} == found


def test_the_training_is_the_one_that_nobody_watched(both: list[Told]) -> None:
    """On both ranks, the results of training equal those without the monitor, to the bit."""
    assert [[], []] == [differences(alone, watched) for _, watched, alone in both]
