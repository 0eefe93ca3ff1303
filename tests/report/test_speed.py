from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.profile import OpCount, Profile
from lflops.profile.steps import Step
from lflops.report.report import report_of, speed_lines
from tests.support.profile_builders import product, profile, run, small_profile, untimed
from tests.support.terminal import drawn

A100 = Hardware("A100 SXM", {"bf16": 312e12, "fp32": 19.5e12})
FORWARD = product("", "aten::mm", "forward", macs=4 * 10**12, bytes_moved=1)
BACKWARD = product("", "aten::mm", "backward", macs=8 * 10**12, bytes_moved=1)


def step(seconds: float | None, phases: Mapping[str, float], **fields: Any) -> Step:
    """A clean step, unless said otherwise."""
    return Step(
        **({"index": 0, "kind": "unprofiled", "seconds": seconds, "phases": phases} | fields)
    )


def measured(
    *steps: Step, op_counts: tuple[OpCount, ...] = (FORWARD, BACKWARD), **facts: Any
) -> Profile:
    """4 T MACs forward and 8 T backward in bfloat16, on an A100."""
    of = run(
        **(
            {"kind": "measure", "hardware": A100, "dtype": "bfloat16", "device_name": "NVIDIA A100"}
            | facts
        )
    )
    return profile(
        {"": {}}, [replace(cell, dtype=of.dtype or "") for cell in op_counts], run=of, steps=steps
    )


def training() -> Profile:
    """Three passes of 190, 200 and 220 ms."""
    passes = ((0.19, 0.075), (0.22, 0.085), (0.2, 0.08))
    return measured(
        *(step(both, {"forward": forward, "backward": both - forward}) for both, forward in passes)
    )


def lines_about_time(given: Profile) -> dict[str, str]:
    """Label and text of the facts about speed, each run of blanks as one."""
    return {
        label: " ".join(text.split())
        for label, text in speed_lines(report_of(analyze(given)).speed)
    }


def test_a_time_has_its_spread_and_what_it_rests_on() -> None:
    """Of 190, 200, 220 ms the quartiles are 195 and 210: the farther is 10 from the median.

    Forward has 240 of all 610 ms.
    """
    shown = lines_about_time(training())
    assert "203 ms mean of 3 passes; median 200 ms ± 5.0 %" == shown["pass"]
    assert "80.0 ms 39.3 % of the pass" == shown["  forward"]
    assert "123 ms 60.7 % of the pass" == shown["  backward"]


def test_figures_stand_below_each_other() -> None:
    """So does what they rest on."""
    whole, forward = (
        text for _, text in list(speed_lines(report_of(analyze(training())).speed))[:2]
    )
    assert (whole.index("ms"), whole.index("mean")) == (
        forward.index("ms"),
        forward.index("39.3") - 1,
    )


def test_one_step_has_no_spread() -> None:
    """A training's is a step."""
    shown = lines_about_time(small_profile())
    assert "3.00 ms of one unprofiled step" == shown["step"]
    assert "1.50 ms 50.0 % of the step" == shown["  backward"]


def test_what_generating_consists_of_is_below_its_forward() -> None:
    """Prefill and decode are forward's, and indented so."""
    shown = lines_about_time(measured(step(1.0, {"prefill": 0.25, "decode": 0.75, "forward": 1.0})))
    assert ["  forward", "    prefill", "    decode"] == [
        label for label in shown if label.startswith("  ")
    ]
    assert "250 ms 25.0 % of the pass" == shown["    prefill"]


def test_the_rates_are_of_all_steps() -> None:
    """24 samples and 12,288 tokens in 610 ms: 39.3 and 20,144 a second.

    Unknown samples have a dash, unknown tokens no line.
    """
    shown = lines_about_time(
        replace(training(), run=run(kind="measure", samples_per_step=8, tokens_per_step=4096))
    )
    assert ("39.3", "20.1 k") == (shown["samples/s"], shown["tokens/s"])
    assert ["samples/s"] == [
        label for label in lines_about_time(training()) if label.endswith("/s")
    ]


def test_mfu_stands_beside_the_peak_that_it_is_of() -> None:
    """72 T FLOPs in 610 ms: 118 T a second, of 312. HFU is the same, and is not said again."""
    shown = lines_about_time(training())
    assert "118 TFLOP/s 2 × MACs of forward and backward" == shown["achieved"]
    assert "37.8 % of 312 TFLOP/s (A100 SXM, bf16 dense)" == shown["MFU"]
    assert "HFU" not in shown


