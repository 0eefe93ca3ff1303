"""What the page's Compare needs of a window beside its table of modules: its circumstances, its pace, and how sure its times are."""

from msgspec import Struct

from lflops.analyze.analysis import Analysis
from lflops.analyze.compare.diff import FACTS, peak, phases_of
from lflops.analyze.compare.module_pair import TIMED
from lflops.analyze.compare.significance import error_of
from lflops.profile.model import Profile
from lflops.profile.records import Phase, Spread
from lflops.report.payload.columns import Columns, column

__all__ = ["Compare", "compare"]

_Measured = tuple[float, float | None]


class Compare(Struct, frozen=True, kw_only=True):
    """One side of a comparison. `None` is unknown.

    Attributes:
        facts: The circumstances that two runs can differ in.
        counted: Whether its work is known.
        phases_ran: Those in which anything ran.
        step: Median seconds of the clean steps, and the error of that in seconds.
        phases: The same of each phase that the steps tell of.
        mfu: A share of 1.
        samples_per_second: Of the clean steps. So is `tokens_per_second`.
        peak_bytes: The most bytes alive.
        times: Of each module in each phase that has times, in the order of the table of modules: the operator calls, which tell a time
            that is unknown from one that there is not, and the error of the median; of all of it, and `own_`. An error is an estimate:
            four digits of it are kept, and the page stays small.
    """

    facts: dict[str, str | int | None]
    counted: bool
    phases_ran: tuple[Phase, ...]
    step: _Measured | None
    phases: dict[str, _Measured]
    mfu: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    times: Columns


def compare(analysis: Analysis) -> Compare:
    """All that `lflops.diff` reads in a profile and no other view shows."""
    profile, found = analysis.profile, analysis.step_times
    return Compare(
        facts={name: getattr(profile.run, name) for name in FACTS},
        counted=bool(profile.cells),
        phases_ran=phases_of(profile),
        step=None if found.seconds is None else (found.seconds.median, _error(found.seconds)),
        phases={name: (spread.median, _error(spread)) for name, spread in found.phases.items()},
        mfu=analysis.utilization.mfu,
        samples_per_second=found.samples_per_second,
        tokens_per_second=found.tokens_per_second,
        peak_bytes=peak(profile),
        times=_times(profile),
    )


def _times(profile: Profile) -> Columns:
    columns: Columns = {}
    for phase in TIMED:
        works = [row.work(phase) for row in profile.modules.values()]
        for prefix in ("", "own_"):
            columns[f"{phase}.{prefix}calls"] = column(getattr(work, f"{prefix}calls") for work in works)
            columns[f"{phase}.{prefix}error"] = column(_error(getattr(work, f"{prefix}seconds")) for work in works)
    return columns


def _error(spread: Spread | None) -> float | None:
    return None if spread is None or spread.n < 2 else float(f"{error_of(spread):.4g}")
