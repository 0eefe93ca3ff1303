"""Test that the training loops of other packages get no false findings.

Each profile has the phases, operators and times of such a run. Most tests have a twin: a similar
run with a planted issue, which must still be found.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.findings.finding import Finding, leading, ordered
from lflops.findings.registry import all_rules
from lflops.findings.rules.optimizer import embedding_with_few_rows
from lflops.findings.rules.other_work import OtherWorkOfRun
from lflops.findings.run_rule import RunEvidence
from lflops.hardware.chips import Hardware
from lflops.ledger.account import Ledger, Span, Start, StepGroup
from lflops.profile.notes import Note
from lflops.profile.profile import OpCount, OptimizerSettings, Profile, UnsupportedCall
from lflops.profile.records import PASSES, Phase, Trace, TracedOperator
from lflops.profile.steps import Step
from lflops.report.explanation import explain, lines_of
from lflops.report.log_text import log_text
from lflops.report.summary_facts import report_of
from lflops.report.verdict import unseen_because
from tests.support.profile_builders import cell, clocked, product, profile, run, weights, work

USUAL = {"data": 1e-3, "forward": 30e-3, "backward": 60e-3, "optimizer": 4e-3, "other": 5e-3}
"""Seconds of each phase of a step of 100 ms."""

WORK = (
    product("a", "addmm", "forward", macs=1000, bytes_moved=1000),
    product("a", "mm", "backward", macs=2000, bytes_moved=2000),
    cell("b", "gelu", "forward", bytes_moved=5_000_000),
    cell("b", "gelu_backward", "backward", bytes_moved=10_000_000),
)
"""The layer `a` has a matmul. The layer `b` has none.

