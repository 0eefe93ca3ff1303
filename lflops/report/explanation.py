"""What a run or a profile is slow for, as one bounded value for people, programs and agents.

`lflops.explain` and `lflops why`.

The verdict is the first screen's. What only the run's ledger sees comes to it: time between steps,
and steps that are slow now and then.
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
from lflops.errors import ProfileError
from lflops.findings.causes import allowance, row_of, taking_batches
from lflops.ledger.account import CATEGORIES, CAUSES, Ledger, memory_growth
from lflops.ledger.run import load_run
from lflops.profile.json_file import load
from lflops.profile.profile import Profile
from lflops.profile.series import summed
from lflops.report.ranks import ranks
from lflops.report.report import report_of
from lflops.report.text import counted, plain, shortened
from lflops.report.verdict import LARGE, Finding, Verdict, judge, unseen_because, verdict_lines

# of the explanation as JSON: a field is added, never changed
FORMAT = 1
# of the time in which the run trained: as much in its second half is compiled for step after step,
# or others had the cores
WORTH = 0.05
LONGER = (
    # times a usual step: if steps take more over the whole run, the first sentence says so
    1.15
)
# steps of a window that are compiled for, besides the first ones
FEWEST_COMPILED = 3
LONGEST, MOST_LINES, MOST_FINDINGS, MOST_MODULES = (
    240,
    6,
    6,
    5,
    # letters of a text, and entries of a list: all of it stays small
)

_KEPT_OFF = "this machine was busy in some of the run, or the process was stopped"
_NO_WINDOW = Verdict(
    said="No window was closed. With LFLOPS=wait=5, lflops run opens one.",
    trust="the ledger of the run alone",
)
_NO_TRAINING = {"start_up", "warm_up", "lflops", "after_run", "down"}
_BY_OTHERS = {
    "other_rank",
    "gc",
    # causes that are no fault of the training's where other programs use the machine
}
_ONCE = {
    "gc": "gc",
    "unknown": "unknown",
    "other": "unknown",
    # causes that any run may have once, by the machine, and those of slow steps
}
_UNSEEN = {
    "training/other": "other",
    "training/wait": "communication",
    # what a ledger alone knows too little of to call it a fault
}
_BETWEEN_STEPS = {
    "validation",
    "checkpoint",
    "logging",
    # on a busy machine these take longer, as steps do
}
_SAME = {
    "other_rank": {"rank", "communication"},
    "logging": {"other"},
    # causes of the ledger, and the findings of a window that are it
}


class Module(Struct, frozen=True, kw_only=True):
    """A module among those that take longest, repeated ones together as `layers.*`."""

    # empty is the model itself
    name: str
    kind: str
    # of a step, in which the module itself runs
    seconds: float
    macs: int


class Explanation(Struct, frozen=True, kw_only=True):
    """What a run is slow for, with its evidence. `None` is unknown."""

    # Whether anything was `found`. Of `nothing found` the steps were good enough to see it; else it
    # is `cannot tell`.
    status: Literal["found", "nothing found", "cannot tell"]
    # how fast and how good a step is
    said: str
    findings: tuple[
        Finding, ...
        # faults, the most costly first, and behind them where else the time goes
    ]
    # what it rests on, and why no one can tell
    because: str
    unseen: str | None = (
        # why a fault would not be seen; `None` if it would be. Empty: there is no window to see it
        # in
        None
    )
    # what was measured, and on what: texts by their names
    measured: Mapping[str, str]
    # those that take longest
    modules: tuple[Module, ...]
    # the lines about the ranks of a run of several
    ranks: tuple[str, ...]
    figures: Mapping[
        str, float | None
        # numbers by their names, in seconds, bytes and operations; those of all of the run begin with
        # run
    ]
    run: (
        Mapping[str, float] | None
        # seconds of the whole run by category, where its ledger is there
    )
    # commands, by what they are for
    more: Mapping[str, str]
    # the version of this value
    format: int = FORMAT

    @property
    def cause(self) -> str | None:
        """The kind of the most costly fault; `None` without one."""
        return self.findings[0].cause if self.status == "found" else None


def explain(given: Profile | Ledger | str | PathLike[str]) -> Explanation:
    """Say what a run is slow for, what that costs, and what to do next.

    Args:
        given: A profile, the ledger of a run, the file of a profile, or the folder of a run: its
            last window and its ledger.

    Raises:
        ProfileError: There is nothing to read there, or it cannot be read.
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
    return _explained(None if window is None else load(window), ledger, path, window)


