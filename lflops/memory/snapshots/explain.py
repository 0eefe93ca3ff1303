"""A snapshot explained.

What is alive at its peak, who holds it, and why memory ran out; and two of them compared.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct

from lflops import units
from lflops.hardware.chips import Hardware
from lflops.memory.snapshots.holders import (
    CATEGORIES,
    Alive,
    Category,
    Peak,
    StackHolder,
    category_of,
    holders_of,
    line_of,
    peak_of,
    phase_of,
    sizes_of_parameters,
)
from lflops.memory.snapshots.modules import MemoryByModule
from lflops.memory.snapshots.read import LARGEST_NUMBER, Snapshot, Stack, snapshot_of
from lflops.profile.series import grouped, summed
from lflops.report.text import counted

_Kept = Literal[
    "kept_graphs", "retained_graph", "kept_results", "validation_graph", "kept_gradients"
]
_Category = Literal[
    "optimizer_state",
    "activations",
    "parameters",
    "gradients",
    "temporary",
    "optimizer_temporary",
    "other",
    "unknown",
]
CauseCode = Literal[
    "process_limit", "other_process", "fragmentation", "model_copy", "huge_tensor", _Kept, _Category
]

EVALUATION = (
    "validation_step",
    "test_step",
    "validate",
    "evaluate",
    "evaluation",
    "evaluation_step",
    "eval_step",
    "valid_step",
)
# of what is alive: less does not name the cause
LEAST_SHARE = 0.1

# comes first, with the largest of the others
_FIRST = {"process_limit"}
# of what the largest line of kept results holds: less is a loss, and makes no graph of them
SMALL_SHARE = 0.01
HUGE_SHARE = 0.2
# forward passes whose results are still there: two may be pipelining, or a graph that was kept by
# accident
MANY = 3


class Cause(Struct, frozen=True, kw_only=True):
    """One cause."""

    code: CauseCode
    # what it explains: that much would be free without it
    bytes: int
    # how many passes, tensors or pieces it is about
    count: int = 0
    # the line of code that made most of it; empty where unknown
    line: str = ""


class _Case(NamedTuple):
    peak: Peak
    held: Mapping[
        str, list[Alive]
        # by category, what an optimizer's step makes and frees apart from all else that is temporary
    ]
    # bytes that were asked for in vain, 0 where memory did not run out
    failed: int
    # reserved bytes that no tensor has
    unused: int
    # bytes of the device that the process could have; `None` is unknown
    total: int | None


def causes_of(
    peak: Peak, parameter_sizes: frozenset[int], total: int | None = None
) -> tuple[Cause, ...]:
    """The causes, the one to look at first first.

    The sizes and the total, which a process sees of the device, are in bytes.
    """
    # A particular one, a leak for instance, goes before the largest category where it explains a
    # tenth of the memory and the failed request
    held = grouped(peak.alive, lambda each: _code(category_of(each, parameter_sizes), each))
    failed = peak.ran_out.size if peak.ran_out is not None else 0
    case = _Case(peak, held, failed, max(peak.reserved - peak.bytes, 0), total)
    particular = [cause for rule in _RULES if (cause := rule(case)) is not None]
    least = max(LEAST_SHARE * (peak.bytes + failed), min(failed, peak.bytes))
    found = (each for each in particular if each.code in _FIRST or each.bytes >= least)
    ruling = sorted(found, key=lambda each: (each.code not in _FIRST, -each.bytes))
    general = [_held(kind, held.get(kind, [])) for kind in get_args(_Category)]
    largest = sorted((each for each in general if each is not None), key=lambda each: -each.bytes)
    return (*ruling, *largest, *(each for each in particular if each not in ruling))


def _code(category: Category, alive: Alive) -> str:
    return (
        "optimizer_temporary"
        if category == "temporary" and phase_of(alive.stack) == "optimizer"
        else category
    )


def _elsewhere(case: _Case) -> Cause | None:
    """A limit of the process, where the device has free what was asked for.

    Another process, where less is free than this one leaves.
    """
    failed = case.peak.ran_out
    if failed is None or failed.device_free is None:
        return None
    if failed.device_free >= failed.size + LARGE_SEGMENT:
        return Cause(code="process_limit", bytes=failed.device_free)
    elsewhere = 0 if case.total is None else case.total - failed.device_free - case.peak.reserved
    return Cause(code="other_process", bytes=elsewhere) if elsewhere > OUTSIDE_ALLOCATOR else None


# bytes that torch may ask the device for in place of a smaller request
LARGE_SEGMENT = 20 * 2**20
OUTSIDE_ALLOCATOR = (
    3 * 2**30
    # bytes that a process may have besides the allocator: CUDA's context, NCCL's buffers, libraries
)


def _fragmentation(case: _Case) -> Cause | None:
    """The request would fit into what is free, but not into one piece."""
    if (
        case.failed
        and case.unused >= case.failed
        and case.unused >= LEAST_SHARE * case.peak.reserved
    ):
        return Cause(code="fragmentation", bytes=case.unused)
    return None


def _kept_passes(case: _Case) -> Cause | None:
    """Activations of forward passes that are over."""
    old = [
        each
        for each in case.held.get("activations", ())
        if each.passes_ago and not _is_evaluation(each)
    ]
    passes = len({each.passes_ago for each in old})
    if passes < MANY:
        return _held("retained_graph", old, passes)
    sizes = summed((_calls(each.stack), each.bytes) for each in old)
    stacks = [
        stack for stack, nbytes in sizes.items() if nbytes > SMALL_SHARE * max(sizes.values())
    ]
    now = {_calls(each.stack) for each in case.held.get("activations", ()) if not each.passes_ago}
    # Of a whole graph most of what one pass makes is kept; of results kept in a list only one
    # line's.
    whole = len(stacks) > 2 or 1 < len(stacks) >= len(now)
    return _held("kept_graphs" if whole else "kept_results", old, passes)


def _calls(stack: Stack) -> Stack:
    """The frames that are the same in each step.

    A module's call takes another line where it has hooks, and a window's steps add some.
    """
    return tuple(frame for frame in stack if not frame.file.endswith("nn/modules/module.py"))


def _validation_graph(case: _Case) -> Cause | None:
    """Activations that a validation keeps for a backward that never comes."""
    held = [each for each in case.held.get("activations", ()) if _is_evaluation(each)]
    return _held("validation_graph", held, len({each.passes_ago for each in held}))


def _is_evaluation(alive: Alive) -> bool:
    return any(frame.function in EVALUATION for frame in alive.stack)


def _kept_gradients(case: _Case) -> Cause | None:
    """Gradients that have outlived an optimizer's step."""
    held = [each for each in case.held.get("gradients", ()) if each.steps_ago]
    return (
        Cause(code="kept_gradients", bytes=sum(each.bytes for each in held), count=len(held))
        if held
        else None
    )


