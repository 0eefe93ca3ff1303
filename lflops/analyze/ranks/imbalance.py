"""Stragglers: where one rank takes longer than the others for the same work, so that all of them wait for it."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from lflops.profile.model import Profile
from lflops.profile.module_names import fold_repeats
from lflops.profile.records import Phase, Rank, RankStat

__all__ = ["Imbalance", "Row", "imbalance", "slowest_first"]


class Row(Struct, frozen=True, kw_only=True):
    """A module's own time in one phase, or that of modules whose names differ only in numbers, as `layers.*.mlp`.

    Attributes:
        modules: How many modules it stands for.
        slow_rank: The rank whose median is the longest.
        spread: How much longer that is than the median rank's, as a share of it; `None` where the median rank takes none.
        always: Whether the slow rank was the slowest in every step; `None` where single steps are not known.
        slowest_steps: In how many it was.
        steps: Of how many: those of all the modules, one by one.
        seconds_lost: What it costs a step: the slowest rank's time less the median one's, the mean over the steps; where single steps are
            not known, that of the medians.
        seconds: The median rank's.
        waiting: Whether any of the time is waiting inside of collectives for other ranks: `none`, `left_out`, or `unknown`.
    """

    module: str
    phase: Phase
    modules: int
    slow_rank: int
    spread: float | None
    always: bool | None
    slowest_steps: int | None
    steps: int | None
    seconds_lost: float
    seconds: float
    waiting: str


class Imbalance(Struct, frozen=True, kw_only=True):
    """Seconds that ranks lose by waiting for the slowest of them, the worst first.

    Attributes:
        rows: A module and a phase each.
        alike: The same with repeated modules folded where the same rank is slow.
    """

    rows: tuple[Row, ...]
    alike: tuple[Row, ...]


def imbalance(profile: Profile, patterns: Mapping[str, str] | None = None) -> Imbalance:
    """Compare the ranks of a merged profile, module by module.

    Args:
        profile: Of several ranks; of one there are no rows.
        patterns: Each module's name with `*` for the numbers of what repeats, where these are already known.
    """
    folded = fold_repeats(
        profile.rank_stats,
        lambda stat: (stat.module, stat.phase, stat.high_rank),
        profile.patterns() if patterns is None else patterns,
    )
    return Imbalance(
        rows=_worst_first(_row(stat.module, [stat]) for stat in profile.rank_stats), alike=_worst_first(_row(*each) for each in folded)
    )


def slowest_first(profile: Profile) -> tuple[int, ...]:
    """The ranks by their seconds beyond the median rank's, where each rank's time is recorded; equal ones by their step.

    Time that may be waiting for other ranks does not count, unless all of it may be. Ranks that did not report come last.
    """
    recorded = [stat for stat in profile.rank_stats if stat.by_rank is not None]
    late: dict[int, float] = {}
    for stat in [stat for stat in recorded if stat.waiting != "unknown"] or recorded:
        for rank, seconds in (stat.by_rank or {}).items():
            late[rank] = late.get(rank, 0.0) + seconds - stat.median

    def order(rank: Rank) -> tuple[bool, float, float, int]:
        return (
            rank.status != "ok" and rank.rank not in late,
            -late.get(rank.rank, 0.0),
            -(rank.step.median if rank.step else 0.0),
            rank.rank,
        )

    return tuple(rank.rank for rank in sorted(profile.ranks, key=order))


def _row(name: str, stats: list[RankStat]) -> Row:
    median, high = sum(stat.median for stat in stats), sum(stat.high for stat in stats)
    known = [(stat.slowest_steps, stat.steps) for stat in stats if stat.slowest_steps is not None and stat.steps]
    slowest, steps = (sum(each) for each in zip(*known, strict=True)) if len(known) == len(stats) else (None, None)
    return Row(
        module=name,
        phase=stats[0].phase,
        modules=len(stats),
        slow_rank=stats[0].high_rank,
        spread=high / median - 1 if median else None,
        always=None if slowest is None else slowest == steps,
        slowest_steps=slowest,
        steps=steps,
        seconds_lost=sum(stat.seconds_lost for stat in stats),
        seconds=median,
        waiting=next((state for state in ("unknown", "left_out") if any(stat.waiting == state for stat in stats)), "none"),
    )


def _worst_first(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: -row.seconds_lost))
