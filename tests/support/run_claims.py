"""Read the numbers of a run back from the page and the terminal, and find those that are wrong.

Each number has a label. The same label must have the same text everywhere, and parts must add up to
their whole.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_AMOUNT = re.compile(r"(?<![\d.])([\d.]+) (ns|µs|ms|s|min|h)\b")
_SHARE = re.compile(r"(<?)([\d.]+) %")
_COST = re.compile(r"([\d.]+) % of the step \(([\d.]+ (?:ns|µs|ms|s))\)")

READ_PAGE = """(root) => {
  const text = (each) => each ? each.innerText.trim() : "";
  const lists = (selector) => [...root.querySelectorAll(selector)].map(text);
  return {
    figures: [...root.querySelectorAll(".figure")].map((each) => [
      text(each.querySelector(".figure-label")), text(each.querySelector(".figure-value")),
      text(each.querySelector(".remark")),
    ]),
    facts: [...root.querySelectorAll(".facts dt")].map((each) => [text(each), text(each.nextElementSibling)]),
    phases: lists(".parts-of-phase > li"),
    account: lists("section.run > .parts > li"),
    cards: [...root.querySelectorAll(".action-card")].map((each) => [
      text(each.querySelector(".saving")), text(each.querySelector(".cause")),
      text(each.querySelector(".sentence")),
    ]),
    trained: text(root.querySelector(".trained")),
    caption: text(root.querySelector(".step-caption")),
  };
}"""


class Page(NamedTuple):
    """The texts of the view Run.

    Attributes:
        figures: Label, value and remark of each figure at the top.
        facts: Label and value of each fact.
        phases: The phases of the step.
        account: The categories of the run's time.
        cards: Saving, cause and sentence of each recommended action.
        trained: The sentence about the time trained.
        caption: The caption of the chart of steps.
    """

    figures: Sequence[Sequence[str]]
    facts: Sequence[Sequence[str]]
    phases: Sequence[str]
    account: Sequence[str]
    cards: Sequence[Sequence[str]]
    trained: str
    caption: str


def read_page(page: Any) -> Page:
    """Read the view Run from a browser."""
    page.locator(".do-next").wait_for()
    return Page(**page.locator("section.run").evaluate(READ_PAGE))


def seconds_of(text: str) -> float:
    """Return the first duration in a text, such as 1 min 5 s, in seconds."""
    found = _AMOUNT.findall(text.partition(",")[0])
    return sum(float(number) * SECONDS[unit] for number, unit in found)


def share_of(text: str) -> float:
    """Return the last share in a text, from 0 to 1. For `<0.1 %` it is 0.05 %."""
    less, number = _SHARE.findall(text)[-1]
    return float(number) / (200 if less else 100)


def labelled(page: Page, terminal: str) -> dict[str, set[str]]:
    """Return all texts after each label, in the page and in the terminal."""
    texts: dict[str, set[str]] = defaultdict(set)
    for label, value, _ in page.figures:
        if label:
            texts[label].add(value)
            texts[label] |= set(_in_terminal(label, value, terminal))
    for label, value in page.facts:
        if label and _is_number(value):
            texts[label].add(_short(value))
    for label, said in texts.items():
        is_time = all(map(_is_duration, said))
        row = re.compile(rf"^ *{re.escape(label)}  +(.+?)(?:  |$)", re.MULTILINE)
        for value in map(_short, row.findall(terminal)):
            # The table of totals has MACs after the name of a phase. They are not compared with a
            # duration.
            if _is_duration(value) or (not is_time and _is_number(value)):
                said.add(value)
    return texts


def _is_number(text: str) -> bool:
    return re.match(r"[–<\d]", text) is not None


def _is_duration(text: str) -> bool:
    return _AMOUNT.fullmatch(text) is not None


def _in_terminal(label: str, value: str, terminal: str) -> Iterator[str]:
    """Yield the texts after a label in the first screen, cut to the length of the page's text."""
    row = re.compile(rf"^(?:figures)? +{re.escape(label)} (\S.*)$", re.MULTILINE)
    for said in row.findall(terminal):
        yield said[: len(value)]


