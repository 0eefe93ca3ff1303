"""What the page's Summary shows: texts that are ready, and shares for the widths of bars."""

from collections.abc import Iterator

from msgspec import Struct

from lflops import units
from lflops.analyze.compare.compared_run import peak
from lflops.analyze.speed.step_times import step_times
from lflops.analyze.speed.utilization import utilization
from lflops.profile.model import PHASES, Profile
from lflops.report.lines.budget import parts
from lflops.report.lines.times import lines
from lflops.report.terminal.header import apart, facts

__all__ = ["Figure", "Line", "Part", "Summary", "summary", "trend"]

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
    """A label with a value; a doubt takes something from the figures' worth."""

    label: str
    text: str
    doubt: bool = False


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


def summary(profile: Profile) -> Summary:
    """What is shown of a profile first."""
    spent = utilization(profile).budget
    budget = [] if spent is None else [_part(name, share, spent.seconds, said) for name, share, said in parts(profile, spent)]
    beside = [Line(label=label, text=text, doubt=doubt) for label, text, doubt in apart(profile)]
    return Summary(
        figures=tuple(_figures(profile)),
        phases=tuple(_phases(profile)),
        budget=tuple(budget),
        why_no_budget="" if budget else _why_no_budget(profile),
        facts=(*(Line(label=label, text=text) for label, text in facts(profile)), *beside),
    )


def trend(profile: Profile) -> dict[str, float]:
    """The large figures that change from window to window, by their labels, in SI units; those that are known."""
    found, reached = step_times(profile), utilization(profile)
    one = "step" if profile.run.kind == "training" else "pass"
    figures = {
        "MFU": reached.mfu,
        "achieved": reached.flops_per_second,
        "samples/s": found.samples_per_second,
        "tokens/s": found.tokens_per_second,
        one: None if found.seconds is None else found.seconds.median,
        "peak live memory": peak(profile),
    }
    return {label: figure for label, figure in figures.items() if figure is not None}


def _figures(profile: Profile) -> Iterator[Figure]:
    """Of the step, without its phases, then of the model."""
    root = profile.modules[""]
    told = {line.label: line for line in lines(profile) if not line.label.startswith(" ")}
    first = [label for label in ("MFU", "achieved", "samples/s", "tokens/s") if label in told]
    for label in [*first, *(label for label in told if label not in first)]:
        line = told[label]
        yield Figure(label=label, text=line.value, remark=", ".join(filter(None, (line.spread, line.remark))))
    yield Figure(label="peak live memory", text=units.size(peak(profile)))
    yield Figure(label="parameters", text=units.count(root.parameters), remark=units.size(root.parameter_bytes))
    if profile.is_counted:
        macs = {phase: root.work(phase).macs for phase in PHASES}
        ran = ", ".join(f"{phase} {units.count(count)}" for phase, count in macs.items() if count)
        yield Figure(label="MACs", text=units.count(sum(macs.values())), remark=ran)


def _phases(profile: Profile) -> Iterator[Part]:
    found = step_times(profile)
    whole = found.seconds.median if found.seconds else 0.0
    for name, seconds in found.phases.items():
        if whole and not (name in _WITHIN_FORWARD and "forward" in found.phases):
            yield _part(name, seconds.median / whole, whole)


def _why_no_budget(profile: Profile) -> str:
    if not profile.is_counted:
        return "nothing was counted"
    if step_times(profile).seconds is None:
        return "no clean step was timed"
    return (
        f'what {profile.run.device_name} can do in the dtypes that were multiplied is not known; profile with hardware="measure", '
        "with a name that lflops hardware lists, or with a lflops.Hardware of your own"
    )


def _part(name: str, share: float, seconds: float, said: str = "") -> Part:
    return Part(name=name, share=share, text=f"{units.percent(share)}, {units.duration(share * seconds)}", said=said)
