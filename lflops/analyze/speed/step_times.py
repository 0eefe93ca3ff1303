"""The time of a step and of its phases, over the clean steps, which ran without hooks or traces."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from lflops.profile.model import Profile
from lflops.profile.records import Spread
from lflops.profile.steps import Step

__all__ = ["StepTimes", "step_times"]


class StepTimes(Struct, frozen=True, kw_only=True):
    """Medians and quartiles over the clean steps; `None` and an absent phase are unknown.

    Attributes:
        steps: The number of steps.
        seconds: Of a step.
        phases: Seconds of each recorded phase, in the order of the steps.
        host_phases: Of each, the seconds that the host was in it, where `phases` are the device's.
        samples_per_second: Samples of the average step in the time of the median one; of several ranks, of all of them together.
        tokens_per_second: The same for tokens.
        cpu_seconds: CPU time of a step, user and system together, over all threads of the process.
        system_seconds: The system's part of that.
    """

    steps: int
    seconds: Spread | None
    phases: Mapping[str, Spread]
    host_phases: Mapping[str, Spread] = {}
    samples_per_second: float | None
    tokens_per_second: float | None
    cpu_seconds: Spread | None
    system_seconds: Spread | None = None


def step_times(profile: Profile) -> StepTimes:
    """Medians over the clean steps.

    Steps that were cold, recompiled, had new shapes, or waited for a validation or a checkpoint are left out.
    """
    steps = [step for step in profile.steps if step.is_clean and step.seconds is not None]
    alone = len(profile.ranks) < 2  # with several ranks the steps have the samples of all, the run those of one
    cpu = [step.cpu_user + step.cpu_system for step in steps if step.cpu_user is not None and step.cpu_system is not None]
    return StepTimes(
        steps=len(steps),
        seconds=Spread.of([step.seconds for step in steps if step.seconds is not None]),
        phases=_spreads(step.phases for step in steps),
        host_phases=_spreads(step.host_phases for step in steps),
        samples_per_second=_rate(steps, [step.samples for step in steps], profile.run.samples_per_step if alone else None),
        tokens_per_second=_rate(steps, [step.tokens for step in steps], profile.run.tokens_per_step if alone else None),
        cpu_seconds=Spread.of(cpu),
        system_seconds=Spread.of(step.cpu_system for step in steps if step.cpu_system is not None),
    )


def _spreads(steps: Iterable[Mapping[str, float]]) -> dict[str, Spread]:
    by_phase: dict[str, list[float]] = {}
    for phases in steps:
        for name, seconds in phases.items():
            by_phase.setdefault(name, []).append(seconds)
    spreads = {name: Spread.of(seconds) for name, seconds in by_phase.items()}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _rate(steps: Sequence[Step], units: Sequence[int | None], usual: int | None) -> float | None:
    """Units a second. A step with an unknown number of units counts with the run's usual number."""
    steps_units = [(usual if n is None else n, step.seconds) for n, step in zip(units, steps, strict=True)]
    known = [(n, seconds) for n, seconds in steps_units if n is not None and seconds is not None]
    if not known or not (median := statistics.median(seconds for _, seconds in known)):
        return None
    return statistics.fmean(n for n, _ in known) / median
