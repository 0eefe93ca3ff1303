"""Reports that go through a store.

On threads of one process where the clock is ours, and between processes of a group.
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
BODY, HEAD = ModulePhase("body", "forward"), ModulePhase("head", "forward")
Laps = tuple[Mapping[ModulePhase, float], ...]


def counted(batch: int = 1, **fields: Any) -> Profile:
    """A rank's step of `body = Linear(8, 16)` and `head = Linear(16, 2)`.

    8 * 16 and 16 * 2 MACs for each of the batch.
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
    """The profile with a hooked step for each lap, and a clean one before them."""
    clean = Step(
        index=0, kind="unprofiled", seconds=2.0, phases={"data": 0.5}, cpu_user=1.0, cpu_system=0.5
    )
    hooked = tuple(
        Step(index=number, kind="module_timing", seconds=3.0, phases={})
        for number, _ in enumerate(laps, 1)
    )
    return replace(with_times(given, ScaledTimes.of_steps(laps)), steps=(clean, *hooked))


def laps_of(body: Sequence[float], head: Sequence[float]) -> Laps:
    """Own seconds of both modules step by step.

    Numbers of a few binary digits are themselves in float32 too.
    """
    return tuple({BODY: one, HEAD: other} for one, other in zip(body, head, strict=True))


class Pausing:
    """A clock that goes on while somebody waits."""

    def __init__(self) -> None:
        self.clock = StillClock()

    def of(self, store: Any, rank: int, topology: Topology) -> RankCollector:
        """A gather by this clock."""
        return RankCollector(
            store, rank, topology, timeout=TIMEOUT, clock=self.clock.mark, pause=self.clock.advance
        )


def topology(world: int, **fields: Any) -> Topology:
    """So many ranks, each at its own coordinate of data."""
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
    """What rank 0 makes of the reports, all of which are there before it looks."""
    store, clock, of_all = store or HashStore(), clock or Pausing(), topology(world or len(reports))
    for rank in sorted(reports, reverse=True):
        one = clock.of(store, rank, of_all)
        one.push(*reports[rank])
        found = one.finish()
    (whole,) = found
    return whole


def stepless(whole: Profile) -> Profile:
    """Without what a gather compares in the hooked steps alone, and a merge of profiles in the clean ones or not at all."""
    ranks = tuple(replace(each, coordinates={}, slowest=None) for each in whole.ranks)
    of_modules = tuple(each for each in whole.rank_stats if each.phase != "data")
    return replace(whole, ranks=ranks, rank_stats=of_modules, rank_comparison=None)


def equal_ranks() -> list[tuple[Profile, Laps]]:
    """Three that did the same in other times."""
    laps = [
        laps_of((0.5, 0.75), (0.25, 0.25)),
        laps_of((0.5, 1.5), (0.125, 0.5)),
        laps_of((1.0, 1.0), (0.25, 0.75)),
    ]
    return [(timed(counted(), each), each) for each in laps]


def uneven_ranks() -> list[tuple[Profile, Laps]]:
    """The second with the larger batch, so that its times are shown.

    The third without hooked steps.
    """
    laps = [laps_of((0.5, 0.75), (0.25, 0.25)), laps_of((0.5, 1.5), (0.125, 0.5))]
    return [
        (timed(counted(1), laps[0]), laps[0]),
        (timed(counted(3), laps[1]), laps[1]),
        (counted(2), ()),
    ]


