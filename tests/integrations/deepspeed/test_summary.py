"""Test the text in the format of DeepSpeed's profiler, with profiles that are made by hand.

The expected figures follow from the counts and times of these profiles, and each docstring gives
the calculation. "Flops" are twice the MACs plus other arithmetic; "FLOPS" are flops per second.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.integrations.deepspeed.text import units as short_units
from lflops.integrations.deepspeed.text.module_classes import ModuleClass, by_depth, most
from lflops.integrations.deepspeed.text.summary import summary
from lflops.profile.notes import Note
from lflops.profile.profile import ModuleProfile, Profile, Work
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
    """Return the profile of one forward of a small model with 4 vectors, without backward.

    The model has two blocks, each with a `Linear(8, 16)` and a GELU, and a head `Linear(16, 2)`. A
    block has 4 × 8 × 16 = 512 MACs and the head 128, so the model has 1152. Each operator takes
    100 µs, so a block takes 200 µs and the model 500 µs.
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
    """Return the figures above the aggregated profile, by their labels."""
    text = summary(analyze(given), detailed=False, **options)
    figures, _, _ = text.partition("Aggregated Profile")
    lines = figures.splitlines()
    return {line[:70].strip().removesuffix(":"): line[72:] for line in lines if line[70:72] == "  "}


def aggregated(given: Profile, **options: Any) -> list[str]:
    """Return the lines of the part "Aggregated Profile per GPU"."""
    text = summary(analyze(given), detailed=False, **options)
    _, _, part = text.partition("Aggregated Profile per GPU")
    return part.splitlines()[1:-1]


def detailed(given: Profile) -> list[str]:
    """Return the lines of the model in the part "Detailed Profile per GPU"."""
    _, _, part = summary(analyze(given)).partition("Detailed Profile per GPU")
    model = part.split("\n\n")[1]
    return model.splitlines()[:-1]


CLEAN = Step(index=0, kind="unprofiled", seconds=1e-3, phases={"forward": 1e-3})
"""An unprofiled step of 1 ms that consists of forward."""


