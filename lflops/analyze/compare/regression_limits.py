"""Check a run against limits: the step's time relative to another run, MFU, memory."""

from typing import Literal

from msgspec import Struct

from lflops.analyze.compare.diff import Diff

__all__ = ["Limit", "limits"]


class Limit(Struct, frozen=True, kw_only=True):
    """One limit and its result.

    Attributes:
        name: Of the figure.
        allowed: The most, or of MFU the least.
        found: The run's figure.
        broken: `None` where it is unknown.
    """

    name: Literal["max_regress", "min_mfu", "max_memory"]
    allowed: float
    found: float | None
    broken: bool | None


def limits(
    diff: Diff, *, max_regress: float | None = None, min_mfu: float | None = None, max_memory: float | None = None
) -> tuple[Limit, ...]:
    """Check the second run against the given limits.

    Args:
        diff: The run and the one before.
        max_regress: How much longer a step may take, as a share of what it took. A step that is longer within the noise breaks nothing;
            a slower machine does.
        min_mfu: The least MFU, a share of 1.
        max_memory: The most bytes alive at once.
    """
    step, mfu, peak = diff.step, diff.mfu.after, diff.peak_bytes.after
    made = []
    if max_regress is not None:
        regress = None if step.ratio is None or step.low is None else step.ratio - 1
        certain = step.low is not None and step.low > 1
        made.append(
            Limit(
                name="max_regress",
                allowed=max_regress,
                found=regress,
                broken=None if regress is None else certain and regress > max_regress,
            )
        )
    if min_mfu is not None:
        made.append(Limit(name="min_mfu", allowed=min_mfu, found=mfu, broken=None if mfu is None else mfu < min_mfu))
    if max_memory is not None:
        made.append(Limit(name="max_memory", allowed=max_memory, found=peak, broken=None if peak is None else peak > max_memory))
    return tuple(made)
