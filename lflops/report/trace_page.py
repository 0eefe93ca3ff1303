"""One HTML file that shows traces: it opens from disk, makes no request to any network, and runs no script."""

import html
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from lflops.analyze.trace.idle import CAUSES as ORDER
from lflops.analyze.trace.summary import TraceSummaries, TraceSummary
from lflops.report.document import document
from lflops.report.lines.text import plain
from lflops.report.lines.trace_summary import CAUSES, STATES, facts, nanoseconds, ranks_verdict, remarks, share, verdict
from lflops.report.lines.trace_tables import TraceTable, ranks_tables, tables

__all__ = ["trace_page"]

_LISTED = 200
"""Rows of a table. All of a trace's kernels would be a page that no browser opens."""

_COLOURS: Mapping[str, str] = {
    "computing": "--budget-useful",
    "exposed_communication": "--budget-communication",
    "exposed_copies": "--phase-transfer",
    "idle": "--budget-idle",
}
_PALETTE = (
    "--phase-data",
    "--budget-idle",
    "--phase-clip",
    "--inefficient",
    "--phase-forward",
    "--phase-backward",
    "--bar",
    "--rest",
    "--line",
)
_ADDED = """
body { height: auto; } #root { height: auto; display: block; max-width: 1400px; }
section { padding: 0 18px 30px; border-bottom: 1px solid var(--line); }
.first { font-weight: 600; font-size: 16px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.wide { overflow-x: auto; } .wide table { border-collapse: collapse; }
.wide td, .wide th { text-align: right; padding: 2px 14px 2px 0; white-space: nowrap; font-variant-numeric: tabular-nums; }
.wide td:first-child, .wide th:first-child { text-align: left; max-width: 560px; overflow: hidden; text-overflow: ellipsis; }
.wide tr:hover td { background: var(--raised); }
.step { display: grid; grid-template-columns: max-content 1fr; gap: 10px; align-items: center; margin: 2px 0; }
.step span { width: 230px; } .step .stack { height: 16px; }
"""


def trace_page(found: TraceSummaries) -> str:
    """The file's text: what the ranks wait for, where there are several, and a section for each trace."""
    names = ", ".join(plain(PurePath(summary.file).name) for summary in found.traces)
    parts = [f"<header><h1>{_text(names)}</h1></header>"]
    if found.ranks is not None:
        shown = "".join(map(_table, ranks_tables(found.ranks, _LISTED))) if found.ranks.collectives else ""
        parts.append(f'<section><p class="first">{_text(ranks_verdict(found.ranks))}</p>{shown}</section>')
    parts += [f"<section>{''.join(_trace(summary))}</section>" for summary in found.traces]
    return document(names, "\n".join(['<div id="root">', *parts, "</div>"]), style=_ADDED)


def _trace(summary: TraceSummary) -> Iterator[str]:
    for index, sentence in enumerate(verdict(summary)):
        yield f'<p class="{"plain" if index else "first"}">{_text(sentence)}</p>'
    yield _terms([*facts(summary), *remarks(summary)])
    device = summary.device
    if device is not None and device.window:
        states = {state: getattr(device, state) for state in STATES}
        yield f"<h2>the device's {nanoseconds(device.window)}</h2>"
        yield _bar(states, _COLOURS) + _legend(states, device.window, STATES, _COLOURS)
        if summary.idle:
            colours: dict[str, str] = dict(zip(ORDER, _PALETTE, strict=True))
            labels: dict[str, str] = {cause: label for cause, (label, _) in CAUSES.items()}
            idle: dict[str, int] = dict(summary.idle.items())
            yield f"<h2>its {nanoseconds(device.idle)} of idle time, lost to</h2>"
            yield _bar(idle, colours) + _legend(idle, device.idle, labels, colours)
    if len(summary.steps) > 1:
        yield "<h2>steps</h2>" + "".join(_steps(summary))
    yield from map(_table, tables(summary, _LISTED))


def _bar(parts: Mapping[str, int], colours: Mapping[str, str], *, rest: int = 0) -> str:
    """Parts of one line, as long as their nanoseconds."""
    slices = "".join(
        f'<div class="slice" style="flex: {time} 1 0; background: var({colours[name]})" title="{_text(name)}"></div>'
        for name, time in parts.items()
        if time
    )
    after = f'<div style="flex: {rest} 1 0"></div>' if rest else ""
    return f'<div class="stack">{slices}{after}</div>\n'


def _legend(parts: Mapping[str, int], whole: int, labels: Mapping[str, str], colours: Mapping[str, str]) -> str:
    rows = (
        f'<li><span class="swatch" style="background: var({colours[name]})"></span>{_text(labels[name])}: '
        f"{_text(nanoseconds(time))}, {_text(share(time, whole))}</li>"
        for name, time in parts.items()
        if time
    )
    return f'<ul class="parts">{"".join(rows)}</ul>'


def _steps(summary: TraceSummary) -> Iterator[str]:
    """A line for each step, as long as it took."""
    longest = max(step.end - step.start for step in summary.steps)
    for step in summary.steps[:_LISTED]:
        took = step.end - step.start
        states = {state: getattr(step.device, state) for state in STATES} if step.device is not None else {}
        bar = _bar(states, _COLOURS, rest=longest - took)
        yield f'<div class="step"><span>{_text(step.name)}, {_text(nanoseconds(took))}</span>{bar}</div>'


def _terms(rows: list[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{_text(label)}</dt><dd>{_text(value)}</dd>' for label, value in rows)}</dl>"


def _table(table: TraceTable) -> str:
    head = "".join(f"<th>{_text(heading)}</th>" for heading in ("", *table.columns))
    rows = "".join(_row(*cells) for cells in zip(table.names, *table.columns.values(), strict=True))
    notes = [*table.notes, *([f"{table.left_out} more"] if table.left_out else [])]
    below = "".join(f'<p class="remark">{_text(note)}</p>' for note in notes)
    return f'<h2>{_text(table.heading)}</h2><div class="wide"><table><tr>{head}</tr>{rows}</table></div>{below}'


def _row(name: str, *cells: str) -> str:
    shown = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
    return f'<tr><td title="{_text(name)}">{_text(name)}</td>{shown}</tr>'


def _text(content: str) -> str:
    """Escaped: names come from a file, and may hold anything."""
    return html.escape(plain(content))
