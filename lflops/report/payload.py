"""A profile as what the page draws: few values, ready to be shown, and the modules' figures column by column.

A count that JavaScript's numbers cannot hold exactly is a string of its digits, an unknown value is null, and a column in which every
module has the same value is that value alone: a page of 20,000 modules stays small enough for a mail.
"""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from lflops import units
from lflops.analyze.imbalance import imbalance
from lflops.analyze.pace import pace
from lflops.analyze.utilization import utilization
from lflops.profile import PHASES, Profile
from lflops.report.budget import parts
from lflops.report.head import apart, facts
from lflops.report.times import lines

__all__ = ["VERSION", "Payload", "payload"]

VERSION = 1
"""Of the form below: a page draws its own and no other."""

_EXACT = 2**53
_WITHIN_FORWARD = frozenset({"prefill", "decode"})

_OF_MODULES = ("kind", "calls", "compiled", "owner", "parameters", "own_parameters", "trainable_parameters", "peak_bytes")
_COUNTED = tuple(prefix + field for field in ("macs", "flops", "bytes_moved", "comm_bytes") for prefix in ("", "own_"))
_TIMED = ("seconds", "own_seconds", "device_seconds")

Value = int | float | str | bool | None


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


class Payload(Struct, frozen=True, kw_only=True):
    """What one page shows of one profile.

    Attributes:
        lflops: The version of this form, before everything else.
        title: What was profiled and when.
        partial: Whether the window was left before its end.
        figures: The large ones.
        phases: The step cut into its phases; empty where no clean step was timed.
        budget: The step's peak-seconds, the largest part first, the three largest with what usually helps; empty where the peak is unknown.
        why_no_budget: Why it is.
        facts: What was profiled, on what, and all that is in no figure.
        modules: Columns: a list with a value for each module, or the one value that all of them have. `name` is always a list.
    """

    lflops: int
    title: str
    partial: bool
    figures: tuple[Figure, ...]
    phases: tuple[Part, ...]
    budget: tuple[Part, ...]
    why_no_budget: str
    facts: tuple[Line, ...]
    modules: Mapping[str, list[Value] | Value]


def payload(profile: Profile) -> Payload:
    """Everything that the page shows of a profile."""
    spent = utilization(profile).budget
    budget = [] if spent is None else [_part(name, share, spent.seconds, said) for name, share, said in parts(profile, spent)]
    beside = [Line(label=label, text=text, doubt=doubt) for label, text, doubt in apart(profile)]
    return Payload(
        lflops=VERSION,
        title=_title(profile),
        partial=profile.run.partial,
        figures=tuple(_figures(profile)),
        phases=tuple(_phases(profile)),
        budget=tuple(budget),
        why_no_budget="" if budget else "it takes counted work, timed clean steps and a known peak of the chip",
        facts=(*(Line(label=label, text=text) for label, text in facts(profile)), *beside),
        modules=_columns(profile),
    )


def _title(profile: Profile) -> str:
    run = profile.run
    when = [f"{name} {at}" for name, at in (("window", run.window), ("step", run.step)) if at is not None]
    return ", ".join([profile.modules[""].kind or "a script", run.stage or run.kind, *when])


def _figures(profile: Profile) -> Iterator[Figure]:
    """Of the step, without its phases, then of the model."""
    root = profile.modules[""]
    told = {line.label: line for line in lines(profile) if not line.label.startswith(" ")}
    first = [label for label in ("MFU", "achieved", "samples/s", "tokens/s") if label in told]
    for label in [*first, *(label for label in told if label not in first)]:
        line = told[label]
        yield Figure(label=label, text=line.value, remark=", ".join(filter(None, (line.spread, line.remark))))
    peak = root.peak_bytes if profile.memory is None else profile.memory.peak_bytes
    yield Figure(label="peak live memory", text=units.size(peak))
    yield Figure(label="parameters", text=units.count(root.parameters), remark=units.size(root.parameter_bytes))
    if _is_counted(profile):
        macs = {phase: root.work(phase).macs for phase in PHASES}
        ran = ", ".join(f"{phase} {units.count(count)}" for phase, count in macs.items() if count)
        yield Figure(label="MACs", text=units.count(sum(macs.values())), remark=ran)


def _phases(profile: Profile) -> Iterator[Part]:
    found = pace(profile)
    whole = found.seconds.median if found.seconds else 0.0
    for name, seconds in found.phases.items():
        if whole and not (name in _WITHIN_FORWARD and "forward" in found.phases):
            yield _part(name, seconds.median / whole, whole)


def _part(name: str, share: float, seconds: float, said: str = "") -> Part:
    return Part(name=name, share=share, text=f"{units.percent(share)}, {units.duration(share * seconds)}", said=said)


def _is_counted(profile: Profile) -> bool:
    return all(note.code != "not_counted" for note in profile.notes)


def _columns(profile: Profile) -> dict[str, list[Value] | Value]:
    """Of modules, then of their work in each phase: all of it, and `own_`."""
    spreads: dict[str, float] = {}
    for row in imbalance(profile).rows:
        if row.spread is not None:
            spreads[row.module] = max(row.spread, spreads.get(row.module, row.spread))
    rows, counted = profile.modules.values(), _is_counted(profile)
    columns: dict[str, list[Value] | Value] = {"name": list(profile.modules)}
    columns |= {field: _column(getattr(row, field) for row in rows) for field in _OF_MODULES}
    columns["rank_spread"] = _column(spreads.get(name) for name in profile.modules)
    for phase in PHASES:
        works = [row.work(phase) for row in rows]
        for field in _COUNTED:
            columns[f"{phase}.{field}"] = _column(getattr(work, field) if counted else None for work in works)
        for field in _TIMED:
            spread = [getattr(work, field) for work in works]
            columns[f"{phase}.{field}"] = _column(None if each is None else each.median for each in spread)
    return columns


def _column(values: Iterable[Value]) -> list[Value] | Value:
    """A list, or the value that all have."""
    column = [str(value) if isinstance(value, int) and value >= _EXACT else value for value in values]
    return column[0] if len(set(column)) == 1 else column
