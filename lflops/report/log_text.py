"""What a window writes to the log: the step, MFU, the modules with the most time, what to do first, in about 40 lines at most."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.report.lines.facts import facts, uncounted
from lflops.report.lines.notes import sentence
from lflops.report.lines.ranks import ranks
from lflops.report.lines.text import counted, plain, shortened
from lflops.report.lines.times import Line, times
from lflops.report.lines.verdict import first_steps

__all__ = ["log_text"]

_MARGIN = 16
_MODULES = 5
_NAME = 44
_NOTES, _UNCOUNTED = 3, 3
_FACTS = frozenset({"profiled", "device", "inputs", "parameters"})
_LEFT_OUT = frozenset({"achieved", "CPU time", "observer"})
"""Of the lines about time, those that only lflops show has."""
_LINES_OF_RANKS = 6

_Lines = Iterator[tuple[str, str]]


def log_text(analysis: Analysis) -> str:
    """The text of a window: labels, and behind each of them a line or more."""
    parts = [_facts(analysis), _times(analysis), _modules(analysis), _advice(analysis), _remarks(analysis)]
    blocks = [[f"{label:<{_MARGIN}}  {plain(value)}".rstrip() for label, value in part] for part in parts]
    return "\n".join(chain.from_iterable(blocks))


def _facts(analysis: Analysis) -> _Lines:
    return ((label, value) for label, value in facts(analysis.profile) if label in _FACTS)


def _times(analysis: Analysis) -> _Lines:
    """The step and its phases with their shares, rates and MFU. Figures stand below each other."""
    if all(step.seconds is None or step.kind == "counted" for step in analysis.profile.steps):
        return
    shown = [line for line in times(analysis) if line.label not in _LEFT_OUT]
    value, spread = max(len(line.value) for line in shown), max(len(line.spread) for line in shown)
    for line in shown:
        yield line.label, _joined(line, value, spread)


def _joined(line: Line, value: int, spread: int) -> str:
    return f"{line.value:>{value}}  {line.spread:<{spread}}  {line.remark}" if spread else f"{line.value:>{value}}  {line.remark}"


def _modules(analysis: Analysis) -> _Lines:
    """The five places with the most own time, and the others together."""
    step, rows = analysis.step_times.seconds, analysis.busiest
    if not rows:
        return
    listed, others = rows[:_MODULES], rows[_MODULES:]
    named = [(f"{each.pattern or 'the root'}{f' ×{each.modules}' if each.modules > 1 else ''}  {each.kind}", each) for each in listed]
    width = min(max(len(name) for name, _ in named), _NAME)
    for index, (name, each) in enumerate(named):
        share = units.percent(each.seconds / step.median if step else None)
        rate = f"  {units.rate(2 * each.macs / each.seconds, 'FLOP/s')}" if each.macs else ""
        line = f"{shortened(plain(name), width):<{width}}  {units.duration(each.seconds):>8}  {share:>6}{rate}"
        yield "" if index else "most time", line
    if others:
        left = sum(each.seconds for each in others)
        name = f"{counted(sum(each.modules for each in others), 'other module')}"
        yield "", f"{name:<{width}}  {units.duration(left):>8}  {units.percent(left / step.median if step else None):>6}"


def _advice(analysis: Analysis) -> _Lines:
    return _labelled("do first", first_steps(analysis))


def _remarks(analysis: Analysis) -> _Lines:
    """Memory, slow ranks, uncounted operators and notes: the first few of each."""
    profile = analysis.profile
    yield "memory", f"{units.size(analysis.peak_bytes)} of live tensors at the peak"
    yield from islice(ranks(analysis), _LINES_OF_RANKS)
    if profile.is_counted and analysis.uncounted:
        yield from _labelled("not counted", (line for line, _ in uncounted(analysis, _UNCOUNTED)))
    yield from _labelled("note", _few(map(sentence, profile.notes), _NOTES))


def _few(lines: Iterable[str], most: int) -> Iterator[str]:
    """The first lines, and how many more there are."""
    every = list(lines)
    kept = every if len(every) <= most else every[: most - 1]
    yield from kept
    if left := len(every) - len(kept):
        yield f"{left} more, see lflops show"


def _labelled(label: str, lines: Iterable[str]) -> _Lines:
    for index, line in enumerate(lines):
        yield "" if index else label, line
