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
    """Return a rank's profile of a frozen `body = Linear(8, 16)` and a `head = Linear(16, 2)`.

    For each sample, forward has 8 * 16 = 128 and 16 * 2 = 32 MACs. Backward computes only the
    gradient of the head's weight, with 32 MACs.
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
    """Check that a file of the profile is read as the same profile, and return the profile."""
    assert given == _checked(msgspec.json.encode(given))
    return given


def merged(*given: Profile) -> Profile:
    """Merge the profiles, and check that the result is consistent and can be saved in a file."""
    return in_file_and_memory(consistent(merge(given)))


def noted(profile: Profile, code: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the subjects and values of all notes with this code."""
    return [(note.subject, note.values) for note in profile.notes if note.code == code]


def test_ranks_that_agree_have_one_ranks_counts() -> None:
    """If all ranks did the same work, the counts are those of one rank, and there is no note.

    Four ranks have 160 MACs forward each, and so has the merged profile.
    """
    whole = merged(*(replica() for _ in range(4)))
    assert (replica().modules, replica().op_counts) == (whole.modules, whole.op_counts)
    assert 160 == whole.total()
    assert (4, False) == (whole.run.world_size, whole.run.partial)
    assert () == whole.notes
    assert [(0, 192), (1, 192), (2, 192), (3, 192)] == [
        (rank.rank, rank.macs) for rank in whole.ranks
    ]


def test_one_rank_is_a_run_of_one() -> None:
    """The merged profile of one rank has its counts and steps, and compares no ranks."""
    steps = (Step(index=0, kind="unprofiled", seconds=2.0, phases={}),)
    alone = replica(steps=steps)
    whole = merged(alone)
    assert (alone.modules, alone.op_counts) == (whole.modules, whole.op_counts)
    assert (alone.steps, alone.run) == (whole.steps, whole.run)
    assert ((), ()) == (whole.rank_stats, whole.notes)
    assert [(0, "ok", 192, None)] == [
        (rank.rank, rank.status, rank.macs, rank.slowest) for rank in whole.ranks
    ]


def test_uneven_batches_are_shown_by_the_rank_with_the_most_work() -> None:
    """If the batches differ, the merged profile shows the rank with the most work.

    The batches have 2, 3 and 1 samples. The second rank has 3 * 160 = 480 MACs forward. With
    backward, the ranks have 384, 576 and 192 MACs. A MAC has two FLOPs, so the last rank has 384
    FLOPs and the second 1152.
    """
    ranks = []
    for batch in (2, 3, 1):
        of_rank = run(samples_per_step=batch, shapes={"0": (batch, 8)})
        ranks.append(replica(batch, run=of_rank))
    whole = merged(*ranks)
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
    """The dtype of a step is the dtype of most MACs over all batches.

    The first batch has 200 MACs in bfloat16, and the second has 100 in float32.
    """
    batches = []
    for dtype, macs_of in (("bfloat16", 200), ("float32", 100)):
        matmul = product("", "aten::mm", "forward", macs=macs_of, bytes_moved=1)
        cells = [replace(matmul, dtype=dtype)]
        batches.append(profile({"": {}}, cells, run=run(dtype=dtype)))
    assert "bfloat16" == sum_of_batches(batches).run.dtype


