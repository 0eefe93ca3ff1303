"""Many ranks, of which a sample hands in the times of its modules if they are too many."""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean, median_low

import pytest
from msgspec.structs import replace
from torch.distributed import HashStore

import lflops
from lflops.profile.profile import Communication, Profile
from lflops.profile.records import ModulePhase
from lflops.profile.steps import Step
from lflops.ranks.collect import report as report_module
from lflops.ranks.collect.collector import RankCollector
from lflops.ranks.collect.topology import Topology
from lflops.timing.module_times import ScaledTimes, with_times
from tests.support.profile_builders import product, profile, run, weights

WORLD, SLOW, PLACES = 24, 13, ("first", "gather", "second", "reduce")
"""Modules in their order; ranks wait for each other in the second one and in the last."""

EMPTY = 4
"""Bytes of an empty value in the store: the number of its parts."""

Laps = tuple[Mapping[ModulePhase, float], ...]


def laps_of(draw: random.Random, slow: bool, steps: int = 6) -> Laps:
    """A rank's steps: 8 s more in the second module, or in waiting for that rank.

    Sixty-fourths of a second are themselves in float32, and add up without an error.
    """

    def seconds(place: str) -> float:
        return draw.randrange(64, 80) / 64 + (
            8.0 if place == ("second" if slow else "reduce") else 0.0
        )

    return tuple(
        {ModulePhase(place, "forward"): seconds(place) for place in PLACES} for _ in range(steps)
    )


def report_of(laps: Laps, names: Sequence[str] = PLACES) -> Profile:
    """A window of one rank that waits in every other module."""
    cells = [product(name, "aten::mm", "forward", macs=1, bytes_moved=4) for name in names]
    waits = [
        Communication(
            module=name,
            phase="forward",
            collective="all_reduce",
            group="0",
            group_size=WORLD,
            calls=1,
            bytes=8,
        )
        for name in names
        if name in {"gather", "reduce"}
    ]
    facts = run(
        kind="training", stage="train", window=0, world_size=WORLD, data_parallel_size=WORLD
    )
    counted = profile(
        {"": {}} | {name: weights(1) for name in names},
        cells,
        run=facts,
        communication=tuple(waits),
    )
    hooked = tuple(
        Step(index=number, kind="module_timing", seconds=9.0, phases={})
        for number, _ in enumerate(laps)
    )
    return replace(with_times(counted, ScaledTimes.of_steps(laps)), steps=hooked)


class Store(HashStore):
    """A store that knows whose times were put there."""

    def __init__(self) -> None:
        super().__init__()
        self.times: set[int] = set()

    def set(self, key: str, value: bytes) -> None:
        """As the store."""
        if "/times/" in key and len(value) > EMPTY:
            self.times.add(int(key.rsplit("/", 1)[1].split("+", maxsplit=1)[0]))
        super().set(key, value)


