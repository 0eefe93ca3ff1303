"""Files of chips: the table that ships with lflops, and the user's own in the same format.

The user's table is the file in the variable `LFLOPS_CHIPS`, else `lflops/chips.toml` in the folder of settings (`XDG_CONFIG_HOME`, else
`~/.config`). Every error names the file, the chip, the key and the value.
"""

import datetime as dt
import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lflops.errors import HardwareError
from lflops.files import write_whole

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")  # what a peak can be of

VARIABLE = "LFLOPS_CHIPS"

_NUMBERS = ("bandwidth", "memory_gib", "usable_gib", "cache_mib", "link")
_KEYS = ("name", "names", "peaks", "source", "date", *_NUMBERS)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A chip of a file. The comment at the top of `chips.toml` explains the fields."""

    name: str
    peaks: Mapping[str, float]
    names: tuple[str, ...] = ()
    bandwidth: float | None = None
    memory_gib: float | None = None
    usable_gib: float | None = None
    cache_mib: float | None = None
    link: float | None = None
    source: str = ""
    date: dt.date | None = None


def own_file() -> Path:
    """Where the user's table of chips is, or would be."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "lflops" / "chips.toml"


def rows_in(path: Path) -> dict[str, tuple[Row, ...]]:
    """The chips of a file by vendor."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}: give a TOML file of chips") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise HardwareError(f"{path}: is no TOML file: {error}") from error
    read: dict[str, tuple[Row, ...]] = {}
    for vendor, chips in table.items():
        if not isinstance(chips, list) or not all(isinstance(chip, dict) for chip in chips):
            raise HardwareError(f"{path}: {vendor} = {_short(chips)}: write a chip below [[{vendor}]], with a name and peaks")
        read[vendor] = tuple(_row(f"{path}: [[{vendor}]] number {number}", chip) for number, chip in enumerate(chips, start=1))
    return read


def append(path: Path, vendor: str, row: Row) -> None:
    """Add a chip at the end of a file, which is made if it is not there. What the file has stays unchanged."""
    lines = [f"[[{_key(vendor)}]]", f"name = {_text(row.name)}"]
    lines += [f"names = [{', '.join(map(_text, row.names))}]"] if row.names else []
    lines.append(f"peaks = {{ {', '.join(f'{dtype} = {float(peak)!r}' for dtype, peak in row.peaks.items())} }}")
    lines += [f"{name} = {value!r}" for name in _NUMBERS if (value := getattr(row, name)) is not None]
    lines += [f"source = {_text(row.source)}"] if row.source else []
    lines += [f"date = {row.date.isoformat()}"] if row.date else []
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n".join([*([before.rstrip("\n"), ""] if before.strip() else []), *lines, ""]).encode())
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}: the chip {row.name!r} was not saved") from error


def _row(place: str, chip: Mapping[str, Any]) -> Row:
    if isinstance(chip.get("name"), str):
        place = f"{place}, {chip['name']!r}"
    for key, value in chip.items():
        if key not in _KEYS:
            raise HardwareError(f"{place}: the key {key!r} is unknown: give some of {', '.join(_KEYS)}")
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
    return Row(**{**chip, "names": tuple(chip.get("names", ()))})


def _problem(key: str, value: object) -> str | None:
    """What a key takes, if the value is something else."""
    if key in {"name", "source"}:
        return None if isinstance(value, str) and value.strip() else "a text"
    if key == "names":
        is_names = isinstance(value, list) and all(isinstance(name, str) and name.strip() for name in value)
        return None if is_names else "a list of texts: the names that drivers report"
    if key == "peaks":
        return None if isinstance(value, dict) and value else "FLOP/s by dtype, as { bf16 = 312e12 }"
    if key == "date":
        return None if isinstance(value, dt.date) and not isinstance(value, dt.datetime) else "a date without quotes, as 2026-11-20"
    return None if _is_positive(value) else "a positive number"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _short(value: object) -> str:
    written = str(value) if isinstance(value, dt.date | dt.time) else repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _text(value: str) -> str:
    """A text of TOML, whose escapes are those of JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if name.replace("-", "_").replace("_", "a").isalnum() and name.isascii() else _text(name)
