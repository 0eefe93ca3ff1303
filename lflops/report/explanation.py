"""Explain why a run or a profile is slow, in one small object for people, programs and agents.

`lflops.explain` returns this object, and `lflops why` prints it. It has the same findings as the
first screen, which is the top of the HTML page. It also has findings from the ledger of the run
(the time account of the whole run), such as time between steps and occasional slow steps.

A finding is one reason for lost time, and an issue is a finding that should be fixed. A window is a
few consecutive steps that lflops profiles; its result is one profile.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analysis.analysis import Analysis, analyze
from lflops.analysis.step_times import lost_share
from lflops.display import Displayed
from lflops.errors import ProfileError
from lflops.findings.finding import Finding, first_issue
from lflops.findings.registry import issue_share
from lflops.findings.run_rule import preempted_share, training_seconds
from lflops.ledger.account import Ledger
from lflops.ledger.ledger_file import ENDING, load_run
from lflops.profile.json_file import load
from lflops.profile.module_names import plain
from lflops.profile.profile import Profile
from lflops.profile.series import ratio
from lflops.report.first_screen.confidence import PREEMPTED, PREEMPTED_SHARE
from lflops.report.first_screen.merged_findings import findings_of
from lflops.report.first_screen.screen import first_screen
from lflops.report.first_screen.step_times import phase_parts, times_of, unlike_window
from lflops.report.first_screen.window import WindowSummary, window_summary
from lflops.report.ledger import HOW_TO_PROFILE, other_runs
from lflops.report.ranks import ranks
from lflops.report.summary_facts import report_of
from lflops.report.text import counted, joined, shortened
from lflops.report.verdict import Status, Verdict, judge, unseen_because, verdict_lines

FORMAT = 1
"""Version of the JSON format of an explanation.

Later versions may add fields, but never change existing fields.
"""

LONGEST_TEXT = 240
"""Names, measurements and lines about ranks are shortened to this number of characters."""

MOST_LINES = 6
"""Maximum number of lines about ranks in an explanation."""

MOST_PHASES = 3
"""Maximum number of longest phases that an explanation names.