At 0.5 GB/s, the rate of a slow operator, `b` needs 10 ms in forward and 20 ms in backward.
"""

OWN: dict[tuple[str, Phase], float] = {
    ("a", "forward"): 20e-3,
    ("b", "forward"): 10e-3,
    ("a", "backward"): 40e-3,
    ("b", "backward"): 20e-3,
}


def trained(
    *,
    own: Mapping[tuple[str, Phase], float] | None = None,
    cells: Iterable[OpCount] = (),
    operators: Mapping[str, float] | None = None,
    on_core: float | None = None,
    waited: float = 0.0,
    fetching_waited: float = 0.0,
    device_type: str = "cpu",
    marks: tuple[str, ...] = (),
    steps: int = 6,
    facts: Mapping[str, Any] | None = None,
    **phases: float,
) -> Profile:
    """Return the profile of a training run of two layers.

    Args:
        own: Self time of modules, in addition to `OWN` or instead of it.
        cells: Op counts in addition to `WORK`.
        operators: Seconds per step of each operator in the trace. `None` if there is no trace.
        on_core: Seconds of a module-timing step in which the training thread uses a core.
        waited: Seconds of a module-timing step in which this thread waits for a core.
        fetching_waited: The part of `waited` before the thread has the batch.
        device_type: The type of the device, such as "cuda".
        marks: The marks of the unprofiled steps.
        steps: Number of unprofiled steps.
        facts: Fields of the profile.
        phases: Seconds of phases, in addition to `USUAL` or instead of it.
    """
    took = USUAL | phases
    seconds = sum(took.values())
    unprofiled = [
        Step(index=number, kind="unprofiled", seconds=seconds, phases=took, marks=marks)
        for number in range(steps)
    ]
    timed = Step(
        index=steps,
        kind="module_timing",
        seconds=seconds,
        phases=took,
        thread_cpu=on_core,
        thread_waited=waited,
        fetching_cpu=0.0,
        fetching_waited=fetching_waited,
    )
    fields: dict[str, Any] = dict(facts or {})
    if operators is not None:
        fields["trace"] = traced(operators)
    rows = {
        "": {"class_name": "Net"} | weights(0, 8),
        "a": {"class_name": "Linear"} | weights(8),
        "b": {"class_name": "GELU"},
    }
    made = profile(
        rows,
        [*WORK, *cells],
        run=run(kind="training", device_type=device_type),
        steps=(*unprofiled, *[replace(timed, index=steps + number) for number in range(3)]),
        **fields,
    )
    return clocked(made, OWN | dict(own or {}))


def traced(operators: Mapping[str, float]) -> Trace:
    """Return a trace of one batch, with the host seconds of each operator."""
    rows = tuple(
        TracedOperator(
            name=f"aten::{name}",
            calls=1,
            host_seconds=seconds,
            self_host_seconds=seconds,
            device_seconds=0.0,
            self_device_seconds=0.0,
        )
        for name, seconds in operators.items()
    )
    return Trace(files={}, batches=1, operators=rows)


def findings(given: Profile | Ledger) -> dict[str, Finding]:
    """Return the findings of a profile or a ledger, by the names of their rules."""
    return {finding.cause: finding for finding in explain(given).findings}


CHIP = Hardware("chip", {"fp32": 1e9}, None)


# Copies.


def test_on_a_cpu_nothing_is_copied_to_the_device() -> None:
    """On a CPU, this phase is the preparation of batches. Here, the Trainer generates text in it.

    Generation shows in the MACs: forward has more than backward. So the time is not an issue.
    """
    generated = product("a", "addmm", "forward", macs=9000, bytes_moved=9000)
    found = findings(trained(transfer=200e-3, cells=[generated]))["transfer"]
    assert "66.7 % of the step (200 ms) is spent preparing batches" in found.sentence
    assert not found.is_issue
    assert "pin_memory" not in found.fix


def test_slow_preparation_is_an_issue_where_nothing_is_generated() -> None:
    """The twin: user code that prepares a batch takes two thirds of the step."""
    found = findings(trained(transfer=200e-3))["transfer"]
    assert found.is_issue
    assert pytest.approx(0.2) == found.seconds


def test_copies_to_a_device_are_found() -> None:
    """The twin on a GPU: the phase is a copy of the batch to the device."""
    found = findings(trained(transfer=200e-3, device_type="cuda"))["transfer"]
    assert found.is_issue
    assert "copying batches to the device" in found.sentence
    assert "pin_memory" in found.fix


# Inference without gradients.


def account(**seconds: float) -> Ledger:
    """Return the ledger of a run with 100 steps, 50 s of start-up and 80 s of forward.

    `seconds` are the seconds of further categories.
    """
    spent = {"start_up": 50.0, "training/forward": 80.0, **seconds}
    begin = 1_800_000_000.0
    total = sum(spent.values())
    start = Start(begin=begin, seconds=total, first_step=0, last_step=100, ended="finished")
    span = Span(begin=begin, seconds=total, steps=100, spent=spent)
    return Ledger(
        seconds=spent, total=total, steps=100, slow_steps=(), starts=(start,), spans=(span,)
    )


def test_rollouts_are_no_validation() -> None:
    """Inference without a validation loader or hook is not reported as validation.

    It takes 120 s of the 200 s after start-up, so 1.2 s for each of the 100 steps.
    """
    found = findings(account(inference=120.0))
    assert {"inference"} == found.keys()
    assert (
        "60.0 % of the training loop's time (1.20 s per step) is spent on inference without "
        "gradients (rollout, evaluation or generation)." == found["inference"].sentence
    )
    assert not found["inference"].is_issue


def test_a_validation_is_found() -> None:
    """The twin: the time was measured in a validation loader or hook."""
    assert findings(account(validation=120.0))["validation"].is_issue


@pytest.mark.parametrize("is_between", [True, False])
def test_a_single_validation_after_the_run_is_no_issue(is_between: bool) -> None:
    """A run that validates once, after its last step, cannot validate less often."""
    between = {"validation": 1.0} if is_between else {}
    step = StepGroup(first=0, last=0, spent={"forward": 0.8}, between=between, longest=0.8)
    run = replace(account(validation=120.0), step_groups=(step,))
    assert is_between == findings(run)["validation"].is_issue


def test_matmuls_outside_the_layers_are_named_with_their_time() -> None:
    """A loss with a Cholesky decomposition takes 20 ms, and few MACs of forward.

    If it has a tenth of the MACs, and no backward, a second model may run there.
    """
    decomposition = product("", "linalg_cholesky_ex", "forward", macs=1, bytes_moved=100)
    given = trained(
        own={("", "forward"): 20e-3},
        cells=[decomposition],
        operators={"linalg_cholesky_ex": 19e-3},
    )
    found = findings(given)["outside"]
    assert "linalg_cholesky_ex (19.0 ms)" in found.sentence
    assert "Call linalg_cholesky_ex less often" in found.fix
    large = product("", "linalg_cholesky_ex", "forward", macs=10_000, bytes_moved=100)
    with_model = trained(own={("", "forward"): 20e-3}, cells=[large])
    assert "reference model" in findings(with_model)["outside"].sentence


# Operators that the model calls itself, outside its layers.

POOLING = (
    cell("", "max_pool2d_with_indices", "forward", bytes_moved=600),
    cell("", "relu", "forward", calls=3, bytes_moved=400),
    cell("", "threshold_backward", "backward", calls=3, bytes_moved=400),
)


def test_operators_that_a_model_calls_itself_are_named_with_their_time() -> None:
    """Pooling takes 19 ms and activations 7.3 ms of 30 ms, so Python code is not the reason."""
    given = trained(
        own={("", "forward"): 25e-3, ("", "backward"): 5e-3},
        cells=POOLING,
        operators={
            "max_pool2d_with_indices": 19e-3,
            "clamp_min": 3e-3,
            "threshold_backward": 4.3e-3,
        },
    )
    found = findings(given)["outside"]
    assert not found.is_issue
    assert "max_pool2d_with_indices (19.0 ms), threshold_backward (4.30 ms)" in found.sentence
    assert "relu (3.00 ms)" in found.sentence
    assert ".item()" not in found.fix


def test_the_times_of_operators_fit_into_the_cost_that_they_explain() -> None:
    """Tracing makes operators slower, so their times are scaled to the time of the model itself.

    The model itself takes 20 ms. Pooling was traced with 30 ms and the activations with 8 ms and
    2 ms, so that half of each time remains.
    """
    given = trained(
        own={("", "forward"): 15e-3, ("", "backward"): 5e-3},
        cells=POOLING,
        operators={
            "max_pool2d_with_indices": 30e-3,
            "clamp_min": 2e-3,
            "threshold_backward": 8e-3,
        },
    )
    found = findings(given)["outside"]
    assert pytest.approx(20e-3) == found.seconds
    assert (
        "max_pool2d_with_indices (15.0 ms), threshold_backward (4.00 ms) and relu (1.00 ms)"
    ) in found.sentence
    assert {
        "max_pool2d_with_indices": pytest.approx(15e-3),
        "threshold_backward": pytest.approx(4e-3),
        "relu": pytest.approx(1e-3),
    } == found.operators


def test_the_share_of_an_operator_is_by_its_bytes() -> None:
    """2 of the 8 million bytes of GELU are moved by the model itself: a quarter of 12 ms.

    These 3 ms are half of the time outside the layers.
    """
    given = trained(
        own={("", "forward"): 6e-3},
        cells=[
            cell("", "gelu", "forward", bytes_moved=2_000_000),
            cell("b", "gelu", "forward", bytes_moved=1_000_000),
        ],
        operators={"gelu": 12e-3},
    )
    assert "gelu (3.00 ms)" in findings(given)["outside"].sentence


def test_the_share_of_an_operator_may_be_by_its_macs() -> None:
    """`b` has a third of the bytes of addmm, but 9 of its 10 thousand MACs: 36 of 40 ms.

    So `b` has no time for Python code. In the twin, addmm takes only 4 ms.
    """
    large = product("b", "addmm", "forward", macs=9000, bytes_moved=500)
    given = trained(
        own={("b", "forward"): 40e-3}, cells=[large], operators={"addmm": 40e-3, "gelu": 1e-3}
    )
    assert "python" not in findings(given)
    small = product("b", "addmm", "forward", macs=100, bytes_moved=500)
    twin = trained(
        own={("b", "forward"): 40e-3}, cells=[small], operators={"addmm": 4e-3, "gelu": 1e-3}
    )
    assert "python" in findings(twin)


def test_on_a_busy_machine_operators_take_longer_than_traced() -> None:
    """If other programs take three quarters of the CPU time, operators may take four times as long.

    GELU was traced with 5 ms and may then take 20 ms, which is half of the 40 ms of `b`. So Python
    code is not reported.
    """
    given = trained(own={("b", "forward"): 40e-3}, operators={"gelu": 5e-3})
    assert "python" in findings(given)
    steps = []
    for step in given.steps:
        if step.kind == "module_timing":
            steps.append(replace(step, cpu_user=1.0, cpu_system=0.0, cpu_lost=3.0))
        else:
            steps.append(step)
    assert "python" not in findings(replace(given, steps=tuple(steps)))


@pytest.mark.parametrize("operators", [None, {"max_pool2d_with_indices": 1e-3, "clamp_min": 1e-3}])
def test_python_outside_the_layers_is_found(operators: dict[str, float] | None) -> None:
    """The twin: forward takes 30 ms, and the operators outside the layers need little of it.

    The issue is found with and without a trace.
    """
    given = trained(own={("", "forward"): 30e-3}, cells=POOLING, operators=operators)
    found = findings(given)["outside"]
    assert found.is_issue
    assert ".item()" in found.fix
    if operators is not None:
        # The operators are not listed, because they do not explain the 30 ms: they take 2.2 ms,
        # of which 2 ms are in forward.
        assert "max_pool2d" not in found.sentence
        assert re.search(r"but operators take only 7\.\d % of this time\.", found.sentence)


def test_a_gradient_within_forward_is_not_counted_twice() -> None:
    """A gradient that forward takes is in the forward phase, and in the backward of the layers.

    Forward takes 80 ms: 30 ms in forward of the layers, 40 ms in their backward, and 10 ms outside.
    The backward phase takes 60 ms, so that backward of the layers takes 100 ms in total.
    """
    gradient = {("a", "backward"): 80e-3}
    outside = findings(trained(own=gradient, forward=80e-3))["outside"]
    assert pytest.approx(10e-3) == outside.seconds
    assert not outside.is_issue
    assert "outside" not in findings(trained(own=gradient, forward=70e-3))


def test_without_a_trace_large_operators_may_need_their_time() -> None:
    """A slow operator moves 0.5 GB/s, so the 10 million bytes of pooling may take 20 of 25 ms."""
    pooling = cell("", "max_pool2d_with_indices", "forward", bytes_moved=10_000_000)
    found = findings(trained(own={("", "forward"): 25e-3}, cells=[pooling]))["outside"]
    assert not found.is_issue
    assert "(operators: max_pool2d_with_indices)." in found.sentence


@pytest.mark.parametrize(("seconds", "is_issue"), [(15e-3, False), (4e-3, True)])
def test_operators_after_backward_may_take_the_time_of_training_step(
    seconds: float, is_issue: bool
) -> None:
    """In manual optimization, `training_step` changes the weights after backward, for example.

    These operators are counted in the phase `other`. They may explain most of the 20 ms outside the
    layers. If they take only 4 ms, Python code takes the rest.
    """
    given = trained(
        own={("", "forward"): 20e-3},
        cells=[cell("", "add_", "other", bytes_moved=1_000_000)],
        operators={"gelu": 5e-3, "gelu_backward": 5e-3, "add_": seconds},
    )
    found = findings(given)["outside"]
    assert found.is_issue == is_issue
    assert ("in add_ (15.0 ms)" in found.sentence) == (not is_issue)


def test_a_reference_model_is_said_to_run_outside_the_layers() -> None:
    """The sentence states that its 500 MACs have no backward pass."""
    given = trained(
        own={("", "forward"): 30e-3},
        cells=[product("", "addmm", "forward", macs=500, bytes_moved=500)],
        operators={"addmm": 40e-3},
        facts={},
    )
    known = replace(given, run=replace(given.run, hardware=CHIP))
    found = findings(known)["outside"]
    assert "500 MACs run there without a backward pass" in found.sentence


# Time without CPU use.


def test_a_sleep_is_no_operator() -> None:
    """If the thread uses no CPU, it sleeps, and no operator is the reason for the time.

    In a step of 170 ms, the thread computes for 104 ms and fetches for 1 ms. The other 65 ms pass
    in `b`, the GELU layer.
    """
    slow = {("b", "forward"): 80e-3}
    given = trained(own=slow, forward=100e-3, on_core=104e-3)
    found = findings(given)
    assert ("b", pytest.approx(65e-3)) == (found["sleep"].module, found["sleep"].seconds)
    assert found["sleep"].is_issue
    expected = "65.0 ms) is spent in b, while the training thread uses no CPU"
    assert expected in found["sleep"].sentence
    assert "no_products" not in found
    assert "sleep" == explain(given).cause


@pytest.mark.parametrize(("traced_as", "sleeps"), [("mkldnn_convolution", True), ("mm", False)])
def test_a_convolution_sleeps_too(traced_as: str, *, sleeps: bool) -> None:
    """A trace has the time of a convolution under the name of the operator that it calls.

    If the trace does not have this time, the convolution may need all the time of the module.
    """
    given = trained(
        own={("b", "forward"): 80e-3},
        cells=[product("b", "convolution", "forward", macs=500, bytes_moved=500)],
        operators={traced_as: 5e-3},
        forward=100e-3,
        on_core=104e-3,
    )
    found = findings(given)
    assert sleeps == ("sleep" in found)
    if sleeps:
        assert found["sleep"].module == "b"


def test_a_sleep_around_the_model_may_be_behind_it() -> None:
    """In a custom loop, the sleep may also be between forward and backward, so the text says so."""
    found = findings(trained(own={("", "forward"): 80e-3}, forward=100e-3, on_core=104e-3))
    assert found["sleep"].module == ""
    expected = "Net itself, outside its layers, or between the model and backward"
    assert expected in found["sleep"].sentence
    assert "between forward and backward" in found["sleep"].fix


def test_a_thread_that_computes_does_not_sleep() -> None:
    """The twin: the step is as slow, but the thread uses a core for most of it."""
    found = findings(trained(own={("b", "forward"): 70e-3}, forward=90e-3, on_core=159e-3))
    assert "sleep" not in found


def test_waiting_for_data_and_for_a_core_is_no_sleep() -> None:
    """The thread waits 61 ms for its batch and computes for the rest of the step."""
    assert "sleep" not in findings(trained(data=61e-3, on_core=99e-3))


def test_on_a_busy_machine_a_little_time_without_cpu_is_no_sleep() -> None:
    """The wait for a core and its possible error of 10 % are not counted as sleep.

    In a step of 170 ms, the thread computes for 39 ms, fetches for 1 ms and waits for a core for
    100 ms, or for up to 110 ms. So 20 ms remain.
    """
    slow = {("b", "forward"): 80e-3}
    busy = trained(own=slow, forward=100e-3, on_core=39e-3, waited=100e-3)
    assert pytest.approx(20e-3) == findings(busy)["sleep"].seconds
    busier = trained(own=slow, forward=100e-3, on_core=58e-3, waited=100e-3)
    assert "sleep" not in findings(busier)


def test_waiting_for_a_core_while_fetching_is_subtracted_once() -> None:
    """In a step of 210 ms, the thread computes for 74 ms and waits for a core for 60 ms + 10 %.

    Fetching takes 41 ms, of which 40 ms are a wait for a core: only 1 ms is a wait for the batch.
    So 69 ms remain. In the twin, all 41 ms are a wait for the batch, so 29 ms remain.
    """
    slow = {("b", "forward"): 80e-3}
    busy = {"own": slow, "forward": 100e-3, "data": 41e-3, "on_core": 74e-3, "waited": 60e-3}
    found = findings(trained(**busy, fetching_waited=40e-3))
    assert found["sleep"].seconds == pytest.approx(69e-3)
    twin = findings(trained(**busy))
    assert twin["sleep"].seconds == pytest.approx(29e-3)


def test_waiting_for_a_device_is_no_sleep() -> None:
    """With a GPU, the thread uses no CPU while it waits for the device."""
    slow = {("b", "forward"): 70e-3}
    given = trained(own=slow, forward=90e-3, on_core=94e-3, device_type="cuda")
    assert "sleep" not in findings(given)


def test_a_hook_on_a_layer_is_python_of_the_module_around_it() -> None:
    """The GELU operator takes 1 ms in the trace, but its module takes 37 ms: 36 ms are Python."""
    given = trained(own={("b", "forward"): 37e-3}, operators={"gelu": 1e-3}, on_core=0.2)
    found = findings(given)["python"]
    assert "b" == found.module
    assert found.is_issue
    assert pytest.approx(36e-3, rel=0.01) == found.seconds
    assert "beyond the time of its operators" in found.sentence


def test_a_module_that_is_called_often_needs_time_for_its_calls() -> None:
    """300 calls of 50 µs may take 15 ms, and the operator takes 1 ms.

    The 37 ms of the module are less than three times as much, so nothing is reported. In the twin,
    the module is called once.
    """
    given = trained(own={("b", "forward"): 37e-3}, operators={"gelu": 1e-3}, on_core=0.2)
    assert "python" in findings(given)
    often = replace(given.modules["b"], calls=300)
    assert "python" not in findings(replace(given, modules={**given.modules, "b": often}))


@pytest.mark.parametrize(
    ("monitor", "strategy", "advice"),
    [
        ("lflops.monitor", "Accelerator", "name parts of the loop with monitor.phase"),
        ("lflops", None, "monitor the loop with lflops.monitor and name its parts"),
        ("FlopsCallback", "Accelerator", "Look at the callbacks of the Trainer, at logging_steps"),
        ("FlopsMonitor", "SingleDeviceStrategy", 'Trainer(profiler="simple")'),
    ],
)
def test_advice_on_other_work_fits_the_loop(
    monitor: str, strategy: str | None, advice: str
) -> None:
    """Only a loop with `lflops.monitor` has `monitor.phase`."""
    given = trained(other=40e-3)
    given = replace(given, run=replace(given.run, monitor=monitor, strategy=strategy))
    found = findings(given)["other"]
    assert found.is_issue
    assert advice in found.fix
    run = RunEvidence(ledger=account(slow__unknown=20.0), profile=given, step_issues=frozenset())
    assert advice in OtherWorkOfRun().fix_for(run)


def test_operators_without_matmuls_are_named() -> None:
    """The operators of GELU take all the time of its module, so Python code is not reported."""
    given = trained(operators={"gelu": 10e-3, "gelu_backward": 20e-3})
    found = findings(given)
    assert "itself, in gelu_backward (20.0 ms) and gelu (10.0 ms)" in found["no_products"].sentence
    assert "python" not in found


def test_operators_that_are_hardly_in_the_trace_are_no_cause() -> None:
    """The trace has 1 of the 30 ms of GELU, so it does not show what takes the other 29 ms.

    gelu_backward is not in the trace: it moves 10 MB, so it may take 20 ms.
    """
    found = findings(trained(operators={"gelu": 1e-3}))["no_products"]
    assert "is spent in b (GELU) itself (operators: gelu and gelu_backward)." in found.sentence
    assert "name parts of the forward of b with lflops.scope" in found.fix
    assert {} == found.operators


@pytest.mark.parametrize(("forward", "slower"), [(2e-3, "backward"), (18e-3, "forward")])
def test_code_beyond_operators_is_sought_in_the_slower_pass(forward: float, slower: str) -> None:
    """The operators of GELU take 2 of its 20 ms. The other code is in the slower pass."""
    own: dict[tuple[str, Phase], float] = {
        ("b", "forward"): forward,
        ("b", "backward"): 20e-3 - forward,
    }
    given = trained(own=own, operators={"gelu": 1e-3, "gelu_backward": 1e-3})
    found = findings(given)
    if slower == "forward":
        # Python code in forward has a finding of its own.
        assert "python" in found
    else:
        assert found["no_products"].fix.endswith("in the backward of b")
        assert found["no_products"].is_issue


@pytest.mark.parametrize(("device_type", "backward"), [("cuda", 18e-3), ("cpu", 0.9e-3)])
def test_a_wait_for_a_device_and_a_short_backward_are_no_code_of_the_user(
    device_type: str, backward: float
) -> None:
    """On a GPU, the host may wait in backward. Python itself takes less than 1 ms for each call."""
    own: dict[tuple[str, Phase], float] = {("b", "forward"): 0.1e-3, ("b", "backward"): backward}
    traced_seconds = {"gelu": 0.05e-3, "gelu_backward": 0.05e-3}
    short: dict[tuple[str, Phase], float] = {("a", "forward"): 1e-3, ("a", "backward"): 2e-3}
    phases = {"forward": 1.1e-3, "backward": 2e-3 + backward, "optimizer": 0.1e-3}
    given = trained(own=short | own, operators=traced_seconds, device_type=device_type, **phases)
    assert not any(each.is_issue for each in [*findings(given).values()] if each.module == "b")


def test_a_short_sleep_does_not_hide_python_code() -> None:
    """The thread sleeps for 2 ms in `b`, whose operators take 2 of the 30 ms of its forward."""
    own: dict[tuple[str, Phase], float] = {("b", "forward"): 30e-3, ("b", "backward"): 1e-3}
    given = trained(
        own=own, operators={"gelu": 1e-3, "gelu_backward": 0.5e-3}, forward=50e-3, on_core=117e-3
    )
    sleep = analyze(given).evidence.sleep
    assert sleep is not None
    assert 0 < sleep.seconds < 3e-3
    found = findings(given)
    assert "sleep" not in found
    assert found["python"].is_issue
    assert found["python"].module == "b"


def test_an_unsupported_operator_in_the_trace_takes_its_time() -> None:
    """An operator without a formula takes 26 of the 30 ms of `b`, so no Python code does."""
    calls = [
        UnsupportedCall(module="b", operator="vision::roi", phase=phase, calls=1, bytes=1000)
        for phase in ("forward", "backward")
    ]
    own: dict[tuple[str, Phase], float] = {("b", "forward"): 15e-3, ("b", "backward"): 15e-3}
    operators = {"gelu": 1e-3, "gelu_backward": 1e-3, "vision::roi": 26e-3}
    given = trained(own=own, operators=operators, facts={"unsupported": tuple(calls)})
    found = findings(given)
    assert "python" not in found
    assert "in vision::roi (26.0 ms)" in found["no_products"].sentence
    # Without its time, it is unknown what takes the time.
    del operators["vision::roi"]
    unknown = findings(trained(own=own, operators=operators, facts={"unsupported": tuple(calls)}))
    assert "python" not in unknown
    assert "operators take only" not in unknown["no_products"].sentence


@pytest.mark.parametrize(("slow", "named"), [(30e-3, "layers.1"), (9e-3, "layers.*")])
def test_a_repeated_module_that_takes_most_of_the_time_is_named_alone(
    slow: float, named: str
) -> None:
    """The two other modules take 10 ms each, so 30 ms are more than half, and 9 ms are not."""
    rows: dict[str, dict[str, Any]] = {
        "": {"class_name": "Net"} | weights(0, 8),
        "a": {"class_name": "Linear"} | weights(8),
        "layers": {"class_name": "ModuleList"},
    }
    own: dict[tuple[str, Phase], float] = {("a", "forward"): 20e-3, ("a", "backward"): 40e-3}
    cells = [*WORK[:2]]
    for number, seconds in enumerate((10e-3, slow, 10e-3)):
        name = f"layers.{number}"
        # It is called twice, so it is not compared with the others as an identical module.
        rows[name] = {"class_name": "GELU", "calls": 2 if number == 1 else 1}
        cells.append(cell(name, "gelu", "forward", bytes_moved=5_000_000))
        own[name, "forward"] = seconds
    step = Step(index=0, kind="unprofiled", seconds=0.1, phases=USUAL)
    given = profile(
        rows,
        cells,
        run=run(kind="training", device_type="cpu"),
        steps=tuple(replace(step, index=number) for number in range(6)),
    )
    found = findings(clocked(given, own))["no_products"]
    assert f"is spent in {named} (GELU) itself" in found.sentence


@pytest.mark.parametrize("module", ["b", ""])
def test_a_loop_of_many_small_operators_is_named(module: str) -> None:
    """A loss in a Python loop makes 1000 calls of `logsumexp`, which is nothing to fuse."""
    calls = cell(module, "logsumexp", "forward", calls=1000, bytes_moved=100_000)
    own: dict[tuple[str, Phase], float] = {(module, "forward"): 30e-3}
    given = trained(own=own, cells=[calls], operators={"logsumexp": 18e-3, "gelu": 1e-3})
    found = findings(given)["no_products" if module else "outside"]
    assert "makes 1.00 k operator calls in a step. Replace Python loops" in found.fix
    assert not found.is_issue


def test_a_single_operator_is_fused_with_its_neighbours() -> None:
    """GELU has one operator, so there is nothing to fuse inside of it."""
    found = findings(trained(operators={"gelu": 10e-3, "gelu_backward": 20e-3}))["no_products"]
    assert found.fix.startswith("Fuse the operator of b with the operators before and after it")


def test_operators_that_other_phases_can_hold_do_not_explain_forward() -> None:
    """The operators after the optimizer take 20 ms, and `other` takes 25 ms.

    So they explain nothing of the 20 ms outside the layers, which Python code takes.
    """
    given = trained(
        own={("", "forward"): 20e-3},
        cells=[cell("", "add_", "other", bytes_moved=1_000_000)],
        operators={"gelu": 5e-3, "gelu_backward": 5e-3, "add_": 20e-3},
        other=25e-3,
    )
    found = findings(given)["outside"]
    assert found.is_issue
    assert "add_" not in found.sentence


def test_a_sleep_outside_the_layers_is_no_python_code() -> None:
    """Of 65 ms outside the layers, the thread sleeps for 40 ms, and pooling takes 22 ms."""
    given = trained(
        own={("", "forward"): 65e-3},
        cells=[cell("", "max_pool2d", "forward", bytes_moved=1_000_000)],
        operators={"gelu": 5e-3, "gelu_backward": 5e-3, "max_pool2d": 22e-3},
        forward=95e-3,
        on_core=124e-3,
    )
    found = findings(given)
    assert found["sleep"].is_issue
    assert 40e-3 == pytest.approx(found["sleep"].seconds, rel=0.05)
    assert not found["outside"].is_issue
    assert "in max_pool2d (22.0 ms)" in found["outside"].sentence


def repeated(*own_seconds: float, on_core: float) -> Profile:
    """Return the profile of a training with four layers `layers.N`, which run no operators."""
    rows: dict[str, dict[str, Any]] = {
        "": {"class_name": "Net"} | weights(0, 8),
        "a": {"class_name": "Linear"} | weights(8),
        "layers": {"class_name": "ModuleList"},
    }
    own: dict[tuple[str, Phase], float] = {("a", "forward"): 20e-3, ("a", "backward"): 40e-3}
    for number, seconds in enumerate(own_seconds):
        rows[f"layers.{number}"] = {"class_name": "Block"}
        own[f"layers.{number}", "forward"] = seconds
    took = {"forward": 20e-3 + sum(own_seconds), "backward": 40e-3}
    step = Step(index=0, kind="unprofiled", seconds=sum(took.values()), phases=took)
    timed = replace(step, kind="module_timing", thread_cpu=on_core, thread_waited=0.0)
    timed = replace(timed, fetching_cpu=0.0, fetching_waited=0.0)
    steps = [replace(step, index=number) for number in range(6)]
    steps += [replace(timed, index=6 + number) for number in range(3)]
    made = profile(rows, WORK[:2], run=run(kind="training", device_type="cpu"), steps=tuple(steps))
    return clocked(made, own)


def test_a_sleep_in_repeated_layers_is_one_finding() -> None:
    """Each of four layers sleeps for 10 ms. In the twin, the thread computes in this time."""
    found = findings(repeated(*[10e-3] * 4, on_core=60e-3))
    assert "layers.*" == found["sleep"].module
    assert "python" not in found
    found = findings(repeated(*[10e-3] * 4, on_core=100e-3))
    assert "sleep" not in found
    assert "python" in found


def test_python_code_in_several_modules_is_not_said_to_be_in_one() -> None:
    """The layer `b` takes 20 ms, and `c` takes 15 ms, both without operators."""
    rows = {
        "": {"class_name": "Net"} | weights(0, 8),
        "a": {"class_name": "Linear"} | weights(8),
        "b": {"class_name": "Encoder"},
        "c": {"class_name": "Decoder"},
    }
    own: dict[tuple[str, Phase], float] = {
        ("a", "forward"): 20e-3,
        ("a", "backward"): 45e-3,
        ("b", "forward"): 20e-3,
        ("c", "forward"): 15e-3,
    }
    step = Step(
        index=0, kind="unprofiled", seconds=0.1, phases={"forward": 55e-3, "backward": 45e-3}
    )
    steps = tuple(replace(step, index=number) for number in range(6))
    made = profile(rows, WORK[:2], run=run(kind="training", device_type="cpu"), steps=steps)
    found = findings(clocked(made, own))["python"]
    assert "is spent in b (Encoder) itself and in 1 other module, although" in found.sentence
    assert 35e-3 == pytest.approx(found.seconds, rel=0.01)


def normalized(kind: str, calls: int) -> Profile:
    """Return a training run with three modules of a class that run no matmuls.

    The modules have different places, so they are no repeats of each other. They take 10, 20 and
    30 ms of a step of 0.1 s, and each runs so many operators.
    """
    rows = {
        "": {"class_name": "Net"} | weights(0, 8),
        "a": {"class_name": "Linear"} | weights(8),
        "first": {"class_name": kind},
        "second": {"class_name": kind},
        "last": {"class_name": kind},
    }
    names = ("first", "second", "last")
    cells = [cell(name, "native_layer_norm", "forward", calls=calls) for name in names]
    own: dict[tuple[str, Phase], float] = {
        ("a", "forward"): 20e-3,
        ("a", "backward"): 20e-3,
        ("first", "forward"): 10e-3,
        ("second", "forward"): 20e-3,
        ("last", "forward"): 30e-3,
    }
    step = Step(
        index=0, kind="unprofiled", seconds=0.1, phases={"forward": 80e-3, "backward": 20e-3}
    )
    steps = tuple(replace(step, index=number) for number in range(6))
    made = profile(
        rows,
        [*WORK[:2], *cells],
        run=run(kind="training", device_type="cpu"),
        steps=steps,
    )
    return clocked(made, own)


def test_modules_of_one_class_have_one_finding() -> None:
    """Three norms take 60 ms of 0.1 s. Each alone would hide two thirds of this time."""
    found = findings(normalized("LayerNorm", 1))["no_products"]
    assert "60.0 % of the step (60.0 ms)" in found.sentence
    assert "is spent in 3 modules of the class LayerNorm, such as last" in found.sentence
    assert 60e-3 == pytest.approx(found.seconds)
    assert "operators without matmuls in 3 LayerNorm modules" == found.title
    assert found.fix.startswith("Fuse the operator of the 3 LayerNorm modules with")


@pytest.mark.parametrize(("operator", "can_fuse"), [("_linalg_svd", False), ("gelu", True)])
def test_no_compiler_fuses_the_operators_of_a_library(operator: str, *, can_fuse: bool) -> None:
    """The operator takes all of the 30 ms of module `b`."""
    cells = [cell("b", operator, phase, calls=1) for phase in PASSES]
    given = trained(cells=cells, operators={operator: 30e-3})
    found = findings(given)["no_products"]
    assert can_fuse == found.fix.startswith("Fuse")
    assert can_fuse != (f"Call {operator} less often" in found.fix)


@pytest.mark.parametrize(
    ("seconds", "module", "cost"),
    [((15e-3, 15e-3), "layers.*", 30e-3), ((25e-3, 5e-3), "layers.0", 25e-3)],
)
def test_one_of_two_repeated_modules_is_named_alone_only_if_it_takes_much_longer(
    seconds: tuple[float, float], module: str, cost: float
) -> None:
    """One of two equal modules always takes half of their time."""
    given = repeated(*seconds, on_core=1.0)
    rows = dict(given.modules)
    for name in ("layers.0", "layers.1"):
        rows[name] = replace(rows[name], class_name="GELU")
    cells = [cell(f"layers.{number}", "gelu", "forward", calls=1) for number in range(2)]
    counted = replace(given, modules=rows, op_counts=(*given.op_counts, *cells))
    forward = {name: replace(row.forward, self_calls=1) for name, row in rows.items()}
    rows |= {name: replace(rows[name], forward=forward[name]) for name in ("layers.0", "layers.1")}
    found = findings(replace(counted, modules=rows))["no_products"]
    assert module == found.module
    assert cost == pytest.approx(found.seconds, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "calls", "is_loop"),
    [
        ("Codebook", 400, True),
        ("Codebook", 100, False),
        # torch's own loop over the steps of a sequence is no Python code.
        ("GRU", 400, False),
    ],
)
def test_a_loop_in_a_module_with_matmuls_is_named(kind: str, calls: int, *, is_loop: bool) -> None:
    """The module has two matmuls, and also calls many small operators."""
    given = trained(cells=[cell("a", "mul", "forward", calls=calls)])
    modules = dict(given.modules)
    modules["a"] = replace(modules["a"], class_name=kind)
    found = findings(replace(given, modules=modules))
    assert is_loop == ("loop" in found)
    if is_loop:
        assert "a (Codebook) itself, which makes 402 operator calls" in found["loop"].sentence
        assert "Replace Python loops" in found["loop"].fix
    else:
        assert 'Pass hardware="measure"' in found["busiest"].fix


@pytest.mark.parametrize(
    ("workers", "advice"),
    [
        (None, "Load batches in DataLoader workers (num_workers=)"),
        (0, "With an IterableDataset, each worker must read different samples"),
        (2, "Use more DataLoader workers, persistent_workers=True"),
    ],
)
def test_advice_on_the_loader_depends_on_its_workers(workers: int | None, advice: str) -> None:
    """`persistent_workers=True` is an error for a loader without workers."""
    given = trained(data=100e-3)
    given = replace(given, run=replace(given.run, workers=workers))
    assert advice in findings(given)["data"].fix


def test_unreliable_module_times_show_no_python_code() -> None:
    """On a busy machine, a module may seem to take several times as long as its operators."""
    given = trained(operators={"gelu": 1e-3})
    assert "python" in findings(given)
    note = Note(code="time_scaled", subject="", values={"forward": 4.5})
    assert "python" not in findings(replace(given, notes=(note,)))


def test_python_code_and_operators_of_a_module_share_its_time() -> None:
    """Of 30 ms in `b`, 9 ms are Python code in forward. The other finding has the rest."""
    found = findings(trained(operators={"gelu": 1e-3}))
    assert 9e-3 == pytest.approx(found["python"].seconds, rel=0.02)
    both = (found["python"].seconds or 0.0) + (found["no_products"].seconds or 0.0)
    assert 30e-3 == pytest.approx(both)


def test_a_short_sleep_does_not_hide_python_code_in_backward() -> None:
    """The thread sleeps for less than 3 ms in `b`, whose backward takes 30 ms for 1 ms of operators."""
    own: dict[tuple[str, Phase], float] = {("b", "forward"): 5e-3, ("b", "backward"): 30e-3}
    given = trained(
        own=own, operators={"gelu": 1e-3, "gelu_backward": 1e-3}, backward=70e-3, on_core=107e-3
    )
    sleep = analyze(given).evidence.sleep
    assert sleep is not None
    assert "b" == sleep.module
    assert 0 < sleep.seconds < 3e-3
    found = findings(given)
    assert "sleep" not in found
    assert found["no_products"].is_issue


def test_each_hook_explains_its_own_part() -> None:
    """One callback works on gradients for 30 ms, and another one at the end of a batch for 18 ms."""
    hooks = {"Histograms.on_after_backward": 30e-3, "Images.on_train_batch_end": 18e-3}
    found = findings(trained(clip=30e-3, other=20e-3, facts={"hooks": hooks}))
    assert "mostly in Histograms.on_after_backward" in found["clip"].sentence
    assert "other phases, mostly in Images.on_train_batch_end" in found["other"].sentence


def test_a_hook_before_the_optimizer_may_be_outside_all_phases() -> None:
    """No part of the step is work on gradients, so the hook's 30 ms are outside all phases."""
    hooks = {"Histograms.on_before_optimizer_step": 30e-3}
    found = findings(trained(other=35e-3, facts={"hooks": hooks}))
    assert "mostly in Histograms.on_before_optimizer_step" in found["other"].sentence


