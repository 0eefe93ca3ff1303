"""A counted profile and timed passes of the same call, as one profile."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from lflops.collect.timing.scale_to_clean import ScaledTimes, scale_to_clean
from lflops.collect.timing.stamps import HookOverhead, PassTimes
from lflops.profile.model import Profile, with_works
from lflops.profile.notes import Note
from lflops.profile.records import ModulePhase, Phase
from lflops.profile.series import gathered, summed
from lflops.profile.steps import Step, is_disturbed

PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute")

WORTH_SAYING = 0.05  # how far the hooked passes may be off the clean ones before a note says so


def attach_module_times(
    profile: Profile, hooked: Sequence[Mapping[str, PassTimes]], overhead: HookOverhead
) -> tuple[Profile, tuple[Mapping[ModulePhase, float], ...]]:
    """A profile whose steps are timed with the time of its modules: the clean steps' time, divided as in the hooked ones.

    Also the own seconds of the modules in each hooked step, as stamped: ranks are compared by these. Their hooks cost all ranks the same;
    a factor of each rank's own would be taken for a slow rank.
    """
    clean = [step for step in profile.steps if step.is_clean]
    of_hooks = [step for step in profile.steps if step.kind == "hooked"]
    waits_apart = len(of_hooks) == len(hooked) and all(step.waiting is not None for step in (*clean, *of_hooks))
    known = gathered(item for step in clean for item in _parts(step, waits_apart=waits_apart).items())
    # A step without the part has none of its seconds: so modules add up to the summed clean steps.
    means = {part: sum(seconds) / len(clean) for part, seconds in known.items()}
    usual = {part: statistics.median(known[part]) * len(known[part]) / len(clean) for part in means}
    ignored = frozenset(note.subject for note in profile.notes if note.code == "ignored")
    apart = [_with_wait_apart(parts, step.waiting or 0.0) for parts, step in zip(hooked, of_hooks, strict=True)] if waits_apart else hooked
    times = scale_to_clean(apart, usual, overhead, ignored, means)
    timed = with_times(profile, times)
    slow, undisturbed = _median(step.seconds for step in of_hooks if not is_disturbed(step.marks)), _median(step.seconds for step in clean)
    run = replace(timed.run, observer_ratio=slow / undisturbed if slow is not None and undisturbed else None)
    far: Mapping[str, float] = {
        part: factor for part, factor in times.factors.items() if part != "waiting" and abs(factor - 1) > WORTH_SAYING
    }
    notes = (*timed.notes, Note(code="time_scaled", subject="", values=far)) if far else timed.notes
    own_of_steps = tuple(summed(item for part in parts.values() for item in part.own.items()) for parts in hooked)
    return replace(timed, run=run, notes=notes), own_of_steps


def with_times(profile: Profile, times: ScaledTimes) -> Profile:
    """The profile with the seconds of its modules; a row that ran in no stamped pass stays unknown."""
    notes = (
        replace(note, values={**note.values, "seconds": times.ignored[note.subject]})
        if note.code == "ignored" and note.subject in times.ignored
        else note
        for note in profile.notes
    )
    works = {
        key: replace(profile.modules[key.row].work(key.phase), seconds=seconds, own_seconds=times.own.get(key))
        for key, seconds in times.inclusive.items()
        if key.row in profile.modules and key.phase in PHASES
    }
    return replace(profile, modules=with_works(profile.modules, works), notes=tuple(notes))


def _with_wait_apart(parts: Mapping[str, PassTimes], seconds: float) -> dict[str, PassTimes]:
    """The parts of a hooked step with the wait for other ranks as one more: how late they are says nothing about the modules."""
    root, backward = ModulePhase("", "backward"), parts.get("backward", PassTimes())
    waited, own = min(seconds, backward.own.get(root, 0.0)), defaultdict(float, backward.own)
    own[root] -= waited
    return {**parts, "backward": dataclasses.replace(backward, own=own), "waiting": PassTimes(own=defaultdict(float, {root: waited}))}


def _parts(step: Step, *, waits_apart: bool) -> dict[str, float]:
    """What a clean pass times as one. Generation has two parts, prefill and decode, which together are forward."""
    parts = {part: step.phases[part] for part in ("forward", "backward") if part in step.phases}
    generating = [step.phases[name] for name in ("prefill", "decode") if name in step.phases]
    if generating and "forward" not in parts:
        parts["forward"] = sum(generating)
    if waits_apart and "backward" in parts:
        parts["waiting"] = step.waiting or 0.0
        parts["backward"] -= parts["waiting"]
    return parts


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
