"""Test the comparison of many ranks. If there are too many, only a sample sends module times."""

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

WORLD = 24
SLOW = 13
PLACES = ("first", "gather", "second", "reduce")
"""The modules in their order. Ranks wait for each other in `gather` and `reduce`."""

EMPTY = 4
"""Bytes of an empty value in the store: the number of its parts."""

Laps = tuple[Mapping[ModulePhase, float], ...]


def laps_of(draw: random.Random, slow: bool, steps: int = 6) -> Laps:
    """Return the times of one rank in each step.

    A slow rank takes 8 s longer in `second`. The other ranks wait for it for 8 s in `reduce`. All
    times are multiples of 1/64 s, which float32 represents and adds exactly.
    """
    longer = "second" if slow else "reduce"
    laps = []
    for _ in range(steps):
        lap = {}
        for place in PLACES:
            seconds = draw.randrange(64, 80) / 64
            if place == longer:
                seconds += 8.0
            lap[ModulePhase(place, "forward")] = seconds
        laps.append(lap)
    return tuple(laps)


def report_of(laps: Laps, names: Sequence[str] = PLACES) -> Profile:
    """Return a window of one rank that waits for other ranks in `gather` and `reduce`."""
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
    """A store that records which ranks have put their times into it."""

    def __init__(self) -> None:
        super().__init__()
        self.times: set[int] = set()

    def set(self, key: str, value: bytes) -> None:
        """Set the key as the base class does."""
        if "/times/" in key and len(value) > EMPTY:
            rank, _, _ = key.rsplit("/", 1)[1].partition("+")
            self.times.add(int(rank))
        super().set(key, value)


def gathered(
    reports: Mapping[int, tuple[Profile, Laps]], *, leaving: Collection[int] = (), seed: int = 0
) -> tuple[Profile, set[int]]:
    """Collect the reports of all ranks, which arrive in a random order.

    Ranks without a report have failed. Returns the merged profile and the ranks that sent times.
    """
    store = Store()
    topology = Topology(world_size=WORLD, coordinates={}, sizes={"data": WORLD})
    draw = random.Random(seed)  # noqa: S311 - nothing is secret
    order = draw.sample(sorted(set(reports) - {0}), len(reports) - 1)
    gathers = {rank: RankCollector(store, rank, topology, timeout=60.0) for rank in (*order, 0)}
    for rank, one in gathers.items():
        one.push(*reports[rank])
        if rank in leaving:
            one.finish()
    # Rank 0 does not wait for ranks that have failed.
    for rank in set(range(WORLD)) - set(reports):
        RankCollector(store, rank, topology, timeout=60.0).finish(failed=True)
    gathers[0]._jobs[0].wait(60)
    whole, *_ = gathers.pop(0).finish()
    for one in gathers.values():
        one.finish()
    return whole, store.times


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit the size of all times to those of four ranks.

    The times of a rank are six steps and their scales in four places, in float32.
    """
    monkeypatch.setattr(report_module, "MOST_BYTES", 4 * 7 * len(PLACES) * 4)
    return iter(())


def ranks_of(seed: int, slow: int = SLOW) -> dict[int, tuple[Profile, Laps]]:
    """Return the reports of all ranks, one of which is slow in the module `second`."""
    draw = random.Random(seed)  # noqa: S311 - nothing is secret
    laps = {rank: laps_of(draw, slow=rank == slow) for rank in range(WORLD)}
    return {rank: (report_of(each), each) for rank, each in laps.items()}


def lost_by_hand(laps: Mapping[int, Laps]) -> float:
    """Return the lost seconds per step, computed in a simple way.

    In each module without a collective, the loss of a step is the time of the slowest rank minus
    that of the median rank. The longest loss counts as the second longest.
    """
    whole = 0.0
    for module in ("first", "second"):
        place = ModulePhase(module, "forward")
        late = []
        for of_ranks in zip(*laps.values(), strict=True):
            took = [of_rank[place] for of_rank in of_ranks]
            late.append(max(took) - median_low(took))
        late.sort()
        whole += fmean([*late[:-1], late[-2]])
    return whole


def last_by_hand(laps: Mapping[int, Laps]) -> list[int]:
    """Return for each rank in how many steps it works longest."""
    first = ModulePhase("first", "forward")
    second = ModulePhase("second", "forward")
    busy = {rank: [step[first] + step[second] for step in steps] for rank, steps in laps.items()}
    last = Counter[int]()
    for step in range(6):
        last[max(busy, key=lambda rank, step=step: busy[rank][step])] += 1
    return [last[rank] for rank in range(WORLD)]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_lost_and_who_was_last_are_as_added_up_by_hand(seed: int) -> None:
    """The lost time and the last rank of each step are exact, in whatever order reports arrive."""
    reports = ranks_of(seed)
    laps = {rank: each for rank, (_, each) in reports.items()}
    whole, sent = gathered(reports, seed=seed)
    assert whole.rank_comparison is not None
    assert lost_by_hand(laps) == whole.rank_comparison.lost_seconds
    assert last_by_hand(laps) == [each.slowest for each in whole.ranks]
    assert set(range(1, WORLD)) == sent


def test_a_late_rank_and_its_module_are_named() -> None:
    """A rank that takes 8 s longer in `second` is flagged, with this module.

    All other ranks wait for it in `reduce`.
    """
    whole, _ = gathered(ranks_of(7))
    assert [("second", "forward", SLOW)] == [
        (row.module, row.phase, row.slow_rank) for row in lflops.stragglers(whole).rows
    ]
    assert whole.rank_comparison is not None
    assert {("reduce", SLOW, WORLD - 1)} == {
        (w.module, w.for_rank, w.ranks) for w in whole.rank_comparison.waits if w.seconds > 4.0
    }


def test_a_lost_host_is_named_and_nothing_else_is_lost() -> None:
    """If ranks 4 to 7 report nothing, they have failed, and the slow rank is still found."""
    whole, _ = gathered(
        {rank: each for rank, each in ranks_of(1).items() if rank not in range(4, 8)}
    )
    assert ["ok"] * 4 + ["failed"] * 4 + ["ok"] * 16 == [rank.status for rank in whole.ranks]
    assert ["4-7"] == [note.subject for note in whole.notes if note.code == "ranks_missing"]
    assert [("second", SLOW)] == [
        (row.module, row.slow_rank) for row in lflops.stragglers(whole).rows
    ]


def test_of_too_many_times_a_sample_is_handed_in(small_sample: None) -> None:
    """If the times of 24 ranks are too large, only four ranks send them.

    Rank 0 also has its own times. A slow rank in the sample is found with its module. For ranks
    outside the sample, it is unknown in how many steps they were the last.
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
    """If the leading rank has sent no times, another rank with the same modules replaces it.

    The leading rank is the rank with the most FLOPs.
    """
    times_of = report_module.ranks_with_times(WORLD, 7 * len(PLACES) * 4)
    reports = ranks_of(3)
    longer = report_of(reports[0][1], names=(*PLACES, "further"))
    leading = max(set(range(WORLD)) - set(times_of))
    for rank in (leading, max(times_of)):
        reports[rank] = (replace(longer, steps=reports[rank][0].steps), reports[rank][1])
    whole, _ = gathered(reports)
    assert "further" in whole.modules
    assert whole.modules["second"].forward.self_seconds is not None
