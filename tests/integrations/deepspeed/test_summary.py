"""The text that users of DeepSpeed's profiler know, of profiles made by hand."""

from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.integrations.deepspeed.text import units as short_units
from lflops.integrations.deepspeed.text.module_classes import ModuleClass, by_depth, most
from lflops.integrations.deepspeed.text.summary import summary
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.steps import Step
from lflops.ranks.merge.merge import merge
from lflops.units import UNKNOWN
from tests.support.profile_builders import (
    cell,
    product,
    profile,
    run,
    scan_traced,
    small_profile,
    weights,
    with_seconds,
)


def blocks(**fields: Any) -> Profile:
    """A model of 2 blocks of a `Linear(8, 16)` and a GELU, and a `Linear(16, 2)`, called with 4 vectors, forward alone.

    By hand: 4 * 8 * 16 = 512 MACs a block, 128 in the head, 1152 together. Of 100 µs an operator:
    200 a block, 500 together.
    """
    rows: dict[str, dict[str, Any]] = {
        "": weights(0, 322) | {"class_name": "Net"},
        "layers": weights(0, 288) | {"class_name": "ModuleList", "calls": 0},
    }
    cells = []
    for block in range(2):
        name = f"layers.{block}"
        rows[name] = weights(0, 144) | {"class_name": "Block"}
        rows[f"{name}.up"] = weights(144) | {
            "class_name": "Linear",
            "detail": "in_features=8, out_features=16, bias=True",
        }
        rows[f"{name}.act"] = weights(0) | {"class_name": "GELU", "detail": "approximate='none'"}
        cells += [
            product(f"{name}.up", "aten::addmm", "forward", macs=512, bytes_moved=1),
            cell(f"{name}.act", "aten::gelu", "forward", flops=64),
        ]
    rows["head"] = weights(34) | {
        "class_name": "Linear",
        "detail": "in_features=16, out_features=2, bias=True",
    }
    cells.append(product("head", "aten::addmm", "forward", macs=128, bytes_moved=1))
    return with_seconds(profile(rows, cells, run=run(kind="measure", samples_per_step=4), **fields))


def labelled(given: Profile, **options: Any) -> dict[str, str]:
    """The figures of the first parts by their labels."""
    lines = (
        summary(analyze(given), detailed=False, **options)
        .partition("Aggregated Profile")[0]
        .splitlines()
    )
    return {line[:70].strip().removesuffix(":"): line[72:] for line in lines if line[70:72] == "  "}


def aggregated(given: Profile, **options: Any) -> list[str]:
    """The lines of the second part."""
    return (
        summary(analyze(given), detailed=False, **options)
        .partition("Aggregated Profile per GPU")[2]
        .splitlines()[1:-1]
    )


def detailed(given: Profile) -> list[str]:
    """The lines of the model."""
    return (
        summary(analyze(given))
        .partition("Detailed Profile per GPU")[2]
        .split("\n\n")[1]
        .splitlines()[:-1]
    )


CLEAN = Step(index=0, kind="unprofiled", seconds=1e-3, phases={"forward": 1e-3})


def test_the_parts_stand_in_deepspeeds_order_under_its_headings() -> None:
    """Its three parts, and two that are ours.

    One before the modules, one at the end; the header is ours.
    """
    ruled = [
        line.strip("- ")
        for line in summary(analyze(small_profile()), step=10).splitlines()
        if line.startswith("---") and line.strip("-")
    ]
    went = "Where the Step's Time Went"
    assert [
        "lflops Flops Profiler",
        "Further Figures per GPU",
        "Aggregated Profile per GPU",
        "Detailed Profile per GPU",
        went,
    ] == ruled


def test_the_first_line_names_the_step() -> None:
    """As it is told, else as the run knows it, else not at all."""
    said = [
        summary(analyze(given), step=step).splitlines()[1]
        for given, step in ((small_profile(), 10), (small_profile(), None), (blocks(), None))
    ]
    assert ["Profile Summary at step 10:", "Profile Summary at step 8:", "Profile Summary:"] == said


