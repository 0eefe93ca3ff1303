"""The page's Ranks view: every rank, and which of them is slow in which modules."""

from msgspec import Struct

from lflops.analyze.analysis import Analysis
from lflops.analyze.ranks.imbalance import slowest_first
from lflops.report.lines.ranks import ranks as lines
from lflops.report.payload.columns import Columns, lists


class RanksShown(Struct, frozen=True, kw_only=True):
    """The ranks of a run."""

    said: list[tuple[str, str]]  # the report's lines, labels and texts
    ranks: Columns  # in their order, with the medians of what they took; a status is one of `ok`, `late`, `missing` and `failed`
    slowest_first: tuple[int, ...]  # the ranks by their time beyond the median rank's
    compared: bool  # whether any module has times of two ranks.
    # Modules and phases with every rank's time, those in which ranks differ most first: the median rank's seconds, how much longer the
    # slowest one takes, and whether ranks wait for each other in it
    places: Columns
    seconds: list[list[float | None]]  # of each of these the seconds of each rank


def ranks(analysis: Analysis) -> RanksShown | None:
    """The view; `None` for a run of one rank."""
    profile = analysis.profile
    if len(profile.ranks) < 2:
        return None
    known = sorted((stat for stat in profile.rank_stats if stat.by_rank is not None), key=lambda stat: (stat.waits, -stat.spread))
    table = lists(profile.ranks, ("rank", "status", "host", "device", "macs", "peak_bytes", "slowest"))
    for field in ("step", "data", "cpu"):
        table[field] = [None if (spread := getattr(rank, field)) is None else spread.median for rank in profile.ranks]
    positions = [", ".join(f"{kind} {coordinate}" for kind, coordinate in rank.coordinates.items()) for rank in profile.ranks]
    return RanksShown(
        said=list(lines(analysis)),
        ranks=table | {"place": [position or None for position in positions]},
        slowest_first=slowest_first(profile, analysis.imbalance),
        compared=bool(profile.rank_stats),
        places=lists(known, ("module", "phase", "median", "spread", "waits")),
        seconds=[[(stat.by_rank or {}).get(rank.rank) for rank in profile.ranks] for stat in known],
    )
