"""Test that pickles that would use unbounded memory or time are refused before they are loaded."""

import itertools
import pickle
import struct
import tracemalloc
from pathlib import Path

import pytest

from lflops.errors import ProfileError
from lflops.memory.snapshots.opcodes import check
from lflops.memory.snapshots.read import load_plain, read_snapshot
from tests.memory.snapshots.test_causes import PLANTED

PLACE = 400_000_000

NESTED = b"(K\x00K\x00t" + b"2\x86" * 40
"""A pair of pairs of pairs, and so on, whose hash takes 2**40 steps."""

BOMBS = {
    "a huge place of the memo": b"\x80\x04]r" + struct.pack("<I", PLACE) + b".",
    "a huge place of the memo as text": b"]p%d\n." % PLACE,
    "nested tuples as a key": b"\x80\x04}(" + NESTED + b"K\x00u.",
    "nested tuples from the memo": b"\x80\x04}("
    b"K\x00K\x00\x86q\x00"
    + b"".join(b"h%ch%c\x86q%c" % (each, each, each + 1) for each in range(40))
    + b"K\x00u.",
    "a tuple of a thousand": b"\x80\x04(" + b"K\x00" * 1000 + b"t.",
    "a set": b"\x80\x04(K\x00\x91.",
    "a number of 300 bytes": b"\x80\x04\x8b" + struct.pack("<I", 300) + bytes(299) + b"\x01.",
    "a number of 255 bytes": b"\x80\x04\x8a\xff" + bytes(254) + b"\x01.",
    "a number of a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "twenty million lists": b"\x80\x04(" + b"]" * 20_000_000 + b"l.",
    "ten million lists from marks": b"\x80\x04(" + b"(l" * 10_000_000 + b"l.",
    "ten million dictionaries from marks": b"\x80\x04(" + b"(d" * 10_000_000 + b"l.",
    "ten million tuples": b"\x80\x04(" + b"N\x85" * 10_000_000 + b"l.",
    "a writable array": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"a.",
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused(content: bytes, tmp_path: Path) -> None:
    """A bomb is refused, with memory of at most ten times the file's size plus one MiB."""
    path = tmp_path / "bomb.pickle"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(
        ProfileError, match="lflops reads only plain containers, strings and numbers, because"
    ):
        load_plain(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (1 << 20) + 10 * len(content)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", PLANTED)
def test_a_snapshot_is_loaded(name: str, protocol: int, tmp_path: Path) -> None:
    """Snapshots written with every version of pickle are loaded."""
    snapshot = PLANTED[name][0]().snapshot()
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol))
    assert snapshot == load_plain(path)[0]


VALUES = [
    None,
    True,
    0,
    255,
    -1,
    2**31,
    2**64 - 1,
    -(2**63),
    0.5,
    "",
    "a" * 300,
    "☃" * 70_000,
    b"bytes",
    b"b" * 70_000,
    (),
    (0, 0),
    (1, 2, 3),
    (1, None, 2**40, 0.5, True),
    [],
    {},
    [[{"a": [1, {"b": (0, 1)}]}]],
    [list(range(70_000)), dict.fromkeys(map(str, range(70_000)))],
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_loaded(protocol: int, tmp_path: Path) -> None:
    """Plain values are loaded with every pickle protocol.

    The values need memo indices of one, two and four bytes, and texts with lengths of one and four
    bytes.
    """
    values = VALUES
    if protocol < 3:
        # These protocols write bytes as the call of a function, which is refused.
        values = [each for each in VALUES if not isinstance(each, bytes)]
    path = tmp_path / "values.pickle"
    path.write_bytes(pickle.dumps(values, protocol))
    assert values == load_plain(path)[0]


def test_the_check_has_a_budget_of_time() -> None:
    """A pickle that takes too long to check is refused; each look at this clock adds a minute."""
    minutes = itertools.count(0, 60)
    with pytest.raises(pickle.UnpicklingError, match="checking them takes too long"):
        check(pickle.dumps(["a", "b", "c", "d"]), clock=lambda: next(minutes))


def test_one_list_referred_to_again_and_again_is_refused(tmp_path: Path) -> None:
    """A file of 12 kB that refers to one list in many places is refused.

    It has 1000 segments with the same 1000 blocks, each with the same 1000 frames.
    """
    frame = {"filename": "a.py", "name": "f", "line": 1}
    frames = [frame] * 1000
    block = {"size": 1, "state": "active_allocated", "frames": frames}
    blocks = [block] * 1000
    segments = [{"address": 0, "total_size": 1000, "blocks": blocks}] * 1000
    path = tmp_path / "shared.pickle"
    path.write_bytes(pickle.dumps({"segments": segments}))
    assert path.stat().st_size < 12_000
    with pytest.raises(ProfileError, match="is in the snapshot twice"):
        read_snapshot(path)
