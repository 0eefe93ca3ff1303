"""Parse the settings of torch's caching allocator from the text of `PYTORCH_ALLOC_CONF`."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from lflops.errors import CountError

MIB = 2**20

LEAST_SPLIT_MIB = 20
"""Limit in MiB for the values of two settings.

`max_split_size_mb` must be more than this limit. `max_non_split_rounding_mb` must be at least this
limit.
"""

INTERVALS = 16
"""Number of ranges of sizes for which `roundup_power2_divisions` can set different roundings.

Each range extends from one power of two to the next, starting at 1 MiB. Smaller sizes belong to the
first range, and the last range has no end.
"""

IGNORED = {
    "backend",
    "use_async_allocator",
    "graph_capture_record_stream_reuse",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
}
"""Settings that do not change the memory that is reserved on the device."""


class AllocatorSettings(Struct, frozen=True, kw_only=True):
    """Settings of the allocator: how it rounds, splits and releases blocks.

    The allocator reserves segments of device memory, and splits them into blocks for requests.

    Attributes:
        expandable_segments: Whether segments grow page by page. Otherwise, one `cudaMalloc`
            allocates a whole segment.
        max_split_size: Blocks of at least this many bytes are never split. `None` for no limit.
        max_non_split_rounding: If a free block is too large to be split, a smaller request gets it
            only if fewer bytes than this number stay unused.
        divisions: For each of the `INTERVALS` ranges of sizes, the number of equal parts into which
            the range is divided. Requests are rounded up to the end of a part. With 0 or 1 parts,
            they are rounded up to multiples of 512 bytes.
        garbage_collection_threshold: If more than this share of the allowed memory is reserved, old
            free segments are released before another segment is reserved. As in torch, the
            threshold has no effect if `memory_fraction` is `None`.
        memory_fraction: Share of the device's memory that the process may use; `None` for all.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LEAST_SPLIT_MIB * MIB
    divisions: tuple[int, ...] = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    memory_fraction: float | None = None


DEFAULT = AllocatorSettings()


def settings_of(text: str) -> AllocatorSettings:
    """Parse a text such as `expandable_segments:True,roundup_power2_divisions:4`.

    Raises:
        CountError: torch does not accept the text.
    """
    if not isinstance(text, str):
        raise CountError(
            f"allocator={text!r}: pass a string in the syntax of PYTORCH_ALLOC_CONF, such as "
            "expandable_segments:True"
        )
    given: dict[str, str] = {}
    # Commas inside brackets separate divisions.
    for part in re.split(r",(?![^\[]*\])", text):
        if not part.strip():
            continue
        name, _, value = part.partition(":")
        if not value.strip():
            raise CountError(
                f"allocator={text!r}: {part.strip()!r} has no value: "
                "pass name:value, such as expandable_segments:True"
            )
        given[name.strip()] = value.strip()
    unknown = given.keys() - _READERS.keys() - IGNORED
    if unknown:
        known = ", ".join(sorted(_READERS))
        raise CountError(
            f"allocator={text!r}: the setting {min(unknown)!r} is unknown: use one of {known}"
        )
    values = {}
    for name, value in given.items():
        if name in _READERS:
            field, read = _READERS[name]
            values[field] = read(text, name, value)
    return AllocatorSettings(**values)


def _refused(text: str, name: str, value: str, accepted: str) -> CountError:
    return CountError(f"allocator={text!r}: {name}={value}: pass {accepted}")


def _truth(text: str, name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _refused(text, name, value, "True or False")
    return value == "True"


def _share(text: str, name: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    may_be_all = name == "per_process_memory_fraction"
    if not 0 < share < 1 and not (may_be_all and share == 1):
        raise _refused(text, name, value, "a number between 0 and 1")
    return share


def _mebibytes(text: str, name: str, value: str) -> int:
    least = LEAST_SPLIT_MIB + 1 if name == "max_split_size_mb" else LEAST_SPLIT_MIB
    if not value.isdecimal() or int(value) < least:
        raise _refused(text, name, value, f"a whole number of MiB, at least {least}")
    return int(value) * MIB


def _divisions(text: str, name: str, value: str) -> tuple[int, ...]:
    """Parse the number of divisions for all sizes, or a list such as `[256:1,512:2,>:4]`.

    In the list, each size in MiB is followed by the number of divisions for this size. `>` stands
    for all larger sizes.
    """
    if not value.startswith("["):
        return (_power(text, name, value, value),) * INTERVALS
    divisions = [0] * INTERVALS
    last = -1
    for pair in value.strip("[]").split(","):
        size, _, number = pair.partition(":")
        size = size.strip()
        parts = _power(text, name, value, number.strip())
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
        raise _refused(text, name, value, "powers of two, such as 4 or [256:1,512:2,>:4]")
    return int(number)


_READERS: Mapping[str, tuple[str, Callable[[str, str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _truth),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "roundup_power2_divisions": ("divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "per_process_memory_fraction": ("memory_fraction", _share),
}
"""For each setting of torch, the field of `AllocatorSettings` and the parser of the value."""
