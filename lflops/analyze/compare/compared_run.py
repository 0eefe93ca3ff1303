"""One run as a comparison reads it: made from a profile, or from the tables of the page's payload that was made from one."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import Struct, convert

from lflops.analyze.compare.significance import Measured, measured
from lflops.analyze.speed.step_times import StepTimes, step_times
from lflops.analyze.speed.utilization import utilization
from lflops.profile.model import Profile
from lflops.profile.module_names import patterns
from lflops.profile.notes import are_times_far_off
from lflops.profile.records import PHASES, Phase

TIMED: tuple[Phase, ...] = ("forward", "backward", "recompute")  # the phases whose times are compared

FACTS = (
    *("kind", "device_name", "dtype", "precision", "strategy", "world_size", "threads"),
    *("samples_per_step", "tokens_per_step", "accumulation"),
)
"""Fields of a profile's `run` that are listed where two runs differ in them."""

Fact = str | int | None
_OWN_OR_INCLUSIVE = ("", "own_")
_WORK = ("macs", "flops", "bytes_moved")


class RunFigures(Struct, frozen=True, kw_only=True):
    """The figures of a whole run. `None` is unknown."""

    facts: Mapping[str, Fact]  # the circumstances that two runs can differ in
    counted: bool
    phases_ran: tuple[Phase, ...]  # the phases in which anything ran
    step: Measured | None  # of the clean steps. So are `phases`, `samples_per_second` and `tokens_per_second`.
    phases: Mapping[str, Measured]
    mfu: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    has_reliable_times: bool = True  # whether the profile does not warn that its modules' times are no measure
    cpu_lost: float | None = None  # the share of its CPU time that other processes took; `None` also on a GPU, whose time is another


class ComparedRun(NamedTuple):
    """What a comparison needs of one run: its figures, and the names and classes of its modules in the model's order."""

    figures: RunFigures
    names: Sequence[str]
    kinds: Sequence[str]
    # Lists with a value for each module, by the names of the payload's columns: `parameters`, `own_parameters`, `peak_bytes`, and for each
    # phase `forward.macs` and so on. `TIMED` phases also have `forward.seconds`, `.error` in seconds, and `.calls`. A time with calls and
    # without seconds is unknown, or of recompute within backward; without both there is none. Own figures of a phase are
    # `forward.own_macs`.
    columns: Mapping[str, Sequence[Any]]

    @classmethod
    def from_tables(cls, figures: RunFigures, tables: Mapping[str, Any]) -> "ComparedRun":
        """Read back what the payload has, where a column of one value is that value, and a large count a text of its digits.

        A `ValueError` says which column is missing or has other values, or that the names are no tree of modules.
        """
        names = convert(tables.get("name"), list[str])
        known = set(names)
        if len(known) < len(names) or "" not in known or any(name.rpartition(".")[0] not in known for name in names):
            raise ValueError("the names are no tree of modules")

        def column(name: str, kind: Any) -> Any:
            given = tables.get(name, [])
            values = convert(given if isinstance(given, list) else [given] * len(names), list[kind], strict=False)
            if len(values) != len(names):
                raise ValueError(f"{name} has {len(values)} values for {len(names)} modules")
            return values

        work = int if figures.counted else int | None
        columns = {"peak_bytes": column("peak_bytes", int | None)}
        columns |= {name: column(name, int) for name in ("parameters", "own_parameters")}
        columns |= {name: column(name, work) for phase in PHASES for name in _named(phase, _WORK)}
        columns |= {name: column(name, int) for phase in TIMED for name in _named(phase, ["calls"])}
        columns |= {name: column(name, float | None) for phase in TIMED for name in _named(phase, ["seconds", "error"])}
        return cls(figures, names, column("kind", str), columns)


def module_patterns(run: ComparedRun) -> dict[str, str]:
    """Each module's name with `*` for the numbers of what repeats, as `Profile.patterns` has it."""
    return patterns(dict(zip(run.names, zip(run.kinds, run.columns["parameters"], strict=True), strict=True)))


def compared_run(profile: Profile, figures: RunFigures | None = None) -> ComparedRun:
    """Read what a comparison needs from a profile; its figures too, where they are not known."""
    modules = profile.modules.values()
    columns: dict[str, Sequence[Any]] = {
        field: [getattr(module, field) for module in modules] for field in ("parameters", "own_parameters", "peak_bytes")
    }
    for phase in PHASES:
        works = [module.work(phase) for module in modules]
        for field in (own + field for field in _WORK for own in _OWN_OR_INCLUSIVE):
            columns[f"{phase}.{field}"] = [getattr(work, field) for work in works]
    figures = figures or run_figures(profile, step_times(profile), utilization(profile).mfu)
    return ComparedRun(figures, list(profile.modules), [module.kind for module in modules], columns | time_columns(profile))


def run_figures(profile: Profile, times: StepTimes, mfu: float | None) -> RunFigures:
    lost = profile.cpu_lost_shares
    return RunFigures(
        facts={name: getattr(profile.run, name) for name in FACTS},
        counted=bool(profile.cells),
        phases_ran=tuple(phase for phase in PHASES if profile.modules[""].work(phase).calls),
        step=measured(times.seconds),
        phases={name: each for name, spread in times.spreads.items() if (each := measured(spread))},
        mfu=mfu,
        samples_per_second=times.samples_per_second,
        tokens_per_second=times.tokens_per_second,
        peak_bytes=profile.memory.peak_bytes if profile.memory else profile.modules[""].peak_bytes,
        has_reliable_times=not are_times_far_off(profile.notes),
        cpu_lost=statistics.fmean(lost) if lost else None,
    )


def time_columns(profile: Profile) -> dict[str, list[Any]]:
    """The columns of the times: their seconds, their errors in seconds, and the operator calls in them."""
    columns: dict[str, list[Any]] = {}
    modules = profile.modules.values()
    for phase in TIMED:
        works = list(map(attrgetter(phase), modules))
        for own in _OWN_OR_INCLUSIVE:
            times = list(map(attrgetter(f"{own}seconds"), works))
            columns[f"{phase}.{own}seconds"] = [None if time is None else time.median for time in times]
            columns[f"{phase}.{own}error"] = [None if time is None else time.error for time in times]
            columns[f"{phase}.{own}calls"] = list(map(attrgetter(f"{own}calls"), works))
    return columns


def _named(phase: Phase, fields: Iterable[str]) -> list[str]:
    return [f"{phase}.{own}{field}" for field in fields for own in _OWN_OR_INCLUSIVE]