def test_the_parts_stand_in_deepspeeds_order_under_its_headings() -> None:
    """The headings are those of DeepSpeed, in its order, and two more.

    lflops adds "Further Figures per GPU" before the modules, and the step's times at the end. The
    title names lflops.
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
    """The step is the argument `step`, else the step of the run; without both, none is named."""
    said = []
    for given, step in ((small_profile(), 10), (small_profile(), None), (blocks(), None)):
        said.append(summary(analyze(given), step=step).splitlines()[1])
    assert ["Profile Summary at step 10:", "Profile Summary at step 8:", "Profile Summary:"] == said


def test_a_forward_has_the_labels_that_deepspeed_gives_a_forward() -> None:
    """The first figures have DeepSpeed's labels and order, and the values worked out by hand.

    1152 MACs and 2 × 1152 + 2 × 64 = 2432 flops in 1 ms are 2.43 MFLOPS. 4 samples in 1 ms are 4000
    per second.
    """
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
    """The flops of backward are counted, while DeepSpeed assumes twice the forward.

    Forward has 1344 flops in 1 ms, backward 1600 in 1.5 ms, and the step of 3 ms both, 2944. Two
    ranks with 4 samples each make 8 samples in 3 ms.
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
    """Recomputed flops count as work of backward, and the labels name them.

    Recompute has 800 MACs, so 1600 flops. With 1600 flops of backward, these are 3200 in 1.5 ms.
    With 1344 flops of forward, they are 4544 in 2.5 ms.
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
    both = "fwd+bwd FLOPS per GPU = fwd+bwd+recompute flops / (fwd+bwd latency)"
    assert "1.82 MFLOPS" == figures[both]
    assert "800" == figures["recompute MACs per GPU"]
    assert "1.60 k" == figures["recompute flops per GPU"]


def test_a_backward_that_nobody_counted_has_deepspeeds_factor_and_says_so() -> None:
    """If backward was not counted, it is assumed to cost 2.5 forwards, and the labels say this.

    A forward has 2432 flops. So backward has 2.5 × 2432 in 2 ms, and both have 3.5 × 2432 in 3 ms.
    """
    step = Step(
        index=0,
        kind="unprofiled",
        seconds=4e-3,
        phases={"forward": 1e-3, "backward": 2e-3, "optimizer": 1e-3},
    )
    note = Note(code="backward_assumed", subject="", values={"forwards": 2.5})
    figures = labelled(blocks(steps=(step,), notes=(note,)))
    assert "3.04 MFLOPS" == figures["bwd FLOPS per GPU = 2.5 * fwd flops per GPU / bwd latency"]
    both = "fwd+bwd FLOPS per GPU = 3.5 * fwd flops per GPU / (fwd+bwd latency)"
    assert "2.84 MFLOPS" == figures[both]
    assert "2.13 MFLOPS" == figures["FLOPS per GPU = 3.5 * fwd flops per GPU / iter latency"]
    assert ("1 ms", "4 ms") == (figures["step latency"], figures["iter latency"])
    assert "note" not in figures


def test_an_unknown_latency_is_a_dash_and_so_is_what_it_would_divide() -> None:
    """In a profile without times, latencies and rates are "–" in all three parts."""
    counted = profile(
        {"": {"class_name": "Net"}}, [product("", "aten::mm", "forward", macs=1, bytes_moved=1)]
    )
    figures = labelled(counted)
    assert "–" == figures["fwd latency"]
    assert "–" == figures["fwd FLOPS per GPU = fwd flops per GPU / fwd latency"]
    assert "    fwd latency - –" in aggregated(counted)
    assert ["Net(0 = –% Params, 1 MACs = 100% MACs, – = –% latency, – FLOPS)"] == detailed(counted)


def test_where_no_step_is_clean_the_latency_is_the_roots_own() -> None:
    """Without an unprofiled step, the latency is the module time of the root, and the text says so.

    The root has 5 operators of 100 µs. If counting made the pass slower, here by a factor of 3, the
    text says this as well.
    """
    step = Step(index=0, kind="counting", seconds=5e-4, phases={})
    counted_alone = blocks(steps=(step,))
    figures = labelled(counted_alone)
    assert "500 us" == figures["fwd latency"]
    assert "only the pass in which operators were counted" == figures["the latencies come from"]
    slow = labelled(replace(counted_alone, run=replace(counted_alone.run, observer_ratio=3.0)))
    said = (
        "counting made the pass 3.00 times as long; the extra time is subtracted from the "
        "latencies, except for a few µs per operator"
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
    """Figures of the whole model are shown if the sizes of the run determine them, otherwise "–".

    With sharded parameters, the profile itself has the parameters of the whole model. Otherwise
    they need the model-parallel size as a factor. The samples per second of all ranks need the
    data-parallel size; without it, those of one GPU are shown.
    """
    one = blocks(steps=(CLEAN,))
    modules = {**one.modules, "": replace(one.modules[""], **root)}
    given = replace(one, modules=modules, run=replace(one.run, **sizes))
    if label.startswith("fwd flops of model"):
        assert "4.86 K" == labelled(with_logical(given, given.modules[""].forward.macs))[label]
        label = "fwd flops of model = 2 * fwd MACs of model"
    assert value == labelled(given)[label]


def test_stages_are_one_model_and_no_gpus_work() -> None:
    """For pipeline stages, the figures are those of the model, and there are none for one GPU.

    One rank has `up` with 128 MACs, and the other has `down` with 32. The model has 160, and no GPU
    did all of them.
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
    assert "178" == lines["params of model, all stages together"]
    assert "160 MACs" == lines["fwd MACs of the model, all stages together"]
    assert UNKNOWN == lines["fwd FLOPS per GPU = fwd flops per GPU / fwd latency"]
    assert "fwd MACs per GPU" not in lines
    assert "160 MACs in forward and backward, 32 to 128 per rank" == lines["all ranks"]


