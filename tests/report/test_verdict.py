"""The sentences about a profile: three runs with a planted cause, which each of them names first."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from lflops.profile.steps import Step
from lflops.report.report import report_of
from tests.support.profile_builders import cell, clocked, product, profile, run, untimed

CHIP = Hardware("abacus", {"fp32": 1e6}, bandwidth_bytes_per_second=1e6, memory_bytes=64 * 2**30)
"""A million FLOP/s, and as many bytes."""

LAYERS = [f"blocks.{block}.{name}" for block in range(4) for name in ("fc", "norm")]


def blocks(milliseconds: Mapping[str, float], step: Mapping[str, float], **facts: Any) -> Profile:
    """4 blocks of a product, 2 ms at the peak, and a norm of 1 ms at the bandwidth.

    Forward only, in a step with these phases.
    """
    rows = {
        name: {"class_name": "Block"}
        for name in ["", "blocks", *(f"blocks.{block}" for block in range(4))]
    }
    rows |= {
        name: {"class_name": "Linear" if name.endswith("fc") else "LayerNorm"} for name in LAYERS
    }
    cells = [
        product(name, "aten::mm", "forward", macs=1000, bytes_moved=10)
        for name in LAYERS
        if name.endswith("fc")
    ]
    cells += [
        cell(name, "aten::native_layer_norm", "forward", flops=10, bytes_moved=1000)
        for name in LAYERS
        if name.endswith("norm")
    ]
    own: dict[tuple[str, Phase], float] = {
        (name, "forward"): milliseconds.get(name, 2.0) * 1e-3 for name in LAYERS
    }
    phases = {name: each * 1e-3 for name, each in step.items()}
    clean = Step(index=0, kind="unprofiled", seconds=sum(phases.values()), phases=phases)
    of = run(**({"kind": "training", "stage": "train", "hardware": CHIP} | facts))
    return clocked(profile(rows, cells, run=of, steps=(clean,)), own)


def told(given: Profile) -> tuple[str, tuple[str, ...]]:
    """How fast, and why."""
    found = report_of(analyze(given)).verdict
    return found.said, found.why


def test_a_wait_for_data_is_named_first() -> None:
    """16 of 40 ms are the modules', 8 of these at the peak: 20 % MFU; the other 24 are the wait."""
    said, why = told(blocks({}, {"data": 24, "forward": 16}))
    assert (
        "A step takes 40.0 ms, at 20.0 % MFU.",
        "60.0 % of the step (24.0 ms) is spent waiting for data.",
    ) == (said, why[0])


def test_a_model_that_is_never_called_is_not_told_to_log_less() -> None:
    """All of 40 ms is in no phase: what lflops watches is not what the loop calls."""
    clean = Step(index=0, kind="unprofiled", seconds=40e-3, phases={"other": 40e-3})
    rows = {name: {"class_name": "Net", "calls": 0} for name in ("", "fc")}
    found = report_of(analyze(profile(rows, [], run=run(kind="training"), steps=(clean,)))).verdict
    assert (
        "100.0 % of the step (40.0 ms) is spent outside all phases, because the monitored model was never called.",
    ) == found.why
    assert ("Pass the model that the loop calls to lflops.",) == found.next


def test_a_model_whose_methods_are_called_directly_is_not_said_to_be_never_called() -> None:
    """Without a count, no module has a call: 10 of 40 ms are forward, so the model did run.

    The other 30 ms are in no phase.
    """
    clean = Step(
        index=0, kind="unprofiled", seconds=40e-3, phases={"forward": 10e-3, "other": 30e-3}
    )
    rows = {name: {"class_name": "Net", "calls": 0} for name in ("", "fc")}
    not_counted = Note(code="not_counted", subject="", values={})
    given = profile(rows, [], run=run(kind="training"), steps=(clean,), notes=(not_counted,))
    why = report_of(analyze(given)).verdict.why
    assert ["75.0 % of the step (30.0 ms) is spent outside all phases"] == [
        each.partition(", in")[0] for each in why
    ]


