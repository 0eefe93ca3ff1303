from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st
from msgspec.structs import replace
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lflops
from lflops.analysis import step_times
from lflops.errors import ProfileError
from lflops.hardware.chips import Hardware
from lflops.profile.json_file import _checked
from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.profile import Communication, DtypeShare, Profile, UnsupportedCall
from lflops.profile.records import ModulePhase, Phase, Rank, RankStat, TimingStats, Trace
from lflops.profile.steps import Step
from lflops.ranks.merge.batches import sum_of_batches
from lflops.ranks.merge.merge import _fitted, merge
from lflops.ranks.merge.rank_table import (
    exposed_by_place,
    exposed_on_all_ranks,
    rank_stats,
    table_of,
)
from lflops.ranks.merge.rows import ranges
from tests.support.processes import Ranks
from tests.support.profile_builders import (
    cell,
    clocked,
    product,
    profile,
    run,
    small_memory,
    small_profile,
    small_timeline,
    spread,
    weights,
)
from tests.support.profile_checks import consistent, flops, macs
from tests.support.small_models import (
    Block,
    between_linears,
    down,
    hidden,
    length,
    sequence,
    square,
    up,
    wide,
)

GPU = Hardware(name="GPU", peak_flops_per_second={"fp32": 1e12})
OTHER_GPU = Hardware(name="another", peak_flops_per_second={"fp32": 2e12})


def replica(batch: int = 1, **fields: Any) -> Profile:
    """A rank's pass of `body = Linear(8, 16)` and `head = Linear(16, 2)`, of which the body is frozen.

    By hand, for each of the batch: forward 8 * 16 = 128 MACs and 16 * 2 = 32; backward the head's
    weight alone, 32.
    """
    cells = (
        product("body", "aten::addmm", "forward", macs=128 * batch, bytes_moved=4),
        product("head", "aten::addmm", "forward", macs=32 * batch, bytes_moved=4),
        product("head", "aten::mm", "backward", macs=32 * batch, bytes_moved=4),
    )
    return profile(
        {"": weights(0, 178), "body": weights(144), "head": weights(34)}, cells, **fields
    )


def in_file_and_memory(given: Profile) -> Profile:
    """The profile, once it is seen that its file would be read as itself."""
    assert given == _checked(msgspec.json.encode(given))
    return given


def merged(*given: Profile) -> Profile:
    """The ranks' profiles as one that adds up, and that a file can hold."""
    return in_file_and_memory(consistent(merge(given)))


