"""What the page and its server need to compare two windows, and the comparison as the page draws it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from typing import Any

from msgspec import DecodeError, Struct, json

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
from lflops.profile.records import PASS_PHASES, ready_for_threads
from lflops.report.diff import headline, is_news
from lflops.report.payload.columns import Columns, Value, column, exact

_WORK = ("macs", "flops", "bytes_moved", "parameters")
_TIME = ("before", "after", "ratio", "per_mac", "low", "high", "lost", "verdict")


class RunShown(RunFigures, frozen=True, kw_only=True):
    """What a comparison needs of a window, and what its table of modules has not."""

    # Of each module in each phase that has times, in the order of the table of modules: the
    # operator calls, and the error of the median; of all of it, and `self_`. Four digits of an error
    # are kept: it is an estimate, and the page stays small.
    times: Columns


class ComparisonShown(Struct, frozen=True, kw_only=True):
    """A `Diff` as the page draws it. What has no comment here is as in a `Diff`."""

    # the verdict on the step, and the other sentences about what changed
    headline: tuple[str, ...]
    # whether anything changed beyond noise
    is_news: bool
    facts: Mapping[str, tuple[Fact, Fact]]
    whole: CommonFactor | None
    step: Timing
    phases: Mapping[str, Timing]
    figures: Mapping[
        str, tuple[Value, Value]
        # of the run, by their names in the diff, and of the work of all of it: before and after.
    ]
    # Of each module `before`, `after`, `kind` and `pattern`; `time.` and the fields of the time
    # that is shown, and `own`, whether that is its own; its own work, as `macs.before` and
    # `macs.after`; `peak_bytes`. Also the seconds and MACs of each phase, as
    # `forward.seconds.before`: its own or the inclusive ones, as the time is.
    modules: Columns


class _Window(Struct, frozen=True):
    modules: dict[str, Any]
    compare: RunShown


ready_for_threads(_Window)


def run_shown(analysis: Analysis) -> RunShown:
    """All that `lflops.diff` reads in a profile and the table of modules does not have."""
    figures = run_figures(analysis.profile, analysis.step_times, analysis.utilization.mfu)
    columns = {
        name: values
        for name, values in time_columns(analysis.profile).items()
        if not name.endswith("seconds")
    }
    rounded = {
        name: (each and float(f"{each:.4g}") for each in values)
        for name, values in columns.items()
        if name.endswith("error")
    }
    times = {name: column(values) for name, values in (columns | rounded).items()}
    return RunShown(
        **{name: getattr(figures, name) for name in RunFigures.__struct_fields__}, times=times
    )


def compared_pairs(analyses: Sequence[Analysis]) -> Iterator[tuple[int, int, ComparisonShown]]:
    """Each run's position, that of each other one, and their comparison, both ways."""
    for (i, before), (j, after) in permutations(enumerate(each.compared for each in analyses), 2):
        yield i, j, _shown(compare(before, after))


def compared_windows(before: bytes, after: bytes) -> bytes:
    """Compare two payloads.

    JSON of a `ComparisonShown`; a `ValueError` says what one of them lacks.
    """
    try:
        with gc_paused():
            return json.encode(_shown(compare(_read(before), _read(after))))
    except (DecodeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"lack what a comparison needs: {error}") from None


def _shown(comparison: Comparison) -> ComparisonShown:
    diff = comparison.diff
    root = diff.modules[0].inclusive
    figures = {
        name: getattr(diff, name)
        for name in ("mfu", "samples_per_second", "tokens_per_second", "peak_bytes")
    }
    figures |= {name: getattr(root, name) for name in _WORK}
    return ComparisonShown(
        headline=headline(diff),
        is_news=is_news(diff),
        facts=diff.facts,
        whole=diff.whole,
        step=diff.step,
        phases=diff.phases,
        figures={
            name: (exact(change.before), exact(change.after)) for name, change in figures.items()
        },
        modules=_modules(comparison),
    )


def _modules(comparison: Comparison) -> Columns:
    modules, pairs = comparison.diff.modules, comparison.pairs
    is_own = [module.news is module.own.time for module in modules]
    changes: dict[str, list[Change]] = {
        name: [getattr(module.own, name) for module in modules] for name in _WORK
    }
    changes["peak_bytes"] = [module.peak_bytes for module in modules]
    columns: Columns = {
        name: column(getattr(module, name) for module in modules)
        for name in ("before", "after", "kind", "pattern")
    }
    columns |= {"own": column(is_own)} | {
        f"time.{name}": column(getattr(module.news, name) for module in modules) for name in _TIME
    }
    for name, values in changes.items():
        columns |= {
            f"{name}.before": column(each.before for each in values),
            f"{name}.after": column(each.after for each in values),
        }
    for phase, field in product(PASS_PHASES, ("seconds", "macs")):
        for side in ("before", "after"):
            modules_of_side: list[ModuleSide | None] = [getattr(pair, side) for pair in pairs]
            columns[f"{phase}.{field}.{side}"] = column(
                None if each is None else each.in_phase(phase, field, own=own)
                for each, own in zip(modules_of_side, is_own, strict=True)
            )
    return columns


def _read(payload: bytes) -> ComparedRun:
    window = json.decode(payload, type=_Window)
    return ComparedRun.from_tables(window.compare, window.modules | window.compare.times)