def test_more_than_the_peak_is_no_achievement() -> None:
    """8 ms of products at the peak in 4 ms: a peak that was measured beside other programs.

    Steps that cannot tell say so too.
    """
    found = report_of(analyze(blocks({}, {"forward": 4}))).verdict
    over = (
        "A step is faster than the peak of abacus allows, so this peak is too low, and MFU is too "
        "high."
    )
    assert ("A step takes 4.00 ms, at 200.0 % MFU.", over) == (found.said, found.why[-1])
    assert ("Measure the peak again on an idle machine: lflops hardware --measure.",) == found.next


def test_a_slow_block_is_named() -> None:
    """Its product takes 26 ms where the others take 2: 24 more.

    Of the 28 ms below the roof 4 are left, as many as the norms need.
    """
    found = report_of(analyze(blocks({"blocks.2.fc": 26.0}, {"forward": 40}))).verdict
    assert "A step takes 40.0 ms, at 20.0 % MFU." == found.said
    assert (
        "blocks.2.fc takes 13.0× as long as the other 3 identical modules, which costs 60.0 % of the step (24.0 ms).",
    ) == found.why
    assert {"10.0 % of the step (4.00 ms) is", "Another 10.0 % of the step (4.00 ms) is"} == {
        each[: each.index(" is") + 3] for each in found.also
    }


def test_a_module_with_more_operators_is_named_with_both_numbers() -> None:
    """Block 1 does the same product in 100 calls, in 22 ms where the others take 2."""
    given = blocks({"blocks.1.fc": 22.0}, {"forward": 36}, hardware=None)
    small = replace(
        product("blocks.1.fc", "aten::mm", "forward", macs=1000, bytes_moved=10), calls=100
    )
    cells = [small if each.module == "blocks.1.fc" else each for each in given.op_counts]
    rows = {name: {"class_name": module.class_name} for name, module in given.modules.items()}
    own: dict[tuple[str, Phase], float] = {
        (name, "forward"): 22e-3 if name == "blocks.1.fc" else 2e-3 for name in LAYERS
    }
    found = clocked(profile(rows, cells, run=given.run, steps=given.steps), own)
    why = "blocks.1.fc runs 100 operators, while the other 3 identical modules run 1 each: this costs 55.6 % of the step (20.0 ms)."
    assert why == told(found)[1][0]


def test_a_layer_in_a_wider_dtype_is_named() -> None:
    """Block 3 multiplies in float64, in 12 ms where the others take 2: 10 of 26 ms.

    Alone of its kind, half of its time is sure.
    """
    given = blocks({"blocks.3.fc": 12.0}, {"forward": 26}, hardware=None)
    wide = replace(
        given,
        op_counts=tuple(
            replace(each, dtype="float64") if each.module == "blocks.3.fc" else each
            for each in given.op_counts
        ),
    )
    why = "The matmuls of blocks.3.fc run in float64, while the other 3 identical modules use float32: this costs 38.5 % of the step (10.0 ms)."
    assert why == told(wide)[1][0]
    rows = {"": {"class_name": "Model"}, "head": {"class_name": "Linear"}}
    head = [
        replace(product("head", "aten::mm", "forward", macs=1000, bytes_moved=10), dtype="float64")
    ]
    steps = blocks({}, {"data": 8, "forward": 8}).steps
    alone = clocked(profile(rows, head, run=given.run, steps=steps), {("head", "forward"): 8e-3})
    why = "The matmuls of head run in float64, while the model trains in float32: this costs at least 25.0 % of the step (4.00 ms)."
    assert why == told(alone)[1][1]


def test_work_outside_of_the_layers_is_the_models_own() -> None:
    """Forward takes 30 ms, the layers 16 of them.

    14 are in training_step itself, known without any peak.
    """
    given = blocks({}, {"forward": 30}, hardware=None, strategy="SingleDeviceStrategy")
    model = {
        name: replace(module, class_name="Net") if not name else module
        for name, module in given.modules.items()
    }
    said, why = told(replace(given, modules=model))
    assert (
        "A step takes 30.0 ms.",
        "46.7 % of the step (14.0 ms) is spent in Net itself, outside its layers.",
    ) == (said, why[0])


