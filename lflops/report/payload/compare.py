"""Compare two windows for the page, and build the data of a window that a comparison needs.

A window is a few profiled steps. The page itself compares nothing: it draws the results.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from operator import attrgetter

from msgspec import DecodeError, Struct, json
from msgspec.structs import asdict

from lflops.analysis.analysis import Analysis
from lflops.analysis.compare.compared_run import (
    Change,
    ComparedRun,
    Fact,
    ModuleSide,
    RunFigures,
    run_figures,
    time_columns,
)
from lflops.analysis.compare.diff import Comparison, compare
from lflops.analysis.compare.significance import CommonFactor, Timing
from lflops.garbage import gc_paused
from lflops.profile.records import PASS_PHASES, Phase, ready_for_threads
from lflops.report.diff import headline, is_news
from lflops.report.payload.columns import Columns, Value, column, exact, table

_WORK = ("macs", "flops", "bytes_moved", "parameters")
_SIDES = ("before", "after")
_TIME = ("before", "after", "ratio", "per_mac", "low", "high", "lost", "verdict")


class ComparedFigures(RunFigures, frozen=True, kw_only=True):
    """The data of a window that a comparison needs, except the data in the table of modules.

    Attributes:
        times: A table with the same rows as the table of modules. For each phase with times, it has
            the number of calls of a module, and the standard error of the module's time. There are
            two columns for each of these numbers: one includes submodules, and the other has the
            prefix `self_` and excludes them. Errors are rounded to four digits to keep the page
            small.
    """

    times: Columns


class ComparisonShown(Struct, frozen=True, kw_only=True):
    """The data of a `Diff`, the comparison of two windows, that the page draws.

    Attributes:
        headline: The verdict on the step time, and other sentences about the changes.
        is_news: Whether anything changed by more than noise.
        facts: Circumstances of the runs, such as the chip, that differ. Each has both values.
        figures: Numbers about the whole step, in the first and in the second window, keyed by name.
        modules: A table with a row for each module. The columns `before`, `after`, `kind` and
            `pattern` identify the module. Columns such as `time.before` describe the time that the
            page shows. The column `own` is true if this time is self time (without submodules).
            Columns such as `macs.before` have the work without submodules. Columns such as
            `forward.seconds.before` have the seconds or MACs of one phase, without submodules if
            `own` is true, and otherwise with submodules.
    """

    headline: tuple[str, ...]
    is_news: bool
    facts: Mapping[str, tuple[Fact, Fact]]
    whole: CommonFactor | None
    step: Timing
    phases: Mapping[str, Timing]
    figures: Mapping[str, tuple[Value, Value]]
    modules: Columns


class _Window(Struct, frozen=True):
    modules: Columns
    compare: ComparedFigures


ready_for_threads(_Window)


def compared_figures(analysis: Analysis) -> ComparedFigures:
    """Return the data of a window that a comparison needs, except the table of modules."""
    figures = run_figures(analysis.profile, analysis.step_times, analysis.utilization.mfu)
    times: Columns = {}
    for name, values in time_columns(analysis.profile).items():
        if name.endswith("error"):
            times[name] = column(map(_rounded, values))
        elif not name.endswith("seconds"):
            times[name] = column(values)
    return ComparedFigures(**asdict(figures), times=times)


def _rounded(error: float | None) -> float | None:
    if error is None:
        return None
    return float(f"{error:.4g}")


def compared_pairs(
    analyses: Sequence[Analysis], *, all_pairs: bool = True
) -> Iterator[tuple[int, int, ComparisonShown]]:
    """Compare profiles in pairs, and yield the comparisons.

    Each item has the index of the first profile in `analyses`, the index of the second profile, and
    their comparison. Each pair is compared in both directions. If `all_pairs` is false, a profile
    is only compared with its neighbours and with the last profile.
    """
    runs = [analysis.compared for analysis in analyses]
    last = len(runs) - 1
    for before, after in permutations(range(len(runs)), 2):
        is_near = abs(before - after) == 1 or last in (before, after)
        if not (all_pairs or is_near):
            continue
        yield before, after, _shown(compare(runs[before], runs[after]))


def compared_windows(before: bytes, after: bytes) -> bytes:
    """Compare two windows, and return a `ComparisonShown` as JSON.

    Args:
        before: The payload of the first window as JSON.
        after: The payload of the second window as JSON.

    Raises:
        ValueError: A payload lacks data that a comparison needs.
    """
    try:
        with gc_paused():
            return json.encode(_shown(compare(_read(before), _read(after))))
    except (DecodeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"lack data that a comparison needs: {error}") from None


def _shown(comparison: Comparison) -> ComparisonShown:
    diff = comparison.diff
    root = diff.modules[0].inclusive
    changes: dict[str, Change] = {
        "mfu": diff.mfu,
        "samples_per_second": diff.samples_per_second,
        "tokens_per_second": diff.tokens_per_second,
        "peak_bytes": diff.peak_bytes,
        "macs": root.macs,
        "flops": root.flops,
        "bytes_moved": root.bytes_moved,
        "parameters": root.parameters,
    }
    figures = {}
    for name, change in changes.items():
        figures[name] = (exact(change.before), exact(change.after))
    return ComparisonShown(
        headline=headline(diff),
        is_news=is_news(diff),
        facts=diff.facts,
        whole=diff.whole,
        step=diff.step,
        phases=diff.phases,
        figures=figures,
        modules=_modules(comparison),
    )


def _modules(comparison: Comparison) -> Columns:
    modules = comparison.diff.modules
    times = []
    is_own = []
    self_work = []
    for module in modules:
        time = module.news
        times.append(time)
        is_own.append(time is module.self_work.time)
        self_work.append(module.self_work)
    columns = table(modules, ("before", "after", "kind", "pattern"))
    columns["own"] = column(is_own)
    columns |= table(times, _TIME, prefix="time.")
    columns["time.ratio"] = column(module.time_ratio for module in modules)
    for side in _SIDES:
        columns |= table(self_work, [f"{name}.{side}" for name in _WORK])
        columns |= table(modules, [f"peak_bytes.{side}"])
    for phase in PASS_PHASES:
        for field in ("seconds", "macs"):
            for side in _SIDES:
                sides = map(attrgetter(side), comparison.pairs)
                columns[f"{phase}.{field}.{side}"] = _in_phase(sides, is_own, phase, field)
    return columns


def _in_phase(
    modules: Iterable[ModuleSide | None], is_own: Sequence[bool], phase: Phase, field: str
) -> list[Value] | Value:
    """Return a column with the seconds or MACs of each module in a phase.

    The value of a module includes its submodules, unless `is_own` is true for the module.
    """
    figures: list[Value] = []
    for module, own in zip(modules, is_own, strict=True):
        figures.append(None if module is None else module.in_phase(phase, field, own=own))
    return column(figures)


def _read(payload: bytes) -> ComparedRun:
    window = json.decode(payload, type=_Window)
    return ComparedRun.from_tables(window.compare, window.modules | window.compare.times)
