"""Build the first screen of a run, which is what a user sees first on the page.

The terminal and the log show the same data as text. The parts of the first screen are a few
numbers, the share of time that was spent on training, the phases of a step, and cards (suggestions
for what to do next).

Data about modules and work come from the last window (a few profiled steps). Without a window, only
the times in the ledger (the run's time account) are known.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from lflops import units
from lflops.findings.finding import Finding, first_issue
from lflops.ledger.account import Ledger
from lflops.report.first_screen.cards import MOST_CARDS, Card, cards_of
from lflops.report.first_screen.confidence import Confidence, confidence_in
from lflops.report.first_screen.figures import figures_of, time_trained_sentence
from lflops.report.first_screen.merged_findings import findings_of
from lflops.report.first_screen.step_times import Steps, StepTimes, phase_parts, times_of
from lflops.report.first_screen.window import RankShown, WindowSummary
from lflops.report.summary_facts import Fact, Part
from lflops.report.text import counted
from lflops.report.verdict import nothing_found


class FirstScreen(Struct, frozen=True, kw_only=True):
    """The first screen: the most important facts about a run, in the order in which they are read.

    Attributes:
        title: The class of the model, or another description if the class is unknown.
        header: Facts such as steps, duration and chip.
        confidence: Confidence in the figures.
        figures: At most four numbers, such as the step time and MFU, with labels.
        trained: The share of the run's time that was spent on training, as a sentence. Empty
            without a ledger.
        steps: Times of the unprofiled steps, or `None` if no step was timed.
        cards: Suggestions for what to do next, the most urgent first.
        nothing: Sentence that there is no issue, or that this is unknown. Empty if there is one.
        phases: The phases of a step with their mean times.
        hint: Advice on how to get MFU if the peak of the chip is unknown. Otherwise empty.
        ranks: All ranks. Empty if the run has only one rank.
    """

    title: str
    header: tuple[str, ...]
    confidence: Confidence
    figures: tuple[Fact, ...]
    trained: str
    steps: Steps | None
    cards: tuple[Card, ...]
    nothing: str
    phases: tuple[Part, ...]
    hint: str
    ranks: tuple[RankShown, ...]


def first_screen(window: WindowSummary | None, ledger: Ledger | None) -> FirstScreen:
    """Build the first screen of a run from its last window and its ledger.

    A ledger only has training steps, so it is not used for a window of another stage.
    """
    if window is not None and window.profile.run.stage not in {None, "train"}:
        ledger = None
    times = times_of(window, ledger)
    confidence = confidence_in(window, ledger)
    steps = None
    phases: Mapping[str, float] = {}
    if times is not None:
        steps = times.steps
        phases = times.phases
    findings = findings_of(window, ledger)
    cards = cards_of(findings, times, confidence, ledger)
    hint = ""
    ranks: Sequence[RankShown] = ()
    if window is not None:
        hint = window.hint
        ranks = window.ranks
    return FirstScreen(
        title=_title(window),
        header=tuple(_header(window, ledger)),
        confidence=confidence,
        figures=tuple(figures_of(window, ledger, times)),
        trained=time_trained_sentence(ledger),
        steps=steps,
        cards=tuple(cards[:MOST_CARDS]),
        nothing=_nothing(findings, times, confidence),
        phases=tuple(phase_parts(phases)),
        hint=hint,
        ranks=tuple(ranks),
    )


def _title(window: WindowSummary | None) -> str:
    if window is None:
        return "A run without a profiled window"
    return window.title


def _header(window: WindowSummary | None, ledger: Ledger | None) -> Iterator[str]:
    if ledger is not None:
        yield counted(ledger.steps, "step")
        yield units.long_duration(ledger.total)
    if window is not None:
        run = window.profile.run
        yield f"{window.device} on {run.host}"
        if run.world_size > 1:
            yield counted(run.world_size, "rank")
        precision = run.precision or run.dtype
        if precision:
            yield precision
    if ledger is not None:
        if len(ledger.starts) > 1:
            yield counted(len(ledger.starts), "start")
        if ledger.starts[-1].ended != "finished":
            yield ledger.starts[-1].ended
        began = datetime.fromtimestamp(ledger.starts[0].begin, UTC)
        yield f"started {began:%Y-%m-%d %H:%M} UTC"
    elif window is not None:
        created = window.profile.run.created[:16].replace("T", " ")
        yield f"profiled {created} UTC"


def _nothing(findings: Sequence[Finding], times: StepTimes | None, confidence: Confidence) -> str:
    """Return the sentence that no issue was found, or the empty string if there is an issue."""
    if first_issue(findings) is not None:
        return ""
    if times is None:
        return "No unprofiled step was timed."
    if confidence.level == "low":
        return f"Cannot tell whether anything is wrong: {confidence.why[0]}."
    return nothing_found(findings)