def test_where_some_steps_have_phases_modules_add_up_to_their_share_of_all() -> None:
    """If only some steps have phases, their shares are applied to the mean of all steps.

    One of eight steps has phases: half of its 20 ms is forward. The mean step takes 15.625 ms, so
    forward takes 7.8125 ms, and the modules add up to this time.
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
    """Return a profile of a layer with experts, which have these MACs on this rank.

    An expert without MACs received no tokens and did not run.
    """
    rows: dict[str, dict[str, int]] = {"": {}, "router": {}}
    cells = []
    for number, macs_of_expert in enumerate(macs_of_each):
        name = f"router.{number}"
        rows[name] = {"calls": 0}
        if macs_of_expert:
            rows[name] = {"calls": 1}
            matmul = product(name, "aten::mm", "forward", macs=macs_of_expert, bytes_moved=1)
            cells.append(matmul)
    return profile(rows, cells)


def test_modules_that_all_ranks_have_are_counted_as_one_rank_ran_them() -> None:
    """If all ranks have the same modules, the work of one rank is shown, with a correct total.

    The second rank has 5 + 8 MACs. The largest work of each expert, 7 + 8, is the total of no rank.
    """
    whole = merged(experts(7, 0), experts(5, 8))
    assert experts(5, 8).modules == whole.modules
    assert {"router.0": 5, "router.1": 8} == macs(whole, "forward")
    assert [7, 13] == [rank.macs for rank in whole.ranks]


def test_the_same_total_in_other_modules_is_a_difference() -> None:
    """If two ranks have the same total in different modules, a note says that the ranks differ.

    Both ranks have 8 MACs, but in different experts. The work of the first rank is shown.
    """
    whole = merged(experts(8, 0), experts(0, 8))
    assert {"router.0": 8} == macs(whole, "forward")
    assert [(8, 8)] == [
        (values["least_macs"], values["most_macs"]) for _, values in noted(whole, "ranks_differ")
    ]


@pytest.mark.parametrize("fields", [{"calls": 2}, {"class_name": "Identity"}])
def test_another_module_of_the_same_name_is_a_difference(fields: dict[str, Any]) -> None:
    """If a module with the same name has other calls or another class, a note says so.

    The work of the module may be the same.
    """
    given = replica()
    other = replace(
        given, modules={**given.modules, "head": replace(given.modules["head"], **fields)}
    )
    assert 1 == len(noted(merged(given, other), "ranks_differ"))


def test_what_a_rank_computes_again_is_not_in_its_macs() -> None:
    """The MACs of a rank include forward and backward, 128 each, but not recomputation."""
    phases: tuple[Phase, ...] = ("forward", "recompute", "backward")
    again = profile(
        {"": {}}, [product("", "aten::mm", phase, macs=128, bytes_moved=1) for phase in phases]
    )
    assert [256] == [rank.macs for rank in merged(again).ranks]


def test_the_same_work_in_another_order_is_no_difference() -> None:
    """The order of the op counts is no difference, because threads may end in any order."""
    ordered = replica()
    assert () == merged(ordered, replace(ordered, op_counts=ordered.op_counts[::-1])).notes


def first_stage() -> Profile:
    """Return a profile of `layers.0 = Linear(4, 8)` with 2 samples and 40 parameters.

    It has 2 * 4 * 8 = 64 MACs forward, and as many backward, which computes only the gradient of
    the weight.
    """
    cells = (
        product("layers.0", "aten::addmm", "forward", macs=64, bytes_moved=8),
        product("layers.0", "aten::mm", "backward", macs=64, bytes_moved=8),
    )
    held = weights(0, 40)
    return profile({"": held, "layers": held, "layers.0": weights(40) | {"peak_bytes": 700}}, cells)


def last_stage() -> Profile:
    """Return a profile of `layers.1 = Linear(8, 3)` in float64, with 27 parameters.

    It has 2 * 8 * 3 = 48 MACs forward and twice as many backward. The loss belongs to the root.
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
        "dtypes": {"float64": DtypeShare(parameters=27, bytes=216)},
    }
    return profile(
        {
            "": weights(0, 27) | double,
            "layers": weights(0, 27) | double,
            "layers.1": weights(27) | double,
        },
        cells,
    )


def test_pipeline_stages_become_one_tree() -> None:
    """The stages of a pipeline become one module tree, with each layer from the rank that has it.

    The tree has 64 + 48 MACs forward and 64 + 96 MACs backward. Its parameters are 40 with 160
    bytes and 27 with 216 bytes.

    The first rank has 2 * 128 = 256 FLOPs. The second has 2 * 144 + 18 = 306 FLOPs, so it is the
    leading rank. One module of the tree is not from it.
    """
    whole = merged(first_stage(), last_stage())
    assert ["", "layers", "layers.0", "layers.1"] == list(whole.modules)
    assert {"layers.0": 64, "layers.1": 48} == macs(whole, "forward")
    assert {"layers.0": 64, "layers.1": 96} == macs(whole, "backward")
    assert {"": 18} == flops(whole, "other")
    assert (112, 160) == (whole.total(), whole.total(phase="backward"))
    for row in ("", "layers"):
        held = whole.modules[row]
        assert 67 == held.parameters == held.trainable_parameters == held.local_parameters
        assert 376 == held.parameter_bytes
        assert 376 == held.trainable_parameter_bytes == held.local_parameter_bytes
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
    """A note says which modules exist only on some ranks.

    There are two stages with two replicas each. If all modules below a module are only on these
    ranks, the note names this module.
    """
    first = rows_of({"up": 8})
    last = rows_of({"down.0.a": 4, "down.1": 4})
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
    """Consecutive ranks are written as a range, and a long list is cut."""
    assert said == ranges(ranks)


