"""What chips can do: peaks by dtype, bandwidth and memory, looked up by the name that a driver reports.

A name is found whole or not at all: an unknown chip is `None`, never its nearest relative, because
a wrong peak looks like a right one. Chips of the user's own file replace those of the shipped table
that have the same name. It is the file in the variable `LFLOPS_CHIPS`, else `lflops/chips.toml` in
the folder of settings (`XDG_CONFIG_HOME`, else `~/.config`). Every error names the file, the chip
and the key.
"""

import datetime as dt
import difflib
import functools
import importlib.resources
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lflops.errors import HardwareError
from lflops.files import write_whole

HOPPER, BLACKWELL = (
    ("H100", "H200", "H800", "H20", "GH200"),
    ("B200", "GB200", "B300", "GB300"),
    # first words of names; of data centers
)
# what a peak can be of
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")

VARIABLE = "LFLOPS_CHIPS"

_NUMBERS = {
    "bandwidth": ("bandwidth_bytes_per_second", 1),
    "memory_gib": ("memory_bytes", 2**30),
    "usable_gib": ("usable_bytes", 2**30),
    "cache_mib": ("cache_bytes", 2**20),
    "link": ("link_bytes_per_second", 1),
}
"""From a key of a file to the field of `Hardware`, and to the bytes of the key's unit."""

_KEYS = ("name", "names", "peaks", "source", "date", *_NUMBERS)


def own_file() -> Path:
    """Where the user's table of chips is, or would be."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    return (
        Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
        / "lflops"
        / "chips.toml"
    )


def _rows_in(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The chips of a file, each after its vendor.

    The comment at the top of `chips.toml` explains the keys.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}: give a TOML file of chips") from error
    except ValueError as error:
        # no TOML, or no UTF-8
        raise HardwareError(f"{path}: is no TOML file: {error}") from error
    rows: list[tuple[str, dict[str, Any]]] = []
    for vendor, chips in table.items():
        if not isinstance(chips, list) or not all(isinstance(chip, dict) for chip in chips):
            raise HardwareError(
                f"{path}: {vendor} = {_short(chips)}: write a chip below [[{vendor}]], with a name and peaks"
            )
        for number, chip in enumerate(chips, start=1):
            _check_row(f"{path}: [[{vendor}]] number {number}", chip)
            rows.append((vendor, chip))
    return rows


def _check_row(place: str, chip: Mapping[str, Any]) -> None:
    if isinstance(chip.get("name"), str):
        place = f"{place}, {chip['name']!r}"
    for key, value in chip.items():
        if key not in _KEYS:
            raise HardwareError(
                f"{place}: the key {key!r} is unknown: give some of {', '.join(_KEYS)}"
            )
        if problem := _problem(key, value):
            raise HardwareError(f"{place}: {key} = {_short(value)}: give {problem}")
    for key in ("name", "peaks"):
        if key not in chip:
            raise HardwareError(f"{place}: {key} is missing: give {_problem(key, None)}")
    for dtype, peak in chip["peaks"].items():
        if dtype not in DTYPES:
            raise HardwareError(f"{place}: peaks has {dtype!r}: give some of {', '.join(DTYPES)}")
        if not _is_positive(peak):
            raise HardwareError(f"{place}: peaks.{dtype} = {_short(peak)}: give FLOP/s, as 312e12")


def _problem(key: str, value: object) -> str | None:
    """Say what a key takes, if the value is something else."""
    if key in {"name", "source"}:
        return None if isinstance(value, str) and value.strip() else "a text"
    if key == "names":
        is_names = isinstance(value, list) and all(
            isinstance(name, str) and name.strip() for name in value
        )
        return None if is_names else "a list of texts: the names that drivers report"
    if key == "peaks":
        return (
            None if isinstance(value, dict) and value else "FLOP/s by dtype, as { bf16 = 312e12 }"
        )
    if key == "date":
        return (
            None
            if isinstance(value, dt.date) and not isinstance(value, dt.datetime)
            else "a date without quotes, as 2026-11-20"
        )
    return None if _is_positive(value) else "a positive number"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _short(value: object) -> str:
    written = str(value) if isinstance(value, dt.date | dt.time) else repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _text(value: str) -> str:
    """A text of TOML, whose escapes are those of JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


GPU_VENDORS = {"NVIDIA": {"nvidia", "tesla", "geforce"}, "AMD": {"amd", "instinct"}}
"""Vendors of GPUs, with the words of their names that only some drivers and people write."""
_VENDORS = set[str]().union(*GPU_VENDORS.values())
_Table = Mapping[
    frozenset[str], tuple[str, "Hardware"]
    # a vendor and its chip by the words of each name that the chip has
]
# tables that were given as a file's path, since the process began
_given: dict[Path, _Table] = {}


