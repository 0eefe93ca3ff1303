"""Extract the data of a run for comparisons, from a profile or from the data of an HTML page.

The classes in this file also compare the figures (work and times) of one `nn.Module` in two runs.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct, convert

from lflops.analysis.compare.significance import Judge, Measured, Timing, measured, total, unjudged
from lflops.analysis.step_times import StepTimes, step_times
from lflops.analysis.utilization import utilization
from lflops.profile.module_names import parent_of, patterns
from lflops.profile.notes import are_times_far_off
from lflops.profile.profile import Profile
from lflops.profile.records import PASS_PHASES, PHASES, Phase, TimingStats, median_of
from lflops.profile.series import ratio, sum_known

FACTS = (
    "kind",
    "device_name",
    "dtype",
    "precision",
    "strategy",
    "world_size",
    "threads",
    "samples_per_step",
    "tokens_per_step",
    "accumulation",
)
"""Fields of a profile's `run` that are reported if they differ between two runs."""

Fact = str | int | None

Figure = TypeVar("Figure")

_WORK = ("macs", "flops", "bytes_moved")
# Prefixes of column names: empty for values with submodules, `self_` for values without submodules.
_INCLUSIVE_AND_SELF = ("", "self_")


class RunFigures(Struct, frozen=True, kw_only=True):
    """The figures (times, rates and memory) of a whole run. `None` means unknown.

    Attributes:
        facts: The fields in `FACTS` with their values, such as device and dtype.
        counted: Whether the work was counted.
        phases_ran: The phases in which at least one operator ran.
        step: Time of the unprofiled steps.
        phases: Times of the phases of the unprofiled steps.
        samples_per_second: Samples per second over the unprofiled steps.
        tokens_per_second: Tokens per second over the unprofiled steps.
        has_reliable_times: Whether module times are reliable, according to the notes of the
            profile.
        cpu_lost: Share of the CPU time that other processes took. Always `None` on a GPU.
    """

    facts: Mapping[str, Fact]
    counted: bool
    phases_ran: tuple[Phase, ...]
    step: Measured | None
    phases: Mapping[str, Measured]
    mfu: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    has_reliable_times: bool = True
    cpu_lost: float | None = None


class ComparedRun(NamedTuple):
    """The data of a run that a comparison needs.

    Attributes:
        figures: Figures of the whole run.
        names: Names of the modules in the model's order.
        kinds: Classes of the modules.
        columns: Lists with a value for each module. The keys are the same as in the data of the
            HTML page, for example `parameters`, `peak_bytes` and, for each phase, `forward.macs`.
            Forward, backward and recomputation also have `forward.seconds`, `forward.error` (of the
            seconds) and `forward.calls`. Values without submodules have names such as
            `forward.self_macs`. If a module has calls but no seconds in a phase, the time is
            unknown, or the phase is recomputation inside a backward kernel. If the module has
            neither, it did not run in the phase.
    """

    figures: RunFigures
    names: Sequence[str]
    kinds: Sequence[str]
    columns: Mapping[str, Sequence[Any]]

    @classmethod
    def from_tables(cls, figures: RunFigures, tables: Mapping[str, Any]) -> "ComparedRun":
        """Build a run from the columns in the data of an HTML page.

        To save space, the page stores a column as a single value if all modules have this value. It
        stores large counts as text.

        Raises:
            ValueError: A column is missing or invalid, or the names do not form a module tree.
        """
        names = convert(tables.get("name"), list[str])
        _check_names(names)

        def column(name: str, kind: Any) -> Any:
            values = tables.get(name, [])
            if not isinstance(values, list):
                values = [values] * len(names)
            converted = convert(values, list[kind], strict=False)
            if len(converted) != len(names):
                raise ValueError(
                    f"the column {name} has {len(converted)} values for {len(names)} modules"
                )
            return converted

        count_type: Any = int | None
        if figures.counted:
            count_type = int
        columns = {
            "peak_bytes": column("peak_bytes", int | None),
            "parameters": column("parameters", int),
            "self_parameters": column("self_parameters", int),
        }
        for phase in PHASES:
            types: dict[str, Any] = dict.fromkeys(_WORK, count_type)
            if phase in PASS_PHASES:
                types.update(calls=int, seconds=float | None, error=float | None)
            for field, kind in types.items():
                for prefix in _INCLUSIVE_AND_SELF:
                    name = f"{phase}.{prefix}{field}"
                    columns[name] = column(name, kind)
        return cls(figures, names, column("kind", str), columns)


