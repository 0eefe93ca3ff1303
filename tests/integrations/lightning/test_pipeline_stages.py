"""A pipeline under a Trainer: ranks have different modules, and one profile tells of all of them."""

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
UP, DOWN = ROWS * WIDTH * WIDE, ROWS * WIDE * CLASSES
FLOAT32 = 4


@pytest.fixture(scope="module")
def both() -> Iterator[list[Told]]:
    """What each of the two ranks has."""
    with Ranks(2) as ranks:
        yield ranks.run(staged)


@pytest.fixture(scope="module")
def whole(both: list[Told]) -> Profile:
    """What the first tells; the second tells nothing."""
    ((profile,), *_), (nothing, *_) = both
    assert [] == nothing
    return profile


def test_the_profile_has_the_modules_of_all_ranks(whole: Profile) -> None:
    """Each as its rank ran it.

    Of the first the input needs no gradient; of the second it is what goes back.
    """
    assert {"up": UP, "down": DOWN} == macs(whole, "forward")
    assert {"up": UP, "down": 2 * DOWN} == macs(whole, "backward")
    assert WIDTH * WIDE + WIDE + WIDE * CLASSES + CLASSES == whole.modules[""].parameters
    assert UP + DOWN == whole.modules[""].forward.logical_macs


def test_each_rank_stands_at_its_stage(whole: Profile) -> None:
    """As the function said; both answered."""
    assert [
        ({"data": 0, "pipeline": rank}, "ok", macs) for rank, macs in enumerate((2 * UP, 3 * DOWN))
    ] == [(rank.coordinates, rank.status, rank.macs) for rank in whole.ranks]
    assert (2, 1, 2, False) == (
        whole.run.world_size,
        whole.run.data_parallel_size,
        whole.run.pipeline_parallel_size,
        whole.run.partial,
    )


def test_the_notes_say_which_rank_has_what(whole: Profile) -> None:
    """And that one alone is the whole of neither."""
    assert ["only rank 0 has up", "only rank 1 has down"] == [
        sentence(note) for note in whole.notes if note.code == "only_on"
    ]
    assert ["ranks_differ"] == [note.code for note in whole.notes if note.code == "ranks_differ"]


def test_what_goes_from_stage_to_stage_is_communication(whole: Profile) -> None:
    """Of the rank whose row the root is: the activations there, the gradient back."""
    once = FLOAT32 * ROWS * WIDE
    assert {"send": (1, once), "recv_": (1, once)} == {
        each.collective: (each.calls, each.bytes) for each in whole.communication
    }


def test_the_training_is_the_one_that_nobody_watched(both: list[Told]) -> None:
    """On both ranks, to the bit."""
    assert [[], []] == [differences(alone, watched) for _, watched, alone in both]
