"""Read a snapshot file of torch's CUDA allocator: segments, their blocks, and the trace of events.

The file is a pickle. It is read without running code from it.
"""

import io
import pickle
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lflops.errors import ProfileError
from lflops.files import read
from lflops.memory.snapshots.opcodes import check

LARGEST_FILE = 8 * 2**30

_DAMAGED = (
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""The errors that pickle raises for a damaged file, or for a file that is not a pickle."""


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that refuses to look up classes, functions and objects outside the file."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"has a reference to {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(
            f"has a reference to an object outside the file, {str(pid)[:60]!r}"
        )


def load_plain(path: str | PathLike[str]) -> tuple[Any, int]:
    """Read a pickle of containers, strings and numbers, and return its value and the file's size.

    Raises `ProfileError` if the file cannot be read, or contains anything else.
    """
    path = Path(path)
    try:
        content = read(path, LARGEST_FILE)
    except OSError as error:
        raise ProfileError(
            f"{path}: {error.strerror or error}: pass a file that torch.cuda.memory._dump_snapshot "
            "wrote"
        ) from error
    try:
        check(content)
        return _PlainUnpickler(io.BytesIO(content)).load(), len(content)
    except pickle.UnpicklingError as error:
        if str(error).startswith("has "):
            raise ProfileError(
                f"{path}: {error}: "
                "lflops reads only plain containers, strings and numbers, because a pickle can run "
                "code"
            ) from None
        raise ProfileError(f"{path}: is not a pickle file: {error}") from None
    except _DAMAGED as error:
        raise ProfileError(
            f"{path}: is not a pickle file, or is damaged: {type(error).__name__}"
        ) from None


_NODE = re.compile(r"torch::autograd::(?:\w+::)*(\w+)::apply\(")
_ENGINE = "torch::autograd::Engine::"
# Folders of lflops with code that runs in a counting step. Frames of this code are removed from
# stacks, because it is not part of the training run. Older snapshots have the folder `collect`.
OBSERVER = re.compile(
    r"lflops/(attribution|collect|flop_counter|inputs|model|timing|torch_private|trace)/"
)
# The file name of the frame that replaces the C++ frames of the autograd engine.
AUTOGRAD = "autograd"

# Upper limit of all numbers in a snapshot. Addresses and sizes have at most 64 bits.
LARGEST_NUMBER = 2**64
# Maximum number of segments, blocks, events and frames of a file. Their number must not be larger
# than the size of the file in bytes either, because a small pickle can refer to one list a billion
# times.
MOST_PARTS = 50_000_000


class Frame(NamedTuple):
    """A line of Python, or the name of a C++ function in a stack without Python."""

    file: str
    line: int
    function: str

    @property
    def is_python(self) -> bool:
        """Return whether the frame is Python code, not C++."""
        if self.file.endswith(".py") or self.file.startswith("<"):
            return True
        # Cells of a notebook have names without a suffix. Headers of the C++ library also have no
        # suffix, but their frames have no line.
        name = self.file.rpartition("/")[2]
        return "." not in name and name not in {"", "??"} and self.line > 0


Stack = tuple[Frame, ...]


class Block(NamedTuple):
    """A part of a segment, which is memory that the allocator reserved.

    Attributes:
        address: Address of the first byte.
        size: Size in bytes.
        requested: The bytes that were requested.
        state: `active_allocated`, `active_awaiting_free` or `inactive`.
        stack: The code that allocated the block, the innermost line first; empty if unknown.
    """

    address: int
    size: int
    requested: int
    state: str
    stack: Stack


class Segment(NamedTuple):
    """Memory that the allocator reserved on the device."""

    size: int
    blocks: tuple[Block, ...]


class Entry(NamedTuple):
    """An event in the allocator's trace.

    Attributes:
        action: `alloc`, `free_requested`, `free_completed`, `segment_alloc`, `segment_free`, `oom`
            or another of torch's actions.
        address: Address of the first byte.
        size: Size in bytes.
        stack: The code that caused the event.
        device_free: For an `oom`, the bytes that the device had left; otherwise `None`.
    """

    action: str
    address: int
    size: int
    stack: Stack
    device_free: int | None


class Snapshot(NamedTuple):
    """The memory of one device: its segments now, and the trace of earlier events."""

    device: int
    segments: tuple[Segment, ...]
    trace: tuple[Entry, ...]
    settings: str


def read_snapshot(path: str | PathLike[str], device: int | None = None) -> Snapshot:
    """Read a file of `torch.cuda.memory._dump_snapshot`.

    Without `device`, the result is for the device that ran out of memory or, if no device did, for
    the device with the most reserved memory. Raises `ProfileError` if the file is not a snapshot.
    """
    content, size = load_plain(path)
    try:
        return snapshot_of(content, device, most_parts=min(size, MOST_PARTS))
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def snapshot_of(
    content: Any, device: int | None = None, *, most_parts: int = MOST_PARTS
) -> Snapshot:
    """Read a snapshot from the nested dicts and lists that torch returns.

    `most_parts` is the maximum number of dicts (segments, blocks, events and frames). Raises
    `ProfileError` for a wrong value. The message contains the position of the value, such as
    `segments[0].blocks[3].size`.
    """
    reader = _Reader(most_parts)
    # Older versions of torch wrote only the segments.
    if isinstance(content, list):
        content = {"segments": content}
    if not isinstance(content, Mapping) or not isinstance(content.get("segments"), list):
        raise ProfileError("is not a memory snapshot of torch: it has no list of segments")
    traces = reader.listed(content.get("device_traces", []), "device_traces")
    rows = []
    devices = []
    for place, each in enumerate(content["segments"]):
        row = reader.mapping(each, f"segments[{place}]")
        rows.append(row)
        devices.append(_number(row, "device", f"segments[{place}]", 0))
    if device is None:
        device = _fullest(rows, devices, traces)
    segments = []
    for place, row in enumerate(rows):
        if devices[place] == device:
            segments.append(reader.segment(row, f"segments[{place}]"))
    trace: tuple[Entry, ...] = ()
    if device < len(traces):
        trace = tuple(reader.entries(traces[device], f"device_traces[{device}]"))
    found = Snapshot(
        device=device,
        segments=tuple(segments),
        trace=trace,
        settings=_settings_text(content.get("allocator_settings")),
    )
    total = sum(entry.size for entry in trace)
    for segment in found.segments:
        total += segment.size
        total += sum(block.size + block.requested for block in segment.blocks)
    if total >= LARGEST_NUMBER:
        raise ProfileError(
            f"the sizes of device {device} add up to more than 64 bits: the file is damaged"
        )
    return found


def _settings_text(settings: Any) -> str:
    """Return the text of the allocator's settings, or an empty string if there is none."""
    if not isinstance(settings, Mapping):
        return ""
    text = settings.get("PYTORCH_ALLOC_CONF", settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if not isinstance(text, str):
        return ""
    return text


def _fullest(
    segments: Iterable[Mapping[str, Any]], devices: Iterable[int], traces: list[Any]
) -> int:
    """Return the device that ran out of memory, or the device with the most reserved bytes."""
    for device, trace in enumerate(traces):
        if isinstance(trace, list) and any(map(_is_failure, trace)):
            return device
    reserved: dict[int, int] = {}
    for device, segment in zip(devices, segments, strict=True):
        size = segment.get("total_size", 0)
        if type(size) is int:
            reserved[device] = reserved.get(device, 0) + size
    return max(reserved, key=reserved.__getitem__, default=0)


def _is_failure(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get("action") == "oom"


class _Reader:
    """Converts the dicts of a snapshot to named tuples, and checks every value.

    It also limits the number of dicts, because a small pickle can refer to the same list many
    times.
    """

    def __init__(self, most_parts: int) -> None:
        self._most_parts = most_parts
        self._parts = 0
        # The ids of the dictionaries of blocks and events that have been read. A small pickle can
        # refer to one of them a million times, but torch writes each of them once.
        self._read: set[int] = set()
        # Stacks, keyed by the id of their list of frames. torch's pickles share these lists.
        self._stacks: dict[int, tuple[Any, Stack]] = {}

    def mapping(self, value: Any, place: str) -> Mapping[str, Any]:
        self._parts += 1
        if self._parts > self._most_parts:
            raise ProfileError(
                f"{place}: the snapshot has more than {self._most_parts:,} segments, blocks, "
                "events and frames: record fewer steps"
            )
        if not isinstance(value, Mapping):
            raise ProfileError(f"{place} is {_described(value)}: it must be a dictionary")
        return value

    def once(self, value: Any, place: str) -> Mapping[str, Any]:
        """Return the dictionary `value`, and check that it has not been read before.

        This check is for blocks and events. A snapshot that contains the same block or event twice
        is refused, because a small pickle could then contain any number of them.

        Args:
            value: The dictionary.
            place: Position of the dictionary in the snapshot, for the error message.
        """
        mapping = self.mapping(value, place)
        if id(mapping) in self._read:
            raise ProfileError(f"{place} is in the snapshot twice, so this file is not from torch")
        self._read.add(id(mapping))
        return mapping

    def listed(self, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise ProfileError(f"{place} is {_described(value)}: it must be a list")
        return list(value)

    def segment(self, value: Mapping[str, Any], place: str) -> Segment:
        blocks: list[Block] = []
        at = _number(value, "address", place)
        for index, each in enumerate(self.listed(value.get("blocks"), f"{place}.blocks")):
            block_place = f"{place}.blocks[{index}]"
            block = self.block(self.once(each, block_place), at, block_place)
            blocks.append(block)
            at = block.address + block.size
        return Segment(_number(value, "total_size", place), tuple(blocks))

    def block(self, value: Mapping[str, Any], at: int, place: str) -> Block:
        """Read a block of a segment.

        Blocks in older snapshots have no address. Their address is `at`, the end of the previous
        block.
        """
        size = _number(value, "size", place)
        state = value.get("state")
        if not isinstance(state, str):
            raise ProfileError(f"{place}.state is {_described(state)}: it must be a string")
        history = value.get("history")
        latest: Mapping[str, Any] = {}
        if isinstance(history, list) and history and isinstance(history[0], Mapping):
            latest = history[0]
        real_size = _number(latest, "real_size", place, size)
        frames = value.get("frames", latest.get("frames", ()))
        return Block(
            address=_number(value, "address", place, at),
            size=size,
            requested=_number(value, "requested_size", place, real_size),
            state=state,
            stack=self.stack(frames, f"{place}.frames"),
        )

    def entries(self, trace: Any, place: str) -> Iterable[Entry]:
        for index, each in enumerate(self.listed(trace, place)):
            at = f"{place}[{index}]"
            entry = self.once(each, at)
            action = entry.get("action")
            if not isinstance(action, str):
                raise ProfileError(f"{at}.action is {_described(action)}: it must be a string")
            yield Entry(
                action,
                _number(entry, "addr", at, 0),
                _number(entry, "size", at, 0),
                self.stack(entry.get("frames", ()), f"{at}.frames"),
                _number(entry, "device_free", at) if "device_free" in entry else None,
            )

    def stack(self, frames: Any, place: str) -> Stack:
        known = self._stacks.get(id(frames))
        if known is not None and known[0] is frames:
            return known[1]
        lines = []
        for index, each in enumerate(self.listed(frames, place)):
            at = f"{place}[{index}]"
            frame = self.mapping(each, at)
            file = frame.get("filename")
            function = frame.get("name")
            if not isinstance(file, str) or not isinstance(function, str):
                raise ProfileError(
                    f"{at} has {_described(file)} and {_described(function)}: "
                    "they must be the names of a file and a function"
                )
            lines.append(Frame(file.replace("\\", "/"), _number(frame, "line", at), function))
        stack = _without_cpp(lines)
        self._stacks[id(frames)] = (frames, stack)
        return stack


def _without_cpp(frames: list[Frame]) -> Stack:
    """Return the Python frames of a stack, without its C++ frames.

    If the stack is in backward, a frame with the name of the running autograd node is added at the
    end. If no frame is left, return only the innermost C++ frame.
    """
    known: list[Frame] = []
    node = ""
    is_backward = False
    for frame in frames:
        if frame.is_python and "::" not in frame.function and not OBSERVER.search(frame.file):
            known.append(frame)
        is_backward = is_backward or _ENGINE in frame.function
        found = _NODE.search(frame.function)
        if found and not node:
            node = found[1]
    if is_backward:
        known.append(Frame(AUTOGRAD, 0, node or "backward"))
    return tuple(known or frames[:1])


def _number(value: Mapping[str, Any], name: str, place: str, missing: int | None = None) -> int:
    number = value.get(name, missing)
    if type(number) is not int or not 0 <= number < LARGEST_NUMBER:
        problem = "is missing" if number is None else f"is {_described(number)}"
        raise ProfileError(
            f"{place}.{name} {problem}: it must be a whole number of at most 64 bits"
        )
    return number


def _described(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str | int | float | bool | None):
        return f"{value!r:.60}"
    return f"a {type(value).__name__}"
