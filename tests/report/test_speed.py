"""Test the lines of a report about speed: step time, phases, throughput, MFU and HFU."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.profile import OpCount, Profile
from lflops.profile.steps import Step
from lflops.report.summary_facts import report_of, speed_lines
from tests.support.profile_builders import product, profile, run, small_profile, untimed
from tests.support.terminal import drawn

A100 = Hardware("A100 SXM", {"bf16": 312e12, "fp32": 19.5e12})
FORWARD = product("", "aten::mm", "forward", macs=4 * 10**12, bytes_moved=1)
BACKWARD = product("", "aten::mm", "backward", macs=8 * 10**12, bytes_moved=1)


def step(seconds: float | None, phases: Mapping[str, float], **fields: Any) -> Step:
    """Return an unprofiled step, or another kind of step if `fields` say so."""
    usual = {"index": 0, "kind": "unprofiled", "seconds": seconds, "phases": phases}
    return Step(**(usual | fields))


def measured(
    *steps: Step, op_counts: tuple[OpCount, ...] = (FORWARD, BACKWARD), **facts: Any
) -> Profile:
    """Return a measurement of 4 T MACs in forward and 8 T in backward, in bfloat16 on an A100."""
    usual = {
        "kind": "measure",
        "hardware": A100,
        "dtype": "bfloat16",
        "device_name": "NVIDIA A100",
    }
    of_run = run(**(usual | facts))
    cells = [replace(cell, dtype=of_run.dtype or "") for cell in op_counts]
    return profile({"": {}}, cells, run=of_run, steps=steps)


def training() -> Profile:
    """Return a measurement with three passes of 190, 200 and 220 ms."""
    return measured(
        step(0.19, {"forward": 0.075, "backward": 0.19 - 0.075}),
        step(0.22, {"forward": 0.085, "backward": 0.22 - 0.085}),
        step(0.2, {"forward": 0.08, "backward": 0.2 - 0.08}),
    )


def lines_about_time(given: Profile) -> dict[str, str]:
    """Return labels and texts of the facts about speed, with single blanks between words."""
    return {
        label: " ".join(text.split())
        for label, text in speed_lines(report_of(analyze(given)).speed)
    }


def test_a_time_has_its_spread_and_what_it_rests_on() -> None:
    """A time has its mean, median and spread; a phase has its share of all passes.

    Of 190, 200 and 220 ms, the quartiles are 195 and 210 ms. The farther one is 10 ms, or 5 %, from
    the median. Forward takes 240 ms of all 610 ms.
    """
    shown = lines_about_time(training())
    assert "203 ms mean of 3 passes; median 200 ms ± 5.0 %" == shown["pass"]
    assert "80.0 ms 39.3 % of the pass" == shown["  forward"]
    assert "123 ms 60.7 % of the pass" == shown["  backward"]


def test_figures_stand_below_each_other() -> None:
    """Units are aligned in a column, and so are the remarks."""
    lines = list(speed_lines(report_of(analyze(training())).speed))
    _, whole = lines[0]
    _, forward = lines[1]
    assert whole.index("ms") == forward.index("ms")
    # Shares are right-aligned: a blank stands before the two digits of 39.3 %.
    assert whole.index("mean") == forward.index("39.3") - 1


def test_one_step_has_no_spread() -> None:
    """A single step has no spread. In a training run, it is called a step."""
    shown = lines_about_time(small_profile())
    assert "3.00 ms of one unprofiled step" == shown["step"]
    assert "1.50 ms 50.0 % of the step" == shown["  backward"]


def test_what_generating_consists_of_is_below_its_forward() -> None:
    """Prefill and decode are parts of forward, so they are indented below it."""
    shown = lines_about_time(measured(step(1.0, {"prefill": 0.25, "decode": 0.75, "forward": 1.0})))
    indented = [label for label in shown if label.startswith("  ")]
    assert ["  forward", "    prefill", "    decode"] == indented
    assert "250 ms 25.0 % of the pass" == shown["    prefill"]


def test_the_rates_are_of_all_steps() -> None:
    """Throughput is computed from the sum of all steps.

    24 samples and 12,288 tokens in 610 ms are 39.3 and 20,144 per second. If samples are unknown,
    their line has a dash; if tokens are unknown, there is no line.
    """
    of_run = run(kind="measure", samples_per_step=8, tokens_per_step=4096)
    shown = lines_about_time(replace(training(), run=of_run))
    assert "39.3" == shown["samples/s"]
    assert "20.1 k" == shown["tokens/s"]
    without_tokens = lines_about_time(training())
    assert ["samples/s"] == [label for label in without_tokens if label.endswith("/s")]


def test_mfu_stands_beside_the_peak_that_it_is_of() -> None:
    """MFU names its peak. HFU is omitted if it equals MFU.

    72 T FLOPs in 610 ms are 118 TFLOP/s, of 312 TFLOP/s.
    """
    shown = lines_about_time(training())
    assert "118 TFLOP/s 2 × MACs of forward and backward" == shown["achieved"]
    assert "37.8 % of 312 TFLOP/s (A100 SXM, bf16 dense)" == shown["MFU"]
    assert "HFU" not in shown


def test_hfu_is_said_where_it_differs() -> None:
    """HFU is shown if MACs were recomputed: with 4 T more MACs, 160 of 312 TFLOP/s are achieved.

    The line `executed` is shown if a mask skips MACs, or if a dtype has no known peak.
    """
    again = product("", "aten::mm", "recompute", macs=4 * 10**12, bytes_moved=1)
    given = measured(step(0.2, {}), op_counts=(FORWARD, BACKWARD, again))
    assert "51.3 % including recomputed MACs" == lines_about_time(given)["HFU"]
    assert "executed" not in lines_about_time(given)
    odd = replace(given, op_counts=(*given.op_counts, replace(again, dtype="float64")))
    assert "51.3 % including recomputed MACs" == lines_about_time(odd)["HFU"]
    assert "– the peak is unknown for the dtype of some MACs" == lines_about_time(odd)["executed"]
    # Only 1 T MACs of each op count are executed.
    masked = tuple(replace(each, executed_macs=10**12) for each in given.op_counts)
    assert (
        "9.6 % without the MACs that are skipped because of masks, and with each dtype at its own peak"
        == lines_about_time(replace(given, op_counts=masked))["executed"]
    )


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (
            {"hardware": None},
            'the peak of NVIDIA A100 is unknown: pass hardware="measure" to measure it',
        ),
        ({"dtype": "float16"}, "the peak of A100 SXM for fp16 is unknown"),
        ({"dtype": "int64"}, "the peak of A100 SXM for int64 is unknown"),
        ({"dtype": None}, "the peak of A100 SXM for an unknown dtype is unknown"),
    ],
)
def test_an_unknown_mfu_is_a_dash_and_says_why(facts: dict[str, Any], why: str) -> None:
    """Without a known chip, or a known peak for the dtype, MFU is a dash with a reason."""
    shown = lines_about_time(measured(step(0.2, {}), **facts))
    assert f"– {why}" == shown["MFU"]
    assert "120 TFLOP/s 2 × MACs of forward and backward" == shown["achieved"]
    assert "HFU" not in shown


def test_without_a_count_there_is_no_rate() -> None:
    """If only times were measured, the achieved rate and MFU are dashes."""
    shown = lines_about_time(measured(step(0.2, {}), op_counts=()))
    assert "– no work was counted" == shown["achieved"]
    assert "– of 312 TFLOP/s (A100 SXM, bf16 dense)" == shown["MFU"]


def test_cpu_time_stands_beside_wall_time() -> None:
    """CPU time is shown relative to the time of the pass.

    250 ms in a pass of 200 ms need more than one core. 50 ms of them are system time.
    """
    shown = lines_about_time(measured(step(0.2, {}, cpu_user=0.2, cpu_system=0.05)))
    expected = "250 ms 1.25× the time of the median pass, 50.0 ms of it in the operating system"
    assert expected == shown["CPU time"]
    assert "CPU time" not in lines_about_time(training())


def test_on_a_device_the_hosts_phases_stand_beside_its_own() -> None:
    """A phase on a device also has its time on the host.

    Forward took 100 ms on the device, but the host had launched it after 20 ms.
    """
    shown = lines_about_time(measured(step(0.2, {"forward": 0.1}, host_phases={"forward": 0.02})))
    assert "100 ms 50.0 % of the pass, 20.0 ms on the host" == shown["  forward"]


def test_the_observers_cost_is_said() -> None:
    """The cost of module timing is shown, if it is known: 4 % here."""
    shown = lines_about_time(measured(step(0.2, {}), observer_ratio=1.04))
    expected = "1.04× time of module-timing passes relative to unprofiled passes"
    assert expected == shown["cost of timing"]
    assert "cost of timing" not in lines_about_time(training())


def test_without_a_clean_step_the_time_is_a_dash() -> None:
    """Without an unprofiled step the time is a dash; other steps do not replace it."""
    timed = measured(step(0.2, {"forward": 0.1}, kind="module_timing"))
    assert {"pass": "– no unprofiled passes"} == lines_about_time(timed)
    warmup = replace(small_profile(), steps=(step(0.2, {}, marks=("warmup",)),))
    assert {"step": "– no unprofiled steps"} == lines_about_time(warmup)


def test_a_profile_without_times_has_no_lines_about_them() -> None:
    """A profile without times, or only with a counting step, has no lines about speed.

    Counting makes a step slow, so its time is not shown.
    """
    assert {} == lines_about_time(untimed(small_profile()))
    assert {} == lines_about_time(measured(step(None, {})))
    assert {} == lines_about_time(measured(step(9.0, {}, kind="counting")))


@pytest.mark.parametrize("width", [24, 40, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """Long lines are broken to the width of the terminal."""
    assert max(map(len, drawn(training(), width))) <= width


def test_what_was_achieved_names_the_phases_that_ran() -> None:
    """The achieved rate names only phases that ran; a validation has no backward."""
    seconds = step(1.0, {"forward": 1.0})
    assert lines_about_time(measured(seconds))["achieved"].endswith(
        "2 × MACs of forward and backward"
    )
    assert lines_about_time(measured(seconds, op_counts=(FORWARD,)))["achieved"].endswith(
        "2 × MACs of forward"
    )
