"""Chips on a terminal: the table of them, and the figures of one next to a measured machine's."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from lflops import units
from lflops.hardware.chips import DTYPES, Hardware, lookup
from lflops.report.terminal.tables import FittedTable, text
from lflops.report.text import plain

_LEFT_OUT_FIRST = ("int8", "fp64", "fp4", "memory", "tf32", "fp16")


def listing(chips: Mapping[str, tuple[Hardware, ...]]) -> RenderableType:
    rows = [
        row
        for vendor, of_vendor in chips.items()
        for row in [(vendor, None), *((chip.name, chip) for chip in of_vendor)]
    ]
    columns = {
        column: ["" if chip is None else _cell(chip, column) for _, chip in rows]
        for column in ("memory", "bandwidth", *DTYPES)
    }
    return Group(
        FittedTable("chip", [name for name, _ in rows], columns, first=_LEFT_OUT_FIRST),
        "",
        text(
            "FLOP/s (int8: OP/s) without sparsity; lflops hardware NAME says of one chip where its figures are from",
            "dim",
        ),
    )


def figures(chip: Hardware | None, measured: Hardware | None = None) -> RenderableType:
    """One chip's figures, or those of a machine, or both.

    With the share that is reached, where the machine has that chip.
    """
    devices = [device for device in (chip, measured) if device is not None]
    kinds = {"memory": "", "bandwidth": "B/s", "link": "B/s"} | {
        dtype: "OP/s" if dtype == "int8" else "FLOP/s" for dtype in DTYPES
    }
    rows = {
        name: values
        for name in kinds
        if any(values := [_value(device, name) for device in devices])
    }
    columns = {
        "measured" if device is measured else plain(device.name): [
            units.quantity(values[place], kinds[name]) if kinds[name] else units.size(values[place])
            for name, values in rows.items()
        ]
        for place, device in enumerate(devices)
    }
    if chip is not None and measured is not None and lookup(measured.name) == chip:
        columns["reached"] = [
            units.percent(here / of_chip if of_chip and here else None)
            for of_chip, here in rows.values()
        ]
    table = FittedTable("", list(rows), columns)
    sources = [
        ("device", f"{each.name}, {each.source}") if each is measured else ("source", each.source)
        for each in devices
    ]
    return Group(
        table,
        "",
        *(Text.assemble((f"{label}  ", "bold"), text(source)) for label, source in sources),
    )


def _cell(chip: Hardware, column: str) -> str:
    value = _value(chip, column)
    if column == "memory":
        return units.size(value, digits=0)
    return units.quantity(value, "B/s" if column == "bandwidth" else "")


def _value(device: Hardware, column: str) -> float | None:
    if column == "memory":
        return device.memory_bytes
    if column in {"bandwidth", "link"}:
        return (
            device.bandwidth_bytes_per_second
            if column == "bandwidth"
            else device.link_bytes_per_second
        )
    return device.peak_flops_per_second.get(column)
