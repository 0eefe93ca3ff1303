"""A profile's memory on a terminal: the peak, when it is, and what is alive then."""

from collections.abc import Iterable, Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.analyze.memory.peak import Holder, holders, peak_moment
from lflops.hardware.chips import Hardware
from lflops.profile.model import Memory, Profile
from lflops.report.terminal.text import margin, text

__all__ = ["render_memory"]

LISTED = 10


def render_memory(profile: Profile) -> Group:
    """The peak, by category, by module and by what is largest."""
    memory = profile.memory
    if memory is None:
        return Group(text("memory was not counted", "dim"))
    table = margin()
    table.add_row("peak", text(", ".join([units.size(memory.peak_bytes), *_when(memory)])))
    if (room := _room(memory, profile.run.hardware)) is not None:
        table.add_row("fits", text(room, "" if room.startswith("yes") else "yellow"))
    categories = {category.replace("_", " "): nbytes for category, nbytes in memory.by_category.items()}
    _add(table, "by category", _listed(categories, memory.peak_bytes))
    _add(table, "by module", _listed({_name(each): each.bytes for each in holders(memory.by_module)}, memory.peak_bytes))
    largest = [
        f"{units.size(each.bytes):>12}  {each.category.replace('_', ' ')}, {each.module or 'the root'}"
        + (f", {each.operator} in {each.phase}" if each.operator else "")
        for each in memory.alive[:LISTED]
    ]
    _add(table, "largest", map(text, largest))
    return Group(table)


def _when(memory: Memory) -> list[str]:
    """The operator that reached it, where that is known."""
    at = peak_moment(memory)
    if at is None:
        return []
    return [f"reached in {at.phase} by {at.operator} of {at.module or 'the root'}, operator {memory.peak_index + 1:,}"]


def _room(memory: Memory, chip: Hardware | None) -> str | None:
    """Whether the chip has as much; the rest is for what no tensor holds."""
    if chip is None or chip.memory_bytes is None:
        return None
    fits = "yes" if memory.fits(chip.memory_bytes) else "no"
    return f"{fits}: {units.percent(memory.peak_bytes / chip.memory_bytes)} of {units.size(chip.memory_bytes)} ({chip.name})"


def _name(holder: Holder) -> str:
    return (holder.name or "the root") + (f" ×{holder.modules}" if holder.modules > 1 else "")


def _listed(parts: Mapping[str, int], whole: int) -> Iterable[Text]:
    most = sorted(((nbytes, name) for name, nbytes in parts.items() if nbytes), key=lambda part: -part[0])
    for nbytes, name in most[:LISTED]:
        yield text(f"{units.size(nbytes):>12}  {units.percent(nbytes / whole):>6}  {name}")
    if rest := most[LISTED:]:
        left = sum(nbytes for nbytes, _ in rest)
        yield text(f"{units.size(left):>12}  {units.percent(left / whole):>6}  {len(rest)} more")


def _add(table: Table, label: str, lines: Iterable[Text]) -> None:
    for place, line in enumerate(lines):
        table.add_row("" if place else label, line)