def _model_copy(case: _Case) -> Cause | None:
    """A second model: an EMA, a reference, a deep copy."""
    return _held("model_copy", case.held.get("copy", []))


def _huge_tensor(case: _Case) -> Cause | None:
    """One tensor that is a fifth of all: the one that failed, or the largest."""
    total = case.peak.bytes + case.failed
    largest = max(case.peak.alive, key=lambda each: each.bytes, default=None)
    if (
        case.peak.ran_out is not None
        and case.failed >= HUGE_SHARE * total
        and (largest is None or case.failed >= largest.bytes)
    ):
        return Cause(
            code="huge_tensor", bytes=case.failed, count=1, line=line_of(case.peak.ran_out.stack)
        )
    if (
        largest is not None
        and largest.bytes >= HUGE_SHARE * total
        and category_of(largest) == "activations"
    ):
        alike = [each for each in case.peak.alive if each.bytes == largest.bytes]
        return Cause(
            code="huge_tensor", bytes=largest.bytes, count=len(alike), line=line_of(largest.stack)
        )
    return None


def _held(code: CauseCode, held: list[Alive], count: int | None = None) -> Cause | None:
    """A cause that explains some allocations, with the line that made the most bytes of them.

    `None` where there are none.
    """
    if not held:
        return None
    lines = summed((line_of(each.stack), each.bytes) for each in held)
    most = max(lines, key=lines.__getitem__)
    return Cause(
        code=code, bytes=sum(lines.values()), count=len(held) if count is None else count, line=most
    )


_RULES = (
    _elsewhere,
    _fragmentation,
    _kept_passes,
    _validation_graph,
    _kept_gradients,
    _model_copy,
    _huge_tensor,
)


