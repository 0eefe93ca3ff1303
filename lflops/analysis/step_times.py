"""The time of a step and of its phases, over the clean steps, which ran without hooks or traces.

A step is divided once: every share of a step, here, in the budget and by module, is a share of the
summed clean steps. So parts add up to their whole, also where steps differ. The median step with
its quartiles is known as well.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import PASSES, TimingStats, step_phase
from lflops.profile.series import gathered, sum_known, summed
from lflops.profile.steps import WITHIN_FORWARD, Step, is_disturbed, with_phases

# of a step: less is how long a look at the clock takes
_LEAST_WAIT = 0.001
# share of the CPU time that the process needed: where others took so much, times are no measure
VERY_BUSY = 0.2
# share of a step that is rounding error of sums of floats
_NOISE = 1e-9


def lost_share(profile: Profile) -> float:
    """What share of the CPU time that the process needed others took, while modules were timed."""
    return statistics.median(profile.cpu_lost_shares or [0.0])


class StepTimes(Struct, frozen=True, kw_only=True):
    """Times over the clean steps; `None` and an absent phase are unknown."""

    # the number of steps
    steps: int
    # of a step: median and quartiles
    seconds: TimingStats | None
    # seconds of a step: those of all clean steps over their number
    mean: float | None
    # of the longest one.
    longest: float | None = None
    # Of each recorded phase the same as `mean`, in the order of the steps; a step without the phase
    # has 0 seconds of it.
    phases: Mapping[str, float]
    host_phases: Mapping[
        str, float
        # of each, the seconds that the host was in it, where `phases` are the device's.
    ] = {}
    # Mean seconds at the end of backward in which gradients are exchanged, and other ranks awaited;
    # `None` where that is not so.
    waiting: float | None = None
    # Of each module's own time, by module and pass, the seconds in which it exchanges or waits and
    # computes nothing.
    communicating: Mapping[tuple[str, str], float] = {}
    spreads: Mapping[
        str, TimingStats
        # of each recorded phase the median and quartiles, of the steps that have it. They do not add up
    ] = {}
    own: Mapping[
        str, float
        # the same medians of the hooked steps, without what others had of the thread's core; empty
        # where unknown
    ] = {}
    samples_per_second: (
        float | None
        # samples of all clean steps over their time; of several ranks, of all of them together
    )
    # the same for tokens
    tokens_per_second: float | None
    cpu_seconds: (
        TimingStats | None
        # CPU time of a step, user and system together, over all threads of the process
    )
    # the system's part of that
    system_seconds: TimingStats | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Disjoint seconds of the mean step by phase, which add up to it.

        `other` has what is in no phase. Empty without any phase.
        """
        mean = self.mean or 0.0
        inside = WITHIN_FORWARD if "forward" in self.phases else ()
        parts = {name: seconds for name, seconds in self.phases.items() if name not in inside}
        rest = mean - sum(parts.values())
        if parts and rest > _NOISE * mean:
            parts["other"] = parts.get("other", 0.0) + rest
        return parts

    @property
    def spread(self) -> float | None:
        """How far the farther quartile is from the median step, as a share of it."""
        if self.seconds is None or not self.seconds.median:
            return None
        return (
            max(self.seconds.high - self.seconds.median, self.seconds.median - self.seconds.low)
            / self.seconds.median
        )

    def share(self, seconds: float) -> float | None:
        """What share of the summed clean steps it is to take so many seconds in each of them."""
        return seconds / self.mean if self.mean else None