def last_window(folder: Path) -> Path | None:
    """The file of a run's last profile, of its training if it has one."""
    windows = folder.rglob("*.profile.json")
    return max(
        windows,
        key=lambda file: (file.name.startswith("train"), file.stat().st_mtime),
        default=None,
    )


def profile_at(path: Path) -> Profile:
    """The profile of a file, or of the last window in the folder of a run."""
    window = last_window(path) if path.is_dir() else path
    if window is None:
        raise ProfileError(f"{path}: there is no profile in this folder")
    return load(window)


class FaultChange(Struct, frozen=True, kw_only=True):
    """A fault that one of two runs has, or that both have."""

    # Of the second run: it has a `new` one, `still` has it, or has it no longer: `gone`. `cannot
    # tell`: one of the runs would not show it.
    status: Literal["new", "still", "gone", "cannot tell"]
    # of the second run; of the first one where only that has it
    finding: Finding
    before: (
        float | None
        # what it costs a step of each run, in seconds; `None` is unknown, or no such fault
    )
    after: float | None


def fault_changes(before: Analysis, after: Analysis) -> tuple[FaultChange, ...]:
    """The faults of two runs, as each run's verdict has them; those of the second run first."""
    faults = [
        {
            (each.cause, each.module): each
            for each in report_of(run).verdict.findings
            if each.is_fault
        }
        for run in (before, after)
    ]
    changes = []
    for key in dict.fromkeys([*faults[1], *faults[0]]):
        first, second = (found.get(key) for found in faults)
        unseen = any(
            each is None and not _would_show(run, key[0])
            for run, each in zip((before, after), (first, second), strict=True)
        )
        status: Literal["new", "still", "gone"] = (
            "still" if first and second else "new" if second else "gone"
        )
        costs = [None if each is None else each.seconds for each in (first, second)]
        finding = second or faults[0][key]
        changes.append(
            FaultChange(
                status="cannot tell" if unseen else status,
                finding=finding,
                before=costs[0],
                after=costs[1],
            )
        )
    return tuple(changes)


def _would_show(analysis: Analysis, cause: str) -> bool:
    """Whether a run shows that it has no such fault.

    Its steps are good enough for any, or the phase is short in nearly all of them.
    """
    spread, mean, least = (
        analysis.step_times.spreads.get(cause),
        analysis.step_times.mean,
        row_of(cause).fault_from,
    )
    is_short = (
        spread is not None and mean is not None and least is not None and spread.high < least * mean
    )
    return unseen_because(analysis) is None or is_short


def fault_lines(changes: Sequence[FaultChange]) -> Iterator[tuple[str, str]]:
    """Label and text of each change for a terminal."""
    for each in changes:
        said = each.finding.said
        if each.status == "cannot tell":
            said += " The other run is too short or too unsteady to show it."
        elif each.status == "still" and each.before is not None:
            said += f" Before it cost {units.duration(each.before)}."
        yield (
            {"new": "new fault", "still": "fault", "gone": "no longer"}.get(
                each.status, each.status
            ),
            said,
        )


