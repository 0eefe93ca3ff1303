"""Trace files of every form, cut anywhere.

The same events, or one sentence that says what is wrong.
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
    """What is looked at in an event."""

    name: str = ""
    args: dict[str, Any] = {}


def names(path: Path, piece: int | None = None) -> tuple[list[str], Header]:
    """The names of a file's events, read so many bytes at a time, and the header."""
    with pytest.MonkeyPatch.context() as patch:
        if piece is not None:
            patch.setattr(event_stream, "_PIECE", piece)
        stream = TraceStream(path, Named)
        return [event.name for events in stream.portions() for event in events], stream.header


def written(path: Path, text: bytes) -> Path:
    """A file."""
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
    """Brackets in texts and objects in arguments are no ends of events.

    What stands before and after the list is the header.
    """
    content = {
        "metadata": {"note": '"traceEvents": [{"name": "none"}]'},
        "deviceProperties": [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}],
        "traceEvents": AWKWARD * 5,
        "distributedInfo": {"rank": 3, "world_size": 4},
        "baseTimeNanoseconds": 17,
        "more": [{"x": 1}, {"y": 2}],
    }
    found, header = names(
        written(tmp_path / "trace.json", json.dumps(content, indent=indent).encode()), piece
    )
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
    """Whatever the events hold, and however few bytes are read at a time."""
    text = json.dumps(
        {"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=indent
    ).encode()
    assert [event["name"] for event in events] == names(
        written(tmp_path_factory.mktemp("any") / "t.json", text), piece
    )[0]


def test_a_packed_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """Its name says nothing; a packed file without the ending is read, and a plain one with it."""
    text = as_json({"traceEvents": AWKWARD})
    for name, content in (("plain.json.gz", text), ("packed.json", gzip.compress(text, mtime=0))):
        assert len(AWKWARD) == len(names(written(tmp_path / name, content))[0])


def test_a_list_of_events_without_a_header_is_a_trace(tmp_path: Path) -> None:
    """The other form of Chrome's format."""
    assert [event["name"] for event in AWKWARD] == names(
        written(tmp_path / "list.json", as_json(AWKWARD)), 9
    )[0]  # type: ignore[arg-type]


def test_infinite_rates_are_read_as_unknown(tmp_path: Path) -> None:
    """C++ writes `inf` and `nan` for a copy that took no time. A name with such a word stays."""
    text = b'{"traceEvents": [{"name": "a: inf", "args": {"GB/s": inf}}, {"name": "b", "args": {"x": -nan, "y": 1}}]}'
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
    """Which file, and what is wrong with it."""
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
    """A name that is a number, no object, a name that is no UTF-8.

    Three of six, and the first is described.
    """
    monkeypatch.setattr(event_stream, "_PIECE", piece)
    events = b'{"name": "a"}, {"name": 5}, {"name": "b"}, 7, {"name": "\xff\xfe"}, {"name": "c"}'
    stream = TraceStream(written(tmp_path / "t.json", b'{"traceEvents": [' + events + b"]}"), Named)
    assert ["a", "b", "c"] == [event.name for portion in stream.portions() for event in portion]
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
    """Truncated, torn, or no archive but for its first two bytes."""
    path = written(tmp_path / "broken.pt.trace.json.gz", text)
    with pytest.raises(ProfileError, match=r"broken\.pt\.trace\.json\.gz: cannot be read: "):
        names(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    """With the system's reason."""
    with pytest.raises(ProfileError, match="No such file"):
        names(tmp_path / "missing.json")
    with pytest.raises(ProfileError, match="is a folder, a pipe or a device"):
        names(tmp_path)


def test_damage_ends_the_reading_before_the_file_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn event among many, at column 51: what follows is read until no event can be so long."""
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
    """Packed a thousandth: the text is measured while it is read."""
    monkeypatch.setattr(event_stream, "_LARGEST", 1 << 20)
    path = written(
        tmp_path / "bomb.json.gz",
        gzip.compress(b'{"traceEvents": [' + b'{"name": "x"},\n' * 200_000 + b"{}]}", mtime=0),
    )
    with pytest.raises(ProfileError, match="GiB of text"):
        names(path, 1 << 16)
