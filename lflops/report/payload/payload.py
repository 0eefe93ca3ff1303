"""A profile as what the page draws: few values, ready to be shown, and tables column by column."""

from pathlib import Path

from msgspec import Struct

from lflops.profile.model import Profile
from lflops.report.payload.columns import VERSION, Columns
from lflops.report.payload.compare import RunShown, run_shown
from lflops.report.payload.memory import MemoryShown, memory
from lflops.report.payload.modules import modules
from lflops.report.payload.operators import Operators, operators
from lflops.report.payload.ranks import RanksShown, ranks
from lflops.report.payload.roofline import Roofs, roofs
from lflops.report.payload.summary import Summary, summary, trend
from lflops.report.payload.traces import TraceFile, traces

__all__ = ["Payload", "payload"]


class Payload(Struct, frozen=True, kw_only=True):
    """What one page shows of one profile, a field for each of its views.

    Attributes:
        lflops: The version of this format, before everything else.
        trend: Figures that windows are followed by; right behind, so that a server reads them without the rest.
        title: What was profiled and when.
        partial: Whether the window was left before its end.

    A view for which there is nothing is `None`.
    """

    lflops: int
    trend: dict[str, float]
    title: str
    partial: bool
    summary: Summary
    modules: Columns
    operators: Operators | None
    roofline: Roofs | None
    memory: MemoryShown | None
    ranks: RanksShown | None
    traces: tuple[TraceFile, ...]
    compare: RunShown


def payload(profile: Profile, folder: Path | None = None) -> Payload:
    """Everything that the page shows of a profile.

    Args:
        profile: What is shown.
        folder: From which its traces are to be reached; `None` names them as the profile does.
    """
    return Payload(
        lflops=VERSION,
        trend=trend(profile),
        title=_title(profile),
        partial=profile.run.partial,
        summary=summary(profile),
        modules=modules(profile),
        operators=operators(profile),
        roofline=roofs(profile),
        memory=memory(profile),
        ranks=ranks(profile),
        traces=traces(profile, folder),
        compare=run_shown(profile),
    )


def _title(profile: Profile) -> str:
    run = profile.run
    when = [f"{name} {at}" for name, at in (("window", run.window), ("step", run.step)) if at is not None]
    return ", ".join([profile.modules[""].kind or "a script", run.stage or run.kind, *when])