class ExplainedMemory(Struct, frozen=True, kw_only=True):
    """The memory of a device at the moment when it ran out, else when the most was allocated."""

    device: int
    # whether a request failed
    ran_out: bool
    # what it asked for; `None` where none failed
    failed_bytes: int | None
    # the line of code that asked
    failed_line: str
    missing_bytes: (
        int | None
        # how much more had to be free, of the device or of what is allowed; `None` where that is
        # unknown
    )
    # asked for by all that is alive
    requested_bytes: int
    # in the allocator's segments
    reserved_bytes: int
    allowed_bytes: (
        int | None
        # that this process may reserve, by a limit that torch has; `None` where it has none, or that is
        # unknown
    )
    # reserved, and no tensor's: cached blocks, fragments and rounding
    unused_bytes: int
    # the largest free block in the end
    largest_unused_bytes: int
    device_free_bytes: (
        int | None
        # what the device had left when the request failed; `None` is unknown
    )
    forward_passes: int
    optimizer_steps: int
    # of the requested bytes, those with a category or a line of code
    named_share: float
    by_category: Mapping[Category, int]
    holders: tuple[StackHolder, ...]
    # the one to look at first first
    causes: tuple[Cause, ...]
    settings: str
    # `None` without a profile
    by_module: MemoryByModule | None = None

    def lines(self) -> Iterator[str]:
        return explained_lines(self)


def explain_snapshot(content: Any, device: int | None, total: int, allowed: int) -> ExplainedMemory:
    """Explain what torch's allocator returns as its snapshot.

    The process sees `total` bytes of the device, and may reserve `allowed`.
    """
    return explain(
        snapshot_of(content, device), total=total, allowed=allowed if allowed < total else None
    )


def explain(
    snapshot: Snapshot,
    chip: Hardware | None = None,
    total: int | None = None,
    allowed: int | None = None,
) -> ExplainedMemory:
    """Explain a snapshot of one device.

    The chip's memory, or the better known `total` of a process, tells another process's share.
    """
    peak = peak_of(snapshot)
    if total is None and chip is not None:
        known = chip.usable_bytes if chip.usable_bytes is not None else chip.memory_bytes
        total = None if known is None else int(known)
    before = sizes_of_parameters(peak.alive)
    by_category = dict.fromkeys(CATEGORIES, 0) | summed(
        (category_of(each, before), each.bytes) for each in peak.alive
    )
    failed = peak.ran_out
    unused = max(peak.reserved - peak.bytes, 0)
    free = failed.device_free if failed is not None else None
    unnamed = sum(
        each.bytes
        for each in peak.alive
        if not each.stack and category_of(each, before) == "unknown"
    )
    left = (LARGEST_NUMBER if allowed is None else allowed) - peak.reserved
    blocks = (block for segment in snapshot.segments for block in segment.blocks)
    return ExplainedMemory(
        device=snapshot.device,
        ran_out=failed is not None,
        failed_bytes=None if failed is None else failed.size,
        failed_line="" if failed is None else line_of(failed.stack),
        missing_bytes=None
        if failed is None or free is None
        else max(failed.size - min(free, left), 0) or None,
        requested_bytes=peak.bytes,
        reserved_bytes=peak.reserved,
        allowed_bytes=allowed,
        unused_bytes=unused,
        largest_unused_bytes=max(
            (block.size for block in blocks if block.state == "inactive"), default=0
        ),
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

SENTENCES: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("causes.toml").read_text(encoding="utf-8")
)
"""From a cause's code to its `sentence`, to its `remedy`, and to the category that its bytes are `within`."""


def cause_line(cause: Cause) -> str:
    """The cause with its bytes and its line of code."""
    sizes = {
        "bytes": units.size(cause.bytes),
        "each": units.size(cause.bytes / max(cause.count, 1)),
    }
    sentence = SENTENCES[cause.code]["sentence"].format(**sizes, count=cause.count)
    return f"{sentence} ({cause.line})" if cause.line else sentence


def remedies(explained: ExplainedMemory) -> Iterator[str]:
    """Say what can be done about each cause, and whether that would have been enough.

    Each byte is promised once.
    """
    held, promised = dict[str, int](explained.by_category.items()), Counter[str]()
    for cause in explained.causes[:4]:
        kind = (
            cause.code
            if cause.bytes == explained.failed_bytes
            else SENTENCES[cause.code].get("within", cause.code)
        )
        left = min(cause.bytes, held.get(kind, cause.bytes) - promised[kind])
        promised[kind] += left
        enough = (
            ""
            if explained.missing_bytes is None or left >= explained.missing_bytes
            else "; not enough alone"
        )
        if left > 0:
            yield f"{units.size(left)}: {SENTENCES[cause.code]['remedy']}{enough}"


