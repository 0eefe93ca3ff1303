"""Every reader accepts a damaged file, or refuses it in one line, within time and memory.

`benchmarks/fuzz.py` reads twenty thousand files.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.support import fuzzed_files
from tests.support.fuzzed_files import (
    INTERESTING,
    Defect,
    Edit,
    Reader,
    damaged,
    originals,
    read_all,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="no alarm here")

EDITS = st.lists(
    st.builds(
        Edit,
        at=st.floats(0, 1),
        removed=st.sampled_from([0, 0, 1, 4, 60, 10_000]),
        added=st.sampled_from(INTERESTING) | st.binary(max_size=8),
        repeated=st.sampled_from([1, 1, 1, 3, 50_000]),
    ),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    """All readers, with whole files."""
    return originals(tmp_path_factory.mktemp("whole"))


NAMES = [
    "profile",
    "two profiles",
    "trace",
    "compressed trace",
    "trace in gzip",
    "raw trace",
    "recorded calls",
    "snapshot",
    "old snapshot",
    "ledger",
    "log of Nsight Compute",
    "table of chips",
    "DeepSpeed's configuration",
    "payload of an event",
    "payload in an event",
]


def test_every_reader_is_tried(readers: dict[str, Reader], tmp_path: Path) -> None:
    """And reads the whole files."""
    assert NAMES == list(readers)
    for reader in readers.values():
        for original in reader.originals:
            assert [] == read_all(reader, damaged(reader, original, []), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_does_no_harm(
    name: str, readers: dict[str, Reader], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Thirty files of each kind."""
    reader = readers[name]
    folder = tmp_path_factory.mktemp("damaged")

    @settings(max_examples=30, deadline=None, database=None)
    @given(st.sampled_from(reader.originals), EDITS)
    def reads(original: bytes, edits: list[Edit]) -> None:
        assert [] == read_all(reader, damaged(reader, original, edits), folder)

    reads()


def test_defects_are_seen(
    readers: dict[str, Reader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check finds planted defects in a reader.

    The first reader raises, the second prints two lines, and the third uses 400 MB of memory.
    """

    def raises(_: bytes) -> int:
        raise KeyError("ts")

    def chatters(_: bytes) -> int:
        sys.stderr.write("a\nb\n")
        return 2

    def hoards(_: bytes) -> int:
        return int(len(b"x" * 400_000_000) == 0)

    for special, expected in (
        (raises, "KeyError: 'ts' at "),
        (chatters, "not one line"),
        (hoards, " MB for 1 bytes"),
    ):
        monkeypatch.setattr(fuzzed_files, "SPECIAL", {"planted": special})
        ((command, what),) = read_all(Reader("x", [b""], ["planted"]), b"x", tmp_path)
        assert Defect("planted", what) == Defect(command, what)
        assert expected in what
