"""Two traces compared: the step, the device's states, what idle time was lost to, and where the device's time went."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from lflops.analysis.compare.diff import Limit
from lflops.profile.records import TimingStats
from lflops.profile.series import summed
from lflops.trace.analysis.summary import TraceSummary
from lflops.trace.device_states import DeviceTimeline, total

_STATES = ("computing", "exposed_communication", "exposed_copies", "idle")


class TimeChange(Struct, frozen=True, kw_only=True):
    """Nanoseconds before and after.

    Of a step where both traces have steps, else of the whole window. 0 is none of it.
    """

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


class TraceDiff(Struct, frozen=True, kw_only=True):
    """What changed from one trace to another. The lists have what changed most first."""

    # whether times are of a step
    per_step: bool
    # of a step, or of the whole window
    window: TimeChange
    step: tuple[
        TimingStats | None, TimingStats | None
        # median and quartiles before and after, in seconds; `None` without steps
    ]
    is_beyond_noise: (
        bool | None
        # whether the quartile ranges of the steps do not overlap; `None` with fewer than two steps
    )
    mfu: tuple[float | None, float | None]
    allocated_bytes: tuple[int | None, int | None]
    # the devices' names before and after
    hardware: tuple[str, str]
    states: tuple[TimeChange, ...]
    idle: tuple[TimeChange, ...]
    categories: tuple[TimeChange, ...]
    operators: tuple[TimeChange, ...]
    kernels: tuple[TimeChange, ...]


def compare(before: TraceSummary, after: TraceSummary) -> TraceDiff:
    pair = before, after
    per_step = all(each.steps for each in pair)
    parts = [len(each.steps) if per_step else 1 for each in pair]
    timelines = [_timeline(each, per_step=per_step) for each in pair]

    def changes(*groups: Iterable[tuple[str, int]]) -> tuple[TimeChange, ...]:
        sums = zip(map(summed, groups), parts, strict=True)
        first, second = (
            {name: time / part for name, time in of_side.items()} for of_side, part in sums
        )
        rows = (
            TimeChange(name=name, before=first.get(name, 0.0), after=second.get(name, 0.0))
            for name in first | second
        )
        return tuple(
            sorted(
                (row for row in rows if row.before or row.after),
                key=lambda row: (-abs(row.change), row.name),
            )
        )

    states = {
        name: TimeChange(
            name=name, before=timelines[0][name] / parts[0], after=timelines[1][name] / parts[1]
        )
        for name in ("window", *_STATES)
    }
    first, second = before.step, after.step
    several = first is not None and second is not None and min(first.n, second.n) > 1
    return TraceDiff(
        per_step=per_step,
        window=states["window"],
        step=(first, second),
        is_beyond_noise=(first.high < second.low or second.high < first.low)
        if several and first and second
        else None,
        mfu=(_mfu(before), _mfu(after)),
        allocated_bytes=(_allocated(before), _allocated(after)),
        hardware=(_names(before), _names(after)),
        states=tuple(states[name] for name in _STATES),
        idle=changes(*(each.idle.items() for each in pair)),
        categories=changes(
            *(((row.category, row.device) for row in each.categories) for each in pair)
        ),
        operators=changes(
            *(
                (
                    (row.name, row.self_device if each.device else row.self_host)
                    for row in each.operators
                )
                for each in pair
            )
        ),
        kernels=changes(*(((row.name, row.device) for row in each.kernels) for each in pair)),
    )


def _timeline(summary: TraceSummary, *, per_step: bool) -> Mapping[str, int]:
    """The states of all steps together, or of the window.

    Of a trace without a device, the window alone.
    """
    known = (
        [step.device for step in summary.steps if step.device is not None]
        if per_step
        else [summary.device]
    )
    timelines: list[DeviceTimeline] = [each for each in known if each is not None]
    if timelines:
        whole = total(timelines)
        return {name: getattr(whole, name) for name in ("window", *_STATES)}
    window = sum(step.end - step.start for step in summary.steps) if per_step else summary.recorded
    return dict.fromkeys(_STATES, 0) | {"window": window}


def _mfu(summary: TraceSummary) -> float | None:
    return summary.utilization.mfu if summary.utilization is not None else None


def _allocated(summary: TraceSummary) -> int | None:
    return max(
        (each.memory.allocated for each in summary.devices if each.memory is not None), default=None
    )


def _names(summary: TraceSummary) -> str:
    return (
        ", ".join(dict.fromkeys(each.name or f"device {each.device}" for each in summary.devices))
        or "no device"
    )


def trace_limits(
    diff: TraceDiff,
    *,
    max_regress: float | None = None,
    min_mfu: float | None = None,
    max_memory: float | None = None,
) -> tuple[Limit, ...]:
    """Check the second trace against limits; of memory, the allocator's peak.

    A step that is longer within the spread breaks nothing.
    """
    made: list[Limit] = []
    if max_regress is not None:
        before, after = diff.step
        regress = (
            after.median / before.median - 1
            if before and after and before.median and diff.is_beyond_noise is not None
            else None
        )
        broken = None if regress is None else regress > max_regress and diff.is_beyond_noise is True
        made.append(Limit(name="max_regress", allowed=max_regress, found=regress, broken=broken))
    if min_mfu is not None:
        mfu = diff.mfu[1]
        made.append(
            Limit(
                name="min_mfu",
                allowed=min_mfu,
                found=mfu,
                broken=None if mfu is None else mfu < min_mfu,
            )
        )
    if max_memory is not None:
        peak = diff.allocated_bytes[1]
        made.append(
            Limit(
                name="max_memory",
                allowed=max_memory,
                found=peak,
                broken=None if peak is None else peak > max_memory,
            )
        )
    return tuple(made)