@pytest.mark.parametrize("monitor", ["lflops.monitor", "lflops", "FlopsCallback", "FlopsMonitor"])
def test_only_a_custom_loop_can_name_the_call_of_another_model(monitor: str) -> None:
    """Matmuls run outside all phases: those of a model that lflops does not monitor."""
    given = trained(cells=[product("", "addmm", "other", macs=900, bytes_moved=500)], other=40e-3)
    given = replace(given, run=replace(given.run, monitor=monitor))
    fix = findings(given)["other"].fix
    assert ("monitor.phase" in fix) == monitor.startswith("lflops")
    # A loop that lflops has detected has no monitor yet.
    assert ("with lflops.monitor" in fix) == (monitor == "lflops")


@pytest.mark.parametrize(("class_name", "is_replaced"), [("Adam", True), ("SGD", False)])
def test_an_optimizer_that_takes_sparse_gradients_is_kept(
    class_name: str, *, is_replaced: bool
) -> None:
    """SGD accepts sparse gradients. Adam does not, but SparseAdam does."""
    cells = (
        cell("b", "embedding", "forward", bytes_moved=1_000),
        cell("b", "embedding_dense_backward", "backward", bytes_moved=41_000),
        cell("b", "addcdiv_", "optimizer", bytes_moved=160_000),
    )
    given = trained(cells=cells, optimizer=60e-3)
    embedding = replace(given.modules["b"], parameter_bytes=40_000)
    optimizers = (OptimizerSettings(class_name=class_name),)
    given = replace(
        given,
        modules={**given.modules, "b": embedding},
        run=replace(given.run, optimizers=optimizers),
    )
    fix = findings(given)["optimizer"].fix
    assert "pass sparse=True to it" in fix
    assert is_replaced == ("SparseAdam" in fix)


