"""The page's Summary view: texts ready to show, and shares for the widths of bars."""

from collections.abc import Iterator

from msgspec import Struct

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.profile.model import PHASES
from lflops.report.lines.budget import advice, sorted_parts
from lflops.report.lines.facts import facts, remarks
from lflops.report.lines.times import times
from lflops.report.lines.verdict import modules_of_part, verdict

__all__ = ["Figure", "Head", "Line", "Part", "Summary", "head", "summary"]

_WITHIN_FORWARD = frozenset({"prefill", "decode"})
_LEAST_REST = 0.001
LARGE = ("step", "pass", "least time", "MFU", "samples/s", "tokens/s", "peak live memory", "memory needed")
"""The figures that are shown large, in this order."""


class Figure(Struct, frozen=True, kw_only=True):
    """A number that is shown large, and what it rests on."""

    label: str
    text: str
    remark: str = ""


class Part(Struct, frozen=True, kw_only=True):
    """A part of the step.

    Attributes:
        name: What it is.
        share: Of the step, for the width of its bar.
        text: That with its seconds.
        advice: What usually shortens it.
        modules: The modules that have the most of it, repeated ones as their pattern, with their shares of the step.
    """

    name: str
    share: float
    text: str
    advice: str = ""
    modules: tuple[tuple[str, float], ...] = ()


class Line(Struct, frozen=True, kw_only=True):
    """A label with a value; a doubt makes the figures less reliable."""

    label: str
    text: str
    doubt: bool = False


class Head(Struct, frozen=True, kw_only=True):
    """What a list of windows shows of each.

    Attributes:
        step: The training's.
        when: Its window and its step, as text.
        kind: The stage, or how it was profiled.
        figures: The large figures that change from window to window, by their labels, in SI units; unknown ones are left out.
        ranges: The quartiles of those that have some.
    """

    step: int | None
    when: str
    kind: str
    device: str
    strategy: str | None
    ranks: int
    dtype: str | None
    partial: bool
    figures: dict[str, float]
    ranges: dict[str, tuple[float, float]]


class Summary(Struct, frozen=True, kw_only=True):
    """A profile at a glance.

    Attributes:
        verdict: What the step reached, and where most of the rest went, in sentences.
        doubts: How many of the facts make the figures less reliable.
        figures: The large ones.
        phases: The step's phases, and `unaccounted` for the rest of it; empty where no clean step was timed.
        budget: The step's peak-seconds, the largest part first; empty where the peak is unknown.
        why_no_budget: Why it is.
        facts: The other figures, what was profiled, on what, and all that is in no figure.
    """

    verdict: tuple[str, ...]
    doubts: int
    figures: tuple[Figure, ...]
    phases: tuple[Part, ...]
    budget: tuple[Part, ...]
    why_no_budget: str
    facts: tuple[Line, ...]


def summary(analysis: Analysis) -> Summary:
    """The first view of a profile."""
    budget = tuple(_budget(analysis))
    figures = list(_figures(analysis))
    large = [each for label in LARGE for each in figures if each.label == label]
    others = [Line(label=each.label, text=", ".join(filter(None, (each.text, each.remark)))) for each in figures if each not in large]
    lines = [Line(label=label, text=text, doubt=doubt) for label, text, doubt in remarks(analysis)]
    return Summary(
        verdict=verdict(analysis),
        doubts=sum(line.doubt for line in lines),
        figures=tuple(large),
        phases=tuple(_phases(analysis)),
        budget=budget,
        why_no_budget="" if budget else _why_no_budget(analysis),
        facts=(*others, *(Line(label=label, text=text) for label, text in facts(analysis.profile)), *lines),
    )


def _budget(analysis: Analysis) -> Iterator[Part]:
    """The largest part first."""
    budget = analysis.budget
    for name, share in sorted_parts(budget) if budget else ():
        modules = tuple(modules_of_part(analysis, budget, name)) if budget else ()
        seconds = budget.seconds if budget else 0.0
        yield _part(name.replace("memory_bound", "memory-bound").replace("_", " "), share, seconds, advice(name), modules)


