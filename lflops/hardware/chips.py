"""Look up a chip's peaks, bandwidth and memory by the name that its driver reports.

A chip is found only by its complete name. For an unknown name, the result is `None` and never a
similar chip, because users would not notice that the peak is wrong.

Chips in the user's file replace chips with the same name in the shipped table, which is part of
lflops. The environment variable `LFLOPS_CHIPS` sets the path of the user's file. The default is
`lflops/chips.toml` in the folder that the variable `XDG_CONFIG_HOME` names, or in `~/.config`. An
error about a table of chips names the file, the chip and the key.
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
from lflops.files import read, write_whole

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""First words of the names of NVIDIA's Hopper chips."""

BLACKWELL = ("B200", "GB200", "B300", "GB300")
"""First words of the names of NVIDIA's Blackwell chips for data centers."""

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
"""Names of the dtypes for which a chip can have a peak."""

VARIABLE = "LFLOPS_CHIPS"
"""Environment variable with the path of the user's file of chips."""

_NUMBERS = {
    "bandwidth": ("bandwidth_bytes_per_second", 1),
    "memory_gib": ("memory_bytes", 2**30),
    "usable_gib": ("usable_bytes", 2**30),
    "cache_mib": ("cache_bytes", 2**20),
    "link": ("link_bytes_per_second", 1),
}
"""The keys of a chip in a TOML file whose values are numbers.

Each key is mapped to a field of `Hardware`, and to the factor that converts the number to the unit
of this field. For example, `memory_gib` is multiplied by 2**30 for `memory_bytes`.
"""

_KEYS = ("name", "names", "peaks", "source", "date", *_NUMBERS)


