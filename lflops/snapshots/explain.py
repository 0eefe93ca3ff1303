"""A snapshot explained: what is alive at its peak, who holds it, and why memory ran out."""

from collections.abc import Mapping

from msgspec import Struct

from lflops.hardware.chips import Hardware
from lflops.snapshots.causes import Cause, causes_of
from lflops.snapshots.holders import CATEGORIES, Category, StackHolder, category_of, holders_of, line_of, sizes_of_parameters
from lflops.snapshots.peak import peak_of
from lflops.snapshots.read import Snapshot

__all__ = ["ExplainedMemory", "explain"]


class ExplainedMemory(Struct, frozen=True, kw_only=True):
    """The memory of a device at the moment when it ran out, else when the most was allocated."""

    device: int
    ran_out: bool  # whether a request failed
    failed_bytes: int | None  # what it asked for; `None` where none failed
    failed_line: str  # the line of code that asked
    missing_bytes: int | None  # how much more the device had to have free; `None` where that is unknown
    requested_bytes: int  # asked for by all that is alive
    reserved_bytes: int  # in the allocator's segments
    unused_bytes: int  # reserved, and no tensor's: cached blocks, fragments and rounding
    largest_unused_bytes: int  # the largest free block in the end
    device_free_bytes: int | None  # what the device had left when the request failed; `None` is unknown
    forward_passes: int
    optimizer_steps: int
    named_share: float  # of the requested bytes, those with a category or a line of code
    by_category: Mapping[Category, int]
    holders: tuple[StackHolder, ...]
    causes: tuple[Cause, ...]  # the one to look at first first
    settings: str


def explain(snapshot: Snapshot, chip: Hardware | None = None, total: int | None = None) -> ExplainedMemory:
    """Explain a snapshot of one device.

    With the chip's memory, or the `total` that a process sees where that is known better, another process's share is known.
    """
    peak = peak_of(snapshot)
    if total is None and chip is not None:
        known = chip.usable_bytes if chip.usable_bytes is not None else chip.memory_bytes
        total = None if known is None else int(known)
    before = sizes_of_parameters(peak.alive)
    by_category: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for each in peak.alive:
        by_category[category_of(each, before)] += each.bytes
    failed = peak.ran_out
    unused = max(peak.reserved - peak.bytes, 0)
    free = failed.device_free if failed is not None else None
    unnamed = sum(each.bytes for each in peak.alive if not each.stack and category_of(each, before) == "unknown")
    blocks = (block for segment in snapshot.segments for block in segment.blocks)
    return ExplainedMemory(
        device=snapshot.device,
        ran_out=failed is not None,
        failed_bytes=None if failed is None else failed.size,
        failed_line="" if failed is None else line_of(failed.stack),
        missing_bytes=None if failed is None or free is None else max(failed.size - free, 0),
        requested_bytes=peak.bytes,
        reserved_bytes=peak.reserved,
        unused_bytes=unused,
        largest_unused_bytes=max((block.size for block in blocks if block.state == "inactive"), default=0),
        device_free_bytes=free,
        forward_passes=peak.passes,
        optimizer_steps=peak.steps,
        named_share=1 - unnamed / peak.bytes if peak.bytes else 1.0,
        by_category=by_category,
        holders=holders_of(peak.alive, before),
        causes=causes_of(peak, before, total),
        settings=snapshot.settings,
    )