def gathered(
    reports: Mapping[int, tuple[Profile, Laps]], *, leaving: Collection[int] = (), seed: int = 0
) -> tuple[Profile, set[int]]:
    """What rank 0 makes of the reports, which come in any order, and the ranks whose times reached it."""
    store, topology = Store(), Topology(world_size=WORLD, coordinates={}, sizes={"data": WORLD})
    order = random.Random(seed).sample(sorted(set(reports) - {0}), len(reports) - 1)  # noqa: S311 - nothing is secret
    gathers = {rank: RankCollector(store, rank, topology, timeout=60.0) for rank in (*order, 0)}
    for rank, one in gathers.items():
        one.push(*reports[rank])
        if rank in leaving:
            one.finish()
    for rank in set(range(WORLD)) - set(reports):  # lost, and so not waited for
        RankCollector(store, rank, topology, timeout=60.0).finish(failed=True)
    gathers[0]._jobs[0].wait(60)
    found = [whole for one in (gathers.pop(0), *gathers.values()) for whole in one.finish()]
    return found[0], store.times


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Room for the times of four ranks: six steps and their scales in four places, in float32."""
    monkeypatch.setattr(report_module, "MOST_BYTES", 4 * 7 * len(PLACES) * 4)
    return iter(())


def ranks_of(seed: int, slow: int = SLOW) -> dict[int, tuple[Profile, Laps]]:
    """All ranks, of which one is slow in the second module."""
    draw = random.Random(seed)  # noqa: S311 - nothing is secret
    laps = {rank: laps_of(draw, slow=rank == slow) for rank in range(WORLD)}
    return {rank: (report_of(each), each) for rank, each in laps.items()}


def lost_by_hand(laps: Mapping[int, Laps]) -> float:
    """Of both modules without a collective the mean over the steps of what the last rank takes beyond the median one.

    The longest step counts as the second longest.
    """
    whole = 0.0
    for place in ("first", "second"):
        took = [
            [step[ModulePhase(place, "forward")] for step in steps]
            for steps in zip(*laps.values(), strict=True)
        ]
        late = sorted(max(step) - median_low(step) for step in took)
        whole += fmean([*late[:-1], late[-2]])
    return whole


def last_by_hand(laps: Mapping[int, Laps]) -> list[int]:
    """In how many steps each rank is busy the longest."""
    first, second = (ModulePhase(place, "forward") for place in ("first", "second"))
    busy = {rank: [step[first] + step[second] for step in steps] for rank, steps in laps.items()}
    last = Counter(max(busy, key=lambda rank: busy[rank][step]) for step in range(6))
    return [last[rank] for rank in range(WORLD)]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_lost_and_who_was_last_are_as_added_up_by_hand(seed: int) -> None:
    """To the last bit, in whatever order reports come."""
    reports = ranks_of(seed)
    laps = {rank: each for rank, (_, each) in reports.items()}
    whole, sent = gathered(reports, seed=seed)
    assert whole.rank_comparison is not None
    assert lost_by_hand(laps) == whole.rank_comparison.lost_seconds
    assert last_by_hand(laps) == [each.slowest for each in whole.ranks]
    assert set(range(1, WORLD)) == sent


def test_a_late_rank_and_its_module_are_named() -> None:
    """8 s in the second module. All ranks wait for it there, which is said of all of them."""
    whole, _ = gathered(ranks_of(7))
    assert [("second", "forward", SLOW)] == [
        (row.module, row.phase, row.slow_rank) for row in lflops.stragglers(whole).rows
    ]
    assert whole.rank_comparison is not None
    assert {("reduce", SLOW, WORLD - 1)} == {
        (w.module, w.for_rank, w.ranks) for w in whole.rank_comparison.waits if w.seconds > 4.0
    }


def test_a_lost_host_is_named_and_nothing_else_is_lost() -> None:
    """Ranks 4 to 7 say nothing; the slow one is found all the same."""
    whole, _ = gathered(
        {rank: each for rank, each in ranks_of(1).items() if rank not in range(4, 8)}
    )
    assert ["ok"] * 4 + ["failed"] * 4 + ["ok"] * 16 == [rank.status for rank in whole.ranks]
    assert ["4-7"] == [note.subject for note in whole.notes if note.code == "ranks_missing"]
    assert [("second", SLOW)] == [
        (row.module, row.slow_rank) for row in lflops.stragglers(whole).rows
    ]


def test_of_too_many_times_a_sample_is_handed_in(small_sample: None) -> None:
    """Four ranks of 24, and rank 0, whose times are at hand.

    A slow rank among them is found with its module; how often another was the last is unknown.
    """
    times_of = report_module.ranks_with_times(WORLD, 7 * len(PLACES) * 4)
    assert 4 == len(times_of)
    slow = min(rank for rank in times_of if rank)
    whole, sent = gathered(ranks_of(7, slow))
    assert set(times_of) - {0} == sent
    assert ["ok"] * WORLD == [rank.status for rank in whole.ranks]
    assert [("second", "forward", slow)] == [
        (row.module, row.phase, row.slow_rank) for row in lflops.stragglers(whole).rows
    ]
    assert {0, *times_of} == {rank.rank for rank in whole.ranks if rank.slowest is not None}
    assert whole.modules["second"].forward.self_seconds is not None


def test_the_rows_of_a_rank_without_times_have_those_of_one_with_the_same_work(
    small_sample: None,
) -> None:
    """The rank with the most FLOPs leads, and hands in no times; another with its rows does."""
    times_of = report_module.ranks_with_times(WORLD, 7 * len(PLACES) * 4)
    reports = ranks_of(3)
    longer = report_of(reports[0][1], names=(*PLACES, "further"))
    leading = max(set(range(WORLD)) - set(times_of))
    for rank in (leading, max(times_of)):
        reports[rank] = (replace(longer, steps=reports[rank][0].steps), reports[rank][1])
    whole, _ = gathered(reports)
    assert "further" in whole.modules
    assert whole.modules["second"].forward.self_seconds is not None