def test_hfu_is_said_where_it_differs() -> None:
    """4 T MACs more ran again: 160 T FLOP/s of 312.

    What a mask skips, or where one dtype has no peak, a line of its own says.
    """
    again = product("", "aten::mm", "recompute", macs=4 * 10**12, bytes_moved=1)
    given = measured(step(0.2, {}), op_counts=(FORWARD, BACKWARD, again))
    assert "51.3 % with recomputed MACs" == lines_about_time(given)["HFU"]
    assert "executed" not in lines_about_time(given)
    odd = replace(given, op_counts=(*given.op_counts, replace(again, dtype="float64")))
    assert "51.3 % with recomputed MACs" == lines_about_time(odd)["HFU"]
    assert "– some MACs are in a dtype without a known peak" == lines_about_time(odd)["executed"]
    skipped = replace(
        given,
        op_counts=tuple(
            replace(each, executed_macs=min(each.executed_macs, 10**12)) for each in given.op_counts
        ),
    )
    assert (
        "9.6 % without the MACs that masks skip, each at the peak of its dtype"
        == lines_about_time(skipped)["executed"]
    )


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (
            {"hardware": None},
            'the peak of NVIDIA A100 is not known: hardware="measure" measures it',
        ),
        ({"dtype": "float16"}, "the peak of A100 SXM for fp16 is not known"),
        ({"dtype": "int64"}, "the peak of A100 SXM for int64 is not known"),
        ({"dtype": None}, "the peak of A100 SXM for an unknown dtype is not known"),
    ],
)
def test_an_unknown_mfu_is_a_dash_and_says_why(facts: dict[str, Any], why: str) -> None:
    """No chip, or none whose peak for that dtype is known."""
    shown = lines_about_time(measured(step(0.2, {}), **facts))
    assert (f"– {why}", "120 TFLOP/s 2 × MACs of forward and backward") == (
        shown["MFU"],
        shown["achieved"],
    )
    assert "HFU" not in shown


def test_without_a_count_there_is_no_rate() -> None:
    """Only times were taken."""
    shown = lines_about_time(measured(step(0.2, {}), op_counts=()))
    assert ("– nothing was counted", "– of 312 TFLOP/s (A100 SXM, bf16 dense)") == (
        shown["achieved"],
        shown["MFU"],
    )


def test_cpu_time_stands_beside_wall_time() -> None:
    """250 ms in a pass of 200, on more than one core; 50 of them were spent in the system."""
    shown = lines_about_time(measured(step(0.2, {}, cpu_user=0.2, cpu_system=0.05)))
    assert (
        "250 ms 1.25× the time of the median pass, 50.0 ms of it in the kernel" == shown["CPU time"]
    )
    assert "CPU time" not in lines_about_time(training())


def test_on_a_device_the_hosts_phases_stand_beside_its_own() -> None:
    """The device was 100 ms in forward, which the host had left after 20."""
    shown = lines_about_time(measured(step(0.2, {"forward": 0.1}, host_phases={"forward": 0.02})))
    assert "100 ms 50.0 % of the pass, 20.0 ms on the host" == shown["  forward"]


def test_the_observers_cost_is_said() -> None:
    """Hooked passes took 4 % more."""
    shown = lines_about_time(measured(step(0.2, {}), observer_ratio=1.04))
    assert "1.04× module-timing passes over unprofiled passes" == shown["cost of timing"]
    assert "cost of timing" not in lines_about_time(training())


def test_without_a_clean_step_the_time_is_a_dash() -> None:
    """Watched ones do not stand in for it."""
    assert {"pass": "– no unprofiled passes"} == lines_about_time(
        measured(step(0.2, {"forward": 0.1}, kind="module_timing"))
    )
    cold = replace(small_profile(), steps=(step(0.2, {}, marks=("warmup",)),))
    assert {"step": "– no unprofiled steps"} == lines_about_time(cold)


def test_a_profile_without_times_has_no_lines_about_them() -> None:
    """A counted step is slow by our own doing."""
    assert [{}] * 3 == [
        *map(
            lines_about_time,
            (
                untimed(small_profile()),
                measured(step(None, {})),
                measured(step(9.0, {}, kind="counting")),
            ),
        )
    ]


@pytest.mark.parametrize("width", [24, 40, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """What a figure rests on goes on below it."""
    assert max(map(len, drawn(training(), width))) <= width


def test_what_was_achieved_names_the_phases_that_ran() -> None:
    """Of a validation there is no backward to be of."""
    seconds = step(1.0, {"forward": 1.0})
    assert lines_about_time(measured(seconds))["achieved"].endswith(
        "2 × MACs of forward and backward"
    )
    assert lines_about_time(measured(seconds, op_counts=(FORWARD,)))["achieved"].endswith(
        "2 × MACs of forward"
    )
