"""Write the first lines of every report: step time, reasons, advice, and confidence."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.step_times import VERY_BUSY, lost_share
from lflops.findings.finding import Finding, leading
from lflops.findings.run_rule import LARGE_SHARE
from lflops.profile.notes import are_times_far_off, time_factors
from lflops.profile.profile import Profile
from lflops.report.text import counted, joined, plus_minus

Status = Literal["found", "nothing found", "cannot tell"]

SHOWN_FINDINGS = 3
"""Number of findings in every report.

`lflops why` has more.
"""

ALWAYS_SHOWN = {"peak", "busiest"}
"""Findings that are in every report, even if there are more than `SHOWN_FINDINGS`."""

FEWEST_STEPS = 5
"""Minimum number of unprofiled steps to conclude that there is no issue."""

UNSTEADY_SHARE = 0.1
"""Steps are unsteady if their mean and median differ by more than this share of the median."""

VARYING_SHARE = 0.3
"""Steps vary too much if a quartile is at least this share of the median away from the median."""

BUSY_SHARE = 0.05
"""Lost CPU time is mentioned if it is at least this share of the CPU time."""

CAVEATS = {
    "busy": "other processes used the CPU",
    "few_steps": ("too few module-timing steps were taken; set active=8 in the schedule"),
    "varied": "the module-timing steps vary too much",
    "allocating": (
        "its kernels are as short as those of identical modules, and layers wait for the driver to "
        "allocate memory"
    ),
    "scaled": "the hooks that time modules changed the times too much",
}
"""Reasons why a module that seems slower than identical modules cannot be judged."""


class Verdict(Struct, frozen=True, kw_only=True):
    """The first lines of every report.

    Attributes:
        said: Sentence with the time of the step and its efficiency. For an estimate, the least time
            of a step and whether it fits.
        status: "found" if there is an issue. "nothing found" if there is no issue, and the steps
            are good enough to show one. Otherwise "cannot tell".
        judgement: A sentence that says that nothing was found. Empty if an issue was found, or if
            an issue would not be visible.
        findings: Issues by cost, then findings that show where else the time goes.
        why: Sentences about the issues and about overhead that costs more, or about where the time
            goes if there are no issues.
        also: Sentences about where else the time goes, if there are issues.
        next: Advice on how to reduce the costs, in the same order.
        caveat: Reason why an issue would not be visible, if no issue was found.
        confidence: The basis of the figures, their spread, and what is unknown.
        caveats: The number of notes that make the figures less reliable.
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
    shown = list(findings[:SHOWN_FINDINGS])
    shown += [finding for finding in findings[SHOWN_FINDINGS:] if finding.cause in ALWAYS_SHOWN]
    judged = judge(said, shown, unseen_because(analysis), confidence)
    return replace(judged, findings=findings, caveats=caveats)


def judge(said: str, findings: Sequence[Finding], unseen: str | None, confidence: str) -> Verdict:
    """Return the verdict that follows from findings.

    Args:
        said: Sentence with the time of the step and its efficiency.
        findings: The findings, issues first.
        unseen: Reason why an issue would not be visible; `None` if it would be visible.
        confidence: The basis of the figures.
    """
    leads = leading(findings)
    issues = tuple(finding.sentence for finding in leads)
    rest = tuple(finding.sentence for finding in findings if finding not in leads)
    status: Status = "cannot tell"
    if issues:
        status = "found"
    elif unseen is None:
        status = "nothing found"
    return Verdict(
        said=said,
        status=status,
        judgement="No known issue found." if status == "nothing found" else "",
        findings=tuple(findings),
        why=issues or rest,
        also=rest if issues else (),
        next=_advice(findings, status),
        caveat=_caveat(status, unseen),
        confidence=confidence,
    )


def _caveat(status: Status, unseen: str | None) -> str:
    """Return the reason why an issue would not be visible, if no issue was found."""
    if status != "cannot tell":
        return ""
    because = f", because {unseen}" if unseen else ""
    return f"cannot tell whether anything is wrong{because}"


def _advice(findings: Iterable[Finding], status: Status) -> tuple[str, ...]:
    """Return advice on how to reduce the costs of issues and of other findings with large costs."""
    advice: dict[str, None] = {}
    for finding in findings:
        is_large = finding.share is not None and finding.share >= LARGE_SHARE
        deserves_advice = (
            finding.is_issue or finding.share is None or (is_large and status != "cannot tell")
        )
        if finding.fix and deserves_advice:
            advice[f"{finding.fix}."] = None
    return tuple(advice)


def unseen_because(analysis: Analysis) -> str | None:
    """Describe why an issue would not be visible in these steps; `None` if it would be visible."""
    times = analysis.step_times
    if times.mean is None:
        return "nothing was timed"
    if lost_share(analysis.profile) >= VERY_BUSY:
        return CAVEATS["busy"]
    if times.steps < FEWEST_STEPS:
        said = f"fewer than {FEWEST_STEPS} unprofiled steps were timed"
        return said + disturbed_by(analysis.profile)
    if (times.spread or 0.0) >= VARYING_SHARE:
        return "the steps vary too much"
    caveat = analysis.outliers.caveat
    return None if caveat is None else CAVEATS[caveat]


