"""Test `RankCollector`, which sends the reports of all ranks to rank 0 through a store.

Most tests use threads of one process, and a clock that the test advances.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from torch.distributed import HashStore, PrefixStore, TCPStore

import lflops
from lflops.profile.notes import Note
from lflops.profile.profile import Communication, Profile
from lflops.profile.records import ModulePhase, RankWait
from lflops.profile.steps import Step
from lflops.ranks.collect import collector as gather_module, rank_times, store as rank_store
from lflops.ranks.collect.collector import (
    EXIT_SECONDS,
    GOODBYE,
    PATIENCE,
    WHILE_TRAINING,
    RankCollector,
)
from lflops.ranks.collect.store import RankStore, shared_store
from lflops.ranks.collect.topology import Topology
from lflops.ranks.merge.merge import merge
from lflops.timing.module_times import ScaledTimes, with_times
from tests.support.fake_clock import StillClock
from tests.support.process_state import differences, process, settle
from tests.support.profile_builders import product, profile, run, small_memory, weights
from tests.support.warm_python import WarmPython

TIMEOUT = 30.0
BODY = ModulePhase("body", "forward")
HEAD = ModulePhase("head", "forward")
Laps = tuple[Mapping[ModulePhase, float], ...]


def counted(batch: int = 1, **fields: Any) -> Profile:
    """Return a rank's profile of `body = Linear(8, 16)` and `head = Linear(16, 2)`.

    For each sample of the batch, they have 8 * 16 and 16 * 2 MACs.
    """
    cells = (
        product("body", "aten::addmm", "forward", macs=128 * batch, bytes_moved=4),
        product("head", "aten::addmm", "forward", macs=32 * batch, bytes_moved=4),
    )
    facts = run(kind="training", stage="train", window=0, step=9)
    return profile(
        {"": weights(0, 178), "body": weights(144), "head": weights(34)},
        cells,
        **({"run": facts} | fields),
    )


def timed(given: Profile, laps: Laps) -> Profile:
    """Return the profile with an unprofiled step, and a module-timing step for each of `laps`."""
    clean = Step(
        index=0, kind="unprofiled", seconds=2.0, phases={"data": 0.5}, cpu_user=1.0, cpu_system=0.5
    )
    hooked = tuple(
        Step(index=number, kind="module_timing", seconds=3.0, phases={})
        for number, _ in enumerate(laps, 1)
    )
    return replace(with_times(given, ScaledTimes.of_steps(laps)), steps=(clean, *hooked))


def laps_of(body: Sequence[float], head: Sequence[float]) -> Laps:
    """Return the self seconds of both modules in each step.

    The tests use numbers with few binary digits, which float32 represents exactly.
    """
    return tuple({BODY: one, HEAD: other} for one, other in zip(body, head, strict=True))


class Pausing:
    """Creates collectors with a clock that advances only while a collector waits."""

    def __init__(self) -> None:
        self.clock = StillClock()

    def of(self, store: Any, rank: int, topology: Topology) -> RankCollector:
        """Return a collector with this clock."""
        return RankCollector(
            store, rank, topology, timeout=TIMEOUT, clock=self.clock.mark, pause=self.clock.advance
        )


def topology(world: int, **fields: Any) -> Topology:
    """Return a topology of `world` ranks, each with its own data coordinate."""
    return Topology(
        world_size=world,
        coordinates={rank: {"data": rank} for rank in range(world)},
        sizes={"data": world},
        **fields,
    )


def gathered(
    reports: Mapping[int, tuple[Profile, Laps]],
    *,
    world: int | None = None,
    store: Any = None,
    clock: Any = None,
) -> Profile:
    """Return the profile that rank 0 merges, after all reports have been put into the store."""
    store = store or HashStore()
    clock = clock or Pausing()
    of_all = topology(world or len(reports))
    for rank in sorted(reports, reverse=True):
        one = clock.of(store, rank, of_all)
        one.push(*reports[rank])
        found = one.finish()
    (whole,) = found
    return whole


def stepless(whole: Profile) -> Profile:
    """Return the profile without the comparisons of single steps, which `merge` does not have.

    A collector compares the ranks in module-timing steps, but `merge` compares whole profiles.
    """
    ranks = tuple(replace(each, coordinates={}, slowest=None) for each in whole.ranks)
    of_modules = tuple(each for each in whole.rank_stats if each.phase != "data")
    return replace(whole, ranks=ranks, rank_stats=of_modules, rank_comparison=None)


def equal_ranks() -> list[tuple[Profile, Laps]]:
    """Return three ranks that did the same work in different times."""
    laps = [
        laps_of((0.5, 0.75), (0.25, 0.25)),
        laps_of((0.5, 1.5), (0.125, 0.5)),
        laps_of((1.0, 1.0), (0.25, 0.75)),
    ]
    return [(timed(counted(), each), each) for each in laps]


def uneven_ranks() -> list[tuple[Profile, Laps]]:
    """Return three ranks with batches of different sizes.

    The second has the largest batch, so that its times are shown. The third has no module-timing
    steps.
    """
    laps = [laps_of((0.5, 0.75), (0.25, 0.25)), laps_of((0.5, 1.5), (0.125, 0.5))]
    return [
        (timed(counted(1), laps[0]), laps[0]),
        (timed(counted(3), laps[1]), laps[1]),
        (counted(2), ()),
    ]


def stages() -> list[tuple[Profile, Laps]]:
    """Return four ranks of a pipeline: two have only the body, and two have only the head."""
    facts = run(kind="training", stage="train", window=0)
    first = profile(
        {"": weights(0, 144), "body": weights(144)},
        [product("body", "aten::addmm", "forward", macs=128, bytes_moved=4)],
        run=facts,
    )
    last = profile(
        {"": weights(0, 34), "head": weights(34)},
        [product("head", "aten::addmm", "forward", macs=32, bytes_moved=4)],
        run=facts,
    )
    root = ModulePhase("", "forward")
    laps: list[Laps] = [
        ({BODY: 0.5, root: 0.25},),
        ({BODY: 1.5, root: 0.5},),
        ({HEAD: 0.5, root: 0.125},),
        ({HEAD: 0.25, root: 0.75},),
    ]
    return [
        (timed(given, each), each)
        for given, each in zip((first, first, last, last), laps, strict=True)
    ]


def communicating() -> list[tuple[Profile, Laps]]:
    """Return two ranks with collectives, memory and notes, and different names for their group."""
    laps = [laps_of((0.5,), (0.25,)), laps_of((0.75,), (0.5,))]
    reduced = (
        Communication(
            module="body",
            phase="forward",
            collective="all_reduce",
            group="",
            group_size=2,
            calls=0,
            bytes=8,
        ),
    )

    def one(rank: int) -> Profile:
        each = tuple(
            replace(every, group=str(rank), seconds=0.125 * rank, exposed_seconds=0.125 * rank)
            for every in reduced
        )
        memory = replace(
            small_memory(), peak_bytes=3000 + rank, by_module={}, alive=(), timeline=()
        )
        return counted(
            communication=each,
            memory=memory,
            notes=(Note(code="scripted", subject="body", values={}),),
        )

    return [(timed(one(rank), each), each) for rank, each in enumerate(laps)]


@pytest.mark.parametrize("ranks", [equal_ranks, uneven_ranks, stages, communicating])
def test_what_is_gathered_is_what_merge_makes_of_the_same_profiles(ranks: Any) -> None:
    """The collected profile equals the result of `merge` for the same profiles.

    The reports were packed, equal parts were sent only once, and ranks were merged one at a time.
    """
    reports = ranks()
    world = len(reports)
    facts = [
        replace(given, run=replace(given.run, world_size=world, data_parallel_size=world))
        for given, _ in reports
    ]
    whole = gathered(dict(enumerate(reports)))
    assert [{"data": rank} for rank in range(world)] == [each.coordinates for each in whole.ranks]
    assert stepless(merge(facts)) == stepless(whole)


def test_ranks_are_compared_step_by_step() -> None:
    """The ranks are compared in each step.

    The medians of the body are 0.625, 1 and 1 s. The excess of the second rank over the median of
    the others is 0.5 - 0.75 s in the first step and 1.5 - 0.875 s in the second.
    """
    whole = gathered(dict(enumerate(equal_ranks())))
    body = next(each for each in whole.rank_stats if each.module == "body")
    assert (0.625, 1.0, 1.0, 1) == (body.low, body.median, body.high, body.high_rank)
    assert {0: 0.625, 1: 1.0, 2: 1.0} == body.by_rank
    assert whole.rank_comparison is not None
    excess = next(
        each for each in whole.rank_comparison.delays if (each.module, each.rank) == ("body", 1)
    )
    assert ((-0.25, 0.625), 2) == (excess.excess, whole.rank_comparison.steps)
    assert [0, 1, 1] == [rank.slowest for rank in whole.ranks]


def test_only_steps_that_all_ranks_have_are_compared() -> None:
    """Only steps that all ranks have are compared.

    The second rank has only step 2, in which it takes 2 s and the first rank 0.5 s.
    """
    first = laps_of((8.0, 0.5), (0.0, 0.0))
    second = laps_of((2.0,), (0.0,))
    alone = timed(counted(), second)
    late = replace(alone, steps=(alone.steps[0], replace(alone.steps[1], index=2)))
    whole = gathered({0: (timed(counted(), first), first), 1: (late, second)})
    assert whole.rank_comparison is not None
    assert {("body", 1, (1.5,))} == {
        (e.module, e.rank, e.excess) for e in whole.rank_comparison.delays if e.phase != "all"
    }


def test_of_a_large_model_the_places_that_tell_who_is_slow_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 200 modules, only 64 are kept, including the module in which rank 1 takes 1 s longer.

    The other modules are included in the sums of the ranks.
    """
    monkeypatch.setattr(rank_times, "MOST_VALUES", 0)
    names = [f"m{number}" for number in range(200)]
    facts = run(kind="training", stage="train", window=0)
    alike = profile(
        {"": {}} | {name: {} for name in names},
        [product(names[0], "aten::mm", "forward", macs=1, bytes_moved=4)],
        run=facts,
    )

    def laps(rank: int) -> Laps:
        lap = {ModulePhase(name, "forward"): 0.5 for name in names}
        if rank == 1:
            lap[ModulePhase("m150", "forward")] = 1.5
        return (lap,) * 6

    whole = gathered({rank: (timed(alike, laps(rank)), laps(rank)) for rank in range(3)})
    assert whole.rank_comparison is not None
    assert (100.0, 1.0) == (whole.rank_comparison.seconds, whole.rank_comparison.lost_seconds)
    assert [("m150", "forward", 1, 1.0)] == [
        (row.module, row.phase, row.slow_rank, row.seconds_lost)
        for row in lflops.stragglers(whole).rows
    ]
    assert len(whole.rank_stats) <= 64


