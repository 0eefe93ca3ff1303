"""Build the data of the page: formatted values, and tables that are stored by column.

A payload is the data of one window (a few profiled steps), and a ledger is a run's time account.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from msgspec import DecodeError, Struct, json
from msgspec.structs import replace

from lflops.analysis.analysis import Analysis
from lflops.errors import ProfileError
from lflops.garbage import gc_paused
from lflops.ledger.account import CATEGORIES, CAUSES, Ledger, StepGroup
from lflops.ledger.ledger_file import ENDING, load_run
from lflops.profile.profile import Profile
from lflops.profile.records import Rank, TimingStats, median_of, ready_for_threads
from lflops.ranks.stragglers import slowest_first
from lflops.report.first_screen.screen import FirstScreen, first_screen
from lflops.report.first_screen.window import WindowSummary, window_summary
from lflops.report.ledger import headline
from lflops.report.payload.columns import VERSION, Columns, Value, lists
from lflops.report.payload.compare import ComparedFigures, compared_figures
from lflops.report.payload.memory import MemoryShown, memory
from lflops.report.payload.operators import Operators, modules, operators
from lflops.report.payload.roofline import Roofs, roofs
from lflops.report.ranks import coordinates_of, ranks
from lflops.report.summary_facts import Report, report_of
from lflops.report.text import joined


class TraceFile(Struct, frozen=True, kw_only=True):
    """The file with the trace of one rank."""

    rank: str
    file: str


class WindowHeader(Struct, frozen=True, kw_only=True):
    """The data of a window that is shown in lists of windows.

    Attributes:
        step: Number of the step of the training run at which the window was profiled.
        when: The number of the window and the number of the step, as text.
        kind: The stage, such as `train`. If there is no stage, the way in which the profile was
            made.
        figures: Numbers that change from window to window, such as MFU, keyed by their names in the
            report. Unknown numbers are left out.
        ranges: Lower and upper quartile of some of the numbers in `figures`, with the same keys.
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


class RanksShown(Struct, frozen=True, kw_only=True):
    """The Ranks view: the ranks of a run and the differences between their times.

    A place is a module in a phase.

    Attributes:
        said: Labels and texts of the lines about ranks in the report.
        ranks: The ranks with their status (`ok`, `late`, `missing` or `failed`) and median times.
        slowest_first: Numbers of the ranks, the slowest rank first.
        compared: Whether at least one module has times from two ranks.
        places: The places with the largest differences between ranks, the largest first. Each has
            the seconds of the median rank, the extra seconds of the slowest rank, and whether the
            ranks wait for each other in this place.
        seconds: For each place in `places`, the seconds of each rank, or `None` if unknown.
    """

    said: list[tuple[str, str]]
    ranks: Columns
    slowest_first: tuple[int, ...]
    compared: bool
    places: Columns
    seconds: list[list[float | None]]


class Payload(Struct, frozen=True, kw_only=True):
    """The data of a page about one profile, with a field for each view of the page.

    A field is `None` if its view has nothing to show.

    Attributes:
        lflops: The version of this format.
        head: The data that is shown in lists of windows. `lflops` and `head` are the first fields,
            so that a server can read them without the other fields.
        title: Description of the profiled model.
        partial: Whether the training run ended before the window was complete.
        has_timeline: Whether a step has a timeline. Timelines are stored separately.
        peak_flops_per_second: The peak that MFU is relative to.
        window: The data of the window that the first screen needs.
    """

    lflops: int
    head: WindowHeader
    title: str
    partial: bool
    has_timeline: bool
    peak_flops_per_second: float | None
    window: WindowSummary
    report: Report
    modules: Columns
    operators: Operators | None
    roofline: Roofs | None
    memory: MemoryShown | None
    ranks: RanksShown | None
    traces: tuple[TraceFile, ...]
    compare: ComparedFigures


def payload(analysis: Analysis, folder: Path | None = None) -> Payload:
    """Return the data of the page for a profile.

    Args:
        analysis: The analysis of the profile.
        folder: If passed, the paths of trace files are relative to this folder.
    """
    made = _MADE.get(analysis)
    if made is None:
        with gc_paused():
            made = _MADE[analysis] = _payload(analysis)
    traces = []
    trace = analysis.profile.trace
    if trace is not None:
        for rank, file in trace.files.items():
            shown = file if folder is None else _relative(folder, file)
            traces.append(TraceFile(rank=rank, file=shown))
    return replace(made, traces=tuple(traces))


_MADE: WeakKeyDictionary[Analysis, Payload] = WeakKeyDictionary()
"""The payload of each analysis that is still in use.

A payload is built only once, even if both the TensorBoard tab and the page need it.
"""


def _payload(analysis: Analysis) -> Payload:
    """Build the payload without the paths of trace files, which depend on the folder."""
    profile = analysis.profile
    root = profile.modules[""].class_name or "a script"
    return Payload(
        lflops=VERSION,
        head=_head(analysis),
        title=f"{root}, {profile.run.stage or profile.run.kind}",
        partial=profile.run.partial,
        has_timeline=bool(profile.timelines),
        peak_flops_per_second=analysis.utilization.peak_flops_per_second,
        window=window_summary(analysis),
        report=report_of(analysis),
        modules=modules(analysis),
        operators=operators(analysis),
        roofline=roofs(analysis),
        memory=memory(analysis),
        ranks=_ranks(analysis),
        traces=(),
        compare=compared_figures(analysis),
    )


_FIGURES = ("MFU", "achieved", "samples/s", "tokens/s", "step", "pass", "data", "peak live memory")


