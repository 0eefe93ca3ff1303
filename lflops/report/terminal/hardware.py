"""Draw chips on a terminal: a table of all chips, or the peaks of one chip and of this machine."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from lflops import units
from lflops.hardware.chips import DTYPES, Hardware, lookup
from lflops.profile.module_names import plain
from lflops.profile.series import without_none
from lflops.report.terminal.tables import FittedTable, text
from lflops.report.text import shortened

_LEFT_OUT_FIRST = ("int8", "fp64", "fp4", "memory", "tf32", "fp16")
_FIGURES = ("memory", "bandwidth", "link", *DTYPES)
_NAME_WIDTH = 40


def listing(chips: Mapping[str, tuple[Hardware, ...]]) -> RenderableType:
    """Draw a table of chips.

    `chips` has the chips of each vendor, keyed by the vendor's name.
    """
    headings = ("memory", "bandwidth", *DTYPES)
    rows = []
    for vendor, of_vendor in chips.items():
        rows.append((vendor, dict.fromkeys(headings, "")))
        for chip in of_vendor:
            cells = {}
            for heading in headings:
                cells[heading] = _cell(chip, heading)
            rows.append((chip.name, cells))
    remark = (
        "FLOP/s (int8: OP/s) without sparsity; "
        "lflops hardware NAME prints the sources of a chip's figures"
    )
    table = FittedTable.of_rows("chip", rows, first=_LEFT_OUT_FIRST)
    return Group(table, "", text(remark, "dim"))


def figures(chip: Hardware | None, measured: Hardware | None = None) -> RenderableType:
    """Draw the memory, bandwidth and peaks of a chip, of this machine, or of both.

    If the machine has this chip, the table also shows what share of each value the machine
    reaches.

    Args:
        chip: The values from the chip's data sheet.
        measured: The values that were measured on this machine.
    """
    devices = without_none([chip, measured])
    rows = []
    for name in _FIGURES:
        if not any(_value(device, name) for device in devices):
            continue
        cells = {}
        if chip is not None:
            cells[shortened(plain(chip.name), _NAME_WIDTH)] = _with_unit(chip, name)
        if measured is not None:
            cells["measured"] = _with_unit(measured, name)
        if chip is not None and measured is not None and lookup(measured.name) == chip:
            cells["reached"] = _reached(chip, measured, name)
        rows.append((name, cells))
    sources = []
    for device in devices:
        label = "source"
        source = device.source
        if device is measured:
            label = "device"
            source = f"{device.name}, {source}"
        sources.append(Text.assemble((f"{label}  ", "bold"), text(source)))
    return Group(FittedTable.of_rows("", rows), "", *sources)


def _with_unit(device: Hardware, name: str) -> str:
    value = _value(device, name)
    if name == "memory":
        return units.size(value)
    if name in {"bandwidth", "link"}:
        return units.quantity(value, "B/s")
    return units.quantity(value, "OP/s" if name == "int8" else "FLOP/s")


def _reached(chip: Hardware, measured: Hardware, name: str) -> str:
    of_chip = _value(chip, name)
    here = _value(measured, name)
    return units.percent(here / of_chip if of_chip and here else None)


def _cell(chip: Hardware, column: str) -> str:
    value = _value(chip, column)
    if column == "memory":
        return units.size(value, digits=0)
    return units.quantity(value, "B/s" if column == "bandwidth" else "")


def _value(device: Hardware, name: str) -> float | None:
    if name == "memory":
        return device.memory_bytes
    if name == "bandwidth":
        return device.bandwidth_bytes_per_second
    if name == "link":
        return device.link_bytes_per_second
    return device.peak_flops_per_second.get(name)
