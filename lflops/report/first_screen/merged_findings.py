"""Join the findings about a step with the findings about the run.

A finding is one reason for lost time. The findings about a step come from the last window (a few
profiled steps), and the findings about the run from its ledger (time account). Costs per step
become shares of the run's mean step.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from lflops import units
from lflops.analysis.step_times import with_recompute
from lflops.findings.evaluate import findings_of_run
from lflops.findings.evidence import REPORTED_SHARE
from lflops.findings.finding import Finding, mostly_in, ordered
from lflops.findings.own_operators import with_time
from lflops.findings.part_rule import in_bursts
from lflops.findings.registry import issue_share
from lflops.findings.rules.data_wait import DataWait
from lflops.findings.rules.other_work import OtherWork
from lflops.findings.run_rule import RunEvidence
from lflops.findings.stalls import stalls_of
from lflops.ledger.account import Ledger
from lflops.profile.profile import Profile
from lflops.profile.series import scaled
from lflops.report.first_screen.step_times import StepTimes, times_of, work_ratio
from lflops.report.first_screen.window import WindowSummary
from lflops.report.text import joined


def findings_of(window: WindowSummary | None, ledger: Ledger | None) -> list[Finding]:
    """Return the findings about a run, from its last window and its ledger.

    If a finding is about a whole phase, its cost is the mean over all unprofiled steps of the run
    instead of the steps of the window. A finding whose cost is small in the run is left out.
    """
    of_step: Sequence[Finding] = () if window is None else window.findings
    if ledger is None:
        return ordered(_with_thread_in_phase(of_step, times_of(window, None)))
    profile = None if window is None else window.profile
    times = times_of(window, ledger)
    if times is None or times.steps.source != "run":
        found = _with_run_findings(of_step, ledger, profile, IN_OTHER)
        return ordered(_with_thread_in_phase(found, times))
    of_step = _of_steps_of_run(of_step, window, times, ledger)
    found = _with_run_findings(of_step, ledger, profile, _in_other(window, times, ledger))
    of_mean = [_of_mean_of_run(finding, times, ledger) for finding in found]
    return ordered(_with_thread_in_phase(of_mean, times))


def _with_thread_in_phase(findings: Sequence[Finding], times: StepTimes | None) -> list[Finding]:
    """Report the wait for another thread in the finding about the phase that contains it.

    Users would add up the costs of two findings. The phase contains most of the wait if the rest
    of the step is too short for half of it.
    """
    wait = next((each for each in findings if each.cause == "thread" and each.is_issue), None)
    if times is None or wait is None or wait.seconds is None:
        return list(findings)
    for finding in findings:
        seconds = times.phases.get(finding.cause)
        if seconds is None or not finding.is_issue:
            continue
        if times.steps.mean - seconds <= (1 - _WITHIN_PHASE) * wait.seconds:
            wait_in_phase = _WAIT_IN_PHASE.format(units.duration(wait.seconds))
            both = replace(
                finding,
                sentence=f"{finding.sentence} {wait_in_phase}",
                fix=joined(finding.fix, _FIX_IN_PHASE, separator=". "),
            )
            others = [each for each in findings if each not in (finding, wait)]
            return [both, *others]
    return list(findings)


_WITHIN_PHASE = 0.5
"""A wait for a thread is in a phase if at least this share of the wait must be in the phase."""

_WAIT_IN_PHASE = (
    "During {} of the step, mostly in this phase, another thread of this process computes and the "
    "training thread waits for it."
)
_FIX_IN_PHASE = "If this code gives work to a thread, such as a logger's, let it give less work"

IN_OTHER = frozenset({"gc", "logging"})
"""Causes whose time is also part of the phase `other` of a window."""


def _in_other(window: WindowSummary | None, times: StepTimes, ledger: Ledger) -> frozenset[str]:
    """Return the causes whose time may be part of the finding `other` about the steps of a run.

    The ledger measures this phase without logging, and on a CPU without garbage collection. But the
    finding has the cost in the window if other findings contain a part of it.
    """
    if window is None or "other" not in times.phases:
        return IN_OTHER
    in_window = window.phases.get("other")
    if not any(each.cause == "other" and _is_whole(each, in_window) for each in window.findings):
        return IN_OTHER
    return frozenset() if ledger.is_on_cpu else frozenset({"gc"})


def _of_steps_of_run(
    of_window: Sequence[Finding], window: WindowSummary | None, times: StepTimes, ledger: Ledger
) -> list[Finding]:
    """Convert findings about the window's steps to findings about the steps of the run."""
    if window is None:
        return []
    phases = with_recompute(window.phases, window.recomputed)
    ratio = work_ratio(window, times).factor
    converted = []
    for finding in of_window:
        of_run = _of_all_steps(finding, window, times, phases, ledger, ratio=ratio)
        became_small = (of_run.share or 0.0) < REPORTED_SHARE <= (finding.share or 0.0)
        if of_run.is_issue or not became_small:
            converted.append(of_run)
    return converted


