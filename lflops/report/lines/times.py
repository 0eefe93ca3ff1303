"""Step time, rates and MFU as lines: a number, its spread where it has one, and what it rests on."""

from collections.abc import Iterator
from typing import NamedTuple

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.speed.step_times import StepTimes
from lflops.analyze.speed.utilization import MODEL_PHASES, Utilization
from lflops.profile.model import Run
from lflops.profile.records import Spread

__all__ = ["Line", "times"]

_PER_SECOND = {"ns": 1e9, "µs": 1e6, "ms": 1e3, "s": 1}
_PARTS_OF_FORWARD = ("prefill", "decode")


class Line(NamedTuple):
    """A label, indented where it is part of the one above; a number, its spread, and what it rests on."""

    label: str
    value: str
    spread: str
    remark: str


def times(analysis: Analysis) -> Iterator[Line]:
    """The step and its phases, rates, FLOP/s and MFU, CPU time, and the observer's overhead."""
    run, clean = analysis.profile.run, analysis.step_times
    one, several = ("step", "steps") if run.kind == "training" else ("pass", "passes")
    if clean.seconds is None:
        yield Line(one, units.UNKNOWN, "", f"no clean {several}")
        return
    rests_on = f"of one clean {one}" if clean.steps == 1 else f"median ± quartiles of {units.count(clean.steps)} clean {several}"
    yield _timed(one, clean.seconds, rests_on)
    yield from _phases(clean, one)
    for label, rate in (("samples/s", clean.samples_per_second), ("tokens/s", clean.tokens_per_second)):
        if rate is not None:
            yield Line(label, units.rate(rate), "", "")
    yield from _reached(analysis)
    if clean.cpu_seconds is not None:
        remark = f"{_times(clean.cpu_seconds.median, clean.seconds.median)} the time of the {one}{_of_the_system(clean)}"
        yield _timed("CPU time", clean.cpu_seconds, remark)
    if run.observer_ratio is not None:
        remark = f"hooked {several} over clean {several}"
        yield Line("observer", _times(run.observer_ratio, 1), "", remark)


def _of_the_system(clean: StepTimes) -> str:
    return "" if clean.system_seconds is None else f", {units.duration(clean.system_seconds.median)} of it in the kernel"


def _phases(clean: StepTimes, one: str) -> Iterator[Line]:
    """Each with its share; the parts of a forward are indented below it."""
    parts = [name for name in _PARTS_OF_FORWARD if name in clean.phases and "forward" in clean.phases]
    names = [(name, f"  {name}") for name in clean.phases if name not in parts]
    if parts:
        after = 1 + [name for name, _ in names].index("forward")
        names[after:after] = [(name, f"    {name}") for name in parts]
    step = clean.seconds.median if clean.seconds else 0
    for name, label in names:
        seconds = clean.phases[name]
        share = units.percent(seconds.median / step if step else None)
        host = f", {units.duration(clean.host_phases[name].median)} on the host" if name in clean.host_phases else ""
        yield _timed(label, seconds, f"{share:>7} of the {one}{host}")


def _reached(analysis: Analysis) -> Iterator[Line]:
    reached, run, root = analysis.utilization, analysis.profile.run, analysis.profile.modules[""]
    rate = units.rate(reached.flops_per_second, "FLOP/s")
    ran = " and ".join(phase for phase in MODEL_PHASES if root.work(phase).macs) or "forward"
    yield Line("achieved", rate, "", "nothing was counted" if reached.flops_per_second is None else f"2 × MACs of {ran}")
    yield Line("MFU", units.of_peak(reached.mfu), "", _peak(reached, run))
    if units.percent(reached.hfu) != units.percent(reached.mfu):
        yield Line("HFU", units.of_peak(reached.hfu), "", "with recomputed MACs")
    if units.percent(reached.executed) != units.percent(reached.hfu):
        known = "without the MACs that masks skip, each at the peak of its dtype"
        unknown = "some MACs are in a dtype without a known peak"
        yield Line("executed", units.of_peak(reached.executed), "", unknown if reached.executed is None else known)


def _peak(reached: Utilization, run: Run) -> str:
    """The peak that the share is of, or why it is unknown."""
    if reached.hardware is None:
        return f'the peak of {run.device_name} is not known: hardware="measure" measures it'
    if reached.peak_flops_per_second is None:
        return f"the peak of {reached.hardware} for {reached.dtype or run.dtype or 'an unknown dtype'} is not known"
    return f"of {units.rate(reached.peak_flops_per_second, 'FLOP/s')} ({reached.hardware}, {reached.dtype} dense)"


def _timed(label: str, seconds: Spread, remark: str) -> Line:
    """A median with its distance to the farther quartile, in the same unit and with as many decimals."""
    median = units.duration(seconds.median)
    number, unit = median.split()
    decimals = len(number.partition(".")[2])
    width = max(seconds.high - seconds.median, seconds.median - seconds.low) * _PER_SECOND[unit]
    least = 10**-decimals
    known = "" if seconds.n == 1 else f"± <{least:g}" if 0 < width < least / 2 else f"± {round(width, 9):.{decimals}f}"
    return Line(label, median, known, remark)


def _times(value: float, base: float) -> str:
    return f"{value / base:.2f}×" if base else units.UNKNOWN
