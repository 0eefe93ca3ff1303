"""A snapshot's file as values: segments, their blocks, and the trace of what the allocator did.

The pickle runs no code.
"""

import io
import pickle
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lflops.errors import ProfileError
from lflops.profile.series import summed

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
"""What pickle raises of a file that is none, or damaged."""


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that looks nothing up: no class, no function, no object from elsewhere."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"has {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"has an object that is stored elsewhere, {str(pid)[:60]!r}")


def load_plain(path: str | PathLike[str]) -> Any:
    """Read a pickle.

    A `ProfileError` if it cannot be read, or has anything but containers, texts and numbers.
    """
    path = Path(path)
    try:
        if not path.is_file():
            path.stat()
            raise ProfileError(
                f"{path}: is a folder, a pipe or a device; give a file of torch.cuda.memory._dump_snapshot"
            )
        if path.stat().st_size > LARGEST_FILE:
            raise ProfileError(
                f"{path}: has {path.stat().st_size} bytes; {LARGEST_FILE} at most are read"
            )
        content = path.read_bytes()
    except OSError as error:
        raise ProfileError(
            f"{path}: {error.strerror or error}; give a file of torch.cuda.memory._dump_snapshot"
        ) from error
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        if str(error).startswith("has "):
            plain = (
                "only plain containers, texts and numbers are read, because a pickle can run code"
            )
            raise ProfileError(f"{path}: {error}: {plain}") from None
        raise ProfileError(f"{path}: is no pickle: {error}") from None
    except _DAMAGED as error:
        raise ProfileError(
            f"{path}: is no pickle, or a damaged one: {type(error).__name__}"
        ) from None


_NODE = re.compile(r"torch::autograd::(?:\w+::)*(\w+)::apply\(")
_ENGINE = "torch::autograd::Engine::"
# in the names of files whose frames are in a counted step's stacks, and say nothing of the training
OBSERVER = "lflops/collect/"
# the file of the frame that stands for C++'s engine of backward
AUTOGRAD = "autograd"

# an address has 64 bits, and no number of bytes needs as many
LARGEST_NUMBER = 2**64
# blocks, entries and frames of one file: a small pickle can name one list a billion times
MOST_PARTS = 50_000_000


class Frame(NamedTuple):
    """A line of Python, or in a stack without any what is known of its C++: the function alone."""

    file: str
    line: int
    function: str

    @property
    def is_python(self) -> bool:
        """Whether it is Python's.

        A notebook's cells have names without a suffix, but so have headers of C++'s library.
        """
        name = self.file.rpartition("/")[2]
        return (
            self.file.endswith(".py")
            or self.file.startswith("<")
            or ("." not in name and name not in {"", "??"} and self.line > 0)
        )


Stack = tuple[Frame, ...]


class Block(NamedTuple):
    """A part of a segment."""

    address: int
    size: int
    # bytes that were asked for
    requested: int
    # `active_allocated`, `active_awaiting_free` or `inactive`
    state: str
    # the code that allocated it, the innermost line first; empty where it is unknown
    stack: Stack


class Segment(NamedTuple):
    """Memory that the allocator got from the device."""

    size: int
    blocks: tuple[Block, ...]


class Entry(NamedTuple):
    """Something that the allocator did."""

    # Torch's word: `alloc`, `free_requested`, `free_completed`, `segment_alloc`, `segment_free`,
    # `oom`, …
    action: str
    address: int
    size: int
    stack: Stack
    # of an `oom`, the bytes that the device had left
    device_free: int | None


class Snapshot(NamedTuple):
    """The memory of one device."""

    device: int
    segments: tuple[Segment, ...]
    trace: tuple[Entry, ...]
    settings: str