def _with_run_findings(
    of_step: Sequence[Finding], ledger: Ledger, profile: Profile | None, in_other: Collection[str]
) -> list[Finding]:
    """Add the findings about the whole run to the findings about a step.

    Findings whose time is already explained by another finding are dropped. `in_other` has the
    causes whose time may be part of the finding `other`.
    """
    # The steps of the run show the data wait better than the few steps of the window. But only the
    # window can show how long other programs delayed its steps.
    step_issues = _issues(of_step)
    confirmed = step_issues & {"data"}
    run = RunEvidence(
        ledger=ledger,
        profile=profile,
        step_issues=step_issues - confirmed,
        confirmed_by_window=confirmed,
    )
    of_run = _with_places(findings_of_run(run), of_step)
    in_run = _SAME_TIME.intersection(
        finding.cause for finding in of_run if not _is_about_one_step(finding)
    )
    findings = [*of_run, *(finding for finding in of_step if finding.cause not in in_run)]
    issues = _issues(findings)
    return [
        finding
        for finding in findings
        if (finding.is_issue or finding.cause not in issues)
        and not _is_explained(finding, findings, in_other)
    ]


def _with_places(of_run: Sequence[Finding], of_step: Sequence[Finding]) -> list[Finding]:
    """Add the place of an issue about a step to the finding about the run with the same cause."""
    places = {finding.cause: finding.place for finding in of_step if finding.is_issue}
    return [replace(finding, place=places.get(finding.cause, "")) for finding in of_run]


def _is_about_one_step(finding: Finding) -> bool:
    """Return whether a finding about a run is only about its slowest step. It has no advice."""
    return finding.of == "run" and not finding.fix


_SAME_TIME = frozenset({"data", "inference", "other"})
"""Causes whose findings about a step and about the run describe the same time."""

_MOSTLY = 0.5
"""If the garbage collector or logging takes this share of `other`, `other` is not reported."""


def _is_explained(finding: Finding, findings: Sequence[Finding], in_other: Collection[str]) -> bool:
    """Return whether a finding with one of the causes `in_other` explains the finding `other`."""
    if finding.cause != "other" or finding.of == "run":
        return False
    known = [each.seconds or 0.0 for each in findings if each.cause in in_other]
    return max(known, default=0.0) >= _MOSTLY * (finding.seconds or 0.0)


def _issues(findings: Sequence[Finding]) -> frozenset[str]:
    """Return the causes of the findings that are issues."""
    return frozenset(finding.cause for finding in findings if finding.is_issue)


_PHRASES = {
    "data": DataWait.phrase,
    "other": OtherWork.phrase,
    "optimizer": "in the steps of the optimizer",
}
"""How a finding names each of the phases whose time is measured in all steps of a run."""

_PHASES = {"recomputed": "recompute", "all_forward": "forward", "all_backward": "backward"}
"""The name of the phase that a finding is about, keyed by the finding's cause.

For all other findings about a phase, the cause is the name of the phase.
"""


def _of_mean_step(finding: Finding, mean: float, ratio: float) -> Finding:
    """Convert the cost of a finding about the window to a share of the mean step of the run.

    The cost and the times of operators are multiplied by `ratio`, the factor of `work_ratio`. The
    cost of a slow rank is not multiplied, because it is a difference between ranks.
    """
    if finding.of != "step" or not finding.seconds:
        return finding
    seconds = finding.seconds
    if finding.rank is None:
        seconds *= ratio
    share = seconds / mean
    cost = _cost(finding.share, finding.seconds)
    sentence = finding.sentence.replace(cost, _cost(share, seconds))
    operators = scaled(finding.operators, seconds / finding.seconds)
    for name, took in operators.items():
        listed = with_time(name, finding.operators[name])
        sentence = sentence.replace(listed, with_time(name, took), 1)
    return replace(finding, seconds=seconds, share=share, sentence=sentence, operators=operators)