def noted(profile: Profile, code: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The subjects and values of all notes with one code."""
    return [(note.subject, note.values) for note in profile.notes if note.code == code]


def test_ranks_that_agree_have_one_ranks_counts() -> None:
    """Four times the same work is still 160 MACs forward on each.

    What one does, and nothing to note.
    """
    whole = merged(*(replica() for _ in range(4)))
    assert (replica().modules, replica().op_counts) == (whole.modules, whole.op_counts)
    assert (160, 4, False, ()) == (
        whole.total(),
        whole.run.world_size,
        whole.run.partial,
        whole.notes,
    )
    assert [(0, 192), (1, 192), (2, 192), (3, 192)] == [
        (rank.rank, rank.macs) for rank in whole.ranks
    ]


def test_one_rank_is_a_run_of_one() -> None:
    """Its counts, its steps; there is nobody to compare it with."""
    steps = (Step(index=0, kind="unprofiled", seconds=2.0, phases={}),)
    alone = replica(steps=steps)
    whole = merged(alone)
    assert (alone.modules, alone.op_counts, alone.steps, alone.run) == (
        whole.modules,
        whole.op_counts,
        whole.steps,
        whole.run,
    )
    assert ((), ()) == (whole.rank_stats, whole.notes)
    assert [(0, "ok", 192, None)] == [
        (rank.rank, rank.status, rank.macs, rank.slowest) for rank in whole.ranks
    ]


def test_uneven_batches_are_shown_by_the_rank_with_the_most_work() -> None:
    """Batches of 2, 3 and 1.

    480 MACs forward on the second, with its samples and shapes; 384, 576 and 192 with backward.

    Two FLOPs a MAC: 384 on the last rank, 1152 on the second.
    """
    whole = merged(
        *(
            replica(batch, run=run(samples_per_step=batch, shapes={"0": (batch, 8)}))
            for batch in (2, 3, 1)
        )
    )
    assert {"body": 384, "head": 96} == macs(whole, "forward")
    assert {"head": 96} == macs(whole, "backward")
    assert (3, {"0": (3, 8)}) == (whole.run.samples_per_step, whole.run.shapes)
    assert [384, 576, 192] == [rank.macs for rank in whole.ranks]
    values = {
        "leading_rank": 1,
        "least_macs": 192,
        "most_macs": 576,
        "least_flops": 384,
        "most_flops": 1152,
        "rows_of_others": 0,
    }
    assert [("", values)] == noted(whole, "ranks_differ")


def test_a_step_s_dtype_is_that_of_most_of_all_its_batches() -> None:
    """200 MACs in bfloat16, then 100 in float32."""
    batches = [
        profile(
            {"": {}},
            [replace(product("", "aten::mm", "forward", macs=macs_of, bytes_moved=1), dtype=dtype)],
            run=run(dtype=dtype),
        )
        for dtype, macs_of in (("bfloat16", 200), ("float32", 100))
    ]
    assert "bfloat16" == sum_of_batches(batches).run.dtype


def test_where_some_steps_have_phases_modules_add_up_to_their_share_of_all() -> None:
    """One of 8 steps is marked: half of its 20 ms is forward.

    The mean step has 15.625 ms, so forward 7.8125.
    """
    marked = Step(
        index=0, kind="unprofiled", seconds=20e-3, phases={"forward": 10e-3, "backward": 10e-3}
    )
    others = [
        Step(index=number, kind="unprofiled", seconds=15e-3, phases={}) for number in range(1, 8)
    ]
    timed = clocked(replica(), {("body", "forward"): 3e-3, ("head", "forward"): 1e-3})
    seconds = _fitted(timed.modules, [marked, *others], at_end=False)[""].forward.seconds
    assert seconds is not None
    assert 7.8125e-3 == pytest.approx(seconds.median)


def experts(*macs_of_each: int) -> Profile:
    """A layer whose experts got as much work as the tokens of this rank gave them.

    One without any did not run.
    """
    rows = {"": {}, "router": {}} | {
        f"router.{n}": {"calls": int(n_macs > 0)} for n, n_macs in enumerate(macs_of_each)
    }
    return profile(
        rows,
        [
            product(f"router.{n}", "aten::mm", "forward", macs=n_macs, bytes_moved=1)
            for n, n_macs in enumerate(macs_of_each)
            if n_macs
        ],
    )


def test_modules_that_all_ranks_have_are_counted_as_one_rank_ran_them() -> None:
    """The largest work of each expert, 7 + 8, is what no rank ever did.

    The total is the second rank's 5 + 8, as it was.
    """
    whole = merged(experts(7, 0), experts(5, 8))
    assert experts(5, 8).modules == whole.modules
    assert {"router.0": 5, "router.1": 8} == macs(whole, "forward")
    assert [7, 13] == [rank.macs for rank in whole.ranks]


def test_the_same_total_in_other_modules_is_a_difference() -> None:
    """Both ranks have 8 MACs, each in another expert: the first one's are shown."""
    whole = merged(experts(8, 0), experts(0, 8))
    assert {"router.0": 8} == macs(whole, "forward")
    assert [(8, 8)] == [
        (values["least_macs"], values["most_macs"]) for _, values in noted(whole, "ranks_differ")
    ]


@pytest.mark.parametrize("fields", [{"calls": 2}, {"class_name": "Identity"}])
def test_another_module_of_the_same_name_is_a_difference(fields: dict[str, Any]) -> None:
    """Nor need it have done anything."""
    given = replica()
    other = replace(
        given, modules={**given.modules, "head": replace(given.modules["head"], **fields)}
    )
    assert 1 == len(noted(merged(given, other), "ranks_differ"))


def test_what_a_rank_computes_again_is_not_in_its_macs() -> None:
    """128 forward, 128 backward; 128 in recompute are not the model's."""
    phases: tuple[Phase, ...] = ("forward", "recompute", "backward")
    again = profile(
        {"": {}}, [product("", "aten::mm", phase, macs=128, bytes_moved=1) for phase in phases]
    )
    assert [256] == [rank.macs for rank in merged(again).ranks]


def test_the_same_work_in_another_order_is_no_difference() -> None:
    """Threads may come to an end in any order."""
    ordered = replica()
    assert () == merged(ordered, replace(ordered, op_counts=ordered.op_counts[::-1])).notes


def first_stage() -> Profile:
    """`layers.0 = Linear(4, 8)` on a batch of 2.

    2 * 4 * 8 = 64 MACs forward and, for the weight alone, backward; 40 parameters.
    """
    cells = (
        product("layers.0", "aten::addmm", "forward", macs=64, bytes_moved=8),
        product("layers.0", "aten::mm", "backward", macs=64, bytes_moved=8),
    )
    held = weights(0, 40)
    return profile({"": held, "layers": held, "layers.0": weights(40) | {"peak_bytes": 700}}, cells)


def last_stage() -> Profile:
    """`layers.1 = Linear(8, 3)` in float64: 2 * 8 * 3 = 48 MACs forward, twice that backward; 27 parameters.

    The loss is the root's.
    """
    cells = (
        product("layers.1", "aten::addmm", "forward", macs=48, bytes_moved=16),
        cell("", "aten::mse_loss", "other", flops=18),
        product("layers.1", "aten::mm", "backward", macs=96, bytes_moved=16),
    )
    double = {
        "parameter_bytes": 216,
        "local_parameter_bytes": 216,
        "trainable_parameter_bytes": 216,
    }
    double |= {"dtypes": {"float64": DtypeShare(parameters=27, bytes=216)}}
    return profile(
        {
            "": weights(0, 27) | double,
            "layers": weights(0, 27) | double,
            "layers.1": weights(27) | double,
        },
        cells,
    )


def test_pipeline_stages_become_one_tree() -> None:
    """Every layer as the rank that has it ran it.

    64 + 48 MACs forward, 64 + 96 backward, 160 or 216 bytes of 40 or 27 parameters.

    2 * 128 = 256 FLOPs on the first rank, 2 * 144 + 18 = 306 on the second, which leads; one row is
    not its own.
    """
    whole = merged(first_stage(), last_stage())
    assert ["", "layers", "layers.0", "layers.1"] == list(whole.modules)
    assert {"layers.0": 64, "layers.1": 48} == macs(whole, "forward")
    assert {"layers.0": 64, "layers.1": 96} == macs(whole, "backward")
    assert {"": 18} == flops(whole, "other")
    assert (112, 160) == (whole.total(), whole.total(phase="backward"))
    for row in ("", "layers"):
        held = whole.modules[row]
        assert (67, 67, 67, 376, 376, 376) == (
            held.parameters,
            held.trainable_parameters,
            held.local_parameters,
            held.parameter_bytes,
            held.trainable_parameter_bytes,
            held.local_parameter_bytes,
        )
        assert {
            "float32": DtypeShare(parameters=40, bytes=160),
            "float64": DtypeShare(parameters=27, bytes=216),
        } == held.dtypes
    assert [128, 144] == [rank.macs for rank in whole.ranks]
    values = {
        "leading_rank": 1,
        "least_macs": 128,
        "most_macs": 144,
        "least_flops": 256,
        "most_flops": 306,
        "rows_of_others": 1,
    }
    assert [("", values)] == noted(whole, "ranks_differ")


def test_a_note_says_which_ranks_have_what_others_have_not() -> None:
    """Two stages of two replicas each, on every other rank.

    The second's two layers stand for what is below them.
    """
    first, last = rows_of({"up": 8}), rows_of({"down.0.a": 4, "down.1": 4})
    whole = merged(first, last, replace(first), replace(last))
    assert [
        ("0, 2", {"modules": 1, "first": "up", "last": "up"}),
        ("1, 3", {"modules": 1, "first": "down", "last": "down"}),
    ] == noted(whole, "only_on")
    below = merged(rows_of({"layers.0": 8, "layers.1": 8}), rows_of({"layers.2": 8}))
    assert [
        ("0", {"modules": 2, "first": "layers.0", "last": "layers.1"}),
        ("1", {"modules": 1, "first": "layers.2", "last": "layers.2"}),
    ] == noted(below, "only_on")
    assert [] == noted(merged(first, replace(first)), "only_on")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1, 2, 5, 7, 8), "0-2, 5, 7-8"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, …"),
    ],
)
def test_ranks_are_named_shortly(ranks: Sequence[int], said: str) -> None:
    """Neighbours by their ends, and of many the first."""
    assert said == ranges(ranks)


