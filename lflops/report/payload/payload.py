"""A profile as what the page draws: few values, ready to be shown, and tables column by column."""

import os
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

from msgspec import Struct, json
from msgspec.structs import replace

from lflops.analysis.analysis import Analysis
from lflops.garbage import gc_paused
from lflops.ledger.account import CATEGORIES, CAUSES, Ledger
from lflops.ledger.run import load_run
from lflops.ranks.stragglers import slowest_first
from lflops.report.ledger import end_lines, headline
from lflops.report.payload.columns import VERSION, Columns, lists
from lflops.report.payload.compare import RunShown, run_shown
from lflops.report.payload.memory import MemoryShown, memory
from lflops.report.payload.operators import Operators, modules, operators
from lflops.report.payload.roofline import Roofs, roofs
from lflops.report.ranks import ranks
from lflops.report.report import Report, report_of


class TraceFile(Struct, frozen=True, kw_only=True):
    """The trace of one rank."""

    rank: str
    file: str


class WindowHeader(Struct, frozen=True, kw_only=True):
    """What a list of windows shows of each."""

    # the training's
    step: int | None
    # its window and its step, as text
    when: str
    # the stage, or how it was profiled
    kind: str
    device: str
    strategy: str | None
    ranks: int
    dtype: str | None
    partial: bool
    figures: dict[
        str, float
        # facts of the report that change from window to window, by their names; unknown ones are left
        # out
    ]
    # the quartiles of those that have some
    ranges: dict[str, tuple[float, float]]


class RanksShown(Struct, frozen=True, kw_only=True):
    """The ranks of a run."""

    # the report's lines, labels and texts
    said: list[tuple[str, str]]
    # in their order, with the medians of what they took; a status is one of `ok`, `late`, `missing`
    # and `failed`
    ranks: Columns
    # the ranks by their time beyond the median rank's
    slowest_first: tuple[int, ...]
    # whether any module has times of two ranks.
    compared: bool
    # Modules and phases with every rank's time, those in which ranks differ most first: the median
    # rank's seconds, how much longer the slowest one takes, and whether ranks wait for each other
    # in it
    places: Columns
    # of each of these the seconds of each rank
    seconds: list[list[float | None]]


class Payload(Struct, frozen=True, kw_only=True):
    """What one page shows of one profile, a field for each of its views.

    `None` where there is nothing to show.
    """

    # the version of this format, before everything else
    lflops: int
    # what a list of windows shows; second, so that a server reads it without the rest
    head: WindowHeader
    # what was profiled; when is in the head
    title: str
    # whether the window was left before its end
    partial: bool
    # whether there is a timeline of a step, which is a separate value
    has_timeline: bool
    peak_flops_per_second: (
        float | None
        # the chip's, for the training's dtype: what MFU is a share of
    )
    report: Report
    modules: Columns
    operators: Operators | None
    roofline: Roofs | None
    memory: MemoryShown | None
    ranks: RanksShown | None
    traces: tuple[TraceFile, ...]
    compare: RunShown


def payload(analysis: Analysis, folder: Path | None = None) -> Payload:
    """Everything that the page shows of a profile.

    Paths of traces are relative to the folder, if one is given.
    """
    made = _MADE.get(analysis)
    if made is None:
        with gc_paused():
            made = _MADE[analysis] = _made(analysis)
    trace = analysis.profile.trace
    files = {} if trace is None else trace.files
    traces = (
        TraceFile(rank=rank, file=file if folder is None else _relative(folder, file))
        for rank, file in files.items()
    )
    return replace(made, traces=tuple(traces))


_MADE: WeakKeyDictionary[Analysis, Payload] = WeakKeyDictionary()
"""What was made of each analysis that is still in use: the tab and the page of one window share it."""


