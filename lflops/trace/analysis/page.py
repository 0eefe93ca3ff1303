"""One HTML file that shows traces.

It opens from disk, makes no request to any network, and runs no script.
"""

import html
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from lflops.profile.series import summed
from lflops.report.html import document
from lflops.report.text import plain
from lflops.trace.analysis.categories import CATEGORIES
from lflops.trace.analysis.sentences import (
    CAUSES,
    STATES,
    TraceTable,
    facts,
    nanoseconds,
    ranks_tables,
    ranks_verdict,
    remarks,
    share,
    tables,
    verdict,
)
from lflops.trace.analysis.summary import TraceSummaries, TraceSummary

# rows of a table. All of a trace's kernels would be a page that no browser opens.
_LISTED = 200

_COLOURS: dict[str, str] = {
    "computing": "var(--part-useful)",
    "exposed_communication": "var(--part-communication)",
    "exposed_copies": "var(--part-transfer)",
    "idle": "var(--part-idle)",
}
_STRIPED = (
    "repeating-linear-gradient(135deg, {0} 0 5px, color-mix(in oklab, {0} 55%, white) 5px 9px)"
)
_CAUSES: Mapping[str, str] = {
    cause: _STRIPED.format(f"var(--class-{at})") for at, cause in enumerate(CAUSES)
}
"""Idle time is striped, so that no cause looks like a kind of work."""

_OF_PARTS = {
    "communication": "communication",
    "copy": "transfer",
    "optimizer": "optimizer",
    "other": "other",
}
_CATEGORIES: Mapping[str, str] = {
    each: f"var(--part-{_OF_PARTS[each]})" if each in _OF_PARTS else f"var(--class-{at})"
    for at, each in enumerate(sorted(CATEGORIES, key=_OF_PARTS.__contains__))
} | {"between operators": "var(--part-all)"}
"""Work by its category, in the colours that the page of a profile has for the same.

The other categories come first.
"""

_ADDED = Path(__file__).with_suffix(".css")


def trace_page(found: TraceSummaries) -> str:
    """The file's text: what the ranks wait for, where there are several, and a section for each trace."""
    names = ", ".join(plain(PurePath(summary.file).name) for summary in found.traces)
    parts = [f"<header><h1>{_text(names)}</h1></header>"]
    if found.ranks is not None:
        shown = (
            "".join(map(_table, ranks_tables(found.ranks, _LISTED)))
            if found.ranks.collectives
            else ""
        )
        parts.append(
            f'<section><p class="first">{_text(ranks_verdict(found.ranks))}</p>{shown}</section>'
        )
    parts += [f"<section>{''.join(_trace(summary))}</section>" for summary in found.traces]
    return document(
        names, "\n".join(['<div id="root">', *parts, "</div>"]), style=_ADDED.read_text("utf-8")
    )


def _trace(summary: TraceSummary) -> Iterator[str]:
    for index, sentence in enumerate(verdict(summary)):
        yield f'<p class="{"plain" if index else "first"}">{_text(sentence)}</p>'
    terms = (
        f"<dt>{_text(label)}</dt><dd>{_text(value)}</dd>"
        for label, value in [*facts(summary), *remarks(summary)]
    )
    yield f"<dl>{''.join(terms)}</dl>"
    device = summary.device
    if device is not None and device.window:
        states = {state: getattr(device, state) for state in STATES}
        yield _chart(f"the device's {nanoseconds(device.window)}", states, STATES, _COLOURS)
    yield _work(summary)
    if device is not None and device.window and summary.idle:
        labels: dict[str, str] = {cause: each.label for cause, each in CAUSES.items()}
        idle: dict[str, int] = dict(summary.idle.items())
        yield _chart(f"its {nanoseconds(device.idle)} of idle time, lost to", idle, labels, _CAUSES)
    if len(summary.steps) > 1:
        yield "<h2>steps</h2>" + "".join(_steps(summary))
    yield from map(_table, tables(summary, _LISTED))