def test_parameters_of_one_dtype_add_up_over_the_stages() -> None:
    """144 on the first, 34 on the second: 178 float32 with 712 bytes."""
    first, last = (
        profile({"": weights(0, 144), "body": weights(144)}, []),
        profile({"": weights(0, 34), "head": weights(34)}, []),
    )
    assert {"float32": DtypeShare(parameters=178, bytes=712)} == merged(first, last).modules[
        ""
    ].dtypes


def rows_of(self_macs: Mapping[str, int]) -> Profile:
    """Rows by their own MACs forward, with all rows above them."""
    names = sorted({above for row in self_macs for above in ancestry(row)})
    cells = [
        product(row, "aten::mm", "forward", macs=n_macs, bytes_moved=1)
        for row, n_macs in self_macs.items()
    ]
    return profile({name: {} for name in names}, cells)


def test_a_row_below_another_ranks_row_counts_in_both_above() -> None:
    """10 of the first rank, 8 of the second, and what only the third has below the second's row: 5.

    Its other 2 are in the second's.
    """
    whole = merged(rows_of({"a": 10}), rows_of({"b": 8}), rows_of({"b": 2, "b.c": 5}))
    assert {"": 23, "a": 10, "b": 13, "b.c": 5} == whole.by_module()


layouts = st.dictionaries(
    st.sampled_from(["", "a", "a.b", "a.c", "a.b.d", "e", "e.f"]), st.integers(0, 9), min_size=1
)


@given(st.lists(layouts, min_size=1, max_size=4))
def test_whatever_rows_the_ranks_have_the_whole_adds_up(self_macs: list[dict[str, int]]) -> None:
    """All rows are there; each has the own work of a rank that has it.

    Ranks with the same rows give the counts of one of them.
    """
    ranks = [rows_of(each) for each in self_macs]
    whole = merged(*ranks)
    assert {row for rank in ranks for row in rank.modules} == set(whole.modules)
    for row, module in whole.modules.items():
        assert module.forward.self_macs in {
            rank.modules[row].forward.self_macs for rank in ranks if row in rank.modules
        }
    if all(rank.modules.keys() == ranks[0].modules.keys() for rank in ranks):
        assert max(ranks, key=Profile.total).modules == whole.modules


def timed(given: Profile, medians: Mapping[str, float], phase: Phase = "forward") -> Profile:
    """The profile with seconds in some rows."""
    rows = {}
    for row, median in medians.items():
        work = replace(
            given.modules[row].work(phase),
            **dict.fromkeys(("seconds", "self_seconds", "device_seconds"), spread(median)),
        )
        rows[row] = replace(given.modules[row], **{phase: work})
    return replace(given, modules={**given.modules, **rows})


def test_a_module_is_compared_from_rank_to_rank() -> None:
    """3 and 1 and 2 ms forward: the median is 2, the first is slow.

    Of four the faster one in the middle is the median: still 2.

    Where one rank alone knows a time, nothing is compared.
    """
    ranks = [timed(replica(), {"head": median}) for median in (3e-3, 1e-3, 2e-3)]
    each = {0: 3e-3, 1: 1e-3, 2: 2e-3}
    slow = RankStat(
        module="head", phase="forward", low=1e-3, median=2e-3, high=3e-3, high_rank=0, by_rank=each
    )
    assert (slow,) == merged(*ranks, timed(replica(), {"body": 5e-3})).rank_stats
    assert (replace(slow, high=8e-3, high_rank=3, by_rank={**each, 3: 8e-3}),) == merged(
        *ranks, timed(replica(), {"head": 8e-3})
    ).rank_stats


def test_where_ranks_wait_each_rank_s_time_is_kept_last() -> None:
    """In 32 modules ranks differ by 1 s, in one, in which they wait for each other, by 9.

    Its times are the ones that are not kept.
    """
    places = [ModulePhase(str(number), "forward") for number in range(33)]
    times = {
        rank: [dict.fromkeys(places[1:], 1.0 + rank) | {places[0]: 1.0 + 9 * rank}]
        for rank in range(2)
    }
    stats = rank_stats(table_of(times, {places[0]}), [place.fqn for place in places])
    assert [(True, True)] == [
        (stat.waits, stat.by_rank is None) for stat in stats if stat.waits or stat.by_rank is None
    ]