def stages() -> list[tuple[Profile, Laps]]:
    """Two ranks with the body, two with the head alone."""
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
    """Each rank has a name of its own for its group, a ledger, and a memory."""
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
    """Names that travelled once, times that were packed, and one rank after the other.

    The same value.
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
    """Body: medians 0.625, 1 and 1.

    The excess of the second rank is 0.5 - 0.75 in the first step and 1.5 - 0.875 in the second.
    """
    whole = gathered(dict(enumerate(equal_ranks())))
    body = next(each for each in whole.rank_stats if each.module == "body")
    assert (0.625, 1.0, 1.0, 1, {0: 0.625, 1: 1.0, 2: 1.0}) == (
        body.low,
        body.median,
        body.high,
        body.high_rank,
        body.by_rank,
    )
    assert whole.rank_comparison is not None
    excess = next(
        each for each in whole.rank_comparison.delays if (each.module, each.rank) == ("body", 1)
    )
    assert ((-0.25, 0.625), 2) == (excess.excess, whole.rank_comparison.steps)
    assert [0, 1, 1] == [rank.slowest for rank in whole.ranks]


def test_only_steps_that_all_ranks_have_are_compared() -> None:
    """The second rank has step 2 alone: 2 s against 0.5 s there."""
    first, second = laps_of((8.0, 0.5), (0.0, 0.0)), laps_of((2.0,), (0.0,))
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
    """Of 200 modules 64: among them the one that takes rank 1 a second longer.

    The others are in the ranks' sums all the same.
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
        return (
            {ModulePhase(name, "forward"): 0.5 + (rank == 1 and name == "m150") for name in names},
        ) * 6

    whole = gathered({rank: (timed(alike, laps(rank)), laps(rank)) for rank in range(3)})
    assert whole.rank_comparison is not None
    assert (100.0, 1.0) == (whole.rank_comparison.seconds, whole.rank_comparison.lost_seconds)
    assert [("m150", "forward", 1, 1.0)] == [
        (row.module, row.phase, row.slow_rank, row.seconds_lost)
        for row in lflops.stragglers(whole).rows
    ]
    assert len(whole.rank_stats) <= 64


def test_each_rank_s_time_is_kept_where_the_most_is_lost() -> None:
    """Of 40 modules the slow rank loses 1 s in the first, 2 in the second and so on.

    32 keep both ranks' times, the first 8 none.
    """
    names = [f"m{number}" for number in range(40)]
    facts = run(kind="training", stage="train", window=0)
    cells = [product(name, "aten::mm", "forward", macs=1, bytes_moved=4) for name in names]
    alike = profile({"": {}} | {name: {} for name in names}, cells, run=facts)
    laps = [
        (
            {
                ModulePhase(name, "forward"): 0.5 + rank * (1 + number)
                for number, name in enumerate(names)
            },
        )
        for rank in range(2)
    ]
    whole = gathered({rank: (timed(alike, each), each) for rank, each in enumerate(laps)})
    known = {each.module: each.by_rank for each in whole.rank_stats}
    assert [None] * 8 == [known[name] for name in names[:8]]
    assert [{0: 0.5, 1: 1.5 + number} for number in range(8, 40)] == [
        known[name] for name in names[8:]
    ]


def test_waiting_that_traces_know_stands_beside_the_inferred_one() -> None:
    """In the body the second rank waits 0.25 s for the first one; in the collective it is 0.125 s longer.

    One trace alone tells nothing.
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
    """Those in the body."""
    assert whole.rank_comparison is not None
    return [wait for wait in whole.rank_comparison.waits if wait.module == "body"]


def test_a_rank_that_says_nothing_is_missing_when_the_time_is_over() -> None:
    """It has no longer than its part of the timeout; its place is known all the same."""
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
    """The second rank closes its window a hundred seconds after the first, which has waited for nothing meanwhile: both are fine."""
    store, two, clock = HashStore(), topology(2), StillClock()
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
    """Twenty timeouts later."""
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
    """The clock stands still."""
    clock = Pausing()
    assert ["ok", "ok"] == [
        rank.status
        for rank in gathered({0: (counted(), ()), 1: (counted(), ())}, clock=clock).ranks
    ]
    assert 0.0 == clock.clock.now


def test_a_rank_that_was_left_by_an_exception_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second handed in what it had, the third nothing.

    Both have failed, and the clock stands still.
    """
    monkeypatch.setattr(gather_module, "EXIT_SECONDS", 60.0)
    store, clock, three = HashStore(), Pausing(), topology(3)
    second, third, first = (clock.of(store, rank, three) for rank in (1, 2, 0))
    left = Note(code="ended_early", subject="RuntimeError", values={})
    second.push(
        counted(run=run(kind="training", stage="train", window=0, partial=True), notes=(left,))
    )
    assert [] == second.finish(failed=True)
    third.finish(failed=True)
    first.push(counted())
    (whole,) = first.finish()
    assert ["ok", "failed", "failed"] == [rank.status for rank in whole.ranks]
    assert ([None, 160], True) == ([whole.ranks[2].macs, whole.ranks[1].macs], whole.run.partial)
    assert 0.0 == clock.clock.now


