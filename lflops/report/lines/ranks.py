"""The ranks of a run as lines: who answered, who is slow in what, and who waits for data."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from lflops import units
from lflops.analyze.ranks.imbalance import Row, imbalance
from lflops.analyze.speed.step_times import step_times
from lflops.profile.model import Profile
from lflops.profile.records import Rank, Spread
from lflops.report.terminal.text import plain

__all__ = ["is_staged", "ranks"]

_WORST = 3
_LISTED = 12
_WORTH_SAYING = 0.01
"""Of the step: what costs less is noise."""


def ranks(profile: Profile) -> Iterator[tuple[str, str]]:
    """Label and value of each line; one without a label goes on with the line above. Of a run of one rank there are none."""
    if len(profile.ranks) < 2:
        return
    yield "ranks", "; ".join(_statuses(profile.ranks))
    macs = [rank.macs for rank in profile.ranks if rank.macs is not None]
    if any(macs):
        uneven = f", {units.count(min(macs))} to {units.count(max(macs))} on each" if min(macs) != max(macs) else ""
        yield "all ranks", f"{units.count(sum(macs))} MACs forward and backward{uneven}"
    for index, said in enumerate(_slow(profile)):
        yield "" if index else "slow ranks", said
    yield from _by_rank(profile.ranks, {"data wait by rank": lambda rank: rank.data, "CPU time by rank": lambda rank: rank.cpu})


def is_staged(profile: Profile) -> bool:
    """Whether the root has the work of ranks with modules of their own: what one GPU does of that differs from rank to rank."""
    return any(note.code == "ranks_differ" and note.values.get("rows_of_others") for note in profile.notes)


def _statuses(each: Sequence[Rank]) -> Iterator[str]:
    """How many answered, and the others by name."""
    fine = sum(rank.status == "ok" for rank in each)
    yield f"all {len(each)} answered" if fine == len(each) else f"{fine} of {len(each)} answered in full"
    for status in ("failed", "late", "missing"):
        named = [f"{rank.rank}{_place(rank)}" for rank in each if rank.status == status]
        if named:
            more = f" and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
            yield f"{status}: {', '.join(named[:_LISTED])}{more}"


def _place(rank: Rank) -> str:
    """Where in the run it stands, which is what is known of one that did not answer."""
    at = [f"{kind} {coordinate}" for kind, coordinate in rank.coordinates.items()]
    where = [*at, *([f"on {rank.host}"] if rank.host else [])]
    return f" ({plain(', '.join(where))})" if where else ""


def _slow(profile: Profile) -> Iterator[str]:
    """The worst, a sentence each. Where it is not known how long ranks wait for each other, that is not told from being slow."""
    step = step_times(profile).seconds
    least = _WORTH_SAYING * step.median if step else 0.0
    found = [row for row in imbalance(profile).alike if row.seconds_lost > least]
    yield from map(_sentence, [row for row in found if row.waiting != "unknown"][:_WORST])
    names = dict.fromkeys(f"{_name(row)} {row.phase}" for row in found if row.waiting == "unknown")
    if names:
        yield f"not told: {plain(', '.join(list(names)[:_WORST]))}, in which ranks wait for each other, nobody knows how long"
    if profile.rank_stats and not found:
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
    """The least, and the most with the rank that has it."""
    for label, of in lines.items():
        known = [(spread.median, rank.rank) for rank in each if (spread := of(rank)) is not None]
        if len(known) > 1:
            (least, _), (most, rank) = min(known), max(known)
            yield label, f"{units.duration(least)} to {units.duration(most)}, the most on rank {rank}"
