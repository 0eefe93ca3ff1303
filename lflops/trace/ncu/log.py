"""Read the log of Nsight Compute into a list of kernel launches.

The log can be readable text, or CSV with one line for each metric or for each launch.
"""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lflops.errors import ProfileError

_RANGES = "Push/Pop_Range"
_RANGE = re.compile(r'<[^>]*>:(.*?):none(?::none)*"?')
_HEADING = re.compile(
    r"^ {2}(?P<name>\S.*?)"
    r"(?: \(\d+, \d+, \d+\)x\(\d+, \d+, \d+\)|, \d{4}-\w{3}-\d+ [\d:]+)"
    r", Context \d+, Stream \d+"
)
_METRIC = re.compile(r"[a-z0-9]\w*")
_GROUPED_DIGITS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
_SECONDS = {
    "s": 1.0,
    "second": 1.0,
    "ms": 1e-3,
    "msecond": 1e-3,
    "us": 1e-6,
    "usecond": 1e-6,
    "ns": 1e-9,
    "nsecond": 1e-9,
}
_PREFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Launch(NamedTuple):
    """A launch of a kernel.

    Attributes:
        name: The name of the kernel.
        ranges: The names of the NVTX ranges around the launch, the innermost last.
        capability: The compute capability of the chip; infinite if unknown.
        metrics: Value of each requested metric; `None` if Nsight Compute has no value.
    """

    name: str
    ranges: tuple[str, ...]
    capability: float
    metrics: dict[str, float | None]


def launches_in(log: str) -> list[Launch]:
    """Return the kernel launches in a log. Only launches in a CSV log have NVTX ranges."""
    lines = log.splitlines()
    for start, line in enumerate(lines):
        if line.startswith('"') and '"Kernel Name"' in line:
            try:
                return _launches_in_csv(lines[start:])
            except (csv.Error, KeyError) as error:
                raise ProfileError(f"has a damaged table: {error}") from None
    return _launches_in_text(lines)


def _launches_in_csv(lines: Sequence[str]) -> list[Launch]:
    heading, *rows = csv.reader(line for line in lines if line.startswith('"'))
    named = []
    for row in rows:
        if len(row) == len(heading):
            named.append(dict(zip(heading, row, strict=True)))
    return _by_metric(named) if "Metric Name" in heading else _by_kernel(named)


def _by_metric(rows: Iterable[Mapping[str, str]]) -> list[Launch]:
    """Return the launches in a CSV that has one line for each metric of a launch."""
    launches: dict[tuple[str | None, str | None], Launch] = {}
    for row in rows:
        key = (row.get("Process ID"), row.get("ID"))
        if key not in launches:
            launches[key] = _launch(row)
        value = _number(row["Metric Value"], row.get("Metric Unit", ""))
        launches[key].metrics[row["Metric Name"]] = value
    return list(launches.values())


def _by_kernel(rows: Sequence[Mapping[str, str]]) -> list[Launch]:
    """Return the launches in a CSV that has one line for each launch, as `--page raw` writes it.

    The first line after the heading can contain the units.
    """
    units: Mapping[str, str] = {}
    if rows and not rows[0].get("ID"):
        units = rows[0]
        rows = rows[1:]
    launches = []
    for row in rows:
        launch = _launch(row)
        for name, value in row.items():
            if "__" in name:
                launch.metrics[name] = _number(value, units.get(name, ""))
        launches.append(launch)
    return launches


def _launch(row: Mapping[str, str]) -> Launch:
    ranges: list[str] = []
    for column, stack in row.items():
        if _RANGES in column:
            ranges += _RANGE.findall(stack)
    return Launch(row["Kernel Name"], tuple(ranges), _capability(row.get("CC", "")), {})


def _launches_in_text(lines: Iterable[str]) -> list[Launch]:
    """Return the launches in a text log.

    The metrics of a launch are indented below the launch's heading. A line has the name of a
    metric, sometimes a unit, and a value.
    """
    launches: list[Launch] = []
    for line in lines:
        heading = _HEADING.match(line) if ", Context " in line else None
        if heading:
            capability = _capability(line.rpartition(", CC ")[2])
            launches.append(Launch(heading["name"], (), capability, {}))
        elif launches and "__" in line and line[0].isspace():
            fields = line.split()
            if len(fields) in {2, 3} and _is_metric(fields[0]):
                unit = fields[1] if len(fields) == 3 else ""
                launches[-1].metrics[fields[0]] = _number(fields[-1], unit)
    return launches


def _is_metric(name: str) -> bool:
    """Return whether a text looks like the name of a metric, such as `dram__bytes_read.sum`."""
    before, separator, after = name.partition("__")
    return bool(separator and after and _METRIC.fullmatch(before))


def _capability(text: str) -> float:
    return _number(text, "") or math.inf


def _number(value: str, unit: str) -> float | None:
    """Return a value in seconds, bytes or counts; `None` if Nsight Compute has no value.

    A comma in `value` groups digits if three digits follow each comma. Otherwise, it is a decimal
    comma.
    """
    is_grouped = _GROUPED_DIGITS.fullmatch(value) is not None
    digits = value.replace(",", "" if is_grouped else ".")
    try:
        number = float(digits)
    except ValueError:
        return None
    if unit in _SECONDS:
        return number * _SECONDS[unit]
    # K is a prefix if a unit follows, as in Kbyte. If K stands alone, it is not a prefix.
    has_prefix = len(unit) > 1 and unit[1:].islower()
    return number * _PREFIXES.get(unit[0], 1.0) if has_prefix else number