def with_logical(given: Profile, macs: int) -> Profile:
    """Return the profile with `macs` as the MACs of the unsharded model, in the root's forward."""
    root = given.modules[""]
    root = replace(root, forward=replace(root.forward, logical_macs=macs))
    return replace(given, modules={**given.modules, "": root})


def test_the_models_flops_are_those_of_its_logical_macs_where_these_differ() -> None:
    """The flops of a tensor-parallel model are twice the MACs of the unsharded model, here 1500."""
    one = blocks()
    sharded = replace(one, run=replace(one.run, world_size=2, tensor_parallel_size=2))
    given = with_logical(sharded, 1500)
    assert "3 K" == labelled(given)["fwd flops of model = 2 * fwd MACs of model"]


def test_stages_that_are_spread_are_told_as_the_whole_model() -> None:
    """For pipeline stages with tensor parallelism, the figures are those of the whole model.

    One rank did 128 of the 256 MACs of its stage, and the other 32 of 64. The model has 320 MACs,
    and twice as many flops.
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
    assert "320 MACs" == lines["fwd MACs of the model, all stages together"]
    assert "640" == lines["fwd flops of model = 2 * fwd MACs of model"]


def test_experts_are_told_apart() -> None:
    """For a model with experts, parameters of experts and others are shown as in DeepSpeed."""
    values = {"non_expert_parameters": 200, "expert_parameters": 2400, "tensor_parallel": 0}
    figures = labelled(blocks(notes=(Note(code="experts", subject="", values=values),)))
    assert "False" == figures["expert tensor parallelism enabled"]
    assert "2.6 K" == figures["params of model"]
    assert "200" == figures["non-expert params of model"]
    assert "2.4 K" == figures["expert params of model"]


def test_beneath_stand_the_phases_of_a_step_with_their_shares() -> None:
    """The figures that lflops adds include the phases of a step with their shares, and memory.

    In the step of 3 ms, the data wait takes 0.2 ms and forward 1 ms.
    """
    figures = labelled(small_profile())
    assert "200 µs, 6.7 % of the step" == figures["data latency"]
    assert "1.00 ms, 33.3 % of the step" == figures["forward latency"]
    assert "768" == figures["bwd MACs per GPU"]
    assert "1.60 k" == figures["bwd flops per GPU"]
    assert "178" == figures["step flops per GPU"]
    assert "1 unprofiled step" == figures["the latencies come from"]
    memory = "2.93 KiB, of these activations 2.23 KiB, parameters 712 B"
    assert memory == figures["peak live memory"]


def test_utilization_stands_beside_its_peak() -> None:
    """The MFU is shown with the peak to which it refers, or "–" if no peak is known.

    2 × 1408 MACs in 3 ms are 938,667 FLOP/s, and the peak is 4 MFLOP/s.
    """
    chip = Hardware("Toy", {"fp32": 4e6})
    timed = small_profile()
    figures = labelled(replace(timed, run=replace(timed.run, hardware=chip)))
    assert "23.5 %, of 4.00 MFLOP/s (Toy, fp32 dense)" == figures["MFU"]
    unknown = '–, the peak of cpu is unknown: pass hardware="measure" to measure it'
    assert unknown == labelled(timed)["MFU"]


def test_a_trace_is_named_with_the_operators_that_took_most() -> None:
    """The text has the trace files and the operators with the most self time in a batch.

    The trace has two batches. In two calls, the operator takes 30 µs on the device. Without a
    device time, its 100 µs on the host are shown.
    """
    traced = small_profile()
    figures = labelled(traced)
    assert "node0_0.pt.trace.json.gz" == figures["trace"]
    most = figures["operators with the most self time on the device, per traced batch"]
    assert "aten::addmm  15.0 µs, calls: 1" == most
    assert traced.trace is not None
    (addmm,) = traced.trace.operators
    on_host = replace(
        traced.trace,
        operators=(replace(addmm, self_device_seconds=0.0),),
        files={"0": "a", "1": "b"},
    )
    figures = labelled(replace(traced, trace=on_host))
    assert ("a", "b") == (figures["trace of rank 0"], figures["trace of rank 1"])
    most = figures["operators with the most self time on the host, per traced batch"]
    assert "aten::addmm  50.0 µs, calls: 1" == most


def test_what_was_not_counted_is_named() -> None:
    """Unsupported operators are listed with their calls and modules.

    If all operators have a formula, the text says so.
    """
    assert "my_ops::scan  2 calls in head" in summary(analyze(scan_traced()))
    assert "nothing: every operator that ran has a formula" == labelled(blocks())["not counted"]


def test_what_a_reader_has_to_know_is_said() -> None:
    """The text says if a module was never called or the profile is partial, and has every note.

    The profile has the same note twice, and so has the text. Without these facts, the text has no
    such labels.
    """
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
    """For a text generation, prefill and decode have separate figures.

    Prefill has 2000 flops in 1 ms. Decode has 400 flops in 4 calls, which take 2 ms, so 500 µs
    each. Each call makes one token for each of 4 samples. So decode makes 4 tokens in 500 µs, and
    all 5 calls, with that of prefill, make 20 tokens in 3 ms.
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
    note = Note(code="generated", subject="", values=values)
    figures = labelled(blocks(steps=(step,), notes=(note,)))
    assert "1.00 k" == figures["prefill MACs per GPU"]
    assert "2 MFLOPS" == figures["prefill FLOPS per GPU"]
    assert "200" == figures["decode MACs per GPU"]
    assert "200 KFLOPS" == figures["decode FLOPS per GPU"]
    assert "4" == figures["decode calls"]
    assert "500 µs" == figures["decode latency of one forward call"]
    assert "8000.00" == figures["decode tokens/second per GPU"]
    assert "6666.67" == figures["tokens/second per GPU"]
    assert "2.00 ms, 66.7 % of the step" == figures["decode latency"]


