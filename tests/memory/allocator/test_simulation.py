"""Test each rule of torch's caching allocator against numbers worked out by hand."""

from collections.abc import Sequence

import pytest

from lflops.memory.allocator.settings import AllocatorSettings
from lflops.memory.allocator.simulation import Request, Simulated, Usage, simulate

KIB = 2**10
MIB = 2**20


def run(*requests: int | Sequence[int], limit: int | None = None, **settings: object) -> Simulated:
    """Simulate allocations of so many bytes, or of (bytes, stream), named 1, 2, 3 ….

    A negative number frees the allocation of that name.
    """
    done: list[Request] = []
    name = 0
    for each in requests:
        if isinstance(each, int) and each < 0:
            done.append(Request(-each, None))
            continue
        name += 1
        nbytes, stream = each if isinstance(each, Sequence) else (each, 0)
        done.append(Request(name, nbytes, stream))
    return simulate(done, AllocatorSettings(**settings), limit_bytes=limit)  # type: ignore[arg-type]


def reserved(*requests: int | Sequence[int], **how: object) -> int:
    """Return the MiB that are reserved at the end."""
    whole, rest = divmod(run(*requests, **how).end.reserved, MIB)  # type: ignore[arg-type]
    assert not rest
    return whole


@pytest.mark.parametrize(
    ("asked", "block"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (3 * MIB + 1, 3 * MIB + 512)],
)
def test_blocks_are_multiples_of_512_bytes(asked: int, block: int) -> None:
    """A block has a multiple of 512 bytes, and at least 512.

    The requested bytes are reported separately.
    """
    assert asked == run(asked).end.requested
    assert block == run(asked).end.allocated


def test_small_requests_share_segments_of_2_mib() -> None:
    """Requests of up to 1 MiB share segments of 2 MiB.

    Two of 1 MiB fill a segment, and one more byte needs another.
    """
    assert 2 == reserved(MIB)
    assert 2 == reserved(MIB, MIB)
    assert 4 == reserved(MIB, MIB, 1)


def test_requests_of_up_to_10_mib_share_segments_of_20_mib() -> None:
    """Requests above 1 MiB and below 10 MiB share segments of 20 MiB.

    Two of 9 MiB fit into one segment, and the third needs another.
    """
    assert 20 == reserved(MIB + 1)
    assert 20 == reserved(9 * MIB, 9 * MIB)
    assert 40 == reserved(9 * MIB, 9 * MIB, 9 * MIB)


def test_requests_from_10_mib_have_segments_in_multiples_of_2_mib() -> None:
    """A request of 10 MiB has a segment of 10 MiB; one byte more needs 12 MiB."""
    assert 10 == reserved(10 * MIB)
    assert 12 == reserved(10 * MIB + 1)
    assert 22 == reserved(10 * MIB, 11 * MIB)


def test_small_and_large_requests_never_share() -> None:
    """A free segment for large requests is not used for a small request, nor the reverse."""
    assert 22 == reserved(5 * MIB, -1, 1000)
    assert 22 == reserved(1000, -1, 2 * MIB)


def test_what_was_freed_is_reused() -> None:
    """A request uses the smallest free block that is large enough.

    12 MiB use the block of 14, so that 20 MiB still use the block of 20.
    """
    assert 34 == reserved(20 * MIB, 14 * MIB, -1, -2, 12 * MIB, 20 * MIB)


