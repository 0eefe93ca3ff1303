"""Ranks too many for one process.

They keep their modules' times, hand in sums, and the late ones are asked for the rest.
"""

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
from lflops.ranks.collect import window_reports
from lflops.ranks.collect.collector import RankCollector
from lflops.ranks.collect.topology import Topology
from lflops.ranks.merge import rank_comparison
from lflops.timing.module_times import ScaledTimes, with_times
from tests.support.profile_builders import product, profile, run, weights

WORLD, SLOW, PLACES = 24, 13, ("first", "gather", "second", "reduce")
"""Modules in their order; ranks wait for each other in the second one and in the last."""

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
        if "/times/" in key:
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
def few_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks keep their times but four that are drawn by lot.

    The two latest ones are asked for theirs.
    """
    monkeypatch.setattr(window_reports, "MOST_BYTES", 0)
    monkeypatch.setattr(window_reports, "BY_LOT", 4)
    monkeypatch.setattr(window_reports, "ASKED", 3)
    for module in (window_reports, rank_comparison):
        monkeypatch.setattr(module, "CANDIDATES", 2)
    return iter(())


def ranks_of(seed: int) -> dict[int, tuple[Profile, Laps]]:
    """All ranks, of which one is slow in the second module."""
    draw = random.Random(seed)  # noqa: S311 - nothing is secret
    laps = {rank: laps_of(draw, slow=rank == SLOW) for rank in range(WORLD)}
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
def test_sums_say_of_all_ranks_what_their_times_would(
    few_places: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Who is late, by how much and how often.

    Equal to the last bit, and to what is added up by hand, in whatever order reports come.
    """
    reports = ranks_of(seed)
    laps = {rank: each for rank, (_, each) in reports.items()}
    reduced, sent = gathered(reports, seed=seed)
    monkeypatch.setattr(window_reports, "MOST_BYTES", 1 << 30)
    flat, all_sent = gathered(reports)
    assert reduced.rank_comparison is not None
    assert flat.rank_comparison is not None
    assert (
        lost_by_hand(laps)
        == reduced.rank_comparison.lost_seconds
        == flat.rank_comparison.lost_seconds
    )
    assert (
        last_by_hand(laps)
        == [each.slowest for each in reduced.ranks]
        == [each.slowest for each in flat.ranks]
    )
    assert (flat.rank_comparison.seconds, flat.ranks, flat.steps) == (
        reduced.rank_comparison.seconds,
        reduced.ranks,
        reduced.steps,
    )
    late = [
        {(e.module, e.rank): e.late for e in whole.rank_comparison.excesses}
        for whole in (reduced, flat)
    ]
    assert late[0]["second", SLOW] == late[1]["second", SLOW]
    lot = window_reports.by_lot(WORLD) - {0}
    assert len(all_sent) == WORLD - 1
    assert SLOW in sent
    assert lot <= sent
    assert len(sent - lot) <= 3


def test_the_module_of_a_late_rank_is_named_from_the_times_it_is_asked_for(
    few_places: None,
) -> None:
    """8 s in the second module. All ranks wait for it there, which is said of all of them."""
    whole, _ = gathered(ranks_of(7))
    assert [("second", "forward", SLOW)] == [
        (row.module, row.phase, row.slow_rank) for row in lflops.stragglers(whole).rows
    ]
    assert whole.rank_comparison is not None
    assert {("reduce", SLOW, WORLD - 1)} == {
        (w.module, w.for_rank, w.ranks) for w in whole.rank_comparison.waits if w.seconds > 4.0
    }


def test_a_lost_host_is_named_and_nothing_else_is_lost(few_places: None) -> None:
    """Ranks 4 to 7 say nothing; the slow one is found all the same."""
    whole, _ = gathered(
        {rank: each for rank, each in ranks_of(1).items() if rank not in range(4, 8)}
    )
    assert ["ok"] * 4 + ["failed"] * 4 + ["ok"] * 16 == [rank.status for rank in whole.ranks]
    assert ["4-7"] == [note.subject for note in whole.notes if note.code == "ranks_missing"]
    assert [("second", SLOW)] == [
        (row.module, row.slow_rank) for row in lflops.stragglers(whole).rows
    ]


def test_a_late_rank_that_has_left_is_not_waited_for(few_places: None) -> None:
    """Its training has ended before it was asked.

    That it was the last is known, its module is not; the other ranks have theirs.
    """
    whole, sent = gathered(ranks_of(2), leaving=[SLOW])
    assert SLOW not in sent
    assert (6, "ok") == (whole.ranks[SLOW].slowest, whole.ranks[SLOW].status)
    assert whole.modules["second"].forward.self_seconds is not None


def test_ranks_that_wait_elsewhere_are_compared_in_one_interval(few_places: None) -> None:
    """Half of the ranks have no collective in the middle of their step, so their sums do not tell of its halves."""
    draw, reports = random.Random(3), {}  # noqa: S311 - nothing is secret
    for rank in range(WORLD):
        laps = laps_of(draw, slow=rank == SLOW)
        given = report_of(laps)
        if rank % 2 == 0:
            given = replace(
                given,
                communication=tuple(
                    each for each in given.communication if each.module == "reduce"
                ),
            )
        reports[rank] = given, laps
    whole, _ = gathered(reports)
    assert ["ok"] * WORLD == [rank.status for rank in whole.ranks]
    assert whole.rank_comparison is not None
    assert {(0,)} == {each.intervals for each in whole.rank_comparison.excesses}
    assert 6 == whole.ranks[SLOW].slowest