def test_parameters_of_one_dtype_add_up_over_the_stages() -> None:
    """Parameters of the same dtype are added up: 144 + 34 in float32, with 712 bytes."""
    first = profile({"": weights(0, 144), "body": weights(144)}, [])
    last = profile({"": weights(0, 34), "head": weights(34)}, [])
    root = merged(first, last).modules[""]
    assert {"float32": DtypeShare(parameters=178, bytes=712)} == root.dtypes


def rows_of(self_macs: Mapping[str, int]) -> Profile:
    """Return a profile with these self MACs in forward, including all modules above the given ones.

    The other modules have no self MACs.
    """
    names = set[str]()
    cells = []
    for row, n_macs in self_macs.items():
        names.update(ancestry(row))
        cells.append(product(row, "aten::mm", "forward", macs=n_macs, bytes_moved=1))
    return profile({name: {} for name in sorted(names)}, cells)


def test_a_row_below_another_ranks_row_counts_in_both_above() -> None:
    """A module that only one rank has is included in the modules above it.

    `a` has 10 MACs on the first rank, and `b` has 8 on the second. Only the third rank has `b.c`,
    with 5 MACs. Its 2 MACs in `b` are not added, because `b` is from the second rank.
    """
    whole = merged(rows_of({"a": 10}), rows_of({"b": 8}), rows_of({"b": 2, "b.c": 5}))
    assert {"": 23, "a": 10, "b": 13, "b.c": 5} == whole.by_module()


layouts = st.dictionaries(
    st.sampled_from(["", "a", "a.b", "a.c", "a.b.d", "e", "e.f"]), st.integers(0, 9), min_size=1
)


@given(st.lists(layouts, min_size=1, max_size=4))
def test_whatever_rows_the_ranks_have_the_whole_adds_up(self_macs: list[dict[str, int]]) -> None:
    """The merged profile has the modules of all ranks, each with the self work of one of its ranks.

    If all ranks have the same modules, all counts are from one rank.
    """
    ranks = [rows_of(each) for each in self_macs]
    whole = merged(*ranks)
    all_rows = set[str]()
    for rank in ranks:
        all_rows.update(rank.modules)
    assert all_rows == set(whole.modules)
    for row, module in whole.modules.items():
        with_row = [rank.modules[row] for rank in ranks if row in rank.modules]
        assert module.forward.self_macs in {each.forward.self_macs for each in with_row}
    if all(rank.modules.keys() == ranks[0].modules.keys() for rank in ranks):
        assert max(ranks, key=Profile.total).modules == whole.modules


def timed(given: Profile, medians: Mapping[str, float], phase: Phase = "forward") -> Profile:
    """Return the profile with these seconds in some modules."""
    rows = {}
    for row, median in medians.items():
        seconds = spread(median)
        work = replace(
            given.modules[row].work(phase),
            seconds=seconds,
            self_seconds=seconds,
            device_seconds=seconds,
        )
        rows[row] = replace(given.modules[row], **{phase: work})
    return replace(given, modules={**given.modules, **rows})


