"""Add the results of the traced steps to a profile.

The profile comes from a counting step, in which lflops counts every operator. It has the
collectives but not their times. The traced steps, which torch.profiler recorded, have the kernels
and their times. Both record the module and phase that launched a collective. So collectives and
kernels are matched by module and phase.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from lflops.profile.collective_names import collective_kind
from lflops.profile.profile import Communication, Profile, with_works
from lflops.profile.records import PHASES, ModulePhase
from lflops.trace.record.compiled_profile import with_compiled
from lflops.trace.record.tracer import Recording

_ROOT_BACKWARD = ModulePhase("", "backward")
_OTHER = ModulePhase("", "other")
"""Module and phase to which a traced step assigns work after the last backward node.

A counting step assigns the same work to the root module in backward.
"""

_SENT_AND_RECEIVED = frozenset({"all_to_all", "send", "recv", "gather", "scatter"})
"""Collectives that NCCL can run as kernels that send and receive."""

_Place = tuple[ModulePhase, str]
"""The module and phase that launched collectives, and the kind of their kernels.

The kind is, for example, `all_reduce`. A trace has one total for all kernels with the same place.
"""


def with_trace(profile: Profile, recording: Recording, files: Mapping[str, str]) -> Profile:
    """Return the profile with operators, communication times and device times of modules.

    Args:
        profile: The profile of a counting step.
        recording: Results of the traced steps.
        files: Trace files by rank.
    """
    works = {}
    for key, seconds in (recording.device_seconds or {}).items():
        if key.fqn in profile.modules and key.phase in PHASES:
            work = profile.modules[key.fqn].work(key.phase)
            works[key] = replace(work, device_seconds=seconds)
    profile = replace(
        profile,
        modules=with_works(profile.modules, works),
        communication=_with_times(profile.communication, recording.communication),
        trace=replace(recording.trace, files=files),
    )
    if recording.timelines:
        profile = replace(profile, timelines=recording.timelines)
    if recording.compiled is not None:
        profile = with_compiled(profile, recording.compiled, recording.call_times)
    return profile


def _with_times(
    rows: Sequence[Communication], seconds: Mapping[_Place, tuple[float, float]]
) -> tuple[Communication, ...]:
    """Return the collectives with their times.

    If two collectives were launched by the same module in the same phase and use the same kind of
    kernel, their kernels cannot be distinguished, so their times are `None`.

    Args:
        rows: The collectives.
        seconds: Total and exposed time of the kernels of each module, phase and kind.
    """
    places = _places_in_trace(rows, seconds)
    number_of_rows: Counter[_Place] = Counter()
    for of_row in places:
        number_of_rows.update(of_row)
    timed = []
    for row, of_row in zip(rows, places, strict=True):
        known = []
        known_exposed = []
        for place in of_row:
            is_of_this_row_only = number_of_rows[place] == 1
            if is_of_this_row_only and place in seconds:
                whole, exposed = seconds[place]
                known.append(whole)
                known_exposed.append(exposed)
        if known:
            times = replace(row, seconds=sum(known), exposed_seconds=sum(known_exposed))
        else:
            times = replace(row, seconds=None, exposed_seconds=None)
        timed.append(times)
    return tuple(timed)


def _places_in_trace(
    rows: Sequence[Communication], seconds: Mapping[_Place, tuple[float, float]]
) -> list[set[_Place]]:
    """Return, for each collective, the places where the trace can show its kernels.

    A place is a module, a phase and a kind of kernel (see `_Place`).
    """
    places: list[set[_Place]] = []
    counted: set[_Place] = set()
    number_of_kind: Counter[str] = Counter()
    for row in rows:
        kinds = _kernel_kinds(row.collective)
        of_row = {(ModulePhase(row.module, row.phase), kind) for kind in kinds}
        places.append(of_row)
        counted |= of_row
        number_of_kind.update(kinds)
    for row, of_row in zip(rows, places, strict=True):
        kinds = _kernel_kinds(row.collective)
        if ModulePhase(row.module, row.phase) == _ROOT_BACKWARD:
            of_row.update({(_OTHER, kind) for kind in kinds} - counted)
        # If only one collective has this kind, all kernels of the kind belong to it, even if the
        # trace shows a launch a little before or after the collective's module.
        for place in seconds:
            kind = place[1]
            if kinds == {kind} and number_of_kind[kind] == 1:
                of_row.add(place)
    return places


def _kernel_kinds(collective: str) -> set[str]:
    """Return the kinds of kernels that a trace can show for a collective."""
    kind = collective_kind(collective)
    return {kind, "send_recv"} if kind in _SENT_AND_RECEIVED else {kind}