def _check_names(names: Sequence[str]) -> None:
    """Raise an error if the names of modules do not form a tree.

    Each name must be unique, and the parent of each module must be included.
    """
    known = set(names)
    parents = {parent_of(name) for name in names}
    if len(known) < len(names) or "" not in known or not parents <= known:
        raise ValueError("the names of the modules do not form a tree")


def module_patterns(run: ComparedRun) -> dict[str, str]:
    """Return the pattern of each module, such as `layers.*.mlp` for `layers.3.mlp`.

    The patterns are the same as in `Profile.patterns`.
    """
    facts = zip(run.kinds, run.columns["parameters"], strict=True)
    return patterns(dict(zip(run.names, facts, strict=True)))


def compared_run(profile: Profile, figures: RunFigures | None = None) -> ComparedRun:
    """Extract the data for a comparison from a profile.

    If `figures` is not passed, the figures of the whole run are computed.
    """
    modules = profile.modules.values()
    columns: dict[str, Sequence[Any]] = {}
    for field in ("parameters", "self_parameters", "peak_bytes"):
        columns[field] = list(map(attrgetter(field), modules))
    for phase in PHASES:
        works = [module.work(phase) for module in modules]
        for field in _WORK:
            for prefix in _INCLUSIVE_AND_SELF:
                columns[f"{phase}.{prefix}{field}"] = list(map(attrgetter(prefix + field), works))
    columns.update(time_columns(profile))
    if figures is None:
        figures = run_figures(profile, step_times(profile), utilization(profile).mfu)
    kinds = [module.class_name for module in modules]
    return ComparedRun(figures, list(profile.modules), kinds, columns)


def run_figures(profile: Profile, times: StepTimes, mfu: float | None) -> RunFigures:
    root = profile.modules[""]
    lost = profile.cpu_lost_shares
    phases_ran = [phase for phase in PHASES if root.work(phase).calls]
    facts = {name: getattr(profile.run, name) for name in FACTS}
    phases = {}
    for name, stats in times.spreads.items():
        phases[name] = Measured(stats.median, stats.error)
    peak_bytes = root.peak_bytes
    if profile.memory:
        peak_bytes = profile.memory.peak_bytes
    cpu_lost = None
    if lost:
        cpu_lost = statistics.fmean(lost)
    return RunFigures(
        facts=facts,
        counted=bool(profile.op_counts),
        phases_ran=tuple(phases_ran),
        step=measured(times.seconds),
        phases=phases,
        mfu=mfu,
        samples_per_second=times.samples_per_second,
        tokens_per_second=times.tokens_per_second,
        peak_bytes=peak_bytes,
        has_reliable_times=not are_times_far_off(profile.notes),
        cpu_lost=cpu_lost,
    )


def time_columns(profile: Profile) -> dict[str, list[Any]]:
    """Return the columns of `ComparedRun` with seconds, their errors, and call counts."""
    columns: dict[str, list[Any]] = {}
    for phase in PASS_PHASES:
        works = [module.work(phase) for module in profile.modules.values()]
        for prefix in _INCLUSIVE_AND_SELF:
            seconds: list[float | None] = []
            errors: list[float | None] = []
            for spread in map(attrgetter(f"{prefix}seconds"), works):
                seconds.append(median_of(spread))
                errors.append(error_of(spread))
            columns[f"{phase}.{prefix}seconds"] = seconds
            columns[f"{phase}.{prefix}error"] = errors
            columns[f"{phase}.{prefix}calls"] = list(map(attrgetter(f"{prefix}calls"), works))
    return columns


def error_of(stats: TimingStats | None) -> float | None:
    """Return the standard error of the median, or `None` if it is unknown."""
    if stats is None:
        return None
    return stats.error


