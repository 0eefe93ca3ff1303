"""Blocks of device memory, and the pools that keep the free ones in order."""

from bisect import bisect_left, insort
from collections.abc import Iterator

Key = tuple[int, int, int]


class Block:
    """A stretch of memory: a whole segment, or a part of one between its neighbours."""

    __slots__ = ("address", "allocated", "expandable", "inserted", "mapped", "next", "pool", "previous", "requested", "size", "stream")

    def __init__(self, pool: "Pool", stream: int, address: int, size: int, *, mapped: bool = True, expandable: bool = False) -> None:
        self.pool, self.stream, self.address, self.size = pool, stream, address, size
        self.mapped = mapped  # whether memory stands behind its addresses; only expandable segments have blocks without
        self.expandable = expandable  # whether its segment is
        self.allocated = False
        self.requested = 0  # bytes that were asked for; 0 while it is free
        self.inserted = 0  # the pool's count of searches when it became free: its age is counted from there
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def key(self) -> Key:
        """Where it stands among the free blocks of its pool."""
        return self.stream, self.size, self.address

    @property
    def is_split(self) -> bool:
        """Whether it is a part of its segment."""
        return self.previous is not None or self.next is not None

    def cut(self, size: int, *, mapped: bool) -> "Block":
        """Keep the first `size` bytes; returns the rest, which follows it."""
        rest = Block(self.pool, self.stream, self.address + size, self.size - size, mapped=mapped, expandable=self.expandable)
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
        self.searches = 0  # how often a free block was looked for while old ones are collected
        self._free: list[Key] = []
        self._unmapped: list[Key] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Take in a free block."""
        block.inserted = self.searches
        insort(*self._placed(block))
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """Give a free block out."""
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