def test_each_rank_s_time_is_kept_where_the_most_is_lost() -> None:
    """The times of all ranks are kept only for the 32 modules in which the most is lost.

    Of 40 modules, the slow rank loses 1 s in the first, 2 s in the second, and so on. So the first
    eight modules have no times of single ranks.
    """
    names = [f"m{number}" for number in range(40)]
    facts = run(kind="training", stage="train", window=0)
    cells = [product(name, "aten::mm", "forward", macs=1, bytes_moved=4) for name in names]
    alike = profile({"": {}} | {name: {} for name in names}, cells, run=facts)

    def laps(rank: int) -> Laps:
        lap = {}
        for number, name in enumerate(names):
            lap[ModulePhase(name, "forward")] = 0.5 + rank * (1 + number)
        return (lap,)

    whole = gathered({rank: (timed(alike, laps(rank)), laps(rank)) for rank in range(2)})
    known = {each.module: each.by_rank for each in whole.rank_stats}
    assert [None] * 8 == [known[name] for name in names[:8]]
    assert [{0: 0.5, 1: 1.5 + number} for number in range(8, 40)] == [
        known[name] for name in names[8:]
    ]


def test_waiting_that_traces_know_stands_beside_the_inferred_one() -> None:
    """A wait has the inferred time and, if traces of two ranks measured it, the traced time.

    In the body, the second rank takes 0.25 s longer, because it waits for the first rank. In its
    trace, the collective takes 0.125 s longer. With one trace, the traced time is unknown.
    """
    whole = gathered(dict(enumerate(communicating())))
    (body,) = (each for each in whole.rank_stats if each.module == "body")
    assert (0.5, 0.75, True) == (body.low, body.high, body.waits)
    assert [(0, 0.25, 0.125, 0.0)] == [
        (w.for_rank, w.seconds, w.traced_seconds, w.transfer_seconds) for w in waits_of(whole)
    ]
    (first, laps), second = communicating()
    unknown = replace(
        first,
        communication=tuple(replace(each, exposed_seconds=None) for each in first.communication),
    )
    assert [(0, 0.25, None, None)] == [
        (w.for_rank, w.seconds, w.traced_seconds, w.transfer_seconds)
        for w in waits_of(gathered({0: (unknown, laps), 1: second}))
    ]


