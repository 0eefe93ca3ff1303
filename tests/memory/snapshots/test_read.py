"""Test reading a snapshot's file: an untrusted pickle, whose containers may hold anything."""

import pickle
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from lflops.errors import ProfileError
from lflops.memory.snapshots.read import Block, Frame, read_snapshot, snapshot_of
from tests.support.memory_snapshots import BUILD, Recorder, forward


def recorded() -> dict[str, Any]:
    """Return a snapshot of two allocations, one of them freed."""
    recorder = Recorder()
    recorder.allocate(1000, BUILD)
    recorder.free(recorder.allocate(2000, forward(30)))
    return recorder.snapshot()


def test_a_file_of_torchs_is_read(tmp_path: Path) -> None:
    """Segments, blocks and allocator events are read in order, with every pickle protocol."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(recorded(), protocol))
        found = read_snapshot(tmp_path / "snapshot.pickle")
        (segment,) = found.segments
        (block,) = segment.blocks
        assert 1000 == block.requested
        assert "active_allocated" == block.state
        assert "convert" == block.stack[0].function
        assert [
            "segment_alloc",
            "alloc",
            "segment_alloc",
            "alloc",
            "free_requested",
            "free_completed",
            "segment_free",
        ] == [entry.action for entry in found.trace]
        assert Frame("/app/model.py", 30, "forward") == found.trace[3].stack[0]


class Runs:
    """An object whose pickle runs a program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return subprocess.run, (["touch", str(self.path)],)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_code_is_refused_by_name_and_runs_nothing(
    tmp_path: Path, protocol: int
) -> None:
    """A pickle that calls a function is an error that names the function, and nothing runs.

    The ordinary reader does run it, as the end of the test shows. The oldest protocols use the name
    of Python 2.
    """
    content = recorded()
    content["segments"].append(Runs(tmp_path / "ran"))
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(
        ProfileError,
        match=r"snapshot\.pickle: has a reference to (subprocess|commands)\.run: lflops reads only",
    ):
        read_snapshot(file)
    assert not (tmp_path / "ran").exists()
    pickle.loads(file.read_bytes())  # noqa: S301 - shows that the pickle is dangerous
    assert (tmp_path / "ran").exists()


def test_a_harmless_class_is_refused_too(tmp_path: Path) -> None:
    """Even a harmless class is refused, because no class is looked up at all."""
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps([Fraction(1, 2)]))
    with pytest.raises(ProfileError, match=r"has a reference to fractions\.Fraction"):
        read_snapshot(tmp_path / "snapshot.pickle")


STUMPS = [
    b"",
    b"no pickle",
    b"\x80\x05",
    pickle.dumps(recorded())[:-40],
    b"\x80\x04\x95" + 8 * b"\xff" + b".",
]


@pytest.mark.parametrize("content", STUMPS)
def test_what_is_no_pickle_is_named(tmp_path: Path, content: bytes) -> None:
    """A file that is no complete pickle is refused.

    The files are empty, a text, two truncated pickles, and a pickle that claims to be endless.
    """
    (tmp_path / "snapshot.pickle").write_bytes(content)
    with pytest.raises(ProfileError, match=r"snapshot\.pickle: is not a pickle"):
        read_snapshot(tmp_path / "snapshot.pickle")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    """The error for a missing file or a folder says what is wrong."""
    for path, said in (
        (tmp_path / "nothing", "No such file"),
        (tmp_path, "a folder, a pipe or a device"),
    ):
        with pytest.raises(ProfileError, match=said):
            read_snapshot(path)


