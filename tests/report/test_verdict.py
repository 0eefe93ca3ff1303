"""Test the summary of a report: profiles with a planted cause, which the summary must name."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.findings.finding import Finding
from lflops.hardware.chips import Hardware
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from lflops.profile.steps import Step
from lflops.report.summary_facts import report_of
from lflops.report.verdict import judge
from tests.support.profile_builders import cell, clocked, product, profile, run, untimed

CHIP = Hardware("abacus", {"fp32": 1e6}, bandwidth_bytes_per_second=1e6, memory_bytes=64 * 2**30)
"""A chip of a million FLOP/s and a million bytes per second."""

MATMULS = [f"blocks.{block}.fc" for block in range(4)]
NORMS = [f"blocks.{block}.norm" for block in range(4)]
LAYERS = [*MATMULS, *NORMS]


def blocks(milliseconds: Mapping[str, float], step: Mapping[str, float], **facts: Any) -> Profile:
    """Return a profile of 4 blocks with a matmul and a norm each, in a step with these phases.

    At the peak, a matmul takes 2 ms. At the bandwidth, a norm takes 1 ms. Only forward runs.

    Args:
        milliseconds: The times of layers that do not take 2 ms.
        step: The milliseconds of each phase of the step.
        facts: Other facts of the run.
    """
    containers = ["", "blocks", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    rows = {name: {"class_name": "Block"} for name in containers}
    cells = []
    for name in MATMULS:
        rows[name] = {"class_name": "Linear"}
        cells.append(product(name, "aten::mm", "forward", macs=1000, bytes_moved=10))
    for name in NORMS:
        rows[name] = {"class_name": "LayerNorm"}
        norm = cell(name, "aten::native_layer_norm", "forward", flops=10, bytes_moved=1000)
        cells.append(norm)
    own: dict[tuple[str, Phase], float] = {
        (name, "forward"): milliseconds.get(name, 2.0) * 1e-3 for name in LAYERS
    }
    phases = {name: each * 1e-3 for name, each in step.items()}
    unprofiled = Step(index=0, kind="unprofiled", seconds=sum(phases.values()), phases=phases)
    of_run = run(**({"kind": "training", "stage": "train", "hardware": CHIP} | facts))
    return clocked(profile(rows, cells, run=of_run, steps=(unprofiled,)), own)


def told(given: Profile) -> tuple[str, tuple[str, ...]]:
    """Return the sentence about the step time and the sentences about its causes."""
    found = report_of(analyze(given)).verdict
    return found.said, found.why


def test_a_wait_for_data_is_named_first() -> None:
    """A data wait of 24 of 40 ms comes first.

    The modules take 16 ms, 8 of them at the peak, so MFU is 20 %.
    """
    said, why = told(blocks({}, {"data": 24, "forward": 16}))
    assert "A step takes 40.0 ms, at 20.0 % MFU." == said
    assert "60.0 % of the step (24.0 ms) is spent waiting for data." == why[0]


def test_a_model_that_is_never_called_is_not_told_to_log_less() -> None:
    """If the monitored model was never called, the summary says so.

    All 40 ms are in no phase, because the loop calls another model.
    """
    clean = Step(index=0, kind="unprofiled", seconds=40e-3, phases={"other": 40e-3})
    rows = {name: {"class_name": "Net", "calls": 0} for name in ("", "fc")}
    given = profile(rows, [], run=run(kind="training"), steps=(clean,))
    found = report_of(analyze(given)).verdict
    (why,) = found.why
    assert (
        "100.0 % of the step (40.0 ms) is spent outside all phases, because the monitored model "
        "was never called."
    ) == why
    assert ("Pass lflops the model that the loop calls.",) == found.next


def test_a_model_whose_methods_are_called_directly_is_not_said_to_be_never_called() -> None:
    """Without a count, no module has calls, but 10 ms of forward show that the model ran.

    The summary only says that the other 30 of 40 ms are in no phase.
    """
    clean = Step(
        index=0, kind="unprofiled", seconds=40e-3, phases={"forward": 10e-3, "other": 30e-3}
    )
    rows = {name: {"class_name": "Net", "calls": 0} for name in ("", "fc")}
    not_counted = Note(code="not_counted", subject="", values={})
    given = profile(rows, [], run=run(kind="training"), steps=(clean,), notes=(not_counted,))
    why = report_of(analyze(given)).verdict.why
    (sentence,) = why
    expected = (
        "75.0 % of the step (30.0 ms) is spent outside forward, backward and the other phases"
    )
    assert expected == sentence.partition(", for")[0]


def test_more_than_the_peak_is_no_achievement() -> None:
    """If matmuls take less than at the peak, the summary says that the peak is too low.

    MFU, which would be 200 %, is not in the first sentence. They take 4 ms instead of 8 ms. Such a peak was measured while other programs used the machine.
    """
    found = report_of(analyze(blocks({}, {"forward": 4}))).verdict
    over = (
        "A step is faster than the peak of abacus allows, so this peak is too low, and MFU is too "
        "high."
    )
    assert "A step takes 4.00 ms." == found.said
    assert over == found.why[-1]
    assert "Measure the peak again on an idle machine: lflops hardware --measure." == found.next[-1]


def test_a_slow_block_is_named() -> None:
    """A module that is slower than identical modules is named with its cost.

    Its matmul takes 26 ms instead of 2 ms, so it costs 24 ms. Inefficient kernels take 4 more
    milliseconds, and memory-bound norms take 4 ms.
    """
    found = report_of(analyze(blocks({"blocks.2.fc": 26.0}, {"forward": 40}))).verdict
    assert "A step takes 40.0 ms, at 20.0 % MFU." == found.said
    (why,) = found.why
    assert (
        "blocks.2.fc takes 13.0× as long as each of the other 3 identical modules, which costs 60.0 "
        "% of the step (24.0 ms)."
    ) == why
    beginnings = {sentence[: sentence.index(" is")] for sentence in found.also}
    assert beginnings == {"10.0 % of the step (4.00 ms)", "Another 10.0 % of the step (4.00 ms)"}


def test_a_module_with_more_operators_is_named_with_both_numbers() -> None:
    """A module that runs more operators than identical modules is named with both numbers.

    Its 100 calls take 22 ms, while one call of the same work takes 2 ms elsewhere.
    """
    given = blocks({"blocks.1.fc": 22.0}, {"forward": 36}, hardware=None)
    small = replace(
        product("blocks.1.fc", "aten::mm", "forward", macs=1000, bytes_moved=10), calls=100
    )
    cells = [small if each.module == "blocks.1.fc" else each for each in given.op_counts]
    rows = {name: {"class_name": module.class_name} for name, module in given.modules.items()}
    own: dict[tuple[str, Phase], float] = {(name, "forward"): 2e-3 for name in LAYERS}
    own["blocks.1.fc", "forward"] = 22e-3
    found = clocked(profile(rows, cells, run=given.run, steps=given.steps), own)
    _, why = told(found)
    assert (
        "blocks.1.fc runs 100 operators, while the other 3 identical modules run 1 each: this "
        "costs 55.6 % of the step (20.0 ms)."
    ) == why[0]


def test_a_layer_in_a_wider_dtype_is_named() -> None:
    """A layer in float64 is named with its cost.

    It takes 12 ms where identical layers in float32 take 2 ms, so it costs 10 of 26 ms. Without an
    identical layer, half of its time is certain.
    """
    given = blocks({"blocks.3.fc": 12.0}, {"forward": 26}, hardware=None)
    cells = []
    for each in given.op_counts:
        is_wide = each.module == "blocks.3.fc"
        cells.append(replace(each, dtype="float64") if is_wide else each)
    _, why = told(replace(given, op_counts=tuple(cells)))
    assert (
        "The matmuls of blocks.3.fc run in float64, while the other 3 identical modules use "
        "float32: this costs 38.5 % of the step (10.0 ms)."
    ) == why[0]
    rows = {"": {"class_name": "Model"}, "head": {"class_name": "Linear"}}
    head = product("head", "aten::mm", "forward", macs=1000, bytes_moved=10)
    head = replace(head, dtype="float64")
    steps = blocks({}, {"data": 8, "forward": 8}).steps
    alone = clocked(profile(rows, [head], run=given.run, steps=steps), {("head", "forward"): 8e-3})
    _, why = told(alone)
    assert (
        "The matmuls of head run in float64, while the model trains in float32: this costs at "
        "least 25.0 % of the step (4.00 ms)."
    ) == why[1]


def test_work_outside_of_the_layers_is_the_models_own() -> None:
    """Time of forward outside of the layers is attributed to the model itself.

    Forward takes 30 ms and the layers take 16 ms, so 14 ms are in `training_step`. This needs no
    peak.
    """
    given = blocks({}, {"forward": 30}, hardware=None, strategy="SingleDeviceStrategy")
    root = replace(given.modules[""], class_name="Net")
    said, why = told(replace(given, modules=given.modules | {"": root}))
    assert "A step takes 30.0 ms." == said
    assert "46.7 % of the step (14.0 ms) is spent in Net itself, outside its layers." == why[0]


def test_more_threads_than_cores_come_first() -> None:
    """More threads than cores is the first cause, although its cost is unknown.

    As many threads as cores are no cause.
    """
    sentence = (
        "torch computes with 8 threads on 2 cores: the threads take turns, so everything takes "
        "longer."
    )
    _, why = told(blocks({}, {"data": 24, "forward": 16}, threads=8, cores=2))
    assert sentence == why[0]
    _, why = told(blocks({}, {"data": 24, "forward": 16}, threads=2, cores=2))
    assert sentence not in why


def test_memory_bound_pointwise_work_is_named() -> None:
    """Memory-bound work is named if nothing else is lost.

    The norms take 1 ms, which is their time at the bandwidth: 4 of 12 ms.
    """
    given = blocks(dict.fromkeys(NORMS, 1.0), {"forward": 12})
    why = "33.3 % of the step (4.00 ms) is memory-bound pointwise work, mostly in blocks.*.norm."
    assert ("A step takes 12.0 ms, at 66.7 % MFU.", (why,)) == told(given)


def test_times_that_are_far_off_name_no_module() -> None:
    """If module times are unreliable, the summary names no module and says so."""
    note = Note(code="time_scaled", subject="", values={"forward": 3.0})
    given = replace(blocks({"blocks.2.fc": 26.0}, {"forward": 40}), notes=(note,))
    found = report_of(analyze(given)).verdict
    lost = "70.0 % of the step (28.0 ms) is lost to inefficient kernels or idle time."
    assert lost == found.why[0]
    assert "module times are unreliable in this run" in found.confidence


def test_times_that_are_far_off_name_the_phase_where_no_peak_is_known() -> None:
    """If module times are unreliable and no peak is known, the summary names phases only.

    Of 60 ms, the optimizer takes 20 ms and forward takes 40 ms.
    """
    note = Note(code="time_scaled", subject="", values={"forward": 0.25, "backward": 2.0})
    given = blocks({"blocks.2.fc": 26.0}, {"forward": 40, "optimizer": 20}, hardware=None)
    given = replace(given, notes=(note,))
    found = report_of(analyze(given)).verdict
    forward = (
        "66.7 % of the step (40.0 ms) is spent in forward, but lflops cannot tell in which module."
    )
    assert ("33.3 % of the step (20.0 ms) is optimizer work.",) == found.why
    assert (forward,) == found.also
    scaled = "to match the unprofiled steps, some of them are multiplied by 0.25"
    assert scaled in found.confidence


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        (
            (60.0, 0.5, 0.5, 60.0, 0.5),
            (
                "60.0 % of the step (24.3 ms) is spent waiting for data: 60.0 ms in 2 of 5 steps, "
                "500 µs in the other steps."
            ),
        ),
        ((20.0, 30.0, 22.0, 28.0, 21.5), "60.0 % of the step (24.3 ms) is spent waiting for data."),
    ],
)
def test_a_wait_in_some_steps_is_said_as_such(waits: tuple[float, ...], said: str) -> None:
    """If only some steps wait for data, the summary gives their number and both times.

    Each step has 16.2 ms of forward, and 24.3 ms of data wait on average.
    """
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
    """The confidence says that other processes took 30 % of the CPU time."""
    given = blocks({}, {"data": 24, "forward": 16}, hardware=None)
    busy = Step(
        index=9,
        kind="module_timing",
        seconds=0.1,
        phases={},
        cpu_user=0.07,
        cpu_system=0.0,
        cpu_lost=0.03,
    )
    found = report_of(analyze(replace(given, steps=(*given.steps, busy)))).verdict
    assert found.said == "A step takes 40.0 ms."
    assert "other processes took 30 % of the CPU time that this process needed" in found.confidence
    assert "unprofiled" not in found.confidence


def test_little_cpu_time_that_is_lost_is_no_busy_machine() -> None:
    """Lost CPU time is not reported if the step needs little CPU time.

    Of 40 ms, a step needs 2 ms of CPU time, 30 % of which are 1.5 % of the step. With 4 ms, it is 3
    %, which is reported.
    """
    for needed, is_said in ((0.002, False), (0.004, True)):
        given = blocks({}, {"data": 36, "forward": 4}, hardware=None)
        timed = [replace(step, cpu_user=needed, cpu_system=0.0) for step in given.steps]
        busy = replace(timed[0], kind="module_timing", cpu_user=0.07, cpu_lost=0.03)
        found = report_of(analyze(replace(given, steps=(*timed, busy)))).verdict
        assert is_said == ("other processes took 30 %" in found.confidence)


def test_without_a_peak_the_time_and_the_wait_are_named() -> None:
    """Without a peak, the summary has the step time and the data wait, but no MFU."""
    said, why = told(blocks({}, {"data": 24, "forward": 16}, hardware=None))
    assert "A step takes 40.0 ms." == said
    assert "60.0 % of the step (24.0 ms) is spent waiting for data." == why[0]


def test_where_nothing_stands_out_the_busiest_modules_are_named() -> None:
    """If there is no finding, the modules with the most time are named.

    Four equal matmuls take 8 of 8.08 ms. Without a peak, it is unknown whether this is slow.
    """
    given = blocks(dict.fromkeys(NORMS, 0.02), {"forward": 8.08}, hardware=None)
    _, why = told(given)
    most = (
        "Among the modules, the most time is spent in blocks.*.fc (Linear): 99.0 % of the step "
        "(8.00 ms)."
    )
    assert (most,) == why


def test_a_model_whose_layers_have_no_time_is_no_layer_without_products() -> None:
    """A compiled model is not reported as a layer without matmuls.

    Its 16 ms are self time, because the layers have no times. The model is named only once, as the
    module with the most time.
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
    untimed_forward = replace(given.modules["fc"].forward, seconds=None, self_seconds=None)
    fc = replace(given.modules["fc"], forward=untimed_forward)
    found = report_of(analyze(replace(given, modules={"": given.modules[""], "fc": fc}))).verdict
    assert "no_products" not in [each.cause for each in found.findings]
    assert found.why[-1].startswith(
        "Among the modules, the most time is spent in Net itself, outside its layers: 100.0 % of the "
        "step"
    )