def waits_of(whole: Profile) -> list[RankWait]:
    """Return the waits in the body."""
    assert whole.rank_comparison is not None
    return [wait for wait in whole.rank_comparison.waits if wait.module == "body"]


def test_a_rank_that_says_nothing_is_missing_when_the_time_is_over() -> None:
    """At the end of a run, a rank that reports nothing within its part of the timeout is missing.

    Its coordinates are known.
    """
    clock = Pausing()
    whole = gathered({0: (counted(), ()), 2: (counted(), ())}, world=3, clock=clock)
    assert ["ok", "missing", "ok"] == [rank.status for rank in whole.ranks]
    assert (True, {"data": 1}, 3) == (
        whole.run.partial,
        whole.ranks[1].coordinates,
        whole.run.world_size,
    )
    assert PATIENCE * TIMEOUT == pytest.approx(clock.clock.now, abs=0.2)


def test_while_the_training_goes_on_a_report_may_take_its_time() -> None:
    """During the run, a report may arrive later than the timeout.

    The second rank closes its window 100 s after the first. Both reports are used.
    """
    store = HashStore()
    two = topology(2)
    clock = StillClock()
    second = RankCollector(store, 1, two, timeout=TIMEOUT)

    def pause(_: float) -> None:
        clock.advance(50.0)
        if clock.now == 100.0:
            second.push(counted())
            second.finish()

    first = RankCollector(store, 0, two, timeout=TIMEOUT, clock=clock.mark, pause=pause)
    first.push(counted())
    first._jobs[0].wait(60)
    assert [["ok", "ok"]] == [[rank.status for rank in whole.ranks] for whole in first.ready()]