def _explained(
    profile: Profile | None,
    ledger: Ledger | None,
    path: Path | None = None,
    window: Path | None = None,
) -> Explanation:
    analysis = None if profile is None else analyze(profile)
    verdict = _NO_WINDOW if analysis is None else report_of(analysis).verdict
    findings = list(verdict.findings)
    if ledger is not None:
        findings += _of_run(ledger, findings, profile)
        explained = max(
            (each.seconds or 0.0 for each in findings if each.cause == "gc"), default=0.0
        )
        findings = [
            each
            for each in findings
            if each.cause != "other" or (each.seconds or 0.0) > 2 * explained
        ]
        faults = {each.cause for each in findings if each.is_fault}
        findings = [each for each in findings if each.is_fault or each.cause not in faults]
    findings.sort(
        key=lambda each: (
            not each.is_fault,
            each.cause == "busiest",
            each.seconds is not None,
            -(each.seconds or 0.0),
        )
    )
    unseen, kept_off = (
        "" if analysis is None else unseen_because(analysis),
        ledger is not None and _kept_off(ledger) >= WORTH,
    )
    if unseen is None and kept_off:
        unseen = _KEPT_OFF
    because = (
        f"{verdict.trust.removesuffix('below')}in lflops show" if verdict.doubts else verdict.trust
    )
    modules, of_ranks = (
        ((), ()) if analysis is None else (analysis.busiest[:MOST_MODULES], ranks(analysis))
    )
    return Explanation(
        status=judge("", findings, unseen, "").status,
        said=_ran_out_of_memory(ledger, path) + verdict.said + _over_the_run(analysis, ledger),
        findings=tuple(findings[:MOST_FINDINGS]),
        because=f"{because}; {_KEPT_OFF}" if kept_off else because,
        unseen=unseen,
        measured={} if analysis is None else dict(_measured(analysis)),
        modules=tuple(
            Module(
                name=_short(each.pattern),
                kind=_short(each.kind),
                seconds=each.seconds,
                macs=each.macs,
            )
            for each in modules
        ),
        ranks=tuple(_short(f"{label}: {text}" if label else text) for label, text in of_ranks)[
            :MOST_LINES
        ],
        figures=dict(_figures(analysis, ledger)),
        run=None
        if ledger is None
        else {name: round(seconds, 3) for name, seconds in ledger.by_group().items()},
        more=dict(_more(path, window, ledger)),
    )


def _ran_out_of_memory(ledger: Ledger | None, folder: Path | None) -> str:
    if ledger is None or ledger.starts[-1].ended != "OutOfMemoryError":
        return ""
    report = (
        None
        if folder is None
        else max(
            folder.rglob("oom-*-rank*.txt"), key=lambda file: file.stat().st_mtime, default=None
        )
    )
    see = "" if report is None else f", see {report}"
    return f"The run ran out of memory after {counted(ledger.starts[-1].last_step, 'step')}{see}. "


def _over_the_run(analysis: Analysis | None, ledger: Ledger | None) -> str:
    """Say what a step takes with all that is between steps, where that is much more."""
    if analysis is None or ledger is None or not ledger.steps or analysis.step_times.mean is None:
        return ""
    each = _trained(ledger) / ledger.steps
    return (
        f" Over the whole run it is {units.duration(each)} for each step."
        if each > LONGER * analysis.step_times.mean
        else ""
    )


