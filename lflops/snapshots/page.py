"""The page of a CUDA memory snapshot: live bytes through the allocator's record, and what is alive at the peak, by line of code."""

from collections.abc import Iterable

from msgspec import Struct

from lflops.hardware.chips import Hardware
from lflops.report.payload.columns import Columns, exact, lists
from lflops.report.payload.memory import POINTS, LiveMemoryShown, chip_memory
from lflops.snapshots.explain import ExplainedMemory, explained_lines, remedies
from lflops.snapshots.holders import CATEGORIES, Category, category_of, line_of, sizes_of_parameters
from lflops.snapshots.peak import Alive, peak_of
from lflops.snapshots.read import Snapshot, Stack
from lflops.snapshots.timeline import timeline_of

_HOLDERS = 400


class SnapshotShown(LiveMemoryShown, frozen=True, kw_only=True):
    """A snapshot as the page draws it.

    Attributes:
        title: The device.
        sentences: The cause, the request that failed, and the totals.
        remedies: What would free memory.
        ran_out: Whether the moment that is explained is a request that failed; else it is the peak.
        points: Bytes alive after each entry that allocates, frees or fails.
        peak: The index in `points` of the moment that is explained; `None` without a trace.
        holders: What is alive then, by category and stack, the most bytes first; of smaller ones the category has the rest.
    """

    title: str
    sentences: list[str]
    remedies: list[str]
    ran_out: bool
    holders: Columns


class _Holder(Struct, frozen=True):
    category: Category
    line: str
    file: str
    stack: str
    count: int
    bytes: int


def snapshot_shown(snapshot: Snapshot, explained: ExplainedMemory, chip: Hardware | None = None) -> SnapshotShown:
    """What the page shows of an explained snapshot."""
    alive = peak_of(snapshot).alive
    sizes = sizes_of_parameters(alive)
    instants = timeline_of(snapshot, sizes, POINTS)
    categories = tuple(name for name in CATEGORIES if any(each.by_category[name] for each in instants))
    points: Columns = {
        "at": [each.at for each in instants],
        "operator": [each.action for each in instants],
        "module": [each.line or "no stack" for each in instants],
        "phase": [each.phase for each in instants],
        "live": [exact(each.live) for each in instants],
    }
    for name in categories:
        points[name] = [exact(each.by_category[name]) for each in instants]
    name_of_chip, capacity = chip_memory(chip)
    first, *others = explained_lines(explained)
    return SnapshotShown(
        title=f"device {explained.device}",
        sentences=[first, *others[1 : others.index("by category") - 1]],
        remedies=list(remedies(explained)),
        ran_out=explained.ran_out,
        operators=len(snapshot.trace),
        peak_bytes=exact(explained.requested_bytes),
        peak=next((place for place, each in enumerate(instants) if each.is_peak), None),
        chip=name_of_chip,
        capacity_bytes=capacity,
        points=points,
        categories=categories,
        by_category=[(name, exact(nbytes)) for name, nbytes in explained.by_category.items() if nbytes],
        holders=lists(_holders(alive, sizes)[:_HOLDERS], _Holder.__struct_fields__),
    )


def _holders(alive: Iterable[Alive], sizes: frozenset[int]) -> list[_Holder]:
    """By category and stack, the most bytes first."""
    sums: dict[tuple[Category, Stack], list[int]] = {}
    for each in alive:
        entry = sums.setdefault((category_of(each, sizes), each.stack), [0, 0])
        entry[0] += 1
        entry[1] += each.bytes
    rows = [
        _Holder(category, line_of(stack), line_of(stack).partition(":")[0], _text(stack), count, nbytes)
        for (category, stack), (count, nbytes) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes, row.line))


def _text(stack: Stack) -> str:
    """A line for each frame, the innermost first."""
    return "\n".join(f"{frame.file}:{frame.line} {frame.function}" for frame in stack)