# Hooks.


def hooked(given: Profile, code: str, *names: str) -> Profile:
    """Return a copy of a profile with a note about hooks on modules or on their parameters."""
    values = {"modules": len(names), "first": names[0], "names": "\n".join(names)}
    return replace(given, notes=(Note(code=code, subject="", values=values),))


@pytest.mark.parametrize(("backward", "found"), [(60e-3, True), (44e-3, False)])
def test_hooks_on_parameters_take_the_time_beyond_the_operators(
    backward: float, *, found: bool
) -> None:
    """The matmul in backward of `a` takes 40 ms in the trace, so hooks take 20 of its 60 ms.

    Without hooks, nothing is said about the 20 ms. A difference of 4 ms may be noise.
    """
    given = trained(
        own={("a", "backward"): backward},
        operators={"mm": 40e-3, "addmm": 20e-3, "gelu": 10e-3, "gelu_backward": 20e-3},
        backward=20e-3 + backward,
    )
    assert "gradient_hooks" not in findings(given)
    of_hooks = findings(hooked(given, "gradient_hooks", "a"))
    assert found == ("gradient_hooks" in of_hooks)
    if found:
        finding = of_hooks["gradient_hooks"]
        assert 20e-3 == pytest.approx(finding.seconds, rel=0.01)
        assert finding.is_issue
        assert "mostly in a, beyond" in finding.sentence


