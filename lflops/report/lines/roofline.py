"""Sentences about a roofline: why a point is above its roof, why there is no roof, and what fusion saves."""

from collections.abc import Sequence

from lflops import units
from lflops.analyze.speed.fused_bytes import Fusion
from lflops.analyze.speed.roofline import Ceiling
from lflops.profile.model import Run
from lflops.report.lines.text import WORDS

OVER = WORDS["over"]


def why_no_roof(run: Run, ceilings: Sequence[Ceiling]) -> str:
    """Why the points have no roof; empty where they have one."""
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
    """Say what compiled code moves, in place of what its operators move as dispatched; empty where that is unknown."""
    moved, fused = sum(each.bytes_moved for each in phases), sum(each.fused_bytes for each in phases)
    if not moved:
        return ""
    by_phase = ", ".join(f"{each.phase} {_saved(each.bytes_moved, each.fused_bytes)}" for each in phases if each.bytes_moved)
    unknown = max(each.unknown_modules for each in phases)
    left_out = f"; {unknown} module{'' if unknown == 1 else 's'} with kernels of unknown bytes left out" if unknown else ""
    sentence = f"compiled code moves {units.size(fused)} in place of {units.size(moved)} as dispatched: fusion saves {_saved(moved, fused)}"
    return f"{sentence} ({by_phase}){left_out}"


def _saved(moved: int, fused: int) -> str:
    return units.percent(1 - fused / moved)