It names them only if the run has no issue and no profiled window.
"""

LEAST_SHARE_OF_PHASE = 0.1
"""Only phases with at least this share of the step are named as the longest."""

MOST_FINDINGS = 6
MOST_MODULES = 5

_NO_WINDOW = Verdict(
    said=f"No window was profiled. {HOW_TO_PROFILE}",
    confidence="all figures come from the ledger of the run",
)


class Module(Struct, frozen=True, kw_only=True):
    """One of the modules that take longest.

    Repeated modules, such as the layers of a transformer, are one entry named `layers.*`. The
    numbers of such an entry are sums over the modules.

    Attributes:
        name: The name of the module, or the empty string for the root.
        kind: The class of the module.
        seconds: Self time (without submodules) in seconds per step.
        macs: MACs of forward and backward per step, without submodules.
    """

    name: str
    kind: str
    seconds: float
    macs: int


class Explanation(Struct, Displayed, frozen=True, kw_only=True):
    """An explanation of why a run is slow, with the measurements. `None` means unknown.

    Attributes:
        status: "found" if there is an issue. "nothing found" if there is no issue, and enough
            steady steps were measured to see one. Otherwise "cannot tell".
        said: Sentence with the time of a step and its efficiency.
        findings: First the issues, and overhead (time in which the model computes nothing) that
            costs more than every issue, sorted by cost. Then the findings that only show where the
            other time goes.
        because: How reliable the numbers are: how many steps were timed, how much they vary, and
            what is unknown.
        unseen: Reason why an issue might exist although none was found, for example that too few
            steps were measured. `None` if an issue would have been found.
        measured: Measurements as texts, keyed by name.
        modules: The modules that take longest.
        ranks: Lines about the ranks. Empty if the run has only one rank.
        figures: Numbers in seconds, bytes or operations, keyed by name. Names of numbers about the
            whole run begin with "run_".
        run: Duration of each part of the run in seconds, keyed by ledger category. `None` if there
            is no ledger.
        more: Commands that show more, keyed by their purpose.
        format: Version of the format of this value as JSON.
    """

    status: Status
    said: str
    findings: tuple[Finding, ...]
    because: str
    unseen: str | None = None
    measured: Mapping[str, str]
    modules: tuple[Module, ...]
    ranks: tuple[str, ...]
    figures: Mapping[str, float | None]
    run: Mapping[str, float] | None
    more: Mapping[str, str]
    format: int = FORMAT

    @property
    def cause(self) -> str | None:
        """The cause of the first issue, or `None` if there is no issue."""
        issue = first_issue(self.findings)
        if issue is None:
            return None
        return issue.cause


def explain(given: Profile | Ledger | str | PathLike[str]) -> Explanation:
    """Explain why a run is slow, how much each reason costs, and what to do next.

    Args:
        given: A profile, the ledger of a run, the file of a profile, or the folder of a run. From a
            folder, the profile of the last window and the ledger are read.

    Raises:
        ProfileError: There is no profile or ledger at this path, or it cannot be read.
    """
    if isinstance(given, Profile):
        return _explained(given, None)
    if isinstance(given, Ledger):
        return _explained(None, given)
    path = Path(given)
    if not path.is_dir():
        return _explained(load(path), None, path, path)
    window = last_window(path)
    try:
        ledger = load_run(path)
    except ProfileError:
        if window is None:
            raise
        ledger = None
    profile = None
    if window is not None:
        profile = load(window)
    return _explained(profile, ledger, path, window)


def last_window(folder: Path) -> Path | None:
    """Return the file of a run's last training profile.

    If no training step was profiled, return the last profile of another stage, or `None`.
    """

    def order_key(file: Path) -> tuple[bool, float]:
        return file.name.startswith("train"), file.stat().st_mtime

    return max(folder.rglob("*.profile.json"), key=order_key, default=None)


def windows_in(folder: Path) -> list[Profile]:
    """Load the profiles in a run's folder, in the order of their steps.

    Only profiles with the same stage as the last profile are returned.

    Raises:
        ProfileError: There is no profile, or a profile cannot be read.
    """
    last = profile_at(folder)
    of_stage = []
    for file in folder.rglob("*.profile.json"):
        profile = load(file)
        if profile.run.stage == last.run.stage:
            of_stage.append(profile)
    return sorted(of_stage, key=lambda profile: (profile.run.step or 0, profile.run.window or 0))


def profile_at(path: Path) -> Profile:
    """Load a profile from its file. If `path` is a run's folder, load the last window's profile."""
    if not path.is_dir():
        return load(path)
    window = last_window(path)
    if window is None:
        others = ""
        if any(path.rglob(f"*{ENDING}")):
            others = "; to read the ledger in this folder, use `lflops why` or `lflops ledger`"
        raise ProfileError(f"{path}: this folder has no profile (*.profile.json){others}")
    return load(window)


ChangeStatus = Literal["new", "still", "gone", "cannot tell"]


class IssueChange(Struct, frozen=True, kw_only=True):
    """An issue that at least one of two runs has.

    Attributes:
        status: "new" if only the second run has the issue, "gone" if only the first run has it, and
            "still" if both have it. "cannot tell" if only one run has it, and the other run has too
            few or too unsteady steps to show it.
        finding: The finding of the second run, or of the first run if the second does not have the
            issue.
        before: Cost of the issue in the first run, in seconds per step. `None` if the cost is
            unknown, or if the first run does not have the issue.
        after: Cost of the issue in the second run, in seconds per step. `None` if the cost is
            unknown, or if the second run does not have the issue.
    """

    status: ChangeStatus
    finding: Finding
    before: float | None
    after: float | None


def issue_changes(before: Analysis, after: Analysis) -> tuple[IssueChange, ...]:
    """Compare the issues of two runs; the issues of the second run come first."""
    issues_before = _issues(before)
    issues_after = _issues(after)
    changes = []
    for key, finding in issues_after.items():
        cost_before = None
        status: ChangeStatus = "cannot tell"
        if key in issues_before:
            cost_before = issues_before[key].seconds
            status = "still"
        elif _would_show(before, finding.cause):
            status = "new"
        change = IssueChange(
            status=status, finding=finding, before=cost_before, after=finding.seconds
        )
        changes.append(change)
    for key, finding in issues_before.items():
        if key not in issues_after:
            status = "cannot tell"
            if _would_show(after, finding.cause):
                status = "gone"
            change = IssueChange(status=status, finding=finding, before=finding.seconds, after=None)
            changes.append(change)
    return tuple(changes)


def _issues(run: Analysis) -> dict[tuple[str, str], Finding]:
    """Return the issues of a run, keyed by the rule's name and the module."""
    issues = {}
    for finding in report_of(run).verdict.findings:
        if finding.is_issue:
            issues[finding.cause, finding.module] = finding
    return issues


def _would_show(analysis: Analysis, cause: str) -> bool:
    """Return whether an issue would certainly have been found in a run if the run had it.

    This is true if enough steady steps were measured to find any issue. It is also true if the
    issue is that a phase takes long, but this phase is short enough in three quarters of the steps.
    """
    if unseen_because(analysis) is None:
        return True
    spread = analysis.step_times.spreads.get(cause)
    mean = analysis.step_times.mean
    share = issue_share(cause)
    if spread is None or mean is None or share is None:
        return False
    return spread.high < share * mean


_CHANGE_LABELS = {"new": "new issue", "still": "issue", "gone": "issue gone"}


