"""Format the first screen (the overview of a run) as lines, for a terminal and for the log."""

import re
from collections.abc import Iterator, Sequence

from lflops import units
from lflops.ledger.account import Ledger, StepGroup
from lflops.profile.module_names import plain
from lflops.report.first_screen.cards import FIRST_CARDS, Card
from lflops.report.first_screen.screen import FirstScreen
from lflops.report.text import counted, joined, label_first

_MARKUP = re.compile(r"[\\`*_{}\[\]<>|#]")

_BARS = "▁▂▃▄▅▆▇█"

_MOST_BARS = 48
"""Maximum number of bars that show the times of the last steps.

Each bar stands for one step or, in a long run, for the mean of several consecutive steps.
"""

_SEPARATOR = " · "


def first_screen_rows(
    screen: FirstScreen, ledger: Ledger | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the label and text of each row of the first screen.

    A row with an empty label continues the previous row.
    """
    yield "run", _SEPARATOR.join([screen.title, *screen.header])
    figures = []
    for fact in screen.figures:
        # Remarks such as `of 19.5 s` continue the value, and other remarks explain it.
        separator = " " if fact.remark.startswith("of ") else ", "
        figures.append(f"{fact.label} {joined(fact.text, fact.remark, separator=separator)}")
    yield from label_first("figures", figures)
    if screen.trained:
        yield "time", screen.trained
    if screen.steps is not None:
        yield "step times", screen.steps.said
    groups = [] if ledger is None else ledger.unprofiled[-_MOST_BARS:]
    if len(groups) > 1:
        yield "", _last_steps(groups)
    yield from _card_rows(screen)
    phases = []
    for part in screen.phases:
        seconds, _, share = part.text.partition(", ")
        phases.append(f"{part.label} {seconds} ({share})")
    if phases:
        yield "step by phase", ", ".join(phases)
    slow = []
    for rank in screen.ranks:
        if rank.lost or rank.status != "ok":
            slow.append(rank.said)
    yield from label_first("ranks", slow)
    if screen.hint:
        yield "unknown", screen.hint
    yield (
        "confidence",
        joined(screen.confidence.level, "; ".join(screen.confidence.why), separator=": "),
    )


def _last_steps(groups: Sequence[StepGroup]) -> str:
    """Draw the mean step time of each group as a bar. The number of all steps follows as text."""
    number = 0
    means = []
    for group in groups:
        number += group.steps
        means.append(group.seconds / group.steps)
    return f"{sparkline(means)} the last {counted(number, 'step')}"


def first_screen_markdown(screen: FirstScreen) -> Iterator[str]:
    """Format the first screen as Markdown, for example for TensorBoard."""
    yield f"**{_escaped(screen.title)}** {_SEPARATOR.join(map(_escaped, screen.header))}"
    yield ""
    yield "| | | |"
    yield "|---|--:|---|"
    for fact in screen.figures:
        yield f"| {fact.label} | **{fact.text}** | {_escaped(fact.remark)} |"
    yield ""
    if screen.nothing:
        yield screen.nothing
    for number, card in enumerate(screen.cards[:FIRST_CARDS], 1):
        action = ""
        if card.action:
            action = f" {_escaped(card.action)}."
        yield f"{number}. **{_escaped(card.title)}** {card.text} per step.{action}"
    yield ""
    for part in screen.phases:
        yield f"* {part.label}: {part.text}"
    yield ""
    why = "; ".join(screen.confidence.why)
    yield f"Confidence: {screen.confidence.level}. {_escaped(why)}"


def _escaped(text: str) -> str:
    """Escape characters that have a meaning in Markdown."""
    return _MARKUP.sub(r"\\\g<0>", plain(text))


def _card_rows(screen: FirstScreen) -> Iterator[tuple[str, str]]:
    """Yield a row for each of the first cards, issues first.

    A row has the cause, the largest possible saving per step (or the cost, if the card is about no
    issue), and advice.
    """
    if screen.nothing:
        yield "status", screen.nothing
    issues = []
    others = []
    for number, card in enumerate(screen.cards[:FIRST_CARDS], 1):
        action = f" {card.action}." if card.action else ""
        if card.is_issue:
            issues.append(f"{number}. {card.title}: {_saving(card)}.{action}")
        else:
            others.append(f"{number}. {card.title}: {_cost(card)}.{action}")
    yield from label_first("do next", issues)
    yield from label_first("time goes to", others)


def _saving(card: Card) -> str:
    if card.seconds is None:
        return "a fix saves an unknown amount of time"
    bound = "at least" if card.is_lower_bound else "at most"
    return f"a fix saves {bound} {units.duration(card.seconds)} per step"


def _cost(card: Card) -> str:
    if card.seconds is None:
        return "this takes an unknown amount of time"
    return f"this takes {units.duration(card.seconds)} per step"


def sparkline(values: Sequence[float]) -> str:
    """Draw the values as bars from 0 to the largest value."""
    most = max(values)
    if not most:
        return ""
    last = len(_BARS) - 1
    bars = ""
    for value in values:
        bars += _BARS[round(value / most * last)]
    return bars
