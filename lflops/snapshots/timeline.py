"""Live bytes by category through a snapshot's trace."""

from collections.abc import Mapping
from typing import NamedTuple

from lflops.profile.records import Phase
from lflops.profile.series import extremes
from lflops.snapshots.holders import CATEGORIES, Category, category_of, line_of
from lflops.snapshots.peak import FREED, Alive, is_forward, is_optimizer
from lflops.snapshots.read import Entry, Snapshot


class Instant(NamedTuple):
    """What is alive after an entry of the trace."""

    at: int  # the entry's number
    action: str  # the allocator's word for what it did
    line: str  # the line of code that asked for it; empty where the stack is unknown
    phase: Phase
    live: int
    by_category: Mapping[Category, int]
    is_peak: bool  # whether memory ran out here, else whether the most was alive here


def timeline_of(snapshot: Snapshot, parameter_sizes: frozenset[int], most: int) -> list[Instant]:
    """The entries that allocate, free or fail, of more than `most` the extremes; empty without a trace."""
    in_use = (block for segment in snapshot.segments for block in segment.blocks if block.state == "active_allocated")
    alive = {block.address: Alive(block.requested, block.stack) for block in in_use}
    changes = [(at, entry) for at, entry in enumerate(snapshot.trace) if entry.action in ("alloc", "oom", *FREED)]
    for _, entry in reversed(changes):
        if entry.action == "alloc":
            alive.pop(entry.address, None)
        elif entry.action in FREED:
            alive[entry.address] = Alive(entry.size, entry.stack)
    live = dict.fromkeys(CATEGORIES, 0)
    held = {address: (category_of(each, parameter_sizes), each.bytes) for address, each in alive.items()}
    for category, nbytes in held.values():
        live[category] += nbytes
    totals, steps = [], []
    total = sum(live.values())
    for _, entry in changes:
        category, change = _change(entry, held, parameter_sizes)
        total += change
        totals.append(total)
        steps.append((category, change))
    failures = [place for place, (_, entry) in enumerate(changes) if entry.action == "oom"]
    peak = failures[-1] if failures else max(range(len(totals)), key=totals.__getitem__, default=0)
    kept = set(extremes(totals, most, [peak]))
    phase: Phase = "other"
    found = []
    for place, ((at, entry), (category, change)) in enumerate(zip(changes, steps, strict=True)):
        live[category] += change
        phase = phase if entry.action in FREED else _phase(entry)
        if place in kept:
            found.append(Instant(at, entry.action, line_of(entry.stack), phase, totals[place], dict(live), place == peak))
    return found


def _change(entry: Entry, held: dict[int, tuple[Category, int]], parameter_sizes: frozenset[int]) -> tuple[Category, int]:
    """The category whose bytes an entry changes, and by how many."""
    if entry.action == "alloc":
        category = category_of(Alive(entry.size, entry.stack, passes_ago=0), parameter_sizes)
        held[entry.address] = (category, entry.size)
        return category, entry.size
    if entry.action in FREED:
        category, nbytes = held.pop(entry.address, ("unknown", 0))
        return category, -nbytes
    return "unknown", 0


def _phase(entry: Entry) -> Phase:
    """What runs; backward has no Python stack."""
    if not entry.stack:
        return "backward"
    if is_optimizer(entry.stack):
        return "optimizer"
    return "forward" if is_forward(entry.stack) else "other"