def test_modules_without_products_are_named_where_no_peak_is_known() -> None:
    """Without a known peak, modules without matmuls are named, unless they are compiled.

    The norms take as long as the matmuls, 8 of 16 ms.
    """
    norms = (
        "50.0 % of the step (8.00 ms) is spent in blocks.*.norm (LayerNorm) itself (operators: "
        "native_layer_norm)."
    )
    most = (
        "Among the modules, the most time is spent in blocks.*.fc (Linear): 50.0 % of the step "
        "(8.00 ms). The chip's "
        "peak is unknown, so lflops cannot tell how much time this should take."
    )
    given = blocks({}, {"forward": 16}, hardware=None)
    _, why = told(given)
    assert (norms, most) == why
    compiled = {name: replace(given.modules[name], compiled=True) for name in NORMS}
    _, why = told(replace(given, modules=given.modules | compiled))
    assert norms not in why


def test_an_estimate_says_the_least_time_and_what_is_unknown() -> None:
    """An estimate has the least time of a step: 4 matmuls of 2 ms and 4 norms of 1 ms.

    Without a chip, it has only the MACs.
    """
    planned = untimed(blocks({}, {"forward": 1}, kind="estimate"))
    assert ("A step takes at least 12.0 ms on abacus.", ()) == told(planned)
    without_chip = replace(planned, run=replace(planned.run, hardware=None))
    assert ("A step has 4.00 k MACs. No step was timed.", ()) == told(without_chip)


