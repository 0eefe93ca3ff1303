"""Each rule of the allocator, worked out by hand."""

from collections.abc import Sequence

import pytest

from lflops.memory.allocator.settings import AllocatorSettings
from lflops.memory.allocator.simulation import Request, Simulated, Usage, simulate

KIB, MIB = 2**10, 2**20


def run(*requests: int | Sequence[int], limit: int | None = None, **settings: object) -> Simulated:
    """Allocations of so many bytes, or of (bytes, stream), named 1, 2, 3 ….

    A negative number frees the one of that name.
    """
    done, name = [], 0
    for each in requests:
        if isinstance(each, int) and each < 0:
            done.append(Request(-each, None))
            continue
        name += 1
        nbytes, stream = each if isinstance(each, Sequence) else (each, 0)
        done.append(Request(name, nbytes, stream))
    return simulate(done, AllocatorSettings(**settings), limit_bytes=limit)  # type: ignore[arg-type]


def reserved(*requests: int | Sequence[int], **how: object) -> int:
    """What is reserved in the end, in MiB."""
    whole, rest = divmod(run(*requests, **how).end.reserved, MIB)  # type: ignore[arg-type]
    assert not rest
    return whole


@pytest.mark.parametrize(
    ("asked", "block"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (3 * MIB + 1, 3 * MIB + 512)],
)
def test_blocks_are_multiples_of_512_bytes(asked: int, block: int) -> None:
    """At least one of them; what was asked for is kept beside."""
    assert (asked, block) == (run(asked).end.requested, run(asked).end.allocated)


def test_small_requests_share_segments_of_2_mib() -> None:
    """Two of 1 MiB fill one; the third byte needs another. Exactly 1 MiB is small."""
    assert [2, 2, 4] == [reserved(MIB), reserved(MIB, MIB), reserved(MIB, MIB, 1)]


def test_requests_of_up_to_10_mib_share_segments_of_20_mib() -> None:
    """Just above 1 MiB is large; of 9 MiB two fit into one, the third needs another."""
    assert [20, 20, 40] == [
        reserved(MIB + 1),
        reserved(9 * MIB, 9 * MIB),
        reserved(9 * MIB, 9 * MIB, 9 * MIB),
    ]


def test_requests_from_10_mib_have_segments_in_multiples_of_2_mib() -> None:
    """10 MiB are their own segment; one byte more is 12."""
    assert [10, 12, 22] == [
        reserved(10 * MIB),
        reserved(10 * MIB + 1),
        reserved(10 * MIB, 11 * MIB),
    ]


def test_small_and_large_requests_never_share() -> None:
    """A free segment of 20 MiB is of no use to a small request, nor 2 MiB to a large one."""
    assert 22 == reserved(5 * MIB, -1, 1000)
    assert 22 == reserved(1000, -1, 2 * MIB)


def test_what_was_freed_is_reused() -> None:
    """The smallest free block that is large enough.

    12 MiB go into the one of 14, and 20 stay for 20.
    """
    assert 34 == reserved(20 * MIB, 14 * MIB, -1, -2, 12 * MIB, 20 * MIB)