def _short(text: str) -> str:
    """Return a text without its remarks."""
    return re.split(r", | ± |  ", text)[0].strip()


def wrong_claims(page: Page, terminal: str, why: str) -> Iterator[str]:
    """Yield a description of each label with two values, and of each wrong sum, share and cost.

    Args:
        page: The view Run.
        terminal: The first screen in the terminal.
        why: The output of `lflops why`.
    """
    for label, said in labelled(page, terminal).items():
        if len(said) > 1:
            yield f"{label} has several values: {sorted(said)}"
    figures = {label: value for label, value, _ in page.figures}
    step = seconds_of(figures["step"])
    if f"mean {figures['step']}" not in page.caption:
        yield f"the step is {figures['step']}, and the chart says {page.caption}"
    yield from _wrong_parts("phases", page.phases, step)
    for line in page.phases:
        if line.replace(", ", " (") + ")" not in terminal:
            yield f"the terminal has no {line}"
    total = sum(seconds_of(line) for line in _first_lines(page.account))
    yield from _wrong_parts("account", _first_lines(page.account), total)
    if page.trained.rstrip(".") not in terminal.replace("\n                  ", " "):
        yield f"the terminal does not say {page.trained}"
    yield from _wrong_shares_of_run(page, figures)
    for saving, cause, sentence in page.cards:
        yield from _wrong_cost(saving, sentence, step)
        if sentence not in why:
            yield f"lflops why does not say {sentence}"
        if cause not in terminal and page.cards.index([saving, cause, sentence]) < 3:
            yield f"the terminal does not name {cause}"


def _first_lines(items: Sequence[str]) -> list[str]:
    """Return the categories of the account without their parts."""
    return [item.split("\n")[0] for item in items]


def _wrong_parts(name: str, parts: Sequence[str], whole: float) -> Iterator[str]:
    """Yield sums and shares that differ from the whole.

    Durations have three digits and shares one decimal, so small differences are allowed.
    """
    durations = [seconds_of(part) for part in parts]
    shares = [share_of(part) for part in parts]
    if not math.isclose(sum(durations), whole, rel_tol=0.006):
        yield f"{name} add up to {sum(durations)} s, not {whole} s"
    if not math.isclose(sum(shares), 1.0, abs_tol=0.0006 * len(parts)):
        yield f"shares of {name} add up to {sum(shares)}"
    for part, duration, share in zip(parts, durations, shares, strict=True):
        if abs(duration / whole - share) > 0.0006 + 0.01 * share:
            yield f"{name}: {part} of {whole} s"


def _wrong_shares_of_run(page: Page, figures: Mapping[str, str]) -> Iterator[str]:
    """Yield shares in the sentence about the time trained that differ from the account."""
    of_account = {}
    for line in _first_lines(page.account):
        label = re.split(r" [\d<]", line)[0]
        of_account[label] = line.rsplit(", ", 1)[1]
    if figures["time trained"] != of_account.get("training"):
        yield f"{figures['time trained']} trained, and the account says {of_account}"
    for part in page.trained.rstrip(".").split("; ")[1].split(", "):
        found = re.fullmatch(r"(.*?)(?: \(once\))? (<?[\d.]+ %)", part)
        assert found is not None, part
        label, share = found.groups()
        if of_account.get(label) != share:
            yield f"{part} in the sentence, and {of_account.get(label)} in the account"


def _wrong_cost(saving: str, sentence: str, step: float) -> Iterator[str]:
    """Yield a card whose saving differs from the cost in its sentence.

    Also yield a sentence whose percentage differs from its seconds.
    """
    found = _COST.search(sentence)
    if found is None:
        return
    share, cost = found.groups()
    if saving.lstrip("−") != cost:
        yield f"{saving} beside {sentence}"
    if abs(seconds_of(cost) / step - float(share) / 100) > 0.0006 + 0.01 * float(share) / 100:
        yield f"{sentence} of {step} s"
