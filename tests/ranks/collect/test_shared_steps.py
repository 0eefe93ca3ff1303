"""Test `SharedSteps`: during a run, ranks send their unprofiled steps to rank 0 through a store."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from torch.distributed import HashStore

from lflops.profile.profile import Profile
from lflops.profile.steps import Step
from lflops.ranks.collect.collector import RankCollector, SharedSteps
from lflops.ranks.collect.store import RankStore
from lflops.ranks.collect.topology import Topology
from lflops.ranks.merge.unprofiled_steps import MOST_STEPS
from tests.support.profile_builders import profile, run, small_clean_comparison, weights

WINDOW: Profile = profile(
    {"": weights(0)},
    [],
    run=run(kind="training", stage="train", window=0, world_size=2, strategy="DDPStrategy"),
    unprofiled_comparison=small_clean_comparison(),
)


def steps(first: int, number: int, slow: float = 0.0) -> list[Step]:
    """Return steps of 3.5 s, with `slow` seconds more for data and as many less of waiting."""
    phases = {"data": 1.0 + slow, "backward": 2.0 + 0.5 - slow}
    return [
        Step(index=n, kind="unprofiled", seconds=3.5, phases=phases, waiting=0.5 - slow)
        for n in range(first, first + number)
    ]


class Counting:
    """A store that counts the requests to it."""

    def __init__(self) -> None:
        self.inner = HashStore()
        self.asked = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            self.asked += 1
            return getattr(self.inner, name)(*args)

        return ask


def two(store: Any) -> tuple[SharedSteps, SharedSteps]:
    """Return the `SharedSteps` of both ranks of a run."""
    return SharedSteps(RankStore(store), 0, 2), SharedSteps(RankStore(store), 1, 2)


def test_the_steps_of_all_ranks_are_compared_all_through_the_run() -> None:
    """The ranks are compared in all steps of the run, so a rank that is slow in no window is found.

    Each rank sends 10 steps twice.
    """
    first, second = two(HashStore())
    for begin in (1, 11):
        for rank, slow in ((second, 0.25), (first, 0.0)):
            rank.add("train", steps(begin, 10, slow))
            rank.send()
    assert 20 == (first.improve(WINDOW).unprofiled_comparison or small_clean_comparison()).steps
    (excess, *_) = first.comparisons["train"].delays
    assert (1, {0.25}) == (excess.rank, set(excess.excess))


def test_a_window_with_more_steps_of_its_own_keeps_them() -> None:
    """If the comparison of a window has as many steps as all ranks have sent, it is kept."""
    first, second = two(HashStore())
    for rank in (second, first):
        rank.add("train", steps(1, 6))
        rank.send()
    assert WINDOW == first.improve(WINDOW)


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_what_it_costs_does_not_grow_with_the_run(shares: int) -> None:
    """Each exchange of steps makes the same number of requests, and leaves nothing in the store."""
    store = Counting()
    first, second = two(store)
    asked = []
    for number in range(shares):
        before = store.asked
        for rank in (second, first):
            rank.add("train", steps(1 + 10 * number, 10))
            rank.send()
        asked.append(store.asked - before)
    assert asked == [asked[0]] * shares
    assert 0 == store.inner.num_keys() - HashStore().num_keys()


def test_steps_that_are_not_sent_are_bounded() -> None:
    """Of many steps, only the last `MOST_STEPS` are sent.

    After rank 0 has left, rank 1 sends no more steps.
    """
    store = HashStore()
    first, second = two(store)
    second.add("train", steps(1, MOST_STEPS + 7))
    second.send()
    first.add("train", steps(1, MOST_STEPS + 7))
    first.send()
    compared = first.improve(WINDOW).unprofiled_comparison
    assert compared is not None
    assert (MOST_STEPS, 8) == (compared.steps, compared.at[0])
    RankStore(store).put("left/0", b"ended")
    keys = store.num_keys()
    second.add("train", steps(1000, 10))
    second.send()
    assert keys == store.num_keys()


def test_ranks_with_different_modules_are_not_compared() -> None:
    """Ranks with different modules, such as the stages of a pipeline, are not compared."""
    first, second = two(HashStore())
    for rank in (second, first):
        rank.add("train", steps(1, 10))
        rank.send()
    staged = replace(WINDOW, unprofiled_comparison=None)
    assert staged == first.improve(staged)
    first.compare()
    assert {} == first.comparisons


def test_at_the_end_the_last_steps_are_there() -> None:
    """At the end of a run, the ranks are compared in their last steps, which were not sent yet.

    After the window, each rank has 12 more steps.
    """
    store = HashStore()
    both = Topology(world_size=2, coordinates={}, sizes={})
    gathers = {rank: RankCollector(store, rank, both, timeout=60.0) for rank in (1, 0)}
    for rank, gather in gathers.items():
        hooked = Step(index=0, kind="counting", seconds=None, phases={})
        gather.push(
            replace(WINDOW, unprofiled_comparison=None, steps=(*steps(1, 8, 0.25 * rank), hooked))
        )
        gather.share("train", steps(20, 6, 0.25 * rank))
        gather.share("train", steps(26, 6, 0.25 * rank))
        gather.finish()
    assert 12 == gathers[0].comparisons["train"].steps