def test_a_forward_has_the_labels_that_deepspeed_gives_a_forward() -> None:
    """1152 MACs and 2 * 1152 + 2 * 64 flops in 1 ms: 2.43 MFLOPS, and 4 samples in it."""
    figures = labelled(blocks(steps=(CLEAN,)))
    expected = {
        "world size": "1",
        "data parallel size": "1",
        "model parallel size": "1",
        "batch size per GPU": "4",
        "params per GPU": "322",
        "params of model = params per GPU * mp_size": "322",
        "fwd MACs per GPU": "1.15 KMACs",
        "fwd flops per GPU": "2.43 K",
        "fwd flops of model = fwd flops per GPU * mp_size": "2.43 K",
        "fwd latency": "1 ms",
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency": "2.43 MFLOPS",
        "samples/second": "4000.0",
    }
    assert expected == dict(list(figures.items())[: len(expected)])


def test_backward_is_as_counted_not_twice_the_forward() -> None:
    """1344 flops forward in 1 ms, 1600 backward in 1.5 ms, 2944 in a step of 3 ms.

    2 ranks of 4 samples each.
    """
    figures = labelled(small_profile())
    expected = {
        "bwd latency": "1.5 ms",
        "bwd FLOPS per GPU = bwd flops per GPU / bwd latency": "1.07 MFLOPS",
        "fwd+bwd FLOPS per GPU = fwd+bwd flops per GPU / (fwd+bwd latency)": "1.18 MFLOPS",
        "step latency": "–",
        "iter latency": "3 ms",
        "FLOPS per GPU = fwd+bwd flops per GPU / iter latency": "981.33 KFLOPS",
        "samples/second": "2666.67",
    }
    assert expected == {label: value for label, value in figures.items() if label in expected}


def test_recomputed_work_is_work_of_backward() -> None:
    """A checkpoint runs the head's 256 flops and the others' 1344 again.

    3200 of them in 1.5 ms, 4544 in 2.5.
    """
    cells = [
        *small_profile().op_counts,
        product("", "aten::addmm", "recompute", macs=800, bytes_moved=1),
    ]
    rows = {
        name: {"class_name": module.class_name} for name, module in small_profile().modules.items()
    }
    figures = labelled(profile(rows, cells, steps=small_profile().steps))
    assert "2.13 MFLOPS" == figures["bwd FLOPS per GPU = bwd+recompute flops / bwd latency"]
    assert (
        "1.82 MFLOPS"
        == figures["fwd+bwd FLOPS per GPU = fwd+bwd+recompute flops / (fwd+bwd latency)"]
    )
    assert ("800", "1.60 k") == (
        figures["recompute MACs per GPU"],
        figures["recompute flops per GPU"],
    )


def test_a_backward_that_nobody_counted_has_deepspeeds_factor_and_says_so() -> None:
    """2.5 forwards of 2432 flops in 2 ms; with the forward's own, 3.5 of them in 3 ms."""
    step = Step(
        index=0,
        kind="unprofiled",
        seconds=4e-3,
        phases={"forward": 1e-3, "backward": 2e-3, "optimizer": 1e-3},
    )
    figures = labelled(
        blocks(
            steps=(step,),
            notes=(Note(code="backward_assumed", subject="", values={"forwards": 2.5}),),
        )
    )
    assert "3.04 MFLOPS" == figures["bwd FLOPS per GPU = 2.5 * fwd flops per GPU / bwd latency"]
    assert (
        "2.84 MFLOPS"
        == figures["fwd+bwd FLOPS per GPU = 3.5 * fwd flops per GPU / (fwd+bwd latency)"]
    )
    assert "2.13 MFLOPS" == figures["FLOPS per GPU = 3.5 * fwd flops per GPU / iter latency"]
    assert ("1 ms", "4 ms") == (figures["step latency"], figures["iter latency"])
    assert "note" not in figures


def test_an_unknown_latency_is_a_dash_and_so_is_what_it_would_divide() -> None:
    """A count has no time."""
    counted = profile(
        {"": {"class_name": "Net"}}, [product("", "aten::mm", "forward", macs=1, bytes_moved=1)]
    )
    figures = labelled(counted)
    assert ("–", "–") == (
        figures["fwd latency"],
        figures["fwd FLOPS per GPU = fwd flops per GPU / fwd latency"],
    )
    assert "    fwd latency - –" in aggregated(counted)
    assert ["Net(0 = –% Params, 1 MACs = 100% MACs, – = –% latency, – FLOPS)"] == detailed(counted)


