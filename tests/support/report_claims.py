"""Read the facts of a report back from each of its views, and find differences and wrong sums.

A view is the terminal, the log, the page, or another output. A fact is a label with a text.
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping

from msgspec import json

from lflops.analysis.analysis import Analysis, analyze
from lflops.integrations.deepspeed.text.summary import summary
from lflops.monitoring.outputs.loggers import scalars
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, Phase
from lflops.report.log_text import log_text
from lflops.report.module_columns import csv_table
from lflops.report.payload.payload import payload
from lflops.report.summary_facts import report_of
from tests.support.terminal import drawn

__all__ = ["claims", "disagreements", "wrong_sums"]

_LINE = re.compile(r"^( *\S.*?)(?:  +|: +)(\S.*)$")
_COST = re.compile(r"([<\d.]+) % of the (?:step|pass) \(([\d.e-]+) (ns|µs|ms|s)\)")
_SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_IN_DEEPSPEED = {"iter latency": "step", "fwd latency": "forward", "bwd latency": "backward"}
_WIDE = 400
"""Width of a terminal in which no line is broken."""


def claims(given: Profile) -> dict[str, dict[str, str]]:
    """Return for each view the texts of its facts, keyed by their labels."""
    analysis = analyze(given)
    shown = json.decode(json.encode(payload(analysis)))["report"]
    facts = [*shown["speed"], *shown["model"]]
    return {
        "terminal": _first(_labelled(drawn(given, _WIDE))),
        "log": _first(_labelled(log_text(analysis).splitlines())),
        "page": {fact["label"]: fact["text"] for fact in facts},
    }


def _labelled(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line above the table of modules."""
    for line in lines:
        if line.startswith("───"):
            return
        found = _LINE.match(line)
        if found:
            yield found[1].strip(), found[2].split("  ")[0]


def _first(labelled: Iterator[tuple[str, str]]) -> dict[str, str]:
    """Return the first text of each label.

    The table of totals below has the names of phases as labels again.
    """
    texts: dict[str, str] = {}
    for label, text in labelled:
        texts.setdefault(label, text)
    return texts


def disagreements(
    given: Profile, claimed: Mapping[str, Mapping[str, str]] | None = None
) -> list[str]:
    """Return a description of each fact in a view that differs from the report.

    Args:
        given: The profile.
        claimed: The facts of its views, as returned by `claims`; by default they are read here.
    """
    analysis = analyze(given)
    report = report_of(analysis)
    wrong = []
    if claimed is None:
        claimed = claims(given)
    for drawing, texts in claimed.items():
        for fact in (*report.speed, *report.model):
            said = texts.get(fact.label)
            if said is not None and not said.startswith(fact.text):
                wrong.append(f"{drawing}: {fact.label} is {said!r}, not {fact.text!r}")
    one = "step" if given.run.kind == "training" else "pass"
    numbers = {name: report.value(name) for name in (one, "MFU", "samples/s")}
    logged = scalars(analysis)
    for tag, name, factor in (
        ("step_ms", one, 1e-3),
        ("mfu", "MFU", 1.0),
        ("samples_per_second", "samples/s", 1.0),
    ):
        scalar = logged[tag] * factor if tag in logged else None
        if not _equal(numbers.get(name), scalar):
            wrong.append(f"scalars: {tag} is {logged.get(tag)}")
    return [*wrong, *_of_deepspeed(analysis), *_of_the_csv(analysis)]


def _of_deepspeed(analysis: Analysis) -> Iterator[str]:
    """Yield times in the summary in DeepSpeed's format that differ from the report.

    This format has few digits, so a difference of 1 % is allowed.
    """
    report = report_of(analysis)
    for line in summary(analysis, detailed=False).splitlines():
        label, _, text = line.partition(":  ")
        value = report.value(_IN_DEEPSPEED.get(label.strip(), ""))
        found = re.match(r"([\d.]+) (ns|us|µs|ms|s)\b", text.strip())
        if value and found:
            said = float(found[1]) * _SECONDS[found[2].replace("us", "µs")]
            if not math.isclose(said, value, rel_tol=0.01):
                yield f"DeepSpeed: {label.strip()} is {text.strip()}, not {value}"


def _of_the_csv(analysis: Analysis) -> Iterator[str]:
    """Yield the root's share of the step in the CSV table, if it differs from its seconds."""
    root = next(csv.DictReader(io.StringIO(csv_table(analysis, analysis.tree(phase=None)))))
    if root["share_of_step"] and analysis.step_times.mean:
        share = float(root["total_seconds"]) / analysis.step_times.mean
        if not _equal(share, float(root["share_of_step"])):
            yield f"csv: the root's share is {root['share_of_step']}, not {share}"


def wrong_sums(given: Profile) -> list[str]:
    """Return a description of each sum and of each cost in a sentence that is wrong.

    The parts of a whole must add up to it. The seconds and the percentage of a cost must be the
    same share of the step.
    """
    analysis = analyze(given)
    report = report_of(analysis)
    times = analysis.step_times
    one = "step" if given.run.kind == "training" else "pass"
    parts = [fact for fact in report.speed if fact.of == one]
    wrong = []
    if parts:
        seconds_add_up = _equal(sum(fact.value or 0.0 for fact in parts), times.mean)
        shares_add_up = _equal(sum(fact.share or 0.0 for fact in parts), 1.0)
        if not (seconds_add_up and shares_add_up):
            wrong.append(f"phases: {[fact.share for fact in parts]}")
    if report.breakdown and not _equal(sum(part.share for part in report.breakdown), 1.0):
        wrong.append(f"breakdown: {[part.share for part in report.breakdown]}")
    if report.breakdown and not _equal(sum(part.seconds for part in report.breakdown), times.mean):
        wrong.append(f"breakdown: {[part.seconds for part in report.breakdown]}")
    for phase in PHASES:
        own = [module.work(phase).self_seconds for module in given.modules.values()]
        whole = given.modules[""].work(phase).seconds
        added_up = sum(each.median for each in own if each is not None)
        if whole is not None and not _equal(added_up, whole.median):
            wrong.append(f"modules: {phase}")
    wrong += _above_their_phase(given, times.phases)
    if times.mean:
        for sentence in (*report.verdict.why, *report.verdict.also):
            wrong += _wrong_costs(sentence, times.mean)
    return wrong


def _wrong_costs(sentence: str, mean: float) -> Iterator[str]:
    """Yield a sentence for each of its costs whose percentage differs from its seconds."""
    for share, number, unit in _COST.findall(sentence):
        if "<" in share:
            continue
        percent = 100 * float(number) * _SECONDS[unit] / mean
        # The percentage has one decimal, and the seconds have three digits.
        if abs(percent - float(share)) > 0.06 + 0.006 * float(share):
            yield f"verdict: {sentence}"


def _above_their_phase(given: Profile, phases: Mapping[str, float]) -> Iterator[str]:
    """Yield the phases in which the modules take longer than the step does."""
    passes: Mapping[str, tuple[Phase, ...]] = {
        "forward": ("forward",),
        "backward": ("backward", "recompute"),
    }
    for part, inside in passes.items():
        spreads = [given.modules[""].work(phase).seconds for phase in inside]
        took = sum(each.median for each in spreads if each is not None)
        if part in phases and took > phases[part] * (1 + 1e-9):
            yield f"modules: {part} takes {took} s, and the step's {part} {phases[part]} s"


def _equal(one: float | None, other: float | None) -> bool:
    """Return True if two numbers are equal except for rounding, or if both are `None`."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-15)