def issue_lines(changes: Sequence[IssueChange]) -> Iterator[tuple[str, str]]:
    """Yield the label and the text for each change, to be printed in a terminal."""
    for change in changes:
        said = change.finding.sentence
        if change.status == "cannot tell":
            said += (
                " The other run is too short, or its step times vary too much, to tell whether it "
                "has this issue."
            )
        elif change.status == "still" and change.before is not None:
            said += f" In the earlier profile, this issue cost {units.duration(change.before)}."
        yield _CHANGE_LABELS.get(change.status, change.status), said


def _explained(
    profile: Profile | None,
    ledger: Ledger | None,
    path: Path | None = None,
    window: Path | None = None,
) -> Explanation:
    analysis = None
    summary = None
    verdict = _NO_WINDOW
    unseen: str | None = "no window was profiled"
    if profile is not None:
        analysis = analyze(profile)
        summary = window_summary(analysis)
        verdict = report_of(analysis).verdict
        unseen = unseen_because(analysis)
    findings = findings_of(summary, ledger)
    was_preempted = ledger is not None and preempted_share(ledger) >= PREEMPTED_SHARE
    if unseen is None and was_preempted:
        unseen = PREEMPTED
    because = verdict.confidence
    # The confidence ends with "N notes below", but there are no notes below an explanation.
    if verdict.caveats:
        because = f"{because.removesuffix('below')}in the output of lflops show"
    if was_preempted:
        because += f"; {PREEMPTED}"
    because = joined(because, unlike_window(summary, ledger), separator="; ")
    said = [_ran_out_of_memory(ledger, path), _said(verdict, summary, ledger)]
    if ledger is not None:
        if profile is None:
            said.append(_longest_phases(ledger))
        said.append(_other_runs(ledger))
    found = Explanation(
        status=judge("", findings, unseen, "").status,
        said=joined(*said, separator=" "),
        findings=tuple(findings[:MOST_FINDINGS]),
        because=because,
        unseen=unseen,
        measured={},
        modules=(),
        ranks=(),
        figures=dict(_figures(analysis, ledger)),
        run=_seconds_by_group(ledger),
        more=dict(_more(path, window, ledger)),
    )
    if analysis is None:
        return found
    return replace(
        found,
        measured=dict(_measured(analysis)),
        modules=tuple(_modules(analysis)),
        ranks=tuple(_rank_lines(analysis)),
    )


def _ran_out_of_memory(ledger: Ledger | None, folder: Path | None) -> str:
    """Return a sentence saying that the run ran out of memory, and which file describes this.

    Return the empty string if the run did not end for lack of memory.
    """
    if ledger is None or ledger.starts[-1].ended != "OutOfMemoryError":
        return ""
    see = ""
    if folder is not None:
        reports = folder.rglob("oom-*-rank*.txt")
        newest = max(reports, key=lambda file: file.stat().st_mtime, default=None)
        if newest is not None:
            see = f", see {newest}"
    return f"The run ran out of memory after {counted(ledger.starts[-1].last_step, 'step')}{see}."


def _said(verdict: Verdict, window: WindowSummary | None, ledger: Ledger | None) -> str:
    """Describe the time of a step, and the share of the run's time that was training."""
    if ledger is None:
        return verdict.said
    screen = first_screen(window, ledger)
    by_name = {fact.name: fact.text for fact in screen.figures}
    if screen.steps is None:
        return f"{verdict.said} {screen.trained}"
    said = f"A step takes {by_name['step']}"
    if "MFU" in by_name:
        said += f", at {by_name['MFU']} MFU"
    if window is None:
        said = f"{verdict.said} {said}"
    return f"{said}. {screen.trained}"


def _longest_phases(ledger: Ledger) -> str:
    """Describe which phases of the step are the longest.

    Return the empty string if no step was timed, or if the longest phase is neither forward nor
    backward, because there are findings about all other phases.
    """
    times = times_of(None, ledger)
    if times is None:
        return ""
    phases = sorted(phase_parts(times.phases), key=lambda part: -part.seconds)
    if not phases or phases[0].name not in {"forward", "backward"}:
        return ""
    longest = []
    for part in phases[:MOST_PHASES]:
        if part.share >= LEAST_SHARE_OF_PHASE:
            share = units.percent(part.share, digits=0)
            longest.append(f"{part.label} ({share}, {units.duration(part.seconds)})")
    return (
        f"Most of the step is spent in {joined(*longest)}. A profiled window shows which modules "
        "take this time."
    )


def _other_runs(ledger: Ledger) -> str:
    others = other_runs(ledger)
    return f"{others.capitalize()}." if others else ""


def _modules(analysis: Analysis) -> Iterator[Module]:
    for modules in analysis.busiest[:MOST_MODULES]:
        yield Module(
            name=_short(modules.pattern),
            kind=_short(modules.kind),
            seconds=modules.seconds,
            macs=modules.macs,
        )