DISTURBED_BY = {
    "new_shapes": ("have batches of new shapes", "pad batches to a few shapes"),
    "recompiled": ("compile code again", "pass dynamic=True to torch.compile"),
    "validation": ("are next to a validation", "validate less often"),
    "checkpoint": ("are next to a checkpoint", "save checkpoints less often"),
}
"""Disturbances of steps, each with a description and with advice on how to avoid it."""


def disturbed_by(profile: Profile) -> str:
    """Describe the most frequent disturbance of the steps, as text to append; empty without one."""
    marks = Counter(mark for step in profile.steps for mark in step.marks if mark in DISTURBED_BY)
    if not marks:
        return ""
    mark, number = marks.most_common(1)[0]
    what, remedy = DISTURBED_BY[mark]
    return f": {number} of {counted(len(profile.steps), 'step')} {what} ({remedy})"


def verdict_lines(said: Verdict) -> Iterator[tuple[str, str]]:
    """Yield the label and text of each line.

    If a label has several lines, only the first line has it, and the others have an empty label.
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
            if line:
                yield "" if index else label, line


def _speed(analysis: Analysis) -> Iterator[str]:
    """Yield the time and efficiency of the step; if nothing ran, the time that a step needs."""
    times = analysis.step_times
    if times.mean is None:
        if analysis.profile.is_counted:
            yield from _estimated(analysis)
        return
    took = f"A {analysis.evidence.unit} takes {units.duration(times.mean)}"
    mfu = analysis.utilization.mfu
    yield f"{took}." if mfu is None else f"{took}, at {units.percent(mfu)} MFU."


def _estimated(analysis: Analysis) -> Iterator[str]:
    bound = analysis.lower_bound
    fit = analysis.memory_fit
    if bound is not None:
        yield f"A step takes at least {units.duration(bound.seconds)} on {bound.hardware}."
    if fit is not None:
        need = f"{units.size(fit.needed_bytes)} of {units.size(fit.usable_bytes)}"
        sentences = {
            "fits": f"It fits: {need}.",
            "tight": f"It is tight: {need}.",
            "does not fit": f"It does not fit: {need}.",
        }
        yield sentences[fit.verdict]
    if bound is None and fit is None:
        macs = analysis.total_macs
        yield f"A step has {units.count(macs)} MACs. Nothing was timed{disturbed_by(analysis.profile)}."


def _confidence(analysis: Analysis, caveats: int) -> Iterator[str]:
    """Yield the basis of the figures, then the facts that make them less reliable."""
    yield from _steadiness(analysis)
    yield from _reliability_of_modules(analysis)
    profile = analysis.profile
    is_timed = analysis.step_times.mean is not None
    if is_timed and profile.is_counted and analysis.utilization.mfu is None:
        yield "MFU is unknown, because the peak is unknown"
    missing = len({row.operator for row in analysis.unsupported})
    if missing:
        yield f"{counted(missing, 'operator')} not counted"
    silent = sum(rank.status != "ok" for rank in profile.ranks)
    if silent:
        yield f"{counted(silent, 'rank')} did not report"
    if caveats:
        yield f"{counted(caveats, 'note')} below"


def _steadiness(analysis: Analysis) -> Iterator[str]:
    """Yield the number of timed steps, and how much they vary."""
    times = analysis.step_times
    lost = lost_share(analysis.profile)
    if times.seconds is not None and times.mean is not None:
        yield _number_of_steps(analysis)
        median = times.seconds.median
        is_skewed = abs(times.mean - median) > UNSTEADY_SHARE * median
        if median and (is_skewed or (times.spread or 0.0) > VARYING_SHARE):
            longest = units.duration(times.longest)
            yield f"unsteady: the longest took {longest}, the median {units.duration(median)}"
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
    is_quiet = lost_share(analysis.profile) < VERY_BUSY
    kind = "unprofiled " if is_quiet else ""
    noun = analysis.evidence.unit if times.steps == 1 else _units_timed(analysis)
    return f"{units.count(times.steps)} {kind}{noun}{spread}"


def _units_timed(analysis: Analysis) -> str:
    return "steps" if analysis.evidence.unit == "step" else "passes"


def _reliability_of_modules(analysis: Analysis) -> Iterator[str]:
    """Describe how reliable module times are."""
    caveat = analysis.outliers.caveat
    if caveat and not analysis.outliers.found:
        reason = CAVEATS[caveat]
        yield f"cannot tell whether a module is slower than identical modules: {reason}"
    factors = time_factors(analysis.profile.notes)
    if are_times_far_off(analysis.profile.notes):
        worst = max(factors, key=_distance_from_one)
        passes = _units_timed(analysis)
        yield (
            f"times of modules are unreliable in this run: unprofiled {passes} took {worst:.2f} "
            f"times as long as module-timing {passes}"
        )
    elif factors:
        error = max(abs(factor - 1) for factor in factors)
        yield f"module times are approximate (± {units.percent(error, digits=0)})"


def _distance_from_one(factor: float) -> float:
    return abs(math.log(factor)) if factor > 0 else math.inf
