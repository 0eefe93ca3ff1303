"""Chips on a terminal: the table of them, and the figures of one next to a measured machine's."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.hardware.chips import DTYPES, Hardware, lookup
from lflops.report.terminal.tables import FittedTable, figure, text

_GAP = 2
_LEFT_OUT_FIRST = ("int8", "fp64", "fp4", "memory", "tf32", "fp16")


def listing(chips: Mapping[str, tuple[Hardware, ...]]) -> RenderableType:
    rows = [row for vendor, of_vendor in chips.items() for row in [(vendor, None), *((chip.name, chip) for chip in of_vendor)]]
    columns = {column: ["" if chip is None else _cell(chip, column) for _, chip in rows] for column in ("memory", "bandwidth", *DTYPES)}
    return Group(
        FittedTable("chip", [name for name, _ in rows], columns, first=_LEFT_OUT_FIRST),
        "",
        text("FLOP/s (int8: OP/s) without sparsity; lflops hardware NAME says of one chip where its figures are from", "dim"),
    )


def figures(chip: Hardware | None, measured: Hardware | None = None) -> RenderableType:
    """One chip's figures, or those of a machine, or both: with the share that is reached, where the machine has that chip."""
    devices = [device for device in (chip, measured) if device is not None]
    reached = chip is not None and measured is not None and lookup(measured.name) == chip
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.add_column("", style="bold", no_wrap=True)
    for device in devices:
        table.add_column(text("measured" if device is measured else device.name), justify="right", no_wrap=True)
    if reached:
        table.add_column("reached", justify="right", no_wrap=True)
    for name, unit in (
        ("memory", ""),
        ("bandwidth", "B/s"),
        ("link", "B/s"),
        *((dtype, "OP/s" if dtype == "int8" else "FLOP/s") for dtype in DTYPES),
    ):
        values = [_value(device, name) for device in devices]
        if any(value is not None for value in values):
            cells = [units.quantity(value, unit) if unit else units.size(value) for value in values]
            if reached:
                of_chip, here = values
                cells.append(units.percent(None if of_chip is None or here is None else here / of_chip))
            table.add_row(name, *map(figure, cells))
    sources = [("device", f"{each.name}, {each.source}") if each is measured else ("source", each.source) for each in devices]
    return Group(table, "", *(Text.assemble((f"{label}  ", "bold"), text(source)) for label, source in sources))


def _cell(chip: Hardware, column: str) -> str:
    value = _value(chip, column)
    if column == "memory":
        return units.size(value, digits=0)
    return units.quantity(value, "B/s" if column == "bandwidth" else "")


def _value(device: Hardware, column: str) -> float | None:
    if column == "memory":
        return device.memory_bytes
    if column in {"bandwidth", "link"}:
        return device.bandwidth_bytes_per_second if column == "bandwidth" else device.link_bytes_per_second
    return device.peak_flops_per_second.get(column)