def test_where_ranks_wait_for_each_other_is_marked() -> None:
    """A sum that begins in the body backward is awaited there or at the root."""

    def summed(took: float) -> Profile:
        once = Communication(
            module="body",
            phase="backward",
            collective="all_reduce",
            group="",
            group_size=2,
            calls=0,
            bytes=8,
        )
        rows = dict.fromkeys(("", "body", "head"), took)
        return timed(replica(communication=(once,)), rows, "backward")

    stats = merge([summed(2e-3), summed(3e-3)]).rank_stats
    assert [("", 3e-3, True), ("body", 3e-3, True), ("head", 3e-3, False)] == [
        (each.module, each.high, each.waits) for each in stats
    ]


@pytest.mark.parametrize(
    ("exposed", "expected"),
    [((3e-3, 1e-3), {"": {0: 3e-3, 1: 1e-3}}), ((3e-3, None), {}), ((None, None), {})],
)
def test_exposed_time_is_known_where_it_is_awaited(
    exposed: tuple[float | None, float | None], expected: dict[str, dict[int, float]]
) -> None:
    """A sum that begins in the body is awaited in the root, if the count says so.

    Where one rank does not know it, it is unknown.
    """
    once = Communication(
        module="body",
        phase="backward",
        collective="allreduce_",
        group="",
        group_size=2,
        calls=1,
        bytes=8,
    )
    given = {
        rank: exposed_by_place(
            replica(
                waits=(ModulePhase("", "backward"),),
                communication=(replace(once, exposed_seconds=seconds),),
            )
        )
        for rank, seconds in enumerate(exposed)
    }
    assert {
        ModulePhase(row, "backward"): known for row, known in expected.items()
    } == exposed_on_all_ranks(given)


def test_the_least_time_of_a_collective_is_kept_where_two_ranks_know_it() -> None:
    """7, 5 and 6 ms; of the leading rank 7. Of one rank that traced there is no least."""
    once = Communication(
        module="body",
        phase="backward",
        collective="allreduce_",
        group="",
        group_size=3,
        calls=1,
        bytes=8,
    )
    traced = [
        replica(communication=(replace(once, seconds=seconds),)) for seconds in (7e-3, 5e-3, 6e-3)
    ]
    assert [(7e-3, 5e-3)] == [
        (each.seconds, each.least_seconds) for each in merge(traced).communication
    ]
    untraced = [replica(communication=(once,)) for _ in range(2)]
    assert [(7e-3, None)] == [
        (each.seconds, each.least_seconds) for each in merge([traced[0], *untraced]).communication
    ]


def test_of_profiles_the_quartiles_are_compared() -> None:
    """The second rank's are all 2 ms above the first one's in the head.

    Steady, in steps of which none is known.
    """
    rows = {rank: replica().modules["head"].forward for rank in range(2)}

    def one(rank: int) -> Profile:
        own = TimingStats(
            median=(2 + 2 * rank) * 1e-3,
            low=(1.9 + 2 * rank) * 1e-3,
            high=(2.1 + 2 * rank) * 1e-3,
            n=9,
        )
        given = replica()
        return replace(
            given,
            modules={
                **given.modules,
                "head": replace(
                    given.modules["head"], forward=replace(rows[rank], self_seconds=own)
                ),
            },
        )

    (row,) = lflops.stragglers(merged(one(0), one(1))).rows
    assert ("head", "forward", 1, None, pytest.approx(2e-3)) == (
        row.module,
        row.phase,
        row.slow_rank,
        row.steps,
        row.seconds_lost,
    )


def test_seconds_are_those_of_the_rank_that_the_work_is_of() -> None:
    """The second rank has the larger batch: 4 ms, also where the first took longer for less."""
    whole = merged(timed(replica(1), {"head": 9e-3}), timed(replica(2), {"head": 4e-3}))
    assert spread(4e-3) == whole.modules["head"].forward.seconds


def test_stages_that_no_clock_saw_together_have_no_time_together() -> None:
    """Each layer keeps its own seconds; above them those of two ranks would be added.

    What no stage adds to keeps its time.
    """
    first = timed(first_stage(), {"": 2e-3, "layers": 2e-3, "layers.0": 2e-3})
    last = timed(
        timed(last_stage(), {"": 3e-3, "layers": 3e-3, "layers.1": 3e-3}), {"": 1e-3}, "other"
    )
    whole = merged(first, last)
    assert {"": None, "layers": None, "layers.0": spread(2e-3), "layers.1": spread(3e-3)} == {
        row: module.forward.seconds for row, module in whole.modules.items()
    }
    assert (None, spread(3e-3)) == (
        whole.modules[""].forward.device_seconds,
        whole.modules["layers.1"].forward.device_seconds,
    )
    assert (spread(3e-3), spread(1e-3)) == (
        whole.modules[""].forward.self_seconds,
        whole.modules[""].other.seconds,
    )
    assert [("", 0.002, 0.003, 1), ("layers", 0.002, 0.003, 1)] == [
        (each.module, each.low, each.high, each.high_rank) for each in whole.rank_stats
    ]


@pytest.mark.parametrize(
    ("known", "expected"), [((64, 48), 112), ((64, None), None), ((None, 48), None)]
)
def test_logical_work_is_known_where_every_stage_knows_its_own(
    known: tuple[int | None, int | None], expected: int | None
) -> None:
    """64 + 48 MACs, or nobody knows."""

    def told(given: Profile, logical: int | None) -> Profile:
        rows = {
            row: replace(module, forward=replace(module.forward, logical_macs=logical))
            for row, module in given.modules.items()
        }
        return replace(given, modules=rows)

    assert (
        expected
        == merged(told(first_stage(), known[0]), told(last_stage(), known[1]))
        .modules[""]
        .forward.logical_macs
    )