def test_a_large_block_is_split_where_more_than_1_mib_is_left() -> None:
    """Of 14 MiB 12 leave 2, which 2 MiB take. 13 leave 1, which is kept with them.

    1.5 MiB need a new segment.
    """
    assert 14 == reserved(14 * MIB, -1, 12 * MIB, 2 * MIB)
    assert 14 + 20 == reserved(14 * MIB, -1, 13 * MIB, 3 * MIB // 2)
    assert 14 * MIB == run(14 * MIB, -1, 13 * MIB).end.allocated


def test_a_small_block_is_split_where_512_bytes_are_left() -> None:
    """All of the 2 MiB but 512 bytes are given out, then the last."""
    assert 2 == reserved(MIB, MIB - 512, 512)


def test_free_neighbours_are_joined() -> None:
    """Of four of 5 MiB two neighbours are freed, in any order: 10 MiB fit in.

    Two that are apart do not make room.
    """
    four = (5 * MIB,) * 4
    assert [20, 20] == [reserved(*four, -2, -3, 10 * MIB), reserved(*four, -3, -2, 10 * MIB)]
    assert 30 == reserved(*four, -1, -3, 10 * MIB)


def test_streams_do_not_share() -> None:
    """What was freed on one stream is not given out on another."""
    assert [10, 20] == [
        reserved((10 * MIB, 0), -1, (10 * MIB, 0)),
        reserved((10 * MIB, 0), -1, (10 * MIB, 1)),
    ]


def test_without_memory_left_free_segments_are_released_first() -> None:
    """Of 30 MiB 20 are cached: 12 more are got by releasing them.

    A segment of which a part is in use stays.
    """
    found = run(20 * MIB, -1, 12 * MIB + 12 * MIB, limit=30 * MIB)
    assert (24 * MIB, 1, None) == (found.end.reserved, found.retries, found.failed)
    failed = run(5 * MIB, 5 * MIB, -1, 12 * MIB, limit=30 * MIB)
    assert ((3, 12 * MIB), 1, 20 * MIB) == (failed.failed, failed.retries, failed.end.reserved)


def test_the_segment_that_failed_is_named() -> None:
    """3 MiB ask for one of 20."""
    assert (0, 20 * MIB) == run(3 * MIB, limit=10 * MIB).failed


def test_fragmentation_is_what_is_reserved_beyond_what_is_allocated() -> None:
    """Four of 5 MiB, of which the first and the third are freed.

    10 of 20 MiB are free, and 10 do not fit in.
    """
    four = (5 * MIB,) * 4
    found = run(*four, -1, -3, 10 * MIB)
    assert (
        Usage(requested=20 * MIB, allocated=20 * MIB, reserved=30 * MIB) == found.at_reserved_peak
    )
    assert Usage(requested=20 * MIB, allocated=20 * MIB, reserved=30 * MIB) == found.peak


def test_each_peak_is_at_its_own_time() -> None:
    """First much is allocated, then in another pool little is reserved in addition."""
    found = run(30 * MIB, -1, 1000)
    assert Usage(requested=30 * MIB, allocated=30 * MIB, reserved=32 * MIB) == found.peak
    assert Usage(requested=1000, allocated=1024, reserved=32 * MIB) == found.at_reserved_peak


def test_expandable_segments_grow_by_pages() -> None:
    """Pages of 20 MiB for large requests, of 2 MiB for small ones, each in one segment.

    35 MiB are two pages, 70 four.
    """
    assert [20, 40, 80, 42] == [
        reserved(3 * MIB, expandable_segments=True),
        reserved(35 * MIB, expandable_segments=True),
        reserved(35 * MIB, 35 * MIB, expandable_segments=True),
        reserved(35 * MIB, 1000, expandable_segments=True),
    ]


def test_an_expandable_segment_grows_at_its_free_end() -> None:
    """30 MiB freed at the end of 60 are used again, with 10 more behind them: 60 + 10 in pages of 20 are 80.

    Else they would be lost.
    """
    steps = (30 * MIB, 30 * MIB, -2, 40 * MIB)
    assert [80, 100] == [reserved(*steps, expandable_segments=True), reserved(*steps)]


def test_expandable_blocks_are_split_down_to_512_bytes() -> None:
    """Without them 1 MiB would be kept with the 13."""
    assert 20 == reserved(14 * MIB, -1, 13 * MIB, 3 * MIB // 2, expandable_segments=True)
    assert 13 * MIB == run(14 * MIB, -1, 13 * MIB, expandable_segments=True).end.allocated


def test_free_pages_of_expandable_segments_are_given_back() -> None:
    """Of 60 MiB in three pages the middle one is freed, and 25 do not fit.

    It is unmapped, and two pages at the end are mapped.
    """
    three = (20 * MIB,) * 3
    found = run(*three, -2, 25 * MIB, limit=80 * MIB, expandable_segments=True)
    assert (80 * MIB, 1, None) == (found.end.reserved, found.retries, found.failed)
    assert 70 * MIB < 65 * MIB + 20 * MIB  # what it would need with the page kept
    kept = run(*three, -2, 45 * MIB, limit=80 * MIB, expandable_segments=True)
    assert (4, 46 * MIB) == kept.failed


@pytest.mark.parametrize(
    ("asked", "divisions", "block"),
    [
        (1200, 4, 1536),
        (700, 4, 1024),
        (1200 * KIB, 4, 1280 * KIB),
        (1200 * KIB, 2, 1536 * KIB),
        (1792 * KIB + 1, 4, 2048 * KIB),
        (1024 * KIB, 4, 1024 * KIB),
    ],
)
def test_requests_are_rounded_up_to_a_part_of_a_power_of_two(
    asked: int, divisions: int, block: int
) -> None:
    """Torch's example: 1200 between 1024 and 2048 in four is 1280.

    Where a part is less than 512 bytes, multiples of 512 are taken.
    """
    assert block == run(asked, divisions=(divisions,) * 16).end.allocated


def test_blocks_above_the_largest_split_are_not_split() -> None:
    """With 30 MiB: one of 40 is not given to 25, which would split it.

    To 32 it is, for it is less than 20 MiB larger.
    """
    assert 40 + 26 == reserved(40 * MIB, -1, 25 * MIB, max_split_size=30 * MIB)
    assert 40 == reserved(40 * MIB, -1, 32 * MIB, max_split_size=30 * MIB)
    assert 52 + 32 == reserved(52 * MIB, -1, 32 * MIB, max_split_size=30 * MIB)


def test_such_blocks_are_released_before_all_others() -> None:
    """One of 60 MiB is too large for 35, and is released for it; the cached one of 10 stays.

    Where that is not enough, all are.
    """
    found = run(60 * MIB, 10 * MIB, -1, -2, 35 * MIB, max_split_size=30 * MIB, limit=80 * MIB)
    assert ((10 + 36) * MIB, 0) == (found.end.reserved, found.retries)
    found = run(40 * MIB, 10 * MIB, -1, -2, 50 * MIB, max_split_size=30 * MIB, limit=60 * MIB)
    assert (50 * MIB, 1) == (found.end.reserved, found.retries)


def test_garbage_is_collected_above_the_threshold() -> None:
    """Half of 100 MiB.

    Of 60 reserved ones 20 are free on another stream: 11 more release them. Of 200 the threshold is
    not reached.
    """
    steps = (20 * MIB, 40 * MIB, -1, (11 * MIB, 1))
    half = {"garbage_collection_threshold": 0.5, "memory_fraction": 1.0}
    assert [40 + 12, 60 + 12] == [
        reserved(*steps, limit=limit, **half) for limit in (100 * MIB, 200 * MIB)
    ]
    assert 60 + 12 == reserved(*steps, limit=100 * MIB, garbage_collection_threshold=0.5), (
        "as in torch, without a fraction"
    )


def test_the_oldest_garbage_goes_first() -> None:
    """Free since 3 and since 1 searches.

    The older one of 20 is released, which is enough; the younger one of 22 stays.
    """
    steps = (20 * MIB, 22 * MIB, 16 * MIB, -1, (1000, 0), (2 * MIB, 2), -2, (30 * MIB, 1))
    assert 22 + 16 + 2 + 20 + 30 == reserved(
        *steps, limit=120 * MIB, garbage_collection_threshold=0.6, memory_fraction=1.0
    )


def test_a_free_of_what_is_not_allocated_is_left_out() -> None:
    """As a recording that began later has them."""
    assert Usage(requested=0, allocated=0, reserved=0) == run(-1).end
