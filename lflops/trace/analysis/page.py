"""Draw the analysis of traces as one HTML file.

The file opens from disk, makes no network request and runs no script.
"""

import html
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lflops.profile.module_names import plain
from lflops.profile.series import summed
from lflops.report.html import document
from lflops.trace.analysis.categories import CATEGORIES
from lflops.trace.analysis.collectives import RankSkew
from lflops.trace.analysis.sentences import (
    CAUSE_LABELS,
    STATES,
    TraceTable,
    facts,
    file_name,
    ranks_tables,
    ranks_verdict,
    remarks,
    states_sentence,
    step_sentences,
    tables,
)
from lflops.trace.analysis.steps import StepTimes
from lflops.trace.analysis.suggestions import CAUSES, Suggestion, suggestions
from lflops.trace.analysis.summary import TraceSummaries, TraceSummary
from lflops.trace.analysis.text import nanoseconds, share

_LISTED = 200
"""Maximum number of rows in a table. A browser could not show all kernels of a trace."""

_STATE_COLOURS = {
    "computing": "var(--part-ideal-compute)",
    "exposed_communication": "var(--part-communication)",
    "exposed_copies": "var(--part-transfer)",
    "idle": "var(--part-idle)",
    "host": "var(--bar)",
}

_STRIPED = (
    "repeating-linear-gradient(135deg, {0} 0 5px, color-mix(in oklab, {0} 55%, white) 5px 9px)"
)
_CAUSE_COLOURS: dict[str, str] = {}
"""Colour of each cause of idle time. It is striped, so that no cause looks like a kind of work."""
for _place, _cause in enumerate(CAUSES):
    _CAUSE_COLOURS[_cause] = _STRIPED.format(f"var(--class-{_place})")

_CATEGORY_COLOURS = {
    "communication": "var(--part-communication)",
    "copy": "var(--part-transfer)",
    "optimizer": "var(--part-optimizer)",
    "other": "var(--part-other)",
    "between operators": "var(--part-all)",
}
"""Colour of each category of work. The page of a profile uses the same colours."""
_OTHER_CATEGORIES = [category for category in CATEGORIES if category not in _CATEGORY_COLOURS]
for _place, _category in enumerate(_OTHER_CATEGORIES):
    _CATEGORY_COLOURS[_category] = f"var(--class-{_place})"

_STYLE = Path(__file__).with_suffix(".css")


def trace_page(found: TraceSummaries) -> str:
    """Return the HTML of the page. If ranks are compared, their comparison is at the top."""
    names = ", ".join(map(file_name, found.traces))
    parts = ['<div id="root">', f"<header><h1>{_text(names)}</h1></header>"]
    if found.ranks is not None:
        parts.append(f"<section>{_ranks(found.ranks)}</section>")
    for summary in found.traces:
        content = "".join(_trace(summary))
        parts.append(f"<section>{content}</section>")
    parts.append("</div>")
    return document(names, "\n".join(parts), style=_STYLE.read_text("utf-8"))


def _ranks(skew: RankSkew) -> str:
    sentence = f'<p class="first">{_text(ranks_verdict(skew))}</p>'
    if not skew.collectives:
        return sentence
    return sentence + "".join(map(_table, ranks_tables(skew, _LISTED)))


def _trace(summary: TraceSummary) -> Iterator[str]:
    yield f'<p class="first">{_text(states_sentence(summary))}</p>'
    for sentence in step_sentences(summary):
        yield f"<p>{_text(sentence)}</p>"
    yield from _do_next(summary)
    yield from _labelled(facts(summary))
    device = summary.device
    if device is not None and device.window:
        title = f"device time: {nanoseconds(device.window)}, by state"
        yield _chart(title, device.by_state(), STATES, _STATE_COLOURS)
    yield _work(summary)
    if device is not None and device.window and summary.idle:
        title = f"idle time: {nanoseconds(device.idle)}, by cause"
        idle: dict[str, int] = dict(sorted(summary.idle.items(), key=lambda item: -item[1]))
        yield _chart(title, idle, CAUSE_LABELS, _CAUSE_COLOURS)
    if len(summary.steps) > 1:
        yield "<h2>steps</h2>"
        longest = max(step.duration for step in summary.steps)
        for step in summary.steps[:_LISTED]:
            yield _step(step, longest)
    yield from map(_table, tables(summary, _LISTED))
    yield from _labelled(remarks(summary))


def _do_next(summary: TraceSummary) -> Iterator[str]:
    """Draw a card for each suggestion."""
    found = suggestions(summary)
    if not found:
        return
    of = "per step" if summary.steps else "in the trace"
    yield f"<h2>Do next <span class='quiet'>– the time that each fix saves at most {of}</span></h2>"
    cards = "".join(f"<li>{_card(suggestion)}</li>" for suggestion in found)
    yield f'<ol class="cards">{cards}</ol>'