def read_snapshot(path: str | PathLike[str], device: int | None = None) -> Snapshot:
    """The snapshot in a file that `torch.cuda.memory._dump_snapshot` wrote.

    A `ProfileError` if it is none, or is not plain.
    """
    # Without a device it is that of the one that ran out of memory, else of the one with the most
    # reserved.
    content = load_plain(path)
    try:
        return snapshot_of(content, device)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def snapshot_of(content: Any, device: int | None = None) -> Snapshot:
    """The snapshot in torch's containers.

    A `ProfileError` that names the place where they are none.
    """
    reader = _Reader()
    # older: segments alone
    if isinstance(content, list):
        content = {"segments": content}
    if not isinstance(content, Mapping) or not isinstance(content.get("segments"), list):
        raise ProfileError("is no snapshot of torch's: it has no list of segments")
    traces = reader.listed(content.get("device_traces", []), "device_traces")
    segments = [
        reader.mapping(each, f"segments[{place}]") for place, each in enumerate(content["segments"])
    ]
    devices = [
        _number(each, "device", f"segments[{place}]", 0) for place, each in enumerate(segments)
    ]
    if device is None:
        device = _fullest(segments, devices, traces)
    settings = content.get("allocator_settings")
    given = settings if isinstance(settings, Mapping) else {}
    text = given.get("PYTORCH_ALLOC_CONF", given.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    found = Snapshot(
        device=device,
        segments=tuple(
            reader.segment(each, f"segments[{place}]")
            for place, each in enumerate(segments)
            if devices[place] == device
        ),
        trace=tuple(reader.entries(traces[device], f"device_traces[{device}]"))
        if device < len(traces)
        else (),
        settings=text if isinstance(text, str) else "",
    )
    blocks = (
        block.size + block.requested for segment in found.segments for block in segment.blocks
    )
    if (
        sum(blocks)
        + sum(segment.size for segment in found.segments)
        + sum(entry.size for entry in found.trace)
        >= LARGEST_NUMBER
    ):
        raise ProfileError(
            f"device {device} has sizes that add up to more than 64 bits: the file is damaged"
        )
    return found


def _fullest(
    segments: Iterable[Mapping[str, Any]], devices: Iterable[int], traces: list[Any]
) -> int:
    """The device that ran out of memory, else the one with the most reserved."""
    for device, trace in enumerate(traces):
        if isinstance(trace, list) and any(
            isinstance(each, Mapping) and each.get("action") == "oom" for each in trace
        ):
            return device
    sizes = zip(devices, (each.get("total_size", 0) for each in segments), strict=True)
    reserved: dict[int, int] = summed((device, size) for device, size in sizes if type(size) is int)
    return max(reserved, key=reserved.__getitem__, default=0)


class _Reader:
    """Checks each value, and counts the parts."""

    def __init__(self) -> None:
        self._parts = 0
        # torch's pickles share them
        self._stacks: dict[int, tuple[Any, Stack]] = {}

    def mapping(self, value: Any, place: str) -> Mapping[str, Any]:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise ProfileError(f"{place}: has more than {MOST_PARTS:,} parts")
        if not isinstance(value, Mapping):
            raise ProfileError(f"{place} is {_described(value)}: a dictionary is taken")
        return value

    def listed(self, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise ProfileError(f"{place} is {_described(value)}: a list is taken")
        return list(value)

    def segment(self, value: Mapping[str, Any], place: str) -> Segment:
        blocks, at = [], _number(value, "address", place)
        for index, each in enumerate(self.listed(value.get("blocks"), f"{place}.blocks")):
            block = self.block(
                self.mapping(each, f"{place}.blocks[{index}]"), at, f"{place}.blocks[{index}]"
            )
            blocks.append(block)
            at = block.address + block.size
        return Segment(_number(value, "total_size", place), tuple(blocks))

    def block(self, value: Mapping[str, Any], at: int, place: str) -> Block:
        """One block; older snapshots leave its address to be added up."""
        size, state = _number(value, "size", place), value.get("state")
        if not isinstance(state, str):
            raise ProfileError(f"{place}.state is {_described(state)}: a text is taken")
        history = value.get("history")
        latest = (
            history[0]
            if isinstance(history, list) and history and isinstance(history[0], Mapping)
            else {}
        )
        requested = _number(
            value, "requested_size", place, _number(latest, "real_size", place, size)
        )
        frames = value.get("frames", latest.get("frames", ()))
        return Block(
            _number(value, "address", place, at),
            size,
            requested,
            state,
            self.stack(frames, f"{place}.frames"),
        )

    def entries(self, trace: Any, place: str) -> Iterable[Entry]:
        for index, each in enumerate(self.listed(trace, place)):
            at = f"{place}[{index}]"
            entry = self.mapping(each, at)
            action = entry.get("action")
            if not isinstance(action, str):
                raise ProfileError(f"{at}.action is {_described(action)}: a text is taken")
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
            file, function = frame.get("filename"), frame.get("name")
            if not isinstance(file, str) or not isinstance(function, str):
                raise ProfileError(
                    f"{at} has {_described(file)} and {_described(function)}: a file's and a function's name are taken"
                )
            lines.append(Frame(file.replace("\\", "/"), _number(frame, "line", at), function))
        stack = _without_cpp(lines)
        self._stacks[id(frames)] = (frames, stack)
        return stack


def _without_cpp(frames: list[Frame]) -> Stack:
    """The frames of Python, then the node that backward ran.

    Of C++ alone the innermost frame, which is all that is known.
    """
    known = [
        frame
        for frame in frames
        if frame.is_python and "::" not in frame.function and OBSERVER not in frame.file
    ]
    if any(_ENGINE in frame.function for frame in frames):
        nodes = (found[1] for frame in frames if (found := _NODE.search(frame.function)))
        known.append(Frame(AUTOGRAD, 0, next(nodes, "backward")))
    return tuple(known or frames[:1])


def _number(value: Mapping[str, Any], name: str, place: str, missing: int | None = None) -> int:
    number = value.get(name, missing)
    if type(number) is not int or not 0 <= number < LARGEST_NUMBER:
        what = "is missing" if number is None else f"is {_described(number)}"
        raise ProfileError(f"{place}.{name} {what}: a whole number of 64 bits at most is taken")
    return number


def _described(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
        return f"a number of {value.bit_length()} bits"
    return (
        f"{value!r:.60}"
        if isinstance(value, str | int | float | bool | None)
        else f"a {type(value).__name__}"
    )
