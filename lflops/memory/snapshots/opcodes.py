"""Check the opcodes of a pickle before it is loaded, in time that is linear in its size.

Loading a pickle of a few bytes can reserve any amount of memory, if the pickle writes to a huge
index of the unpickler's memo (its table of objects). It can also take years if the pickle uses
nested tuples as keys, because nested tuples are hashed again and again. The snapshot files of torch
do neither.
"""

import functools
import pickle
import pickletools
import re
import time
from collections.abc import Callable

_LINE = 40
"""Maximum number of characters of a number that is written as text."""

# Patterns for integers of at most 9 bytes. An unsigned 64-bit number needs up to 9 bytes.
_SMALL_NUMBERS = [rb"\x8a\x00"]
for _length in range(1, 10):
    _SMALL_NUMBERS.append(rb"\x8a\x%02x.{%d}" % (_length, _length))

_NUMBER = rb"(?:%b)" % b"|".join(
    [
        rb"[N\x88\x89]|K.|M..|J.{4}|G.{8}",
        rb"[ILF][^\n]{1,%d}\n" % _LINE,
        *_SMALL_NUMBERS,
    ]
)

_TUPLE = rb"%b\x85|%b{2}\x86|%b{3}\x87|\(%b{0,16}+t" % ((_NUMBER,) * 4)
"""Pattern for a tuple of numbers. All other tuples are refused.

Other tuples could contain the same tuples many times, and hashing them could take years.
"""

_CONTAINER_OR_MARK = rb"[()\]}aesudl01\x94]"
_REFERENCE = rb"h.|j.{4}|g\d{1,10}\n"
_START = rb"\x80.|\x95.{8}"

_SIZES = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"U": 1, b"T": 4, b"C": 1, b"B": 4, b"\x8e": 8}
"""The number of bytes that store the length of a string, keyed by the opcode of the string."""

_NAMES = {ord(each.code): each.name for each in pickletools.opcodes}

_CHECKED = _NAMES.keys() - set(b"ciPQ\x93\x82\x83\x84")
"""Opcodes that `check` examines: all except the opcodes that look up a class, function or object.

The check ends at such a lookup, or at a byte that is no opcode, because the unpickler refuses both.
"""
_PUT = ord("p")

BYTES_OF_MEMO = 3
"""Minimum number of bytes in the file for each entry of the pickle's memo.

An entry needs at least one byte for the value, one for an opcode and one for an index. This limits
the number of entries: a memo index above the file's size divided by `BYTES_OF_MEMO` is refused.
"""

SECONDS = 5.0
BYTES_PER_SECOND = 5_000_000
"""Number of bytes for which the time limit of the check is extended by one second.

The time limit is `SECONDS`, plus one second for each `BYTES_PER_SECOND` bytes of the pickle.
"""

_NEW_CONTAINERS = (b"}", b"]", b"(l", b"(d", b"\x85", b"\x86", b"\x87")
"""Opcodes that make a list, a dictionary or a tuple."""

MANY_CONTAINERS = 2_000_000
BYTES_OF_CONTAINER = 9
"""Number of bytes of the pickle for which one more container is accepted.

The maximum number of containers (lists, dicts and tuples) is `MANY_CONTAINERS`, plus one for each
`BYTES_OF_CONTAINER` bytes. The number is limited because an empty container takes few bytes in the
file but 64 bytes of memory.
"""


def check(content: bytes, clock: Callable[[], float] = time.monotonic) -> None:
    """Raise `pickle.UnpicklingError` for a pickle that could use unbounded memory or time."""
    containers = sum(map(content.count, _NEW_CONTAINERS))
    if containers > MANY_CONTAINERS + len(content) // BYTES_OF_CONTAINER:
        raise pickle.UnpicklingError("has too many lists and dictionaries for its size")
    most_memo = len(content) // BYTES_OF_MEMO
    harmless = _harmless(most_memo >> 16)
    latest = clock() + SECONDS + len(content) / BYTES_PER_SECOND
    place = 0
    while place < len(content):
        found = harmless.match(content, place)
        place = found.end() if found else place
        opcode = content[place : place + 1]
        if opcode in {b"", b"."} or opcode[0] not in _CHECKED:
            return
        place = _after_text(content, place, most_memo)
        if clock() > latest:
            raise pickle.UnpicklingError("has so many strings that checking them takes too long")


@functools.cache
def _harmless(most: int) -> re.Pattern[bytes]:
    """Return a pattern that matches a sequence of harmless opcodes.

    An opcode that writes to the memo is harmless if the index of the memo entry is below
    (`most` + 1) * 65536.
    """
    high = min(most >> 8, 255)
    top = b"[\\x00-\\x%02x]" % high
    middle = b"." if high else b"[\\x00-\\x%02x]" % (most & 255)
    put = b"q.|r..%b%b" % (middle, top)
    parts = [_TUPLE, _NUMBER, _CONTAINER_OR_MARK, _REFERENCE, put, _START]
    return re.compile(b"(?:%b)*+" % b"|".join(parts), re.DOTALL)


def _after_text(content: bytes, place: int, most_memo: int) -> int:
    """Return the position after the opcode at `place` and its text.

    The text is a string, or a memo index that is written in digits.

    Raises:
        pickle.UnpicklingError: The opcode has no such text, or the index is too large.
    """
    opcode = content[place]
    size = _SIZES.get(content[place : place + 1])
    if size is not None:
        begin = place + 1 + size
        return begin + int.from_bytes(content[place + 1 : begin], "little")
    end = content.find(b"\n", place) + 1 or len(content)
    if opcode in b"VS":
        return end
    digits = content[place + 1 : end].strip()
    if opcode == _PUT and digits.isdigit() and len(digits) < _LINE and int(digits) <= most_memo:
        return end
    raise pickle.UnpicklingError(f"has the opcode {_NAMES[opcode]}")