def _card(suggestion: Suggestion) -> str:
    title = f"{suggestion.title[0].upper()}{suggestion.title[1:]}"
    action = f"{suggestion.action[0].upper()}{suggestion.action[1:]}."
    what = f'<b class="cause">{_text(title)}</b>'
    if suggestion.evidence:
        what += f'<p class="sentence">{_text(suggestion.evidence)}</p>'
    saving = f'<span class="saving">−{nanoseconds(suggestion.time)}</span>'
    return f'<div class="action-card">{saving}<div>{what}</div><span>{_text(action)}</span></div>'


def _labelled(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield "<dl>"
    for label, value in rows:
        yield f"<dt>{_text(label)}</dt><dd>{_text(value)}</dd>"
    yield "</dl>"


def _work(summary: TraceSummary) -> str:
    """Draw the device time by category, or the host time of a step if there is no device."""
    if summary.device is not None:
        parts: dict[str, int] = {row.category: row.device for row in summary.categories}
        title = f"kernels and copies: {nanoseconds(sum(parts.values()))}, by category"
        between_operators = 0
    else:
        steps = len(summary.steps) or 1
        recorded = summary.steps_time or summary.recorded
        per_step = recorded // steps
        parts = summed((row.category, row.self_host // steps) for row in summary.operators)
        title = "host time, by category"
        if summary.steps:
            title = f"host time of a step: {nanoseconds(per_step)}, by category"
        between_operators = per_step - sum(parts.values())
    if not parts:
        return ""
    largest_first = dict(sorted(parts.items(), key=lambda part: -part[1]))
    if between_operators > 0:
        largest_first["between operators"] = between_operators
    return _chart(title, largest_first, {}, _CATEGORY_COLOURS)


def _chart(
    title: str, parts: Mapping[str, int], labels: Mapping[str, str], colours: Mapping[str, str]
) -> str:
    """Draw a heading, a bar divided into parts, and its legend.

    A part without an entry in `labels` is labelled with its name.
    """
    whole = sum(parts.values())
    slices = []
    legend = []
    for name, time in parts.items():
        if not time:
            continue
        label = _text(labels.get(name, name))
        slices.append(_slice(name, time, colours[name], f"<span>{label}</span>"))
        swatch = f'<span class="swatch" style="background: {colours[name]}"></span>'
        figures = f"{_text(nanoseconds(time))}, {_text(share(time, whole))}"
        legend.append(f"<li>{swatch}{label}: {figures}</li>")
    bar = f'<div class="stack">{"".join(slices)}</div>\n'
    return f'<h2>{_text(title)}</h2>{bar}<ul class="parts">{"".join(legend)}</ul>'


def _slice(name: str, time: int, colour: str, content: str) -> str:
    """Draw one part of a bar. The length of the part is proportional to `time`."""
    style = f"flex: {time} 1 0; background: {colour}"
    return f'<div class="slice" style="{style}" title="{_text(name)}">{content}</div>'


def _step(step: StepTimes, longest: int) -> str:
    times = {"host": step.duration} if step.device is None else step.device.by_state()
    slices = []
    for name, time in times.items():
        if time:
            slices.append(_slice(name, time, _STATE_COLOURS[name], ""))
    if longest > step.duration:
        slices.append(f'<div style="flex: {longest - step.duration} 1 0"></div>')
    label = f"<span>{_text(step.name)}, {_text(nanoseconds(step.duration))}</span>"
    bar = f'<div class="stack">{"".join(slices)}</div>\n'
    return f'<div class="step">{label}{bar}</div>'


def _table(table: TraceTable) -> str:
    head = _cells("th", ("", *table.columns))
    rows = "".join(map(_row, table.names, *table.columns.values()))
    notes = "".join(f'<p class="remark">{_text(note)}</p>' for note in table.notes)
    listed = f"{len(table.names)} of {table.total}" if table.left_out else str(len(table.names))
    title = f"<h2>{_text(table.heading)}</h2> <span class='remark'>{listed}</span>"
    content = f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>{notes}'
    return f"<details><summary>{title}</summary>{content}</details>"


def _row(name: str, *cells: str) -> str:
    return f'<tr><td title="{_text(name)}">{_text(name)}</td>{_cells("td", cells)}</tr>'


def _cells(tag: str, contents: Iterable[str]) -> str:
    return "".join(f"<{tag}>{_text(content)}</{tag}>" for content in contents)


def _text(content: str) -> str:
    """Return text escaped for HTML, because names from a file may contain any character."""
    return html.escape(plain(content))
