"""What the page and the texts of a run claim, read back from them, and the claims that are wrong.

A number has a label. The same label must have the same text wherever it stands, and parts must add
up to their whole.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
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
    """The numbers of the view Run, as its elements show them."""

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
    """The first duration in a text, such as 1 min 5 s."""
    found = _AMOUNT.findall(text.partition(",")[0])
    return sum(float(number) * SECONDS[unit] for number, unit in found)


def share_of(text: str) -> float:
    """The last share in a text, from 0 to 1; a text such as `<0.1 %` is half of that."""
    (less, number) = _SHARE.findall(text)[-1]
    return float(number) / (200 if less else 100)


def labelled(page: Page, terminal: str) -> dict[str, set[str]]:
    """Every text behind a label, of the page and of the terminal."""
    texts: dict[str, set[str]] = defaultdict(set)
    for label, value, _ in filter(itemgetter(0), page.figures):
        texts[label].add(value)
        texts[label] |= set(_in_terminal(label, value, terminal))
    for label, value in page.facts:
        if label and _is_number(value):
            texts[label].add(_short(value))
    for label, said in texts.items():
        is_time = all(map(_is_duration, said))
        row = re.compile(rf"^ *{re.escape(label)}  +(.+?)(?:  |$)", re.MULTILINE)
        for value in map(_short, row.findall(terminal)):
            # The table of totals has MACs behind the name of a phase.
            if _is_duration(value) or (not is_time and _is_number(value)):
                said.add(value)
    return texts


def _is_number(text: str) -> bool:
    return re.match(r"[–<\d]", text) is not None


def _is_duration(text: str) -> bool:
    return _AMOUNT.fullmatch(text) is not None


def _in_terminal(label: str, value: str, terminal: str) -> Iterator[str]:
    """What a row of the first screen says behind a label: as much of it as the page's text."""
    row = re.compile(rf"^(?:figures)? +{re.escape(label)} (\S.*)$", re.MULTILINE)
    for said in row.findall(terminal):
        yield said[: len(value)]


def _short(text: str) -> str:
    """A text without its remarks."""
    return re.split(r", | ± |  ", text)[0].strip()


def wrong_claims(page: Page, terminal: str, why: str) -> Iterator[str]:
    """Every word with two values, and every sum and share that is wrong."""
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
    """The categories of the account without their parts."""
    return [item.split("\n")[0] for item in items]


def _wrong_parts(name: str, parts: Sequence[str], whole: float) -> Iterator[str]:
    """Durations with three digits and shares with one decimal add up to about their whole."""
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
    """Shares in the sentence about the time trained are those of the account."""
    of_account = {}
    for line in _first_lines(page.account):
        label = re.split(r" [\d<]", line)[0]
        of_account[label] = line.rsplit(", ", 1)[1]
    if figures["time trained"] != of_account.get("training"):
        yield f"{figures['time trained']} trained, and the account says {of_account}"
    for part in page.trained.rstrip(".").split("; ")[1].split(", "):
        label, share = re.fullmatch(r"(.*?) (<?[\d.]+ %)", part).groups()  # type: ignore[union-attr]
        if of_account.get(label) != share:
            yield f"{part} in the sentence, and {of_account.get(label)} in the account"


def _wrong_cost(saving: str, sentence: str, step: float) -> Iterator[str]:
    """A card saves what its sentence costs, and the share in its sentence is one of the step."""
    found = _COST.search(sentence)
    if found is None:
        return
    share, cost = found.groups()
    if saving.lstrip("−") != cost:
        yield f"{saving} beside {sentence}"
    if abs(seconds_of(cost) / step - float(share) / 100) > 0.0006 + 0.01 * float(share) / 100:
        yield f"{sentence} of {step} s"
