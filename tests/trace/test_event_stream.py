"""Test that trace files of every form are read, wherever the text is divided into pieces.

A file that cannot be read gives an error message of one sentence.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import Struct

from lflops.errors import ProfileError
from lflops.trace import event_stream
from lflops.trace.event_stream import Header, TraceStream
from tests.support.traces_by_hand import as_json


class Named(Struct):
    """The fields of an event that these tests read."""

    name: str = ""
    args: dict[str, Any] = {}


def names(path: Path, piece: int | None = None) -> tuple[list[str], Header]:
    """Return the names of a file's events and the header. `piece` is the bytes of each read."""
    with pytest.MonkeyPatch.context() as patch:
        if piece is not None:
            patch.setattr(event_stream, "_PIECE", piece)
        stream = TraceStream(path, Named)
        found = []
        for events in stream.portions():
            found += [event.name for event in events]
        return found, stream.header


def written(path: Path, text: bytes) -> Path:
    """Write a file, and return its path."""
    path.write_bytes(text)
    return path


AWKWARD = [
    {"name": "plain", "args": {}},
    {"name": "},{", "args": {"list": [{"a": 1}, {"b": 2}]}},
    {"name": '"traceEvents": [', "args": {"deep": [[{"c": []}, {"d": "}]"}]]}},
    {"name": "\\", "args": {"text": '] , {"name": "none"}'}},
]


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_events_are_the_same_wherever_the_text_is_cut(
    tmp_path: Path, piece: int, indent: int | None
) -> None:
    """The events are the same, however the text is divided into pieces.

    Brackets in strings and objects in arguments do not end an event. The fields before and after
    the list of events are the header.
    """
    content = {
        "metadata": {"note": '"traceEvents": [{"name": "none"}]'},
        "deviceProperties": [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}],
        "traceEvents": AWKWARD * 5,
        "distributedInfo": {"rank": 3, "world_size": 4},
        "baseTimeNanoseconds": 17,
        "more": [{"x": 1}, {"y": 2}],
    }
    text = json.dumps(content, indent=indent).encode()
    found, header = names(written(tmp_path / "trace.json", text), piece)
    assert [event["name"] for event in AWKWARD] * 5 == found
    assert (17, ["A", "B"]) == (header.base, [device.name for device in header.devices])
    assert header.distributed is not None
    assert (3, 4) == (header.distributed.rank, header.distributed.world_size)