ONE = {"address": 1, "total_size": 1, "stream": 0, "blocks": []}
WRONG: dict[str, tuple[Any, str]] = {
    "a number": (3, "is not a memory snapshot of torch"),
    "no segments": ({"segments": 3}, "is not a memory snapshot of torch"),
    "a segment": ({"segments": [3]}, r"segments\[0\] is 3: it must be a dictionary"),
    "a size": (
        {"segments": [ONE | {"total_size": "x"}]},
        r"segments\[0\]\.total_size is 'x': it must be a whole number of at most 64 bits",
    ),
    "no size": (
        {"segments": [ONE | {"blocks": [{}]}]},
        r"segments\[0\]\.blocks\[0\]\.size is missing",
    ),
    "a truth": (
        {"segments": [{"address": True, "total_size": 1}]},
        r"segments\[0\]\.address is True",
    ),
    "a negative one": (
        {"segments": [{"address": -1, "total_size": 1}]},
        r"segments\[0\]\.address is -1",
    ),
    "more than an address has": (
        {"segments": [ONE | {"total_size": 10**5000}]},
        r"segments\[0\]\.total_size is a number of 16610 bits: it must be a whole number of at most 64 bits",
    ),
    "a sum of more": (
        {
            "segments": [
                ONE | {"total_size": 2**64 - 1, "blocks": [{"size": 1, "state": "inactive"}]}
            ]
        },
        "add up to more than 64 bits",
    ),
    "a device below 0": (
        {"segments": [ONE | {"device": -1}], "device_traces": [[]]},
        r"segments\[0\]\.device is -1",
    ),
    "no blocks": (
        {"segments": [{"address": 1, "total_size": 1}]},
        r"segments\[0\]\.blocks is None: it must be a list",
    ),
    "no state": (
        {"segments": [ONE | {"blocks": [{"size": 1}]}]},
        r"segments\[0\]\.blocks\[0\]\.state is None: it must be a string",
    ),
    "a file's name": (
        {
            "segments": [],
            "device_traces": [
                [{"action": "oom", "frames": [{"filename": 5, "name": "f", "line": 1}]}]
            ],
        },
        r"frames\[0\] has 5 and 'f': they must be the names of a file and a function",
    ),
    "a frame without a line": (
        {
            "segments": [],
            "device_traces": [[{"action": "oom", "frames": [{"filename": "a.py", "name": "f"}]}]],
        },
        r"frames\[0\]\.line is missing",
    ),
    "an action": (
        {"segments": [], "device_traces": [[{"action": 1}]]},
        r"device_traces\[0\]\[0\]\.action is 1: it must be a string",
    ),
    "frames": (
        {"segments": [], "device_traces": [[{"action": "oom", "frames": [1]}]]},
        r"\[0\]\.frames\[0\] is 1: it must be a dictionary",
    ),
}


@pytest.mark.parametrize(("content", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_named_with_its_place(content: Any, said: str) -> None:
    """The error contains the position in the snapshot and the accepted values."""
    with pytest.raises(ProfileError, match=said):
        snapshot_of(content)


def test_a_pickle_that_names_one_list_again_and_again_does_not_take_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle with too many parts, or with one object in several places, is refused.

    Otherwise a few bytes could contain a billion blocks.
    """
    monkeypatch.setattr("lflops.memory.snapshots.read.MOST_PARTS", 1_000)
    blocks = [{"size": 1, "state": "inactive"} for _ in range(2000)]
    segment = {"address": 1, "total_size": 1, "blocks": blocks}
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment]}))
    with pytest.raises(ProfileError, match="has more than 1,000 segments"):
        read_snapshot(path)
    segment["blocks"] = blocks[:1] * 2
    path.write_bytes(pickle.dumps({"segments": [segment]}))
    with pytest.raises(ProfileError, match=r"segments\[0\].blocks\[1\] is in the snapshot twice"):
        read_snapshot(path)
    traces = [[{"action": "alloc", "frames": []}] * 2]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": traces}))
    with pytest.raises(ProfileError, match=r"\[1\] is in the snapshot twice"):
        read_snapshot(path)


def test_older_snapshots_are_read() -> None:
    """An older snapshot is a list of segments, whose blocks have a history and no addresses."""
    block = {
        "size": 512,
        "state": "active_allocated",
        "history": [{"addr": 100, "real_size": 500, "frames": []}],
    }
    found = snapshot_of(
        [
            {
                "address": 100,
                "total_size": 1024,
                "stream": 0,
                "blocks": [block, {"size": 512, "state": "inactive"}],
            }
        ]
    )
    assert (
        Block(100, 512, 500, "active_allocated", ()),
        Block(612, 512, 512, "inactive", ()),
    ) == found.segments[0].blocks


def test_the_device_that_ran_out_is_taken() -> None:
    """The device that ran out of memory is read by default, or else the fullest device.

    `device=` selects another device.
    """
    segments = [
        {"device": device, "address": 1, "total_size": size, "blocks": []}
        for device, size in ((0, 5), (1, 9), (2, 3))
    ]
    assert 1 == snapshot_of({"segments": segments}).device
    failed = {"segments": segments, "device_traces": [[], [], [{"action": "oom", "size": 7}]]}
    assert 2 == snapshot_of(failed).device
    assert 3 == snapshot_of(failed).segments[0].size
    assert 5 == snapshot_of(failed, device=0).segments[0].size
