"""Memory on a terminal: the peak and what is alive then, and what checkpointing or sharding would change."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.memory.peak import Holder
from lflops.analyze.memory.what_if import Checkpointed, Sharded
from lflops.hardware.chips import Hardware
from lflops.profile.model import Memory, Moment
from lflops.report.terminal.tables import margin, text

__all__ = ["render_checkpointed", "render_memory", "render_sharded"]

_LISTED = 10
_BLOCKS = 5


def render_memory(analysis: Analysis) -> Group:
    """The peak, by category, by module and by its largest storages."""
    memory = analysis.profile.memory
    if memory is None:
        return Group(text("memory was not counted", "dim"))
    table = margin()
    table.add_row("peak", text(", ".join([units.size(memory.peak_bytes), *_when(memory, analysis.peak_moment)])))
    if (room := _room(memory, analysis.profile.run.hardware)) is not None:
        table.add_row("fits", text(room, "" if room.startswith("yes") else "yellow"))
    categories = {category.replace("_", " "): nbytes for category, nbytes in memory.by_category.items()}
    _add(table, "by category", _listed(categories, memory.peak_bytes))
    _add(table, "by module", _listed({_name(each): each.bytes for each in analysis.holders}, memory.peak_bytes))
    largest = [
        f"{units.size(each.bytes):>12}  {each.category.replace('_', ' ')}, {each.module or 'the root'}"
        + (f", {each.operator} in {each.phase}" if each.operator else "")
        for each in memory.alive[:_LISTED]
    ]
    _add(table, "largest", map(text, largest))
    return Group(table)


def _when(memory: Memory, at: Moment | None) -> list[str]:
    """The operator that reached it, where that is known."""
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


def _listed(parts: Mapping[str, int], total: int) -> Iterable[Text]:
    largest = sorted(((nbytes, name) for name, nbytes in parts.items() if nbytes), key=lambda part: -part[0])
    for nbytes, name in largest[:_LISTED]:
        yield text(f"{units.size(nbytes):>12}  {units.percent(nbytes / total):>6}  {name}")
    if rest := largest[_LISTED:]:
        left = sum(nbytes for nbytes, _ in rest)
        yield text(f"{units.size(left):>12}  {units.percent(left / total):>6}  {len(rest)} more")


def _add(table: Table, label: str, lines: Iterable[Text]) -> None:
    for index, line in enumerate(lines):
        table.add_row("" if index else label, line)


def render_checkpointed(blocks: Sequence[Checkpointed]) -> Group:
    """The blocks that save most, and all together."""
    table = margin()
    for index, each in enumerate(blocks[:_BLOCKS]):
        table.add_row("" if index else "checkpointing", text(f"{_saving(each.saved_bytes, each.macs)}, {each.module}"))
    if len(blocks) > 1:
        # While one runs again, its own activations are there once more.
        saved = sum(each.saved_bytes for each in blocks[1:])
        table.add_row("", text(f"{_saving(saved, sum(each.macs for each in blocks))}, all {len(blocks)} blocks"))
    return Group(table)


def render_sharded(strategies: Sequence[Sharded]) -> Group:
    """A column for each part of what a rank holds."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    for _ in range(5):
        table.add_column(justify="right")
    heads = ("parameters", "gradients", "optimizer state", "gathered", "the rest at the peak")
    table.add_row(*map(text, (f"each of {strategies[0].ranks} ranks" if strategies else "", *heads)), style="bold")
    for each in strategies:
        parts = (each.parameter_bytes, each.gradient_bytes, each.optimizer_state_bytes, each.gathered_bytes, each.rest_bytes)
        table.add_row(text(each.strategy), *(text(units.size(part)) for part in parts))
    return Group(table)


def _saving(saved: int, macs: int) -> str:
    return f"saves up to {units.size(saved)} for {units.count(macs)} MACs more"