@given(
    events=st.lists(
        st.fixed_dictionaries(
            {
                "name": st.text('{}[],:"\\ aé\n', max_size=6),
                "args": st.dictionaries(
                    st.text("}],{", max_size=3),
                    st.lists(st.text("}{,] ", max_size=4), max_size=2),
                    max_size=2,
                ),
            }
        ),
        max_size=12,
    ),
    piece=st.integers(1, 90),
    indent=st.sampled_from([None, 2]),
)
def test_any_text_in_events_is_read(
    events: list[dict[str, Any]],
    piece: int,
    indent: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Events with any text are read, however few bytes are read at a time."""
    content = {"schemaVersion": 1, "traceEvents": events, "traceName": "x"}
    text = json.dumps(content, indent=indent).encode()
    found, _ = names(written(tmp_path_factory.mktemp("any") / "t.json", text), piece)
    assert [event["name"] for event in events] == found


def test_a_packed_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """A compressed file is detected by its first bytes, not by its name.

    A compressed file without `.gz` is read, and so is a plain file with `.gz`.
    """
    text = as_json({"traceEvents": AWKWARD})
    for name, content in (("plain.json.gz", text), ("packed.json", gzip.compress(text, mtime=0))):
        assert len(AWKWARD) == len(names(written(tmp_path / name, content))[0])


def test_a_list_of_events_without_a_header_is_a_trace(tmp_path: Path) -> None:
    """A plain list of events, the other form of Chrome's trace format, is read."""
    assert [event["name"] for event in AWKWARD] == names(
        written(tmp_path / "list.json", as_json(AWKWARD)), 9
    )[0]  # type: ignore[arg-type]


def test_infinite_rates_are_read_as_unknown(tmp_path: Path) -> None:
    """The values `inf` and `nan`, which are no JSON, are read as unknown.

    C++ writes them for a copy that took no time. A name that contains such a word stays unchanged.
    """
    text = (
        b'{"traceEvents": [{"name": "a: inf", "args": {"GB/s": inf}}, '
        b'{"name": "b", "args": {"x": -nan, "y": 1}}]}'
    )
    assert ["a: inf", "b"] == names(written(tmp_path / "infinite.json", text))[0]


GOOD = as_json({"schemaVersion": 1, "traceEvents": AWKWARD * 3, "traceName": "x"})
BROKEN = {
    "empty": (b"", "the file is empty"),
    "spaces": (b" \n ", "the file is empty"),
    "no trace": (b'{"version": "1.0"}', "it has no list of events"),
    "not json": (b"\x00\x01binary", "it has no list of events"),
    "text": (b"hello", "it has no list of events"),
    "truncated": (GOOD[:-60], "the file is truncated"),
    "cut within the header": (GOOD[:30], "it has no list of events"),
    "torn": (GOOD[:100] + b"\x00\x00\x00" + GOOD[140:], "line 1, column 101: JSON is malformed"),
    "torn in a later line": (
        b'{"traceEvents": [\n{"name": "a"},\n  {"name": "b" "}\n]}',
        "line 3, column 16: JSON is malformed",
    ),
    "a text cut off": (b'{"traceEvents": [{"name": "a"}, {"name": "b', "the file is truncated"),
    "header": (
        b'{"distributedInfo": {"rank": "first"}, "traceEvents": []}',
        "Expected `int | null`, got `str`",
    ),
    "deep": (b'{"traceEvents": [{"args": ' + b"[" * 200_000 + b"]" * 200_000 + b"}]}", "recursion"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_in_one_sentence_that_names_it(tmp_path: Path, kind: str) -> None:
    """A file that cannot be read is an error of one line, with the file's name and the reason."""
    text, reason = BROKEN[kind]
    path = written(tmp_path / "broken.pt.trace.json", text)
    with pytest.raises(ProfileError) as raised:
        names(path)
    assert str(raised.value).startswith(f"{path}: is not a torch.profiler trace: ")
    assert reason.lower() in str(raised.value).lower()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("piece", [30, 1 << 22])
def test_a_damaged_event_is_left_out_and_counted(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged events are left out and counted, and the first one is described.

    Three of six events are damaged: one has a number as its name, one is no object, and one has a
    name that is not UTF-8.
    """
    monkeypatch.setattr(event_stream, "_PIECE", piece)
    events = b'{"name": "a"}, {"name": 5}, {"name": "b"}, 7, {"name": "\xff\xfe"}, {"name": "c"}'
    stream = TraceStream(written(tmp_path / "t.json", b'{"traceEvents": [' + events + b"]}"), Named)
    found = []
    for portion in stream.portions():
        found += [event.name for event in portion]
    assert ["a", "b", "c"] == found
    assert (3, "Expected `str`, got `int` - at `$.name`") == (stream.damaged, stream.damage)


@pytest.mark.parametrize(
    "text",
    [
        gzip.compress(GOOD, mtime=0)[:-20],
        gzip.compress(GOOD, mtime=0)[:40] + bytes(60),
        b"\x1f\x8b no gzip at all",
    ],
    ids=["cut off", "damaged", "no archive"],
)
def test_a_broken_archive_is_refused(tmp_path: Path, text: bytes) -> None:
    """A compressed file that is truncated or damaged, or that only begins like one, is an error."""
    path = written(tmp_path / "broken.pt.trace.json.gz", text)
    with pytest.raises(ProfileError, match=r"broken\.pt\.trace\.json\.gz: cannot be read: "):
        names(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    """A missing file and a folder are errors, with the reason."""
    with pytest.raises(ProfileError, match="No such file"):
        names(tmp_path / "missing.json")
    with pytest.raises(ProfileError, match="not a regular file, but a folder, a pipe or a device"):
        names(tmp_path)


def test_damage_ends_the_reading_before_the_file_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a damaged event, reading stops before the whole file is in memory.

    The event at column 51 is malformed. The text after it is read only up to the maximum length of
    an event.
    """
    monkeypatch.setattr(event_stream, "_LONGEST", 4096)
    text = (
        b'{"traceEvents": [{"name": "good"}, {"name": "bad" "}, '
        + b'{"name": "more"},' * 5000
        + b"]}"
    )
    with pytest.raises(ProfileError, match="line 1, column 51: JSON is malformed"):
        names(written(tmp_path / "torn.json", text), 512)


def test_a_file_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed file is rejected while it is read, when its text becomes too large.

    The text is about a thousand times as large as the file.
    """
    monkeypatch.setattr(event_stream, "_LARGEST", 1 << 20)
    path = written(
        tmp_path / "bomb.json.gz",
        gzip.compress(b'{"traceEvents": [' + b'{"name": "x"},\n' * 200_000 + b"{}]}", mtime=0),
    )
    with pytest.raises(ProfileError, match="GiB of text"):
        names(path, 1 << 16)