def test_several_steps_have_quartiles() -> None:
    """The latency of several steps is their median, shown with its quartiles.

    For steps of 1, 2, 3, 4 and 5 ms, the median is 3 ms and the quartiles are 2 ms and 4 ms.
    """
    steps = tuple(
        Step(index=i, kind="unprofiled", seconds=i * 1e-3, phases={"forward": i * 1e-3})
        for i in range(1, 6)
    )
    figures = labelled(blocks(steps=steps))
    assert "3 ms" == figures["fwd latency"]
    assert "3.00 ms, 100.0 % of the step" == figures["forward latency"]
    assert "3.00 ms, 2.00 ms to 4.00 ms" == figures["the median step and its quartiles"]
    assert "5 unprofiled steps" == figures["the latencies come from"]


def test_what_timing_modules_costs_is_said() -> None:
    """The cost of module timing is its step time relative to an unprofiled step, here 1.25."""
    given = blocks(steps=(CLEAN,))
    figures = labelled(replace(given, run=replace(given.run, observer_ratio=1.25)))
    assert (
        "1.25×, time of module-timing passes relative to unprofiled passes"
        == figures["cost of timing"]
    )


def test_the_kinds_of_modules_are_added_up_by_depth() -> None:
    """`by_depth` adds up the modules of a class at each depth.

    The `ModuleList` never runs itself, but has the MACs and the time of the blocks inside it.
    """
    levels = by_depth(blocks())
    assert [["Net"], ["ModuleList", "Linear"], ["Block"], ["Linear", "GELU"]] == [
        [kind.name for kind in level] for level in levels
    ]
    block = ModuleClass(name="Block", modules=2, parameters=288, macs=1024, seconds=4e-4)
    assert block == levels[2][0]
    around = ModuleClass(name="ModuleList", modules=1, parameters=288, macs=1024, seconds=4e-4)
    assert around == levels[1][0]


@pytest.mark.parametrize(("depth", "levels"), [(-1, 4), (0, 1), (1, 2), (3, 4), (99, 4)])
def test_a_depth_is_the_last_that_is_shown(depth: int, levels: int) -> None:
    """All depths up to `module_depth` are shown: 0 is only the root, -1 is every depth."""
    assert levels == len(by_depth(blocks(), depth))
    lines = aggregated(blocks(), module_depth=depth)
    assert levels == sum(line.startswith("depth ") for line in lines)