def test_more_threads_than_cores_come_first() -> None:
    """What they cost is unknown; as many threads as cores are none."""
    why = "torch computes with 8 threads on 2 cores: the threads take turns, which makes all times longer."
    assert why == told(blocks({}, {"data": 24, "forward": 16}, threads=8, cores=2))[1][0]
    assert why not in told(blocks({}, {"data": 24, "forward": 16}, threads=2, cores=2))[1]


def test_memory_bound_pointwise_work_is_named() -> None:
    """Norms of 1 ms at the bandwidth, in 1 ms: 4 of 12 ms, and nothing below the roof."""
    given = blocks(
        dict.fromkeys((name for name in LAYERS if name.endswith("norm")), 1.0), {"forward": 12}
    )
    why = "33.3 % of the step (4.00 ms) is memory-bound pointwise work, mostly in blocks.*.norm."
    assert ("A step takes 12.0 ms, at 66.7 % MFU.", (why,)) == told(given)


def test_times_that_are_far_off_name_no_module() -> None:
    """Their notes say that they are no measure."""
    note = Note(code="time_scaled", subject="", values={"forward": 3.0})
    found = report_of(
        analyze(replace(blocks({"blocks.2.fc": 26.0}, {"forward": 40}), notes=(note,)))
    ).verdict
    assert (
        "70.0 % of the step (28.0 ms) is lost to inefficient kernels or idle time." == found.why[0]
    )
    assert "module times are unreliable in this run" in found.confidence


def test_times_that_are_far_off_name_the_phase_where_no_peak_is_known() -> None:
    """Of 60 ms the optimizer has 20, and forward 40, though no one can say which module has them.

    Nothing else is said of modules.
    """
    note = Note(code="time_scaled", subject="", values={"forward": 0.25, "backward": 2.0})
    given = replace(
        blocks({"blocks.2.fc": 26.0}, {"forward": 40, "optimizer": 20}, hardware=None),
        notes=(note,),
    )
    found = report_of(analyze(given)).verdict
    forward = (
        "66.7 % of the step (40.0 ms) is spent in forward, but lflops cannot tell in which module."
    )
    assert (("33.3 % of the step (20.0 ms) is optimizer work.",), (forward,)) == (
        found.why,
        found.also,
    )
    scaled = "to match the unprofiled steps, some are multiplied by 0.25"
    assert scaled in found.confidence


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        (
            (60.0, 0.5, 0.5, 60.0, 0.5),
            "60.0 % of the step (24.3 ms) is spent waiting for data: 60.0 ms in 2 of 5 steps, 500 µs in the other steps.",
        ),
        ((20.0, 30.0, 22.0, 28.0, 21.5), "60.0 % of the step (24.3 ms) is spent waiting for data."),
    ],
)
def test_a_wait_in_some_steps_is_said_as_such(waits: tuple[float, ...], said: str) -> None:
    """16.2 ms of forward in each step, and 24.3 of waiting in the mean."""
    steps = [
        Step(
            index=n,
            kind="unprofiled",
            seconds=(wait + 16.2) * 1e-3,
            phases={"data": wait * 1e-3, "forward": 16.2e-3},
        )
        for n, wait in enumerate(waits)
    ]
    given = replace(blocks({}, {"data": 24.3, "forward": 16.2}, hardware=None), steps=tuple(steps))
    assert said == report_of(analyze(given)).verdict.why[0]


def test_a_busy_machine_is_in_the_verdict() -> None:
    """Others took 30 ms for each 70 ms that the process had."""
    given = blocks({}, {"data": 24, "forward": 16}, hardware=None)
    busy = [
        Step(
            index=9,
            kind="module_timing",
            seconds=0.1,
            phases={},
            cpu_user=0.07,
            cpu_system=0.0,
            cpu_lost=0.03,
        )
    ]
    found = report_of(analyze(replace(given, steps=(*given.steps, *busy)))).verdict
    assert found.said == "A step takes 40.0 ms."
    assert "other processes took 30 % of the CPU time that this process needed" in found.confidence
    assert "unprofiled" not in found.confidence


