"""One run as a comparison reads it.

Made from a profile, or from the page's tables of one; and one module in two runs.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import Struct, convert

from lflops.analysis.compare.significance import Judge, Measured, Timing, measured, total, unjudged
from lflops.analysis.step_times import StepTimes, step_times
from lflops.analysis.utilization import utilization
from lflops.profile.module_names import patterns
from lflops.profile.notes import are_times_far_off
from lflops.profile.profile import Profile
from lflops.profile.records import PASS_PHASES, PHASES, Phase

FACTS = (
    *("kind", "device_name", "dtype", "precision", "strategy", "world_size", "threads"),
    *("samples_per_step", "tokens_per_step", "accumulation"),
)
"""Fields of a profile's `run` that are listed where two runs differ in them."""

Fact = str | int | None
_OWN_OR_INCLUSIVE = ("", "self_")
_WORK = ("macs", "flops", "bytes_moved")


class RunFigures(Struct, frozen=True, kw_only=True):
    """The figures of a whole run. `None` is unknown."""

    # the circumstances that two runs can differ in
    facts: Mapping[str, Fact]
    counted: bool
    # the phases in which anything ran
    phases_ran: tuple[Phase, ...]
    step: (
        Measured | None
        # of the clean steps. So are `phases`, `samples_per_second` and `tokens_per_second`.
    )
    phases: Mapping[str, Measured]
    mfu: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    has_reliable_times: bool = (
        # whether the profile does not warn that its modules' times are no measure
        True
    )
    cpu_lost: float | None = (
        # the share of its CPU time that other processes took; `None` also on a GPU, whose time is
        # another
        None
    )


class ComparedRun(NamedTuple):
    """What a comparison needs of one run.

    Its figures, and the names and classes of its modules in the model's order.
    """

    figures: RunFigures
    names: Sequence[str]
    kinds: Sequence[str]
    # Lists with a value for each module, by the names of the payload's columns: `parameters`,
    # `self_parameters`, `peak_bytes`, and for each phase `forward.macs` and so on. `PASS_PHASES`
    # also have `forward.seconds`, `.error` in seconds, and `.calls`. A time with calls and without
    # seconds is unknown, or of recompute within backward; without both there is none. Own figures
    # of a phase are `forward.self_macs`.
    columns: Mapping[str, Sequence[Any]]

    @classmethod
    def from_tables(cls, figures: RunFigures, tables: Mapping[str, Any]) -> "ComparedRun":
        """Read back what the payload has, where a column of one value is that value, and a large count a text of its digits."""
        # A `ValueError` says which column is missing or has other values, or that the names are no
        # tree of modules.
        names = convert(tables.get("name"), list[str])
        known = set(names)
        if (
            len(known) < len(names)
            or "" not in known
            or any(name.rpartition(".")[0] not in known for name in names)
        ):
            raise ValueError("the names are no tree of modules")

        def column(name: str, kind: Any) -> Any:
            given = tables.get(name, [])
            values = convert(
                given if isinstance(given, list) else [given] * len(names), list[kind], strict=False
            )
            if len(values) != len(names):
                raise ValueError(f"{name} has {len(values)} values for {len(names)} modules")
            return values

        work = int if figures.counted else int | None
        columns = {"peak_bytes": column("peak_bytes", int | None)}
        columns |= {name: column(name, int) for name in ("parameters", "self_parameters")}
        columns |= {name: column(name, work) for phase in PHASES for name in _named(phase, _WORK)}
        columns |= {
            name: column(name, int) for phase in PASS_PHASES for name in _named(phase, ["calls"])
        }
        columns |= {
            name: column(name, float | None)
            for phase in PASS_PHASES
            for name in _named(phase, ["seconds", "error"])
        }
        return cls(figures, names, column("kind", str), columns)


def module_patterns(run: ComparedRun) -> dict[str, str]:
    """Each module's name with `*` for the numbers of what repeats, as `Profile.patterns` has it."""
    return patterns(
        dict(zip(run.names, zip(run.kinds, run.columns["parameters"], strict=True), strict=True))
    )