def _of_run(ledger: Ledger, found: Sequence[Finding], profile: Profile | None) -> Iterator[Finding]:
    """Find what takes time between steps or in a few of them, and memory that grows."""
    trained = _trained(ledger)
    seen = {each.cause for each in found if each.is_fault}
    allowed = allowance(max(_kept_off(ledger), 0.0 if profile is None else lost_share(profile)))
    by_others = _BY_OTHERS | (
        {"data"} if profile is not None and profile.run.workers else set()
        # workers have no core there
    )
    marks = (
        ()
        if profile is None
        else [step.marks for step in profile.steps if "warmup" not in step.marks]
    )
    late = [each for each in ledger.spans if each.steps > ledger.steps / 2][
        1:
        # at first, every compiled model takes long
    ]
    recompiles = (
        sum("recompiled" in each for each in marks) >= FEWEST_COMPILED
        # step after step is compiled for
    )
    recompiles |= (
        sum(each.spent.get("compilation", 0.0) for each in late)
        >= WORTH * sum(each.seconds for each in late)
        > 0
    )
    for cause, seconds in summed(
        (_cause_of(name, ledger), seconds) for name, seconds in ledger.seconds.items()
    ).items():
        row = row_of(cause)
        if (
            row.fault_from is None
            or seconds < row.fault_from * trained
            or _SAME.get(cause, {cause}) & seen
        ):
            continue
        much = allowed**0.5 if cause in _BETWEEN_STEPS else allowed
        taken = (
            taking_batches(profile) * ledger.steps
            if cause == "data" and profile is not None
            else 0.0
        )
        if cause in _ONCE:
            slow = (one.cost for one in ledger.slow_steps if one.cause == _ONCE[cause])
            spans = [
                sum(took for name, took in one.spent.items() if _cause_of(name, ledger) == cause)
                for one in ledger.spans
            ]
            taken = max([*slow, *(spans if len(spans) > 1 else ())], default=0.0)
        is_fault = seconds - taken >= row.fault_from * trained * much and (
            cause != "compilation" or recompiles
        )
        is_fault = (
            is_fault and cause != "not_scheduled" and not (cause in by_others and allowed > 1)
        )
        yield _taking(cause, seconds, ledger, is_fault=is_fault)
    for category, cause in _UNSEEN.items() if profile is None else ():
        if (seconds := ledger.seconds.get(category, 0.0)) >= LARGE * trained > 0:
            yield _taking(cause, seconds, ledger, is_fault=False)
    if (growth := memory_growth(ledger)) is not None:
        said = f"Memory of the process grows by {units.size(growth)} an hour."
        yield Finding(
            cause="memory", said=said, of="run", next=row_of("memory").next, is_fault=True
        )


def _taking(cause: str, seconds: float, ledger: Ledger, *, is_fault: bool) -> Finding:
    """Say that a cause takes so much of a run."""
    row, each, share = row_of(cause), seconds / max(ledger.steps, 1), seconds / _trained(ledger)
    what = (
        row.what
        or CATEGORIES.get(cause)
        or CATEGORIES.get(f"{cause}_save")
        or f"slow steps: {CAUSES.get(cause, cause)}"
    )
    said = f"{units.percent(share)} of the run, without its start, is {what}: {units.duration(each)} for each step."
    right = row.right if is_fault else None
    return Finding(
        cause=cause,
        said=said,
        seconds=each,
        share=share,
        of="run",
        next=row.next,
        is_fault=is_fault,
        right=right,
    )


def _trained(ledger: Ledger) -> float:
    """Seconds from the first usual step on, without what lflops itself took."""
    return sum(seconds for group, seconds in ledger.by_group().items() if group not in _NO_TRAINING)


def _kept_off(ledger: Ledger) -> float:
    """The share of the run's training for which steps waited for a core, but for the one that waited longest: it may have been stopped."""
    once = max(
        (each.cost for each in ledger.slow_steps if each.cause == "not_scheduled"), default=0.0
    )
    return max(ledger.seconds.get("slow/not_scheduled", 0.0) - once, 0.0) / (
        _trained(ledger) or 1.0
    )


def _cause_of(category: str, ledger: Ledger) -> str:
    """The cause that a category of the ledger is.

    Empty for training as it should be, and for what is before or after it.
    """
    group, _, part = category.partition("/")
    if group == "slow":
        costs = summed(
            (each.phase, each.cost) for each in ledger.slow_steps if each.cause == part == "unknown"
        )
        return (
            "data"
            if part == "loader"
            else "other"
            if costs and max(costs, key=costs.__getitem__) == "other"
            else part
        )
    return (
        "data"
        if category == "training/data"
        else ""
        if group in _NO_TRAINING | {"training"}
        else group.removesuffix("_save")
    )