def test_a_module_is_compared_from_rank_to_rank() -> None:
    """The times of a module are compared over all ranks.

    The head takes 3, 1 and 2 ms, so the median is 2 ms, and the first rank is the slowest. Of four
    ranks, the median is the lower of the two middle times, which is 2 ms again. A module whose time
    only one rank knows is not compared.
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
    """The times of all ranks are kept first for modules in which ranks do not wait for each other.

    In 32 modules, the ranks differ by 1 s. In one module, in which they wait for each other, they
    differ by 9 s, and only the times of this module are not kept.
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
    """Places in which ranks wait for each other are marked.

    The wait for an all-reduce that begins in backward of the body is in the body or in the root.
    """

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
    """The exposed time of a collective belongs to the place in which the ranks wait for it.

    According to `waits`, ranks wait in the root for an all-reduce that begins in the body. If one
    rank does not know the exposed time, it is unknown.
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
    waits = (ModulePhase("", "backward"),)
    given = {}
    for rank, seconds in enumerate(exposed):
        of_rank = (replace(once, exposed_seconds=seconds),)
        given[rank] = exposed_by_place(replica(waits=waits, communication=of_rank))
    by_place = {ModulePhase(row, "backward"): known for row, known in expected.items()}
    assert by_place == exposed_on_all_ranks(given)


def test_the_least_time_of_a_collective_is_kept_where_two_ranks_know_it() -> None:
    """The least time of a collective is known if at least two ranks have traced it.

    Three ranks took 7, 5 and 6 ms, and the leading rank took 7 ms. With one traced rank, the least
    time is unknown.
    """
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
    """Ranks in merged profiles are compared by their quartiles, because single steps are unknown.

    All quartiles of the second rank in the head are 2 ms higher than those of the first.
    """

    def one(rank: int) -> Profile:
        own = TimingStats(
            median=(2 + 2 * rank) * 1e-3,
            low=(1.9 + 2 * rank) * 1e-3,
            high=(2.1 + 2 * rank) * 1e-3,
            n=9,
        )
        given = replica()
        head = given.modules["head"]
        head = replace(head, forward=replace(head.forward, self_seconds=own))
        return replace(given, modules={**given.modules, "head": head})

    (row,) = lflops.stragglers(merged(one(0), one(1))).rows
    assert ("head", "forward", 1) == (row.module, row.phase, row.slow_rank)
    assert row.steps is None
    assert pytest.approx(2e-3) == row.seconds_lost


def test_seconds_are_those_of_the_rank_that_the_work_is_of() -> None:
    """The times are those of the rank whose work is shown.

    The second rank has the larger batch and takes 4 ms. The first rank takes longer for less work.
    """
    whole = merged(timed(replica(1), {"head": 9e-3}), timed(replica(2), {"head": 4e-3}))
    assert spread(4e-3) == whole.modules["head"].forward.seconds


def test_stages_that_no_clock_saw_together_have_no_time_together() -> None:
    """Modules above two pipeline stages have no time in forward, because it would mix two ranks.

    Each layer keeps its time. The root keeps its self time, and its time in the phase `other`,
    which only one stage has.
    """
    first = timed(first_stage(), {"": 2e-3, "layers": 2e-3, "layers.0": 2e-3})
    last = timed(last_stage(), {"": 3e-3, "layers": 3e-3, "layers.1": 3e-3})
    last = timed(last, {"": 1e-3}, "other")
    whole = merged(first, last)
    assert {"": None, "layers": None, "layers.0": spread(2e-3), "layers.1": spread(3e-3)} == {
        row: module.forward.seconds for row, module in whole.modules.items()
    }
    root = whole.modules[""]
    assert root.forward.device_seconds is None
    assert spread(3e-3) == whole.modules["layers.1"].forward.device_seconds
    assert spread(3e-3) == root.forward.self_seconds
    assert spread(1e-3) == root.other.seconds
    assert [("", 0.002, 0.003, 1), ("layers", 0.002, 0.003, 1)] == [
        (each.module, each.low, each.high, each.high_rank) for each in whole.rank_stats
    ]


@pytest.mark.parametrize(
    ("known", "expected"), [((64, 48), 112), ((64, None), None), ((None, 48), None)]
)
def test_logical_work_is_known_where_every_stage_knows_its_own(
    known: tuple[int | None, int | None], expected: int | None
) -> None:
    """The MACs of the whole model are 64 + 48 if both stages know their own, and else unknown."""

    def told(given: Profile, logical: int | None) -> Profile:
        rows = {
            row: replace(module, forward=replace(module.forward, logical_macs=logical))
            for row, module in given.modules.items()
        }
        return replace(given, modules=rows)

    whole = merged(told(first_stage(), known[0]), told(last_stage(), known[1]))
    assert expected == whole.modules[""].forward.logical_macs


def step(index: int, seconds: float | None, **fields: Any) -> Step:
    """Return a step; by default, it is unprofiled and has no phases."""
    usual = {"index": index, "kind": "unprofiled", "seconds": seconds, "phases": {}}
    return Step(**(usual | fields))


def stepped(*steps: Step) -> Profile:
    """Return the profile of a rank with these steps."""
    return replica(steps=steps)


def test_without_collectives_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    """Without collectives, a merged step is the step of the slowest rank.

    Step 0 is from the second rank: 5 s, with its phases and CPU time. Step 1 is from the first
    rank: 7 s. A module-timing step with the same index is a separate step.
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
    """The times of the modules add up to the merged steps.

    Each rank is the last in one of two steps. The merged steps take 2.5 and 1.2 s forward and 1.5
    and 1.0 s backward, so 1.85 and 1.25 s on average.

    The modules of the first rank took 1.1 s forward, so their times are scaled. They took 2.0 s
    backward. Of these, 1.05 s are self time of the root, which is mostly waiting, so only this time
    is reduced.
    """
    steps = (
        [({"forward": 1.0, "backward": 3.0}, 2.0), ({"forward": 1.2, "backward": 1.0}, 0.1)],
        [({"forward": 2.5, "backward": 1.5}, 0.5), ({"forward": 0.5, "backward": 1.7}, 0.8)],
    )
    own: dict[tuple[str, Phase], float] = {
        ("", "forward"): 0.1,
        ("body", "forward"): 0.4,
        ("head", "forward"): 0.6,
        ("", "backward"): 1.05,
        ("head", "backward"): 0.95,
    }
    ranks = []
    for of_rank in steps:
        steps_of_rank = [
            step(n, sum(phases.values()), phases=phases, waiting=waited)
            for n, (phases, waited) in enumerate(of_rank)
        ]
        untimed = replica(
            run=run(kind="training", world_size=2),
            waits=(ModulePhase("", "backward"),),
            steps=steps_of_rank,
        )
        ranks.append(clocked(untimed, own))
    whole = merge(ranks)
    assert [(2.5, 1.5), (1.2, 1.0)] == [
        (each.phases["forward"], each.phases["backward"]) for each in whole.steps
    ]
    expected = {
        ("", "forward"): 0.1 * 1.85 / 1.1,
        ("body", "forward"): 0.4 * 1.85 / 1.1,
        ("head", "forward"): 0.6 * 1.85 / 1.1,
        ("", "backward"): 0.3,
        ("head", "backward"): 0.95,
    }
    for (row, phase), seconds in expected.items():
        self_seconds = whole.modules[row].work(phase).self_seconds
        assert self_seconds is not None
        assert pytest.approx(seconds) == self_seconds.median
    root = whole.modules[""]
    assert root.forward.seconds is not None
    assert root.backward.seconds is not None
    assert pytest.approx((1.85, 1.25)) == (
        root.forward.seconds.median,
        root.backward.seconds.median,
    )


