"""A profile as what the page draws: few values, ready to be shown, and tables column by column."""

from pathlib import Path

from msgspec import Struct

from lflops.profile import Profile
from lflops.report.shown.columns import Columns
from lflops.report.shown.modules import modules
from lflops.report.shown.summary import Summary, summary
from lflops.report.shown.traces import TraceFile, traces

__all__ = ["VERSION", "Payload", "payload"]

VERSION = 1
"""Of the form below: a page draws its own and no other."""


class Payload(Struct, frozen=True, kw_only=True):
    """What one page shows of one profile, a field for each of its views.

    Attributes:
        lflops: The version of this form, before everything else.
        title: What was profiled and when.
        partial: Whether the window was left before its end.
    """

    lflops: int
    title: str
    partial: bool
    summary: Summary
    modules: Columns
    traces: tuple[TraceFile, ...]


def payload(profile: Profile, folder: Path | None = None) -> Payload:
    """Everything that the page shows of a profile.

    Args:
        profile: What is shown.
        folder: From which its traces are to be reached; `None` names them as the profile does.
    """
    return Payload(
        lflops=VERSION,
        title=_title(profile),
        partial=profile.run.partial,
        summary=summary(profile),
        modules=modules(profile),
        traces=traces(profile, folder),
    )


def _title(profile: Profile) -> str:
    run = profile.run
    when = [f"{name} {at}" for name, at in (("window", run.window), ("step", run.step)) if at is not None]
    return ", ".join([profile.modules[""].kind or "a script", run.stage or run.kind, *when])
