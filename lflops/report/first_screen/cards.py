"""Turn findings into cards. A card is a suggestion for one thing to do next.

A finding is one reason for lost time. An issue is a finding that should be fixed.
"""

from collections.abc import Sequence

from msgspec import Struct

from lflops import units
from lflops.findings.finding import Finding, least_share
from lflops.findings.registry import issue_share
from lflops.findings.run_rule import preempted_share
from lflops.findings.stalls import stalls_of
from lflops.ledger.account import Ledger
from lflops.profile.module_names import plain
from lflops.report.first_screen.confidence import PREEMPTED_SHARE, Confidence, Level
from lflops.report.first_screen.step_times import StepTimes
from lflops.report.text import WORDS

MOST_CARDS = 6
"""Maximum number of cards of a first screen.

The page shows the first `FIRST_CARDS` cards, and the other cards after a click. The terminal and
the log show only the first `FIRST_CARDS` cards.
"""


FIRST_CARDS = 3


LEAST_SAVING = 0.03
"""A finding that is not an issue gets a card if its cost is at least this share of a step."""


MANY_STEPS = 30
"""The confidence in a cost is high if it was measured in at least this many steps."""


PROVEN_SHARE = 0.65
"""The confidence in a finding is high if at least this share of similar findings was right."""


CAUSES_WITHOUT_CARD = {"ideal_compute", "peak"}
"""Causes whose findings get no card, unless the finding is an issue.

Only an issue of these causes shows time that can be saved.
"""


VIEWS = WORDS["views"]
"""The view (tab) of the page that shows the data behind a finding, keyed by the finding's cause.

For all other causes, the view is `modules` if the finding names a module, and otherwise `run`.
"""


class Card(Struct, frozen=True, kw_only=True):
    """A suggestion for one thing to do next.

    Attributes:
        cause: The name of the finding's rule.
        title: A few words that name the cause of the cost.
        seconds: Maximum seconds per step that the action saves, or `None` if this is unknown.
        is_lower_bound: Whether the action may save more than `seconds`.
        text: The seconds as text, such as `−29.0 ms` or `−29.0 ms or more`. There is no minus sign
            if the finding is not an issue.
        action: Advice on what to do. Empty if there is no general advice.
        sentence: The finding as a sentence.
        view: The view (tab) of the page that shows the data behind the finding.
        module: The module that this view shows. Empty if the finding is not about a module.
        confidence: Confidence in the finding.
        is_issue: Whether the finding is an issue. If not, the card only shows where time goes.
    """

    cause: str
    title: str
    seconds: float | None
    is_lower_bound: bool
    text: str
    action: str
    sentence: str
    view: str
    module: str
    confidence: Confidence
    is_issue: bool


def cards_of(
    findings: Sequence[Finding],
    times: StepTimes | None,
    confidence: Confidence,
    ledger: Ledger | None,
) -> list[Card]:
    """Return a card for each finding whose time might be saved, in the order of the findings.

    `times` are the times of the unprofiled steps, and `confidence` is the confidence in the whole
    screen.
    """
    mean = 0.0 if times is None else times.steps.mean
    steady_steps = _steady_steps(ledger)
    cards = []
    for finding in findings:
        if not _is_saving(finding, mean):
            continue
        of_finding = _confidence_of(finding, confidence)
        if steady_steps >= MANY_STEPS and _is_of_all_steps(finding, times):
            why = f"measured in all {steady_steps} unprofiled steps of the run"
            of_finding = Confidence(level="high", why=(why,))
        cards.append(_card(finding, of_finding, ledger))
    return cards


def _steady_steps(ledger: Ledger | None) -> int:
    """Return the number of unprofiled steps of the run, or 0 if steps often waited for a core."""
    if ledger is None or preempted_share(ledger) >= PREEMPTED_SHARE:
        return 0
    return sum(group.steps for group in ledger.unprofiled)


def _is_of_all_steps(finding: Finding, times: StepTimes | None) -> bool:
    """Return whether the cost of a finding was measured in all unprofiled steps of the run."""
    if finding.of == "run" or finding.cause == "data":
        return True
    if times is None or times.steps.source != "run":
        return False
    return finding.is_overhead and finding.cause in times.phases


def _is_saving(finding: Finding, mean: float) -> bool:
    if finding.is_issue:
        return True
    if finding.cause in CAUSES_WITHOUT_CARD:
        return False
    if finding.seconds is None:
        return True
    return bool(finding.fix) and finding.seconds >= LEAST_SAVING * mean


def _card(finding: Finding, confidence: Confidence, ledger: Ledger | None) -> Card:
    seconds = finding.seconds
    saving = "unknown"
    if seconds is not None:
        # Only an issue can be fixed, so only the time of an issue has a minus sign.
        sign = "−" if finding.is_issue else ""
        saving = f"{sign}{units.duration(seconds)}"
        if finding.is_lower_bound:
            saving += " or more"
    usual_view = "modules" if finding.module else "run"
    view = VIEWS.get(finding.cause, usual_view)
    return Card(
        cause=finding.cause,
        title=_title_of(finding, ledger),
        seconds=seconds,
        is_lower_bound=finding.is_lower_bound,
        text=saving,
        action="" if finding.cause == "busiest" else finding.fix,
        sentence=finding.sentence,
        view=view,
        module=finding.module,
        confidence=confidence,
        is_issue=finding.is_issue,
    )


def _title_of(finding: Finding, ledger: Ledger | None) -> str:
    stalls = None
    if finding.cause in {"data", "other"}:
        stalls = stalls_of(ledger, finding.cause)
    if stalls is not None and finding.cause == "data":
        return f"Data loading stalls {stalls.often}"
    if finding.title:
        return f"{finding.title[0].upper()}{finding.title[1:]}"
    if finding.cause == "other" and finding.place:
        return f"Work in {plain(finding.place)}"
    title = WORDS["titles"].get(finding.cause, plain(finding.cause.replace("_", " ")))
    if finding.rank is not None:
        title = f"rank {finding.rank} is slow"
    if finding.module:
        title = f"{title} in {plain(finding.module)}"
    elif finding.place:
        title = f"{title} in {plain(finding.place)}"
    elif stalls is not None and stalls.is_regular and stalls.often in finding.sentence:
        title = f"{title}, mostly {stalls.often}"
    return f"{title[0].upper()}{title[1:]}"


def _confidence_of(finding: Finding, of_screen: Confidence) -> Confidence:
    level: Level = "medium"
    if finding.right is not None:
        is_proven = least_share(*finding.right) >= PROVEN_SHARE
        if is_proven and of_screen.level != "low":
            level = "high"
        return Confidence(level=level, why=(finding.track_record,))
    if not finding.is_issue:
        if of_screen.level == "low":
            level = "low"
        why = "the cost is too small to be reported as an issue"
        if issue_share(finding.cause) is None:
            why = "the finding only shows where time goes"
        return Confidence(level=level, why=(why,))
    return Confidence(
        level=of_screen.level, why=("the cost is large enough to be reported as an issue",)
    )
