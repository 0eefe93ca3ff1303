"""Draw memory on a terminal: the peak, and the effect of checkpointing or sharding."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.memory.peak import (
    FRAGMENTATION,
    Checkpointed,
    Holder,
    MemoryFit,
    Sharded,
    Verdict,
    memory_fit_of,
)
from lflops.profile.profile import Memory, Reserved
from lflops.report.terminal.tables import margin, prose, text
from lflops.report.text import counted, savings, times_mark

_COLOURS: Mapping[Verdict, str] = {
    "fits": "",
    "tight": "yellow",
    "fits, with retries": "yellow",
    "does not fit": "red",
}
_LISTED = 10
_BLOCKS = 5


def render_memory(analysis: Analysis) -> Group:
    """Draw the memory at its peak: the bytes by category and module, and the largest storages."""
    memory = analysis.profile.memory
    if memory is None:
        return Group(text("the profile has no memory data", "dim"))
    return Group(margin(_rows(analysis, memory)))


def _rows(analysis: Analysis, memory: Memory) -> Iterator[tuple[str, RenderableType]]:
    yield "peak", prose(units.size(memory.peak_bytes) + _when(analysis, memory))
    fit = memory_fit_of(analysis.profile, analysis.profile.run.hardware)
    if fit is not None:
        for line in memory_fit_lines(fit):
            yield "fit", prose(line, _COLOURS[fit.verdict])
    if memory.reserved is not None:
        yield "reserved", prose(_reserved(memory.reserved))
    for saving, _, cost in savings(analysis):
        # Checkpointing costs time, so `render_checkpointed` draws separate lines about it.
        if not cost:
            yield "to lower it", prose(saving)
    yield from _categories(memory)
    holders = {}
    for holder in analysis.holders:
        holders[_holder(holder)] = holder.bytes
    for row in _listed(holders, memory.peak_bytes):
        yield "by module", row
    for storage in memory.alive[:_LISTED]:
        origin = ""
        if storage.operator:
            origin = f", {storage.operator} in {storage.phase}"
        category = storage.category.replace("_", " ")
        module = storage.module or "the model itself"
        yield "largest", f"{units.size(storage.bytes):>12}  {category}, {module}{origin}"


def _when(analysis: Analysis, memory: Memory) -> str:
    """Describe when memory reached its peak: in which phase, operator and module."""
    at = analysis.peak_moment
    if at is None:
        return ""
    module = at.module or "the model itself"
    number = f"{memory.peak_index + 1:,}"
    return f", reached in {at.phase} by {at.operator} of {module} (operator {number} of the step)"


def _categories(memory: Memory) -> Iterator[tuple[str, RenderableType]]:
    most = memory.most_by_category.get("activations", 0)
    has_larger_moment = most > memory.by_category.get("activations", 0)
    parts: dict[str, int] = {}
    for category, nbytes in memory.by_category.items():
        name = category.replace("_", " ")
        if category == "activations" and has_larger_moment:
            name = "activations (at the peak)"
        parts[name] = nbytes
    for row in _listed(parts, memory.peak_bytes):
        yield "by category", row
    if has_larger_moment:
        line = f"{units.size(most):>12}          activations (highest value, at another moment)"
        yield "", prose(line, "dim")


def _holder(holder: Holder) -> str:
    name = holder.name or "the model itself"
    return f"{name}{times_mark(holder.modules)}"


def _reserved(reserved: Reserved) -> str:
    unused = units.UNKNOWN
    if reserved.reserved_bytes:
        unused = units.percent(reserved.unused_bytes / reserved.reserved_bytes)
    settings = reserved.settings or "default settings"
    line = (
        f"{units.size(reserved.reserved_bytes)} by torch's allocator with {settings} (simulated), "
        f"of which {unused} is unused; peak allocated: {units.size(reserved.allocated_bytes)}"
    )
    if reserved.retries:
        times = counted(reserved.retries, "time")
        line += (
            f"; the allocator frees its cache {times} to get memory, and the device waits each time"
        )
    return line


def memory_fit_lines(fit: MemoryFit) -> Iterable[str]:
    """Yield two lines: whether the step fits into memory, and the parts of the needed memory."""
    yield (
        f"{fit.verdict}: a step needs {units.size(fit.needed_bytes)} of the "
        f"{units.size(fit.usable_bytes)} that a process can use on {fit.chip} "
        f"({units.percent(fit.needed_bytes / fit.usable_bytes)})"
    )
    fragmentation = f"fragmentation ({units.percent(FRAGMENTATION, digits=0)} assumed)"
    if fit.fragmentation_simulated:
        fragmentation = "also reserved by the allocator (simulated)"
    parts = {
        "tensors": fit.tensor_bytes,
        fragmentation: fit.fragmentation_bytes,
        "CUDA context": fit.context_bytes,
        "cuBLAS": fit.workspace_bytes,
        "NCCL": fit.collective_bytes,
    }
    listed = []
    for name, nbytes in parts.items():
        if nbytes:
            listed.append(f"{units.size(nbytes)} {name}")
    yield ", ".join(listed)


def _listed(parts: Mapping[str, int], total: int) -> Iterable[Text]:
    """Yield a line for each of the largest parts of memory, and one line for the rest.

    `parts` has the bytes of each part, and `total` the bytes of all parts together.
    """
    largest = sorted(filter(parts.get, parts), key=lambda name: -parts[name])
    for name in largest[:_LISTED]:
        yield _part(parts[name], total, name)
    rest = largest[_LISTED:]
    if rest:
        yield _part(sum(parts[name] for name in rest), total, f"{len(rest)} more")


def _part(nbytes: int, total: int, name: str) -> Text:
    return text(f"{units.size(nbytes):>12}  {units.percent(nbytes / total):>6}  {name}")


def render_checkpointed(blocks: Sequence[Checkpointed]) -> Group:
    """Draw how much memory checkpointing saves and how much work it adds.

    There is a line for each of the blocks that save the most memory, and a line for all blocks
    together.
    """
    rows = []
    for block in blocks[:_BLOCKS]:
        saving = _saving(block.saved_bytes, block.macs)
        rows.append(("checkpointing", f"{block.module}: {saving}"))
    if len(blocks) > 1:
        # The first block has the largest saving. It is left out of the sum: while a block is
        # recomputed in backward, its activations are alive again, so one block saves nothing.
        saved = sum(block.saved_bytes for block in blocks[1:])
        saving = _saving(saved, sum(block.macs for block in blocks))
        rows.append(("checkpointing", f"all {len(blocks)} blocks: {saving}"))
    return Group(margin(rows))


def _saving(saved: int, macs: int) -> str:
    return f"saves up to {units.size(saved)}, adds {units.count(macs)} MACs"


def render_sharded(strategies: Sequence[Sharded]) -> Group:
    """Draw the memory that a rank needs under each sharding strategy, and whether it fits."""
    headings = ["total", "parameters", "gradients", "optimizer state", "gathered", "rest"]
    if any(strategy.memory_fit is not None for strategy in strategies):
        headings += ["needs", "verdict"]
    title = ""
    if strategies:
        title = f"peak per rank, {strategies[0].ranks} ranks"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    for _ in headings:
        table.add_column(justify="right")
    table.add_row(*map(text, (title, *headings)), style="bold")
    for strategy in strategies:
        sizes = (
            strategy.total_bytes,
            strategy.parameter_bytes,
            strategy.gradient_bytes,
            strategy.optimizer_state_bytes,
            strategy.gathered_bytes,
            strategy.rest_bytes,
        )
        cells = [text(units.size(nbytes)) for nbytes in sizes]
        fit = strategy.memory_fit
        if fit is not None:
            cells.append(text(units.size(fit.needed_bytes)))
            cells.append(text(fit.verdict, _COLOURS[fit.verdict]))
        table.add_row(text(strategy.strategy), *cells)
    remark = (
        "estimated from this step; the column 'needs' also includes fragmentation, the CUDA "
        "context, cuBLAS and NCCL"
    )
    return Group(table, text(remark, "dim"))
