"""Memory on a terminal.

The peak and what is alive then, and what checkpointing or sharding would change.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.memory.peak import FRAGMENTATION, Checkpointed, MemoryFit, Sharded, Verdict, room_for
from lflops.profile.profile import Memory, Reserved
from lflops.report.terminal.tables import margin, prose, text
from lflops.report.text import savings

_COLOURS: Mapping[Verdict, str] = {"fits": "", "tight": "yellow", "does not fit": "red"}
_LISTED = 10
_BLOCKS = 5


def render_memory(analysis: Analysis) -> Group:
    """The peak, by category, by module and by its largest storages."""
    memory = analysis.profile.memory
    return Group(
        text("memory was not counted", "dim") if memory is None else margin(_rows(analysis, memory))
    )


def _rows(analysis: Analysis, memory: Memory) -> Iterator[tuple[str, RenderableType]]:
    at, when = analysis.peak_moment, ""
    if at is not None:
        when = f", reached in {at.phase} by {at.operator} of {at.module or 'the model itself'}, operator {memory.peak_index + 1:,}"
    yield "peak", prose(f"{units.size(memory.peak_bytes)}{when}")
    if (room := room_for(analysis.profile, analysis.profile.run.hardware)) is not None:
        yield from (("verdict", prose(line, _COLOURS[room.verdict])) for line in room_lines(room))
    if (reserved := memory.reserved) is not None:
        yield "reserved", prose(_reserved(reserved))
    # What checkpointing saves has its own lines.
    yield from (("to lower it", prose(what)) for what, _, cost in savings(analysis) if not cost)
    most, at_peak = (
        each.get("activations", 0) for each in (memory.most_by_category, memory.by_category)
    )
    names = {"activations": "activations (peak)"} if most > at_peak else {}
    categories = {
        names.get(category, category.replace("_", " ")): nbytes
        for category, nbytes in memory.by_category.items()
    }
    yield from (("by category", line) for line in _listed(categories, memory.peak_bytes))
    if most > at_peak:
        yield (
            "",
            prose(
                f"{units.size(most):>12}          activations (largest, at another moment)", "dim"
            ),
        )
    holders = {
        (one.name or "the model itself")
        + (f" ×{one.modules}" if one.modules > 1 else ""): one.bytes
        for one in analysis.holders
    }
    yield from (("by module", line) for line in _listed(holders, memory.peak_bytes))
    for each in memory.alive[:_LISTED]:
        made = f", {each.operator} in {each.phase}" if each.operator else ""
        yield (
            "largest",
            f"{units.size(each.bytes):>12}  {each.category.replace('_', ' ')}, {each.module or 'the model itself'}{made}",
        )


def _reserved(reserved: Reserved) -> str:
    unused = (
        units.percent(reserved.unused_bytes / reserved.reserved_bytes)
        if reserved.reserved_bytes
        else units.UNKNOWN
    )
    settings = f"with {reserved.settings}" if reserved.settings else "with its default settings"
    return (
        f"{units.size(reserved.reserved_bytes)} by torch's allocator {settings}, simulated; {unused} of it unused, "
        f"at most {units.size(reserved.allocated_bytes)} allocated"
    )


def room_lines(room: MemoryFit) -> Iterable[str]:
    """The verdict, and what it is made of."""
    yield (
        f"{room.verdict}: {units.size(room.needed_bytes)} of the {units.size(room.usable_bytes)} that a process has on {room.chip} "
        f"({units.percent(room.needed_bytes / room.usable_bytes)})"
    )
    assumed = f"fragmentation ({units.percent(FRAGMENTATION, digits=0)} assumed)"
    parts = {
        "tensors": room.tensor_bytes,
        "reserved besides by the allocator (simulated)"
        if room.fragmentation_simulated
        else assumed: room.fragmentation_bytes,
        "CUDA context": room.context_bytes,
        "cuBLAS": room.workspace_bytes,
        "NCCL": room.collective_bytes,
    }
    yield ", ".join(f"{units.size(nbytes)} {name}" for name, nbytes in parts.items() if nbytes)


def _listed(parts: Mapping[str, int], total: int) -> Iterable[Text]:
    largest = sorted(
        ((nbytes, name) for name, nbytes in parts.items() if nbytes), key=lambda part: -part[0]
    )
    for nbytes, name in largest[:_LISTED]:
        yield text(f"{units.size(nbytes):>12}  {units.percent(nbytes / total):>6}  {name}")
    if rest := largest[_LISTED:]:
        left = sum(nbytes for nbytes, _ in rest)
        yield text(f"{units.size(left):>12}  {units.percent(left / total):>6}  {len(rest)} more")


def render_checkpointed(blocks: Sequence[Checkpointed]) -> Group:
    """The blocks that save most, and all together."""
    lines = [f"{_saving(each.saved_bytes, each.macs)}, {each.module}" for each in blocks[:_BLOCKS]]
    if len(blocks) > 1:
        # While one runs again, its own activations are there once more.
        saved = sum(each.saved_bytes for each in blocks[1:])
        lines.append(
            f"{_saving(saved, sum(each.macs for each in blocks))}, all {len(blocks)} blocks"
        )
    return Group(margin(("checkpointing", line) for line in lines))


def render_sharded(strategies: Sequence[Sharded]) -> Group:
    """Draw what a rank needs under each strategy.

    In all, whether that fits, and a column for each part.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    heads = ["in all", "parameters", "gradients", "optimizer state", "gathered", "rest"]
    has_room = any(each.room is not None for each in strategies)
    heads += ["needs", "verdict"] if has_room else []
    for _ in heads:
        table.add_column(justify="right")
    table.add_row(
        *map(text, (f"peak of each of {strategies[0].ranks} ranks" if strategies else "", *heads)),
        style="bold",
    )
    for each in strategies:
        parts = (
            each.parameter_bytes,
            each.gradient_bytes,
            each.optimizer_state_bytes,
            each.gathered_bytes,
            each.rest_bytes,
        )
        cells = [text(units.size(part)) for part in (each.total_bytes, *parts)]
        if each.room is not None:
            cells += [
                text(units.size(each.room.needed_bytes)),
                text(each.room.verdict, _COLOURS[each.room.verdict]),
            ]
        table.add_row(text(each.strategy), *cells)
    return Group(
        table,
        text(
            "by arithmetic on this step; needs = with fragmentation, CUDA's context, cuBLAS and NCCL",
            "dim",
        ),
    )


def _saving(saved: int, macs: int) -> str:
    return f"saves up to {units.size(saved)} for {units.count(macs)} MACs more"
