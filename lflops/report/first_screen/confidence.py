"""Judge how reliable the values of the first screen are."""

from typing import Literal

from msgspec import Struct

from lflops.findings.run_rule import preempted_share
from lflops.ledger.account import Ledger
from lflops.report.first_screen.step_times import unlike_window
from lflops.report.first_screen.window import WindowSummary

Level = Literal["high", "medium", "low"]


PREEMPTED_SHARE = 0.05
"""The confidence is low if steps waited for a CPU core for at least this share of training time.

If no issue was found in such a run, the report says that it cannot tell whether anything is wrong.
"""


PREEMPTED = (
    "other programs kept this machine busy during a part of the run, or the process was suspended"
)


class Confidence(Struct, frozen=True, kw_only=True):
    """A level of confidence in a value, with the reasons."""

    level: Level
    why: tuple[str, ...] = ()


def confidence_in(window: WindowSummary | None, ledger: Ledger | None) -> Confidence:
    if window is None:
        return Confidence(
            level="low",
            why=("no window was profiled", "all figures come from the ledger of the run"),
        )
    why = []
    if window.unseen is not None:
        why.append(window.unseen)
    if ledger is not None and preempted_share(ledger) >= PREEMPTED_SHARE:
        why.append(PREEMPTED)
    is_low = bool(why)
    doubts = [text for text in window.confidence if text not in why]
    if ledger is not None and doubts:
        # The first text has the number of timed steps, which is smaller than the number of steps in
        # the run.
        doubts[0] = f"the window has {doubts[0]}"
    # A log has no notes below this text.
    why += [text.replace(" below", " in the output of lflops show") for text in doubts]
    unlike = unlike_window(window, ledger)
    if unlike:
        why.append(unlike)
        doubts.append(unlike)
    level: Level = "high"
    if is_low:
        level = "low"
    elif len(doubts) > 1:
        # The first text has the number of timed steps.
        level = "medium"
    return Confidence(level=level, why=tuple(why))