def head(analysis: Analysis) -> Head:
    """What a list of windows shows of this one."""
    run, clean, reached = analysis.profile.run, analysis.step_times, analysis.utilization
    one = "step" if run.kind == "training" else "pass"
    times = {one: clean.seconds, **{name: seconds for name, seconds in clean.phases.items() if name == "data"}}
    figures = {
        "MFU": reached.mfu,
        "achieved": reached.flops_per_second,
        "samples/s": clean.samples_per_second,
        "tokens/s": clean.tokens_per_second,
        **{name: None if spread is None else spread.median for name, spread in times.items()},
        "peak live memory": analysis.peak_bytes,
    }
    when = [f"{name} {at}" for name, at in (("window", run.window), ("step", run.step)) if at is not None]
    return Head(
        step=run.step,
        when=", ".join(when),
        kind=run.stage or run.kind,
        device=run.device_name if run.hardware is None or run.kind != "estimate" else run.hardware.name,
        strategy=run.strategy,
        ranks=run.world_size,
        dtype=run.precision or run.dtype,
        partial=run.partial,
        figures={label: float(figure) for label, figure in figures.items() if figure is not None},
        ranges={label: (spread.low, spread.high) for label, spread in times.items() if spread is not None and spread.n > 1},
    )


def _figures(analysis: Analysis) -> Iterator[Figure]:
    """Of the step, without its phases, then of the model."""
    root = analysis.profile.modules[""]
    lines = {line.label: line for line in times(analysis) if not line.label.startswith(" ")}
    first = [label for label in ("MFU", "achieved", "samples/s", "tokens/s") if label in lines]
    if (bound := analysis.lower_bound) is not None and analysis.step_times.seconds is None:
        yield Figure(label="least time", text=units.duration(bound.seconds), remark=f"a step can take on {bound.hardware}")
    if (room := analysis.room) is not None and analysis.profile.run.kind == "estimate":
        yield Figure(
            label="memory needed",
            text=units.size(room.needed_bytes),
            remark=f"{room.verdict}: {room.chip} has {units.size(room.usable_bytes)}",
        )
    for label in [*first, *(label for label in lines if label not in first)]:
        line = lines[label]
        if line.value == units.UNKNOWN and analysis.step_times.seconds is None:
            continue
        yield Figure(label=label, text=line.value, remark=", ".join(filter(None, (line.spread, line.remark))))
    yield Figure(label="peak live memory", text=units.size(analysis.peak_bytes))
    yield Figure(label="parameters", text=units.count(root.parameters), remark=units.size(root.parameter_bytes))
    if analysis.profile.is_counted:
        macs = {phase: root.work(phase).macs for phase in PHASES}
        ran = ", ".join(f"{phase} {units.count(count)}" for phase, count in macs.items() if count)
        yield Figure(label="MACs", text=units.count(sum(macs.values())), remark=ran)


def _phases(analysis: Analysis) -> Iterator[Part]:
    clean = analysis.step_times
    step = clean.seconds.median if clean.seconds else 0.0
    left = 1.0
    for name, seconds in clean.phases.items():
        if step and not (name in _WITHIN_FORWARD and "forward" in clean.phases):
            left -= seconds.median / step
            yield _part(name, seconds.median / step, step)
    if clean.phases and step and left >= _LEAST_REST:
        yield _part("unaccounted", left, step, "each phase is a separate median, so their sum may be less than the median step")


def _why_no_budget(analysis: Analysis) -> str:
    if not analysis.profile.is_counted:
        return "nothing was counted"
    if analysis.step_times.seconds is None:
        return "no clean step was timed"
    return (
        f'what {analysis.profile.run.device_name} can do in the dtypes that were multiplied is not known; profile with hardware="measure", '
        "with a name that lflops hardware lists, or with your own lflops.Hardware"
    )


def _part(name: str, share: float, seconds: float, advice: str = "", modules: tuple[tuple[str, float], ...] = ()) -> Part:
    text = f"{units.percent(share)}, {units.duration(share * seconds)}"
    return Part(name=name, share=share, text=text, advice=advice, modules=modules)
