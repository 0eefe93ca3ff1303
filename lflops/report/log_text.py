"""Format the text that is logged at the end of each window (a few profiled steps).

The text describes the verdict, the step, the modules with the most time, memory and ranks, in at
most about 40 lines.
"""

from collections.abc import Iterator
from itertools import groupby

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.compare.diff import diff
from lflops.analysis.tree import BusyModules
from lflops.analysis.utilization import flops_per_second
from lflops.findings.rule import root_itself
from lflops.profile.module_names import plain
from lflops.profile.profile import Profile
from lflops.report.diff import headline
from lflops.report.summary_facts import Report, report_of, speed_lines, unsupported_lines
from lflops.report.text import counted, labelled, shortened_name, times_mark
from lflops.report.verdict import verdict_lines

_MARGIN = 16
"""Minimum width of the column of labels, in characters."""

_MODULES = 5
"""Maximum number of modules that get a line each. All other modules share one line."""

_NAME = 60
_LEAST_NAME = 30

_REMARKS = 3
"""Maximum number of lines with notes, and also of lines with unsupported operators."""

_RANK_LINES = 4

_CHANGES = 2
"""Maximum number of sentences about the changes since the previous window."""

_SUBJECT = frozenset({"profiled", "device", "inputs"})
_MODEL = frozenset({"parameters", "peak live memory"})

# Names of facts about speed that the log leaves out. `lflops show` prints them.
_LEFT_OUT = frozenset({"achieved", "CPU time", "observer"})


def log_text(analysis: Analysis, before: Profile | None = None) -> str:
    """Format a profile for the log, with the changes since an earlier profile of the run."""
    lines = [(label, plain(text)) for label, text in _lines(analysis, before)]
    return labelled(lines, least_width=_MARGIN)


def _lines(analysis: Analysis, before: Profile | None) -> Iterator[tuple[str, str]]:
    """Yield the label and text of each line.

    A line with an empty label continues the previous line.
    """
    report = report_of(analysis)
    yield from verdict_lines(report.verdict)
    if before is not None:
        for sentence in headline(diff(before, analysis.profile))[:_CHANGES]:
            yield "vs last window", sentence
    for fact in report.subject:
        if fact.name in _SUBJECT:
            yield fact.label, fact.text
    yield from speed_lines([fact for fact in report.speed if fact.name not in _LEFT_OUT])
    yield from _modules(analysis)
    for fact in report.model:
        if fact.name in _MODEL:
            yield fact.label, fact.said
    yield from _remarks(analysis, report)


def _modules(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Yield a line for each of the modules that take longest, and one line for all others."""
    modules = analysis.busiest
    if not modules:
        return
    listed = modules[:_MODULES]
    names = [_named(each, analysis.profile) for each in listed]
    width = max(map(len, names))
    for name, module in zip(names, listed, strict=True):
        line = f"{name:<{width}}  {_time(analysis, module.seconds)}"
        if module.macs:
            rate = flops_per_second(module.macs, module.seconds)
            line += f"  {units.rate(rate, 'FLOP/s')}"
        yield "most time", line
    others = modules[_MODULES:]
    if others:
        name = counted(sum(module.modules for module in others), "other module")
        seconds = sum(module.seconds for module in others)
        yield "most time", f"{name:<{width}}  {_time(analysis, seconds)}"


def _time(analysis: Analysis, seconds: float) -> str:
    share = units.percent(analysis.step_times.share(seconds))
    return f"{units.duration(seconds):>8}  {share:>6}"


def _named(modules: BusyModules, profile: Profile) -> str:
    """Format the name of one or several identical modules, with their number and class.

    A long name is shortened at its start.
    """
    if not modules.name:
        return root_itself(profile)
    after = f"{times_mark(modules.modules)}  {plain(modules.kind)}"
    if modules.is_compiled:
        after += ", compiled"
    room = max(_NAME - len(after), _LEAST_NAME)
    return f"{shortened_name(plain(modules.name), room)}{after}"


def _remarks(analysis: Analysis, report: Report) -> Iterator[tuple[str, str]]:
    """Yield the notes, unsupported operators and lines about ranks, each with its label.

    Only the first few notes, operators and lines about ranks are included. If notes or operators
    are left out, their last line says how many.
    """
    room = _RANK_LINES
    for label, facts in groupby(report.remarks, key=lambda fact: fact.label):
        lines = [fact.text for fact in facts]
        if label == "not counted":
            lines = list(unsupported_lines(analysis.unsupported, _REMARKS - 1))
        elif label == "note":
            lines = _first(lines)
        elif label == "allocator's peak":
            continue
        else:
            lines = lines[:room]
            room -= len(lines)
        for line in lines:
            yield label, line


def _first(lines: list[str]) -> list[str]:
    if len(lines) <= _REMARKS:
        return lines
    kept = lines[: _REMARKS - 1]
    return [*kept, f"{len(lines) - len(kept)} more notes, see lflops show"]
