"""A counted profile and timed passes of the same call, as one profile."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from lflops.collect.timing.scale_to_clean import ScaledTimes, scale_to_clean
from lflops.collect.timing.stamps import HookOverhead, PassTimes
from lflops.collect.timing.timed_passes import TimedPasses
from lflops.profile.model import ModuleProfile, Profile
from lflops.profile.notes import Note
from lflops.profile.records import ModulePhase, Phase
from lflops.profile.steps import Step, is_disturbed

__all__ = ["divide", "divided", "join", "with_times"]

PARTS = ("forward", "backward")
"""What a clean pass times as one."""

PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute")

WORTH_SAYING = 0.05
"""How far the hooked passes may be off the clean ones before a note says so."""


def join(profile: Profile, passes: TimedPasses, overhead: HookOverhead) -> Profile:
    """The profile with the steps, and the time of its modules."""
    run = replace(profile.run, kind="measure")
    steps = tuple(replace(step, samples=run.samples_per_step, tokens=run.tokens_per_step) for step in passes.steps)
    return divide(replace(profile, run=run, steps=steps), passes.hooked, overhead)


def divide(profile: Profile, hooked: Sequence[Mapping[str, PassTimes]], overhead: HookOverhead) -> Profile:
    """A profile with the times of its steps, and now of its modules: the clean steps' time, divided as in the hooked ones.

    Args:
        profile: What was counted and timed.
        hooked: The times of each hooked step by its parts; one step at least.
        overhead: What torch takes to call the hooks.
    """
    return divided(profile, hooked, overhead)[0]


def divided(
    profile: Profile, hooked: Sequence[Mapping[str, PassTimes]], overhead: HookOverhead
) -> tuple[Profile, tuple[Mapping[ModulePhase, float], ...]]:
    """The same, with the own seconds of the modules in each hooked step, as stamped: ranks are compared by these.

    Their hooks cost all ranks the same; a factor of each rank's own would be taken for a slow rank.
    """
    clean = [step for step in profile.steps if step.is_clean]
    known = {part: [seconds for step in clean if (seconds := _part(step, part)) is not None] for part in PARTS}
    # A step without the part has none of its seconds: so modules add up to the summed clean steps.
    means = {part: sum(seconds) / len(clean) for part, seconds in known.items() if seconds}
    usual = {part: statistics.median(known[part]) * len(known[part]) / len(clean) for part in means}
    ignored = frozenset(note.subject for note in profile.notes if note.code == "ignored")
    times = scale_to_clean(hooked, usual, overhead, ignored, means)
    timed = with_times(profile, times)
    hooked_steps = [step for step in profile.steps if step.kind == "hooked" and not is_disturbed(step.marks)]
    ratio = _ratio(_median(step.seconds for step in hooked_steps), _median(step.seconds for step in clean))
    return replace(timed, run=replace(timed.run, observer_ratio=ratio), notes=(*timed.notes, *_scaled(times))), tuple(
        map(_own_seconds, hooked)
    )


def _own_seconds(parts: Mapping[str, PassTimes]) -> dict[ModulePhase, float]:
    """The own seconds of a hooked step's modules over all its parts."""
    own: defaultdict[ModulePhase, float] = defaultdict(float)
    for part in parts.values():
        for key, seconds in part.own.items():
            own[key] += seconds
    return dict(own)


def with_times(profile: Profile, times: ScaledTimes) -> Profile:
    """The profile with the seconds of its modules; a row that ran in no stamped pass stays unknown."""
    notes = (
        replace(note, values={**note.values, "seconds": times.ignored[note.subject]})
        if note.code == "ignored" and note.subject in times.ignored
        else note
        for note in profile.notes
    )
    return replace(profile, modules={name: _timed(name, module, times) for name, module in profile.modules.items()}, notes=tuple(notes))


def _timed(name: str, module: ModuleProfile, times: ScaledTimes) -> ModuleProfile:
    works: dict[str, Any] = {}
    for phase in PHASES:
        key = ModulePhase(name, phase)
        if key in times.inclusive:
            works[phase] = replace(module.work(phase), seconds=times.inclusive[key], own_seconds=times.own.get(key))
    return replace(module, **works) if works else module


def _part(step: Step, part: str) -> float | None:
    """Generation has two parts, prefill and decode, which together are forward."""
    if part == "forward" and part not in step.phases:
        generating = [step.phases[name] for name in ("prefill", "decode") if name in step.phases]
        return sum(generating) if generating else None
    return step.phases.get(part)


def _scaled(times: ScaledTimes) -> Iterable[Note]:
    far: Mapping[str, float] = {part: factor for part, factor in times.factors.items() if abs(factor - 1) > WORTH_SAYING}
    if far:
        yield Note(code="time_scaled", subject="", values=far)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(hooked: float | None, clean: float | None) -> float | None:
    return hooked / clean if hooked is not None and clean else None
