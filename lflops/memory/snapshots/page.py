"""Build the page of a CUDA memory snapshot: live bytes over time, and the code behind the peak."""

from collections.abc import Iterable

from msgspec import Struct

from lflops.hardware.chips import Hardware
from lflops.memory.snapshots.explain import ExplainedMemory, explained_lines, remedies
from lflops.memory.snapshots.holders import (
    CATEGORIES,
    FREED,
    Alive,
    Category,
    Change,
    category_of,
    changes,
    lasting_state,
    line_of,
    peak_of,
    phase_of,
    sizes_of_parameters,
)
from lflops.memory.snapshots.modules import MemoryByModule
from lflops.memory.snapshots.read import Entry, Snapshot, Stack
from lflops.profile.records import Phase
from lflops.profile.series import extremes, grouped
from lflops.report.payload.columns import Columns, Value, exact, lists
from lflops.report.payload.memory import POINTS, LiveMemoryShown, chip_memory

_HOLDERS = 400
"""Maximum number of groups of allocations in the treemap of the page."""


class SnapshotShown(LiveMemoryShown, frozen=True, kw_only=True):
    """The data of the page for a snapshot.

    Each point of the chart is an event of the trace (the list of events that torch recorded): an
    allocation, a free or a failed request. The page explains the memory at one point: the request
    that failed, or the peak. `peak` is the index of this point, or `None` if there is no trace.

    Attributes:
        title: The title of the page, such as `device 0`.
        sentences: The cause, the request that failed, and the totals.
        remedies: Ways to free memory.
        ran_out: Whether the explained point is a request that failed.
        holders: The allocations that are alive at the explained point, grouped by category and
            stack, and sorted by bytes in descending order.
        by_module: Bytes by module; `None` without a profile.
    """

    title: str
    sentences: list[str]
    remedies: list[str]
    ran_out: bool
    holders: Columns
    by_module: MemoryByModule | None


def snapshot_shown(
    snapshot: Snapshot, explained: ExplainedMemory, chip: Hardware | None = None
) -> SnapshotShown:
    alive = peak_of(snapshot).alive
    sizes = sizes_of_parameters(alive)
    points, peak = timeline_of(snapshot, sizes, POINTS)
    categories = tuple(name for name in CATEGORIES if any(points[name]))
    shown_points: Columns = {}
    for name, values in points.items():
        if name not in CATEGORIES or name in categories:
            shown_points[name] = values
    by_category: list[tuple[str, Value]] = []
    for category, nbytes in explained.by_category.items():
        if nbytes:
            by_category.append((category, exact(nbytes)))
    chip_name, capacity = chip_memory(chip)
    return SnapshotShown(
        title=f"device {explained.device}",
        sentences=_sentences(explained),
        remedies=list(remedies(explained)),
        ran_out=explained.ran_out,
        operators=len(snapshot.trace),
        peak_bytes=exact(explained.requested_bytes),
        peak=peak,
        chip=chip_name,
        capacity_bytes=capacity,
        points=shown_points,
        categories=categories,
        by_category=by_category,
        holders=_holders(alive, sizes),
        by_module=explained.by_module,
    )


def _sentences(explained: ExplainedMemory) -> list[str]:
    """Return the lines of the explanation before the table of categories."""
    first, *others = explained_lines(explained)
    # An empty line separates these lines from the table.
    return [first, *others[1 : others.index("by category") - 1]]


def timeline_of(
    snapshot: Snapshot, parameter_sizes: frozenset[int], most: int
) -> tuple[dict[str, list[Value]], int | None]:
    """Return the points of the chart of live bytes, and the index of the peak.

    The peak is the last failed request. If no request failed, it is the point with the most live
    bytes.

    Args:
        snapshot: The snapshot.
        parameter_sizes: The sizes of parameters in bytes.
        most: Maximum number of points. In a longer trace, points are dropped, but the highest and
            lowest points are kept.

    Returns:
        The points as a table, with one list for each column, keyed by the name of the column; and
        the index of the peak among the points, or `None` if there is no trace.
    """
    trace = snapshot.trace
    lasting = lasting_state(trace)

    def category_of_older(nbytes: int, stack: Stack) -> Category:
        return category_of(Alive(nbytes, stack), parameter_sizes)

    def category_of_new(index: int, entry: Entry) -> Category:
        alive = Alive(entry.size, entry.stack, passes_ago=0, outlives_step=index in lasting)
        return category_of(alive, parameter_sizes)

    live: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    traced: list[Change[Category]] = []
    for change in changes(snapshot, category_of_older, category_of_new):
        if change.trace_index >= 0:
            traced.append(change)
        else:
            live[change.label or "unknown"] += change.bytes

    total = sum(live.values())
    totals = []
    for change in traced:
        total += change.bytes
        totals.append(total)
    peak = _peak(trace, traced, totals)
    kept = extremes(totals, most, [peak])
    names = ("at", "operator", "module", "phase", "live", *CATEGORIES)
    points: dict[str, list[Value]] = {name: [] for name in names}
    phase: Phase = "other"
    kept_indices = set(kept)
    for index, change in enumerate(traced):
        entry = trace[change.trace_index]
        live[change.label or "unknown"] += change.bytes
        # The event of a free may have the stack of the allocation, so it does not show the phase.
        if entry.action not in FREED:
            phase = phase_of(entry.stack)
        if index not in kept_indices:
            continue
        points["at"].append(change.trace_index)
        points["operator"].append(entry.action)
        points["module"].append(line_of(entry.stack) or "no stack")
        points["phase"].append(phase)
        points["live"].append(exact(totals[index]))
        for category, nbytes in live.items():
            points[category].append(exact(nbytes))
    return points, kept.index(peak) if kept else None


def _peak(trace: tuple[Entry, ...], traced: list[Change[Category]], totals: list[int]) -> int:
    """Return the index of the last failed request among the traced changes.

    If no request failed, return the index of the change after which the most bytes are alive.
    """
    for index in reversed(range(len(traced))):
        if trace[traced[index].trace_index].action == "oom":
            return index
    return max(range(len(totals)), key=totals.__getitem__, default=0)


class _Holder(Struct):
    """Allocations of one category that were made with the same stack.

    Attributes:
        category: The category.
        line: The innermost line of the user's code.
        file: The file of that line.
        stack: The whole stack, with one line for each frame.
        count: Number of these allocations.
        bytes: Bytes of these allocations.
    """

    category: Category
    line: str
    file: str
    stack: str
    count: int
    bytes: int


def _holders(alive: Iterable[Alive], sizes: frozenset[int]) -> Columns:
    groups = grouped(alive, lambda each: (category_of(each, sizes), each.stack))
    holders = []
    for (category, stack), held in groups.items():
        line = line_of(stack)
        frames = [f"{frame.file}:{frame.line} {frame.function}" for frame in stack]
        holder = _Holder(
            category=category,
            line=line,
            file=line.partition(":")[0],
            stack="\n".join(frames),
            count=len(held),
            bytes=sum(each.bytes for each in held),
        )
        holders.append(holder)
    holders.sort(key=lambda holder: (-holder.bytes, holder.line))
    return lists(holders[:_HOLDERS], _Holder.__struct_fields__)