def test_a_rank_that_has_ended_before_is_missing_and_not_waited_for() -> None:
    """Its data was over."""
    store, clock, two = HashStore(), Pausing(), topology(2)
    clock.of(store, 1, two).finish()
    first = clock.of(store, 0, two)
    first.push(counted())
    (whole,) = first.finish()
    assert (["ok", "missing"], 0.0) == ([rank.status for rank in whole.ranks], clock.clock.now)


def test_a_rank_whose_report_has_begun_to_come_is_late() -> None:
    """It has said so, and not the rest."""
    store = HashStore()
    RankStore(store).put("train/0/begun/1", b"")
    assert ["ok", "late"] == [
        rank.status for rank in gathered({0: (counted(), ())}, world=2, store=store).ranks
    ]


def test_a_rank_whose_names_never_came_is_late() -> None:
    """Who was to hand them in for all was killed before."""

    class Losing(Keeping):
        def set(self, key: str, value: bytes) -> None:
            if "/shared/" not in key:
                super().set(key, value)

    store = Losing()
    reports = {0: (counted(), ()), 1: (counted(2), ())}
    assert ["ok", "late"] == [rank.status for rank in gathered(reports, store=store).ranks]


class Keeping:
    """A store that knows what was set."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.said: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        """As the store."""
        self.said.append(key)
        self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_names_and_counts_travel_once_or_twice() -> None:
    """Five ranks hand in, of whom four did the same and one something else: two copies, and one."""
    store = Keeping()
    gathered({rank: (counted(2 if rank == 3 else 1), ()) for rank in range(6)}, store=store)
    assert 3 == sum("/shared/" in key for key in store.said)


def test_what_was_looked_at_is_taken_away() -> None:
    """Of five windows no report is left, only who has left and how many have told."""
    store, clock, four = HashStore(), Pausing(), topology(4)
    ranks = [clock.of(store, rank, four) for rank in (3, 2, 1, 0)]
    for window in range(5):
        for one in ranks:
            one.push(counted(run=run(kind="training", stage="train", window=window)))
            one._jobs[-1].wait(60)
    assert [0, 1, 2, 3, 4] == [whole.run.window for whole in ranks[-1].ready()]
    left = store.list_keys() if hasattr(store, "list_keys") else []
    assert [] == [
        key
        for key in left
        if any(what in key for what in ("/head/", "/times/", "/shared/", "/begun/"))
    ]


def test_a_report_that_comes_when_all_is_over_is_not_sent() -> None:
    """Nobody would take it away again. The rank has it back, to keep it."""
    store, clock, two = Keeping(), Pausing(), topology(2)
    first, second = clock.of(store, 0, two), clock.of(store, 1, two)
    first.push(counted())
    first.finish()
    before = len(store.said)
    second.push(counted())
    (kept,) = second.finish()
    assert ["left/1"] == store.said[before:]
    assert (counted().modules, ["gather_failed"]) == (
        kept.modules,
        [note.code for note in kept.notes],
    )


def test_a_window_is_told_of_once_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then nothing, and something is waited for, which is no work.

    A rank other than the first has nothing to tell.
    """
    store, two, arrived = HashStore(), topology(2), threading.Event()
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
    assert first.pending  # else nobody would ask
    assert ([2], False) == ([whole.run.world_size for whole in first.ready()], first.pending)
    assert [] == first.finish()