def test_where_no_step_is_clean_the_latency_is_the_roots_own() -> None:
    """5 operators of 100 µs, which were 3 times as long with the counting."""
    figures = labelled(
        counted_alone := blocks(steps=(Step(index=0, kind="counting", seconds=5e-4, phases={}),))
    )
    assert ("500 us", "the counted pass only") == (
        figures["fwd latency"],
        figures["the latencies come from"],
    )
    slow = labelled(replace(counted_alone, run=replace(counted_alone.run, observer_ratio=3.0)))
    said = (
        "the pass took 3.00 times as long; this is subtracted from the latencies, except for a few "
        "µs per operator"
    )
    assert said == slow["cost of counting"]


SHARDED = {"parameters": 322, "local_parameters": 161, "class_name": "Net"}


@pytest.mark.parametrize(
    ("root", "sizes", "label", "value"),
    [
        (
            {},
            {"tensor_parallel_size": 2, "world_size": 2},
            "params of model = params per GPU * mp_size",
            "644",
        ),
        (
            {},
            {"tensor_parallel_size": 2, "world_size": 2},
            "fwd flops of model = fwd flops per GPU * mp_size",
            "–",
        ),
        (SHARDED, {"world_size": 2}, "params of model, which is sharded", "322"),
        (SHARDED, {"world_size": 2}, "params per GPU", "161"),
        ({}, {"world_size": 4}, "params of model = params per GPU * mp_size", "–"),
        ({}, {"world_size": 4, "tensor_parallel_size": 4}, "data parallel size", "1"),
        ({}, {"world_size": 4, "data_parallel_size": 4}, "model parallel size", "1"),
        ({}, {"world_size": 4}, "samples/second per GPU", "4000.0"),
        ({}, {"world_size": 4, "data_parallel_size": 2}, "samples/second", "8000.0"),
    ],
)
def test_more_than_one_gpu(
    root: dict[str, Any], sizes: dict[str, int], label: str, value: str
) -> None:
    """Torch's own sharding tells the model's parameters.

    A factor is used where it is known, and a rate of all where all are.
    """
    one = blocks(steps=(CLEAN,))
    modules = {**one.modules, "": replace(one.modules[""], **root)}
    given = replace(one, modules=modules, run=replace(one.run, **sizes))
    if label.startswith("fwd flops of model"):
        assert "4.86 K" == labelled(with_logical(given, given.modules[""].forward.macs))[label]
        label = "fwd flops of model = 2 * fwd MACs of model"
    assert value == labelled(given)[label]


def test_stages_are_one_model_and_no_gpus_work() -> None:
    """`up` with 128 MACs on one rank, `down` with 32 on the other.

    160 of the model, in a step of which no GPU did as much.
    """
    step = Step(index=0, kind="unprofiled", seconds=0.2, phases={"forward": 0.1})
    first = profile(
        {"": weights(0, 144), "up": weights(144)},
        [product("up", "aten::mm", "forward", macs=128, bytes_moved=1)],
        steps=(step,),
    )
    last = profile(
        {"": weights(0, 34), "down": weights(34)},
        [product("down", "aten::mm", "forward", macs=32, bytes_moved=1)],
        steps=(step,),
    )
    lines = labelled(merge([first, last]))
    assert ("178", "160 MACs") == (
        lines["params of model, all stages together"],
        lines["fwd MACs of model, all stages together"],
    )
    assert UNKNOWN == lines["fwd FLOPS per GPU = fwd flops per GPU / fwd latency"]
    assert "fwd MACs per GPU" not in lines
    assert "160 MACs forward and backward, 32 to 128 on each" == lines["all ranks"]


def with_logical(given: Profile, macs: int) -> Profile:
    """The same, with the unsharded model's MACs at the root."""
    root = given.modules[""]
    return replace(
        given,
        modules={
            **given.modules,
            "": replace(root, forward=replace(root.forward, logical_macs=macs)),
        },
    )


def test_the_models_flops_are_those_of_its_logical_macs_where_these_differ() -> None:
    """Twice the 1500 that the unsharded model would have done."""
    one = blocks()
    given = with_logical(
        replace(one, run=replace(one.run, world_size=2, tensor_parallel_size=2)), 1500
    )
    assert "3 K" == labelled(given)["fwd flops of model = 2 * fwd MACs of model"]


