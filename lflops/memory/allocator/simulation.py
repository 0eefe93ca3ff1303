"""The allocator itself.

Requests come in, segments are reserved, blocks are split, handed out, and joined again; pools keep
them in order.

The rules are those of torch's `c10/cuda/CUDACachingAllocator.cpp`; `tests/memory/allocator/` works
each of them out by hand.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct

from lflops.memory.allocator.settings import DEFAULT, AllocatorSettings

Key = tuple[int, int, int]


class Block:
    """A stretch of memory: a whole segment, or a part of one between its neighbours."""

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
        self.pool, self.stream, self.address, self.size = pool, stream, address, size
        # whether memory stands behind its addresses; only expandable segments have blocks without
        self.mapped = mapped
        # whether its segment is
        self.expandable = expandable
        self.allocated = False
        # bytes that were asked for; 0 while it is free
        self.requested = 0
        self.inserted = (
            # the pool's count of searches when it became free: its age is counted from there
            0
        )
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def key(self) -> Key:
        """Its sort key among the free blocks of its pool."""
        return self.stream, self.size, self.address

    @property
    def is_split(self) -> bool:
        """Whether it is a part of its segment."""
        return self.previous is not None or self.next is not None

    def cut(self, size: int, *, mapped: bool) -> "Block":
        """Keep the first `size` bytes; returns the rest, which follows it."""
        rest = Block(
            self.pool,
            self.stream,
            self.address + size,
            self.size - size,
            mapped=mapped,
            expandable=self.expandable,
        )
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb(self, other: "Block | None") -> None:
        """Take in a neighbour that is free and mapped as this one is."""
        if other is None or other.allocated or other.mapped != self.mapped:
            return
        other.pool.remove(other)
        if other is self.previous:
            self.address, self.previous = other.address, other.previous
            if other.previous is not None:
                other.previous.next = self
        else:
            self.next = other.next
            if other.next is not None:
                other.next.previous = self
        self.size += other.size


class Pool:
    """The free blocks for small requests, or for large ones."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        # how often a free block was looked for while old ones are collected
        self.searches = 0
        self._free: list[Key] = []
        self._unmapped: list[Key] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        block.inserted = self.searches
        insort(*self._placed(block))
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        order, key = self._placed(block)
        del order[bisect_left(order, key)]
        del self._blocks[block.address]

    def _placed(self, block: Block) -> tuple[list[Key], Key]:
        if block.mapped:
            return self._free, block.key
        return self._unmapped, (block.stream, block.address, 0)

    def best(self, stream: int, size: int) -> Iterator[Block]:
        """The free blocks of a stream that are large enough, the smallest first, of two the one at the lower address."""
        for place in range(bisect_left(self._free, (stream, size, 0)), len(self._free)):
            if self._free[place][0] != stream:
                return
            yield self._blocks[self._free[place][2]]

    def smaller(self, stream: int, size: int) -> list[Block]:
        """The free blocks of a stream that are smaller, the largest first."""
        end = bisect_left(self._free, (stream, size, 0))
        return [self._blocks[key[2]] for key in reversed(self._free[:end]) if key[0] == stream]

    def unmapped(self, stream: int) -> list[Block]:
        """The blocks of a stream without memory, the lowest address first."""
        return [self._blocks[address] for each, address, _ in self._unmapped if each == stream]

    def __iter__(self) -> Iterator[Block]:
        return iter([self._blocks[key[2]] for key in self._free])


MIB = 2**20
LEAST_BLOCK = 512
SMALL_REQUEST, SMALL_SEGMENT = (
    MIB,
    2 * MIB,
    # requests of up to 1 MiB are packed into segments of 2 MiB
)

LARGE_REQUEST, LARGE_SEGMENT, LARGE_MULTIPLE = 10 * MIB, 20 * MIB, 2 * MIB
"""Requests of up to 10 MiB share segments of 20 MiB.

Larger ones get their own, in multiples of 2 MiB.
"""

# addresses of an expandable segment: a whole number of its pages
ENDLESS = LARGE_SEGMENT << 36


class Request(NamedTuple):
    """One allocation, or one free."""

    # the allocation's name: a free has that of what it frees
    key: int
    # what is asked for; `None` frees
    bytes: int | None
    # on which memory is used first, and reused
    stream: int = 0


class Usage(Struct, frozen=True, kw_only=True):
    """Bytes at one moment."""

    # asked for
    requested: int
    # in blocks that are handed out; `torch.cuda.memory_allocated()`
    allocated: int
    # in segments; `torch.cuda.memory_reserved()`
    reserved: int


class Simulated(Struct, frozen=True, kw_only=True):
    """What a sequence of requests came to."""

    # the most of each, each at its own time
    peak: Usage
    # when the most is reserved and, of these moments, the most is allocated. The difference is the
    # allocator's
    at_reserved_peak: Usage
    # after the last request
    end: Usage
    # how often the device had no memory left until cached segments were released
    retries: int
    # The place of the request that could not be served, and the bytes it asked the device for;
    # `None` if all were.
    failed: tuple[int, int] | None = None


class OutOfMemoryError(Exception):
    """A request that the device has no memory for."""


