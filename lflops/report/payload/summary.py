"""The page's Summary view: texts ready to show, and shares for the widths of bars."""

from collections.abc import Iterator

from msgspec import Struct

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.profile.model import PHASES
from lflops.report.lines.budget import parts
from lflops.report.lines.facts import facts, remarks
from lflops.report.lines.times import times

__all__ = ["Figure", "Head", "Line", "Part", "Summary", "head", "summary"]

_WITHIN_FORWARD = frozenset({"prefill", "decode"})


class Figure(Struct, frozen=True, kw_only=True):
    """A number that is shown large, and what it rests on."""

    label: str
    text: str
    remark: str = ""


class Part(Struct, frozen=True, kw_only=True):
    """A part of the step: its share of it, for the width of its bar, and that with its seconds as text."""

    name: str
    share: float
    text: str
    said: str = ""


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
        figures: The large ones.
        phases: The step cut into its phases; empty where no clean step was timed.
        budget: The step's peak-seconds, the largest part first, the three largest with what usually helps; empty where the peak is unknown.
        why_no_budget: Why it is.
        facts: What was profiled, on what, and all that is in no figure.
    """

    figures: tuple[Figure, ...]
    phases: tuple[Part, ...]
    budget: tuple[Part, ...]
    why_no_budget: str
    facts: tuple[Line, ...]


def summary(analysis: Analysis) -> Summary:
    """The first view of a profile."""
    profile, spent = analysis.profile, analysis.budget
    budget = [] if spent is None else [_part(name, share, spent.seconds, said) for name, share, said in parts(profile, spent)]
    lines = [Line(label=label, text=text, doubt=doubt) for label, text, doubt in remarks(analysis)]
    return Summary(
        figures=tuple(_figures(analysis)),
        phases=tuple(_phases(analysis)),
        budget=tuple(budget),
        why_no_budget="" if budget else _why_no_budget(analysis),
        facts=(*(Line(label=label, text=text) for label, text in facts(profile)), *lines),
    )


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
    for label in [*first, *(label for label in lines if label not in first)]:
        line = lines[label]
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
    for name, seconds in clean.phases.items():
        if step and not (name in _WITHIN_FORWARD and "forward" in clean.phases):
            yield _part(name, seconds.median / step, step)


def _why_no_budget(analysis: Analysis) -> str:
    if not analysis.profile.is_counted:
        return "nothing was counted"
    if analysis.step_times.seconds is None:
        return "no clean step was timed"
    return (
        f'what {analysis.profile.run.device_name} can do in the dtypes that were multiplied is not known; profile with hardware="measure", '
        "with a name that lflops hardware lists, or with a lflops.Hardware of your own"
    )


def _part(name: str, share: float, seconds: float, said: str = "") -> Part:
    return Part(name=name, share=share, text=f"{units.percent(share)}, {units.duration(share * seconds)}", said=said)