def with_layers(given: Profile, *names: str) -> Profile:
    """Return a copy of a profile with more modules, each of which is called once in a step."""
    layer = replace(
        given.modules["b"], class_name="Linear", calls=1, forward=work(), backward=work()
    )
    return replace(given, modules={**given.modules, **dict.fromkeys(names, layer)})


@pytest.mark.parametrize(("forward", "is_issue"), [(25e-3, True), (12e-3, False)])
def test_forward_hooks_on_the_layers_of_a_module_are_named(
    forward: float, *, is_issue: bool
) -> None:
    """The hooks on `b.inner` run operators, whose time counts for `b`.

    They have no backward. If forward takes at most as long as backward, other operators of `b` may
    take the time.
    """
    backward = 5e-3 if is_issue else 18e-3
    own: dict[tuple[str, Phase], float] = {("b", "forward"): forward, ("b", "backward"): backward}
    given = with_layers(
        trained(own=own, operators={"gelu": forward, "gelu_backward": backward}), "b.inner"
    )
    assert "hooks" not in findings(given)["no_products"].sentence
    found = findings(hooked(given, "forward_hooks", "b.inner"))["no_products"]
    assert "in b (GELU) itself or in forward hooks, in gelu" in found.sentence
    assert is_issue == ("hooks on b or its layers work only every N steps" in found.fix)
    assert is_issue == ("forward hooks in b" == found.title)
    assert is_issue == found.is_issue
    # With a hook on only one of three layers, the operators are those of `b`.
    more = with_layers(given, "b.inner", "b.other", "b.another")
    found = findings(hooked(more, "forward_hooks", "b.inner"))["no_products"]
    assert "hooks" not in found.sentence
    assert not found.is_issue
    # If the trace does not show these operators, the hook may take the time.
    unseen = trained(own=own, operators={"gelu": 1e-3, "gelu_backward": 1e-3})
    unknown = (UnsupportedCall(module="b", operator="v::nms", phase="forward", calls=1, bytes=9),)
    unseen = with_layers(replace(unseen, unsupported=unknown), "b.inner", "b.other", "b.another")
    found = findings(hooked(unseen, "forward_hooks", "b.inner"))["no_products"]
    assert "or in forward hooks" in found.sentence
    assert is_issue == found.is_issue


