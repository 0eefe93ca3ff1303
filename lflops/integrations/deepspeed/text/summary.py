"""Write a profile as text in the format of DeepSpeed's profiler.

The text has a summary, a table of the module classes at each depth, and a list of all modules. The
headings, the labels and their order are the same as in DeepSpeed's text, so that the two texts can
be compared line by line. A label differs only if the number has a different meaning. Additional
lines, which are not in DeepSpeed's text, come last.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from lflops.analysis.analysis import Analysis
from lflops.analysis.step_times import StepTimes, step_times
from lflops.integrations.deepspeed.text.figures import figure_lines
from lflops.integrations.deepspeed.text.further_figures import further_lines
from lflops.integrations.deepspeed.text.model import detailed as model_text
from lflops.integrations.deepspeed.text.module_classes import aggregated
from lflops.report.summary_facts import report_of
from lflops.report.verdict import verdict_lines

_NOTATIONS = (
    "Notations:\ndp: data parallel; mp: model parallel; params: parameters (a shared parameter "
    "counts once); MACs: multiply-accumulates, for example of matmuls;\nflops: 2 x MACs, plus all "
    "pointwise and other operations; FLOPS: flops per second; latency: the mean time over the "
    "unprofiled steps;\nfwd: forward; bwd: backward, with counted flops and measured time; step: "
    "the optimizer's update; iter: a whole step, including the wait for data"
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
    """Return the whole text.

    Args:
        analysis: The profile with its results.
        step: The step number in the first line. By default, the step at which the profile was made.
        module_depth: The largest depth at which module classes are listed; -1 for all depths.
        top_modules: Number of module classes to list at each depth.
        detailed: Whether to list the model, module by module.
        fold: Whether modules with the same counts are listed only once, such as "12 x Block".

    Raises:
        ValueError: `module_depth` is below -1.
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
    """Format labels and values as lines.

    A value with an empty label belongs to the label of the line above it.
    """
    lines = []
    for label, value in figures:
        heading = f"{label}: " if label else ""
        lines.append(f"{heading:<70}  {value}")
    return lines


def _latencies(analysis: Analysis) -> StepTimes:
    """Return the times of the unprofiled steps or, if there are none, of the counting steps.

    In an unprofiled step, lflops only reads a clock. In a counting step, it counts every operator.
    """
    if analysis.step_times.steps:
        return analysis.step_times
    steps = []
    for step in analysis.profile.steps:
        if step.kind == "counting":
            steps.append(replace(step, kind="unprofiled"))
    return step_times(replace(analysis.profile, steps=tuple(steps)))
