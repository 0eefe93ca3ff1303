"""Test the findings for profiles of an H100, each with one planted fault or none.

`benchmarks/gpu_faults.py` recorded the profiles with torch 2.11. Only memory and timelines were
removed from them. Some rules were developed with these profiles, so the tests do not validate those
rules.
"""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import lflops
from lflops.analysis.analysis import analyze
from lflops.findings.evidence import host_syncs
from lflops.findings.finding import Finding
from lflops.report.diff import headline
from lflops.report.explanation import explain
from lflops.report.summary_facts import report_of


def recorded(file: str) -> dict[str, Any]:
    """Return the profiles of a file next to this one, by the names of their faults."""
    path = Path(__file__).with_name(file)
    profiles: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return profiles


# The second file has a decoder and a convolutional model, with their memory at the peak.
TRAININGS = recorded("h100_trainings.json.gz") | recorded("h100_models.json.gz")

# The cause of the first issue in each profile, or "" if there is no issue
FIRST = {
    "nothing": "",
    "loader_sleeps": "data",
    # Calls `.item()` in forward.
    "reads_scalars": "idle",
    "tiny_operators": "calls",
    "one_layer_in_fp64": "dtype",
    # The host is too slow for this device; the second issue is `recomputed`.
    "checkpoints_all": "idle",
    "optimizer_by_tensor": "optimizer",
    "clips_by_tensor": "clip",
    "copies_pageable_memory": "copy",
    "empties_the_cache": "idle",
    "batch_of_one": "idle",
}


def profile(name: str, folder: Path) -> lflops.Profile:
    """Load one of the recorded profiles."""
    path = folder / "train.profile.json"
    path.write_text(json.dumps(TRAININGS[name]))
    return lflops.load(path)


def issues_of(given: lflops.Profile) -> list[Finding]:
    """Return the findings that are issues."""
    return [each for each in explain(given).findings if each.is_issue]


@pytest.mark.parametrize("name", FIRST)
def test_the_first_fault_is_the_planted_one(name: str, tmp_path: Path) -> None:
    """The first issue is the planted fault, and the step breakdown adds up to 1."""
    given = profile(name, tmp_path)
    issues = issues_of(given)
    first = issues[0].cause if issues else ""
    assert FIRST[name] == first
    # The reliability of a rule, `right`, was measured only in CPU runs.
    assert all(each.right is None for each in issues)
    breakdown = analyze(given).breakdown
    assert breakdown is not None
    assert pytest.approx(1.0) == sum(breakdown.parts.values())


@pytest.mark.parametrize(
    ("name", "said", "seconds"),
    [
        ("decoder nothing", None, 0.0),
        # 13 % of the step; the host waits 200 times.
        ("decoder reads_scalars", "idle", (16.48 - 14.26) * 1e-3),
        ("decoder empties_the_cache", "allocating", (19.20 - 14.26) * 1e-3),
        # 10 % of the step, which needs 3.5 of 79 GiB.
        ("decoder checkpoints_all", "recomputed", (18.03 - 14.26) * 1e-3),
        ("decoder all_in_fp32", "tensor_cores", (81.72 - 14.26) * 1e-3),
        # cuDNN multiplies in TF32.
        ("convolutions all_in_fp32", "tensor_cores", (11.40 - 7.78) * 1e-3),
        ("convolutions clips_by_tensor", "clip", (10.57 - 7.78) * 1e-3),
    ],
)
def test_the_one_fault_of_another_model_costs_about_what_a_stopwatch_says(
    name: str, said: str | None, seconds: float, tmp_path: Path
) -> None:
    """The only issue is the planted fault, and its cost is near the measured cost.

    The measured cost is the difference of unprofiled steps with and without the fault. A cost that
    is computed from the peaks, or from the second forward alone, is about half of it.
    """
    issues = issues_of(profile(name, tmp_path))
    if said is None:
        assert [] == issues
        return
    (issue,) = issues
    assert said == issue.cause
    assert issue.seconds is not None
    assert 0.5 * seconds <= issue.seconds <= 1.2 * seconds


def test_a_step_of_several_batches_waits_as_often_as_all_of_them(tmp_path: Path) -> None:
    """The host waits 200 times per batch, so 800 times in a step of four batches."""
    given = profile("decoder reads_scalars", tmp_path)
    assert 200 == host_syncs(replace(given, run=replace(given.run, accumulation=None)))
    assert 800 == host_syncs(replace(given, run=replace(given.run, accumulation=4)))


def test_a_little_waiting_for_the_driver_hides_no_idle_device(tmp_path: Path) -> None:
    """A quarter of the wait for the driver is below the threshold, so the idle time is reported.

    The wait is 1.5 ms of 20 ms instead of 6 ms. As without any wait, 3.9 ms are idle.
    """
    given = profile("decoder empties_the_cache", tmp_path)
    assert given.trace is not None
    operators = []
    for each in given.trace.operators:
        if each.name in {"cudaMalloc", "cudaFree"}:
            operators.append(replace(each, self_host_seconds=each.self_host_seconds / 4))
        else:
            operators.append(each)
    given = replace(given, trace=replace(given.trace, operators=operators))
    found = {each.cause: each for each in explain(given).findings}
    assert "allocating" not in found
    assert found["idle"].seconds == pytest.approx(3.91e-3, rel=0.01)


