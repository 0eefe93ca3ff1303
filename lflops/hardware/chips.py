"""What chips can do: peaks by dtype, bandwidth and memory, looked up by the name that a driver reports.

A name is found whole or not at all: an unknown chip is `None`, never its nearest relative, because a wrong peak looks like a right one.
"""

import datetime as dt
import difflib
import functools
import importlib.resources
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from lflops.errors import HardwareError

__all__ = ["DTYPES", "Hardware", "chips", "hint", "lookup", "named", "names", "unknown"]

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
"""What a peak can be of."""

# Words that only some drivers and people write.
_VENDORS = {"nvidia", "tesla", "geforce", "amd", "instinct"}


@dataclass(frozen=True)
class Hardware:
    """What one device can do. Give your own where the table does not know a chip, or knows it wrong.

    Attributes:
        name: A name of your choice.
        peak_flops_per_second: FLOP/s without sparsity by dtype, the names of `DTYPES`; of int8, OP/s.
        bandwidth_bytes_per_second: Of the device's memory, bytes/s; `None` is unknown.
        memory_bytes: Bytes; `None` is unknown.
        source: Where the figures are from.
        cache_bytes: Of its last level of cache, bytes; `None` is unknown.
        usable_bytes: What a process sees as the device's memory, which is less than is sold, bytes; `None` is unknown.
        link_bytes_per_second: Of the link to the other devices of a host, as NVLink, in one direction, bytes/s; `None` is unknown.
    """

    name: str
    peak_flops_per_second: Mapping[str, float]
    bandwidth_bytes_per_second: float | None = None
    memory_bytes: float | None = None
    source: str = ""
    cache_bytes: float | None = None
    usable_bytes: float | None = None
    link_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        """See that the figures can be.

        Raises:
            HardwareError: One cannot; the message names the argument, its value and what is taken.
        """
        _check_text("name", self.name)
        _check_text("source", self.source, empty=True)
        for argument in ("bandwidth_bytes_per_second", "memory_bytes", "cache_bytes", "usable_bytes", "link_bytes_per_second"):
            if getattr(self, argument) is not None:
                _check_positive(argument, getattr(self, argument))
        # A copy: what the caller does to theirs later is not done to ours.
        object.__setattr__(self, "peak_flops_per_second", _checked_peaks(self.peak_flops_per_second))


def lookup(name: str) -> Hardware | None:
    """The table's row of a chip.

    Args:
        name: As `torch.cuda.get_device_name()` or `names()` gives it. Letter case and the order of the words do not matter, nor do the
            words NVIDIA, Tesla, GeForce, AMD and Instinct. Every other word does: a laptop's chip, or a MIG slice, is not the desktop
            chip of the same name.

    Returns:
        `None` for a chip that the table does not have.
    """
    return _index().get(_words(name))


def named(name: str) -> Hardware:
    """The table's row of a chip that has to be there.

    Raises:
        HardwareError: It is not.
    """
    found = lookup(name)
    if found is None:
        raise HardwareError(f"hardware={name!r}: {hint(name)}")
    return found


def names() -> tuple[str, ...]:
    """The chips of the table, as lflops calls them."""
    return tuple(chip.name for of_vendor in chips().values() for chip in of_vendor)


def chips() -> Mapping[str, tuple[Hardware, ...]]:
    """The table's chips by vendor."""
    return {vendor: tuple(row.hardware() for row in rows) for vendor, rows in _table().items()}


def hint(name: str) -> str:
    """What to do in Python about a chip that the table does not have, in one sentence."""
    return (
        f"{unknown(name)}: give one of lflops.hardware.names(), or figures of your own as lflops.Hardware(name=..., "
        "peak_flops_per_second={'bf16': ...}, bandwidth_bytes_per_second=...), or measure this machine's with lflops.calibrate()"
    )


def unknown(name: str) -> str:
    """That the table does not have a chip, and which ones are near."""
    near = ", ".join(_nearest(name))
    known = f"is not in the table of chips (nearest: {near})" if near else "is not in the table of chips"
    why = ", a MIG slice being only a part of its chip" if "mig" in _words(name) else ""
    return f"{name!r} {known}{why}"


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chip in `chips.toml`, which says what the fields mean."""

    name: str
    names: tuple[str, ...]
    peaks: Mapping[str, float]
    source: str
    date: dt.date
    bandwidth: float | None = None
    memory_gib: int | None = None
    usable_gib: float | None = None
    link: float | None = None

    def hardware(self) -> Hardware:
        memory = None if self.memory_gib is None else self.memory_gib * 2**30
        usable = None if self.usable_gib is None else self.usable_gib * 2**30
        source = f"{self.source} ({self.date})"
        return Hardware(self.name, self.peaks, self.bandwidth, memory, source, usable_bytes=usable, link_bytes_per_second=self.link)


@functools.cache
def _table() -> dict[str, tuple[_Row, ...]]:
    text = importlib.resources.files("lflops.hardware").joinpath("chips.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, tuple[_Row, ...]])


@functools.cache
def _index() -> dict[frozenset[str], Hardware]:
    return {_words(name): row.hardware() for rows in _table().values() for row in rows for name in (row.name, *row.names)}


def _words(name: str) -> frozenset[str]:
    return frozenset(_split(name)) - _VENDORS


def _split(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _nearest(name: str) -> list[str]:
    """Up to four chips that share the most words with a number in them; else those whose names are spelled much like it."""
    asked = {word for word in _words(name) if any(letter.isdigit() for letter in word)}
    shared: dict[str, int] = {}
    for words, chip in _index().items():
        shared[chip.name] = max(len(asked & words), shared.get(chip.name, 0))
    most = max(shared.values())
    if most:
        return [chip for chip, count in shared.items() if count == most][:4]
    spelled = {_joined(chip): chip for chip in names()}
    return [spelled[each] for each in difflib.get_close_matches(_joined(name), spelled, 4)]


def _joined(name: str) -> str:
    return "".join(word for word in _split(name) if word not in _VENDORS)


def _checked_peaks(peaks: object) -> dict[str, float]:
    if not isinstance(peaks, Mapping) or not peaks:
        raise HardwareError(f"peak_flops_per_second={peaks!r}: give FLOP/s by dtype, as {{'bf16': 312e12}}")
    for dtype, peak in peaks.items():
        if dtype not in DTYPES:
            raise HardwareError(f"peak_flops_per_second has {dtype!r}: give some of {', '.join(DTYPES)}")
        _check_positive(f"peak_flops_per_second[{dtype!r}]", peak)
    return dict(peaks)


def _check_positive(argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise HardwareError(f"{argument}={value!r}: give a positive, finite number")


def _check_text(argument: str, value: object, *, empty: bool = False) -> None:
    if not isinstance(value, str) or not (empty or value.strip()):
        raise HardwareError(f"{argument}={value!r}: give a text")