def test_one_that_never_comes_is_given_up_while_the_training_goes_on() -> None:
    """During the run, rank 0 stops waiting for a rank after `WHILE_TRAINING` timeouts."""
    clock = StillClock()
    first = RankCollector(
        HashStore(),
        0,
        topology(2),
        timeout=TIMEOUT,
        clock=clock.mark,
        pause=lambda _: clock.advance(TIMEOUT),
    )
    first.push(counted())
    first._jobs[0].wait(60)
    assert [["ok", "missing"]] == [[rank.status for rank in whole.ranks] for whole in first.ready()]
    assert WHILE_TRAINING * TIMEOUT == clock.now


def test_nobody_waits_where_all_are_there() -> None:
    """If all reports have arrived, rank 0 does not wait: the clock does not advance."""
    clock = Pausing()
    assert ["ok", "ok"] == [
        rank.status
        for rank in gathered({0: (counted(), ()), 1: (counted(), ())}, clock=clock).ranks
    ]
    assert 0.0 == clock.clock.now


def test_a_rank_that_was_left_by_an_exception_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 does not wait for ranks that ended with an exception.

    The second rank reported the work until then, and the third rank reported nothing. Both have
    failed, and the clock does not advance.
    """
    monkeypatch.setattr(gather_module, "EXIT_SECONDS", 60.0)
    store = HashStore()
    clock = Pausing()
    three = topology(3)
    second = clock.of(store, 1, three)
    third = clock.of(store, 2, three)
    first = clock.of(store, 0, three)
    left = Note(code="ended_early", subject="RuntimeError", values={})
    second.push(
        counted(run=run(kind="training", stage="train", window=0, partial=True), notes=(left,))
    )
    assert [] == second.finish(failed=True)
    third.finish(failed=True)
    first.push(counted())
    (whole,) = first.finish()
    assert ["ok", "failed", "failed"] == [rank.status for rank in whole.ranks]
    assert 160 == whole.ranks[1].macs
    assert whole.ranks[2].macs is None
    assert True is whole.run.partial
    assert 0.0 == clock.clock.now


def test_a_rank_that_has_ended_before_is_missing_and_not_waited_for() -> None:
    """Rank 0 does not wait for a rank that ended normally without a report, for lack of data."""
    store = HashStore()
    clock = Pausing()
    two = topology(2)
    clock.of(store, 1, two).finish()
    first = clock.of(store, 0, two)
    first.push(counted())
    (whole,) = first.finish()
    assert (["ok", "missing"], 0.0) == ([rank.status for rank in whole.ranks], clock.clock.now)


def test_a_rank_whose_report_has_begun_to_come_is_late() -> None:
    """A rank that has announced a report, but has not sent the rest, is late."""
    store = HashStore()
    RankStore(store).put("train/0/begun/1", b"")
    assert ["ok", "late"] == [
        rank.status for rank in gathered({0: (counted(), ())}, world=2, store=store).ranks
    ]


def test_a_rank_whose_names_never_came_is_late() -> None:
    """A rank is late if the shared part of its report is missing, because the sender was killed."""

    class Losing(Keeping):
        def set(self, key: str, value: bytes) -> None:
            if "/shared/" not in key:
                super().set(key, value)

    store = Losing()
    reports = {0: (counted(), ()), 1: (counted(2), ())}
    assert ["ok", "late"] == [rank.status for rank in gathered(reports, store=store).ranks]


class Keeping:
    """A store that records which keys were set."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.said: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        """Set the key, and record it."""
        self.said.append(key)
        self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_names_and_counts_travel_once_or_twice() -> None:
    """Names and counts that are equal on many ranks are sent at most twice.

    Five ranks send reports. Four of them have equal counts, which are sent twice, and one has other
    counts.
    """
    store = Keeping()
    batches = (1, 1, 1, 2, 1, 1)
    gathered({rank: (counted(batch), ()) for rank, batch in enumerate(batches)}, store=store)
    assert 3 == sum("/shared/" in key for key in store.said)


def test_what_was_looked_at_is_taken_away() -> None:
    """Reports are removed from the store after they were read.

    After five windows, the store has only counters and the ranks that have left.
    """
    store = HashStore()
    clock = Pausing()
    four = topology(4)
    ranks = [clock.of(store, rank, four) for rank in (3, 2, 1, 0)]
    for window in range(5):
        for one in ranks:
            one.push(counted(run=run(kind="training", stage="train", window=window)))
            one._jobs[-1].wait(60)
    assert [0, 1, 2, 3, 4] == [whole.run.window for whole in ranks[-1].ready()]
    left = store.list_keys() if hasattr(store, "list_keys") else []
    for key in left:
        for part in ("/head/", "/times/", "/shared/", "/begun/"):
            assert part not in key


def test_a_report_that_comes_when_all_is_over_is_not_sent() -> None:
    """A report that comes after rank 0 has ended is not sent, because it would not be removed.

    The rank gets its own profile back, so that it can save it.
    """
    store = Keeping()
    clock = Pausing()
    two = topology(2)
    first = clock.of(store, 0, two)
    second = clock.of(store, 1, two)
    first.push(counted())
    first.finish()
    before = len(store.said)
    second.push(counted())
    (kept,) = second.finish()
    assert ["left/1"] == store.said[before:]
    assert counted().modules == kept.modules
    assert ["gather_failed"] == [note.code for note in kept.notes]


def test_a_window_is_told_of_once_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 returns a window when all reports have arrived; other ranks return nothing.

    Until then, the collector is pending but not busy, because it only waits.
    """
    store = HashStore()
    two = topology(2)
    arrived = threading.Event()
    first = RankCollector(
        store, 0, two, timeout=TIMEOUT, clock=lambda: 0.0, pause=lambda _: arrived.wait(60)
    )
    second = RankCollector(store, 1, two, timeout=TIMEOUT)
    first.push(counted())
    assert ([], True, False) == (first.ready(), first.pending, first.busy)
    second.push(counted())
    assert [] == second.finish()
    arrived.set()
    first._jobs[0].wait(60)
    # The collector is still pending, so that the caller calls `ready`.
    assert first.pending
    assert ([2], False) == ([whole.run.world_size for whole in first.ready()], first.pending)
    assert [] == first.finish()


