"""The page of a CUDA memory snapshot.

Live bytes through the allocator's record, and what is alive at the peak, by line of code.
"""

from collections.abc import Iterable
from itertools import accumulate

from lflops.hardware.chips import Hardware
from lflops.memory.snapshots.explain import ExplainedMemory, explained_lines, remedies
from lflops.memory.snapshots.holders import (
    CATEGORIES,
    FREED,
    Alive,
    Category,
    category_of,
    changes,
    lasting_state,
    line_of,
    peak_of,
    phase_of,
    sizes_of_parameters,
)
from lflops.memory.snapshots.modules import MemoryByModule
from lflops.memory.snapshots.read import Entry, Snapshot
from lflops.profile.records import Phase
from lflops.profile.series import extremes, grouped, summed
from lflops.report.payload.columns import Columns, Value, exact
from lflops.report.payload.memory import POINTS, LiveMemoryShown, chip_memory


def timeline_of(
    snapshot: Snapshot, parameter_sizes: frozenset[int], most: int
) -> tuple[dict[str, list[Value]], int | None]:
    """The entries that allocate, free or fail, of more than `most` the extremes, with all bytes alive then; empty without a trace."""
    # The number is the place among them where memory ran out, else where the most was alive.
    trace, lasting = snapshot.trace, lasting_state(snapshot.trace)

    def category(at: int, entry: Entry) -> Category:
        return category_of(
            Alive(entry.size, entry.stack, passes_ago=0, outlives_step=at in lasting),
            parameter_sizes,
        )

    found = list(
        changes(
            snapshot,
            lambda nbytes, stack: category_of(Alive(nbytes, stack), parameter_sizes),
            category,
        )
    )
    older, steps = (
        [each for each in found if (each[0] < 0) == is_older] for is_older in (True, False)
    )
    live = dict.fromkeys(CATEGORIES, 0) | summed(
        (name or "unknown", nbytes) for _, name, nbytes in older
    )
    totals = list(accumulate((nbytes for _, _, nbytes in steps), initial=sum(live.values())))[1:]
    failures = [place for place, (at, _, _) in enumerate(steps) if trace[at].action == "oom"]
    peak = failures[-1] if failures else max(range(len(totals)), key=totals.__getitem__, default=0)
    kept = set(extremes(totals, most, [peak]))
    phase: Phase = "other"
    points: dict[str, list[Value]] = {
        name: [] for name in ("at", "operator", "module", "phase", "live", *CATEGORIES)
    }
    for place, (at, name, nbytes) in enumerate(steps):
        entry = trace[at]
        live[name or "unknown"] += nbytes
        phase = phase if entry.action in FREED else phase_of(entry.stack)
        if place in kept:
            instant = (
                at,
                entry.action,
                line_of(entry.stack) or "no stack",
                phase,
                exact(totals[place]),
                *map(exact, live.values()),
            )
            for values, value in zip(points.values(), instant, strict=True):
                values.append(value)
    return points, sorted(kept).index(peak) if kept else None


_HOLDERS = 400


class SnapshotShown(LiveMemoryShown, frozen=True, kw_only=True):
    """A snapshot as the page draws it.

    Its `points` are the bytes alive after each entry that allocates, frees or fails; `peak` is the
    index in them of the moment that is explained, and `None` without a trace.
    """

    # the device
    title: str
    # the cause, the request that failed, and the totals
    sentences: list[str]
    # what would free memory
    remedies: list[str]
    ran_out: (
        # whether the moment that is explained is a request that failed; else it is the peak
        bool
    )
    # what is alive then, by category and stack, the most bytes first; of smaller ones the category
    # has the rest
    holders: Columns
    # `None` without a profile
    by_module: MemoryByModule | None


def snapshot_shown(
    snapshot: Snapshot, explained: ExplainedMemory, chip: Hardware | None = None
) -> SnapshotShown:
    """Make the page's value of an explained snapshot."""
    alive = peak_of(snapshot).alive
    sizes = sizes_of_parameters(alive)
    points, peak = timeline_of(snapshot, sizes, POINTS)
    categories = tuple(name for name in CATEGORIES if any(points[name]))
    name_of_chip, capacity = chip_memory(chip)
    first, *others = explained_lines(explained)
    return SnapshotShown(
        title=f"device {explained.device}",
        sentences=[first, *others[1 : others.index("by category") - 1]],
        remedies=list(remedies(explained)),
        ran_out=explained.ran_out,
        operators=len(snapshot.trace),
        peak_bytes=exact(explained.requested_bytes),
        peak=peak,
        chip=name_of_chip,
        capacity_bytes=capacity,
        points={
            name: values
            for name, values in points.items()
            if name not in CATEGORIES or name in categories
        },
        categories=categories,
        by_category=[
            (name, exact(nbytes)) for name, nbytes in explained.by_category.items() if nbytes
        ],
        holders=_holders(alive, sizes),
        by_module=explained.by_module,
    )


def _holders(alive: Iterable[Alive], sizes: frozenset[int]) -> Columns:
    rows: list[tuple[Category, str, str, str, int, int]] = []
    for (category, stack), held in grouped(
        alive, lambda each: (category_of(each, sizes), each.stack)
    ).items():
        line, text = (
            line_of(stack),
            "\n".join(f"{frame.file}:{frame.line} {frame.function}" for frame in stack),
        )
        rows.append(
            (
                category,
                line,
                line.partition(":")[0],
                text,
                len(held),
                sum(each.bytes for each in held),
            )
        )
    largest = sorted(rows, key=lambda row: (-row[-1], row[1]))[:_HOLDERS]
    names = ("category", "line", "file", "stack", "count", "bytes")
    return {name: [exact(row[place]) for row in largest] for place, name in enumerate(names)}
