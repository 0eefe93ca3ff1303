"""Test the rows of the module table: the tree, folded repeats, times, sorting and totals."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.operators import operators
from lflops.analysis.tree import SORT_KEYS, ModuleRow, Repeat, WorkCounts, flat, totals, tree
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import PHASES, Phase
from tests.support.profile_builders import (
    cell,
    clocked,
    fields_of,
    product,
    profile,
    small_profile,
    untimed,
    weights,
    with_seconds,
)


def stack(blocks: int = 3, *, labels: tuple[str, ...] = ("q", "k", "out")) -> Profile:
    """Return the profile of a stack of blocks, each with one Linear for each label.

    A Linear has 10 parameters, 100 MACs of forward and 200 MACs of backward. A Linear with the
    label `out` has three times as much.
    """
    each = dict.fromkeys(labels, 1)
    if "out" in each:
        each["out"] = 3
    below = 10 * sum(each.values())
    rows: dict[str, dict[str, Any]] = {
        "": weights(0, blocks * below) | {"class_name": "Model"},
        "layers": weights(0, blocks * below) | {"class_name": "ModuleList", "calls": 0},
    }
    cells = []
    for block in range(blocks):
        rows[f"layers.{block}"] = weights(0, below) | {"class_name": "Block"}
        for label, times in each.items():
            name = f"layers.{block}.{label}"
            rows[name] = weights(10 * times) | {"class_name": "Linear"}
            cells.append(
                product(name, "aten::addmm", "forward", macs=100 * times, bytes_moved=1000 * times)
            )
            cells.append(
                product(name, "aten::mm", "backward", macs=200 * times, bytes_moved=2000 * times)
            )
    return profile(rows, cells)


def changed(given: Profile, name: str, **fields: Any) -> Profile:
    """Return the profile with some fields of one module changed."""
    return replace(given, modules={**given.modules, name: replace(given.modules[name], **fields)})


def walk(rows: tuple[ModuleRow, ...]) -> Iterator[ModuleRow]:
    """Yield all rows of a tree, each before the rows below it."""
    for row in rows:
        yield row
        yield from walk(row.children)


def layers(given: Profile, **options: Any) -> tuple[ModuleRow, ...]:
    """Return the rows directly below `layers`."""
    (root,) = tree(given, **options)
    return root.children[0].children


def repeats(rows: tuple[ModuleRow, ...]) -> list[tuple[str, int]]:
    """Return the label of each row, and the number of modules that it stands for."""
    return [(row.label, row.times) for row in rows]


def test_the_tree_is_the_one_of_the_names() -> None:
    """The tree has one root, and each row is below the module that contains it by its name."""
    rows = [(row.depth, row.name, row.label, row.class_name) for row in walk(tree(small_profile()))]
    assert [
        (0, "", "", "Model"),
        (1, "encoder", "encoder", "Sequential"),
        (2, "encoder.0", "0", "Linear"),
        (2, "encoder.1", "1", "GELU"),
        (1, "head", "head", "Linear"),
    ] == rows


def test_a_row_holds_the_inclusive_figures_of_its_module() -> None:
    """The row of the encoder includes its Linear with 512 MACs and its GELU with 64 FLOPs.

    Its share is 512 of 640 MACs.
    """
    encoder = tree(small_profile())[0].children[0]
    assert (144, 144, 576) == (
        encoder.parameters,
        encoder.trainable_parameters,
        encoder.parameter_bytes,
    )
    assert (
        WorkCounts(calls=2, macs=512, executed_macs=512, flops=1088, bytes_moved=4 * (240 + 128))
        == encoder.phases["forward"]
    )
    assert [512, 512, 0, 0, 0] == [encoder.one(phase).macs for phase in PHASES]
    assert 512 / 640 == encoder.share
    assert not encoder.is_self


@pytest.mark.parametrize(
    ("phase", "share"),
    [
        ("forward", 128 / 640),
        ("backward", 256 / 768),
        (None, 384 / 1408),
        ("optimizer", 34 / 178),
        ("recompute", None),
    ],
)
def test_the_share_is_of_the_phase_that_is_asked_for(phase: Any, share: float | None) -> None:
    """The head has 128 of 640 MACs in forward, and 256 of 768 in backward.

    The optimizer has no MACs, so the share is 34 of 178 FLOPs. Without work, there is no share.
    """
    assert share == tree(small_profile(), phase=phase)[0].children[1].share


def test_siblings_that_are_alike_share_a_row() -> None:
    """Three equal blocks are one row, which has the first and the last label and all names."""
    (row,) = layers(stack(3))
    assert Repeat(first="0", last="2", times=3) == row.repeat
    assert ("layers.0", "layers.1", "layers.2") == row.names
    assert "layers.0" == row.name


def test_a_shared_row_holds_the_figures_of_one_and_gives_those_of_all() -> None:
    """A shared row has the work of one block, and can return the work of all three blocks.

    A block has 100 + 100 + 300 MACs in forward, and twice as many in backward.
    """
    (row,) = layers(stack(3))
    assert 500 == row.one("forward").macs
    assert 1500 == row.all("forward").macs
    assert 4500 == row.all(None).macs
    assert 50 == row.parameters
    assert 1 / 3 == row.share


def test_siblings_with_other_names_share_a_row_too() -> None:
    """`q` and `k` do the same work, so they share a row. `out` is larger."""
    (block,) = layers(stack(2))
    assert [("q", 2), ("out", 1)] == repeats(block.children)
    assert ("layers.0.q", "layers.0.k") == block.children[0].names


def test_only_neighbours_share_a_row() -> None:
    """`q` and `k` do not share a row here, because `out` is between them."""
    (block,) = layers(stack(2, labels=("q", "out", "k")))
    assert [("q", 1), ("out", 1), ("k", 1)] == repeats(block.children)


@pytest.mark.parametrize(
    "difference",
    [
        {"class_name": "Conv1d"},
        {"calls": 2},
        {"compiled": True},
        {"owner": "layers.0.out"},
        {"trainable_parameters": 0},
        {"dtypes": {}},
        {"backward": stack().modules["layers.0.q"].backward},
        {"recompute": stack().modules["layers.0.q"].forward},
    ],
)
def test_a_difference_anywhere_below_keeps_rows_apart(difference: dict[str, Any]) -> None:
    """The second of four blocks differs, so only the last two blocks share a row."""
    rows = layers(changed(stack(4), "layers.1.out", **difference))
    assert [("0", 1), ("1", 1), ("2", 2)] == repeats(rows)


def test_other_labels_below_keep_rows_apart() -> None:
    """In the second block, `out` has another name, so the blocks do not share a row."""
    given = stack(2)
    renamed = {name.replace("1.out", "1.proj"): module for name, module in given.modules.items()}
    assert [("0", 1), ("1", 1)] == repeats(layers(replace(given, modules=renamed)))


def test_times_and_peaks_do_not_keep_rows_apart() -> None:
    """Blocks share a row although their times and memory peaks differ, as they always do."""
    timed = with_seconds(stack(2))
    timed = changed(timed, "layers.1", peak_bytes=7)
    untimed: ModuleProfile = stack(2).modules["layers.0.q"]
    assert [("0", 2)] == repeats(
        layers(changed(timed, "layers.0.q", **{phase: untimed.work(phase) for phase in PHASES}))
    )


def timed_stack() -> Profile:
    """Return a stack of two blocks with times.

    In forward, each Linear takes 1 s in the first block and 3 s in the second. The root takes 2 s
    itself. In backward, only `q` has a time: 5 s in each block.
    """
    own: dict[tuple[str, Phase], float] = {("", "forward"): 2.0}
    for block, seconds in ((0, 1.0), (1, 3.0)):
        own |= {(f"layers.{block}.{label}", "forward"): seconds for label in ("q", "k", "out")}
        own[f"layers.{block}.q", "backward"] = 5.0
    return clocked(stack(2), own)


def test_a_row_has_the_time_of_its_module() -> None:
    """The root takes 2 + 3 + 9 s in forward, and the layers 12 s. Untimed phases have no time."""
    (root,) = tree(timed_stack())
    assert (14.0, 12.0) == (root.time("forward"), root.children[0].time("forward"))
    assert (1.0, 12 / 14) == (root.time_share, root.children[0].time_share)
    assert {
        "forward": 14.0,
        "backward": 10.0,
        "recompute": None,
        "optimizer": None,
        "other": None,
    } == root.seconds


def test_a_shared_row_has_the_mean_of_the_times() -> None:
    """The blocks take 3 s and 9 s in forward, so the row has 6 s of 14 s.

    Below it, `q`, `k` and `out` take 1 s or 3 s, so each has the mean 2 s.
    """
    (block,) = layers(timed_stack())
    assert (6.0, 6 / 14) == (block.time("forward"), block.time_share)
    assert [("q", 2, 2.0), ("out", 1, 2.0)] == [
        (row.label, row.times, row.time("forward")) for row in block.children
    ]


def test_a_mean_of_which_a_part_is_unknown_is_unknown() -> None:
    """The row of `q` and `k` has no time in backward, because only `q` was timed.

    Without folding, `q` has its 5 s.
    """
    (block,) = layers(timed_stack())
    assert None is block.children[0].time("backward")
    assert [5.0, None, None] == [
        row.time("backward") for row in layers(timed_stack(), fold=False)[0].children
    ]


def test_all_phases_together_take_as_long_as_those_that_ran() -> None:
    """The time of all phases is the sum of the known times: 14 s of forward and 10 s of backward.

    The time of `out` in backward is unknown, so its time is the 1 s of forward.
    """
    root, *_ = flat(timed_stack(), sort="name", phase=None)
    assert 24.0 == tree(timed_stack(), phase=None)[0].time(None)
    assert 2.0 == root.time(None)
    q, _, out = layers(timed_stack(), fold=False, phase=None)[0].children
    assert (6.0, 6 / 24) == (q.time(None), q.time_share)
    assert (1.0, 1 / 24) == (out.time(None), out.time_share)


def test_the_rate_is_of_the_macs_in_that_time() -> None:
    """The rate of a block is 2 * 500 FLOPs in the mean time of 6 s.

    It is unknown without a time, or if the time is 0.
    """
    (block,) = layers(timed_stack())
    assert 2 * 500 / 6 == block.flops_per_second("forward")
    assert None is block.flops_per_second("optimizer")
    without_duration = clocked(stack(2), {("layers.0", "forward"): 0.0})
    assert None is layers(without_duration)[0].flops_per_second("forward")


def test_the_recomputation_of_fused_attention_is_in_the_time_of_backward() -> None:
    """A block has 1000 MACs in 10 s of forward and backward, and 100 recomputed MACs.

    Backward of fused attention recomputes scores, so this recomputation has no time of its own.
    """
    (block,) = layers(timed_stack())
    macs = {"forward": 400, "backward": 600, "recompute": 100}
    phases = {name: WorkCounts(macs=macs.get(name, 0)) for name in PHASES}
    seconds: dict[Phase, float | None] = dict.fromkeys(PHASES)
    row = replace(block, phases=phases, seconds=seconds | {"forward": 4.0, "backward": 6.0})
    assert 2 * 1100 / 10 == row.flops_per_second(None)
    assert None is row.flops_per_second("recompute")


def test_a_flat_row_has_its_own_time() -> None:
    """A flat row has the self time: 2 of 14 s for the root. The self time of a block is unknown."""
    rows = {row.name: row for row in flat(timed_stack())}
    assert (2.0, 2 / 14) == (rows[""].time("forward"), rows[""].time_share)
    assert (None, None) == (rows["layers.0"].time("forward"), rows["layers.0"].time_share)


def test_rows_are_sorted_by_time_and_the_unknown_come_last() -> None:
    """Sorting by time puts the longest first and unknown times last.

    `b` takes 2 s, `a` takes 0 s, and the time of `c` is unknown. Two modules of 3 s that share a
    row come before one module of 5 s.
    """
    given = clocked(
        profile({"": {}, "c": {}, "a": {}, "b": {}}, []),
        {("a", "forward"): 0.0, ("b", "forward"): 2.0},
    )
    assert ["b", "a", "c"] == [
        row.label for row in tree(given, sort="time", fold=False)[0].children
    ]
    assert ["b", "", "c", "a"] == [
        row.name
        for row in flat(changed(given, "a", forward=given.modules["c"].forward), sort="time")
    ]
    one_block = stack(1, labels=("out", "a", "b"))
    own: dict[tuple[str, Phase], float] = {
        ("layers.0.out", "forward"): 5.0,
        ("layers.0.a", "forward"): 3.0,
        ("layers.0.b", "forward"): 3.0,
    }
    assert [("a", 2), ("out", 1)] == repeats(
        layers(clocked(one_block, own), sort="time")[0].children
    )


@pytest.mark.parametrize("rows_of", [tree, flat])
@pytest.mark.parametrize(("phase", "where"), [("forward", "in forward"), (None, "in any phase")])
def test_without_times_there_is_no_order_by_time(rows_of: Any, phase: Any, where: str) -> None:
    """The error states that no module has a time, and lists the accepted values."""
    with pytest.raises(
        ValueError,
        match=f"sort='time': no module of this profile was timed {where}: pass one of macs, .*, "
        "name$",
    ):
        rows_of(untimed(small_profile()), sort="time", phase=phase)


def test_without_folding_every_module_has_its_row() -> None:
    """Each module has its own row, in the order of the profile."""
    given = stack(3)
    assert list(given.modules) == [row.name for row in walk(tree(given, fold=False))]
    assert {None} == {row.repeat for row in walk(tree(given, fold=False))}


@pytest.mark.parametrize(("depth", "rows"), [(0, 1), (1, 2), (2, 3), (3, 5), (-1, 5), (9, 5)])
def test_depth_cuts_the_tree(depth: int, rows: int) -> None:
    """Depth 0 is only the root. The folded tree has the levels root, layers, blocks and Linears.

    The two blocks share a row, and so do `q` and `k` in them.
    """
    assert rows == len(list(walk(tree(stack(2), depth=depth))))


def test_what_the_depth_hides_still_keeps_rows_apart() -> None:
    """The blocks do not share a row, although the depth hides the layer in which they differ."""
    given = changed(stack(2), "layers.1.out", class_name="Conv1d")
    assert [("0", 1), ("1", 1)] == repeats(layers(given, depth=2))


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("given", [stack(3), small_profile()])
def test_a_row_and_all_below_it_add_up(given: Profile, fold: bool) -> None:
    """Inclusive work is the self work plus the work of all rows directly below, in every phase."""
    own = {row.name: row for row in flat(given)}
    for row in walk(tree(given, fold=fold)):
        for phase in PHASES:
            assert row.one(phase) == sum(
                (child.all(phase) for child in row.children), own[row.name].one(phase)
            )


def test_rows_are_in_the_models_order_unless_sorted() -> None:
    """By default, the head comes after the encoder, as in the model."""
    assert ["encoder", "head"] == [row.label for row in tree(small_profile())[0].children]


@pytest.mark.parametrize(
    ("sort", "labels"),
    [
        ("macs", ["big", "busy", "2", "10"]),
        ("flops", ["busy", "big", "2", "10"]),
        ("parameters", ["10", "big", "busy", "2"]),
        ("bytes", ["2", "big", "busy", "10"]),
        ("name", ["2", "10", "big", "busy"]),
    ],
)
def test_siblings_are_sorted_the_most_first(sort: str, labels: list[str]) -> None:
    """Siblings are sorted in descending order, or by name.

    Rows with equal MACs are sorted by their FLOPs, and equal rows keep the model's order. Numbers
    in names are compared as numbers, so "2" comes before "10".
    """
    rows = {
        "": weights(0, 10) | {"class_name": "Model"},
        "big": {},
        "10": weights(10),
        "busy": {},
        "2": {},
    }
    cells = [
        cell("big", "aten::mm", "forward", macs=5, flops=10, bytes_moved=2),
        cell("busy", "aten::exp", "forward", flops=20, bytes_moved=2),
        cell("2", "aten::copy_", "forward", flops=1, bytes_moved=3),
    ]
    assert labels == [row.label for row in tree(profile(rows, cells), sort=sort)[0].children]


def test_rows_that_share_are_sorted_by_what_they_are_together() -> None:
    """The row of four modules with 100 MACs each comes before a module with 300 MACs."""
    (block,) = layers(stack(1, labels=("out", "a", "b", "c", "d")), sort="macs")
    assert [("a", 4), ("out", 1)] == repeats(block.children)


@pytest.mark.parametrize(
    ("phase", "labels"), [("forward", ["a", "b"]), ("backward", ["b", "a"]), (None, ["b", "a"])]
)
def test_the_order_is_that_of_the_phase_that_is_asked_for(phase: Any, labels: list[str]) -> None:
    """`a` has 2 MACs in forward and 1 in backward. `b` has 1 and 5."""
    counted = [("a", "forward", 2), ("a", "backward", 1), ("b", "forward", 1), ("b", "backward", 5)]
    cells = [
        product(name, "aten::mm", where, macs=macs, bytes_moved=1) for name, where, macs in counted
    ]
    given = profile({"": {}, "a": {}, "b": {}}, cells)
    assert labels == [row.label for row in tree(given, sort="macs", phase=phase)[0].children]
    assert labels == [row.label for row in flat(given, phase=phase) if row.name]


@pytest.mark.parametrize("rows_of", [tree, flat])
def test_an_unknown_order_is_named_with_what_is_taken(rows_of: Any) -> None:
    """The error states the wrong value and the accepted values."""
    with pytest.raises(ValueError, match=f"sort='size': pass one of {', '.join(SORT_KEYS)}"):
        rows_of(small_profile(), sort="size")


def test_an_impossible_depth_is_named_with_what_is_taken() -> None:
    """The error explains -1 and 0, because a smaller depth has no meaning."""
    with pytest.raises(ValueError, match="depth=-2: pass -1 for all levels, 0 for only the model"):
        tree(small_profile(), depth=-2)


def test_the_flat_list_is_by_own_macs_the_most_first() -> None:
    """The flat list is sorted by self MACs, and rows without MACs are sorted by FLOPs.

    The GELU has FLOPs, and the containers have no work themselves.
    """
    assert [("encoder.0", 512), ("head", 128), ("encoder.1", 0), ("", 0), ("encoder", 0)] == [
        (row.name, row.one("forward").macs) for row in flat(small_profile())
    ]


def test_a_flat_row_holds_own_figures_only() -> None:
    """The flat row of the root has no parameters, and the work of the loss.

    A profile does not have the trainable parameters or parameter bytes of a module itself.
    """
    root = next(row for row in flat(small_profile(), phase="other") if not row.name)
    assert root.is_self
    assert (0, None, None) == (root.parameters, root.trainable_parameters, root.parameter_bytes)
    assert WorkCounts(calls=1, flops=24, bytes_moved=68) == root.phases["other"]
    assert () == root.children


@pytest.mark.parametrize("phase", [*PHASES, None])
def test_own_figures_add_up_to_the_total(phase: Any) -> None:
    """In each phase and in all phases, no self work is lost or counted twice."""
    phases = PHASES if phase is None else (phase,)
    expected = sum((totals(small_profile())[each] for each in phases), WorkCounts())
    own = sum((row.one(phase) for row in flat(small_profile())), WorkCounts())
    assert expected == own


def test_totals_are_the_roots_work() -> None:
    """The totals have 640 MACs in forward, 768 in backward, and none in other phases."""
    macs = {phase: figures.macs for phase, figures in totals(small_profile()).items()}
    assert {"forward": 640, "backward": 768, "recompute": 0, "optimizer": 0, "other": 0} == macs


def test_operators_are_added_up_over_modules_the_most_first() -> None:
    """The work of an operator is added up over modules, and the most work comes first.

    Forward has two matmuls with 512 and 128 MACs, and an activation. The only operator of the
    optimizer has the share 1. The operators of backward add up to its total.
    """
    found = [
        (row.operator, row.figures.calls, row.figures.macs, row.share)
        for row in operators(small_profile())
    ]
    assert [("aten::addmm", 2, 640, 1.0), ("aten::gelu", 1, 0, 0.0)] == found
    assert [("aten::_foreach_add_", 1.0)] == [
        (row.operator, row.share) for row in operators(small_profile(), "optimizer")
    ]
    assert totals(small_profile())["backward"] == sum(
        (row.figures for row in operators(small_profile(), "backward")), WorkCounts()
    )


def test_figures_add_field_by_field() -> None:
    """Every field of `WorkCounts` is added and multiplied, so a new field cannot be forgotten."""
    one = WorkCounts(**dict.fromkeys(fields_of(WorkCounts()), 3))
    assert {6} == set(fields_of(one + one).values()) == set(fields_of(one * 2).values())
