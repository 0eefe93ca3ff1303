"""A snapshot explained: what is alive at its peak, who holds it, why memory ran out, and what to do."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from lflops import units
from lflops.hardware.chips import Hardware
from lflops.profile.series import summed
from lflops.report.lines.text import counted
from lflops.snapshots.causes import Cause, causes_of
from lflops.snapshots.holders import CATEGORIES, Category, StackHolder, category_of, holders_of, line_of, peak_of, sizes_of_parameters
from lflops.snapshots.read import Snapshot, snapshot_of


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

    def lines(self) -> Iterator[str]:
        """The report in sentences."""
        return explained_lines(self)


def explain_snapshot(content: Any, device: int | None, total: int) -> ExplainedMemory:
    """Explain what torch's allocator returns as its snapshot; `total` is the memory that the process sees on the device."""
    return explain(snapshot_of(content, device), total=total)


def explain(snapshot: Snapshot, chip: Hardware | None = None, total: int | None = None) -> ExplainedMemory:
    """Explain a snapshot of one device.

    With the chip's memory, or the `total` that a process sees where that is known better, another process's share is known.
    """
    peak = peak_of(snapshot)
    if total is None and chip is not None:
        known = chip.usable_bytes if chip.usable_bytes is not None else chip.memory_bytes
        total = None if known is None else int(known)
    before = sizes_of_parameters(peak.alive)
    by_category = dict.fromkeys(CATEGORIES, 0) | summed((category_of(each, before), each.bytes) for each in peak.alive)
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


_LISTED = 12

SENTENCES: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))
"""From a cause's code to its `sentence`, and to its `remedy`."""


def cause_line(cause: Cause) -> str:
    """The cause with its bytes and its line of code."""
    sentence = SENTENCES[cause.code]["sentence"].format(bytes=units.size(cause.bytes), count=cause.count)
    return f"{sentence} ({cause.line})" if cause.line else sentence


def remedies(explained: ExplainedMemory) -> Iterator[str]:
    """What can be done about each cause, and whether that would have been enough."""
    for cause in explained.causes[:4]:
        enough = "" if explained.missing_bytes is None or cause.bytes >= explained.missing_bytes else "; not enough alone"
        yield f"{units.size(cause.bytes)}: {SENTENCES[cause.code]['remedy']}{enough}"


def explained_lines(explained: ExplainedMemory) -> Iterator[str]:
    """The report: the cause, the request, the memory, who holds it, and what can be done."""
    yield f"{cause_line(explained.causes[0])}." if explained.causes else "Nothing is allocated."
    yield ""
    if explained.ran_out:
        at = f" at {explained.failed_line}" if explained.failed_line else ""
        free = f"; the device had {units.size(explained.device_free_bytes)} free" if explained.device_free_bytes is not None else ""
        yield f"device {explained.device} ran out of memory: {units.size(explained.failed_bytes)} were asked for{at}{free}"
    else:
        yield f"device {explained.device}, the most that was allocated"
    yield (
        f"reserved {units.size(explained.reserved_bytes)}, requested {units.size(explained.requested_bytes)}, unused "
        f"{units.size(explained.unused_bytes)} (the largest piece in the end {units.size(explained.largest_unused_bytes)})"
    )
    passes = f"{explained.forward_passes} forward pass{'' if explained.forward_passes == 1 else 'es'}"
    yield f"the recording has {passes} and {counted(explained.optimizer_steps, 'optimizer step')}"
    total = explained.requested_bytes
    yield ""
    yield "by category"
    for category, nbytes in sorted(explained.by_category.items(), key=lambda item: -item[1]):
        if nbytes:
            yield f"  {units.size(nbytes):>12}  {units.percent(nbytes / total):>6}  {category.replace('_', ' ')}"
    yield ""
    yield f"by line of code ({units.percent(explained.named_share)} of the bytes are named)"
    for each in explained.holders[:_LISTED]:
        where = f"{each.category.replace('_', ' ')}, {each.count} × {each.line or 'no stack'}"
        yield f"  {units.size(each.bytes):>12}  {units.percent(each.bytes / total):>6}  {where}"
    if len(explained.holders) > _LISTED:
        yield f"  {len(explained.holders) - _LISTED} more lines"
    yield ""
    yield "what would free memory"
    yield from (f"  {each}" for each in remedies(explained))
