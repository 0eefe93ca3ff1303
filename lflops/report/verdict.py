"""Write the verdict, which is the first lines of every report.

The verdict has the step time, the reasons for it (the findings), advice, and the confidence in the
numbers. An issue is a finding that should be fixed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.step_times import VERY_BUSY, busy_share, spread_without_data
from lflops.findings.finding import Finding, leading
from lflops.findings.run_rule import LARGE_SHARE
from lflops.profile.notes import are_times_far_off, time_factors
from lflops.profile.profile import Profile
from lflops.report.text import counted, joined, plus_minus

Status = Literal["found", "nothing found", "cannot tell"]

SHOWN_FINDINGS = 3
"""Maximum number of findings that a report shows, except for those in `ALWAYS_SHOWN`.

`lflops why` shows more.
"""

ALWAYS_SHOWN = {"peak", "busiest"}
"""Causes of findings that every report shows."""

FEWEST_STEPS = 5
"""Minimum number of unprofiled steps to conclude that there is no issue."""

UNSTEADY_SHARE = 0.1
"""Steps are unsteady if mean and median differ by more than this share of the median."""

VARYING_SHARE = 0.3
"""Steps vary too much if their spread is at least this share of their median.

The spread is the distance from the median to the farther quartile.
"""

BUSY_SHARE = 0.05
"""Smallest share of CPU time taken by other processes that a report mentions.

The share is relative to the CPU time that the profiled process needed.
"""

NOT_AN_ITEM = {*ALWAYS_SHOWN, "all_backward", "all_forward", "ideal_compute"}
"""Causes whose findings only say where time goes. Their large costs are normal."""

LARGE_COST = 0.25
"""Share of the step from which a cost is mentioned although it is not known to be an issue."""

CAVEATS = {
    "busy": "other processes used the CPU",
    "few_steps": "there were too few module-timing steps (set active=8 in the schedule)",
    "varied": "the times of the modules vary too much from step to step",
    "allocating": (
        "a module takes longer although the kernels of this module do not, and the host waits for "
        "the driver to allocate memory"
    ),
    "scaled": "the hooks that time modules changed the module times too much",
}
"""Texts for the reasons why it is unknown whether a module is slower than identical modules."""


class Verdict(Struct, frozen=True, kw_only=True):
    """The first lines of every report.

    Attributes:
        said: Sentence with the time of the step and its efficiency. For an estimate, the least time
            of a step and whether the step fits into memory.
        status: "found" if there is an issue. "nothing found" if there is no issue, and enough
            steady steps were measured to see one. Otherwise "cannot tell".
        judgement: Sentence that no issue was found, if the status is "nothing found". Otherwise
            empty.
        findings: First the issues, and overhead (time in which the model computes nothing) that
            costs more than every issue, sorted by cost. Then the findings that only show where the
            other time goes.
        why: Sentences about the issues, and about overhead that costs more than every issue. If
            there are no issues, sentences about all findings.
        also: If there are issues, sentences about the findings that are not in `why`.
        next: Advice on how to reduce the costs, in the order of the findings.
        caveat: Sentence that says why an issue might exist although none was found. Empty if the
            status is not "cannot tell".
        confidence: How many steps were timed, how much they vary, and what is unknown.
        caveats: The number of notes that make the numbers less reliable.
    """

    said: str
    status: Status = "cannot tell"
    judgement: str = ""
    findings: tuple[Finding, ...] = ()
    why: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    next: tuple[str, ...] = ()
    caveat: str = ""
    confidence: str = ""
    caveats: int = 0


def verdict(analysis: Analysis, caveats: int) -> Verdict:
    """Return the verdict on a profile.

    Args:
        analysis: The analysis of the profile.
        caveats: The number of notes that make the figures of the profile less reliable.
    """
    said = " ".join(_speed(analysis))
    confidence = "; ".join(_confidence(analysis, caveats))
    if analysis.step_times.mean is None:
        return Verdict(said=said, confidence=confidence, caveats=caveats)
    findings = analysis.findings
    limited = [finding for finding in findings if finding.cause not in ALWAYS_SHOWN]
    left_out = limited[SHOWN_FINDINGS:]
    shown = [finding for finding in findings if finding not in left_out]
    judged = judge(said, shown, unseen_because(analysis), confidence)
    return replace(judged, findings=findings, caveats=caveats)


def judge(said: str, findings: Sequence[Finding], unseen: str | None, confidence: str) -> Verdict:
    """Return the verdict that follows from findings.

    Args:
        said: Sentence with the time of the step and its efficiency.
        findings: The findings in the order of `Verdict.findings`.
        unseen: Reason why an issue might exist although none was found, as `unseen_because` returns
            it. `None` if an issue would have been found.
        confidence: How many steps were timed, how much they vary, and what is unknown.
    """
    leads = leading(findings)
    issues = tuple(finding.sentence for finding in leads)
    rest = tuple(finding.sentence for finding in findings if finding not in leads)
    status: Status = "cannot tell"
    judgement = ""
    if issues:
        status = "found"
    elif unseen is None:
        status = "nothing found"
        judgement = nothing_found(findings)
    return Verdict(
        said=said,
        status=status,
        judgement=judgement,
        findings=tuple(findings),
        why=issues or rest,
        also=rest if issues else (),
        next=_advice(findings),
        caveat=_caveat(status, unseen),
        confidence=confidence,
    )


def nothing_found(findings: Iterable[Finding]) -> str:
    """Return the sentence that no issue was found. It mentions the largest of the large costs."""
    shares = []
    for finding in findings:
        if finding.fix and finding.cause not in NOT_AN_ITEM:
            shares.append(finding.share or 0.0)
    largest = max(shares, default=0.0)
    if largest < LARGE_COST:
        return "No known issue found."
    return (
        f"No known issue found, but the largest cost below is {units.percent(largest)} of the step."
    )


def _caveat(status: Status, unseen: str | None) -> str:
    """Return a sentence that says why an issue might exist although none was found.

    Return the empty string if the status is not "cannot tell".
    """
    if status != "cannot tell":
        return ""
    because = f", because {unseen}" if unseen else ""
    return f"cannot tell whether anything is wrong{because}"


def _advice(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return advice on issues and on other findings with large costs, in the given order."""
    advice: dict[str, None] = {}
    for finding in findings:
        is_large = finding.share is not None and finding.share >= LARGE_SHARE
        if finding.fix and (finding.is_issue or finding.share is None or is_large):
            advice[f"{finding.fix}."] = None
    return tuple(advice)