def test_stages_that_are_spread_are_told_as_the_whole_model() -> None:
    """128 MACs of 256 on one rank, 32 of 64 on the other.

    320 of the model, and their double in FLOPs.
    """
    stages = []
    for name, macs in (("up", 128), ("down", 32)):
        one = profile(
            {"": weights(0, 144), name: weights(144)},
            [product(name, "aten::mm", "forward", macs=macs, bytes_moved=1)],
        )
        rows = {
            row: replace(each, forward=replace(each.forward, logical_macs=2 * macs))
            for row, each in one.modules.items()
        }
        stages.append(replace(one, modules=rows))
    lines = labelled(merge(stages))
    assert ("320 MACs", "640") == (
        lines["fwd MACs of model, all stages together"],
        lines["fwd flops of model = 2 * fwd MACs of model"],
    )


def test_experts_are_told_apart() -> None:
    """As DeepSpeed does where a model has some."""
    values = {"non_expert_parameters": 200, "expert_parameters": 2400, "tensor_parallel": 0}
    figures = labelled(blocks(notes=(Note(code="experts", subject="", values=values),)))
    assert ("False", "2.6 K", "200", "2.4 K") == (
        figures["expert tensor parallelism enabled"],
        figures["params of model"],
        figures["non-expert params of model"],
        figures["expert params of model"],
    )


def test_beneath_stand_the_phases_of_a_step_with_their_shares() -> None:
    """0.2 of 3 ms waited for data, 1 ms forward."""
    figures = labelled(small_profile())
    assert ("200 µs, 6.7 % of the step", "1.00 ms, 33.3 % of the step") == (
        figures["data latency"],
        figures["forward latency"],
    )
    assert ("768", "1.60 k", "178") == (
        figures["bwd MACs per GPU"],
        figures["bwd flops per GPU"],
        figures["step flops per GPU"],
    )
    assert "1 unprofiled step" == figures["the latencies come from"]
    assert (
        "2.93 KiB, of these activations 2.23 KiB, parameters 712 B" == figures["peak live memory"]
    )


def test_utilization_stands_beside_its_peak() -> None:
    """2 * 1408 MACs in 3 ms are 938,667 FLOP/s, of a peak of 4 M."""
    chip = Hardware("Toy", {"fp32": 4e6})
    timed = small_profile()
    figures = labelled(replace(timed, run=replace(timed.run, hardware=chip)))
    assert "23.5 %, of 4.00 MFLOP/s (Toy, fp32 dense)" == figures["MFU"]
    assert (
        '–, the peak of cpu is not known: hardware="measure" measures it' == labelled(timed)["MFU"]
    )


def test_a_trace_is_named_with_the_operators_that_took_most() -> None:
    """Of two batches: 30 µs of their own on the device, in two calls.

    Without a device 100 µs on the host.
    """
    traced = small_profile()
    figures = labelled(traced)
    assert "node0_0.pt.trace.json.gz" == figures["trace"]
    assert (
        "aten::addmm  15.0 µs, calls: 1"
        == figures["most self time on the device in a traced batch"]
    )
    (addmm,) = traced.trace.operators if traced.trace else ()
    on_host = replace(
        traced.trace,
        operators=(replace(addmm, self_device_seconds=0.0),),
        files={"0": "a", "1": "b"},
    )
    figures = labelled(replace(traced, trace=on_host))
    assert ("a", "b") == (figures["trace of rank 0"], figures["trace of rank 1"])
    assert (
        "aten::addmm  50.0 µs, calls: 1" == figures["most self time on the host in a traced batch"]
    )


def test_what_was_not_counted_is_named() -> None:
    """With its calls and bytes, and its time where that is known."""
    assert "my_ops::scan  2 calls in head" in summary(analyze(scan_traced()))
    assert "nothing: every operator that ran has a formula" == labelled(blocks())["not counted"]


def test_what_a_reader_has_to_know_is_said() -> None:
    """A part that never ran, an end before its time, and each note."""
    one = blocks()
    head = replace(one.modules["head"], calls=0)
    ignored = Note(code="ignored", subject="head", values={"calls": 1, "macs": 128, "flops": 256})
    given = replace(
        one,
        modules={**one.modules, "head": head},
        run=replace(one.run, partial=True),
        notes=(ignored, ignored),
    )
    figures = labelled(given)
    assert "head" == figures["never called"]
    assert "partial" in figures
    assert figures["note"].startswith("head is left out of all totals, as requested")
    assert 2 == summary(analyze(given)).count("head is left out of all totals, as requested")
    assert {"never called", "partial", "note"}.isdisjoint(labelled(one))


