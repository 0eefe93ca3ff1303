"""The least time of a step on a chip: for each operator the longer of its compute time and its memory time."""

from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct

from lflops.analyze.speed.peaks import peak_of
from lflops.hardware.chips import Hardware
from lflops.profile.model import Profile
from lflops.profile.module_names import ancestry
from lflops.profile.records import PHASES, Phase


class LowerBound(Struct, frozen=True, kw_only=True):
    """Lower bounds in seconds."""

    hardware: str  # the chip's name
    seconds: float  # of a step
    by_phase: Mapping[Phase, float]  # the same by phase, those that ran
    by_module: Mapping[str, float]  # row to seconds of it and all below, over all phases
    unknown: tuple[str, ...]  # contractions in a dtype whose peak is not known: they count by their bytes


def lower_bound(profile: Profile, hardware: Hardware | None = None) -> LowerBound | None:
    """The sum over operators of the longer of contractions at the peak of their dtype and bytes at the bandwidth.

    Operators are taken one after the other, as eager code runs them: fused ones may move less. What is no contraction counts by its
    bytes. `None` where no chip is known, or not its bandwidth.
    """
    chip = hardware or profile.run.hardware
    if chip is None or chip.bandwidth_bytes_per_second is None:
        return None
    by_phase: dict[Phase, float] = defaultdict(float)
    by_module = dict.fromkeys(profile.modules, 0.0)
    unknown: dict[str, None] = {}
    for cell in profile.cells:
        seconds = cell.bytes_moved / chip.bandwidth_bytes_per_second
        if cell.executed_macs:
            peak = peak_of(cell.dtype, profile.run, chip)
            if peak is None:
                unknown[cell.operator] = None
            else:
                seconds = max(seconds, 2 * cell.executed_macs / peak)
        by_phase[cell.phase] += seconds
        for row in ancestry(cell.module):
            by_module[row] += seconds
    phases = {phase: by_phase[phase] for phase in PHASES if phase in by_phase}
    return LowerBound(hardware=chip.name, seconds=sum(phases.values()), by_phase=phases, by_module=by_module, unknown=tuple(unknown))