def compared_run(profile: Profile, figures: RunFigures | None = None) -> ComparedRun:
    """Read what a comparison needs from a profile; its figures too, where they are not known."""
    modules = profile.modules.values()
    columns: dict[str, Sequence[Any]] = {
        field: [getattr(module, field) for module in modules]
        for field in ("parameters", "self_parameters", "peak_bytes")
    }
    for phase in PHASES:
        works = [module.work(phase) for module in modules]
        for field in (own + field for field in _WORK for own in _OWN_OR_INCLUSIVE):
            columns[f"{phase}.{field}"] = [getattr(work, field) for work in works]
    figures = figures or run_figures(profile, step_times(profile), utilization(profile).mfu)
    return ComparedRun(
        figures,
        list(profile.modules),
        [module.class_name for module in modules],
        columns | time_columns(profile),
    )


def run_figures(profile: Profile, times: StepTimes, mfu: float | None) -> RunFigures:
    lost = profile.cpu_lost_shares
    return RunFigures(
        facts={name: getattr(profile.run, name) for name in FACTS},
        counted=bool(profile.op_counts),
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
    """The columns of the times.

    Their seconds, their errors in seconds, and the operator calls in them.
    """
    columns: dict[str, list[Any]] = {}
    modules = profile.modules.values()
    for phase in PASS_PHASES:
        works = list(map(attrgetter(phase), modules))
        for own in _OWN_OR_INCLUSIVE:
            times = list(map(attrgetter(f"{own}seconds"), works))
            columns[f"{phase}.{own}seconds"] = [
                None if time is None else time.median for time in times
            ]
            columns[f"{phase}.{own}error"] = [
                None if time is None else time.error for time in times
            ]
            columns[f"{phase}.{own}calls"] = list(map(attrgetter(f"{own}calls"), works))
    return columns


def _named(phase: Phase, fields: Iterable[str]) -> list[str]:
    return [f"{phase}.{own}{field}" for field in fields for own in _OWN_OR_INCLUSIVE]


class Change(Struct, frozen=True, kw_only=True, gc=False):
    """A figure before and after; `None` where it is unknown, or the module is not there."""

    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """The figure after over that before."""
        return None if self.after is None or not self.before else self.after / self.before

    @property
    def differs(self) -> bool:
        """Whether it changed; not where a side is unknown."""
        return self.before is not None and self.after is not None and self.before != self.after


class ModuleFigures(Struct, frozen=True, kw_only=True):
    """Work of the phases that both runs have, together, and the time of forward, backward and recompute.

    The time is judged where MACs and FLOPs of each of these phases are the same; where the MACs
    differ it is compared a MAC, not judged.
    """

    macs: Change
    flops: Change
    bytes_moved: Change
    parameters: Change
    time: Timing

    @property
    def differs(self) -> bool:
        """Whether the work or the parameters do."""
        return (
            self.macs.differs
            or self.flops.differs
            or self.bytes_moved.differs
            or self.parameters.differs
        )


class SharedPhases:
    """A run's columns in the phases that both runs have, each summed or collected once for all modules."""

    def __init__(self, run: ComparedRun, phases: Sequence[Phase]) -> None:
        timed = [phase for phase in phases if phase in PASS_PHASES]

        def columns(phases: Sequence[Phase], field: str) -> list[Sequence[Any]]:
            return [run.columns[f"{phase}.{field}"] for phase in phases]

        def sums(phases: Sequence[Phase], field: str) -> list[int]:
            return (
                [sum(values) for values in zip(*columns(phases, field), strict=True)]
                if phases
                else [0] * len(run.names)
            )

        self.run = run
        self.counted = run.figures.counted
        self.work: dict[str, list[int]] = {}
        self.timed_work: dict[str, list[tuple[int, ...]]] = {}
        self.times: dict[str, list[list[tuple[float | None, float | None]]]] = {}
        for own in ("", "self_"):
            if self.counted:
                self.work |= {
                    own + field: sums(phases, own + field)
                    for field in ("macs", "flops", "bytes_moved")
                }
                self.work[f"{own}timed_macs"] = sums(timed, f"{own}macs")
                both = [*columns(timed, f"{own}macs"), *columns(timed, f"{own}flops")]
                self.timed_work[own] = (
                    list(zip(*both, strict=True)) if both else [()] * len(run.names)
                )
            self.times[own] = [[] for _ in run.names]
            for phase in timed:
                seconds, errors, calls = (
                    run.columns[f"{phase}.{own}{field}"] for field in ("seconds", "error", "calls")
                )
                for times, each, error, ran in zip(
                    self.times[own], seconds, errors, calls, strict=True
                ):
                    if each is not None or (
                        ran and phase != "recompute"
                        # a fused attention's is within backward
                    ):
                        times.append((each, error))


class ModuleSide(NamedTuple):
    """A module in one of the runs."""

    # the run
    of: SharedPhases
    rows: Sequence[
        int
        # of it and of what it wraps, the outermost first, as positions in columns. Inclusive is that of
        # the first.
    ]

    def work(self, field: str) -> int | None:
        """A count of all phases, as `macs` or `self_macs`."""
        return (
            self._sum(self.of.work[field], own=field.startswith("self_"))
            if self.of.counted
            else None
        )

    def timed_work(self, *, own: bool) -> tuple[int, ...]:
        """The MACs and the FLOPs of each phase that has times."""
        work = self.of.timed_work["self_" if own else ""]
        if not own or len(self.rows) == 1:
            return work[self.rows[0]]
        return tuple(sum(each) for each in zip(*(work[row] for row in self.rows), strict=True))

    def time(self, *, own: bool) -> Measured | None:
        """Add up the phases that ran."""
        times = self.of.times["self_" if own else ""]
        if not own or len(self.rows) == 1:
            return total(times[self.rows[0]])
        return total([each for row in self.rows for each in times[row]])

    def in_phase(self, phase: Phase, field: str, *, own: bool) -> float | None:
        """Its `seconds`, or its `macs`, in one phase."""
        if field == "macs" and not self.of.counted:
            return None
        column = self.of.run.columns[f"{phase}.{'self_' if own else ''}{field}"]
        return (
            None
            if own and any(column[row] is None for row in self.rows)
            else self._sum(column, own=own)
        )

    def parameters(self, *, own: bool) -> int:
        """Distinct ones."""
        parameters: int = self._sum(
            self.of.run.columns["self_parameters" if own else "parameters"], own=own
        )
        return parameters

    def peak(self) -> int | None:
        peak: int | None = self.of.run.columns["peak_bytes"][self.rows[0]]
        return peak

    def _sum(self, column: Sequence[Any], *, own: bool) -> Any:
        return (
            sum(column[row] for row in self.rows)
            if own and len(self.rows) > 1
            else column[self.rows[0]]
        )


class ModulePair(NamedTuple):
    """A module in both runs, or in one of them."""

    before: ModuleSide | None
    after: ModuleSide | None

    def change(self, figure: Callable[[ModuleSide], float | None]) -> Change:
        before, after = self
        return Change(
            before=None if before is None else figure(before),
            after=None if after is None else figure(after),
        )

    def times(self, *, own: bool) -> tuple[Measured | None, Measured | None]:
        before, after = self
        return None if before is None else before.time(
            own=own
        ), None if after is None else after.time(own=own)

    def same_work(self, *, own: bool) -> bool:
        """Whether MACs and FLOPs of each phase that has times are known to be the same."""
        if (
            self.before is None
            or self.after is None
            or not (self.before.of.counted and self.after.of.counted)
        ):
            return False
        return self.before.timed_work(own=own) == self.after.timed_work(own=own)

    def figures(self, judge: Judge | None, explained: float = 0.0, *, own: bool) -> ModuleFigures:
        """Its work and its time, which is judged where it can be."""
        prefix = "self_" if own else ""
        first, second = self.times(own=own)
        if judge and self.same_work(own=own):
            time = judge.timing(first, second, explained)
        else:
            macs = self.change(lambda side: side.work(f"{prefix}timed_macs")).ratio
            time = (
                judge.cost(first, second, macs) if judge and own else unjudged(first, second, macs)
            )
        work = {
            field: self.change(partial(ModuleSide.work, field=prefix + field))
            for field in ("macs", "flops", "bytes_moved")
        }
        return ModuleFigures(
            **work, parameters=self.change(partial(ModuleSide.parameters, own=own)), time=time
        )