def test_a_step_that_one_rank_does_not_know_or_have_is_that_of_the_others() -> None:
    """If a rank has no time for a step, or does not have it, the step of the other rank is used."""
    whole = merged(
        stepped(step(0, None), step(1, 2.0), step(2, 9.0)), stepped(step(0, 4.0), step(1, 3.0))
    )
    assert [4.0, 3.0, 9.0] == [each.seconds for each in whole.steps]


def test_what_disturbed_one_rank_has_disturbed_the_step() -> None:
    """A merged step has the marks of all ranks.

    The slowest rank, which is shown, waited while another rank compiled.
    """
    whole = merged(
        stepped(step(0, 5.0, marks=("no_update",))),
        stepped(step(0, 4.0, marks=("recompiled", "no_update"))),
    )
    assert (step(0, 5.0, marks=("no_update", "recompiled")),) == whole.steps


def test_each_rank_has_the_spread_of_its_clean_steps() -> None:
    """Each rank has the statistics of its own unprofiled steps.

    They take 1, 2 and 3 s, so the quartiles are 1.5 and 2.5 s. Data is known in one of them, with
    0.2 s. The CPU time is known in one of them, because both of its parts must be known: 0.5 +
    0.25 s. The module-timing step and the step that compiled are left out.
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
    """The step time of a rank is the same as in its own profile.

    Two places in the code decide which marks exclude a step, and they must agree.
    """
    for mark in ("warmup", "recompiled", "new_shapes", "validation", "checkpoint", "no_update"):
        alone = stepped(step(0, 2.0), step(1, 8.0, marks=(mark,)))
        assert step_times.step_times(alone).seconds == merged(alone).ranks[0].step


def test_the_largest_peak_is_the_runs() -> None:
    """The largest peak of all ranks is the peak of the run, and likewise for each module.

    The first rank has a peak of 3000 bytes, although it has less work. The head has a peak of 900
    bytes on the second rank. The peak of the body is unknown on all ranks.
    """

    def held(batch: int, peak: int, head_peak: int | None) -> Profile:
        memory = replace(small_memory(), peak_bytes=peak, by_module={}, alive=(), timeline=())
        given = replica(batch, memory=memory)
        head = replace(given.modules["head"], peak_bytes=head_peak)
        return replace(given, modules={**given.modules, "head": head})

    whole = merged(held(1, 3000, 500), held(2, 2000, 900), held(1, 100, None))
    assert whole.memory is not None
    assert 3000 == whole.memory.peak_bytes
    assert (900, None) == (whole.modules["head"].peak_bytes, whole.modules["body"].peak_bytes)
    assert [3000, 2000, 100] == [rank.peak_bytes for rank in whole.ranks]


def test_without_a_memory_a_rank_has_its_roots_peak() -> None:
    """If the memory of a rank was not recorded, its peak is that of the root module: 40 bytes."""
    given = replica()
    root = replace(given.modules[""], peak_bytes=40)
    whole = merged(replace(given, modules={**given.modules, "": root}))
    assert (None, 40) == (whole.memory, whole.ranks[0].peak_bytes)


def scan(module: str, calls: int, phase: Phase = "forward") -> UnsupportedCall:
    """Return the calls of an unsupported operator (an operator without a formula)."""
    return UnsupportedCall(
        module=module, operator="my_ops::scan", phase=phase, calls=calls, bytes=64
    )


def test_the_ledger_is_that_of_all_ranks() -> None:
    """The unsupported operators are those of all ranks.

    In forward of the head, all ranks ran the operator; the leading second rank ran it 3 times. In
    the body and in backward, only the first rank ran it.
    """
    first = replica(1, unsupported=(scan("head", 2), scan("body", 5), scan("head", 1, "backward")))
    second = replica(2, unsupported=(scan("head", 3),))
    third = replica(1, unsupported=(scan("head", 4),))
    assert {scan("head", 3), scan("body", 5), scan("head", 1, "backward")} == set(
        merged(first, second, third).unsupported
    )


def test_a_ledger_that_differs_is_a_difference() -> None:
    """If the calls of an unsupported operator differ, a note says that the ranks differ."""
    first = replica(unsupported=(scan("head", 2),))
    assert () == merged(first, replica(unsupported=(scan("head", 2),))).notes
    assert 1 == len(noted(merged(first, replica(unsupported=(scan("head", 3),))), "ranks_differ"))


def test_collectives_are_those_of_the_rank_that_the_row_is_of() -> None:
    """The collectives are those of one rank: 8 bytes, not 8 + 8.

    The ranks have different names for the group, which is no difference.
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
    """Ranks without a profile are missing: ranks 1 and 3 of 5.

    The profiles are passed in any order.
    """
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
    """If a run has 16 ranks and one profile is passed, the other 15 ranks are missing."""
    whole = merged(replica(run=run(world_size=16)))
    assert (16, 15) == (len(whole.ranks), sum(rank.status == "missing" for rank in whole.ranks))
    assert [("1-15", {"missing": 15, "world_size": 16})] == noted(whole, "ranks_missing")


