"""Words and sentences that several reports share."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.roofline import Ceiling, Fusion
from lflops.memory.peak import Saving, memory_savings
from lflops.profile.module_names import plain
from lflops.profile.profile import Run

WORDS = msgspec.toml.decode(
    Path(__file__).with_name("words.toml").read_bytes(), type=dict[str, dict[str, str]]
)

# what is left of a name that was cut before a number
_NUMBER = re.compile(r"…[*{\d]")
_PARAMETERS = re.compile(r"\([^()]*(?:\([^()]*\)[^()]*)*\)( const)?$")
_NOISE = re.compile(
    r"\bvoid |at::native::|\(anonymous namespace\)::|(?:\bat::)?<unnamed>::|\bat::cuda::|\bc10::|\bstd::"
)
_WRAPPED = re.compile(r"^cutlass\w*::Kernel2?<(\w+)>$")


def shortened(name: str, width: int) -> str:
    """The name, or its two ends if it is longer than the width."""
    if len(name) <= width:
        return name
    end = max(width - 1, 0) // 2
    return f"{name[: max(width - 1 - end, 0)]}…{name[len(name) - end :]}"


def shortened_name(name: str, width: int) -> str:
    """A module's name, without its first parts where it is longer than the width.

    The last ones say most.
    """
    parts = name.split(".")
    while len(parts) > 1 and (len(name) > width or _NUMBER.match(name)):
        parts = parts[1:]
        name = f"…{'.'.join(parts)}"
    return shortened(name, width)


def kernel_name(name: str) -> str:
    """A kernel's name without its parameters and the namespaces of torch."""
    if name.startswith(("Memcpy", "Memset")):
        return plain(name)
    bare = _PARAMETERS.sub("", _NOISE.sub("", name)).strip()
    wrapped = _WRAPPED.match(bare)
    return plain(wrapped[1] if wrapped else bare or name)


def plus_minus(spread: float) -> str:
    """How far steps are from the median, as a share of it."""
    return units.percent(spread) if spread <= 1 else "more than 100 %"


def counted(number: int, noun: str) -> str:
    """A number with its noun, as `3 calls`."""
    return f"{units.count(number)} {noun}" if number == 1 else f"{units.count(number)} {noun}s"


OVER = WORDS["over"]


def why_no_roof(run: Run, ceilings: Sequence[Ceiling]) -> str:
    """Why the points of the roofline have no roof, or the empty string if they have one."""
    if run.hardware is None:
        return (
            f'what {run.device_name} can do is not known; run FlopsMonitor or lflops.measure with hardware="measure", or with a name that '
            "lflops hardware lists"
        )
    if not any(ceiling.is_judged_by for ceiling in ceilings):
        return f"{run.hardware.name} has no known peak in any of the dtypes that were multiplied"
    if run.hardware.bandwidth_bytes_per_second is None:
        return f"the bandwidth of {run.hardware.name} is not known"
    return ""


def saved_by_fusion(phases: Sequence[Fusion]) -> str:
    """The bytes that compiled code moves, compared with those of its operators as dispatched.

    Empty if they are unknown.
    """
    moved = sum(each.bytes_moved for each in phases)
    fused = sum(each.fused_bytes for each in phases)
    if not moved:
        return ""
    by_phase = ", ".join(
        f"{each.phase} {units.percent(1 - each.fused_bytes / each.bytes_moved)}"
        for each in phases
        if each.bytes_moved
    )
    unknown = max(each.unknown_modules for each in phases)
    left_out = (
        f"; {unknown} module{'' if unknown == 1 else 's'} with kernels of unknown bytes left out"
        if unknown
        else ""
    )
    sentence = (
        f"compiled code moves {units.size(fused)} in place of {units.size(moved)} as dispatched"
    )
    return f"{sentence}: fusion saves {units.percent(1 - fused / moved)} ({by_phase}){left_out}"


def savings(analysis: Analysis) -> Iterator[tuple[str, int, str]]:
    """Ways to use less memory, with the bytes that each saves at most and its cost."""
    for each in memory_savings(
        analysis.profile.memory, analysis.peak_moment, analysis.checkpointed, analysis.patterns
    ):
        yield _what(each), each.bytes, _cost(each, analysis)


def _what(saving: Saving) -> str:
    if saving.kind == "gradients":
        return "free the gradients before forward: optimizer.zero_grad(set_to_none=True) right after the step"
    if saving.kind == "fused_optimizer":
        return "update in place: an optimizer with fused=True makes no temporary tensors"
    if saving.kind == "chunked_loss":
        return f"logits and loss hold {units.size(saving.bytes)}: use a loss that computes them for a chunk of the tokens at a time"
    return f"checkpoint {plain(saving.module)}{f' ×{saving.modules}' if saving.modules > 1 else ''}"


def _cost(saving: Saving, analysis: Analysis) -> str:
    total = sum(counts.macs for counts in analysis.totals.values())
    if not saving.macs or not total:
        return ""
    return (
        f"{units.count(saving.macs)} MACs more, {units.percent(saving.macs / total)} of the step's"
    )