def _measured(analysis: Analysis) -> Iterator[tuple[str, str]]:
    report = report_of(analysis)
    for fact in (*report.subject, *report.speed, *report.model):
        yield fact.name, _short(fact.said)
    if unsupported := [row.operator for row in analysis.unsupported]:
        yield "not counted", _short(", ".join(dict.fromkeys(unsupported)))


def _figures(
    analysis: Analysis | None, ledger: Ledger | None
) -> Iterator[tuple[str, float | None]]:
    if analysis is not None:
        profile, times = analysis.profile, analysis.step_times
        yield from (
            ("step_seconds", times.mean),
            ("steps", times.steps),
            ("step_spread", times.spread),
            ("mfu", analysis.utilization.mfu),
        )
        yield from (
            ("samples_per_second", times.samples_per_second),
            ("tokens_per_second", times.tokens_per_second),
        )
        yield from (
            ("macs", sum(each.macs for each in analysis.totals.values())),
            ("peak_bytes", analysis.peak_bytes),
        )
        yield from (
            ("parameters", profile.modules[""].parameters),
            ("ranks", profile.run.world_size),
            ("threads", profile.run.threads),
        )
        yield ("lost_cpu_share", lost_share(profile) if profile.cpu_lost_shares else None)
    if ledger is not None:
        yield from (
            ("run_seconds", ledger.total),
            ("run_steps", ledger.steps),
            ("run_starts", len(ledger.starts)),
        )
        yield ("run_seconds_per_step", _trained(ledger) / ledger.steps if ledger.steps else None)


def _more(
    path: Path | None, window: Path | None, ledger: Ledger | None
) -> Iterator[tuple[str, str]]:
    if window is not None:
        file = shlex.quote(os.fspath(window))
        yield from (
            ("the modules", f"lflops show {file}"),
            ("the operators", f"lflops show {file} --operators"),
        )
        yield from (
            ("the memory", f"lflops show {file} --memory"),
            ("all of it, as a page", f"lflops html {file}"),
        )
    if path is None:
        return
    where = shlex.quote(os.fspath(path))
    if path.is_dir() and any(path.rglob("*.tfevents.*")):
        yield "all windows, in TensorBoard", f"tensorboard --logdir {where}"
    if ledger is not None:
        yield "every second of the run", f"lflops ledger {where}"
        if ledger.starts[-1].ended == "running":
            yield "a window of the running training", f"lflops window {where}"
    yield "whether a change made it faster", f"lflops diff {where} AFTER"


def _short(text: str) -> str:
    return shortened(plain(text), LONGEST)


def lines_of(found: Explanation) -> Iterator[tuple[str, str]]:
    """Label and text of each line for a terminal."""
    findings = [replace(each, said=each.said + _sure(each)) for each in found.findings]
    return verdict_lines(judge(found.said, findings, found.unseen, found.because))


def _sure(finding: Finding) -> str:
    return (
        ""
        if finding.right is None
        else f" (Right in {finding.right[0]} of {finding.right[1]} trainings with known faults.)"
    )


def markdown(found: Explanation) -> Iterator[str]:
    """The explanation as a text to paste."""
    yield from (f"**{found.said}** ({found.status})", "")
    for number, each in enumerate(found.findings, 1):
        yield f"{number}. {each.said}{_sure(each)}{f' {each.next}.' if each.next else ''}"
    yield from ("", f"Trust: {found.because}", "", "| measured | |", "|---|---|")
    yield from (f"| {name} | {text.replace('|', '∣')} |" for name, text in found.measured.items())
    if found.modules:
        yield from ("", "| module | kind | ms a step | MACs |", "|---|---|--:|--:|")
        for row in found.modules:
            yield f"| `{row.name or 'the model itself'}` | {row.kind} | {row.seconds * 1e3:.3g} | {row.macs:,} |"
    yield from (("", *(f"- {line}" for line in found.ranks)) if found.ranks else ())
    yield from (
        ("", *(f"- {purpose}: `{command}`" for purpose, command in found.more.items()))
        if found.more
        else ()
    )
