"""Check a run against limits: the step's time relative to another run, MFU, memory."""

from typing import Literal

from msgspec import Struct

from lflops.analyze.compare.diff import Diff
from lflops.analyze.compare.significance import Doubt, slowed_by


class Limit(Struct, frozen=True, kw_only=True):
    """One limit and its result."""

    name: Literal["max_regress", "min_mfu", "max_memory"]  # of the figure
    allowed: float  # the most, or of MFU the least
    found: float | None  # the run's figure
    broken: bool | None  # `None` where it is unknown
    doubt: Doubt | None = None  # why no one can tell whether it is broken, where the figure is known


def limits(
    diff: Diff, *, max_regress: float | None = None, min_mfu: float | None = None, max_memory: float | None = None
) -> tuple[Limit, ...]:
    """Check the second run against the given limits: shares of 1, and the most bytes alive at once.

    A step that is longer within the noise does not break `max_regress`; a slower machine does, unless other processes made it slow.
    """
    step, mfu, peak = diff.step, diff.mfu.after, diff.peak_bytes.after
    made = []
    if max_regress is not None:
        doubt = None if step.doubt == "few_steps" else step.doubt
        regress = None if step.ratio is None or (step.low is None and doubt is None) else step.ratio - 1
        broken = None if step.low is None or regress is None else step.low > 1 and regress > max_regress
        made.append(Limit(name="max_regress", allowed=max_regress, found=regress, broken=broken, doubt=doubt))
    if min_mfu is not None:
        is_less = None if mfu is None else mfu < min_mfu
        is_busy = is_less and mfu is not None and mfu * slowed_by(diff.cpu_lost[1] or 0.0) >= min_mfu
        made.append(
            Limit(name="min_mfu", allowed=min_mfu, found=mfu, broken=None if is_busy else is_less, doubt="busy" if is_busy else None)
        )
    if max_memory is not None:
        made.append(Limit(name="max_memory", allowed=max_memory, found=peak, broken=None if peak is None else peak > max_memory))
    return tuple(made)