def step(index: int, seconds: float | None, **fields: Any) -> Step:
    """A clean step, unless said otherwise."""
    return Step(
        **({"index": index, "kind": "unprofiled", "seconds": seconds, "phases": {}} | fields)
    )


def stepped(*steps: Step) -> Profile:
    """A rank with these steps."""
    return replica(steps=steps)


def test_without_collectives_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    """Step 0 is the second rank's 5 s with its phases and CPU time, step 1 the first rank's 7 s.

    The active step is one of its own.
    """
    slow = step(0, 5.0, phases={"data": 1.0, "forward": 4.0}, cpu_user=3.0)
    first = stepped(
        step(0, 2.0, phases={"data": 0.5, "forward": 1.5}),
        step(1, 7.0),
        step(1, 6.0, kind="module_timing"),
    )
    second = stepped(slow, step(1, 3.0), step(1, 8.0, kind="module_timing"))
    assert (slow, step(1, 7.0), step(1, 8.0, kind="module_timing")) == merged(first, second).steps


def test_the_modules_times_add_up_to_the_run_s_steps() -> None:
    """Each rank comes last in one of two steps.

    Forward 2.5 and 1.2 s, backward 1.5 and 1.0 s, so 1.85 and 1.25 in the mean.

    The first rank's modules took 1.1 and 2.0 s, of which 1.05 in the model itself, mostly waiting:
    that is what is too much.
    """
    steps = (
        [({"forward": 1.0, "backward": 3.0}, 2.0), ({"forward": 1.2, "backward": 1.0}, 0.1)],
        [({"forward": 2.5, "backward": 1.5}, 0.5), ({"forward": 0.5, "backward": 1.7}, 0.8)],
    )
    own: dict[tuple[str, Phase], float] = {
        ("", "forward"): 0.1,
        ("body", "forward"): 0.4,
        ("head", "forward"): 0.6,
    }
    own |= {("", "backward"): 1.05, ("head", "backward"): 0.95}
    ranks = [
        clocked(
            replica(
                run=run(kind="training", world_size=2),
                waits=(ModulePhase("", "backward"),),
                steps=[
                    step(n, sum(phases.values()), phases=phases, waiting=waited)
                    for n, (phases, waited) in enumerate(of_rank)
                ],
            ),
            own,
        )
        for of_rank in steps
    ]
    whole = merge(ranks)
    assert [(2.5, 1.5), (1.2, 1.0)] == [
        (each.phases["forward"], each.phases["backward"]) for each in whole.steps
    ]
    times = {(row, phase): whole.modules[row].work(phase).self_seconds for row, phase in own}
    expected = {key: seconds * 1.85 / 1.1 for key, seconds in own.items() if key[1] == "forward"}
    expected |= {("", "backward"): 0.3, ("head", "backward"): 0.95}
    assert pytest.approx(expected) == {
        key: None if each is None else each.median for key, each in times.items()
    }
    root = whole.modules[""]
    assert root.forward.seconds is not None
    assert root.backward.seconds is not None
    assert pytest.approx((1.85, 1.25)) == (
        root.forward.seconds.median,
        root.backward.seconds.median,
    )


def test_a_step_that_one_rank_does_not_know_or_have_is_that_of_the_others() -> None:
    """A time that is unknown is not the longest; the first rank has gone on for a step."""
    whole = merged(
        stepped(step(0, None), step(1, 2.0), step(2, 9.0)), stepped(step(0, 4.0), step(1, 3.0))
    )
    assert [4.0, 3.0, 9.0] == [each.seconds for each in whole.steps]


def test_what_disturbed_one_rank_has_disturbed_the_step() -> None:
    """The slowest rank waited for another one to compile."""
    whole = merged(
        stepped(step(0, 5.0, marks=("no_update",))),
        stepped(step(0, 4.0, marks=("recompiled", "no_update"))),
    )
    assert (step(0, 5.0, marks=("no_update", "recompiled")),) == whole.steps


def test_each_rank_has_the_spread_of_its_clean_steps() -> None:
    """Of 1, 2, 3 s the quartiles are 1.5 and 2.5.

    Data took 0.2 s in one of them; of CPU time both parts have to be known, 0.5 + 0.25 s.

    Neither the active step nor the one that compiled is among them.
    """
    told = stepped(
        step(0, 60.0, marks=("recompiled",)),
        step(1, 1.0, cpu_user=0.5, cpu_system=0.25),
        step(2, 3.0, phases={"data": 0.2}),
        step(3, 2.0, cpu_user=4.0),
        step(4, 40.0, kind="module_timing"),
    )
    first, second = merged(told, stepped()).ranks
    assert TimingStats(median=2.0, low=1.5, high=2.5, n=3) == first.step
    assert TimingStats(median=0.2, low=0.2, high=0.2, n=1) == first.data
    assert TimingStats(median=0.75, low=0.75, high=0.75, n=1) == first.cpu
    assert (None, None, None) == (second.step, second.data, second.cpu)


def test_a_rank_has_the_pace_that_its_own_profile_has() -> None:
    """Which steps are no measure of the others is told in two places, which have to agree."""
    for mark in ("warmup", "recompiled", "new_shapes", "validation", "checkpoint", "no_update"):
        alone = stepped(step(0, 2.0), step(1, 8.0, marks=(mark,)))
        assert step_times.step_times(alone).seconds == merged(alone).ranks[0].step