def own_file() -> Path:
    """Return the path of the user's file of chips, even if the file does not exist."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser()
    settings = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(settings).expanduser() / "lflops" / "chips.toml"


def _rows_in(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Read a TOML file of chips, and return the vendor and the entry of each chip.

    An entry is a dictionary. The comment at the top of `chips.toml` explains its keys.
    """
    if path == Path(os.devnull):
        # Users set `LFLOPS_CHIPS` to this path to use no file.
        return []
    try:
        table = tomllib.loads(read(path).decode())
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}: pass a TOML file of chips") from error
    except (ValueError, RecursionError) as error:
        # Invalid TOML, or invalid UTF-8.
        raise HardwareError(f"{path}: not a valid TOML file: {error}") from error
    rows: list[tuple[str, dict[str, Any]]] = []
    for vendor, chips in table.items():
        if not isinstance(chips, list) or not all(isinstance(chip, dict) for chip in chips):
            raise HardwareError(
                f"{path}: {vendor} is {_short(chips)}, not a list of chips: begin each chip with "
                f"the line [[{vendor}]], followed by its name and its peaks"
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
            raise HardwareError(f"{place}: unknown key {key!r}: use one of {', '.join(_KEYS)}")
        if not _is_valid(key, value):
            raise HardwareError(f"{place}: {key} = {_short(value)}: use {_accepted(key)}")
    for key in ("name", "peaks"):
        if key not in chip:
            raise HardwareError(f"{place}: {key} is missing: add {_accepted(key)}")
    for dtype, peak in chip["peaks"].items():
        if dtype not in DTYPES:
            raise HardwareError(
                f"{place}: peaks has the unknown dtype {dtype!r}: use one of {', '.join(DTYPES)}"
            )
        if not _is_positive(peak):
            raise HardwareError(
                f"{place}: peaks.{dtype} = {_short(peak)}: use a number of FLOP/s, such as 312e12"
            )


_ACCEPTED = {
    "name": "a string",
    "source": "a string",
    "names": "a list of strings: the names that drivers report",
    "peaks": "the FLOP/s of each dtype, such as { bf16 = 312e12 }",
    "date": "a date without quotes, such as 2026-11-20",
}


def _accepted(key: str) -> str:
    return _ACCEPTED.get(key, "a positive number")


def _is_valid(key: str, value: object) -> bool:
    if key in {"name", "source"}:
        return _is_text(value)
    if key == "names":
        return isinstance(value, list) and all(map(_is_text, value))
    if key == "peaks":
        return isinstance(value, dict) and bool(value)
    if key == "date":
        return isinstance(value, dt.date) and not isinstance(value, dt.datetime)
    return _is_positive(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _short(value: object) -> str:
    written = str(value) if isinstance(value, dt.date | dt.time) else repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _text(value: str) -> str:
    """Quote a string for TOML. TOML has the same escapes as JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


GPU_VENDORS = {"NVIDIA": {"nvidia", "tesla", "geforce"}, "AMD": {"amd", "instinct"}}
"""For each GPU vendor, the words in the names of chips that do not distinguish the vendor's chips.

Some drivers and users leave these words out, so they are ignored when names are compared.
"""

_VENDORS = set[str]().union(*GPU_VENDORS.values())

_Table = Mapping[frozenset[str], tuple[str, "Hardware"]]
"""A table of chips: the vendor and the chip, keyed by the set of words in a name of the chip.

A chip with several names has several keys.
"""

_given: dict[Path, _Table] = {}
"""Tables of the TOML files that a user passed instead of the name of a chip, keyed by path.

The tables are kept so that `vendor_of` finds their chips as well.
"""


@dataclass(frozen=True)
class Hardware:
    """The peaks, bandwidths and memory of a device.

    Pass your own `Hardware` if the table of chips has no figures or wrong figures for your chip.

    Attributes:
        name: Name of the chip. For your own chip, choose any name.
        peak_flops_per_second: FLOP/s without sparsity, keyed by the names in `DTYPES`; OP/s for
            int8.
        bandwidth_bytes_per_second: Bandwidth of the device's memory; `None` if unknown.
        memory_bytes: Memory of the device; `None` if unknown.
        source: The source of the figures.
        cache_bytes: Size of the last-level cache; `None` if unknown.
        usable_bytes: Memory that the driver reports for the device, which is less than
            `memory_bytes`; `None` if unknown.
        link_bytes_per_second: Bandwidth in one direction to other devices of the same host, for
            example over NVLink; `None` if unknown.
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
        for field, _ in _NUMBERS.values():
            value = getattr(self, field)
            if value is not None:
                _check_positive(field, value)
        # A copy, so that the caller can change the original.
        peaks = _checked_peaks(self.peak_flops_per_second)
        object.__setattr__(self, "peak_flops_per_second", peaks)


def lookup(name: str) -> Hardware | None:
    """Return the chip with the given name, or `None` if no table has it.

    The user's tables are searched before the table that is part of lflops.

    The name is the result of `torch.cuda.get_device_name()` or one of `names()`. Letter case, the
    order of the words, and the words NVIDIA, Tesla, GeForce, AMD and Instinct do not matter. All
    other words matter, because a laptop chip or a MIG slice is slower than the chip with a similar
    name.

    Raises:
        HardwareError: The user's table of chips cannot be read.
    """
    found = _found(name)
    return None if found is None else found[1]


USUAL = {"H100": "H100 SXM", "A100": "A100 SXM 80GB", "V100": "V100 SXM2 32GB"}
"""Short names that users can pass, and the names of the chips for which they stand.

A short name is not accepted from a driver, because drivers report complete names.
"""


def named(name: str) -> Hardware:
    """Return the chip that a user has named.

    `name` is either the name of a chip or the path of a TOML file with exactly one chip. The name
    of a chip can be short; for example, `H100` stands for `H100 SXM`.

    Raises:
        HardwareError: The chip is unknown, or the file does not have exactly one chip.
    """
    if name.endswith(".toml"):
        return _only_chip(Path(name))
    found = lookup(name) or lookup(USUAL.get(name.strip().upper(), ""))
    if found is None:
        raise HardwareError(f"hardware={name!r}: {hint(name)}")
    return found


def chip_named(hardware: Hardware | str | None) -> Hardware | None:
    """Return the chip for the argument `hardware` of a public function.

    A string, which is the name of a chip or the path of a file, is looked up with `named`. A
    `Hardware` or `None` is returned unchanged.

    Raises:
        HardwareError: The chip is unknown, or the file does not have exactly one chip.
    """
    if isinstance(hardware, str):
        return named(hardware)
    return hardware


def vendor_of(name: str) -> str | None:
    """Return the vendor of the chip with this name; `None` if the name is unknown."""
    found = _found(name)
    return None if found is None else found[0]


def is_gpu(chip: Hardware | None) -> bool:
    """Return whether a chip is a GPU from NVIDIA or AMD, which torch uses as a CUDA device."""
    return chip is not None and vendor_of(chip.name) in GPU_VENDORS


def names() -> tuple[str, ...]:
    """Return the names of the chips in all tables."""
    listed: list[str] = []
    for of_vendor in chips().values():
        listed += [chip.name for chip in of_vendor]
    return tuple(listed)


def chips() -> Mapping[str, tuple[Hardware, ...]]:
    """Return the chips of all tables, keyed by vendor."""
    # A chip is in a table under each of its names, but is listed once. A chip that another table
    # replaces is not listed.
    listed: dict[str, list[Hardware]] = {}
    for table in reversed([*_tables()]):
        for words, (vendor, chip) in table.items():
            is_main_name = words == _words(chip.name)
            is_replaced = _found(chip.name) != (vendor, chip)
            if is_main_name and not is_replaced:
                listed.setdefault(vendor, []).append(chip)
    return {vendor: tuple(of_vendor) for vendor, of_vendor in listed.items()}


def save(name: str, measured: Hardware) -> Path:
    """Add the result of `lflops.calibrate` to the user's file of chips, under a new name.

    If no table has the device, the name that the driver reports is added as well, so that
    `hardware="auto"` finds the device. Returns the path of the file.
    """
    check_new(name)
    path = own_file()
    try:
        before = ""
        if path.exists():
            before = read(path).decode().rstrip()
        path.parent.mkdir(parents=True, exist_ok=True)
        separator = "\n\n" if before else ""
        write_whole(path, f"{before}{separator}{_as_toml(name, measured)}".encode())
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}: the chip {name!r} was not saved") from error
    return path


def _as_toml(name: str, chip: Hardware) -> str:
    lines = [f"[[{_vendor_in(chip.name)}]]", f"name = {_text(name)}"]
    is_found = lookup(chip.name) is not None or _words(chip.name) == _words(name)
    if not is_found:
        lines.append(f"names = [{_text(chip.name)}]")
    peaks = [f"{dtype} = {float(peak)!r}" for dtype, peak in chip.peak_flops_per_second.items()]
    lines.append(f"peaks = {{ {', '.join(peaks)} }}")
    for key, (field, unit) in _NUMBERS.items():
        value = getattr(chip, field)
        if value is not None:
            lines.append(f"{key} = {value / unit!r}")
    if chip.source:
        lines.append(f"source = {_text(chip.source)}")
    return "\n".join(lines) + "\n"


def _vendor_in(name: str) -> str:
    """Return the GPU vendor that a chip's name mentions, or `measured` if it mentions none."""
    words = set(_split(name))
    for vendor, marks in GPU_VENDORS.items():
        if words & marks:
            return vendor
    return "measured"


def hint(name: str) -> str:
    """Return the error text for an unknown chip, with the values that can be passed instead."""
    return (
        f"{unknown(name)}: pass one of lflops.hardware.names(). For any other chip, pass "
        f"lflops.Hardware(name=..., peak_flops_per_second={{'bf16': ...}}, "
        "bandwidth_bytes_per_second=...), or the path of a TOML file with these figures. "
        "lflops.calibrate() measures this machine"
    )


def unknown(name: str) -> str:
    """Return the first part of the error text for an unknown chip, with the most similar names."""
    clause = f"{name!r} is not in the table of chips"
    near = ", ".join(_nearest(name))
    if near:
        clause += f" (similar names: {near})"
    if "mig" in _words(name):
        clause += ", because a MIG slice is only a part of its chip"
    return clause


def check_new(name: str) -> None:
    """Raise a `HardwareError` if a chip cannot be saved under this name.

    The name must have letters or digits, and no other chip may have this name.
    """
    if not _words(name):
        raise HardwareError(f"save={name!r}: pass a name with letters or digits")
    if lookup(name) is not None:
        raise HardwareError(
            f"save={name!r}: a chip with this name already exists: "
            f"pass another name, or remove the chip if it is in {own_file()}"
        )


def _only_chip(path: Path) -> Hardware:
    table = _table_of(path)
    found = {chip.name: chip for _, chip in table.values()}
    if len(found) != 1:
        listed = f"the chips {', '.join(found)}" if found else "no chip"
        raise HardwareError(
            f"hardware={str(path)!r} has {listed}: pass a file with one chip, or set {VARIABLE} to "
            "the path of this file and pass the name of one of its chips"
        )
    # `vendor_of` finds the chip from now on.
    _given[path] = table
    return next(iter(found.values()))


def _found(name: str) -> tuple[str, Hardware] | None:
    words = _words(name)
    for table in _tables():
        if words in table:
            return table[words]
    return None


def _tables() -> Iterator[_Table]:
    """Yield the user's tables of chips, and then the table that is part of lflops."""
    yield from _given.values()
    path = own_file()
    try:
        stat = path.stat()
    except OSError as error:
        if os.environ.get(VARIABLE):
            raise HardwareError(
                f"{VARIABLE}={str(path)!r}: {error.strerror}: pass a TOML file of chips"
            ) from error
    else:
        yield _own(path, stat.st_mtime_ns, stat.st_size)
    yield _shipped()


@functools.lru_cache(maxsize=8)
def _own(path: Path, _changed_ns: int, _size: int) -> _Table:
    """Return the table of chips in the user's file.

    The last two arguments are only for the cache: if the file changes, they change, and the file is
    read again.
    """
    return _table_of(path)


@functools.cache
def _shipped() -> _Table:
    resource = importlib.resources.files("lflops.hardware") / "chips.toml"
    with importlib.resources.as_file(resource) as path:
        return _table_of(path)


def _table_of(path: Path) -> _Table:
    table: dict[frozenset[str], tuple[str, Hardware]] = {}
    for vendor, row in _rows_in(path):
        source = str(row.get("source") or path)
        if "date" in row:
            source += f" ({row['date']})"
        numbers: dict[str, float] = {}
        for key, (field, unit) in _NUMBERS.items():
            if key in row:
                numbers[field] = row[key] * unit
        chip = Hardware(row["name"], row["peaks"], source=source, **numbers)
        for name in (row["name"], *row.get("names", ())):
            if table.setdefault(_words(name), (vendor, chip)) != (vendor, chip):
                raise HardwareError(f"{path}: two chips have the name {name!r}: rename one of them")
    return table


def _words(name: str) -> frozenset[str]:
    return frozenset(_split(name)) - _VENDORS


def _split(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _nearest(name: str) -> list[str]:
    """Return the names of up to four chips with the most similar names.

    A name is similar if it has many of the words with digits in the passed name, such as `H100`. If
    no chip has any of these words, the names with the most similar spelling are returned.
    """
    requested = {word for word in _words(name) if any(map(str.isdigit, word))}
    chip_by_words: dict[frozenset[str], str] = {}
    for table in _tables():
        for words, (_, chip) in table.items():
            chip_by_words[words] = chip.name
    shared: dict[str, int] = {}
    for words, chip_name in chip_by_words.items():
        shared[chip_name] = max(len(requested & words), shared.get(chip_name, 0))
    most = max(shared.values(), default=0)
    if not most:
        return _similarly_spelled(name)
    return [chip_name for chip_name, count in shared.items() if count == most][:4]


def _similarly_spelled(name: str) -> list[str]:
    chip_by_spelling = {_joined(chip_name): chip_name for chip_name in names()}
    matches = difflib.get_close_matches(_joined(name), chip_by_spelling, 4)
    return [chip_by_spelling[match] for match in matches]


def _joined(name: str) -> str:
    return "".join(word for word in _split(name) if word not in _VENDORS)


def _checked_peaks(peaks: object) -> dict[str, float]:
    if not isinstance(peaks, Mapping) or not peaks:
        raise HardwareError(
            f"peak_flops_per_second={peaks!r}: pass a dict with the FLOP/s of each dtype, such as "
            "{'bf16': 312e12}"
        )
    for dtype, peak in peaks.items():
        if dtype not in DTYPES:
            raise HardwareError(
                f"peak_flops_per_second has the unknown dtype {dtype!r}: use one of "
                f"{', '.join(DTYPES)}"
            )
        _check_positive(f"peak_flops_per_second[{dtype!r}]", peak)
    return dict(peaks)


def _check_positive(argument: str, value: object) -> None:
    if not _is_positive(value):
        raise HardwareError(f"{argument}={value!r}: pass a positive, finite number")


def _check_text(argument: str, value: object, *, empty: bool = False) -> None:
    if not isinstance(value, str) or not (empty or value.strip()):
        raise HardwareError(f"{argument}={value!r}: pass a string")