def test_a_hook_before_the_forward_of_a_module_counts_for_the_module() -> None:
    """Only the module with the hook is concerned, and not the one that calls it."""
    own: dict[tuple[str, Phase], float] = {("b", "forward"): 25e-3, ("b", "backward"): 5e-3}
    given = trained(own=own, operators={"gelu": 24e-3, "gelu_backward": 5e-3})
    found = findings(hooked(given, "forward_pre_hooks", "b"))
    assert "in b (GELU) itself or in forward hooks" in found["no_products"].sentence
    assert found["no_products"].is_issue
    assert "hooks" not in findings(hooked(given, "forward_hooks", "b"))["no_products"].sentence


def test_forward_hooks_on_the_layers_of_a_list_count_for_the_module_that_calls_them() -> None:
    """The list `blocks` is never called, so the root calls the two blocks with hooks."""
    outside = trained(own={("", "forward"): 25e-3}, cells=POOLING, operators={"clamp_min": 20e-3})
    given = with_layers(outside, "blocks.0", "blocks.1")
    container = replace(given.modules["b"], calls=0, class_name="ModuleList")
    given = replace(given, modules={**given.modules, "blocks": container})
    found = findings(hooked(given, "forward_hooks", "blocks.0", "blocks.1"))["outside"]
    assert "or in forward hooks on the layers" in found.sentence
    assert "hooks" not in findings(given)["outside"].sentence


def test_a_layer_with_hooks_on_its_parameters_has_one_finding() -> None:
    """Hooks take 19 of the 30 ms in backward of `b`, and are no operators to fuse."""
    own: dict[tuple[str, Phase], float] = {("b", "forward"): 5e-3, ("b", "backward"): 30e-3}
    given = trained(own=own, operators={"gelu": 4e-3, "gelu_backward": 11e-3})
    assert "no_products" in findings(given)
    found = findings(hooked(given, "gradient_hooks", "b"))
    assert 19e-3 == pytest.approx(found["gradient_hooks"].seconds, rel=0.01)
    assert "no_products" not in found
    assert "busiest" not in found or "in b" not in found["busiest"].sentence


def test_operators_take_as_much_longer_as_their_modules() -> None:
    """The times of modules were multiplied by 1.45, so operators of 12 ms explain 17 of 30 ms."""
    own: dict[tuple[str, Phase], float] = {("b", "forward"): 1e-3, ("b", "backward"): 29e-3}
    given = trained(own=own, operators={"gelu": 1e-3, "gelu_backward": 11e-3})
    assert "operators take only" in findings(given)["no_products"].sentence
    note = Note(code="time_scaled", subject="", values={"backward": 1.45})
    scaled = findings(replace(given, notes=(note,)))["no_products"]
    assert "operators take only" not in scaled.sentence
    # The operators are in backward, so a factor of forward changes nothing.
    note = Note(code="time_scaled", subject="", values={"forward": 1.45})
    not_scaled = findings(replace(given, notes=(note,)))["no_products"]
    assert "operators take only" in not_scaled.sentence


# The order.


ADAM = OptimizerSettings(class_name="Adam", accepts_fused=True, accepts_foreach=True)
RMSPROP = OptimizerSettings(class_name="RMSprop", accepts_foreach=True)
SPARSE = OptimizerSettings(class_name="SparseAdam")
LBFGS = OptimizerSettings(class_name="LBFGS", max_iter=20)