class Allocator:
    """One device's allocator."""

    def __init__(
        self, settings: AllocatorSettings = DEFAULT, limit_bytes: int | None = None
    ) -> None:
        self._settings = settings
        self._limit = ENDLESS if limit_bytes is None else limit_bytes
        fraction = settings.memory_fraction
        self._allowed = self._limit if fraction is None else int(fraction * self._limit)
        self._collects = fraction is not None and settings.garbage_collection_threshold > 0
        self._unsplit = ENDLESS if settings.max_split_size is None else settings.max_split_size
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._next_address = ENDLESS
        self.requested = self.allocated = self.reserved = self.retries = 0

    @property
    def usage(self) -> Usage:
        return Usage(requested=self.requested, allocated=self.allocated, reserved=self.reserved)

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Hand out a block; of an `OutOfMemoryError` the message is the size of the segment."""
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
            raise OutOfMemoryError(str(_segment_size(size)))
        if self._splits(block, size):
            pool.add(block.cut(size, mapped=True))
        block.allocated, block.requested = True, nbytes
        self.requested += nbytes
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbours."""
        self.requested -= block.requested
        self.allocated -= block.size
        block.allocated, block.requested = False, 0
        block.absorb(block.previous)
        block.absorb(block.next)
        block.pool.add(block)

    def rounded(self, nbytes: int) -> int:
        """The size of the block for a request."""
        if nbytes < LEAST_BLOCK:
            return LEAST_BLOCK
        power = nbytes.bit_length() - 1
        parts = self._settings.divisions[min(max(power - 20, 0), len(self._settings.divisions) - 1)]
        if parts > 1 and nbytes > LEAST_BLOCK * parts:
            return rounded_up(nbytes, max((1 << power) // parts, 1))
        return rounded_up(nbytes, LEAST_BLOCK)

    def _cached(self, pool: Pool, size: int, stream: int) -> Block | None:
        if self._collects:
            pool.searches += 1
        block = None
        for each in pool.best(stream, size):
            # Of expandable segments the one that can grow the least is taken.
            if block is not None and _growable(each) >= _growable(block):
                break
            block = each
            if not block.expandable:
                break
        if block is None:
            return None
        is_unsplit = size >= self._unsplit
        if (
            (block.size >= size + self._settings.max_non_split_rounding)
            if is_unsplit
            else (block.size >= self._unsplit)
        ):
            return None
        pool.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self._settings.expandable_segments:
            return rest >= LEAST_BLOCK
        return size < self._unsplit and rest > SMALL_REQUEST

    def _reserve(self, pool: Pool, size: int, stream: int) -> Block | None:
        """New memory from the device; `None` where it has none."""
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
        """Map pages behind the lowest addresses at which there is room."""
        block = self._expandable(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size and (rest := block.next) is not None:
            if not self._map(rest, min(size - block.size, rest.size)):
                return None
            # which has absorbed the free block before it
            block = rest
        pool.remove(block)
        return block

    def _expandable(self, pool: Pool, size: int, stream: int) -> Block:
        for each in pool.unmapped(stream):
            first = (
                each.previous if each.previous is not None and not each.previous.allocated else each
            )
            room = 0
            at: Block | None = first
            while room < size and at is not None and not at.allocated:
                room += at.size
                at = at.next
            if room >= size:
                return first
        self._next_address += ENDLESS
        segment = Block(
            pool, stream, self._next_address - ENDLESS, ENDLESS, mapped=False, expandable=True
        )
        pool.add(segment)
        return segment

    def _map(self, block: Block, nbytes: int) -> bool:
        """Put pages behind the beginning of a block, and join it with free neighbours that have some."""
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
        """Release free segments that are older than the mean, until what is reserved is below the threshold."""
        threshold = int(self._settings.garbage_collection_threshold * self._allowed)
        target, reclaimed = self.reserved - threshold, 0
        ages = [
            (self._large.searches - block.inserted, block)
            for block in self._large
            if not block.is_split
        ]
        while target > reclaimed and ages:
            mean = sum(age for age, _ in ages) / len(ages)
            for block in [block for age, block in ages if age >= mean]:
                reclaimed += block.size
                self._release(block)
            ages = [(age, block) for age, block in ages if age < mean]

    def _release_unsplit(self, pool: Pool, size: int, stream: int) -> bool:
        """Where blocks have a largest size to be split.

        Release those above it that are enough for a request.
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
        """Return every free segment, and every free page of expandable ones, to the device."""
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
        page, pool = _page(block.pool), block.pool
        begin, end = rounded_up(block.address, page), (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            before, block = block, block.cut(begin - block.address, mapped=True)
            pool.add(before)
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
    """Run a sequence of requests, up to the first that cannot be served.

    A free of a key that is not allocated is left out.
    """
    allocator = Allocator(settings, limit_bytes)
    blocks: dict[int, Block] = {}
    requested = allocated = 0
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
            failed = (place, int(str(error)))
            break
        requested, allocated = (
            max(requested, allocator.requested),
            max(allocated, allocator.allocated),
        )
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
    rest = block.next
    return block.size + (rest.size if rest is not None and not rest.mapped else 0)


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