def _rank_lines(analysis: Analysis) -> Iterator[str]:
    for label, text in list(ranks(analysis))[:MOST_LINES]:
        yield _short(joined(label, text, separator=": "))


def _measured(analysis: Analysis) -> Iterator[tuple[str, str]]:
    report = report_of(analysis)
    for fact in (*report.subject, *report.speed, *report.model):
        yield fact.name, _short(fact.said)
    unsupported = dict.fromkeys(row.operator for row in analysis.unsupported)
    if unsupported:
        yield "not counted", _short(", ".join(unsupported))


def _figures(
    analysis: Analysis | None, ledger: Ledger | None
) -> Iterator[tuple[str, float | None]]:
    if analysis is not None:
        profile = analysis.profile
        times = analysis.step_times
        yield "step_seconds", times.mean
        yield "steps", times.steps
        yield "step_spread", times.spread
        yield "mfu", analysis.utilization.mfu
        yield "samples_per_second", times.samples_per_second
        yield "tokens_per_second", times.tokens_per_second
        yield "macs", analysis.total_macs
        yield "peak_bytes", analysis.peak_bytes
        yield "parameters", profile.modules[""].parameters
        yield "ranks", profile.run.world_size
        yield "threads", profile.run.threads
        lost = None
        if profile.cpu_lost_shares:
            lost = lost_share(profile)
        yield "lost_cpu_share", lost
    if ledger is not None:
        per_step = ratio(training_seconds(ledger), ledger.steps)
        yield "run_seconds", ledger.total
        yield "run_steps", ledger.steps
        yield "run_starts", len(ledger.starts)
        yield "run_seconds_per_step", per_step


def _seconds_by_group(ledger: Ledger | None) -> dict[str, float] | None:
    if ledger is None:
        return None
    return {name: round(seconds, 3) for name, seconds in ledger.by_group().items()}


def _more(
    path: Path | None, window: Path | None, ledger: Ledger | None
) -> Iterator[tuple[str, str]]:
    """Yield the commands that show more details of the run: subject and command line."""
    if window is not None:
        file = shlex.quote(os.fspath(window))
        yield "the modules", f"lflops show {file}"
        yield "the operators", f"lflops show {file} --operators"
        yield "the memory", f"lflops show {file} --memory"
        yield "the whole profile, as a page", f"lflops html {file}"
    if path is None:
        return
    where = shlex.quote(os.fspath(path))
    if path.is_dir() and any(path.rglob("*.tfevents.*")):
        yield "all windows, in TensorBoard", f"tensorboard --logdir {where}"
    if ledger is not None:
        yield "every second of the run", f"lflops ledger {where}"
        if ledger.starts[-1].ended == "running":
            yield "another window of the run", f"lflops window {where}"
    yield "whether a change made the run faster", f"lflops diff {where} AFTER"


def _short(text: str) -> str:
    return shortened(plain(text), LONGEST_TEXT)


def lines_of(found: Explanation) -> Iterator[tuple[str, str]]:
    """Yield the label and text of each line of an explanation, for a terminal."""
    findings = []
    for finding in found.findings:
        sentence = finding.sentence + _track_record(finding)
        findings.append(replace(finding, sentence=sentence))
    return verdict_lines(judge(found.said, findings, found.unseen, found.because))


def _track_record(finding: Finding) -> str:
    """Format in brackets how often such findings were right in runs with known issues."""
    if not finding.track_record:
        return ""
    return f" ({finding.track_record})"


def markdown(found: Explanation) -> Iterator[str]:
    """Format the explanation as Markdown, for example to paste it into an issue or a chat."""
    yield f"**{found.said}** ({found.status})"
    yield ""
    for number, finding in enumerate(found.findings, 1):
        advice = f" {finding.fix}." if finding.fix else ""
        yield f"{number}. {finding.sentence}{_track_record(finding)}{advice}"
    yield ""
    yield f"Confidence: {found.because}"
    yield ""
    yield "| measured | |"
    yield "|---|---|"
    for name, text in found.measured.items():
        yield f"| {name} | {text.replace('|', '∣')} |"
    if found.modules:
        yield from _module_rows(found.modules)
    if found.ranks:
        yield ""
        for line in found.ranks:
            yield f"- {line}"
    if found.more:
        yield ""
        for purpose, command in found.more.items():
            yield f"- {purpose}: `{command}`"


def _module_rows(modules: Sequence[Module]) -> Iterator[str]:
    yield ""
    yield "| module | class | ms per step | MACs |"
    yield "|---|---|--:|--:|"
    for module in modules:
        name = module.name or "the root module"
        yield f"| `{name}` | {module.kind} | {module.seconds * 1e3:.3g} | {module.macs:,} |"