@pytest.mark.parametrize(
    ("optimizers", "advice"),
    [
        ((), "Pass fused=True to the optimizer if it accepts this argument, or use larger batches"),
        ((SPARSE, ADAM), "Pass fused=True to Adam, or use larger batches"),
        ((replace(ADAM, foreach=True),), "Pass fused=True instead of foreach=True to Adam, or use"),
        ((replace(ADAM, fused=True),), "Use larger batches, so that the optimizer makes fewer st"),
        # On a CPU, foreach=True makes RMSprop 2 to 2.4 times as slow with 8 to 60 large parameters.
        ((SPARSE, RMSPROP), "Use larger batches, so that the optimizer makes fewer steps"),
        ((replace(RMSPROP, foreach=True),), "Use larger batches"),
        ((SPARSE,), "Use larger batches"),
        ((LBFGS,), "Lower history_size or max_iter: in each of its up to 20 iterations per step"),
    ],
)
def test_advice_on_a_slow_optimizer_is_possible(
    optimizers: tuple[OptimizerSettings, ...], advice: str
) -> None:
    """Only arguments that an optimizer accepts are advised, unless they are already set.

    If the optimizer is unknown, the advice is conditional.
    """
    given = trained(optimizer=60e-3)
    slow = replace(given, run=replace(given.run, optimizers=optimizers))
    found = findings(slow)["optimizer"]
    assert found.is_issue
    assert advice in found.fix
    assert ("closure" in found.fix) == (optimizers == (LBFGS,))


@pytest.mark.parametrize(
    ("name", "calls", "is_advised"),
    [("Lamb", 190, True), ("Lamb", 50, False), ("SparseAdam", 190, False)],
)
def test_an_own_optimizer_with_many_calls_could_use_foreach(
    name: str, calls: int, *, is_advised: bool
) -> None:
    """If a user's own optimizer makes 380 operator calls, the advice is torch._foreach."""
    cells = [cell(each, "mul", "optimizer", calls=calls) for each in ("a", "b")]
    given = trained(optimizer=60e-3, cells=cells)
    own = (OptimizerSettings(class_name=name),)
    found = findings(replace(given, run=replace(given.run, optimizers=own)))["optimizer"]
    assert is_advised == found.fix.startswith("Lamb makes 380 operator calls in a step.")
    assert is_advised == ("torch._foreach" in found.fix)


EMBEDDING = (
    cell("u", "embedding", "forward", bytes_moved=1_000),
    cell("u", "embedding_dense_backward", "backward", bytes_moved=41_000),
    cell("u", "addcdiv_", "optimizer", bytes_moved=160_000),
    cell("u.head", "addcdiv_", "optimizer", bytes_moved=40_000),
)
"""An embedding of 40,000 bytes. A step reads 1,000 bytes of it, and the optimizer updates it all."""


@pytest.mark.parametrize(
    ("fields", "read", "updated", "is_advised"),
    [
        ({}, 1_000, 160_000, True),
        # A step reads more than 5 % of the embedding.
        ({}, 3_000, 160_000, False),
        # The optimizer moves most bytes for other parameters.
        ({}, 1_000, 30_000, False),
        # Another module uses the same weight in a matmul.
        ({"owner": "u"}, 1_000, 160_000, False),
    ],
)
def test_sparse_gradients_are_advised_for_an_embedding_with_few_rows(
    fields: dict[str, Any], read: int, updated: int, *, is_advised: bool
) -> None:
    """Only an embedding that causes most of the optimizer's work, and whose rows are rarely read."""
    cells = (
        replace(EMBEDDING[0], bytes_moved=read),
        EMBEDDING[1],
        replace(EMBEDDING[2], bytes_moved=updated),
        EMBEDDING[3],
    )
    rows = {
        "": {"class_name": "Net"} | weights(0, 10_010),
        "u": {"class_name": "Embedding"} | weights(10_000),
        "u.head": {"class_name": "Linear"} | weights(10) | fields,
    }
    given = profile(rows, cells, run=run(kind="training", optimizers=(ADAM,)))
    assert is_advised == (embedding_with_few_rows(given) == "u")


def test_a_slow_optimizer_is_named_without_a_window() -> None:
    """The optimizer takes 60 of the 140 s after start-up, but a ledger does not prove an issue.

    The twin: 10 of 90 s are reported, and 5 of 85 s are not.
    """
    found = findings(account(**{"training/optimizer": 60.0}))["optimizer"]
    assert (
        "42.9 % of the training loop's time (600 ms per step) is optimizer work." == found.sentence
    )
    assert "fused=True" in found.fix
    assert not found.is_issue
    assert "optimizer" in findings(account(**{"training/optimizer": 10.0}))
    assert "optimizer" not in findings(account(**{"training/optimizer": 5.0}))
    # On a GPU, the host waits in any phase for the kernels that it has launched.
    waiting = account(**{"training/optimizer": 60.0, "training/other": 60.0})
    assert {"optimizer", "other"} == findings(waiting).keys()
    assert not findings(replace(waiting, device="cuda"))


def test_an_optimizer_that_loops_over_rows_is_an_issue() -> None:
    """400 ms for 40,000 calls are 10 µs for each call, but no optimizer needs so many calls.

    The twin makes as many calls, but for 400 modules.
    """
    cells = [cell("a", "add_", "optimizer", calls=40_000, bytes_moved=160_000)]
    looping = trained(optimizer=0.4, cells=cells)
    found = findings(looping)["optimizer"]
    assert found.is_issue
    assert "makes 40.00 k operator calls in a step. Compute with whole tensors" in found.fix
    parameters = replace(looping.modules["a"], class_name="ParameterList")
    with_list = replace(looping, modules={**looping.modules, "a": parameters})
    assert not findings(with_list)["optimizer"].is_issue
    many = [replace(cells[0], module=f"layers.{each}", calls=100) for each in range(400)]
    rows = {"": {"class_name": "Net"}, "layers": {"class_name": "ModuleList"}}
    rows |= {f"layers.{each}": {"class_name": "Linear"} for each in range(400)}
    step = Step(index=0, kind="unprofiled", seconds=0.5, phases=USUAL | {"optimizer": 0.4})
    steps = tuple(replace(step, index=number) for number in range(6))
    given = profile(rows, many, run=run(kind="training", device_type="cpu"), steps=steps)
    assert not findings(given)["optimizer"].is_issue


def test_the_usual_clipping_of_transformers_is_no_loop_over_parameters() -> None:
    """The Trainer clips by default, with `foreach`. It may need 0.2 ns for each byte."""
    traffic = cell("", "_foreach_mul_", "other", bytes_moved=100_000_000)
    clipping = trained(clip=20e-3, cells=[traffic])
    assert findings(clipping)["clip"].is_issue
    in_trainer = replace(clipping, run=replace(clipping.run, monitor="FlopsCallback"))
    assert not findings(in_trainer)["clip"].is_issue
    given = trained(clip=20e-3)
    given = replace(given, run=replace(given.run, monitor="FlopsCallback"))
    assert findings(given)["clip"].is_issue
    assert "pass max_grad_norm=0 to TrainingArguments" in findings(given)["clip"].fix
    assert "loop over parameters" not in findings(given)["clip"].fix


def finding(cause: str, seconds: float | None, **fields: Any) -> Finding:
    """Return a finding of a step that takes one second."""
    return Finding(cause=cause, sentence=cause, seconds=seconds, share=seconds, **fields)


def test_the_largest_share_comes_first_whatever_its_kind() -> None:
    """Overhead of 86 % outside all phases comes before issues of 5 % and 3 %.

    Inefficient kernels and the busiest module have larger shares, but they are the model's work.
    """
    other = finding("other", 0.86, is_overhead=True)
    small = [finding("data", 0.05, is_issue=True), finding("clip", 0.03, is_issue=True)]
    rest = [finding("peak", None), finding("inefficient_kernels", 0.9), finding("busiest", 0.95)]
    found = ordered([*rest, *small, other])
    assert ["other", "data", "clip", "busiest", "inefficient_kernels", "peak"] == [
        each.cause for each in found
    ]
    assert [other, *small] == leading(found)


def test_a_large_issue_stays_first() -> None:
    """The twin: overhead that costs less than an issue comes after it and does not lead."""
    other = finding("other", 0.2, is_overhead=True)
    issue = finding("data", 0.3, is_issue=True)
    setting = finding("eval_mode", None, is_issue=True)
    assert [setting, issue, other] == ordered([other, issue, setting])
    assert [setting, issue] == leading([other, issue, setting])


def test_why_begins_with_the_largest_share() -> None:
    """The most time is outside all phases, where another model's matmuls run.

    So this time is not an issue, but it comes before the issue in gradient clipping.
    """
    another = product("", "mm", "other", macs=1_000_000, bytes_moved=1)
    given = trained(other=900e-3, clip=200e-3, cells=[another])
    said = explain(given)
    assert ("other", "clip") == tuple(each.cause for each in said.findings[:2])
    assert ("found", "clip") == (said.status, said.cause)
    first_why = next(text for label, text in lines_of(said) if label == "why")
    assert "outside forward, backward and the other phases" in first_why