def test_a_gather_that_fails_leaves_the_first_ranks_own() -> None:
    """If a report cannot be read, rank 0 keeps its own profile, with a note about the reason."""
    store = HashStore()
    RankStore(store).put("train/0/head/1", b"nonsense")
    RankStore(store).add("train/0/reported/")
    whole = gathered({0: (counted(), ())}, world=2, store=store)
    assert ["ok", "missing"] == [rank.status for rank in whole.ranks]
    assert ["ranks_missing", "gather_failed"] == [note.code for note in whole.notes]


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store does not answer, a rank that ends with an exception does not wait.

    Rank 0 keeps its own profile.
    """
    monkeypatch.setattr(gather_module, "EXIT_SECONDS", 0.0)
    forever = threading.Event()

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: forever.wait(60)

    waiting: list[RankCollector] = []
    for rank, expected in ((0, ["ok", "missing"]), (1, [])):
        one = RankCollector(Silent(), rank, topology(2), timeout=TIMEOUT)
        one.push(counted())
        statuses = []
        for whole in one.finish(failed=True):
            statuses += [found.status for found in whole.ranks]
        assert expected == statuses
        waiting.append(one)
    forever.set()
    for one in waiting:
        for job in one._jobs:
            job.wait(60)


def test_what_could_not_be_handed_in_is_given_back() -> None:
    """If a report cannot be sent, the rank gets its own profile back, with the reason.

    Here, the store is gone together with rank 0. The profile is returned only once.
    """

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("the store is gone")

    second = RankCollector(Gone(), 1, topology(2), timeout=TIMEOUT)
    second.push(counted())
    second._jobs[0].wait(60)
    (kept,) = second.ready()
    assert (2, counted().modules) == (kept.run.world_size, kept.modules)
    assert [{"error": "ConnectionError: the store is gone"}] == [note.values for note in kept.notes]
    assert [] == second.finish()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("failed", "longest"), [(False, TIMEOUT), (True, EXIT_SECONDS)])
def test_nobody_is_held_up_longer_than_the_timeout(
    rank: int, *, failed: bool, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store never answers, a rank waits no longer than the timeout.

    It waits for its jobs, and then for the message that it leaves. Each wait advances the clock.
    """
    forever = threading.Event()
    clock = StillClock()

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: forever.wait(60)

    def wait(_: object, seconds: float) -> None:
        clock.advance(max(seconds, 0.0))

    stuck = RankCollector(Silent(), rank, topology(2), timeout=TIMEOUT, clock=clock.mark)
    for window in range(3):
        stuck.push(counted(run=run(kind="training", stage="train", window=window)))
    jobs = stuck._jobs
    with monkeypatch.context() as patch:
        patch.setattr(gather_module._Job, "wait", wait)
        stuck.finish(failed=failed)
        assert GOODBYE * longest == pytest.approx(clock.now)
        stuck._stop()
        assert longest == pytest.approx(clock.now)
    forever.set()
    for job in (*jobs, *stuck._jobs):
        job.wait(60)


