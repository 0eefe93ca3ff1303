"""Format words and sentences that several reports share."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.roofline import Ceiling, Fusion
from lflops.memory.peak import Saving, memory_savings
from lflops.profile.module_names import plain
from lflops.profile.profile import Run
from lflops.profile.settings_advice import how_to_measure_peak

WORDS = msgspec.toml.decode(
    Path(__file__).with_name("words.toml").read_bytes(), type=dict[str, dict[str, str]]
)

OVER = WORDS["over"]
"""Sentences that explain why a module or operator is above its roofline limit, by reason."""

# A shortened name that begins with an index or a placeholder, such as `…3.mlp` or `…*.mlp`.
_CUT_BEFORE_NUMBER = re.compile(r"…[*{\d]")
_PARAMETERS = re.compile(r"\([^()]*(?:\([^()]*\)[^()]*)*\)( const)?$")
_NOISE = re.compile(
    r"\bvoid |at::native::|\(anonymous namespace\)::|(?:\bat::)?<unnamed>::|\bat::cuda::|\bc10::"
    r"|\bstd::"
)
_WRAPPED = re.compile(r"^cutlass\w*::Kernel2?<(\w+)>$")


def joined(*parts: str | None, separator: str = ", ") -> str:
    """Join the parts that are not empty."""
    return separator.join(part for part in parts if part)


def labelled(lines: Iterable[tuple[str, str]], least_width: int = 0) -> str:
    """Format lines with their labels in a column on the left.

    If consecutive lines have the same label, only the first of them shows it.
    """
    lines = list(lines)
    width = max((len(label) for label, _ in lines), default=0)
    width = max(width, least_width)
    shown = []
    above = ""
    for label, text in lines:
        column = "" if label == above else label
        shown.append(f"{column:<{width}}  {text}".rstrip())
        above = label or above
    return "\n".join(shown)


def label_first(label: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each line: `label` for the first line, then empty labels."""
    for line in lines:
        yield label, line
        label = ""


def times_mark(number: int) -> str:
    """Return the mark after the name of identical modules, such as ` ×12` for 12 modules.

    Return the empty string for one module.
    """
    if number <= 1:
        return ""
    return f" ×{number}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, such as `3 calls`."""
    plural = "" if number == 1 else "s"
    return f"{units.count(number)} {noun}{plural}"


def plus_minus(spread: float) -> str:
    """Format the number after `±`.

    `spread` is the distance from the median step to the farther quartile, as a share of the median.
    """
    return units.percent(spread) if spread <= 1 else "more than 100 %"


def phase_label(phase: str) -> str:
    """Return the label of a phase of a step, such as `data wait` for `data`."""
    return WORDS["phases"].get(phase, phase)


def shortened(name: str, width: int) -> str:
    """Return a name. If it is longer than `width`, replace its middle with `…`."""
    if len(name) <= width:
        return name
    end = max(width - 1, 0) // 2
    return f"{name[: max(width - 1 - end, 0)]}…{name[len(name) - end :]}"


def shortened_name(name: str, width: int) -> str:
    """Return a module's name. If it is longer than `width`, replace its first parts with `…`.

    The last parts are kept because they identify a module best. A shortened name does not begin
    with an index, unless only the index is left.
    """
    parts = name.split(".")
    while len(parts) > 1 and (len(name) > width or _CUT_BEFORE_NUMBER.match(name)):
        parts = parts[1:]
        name = f"…{'.'.join(parts)}"
    return shortened(name, width)


def kernel_name(name: str) -> str:
    """Return a kernel's name without its parameters and torch's namespaces."""
    if name.startswith(("Memcpy", "Memset")):
        return plain(name)
    bare = _PARAMETERS.sub("", _NOISE.sub("", name)).strip()
    wrapped = _WRAPPED.match(bare)
    if wrapped:
        return plain(wrapped[1])
    return plain(bare or name)


def why_no_limit(run: Run, ceilings: Sequence[Ceiling]) -> str:
    """Describe why the roofline cannot be drawn, for example because the peak is unknown.

    Return the empty string if the roofline is known.
    """
    if run.hardware is None:
        return (
            f"the peak of {run.device_name} is unknown; {how_to_measure_peak(run)}, or instead of "
            "`measure` a name from the output of `lflops hardware`"
        )
    if not any(ceiling.is_reference for ceiling in ceilings):
        return f"the peak of {run.hardware.name} is unknown for the dtypes of the matmuls"
    if run.hardware.bandwidth_bytes_per_second is None:
        return f"the bandwidth of {run.hardware.name} is unknown"
    return ""


def saved_by_fusion(phases: Sequence[Fusion]) -> str:
    """Describe how many fewer bytes compiled code moves because its operators are fused.

    Without fusion, each operator would run separately, read its inputs and write its results. The
    result is empty if the bytes are unknown.
    """
    moved = 0
    fused = 0
    unknown = 0
    by_phase = []
    for phase in phases:
        moved += phase.bytes_moved
        fused += phase.fused_bytes
        unknown = max(unknown, phase.unknown_modules)
        if phase.bytes_moved:
            saved = units.percent(1 - phase.fused_bytes / phase.bytes_moved)
            by_phase.append(f"{phase.phase} {saved}")
    if not moved:
        return ""
    sentence = (
        f"compiled code moves {units.size(fused)} instead of {units.size(moved)}: "
        f"fusion saves {units.percent(1 - fused / moved)} ({', '.join(by_phase)})"
    )
    if unknown:
        sentence += (
            f"; this does not include {counted(unknown, 'module')} with kernels that move an "
            "unknown number of bytes"
        )
    return sentence


def savings(analysis: Analysis) -> Iterator[tuple[str, int, str]]:
    """Yield ways to use less memory.

    Each item has a description of the change, the maximum number of bytes that the change saves,
    and the cost of the change as text. The cost is empty if the change adds no MACs.
    """
    memory = analysis.profile.memory
    checkpointed = analysis.checkpointed
    for saving in memory_savings(memory, analysis.peak_moment, checkpointed, analysis.patterns):
        yield _advice(saving), saving.bytes, _cost(saving, analysis)


def _advice(saving: Saving) -> str:
    if saving.kind == "gradients":
        return (
            "free the gradients before forward: call optimizer.zero_grad(set_to_none=True) right "
            "after the optimizer's step"
        )
    if saving.kind == "fused_optimizer":
        return (
            "pass fused=True to the optimizer: it then updates parameters without temporary tensors"
        )
    if saving.kind == "chunked_loss":
        return (
            f"logits and loss hold {units.size(saving.bytes)}: use a loss function that processes "
            "the tokens in chunks"
        )
    return f"use activation checkpointing in {plain(saving.module)}{times_mark(saving.modules)}"


def _cost(saving: Saving, analysis: Analysis) -> str:
    total = analysis.total_macs
    if not saving.macs or not total:
        return ""
    share = units.percent(saving.macs / total)
    return f"{units.count(saving.macs)} additional MACs, {share} of the step"
