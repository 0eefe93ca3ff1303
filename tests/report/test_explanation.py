"""Test `lflops.explain` and `lflops why`: findings, issues, the ledger's findings and the output.

In most tests, a step takes 34 ms, and one planted cause adds to it.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import json as struct_json
from msgspec.structs import replace

import lflops
from lflops.analysis import analysis
from lflops.analysis.analysis import analyze
from lflops.analysis.compare import compared_run
from lflops.analysis.step_times import StepTimes, step_times
from lflops.cli.main import main
from lflops.findings.finding import Finding
from lflops.hardware.chips import Hardware
from lflops.ledger.account import Ledger, SlowStep, Span, Start, StepGroup
from lflops.profile.json_file import json_schema
from lflops.profile.notes import Note
from lflops.profile.profile import Communication, Profile
from lflops.profile.records import ModulePhase, Phase, Trace
from lflops.profile.steps import Step
from lflops.report import explanation
from lflops.report.explanation import (
    Explanation,
    explain,
    issue_changes,
    issue_lines,
    lines_of,
    markdown,
)
from lflops.report.log_text import log_text
from lflops.report.summary_facts import report_of
from tests.support.profile_builders import cell, clocked, product, profile, run, weights

USUAL = {"data": 1e-3, "forward": 10e-3, "backward": 20e-3, "optimizer": 2e-3, "other": 1e-3}
"""Seconds of the phases of a step of 34 ms."""


def usual_steps() -> tuple[Step, ...]:
    """Return six unprofiled steps of 34 ms."""
    seconds = sum(USUAL.values())
    return tuple(Step(index=n, kind="unprofiled", seconds=seconds, phases=USUAL) for n in range(6))


def trained(
    steps: int = 6,
    *,
    own: dict[tuple[str, Phase], float] | None = None,
    cells: Any = (),
    facts: Any = (),
    waiting: float | None = None,
    **phases: float,
) -> Profile:
    """Return a training run of two layers without any issue, except for what the arguments add.

    Args:
        steps: Number of unprofiled steps.
        own: Self times of modules in phases, in addition to the layers' equal shares of each phase.
        cells: More op counts.
        facts: More fields of the profile.
        waiting: Seconds of communication in each step.
        phases: Seconds of phases that differ from `USUAL`.
    """
    took = USUAL | phases
    rows = {"": {"class_name": "Net"} | weights(0, 8)}
    work = []
    self_times: dict[tuple[str, Phase], float] = {}
    for name in ("a", "b"):
        rows[name] = {"class_name": "Linear"} | weights(4)
        work.append(product(name, "aten::mm", "forward", macs=4, bytes_moved=8))
        work.append(product(name, "aten::mm", "backward", macs=8, bytes_moved=8))
        self_times[name, "forward"] = took["forward"] / 2
        self_times[name, "backward"] = took["backward"] / 2
    work.append(cell("", "aten::_foreach_add_", "optimizer", calls=40, bytes_moved=1000))
    unprofiled = tuple(
        Step(index=n, kind="unprofiled", seconds=sum(took.values()), phases=took, waiting=waiting)
        for n in range(steps)
    )
    counted = profile(
        rows, [*work, *cells], run=run(kind="training"), steps=unprofiled, **dict(facts)
    )
    return clocked(counted, self_times | (own or {}))


def account(**seconds: float) -> Ledger:
    """Return the ledger of a run of 100 steps, with 50 s of start-up and 80 s of forward.

    Args:
        seconds: Seconds of other categories; `training__data` stands for `training/data`.
    """
    spent = {"start_up": 50.0, "training/forward": 80.0}
    spent |= {name.replace("__", "/"): each for name, each in seconds.items()}
    begin = 1_800_000_000.0
    start = Start(
        begin=begin, seconds=sum(spent.values()), first_step=0, last_step=100, ended="finished"
    )
    span = Span(begin=begin, seconds=start.seconds, steps=100, spent=spent)
    return Ledger(
        seconds=spent, total=start.seconds, steps=100, slow_steps=(), starts=(start,), spans=(span,)
    )


def issues_of(found: Explanation) -> list[Finding]:
    """Return the findings that are issues."""
    return [each for each in found.findings if each.is_issue]


def causes(findings: Iterable[Finding]) -> list[str]:
    """Return the causes of findings in their order."""
    return [each.cause for each in findings]


def rounded(seconds: float | None) -> float | None:
    """Round to nanoseconds, so that costs are compared without rounding errors of floats."""
    if seconds is None:
        return None
    return round(seconds, 9)


def faults(given: Profile | Ledger) -> list[tuple[str, float | None]]:
    """Return the cause and the cost of each issue."""
    return [(each.cause, rounded(each.seconds)) for each in issues_of(explain(given))]


def test_a_training_like_any_other_has_no_fault_though_its_time_goes_somewhere() -> None:
    """A normal run has findings but no issue.

    The optimizer takes 2 of 34 ms. This is more than 2 %, so it is a finding.
    """
    found = explain(trained())
    assert "nothing found" == found.status
    assert found.cause is None
    phases = {each.cause for each in found.findings if each.cause in USUAL}
    assert {"data", "optimizer", "other"} == phases
    assert [] == issues_of(found)


def test_few_steps_or_a_busy_machine_cannot_tell() -> None:
    """With fewer than five unprofiled steps and no issue, the status is "cannot tell"."""
    assert "cannot tell" == explain(trained(4)).status
    assert "found" == explain(trained(4, data=20e-3)).status


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ({"data": 20e-3}, [("data", 20e-3)]),
        ({"other": 10e-3}, [("other", 10e-3)]),
        ({"clip": 8e-3}, [("clip", 8e-3)]),
        # 40 operators need at most 1.2 ms, and 1,000 bytes need almost nothing: 7 ms are too long,
        # and 2.3 ms are not.
        ({"optimizer": 7e-3}, [("optimizer", 7e-3)]),
        ({"optimizer": 2.3e-3}, []),
        ({"data": 2e-3}, []),
    ],
)
def test_from_which_share_on_a_phase_is_a_fault(
    phases: dict[str, float], said: list[tuple[str, float]]
) -> None:
    """A phase is an issue if it takes a tenth of the step, or a little more."""
    assert said == faults(trained(**phases))


def test_products_outside_of_all_phases_are_a_model_s() -> None:
    """Time outside all phases is no issue if another model runs there, such as one of a GAN.

    1 MAC may belong to a metric. 2 MACs are too few to explain 20 ms: the monitored model needs
    30 ms for 40 MACs, so 2 MACs that are three times as slow take 4.5 ms. 20 MACs take 45 ms.
    """
    for macs, said in ((1, [("other", 20e-3)]), (2, [("other", 20e-3)]), (20, [])):
        cells = [
            product("", "aten::mm", "other", macs=macs, bytes_moved=8),
            product("a", "aten::addmm", "forward", macs=16, bytes_moved=8),
        ]
        given = trained(other=20e-3, cells=cells)
        assert said == faults(given)
        (other,) = (each for each in explain(given).findings if each.cause == "other")
        assert ("where 20 MACs run" in other.sentence) is (macs == 20)


def test_a_clip_of_a_short_step_is_no_fault() -> None:
    """Clipping that takes no longer than a few operators is no issue, even if its share is large.

    0.4 ms of 2.4 ms is no issue, but 0.6 ms of 2.6 ms is.
    """

    def short(clip: float) -> Profile:
        return trained(
            data=0.1e-3,
            forward=0.6e-3,
            backward=1.2e-3,
            optimizer=0.05e-3,
            other=0.05e-3,
            clip=clip,
        )

    assert [] == faults(short(0.4e-3))
    assert [("clip", 0.6e-3)] == faults(short(0.6e-3))


@pytest.mark.parametrize(
    ("strategy", "clip", "outside"),
    [
        (
            "DDPStrategy",
            "between backward and the optimizer's step",
            ("is spent in Net itself, outside its layers.", "out of training_step"),
        ),
        (
            "Fabric",
            "between backward and the optimizer's step",
            ("outside its layers, or between the model and backward.", "of the loss"),
        ),
        (
            None,
            "between backward and the optimizer's step",
            ("outside its layers, or between the model and backward.", "of the loss"),
        ),
    ],
)
def test_a_loop_of_the_users_own_has_its_own_words(
    strategy: str | None, clip: str, outside: tuple[str, str]
) -> None:
    """Sentences mention `training_step` only for Lightning, identified by the name of its strategy.

    Other loops have no such method, and no hook that only clips.
    """
    own: dict[tuple[str, Phase], float] = {
        ("", "forward"): 8e-3,
        ("a", "forward"): 1e-3,
        ("b", "forward"): 1e-3,
    }
    given = trained(own=own, clip=8e-3)
    explained = explain(replace(given, run=replace(given.run, strategy=strategy)))
    found = {each.cause: each for each in issues_of(explained)}
    assert {"clip", "outside"} == found.keys()
    assert clip in found["clip"].sentence
    assert outside[0] in found["outside"].sentence
    assert outside[1] in found["outside"].fix
    assert ("training_step" in found["outside"].fix) == (strategy == "DDPStrategy")


def test_a_loop_that_clips_with_foreach_is_not_told_to_do_so() -> None:
    """The operator `_foreach_norm` shows that clip_grad_norm_ computes all norms together."""
    norm = cell("", "_foreach_norm", "other", calls=1)
    for cells, is_advised in (((), True), ((norm,), False)):
        (found,) = explain(trained(clip=8e-3, cells=cells)).findings[:1]
        assert "clip" == found.cause
        assert is_advised == ("foreach=True" in found.fix)


@pytest.mark.parametrize(("seconds", "said"), [(8e-3, []), (9e-3, [("optimizer", 9e-3)])])
def test_an_optimizer_with_many_operators_may_take_long(
    seconds: float, said: list[tuple[str, float]]
) -> None:
    """An optimizer of 440 operators may take 8.8 ms."""
    many = cell("", "aten::_foreach_add_", "optimizer", calls=400)
    assert said == faults(trained(optimizer=seconds, cells=[many]))


@pytest.mark.parametrize(("calls", "said"), [(10, []), (60, [("optimizer", 7e-3)])])
def test_an_optimizer_s_large_operators_read_memory_and_small_ones_a_cache(
    calls: int, said: list[tuple[str, float]]
) -> None:
    """The allowed time of an optimizer depends on the bytes of its operators.

    60 MB need 12 ms at 5 GB/s, the rate of memory. If 100 operators share these bytes, each is
    small enough for a cache: they need 3 ms at 20 GB/s, and 2 ms for 100 calls.
    """
    large = cell("", "aten::_foreach_add_", "optimizer", calls=calls, bytes_moved=60_000_000)
    assert said == faults(trained(optimizer=7e-3, cells=[large]))


def test_one_slow_step_of_an_optimizer_is_no_slow_optimizer() -> None:
    """One slow step does not make the optimizer an issue.

    It takes 22 ms in one of 6 steps and 2 ms in the others, so 5.33 ms on average.
    """
    given = trained()
    slow = replace(given.steps[0], seconds=54e-3, phases=USUAL | {"optimizer": 22e-3})
    assert [] == faults(replace(given, steps=(slow, *given.steps[1:])))


@pytest.mark.parametrize(("moved", "said"), [(1000, [("optimizer", 7e-3)]), (4_000_000, [])])
def test_on_a_device_an_optimizer_may_take_its_bytes_and_not_each_launch(
    moved: int, said: list[tuple[str, float]]
) -> None:
    """On a GPU, the allowed time of an optimizer depends on its bytes, but not on its launches.

    At 1 GB/s, 4 MB need 4 ms, so 7 ms are not too long. 1,000 bytes need almost nothing, although
    the host launches 400 operators.
    """
    many = cell("", "aten::add_", "optimizer", calls=400, bytes_moved=moved)
    given = trained(optimizer=7e-3, cells=[many])
    chip = Hardware("chip", {"fp32": 1e6}, 1e9)
    assert said == faults(replace(given, run=replace(given.run, device_type="cuda", hardware=chip)))


def test_with_a_known_peak_recomputing_still_costs_its_time() -> None:
    """Recomputation costs its measured 8 of 34 ms, not the 4 µs of its FLOPs at the peak."""
    again = product("a", "aten::mm", "recompute", macs=2, bytes_moved=8)
    given = trained(own={("a", "recompute"): 8e-3, ("a", "backward"): 2e-3}, cells=[again])
    chip = Hardware("chip", {"fp32": 1e6}, 1e9)
    assert [("recomputed", 8e-3)] == faults(replace(given, run=replace(given.run, hardware=chip)))


def test_a_second_backward_costs_what_is_more_than_twice_the_forward() -> None:
    """A second backward costs the part of backward that exceeds twice the MACs of forward.

    Forward has 8 MACs and backward has 16 + 16, so half of its 20 ms.
    """
    again = [product(name, "aten::mm", "backward", macs=8, bytes_moved=8) for name in ("a", "b")]
    given = trained(cells=again)
    assert [("backward_twice", 10e-3)] == faults(given)
    first = explain(given).findings[0]
    expected = "Backward has 4.0× as many MACs as forward, but only twice as many are normal"
    assert expected in first.sentence


def test_gradients_of_gradients_are_no_second_backward() -> None:
    """A step that takes derivatives on purpose has more MACs in backward than other steps.

    Backward has as many MACs as in the test above.
    """
    again = [product(name, "aten::mm", "backward", macs=8, bytes_moved=8) for name in ("a", "b")]
    given = trained(cells=again)
    derivatives = replace(given, run=replace(given.run, takes_derivatives=True))
    assert [] == faults(derivatives)
    (found,) = (each for each in explain(derivatives).findings if each.cause == "derivatives")
    assert 10e-3 == pytest.approx(found.seconds)
    assert "backward has 4.0× as many MACs as forward" in found.sentence


@pytest.mark.parametrize(
    ("numbers", "listed"),
    [
        ((2, 3, 4, 5, 13), "(2 to 5, 13)"),
        ((2, 3, 4, 9, 10), "(2 to 4, 9, 10)"),
        ((1, 3, 5, 7, 9), "(between 1 and 9)"),
    ],
)
def test_the_steps_of_the_mean_are_listed(numbers: tuple[int, ...], listed: str) -> None:
    """Consecutive steps are a range, and many ranges are only their first and last step."""
    given = trained(5)
    steps = [replace(step, index=index) for step, index in zip(given.steps, numbers, strict=True)]
    fact = report_of(analyze(replace(given, steps=tuple(steps)))).fact("step")
    assert fact is not None
    assert f"mean of 5 unprofiled steps {listed}; median" in fact.remark


def test_backward_work_in_forward_is_mentioned() -> None:
    """Modules take 40 ms in backward, and the phase backward only 20 ms. In the twin, both agree.

    torch.autograd.grad runs the rest during forward.
    """
    for seconds, is_mentioned in ((30e-3, True), (10e-3, False)):
        given = trained(own={("a", "backward"): seconds})
        derivatives = replace(given, run=replace(given.run, takes_derivatives=True))
        fact = report_of(analyze(derivatives)).fact("forward")
        assert fact is not None
        assert is_mentioned == ("backward work that torch.autograd.grad runs" in fact.remark)


def test_a_large_matmul_only_in_backward_is_no_second_backward() -> None:
    """One large matmul in backward, such as that of a Cholesky gradient, is not a second backward.

    Backward has as many MACs as in the test above, but its matmul of 32 MACs is eight times as
    large as the largest one of forward.
    """
    large = product("a", "aten::mm", "backward", macs=32, bytes_moved=8)
    assert [] == faults(trained(cells=[large]))


def test_a_layer_that_nothing_is_learned_from_is_unused() -> None:
    """A trainable layer without a backward is unused; one without parameters is not reported."""

    def with_third(parameters: int) -> Profile:
        rows = {
            "": {"class_name": "Net"} | weights(0, 8 + parameters),
            "a": {"class_name": "Linear"} | weights(4),
            "b": {"class_name": "Linear"} | weights(4),
            "c": {"class_name": "Linear"} | weights(parameters),
        }
        macs: dict[tuple[str, Phase], int] = {
            ("c", "forward"): 4,
            ("a", "forward"): 4,
            ("b", "forward"): 4,
            ("a", "backward"): 8,
            ("b", "backward"): 8,
        }
        own: dict[tuple[str, Phase], float] = {
            ("a", "forward"): 3e-3,
            ("b", "forward"): 3e-3,
            ("c", "forward"): 4e-3,
        }
        return built(rows, macs, own)

    (issue,) = issues_of(explain(with_third(4)))
    assert "unused" == issue.cause
    assert "c" == issue.module
    assert 4e-3 == issue.seconds
    assert [] == faults(with_third(0))


def built(
    rows: dict[str, Any],
    macs: dict[tuple[str, Phase], int],
    own: dict[tuple[str, Phase], float],
    **facts: Any,
) -> Profile:
    """Return a training run of these modules, with steps of 34 ms.

    Args:
        rows: The fields of each module.
        macs: The MACs of one matmul for each module and phase.
        own: Self times of modules in phases.
        facts: More fields of the profile.
    """
    work = [
        product(name, "aten::mm", phase, macs=each, bytes_moved=8)
        for (name, phase), each in macs.items()
    ]
    root = {"": {"class_name": "Net"} | weights(0, 8)}
    counted = profile(root | rows, work, run=run(kind="training"), steps=usual_steps(), **facts)
    return clocked(counted, own)


def test_time_of_a_module_without_operators_is_python() -> None:
    """Self time of a container without operators is time of Python code, such as hooks.

    A container may take 50 µs, and 50 µs for each of its two layers. Of 4 ms, 3.85 ms are left.
    Without a counting step, it is unknown whether a module runs operators.
    """
    rows = {
        "block": {"class_name": "Sequential"} | weights(0, 8),
        "block.0": {"class_name": "Linear"} | weights(4),
        "block.1": {"class_name": "Linear"} | weights(4),
    }
    macs: dict[tuple[str, Phase], int] = {
        ("block.0", "forward"): 4,
        ("block.0", "backward"): 4,
        ("block.1", "forward"): 4,
        ("block.1", "backward"): 4,
    }

    def of_block(milliseconds: float, **facts: Any) -> Profile:
        own: dict[tuple[str, Phase], float] = {
            ("block", "forward"): milliseconds * 1e-3,
            ("block.0", "forward"): 3e-3,
            ("block.1", "forward"): 3e-3,
        }
        return built(rows, macs, own, **facts)

    assert [("python", 3.85e-3)] == faults(of_block(4))
    found = explain(of_block(4)).findings[0]
    assert "block" == found.module
    assert (
        "11.3 % of the step (3.85 ms) is spent in block (Sequential) itself, although it runs no "
        "operators"
    ) == found.sentence.partition(": in")[0]
    assert "no_products" not in {each.cause for each in explain(of_block(4)).findings}
    assert [] == faults(of_block(1))
    not_counted = Note(code="not_counted", subject="", values={})
    assert [] == faults(of_block(4, notes=(not_counted,)))


def test_frozen_layers_learn_nothing() -> None:
    """Matmuls in frozen layers without gradients are an issue without a known cost.

    Here they are three quarters of forward. A frozen layer after a trainable adapter has a
    backward, so it is not reported.
    """
    frozen = weights(4) | {"trainable_parameters": 0}

    def with_backward(*names: str) -> Profile:
        rows = {
            "a": {"class_name": "Linear"} | frozen,
            "b": {"class_name": "Linear"} | frozen,
            "c": {"class_name": "Linear"} | weights(4),
        }
        macs: dict[tuple[str, Phase], int] = {
            ("a", "forward"): 4,
            ("b", "forward"): 8,
            ("c", "forward"): 4,
        }
        return built(rows, macs | {(name, "backward"): 4 for name in names}, {})

    found = explain(with_backward("c"))
    assert [("frozen", None)] == faults(with_backward("c"))
    assert found.findings[0].sentence.startswith(
        "75.0 % of the matmuls in forward are in frozen layers"
    )
    assert [] == faults(with_backward("c", "b"))
    assert [] == faults(with_backward())
    timed = clocked(with_backward("c"), {("a", "forward"): 2e-3, ("b", "forward"): 4e-3})
    (cost,) = (each.seconds for each in explain(timed).findings if each.cause == "frozen")
    assert pytest.approx(6e-3) == cost


@pytest.mark.parametrize(
    ("trainable", "macs", "expected"),
    [(1, 8, [("frozen_gradients", 10e-3)]), (1, 4, []), (4, 8, [])],
)
def test_gradients_as_large_as_frozen_weights_are_found(
    trainable: int, macs: int, expected: list[tuple[str, float]]
) -> None:
    """Module `a` has 4 MACs in forward and 8 in backward, so half of its 20 ms is for weights.

    Nothing is found if backward has as many MACs as forward, or if the weights are trainable.
    """
    rows = {
        "a": {"class_name": "LoRA"} | weights(4) | {"trainable_parameters": trainable},
        "b": {"class_name": "Linear"} | weights(4),
    }
    work: dict[tuple[str, Phase], int] = {
        ("a", "forward"): 4,
        ("a", "backward"): macs,
        ("b", "forward"): 4,
        ("b", "backward"): 8,
    }
    times: dict[tuple[str, Phase], float] = {
        ("a", "forward"): 5e-3,
        ("a", "backward"): 20e-3,
        ("b", "forward"): 2e-3,
        ("b", "backward"): 4e-3,
    }
    assert expected == faults(clocked(built(rows, work, {}), times))


@pytest.mark.parametrize(
    ("first_layer", "updated", "optimized", "expected"),
    [
        (4, ["student"], 4, [("untrained", 20e-3)]),
        (8, ["student"], 4, [("untrained", 10e-3)]),
        (4, ["student", "teacher.1"], 8, [("untrained", 8e-3)]),
        (4, ["student"], 12, []),
        (4, [], None, []),
    ],
)
def test_gradients_of_a_module_without_an_optimizer_are_found(
    first_layer: int, updated: list[str], optimized: int | None, expected: list[tuple[str, float]]
) -> None:
    """Backward of the teacher takes 20 ms, but the optimizer only updates the student.

    If the teacher's first layer has as many MACs in backward as in forward, no gradient leaves the
    teacher, so its whole backward is unnecessary. With twice as many MACs, gradients pass through
    it, and only half of its backward is for its weights. If the optimizer updates one of the
    teacher's layers, only the other layer is found. Nothing is found if no optimizer made a step,
    or if the optimizer has the teacher's parameters, but updates them in kernels that lflops does
    not see.
    """
    rows = {
        "": {"class_name": "Net"} | weights(0, 12),
        "teacher": {"class_name": "Sequential"} | weights(0, 8),
        "teacher.0": {"class_name": "Linear"} | weights(4),
        "teacher.1": {"class_name": "Linear"} | weights(4),
        "student": {"class_name": "Linear"} | weights(4),
    }
    work: dict[tuple[str, Phase], int] = {
        ("teacher.0", "forward"): 4,
        ("teacher.0", "backward"): first_layer,
        ("teacher.1", "forward"): 4,
        ("teacher.1", "backward"): 8,
        ("student", "forward"): 4,
        ("student", "backward"): 8,
    }
    for name in updated:
        work[name, "optimizer"] = 1
    times: dict[tuple[str, Phase], float] = {
        ("teacher.0", "backward"): 8e-3,
        ("teacher.1", "backward"): 12e-3,
        ("student", "backward"): 4e-3,
    }
    given = clocked(built(rows, work, {}), times)
    given = replace(given, run=replace(given.run, optimized_parameters=optimized))
    found = faults(given)
    assert expected == [each for each in found if each[0] == "untrained"]


def test_a_step_that_calls_no_model_has_no_frozen_layers() -> None:
    """A step without matmuls in forward has no share of frozen layers.

    Its backward comes from a loss of parameters alone.
    """
    rows = {
        "a": {"class_name": "Linear"} | weights(4) | {"trainable_parameters": 0},
        "b": {"class_name": "Linear"} | weights(4),
    }
    assert [] == faults(built(rows, {("b", "backward"): 4}, {}))


def on_busy_machine(given: Profile, own: dict[str, float], *, workers: int = 0) -> Profile:
    """Return the profile of a busy machine: other processes took three quarters of the CPU time.

    Args:
        given: The profile.
        own: Seconds of phases in module-timing steps without the time that other processes took.
        workers: Number of workers of the data loader.
    """
    hooked = Step(
        index=9,
        kind="module_timing",
        seconds=134e-3,
        phases={},
        cpu_user=34e-3,
        cpu_system=0.0,
        cpu_lost=102e-3,
        uncontended_phases=own,
    )
    of_run = replace(given.run, workers=workers)
    return replace(given, run=of_run, steps=(*given.steps, hooked, hooked, hooked))


@pytest.mark.parametrize(
    ("wall", "own", "said"),
    [
        # 9 of 132 ms, and 8 of 41 ms without other processes, which is 20 %
        (9e-3, 8e-3, [("data", 9e-3)]),
        # 40 of 163 ms, and 1 of 34 ms without other processes, which is 3 %
        (40e-3, 1e-3, []),
    ],
)
def test_on_a_busy_machine_a_phase_is_judged_without_what_others_took(
    wall: float, own: float, said: list[tuple[str, float]]
) -> None:
    """On a busy machine, shares are computed without the time that other processes took.

    Computation takes four times as long there, but sleeping does not. If the times without other
    processes are unknown, there is no issue.
    """
    given = trained(data=wall, forward=40e-3, backward=80e-3)
    assert said == faults(on_busy_machine(given, USUAL | {"data": own}))
    assert [] == faults(on_busy_machine(given, {}))


def test_what_hooks_take_is_no_part_of_a_phase() -> None:
    """Time that only module-timing steps have in a phase comes from the hooks, so it is no issue.

    In both cases, module-timing steps have 15 ms outside all phases. Unprofiled steps have 15 of 48
    ms there in the first case, and 1 of 34 ms in the second.
    """
    own = USUAL | {"other": 15e-3}
    assert [("other", 15e-3)] == faults(on_busy_machine(trained(other=15e-3), own))
    assert [] == faults(on_busy_machine(trained(), own))


def test_on_a_busy_machine_what_modules_take_is_judged_by_their_phases() -> None:
    """On a busy machine, times of modules are scaled down like their phase.

    Forward takes 40 ms, and 10 ms without other processes. 24 ms of self time become 6 ms, 18 % of
    34 ms. 8 ms become 2 ms, 6 %.
    """

    def with_outside(seconds: float) -> Profile:
        own: dict[tuple[str, Phase], float] = {
            ("", "forward"): seconds,
            ("a", "forward"): 20e-3 - seconds / 2,
            ("b", "forward"): 20e-3 - seconds / 2,
        }
        return trained(own=own, forward=40e-3, backward=80e-3)

    assert [("outside", 24e-3)] == faults(on_busy_machine(with_outside(24e-3), USUAL))
    assert [] == faults(on_busy_machine(with_outside(8e-3), USUAL))


@pytest.mark.parametrize(
    ("workers", "on_core", "is_issue"), [(0, 3e-3, True), (2, 0.1e-3, True), (2, 2e-3, False)]
)
def test_to_take_a_batch_from_a_worker_is_no_waiting(
    workers: int, on_core: float, is_issue: bool
) -> None:
    """The time to receive a batch from a worker is subtracted from the data wait.

    6 of 39 ms are data wait, 15 %. Receiving takes at most 1.5 ms, so 11 % are left. If the thread
    computes for 2 ms more, 6 % are left.
    """
    given = trained(data=6e-3)
    hooked = Step(index=9, kind="module_timing", seconds=39e-3, phases={}, fetching_cpu=on_core)
    of_run = replace(given.run, workers=workers)
    found = faults(replace(given, run=of_run, steps=(*given.steps, hooked)))
    expected = [("data", 6e-3)] if is_issue else []
    assert expected == found


@pytest.mark.parametrize(("on_core", "is_issue"), [(0.0, True), (0.06, False)])
def test_over_the_run_to_take_a_batch_is_no_waiting_either(on_core: float, is_issue: bool) -> None:
    """In a ledger, the time to receive batches is subtracted too.

    10 of 90 s of training are data wait in 100 steps, 11 %. If the thread computes for 6 s of them,
    4 % are left. Receiving takes 0.2 %.
    """
    given = trained()
    hooked = Step(index=9, kind="module_timing", seconds=34e-3, phases={}, fetching_cpu=on_core)
    given = replace(given, run=replace(given.run, workers=1), steps=(*given.steps, hooked))
    found = explanation._explained(given, account(training__data=10.0))
    assert is_issue == ("data" in causes(issues_of(found)))


def test_on_a_busy_machine_workers_that_are_late_are_no_fault() -> None:
    """On a busy machine, late workers are no issue, because they lack cores too.

    For a data loader without workers, 20 of 53 ms are an issue.
    """
    given = trained(data=20e-3)
    assert [] == faults(on_busy_machine(given, USUAL | {"data": 20e-3}, workers=1))
    assert [("data", 20e-3)] == faults(on_busy_machine(given, USUAL | {"data": 20e-3}))


@pytest.mark.parametrize(
    ("cause", "seconds", "quiet", "busy"),
    [
        # 16 % of the run. The threshold is 10 %, and 40 % on the busy machine.
        ("validation", 15.0, True, False),
        # 43 % of the run
        ("validation", 60.0, True, True),
        ("gc", 2000.0, True, False),
    ],
)
def test_what_is_between_steps_takes_longer_on_a_busy_machine_as_steps_do(
    cause: str, seconds: float, quiet: bool, busy: bool, tmp_path: Path
) -> None:
    """On a busy machine, the threshold for validation between steps is four times as high.

    Other processes take three quarters of the time. For garbage collection, their share is unknown,
    so it is no issue.
    """
    for is_busy, expected in ((False, quiet), (True, busy)):
        given = on_busy_machine(trained(), USUAL) if is_busy else trained()
        found = explanation._explained(given, account(**{cause: seconds}))
        assert expected == (cause in causes(issues_of(found)))


@pytest.mark.parametrize(
    ("threads", "others", "is_one"), [(1, 10e-3, True), (1, 1e-3, False), (4, 10e-3, False)]
)
def test_another_thread_of_python_is_seen_by_its_time_on_a_core(
    threads: int, others: float, is_one: bool
) -> None:
    """CPU time of other threads of the process is an issue if torch computes with one thread.

    In 34 ms, the training thread uses 20 ms of CPU time and other threads use 10 ms. Threads of
    torch are no issue. Three module-timing steps are needed.
    """
    hooked = Step(
        index=9,
        kind="module_timing",
        seconds=34e-3,
        phases=USUAL,
        cpu_user=20e-3 + others,
        cpu_system=0.0,
        thread_cpu=20e-3,
    )
    given = trained()
    on = replace(given.run, threads=threads, cores=4)
    expected = [("thread", 10e-3)] if is_one else []
    with_three = replace(given, run=on, steps=(*given.steps, hooked, hooked, hooked))
    assert expected == faults(with_three)
    with_two = replace(given, run=on, steps=(*given.steps, hooked, hooked))
    assert [] == faults(with_two)


def test_a_training_in_float64_could_take_half() -> None:
    """Training in float64 costs half of the 30 ms in modules."""
    given = trained()
    given = replace(given, run=replace(given.run, dtype="float64"))
    assert [("dtype", 15e-3)] == faults(given)
    first = explain(given).findings[0]
    assert "The matmuls of the model run in float64" in first.sentence


@pytest.mark.parametrize(
    ("dtype", "calls", "others", "expected"),
    [
        ("float64", 2, 0, [("double_precision", 7.5e-3)]),
        ("complex128", 2, 0, [("double_precision", 7.5e-3)]),
        ("float64", 20, 0, []),
        ("float64", 2, 500_000, []),
        ("float32", 2, 0, []),
    ],
    ids=["float64", "complex128", "small calls", "mostly float32", "float32"],
)
def test_operators_in_float64_could_take_half(
    dtype: str, calls: int, others: int, expected: list[Any]
) -> None:
    """Large operators in float64 cost half of the module's 15 ms if they move most of its bytes.

    They move 400,000 bytes in 2 calls, or in 20 small ones, which float32 would not make faster.
    """
    cells = [
        cell("b", "aten::mul", "forward", dtype=dtype, calls=calls, bytes_moved=400_000),
        cell("b", "aten::add", "forward", calls=1, bytes_moved=others),
    ]
    given = trained(cells=cells)
    assert expected == faults(given)
    if expected:
        assert "The operators of b run in float64, while the model trains in float32: this" in (
            explain(given).findings[0].sentence
        )


def test_float32_leaves_tensor_cores_unused() -> None:
    """Training in float32 is an issue if the chip is faster in TF32.

    24 MACs are 48 FLOPs: 12 ms at 4,000 FLOP/s and 6 ms at 8,000 FLOP/s. A run in bfloat16, chips
    without TF32, AMD chips and an unknown chip have no such issue.
    """
    peaks = {"fp32": 4000.0, "tf32": 8000.0}
    plain = trained()
    given = replace(plain, run=replace(plain.run, hardware=Hardware("H100 SXM", peaks)))
    assert ("tensor_cores", 6e-3) in faults(given)
    without_tf32 = Hardware("V100 SXM2 32GB", {"fp32": 4000.0})
    amd = Hardware("MI300X", peaks)
    for other in (
        replace(given.run, dtype="bfloat16"),
        replace(given.run, hardware=without_tf32),
        replace(given.run, hardware=amd),
        replace(given.run, hardware=None),
    ):
        assert "tensor_cores" not in dict(faults(replace(given, run=other)))


def test_tf32_is_slower_than_bfloat16() -> None:
    """Training in TF32 is an issue if the chip is faster in bfloat16 and this peak is known.

    48 FLOPs take 12 ms at 4,000 FLOP/s and 3 ms at 16,000 FLOP/s.
    """
    plain = trained()
    cells = tuple(replace(each, dtype="tf32") if each.macs else each for each in plain.op_counts)
    of_tf32 = replace(plain, run=replace(plain.run, dtype="tf32"), op_counts=cells)
    for peaks, saved in (({"tf32": 4000.0, "bf16": 16_000.0}, 9e-3), ({"tf32": 4000.0}, None)):
        given = replace(of_tf32, run=replace(of_tf32.run, hardware=Hardware("H100 SXM", peaks)))
        assert saved == dict(faults(given)).get("tensor_cores")
        sentence = (
            "The matmuls of the model run in tf32. According to the chip's peaks, bfloat16 would "
            "save 26.5 % of the step (9.00 ms)."
        )
        sentences = [each.sentence for each in explain(given).findings]
        assert (saved is not None) == (sentence in sentences)


def test_gradients_that_are_averaged_by_hand_are_communication() -> None:
    """All-reduces outside all phases are communication; only the rest is time outside all phases.

    Of 21 ms, 38 all-reduces after backward take 12 ms. They may also be in the phase clip, which is
    the time between backward and the optimizer.
    """
    sent = Communication(
        module="",
        phase="other",
        collective="allreduce_",
        group="0",
        group_size=2,
        calls=38,
        bytes=1 << 20,
        seconds=12e-3,
    )
    facts = {"communication": (sent,), "trace": Trace(files={})}
    expected = [("communication", 12e-3), ("other", 9e-3)]
    assert expected == faults(trained(other=21e-3, facts=facts))
    # All 10 ms before the optimizer are communication, and 2 of the 11 ms after it.
    assert expected == faults(trained(clip=10e-3, other=11e-3, facts=facts))


def test_what_the_model_waits_for_before_its_layers_run_is_no_fault_of_its() -> None:
    """Self time of the model in forward is an issue, unless the model waits for other ranks there.

    8 ms of forward are in no layer. DDP, for example, synchronizes buffers before the layers run.
    """
    own: dict[tuple[str, Phase], float] = {
        ("", "forward"): 8e-3,
        ("a", "forward"): 1e-3,
        ("b", "forward"): 1e-3,
    }
    assert [("outside", 8e-3)] == faults(trained(own=own))
    assert [] == faults(trained(own=own, facts={"waits": (ModulePhase("", "forward"),)}))


@pytest.mark.parametrize(
    ("code", "values", "words"),
    [
        ("graph_breaks", {"places": 3}, "torch.compile breaks the graph in 3 places"),
        ("find_unused", {}, "DistributedDataParallel looks for unused parameters"),
    ],
)
def test_what_was_left_on_is_a_fault_whose_cost_is_unknown(
    code: str, values: dict[str, int], words: str
) -> None:
    """An issue without a known cost, such as graph breaks, comes first."""
    note = Note(code=code, subject="", values=values)
    found = explain(trained(facts={"notes": (note,)}, data=20e-3))
    first, second = found.findings[:2]
    assert code == first.cause
    assert first.seconds is None
    assert first.sentence.startswith(words)
    assert "data" == second.cause
    assert 20e-3 == second.seconds


def test_padding_costs_its_share_of_forward_and_backward() -> None:
    """60 % padding costs 60 % of the 30 ms of forward and backward."""
    note = Note(code="padding", subject="", values={"share": 0.6})
    given = trained(facts={"notes": (note,)})
    assert [("padding", pytest.approx(18e-3))] == faults(given)
    assert "60.0 % of a batch is padding" in explain(given).findings[0].sentence


def test_many_small_messages_are_a_fault_and_few_large_ones_are_none() -> None:
    """Communication is an issue if it has many small messages.

    It takes 10 of 20 ms of backward: in 16 all-reduces of 64 KiB, or in two of 8 MiB.
    """

    def exchanging(calls: int, bytes_each: int) -> Profile:
        sent = Communication(
            module="",
            phase="backward",
            collective="allreduce_",
            group="world",
            group_size=2,
            calls=calls,
            bytes=calls * bytes_each,
            seconds=10e-3,
            exposed_seconds=10e-3,
        )
        own: dict[tuple[str, Phase], float] = {
            ("", "backward"): 10e-3,
            ("a", "backward"): 5e-3,
            ("b", "backward"): 5e-3,
        }
        return trained(facts={"communication": (sent,)}, own=own, waiting=10e-3)

    assert [("communication", 10e-3)] == faults(exchanging(16, 1 << 16))
    assert [] == faults(exchanging(2, 1 << 23))


def test_what_is_computed_again_is_told_without_a_peak() -> None:
    """Recomputation of 5 ms is an issue without a known peak too."""
    again = [product("a", "aten::mm", "recompute", macs=4, bytes_moved=8)]
    assert ("recomputed", 5e-3) in faults(trained(cells=again, own={("a", "recompute"): 5e-3}))


def test_the_ledger_adds_what_is_between_steps() -> None:
    """A ledger has issues between steps, with the cost per step.

    Of 100 s after the start-up, 17 s are validation, so 0.17 s for each of 100 steps. Saving
    checkpoints takes 3 %, which is no issue. The 50 s of start-up do not count.
    """
    found = explain(account(validation=17.0, checkpoint_save=3.0))
    (finding,) = found.findings
    assert "validation" == finding.cause
    assert 0.17 == finding.seconds
    assert 0.17 == finding.share
    sentence = (
        "17.0 % of the training loop's time (170 ms per step) is spent on validation between steps."
    )
    assert sentence == finding.sentence
    assert "found" == found.status
    assert "validation" == found.cause
    assert 50.0 == (found.run or {})["start_up"]
    assert "cannot tell" == explain(account()).status


def in_steps(**phases: float) -> Ledger:
    """Return the ledger of 100 steps with these seconds in each phase of a step."""
    spent = {name: 100 * each for name, each in phases.items()}
    total = sum(phases.values())
    group = StepGroup(first=0, last=99, spent=spent, longest=total, steps=100)
    account_of_phases = {f"training__{name}": each for name, each in spent.items()}
    return replace(account(**account_of_phases), step_groups=(group,))


def test_without_a_window_the_longest_phases_are_named() -> None:
    """If the longest phase is a pass of the model and there is no issue, `said` names the phases.

    Of 100 ms, forward takes 60 % and backward 30 %. The optimizer takes 5 %, which is below 10 %.
    Without a longest pass of the model, or with a window, `said` has no such sentence.
    """
    found = explain(in_steps(forward=0.060, backward=0.030, optimizer=0.005, other=0.005))
    sentence = (
        "Most of the step is spent in forward (60 %, 60.0 ms), backward (30 %, 30.0 ms). A profiled "
        "window shows which modules take this time."
    )
    assert found.said.endswith(sentence)
    assert "cannot tell" == found.status
    assert "Most of the step" not in explain(in_steps(forward=0.010, other=0.090)).said
    assert "Most of the step" not in explain(trained()).said


def test_other_runs_in_the_folder_are_mentioned() -> None:
    """As `lflops ledger` does, `said` ends with the number of files that are not included."""
    found = explain(replace(account(), others=4))
    sentence = "This folder also has 4 ledger files of other runs, which are not included here."
    assert found.said.endswith(sentence)
    assert "other runs" not in explain(account()).said


@pytest.mark.parametrize(
    ("compiling", "is_issue"), [((9.0, 0.0, 0.0, 0.0), False), ((9.0, 1.0, 1.0, 1.0), True)]
)
def test_compilation_is_a_fault_where_it_goes_on(
    compiling: tuple[float, ...], is_issue: bool
) -> None:
    """Compilation is an issue if it continues after the start.

    There are four spans of 25 steps and 10 s. Every model is compiled in the first span; a model
    with changing shapes is compiled again and again.
    """
    made = account(compilation=sum(compiling))
    spans = [
        Span(
            begin=made.starts[0].begin + 10 * n,
            seconds=10.0,
            steps=25 * (n + 1),
            spent={"compilation": took, "training/forward": 10 - took},
        )
        for n, took in enumerate(compiling)
    ]
    (finding,) = explain(replace(made, spans=tuple(spans))).findings
    assert "compilation" == finding.cause
    assert is_issue == finding.is_issue
    assert is_issue == ("dynamic=True" in finding.fix)
    # 9 of the 40 s of the four spans are no time of each step.
    at_the_beginning = "(9.00 s in total) is spent on compilation at the beginning."
    assert is_issue == (at_the_beginning not in finding.sentence)


def with_ledger(
    made: Profile, ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Explanation:
    """Explain a folder with this profile and this ledger."""
    made.save(folder / "train-0-9.profile.json")
    monkeypatch.setattr(explanation, "load_run", lambda _path: ledger)
    return explain(folder)


def test_a_loader_that_is_late_beyond_the_window_is_seen_by_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data wait of 20 of 100 s is an issue of the ledger, although the window had no data wait.

    20 s in the optimizer phase are no issue of the ledger.
    """
    ledger = account(training__data=20.0)
    assert [("data", 0.2)] == faults(ledger)
    found = with_ledger(trained(), ledger, tmp_path, monkeypatch)
    (data,) = (each for each in found.findings if each.cause == "data")
    assert data.is_issue
    assert [] == faults(account(training__optimizer=20.0))