def _of_all_steps(
    finding: Finding,
    window: WindowSummary,
    times: StepTimes,
    of_window: Mapping[str, float],
    ledger: Ledger,
    *,
    ratio: float,
) -> Finding:
    """Replace the cost of a finding about a whole phase with the mean over all unprofiled steps.

    The text that says how often the phase is long is replaced, too. If the finding is not about a
    whole phase, return the result of `_of_mean_step`. `ratio` is the factor of `work_ratio`.
    """
    phase = _PHASES.get(finding.cause, finding.cause)
    seconds = times.phases.get(phase)
    if seconds is None or not _is_whole(finding, of_window.get(phase)):
        return _of_mean_step(finding, times.steps.mean, ratio)
    is_issue = finding.is_issue
    if phase == "other":
        # A single slow step has its own finding. It is not a reason why other steps take long.
        seconds -= _slowest(ledger) / times.steps.number
    share = seconds / times.steps.mean
    if finding.cause not in THRESHOLD_DEPENDS:
        # The cost in the window was large enough, but the cost in the run may be smaller.
        is_issue = is_issue and share >= (issue_share(finding.cause) or 0.0)
    cost = _cost(share, seconds)
    sentence = finding.sentence.replace(_cost(finding.share, finding.seconds), cost)
    sentence = _with_rhythm_of_run(sentence, phase, window, ledger, seconds)
    return replace(finding, seconds=seconds, share=share, sentence=sentence, is_issue=is_issue)


THRESHOLD_DEPENDS = frozenset({"recomputed"})
"""Causes whose threshold depends on the run, so that the cost in the run is not judged again."""


def _of_mean_of_run(finding: Finding, times: StepTimes, ledger: Ledger) -> Finding:
    """Convert a finding about a phase in `_PHRASES` to a finding about the mean step of the run."""
    seconds = times.phases.get(finding.cause)
    phrase = _PHRASES.get(finding.cause)
    is_of_run = finding.of == "run" or finding.cause == "data"
    if seconds is None or phrase is None or not is_of_run or _is_about_one_step(finding):
        return finding
    share = seconds / times.steps.mean
    rhythm = ""
    if ledger.is_on_cpu or finding.cause == "data":
        rhythm = _rhythm(finding.cause, ledger, seconds)
    where = mostly_in(finding.place) + rhythm
    sentence = f"{_cost(share, seconds)} is spent {phrase}{where}."
    return replace(finding, seconds=seconds, share=share, of="step", sentence=sentence)


def _with_rhythm_of_run(
    sentence: str, phase: str, window: WindowSummary, ledger: Ledger, cost: float
) -> str:
    """Replace the text that says how often a phase is long in the window with a text for the run.

    The window has too few steps to show this. If the run uses a GPU or another device, this text is
    only removed, because the ledger has no device times.
    """
    sentence = sentence.replace(in_bursts(window.profile, phase), "")
    if window.profile.run.device_type not in {"cpu", None}:
        return sentence
    return f"{sentence.removesuffix('.')}{_rhythm(phase, ledger, cost)}."


def _rhythm(phase: str, ledger: Ledger, cost: float) -> str:
    """Describe how long and how often a phase stalls in the run: `: 1.20 s every 3rd step`.

    If the other steps have a considerable part of the cost, their time follows. Returns an empty
    text if the stalls do not explain most of the cost, in seconds per step.
    """
    stalls = stalls_of(ledger, phase)
    if stalls is None:
        return ""
    if stalls.seconds * stalls.share < _MOSTLY * cost:
        return ""
    rhythm = f": {units.duration(stalls.seconds)} {stalls.often}"
    usual = stalls.usual
    if usual is None or usual * (1 - stalls.share) < _LEAST_IN_OTHER_STEPS * cost:
        return rhythm
    return f"{rhythm}, {units.duration(usual)} in the other steps"


_LEAST_IN_OTHER_STEPS = 0.1
"""Share of a cost from which the text says how much of it is in the steps without a stall."""


def _cost(share: float | None, seconds: float | None) -> str:
    return f"{units.percent(share)} of the step ({units.duration(seconds)})"


def _slowest(ledger: Ledger) -> float:
    """Return the seconds that the only slow step with unknown cause lost outside all phases.

    If several steps lost such time, it is typical of the run, and the result is 0. The result is
    also 0 if no step lost such time.
    """
    costs = []
    for step in ledger.slow_steps:
        if step.cause == "unknown" and step.phase == "other":
            costs.append(step.cost)
    return costs[0] if len(costs) == 1 else 0.0


def _is_whole(finding: Finding, phase_seconds: float | None) -> bool:
    """Return whether the cost of a finding is the whole time of a phase.

    `phase_seconds` is the mean time of the phase in the window, or `None` if it was not timed.
    """
    if finding.of != "step" or finding.rank is not None or not finding.seconds:
        return False
    return phase_seconds is not None and math.isclose(finding.seconds, phase_seconds)