class Change(Struct, frozen=True, kw_only=True, gc=False):
    """The values of one number, such as the MACs of a module, in the first and the second run.

    A value is `None` if it is unknown, or if the run does not have the module.
    """

    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """The second number divided by the first number."""
        return ratio(self.after, self.before)

    @property
    def differs(self) -> bool:
        """Return whether the number is known in both runs and changed."""
        return self.before is not None and self.after is not None and self.before != self.after


class ModuleFigures(Struct, frozen=True, kw_only=True):
    """The work and the time of a module in both runs.

    The work covers all phases that both runs have. The time covers forward, backward and
    recomputation. The time gets a verdict (slower, faster or the same) only if the MACs and FLOPs
    in each of these phases did not change. If the MACs changed, the time per MAC is compared
    without a verdict.
    """

    macs: Change
    flops: Change
    bytes_moved: Change
    parameters: Change
    time: Timing

    @property
    def differs(self) -> bool:
        """Return whether the work or the number of parameters changed."""
        return (
            self.macs.differs
            or self.flops.differs
            or self.bytes_moved.differs
            or self.parameters.differs
        )


class SharedPhases:
    """The work and times of a run's modules, restricted to the phases that both runs have.

    The values of all modules are computed at once. Each list has an item for each module. Some
    dictionaries have two keys: `self_` for values without submodules, and the empty string for
    values with submodules.

    Attributes:
        run: The run.
        counted: Whether the run's work was counted. If not, `work` and `timed_work` are empty.
        work: Sums over the phases, keyed by field, such as `macs` or `self_macs`. `timed_macs` only
            includes phases with times.
        timed_work: MACs and FLOPs of each phase with times. The keys are `self_` and "".
        times: Seconds and their error in each phase in which the module ran. The keys are `self_`
            and "".
    """

    def __init__(self, run: ComparedRun, phases: Sequence[Phase]) -> None:
        timed = [phase for phase in phases if phase in PASS_PHASES]
        self.run = run
        self.counted = run.figures.counted
        self.work: dict[str, list[int]] = {}
        self.timed_work: dict[str, list[tuple[int, ...]]] = {}
        self.times: dict[str, list[list[tuple[float | None, float | None]]]] = {}
        for prefix in _INCLUSIVE_AND_SELF:
            self.times[prefix] = self._times(timed, prefix)
            if self.counted:
                for field in _WORK:
                    self.work[prefix + field] = self._sums(phases, prefix + field)
                self.work[f"{prefix}timed_macs"] = self._sums(timed, f"{prefix}macs")
                self.timed_work[prefix] = self._rows(timed, f"{prefix}macs", f"{prefix}flops")

    def _rows(self, phases: Sequence[Phase], *fields: str) -> list[tuple[Any, ...]]:
        """Return a tuple for each module with its values in the given fields and phases."""
        if not phases:
            return [()] * len(self.run.names)
        columns = []
        for field in fields:
            for phase in phases:
                columns.append(self.run.columns[f"{phase}.{field}"])
        return list(zip(*columns, strict=True))

    def _sums(self, phases: Sequence[Phase], field: str) -> list[int]:
        return [sum(values) for values in self._rows(phases, field)]

    def _times(
        self, phases: Sequence[Phase], prefix: str
    ) -> list[list[tuple[float | None, float | None]]]:
        """Return the seconds and their error in each phase in which a module ran, by module."""
        found: list[list[tuple[float | None, float | None]]] = [[] for _ in self.run.names]
        for phase in phases:
            rows = self._rows([phase], f"{prefix}seconds", f"{prefix}error", f"{prefix}calls")
            for times, (seconds, error, calls) in zip(found, rows, strict=True):
                # Recomputed fused attention has calls, but its time is part of backward.
                is_unknown = calls and phase != "recompute"
                if seconds is not None or is_unknown:
                    times.append((seconds, error))
        return found


def _prefix(*, own: bool) -> str:
    """Return the prefix of column names: `self_` for values without submodules, otherwise empty."""
    if own:
        return "self_"
    return ""


