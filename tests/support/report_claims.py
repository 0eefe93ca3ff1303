"""Read the claims of each view of a report back from the view itself.

Also finds claims that differ from the value in the report.
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
from lflops.report.module_table import csv_table
from lflops.report.payload.payload import payload
from lflops.report.report import report_of
from tests.support.terminal import drawn

__all__ = ["claims", "disagreements", "wrong_sums"]

_LINE = re.compile(r"^( *\S.*?)(?:  +|: +)(\S.*)$")
_COST = re.compile(r"([<\d.]+) % of the (?:step|pass) \(([\d.e-]+) (ns|µs|ms|s)\)")
_SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_IN_DEEPSPEED = {"iter latency": "step", "fwd latency": "forward", "bwd latency": "backward"}
_WIDE = 400
"""Columns of a terminal on which no line is broken."""


def claims(given: Profile) -> dict[str, dict[str, str]]:
    """By drawing: the text behind each label of a fact."""
    analysis = analyze(given)
    shown = json.decode(json.encode(payload(analysis)))["report"]
    facts = [*shown["speed"], *shown["model"]]
    return {
        "terminal": _first(_labelled(drawn(given, _WIDE))),
        "log": _first(_labelled(log_text(analysis).splitlines())),
        "page": {fact["label"]: fact["text"] for fact in facts},
    }


def _labelled(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Of the lines above the table of modules."""
    for line in lines:
        if line.startswith("───"):
            return
        if found := _LINE.match(line):
            yield found[1].strip(), found[2].split("  ")[0]


def _first(labelled: Iterator[tuple[str, str]]) -> dict[str, str]:
    """Phases are labels once more in the table of totals, below."""
    texts: dict[str, str] = {}
    for label, text in labelled:
        texts.setdefault(label, text)
    return texts


def disagreements(
    given: Profile, claimed: Mapping[str, Mapping[str, str]] | None = None
) -> list[str]:
    """Every claim of a drawing that is not what the report says.

    Args:
        given: The profile.
        claimed: What was read from its drawings; `None` draws them.
    """
    analysis = analyze(given)
    report = report_of(analysis)
    wrong = []
    for drawing, texts in (claims(given) if claimed is None else claimed).items():
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
        if not _equal(numbers.get(name), logged[tag] * factor if tag in logged else None):
            wrong.append(f"scalars: {tag} is {logged.get(tag)}")
    return [*wrong, *_of_deepspeed(analysis), *_of_the_csv(analysis)]


def _of_deepspeed(analysis: Analysis) -> Iterator[str]:
    """Its own units have fewer digits: a number is the same within one in a hundred."""
    report = report_of(analysis)
    for line in summary(analysis, detailed=False).splitlines():
        label, _, text = line.partition(":  ")
        value = report.value(_IN_DEEPSPEED.get(label.strip(), ""))
        if value and (found := re.match(r"([\d.]+) (ns|us|µs|ms|s)\b", text.strip())):
            said = float(found[1]) * _SECONDS[found[2].replace("us", "µs")]
            if not math.isclose(said, value, rel_tol=0.01):
                yield f"DeepSpeed: {label.strip()} is {text.strip()}, not {value}"


def _of_the_csv(analysis: Analysis) -> Iterator[str]:
    root = next(csv.DictReader(io.StringIO(csv_table(analysis, analysis.tree(phase=None)))))
    if root["share_of_step"] and analysis.step_times.mean:
        share = float(root["total_seconds"]) / analysis.step_times.mean
        if not _equal(share, float(root["share_of_step"])):
            yield f"csv: the root's share is {root['share_of_step']}, not {share}"


def wrong_sums(given: Profile) -> list[str]:
    """Every whole that its parts do not add up to, and every cost in a sentence that is not its share of the step."""
    analysis = analyze(given)
    report, times = report_of(analysis), analysis.step_times
    one = "step" if given.run.kind == "training" else "pass"
    parts = [fact for fact in report.speed if fact.of == one]
    wrong = []
    if parts and not (
        _equal(sum(fact.value or 0.0 for fact in parts), times.mean)
        and _equal(sum(fact.share or 0.0 for fact in parts), 1.0)
    ):
        wrong.append(f"phases: {[fact.share for fact in parts]}")
    if report.breakdown and not _equal(sum(part.share for part in report.breakdown), 1.0):
        wrong.append(f"breakdown: {[part.share for part in report.breakdown]}")
    if report.breakdown and not _equal(sum(part.seconds for part in report.breakdown), times.mean):
        wrong.append(f"breakdown: {[part.seconds for part in report.breakdown]}")
    for phase in PHASES:
        own = [module.work(phase).self_seconds for module in given.modules.values()]
        whole = given.modules[""].work(phase).seconds
        if whole is not None and not _equal(
            sum(each.median for each in own if each is not None), whole.median
        ):
            wrong.append(f"modules: {phase}")
    wrong += _above_their_phase(given, times.phases)
    for sentence in (*report.verdict.why, *report.verdict.also):
        for share, number, unit in _COST.findall(sentence):
            seconds = float(number) * _SECONDS[unit]
            if (
                "<" not in share
                and times.mean
                and abs(100 * seconds / times.mean - float(share)) > 0.06 + 0.006 * float(share)
            ):
                wrong.append(f"verdict: {sentence}")
    return wrong


def _above_their_phase(given: Profile, phases: Mapping[str, float]) -> Iterator[str]:
    """Modules that take longer than the phase of the step that they run in."""
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
    return (
        one is other
        if one is None or other is None
        else math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-15)
    )