def test_a_large_value_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of ten bytes is stored in three parts of at most four bytes.

    When the value is taken, all parts are removed.
    """
    monkeypatch.setattr(rank_store, "LARGEST_VALUE", 4)
    plain = HashStore()
    store = RankStore(plain)
    store.put("key", bytes(range(10)))
    assert (bytes(range(10)), 3) == (store.get("key"), plain.num_keys())
    assert (bytes(range(10)), 0) == (store.take("key"), plain.num_keys())
    assert not store.has("key")


def test_nothing_is_left_when_all_is_told() -> None:
    """After the collectors have finished, no thread and no exit handler remains.

    This also holds for a collector that never sent a report.
    """
    settle()
    before = process()
    gathered({0: (counted(), ()), 1: (counted(), ())})
    RankCollector(HashStore(), 1, topology(2), timeout=TIMEOUT).finish()
    assert [] == differences(before, process())


ENDS_EARLY = """
from torch.distributed import TCPStore
from tests.ranks.collect.test_collector import RankCollector, counted, topology
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
gather = RankCollector(store.clone(), 0, topology(64), timeout=600.0)
gather.push(counted())
"""


def test_a_process_may_end_while_something_is_waited_for(warm_python: WarmPython) -> None:
    """A process may exit while its collector waits for other ranks: there is no error or output.

    A thread that continues after the interpreter has ended would crash the process.
    """
    assert (0, "", "") == warm_python.run(ENDS_EARLY, destroys_objects=True)


class Watched(TCPStore):
    """A store of the user. lflops must neither set its timeout nor clone it.

    A clone would wait with the timeout of the original store.
    """

    def set_timeout(self, _timeout: object) -> None:
        """Fail the test."""
        raise AssertionError("the timeout was set")

    def clone(self) -> Any:
        """Fail the test."""
        raise AssertionError("the store was cloned")


def test_ranks_meet_and_leave_the_timeout_of_the_groups_store_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks of a group share a store on a separate connection, with a separate timeout.

    Two groups that use the same store see only their own keys.
    """
    store = Watched("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = {}
    for group in "ab":
        monkeypatch.setattr(
            rank_store,
            "group_store",
            lambda group=group: PrefixStore("default_pg", PrefixStore(group, store)),
        )
        found[group] = [shared_store("lflops", timeout=TIMEOUT) for _ in range(2)]
    for group in "ab":
        other, first = found[group]
        other.set("from", group)
        assert group.encode() == first.get("from")
        assert timedelta(seconds=TIMEOUT) == first.timeout


def test_without_a_group_ranks_do_not_meet() -> None:
    """Without a process group, there is no shared store."""
    assert shared_store("lflops", timeout=TIMEOUT) is None


def test_a_collector_that_is_starved_takes_what_lies_in_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collector that runs slowly still reads all reports that are in the store.

    Each answer of the store takes a quarter of the timeout, so the timeout is over long before the
    collector has read both reports.
    """
    store = HashStore()
    two = topology(2)
    clock = StillClock()
    second = RankCollector(store, 1, two, timeout=TIMEOUT)
    second.push(counted())
    second.finish()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            clock.advance(TIMEOUT / 4)
            return getattr(store, name)

    patience = gather_module._Job.wait

    def wait(job: Any, seconds: float) -> None:
        """Wait in real time for one more answer of the store, then advance the clock."""
        answers = first._store.answers
        for _ in range(6000):
            patience(job, 0.01)
            if not job.is_running or first._store.answers > answers:
                break
        clock.advance(max(seconds, 0.0))

    monkeypatch.setattr(gather_module._Job, "wait", wait)
    first = RankCollector(Slow(), 0, two, timeout=TIMEOUT, clock=clock.mark, pause=clock.advance)
    first.push(counted())
    (whole,) = first.finish()
    assert ["ok", "ok"] == [rank.status for rank in whole.ranks]
    assert [] == [note.code for note in whole.notes]
    for job in first._jobs:
        patience(job, 60)
