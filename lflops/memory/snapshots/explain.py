"""Explain a memory snapshot: which code holds memory at the peak, and why memory ran out.

Two snapshots can also be compared.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct

from lflops import units
from lflops.hardware.chips import Hardware
from lflops.memory.allocator.simulation import LARGE_SEGMENT
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
from lflops.memory.snapshots.read import Snapshot, Stack, snapshot_of
from lflops.profile.series import grouped
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
# A specific cause, such as a leak, is listed before the general causes (categories of tensors) if
# it explains at least this share of the live memory. Fragmentation is a cause only if at least this
# share of the reserved memory is unused.
LEAST_SHARE = 0.1

# Causes that are always listed first. After them, the largest cause comes first.
_FIRST = {"process_limit"}
# If a line of code holds at most this share of the bytes that the largest line holds, it is assumed
# to hold only losses. Such a line does not count as a line of a kept graph.
SMALL_SHARE = 0.01
# A tensor is huge if it has at least this share of the memory.
HUGE_SHARE = 0.2
# If the results of at least this many earlier forward passes are still alive, they are a leak. With
# fewer passes, the reason might be pipelining, or a graph that was retained by accident.
MANY = 3
# Maximum number of bytes that a process may use outside the allocator, such as CUDA's context,
# NCCL's buffers and libraries.
OUTSIDE_ALLOCATOR = 3 * 2**30


class Cause(Struct, frozen=True, kw_only=True):
    """A cause of high memory usage.

    Attributes:
        code: The kind of cause, for example `kept_graphs`.
        bytes: Bytes that would be free without the cause.
        count: The number of forward passes whose activations are kept, or the number of tensors,
            depending on the kind of cause. 0 if the kind has no count.
        line: The line of code that allocated the most of these bytes; empty if unknown.
    """

    code: CauseCode
    bytes: int
    count: int = 0
    line: str = ""


class _Case(NamedTuple):
    """The data about the peak that the search for causes of high memory usage needs.

    Attributes:
        peak: The live allocations.
        held: The live allocations by category. Temporary tensors of the optimizer's step have a
            separate category, `optimizer_temporary`.
        failed: Bytes of the request that failed; 0 if memory did not run out.
        unused: Reserved bytes that no tensor uses.
        total: Bytes of the device that the process can use; `None` if unknown.
    """

    peak: Peak
    held: Mapping[str, list[Alive]]
    failed: int
    unused: int
    total: int | None


def causes_of(
    peak: Peak, parameter_sizes: frozenset[int], total: int | None = None
) -> tuple[Cause, ...]:
    """Return the causes of high memory usage, the most important cause first.

    There are specific causes, such as a leak, and general causes: the categories of tensors, such
    as activations. A specific cause comes before the general causes if it explains at least a tenth
    of the memory and at least the bytes of the failed request. Otherwise, it comes after the
    general causes. A memory limit of the process always comes first.

    Args:
        peak: The live allocations.
        parameter_sizes: The sizes of parameters in bytes.
        total: Bytes of the device that the process can use.
    """
    held = grouped(peak.alive, lambda each: _code(category_of(each, parameter_sizes), each))
    failed = 0
    if peak.ran_out is not None:
        failed = peak.ran_out.size
    case = _Case(peak, held, failed, max(peak.reserved - peak.bytes, 0), total)
    least = max(LEAST_SHARE * (peak.bytes + failed), min(failed, peak.bytes))
    first: list[Cause] = []
    large: list[Cause] = []
    small: list[Cause] = []
    for rule in _RULES:
        cause = rule(case)
        if cause is None:
            continue
        if cause.code in _FIRST:
            first.append(cause)
        elif cause.bytes >= least:
            large.append(cause)
        else:
            small.append(cause)
    categories: list[Cause] = []
    for category in get_args(_Category):
        cause = _held(category, held.get(category, []))
        if cause is not None:
            categories.append(cause)
    large.sort(key=lambda cause: -cause.bytes)
    categories.sort(key=lambda cause: -cause.bytes)
    return (*first, *large, *categories, *small)


def _code(category: Category, alive: Alive) -> str:
    is_optimizer = category == "temporary" and phase_of(alive.stack) == "optimizer"
    return "optimizer_temporary" if is_optimizer else category


def _elsewhere(case: _Case) -> Cause | None:
    """Return a cause outside the allocator: a memory limit of the process, or another process.

    A limit is the cause if the device had the requested bytes free, but the request failed. Another
    process is the cause if more memory is in use outside the allocator than this process can need.
    """
    failed = case.peak.ran_out
    if failed is None or failed.device_free is None:
        return None
    # For a smaller allocation, torch may request a whole segment from the device.
    if failed.device_free >= failed.size + LARGE_SEGMENT:
        return Cause(code="process_limit", bytes=failed.device_free)
    if case.total is None:
        return None
    elsewhere = case.total - failed.device_free - case.peak.reserved
    if elsewhere > OUTSIDE_ALLOCATOR:
        return Cause(code="other_process", bytes=elsewhere)
    return None


def _fragmentation(case: _Case) -> Cause | None:
    """Return fragmentation as a cause, or `None` if it is not the cause.

    Fragmentation is the cause if the unused memory would have been enough for the failed request,
    but was not in one piece. The unused memory must also be at least `LEAST_SHARE` of the reserved
    memory.
    """
    is_enough = case.failed and case.unused >= case.failed
    if is_enough and case.unused >= LEAST_SHARE * case.peak.reserved:
        return Cause(code="fragmentation", bytes=case.unused)
    return None


def _kept_passes(case: _Case) -> Cause | None:
    """Find activations of earlier forward passes that are still alive.

    They are kept by a graph that was not freed, or by a list that collects results.
    """
    old: list[Alive] = []
    current_calls: set[Stack] = set()
    for each in case.held.get("activations", ()):
        if not each.passes_ago:
            current_calls.add(_calls(each.stack))
        elif not _is_evaluation(each):
            old.append(each)
    passes = _number_of_passes(old)
    if passes < MANY:
        return _held("retained_graph", old, passes)
    sizes: Counter[Stack] = Counter()
    for each in old:
        sizes[_calls(each.stack)] += each.bytes
    least = SMALL_SHARE * max(sizes.values())
    lines = sum(nbytes > least for nbytes in sizes.values())
    # A kept graph keeps most tensors of a pass, from many lines of code. A list of results keeps
    # only the tensors of one or two lines.
    is_graph = lines > 2 or 1 < lines >= len(current_calls)
    return _held("kept_graphs" if is_graph else "kept_results", old, passes)


def _number_of_passes(held: Iterable[Alive]) -> int:
    """Return the number of forward passes to which allocations belong."""
    return len({each.passes_ago for each in held})


def _calls(stack: Stack) -> Stack:
    """Return a stack without the frames that can differ from step to step.

    These are the frames of `torch/nn/modules/module.py`: the line of this file that calls a module
    depends on whether the module has hooks, and hooks may exist only in some of the steps.
    """
    return tuple(frame for frame in stack if not frame.file.endswith("nn/modules/module.py"))


def _validation_graph(case: _Case) -> Cause | None:
    """Find activations of validation that are kept for a backward that never runs.

    This happens if validation runs without `torch.no_grad()`.
    """
    held = [each for each in case.held.get("activations", ()) if _is_evaluation(each)]
    return _held("validation_graph", held, _number_of_passes(held))


def _is_evaluation(alive: Alive) -> bool:
    return any(frame.function in EVALUATION for frame in alive.stack)


def _kept_gradients(case: _Case) -> Cause | None:
    """Find gradients that are still alive after an optimizer step."""
    held = [each for each in case.held.get("gradients", ()) if each.steps_ago]
    if not held:
        return None
    nbytes = sum(each.bytes for each in held)
    return Cause(code="kept_gradients", bytes=nbytes, count=len(held))


def _model_copy(case: _Case) -> Cause | None:
    """Find a second model, such as an EMA, a reference model or a deep copy."""
    return _held("model_copy", case.held.get("copy", []))


def _huge_tensor(case: _Case) -> Cause | None:
    """Find a huge tensor, which has at least `HUGE_SHARE` of the memory.

    The tensor is the failed request, or the largest live tensor.
    """
    least = HUGE_SHARE * (case.peak.bytes + case.failed)
    largest = max(case.peak.alive, key=lambda each: each.bytes, default=None)
    request = case.peak.ran_out
    is_largest = largest is None or case.failed >= largest.bytes
    if request is not None and case.failed >= least and is_largest:
        line = line_of(request.stack)
        return Cause(code="huge_tensor", bytes=case.failed, count=1, line=line)
    if largest is None or largest.bytes < least or category_of(largest) != "activations":
        return None
    count = sum(each.bytes == largest.bytes for each in case.peak.alive)
    line = line_of(largest.stack)
    return Cause(code="huge_tensor", bytes=largest.bytes, count=count, line=line)


def _held(code: CauseCode, held: list[Alive], count: int | None = None) -> Cause | None:
    """Return a cause that explains the memory of some live allocations.

    The cause has their total bytes, and the line of code that allocated the most of them. Return
    `None` if there are no allocations.

    Args:
        code: The kind of cause.
        held: The allocations.
        count: Value of `Cause.count`. By default, it is the number of allocations.
    """
    if not held:
        return None
    lines: Counter[str] = Counter()
    for each in held:
        lines[line_of(each.stack)] += each.bytes
    return Cause(
        code=code,
        bytes=lines.total(),
        count=len(held) if count is None else count,
        line=max(lines, key=lines.__getitem__),
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
    """The memory of a device when a request failed, or at the peak if none failed.

    Attributes:
        device: Number of the device.
        ran_out: Whether a request failed.
        failed_bytes: Bytes of the request that failed; `None` if no request failed.
        failed_line: The line of code of the failed request; empty if unknown.
        missing_bytes: Number of additional free bytes that the failed request needed, on the device
            or within the limit of the process; `None` if enough bytes were free, or if unknown.
        requested_bytes: Bytes that were requested for all live allocations.
        reserved_bytes: Bytes in the allocator's segments.
        allowed_bytes: Bytes that the process may reserve; `None` if torch has no limit, or if the
            limit is unknown.
        unused_bytes: Reserved bytes that no tensor uses: cached blocks, fragments and rounding.
        largest_unused_bytes: Bytes of the largest free block at the end of the recording.
        device_free_bytes: Bytes that the device had left when the request failed; `None` if
            unknown.
        forward_passes: Number of forward passes that began before the failure or the peak.
        optimizer_steps: Number of optimizer steps that ended before the failure or the peak.
        named_share: Share of the requested bytes with a known category or line of code.
        by_category: Requested bytes, keyed by category.
        holders: Requested bytes of each category and line of code.
        causes: The causes of high memory usage, the most important cause first.
        settings: Settings of the allocator.
        by_module: Bytes by module; `None` without a profile.
    """

    device: int
    ran_out: bool
    failed_bytes: int | None
    failed_line: str
    missing_bytes: int | None
    requested_bytes: int
    reserved_bytes: int
    allowed_bytes: int | None
    unused_bytes: int
    largest_unused_bytes: int
    device_free_bytes: int | None
    forward_passes: int
    optimizer_steps: int
    named_share: float
    by_category: Mapping[Category, int]
    holders: tuple[StackHolder, ...]
    causes: tuple[Cause, ...]
    settings: str
    by_module: MemoryByModule | None = None

    def lines(self) -> Iterator[str]:
        return explained_lines(self)


def explain_snapshot(content: Any, device: int | None, total: int, allowed: int) -> ExplainedMemory:
    """Explain a snapshot that torch returned as a value, not as a file.

    Args:
        content: The value that torch returned.
        device: The device to explain.
        total: Bytes of the device that the process can use.
        allowed: Bytes that the process may reserve.
    """
    limit = allowed if allowed < total else None
    return explain(snapshot_of(content, device), total=total, allowed=limit)


def explain(
    snapshot: Snapshot,
    chip: Hardware | None = None,
    total: int | None = None,
    allowed: int | None = None,
) -> ExplainedMemory:
    """Explain the snapshot of a device.

    Args:
        snapshot: The snapshot.
        chip: The chip. Its memory size shows how much other processes use.
        total: Bytes of the device that the process can use. By default, the number comes from the
            chip.
        allowed: Bytes that the process may reserve.
    """
    peak = peak_of(snapshot)
    if total is None and chip is not None:
        known = chip.usable_bytes if chip.usable_bytes is not None else chip.memory_bytes
        total = None if known is None else int(known)
    parameter_sizes = sizes_of_parameters(peak.alive)
    by_category = dict.fromkeys(CATEGORIES, 0)
    unnamed = 0
    for each in peak.alive:
        category = category_of(each, parameter_sizes)
        by_category[category] += each.bytes
        if category == "unknown" and not each.stack:
            unnamed += each.bytes
    largest_unused = 0
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.state == "inactive":
                largest_unused = max(largest_unused, block.size)
    failed = peak.ran_out
    return ExplainedMemory(
        device=snapshot.device,
        ran_out=failed is not None,
        failed_bytes=None if failed is None else failed.size,
        failed_line="" if failed is None else line_of(failed.stack),
        missing_bytes=_missing_bytes(peak, allowed),
        requested_bytes=peak.bytes,
        reserved_bytes=peak.reserved,
        allowed_bytes=allowed,
        unused_bytes=max(peak.reserved - peak.bytes, 0),
        largest_unused_bytes=largest_unused,
        device_free_bytes=None if failed is None else failed.device_free,
        forward_passes=peak.passes,
        optimizer_steps=peak.steps,
        named_share=1 - unnamed / peak.bytes if peak.bytes else 1.0,
        by_category=by_category,
        holders=holders_of(peak.alive, parameter_sizes),
        causes=causes_of(peak, parameter_sizes, total),
        settings=snapshot.settings,
    )


def _missing_bytes(peak: Peak, allowed: int | None) -> int | None:
    failed = peak.ran_out
    if failed is None or failed.device_free is None:
        return None
    free = failed.device_free
    if allowed is not None:
        free = min(free, allowed - peak.reserved)
    return max(failed.size - free, 0) or None


_LISTED = 12


class Explanation(NamedTuple):
    """The text that a report prints for one reason why much memory is in use.

    Attributes:
        sentence: Sentence that names the reason. It can contain the placeholders `{bytes}`,
            `{count}`, and `{each}` (the bytes divided by the count).
        remedy: How to free the memory.
        within: The category of tensors that contains the memory. For example, the memory of
            `kept_graphs` is a part of `activations`. Empty if the reason is a whole category, such
            as `gradients`, or not a part of a single category, such as `fragmentation`.
    """

    sentence: str
    remedy: str
    within: str = ""


EXPLANATIONS: Mapping[CauseCode, Explanation] = {
    "process_limit": Explanation(
        "This process reached its own memory limit, although the device had {bytes} free",
        "raise the limit: torch.cuda.set_per_process_memory_fraction, or "
        "per_process_memory_fraction in PYTORCH_ALLOC_CONF; if neither is set, the limit comes "
        "from MPS, the vGPU or the container",
    ),
    "other_process": Explanation(
        "Another process holds {bytes} of the memory of this device",
        "end the other process (nvidia-smi lists it), or run this process on another device",
    ),
    "fragmentation": Explanation(
        "Memory is fragmented: {bytes} is reserved but unused, in pieces that are too small for "
        "the request",
        "set PYTORCH_ALLOC_CONF=expandable_segments:True",
    ),
    "kept_graphs": Explanation(
        "The graphs of {count} earlier forward passes are still alive and hold {bytes} of "
        "activations",
        "a list or a running sum keeps losses or outputs together with their graphs: "
        "keep loss.detach() or loss.item() instead",
        within="activations",
    ),
    "retained_graph": Explanation(
        "The graph of an earlier forward pass is still alive and holds {bytes} of activations",
        "leave out retain_graph=True, or delete the loss and the outputs before the next forward",
        within="activations",
    ),
    "kept_results": Explanation(
        "Results of {count} earlier forward passes are kept: {bytes}, and {each} more in each pass",
        "some code collects tensors on the device: collect numbers or tensor.detach().cpu() "
        "instead, and empty the list",
        within="activations",
    ),
    "validation_graph": Explanation(
        "Validation builds a graph and keeps {bytes} of activations for a backward that never runs",
        "run validation under torch.no_grad() or torch.inference_mode()",
        within="activations",
    ),
    "kept_gradients": Explanation(
        "Gradients of an earlier step are still alive during forward and hold {bytes}",
        "call optimizer.zero_grad(set_to_none=True) right after optimizer.step()",
        within="gradients",
    ),
    "model_copy": Explanation(
        "A copy of the model takes {bytes}",
        "keep this copy, such as an EMA or reference model, on the CPU, in a lower precision, or "
        "sharded",
    ),
    "huge_tensor": Explanation(
        "One tensor takes {bytes}",
        "compute the tensor in chunks; for logits, use a chunked or fused cross-entropy",
        within="activations",
    ),
    "optimizer_state": Explanation(
        "The optimizer state is the largest part of the memory: {bytes}",
        "shard the optimizer's state (FSDP, ZeRO-1), keep it in 8 bits, or use an optimizer with "
        "less state",
    ),
    "activations": Explanation(
        "Activations of this batch are the largest part of the memory: {bytes}",
        "use activation checkpointing, a smaller batch or a shorter sequence",
    ),
    "parameters": Explanation(
        "Parameters are the largest part of the memory: {bytes}",
        "shard parameters (FSDP, tensor parallelism), or keep them in a lower precision",
    ),
    "gradients": Explanation(
        "Gradients are the largest part of the memory: {bytes}",
        "shard gradients (FSDP, ZeRO-2), or run the optimizer during backward",
    ),
    "temporary": Explanation(
        "Temporary tensors of backward are the largest part of the memory: {bytes}",
        "use a smaller batch",
    ),
    "optimizer_temporary": Explanation(
        "Temporary tensors of the optimizer step are the largest part of the memory: {bytes}",
        "pass foreach=False or fused=True to an optimizer of torch; in a custom optimizer, update "
        "parameters in place",
    ),
    "other": Explanation(
        "Tensors that were created outside the model are the largest part of the memory: {bytes}",
        "look at the lines of code in the category other: delete tensors that the step does not "
        "need, or keep these tensors on the host",
    ),
    "unknown": Explanation(
        "{bytes} were allocated before the recording began, or without a recorded stack",
        "to see which code allocated this memory, call torch.cuda.memory._record_memory_history() "
        "before the model is "
        "built",
    ),
}


def cause_line(cause: Cause) -> str:
    """Return the sentence that describes a cause, with the bytes and the line of code."""
    sentence = EXPLANATIONS[cause.code].sentence.format(
        bytes=units.size(cause.bytes),
        each=units.size(cause.bytes / max(cause.count, 1)),
        count=cause.count,
    )
    return f"{sentence} ({cause.line})" if cause.line else sentence


def remedies(explained: ExplainedMemory) -> Iterator[str]:
    """Yield a remedy for each of the four most important causes, with the bytes that it frees.

    If these bytes are not enough for the failed request, the text says so. Bytes that belong to
    several causes are counted only for the first of them.
    """
    held = dict[str, int](explained.by_category.items())
    counted_bytes: Counter[str] = Counter()
    missing = explained.missing_bytes
    for cause in explained.causes[:4]:
        explanation = EXPLANATIONS[cause.code]
        kind = explanation.within or cause.code
        # The failed request was not allocated, so no category contains its bytes.
        if cause.bytes == explained.failed_bytes:
            kind = cause.code
        freed = min(cause.bytes, held.get(kind, cause.bytes) - counted_bytes[kind])
        counted_bytes[kind] += freed
        if freed > 0:
            is_enough = missing is None or freed >= missing
            note = "" if is_enough else "; this alone does not free enough"
            yield f"{units.size(freed)}: {explanation.remedy}{note}"


def explained_lines(explained: ExplainedMemory) -> Iterator[str]:
    """Yield the lines of the report: causes, request, memory, holders, and ways to free memory."""
    shown = 2 if explained.causes and explained.causes[0].code in _FIRST else 1
    sentences = [f"{cause_line(cause)}." for cause in explained.causes[:shown]]
    yield " ".join(sentences) or "Nothing is allocated."
    yield ""
    yield from _total_lines(explained)
    total = explained.requested_bytes
    yield ""
    yield "by category"
    for category, nbytes in sorted(explained.by_category.items(), key=lambda item: -item[1]):
        if nbytes:
            yield _share_line(nbytes, total, category.replace("_", " "))
    yield ""
    yield f"by line of code (known for {units.percent(explained.named_share)} of the bytes)"
    for each in explained.holders[:_LISTED]:
        category_name = each.category.replace("_", " ")
        line = f"{category_name}, {each.count} × {each.line or 'no stack'}"
        yield _share_line(each.bytes, total, line)
    if len(explained.holders) > _LISTED:
        yield f"  {len(explained.holders) - _LISTED} more lines of code"
    if explained.by_module is not None:
        yield ""
        yield from explained.by_module.lines(_LISTED)
    yield ""
    yield "what would free memory"
    for remedy in remedies(explained):
        yield f"  {remedy}"


def _total_lines(explained: ExplainedMemory) -> Iterator[str]:
    if explained.ran_out:
        line = ""
        if explained.failed_line:
            line = f" at {explained.failed_line}"
        free = ""
        if explained.device_free_bytes is not None:
            free = f"; the device had {units.size(explained.device_free_bytes)} free"
        yield (
            f"device {explained.device} ran out of memory: "
            f"{units.size(explained.failed_bytes)} were requested{line}{free}"
        )
    else:
        yield f"device {explained.device} at the peak of its memory"
    allowed = ""
    if explained.allowed_bytes is not None:
        allowed = f" (limit {units.size(explained.allowed_bytes)})"
    yield (
        f"reserved {units.size(explained.reserved_bytes)}{allowed}, "
        f"requested by tensors {units.size(explained.requested_bytes)}, "
        f"unused {units.size(explained.unused_bytes)} "
        f"(largest free block at the end: {units.size(explained.largest_unused_bytes)})"
    )
    passes = "pass" if explained.forward_passes == 1 else "passes"
    steps = counted(explained.optimizer_steps, "optimizer step")
    yield f"the recording has {explained.forward_passes} forward {passes} and {steps}"


def _share_line(nbytes: int, total: int, name: str) -> str:
    return f"  {units.size(nbytes):>12}  {units.percent(nbytes / total):>6}  {name}"


class HolderChange(Struct, frozen=True, kw_only=True):
    """The allocations of one category by one line of code, at the peaks of two snapshots.

    Attributes:
        category: The category.
        line: The line of code.
        count: Number of allocations in the first and in the second snapshot.
        bytes: Bytes of the allocations in the first and in the second snapshot.
    """

    category: Category
    line: str
    count: tuple[int, int]
    bytes: tuple[int, int]

    @property
    def change(self) -> int:
        return _change(self.bytes)


class MemoryDiff(Struct, frozen=True, kw_only=True):
    """The difference between two snapshots, each at its peak or when memory ran out.

    A pair has the value of the first snapshot and the value of the second snapshot.

    Attributes:
        requested_bytes: The pair of bytes that were requested.
        reserved_bytes: The pair of bytes that were reserved.
        ran_out: For both snapshots, whether memory ran out.
        by_category: The pair of bytes of each category.
        holders: The lines of code that hold more or fewer bytes than before. The largest change
            comes first.
    """

    requested_bytes: tuple[int, int]
    reserved_bytes: tuple[int, int]
    ran_out: tuple[bool, bool]
    by_category: Mapping[Category, tuple[int, int]]
    holders: tuple[HolderChange, ...]


def compare(before: ExplainedMemory, after: ExplainedMemory) -> MemoryDiff:
    """Compare two snapshots by category and line of code."""
    by_category: dict[Category, tuple[int, int]] = {}
    for name, nbytes in before.by_category.items():
        by_category[name] = (nbytes, after.by_category[name])
    holders_before = _holders_by_line(before)
    holders_after = _holders_by_line(after)
    none = StackHolder(category="unknown", line="", count=0, bytes=0)
    rows: list[HolderChange] = []
    for key in holders_before | holders_after:
        one = holders_before.get(key, none)
        two = holders_after.get(key, none)
        category, line = key
        row = HolderChange(
            category=category,
            line=line,
            count=(one.count, two.count),
            bytes=(one.bytes, two.bytes),
        )
        if row.change:
            rows.append(row)
    rows.sort(key=lambda row: (-abs(row.change), row.line))
    return MemoryDiff(
        requested_bytes=(before.requested_bytes, after.requested_bytes),
        reserved_bytes=(before.reserved_bytes, after.reserved_bytes),
        ran_out=(before.ran_out, after.ran_out),
        by_category=by_category,
        holders=tuple(rows),
    )


def _holders_by_line(explained: ExplainedMemory) -> dict[tuple[Category, str], StackHolder]:
    """Return the holders of the memory, keyed by category and line of code."""
    return {(each.category, each.line): each for each in explained.holders}


def compared_lines(diff: MemoryDiff) -> Iterator[str]:
    """Yield the report that compares two snapshots: peaks, categories, and lines of code."""
    moments = []
    for ran_out in diff.ran_out:
        moments.append("when memory ran out" if ran_out else "at its peak")
    requested = _sides(diff.requested_bytes)
    reserved = _sides(diff.reserved_bytes)
    yield f"requested by tensors {requested}, reserved {reserved}"
    yield f"first snapshot: {moments[0]}; second snapshot: {moments[1]}"
    yield ""
    yield "by category"
    for category, sides in sorted(diff.by_category.items(), key=lambda row: -abs(_change(row[1]))):
        if any(sides):
            change = _signed(_change(sides))
            yield f"  {change:>12}  {category.replace('_', ' ')}, {_sides(sides)}"
    yield from _change_lines("grew", [row for row in diff.holders if row.change > 0])
    yield from _change_lines("shrank", [row for row in diff.holders if row.change < 0])


def _change_lines(title: str, rows: Sequence[HolderChange]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"{title}, by line of code"
    for row in rows[:_LISTED]:
        name = f"{row.category.replace('_', ' ')}, {row.count[0]} → {row.count[1]} ×"
        yield f"  {_signed(row.change):>12}  {name} {row.line or 'no stack'}"
    if len(rows) > _LISTED:
        rest = sum(row.change for row in rows[_LISTED:])
        yield f"  {_signed(rest):>12}  {len(rows) - _LISTED} more lines of code"


def _change(sides: tuple[int, int]) -> int:
    return sides[1] - sides[0]


def _sides(sides: tuple[int, int]) -> str:
    return f"{units.size(sides[0])} → {units.size(sides[1])}"


def _signed(nbytes: int) -> str:
    sign = "+" if nbytes > 0 else ""
    if nbytes < 0:
        sign = "-"
    return f"{sign}{units.size(abs(nbytes))}"
