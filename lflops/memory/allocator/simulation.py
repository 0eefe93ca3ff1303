"""Simulate torch's caching allocator.

The allocator reserves segments of memory on the device. It splits a segment into blocks for
requests, and joins free blocks that are next to each other. The free blocks are kept in two pools:
one for small requests, and one for large requests.

An expandable segment is a large range of addresses. Memory is mapped to it page by page, when it is
needed. A block of an expandable segment is either mapped or not.

The rules are the same as in torch's `c10/cuda/CUDACachingAllocator.cpp`. For each rule, a test in
`tests/memory/allocator/` has an expected result that was worked out by hand.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct

from lflops.memory.allocator.settings import DEFAULT, AllocatorSettings

Key = tuple[int, int, int]


class Block:
    """A range of memory: a whole segment, or a part of one.

    Attributes:
        pool: The pool that the block returns to when it is freed.
        stream: The CUDA stream that uses the block.
        address: Address of the block's first byte.
        size: Size in bytes.
        mapped: Whether the addresses of the block have memory. Only expandable segments have
            unmapped blocks.
        expandable: Whether the block's segment is expandable.
        allocated: Whether a request uses the block.
        requested: Bytes that were requested; 0 while the block is free.
        inserted: The pool's counter of searches for a free block, at the time when this block
            became free. The age of a free block is the number of searches since that time.
        previous: The block before this block in the segment.
        next: The block after this block in the segment.
    """

    __slots__ = (
        "address",
        "allocated",
        "expandable",
        "inserted",
        "mapped",
        "next",
        "pool",
        "previous",
        "requested",
        "size",
        "stream",
    )

    def __init__(
        self,
        pool: "Pool",
        stream: int,
        address: int,
        size: int,
        *,
        mapped: bool = True,
        expandable: bool = False,
    ) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.mapped = mapped
        self.expandable = expandable
        self.allocated = False
        self.requested = 0
        self.inserted = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def key(self) -> Key:
        """The key by which a pool sorts its free blocks: stream, size and address."""
        return self.stream, self.size, self.address

    @property
    def is_split(self) -> bool:
        """Return whether the block is only a part of its segment."""
        return self.previous is not None or self.next is not None

    def cut(self, size: int, *, mapped: bool) -> "Block":
        """Keep the first `size` bytes, and return the rest as a new block after this block."""
        rest = Block(
            self.pool,
            self.stream,
            self.address + size,
            self.size - size,
            mapped=mapped,
            expandable=self.expandable,
        )
        rest.previous = self
        rest.next = self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb(self, other: "Block | None") -> None:
        """Merge the neighbour `other` into this block, if `other` is free.

        Nothing is merged if only one of the two blocks is mapped.
        """
        if other is None or other.allocated or other.mapped != self.mapped:
            return
        other.pool.remove(other)
        if other is self.previous:
            self.address = other.address
            self.previous = other.previous
            if other.previous is not None:
                other.previous.next = self
        else:
            self.next = other.next
            if other.next is not None:
                other.next.previous = self
        self.size += other.size


class Pool:
    """The free blocks for small requests, or for large requests."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        # Number of searches for a free block so far. The age of blocks is measured in searches.
        self.searches = 0
        self._free: list[Key] = []
        self._unmapped: list[Key] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        block.inserted = self.searches
        order, key = self._order_and_key(block)
        insort(order, key)
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        order, key = self._order_and_key(block)
        del order[bisect_left(order, key)]
        del self._blocks[block.address]

    def _order_and_key(self, block: Block) -> tuple[list[Key], Key]:
        if block.mapped:
            return self._free, block.key
        return self._unmapped, (block.stream, block.address, 0)

    def best(self, stream: int, size: int) -> Iterator[Block]:
        """Yield a stream's free blocks of at least `size` bytes, sorted by size and address."""
        for place in range(bisect_left(self._free, (stream, size, 0)), len(self._free)):
            block_stream, _, address = self._free[place]
            if block_stream != stream:
                return
            yield self._blocks[address]

    def smaller(self, stream: int, size: int) -> list[Block]:
        """Return a stream's free blocks of less than `size` bytes, sorted from large to small."""
        end = bisect_left(self._free, (stream, size, 0))
        return [self._blocks[key[2]] for key in reversed(self._free[:end]) if key[0] == stream]

    def unmapped(self, stream: int) -> list[Block]:
        """Return the unmapped blocks of a stream, sorted by address."""
        return [self._blocks[key[1]] for key in self._unmapped if key[0] == stream]

    def __iter__(self) -> Iterator[Block]:
        return iter([self._blocks[key[2]] for key in self._free])


