"""A run's ledger as text: a few lines for the log at the end of the run, or all of it."""

import shlex
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lflops import units
from lflops.ledger.account import (
    CATEGORIES,
    CAUSES,
    NO_LOSS,
    Ledger,
    SlowStep,
    group_of,
    memory_growth,
)
from lflops.profile.series import summed
from lflops.report.text import counted, phase_label

LEAST_SHARE = 0.01
"""The smallest loss that has a line, as a share of the run."""

LEAST_SECONDS = 1.0
"""The smallest loss that has a line, in seconds."""

SHORT_RUN_SECONDS = 60.0
"""In a shorter run, only slow steps have a line, because every program needs time to start."""

WAITS = {
    "training/data": "waiting for data",
    "training/wait": "waiting for other ranks in backward",
}
"""Phases of usual steps in which the run waits."""

LONG_WAIT_SHARE = 0.1
"""The share of the run above which a wait in usual steps is a loss."""

MOST_LOSSES = 3
MOST_SLOW_STEPS = 10
MOST_CATEGORIES = 4


class Loss(NamedTuple):
    """Time that was not spent on training: a category, or the cause of slow steps.

    Attributes:
        steps: The slow steps of the cause that the ledger lists.
    """

    name: str
    seconds: float
    steps: tuple[SlowStep, ...]


def losses(ledger: Ledger) -> list[Loss]:
    """The losses that are large enough for a line, the largest first."""
    found = []
    for name, seconds in ledger.seconds.items():
        group, _, cause = name.partition("/")
        if _is_loss(ledger, name, seconds):
            steps = [step for step in ledger.slow_steps if step.cause == cause]
            found.append(Loss(name, seconds, tuple(steps) if group == "slow" else ()))
    return sorted(found, key=lambda loss: -loss.seconds)


def _is_loss(ledger: Ledger, name: str, seconds: float) -> bool:
    if seconds < max(LEAST_SHARE * ledger.total, LEAST_SECONDS):
        return False
    if name in WAITS:
        return seconds >= LONG_WAIT_SHARE * ledger.total
    group = group_of(name)
    return group == "slow" or (group not in NO_LOSS and ledger.total >= SHORT_RUN_SECONDS)


def end_lines(ledger: Ledger, where: str | None) -> list[str]:
    """Where the time of the run went, and its largest losses. Empty for a run without losses.

    `where` is the folder of the ledger, if it is written to one.
    """
    lost = losses(ledger)[:MOST_LOSSES]
    growth = memory_growth(ledger)
    if not lost and growth is None:
        return []
    parts = []
    for group, seconds in ledger.by_group().items():
        parts.append(f"{CATEGORIES[group]} {units.percent(seconds / ledger.total)}")
    if len(parts) > MOST_CATEGORIES:
        left = len(parts) - MOST_CATEGORIES
        parts = [*parts[:MOST_CATEGORIES], counted(left, "other")]
    lines = [f"lflops: the run's {units.long_duration(ledger.total)}: {', '.join(parts)}"]
    for loss in lost:
        lines.append(f"  {units.long_duration(loss.seconds):>8}  {_text_of(loss)}")
    if growth is not None:
        lines.append(f"  {_growth(growth)}")
    if where is not None:
        lines.append(f"  details: lflops ledger {shlex.quote(where)}")
    return lines


def headline(ledger: Ledger) -> str:
    """How long the run is, and which rank measured it."""
    duration = units.long_duration(ledger.total)
    starts = counted(len(ledger.starts), "start")
    steps = counted(ledger.steps, "step")
    line = f"{duration} in {starts}, {steps}, rank {ledger.rank} of {ledger.ranks}"
    if ledger.others:
        others = counted(ledger.others, "start")
        line += f"; this folder has {others} of other runs or loops, in separate files"
    return line


def ledger_lines(ledger: Ledger) -> Iterator[str]:
    """The seconds by category, the starts, and the slow steps that cost most."""
    yield headline(ledger)
    yield ""
    for group, total in ledger.by_group().items():
        yield _row(CATEGORIES[group], total, ledger.total)
        for label, seconds in _parts(ledger, group):
            yield _row(f"  {label}", seconds, ledger.total)
    if len(ledger.starts) > 1:
        yield ""
        for number, start in enumerate(ledger.starts, 1):
            steps = f"steps {start.first_step + 1} to {start.last_step}"
            duration = units.long_duration(start.seconds)
            yield f"start {number}: {duration}, {steps}, {start.ended}"
    if ledger.slow_steps:
        yield ""
        yield from _slow_lines(ledger.slow_steps)
    growth = memory_growth(ledger)
    if growth is not None:
        yield ""
        yield _growth(growth)


def _parts(ledger: Ledger, group: str) -> Iterator[tuple[str, float]]:
    """The phases or causes of a category with their seconds, the longest first."""
    for name, seconds in sorted(ledger.seconds.items(), key=lambda item: -item[1]):
        of_group, _, part = name.partition("/")
        if of_group == group and part:
            yield CAUSES.get(part, part) if group == "slow" else phase_label(part), seconds


def _row(label: str, seconds: float, total: float) -> str:
    share = units.percent(seconds / total if total else None)
    return f"{label:<72} {units.long_duration(seconds):>12} {share:>8}"


def _slow_lines(steps: Iterable[SlowStep]) -> Iterator[str]:
    by_cost = sorted(steps, key=lambda step: -step.cost)
    yield f"{'step':>10} {'took':>10} {'usual':>10}  cause"
    for step in by_cost[:MOST_SLOW_STEPS]:
        cause = CAUSES.get(step.cause, step.cause)
        if step.cause == "unknown":
            cause += f", in {phase_label(step.phase)}"
        times = f"{units.duration(step.seconds):>10} {units.duration(step.usual):>10}"
        yield f"{step.step:>10} {times}  {cause}"
    if len(by_cost) > MOST_SLOW_STEPS:
        yield f"{len(by_cost) - MOST_SLOW_STEPS:>10} more"


def _text_of(loss: Loss) -> str:
    group, _, cause = loss.name.partition("/")
    if group != "slow":
        return WAITS.get(loss.name, CATEGORIES.get(group, group))
    text = f"slow steps: {CAUSES.get(cause, cause)}"
    if not loss.steps:
        return text
    if cause == "unknown":
        costs = summed((step.phase, step.cost) for step in loss.steps)
        text += f", mostly in {phase_label(max(costs, key=costs.__getitem__))}"
    longest = max(loss.steps, key=lambda step: step.seconds)
    number = counted(len(loss.steps), "step")
    return f"{text}; {number}, the longest {units.duration(longest.seconds)} (step {longest.step})"


def _growth(bytes_per_hour: float) -> str:
    return f"the memory of the process grows by {units.size(bytes_per_hour)} per hour"
