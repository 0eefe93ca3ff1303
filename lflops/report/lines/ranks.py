"""The ranks of a run as lines: which reported, which are slow and in which modules, and which wait for data."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.ranks.imbalance import Row
from lflops.profile.records import Rank, Spread
from lflops.report.lines.text import plain

__all__ = ["ranks"]

_WORST = 3
_LISTED = 12
_WORTH_SAYING = 0.01
"""Of the step: what costs less is noise."""


def ranks(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Label and value of each line; one without a label goes on with the line above. Of a run of one rank there are none."""
    listed = analysis.profile.ranks
    if len(listed) < 2:
        return
    yield "ranks", "; ".join(_statuses(listed))
    macs = [rank.macs for rank in listed if rank.macs is not None]
    if any(macs):
        uneven = f", {units.count(min(macs))} to {units.count(max(macs))} on each" if min(macs) != max(macs) else ""
        yield "all ranks", f"{units.count(sum(macs))} MACs forward and backward{uneven}"
    for index, sentence in enumerate(_slow(analysis)):
        yield "" if index else "slow ranks", sentence
    yield from _by_rank(listed, {"data wait by rank": lambda rank: rank.data, "CPU time by rank": lambda rank: rank.cpu})


def _statuses(each: Sequence[Rank]) -> Iterator[str]:
    """How many ranks reported, and the numbers of the others."""
    fine = sum(rank.status == "ok" for rank in each)
    yield f"all {len(each)} answered" if fine == len(each) else f"{fine} of {len(each)} answered in full"
    for status in ("failed", "late", "missing"):
        named = [f"{rank.rank}{_position(rank)}" for rank in each if rank.status == status]
        if named:
            more = f" and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
            yield f"{status}: {', '.join(named[:_LISTED])}{more}"


def _position(rank: Rank) -> str:
    """Its coordinates and host, which are known even of a rank that did not report."""
    at = [f"{kind} {coordinate}" for kind, coordinate in rank.coordinates.items()]
    where = [*at, *([f"on {rank.host}"] if rank.host else [])]
    return f" ({plain(', '.join(where))})" if where else ""


def _slow(analysis: Analysis) -> Iterator[str]:
    """The worst stragglers, a sentence each. Time that may be waiting for other ranks does not make a straggler."""
    step = analysis.step_times.seconds
    least = _WORTH_SAYING * step.median if step else 0.0
    rows = [row for row in analysis.imbalance.alike if row.seconds_lost > least]
    yield from map(_sentence, [row for row in rows if row.waiting != "unknown"][:_WORST])
    names = dict.fromkeys(f"{_name(row)} {row.phase}" for row in rows if row.waiting == "unknown")
    if names:
        yield f"not told: {plain(', '.join(list(names)[:_WORST]))}, in which ranks wait for each other, nobody knows how long"
    if analysis.profile.rank_stats and not rows:
        share = f" {units.percent(_WORTH_SAYING)} of the step" if step else " nothing"
        yield f"none costs more than{share}"


def _sentence(row: Row) -> str:
    more = "slower" if row.spread is None else f"{units.percent(row.spread)} slower"
    often = "" if row.always is None else ", every step" if row.always else f", in {row.slowest_steps} of {row.steps} cases"
    number = f" ({row.modules} modules)" if row.modules > 1 else ""
    where = f"{plain(_name(row))} {row.phase}{number}"
    return f"rank {row.slow_rank} is {more} than the median in {where}{often}: {units.duration(row.seconds_lost)} a step"


def _name(row: Row) -> str:
    return row.module or "the root's own"


def _by_rank(each: Sequence[Rank], lines: Mapping[str, Callable[[Rank], Spread | None]]) -> Iterator[tuple[str, str]]:
    """The minimum, and the maximum with its rank."""
    for label, of in lines.items():
        known = [(spread.median, rank.rank) for rank in each if (spread := of(rank)) is not None]
        if len(known) > 1:
            (least, _), (most, rank) = min(known), max(known)
            yield label, f"{units.duration(least)} to {units.duration(most)}, the most on rank {rank}"
