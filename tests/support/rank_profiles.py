"""Handmade merged profiles of several ranks."""

from typing import Any

from msgspec.structs import replace

from lflops.profile.profile import Profile
from lflops.profile.records import Rank, RankStat
from tests.support.profile_builders import small_profile, spread


def answered(number: int, **fields: Any) -> Rank:
    """Return a rank that has sent its report."""
    known: dict[str, Any] = {
        "node": "0",
        "host": f"node{number // 8}",
        "device": "NVIDIA H100",
        "coordinates": {"data": number},
    }
    return Rank(rank=number, status="ok", **(known | fields))


def stat(module: str, seconds: dict[int, float], **fields: Any) -> RankStat:
    """Return the statistics of a module's time in forward, from its seconds on each rank."""
    slow = max(seconds, key=seconds.__getitem__)
    median = sorted(seconds.values())[(len(seconds) - 1) // 2]
    known: dict[str, Any] = {
        "phase": "forward",
        "low": min(seconds.values()),
        "median": median,
        "high": seconds[slow],
        "high_rank": slow,
    }
    return RankStat(module=module, by_rank=seconds, **(known | fields))


def four_ranks() -> Profile:
    """Return the profile of four ranks.

    Rank 0 takes 10 % longer than the median in `encoder.0`, rank 2 takes twice as long in the head,
    and rank 3 is missing.
    """
    ranks = (
        answered(
            0,
            step=spread(3e-3),
            data=spread(1e-4),
            cpu=spread(4e-3),
            macs=1408,
            peak_bytes=3000,
            slowest=0,
        ),
        answered(
            1,
            step=spread(2e-3),
            data=spread(2e-4),
            cpu=spread(5e-3),
            macs=1408,
            peak_bytes=2000,
            slowest=1,
        ),
        answered(
            2,
            step=spread(5e-3),
            data=spread(3e-4),
            cpu=spread(6e-3),
            macs=1408,
            peak_bytes=1000,
            slowest=2,
        ),
        Rank(rank=3, node=None, host=None, device=None, coordinates={"data": 3}, status="missing"),
    )
    stats = (
        stat("encoder.0", {0: 1.1e-3, 1: 0.9e-3, 2: 1e-3}),
        stat("head", {0: 1e-3, 1: 1e-3, 2: 2e-3}),
        RankStat(
            module="encoder.1", phase="forward", low=1e-4, median=1e-4, high=1e-4, high_rank=0
        ),
    )
    return replace(
        small_profile(),
        ranks=ranks,
        rank_stats=stats,
        rank_comparison=None,
        unprofiled_comparison=None,
    )


def so_many(world: int) -> Profile:
    """Return the profile of `world` ranks.

    In the head, each rank is a microsecond slower than the previous one. Only the rank in the
    middle is much slower, with 9 ms instead of about 1 ms.
    """
    seconds = {rank: 1e-3 + 1e-6 * rank for rank in range(world)} | {world // 2: 9e-3}
    ranks = tuple(answered(number, step=spread(3e-3)) for number in range(world))
    return replace(
        small_profile(),
        ranks=ranks,
        rank_stats=(stat("head", seconds),),
        rank_comparison=None,
        unprofiled_comparison=None,
    )
