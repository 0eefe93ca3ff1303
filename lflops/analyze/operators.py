"""What each operator did, over all modules."""

from msgspec import Struct

from lflops.analyze.tree import Figures, share_of
from lflops.profile import PHASES, Phase, Profile

__all__ = ["Operator", "operators"]


class Operator(Struct, frozen=True, kw_only=True):
    """One operator. `share` is its part of the MACs, or of the FLOPs, as `analyze.tree.share_of` says."""

    operator: str
    figures: Figures
    share: float | None


def operators(profile: Profile, phase: Phase | None = "forward") -> tuple[Operator, ...]:
    """The operators of a phase, or of all of them, the most first: by MACs, then by FLOPs, then by bytes."""
    phases = PHASES if phase is None else (phase,)
    found: dict[str, Figures] = {}
    for cell in profile.cells:
        if cell.phase in phases:
            ran = Figures(**{field: getattr(cell, field) for field in Figures.__struct_fields__})
            found[cell.operator] = found.get(cell.operator, Figures()) + ran
    shared = share_of(profile, phase)
    whole = sum(getattr(profile.modules[""].work(each), shared) for each in phases)
    rows = [Operator(operator=name, figures=ran, share=getattr(ran, shared) / whole if whole else None) for name, ran in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.figures.macs, -row.figures.flops, -row.figures.bytes_moved)))