def test_the_largest_peak_is_the_runs() -> None:
    """3000 bytes on the first rank, which has less work.

    5000 in the head of the second; the body's is nowhere known.
    """

    def held(batch: int, peak: int, head: int | None) -> Profile:
        given = replica(
            batch,
            memory=replace(small_memory(), peak_bytes=peak, by_module={}, alive=(), timeline=()),
        )
        return replace(
            given,
            modules={**given.modules, "head": replace(given.modules["head"], peak_bytes=head)},
        )

    whole = merged(held(1, 3000, 500), held(2, 2000, 900), held(1, 100, None))
    assert 3000 == (whole.memory and whole.memory.peak_bytes)
    assert (900, None) == (whole.modules["head"].peak_bytes, whole.modules["body"].peak_bytes)
    assert [3000, 2000, 100] == [rank.peak_bytes for rank in whole.ranks]


def test_without_a_memory_a_rank_has_its_roots_peak() -> None:
    """40 bytes."""
    given = replica()
    given = replace(given, modules={**given.modules, "": replace(given.modules[""], peak_bytes=40)})
    assert (None, 40) == (merged(given).memory, merged(given).ranks[0].peak_bytes)


def scan(module: str, calls: int, phase: Phase = "forward") -> UnsupportedCall:
    """An operator without a formula."""
    return UnsupportedCall(
        module=module, operator="my_ops::scan", phase=phase, calls=calls, bytes=64
    )


def test_the_ledger_is_that_of_all_ranks() -> None:
    """In the head all ranks ran it, the second, which leads, 3 times.

    In the body the first alone did, and backward too.
    """
    first = replica(1, unsupported=(scan("head", 2), scan("body", 5), scan("head", 1, "backward")))
    second = replica(2, unsupported=(scan("head", 3),))
    third = replica(1, unsupported=(scan("head", 4),))
    assert {scan("head", 3), scan("body", 5), scan("head", 1, "backward")} == set(
        merged(first, second, third).unsupported
    )


def test_a_ledger_that_differs_is_a_difference() -> None:
    """The same calls are none, another number of calls is one."""
    first = replica(unsupported=(scan("head", 2),))
    assert () == merged(first, replica(unsupported=(scan("head", 2),))).notes
    assert 1 == len(noted(merged(first, replica(unsupported=(scan("head", 3),))), "ranks_differ"))


def test_collectives_are_those_of_the_rank_that_the_row_is_of() -> None:
    """The second rank's 8 bytes, not 8 + 8.

    Each rank has a name of its own for its group, which is no difference.
    """

    def reduced(group: str) -> Profile:
        sum_up = Communication(
            module="",
            phase="backward",
            collective="all_reduce",
            group=group,
            group_size=2,
            calls=0,
            bytes=8,
        )
        return replica(communication=(sum_up,))

    whole = merged(reduced("1"), reduced("2"))
    assert [("1", 8)] == [(each.group, each.bytes) for each in whole.communication]
    assert (8, ()) == (whole.modules[""].backward.comm_bytes, whole.notes)


def test_ranks_without_a_profile_are_missing() -> None:
    """Ranks 1 and 3 of a run of 5, whose profiles come in any order."""
    whole = in_file_and_memory(
        merge({4: replica(2), 0: replica(1, run=run(world_size=5)), 2: replica(1)})
    )
    assert ["ok", "missing", "ok", "missing", "ok"] == [rank.status for rank in whole.ranks]
    assert [(0, 192), (1, None), (2, 192), (3, None), (4, 384)] == [
        (rank.rank, rank.macs) for rank in whole.ranks
    ]
    assert (
        Rank(rank=1, node=None, host=None, device=None, coordinates={}, status="missing")
        == whole.ranks[1]
    )
    assert (5, True) == (whole.run.world_size, whole.run.partial)
    assert [("1, 3", {"missing": 2, "world_size": 5})] == noted(whole, "ranks_missing")


def test_the_run_may_know_of_more_ranks_than_were_given() -> None:
    """One of 16 has a profile: of the 15 others 12 are named in the note, all of them in the ranks."""
    whole = merged(replica(run=run(world_size=16)))
    assert (16, 15) == (len(whole.ranks), sum(rank.status == "missing" for rank in whole.ranks))
    assert [("1-15", {"missing": 15, "world_size": 16})] == noted(whole, "ranks_missing")


def test_a_rank_that_was_left_by_an_exception_has_failed() -> None:
    """What it had counted until then, 3 times 192 MACs, is not what a rank does.

    The whole one leads.
    """
    whole = merged(replica(3, run=run(partial=True)), replica())
    assert ["failed", "ok"] == [rank.status for rank in whole.ranks]
    assert (True, 160) == (whole.run.partial, whole.total())


def test_a_rank_is_said_by_its_host_and_device() -> None:
    """Two hosts."""
    whole = merged(
        replica(run=run(host="a", device_name="H200")),
        replica(run=run(host="b", device_name="H100")),
    )
    assert [("a", "H200"), ("b", "H100")] == [(rank.host, rank.device) for rank in whole.ranks]


@pytest.mark.parametrize(("second", "common"), [(GPU, GPU), (OTHER_GPU, None), (None, None)])
def test_chips_of_several_kinds_have_no_common_peak(
    second: Hardware | None, common: Hardware | None
) -> None:
    """What the peak is of is then unknown."""
    assert (
        common
        == merged(replica(run=run(hardware=GPU)), replica(run=run(hardware=second))).run.hardware
    )


def test_a_note_is_taken_once() -> None:
    """The time of each rank was scaled by another factor: that of the rank whose times are shown.

    The last alone ran eager.
    """

    def scaled(factor: float) -> Note:
        return Note(code="time_scaled", subject="", values={"forward": factor})

    eager = Note(code="compiled_ran_eager", subject="2", values={})
    ranks = (
        replica(notes=(scaled(0.8),)),
        replica(notes=(scaled(0.9),)),
        replica(notes=(eager, scaled(0.7))),
    )
    assert (scaled(0.8), eager) == merged(*ranks).notes


