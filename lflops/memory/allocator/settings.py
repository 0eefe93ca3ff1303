"""The settings of torch's caching allocator, and the text of `PYTORCH_ALLOC_CONF` that they are given in."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from lflops.errors import CountError

MIB = 2**20
LEAST_SPLIT_MIB = 20
INTERVALS = (
    # powers of two from 1 MiB to 64 GiB, each of which may have its own number of divisions
    16
)

IGNORED = {
    *(
        "backend",
        "use_async_allocator",
        "graph_capture_record_stream_reuse",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    ),
    *(
        f"pinned_{name}"
        for name in ("num_register_threads", "use_background_threads", "reserve_segment_size_mb")
    ),
    *("pinned_use_cuda_host_register", "pinned_use_hip_host_register"),
}
"""Settings that do not change what is reserved on the device."""


class AllocatorSettings(Struct, frozen=True, kw_only=True):
    """How the allocator rounds, splits and releases."""

    expandable_segments: bool = (
        # whether segments grow page by page, in place of one `cudaMalloc` each
        False
    )
    max_split_size: int | None = (
        # blocks of so many bytes or more are never split; `None` is no limit
        None
    )
    max_non_split_rounding: int = (
        LEAST_SPLIT_MIB * MIB
        # how much larger than asked for such a block may be, bytes.
    )
    # For each power of two from 1 MiB on, into how many parts it is divided when a request is
    # rounded up; 0 and 1 round up to multiples of 512 bytes.
    divisions: tuple[int, ...] = (0,) * INTERVALS
    # Share of the allowed memory above which old free segments are released before a new one is
    # reserved; it works only with a memory fraction, as in torch.
    garbage_collection_threshold: float = 0.0
    memory_fraction: float | None = (
        # share of the device's memory that the process may take; `None` is all
        None
    )


DEFAULT = AllocatorSettings()


def settings_of(text: str) -> AllocatorSettings:
    """The settings in a text such as `expandable_segments:True,roundup_power2_divisions:4`.

    A `CountError` where torch takes none such.
    """
    if not isinstance(text, str):
        raise CountError(
            f"allocator={text!r}: give the text of PYTORCH_ALLOC_CONF, as expandable_segments:True"
        )
    given: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in re.split(r",(?![^\[]*\])", text))):
        name, separator, value = (each.strip() for each in part.partition(":"))
        if not separator or not value:
            raise CountError(
                f"allocator={text!r}: {part!r} has no value: give name:value, as expandable_segments:True"
            )
        given[name] = value
    unknown = given.keys() - _READERS.keys() - IGNORED
    if unknown:
        raise CountError(
            f"allocator={text!r}: {min(unknown)!r} is unknown: give some of {', '.join(sorted(_READERS))}"
        )
    values = {
        _READERS[name][0]: _READERS[name][1](text, name, value)
        for name, value in given.items()
        if name in _READERS
    }
    return AllocatorSettings(**values)


def _refused(text: str, name: str, value: str, taken: str) -> CountError:
    return CountError(f"allocator={text!r}: {name}={value}: give {taken}")


def _truth(text: str, name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _refused(text, name, value, "True or False")
    return value == "True"


def _share(text: str, name: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 < share < 1 and not (name == "per_process_memory_fraction" and share == 1):
        raise _refused(text, name, value, "a share between 0 and 1")
    return share


def _mebibytes(text: str, name: str, value: str) -> int:
    if (
        not value.isdecimal()
        or int(value) < LEAST_SPLIT_MIB
        or (name == "max_split_size_mb" and int(value) == LEAST_SPLIT_MIB)
    ):
        raise _refused(text, name, value, f"a whole number of MiB above {LEAST_SPLIT_MIB}")
    return int(value) * MIB


def _divisions(text: str, name: str, value: str) -> tuple[int, ...]:
    """One number for all sizes, or a list such as `[256:1,512:2,>:4]` by sizes in MiB."""
    if not value.startswith("["):
        return (_power(text, name, value, value),) * INTERVALS
    divisions = [0] * INTERVALS
    last = -1
    for pair in value.strip("[]").split(","):
        size, _, number = (each.strip() for each in pair.partition(":"))
        parts = _power(text, name, value, number)
        if size == ">":
            divisions[last + 1 :] = [parts] * (INTERVALS - (last + 1))
            continue
        at = min(_power(text, name, value, size).bit_length() - 1, INTERVALS - 1)
        if last < 0:
            divisions[:at] = [parts] * at
        divisions[at] = parts
        last = at
    return tuple(divisions)


def _power(text: str, name: str, value: str, number: str) -> int:
    if not number.isdecimal() or int(number) < 1 or int(number) & (int(number) - 1):
        raise _refused(text, name, value, "powers of two, as 4 or [256:1,512:2,>:4]")
    return int(number)


_READERS: Mapping[str, tuple[str, Callable[[str, str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _truth),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "roundup_power2_divisions": ("divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "per_process_memory_fraction": ("memory_fraction", _share),
}
"""From torch's name of a setting to ours, and to what reads its value."""