def step_times(profile: Profile) -> StepTimes:
    """Times over the clean steps.

    Those that were cold, recompiled, had new shapes, or waited for an event of the training are
    left out.
    """
    steps = [step for step in profile.steps if step.is_unprofiled and step.seconds is not None]
    alone = (
        len(profile.ranks) < 2
        # with several ranks the steps have the samples of all, the run those of one
    )
    mean = sum(step.seconds or 0.0 for step in steps) / len(steps) if steps else None
    timed, scale = with_phases(steps)
    waited = sum_known(step.waiting for step in timed)
    waiting = (
        waited * scale / len(timed)
        if waited and mean and waited * scale >= _LEAST_WAIT * mean * len(timed)
        else None
    )
    cpu = [
        step.cpu_user + step.cpu_system
        for step in steps
        if step.cpu_user is not None and step.cpu_system is not None
    ]
    return StepTimes(
        steps=len(steps),
        seconds=TimingStats.of(step.seconds for step in steps if step.seconds is not None),
        mean=mean,
        longest=max((step.seconds or 0.0 for step in steps), default=None),
        phases=_means([step.phases for step in timed], scale),
        host_phases=_means([step.host_phases for step in timed], scale),
        waiting=waiting,
        communicating={("", "backward"): waiting} if waiting else _in_collectives(profile),
        spreads=_spreads(step.phases for step in timed),
        own=without_others(profile),
        samples_per_second=_rate(
            steps, [step.samples for step in steps], profile.run.samples_per_step if alone else None
        ),
        tokens_per_second=_rate(
            steps, [step.tokens for step in steps], profile.run.tokens_per_step if alone else None
        ),
        cpu_seconds=TimingStats.of(cpu),
        system_seconds=TimingStats.of(
            step.cpu_system for step in steps if step.cpu_system is not None
        ),
    )


def _means(steps: Sequence[Mapping[str, float]], scale: float) -> dict[str, float]:
    names = dict.fromkeys(name for phases in steps for name in phases)
    return {
        name: sum(phases.get(name, 0.0) for phases in steps) * scale / len(steps) for name in names
    }


def _spreads(steps: Iterable[Mapping[str, float]]) -> dict[str, TimingStats]:
    by_phase = gathered(item for phases in steps for item in phases.items())
    return {
        name: spread
        for name, seconds in by_phase.items()
        if (spread := TimingStats.of(seconds)) is not None
    }


def without_others(profile: Profile) -> dict[str, float]:
    """Median seconds of each phase in the hooked steps without what others had of the core.

    Empty where that is unknown.
    """
    # Where it is known, the times of modules are without that as well.
    hooked = [
        step
        for step in profile.steps
        if step.kind == "module_timing" and not is_disturbed(step.marks)
    ]
    known = [step.uncontended_phases for step in hooked if step.uncontended_phases]
    return (
        {name: spread.median for name, spread in _spreads(known).items()}
        if len(known) == len(hooked)
        else {}
    )


def _rate(steps: Sequence[Step], units: Sequence[int | None], usual: int | None) -> float | None:
    """Units a second. A step with an unknown number of units counts with the run's usual number."""
    known = [
        (usual if n is None else n, step.seconds) for n, step in zip(units, steps, strict=True)
    ]
    summed = [(n, seconds) for n, seconds in known if n is not None and seconds is not None]
    together = sum(seconds for _, seconds in summed)
    return sum(n for n, _ in summed) / together if together else None


def _in_collectives(profile: Profile) -> dict[tuple[str, str], float]:
    """What collectives on the host took in the traced steps, as far as modules have so much time.

    On a device the budget has it.
    """
    if profile.trace is None or profile.trace.device_compute_seconds is not None:
        return {}
    exposed = (
        (each.module, step_phase(each.phase), each.exposed_seconds)
        for each in profile.communication
    )
    found = summed(
        ((module, when), seconds) for module, when, seconds in exposed if when in PASSES and seconds
    )
    return {
        (name, when): min(seconds, _own_seconds(profile.modules[name], when))
        for (name, when), seconds in found.items()
    }


def _own_seconds(module: ModuleProfile, when: str) -> float:
    spreads = [module.work(phase).self_seconds for phase in PASSES[when]]
    return sum(spread.median for spread in spreads if spread is not None)


def traced_seconds(profile: Profile, *, own: bool = False) -> dict[str, float]:
    """Seconds a step of all calls of each traced operator, on the device where recorded.

    `own` leaves out the operators that it calls.
    """
    trace = profile.trace
    if trace is None or not trace.batches:
        return {}
    side = (
        "device_seconds"
        if any(each.self_device_seconds for each in trace.operators)
        else "host_seconds"
    )
    batches = profile.run.accumulation or 1
    return {
        each.name: getattr(each, f"self_{side}" if own else side) * batches / trace.batches
        for each in trace.operators
    }