def test_the_traces_of_all_ranks_are_there() -> None:
    """What was seen in them is the first one's."""
    first, second = (
        Trace(files={"0": "a.json"}, device_idle_seconds=1e-3),
        Trace(files={"2": "c.json"}, device_idle_seconds=9e-3),
    )
    whole = merged(replica(trace=first), replica(), replica(trace=second))
    assert Trace(files={"0": "a.json", "2": "c.json"}, device_idle_seconds=1e-3) == whole.trace


def test_the_parallel_sizes_are_those_that_the_ranks_tell() -> None:
    """Nobody makes them up."""
    told = merged(replica(run=run(data_parallel_size=2)), replica(run=run(data_parallel_size=2)))
    assert (2, None) == (
        told.run.data_parallel_size,
        merged(replica(), replica()).run.data_parallel_size,
    )


def test_a_profile_of_a_later_version_becomes_one_of_this() -> None:
    """Its further fields were left out when it was read."""
    assert "2.0" == merged(replace(replica(), schema_version="2.7"), replica()).schema_version


def the_same_twice() -> list[Profile]:
    """One object."""
    return [replica()] * 2


def whatever(n: int = 2, **facts: Any) -> list[Profile]:
    """So many ranks, the last of which has these facts."""
    return [*(replica() for _ in range(n - 1)), replica(run=run(**facts))]


REFUSED: list[tuple[Any, str]] = [
    ([], "profiles is empty: pass the profile of at least one rank"),
    ({}, "profiles is empty: pass the profile of at least one rank"),
    (replica(), "profiles is a Profile: pass the profiles of all ranks, as a list or by rank"),
    (3, "profiles is a int: pass the profiles of all ranks, as a list or by rank"),
    ([replica(), "rank1.json"], "rank 1 is a str: pass a Profile, for example from lflops.load"),
    ({0: replica(), 3: None}, "rank 3 is a NoneType: pass a Profile, for example from lflops.load"),
    (
        {"0": replica()},
        "'0' is not a rank: as keys of profiles, pass whole numbers from 0 to 1048575",
    ),
    (
        {True: replica()},
        "True is not a rank: as keys of profiles, pass whole numbers from 0 to 1048575",
    ),
    (
        {-1: replica()},
        "-1 is not a rank: as keys of profiles, pass whole numbers from 0 to 1048575",
    ),
    (
        {1 << 20: replica()},
        "1048576 is not a rank: as keys of profiles, pass whole numbers from 0 to 1048575",
    ),
    (the_same_twice(), "ranks 0 and 1 are the same profile: pass the profile of each rank"),
    (
        [replica(), small_profile()],
        "rank 1 is already merged from 2 ranks: pass the profile of each rank",
    ),
    (
        [merge([replica()])],
        "rank 0 is already merged from 1 ranks: pass the profile of each rank",
    ),
    (
        whatever(3, kind="measure"),
        "run.kind is 'measure' on rank 2, but 'count' on rank 0: pass the ranks of one run",
    ),
    (
        whatever(versions={"torch": "2.11.0"}),
        "run.versions['torch'] is '2.11.0' on rank 1, but '2.13.0' on rank 0: pass the ranks of one run",
    ),
    (
        [replica(run=run(window=n)) for n in (0, 1)],
        "run.window is 1 on rank 1, but 0 on rank 0: pass the ranks of one run",
    ),
    (
        [replica(run=run(stage=stage)) for stage in ("train", "test")],
        "run.stage is 'test' on rank 1, but 'train' on rank 0: pass the ranks of one run",
    ),
    (
        [replica(), *(replica(run=run(tensor_parallel_size=n)) for n in (2, 4))],
        "run.tensor_parallel_size is 4 on rank 2, but 2 on rank 1: pass the ranks of one run",
    ),
    (
        [replica(), *(replica(run=run(world_size=n)) for n in (8, 4))],
        "run.world_size is 4 on rank 2, but 8 on rank 1: pass the ranks of one run",
    ),
    (
        whatever(3, world_size=2),
        "run.world_size is 2 on rank 2, but must be at least 3 for these ranks, and at most 1048576",
    ),
    (
        whatever(2, world_size=1 << 60),
        (
            f"run.world_size is {1 << 60} on rank 1, but must be at least 2 for these ranks, "
            "and at most 1048576"
        ),
    ),
]


@pytest.mark.parametrize(("given_profiles", "problem"), REFUSED)
def test_what_is_not_the_ranks_of_one_run_is_refused(given_profiles: Any, problem: str) -> None:
    """The message names the rank, what it has, and what to give."""
    with pytest.raises(ProfileError) as caught:
        merge(given_profiles)
    assert f"merge: {problem}" == str(caught.value)


@pytest.mark.parametrize(
    "given_profiles",
    [
        whatever(
            stage="train",
            window=0,
            strategy="ddp",
            accumulation=2,
            data_parallel_size=2,
            world_size=2,
        ),
        whatever(
            host="b",
            device_name="another",
            dtype="bfloat16",
            created="2026-01-02T03:04:09Z",
            precision="autocast bfloat16",
        ),
        whatever(versions={"python": "3.11.9"}),
        (replica() for _ in range(2)),
        {1: replica(), 0: replica()},
        {1: replica(), 0: replica()}.values(),
    ],
)
def test_ranks_may_know_more_than_each_other_and_come_in_any_way(
    given_profiles: Iterable[Profile],
) -> None:
    """What one rank does not know contradicts nobody; lists, generators and mappings are taken."""
    assert [0, 1] == [rank.rank for rank in merge(given_profiles).ranks]