def unseen_because(analysis: Analysis) -> str | None:
    """Describe why an issue might exist although none was found in these steps.

    For example, too few steps were timed, or the steps vary too much. Return `None` if an issue
    would have been found.
    """
    times = analysis.step_times
    if times.mean is None:
        return "nothing was timed"
    if busy_share(analysis.profile, times) >= VERY_BUSY:
        return CAVEATS["busy"]
    if times.steps < FEWEST_STEPS:
        said = f"fewer than {FEWEST_STEPS} unprofiled steps were timed"
        return said + disturbed_by(analysis.profile)
    # How long a step waits for data is measured, so a loader that stalls hides no other issue.
    spread = min(times.spread or 0.0, spread_without_data(analysis.profile))
    if spread >= VARYING_SHARE:
        return "the step times vary too much"
    caveat = analysis.outliers.caveat
    return None if caveat is None else CAVEATS[caveat]


DISTURBED_BY = {
    "new_shapes": ("have batches of new shapes", "pad batches to a few fixed shapes"),
    "recompiled": ("compile code again", "pass dynamic=True to torch.compile"),
    "validation": ("come right before or after a validation", "validate less often"),
    "checkpoint": ("come right before or after a checkpoint", "save checkpoints less often"),
}
"""Events that disturb steps. For each event: what the disturbed steps do, and advice against it.

A disturbed step is not typical, so its time is not used.
"""


def disturbed_by(profile: Profile) -> str:
    """Describe which event disturbed the most steps, as text to append to a sentence.

    Return the empty string if no step was disturbed.
    """
    numbers: Counter[str] = Counter()
    for step in profile.steps:
        numbers.update(mark for mark in step.marks if mark in DISTURBED_BY)
    if not numbers:
        return ""
    mark, number = numbers.most_common(1)[0]
    what, remedy = DISTURBED_BY[mark]
    return f": {number} of {counted(len(profile.steps), 'step')} {what} ({remedy})"


def verdict_lines(said: Verdict) -> Iterator[tuple[str, str]]:
    """Yield the label and text of each line of the verdict.

    If several lines belong to one label, only the first line has the label, and the label of the
    others is empty.
    """
    first = f"{said.said} {said.judgement}".strip()
    sections: dict[str, Sequence[str]] = {
        "verdict": [first],
        "why": said.why,
        "also": said.also,
        "next": said.next,
        "confidence": [joined(said.caveat, said.confidence, separator="; ")],
    }
    for label, lines in sections.items():
        for index, line in enumerate(lines):
            shown_label = label if index == 0 else ""
            if line:
                yield shown_label, line