MIB = 2**20

LEAST_BLOCK = 512
"""Size of the smallest block in bytes. All block sizes are multiples of it."""

SMALL_REQUEST = MIB
"""Maximum size in bytes of a small request, which gets a part of a small segment."""

SMALL_SEGMENT = 2 * MIB
"""Size in bytes of a small segment, which several small requests share."""

LARGE_REQUEST = 10 * MIB
"""Minimum size in bytes of a request for which a separate segment is reserved."""

LARGE_SEGMENT = 20 * MIB
"""Size in bytes of a segment that several requests share.

These requests have sizes between `SMALL_REQUEST` and `LARGE_REQUEST`.
"""

LARGE_MULTIPLE = 2 * MIB
"""The size in bytes of a separate segment is rounded up to a multiple of this number."""

ENDLESS = LARGE_SEGMENT << 36
"""Size in bytes of the range of addresses of an expandable segment.

This size is larger than the memory of any device, and a whole number of pages.
"""


class Request(NamedTuple):
    """A request to the allocator: an allocation or a free.

    Attributes:
        key: Number of the allocation. A free has the number of the allocation that it frees.
        bytes: The requested bytes; `None` for a free.
        stream: The CUDA stream that uses the memory. Only requests of the same stream can reuse the
            memory.
    """

    key: int
    bytes: int | None
    stream: int = 0


class Usage(Struct, frozen=True, kw_only=True):
    """The bytes that are in use at one point in time.

    Attributes:
        requested: Bytes that were requested for the blocks in use.
        allocated: Bytes of the blocks in use, as in `torch.cuda.memory_allocated()`.
        reserved: Bytes of all segments, as in `torch.cuda.memory_reserved()`.
    """

    requested: int
    allocated: int
    reserved: int


class Simulated(Struct, frozen=True, kw_only=True):
    """The result of simulating a sequence of requests.

    Attributes:
        peak: The maxima of the requested, allocated and reserved bytes. They can occur at different
            times.
        at_reserved_peak: The usage when the most bytes are reserved. If this occurs several times,
            the time with the most allocated bytes counts. Reserved minus allocated bytes are the
            overhead of the allocator.
        end: The usage after the last request.
        retries: Number of times that cached segments were released because the device had no memory
            left.
        failed: Index of the request that failed, and the bytes that the allocator then requested
            from the device; `None` if no request failed.
    """

    peak: Usage
    at_reserved_peak: Usage
    end: Usage
    retries: int
    failed: tuple[int, int] | None = None


class OutOfMemoryError(Exception):
    """The device has no memory for a request.

    Attributes:
        segment_bytes: The bytes that were requested from the device.
    """

    def __init__(self, segment_bytes: int) -> None:
        super().__init__(f"no memory for a segment of {segment_bytes} bytes")
        self.segment_bytes = segment_bytes