def test_a_model_whose_layers_have_no_times_has_nothing_outside_of_them() -> None:
    """If only the root has a time, as in a compiled model, none of it is outside the layers."""
    given = blocks({}, {"forward": 30}, hardware=None)
    modules = {}
    for name, module in given.modules.items():
        if name:
            forward = replace(module.forward, seconds=None, self_seconds=None)
            modules[name] = replace(module, forward=forward)
        else:
            modules[name] = module
    _, why = told(replace(given, modules=modules))
    assert not [sentence for sentence in why if "itself" in sentence]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "No known issue found."),
        ([("python", 0.24, "Use vectorized code")], "No known issue found."),
        (
            [("python", 0.31, "Use vectorized code"), ("hooks", 0.27, "Remove hooks")],
            "No known issue found, but the largest cost below is 31.0 % of the step.",
        ),
        # Nearly all models have a module that takes a large part of the step.
        ([("busiest", 0.9, "Use a smaller module")], "No known issue found."),
        # Nobody can do anything about a finding without advice.
        ([("python", 0.9, "")], "No known issue found."),
    ],
)
def test_without_an_issue_the_largest_cost_is_mentioned(
    given: list[tuple[str, float, str]], sentence: str
) -> None:
    """Only a cost of at least a quarter of the step that has advice is mentioned."""
    findings = [
        Finding(cause=cause, sentence=cause, seconds=share, share=share, fix=fix)
        for cause, share, fix in given
    ]
    judged = judge("A step takes 1 s.", findings, None, "certain")
    assert sentence == judged.judgement
    assert judged.status == "nothing found"
