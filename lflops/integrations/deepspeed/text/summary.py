"""Write a profile as text in the format of DeepSpeed's profiler.

It has a summary, the classes of modules by depth, and the model in detail. Headings, labels and
their order are DeepSpeed's, so that two reports can be compared line by line. A label that differs
names a number with another meaning. Lines that DeepSpeed does not have come after its lines.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from lflops.analysis.analysis import Analysis
from lflops.analysis.step_times import StepTimes, step_times
from lflops.integrations.deepspeed.text.figures import figure_lines
from lflops.integrations.deepspeed.text.further_figures import further_lines
from lflops.integrations.deepspeed.text.model import detailed as model_text
from lflops.integrations.deepspeed.text.module_classes import aggregated
from lflops.report.report import report_of
from lflops.report.verdict import verdict_lines

_NOTATIONS = (
    "Notations:\n"
    "dp: data parallel, mp: model parallel; params: parameters, shared parameters once; "
    "MACs: multiply-accumulates of contractions;\n"
    "flops: a count, 2 for each MAC, plus the pointwise and other work; "
    "FLOPS: flops a second; latency: the mean over the unprofiled steps;\n"
    "fwd: forward; bwd: backward, counted and timed; step: the optimizer's update; "
    "iter: a whole step, including the wait for data"
)


def summary(
    analysis: Analysis,
    *,
    step: int | None = None,
    module_depth: int = -1,
    top_modules: int = 1,
    detailed: bool = True,
    fold: bool = False,
) -> str:
    """The whole text. The arguments are the same as in `get_model_profile`, with two more.

    Args:
        analysis: The profile with its results.
        step: The step in the first line, by default the step of the run.
        module_depth: The last depth of the classes.
        top_modules: Number of classes at each depth.
        detailed: Whether the model is shown module by module.
        fold: Whether repeated modules share their lines in this listing.

    Raises:
        ValueError: There is no such depth.
    """
    step = analysis.profile.run.step if step is None else step
    latencies = _latencies(analysis)
    report = report_of(analysis)
    parts = [
        _heading("lflops Flops Profiler", 26),
        "Profile Summary:" if step is None else f"Profile Summary at step {step}:",
        _NOTATIONS,
        "",
        *_lines(figure_lines(analysis, latencies)),
        "",
        _heading("Further Figures per GPU", 30),
        *_lines(further_lines(analysis, report, latencies)),
        "",
        _heading("Aggregated Profile per GPU", 29),
        aggregated(analysis.profile, module_depth=module_depth, top_modules=top_modules),
    ]
    if detailed:
        parts += ["", _heading("Detailed Profile per GPU", 30), model_text(analysis, fold=fold)]
    if report.verdict.why:
        parts += ["", _heading("Where the Step's Time Went", 29)]
        parts += _lines(verdict_lines(report.verdict))
    parts.append("-" * 78)
    return "\n".join(parts)


def _heading(title: str, dashes: int) -> str:
    rule = "-" * dashes
    return f"{rule} {title} {rule}"


def _lines(figures: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of labels and values; an empty label continues the line above."""
    lines = []
    for label, value in figures:
        heading = f"{label}: " if label else ""
        lines.append(f"{heading:<70}  {value}")
    return lines


def _latencies(analysis: Analysis) -> StepTimes:
    """Times of the unprofiled steps, or of the counting steps if there are no unprofiled steps."""
    if analysis.step_times.steps:
        return analysis.step_times
    steps = []
    for step in analysis.profile.steps:
        if step.kind == "counting":
            steps.append(replace(step, kind="unprofiled"))
    return step_times(replace(analysis.profile, steps=tuple(steps)))