def test_where_memory_is_short_recomputing_may_take_a_tenth(tmp_path: Path) -> None:
    """Recomputation is no issue if the step needs almost all memory of the chip.

    The same step runs on a chip with a twentieth of the memory.
    """
    given = profile("decoder checkpoints_all", tmp_path)
    chip = given.run.hardware
    assert chip is not None
    assert chip.memory_bytes is not None
    small = dataclasses.replace(chip, memory_bytes=chip.memory_bytes // 20, usable_bytes=None)
    assert [] == issues_of(replace(given, run=replace(given.run, hardware=small)))


def test_recomputing_is_told_next_to_an_idle_device(tmp_path: Path) -> None:
    """Recomputation, a second forward of 4.75 ms, is an issue in addition to idle time."""
    idle, recomputed = issues_of(profile("checkpoints_all", tmp_path))
    assert "idle" == idle.cause
    assert "recomputed" == recomputed.cause
    assert recomputed.seconds == pytest.approx(4.75e-3, rel=0.01)


def test_a_loop_that_reads_scalars_is_told_how_often_it_waits(tmp_path: Path) -> None:
    """The sentence about idle time says how often the host waits for the device.

    `.item()` is called 200 times in each step, and the trace has 600 waits in three steps. The run
    with a small batch has no waits.
    """
    scalars = explain(profile("reads_scalars", tmp_path)).findings[0]
    assert (
        "idle time of the device, mostly in forward (the host waits for the device 200 times per "
        "step)"
    ) in scalars.sentence
    assert scalars.fix.startswith("Within the step, avoid .item()")
    small_batch = explain(profile("batch_of_one", tmp_path)).findings[0]
    assert "waits" not in small_batch.sentence
    assert "larger batches" in small_batch.fix


def test_a_larger_batch_of_a_step_that_the_host_limits_is_doubted(tmp_path: Path) -> None:
    """`what_if` has a caveat if the device is idle for a large part of the step.

    The device is idle for 72 % of a step with one sample. The measured step with 16 samples took 13
    ms, while the step with one sample took 15 ms.
    """
    small_batch = profile("batch_of_one", tmp_path)
    assert ("idle",) == lflops.what_if(small_batch, batch=16).caveats
    assert () == lflops.what_if(small_batch, without="optimizer").caveats
    # Without recompute, the host has fewer launches, so idle time changes too.
    checkpointed = profile("checkpoints_all", tmp_path)
    assert ("idle",) == lflops.what_if(checkpointed, without="recompute").caveats
    assert () == lflops.what_if(profile("nothing", tmp_path), batch=2).caveats


def test_a_layer_that_waits_for_memory_is_not_slow(tmp_path: Path) -> None:
    """A layer that waits for memory of the driver is not reported as slower than identical layers.

    Its kernels take 2.29 ms like those of the others. `cudaMalloc` and `cudaFree` take (6.57 +
    5.28) / 3 = 3.95 ms per step.
    """
    given = profile("empties_the_cache", tmp_path)
    outliers = analyze(given).outliers
    assert () == outliers.found
    assert "allocating" == outliers.caveat
    assert given.trace is not None
    # If the trace did not have these calls, the layer would be reported.
    waits = {"cudaMalloc", "cudaFree"}
    operators = [each for each in given.trace.operators if each.name not in waits]
    without_waits = replace(given, trace=replace(given.trace, operators=operators))
    (outlier,) = analyze(without_waits).outliers.found
    assert "layers.3" == outlier.module


def test_the_first_lines_leave_no_fault_out(tmp_path: Path) -> None:
    """The summary names an issue that costs less than memory-bound work.

    Every training run has memory-bound work, and it is no issue.
    """
    verdict = report_of(analyze(profile("clips_by_tensor", tmp_path))).verdict
    assert any("clipping gradients" in line for line in verdict.why)


def test_a_third_more_is_not_the_same_however_unsteady_the_steps_were(tmp_path: Path) -> None:
    """Steps of 11.8 ms and 15.5 ms are not called equal, although the first varied by 29 %."""
    before = profile("nothing", tmp_path)
    after = profile("reads_scalars", tmp_path)
    assert headline(lflops.diff(before, after))[0].startswith(
        "Cannot tell whether the step is slower or faster, because two runs"
    )


def test_a_large_copy_makes_no_layer_faster_than_the_peak(tmp_path: Path) -> None:
    """A large copy does not make the peak look too low; the matmuls are those of the other runs."""
    given = profile("copies_pageable_memory", tmp_path)
    assert not lflops.utilization(given).is_peak_too_low
