"""Format a run's ledger, its time account, as text.

A start is one process of the run. A run that was resumed has several starts.
"""

from collections.abc import Iterable, Iterator

from lflops import units
from lflops.findings.stalls import stalls_of
from lflops.ledger.account import (
    CATEGORIES,
    CAUSES,
    NO_LOSS,
    Ledger,
    SlowStep,
    Start,
    group_of,
    memory_growth,
)
from lflops.report.text import counted, phase_label

LEAST_SHARE = 0.01
"""Smallest time of a category that is reported as lost, as a share of the run."""

LEAST_SECONDS = 1.0
"""Smallest time of a category that is reported as lost, in seconds."""

SHORT_RUN_SECONDS = 60.0
"""If a run is shorter than this, time outside training, such as the start-up, is not lost time.

In a short run, it is normal that the start-up takes much of the time.
"""

WAITS = {"training/data", "training/wait"}
"""Ledger categories of the data wait and the communication wait in steps that were not slow."""

LONG_WAIT_SHARE = 0.1
"""Waits in steps that were not slow are lost time if they take at least this share of the run."""

LONG_OTHER_SHARE = 0.25
"""Time outside all phases of the steps is lost time if it takes at least this share of the run.

A smaller share may be useful work, such as the loss or another model.
"""

MOST_SLOW_STEPS = 10

HOW_TO_PROFILE = "To profile a window, set LFLOPS=wait=5 and start the run with `lflops run`."
"""Advice for a run without a window. Only a window shows the times and the work of modules."""


def has_losses(ledger: Ledger) -> bool:
    """Return whether the run lost much time, or the memory of its last process keeps growing."""
    is_lost = any(_is_loss(ledger, name, seconds) for name, seconds in ledger.seconds.items())
    return is_lost or memory_growth(ledger) is not None


def _is_loss(ledger: Ledger, name: str, seconds: float) -> bool:
    if seconds < max(LEAST_SHARE * ledger.total, LEAST_SECONDS):
        return False
    if name in WAITS:
        return seconds >= LONG_WAIT_SHARE * ledger.total
    if name == "training/other":
        return seconds >= LONG_OTHER_SHARE * ledger.total
    group = group_of(name)
    return group == "slow" or (group not in NO_LOSS and ledger.total >= SHORT_RUN_SECONDS)


def headline(ledger: Ledger) -> str:
    """Describe the run in one line: duration, starts, steps, and the rank that measured them."""
    duration = units.long_duration(ledger.total)
    starts = counted(len(ledger.starts), "start")
    steps = counted(ledger.steps, "step")
    line = f"{duration} in {starts}, {steps}, rank {ledger.rank} of {ledger.ranks}"
    others = other_runs(ledger)
    return f"{line}; {others}" if others else line


def other_runs(ledger: Ledger) -> str:
    """Describe the other runs in the folder of a ledger, or return the empty string."""
    if not ledger.others:
        return ""
    files = counted(ledger.others, "ledger file")
    return f"this folder also has {files} of other runs, which are not included here"


def ledger_lines(ledger: Ledger) -> Iterator[str]:
    """Yield the lines of the ledger.

    They show the time in each category, the starts of the run if there are several, the slow steps
    with the highest cost, and the growth of the process's memory.
    """
    yield headline(ledger)
    yield ""
    for group, total in ledger.by_group().items():
        yield _row(CATEGORIES[group], total, ledger.total)
        for label, seconds in _parts(ledger, group):
            yield _row(f"  {label}", seconds, ledger.total)
    if len(ledger.starts) > 1:
        yield ""
        for number, start in enumerate(ledger.starts, 1):
            duration = units.long_duration(start.seconds)
            yield f"start {number}: {duration}, {_steps_of(start)}, {start.ended}"
    if ledger.slow_steps:
        yield ""
        yield from _slow_lines(ledger.slow_steps)
        yield from _rhythm_lines(ledger)
    growth = memory_growth(ledger)
    if growth is not None:
        yield ""
        yield _growth(growth)


def _parts(ledger: Ledger, group: str) -> Iterator[tuple[str, float]]:
    """Yield the label and the seconds of each part of a category, the longest part first.

    The category of slow steps is divided by cause, and every other category by phase.
    """
    for name, seconds in sorted(ledger.seconds.items(), key=lambda item: -item[1]):
        of_group, _, part = name.partition("/")
        if of_group != group or not part:
            continue
        label = phase_label(part)
        if group == "slow":
            label = CAUSES.get(part, part)
        yield label, seconds


def _row(label: str, seconds: float, total: float) -> str:
    share = units.percent(seconds / total if total else None)
    return f"{label:<72} {units.long_duration(seconds):>12} {share:>8}"


def _slow_lines(steps: Iterable[SlowStep]) -> Iterator[str]:
    by_cost = sorted(steps, key=lambda step: -step.cost)
    yield f"{'step':>10} {'took':>10} {'usual':>10}  cause"
    for step in by_cost[:MOST_SLOW_STEPS]:
        cause = CAUSES.get(step.cause, step.cause)
        if step.cause == "unknown":
            cause += f", in the phase {phase_label(step.phase)}"
        times = f"{units.duration(step.seconds):>10} {units.duration(step.usual):>10}"
        yield f"{step.step:>10} {times}  {cause}"
    if len(by_cost) > MOST_SLOW_STEPS:
        yield f"{len(by_cost) - MOST_SLOW_STEPS:>10} more slow steps"


def _rhythm_lines(ledger: Ledger) -> Iterator[str]:
    """Describe how often slow steps occur if their cause is unknown, with a line per phase."""
    phases = dict.fromkeys(step.phase for step in ledger.slow_steps if step.cause == "unknown")
    for phase in phases:
        stalls = stalls_of(ledger, phase)
        if stalls is not None:
            line = f"{phase_label(phase)} takes {units.duration(stalls.seconds)} {stalls.often}"
            if stalls.usual is not None:
                line += f", and {units.duration(stalls.usual)} in the other steps"
            yield line


def _steps_of(start: Start) -> str:
    """Format which steps a start ran. Steps are numbered from 0."""
    if start.last_step <= start.first_step:
        return "no steps"
    return f"steps {start.first_step} to {start.last_step - 1}"


def _growth(bytes_per_hour: float) -> str:
    return f"the host memory of the process grows by {units.size(bytes_per_hour)} per hour"
