"""What a window writes to the log.

The verdict, the step, the modules with the most time, memory, ranks; in about 40 lines at most.
"""

from collections.abc import Iterable, Iterator
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
from lflops.report.report import Report, report_of, speed_lines, unsupported
from lflops.report.text import counted, shortened_name
from lflops.report.verdict import verdict_lines

_MARGIN = 16
_MODULES = 5
_NAME, _LEAST_NAME = 60, 30
_MOST = {
    "note": 3,
    "not counted": 3,
    # of the remarks with these labels; the first few lines of each, and how many more there are
}
_SUBJECT = frozenset({"profiled", "device", "inputs"})
_MODEL = frozenset({"parameters", "peak live memory"})
_LEFT_OUT = frozenset(
    {"achieved", "CPU time", "observer"}
    # of the facts about speed, those that only lflops show has
)
_LINES_OF_RANKS = 4
# sentences about what changed since the window before
_CHANGES = 2

_Lines = Iterable[tuple[str, str]]


def log_text(analysis: Analysis, before: Profile | None = None) -> str:
    """The text of a window, compared with the one before it.

    Labels, and behind each of them a line or more.
    """
    report = report_of(analysis)
    parts: list[_Lines] = [
        verdict_lines(report.verdict),
        (("since the last", line) for line in headline(diff(before, analysis.profile))[:_CHANGES])
        if before is not None
        else (),
        ((fact.label, fact.text) for fact in report.subject if fact.name in _SUBJECT),
        speed_lines([fact for fact in report.speed if fact.name not in _LEFT_OUT]),
        _modules(analysis),
        ((fact.label, fact.said) for fact in report.model if fact.name in _MODEL),
        _remarks(analysis, report),
    ]
    lines, above = [], ""
    for label, text in (line for part in parts for line in part):
        lines.append(f"{'' if label == above else label:<{_MARGIN}}  {plain(text)}".rstrip())
        above = label or above
    return "\n".join(lines)


def _modules(analysis: Analysis) -> Iterator[tuple[str, str]]:
    times, rows = analysis.step_times, analysis.busiest
    if not rows:
        return
    listed, others = rows[:_MODULES], rows[_MODULES:]
    named = [(_named(each), each) for each in listed]
    width = max(len(name) for name, _ in named)
    for name, each in named:
        rate = (
            f"  {units.rate(flops_per_second(each.macs, each.seconds), 'FLOP/s')}"
            if each.macs
            else ""
        )
        share = units.percent(times.share(each.seconds))
        yield "most time", f"{name:<{width}}  {units.duration(each.seconds):>8}  {share:>6}{rate}"
    if others:
        left = sum(each.seconds for each in others)
        name = counted(sum(each.modules for each in others), "other module")
        yield (
            "most time",
            f"{name:<{width}}  {units.duration(left):>8}  {units.percent(times.share(left)):>6}",
        )


def _named(each: BusyModules) -> str:
    """The name, its number and its class. What is cut off is the beginning of a long name."""
    if not each.name:
        return root_itself(each.kind)
    after = f"{f' ×{each.modules}' if each.modules > 1 else ''}  {plain(each.kind)}"
    return f"{shortened_name(plain(each.name), max(_NAME - len(after), _LEAST_NAME))}{after}"


def _remarks(analysis: Analysis, report: Report) -> Iterator[tuple[str, str]]:
    of_ranks = 0
    for label, facts in groupby(report.remarks, key=lambda fact: fact.label):
        lines = [fact.text for fact in facts]
        if label == "not counted":
            lines = [line for line, is_doubt in unsupported(analysis, _MOST[label] - 1) if is_doubt]
        elif label == "note":
            lines = _few(lines, _MOST[label])
        elif label == "allocator's peak":
            continue
        else:
            lines = lines[: max(_LINES_OF_RANKS - of_ranks, 0)]
            of_ranks += len(lines)
        yield from ((label, line) for line in lines)


def _few(lines: list[str], most: int) -> list[str]:
    kept = lines if len(lines) <= most else lines[: most - 1]
    left = len(lines) - len(kept)
    return [*kept, f"{left} more, see lflops show"] if left else kept