def _head(analysis: Analysis) -> WindowHeader:
    run = analysis.profile.run
    times = analysis.step_times
    report = report_of(analysis)
    figures = {}
    for name in _FIGURES:
        value = report.value(name)
        if value is not None:
            figures[name] = float(value)
    ranges = {}
    spreads = {analysis.evidence.unit: times.seconds, "data": times.spreads.get("data")}
    for name, spread in spreads.items():
        if spread is not None and spread.n > 1:
            ranges[name] = (spread.low, spread.high)
    window = None
    if run.window is not None:
        window = f"window {run.window}"
    step = None
    if run.step is not None:
        step = f"step {run.step}"
    device = run.device_name
    if run.kind == "estimate" and run.hardware is not None:
        device = run.hardware.name
    dtype = run.precision or run.dtype
    if run.dtype == "tf32":
        dtype = run.dtype
    return WindowHeader(
        step=run.step,
        when=joined(window, step),
        kind=run.stage or run.kind,
        device=device,
        strategy=run.strategy,
        ranks=run.world_size,
        dtype=dtype,
        partial=run.partial,
        figures=figures,
        ranges=ranges,
    )


def _relative(folder: Path, file: str) -> str:
    try:
        return Path(os.path.relpath(file, folder)).as_posix()
    except ValueError:
        # The file is on another drive on Windows.
        return file


def _ranks(analysis: Analysis) -> RanksShown | None:
    """Return the data of the Ranks view, or `None` if the run has only one rank."""
    profile = analysis.profile
    if len(profile.ranks) < 2:
        return None
    stats = [stat for stat in profile.rank_stats if stat.by_rank is not None]
    stats.sort(key=lambda stat: (stat.waits, -stat.spread))
    seconds = []
    for stat in stats:
        by_rank = stat.by_rank or {}
        seconds.append([by_rank.get(rank.rank) for rank in profile.ranks])
    return RanksShown(
        said=list(ranks(analysis)),
        ranks=_table_of_ranks(profile.ranks),
        slowest_first=slowest_first(profile, analysis.stragglers),
        compared=bool(profile.rank_stats),
        places=lists(stats, ("module", "phase", "median", "spread", "waits")),
        seconds=seconds,
    )


def _table_of_ranks(listed: Sequence[Rank]) -> Columns:
    table = lists(listed, ("rank", "status", "host", "device", "macs", "peak_bytes", "slowest"))
    for field in ("step", "data", "cpu"):
        medians: list[Value] = []
        for rank in listed:
            spread: TimingStats | None = getattr(rank, field)
            medians.append(median_of(spread))
        table[field] = medians
    positions: list[Value] = []
    for rank in listed:
        positions.append(", ".join(coordinates_of(rank)) or None)
    return table | {"place": positions}


class LedgerShown(Struct, frozen=True, kw_only=True):
    """The data of a ledger that the page shows.

    Attributes:
        title: The duration, the number of starts (processes) and the number of steps of the run,
            and the rank that measured them.
        categories: Labels of the ledger's categories, keyed by name.
        causes: Labels of the causes of slow steps, keyed by name.
    """

    title: str
    ledger: Ledger
    categories: Mapping[str, str]
    causes: Mapping[str, str]


class RunShown(Struct, frozen=True, kw_only=True):
    """The data that the page shows about a whole run.

    Attributes:
        screen: The data of the page's first screen.
        steps: The timed steps of the window. Empty if there is a ledger, because the ledger has the
            times of all steps.
        ledger: The ledger, or `None` if there is none.
    """

    screen: FirstScreen
    steps: tuple[StepGroup, ...]
    ledger: LedgerShown | None


def run_shown(window: WindowSummary | None, ledger: Ledger | None) -> RunShown:
    """Build the data that the page shows about a whole run.

    The data come from the last window of the run and from its ledger.
    """
    steps: Iterator[StepGroup] = iter(())
    if ledger is None and window is not None:
        steps = _groups(window.profile)
    return RunShown(
        screen=first_screen(window, ledger),
        steps=tuple(steps),
        ledger=None if ledger is None else ledger_shown(ledger),
    )


def ledger_shown(ledger: Ledger) -> LedgerShown:
    return LedgerShown(title=headline(ledger), ledger=ledger, categories=CATEGORIES, causes=CAUSES)


def _groups(profile: Profile) -> Iterator[StepGroup]:
    """Yield the timed steps of a window, each as a group of one step.

    The step in which operators were counted is left out, because its time is never used.
    """
    for step in profile.steps:
        if step.seconds is None or step.kind == "counting":
            continue
        spent = step.phases or {"other": step.seconds}
        yield StepGroup(
            first=step.index,
            last=step.index,
            spent=spent,
            longest=step.seconds,
            mode="unprofiled" if step.is_unprofiled else "profiled",
        )


class _Payload(Struct):
    window: WindowSummary


ready_for_threads(_Payload)


def encoded_run(payload: bytes, folder: Path) -> bytes:
    """Return the data of a run as JSON.

    Args:
        payload: The payload of the run's last window, as JSON.
        folder: The folder of the run, which may contain a ledger.

    Raises:
        ValueError: The payload does not have the data of the first screen, or the ledger cannot be
            read.
    """
    try:
        window = json.decode(payload, type=_Payload).window
        return json.encode(run_shown(window, ledger_in(folder)))
    except ProfileError as error:
        raise ValueError(f"has an unreadable ledger: {error}") from None
    except (DecodeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"lacks data for the summary of the run: {error}") from None


def ledger_in(folder: Path) -> Ledger | None:
    """Load the ledger of the last run in a folder, or return `None` if there is no ledger.

    Raises:
        ProfileError: The ledger cannot be read.
    """
    has_ledger = any(folder.rglob(f"*{ENDING}"))
    return load_run(folder) if has_ledger else None
