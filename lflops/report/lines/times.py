"""How long it took and what was reached in that time, as lines: a number, its spread where it has one, and what it rests on."""

from collections.abc import Iterator
from typing import NamedTuple

from rich.table import Table

from lflops import units
from lflops.analyze.speed.step_times import StepTimes, step_times
from lflops.analyze.speed.utilization import Utilization, utilization
from lflops.profile.model import Profile, Run
from lflops.profile.records import Spread
from lflops.report.terminal.text import margin, text

__all__ = ["Line", "lines", "times"]

_PER_SECOND = {"ns": 1e9, "µs": 1e6, "ms": 1e3, "s": 1}
_PARTS_OF_FORWARD = ("prefill", "decode")


class Line(NamedTuple):
    """A label, indented where it is part of the one above; a number, its spread, and what it rests on."""

    label: str
    value: str
    spread: str
    remark: str


def times(profile: Profile) -> Table | None:
    """The pace of the clean steps and the share of the peak that they reached; `None` where no step but the counted one was timed."""
    if all(step.seconds is None or step.kind == "counted" for step in profile.steps):
        return None
    told = list(lines(profile))
    table = margin()
    value, spread = max(len(line.value) for line in told), max(len(line.spread) for line in told)
    for line in told:
        table.add_row(line.label, text(f"{line.value:>{value}}  {line.spread:<{spread}}  {line.remark}".rstrip()))
    return table


def lines(profile: Profile) -> Iterator[Line]:
    """The step and its phases, rates, what was reached, CPU time and what the observer cost."""
    run, found = profile.run, step_times(profile)
    one, several = ("step", "steps") if run.kind == "training" else ("pass", "passes")
    if found.seconds is None:
        yield Line(one, units.UNKNOWN, "", f"no clean {several}")
        return
    rests_on = f"clean {one}" if found.steps == 1 else f"clean {several}: the median, and how far the quartiles are from it"
    yield _timed(one, found.seconds, f"{units.count(found.steps)} {rests_on}")
    yield from _phases(found, one)
    for label, rate in (("samples/s", found.samples_per_second), ("tokens/s", found.tokens_per_second)):
        if rate is not None:
            yield Line(label, units.count(rate), "", "")
    yield from _reached(utilization(profile), run)
    if found.cpu_seconds is not None:
        remark = f"{_times(found.cpu_seconds.median, found.seconds.median)} the time of the {one}{_of_the_system(found)}"
        yield _timed("CPU time", found.cpu_seconds, remark)
    if run.observer_ratio is not None:
        remark = f"hooked {several} against clean ones; clean ones are what is shown"
        yield Line("observer", _times(run.observer_ratio, 1), "", remark)


def _of_the_system(found: StepTimes) -> str:
    return "" if found.system_seconds is None else f", {units.duration(found.system_seconds.median)} of it the system's"


def _phases(found: StepTimes, one: str) -> Iterator[Line]:
    """Each with its share; the parts of a forward are indented below it."""
    parts = [name for name in _PARTS_OF_FORWARD if name in found.phases and "forward" in found.phases]
    names = [(name, f"  {name}") for name in found.phases if name not in parts]
    if parts:
        behind = 1 + [name for name, _ in names].index("forward")
        names[behind:behind] = [(name, f"    {name}") for name in parts]
    whole = found.seconds.median if found.seconds else 0
    for name, label in names:
        seconds = found.phases[name]
        share = units.percent(seconds.median / whole if whole else None)
        host = f", {units.duration(found.host_phases[name].median)} on the host" if name in found.host_phases else ""
        yield _timed(label, seconds, f"{share:>7} of the {one}{host}")


def _reached(found: Utilization, run: Run) -> Iterator[Line]:
    reached = units.quantity(found.flops_per_second, "FLOP/s")
    yield Line("achieved", reached, "", "nothing was counted" if found.flops_per_second is None else "2 × MACs of forward and backward")
    yield Line("MFU", units.percent(found.mfu), "", _peak(found, run))
    if units.percent(found.hfu) != units.percent(found.mfu):
        known = "executed MACs, recomputed ones among them, each at the peak of its dtype"
        yield Line("HFU", units.percent(found.hfu), "", "some MACs are in a dtype without a known peak" if found.hfu is None else known)


def _peak(found: Utilization, run: Run) -> str:
    """What the share is of, or why there is none."""
    if found.hardware is None:
        return f"the peak of {run.device_name} is not known"
    if found.peak_flops_per_second is None:
        return f"the peak of {found.hardware} for {found.dtype or run.dtype or 'an unknown dtype'} is not known"
    return f"of {units.quantity(found.peak_flops_per_second, 'FLOP/s')} ({found.hardware}, {found.dtype} dense)"


def _timed(label: str, seconds: Spread, remark: str) -> Line:
    """With the distance to the farther quartile, in the unit of the median."""
    median = units.duration(seconds.median)
    width = max(seconds.high - seconds.median, seconds.median - seconds.low) * _PER_SECOND[median.split()[-1]]
    known = "" if seconds.n == 1 else f"± {'<0.01' if 0 < width < 0.005 else f'{width:.2f}'}"
    return Line(label, median, known, remark)


def _times(value: float, whole: float) -> str:
    return f"{value / whole:.2f}×" if whole else units.UNKNOWN