def test_a_generation_has_its_two_parts_apart() -> None:
    """2000 flops of prompt in 1 ms, 400 in 4 calls in 2 ms.

    Half a ms each, for 4 tokens; with those of the prompt 20 in 3 ms.
    """
    values = {
        "prefill_macs": 1000,
        "decode_macs": 200,
        "decode_calls": 4,
        "prefill_flops": 2000,
        "decode_flops": 400,
    }
    phases = {"forward": 3e-3, "prefill": 1e-3, "decode": 2e-3}
    step = Step(index=0, kind="unprofiled", seconds=3e-3, phases=phases, tokens=15)
    figures = labelled(
        blocks(steps=(step,), notes=(Note(code="generated", subject="", values=values),))
    )
    assert ("1.00 k", "2 MFLOPS") == (
        figures["prefill MACs per GPU"],
        figures["prefill FLOPS per GPU"],
    )
    assert ("200", "200 KFLOPS") == (
        figures["decode MACs per GPU"],
        figures["decode FLOPS per GPU"],
    )
    assert ("4", "500 µs") == (figures["decode calls"], figures["decode latency of one call"])
    assert ("8000.00", "6666.67") == (
        figures["decode tokens/second per GPU"],
        figures["tokens/second per GPU"],
    )
    assert "2.00 ms, 66.7 % of the step" == figures["decode latency"]


def test_several_steps_have_quartiles() -> None:
    """Of 1, 2, 3, 4 and 5 ms the quartiles are 2 and 4."""
    steps = tuple(
        Step(index=i, kind="unprofiled", seconds=i * 1e-3, phases={"forward": i * 1e-3})
        for i in range(1, 6)
    )
    figures = labelled(blocks(steps=steps))
    assert ("3 ms", "3.00 ms, 100.0 % of the step") == (
        figures["fwd latency"],
        figures["forward latency"],
    )
    assert "3.00 ms, 2.00 ms to 4.00 ms" == figures["the median step and its quartiles"]
    assert "5 unprofiled steps" == figures["the latencies come from"]


def test_what_timing_modules_costs_is_said() -> None:
    """A quarter more than a clean step."""
    given = blocks(steps=(CLEAN,))
    figures = labelled(replace(given, run=replace(given.run, observer_ratio=1.25)))
    assert "1.25×, module-timing passes over unprofiled passes" == figures["cost of timing"]


def test_the_kinds_of_modules_are_added_up_by_depth() -> None:
    """Two blocks are one line, their layers another; the list around them has their time."""
    levels = by_depth(blocks())
    assert [["Net"], ["ModuleList", "Linear"], ["Block"], ["Linear", "GELU"]] == [
        [kind.name for kind in level] for level in levels
    ]
    assert (
        ModuleClass(name="Block", modules=2, parameters=288, macs=1024, seconds=4e-4)
        == levels[2][0]
    )
    assert (
        ModuleClass(name="ModuleList", modules=1, parameters=288, macs=1024, seconds=4e-4)
        == levels[1][0]
    )


@pytest.mark.parametrize(("depth", "levels"), [(-1, 4), (0, 1), (1, 2), (3, 4), (99, 4)])
def test_a_depth_is_the_last_that_is_shown(depth: int, levels: int) -> None:
    """-1 and too deep are the innermost, 0 is the root."""
    assert levels == len(by_depth(blocks(), depth))
    assert levels == sum(
        line.startswith("depth ") for line in aggregated(blocks(), module_depth=depth)
    )


def test_a_depth_that_cannot_be_is_refused() -> None:
    """Also before any other part is written."""
    with pytest.raises(ValueError, match=r"depth=-2: pass -1 for all depths"):
        summary(analyze(blocks()), module_depth=-2)


def test_a_kind_with_a_module_of_unknown_time_has_none() -> None:
    """One that ran and was not timed makes it unknown; one that never ran does not."""
    one = blocks()
    up = one.modules["layers.0.up"]
    untimed = replace(up, forward=replace(up.forward, seconds=None))
    ran, idle = (
        replace(one, modules={**one.modules, "layers.0.up": each})
        for each in (untimed, replace(untimed, calls=0, forward=zero()))
    )
    assert [None, 1e-4] == [by_depth(each)[3][0].seconds for each in (ran, idle)]


def zero() -> Any:
    """The work of a module that did none."""
    return blocks().modules[""].backward


