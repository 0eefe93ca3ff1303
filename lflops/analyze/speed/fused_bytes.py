"""Bytes that compiled kernels read and write, by module: what fusion saves of the bytes of the operators as dispatched."""

from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct

from lflops.profile.model import Profile
from lflops.profile.module_names import ancestry
from lflops.profile.records import PHASES, ModulePhase, Phase
from lflops.profile.series import gathered, sum_known


class Fusion(Struct, frozen=True, kw_only=True):
    """What fusion saves in one phase of a step, over the modules that have kernels of compiled code."""

    phase: Phase
    bytes_moved: int  # of the operators as dispatched
    fused_bytes: int  # what the kernels read and write, as the compiler counts it
    unknown_modules: int  # how many modules have a kernel of unknown bytes; they are in neither figure


def bytes_as_compiled(profile: Profile) -> Mapping[ModulePhase, int | None]:
    """Own bytes in a step of each module and phase that has kernels of compiled code. `None` where the bytes of a kernel are unknown.

    The compiler may compute cheap operators again in backward. Where the code as written computes nothing again, these bytes are part of
    the backward, so that both counts of bytes are of the same work.
    """
    trace = profile.trace
    if trace is None or trace.compiled is None or not trace.batches:
        return {}
    written = {ModulePhase(cell.module, cell.phase) for cell in profile.cells}
    kernels: defaultdict[ModulePhase, list[int | None]] = defaultdict(list)
    for kernel in trace.compiled.kernels:
        key = ModulePhase(kernel.module, kernel.phase)
        is_only_compiled = kernel.phase == "recompute" and key not in written
        kernels[ModulePhase(kernel.module, "backward") if is_only_compiled else key].append(kernel.bytes_moved)
    sums = {key: sum_known(moved) for key, moved in kernels.items()}
    batches = profile.run.accumulation or 1
    return {key: None if moved is None else round(moved * batches / trace.batches) for key, moved in sums.items()}


def bytes_with_below(profile: Profile, compiled: Mapping[ModulePhase, int | None]) -> Mapping[ModulePhase, int | None]:
    """Add up `bytes_as_compiled` over each module and all below it; without a kernel, the bytes of its operators as dispatched."""
    counted = {ModulePhase(cell.module, cell.phase) for cell in profile.cells}
    moved = {**{key: profile.modules[key.row].work(key.phase).own_bytes_moved for key in counted}, **compiled}
    parts = gathered((ModulePhase(name, key.phase), each) for key, each in moved.items() for name in ancestry(key.row))
    opened = {ModulePhase(name, key.phase) for key in compiled for name in ancestry(key.row)}
    return {key: sum_known(parts[key]) for key in opened}


def fusion(profile: Profile) -> tuple[Fusion, ...]:
    """What fusion saves, by phase; empty where no kernel of compiled code was traced, or nothing was counted."""
    compiled = bytes_as_compiled(profile) if profile.is_counted else {}
    found = []
    for phase in PHASES:
        of_phase = {key.row: moved for key, moved in compiled.items() if key.phase == phase}
        known = {row: moved for row, moved in of_phase.items() if moved is not None}
        if of_phase:
            found.append(
                Fusion(
                    phase=phase,
                    bytes_moved=sum(profile.modules[row].work(phase).own_bytes_moved for row in known if row in profile.modules),
                    fused_bytes=sum(known.values()),
                    unknown_modules=len(of_phase) - len(known),
                )
            )
    return tuple(found)