class ModuleSide(NamedTuple):
    """A module in one of the two runs.

    If `own` is true, its methods return values without submodules.

    Attributes:
        of: The data of the run in the phases that both runs have.
        rows: Indices in the columns of the run. If the module is wrapped, for example by DDP or
            FSDP, the indices of its wrappers come before the index of the module. Values with
            submodules are read at the first index. Values without submodules are summed over all
            indices.
    """

    of: SharedPhases
    rows: Sequence[int]

    def work(self, field: str) -> int | None:
        """Return a count over all phases, such as `macs` or `self_macs`."""
        if not self.of.counted:
            return None
        count: int = self._sum(self.of.work[field], own=field.startswith("self_"))
        return count

    def timed_work(self, *, own: bool) -> list[int]:
        """Return the MACs and the FLOPs of each phase that has times."""
        work = self.of.timed_work[_prefix(own=own)]
        rows = [work[row] for row in self._rows(own=own)]
        return [sum(values) for values in zip(*rows, strict=True)]

    def time(self, *, own: bool) -> Measured | None:
        """Return the sum of the times over the phases in which the module ran."""
        times = self.of.times[_prefix(own=own)]
        parts: list[tuple[float | None, float | None]] = []
        for row in self._rows(own=own):
            parts += times[row]
        return total(parts)

    def in_phase(self, phase: Phase, field: str, *, own: bool) -> float | None:
        """Return the seconds or the MACs of one phase. `field` is `seconds` or `macs`."""
        if field == "macs" and not self.of.counted:
            return None
        column = self.of.run.columns[f"{phase}.{_prefix(own=own)}{field}"]
        figure: float | None = self._sum(column, own=own)
        return figure

    def parameters(self, *, own: bool) -> int:
        """Return the number of parameters. A shared parameter is counted once."""
        column = self.of.run.columns[f"{_prefix(own=own)}parameters"]
        parameters: int = self._sum(column, own=own)
        return parameters

    def peak(self) -> int | None:
        peak: int | None = self.of.run.columns["peak_bytes"][self.rows[0]]
        return peak

    def _rows(self, *, own: bool) -> Sequence[int]:
        if own:
            return self.rows
        return self.rows[:1]

    def _sum(self, column: Sequence[Any], *, own: bool) -> Any:
        return sum_known([column[row] for row in self._rows(own=own)])


class ModulePair(NamedTuple):
    """The data of one module in both runs. It is `None` for a run that does not have the module."""

    before: ModuleSide | None
    after: ModuleSide | None

    def both(
        self, figure: Callable[[ModuleSide], Figure | None]
    ) -> tuple[Figure | None, Figure | None]:
        """Return a figure of the module in the first and in the second run."""
        before = after = None
        if self.before is not None:
            before = figure(self.before)
        if self.after is not None:
            after = figure(self.after)
        return before, after

    def change(self, figure: Callable[[ModuleSide], float | None]) -> Change:
        before, after = self.both(figure)
        return Change(before=before, after=after)

    def times(self, *, own: bool) -> tuple[Measured | None, Measured | None]:
        """Return the times of the module in the first and in the second run."""
        return self.both(partial(ModuleSide.time, own=own))

    def same_work(self, *, own: bool) -> bool:
        """Return whether MACs and FLOPs are known to be equal in each phase that was timed."""
        before = self.before
        after = self.after
        if before is None or after is None or not before.of.counted or not after.of.counted:
            return False
        return before.timed_work(own=own) == after.timed_work(own=own)

    def figures(self, judge: Judge | None, explained: float = 0.0, *, own: bool) -> ModuleFigures:
        """Compare the work and the time of the module in both runs.

        Args:
            judge: Compares the times. The result has a verdict if the module did the same work in
                both runs. `None` if times cannot be judged.
            explained: Seconds of the change in time that changes of submodules already explain.
            own: Whether to compare values without submodules.
        """
        prefix = _prefix(own=own)

        def change(field: str) -> Change:
            return self.change(lambda side: side.work(prefix + field))

        before, after = self.times(own=own)
        if judge and self.same_work(own=own):
            time = judge.timing(before, after, explained)
        elif judge and own:
            time = judge.cost(before, after, change("timed_macs").ratio)
        else:
            time = unjudged(before, after, change("timed_macs").ratio)
        return ModuleFigures(
            macs=change("macs"),
            flops=change("flops"),
            bytes_moved=change("bytes_moved"),
            parameters=self.change(partial(ModuleSide.parameters, own=own)),
            time=time,
        )