def test_the_most_come_first_and_the_unknown_not_at_all() -> None:
    """By value, however they stand in the model."""
    kinds = [
        ModuleClass(name=name, modules=1, parameters=n, macs=0, seconds=s)
        for name, n, s in (("a", 1, None), ("b", 3, 1.0), ("c", 2, 2.0))
    ]
    assert ["b", "c"] == list(most(kinds, "parameters", 2))
    assert ["c", "b"] == list(most(kinds, "seconds", 9))


def test_the_second_part_is_written_as_deepspeed_writes_it() -> None:
    """The class's name and its figure, the most first."""
    assert [
        "Top 2 modules in terms of params, MACs or fwd latency at different model depths:",
        "depth 0:",
        "    params      - {'Net': '322'}",
        "    MACs        - {'Net': '1.15 KMACs'}",
        "    fwd latency - {'Net': '500 us'}",
        "depth 1:",
        "    params      - {'ModuleList': '288', 'Linear': '34'}",
        "    MACs        - {'ModuleList': '1.02 KMACs', 'Linear': '128 MACs'}",
        "    fwd latency - {'ModuleList': '400 us', 'Linear': '100 us'}",
    ] == aggregated(blocks(), module_depth=1, top_modules=2)


def test_the_third_part_is_the_model_as_torch_prints_it() -> None:
    """Each share is of the root's.

    144 of 322 parameters, 512 of 1152 MACs, 200 of 500 µs, 1088 flops in 200 µs.
    """
    lines = detailed(blocks())
    assert lines[:6] == [
        "Net(",
        "  322 = 100% Params, 1.15 KMACs = 100% MACs, 500 us = 100% latency, 4.86 MFLOPS",
        "  (layers): ModuleList(",
        "    288 = 89.44% Params, 1.02 KMACs = 88.89% MACs, 400 us = 80% latency, 5.44 MFLOPS",
        "    (0): Block(",
        "      144 = 44.72% Params, 512 MACs = 44.44% MACs, 200 us = 40% latency, 5.44 MFLOPS",
    ]
    up = "(up): Linear(144 = 44.72% Params, 512 MACs = 44.44% MACs, 100 us = 20% latency, 10.24 MFLOPS, "
    assert f"      {up}in_features=8, out_features=16, bias=True)" == lines[6]
    assert ["    )", "  )", ")"] == [line for line in lines[-6:] if line.strip() == ")"]
    assert "Detailed" not in summary(analyze(blocks()), detailed=False)


def test_what_is_special_about_a_module_is_said_behind_its_figures() -> None:
    """Whose parameters it shares, that it is compiled, that it never ran.

    A name that would drive the terminal is made harmless.
    """
    rows = {
        "": {"class_name": "Net"},
        "a": {"class_name": "Linear", "owner": "", "compiled": True},
        "b": {"class_name": "Li\x1bnear", "calls": 0, "parameters": 8, "detail": "p=0.1"},
    }
    lines = detailed(profile(rows, []))
    assert lines[2].endswith("shares the model itself, compiled)")
    assert "(b): Li\N{REPLACEMENT CHARACTER}near(" in lines[3]
    assert lines[3].endswith("– FLOPS, never called, p=0.1)")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (999, "999"),
        (1000, "1 K"),
        (61_100_840, "61.1 M"),
        (1_428_376_960, "1.43 G"),
        (6.27986e12, "6.28 T"),
        (0.0123, "12.3 m"),
        (5e-5, "50 u"),
        (2e-10, "0.0002 u"),
    ],
)
def test_numbers_are_written_as_deepspeed_writes_them(value: float | None, text: str) -> None:
    """Two decimals, without zeros behind them; what is not 0 does not read as 0."""
    assert text == short_units.number(value)


def test_each_unit_stands_where_deepspeed_puts_it() -> None:
    """Parameters count in billions; a share of nothing is unknown."""
    assert ("1.34 B", "10.74 GMACs", "2 G") == (
        short_units.params(1.34e9),
        short_units.macs(10.74e9),
        short_units.flops(2e9),
    )
    assert ("117.74 TFLOPS", "182.39 us") == (
        short_units.rate(117.74e12),
        short_units.duration(182.39e-6),
    )
    assert ["33.33%", "–%", "–%", "0.001%"] == [
        short_units.percent(*pair) for pair in ((1, 3), (None, 3), (0, 0), (1, 100_000))
    ]