def test_it_makes_no_difference_in_which_order_a_mapping_is() -> None:
    """Of ranks with equal work the lowest leads, wherever it stands."""
    first, second = (replica(run=run(host=host)) for host in ("a", "b"))
    assert merged(first, second) == merge({1: second, 0: first})
    assert "a" == merge({1: second, 0: first}).run.host


def test_what_was_given_is_left_as_it_was() -> None:
    """A dictionary, the profiles in it, and their order."""
    ranks = {1: first_stage(), 0: last_stage()}
    merge(ranks)
    assert [(1, first_stage()), (0, last_stage())] == list(ranks.items())


@pytest.fixture
def two_ranks(tmp_path: Path) -> Any:
    """Two processes in one group."""
    with Ranks(2, tmp_path) as ranks:
        yield ranks


def saved(folder: Path, count: Any) -> Profile:
    """A rank's profile, after it was written to a file with the rank's number in its name."""
    profile: Profile = count()
    profile.save(folder / f"rank{distributed.get_rank()}.profile.json")
    return profile


def from_files(folder: Path) -> Profile:
    """What the script that comes after the run does."""
    return merge({rank: lflops.load(folder / f"rank{rank}.profile.json") for rank in range(2)})


def replicated() -> Profile:
    """One pass under DDP, in which the second rank has two sequences and the first one."""
    model = DistributedDataParallel(between_linears(Block()))
    return lflops.count(
        model, torch.randn(1 + distributed.get_rank(), length, hidden), backward=True
    )


class Stage(nn.Module):
    """One of two."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        if first:
            self.up = nn.Linear(hidden, wide)
        else:
            self.down = nn.Linear(wide, hidden)


def staged() -> Profile:
    """A step of a pipeline by hand: activations go to the second rank, their gradient comes back."""
    first = distributed.get_rank() == 0
    stage = Stage(first=first)
    with lflops.counting(stage) as counted:
        between = torch.empty(*sequence().shape[:-1], wide)
        if first:
            sent = stage.up(sequence())
            distributed.send(sent.detach(), 1)
            distributed.recv(between, 1)
            sent.backward(between)
        else:
            distributed.recv(between, 0)
            between.requires_grad_()
            stage.down(torch.relu(between)).sum().backward()
            distributed.send(between.grad, 0)
    return counted.profile


def test_two_processes_of_a_replicated_model(two_ranks: Ranks, tmp_path: Path) -> None:
    """Each counts its own batch.

    Of the whole, the larger: forward each product once, backward all but the first one's input.
    """
    two_ranks.run(partial(saved, tmp_path, replicated))
    whole = in_file_and_memory(from_files(tmp_path))
    assert {
        "module.0": square,
        "module.1.up": up,
        "module.1.down": down,
        "module.2": square,
    } == macs(whole, "forward")
    assert {
        "module.0": square,
        "module.1.up": 2 * up,
        "module.1.down": 2 * down,
        "module.2": 2 * square,
    } == macs(whole, "backward")
    larger = 5 * square + 3 * up + 3 * down
    assert [(larger // 2, "ok"), (larger, "ok")] == [
        (rank.macs, rank.status) for rank in whole.ranks
    ]
    assert (2, 2) == (whole.run.samples_per_step, whole.run.world_size)
    assert [1] == [values["leading_rank"] for _, values in noted(whole, "ranks_differ")]


def test_two_processes_of_a_pipeline(two_ranks: Ranks, tmp_path: Path) -> None:
    """Each has its own layer; of the first one the input needs no gradient."""
    two_ranks.run(partial(saved, tmp_path, staged))
    whole = in_file_and_memory(from_files(tmp_path))
    assert {"up": up, "down": down} == macs(whole, "forward")
    assert {"up": up, "down": 2 * down} == macs(whole, "backward")
    assert (hidden * wide + wide + wide * hidden + hidden) == whole.modules[""].parameters
    assert [2 * up, 3 * down] == [rank.macs for rank in whole.ranks]


def measured() -> Profile:
    """Two clean passes and two hooked ones under DDP."""
    model = DistributedDataParallel(between_linears(Block()))
    return lflops.measure(model, sequence(), backward=True, warmup=1, repeats=2, hardware=None)


def test_two_processes_that_measure(two_ranks: Ranks, tmp_path: Path) -> None:
    """Each of the four passes is that of the rank that waits less in backward.

    Each module that ran is compared, in both phases.
    """
    ranks = two_ranks.run(partial(saved, tmp_path, measured))
    whole = in_file_and_memory(from_files(tmp_path))
    in_pairs = list(zip(*(rank.steps for rank in ranks), strict=True))
    late = [min(pair, key=lambda step: step.phases.get("backward", 0.0)) for pair in in_pairs]
    assert [step.phases for step in late] == [step.phases for step in whole.steps]
    assert ["unprofiled", "module_timing", "module_timing", "unprofiled"] == [
        step.kind for step in whole.steps
    ]
    assert [2, 2] == [rank.step.n for rank in whole.ranks if rank.step]
    assert {"module.0", "module.1.up", "module.1.down", "module.2"} <= {
        each.module for each in whole.rank_stats if each.phase == "backward"
    }
    assert (("", "backward"),) == whole.waits
    assert ([], "measure") == (noted(whole, "ranks_differ"), whole.run.kind)


def test_the_first_ranks_keep_their_steps_in_time() -> None:
    """Of ten ranks eight, each under its own number."""
    step = small_timeline()[:1]
    found = merged(*(replica(timelines=step) for _ in range(10))).timelines
    assert [*range(8)] == [each.rank for each in found]
    assert {step[0].slices} == {each.slices for each in found}