@dataclass(frozen=True)
class Hardware:
    """What one device can do.

    Give your own where the table does not know a chip, or knows it wrong.

    Attributes:
        name: A name of your choice.
        peak_flops_per_second: FLOP/s without sparsity by dtype, the names of `DTYPES`; of int8,
            OP/s.
        bandwidth_bytes_per_second: Of the device's memory, bytes/s; `None` is unknown.
        memory_bytes: Bytes; `None` is unknown.
        source: Where the figures are from.
        cache_bytes: Of its last level of cache, bytes; `None` is unknown.
        usable_bytes: What a process sees as the device's memory, which is less than is sold, bytes;
            `None` is unknown.
        link_bytes_per_second: Of the link to the other devices of a host, as NVLink, in one
            direction, bytes/s; `None` is unknown.
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
        _check_text("name", self.name)
        _check_text("source", self.source, empty=True)
        for argument in (
            "bandwidth_bytes_per_second",
            "memory_bytes",
            "cache_bytes",
            "usable_bytes",
            "link_bytes_per_second",
        ):
            if getattr(self, argument) is not None:
                _check_positive(argument, getattr(self, argument))
        # A copy: what the caller does to theirs later is not done to ours.
        object.__setattr__(
            self, "peak_flops_per_second", _checked_peaks(self.peak_flops_per_second)
        )


def lookup(name: str) -> Hardware | None:
    """The chip of that name, in the user's own tables or in the shipped one.

    `None` for a chip that no table has.

    The name is as `torch.cuda.get_device_name()` or `names()` gives it. Letter case and the order
    of the words do not matter, nor do the words NVIDIA, Tesla, GeForce, AMD and Instinct. Every
    other word does: a laptop's chip, or a MIG slice, is not the desktop chip.

    Raises:
        HardwareError: The user's table of chips cannot be read.
    """
    found = _found(name)
    return None if found is None else found[1]


USUAL = {"H100": "H100 SXM", "A100": "A100 SXM 80GB", "V100": "V100 SXM2 32GB"}
"""What people mean by a short name.

Only names that people give are looked up here: a driver's name is whole.
"""


def named(name: str) -> Hardware:
    """The chip of that name, or the one in the TOML file at that path.

    Of a family the usual chip is taken, as `H100 SXM` for `H100`.
    """
    if name.endswith(".toml"):
        return _only_chip(Path(name))
    found = lookup(name) or lookup(USUAL.get(name.strip().upper(), ""))
    if found is None:
        raise HardwareError(f"hardware={name!r}: {hint(name)}")
    return found


def vendor_of(name: str) -> str | None:
    """The vendor that a chip is listed under; `None` for a chip that no table has."""
    found = _found(name)
    return None if found is None else found[0]


def is_gpu(chip: Hardware | None) -> bool:
    """Whether a chip is listed under NVIDIA or AMD, so that torch runs on it as on CUDA."""
    return chip is not None and vendor_of(chip.name) in GPU_VENDORS


def names() -> tuple[str, ...]:
    """The chips of all tables, as lflops calls them."""
    return tuple(chip.name for of_vendor in chips().values() for chip in of_vendor)


def chips() -> Mapping[str, tuple[Hardware, ...]]:
    """The chips of all tables by vendor."""
    listed: dict[str, list[Hardware]] = {}
    for table in reversed([*_tables()]):
        for words, (vendor, chip) in table.items():
            if words == _words(chip.name) and _found(chip.name) == (
                vendor,
                chip,
                # no other table replaces it
            ):
                listed.setdefault(vendor, []).append(chip)
    return {vendor: tuple(of_vendor) for vendor, of_vendor in listed.items()}


def save(name: str, measured: Hardware) -> Path:
    """Add what `lflops.calibrate` returned to the user's table of chips, and return the table's path.

    If no table has the device, its own name finds the figures too, so that `hardware="auto"` does.
    """
    check_new(name)
    words = set(_split(measured.name))
    vendor = next((vendor for vendor, marks in GPU_VENDORS.items() if words & marks), "measured")
    has_name = lookup(measured.name) is not None or _words(measured.name) == _words(name)
    lines = [f"[[{vendor}]]", f"name = {_text(name)}"]
    lines += [] if has_name else [f"names = [{_text(measured.name)}]"]
    lines.append(
        f"peaks = {{ {', '.join(f'{dtype} = {float(peak)!r}' for dtype, peak in measured.peak_flops_per_second.items())} }}"
    )
    lines += [
        f"{key} = {value / unit!r}"
        for key, (field, unit) in _NUMBERS.items()
        if (value := getattr(measured, field)) is not None
    ]
    lines += [f"source = {_text(measured.source)}"] if measured.source else []
    path = own_file()
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(
            path,
            "\n".join(
                [*([before.rstrip("\n"), ""] if before.strip() else []), *lines, ""]
            ).encode(),
        )
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}: the chip {name!r} was not saved") from error
    return path


def hint(name: str) -> str:
    """Say what to do in Python about a chip that the table does not have, in one sentence."""
    return (
        f"{unknown(name)}: give one of lflops.hardware.names(), or figures of your own as lflops.Hardware(name=..., "
        "peak_flops_per_second={'bf16': ...}, bandwidth_bytes_per_second=...) or in a TOML file, or measure this machine's with "
        "lflops.calibrate()"
    )


def unknown(name: str) -> str:
    """Say that the table does not have a chip, and which ones are near."""
    near = ", ".join(_nearest(name))
    known = (
        f"is not in the table of chips (nearest: {near})"
        if near
        else "is not in the table of chips"
    )
    why = ", a MIG slice being only a part of its chip" if "mig" in _words(name) else ""
    return f"{name!r} {known}{why}"


def check_new(name: str) -> None:
    """Check that a chip can be saved under a name."""
    if not _words(name):
        raise HardwareError(f"save={name!r}: give a name with letters or digits")
    if lookup(name) is not None:
        raise HardwareError(
            f"save={name!r}: there is a chip of that name; give another name, or remove the chip if it is in {own_file()}"
        )


def _only_chip(path: Path) -> Hardware:
    table = _table_of(path)
    found = {chip.name: chip for _, chip in table.values()}
    if len(found) != 1:
        listed = f"the chips {', '.join(found)}" if found else "no chip"
        raise HardwareError(
            f"hardware={str(path)!r} has {listed}: give a file with one, or set {VARIABLE} to the file and give a name"
        )
    # so that what is known of the vendor's chips is known of this one
    _given[path] = table
    return next(iter(found.values()))


def _found(name: str) -> tuple[str, Hardware] | None:
    words = _words(name)
    return next((table[words] for table in _tables() if words in table), None)


def _tables() -> Iterator[_Table]:
    """The user's tables before the shipped one."""
    yield from _given.values()
    path = own_file()
    try:
        stat = path.stat()
    except OSError as error:
        if os.environ.get(VARIABLE):
            raise HardwareError(
                f"{VARIABLE}={str(path)!r}: {error.strerror}: give a TOML file of chips"
            ) from error
    else:
        yield _own(path, stat.st_mtime_ns, stat.st_size)
    yield _shipped()