def test_little_cpu_time_that_is_lost_is_no_busy_machine() -> None:
    """Of 40 ms a step needs 2 ms of the CPU: 30 % of it are 1.5 % of the step, and of 4 ms 3 %."""
    for needed, is_said in ((0.002, False), (0.004, True)):
        given = blocks({}, {"data": 36, "forward": 4}, hardware=None)
        timed = [replace(step, cpu_user=needed, cpu_system=0.0) for step in given.steps]
        busy = replace(timed[0], kind="module_timing", cpu_user=0.07, cpu_lost=0.03)
        found = report_of(analyze(replace(given, steps=(*timed, busy)))).verdict
        assert is_said == ("other processes took 30 %" in found.confidence)


def test_without_a_peak_the_time_and_the_wait_are_named() -> None:
    """40 ms a step, 24 of them the wait."""
    said, why = told(blocks({}, {"data": 24, "forward": 16}, hardware=None))
    assert ("A step takes 40.0 ms.", "60.0 % of the step (24.0 ms) is spent waiting for data.") == (
        said,
        why[0],
    )


def test_where_nothing_stands_out_the_busiest_modules_are_named() -> None:
    """8 of 8.08 ms are in four equal products, and no peak is known to hold them against."""
    norms = dict.fromkeys((name for name in LAYERS if name.endswith("norm")), 0.02)
    found = told(blocks(norms, {"forward": 8.08}, hardware=None))[1]
    assert (
        "The most time is spent in blocks.*.fc (Linear): 99.0 % of the step (8.00 ms).",
    ) == found


def test_a_model_whose_layers_have_no_time_is_no_layer_without_products() -> None:
    """As a compiled one: 16 ms are its own, in operators of which no one can say what they multiply.

    It is named once.
    """
    cells = [
        cell("", "aten::add", "forward"),
        product("fc", "aten::mm", "forward", macs=1000, bytes_moved=10),
    ]
    clean = Step(index=0, kind="unprofiled", seconds=16e-3, phases={"forward": 16e-3})
    rows = {"": {"class_name": "Net"}, "fc": {"class_name": "Linear"}}
    given = clocked(
        profile(rows, cells, run=run(kind="training"), steps=(clean,)),
        {("", "forward"): 16e-3, ("fc", "forward"): 0.0},
    )
    fc = replace(
        given.modules["fc"],
        forward=replace(given.modules["fc"].forward, seconds=None, self_seconds=None),
    )
    found = report_of(analyze(replace(given, modules={"": given.modules[""], "fc": fc}))).verdict
    assert [] == [each.cause for each in found.findings if each.cause == "no_products"]
    assert found.why[-1].startswith(
        "The most time is spent in Net itself, outside its layers: 100.0 % of the step"
    )


def test_modules_without_products_are_named_where_no_peak_is_known() -> None:
    """The norms take as long as the products, 8 of 16 ms."""
    why = "50.0 % of the step (8.00 ms) is spent in blocks.*.norm (LayerNorm) itself (operators: native_layer_norm)."
    most = "The most time is spent in blocks.*.fc (Linear): 50.0 % of the step (8.00 ms). Without a known peak, lflops cannot tell how fast it could be."
    given = blocks({}, {"forward": 16}, hardware=None)
    assert (why, most) == told(given)[1]
    compiled = {
        name: replace(each, compiled=name.endswith("norm")) for name, each in given.modules.items()
    }
    assert why not in told(replace(given, modules=compiled))[1]


def test_an_estimate_says_the_least_time_and_what_is_unknown() -> None:
    """4 products of 2 ms and 4 norms of 1.

    12 ms at the least; without a chip its work is what is known.
    """
    planned = untimed(blocks({}, {"forward": 1}, kind="estimate"))
    assert ("A step takes at least 12.0 ms on abacus.", ()) == told(planned)
    assert ("A step has 4.00 k MACs. Nothing was timed.", ()) == told(
        replace(planned, run=replace(planned.run, hardware=None))
    )


def test_a_model_whose_layers_have_no_times_has_nothing_outside_of_them() -> None:
    """As one that is compiled as a whole: its own time is that of all layers."""
    given = blocks({}, {"forward": 30}, hardware=None)
    modules = {
        name: replace(each, forward=replace(each.forward, seconds=None, self_seconds=None))
        for name, each in given.modules.items()
        if name
    }
    whole = replace(given, modules={"": given.modules[""]} | modules)
    assert not [why for why in told(whole)[1] if "itself" in why]