def _speed(analysis: Analysis) -> Iterator[str]:
    """Yield sentences with the time and the efficiency of the step.

    If no step ran, yield the least time of a step, and whether the step fits into memory.
    """
    times = analysis.step_times
    if times.mean is None:
        if analysis.profile.is_counted:
            yield from _estimated(analysis)
        return
    took = f"A {analysis.evidence.unit} takes {units.duration(times.mean)}"
    mfu = analysis.utilization.mfu
    # An MFU above 1 means that the peak is too low, so it is not shown. A note explains this.
    if mfu is None or mfu > 1:
        yield f"{took}."
    else:
        yield f"{took}, at {units.percent(mfu)} MFU."


def _estimated(analysis: Analysis) -> Iterator[str]:
    bound = analysis.lower_bound
    fit = analysis.memory_fit
    if bound is not None:
        yield f"A step takes at least {units.duration(bound.seconds)} on {bound.hardware}."
    if fit is not None:
        need = f"a step needs {units.size(fit.needed_bytes)} of {units.size(fit.usable_bytes)}"
        sentences = {
            "fits": f"The model fits into memory: {need}.",
            "tight": f"The model barely fits into memory: {need}.",
            "does not fit": f"The model does not fit into memory: {need}.",
        }
        yield sentences[fit.verdict]
    if bound is None and fit is None:
        macs = units.count(analysis.total_macs)
        disturbance = disturbed_by(analysis.profile)
        yield f"A step has {macs} MACs. No step was timed{disturbance}."


def _confidence(analysis: Analysis, caveats: int) -> Iterator[str]:
    """Yield texts: how many steps were timed, and what makes the measurement unreliable."""
    yield from _steadiness(analysis)
    yield from _reliability_of_modules(analysis)
    profile = analysis.profile
    is_timed = analysis.step_times.mean is not None
    if is_timed and profile.is_counted and analysis.utilization.mfu is None:
        yield "MFU is unknown, because the peak of the chip is unknown"
    missing = len({row.operator for row in analysis.unsupported})
    if missing:
        yield counted(missing, "unsupported operator")
    silent = sum(rank.status != "ok" for rank in profile.ranks)
    if silent:
        yield f"{counted(silent, 'rank')} did not report"
    if caveats:
        yield f"{counted(caveats, 'note')} below"


def _steadiness(analysis: Analysis) -> Iterator[str]:
    """Yield texts about the number of timed steps and their spread, and about a busy machine."""
    times = analysis.step_times
    lost = busy_share(analysis.profile, times)
    if times.seconds is not None and times.mean is not None:
        yield _number_of_steps(analysis)
        median = times.seconds.median
        is_skewed = abs(times.mean - median) > UNSTEADY_SHARE * median
        if median and (is_skewed or (times.spread or 0.0) > VARYING_SHARE):
            longest = units.duration(times.longest)
            unit = analysis.evidence.unit
            yield (
                f"unsteady: the longest {unit} took {longest}, the median {unit} "
                f"{units.duration(median)}"
            )
    if lost >= BUSY_SHARE:
        share = units.percent(lost, digits=0)
        yield (
            f"this machine was busy: other processes took {share} of the CPU time that this "
            "process needed"
        )


def _number_of_steps(analysis: Analysis) -> str:
    times = analysis.step_times
    spread = ""
    if times.steps > 1 and times.spread is not None:
        spread = f" ± {plus_minus(times.spread)}"
    is_quiet = busy_share(analysis.profile, times) < VERY_BUSY
    kind = "unprofiled " if is_quiet else ""
    noun = analysis.evidence.unit if times.steps == 1 else _units_timed(analysis)
    return f"{units.count(times.steps)} {kind}{noun}{spread}"


def _units_timed(analysis: Analysis) -> str:
    return "steps" if analysis.evidence.unit == "step" else "passes"


def _reliability_of_modules(analysis: Analysis) -> Iterator[str]:
    """Yield texts about module times that are unreliable or approximate."""
    caveat = analysis.outliers.caveat
    if caveat and not analysis.outliers.found:
        reason = CAVEATS[caveat]
        yield f"cannot tell whether a module is slower than identical modules: {reason}"
    factors = time_factors(analysis.profile.notes)
    if are_times_far_off(analysis.profile.notes):
        worst = max(factors, key=_distance_from_one)
        passes = _units_timed(analysis)
        yield (
            "module times are unreliable in this run: to match the unprofiled "
            f"{passes}, some of them are multiplied by {worst:.2f}"
        )
    elif factors:
        error = max(abs(factor - 1) for factor in factors)
        yield f"module times are approximate (± {units.percent(error, digits=0)})"


def _distance_from_one(factor: float) -> float:
    return abs(math.log(factor)) if factor > 0 else math.inf