def test_a_depth_that_cannot_be_is_refused() -> None:
    """A depth below -1 raises an error that names the accepted value."""
    with pytest.raises(ValueError, match=r"depth=-2: pass -1 for all depths"):
        summary(analyze(blocks()), module_depth=-2)


def test_a_kind_with_a_module_of_unknown_time_has_none() -> None:
    """A class has no time if one of its modules ran and was not timed.

    A module that never ran does not make the time of its class unknown.
    """
    one = blocks()

    def linear_seconds(up: ModuleProfile) -> float | None:
        levels = by_depth(replace(one, modules={**one.modules, "layers.0.up": up}))
        linear = levels[3][0]
        return linear.seconds

    up = one.modules["layers.0.up"]
    untimed = replace(up, forward=replace(up.forward, seconds=None))
    never_ran = replace(untimed, calls=0, forward=zero())
    assert linear_seconds(untimed) is None
    assert 1e-4 == linear_seconds(never_ran)


def zero() -> Work:
    """Return the work of a phase that never ran: `blocks` has no backward."""
    return blocks().modules[""].backward


def test_the_most_come_first_and_the_unknown_not_at_all() -> None:
    """`most` sorts classes by a value, largest first, and leaves out classes without the value."""
    kinds = [
        ModuleClass(name=name, modules=1, parameters=n, macs=0, seconds=s)
        for name, n, s in (("a", 1, None), ("b", 3, 1.0), ("c", 2, 2.0))
    ]
    assert ["b", "c"] == list(most(kinds, "parameters", 2))
    assert ["c", "b"] == list(most(kinds, "seconds", 9))


def test_the_second_part_is_written_as_deepspeed_writes_it() -> None:
    """The aggregated profile has the largest classes of each depth, in DeepSpeed's format."""
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
    """The detailed profile is the model as torch prints it, with the figures of each module.

    Shares refer to the root. For block 0, these are 144 of 322 parameters, 512 of 1152 MACs and 200
    of 500 µs; 1088 flops in 200 µs are 5.44 MFLOPS.
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
    up = (
        "      (up): Linear(144 = 44.72% Params, 512 MACs = 44.44% MACs, 100 us = 20% latency, "
        "10.24 MFLOPS, in_features=8, out_features=16, bias=True)"
    )
    assert up == lines[6]
    assert ["    )", "  )", ")"] == [line for line in lines[-6:] if line.strip() == ")"]
    assert "Detailed" not in summary(analyze(blocks()), detailed=False)


def test_what_is_special_about_a_module_is_said_behind_its_figures() -> None:
    """A module's line says if it shares parameters, is compiled or was never called.

    Control characters in a class name are replaced, so that they cannot control the terminal.
    """
    rows = {
        "": {"class_name": "Net"},
        "a": {"class_name": "Linear", "owner": "", "compiled": True},
        "b": {"class_name": "Li\x1bnear", "calls": 0, "parameters": 8, "detail": "p=0.1"},
    }
    lines = detailed(profile(rows, []))
    assert lines[2].endswith("shares parameters of the model itself, compiled)")
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
    """Numbers have two decimals without trailing zeros, but no small number reads as 0."""
    assert text == short_units.number(value)


def test_each_unit_stands_where_deepspeed_puts_it() -> None:
    """Units are written as in DeepSpeed: for parameters, "B" means billions.

    A share is "–%" if a number is unknown or the whole is 0.
    """
    assert "1.34 B" == short_units.params(1.34e9)
    assert "10.74 GMACs" == short_units.macs(10.74e9)
    assert "2 G" == short_units.flops(2e9)
    assert "117.74 TFLOPS" == short_units.rate(117.74e12)
    assert "182.39 us" == short_units.duration(182.39e-6)
    assert "33.33%" == short_units.percent(1, 3)
    assert "–%" == short_units.percent(None, 3)
    assert "–%" == short_units.percent(0, 0)
    assert "0.001%" == short_units.percent(1, 100_000)
