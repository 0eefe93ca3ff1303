"""Stragglers: which rank makes the others wait, in what, and what that costs a step."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops.analyze.ranks.stragglers import Verdict, costs, judge
from lflops.profile.model import Profile
from lflops.profile.records import Rank, RankComparison, RankExcess, RankWait

__all__ = ["Imbalance", "Row", "culprits", "imbalance", "slowest_first"]

WORTH_SAYING = 0.01
"""Of the step: what costs less is dropped."""

MOST_OF = 0.6
"""Of what several modules cost: one that costs so much is named alone."""


class Row(Struct, frozen=True, kw_only=True):
    """A culprit: one rank, and what it takes longer for than the other ranks.

    Attributes:
        module: `""` is the root, and what is in no module; `layers.*.mlp` is several modules together.
        phase: One of `PHASES`, `data`, `transfer`, `clip`; `all` is everything that the rank's device does.
        modules: The number of modules.
        slow_rank: The rank.
        seconds_lost: What it costs a step, the mean over the steps.
        pattern: `steady` is in nearly every step, `burst` in some of them.
        slow_steps: In how many steps it is there.
        steps: Of how many; `None` where single steps are unknown.
        seconds: The slow rank's median.
        usual: The other ranks' median.
    """

    module: str
    phase: str
    modules: int
    slow_rank: int
    seconds_lost: float
    pattern: Literal["steady", "burst"]
    slow_steps: int | None
    steps: int | None
    seconds: float
    usual: float

    @property
    def ratio(self) -> float | None:
        """The slow rank's time to the others'; `None` where they take none, or where it comes in bursts."""
        return self.seconds / self.usual if self.usual and self.pattern == "steady" else None


class Imbalance(Struct, frozen=True, kw_only=True):
    """What a run loses because its ranks are not equally fast.

    Attributes:
        rows: The culprits, the one that costs most first.
        waits: Where ranks wait for another, the longest first.
        lost_share: The share that a step would be shorter by with all ranks as fast as the median one; `None` is unknown.
        compared: Whether ranks were compared at all.
    """

    rows: tuple[Row, ...] = ()
    waits: tuple[RankWait, ...] = ()
    lost_share: float | None = None
    compared: bool = False


def imbalance(profile: Profile) -> Imbalance:
    """Find who makes the ranks of a merged profile wait.

    Args:
        profile: Of several ranks; of one there are no rows.
    """
    compared = profile.rank_comparison
    if compared is None:
        return Imbalance()
    lost = compared.lost_seconds
    return Imbalance(
        rows=culprits(compared, max(len(profile.ranks), 2)),
        waits=tuple(wait for wait in compared.waits if wait.seconds >= WORTH_SAYING * compared.seconds),
        lost_share=None if lost is None or not compared.seconds else min(lost / compared.seconds, 1.0),
        compared=True,
    )


def culprits(compared: RankComparison, ranks: int) -> tuple[Row, ...]:
    """The excesses that are more than noise and cost more than a hundredth of the step, the worst first.

    One after the other: what the worst one explains of a rank's lateness is not explained once more by another.
    """
    by_rank: dict[int, list[RankExcess]] = {}
    for each in compared.excesses:
        by_rank.setdefault(each.rank, []).append(each)
    rows = [row for excesses in by_rank.values() for row in _of_rank(excesses, compared, ranks)]
    return tuple(sorted(rows, key=lambda row: -row.seconds_lost))


def _of_rank(excesses: Sequence[RankExcess], compared: RankComparison, ranks: int) -> Iterator[Row]:
    left, least = list(excesses), WORTH_SAYING * compared.seconds
    while left:
        judged = [(each, verdict) for each in left if (verdict := judge(each, compared, ranks)) is not None and verdict.seconds >= least]
        if not judged:
            return
        worst = max(judged, key=_seconds)
        alone = [each for each in judged if _seconds(each) >= MOST_OF * _seconds(worst) and _stands_out(each[0], worst[0])]
        found, verdict = max(alone, key=_seconds, default=worst)
        yield _row(found, verdict, compared)
        explained = [max(each, 0.0) for each in costs(found)]
        left = [_less(each, explained, found) if set(each.intervals) & set(found.intervals) else each for each in left if each is not found]


def _stands_out(each: RankExcess, of: RankExcess) -> bool:
    """Whether a single module or phase is slower than all of those that it is one of."""
    if each.modules > 1 or each.phase == "all":
        return False
    ratio = of.seconds / of.usual if of.phase == "all" and of.usual else 1.0
    return ratio == 1.0 or each.seconds - ratio * each.usual >= (each.seconds - each.usual) / 2


def _seconds(judged: tuple[RankExcess, Verdict]) -> float:
    return judged[1].seconds


def _less(each: RankExcess, explained: Sequence[float], found: RankExcess) -> RankExcess:
    """The excess, of a rank that is late by so much less; of several modules without the one that explains it."""
    late = tuple(late - known for late, known in zip(each.late, explained, strict=True))
    if not _is_one_of(found, each):
        return replace(each, late=late)
    rest = tuple(seconds - one for seconds, one in zip(each.excess, found.excess, strict=True))
    return replace(each, late=late, excess=rest, seconds=each.seconds - found.seconds, usual=each.usual - found.usual)


def _is_one_of(each: RankExcess, several: RankExcess) -> bool:
    names, pattern = each.module.split("."), several.module.split(".")
    alike = len(names) == len(pattern) and all(part in {name, "*"} for name, part in zip(names, pattern, strict=True))
    return alike and several.modules > each.modules and each.phase == several.phase


def _row(each: RankExcess, verdict: Verdict, compared: RankComparison) -> Row:
    return Row(
        module=each.module,
        phase=each.phase,
        modules=each.modules,
        slow_rank=each.rank,
        seconds_lost=verdict.seconds,
        pattern=verdict.pattern,
        slow_steps=None if compared.from_quartiles else verdict.steps,
        steps=None if compared.from_quartiles else compared.steps,
        seconds=each.seconds,
        usual=each.usual,
    )


def slowest_first(profile: Profile, found: Imbalance) -> tuple[int, ...]:
    """The ranks by their cost as culprits; then by how long others waited for them; then by their time beyond the median rank's.

    Ranks without a report come last.
    """
    cost, waited, beyond = (defaultdict[int, float](float) for _ in range(3))
    for row in found.rows:
        cost[row.slow_rank] += row.seconds_lost
    for wait in found.waits:
        waited[wait.for_rank] += wait.seconds
    for stat in profile.rank_stats:
        if not stat.waits:
            for number, seconds in (stat.by_rank or {}).items():
                beyond[number] += seconds - stat.median

    def order(rank: Rank) -> tuple[float, ...]:
        step = rank.step.median if rank.step else 0.0
        reported = rank.status in {"ok", "late"} or rank.rank in beyond
        return not reported, -cost[rank.rank], -waited[rank.rank], -beyond[rank.rank], -step, rank.rank

    return tuple(rank.rank for rank in sorted(profile.ranks, key=order))
