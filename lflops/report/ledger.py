"""A run's ledger as lines of text.

Five for the log at the run's end, and all of it for the command line.
"""

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
from lflops.report.text import counted

LEAST_SHARE, LEAST = (
    0.01,
    1.0,
    # a loss costs this share of the run and so many seconds; less is not worth a line
)
SHORT_RUN = (
    # seconds: of a shorter run only slow steps are worth a line, since every program starts
    60.0
)

WAITS = {
    "training/data": "waiting for data",
    "training/wait": "waiting for other ranks in backward",
}
# of the run: as much of it is a loss, though it is in the usual steps
LONG_WAIT = 0.1

MOST_LOSSES, MOST_SLOW, MOST_CATEGORIES = 3, 10, 4


class Loss(NamedTuple):
    """Time that was no training: a category, or the cause of slow steps."""

    name: str
    seconds: float
    # the slow ones that it is the cause of, as far as they are kept
    steps: tuple[SlowStep, ...]


def losses(ledger: Ledger) -> list[Loss]:
    """List what took time besides training, the most first; what is not worth a line is left out."""
    least = max(LEAST_SHARE * ledger.total, LEAST)
    is_short = ledger.total < SHORT_RUN
    found = []
    for name, seconds in ledger.seconds.items():
        group, _, cause = name.partition("/")
        is_loss = (
            seconds >= LONG_WAIT * ledger.total
            if name in WAITS
            else group not in NO_LOSS and (group == "slow" or not is_short)
        )
        if is_loss and seconds >= least:
            found.append(
                Loss(
                    name,
                    seconds,
                    tuple(
                        each
                        for each in ledger.slow_steps
                        if group == "slow" and each.cause == cause
                    ),
                )
            )
    return sorted(found, key=lambda loss: -loss.seconds)


def end_lines(ledger: Ledger, where: str | None) -> list[str]:
    """Where the run's time went, its three largest losses, and where to look (`where`, if there is a file); nothing for small losses."""
    lost = losses(ledger)[:MOST_LOSSES]
    growth = memory_growth(ledger)
    if not lost and growth is None:
        return []
    parts = [
        f"{CATEGORIES[group]} {units.percent(seconds / ledger.total)}"
        for group, seconds in ledger.by_group().items()
    ]
    more = (
        f", {counted(len(parts) - MOST_CATEGORIES, 'other')}"
        if len(parts) > MOST_CATEGORIES
        else ""
    )
    lines = [
        f"lflops: the run's {units.long_duration(ledger.total)}: {', '.join(parts[:MOST_CATEGORIES])}{more}"
    ]
    lines += [f"  {units.long_duration(loss.seconds):>8}  {_text_of(loss)}" for loss in lost]
    if growth is not None:
        lines.append(f"  memory of the process grows by {units.size(growth)} an hour")
    return lines if where is None else [*lines, f"  all of it: lflops ledger {shlex.quote(where)}"]


def headline(ledger: Ledger) -> str:
    """How long the run is, and whose account it is."""
    starts = counted(len(ledger.starts), "start")
    others = (
        f"; {counted(ledger.others, 'start')} of other runs or loops in this folder, each in its file"
        if ledger.others
        else ""
    )
    return f"{units.long_duration(ledger.total)} in {starts}, {counted(ledger.steps, 'step')}, rank {ledger.rank} of {ledger.ranks}{others}"


def ledger_lines(ledger: Ledger) -> Iterator[str]:
    """The account by category, the starts, and the costliest slow steps."""
    yield headline(ledger)
    yield ""
    groups = ledger.by_group()
    for group, seconds in groups.items():
        yield _row(CATEGORIES[group], seconds, ledger.total)
        parts = {
            name.partition("/")[2]: value
            for name, value in ledger.seconds.items()
            if group_of(name) == group and "/" in name
        }
        for part, value in sorted(parts.items(), key=lambda item: -item[1]):
            yield _row(
                f"  {CAUSES.get(part, part) if group == 'slow' else part}", value, ledger.total
            )
    if len(ledger.starts) > 1:
        yield ""
        for number, start in enumerate(ledger.starts, 1):
            yield f"start {number}: {units.long_duration(start.seconds)}, steps {start.first_step + 1} to {start.last_step}, {start.ended}"
    if ledger.slow_steps:
        yield from ["", *_slow_lines(ledger.slow_steps)]
    if (growth := memory_growth(ledger)) is not None:
        yield from ["", f"memory of the process grows by {units.size(growth)} an hour"]


def _row(label: str, seconds: float, total: float) -> str:
    return f"{label:<72} {units.long_duration(seconds):>12} {units.percent(seconds / total if total else None):>8}"


def _slow_lines(steps: Iterable[SlowStep]) -> Iterator[str]:
    costliest = sorted(steps, key=lambda step: -step.cost)
    yield f"{'step':>10} {'took':>10} {'usual':>10}  cause"
    for each in costliest[:MOST_SLOW]:
        what = f", in {each.phase}" if each.cause == "unknown" else ""
        times = f"{units.duration(each.seconds):>10} {units.duration(each.usual):>10}"
        yield f"{each.step:>10} {times}  {CAUSES.get(each.cause, each.cause)}{what}"
    if len(costliest) > MOST_SLOW:
        yield f"{len(costliest) - MOST_SLOW:>10} more"


def _text_of(loss: Loss) -> str:
    group, _, cause = loss.name.partition("/")
    if group != "slow":
        return WAITS.get(loss.name, CATEGORIES.get(group, group))
    longest = max(loss.steps, key=lambda step: step.seconds, default=None)
    phases = summed((step.phase, step.cost) for step in loss.steps)
    what = f"{CAUSES.get(cause, cause)}{f', mostly in {max(phases, key=phases.__getitem__)}' if cause == 'unknown' and phases else ''}"
    if longest is None:
        return f"slow steps: {what}"
    return f"slow steps: {what}; {counted(len(loss.steps), 'step')}, the longest {units.duration(longest.seconds)} (step {longest.step})"