def test_a_gather_that_fails_leaves_the_first_ranks_own() -> None:
    """A report that is none: the rank's own profile, and why."""
    store = HashStore()
    RankStore(store).put("train/0/head/1", b"nonsense")
    RankStore(store).add("train/0/reported/")
    whole = gathered({0: (counted(), ())}, world=2, store=store)
    assert ["ok", "missing"] == [rank.status for rank in whole.ranks]
    assert ["ranks_missing", "gather_failed"] == [note.code for note in whole.notes]


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is gone: what ends by an exception is let go at once, on the first rank with its own profile."""
    monkeypatch.setattr(gather_module, "EXIT_SECONDS", 0.0)
    forever = threading.Event()

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: forever.wait(60)

    waiting: list[RankCollector] = []
    for rank, expected in ((0, ["ok", "missing"]), (1, [])):
        one = RankCollector(Silent(), rank, topology(2), timeout=TIMEOUT)
        one.push(counted())
        assert expected == [
            status.status for whole in one.finish(failed=True) for status in whole.ranks
        ]
        waiting.append(one)
    forever.set()
    for job in (job for one in waiting for job in one._jobs):
        job.wait(60)


def test_what_could_not_be_handed_in_is_given_back() -> None:
    """The store is gone with the first rank.

    The second has its own profile, and why, the first time that it asks.
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
    """Where the store never answers.

    By what is under way, then by the goodbye, and all that is waited for advances the clock.
    """
    forever, clock = threading.Event(), StillClock()

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
    """Ten bytes, four at once; all parts are gone when it is taken."""
    monkeypatch.setattr(rank_store, "LARGEST_VALUE", 4)
    plain = HashStore()
    store = RankStore(plain)
    store.put("key", bytes(range(10)))
    assert (bytes(range(10)), 3) == (store.get("key"), plain.num_keys())
    assert (bytes(range(10)), 0) == (store.take("key"), plain.num_keys())
    assert not store.has("key")


def test_nothing_is_left_when_all_is_told() -> None:
    """No thread, nothing that the end of the process would call; also where nobody ever handed in."""
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
    """As any other, and without a word.

    A thread that went on when Python is gone would end it by a signal.
    """
    assert (0, "", "") == warm_python.run(ENDS_EARLY)


class Watched(TCPStore):
    """A store of the user's whose timeout nobody else may set, and which nobody may clone.

    That would wait by its timeout.
    """

    def set_timeout(self, _timeout: object) -> None:
        """Be called."""
        raise AssertionError("the timeout was set")

    def clone(self) -> Any:
        """Be called."""
        raise AssertionError("the store was cloned")


def test_ranks_meet_and_leave_the_timeout_of_the_groups_store_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the store of each group, on another connection, whichever rank comes first.

    Two groups in one store have nothing in common.
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
    """A rank that says it is one of several."""
    assert shared_store("lflops", timeout=TIMEOUT) is None


def test_a_collector_that_is_starved_takes_what_lies_in_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gets on slowly: time is over long before it is done, and yet both reports are there."""
    store, two, clock = HashStore(), topology(2), StillClock()
    second = RankCollector(store, 1, two, timeout=TIMEOUT)
    second.push(counted())
    second.finish()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            clock.advance(TIMEOUT / 4)
            return getattr(store, name)

    patience = gather_module._Job.wait

    def wait(job: Any, seconds: float) -> None:
        """A look at the collector, which is given real time until it has come one answer further, and all of the time that it may take."""
        answers, looks = first._store.answers, range(6000)
        for _ in looks:
            patience(job, 0.01)
            if not job.is_running or first._store.answers > answers:
                break
        clock.advance(max(seconds, 0.0))

    monkeypatch.setattr(gather_module._Job, "wait", wait)
    first = RankCollector(Slow(), 0, two, timeout=TIMEOUT, clock=clock.mark, pause=clock.advance)
    first.push(counted())
    (whole,) = first.finish()
    assert (["ok", "ok"], []) == (
        [rank.status for rank in whole.ranks],
        [note.code for note in whole.notes],
    )
    for job in first._jobs:
        patience(job, 60)