def test_a_rank_that_was_left_by_an_exception_has_failed() -> None:
    """A rank that ended with an exception has failed and is not the leading rank.

    The work that it counted until then, 3 * 192 MACs, is not the work of a step. So the other rank,
    whose profile is complete, is the leading rank.
    """
    whole = merged(replica(3, run=run(partial=True)), replica())
    assert ["failed", "ok"] == [rank.status for rank in whole.ranks]
    assert (True, 160) == (whole.run.partial, whole.total())


def test_a_rank_is_said_by_its_host_and_device() -> None:
    """Each rank has its host and its device."""
    whole = merged(
        replica(run=run(host="a", device_name="H200")),
        replica(run=run(host="b", device_name="H100")),
    )
    assert [("a", "H200"), ("b", "H100")] == [(rank.host, rank.device) for rank in whole.ranks]


@pytest.mark.parametrize(("second", "common"), [(GPU, GPU), (OTHER_GPU, None), (None, None)])
def test_chips_of_several_kinds_have_no_common_peak(
    second: Hardware | None, common: Hardware | None
) -> None:
    """If the ranks have different chips, the hardware of the run is unknown."""
    whole = merged(replica(run=run(hardware=GPU)), replica(run=run(hardware=second)))
    assert common == whole.run.hardware


def test_a_note_is_taken_once() -> None:
    """A note that several ranks have is in the merged profile once.

    Each rank has another factor in its note, and the factor of the rank whose times are shown is
    kept. A note that only the last rank has is kept, too.
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
    """The merged profile has the trace files of all ranks, and the values of the first trace."""
    first = Trace(files={"0": "a.json"}, device_idle_seconds=1e-3)
    second = Trace(files={"2": "c.json"}, device_idle_seconds=9e-3)
    whole = merged(replica(trace=first), replica(), replica(trace=second))
    assert Trace(files={"0": "a.json", "2": "c.json"}, device_idle_seconds=1e-3) == whole.trace


def test_the_parallel_sizes_are_those_that_the_ranks_tell() -> None:
    """The sizes of parallelism are those of the ranks; if the ranks have none, they are unknown."""
    known = merged(replica(run=run(data_parallel_size=2)), replica(run=run(data_parallel_size=2)))
    assert 2 == known.run.data_parallel_size
    unknown = merged(replica(), replica())
    assert unknown.run.data_parallel_size is None


def test_a_profile_of_a_later_version_becomes_one_of_this() -> None:
    """A profile of a later schema version is merged into one of the current version.

    Its unknown fields were dropped when it was read.
    """
    assert "2.0" == merged(replace(replica(), schema_version="2.7"), replica()).schema_version


def the_same_twice() -> list[Profile]:
    """Return the same profile twice."""
    return [replica()] * 2


def whatever(n: int = 2, **facts: Any) -> list[Profile]:
    """Return `n` ranks; the run of the last one has these fields."""
    return [*(replica() for _ in range(n - 1)), replica(run=run(**facts))]


REFUSED: list[tuple[Any, str]] = [
    ([], "profiles is empty: pass the profile of at least one rank"),
    ({}, "profiles is empty: pass the profile of at least one rank"),
    (
        replica(),
        "profiles is a Profile: pass the profiles of all ranks, as a list, or as a dict with ranks as keys",
    ),
    (
        3,
        "profiles is a int: pass the profiles of all ranks, as a list, or as a dict with ranks as keys",
    ),
    (
        [replica(), "rank1.json"],
        "the profile of rank 1 is a str: pass a Profile, for example from lflops.load",
    ),
    (
        {0: replica(), 3: None},
        "the profile of rank 3 is a NoneType: pass a Profile, for example from lflops.load",
    ),
    (
        {"0": replica()},
        "the key '0' is not a rank: use whole numbers as keys, from 0 to 1048575",
    ),
    (
        {True: replica()},
        "the key True is not a rank: use whole numbers as keys, from 0 to 1048575",
    ),
    (
        {-1: replica()},
        "the key -1 is not a rank: use whole numbers as keys, from 0 to 1048575",
    ),
    (
        {1 << 20: replica()},
        "the key 1048576 is not a rank: use whole numbers as keys, from 0 to 1048575",
    ),
    (
        the_same_twice(),
        "ranks 0 and 1 have the same profile: pass a separate profile for each rank",
    ),
    (
        [replica(), small_profile()],
        "the profile of rank 1 is already merged from 2 ranks: pass profiles that were not merged, one for each rank",
    ),
    (
        [merge([replica()])],
        "the profile of rank 0 is already merged from 1 ranks: pass profiles that were not merged, one for each rank",
    ),
    (
        whatever(3, kind="measure"),
        "run.kind is 'measure' on rank 2, but 'count' on rank 0: pass profiles of the same run",
    ),
    (
        whatever(versions={"torch": "2.11.0"}),
        (
            "run.versions['torch'] is '2.11.0' on rank 1, but '2.13.0' on rank 0: "
            "pass profiles of the same run"
        ),
    ),
    (
        [replica(run=run(window=n)) for n in (0, 1)],
        "run.window is 1 on rank 1, but 0 on rank 0: pass profiles of the same run",
    ),
    (
        [replica(run=run(stage=stage)) for stage in ("train", "test")],
        "run.stage is 'test' on rank 1, but 'train' on rank 0: pass profiles of the same run",
    ),
    (
        [replica(), *(replica(run=run(tensor_parallel_size=n)) for n in (2, 4))],
        "run.tensor_parallel_size is 4 on rank 2, but 2 on rank 1: pass profiles of the same run",
    ),
    (
        [replica(), *(replica(run=run(world_size=n)) for n in (8, 4))],
        "run.world_size is 4 on rank 2, but 8 on rank 1: pass profiles of the same run",
    ),
    (
        whatever(3, world_size=2),
        (
            "run.world_size is 2 on rank 2, but must be at least 3 for these ranks, "
            "and at most 1048576"
        ),
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
    """Profiles that are not the ranks of one run are an error.

    The message names the rank, its value, and the accepted values.
    """
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
    """Ranks may have different facts about the run, and differ in their host and device.

    The profiles may be a list, a generator or a mapping.
    """
    assert [0, 1] == [rank.rank for rank in merge(given_profiles).ranks]


def test_it_makes_no_difference_in_which_order_a_mapping_is() -> None:
    """The order of a mapping does not matter.

    Among ranks with equal work, the lowest rank is the leading rank.
    """
    first = replica(run=run(host="a"))
    second = replica(run=run(host="b"))
    assert merged(first, second) == merge({1: second, 0: first})
    assert "a" == merge({1: second, 0: first}).run.host


def test_what_was_given_is_left_as_it_was() -> None:
    """`merge` changes neither the dictionary that it is passed nor the profiles in it."""
    ranks = {1: first_stage(), 0: last_stage()}
    merge(ranks)
    assert [(1, first_stage()), (0, last_stage())] == list(ranks.items())


@pytest.fixture
def two_ranks(tmp_path: Path) -> Any:
    """Return two processes in one group."""
    with Ranks(2, tmp_path) as ranks:
        yield ranks


def saved(folder: Path, count: Any) -> Profile:
    """Save this rank's profile to a file with the rank in its name, and return the profile."""
    profile: Profile = count()
    profile.save(folder / f"rank{distributed.get_rank()}.profile.json")
    return profile


