"""What a step would need otherwise, on a terminal."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from lflops import units
from lflops.analyze.memory.what_if import Checkpointed, Sharded
from lflops.report.terminal.text import margin, text

__all__ = ["render_checkpointed", "render_sharded"]

LISTED = 5


def render_checkpointed(blocks: Sequence[Checkpointed]) -> Group:
    """The blocks that save most, and all together."""
    table = margin()
    for place, each in enumerate(blocks[:LISTED]):
        table.add_row("" if place else "checkpointing", text(f"{_saving(each.saved_bytes, each.macs)}, {each.module}"))
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