@functools.lru_cache(maxsize=8)
def _own(path: Path, _changed_ns: int, _size: int) -> _Table:
    """The user's table; read again when it has changed."""
    return _table_of(path)


@functools.cache
def _shipped() -> _Table:
    with importlib.resources.as_file(
        importlib.resources.files("lflops.hardware") / "chips.toml"
    ) as path:
        return _table_of(path)


def _table_of(path: Path) -> _Table:
    table: dict[frozenset[str], tuple[str, Hardware]] = {}
    for vendor, row in _rows_in(path):
        dated = f" ({row['date']})" if "date" in row else ""
        numbers = {field: row[key] * unit for key, (field, unit) in _NUMBERS.items() if key in row}
        chip = Hardware(
            row["name"], row["peaks"], source=f"{row.get('source') or path}{dated}", **numbers
        )
        for name in (row["name"], *row.get("names", ())):
            if table.setdefault(_words(name), (vendor, chip)) != (vendor, chip):
                raise HardwareError(f"{path}: two chips have the name {name!r}: give each its own")
    return table


def _words(name: str) -> frozenset[str]:
    return frozenset(_split(name)) - _VENDORS


def _split(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _nearest(name: str) -> list[str]:
    """Up to four chips that share the most words with a number in them.

    Else those whose names are spelled much like it.
    """
    asked = {word for word in _words(name) if any(letter.isdigit() for letter in word)}
    shared: dict[str, int] = {}
    every = {words: chip for table in _tables() for words, (_, chip) in table.items()}
    for words, chip in every.items():
        shared[chip.name] = max(len(asked & words), shared.get(chip.name, 0))
    most = max(shared.values(), default=0)
    if most:
        return [chip for chip, count in shared.items() if count == most][:4]
    spelled = {_joined(chip): chip for chip in names()}
    return [spelled[each] for each in difflib.get_close_matches(_joined(name), spelled, 4)]


def _joined(name: str) -> str:
    return "".join(word for word in _split(name) if word not in _VENDORS)


def _checked_peaks(peaks: object) -> dict[str, float]:
    if not isinstance(peaks, Mapping) or not peaks:
        raise HardwareError(
            f"peak_flops_per_second={peaks!r}: give FLOP/s by dtype, as {{'bf16': 312e12}}"
        )
    for dtype, peak in peaks.items():
        if dtype not in DTYPES:
            raise HardwareError(
                f"peak_flops_per_second has {dtype!r}: give some of {', '.join(DTYPES)}"
            )
        _check_positive(f"peak_flops_per_second[{dtype!r}]", peak)
    return dict(peaks)


def _check_positive(argument: str, value: object) -> None:
    if not _is_positive(value):
        raise HardwareError(f"{argument}={value!r}: give a positive, finite number")


def _check_text(argument: str, value: object, *, empty: bool = False) -> None:
    if not isinstance(value, str) or not (empty or value.strip()):
        raise HardwareError(f"{argument}={value!r}: give a text")