class Allocator:
    """A simulated allocator of one device. All sizes are in bytes."""

    def __init__(
        self, settings: AllocatorSettings = DEFAULT, limit_bytes: int | None = None
    ) -> None:
        self._settings = settings
        self._limit = ENDLESS if limit_bytes is None else limit_bytes
        fraction = settings.memory_fraction
        self._allowed = self._limit if fraction is None else int(fraction * self._limit)
        self._collects = fraction is not None and settings.garbage_collection_threshold > 0
        self._unsplit = ENDLESS if settings.max_split_size is None else settings.max_split_size
        self._small = Pool(small=True)
        self._large = Pool(small=False)
        self._next_address = ENDLESS
        self.requested = 0
        self.allocated = 0
        self.reserved = 0
        self.retries = 0

    @property
    def usage(self) -> Usage:
        return Usage(requested=self.requested, allocated=self.allocated, reserved=self.reserved)

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate a block for a request.

        Raises:
            OutOfMemoryError: The device has no memory left.
        """
        size = self.rounded(nbytes)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = self._cached(pool, size, stream)
        if block is None:
            if self._collects:
                self._collect()
            block = self._reserve(pool, size, stream)
        if block is None and self._release_unsplit(pool, size, stream):
            block = self._reserve(pool, size, stream)
        if block is None:
            self._release_all()
            self.retries += 1
            block = self._reserve(pool, size, stream)
        if block is None:
            raise OutOfMemoryError(_segment_size(size))
        if self._splits(block, size):
            pool.add(block.cut(size, mapped=True))
        block.allocated = True
        block.requested = nbytes
        self.requested += nbytes
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool, and join it with its free neighbours."""
        self.requested -= block.requested
        self.allocated -= block.size
        block.allocated = False
        block.requested = 0
        block.absorb(block.previous)
        block.absorb(block.next)
        block.pool.add(block)

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block that a request of `nbytes` gets."""
        if nbytes < LEAST_BLOCK:
            return LEAST_BLOCK
        power = nbytes.bit_length() - 1
        divisions = self._settings.divisions
        # The first range of sizes ends at 2 MiB; the last range has no end.
        interval = min(max(power - 20, 0), len(divisions) - 1)
        parts = divisions[interval]
        if parts > 1 and nbytes > LEAST_BLOCK * parts:
            return rounded_up(nbytes, max((1 << power) // parts, 1))
        return rounded_up(nbytes, LEAST_BLOCK)

    def _cached(self, pool: Pool, size: int, stream: int) -> Block | None:
        if self._collects:
            pool.searches += 1
        block = None
        for each in pool.best(stream, size):
            # Among expandable segments, the segment that can grow the least is used.
            if block is not None and _growable(each) >= _growable(block):
                break
            block = each
            if not block.expandable:
                break
        if block is None:
            return None
        if size < self._unsplit:
            is_too_large = block.size >= self._unsplit
        else:
            is_too_large = block.size >= size + self._settings.max_non_split_rounding
        if is_too_large:
            return None
        pool.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self._settings.expandable_segments:
            return rest >= LEAST_BLOCK
        return size < self._unsplit and rest > SMALL_REQUEST

    def _reserve(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Reserve memory on the device, and return a block that is large enough for a request.

        Return `None` if the device has no memory left.
        """
        segment = _segment_size(size)
        if self._settings.memory_fraction is not None and self.reserved + segment > self._allowed:
            return None
        if self._settings.expandable_segments:
            return self._expand(pool, size, stream)
        if self.reserved + segment > self._limit:
            return None
        self.reserved += segment
        self._next_address += segment
        return Block(pool, stream, self._next_address - segment, segment)

    def _expand(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Map pages of an expandable segment for a request, and return them as a block.

        The block is at the lowest addresses with enough room. Return `None` if the device has no
        memory left.
        """
        block = self._expandable(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size and block.next is not None:
            rest = block.next
            if not self._map(rest, min(size - block.size, rest.size)):
                return None
            # `rest` has absorbed the free block before it.
            block = rest
        pool.remove(block)
        return block

    def _expandable(self, pool: Pool, size: int, stream: int) -> Block:
        """Return the first of several adjacent free blocks that together have room for a request.

        The blocks belong to an expandable segment, and at least one of them is unmapped. If there
        are no such blocks, create a new expandable segment and return its only block.
        """
        for unmapped in pool.unmapped(stream):
            first = unmapped
            if first.previous is not None and not first.previous.allocated:
                first = first.previous
            room = 0
            block: Block | None = first
            while room < size and block is not None and not block.allocated:
                room += block.size
                block = block.next
            if room >= size:
                return first
        address = self._next_address
        segment = Block(pool, stream, address, ENDLESS, mapped=False, expandable=True)
        self._next_address += ENDLESS
        pool.add(segment)
        return segment

    def _map(self, block: Block, nbytes: int) -> bool:
        """Map pages at the beginning of a block, and join it with free neighbours that are mapped.

        Returns:
            Whether the device had enough memory left.
        """
        nbytes = rounded_up(nbytes, _page(block.pool))
        if self.reserved + nbytes > self._limit:
            return False
        pool = block.pool
        pool.remove(block)
        if nbytes < block.size:
            pool.add(block.cut(nbytes, mapped=False))
        block.mapped = True
        block.absorb(block.previous)
        block.absorb(block.next)
        pool.add(block)
        self.reserved += nbytes
        return True

    def _collect(self) -> None:
        """Release old free segments until the reserved bytes do not exceed the threshold.

        Each round releases the segments that are at least as old as the mean age of all segments
        that are left.
        """
        threshold = int(self._settings.garbage_collection_threshold * self._allowed)
        segments = [block for block in self._large if not block.is_split]
        while self.reserved > threshold and segments:
            mean = sum(map(self._age, segments)) / len(segments)
            young = []
            for segment in segments:
                if self._age(segment) < mean:
                    young.append(segment)
                else:
                    self._release(segment)
            segments = young

    def _age(self, block: Block) -> int:
        return self._large.searches - block.inserted

    def _release_unsplit(self, pool: Pool, size: int, stream: int) -> bool:
        """Release free blocks that are too large to be split, until a request has enough bytes.

        Returns:
            Whether the released bytes are enough for the request. Always false without the setting
            `max_split_size`.
        """
        if self._settings.max_split_size is None:
            return False
        wanted = max(size, self._unsplit)
        enough = next(pool.best(stream, wanted), None)
        if enough is not None:
            if enough.is_split or enough.expandable:
                return False
            self._release(enough)
            return True
        released = 0
        for block in pool.smaller(stream, wanted):
            if released >= wanted or block.size < self._unsplit:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def _release_all(self) -> None:
        """Release all free segments, and all free pages of expandable segments."""
        for pool in (self._large, self._small):
            for block in pool:
                if block.expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.size

    def _unmap(self, block: Block) -> None:
        """Release the pages that lie completely inside a free block of an expandable segment.

        The rest of the block, at its beginning and end, stays mapped.
        """
        pool = block.pool
        page = _page(pool)
        begin = rounded_up(block.address, page)
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            rest = block.cut(begin - block.address, mapped=True)
            pool.add(block)
            block = rest
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address, mapped=True))
        block.mapped = False
        self.reserved -= block.size
        block.absorb(block.previous)
        block.absorb(block.next)
        pool.add(block)


def simulate(
    requests: Iterable[Request],
    settings: AllocatorSettings = DEFAULT,
    *,
    limit_bytes: int | None = None,
) -> Simulated:
    """Run a sequence of requests on a simulated allocator, until one fails.

    A free is ignored if no allocation with its key is alive.
    """
    allocator = Allocator(settings, limit_bytes)
    blocks: dict[int, Block] = {}
    requested = 0
    allocated = 0
    at_peak = allocator.usage
    failed = None
    for place, (key, nbytes, stream) in enumerate(requests):
        if nbytes is None:
            if key in blocks:
                allocator.free(blocks.pop(key))
            continue
        try:
            blocks[key] = allocator.allocate(nbytes, stream)
        except OutOfMemoryError as error:
            failed = (place, error.segment_bytes)
            break
        requested = max(requested, allocator.requested)
        allocated = max(allocated, allocator.allocated)
        if (allocator.reserved, allocator.allocated) > (at_peak.reserved, at_peak.allocated):
            at_peak = allocator.usage
    return Simulated(
        peak=Usage(requested=requested, allocated=allocated, reserved=at_peak.reserved),
        at_reserved_peak=at_peak,
        end=allocator.usage,
        retries=allocator.retries,
        failed=failed,
    )


def _segment_size(size: int) -> int:
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_REQUEST else rounded_up(size, LARGE_MULTIPLE)


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT if pool.small else LARGE_SEGMENT


def _growable(block: Block) -> int:
    """Return the size to which a block of an expandable segment can grow.

    This is the size of the block, plus the size of the block after it if that block is unmapped.
    """
    rest = block.next
    if rest is None or rest.mapped:
        return block.size
    return block.size + rest.size


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