# Advice and confidence.


def test_advice_to_log_less_needs_a_logger() -> None:
    """Time outside all phases may be anything. Only the ledger has the time of loggers."""
    assert "og less" not in findings(trained(other=100e-3))["other"].fix
    assert "Log less" in findings(account(logging=20.0))["logging"].fix


def test_kinds_that_were_wrong_elsewhere_have_no_record() -> None:
    """Rules that gave false findings in such runs state no share of right findings."""
    rules = all_rules()
    for name in ("data", "transfer", "other", "outside", "validation", "padding", "no_products"):
        assert all(rule.right is None for rule in rules[name])
    given = trained(data=60e-3)
    assert not any("such findings were right" in text for _, text in lines_of(explain(given)))


def test_cannot_tell_is_no_headline() -> None:
    """If too few steps were timed, the first line has only the step time.

    The last line states that lflops cannot tell whether anything is wrong.
    """
    said = report_of(analyze(trained(steps=3))).verdict
    assert "A step takes 100 ms." == said.said
    assert "" == said.judgement
    lines = list(lines_of(explain(trained(steps=3))))
    assert ("verdict", "A step takes 100 ms.") == lines[0]
    assert "cannot tell whether anything is wrong" in lines[-1][1]


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        (
            ("new_shapes",),
            ": 6 of 9 steps have batches of new shapes (pad batches to a few fixed shapes)",
        ),
        (("recompiled",), ": 6 of 9 steps compile code again (pass dynamic=True to torch.compile)"),
        ((), ""),
    ],
)
def test_few_steps_have_a_reason(marks: tuple[str, ...], reason: str) -> None:
    """The reason names the marks of the steps, if they have marks.

    Runs with marks have 6 marked and 3 module-timing steps. The run without marks has 3 unprofiled
    and 3 module-timing steps.
    """
    given = trained(marks=marks) if marks else trained(steps=3)
    said = [unseen_because(analyze(given)), report_of(analyze(given)).verdict.said]
    if marks:
        assert ["nothing was timed", f"A step has 3.00 k MACs. No step was timed{reason}."] == said
    else:
        assert ["fewer than 5 unprofiled steps were timed", "A step takes 100 ms."] == said


def test_steps_of_new_shapes_are_the_reason_for_few_steps() -> None:
    """6 of 13 steps have new shapes, 3 are module-timing steps, and only 4 are undisturbed."""
    given = trained(marks=("new_shapes",))
    more = [replace(step, marks=()) for step in given.steps[:4]]
    assert (
        "fewer than 5 unprofiled steps were timed: 6 of 13 steps have batches of new shapes (pad "
        "batches to a few fixed shapes)"
    ) == unseen_because(analyze(replace(given, steps=(*given.steps, *more))))


# Names.


def test_modules_that_only_keep_books_are_not_said_to_be_never_called() -> None:
    """A metric has no parameters, and `lm_head` has weights that the optimizer updates.

    So only `spare` is listed as never called.
    """
    rows: dict[str, dict[str, Any]] = {
        "": {"class_name": "Net", "calls": 1} | weights(0, 24),
        "lm_head": {"class_name": "Linear", "calls": 0} | weights(8),
        "spare": {"class_name": "Linear", "calls": 0} | weights(8),
        "accuracy": {"class_name": "MulticlassAccuracy", "calls": 0},
        "layer": {"class_name": "Linear", "calls": 1} | weights(8),
    }
    updates = [cell(name, "_foreach_add_", "optimizer") for name in ("lm_head", "layer")]
    assert ("spare",) == analyze(profile(rows, updates)).uncalled


def test_the_list_of_modules_that_were_never_called_is_short() -> None:
    """The list has four names, each shortened to at most 60 characters."""
    names = [f"{letter * 80}" for letter in "abcdef"]
    rows: dict[str, dict[str, Any]] = {"": {"class_name": "Net", "calls": 1} | weights(0, 48)}
    rows |= {name: {"class_name": f"L{name[0]}", "calls": 0} | weights(8) for name in names}
    remarks = {fact.name: fact.text for fact in report_of(analyze(profile(rows, ()))).remarks}
    said = remarks["never_called"]
    assert said.endswith("and 2 more")
    assert len(said) <= 4 * 62 + 12


def test_inputs_have_their_size_with_its_source() -> None:
    """If the size is unknown, the report shows a dash and how to pass the size."""

    def inputs(**facts: Any) -> str:
        given = replace(trained(), run=run(kind="training", shapes={}, **facts))
        subject = {fact.name: fact.text for fact in report_of(analyze(given)).subject}
        return subject["inputs"]

    assert "samples – (pass units=)" == inputs()
    assert "4 samples (from num_graphs of the batch)" == inputs(
        samples_per_step=4, samples_from="num_graphs of the batch"
    )
    tokens = {"tokens_per_step": 216, "tokens_from": ("a_input_ids", "0")}
    assert "216 tokens (from a_input_ids, input 0), samples – (pass units=)" == inputs(**tokens)


def test_unknown_samples_per_second_say_why() -> None:
    """A remark gives the reason, because a dash alone would look like a failure."""
    speed = {fact.name: fact for fact in report_of(analyze(trained())).speed}
    assert (None, "the number of samples per batch is unknown: pass units=") == (
        speed["samples/s"].value,
        speed["samples/s"].remark,
    )


def test_advice_in_an_unchanged_script_does_not_ask_for_arguments() -> None:
    """`lflops run` passes no arguments, so the advice names the environment variable instead."""
    given = trained()
    detected = replace(given, run=replace(given.run, monitor="lflops"))
    report = report_of(analyze(detected))
    said = " ".join(fact.remark for fact in (*report.speed, *report.subject))
    assert "pass units= to lflops.monitor in the script" in said
    assert "set LFLOPS=hardware=measure to measure it" in said
    assert "pass hardware" not in said
    fixes = " ".join(finding.fix for finding in findings(detected).values())
    assert "Set the environment variable LFLOPS to hardware=measure" in fixes
    assert "Pass hardware" not in fixes


def test_the_own_code_of_a_model_is_one_finding() -> None:
    """The model calls only functions, and not its layer: 60 of 100 ms.

    No other finding names the same time again.
    """
    work = [
        product("", "aten::bmm", "forward", macs=1000, bytes_moved=8),
        product("", "aten::bmm", "backward", macs=2000, bytes_moved=8),
    ]
    step = Step(index=0, kind="unprofiled", seconds=0.1, phases=USUAL)
    steps = tuple(replace(step, index=number) for number in range(6))
    rows = {"": {"class_name": "Ensemble"} | weights(0, 8), "a": {"class_name": "MLP"} | weights(8)}
    made = profile(rows, work, run=run(kind="training", device_type="cpu"), steps=steps)
    found = findings(clocked(made, {("", "forward"): 30e-3, ("", "backward"): 30e-3}))
    assert pytest.approx(60e-3) == found["outside"].seconds
    assert "busiest" not in found


def test_a_model_that_is_compiled_as_a_whole_has_the_work_of_its_layers() -> None:
    """Only the whole model is timed: 50 ms. Its layers have 3000 MACs, so it computes 120 kFLOP/s."""
    rows = {
        "": {"class_name": "Net", "compiled": True} | weights(0, 8),
        "a": {"class_name": "Linear"} | weights(8),
    }
    step = Step(index=0, kind="unprofiled", seconds=0.1, phases=USUAL)
    steps = tuple(replace(step, index=number) for number in range(6))
    made = profile(rows, WORK[:2], run=run(kind="training", device_type="cpu"), steps=steps)
    own: dict[tuple[str, Phase], float] = {("", "forward"): 20e-3, ("", "backward"): 30e-3}
    given = clocked(made, own)
    (busy,) = analyze(given).busiest
    assert busy.is_compiled
    assert (3000, 50e-3) == (busy.macs, pytest.approx(busy.seconds))
    assert "most time is spent in the compiled Net: 50.0 %" in findings(given)["busiest"].sentence
    (line,) = (line for line in log_text(analyze(given)).splitlines() if "most time" in line[:12])
    assert "the compiled Net" in line
    assert "120 kFLOP/s" in line
    timed_inside = clocked(made, own | {("a", "forward"): 10e-3})
    assert not any(each.is_compiled for each in analyze(timed_inside).busiest)