def _work(summary: TraceSummary) -> str:
    """Draw what the time goes into, by category.

    The device's kernels, or what operators take on the host themselves.
    """
    steps, recorded = (
        len(summary.steps) or 1,
        sum(step.end - step.start for step in summary.steps) or summary.recorded,
    )
    parts: dict[str, int] = {row.category: row.device for row in summary.categories}
    title = f"its {nanoseconds(sum(parts.values()))} of kernels and copies, by category"
    if summary.device is None:
        parts = summed(
            (operator.category, operator.self_host // steps) for operator in summary.operators
        )
        title = (
            f"where the {nanoseconds(recorded // steps)} of a step go on the host"
            if summary.steps
            else "where the host's time goes"
        )
    largest = dict(sorted(parts.items(), key=lambda part: -part[1]))
    left = recorded // steps - sum(parts.values())
    rest = {"between operators": left} if summary.device is None and left > 0 else {}
    return (
        _chart(title, largest | rest, {name: name for name in _CATEGORIES}, _CATEGORIES)
        if parts
        else ""
    )


def _chart(
    title: str, parts: Mapping[str, int], labels: Mapping[str, str], colours: Mapping[str, str]
) -> str:
    return f"<h2>{_text(title)}</h2>{_bar(parts, colours, labels)}{_legend(parts, sum(parts.values()), labels, colours)}"


def _bar(
    parts: Mapping[str, int],
    colours: Mapping[str, str],
    labels: Mapping[str, str] | None = None,
    *,
    rest: int = 0,
) -> str:
    """Parts of one line, as long as their nanoseconds.

    With labels, each has its name where there is room.
    """
    slices = "".join(
        f'<div class="slice" style="flex: {time} 1 0; background: {colours[name]}" title="{_text(name)}">'
        f"{f'<span>{_text(labels[name])}</span>' if labels else ''}</div>"
        for name, time in parts.items()
        if time
    )
    after = f'<div style="flex: {rest} 1 0"></div>' if rest else ""
    return f'<div class="stack">{slices}{after}</div>\n'


def _legend(
    parts: Mapping[str, int], whole: int, labels: Mapping[str, str], colours: Mapping[str, str]
) -> str:
    rows = (
        f'<li><span class="swatch" style="background: {colours[name]}"></span>{_text(labels[name])}: '
        f"{_text(nanoseconds(time))}, {_text(share(time, whole))}</li>"
        for name, time in parts.items()
        if time
    )
    return f'<ul class="parts">{"".join(rows)}</ul>'


def _steps(summary: TraceSummary) -> Iterator[str]:
    longest = max(step.end - step.start for step in summary.steps)
    for step in summary.steps[:_LISTED]:
        took = step.end - step.start
        states = (
            {state: getattr(step.device, state) for state in STATES}
            if step.device is not None
            else {"host": took}
        )
        bar = _bar(states, _COLOURS | {"host": "var(--bar)"}, rest=longest - took)
        yield f'<div class="step"><span>{_text(step.name)}, {_text(nanoseconds(took))}</span>{bar}</div>'


def _table(table: TraceTable) -> str:
    head = "".join(f"<th>{_text(heading)}</th>" for heading in ("", *table.columns))
    rows = "".join(_row(*cells) for cells in zip(table.names, *table.columns.values(), strict=True))
    below = "".join(f'<p class="remark">{_text(note)}</p>' for note in table.notes)
    listed = f"{len(table.names)} of {table.total}" if table.left_out else str(len(table.names))
    title = (
        f"<summary><h2>{_text(table.heading)}</h2> <span class='remark'>{listed}</span></summary>"
    )
    return f'<details>{title}<div class="wide"><table><tr>{head}</tr>{rows}</table></div>{below}</details>'


def _row(name: str, *cells: str) -> str:
    shown = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
    return f'<tr><td title="{_text(name)}">{_text(name)}</td>{shown}</tr>'


def _text(content: str) -> str:
    """Escaped: names come from a file, and may hold anything."""
    return html.escape(plain(content))