def explained_lines(explained: ExplainedMemory) -> Iterator[str]:
    """The report: the cause, the request, the memory, who holds it, and what can be done."""
    first = explained.causes[: 2 if explained.causes and explained.causes[0].code in _FIRST else 1]
    yield " ".join(f"{cause_line(each)}." for each in first) or "Nothing is allocated."
    yield ""
    if explained.ran_out:
        at = f" at {explained.failed_line}" if explained.failed_line else ""
        free = (
            f"; the device had {units.size(explained.device_free_bytes)} free"
            if explained.device_free_bytes is not None
            else ""
        )
        yield f"device {explained.device} ran out of memory: {units.size(explained.failed_bytes)} were asked for{at}{free}"
    else:
        yield f"device {explained.device}, the most that was allocated"
    allowed = (
        ""
        if explained.allowed_bytes is None
        else f" of {units.size(explained.allowed_bytes)} that are allowed"
    )
    yield (
        f"reserved {units.size(explained.reserved_bytes)}{allowed}, requested {units.size(explained.requested_bytes)}, unused "
        f"{units.size(explained.unused_bytes)} (the largest piece in the end {units.size(explained.largest_unused_bytes)})"
    )
    passes = (
        f"{explained.forward_passes} forward pass{'' if explained.forward_passes == 1 else 'es'}"
    )
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
    if explained.by_module is not None:
        yield ""
        yield from explained.by_module.lines(_LISTED)
    yield ""
    yield "what would free memory"
    yield from (f"  {each}" for each in remedies(explained))


class HolderChange(Struct, frozen=True, kw_only=True):
    """Allocations of one category by one line of code, at each peak; 0 is none."""

    category: Category
    line: str
    count: tuple[int, int]
    bytes: tuple[int, int]

    @property
    def change(self) -> int:
        return self.bytes[1] - self.bytes[0]


class MemoryDiff(Struct, frozen=True, kw_only=True):
    """Two snapshots, before and after. Each is taken at its peak, or where memory ran out."""

    requested_bytes: tuple[int, int]
    reserved_bytes: tuple[int, int]
    ran_out: tuple[bool, bool]
    by_category: Mapping[Category, tuple[int, int]]
    # those that differ, the largest change first
    holders: tuple[HolderChange, ...]


def compare(before: ExplainedMemory, after: ExplainedMemory) -> MemoryDiff:
    """Match the holders of two snapshots by category and line."""
    first, second = (
        {(each.category, each.line): each for each in side.holders} for side in (before, after)
    )
    none = StackHolder(category="unknown", line="", count=0, bytes=0)
    pairs = ((key, first.get(key, none), second.get(key, none)) for key in first | second)
    rows = (
        HolderChange(
            category=key[0], line=key[1], count=(one.count, two.count), bytes=(one.bytes, two.bytes)
        )
        for key, one, two in pairs
    )
    return MemoryDiff(
        requested_bytes=(before.requested_bytes, after.requested_bytes),
        reserved_bytes=(before.reserved_bytes, after.reserved_bytes),
        ran_out=(before.ran_out, after.ran_out),
        by_category={
            name: (nbytes, after.by_category[name]) for name, nbytes in before.by_category.items()
        },
        holders=tuple(
            sorted(
                (row for row in rows if row.change), key=lambda row: (-abs(row.change), row.line)
            )
        ),
    )


def compared_lines(diff: MemoryDiff) -> Iterator[str]:
    """The comparison in sentences.

    The peak, the categories, then the lines of code that hold more and those that hold less.
    """
    moments = " → ".join("ran out of memory" if each else "peak" for each in diff.ran_out)
    yield f"requested {_sides(diff.requested_bytes)}, reserved {_sides(diff.reserved_bytes)} ({moments})"
    yield ""
    yield "by category"
    for category, sides in sorted(
        diff.by_category.items(), key=lambda item: -abs(item[1][1] - item[1][0])
    ):
        if any(sides):
            yield f"  {_signed(sides[1] - sides[0]):>12}  {category.replace('_', ' ')}, {_sides(sides)}"
    for title, sign in (("grew", 1), ("went", -1)):
        rows = [row for row in diff.holders if row.change * sign > 0]
        if rows:
            yield ""
            yield f"{title}, by line of code"
        for row in rows[:_LISTED]:
            count = f"{row.count[0]} → {row.count[1]} ×"
            yield f"  {_signed(row.change):>12}  {row.category.replace('_', ' ')}, {count} {row.line or 'no stack'}"
        if len(rows) > _LISTED:
            yield f"  {_signed(sum(row.change for row in rows[_LISTED:])):>12}  {len(rows) - _LISTED} more lines"


def _sides(sides: tuple[int, int]) -> str:
    return f"{units.size(sides[0])} → {units.size(sides[1])}"


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes > 0 else '-' if nbytes < 0 else ''}{units.size(abs(nbytes))}"