def from_files(folder: Path) -> Profile:
    """Merge the files of both ranks, as a script does after the run."""
    return merge({rank: lflops.load(folder / f"rank{rank}.profile.json") for rank in range(2)})


def replicated() -> Profile:
    """Count one pass under DDP. The first rank has one sequence, and the second has two."""
    model = DistributedDataParallel(between_linears(Block()))
    return lflops.count(
        model, torch.randn(1 + distributed.get_rank(), length, hidden), backward=True
    )


class Stage(nn.Module):
    """One of two pipeline stages."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        if first:
            self.up = nn.Linear(hidden, wide)
        else:
            self.down = nn.Linear(wide, hidden)


def staged() -> Profile:
    """Count a step of a simple pipeline.

    The activations are sent to the second rank, and their gradient is sent back.
    """
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
    """Two processes of a replicated model count their own batches, and the larger one is shown.

    Forward has each matmul once. Backward has two matmuls for each layer, but only one for the
    first layer, whose input needs no gradient.
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
    """Each of two processes has its own layer of a pipeline.

    The input of the first layer needs no gradient, so its backward has half of the work.
    """
    two_ranks.run(partial(saved, tmp_path, staged))
    whole = in_file_and_memory(from_files(tmp_path))
    assert {"up": up, "down": down} == macs(whole, "forward")
    assert {"up": up, "down": 2 * down} == macs(whole, "backward")
    assert (hidden * wide + wide + wide * hidden + hidden) == whole.modules[""].parameters
    assert [2 * up, 3 * down] == [rank.macs for rank in whole.ranks]


def measured() -> Profile:
    """Measure two unprofiled passes and two hooked passes under DDP."""
    model = DistributedDataParallel(between_linears(Block()))
    return lflops.measure(model, sequence(), backward=True, warmup=1, repeats=2, hardware=None)


def test_two_processes_that_measure(two_ranks: Ranks, tmp_path: Path) -> None:
    """Each of the four merged passes is from the rank that waits less in backward.

    In backward, every module that ran is compared.
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
    """The timelines of the first eight of ten ranks are kept, each with the number of its rank."""
    step = small_timeline()[:1]
    found = merged(*(replica(timelines=step) for _ in range(10))).timelines
    assert [*range(8)] == [each.rank for each in found]
    assert {step[0].slices} == {each.slices for each in found}