def test_a_large_block_is_split_where_more_than_1_mib_is_left() -> None:
    """A large block is split if more than 1 MiB remains.

    12 of 14 MiB leave 2 MiB, which a request of 2 MiB uses. 13 MiB leave 1 MiB, which stays part of
    the block, so a request of 1.5 MiB needs a new segment.
    """
    assert 14 == reserved(14 * MIB, -1, 12 * MIB, 2 * MIB)
    assert 14 + 20 == reserved(14 * MIB, -1, 13 * MIB, 3 * MIB // 2)
    assert 14 * MIB == run(14 * MIB, -1, 13 * MIB).end.allocated


def test_a_small_block_is_split_where_512_bytes_are_left() -> None:
    """A small block is split if 512 bytes remain, so a segment of 2 MiB can be filled."""
    assert 2 == reserved(MIB, MIB - 512, 512)


def test_free_neighbours_are_joined() -> None:
    """Adjacent free blocks are merged, in whichever order they are freed.

    10 MiB fit into two adjacent blocks of 5 MiB, but not into two separate ones.
    """
    four = (5 * MIB,) * 4
    assert 20 == reserved(*four, -2, -3, 10 * MIB)
    assert 20 == reserved(*four, -3, -2, 10 * MIB)
    assert 30 == reserved(*four, -1, -3, 10 * MIB)


def test_streams_do_not_share() -> None:
    """A block that was freed on one stream is not used on another stream."""
    assert 10 == reserved((10 * MIB, 0), -1, (10 * MIB, 0))
    assert 20 == reserved((10 * MIB, 0), -1, (10 * MIB, 1))


def test_without_memory_left_free_segments_are_released_first() -> None:
    """If memory is exhausted, free segments are released, and the request is retried.

    With a limit of 30 MiB and a free segment of 20 MiB, a request of 24 MiB succeeds after the
    release. A segment that is partly used stays, so a request of 12 MiB fails.
    """
    found = run(20 * MIB, -1, 12 * MIB + 12 * MIB, limit=30 * MIB)
    assert 24 * MIB == found.end.reserved
    assert 1 == found.retries
    assert found.failed is None
    failed = run(5 * MIB, 5 * MIB, -1, 12 * MIB, limit=30 * MIB)
    assert (3, 12 * MIB) == failed.failed
    assert 1 == failed.retries
    assert 20 * MIB == failed.end.reserved


def test_the_segment_that_failed_is_named() -> None:
    """A failed request reports the size of its segment: 3 MiB need a segment of 20 MiB."""
    assert (0, 20 * MIB) == run(3 * MIB, limit=10 * MIB).failed


def test_fragmentation_is_what_is_reserved_beyond_what_is_allocated() -> None:
    """Fragmented free blocks are reserved but cannot be used.

    Of four blocks of 5 MiB the first and the third are freed. 10 of 20 MiB are free, but a request
    of 10 MiB needs a new segment.
    """
    four = (5 * MIB,) * 4
    found = run(*four, -1, -3, 10 * MIB)
    expected = Usage(requested=20 * MIB, allocated=20 * MIB, reserved=30 * MIB)
    assert expected == found.at_reserved_peak
    assert expected == found.peak


def test_each_peak_is_at_its_own_time() -> None:
    """The peak of allocated memory and the peak of reserved memory are reached at different times.

    First 30 MiB are allocated and freed; later a small request reserves 2 MiB in another pool.
    """
    found = run(30 * MIB, -1, 1000)
    assert Usage(requested=30 * MIB, allocated=30 * MIB, reserved=32 * MIB) == found.peak
    assert Usage(requested=1000, allocated=1024, reserved=32 * MIB) == found.at_reserved_peak


def test_expandable_segments_grow_by_pages() -> None:
    """Expandable segments grow by pages: of 20 MiB for large requests, and of 2 MiB for small ones.

    35 MiB need two pages, and 70 MiB need four.
    """
    assert 20 == reserved(3 * MIB, expandable_segments=True)
    assert 40 == reserved(35 * MIB, expandable_segments=True)
    assert 80 == reserved(35 * MIB, 35 * MIB, expandable_segments=True)
    assert 42 == reserved(35 * MIB, 1000, expandable_segments=True)


def test_an_expandable_segment_grows_at_its_free_end() -> None:
    """An expandable segment uses its free end together with new pages.

    30 of 60 MiB are freed at the end, and 40 MiB use them and 10 MiB more. 70 MiB need four pages
    of 20 MiB. Without expandable segments the 30 MiB could not be used.
    """
    steps = (30 * MIB, 30 * MIB, -2, 40 * MIB)
    assert 80 == reserved(*steps, expandable_segments=True)
    assert 100 == reserved(*steps)


def test_expandable_blocks_are_split_down_to_512_bytes() -> None:
    """A block of an expandable segment is split even if only 1 MiB remains.

    Without expandable segments, 1 MiB would stay part of the block of 13 MiB.
    """
    assert 20 == reserved(14 * MIB, -1, 13 * MIB, 3 * MIB // 2, expandable_segments=True)
    assert 13 * MIB == run(14 * MIB, -1, 13 * MIB, expandable_segments=True).end.allocated


def test_free_pages_of_expandable_segments_are_given_back() -> None:
    """Free pages in the middle of an expandable segment are unmapped if memory is exhausted.

    The middle one of three pages is freed, but 25 MiB do not fit there. The page is unmapped, and
    two pages are mapped at the end.
    """
    three = (20 * MIB,) * 3
    found = run(*three, -2, 25 * MIB, limit=80 * MIB, expandable_segments=True)
    assert 80 * MIB == found.end.reserved
    assert 1 == found.retries
    assert found.failed is None
    # With the free page kept, the segment would need 65 MiB and this page of 20 MiB.
    assert 70 * MIB < 65 * MIB + 20 * MIB
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
    """Requests are rounded up to a division of a power of two, but at least to 512 bytes.

    In torch's example, 1200 between 1024 and 2048 with four divisions is 1280.
    """
    assert block == run(asked, divisions=(divisions,) * 16).end.allocated


def test_blocks_above_the_largest_split_are_not_split() -> None:
    """A block above `max_split_size` is only used for requests that are at most 20 MiB smaller.

    A free block of 40 MiB is not used for a request of 25 MiB, which would have to split it, but it
    is used for one of 32 MiB. A block of 52 MiB is 20 MiB larger than 32 MiB and is not used.
    """
    assert 40 + 26 == reserved(40 * MIB, -1, 25 * MIB, max_split_size=30 * MIB)
    assert 40 == reserved(40 * MIB, -1, 32 * MIB, max_split_size=30 * MIB)
    assert 52 + 32 == reserved(52 * MIB, -1, 32 * MIB, max_split_size=30 * MIB)


def test_such_blocks_are_released_before_all_others() -> None:
    """Blocks above `max_split_size` are released first, other free blocks only if necessary.

    The free block of 60 MiB is released for a request of 35 MiB, and the free block of 10 MiB
    stays. A request of 50 MiB needs both.
    """
    found = run(60 * MIB, 10 * MIB, -1, -2, 35 * MIB, max_split_size=30 * MIB, limit=80 * MIB)
    assert (10 + 36) * MIB == found.end.reserved
    assert 0 == found.retries
    found = run(40 * MIB, 10 * MIB, -1, -2, 50 * MIB, max_split_size=30 * MIB, limit=60 * MIB)
    assert 50 * MIB == found.end.reserved
    assert 1 == found.retries


def test_garbage_is_collected_above_the_threshold() -> None:
    """Free segments are released if more than the threshold is reserved.

    The threshold is half of the limit. With 60 of 100 MiB reserved, a request on another stream
    releases the free 20 MiB. With a limit of 200 MiB the threshold is not reached.
    """
    steps = (20 * MIB, 40 * MIB, -1, (11 * MIB, 1))
    half = {"garbage_collection_threshold": 0.5, "memory_fraction": 1.0}
    assert 40 + 12 == reserved(*steps, limit=100 * MIB, **half)
    assert 60 + 12 == reserved(*steps, limit=200 * MIB, **half)
    # As in torch, there is no collection without a memory fraction.
    assert 60 + 12 == reserved(*steps, limit=100 * MIB, garbage_collection_threshold=0.5)


def test_the_oldest_garbage_goes_first() -> None:
    """The segment that was free for the most searches is released first.

    One segment is free for 3 searches and one for 1. Releasing the older one of 20 MiB is enough,
    so the younger one of 22 MiB stays.
    """
    steps = (20 * MIB, 22 * MIB, 16 * MIB, -1, (1000, 0), (2 * MIB, 2), -2, (30 * MIB, 1))
    assert 22 + 16 + 2 + 20 + 30 == reserved(
        *steps, limit=120 * MIB, garbage_collection_threshold=0.6, memory_fraction=1.0
    )


def test_a_free_of_what_is_not_allocated_is_left_out() -> None:
    """A free of an unknown allocation is ignored.

    A recording that began after the allocation contains such a free.
    """
    assert Usage(requested=0, allocated=0, reserved=0) == run(-1).end