def _made(analysis: Analysis) -> Payload:
    """Everything but the paths of its traces."""
    profile = analysis.profile
    return Payload(
        lflops=VERSION,
        head=_head(analysis),
        title=", ".join(
            [
                profile.modules[""].class_name or "a script",
                profile.run.stage or profile.run.kind,
            ]
        ),
        partial=profile.run.partial,
        has_timeline=bool(profile.timelines),
        peak_flops_per_second=analysis.utilization.peak_flops_per_second,
        report=report_of(analysis),
        modules=modules(analysis),
        operators=operators(analysis),
        roofline=roofs(analysis),
        memory=memory(analysis),
        ranks=_ranks(analysis),
        traces=(),
        compare=run_shown(analysis),
    )


_FIGURES = ("MFU", "achieved", "samples/s", "tokens/s", "step", "pass", "data", "peak live memory")


def _head(analysis: Analysis) -> WindowHeader:
    run, times, report = analysis.profile.run, analysis.step_times, report_of(analysis)
    spreads = {
        "step" if run.kind == "training" else "pass": times.seconds,
        "data": times.spreads.get("data"),
    }
    return WindowHeader(
        step=run.step,
        when=", ".join(
            f"{name} {at}"
            for name, at in (("window", run.window), ("step", run.step))
            if at is not None
        ),
        kind=run.stage or run.kind,
        device=run.device_name
        if run.hardware is None or run.kind != "estimate"
        else run.hardware.name,
        strategy=run.strategy,
        ranks=run.world_size,
        dtype=run.dtype if run.dtype == "tf32" else run.precision or run.dtype,
        partial=run.partial,
        figures={
            name: float(value) for name in _FIGURES if (value := report.value(name)) is not None
        },
        ranges={
            name: (spread.low, spread.high)
            for name, spread in spreads.items()
            if spread is not None and spread.n > 1
        },
    )


def _relative(folder: Path, file: str) -> str:
    try:
        return Path(os.path.relpath(file, folder)).as_posix()
    except ValueError:
        # another drive on Windows
        return file


def _ranks(analysis: Analysis) -> RanksShown | None:
    """The view; `None` for a run of one rank."""
    profile = analysis.profile
    if len(profile.ranks) < 2:
        return None
    known = sorted(
        (stat for stat in profile.rank_stats if stat.by_rank is not None),
        key=lambda stat: (stat.waits, -stat.spread),
    )
    table = lists(
        profile.ranks, ("rank", "status", "host", "device", "macs", "peak_bytes", "slowest")
    )
    for field in ("step", "data", "cpu"):
        table[field] = [
            None if (spread := getattr(rank, field)) is None else spread.median
            for rank in profile.ranks
        ]
    positions = [
        ", ".join(f"{kind} {coordinate}" for kind, coordinate in rank.coordinates.items())
        for rank in profile.ranks
    ]
    return RanksShown(
        said=list(ranks(analysis)),
        ranks=table | {"place": [position or None for position in positions]},
        slowest_first=slowest_first(profile, analysis.stragglers),
        compared=bool(profile.rank_stats),
        places=lists(known, ("module", "phase", "median", "spread", "waits")),
        seconds=[[(stat.by_rank or {}).get(rank.rank) for rank in profile.ranks] for stat in known],
    )


class LedgerShown(Struct, frozen=True, kw_only=True):
    """A ledger, with what its page says of it."""

    title: str
    # the losses that are worth a line
    said: tuple[str, ...]
    ledger: Ledger
    # how each is called
    categories: Mapping[str, str]
    causes: Mapping[str, str]


def ledger_shown(ledger: Ledger) -> LedgerShown:
    said = tuple(line.strip() for line in end_lines(ledger, None)[1:])
    return LedgerShown(
        title=headline(ledger), said=said, ledger=ledger, categories=CATEGORIES, causes=CAUSES
    )


def encoded_run(folder: Path) -> bytes:
    """The last run in a folder, as JSON.

    A `ProfileError` where there is no ledger, or it cannot be read.
    """
    return json.encode(ledger_shown(load_run(folder)))