@pytest.mark.parametrize(
    ("seconds", "status", "said"),
    [
        # 2 % of the run without a core
        (2.0, "found", [("data", 0.2)]),
        # 17 % without a core: the data wait may take 1.4 times 9 %, and takes 17 %.
        (20.0, "found", [("data", 0.2)]),
        # 38 % without a core: the data wait may take 2.6 times 9 %, and takes 13 %.
        (60.0, "cannot tell", []),
    ],
)
def test_others_that_had_the_cores_in_some_of_the_run_are_no_fault_of_it(
    seconds: float,
    status: str,
    said: list[tuple[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If other processes took CPU time during the run, the thresholds of the ledger are higher.

    This applies even if the steps of the window were undisturbed. Time without a core is a finding,
    but no issue.
    """
    ledger = account(training__data=20.0, slow__not_scheduled=seconds)
    found = with_ledger(trained(), ledger, tmp_path, monkeypatch)
    assert status == found.status
    assert said == [(each.cause, rounded(each.seconds)) for each in issues_of(found)]
    is_busy = seconds > 5
    caveat = "; other programs kept this machine busy during a part of the run, or the process was suspended"
    assert is_busy == found.because.endswith(caveat)
    others = [each.cause for each in found.findings if not each.is_issue]
    assert is_busy == ("not_scheduled" in others)


def test_one_stop_of_the_process_excuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process was stopped in one step only, the thresholds stay as they are.

    It was stopped for a minute. The other steps wait for data for a fifth of the rest.
    """
    stopped = SlowStep(
        step=50,
        end=100.0,
        seconds=61.0,
        usual=1.0,
        cost=60.0,
        cause="not_scheduled",
        phase="forward",
    )
    ledger = replace(account(training__data=20.0, slow__not_scheduled=60.0), slow_steps=(stopped,))
    found = with_ledger(trained(), ledger, tmp_path, monkeypatch)
    assert ["data"] == causes(issues_of(found))
    assert "busy" not in found.because


def test_garbage_explains_what_is_in_no_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection replaces time outside all phases as the issue if it explains this time.

    Each step has 10 ms outside all phases. Collection of 8 ms per step is only 1 % of the run,
    which is too little for a finding. Collection of 160 ms is an issue. Its time in slow steps
    counts too.
    """
    little = account(gc=0.5, slow__gc=0.3, training__optimizer=2.0)
    found = with_ledger(trained(other=10e-3), little, tmp_path, monkeypatch)
    assert ["other"] == causes(issues_of(found))
    much = account(gc=10.0, slow__gc=6.0)
    found = with_ledger(trained(other=10e-3), much, tmp_path, monkeypatch)
    (issue,) = issues_of(found)
    assert "gc" == issue.cause
    assert 0.16 == issue.seconds


def test_a_window_whose_steps_are_compiled_for_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three recompiled steps in the window, after the warm-up, show that compilation continues.

    The ledger has 9 s of compilation, but no late span with compilation.
    """
    for recompiled, is_issue in ((3, True), (2, False)):
        given = trained()
        again = [
            Step(index=9 + n, kind="unprofiled", seconds=1.0, phases={}, marks=("recompiled",))
            for n in range(recompiled)
        ]
        first = Step(
            index=0, kind="unprofiled", seconds=1.0, phases={}, marks=("warmup", "recompiled")
        )
        window = replace(given, steps=(first, *given.steps, *again))
        found = with_ledger(window, account(compilation=9.0), tmp_path, monkeypatch)
        (compilation,) = (each for each in found.findings if each.cause == "compilation")
        assert is_issue == compilation.is_issue


def test_steps_that_vary_without_a_cause_leave_it_open() -> None:
    """If many steps are twice as long for an unknown reason, the status is "cannot tell".

    Here these are three of eight steps.
    """
    given = trained(8)
    twice = {name: 2 * seconds for name, seconds in USUAL.items()}
    slow = Step(index=9, kind="unprofiled", seconds=sum(twice.values()), phases=twice)
    varied = replace(given, steps=(*given.steps[3:], slow, slow, slow))
    assert "nothing found" == explain(given).status
    assert "cannot tell" == explain(varied).status


def test_the_log_says_of_a_window_what_lflops_why_says() -> None:
    """The log has the same verdict, findings and confidence as `lflops why`.

    Four steps without an issue are too few for a verdict, six are enough. A data wait of 20 ms is
    an issue in any number of steps.
    """
    few = (
        "cannot tell whether anything is wrong, because fewer than 5 unprofiled steps were timed; "
    )
    judgements = [
        (trained(), " No known issue found.", ""),
        (trained(4), "", few),
        (trained(4, data=20e-3), "", ""),
    ]
    for given, judgement, caveat in judgements:
        first, *others = lines_of(explain(given))
        assert first == ("verdict", explain(given).said + judgement)
        in_log = log_text(analyze(given)).splitlines()
        assert f"verdict           {first[1]}" == in_log[0]
        rows = [f"{label:<18}{text.partition(' (at least ')[0]}" for label, text in others]
        assert rows == in_log[1 : 1 + len(rows)]
        confidence = dict(others)["confidence"]
        assert confidence.startswith(caveat)
        assert bool(caveat) == ("cannot tell whether anything" in confidence)


def test_large_costs_have_advice_even_if_no_issue_can_be_seen() -> None:
    """The advice is to measure the peak, because 30 of 34 ms are matmuls.

    Four steps are too few to say that there is no issue, but they show where the time goes.
    """
    advice = 'Pass hardware="measure" to lflops, which then measures the peak.'
    for steps in (4, 6):
        found = explain(trained(steps))
        assert (steps == 4) == (found.status == "cannot tell")
        assert advice == dict(lines_of(found))["next"]


def test_the_figures_are_numbers_of_the_window_and_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An explanation has figures of the window and of the run.

    Steps of the window take 34 ms and have 24 MACs. The run has 80 s of training and 20 s of
    validation in 100 steps, so 1 s per step.
    """
    found = with_ledger(trained(), account(validation=20.0), tmp_path, monkeypatch)
    figures = found.figures
    assert pytest.approx(34e-3) == figures["step_seconds"]
    assert 6 == figures["steps"]
    assert 24 == figures["macs"]
    assert 8 == figures["parameters"]
    assert 1 == figures["ranks"]
    assert figures["mfu"] is None
    of_run = {"run_seconds": 150.0, "run_steps": 100, "run_starts": 1, "run_seconds_per_step": 1.0}
    assert of_run == {name: each for name, each in figures.items() if name.startswith("run_")}
    assert (
        "A step takes 34.0 ms. 53.3 % of 2 min 30 s was training; start-up (once) 33.3 %, "
        "validation 13.3 %."
    ) == found.said
    (issue,) = issues_of(found)
    assert "validation" == issue.cause
    assert "run" == issue.of
    assert 0.2 == issue.share
    assert "A step takes 34.0 ms." == explain(trained()).said


@pytest.mark.parametrize("cause", ["gc", "unknown"])
@pytest.mark.parametrize("passes", [1, 2])
def test_one_slow_step_belongs_to_any_run(cause: str, passes: int) -> None:
    """16 s of 96 s in one slow step are no issue, but in two slow steps they are.

    A single pass of the garbage collector over all objects can take that long.
    """
    cost = 16.0 / passes
    slow = SlowStep(
        step=50, end=100.0, seconds=cost + 1, usual=1.0, cost=cost, cause=cause, phase="forward"
    )
    given = replace(account(**{f"slow__{cause}": 16.0}), slow_steps=(slow,) * passes)
    expected = [] if passes == 1 else [(cause, 0.16)]
    assert expected == faults(given)


@pytest.mark.parametrize(("second", "said"), [(0.0, []), (8.0, [("gc", 0.16)])])
def test_what_the_collector_takes_in_one_part_of_a_run_belongs_to_it(
    second: float, said: list[tuple[str, float]]
) -> None:
    """Garbage collection in only one half of the run is no issue.

    It takes 16 s in the first half, for example because of a window, or 8 s in each half.
    """
    whole = account(gc=16.0)
    (span,) = whole.spans
    first_half = {"training/forward": 40.0, "gc": 16.0 - second}
    second_half = {"training/forward": 40.0, "gc": second}
    halves = (
        replace(span, steps=50, spent=first_half),
        replace(span, steps=50, spent=second_half),
    )
    assert said == faults(replace(whole, spans=halves))


@pytest.mark.parametrize(("cause", "rule"), [("gc", "gc"), ("unknown", "other")])
def test_several_slow_steps_in_one_part_of_a_run_are_an_issue(cause: str, rule: str) -> None:
    """Three slow steps are no single occurrence, even if they are in one part of a short run.

    They cost 6 s each: 18 s of 98 s, of which 12 s (12.2 %) are more than one occurrence.
    """
    slow = SlowStep(step=10, end=60.0, seconds=7.0, usual=1.0, cost=6.0, cause=cause, phase="other")
    whole = account(**{f"slow__{cause}": 18.0})
    (span,) = whole.spans
    first_half = {"training/forward": 40.0, f"slow/{cause}": 18.0}
    halves = (
        replace(span, steps=50, spent=first_half),
        replace(span, steps=50, spent={"training/forward": 40.0}),
    )
    steps = tuple(replace(slow, step=number) for number in (10, 20, 30))
    found = faults(replace(whole, spans=halves, slow_steps=steps))
    assert [(rule, pytest.approx(0.18))] == found


def test_slow_steps_for_the_loader_are_not_told_twice(tmp_path: Path) -> None:
    """Slow steps because of the data loader are one issue, from the window or else from the ledger.

    The window also has the data wait, and its cost in a usual step.
    """
    waits = account(slow__loader=20.0)
    assert [("data", 0.2)] == faults(waits)
    for data in (20e-3, 1e-3):
        trained(data=data).save(tmp_path / "train-0-9.profile.json")
        (tmp_path / "rank0-1-2.ledger.jsonl").write_bytes(b"")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(explanation, "load_run", lambda _path: waits)
            (found,) = (each for each in explain(tmp_path).findings if each.cause == "data")
            assert found.is_issue


def test_the_commands_for_more_are_of_the_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suggested commands use existing files only.

    Any profile can be shown as a page. TensorBoard is suggested if there are event files.
    """
    assert {} == explain(trained()).more
    path = tmp_path / "train-0-9.profile.json"
    of_profile = {
        "the modules": f"lflops show {path}",
        "the operators": f"lflops show {path} --operators",
        "the memory": f"lflops show {path} --memory",
        "the whole profile, as a page": f"lflops html {path}",
    }
    of_run = {
        "every second of the run": f"lflops ledger {tmp_path}",
        "whether a change made the run faster": f"lflops diff {tmp_path} AFTER",
    }
    assert of_profile | of_run == with_ledger(trained(), account(), tmp_path, monkeypatch).more
    (tmp_path / "events.out.tfevents.1.host").touch()
    in_tensorboard = explain(tmp_path).more["all windows, in TensorBoard"]
    assert f"tensorboard --logdir {tmp_path}" == in_tensorboard
    of_change = {"whether a change made the run faster": f"lflops diff {path} AFTER"}
    assert of_profile | of_change == explain(path).more


def test_a_run_that_ran_out_of_memory_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ran out of memory says so first, and names its memory report.

    Other ends of a run are not mentioned. Notes are only counted, because `lflops show` has them.
    """
    noted = replace(trained(), notes=(Note(code="ranks_missing", subject="3", values={}),))
    ended = account()
    died = replace(ended, starts=(replace(ended.starts[0], last_step=8, ended="OutOfMemoryError"),))
    report = tmp_path / "oom-8-rank0.txt"
    report.touch()
    found = with_ledger(noted, died, tmp_path, monkeypatch)
    assert found.said.startswith(
        f"The run ran out of memory after 8 steps, see {report}. A step takes "
    )
    assert found.because.endswith("1 note in the output of lflops show")
    assert with_ledger(noted, ended, tmp_path, monkeypatch).said.startswith("A step takes ")


def test_a_folder_has_its_last_training_window(tmp_path: Path) -> None:
    """For a folder, the last training window is explained, and a validation window is ignored.

    A ledger is not needed. A folder without a profile is an error.
    """
    trained(data=20e-3).save(tmp_path / "train-0-9.profile.json")
    trained().save(tmp_path / "validate-0-9.profile.json")
    assert "data" == explain(tmp_path).cause
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        lflops.ProfileError, match="no ledger of rank 0 found: pass the folder of a run"
    ):
        explain(empty)


def huge() -> Profile:
    """Return a profile of 5,000 modules with names of 2,000 characters."""
    rows: dict[str, dict[str, Any]] = {"": {"class_name": "Net"}}
    for n in range(5000):
        rows[f"{'x' * 2000}{n}"] = {"class_name": "Kind" * 200}
    cells = [
        product(name, f"my::{'operator' * 50}{n}", "forward", macs=1, bytes_moved=1)
        for n, name in enumerate(rows)
    ]
    return profile(rows, cells, run=run(kind="training"), steps=usual_steps())


@pytest.mark.parametrize("given", [trained(data=20e-3), huge()], ids=["small", "huge"])
def test_it_is_bounded_and_follows_its_schema(given: Profile) -> None:
    """An explanation has at most 8,000 characters, about 2,000 tokens, and matches its schema."""
    text = struct_json.encode(explain(given)).decode()
    assert len(text) <= 8000
    assert len("\n".join(markdown(explain(given)))) <= 8000
    jsonschema.validate(json.loads(text), json_schema(Explanation, "an explanation"))


def test_the_shell_prints_it_in_three_forms(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`lflops why` prints the same as text, Markdown and JSON; other formats are refused."""
    path = tmp_path / "run.profile.json"
    trained(data=20e-3).save(path)

    def printed(*options: str) -> str:
        assert 0 == main(["why", str(path), *options])
        return capfdbinary.readouterr().out.decode()

    sentence = "37.7 % of the step (20.0 ms) is spent waiting for data."
    assert f"why         {sentence}" in printed()
    assert re.search(
        rf"1\. {re.escape(sentence)} Load batches in DataLoader workers",
        printed("--format", "markdown"),
    )
    shown = json.loads(printed("--format", "json"))
    assert "found" == shown["status"]
    assert sentence == shown["findings"][0]["sentence"]
    assert f"lflops show {path}" == shown["more"]["the modules"]
    assert 2 == main(["why", str(path), "--format", "xml"])
    assert b"format='xml': pass one of text, markdown, json" in capfdbinary.readouterr().err
    assert 0 == main(["schema", "--why"])
    assert (
        b'"title": "Output of lflops why --format json, version 1"' in capfdbinary.readouterr().out
    )


def test_two_runs_are_compared_by_their_faults() -> None:
    """Issues of two runs are new, gone or still there.

    The first run waits 40 of 73 ms for data. The second run waits 1 of 44 ms, and clips for 10 ms.
    Both have enough steps.
    """
    before = analyze(trained(data=40e-3))
    after = analyze(trained(clip=10e-3))
    changes = issue_changes(before, after)
    new, gone = changes
    assert "new" == new.status
    assert "clip" == new.finding.cause
    assert new.before is None
    assert pytest.approx(10e-3) == new.after
    assert "gone" == gone.status
    assert "data" == gone.finding.cause
    assert 40e-3 == gone.before
    assert gone.after is None
    assert ["new issue", "issue gone"] == [label for label, _ in issue_lines(changes)]
    changes = issue_changes(before, analyze(trained(data=20e-3)))
    (still,) = changes
    assert "still" == still.status
    ((_, said),) = issue_lines(changes)
    assert said.endswith("In the earlier profile, this issue cost 40.0 ms.")


def test_a_run_that_is_too_short_is_not_said_to_be_without_a_fault() -> None:
    """If the second run is short, an issue without a cost is not called gone.

    Four unprofiled steps are enough to see that a phase has become short. Two runs without issues
    have no changes.
    """
    eval_mode = Note(code="eval_mode", subject="", values={})
    short = analyze(trained(steps=4))
    without_cost = analyze(trained(facts={"notes": (eval_mode,)}))
    assert ["cannot tell"] == [each.status for each in issue_changes(without_cost, short)]
    with_cost = analyze(trained(data=40e-3))
    assert ["gone"] == [each.status for each in issue_changes(with_cost, short)]
    assert () == issue_changes(analyze(trained()), analyze(trained()))


def test_diff_analyzes_each_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lflops diff` computes step times once per run, for the comparison and for the issues."""
    asked: list[Profile] = []

    def counted(given: Profile) -> StepTimes:
        asked.append(given)
        return step_times(given)

    for module in (analysis, compared_run):
        monkeypatch.setattr(module, "step_times", counted)
    before = tmp_path / "before.json"
    after = tmp_path / "after.json"
    trained(data=40e-3).save(before)
    trained(data=1e-3).save(after)
    assert 0 == main(["diff", str(before), str(after), "--json"])
    assert 2 == len(asked)


def test_diff_takes_the_folders_of_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lflops diff` accepts two folders and uses the last training window of each.

    A missing folder or a folder without a profile is an error.
    """
    for name, data in (("before", 40e-3), ("after", 1e-3)):
        (tmp_path / name).mkdir()
        trained(data=data).save(tmp_path / name / "train-0-1.profile.json")
    runs = [str(tmp_path / name) for name in ("before", "after")]
    assert 0 == main(["diff", *runs, "--json"])
    (issue,) = json.loads(capsys.readouterr().out)["issues"]
    assert "gone" == issue["status"]
    assert "data" == issue["finding"]["cause"]
    assert pytest.approx(40e-3) == issue["before"]
    assert issue["after"] is None
    assert 0 == main(["diff", *runs])
    assert "issue gone" in capsys.readouterr().out
    assert 2 == main(["diff", str(tmp_path), str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    assert 2 == main(["diff", str(tmp_path / "empty"), runs[0]])
    assert "this folder has no profile" in capsys.readouterr().err
