"""A profile and what was recorded of its traced steps, as one profile."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from lflops.collect.kineto.attach_compiled import with_compiled
from lflops.collect.kineto.tracer import Recording
from lflops.profile.collective_names import collective_kind
from lflops.profile.model import Communication, ModuleProfile, Profile
from lflops.profile.records import PHASES, ModulePhase, Spread, Trace

__all__ = ["with_trace"]

ROOTS_BACKWARD, OTHER = ModulePhase("", "backward"), ModulePhase("", "other")
"""What the engine calls at the end of backward is the root's backward in a count. A trace has it after the last node: `other`."""


def with_trace(profile: Profile, recording: Recording, files: Mapping[str, str]) -> Profile:
    """The profile with what was recorded: the operators, and the device's time of each module and phase where a device was.

    Args:
        profile: What was counted and timed.
        recording: Of the window's traced steps.
        files: Where the trace will be, by rank.
    """
    trace = Trace(
        files=files,
        batches=recording.batches,
        device_idle_seconds=recording.device_idle_seconds,
        device_idle_by_phase=recording.device_idle_by_phase,
        exposed_comm_seconds=recording.exposed_comm_seconds,
        exposed_copy_seconds=recording.exposed_copy_seconds,
        device_compute_seconds=recording.device_compute_seconds,
        operators=recording.operators,
        compiled=None if recording.compiled is None else recording.compiled.code,
    )
    seconds = recording.device_seconds or {}
    modules = {name: _on_device(name, module, seconds) for name, module in profile.modules.items()}
    communication = _timed(profile.communication, recording.communication)
    timelines = profile.timelines if recording.timeline is None else (recording.timeline,)
    profile = replace(profile, modules=modules, communication=communication, trace=trace, timelines=timelines)
    return profile if recording.compiled is None else with_compiled(profile, recording.compiled, recording.call_times)


def _timed(rows: Sequence[Communication], seconds: Mapping[tuple[ModulePhase, str], tuple[float, float]]) -> tuple[Communication, ...]:
    """The collectives with their times. Two of one kind in one place share kernels that cannot be distinguished: unknown."""
    places = [{(ModulePhase(row.module, row.phase), kind) for kind in _kernels_of(row.collective)} for row in rows]
    counted = set().union(*places)
    for each in places:
        each |= {(OTHER, kind) for place, kind in each if place == ROOTS_BACKWARD and (OTHER, kind) not in counted}
    number = Counter(place for each in places for place in each)
    timed = []
    for row, each in zip(rows, places, strict=True):
        known = [seconds[place] for place in each if place in seconds and number[place] == 1]
        whole, exposed = (sum(part) for part in zip(*known, strict=True)) if known else (None, None)
        timed.append(replace(row, seconds=whole, exposed_seconds=exposed))
    return tuple(timed)


def _kernels_of(collective: str) -> set[str]:
    """The kinds of kernels that a collective is made of."""
    kind = collective_kind(collective)
    return {kind, "send_recv"} if kind in {"all_to_all", "send", "recv", "gather", "scatter"} else {kind}


def _on_device(name: str, module: ModuleProfile, seconds: Mapping[ModulePhase, Spread]) -> ModuleProfile:
    works: dict[str, Any] = {
        phase: replace(module.work(phase), device_seconds=each)
        for phase in PHASES
        if (each := seconds.get(ModulePhase(name, phase))) is not None
    }
    return replace(module, **works) if works else module
