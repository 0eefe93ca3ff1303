"""Compute the time of a step and of its phases over the unprofiled steps.

Unprofiled steps run without hooks or traces. Every share of a step is relative to the mean time of
these steps, here and in the step breakdown. So the parts add up to the whole even if the steps
differ. The median step and its quartiles are reported next to the mean.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import PASSES, TimingStats, median_of, step_phase
from lflops.profile.series import ratio, sum_known, without_none
from lflops.profile.steps import WITHIN_FORWARD, Step, is_disturbed, with_phases

# Times are unreliable if other processes take at least this share of the CPU time.
VERY_BUSY = 0.2

# Smallest communication wait that is not ignored, as a share of the step. Reading the clock can
# take as long as a shorter wait.
_MIN_WAIT_SHARE = 0.001
# Recomputation is a separate phase only if it takes at least this share of the step. Fused
# attention always recomputes a little.
_LEAST_RECOMPUTED = 0.01
# Rounding error of summed floats, as a share of a step.
_ROUNDING = 1e-9


def lost_share(profile: Profile) -> float:
    """Return the median share of CPU time that other processes took in the module-timing steps."""
    return statistics.median(profile.cpu_lost_shares or [0.0])


LEAST_LOST = 0.02
"""If other processes took less CPU time than this share of the step, this time is ignored.

A step that waits most of the time needs little CPU time, so other processes can take only little.
"""


class StepTimes(Struct, frozen=True, kw_only=True):
    """Times over the unprofiled steps. `None` or a missing phase means unknown.

    Attributes:
        steps: Number of unprofiled steps.
        seconds: Median and quartiles of the duration of a step.
        mean: Mean duration of a step in seconds.
        longest: Duration of the longest step in seconds.
        phases: Mean seconds of each recorded phase, in the order of the step. If a step does not
            have the phase, it counts as 0 seconds.
        host_phases: Mean seconds that the host spent in each phase. Empty unless `phases` are
            device times.
        waiting: Mean seconds at the end of backward in which the rank exchanges gradients and waits
            for other ranks. `None` if it does not wait there.
        recompute: Mean seconds of backward in which activations are recomputed. `None` if unknown,
            or if nothing is recomputed.
        communicating: Seconds of self time in which a module computes nothing, because it exchanges
            data or waits for other ranks. The keys are the module and the pass (forward or
            backward).
        spreads: Median and quartiles of each phase, over the steps that have the phase. The medians
            do not add up to the step.
        uncontended: Median seconds of each phase in the module-timing steps, without the time in
            which other threads used the CPU core. Empty if unknown.
        samples_per_second: Samples per second over all unprofiled steps. If there are several
            ranks, the samples of all ranks are added up.
        tokens_per_second: Tokens per second, computed in the same way.
        cpu_seconds: CPU time of a step, over all threads of the process. It includes the time that
            the operating system spent for the process.
        system_seconds: The part of `cpu_seconds` that the operating system spent.
    """

    steps: int
    seconds: TimingStats | None
    mean: float | None
    longest: float | None = None
    phases: Mapping[str, float]
    host_phases: Mapping[str, float] = {}
    waiting: float | None = None
    recompute: float | None = None
    communicating: Mapping[tuple[str, str], float] = {}
    spreads: Mapping[str, TimingStats] = {}
    uncontended: Mapping[str, float] = {}
    samples_per_second: float | None
    tokens_per_second: float | None
    cpu_seconds: TimingStats | None
    system_seconds: TimingStats | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds of each phase of a step.

        The phases do not overlap, and their times add up to the mean step. Time outside all phases
        is `other`. The result is empty if no phase was recorded.
        """
        parts = dict(self.phases)
        if "forward" in parts:
            for name in WITHIN_FORWARD:
                parts.pop(name, None)
        mean = self.mean or 0.0
        rest = mean - sum(parts.values())
        if parts and rest > _ROUNDING * mean:
            parts["other"] = parts.get("other", 0.0) + rest
        return parts

    @property
    def recomputed_share(self) -> float:
        """Share of the backward time in which activations are recomputed.

        It is 0 if recomputation takes less than 1 % of the step.
        """
        backward = self.phases.get("backward")
        recompute = self.recompute or 0.0
        if not backward or recompute < _LEAST_RECOMPUTED * (self.mean or 0.0):
            return 0.0
        return min(recompute / backward, 1.0)

    @property
    def spread(self) -> float | None:
        """Distance from the median step to the farther quartile, as a share of the median."""
        return spread_of(self.seconds)

    def share(self, seconds: float | None) -> float | None:
        """Return `seconds` as a share of the mean step; `None` if either is unknown."""
        return ratio(seconds, self.mean)


def with_recompute(phases: Mapping[str, float], share: float) -> dict[str, float]:
    """Divide backward into two phases, `recompute` and `backward`.

    `share` is the share of the backward time in which activations are recomputed.
    """
    divided: dict[str, float] = {}
    for name, seconds in phases.items():
        if name == "backward" and share:
            divided["recompute"] = seconds * share
            divided[name] = seconds * (1 - share)
        else:
            divided[name] = seconds
    return divided


def busy_share(profile: Profile, times: StepTimes) -> float:
    """Return the share of CPU time that other processes took.

    Return 0 if this CPU time is less than the share `LEAST_LOST` of a step.
    """
    lost = lost_share(profile)
    if times.cpu_seconds is None or not times.mean:
        return lost
    lost_seconds = lost * times.cpu_seconds.median
    if lost_seconds < LEAST_LOST * times.mean:
        return 0.0
    return lost


def step_times(profile: Profile) -> StepTimes:
    """Compute the times over the unprofiled steps.

    Other steps are left out: warmup steps, steps with new shapes, steps in which code was compiled
    again, and steps that were disturbed by validation, checkpoints or other events.
    """
    steps = []
    seconds = []
    samples = []
    tokens = []
    cpu_seconds = []
    system_seconds = []
    for step in profile.steps:
        if step.is_unprofiled and step.seconds is not None:
            steps.append(step)
            seconds.append(step.seconds)
            samples.append(step.samples)
            tokens.append(step.tokens)
            cpu_seconds.append(sum_known((step.cpu_user, step.cpu_system)))
            system_seconds.append(step.cpu_system)
    mean = ratio(sum(seconds), len(steps))
    timed, scale = with_phases(steps)
    phases = [step.phases for step in timed]
    waiting = _communication_wait(timed, scale, mean)
    if waiting:
        communicating = {("", "backward"): waiting}
    else:
        communicating = _host_collectives(profile)

    # In a profile of several ranks, a step has the samples of all ranks, but `run` has the number
    # of one rank.
    usual_samples = usual_tokens = None
    if len(profile.ranks) < 2:
        usual_samples = profile.run.samples_per_step
        usual_tokens = profile.run.tokens_per_step

    return StepTimes(
        steps=len(steps),
        seconds=TimingStats.of(seconds),
        mean=mean,
        longest=max(seconds, default=None),
        phases=_means(phases, scale),
        host_phases=_means([step.host_phases for step in timed], scale),
        waiting=waiting,
        recompute=median_of(profile.modules[""].recompute.seconds) or None,
        communicating=communicating,
        spreads=_phase_stats(phases),
        uncontended=uncontended_phases(profile),
        samples_per_second=_rate(samples, seconds, usual_samples),
        tokens_per_second=_rate(tokens, seconds, usual_tokens),
        cpu_seconds=TimingStats.of(without_none(cpu_seconds)),
        system_seconds=TimingStats.of(without_none(system_seconds)),
    )


def spread_without_data(profile: Profile) -> float:
    """Return the spread of the unprofiled steps without the time in which they waited for data.

    It is 0 if no step was timed.
    """
    seconds = []
    for step in profile.steps:
        if step.is_unprofiled and step.seconds is not None:
            seconds.append(step.seconds - step.phases.get("data", 0.0))
    return spread_of(TimingStats.of(seconds)) or 0.0


def spread_of(times: TimingStats | None) -> float | None:
    """Return the distance from the median to the farther quartile, as a share of the median."""
    if times is None or not times.median:
        return None
    return max(times.high - times.median, times.median - times.low) / times.median


def _communication_wait(timed: Sequence[Step], scale: float, mean: float | None) -> float | None:
    """Return the mean wait at the end of backward in seconds.

    Return `None` if the wait is negligible or unknown.
    """
    total = sum_known(step.waiting for step in timed)
    if not total or not mean:
        return None
    waiting = total * scale / len(timed)
    if waiting < _MIN_WAIT_SHARE * mean:
        return None
    return waiting


def _means(steps: Sequence[Mapping[str, float]], scale: float) -> dict[str, float]:
    sums: dict[str, float] = {}
    for phases in steps:
        for name, seconds in phases.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return {name: total * scale / len(steps) for name, total in sums.items()}


def _phase_stats(steps: Iterable[Mapping[str, float]]) -> dict[str, TimingStats]:
    by_phase: dict[str, list[float]] = {}
    for phases in steps:
        for name, seconds in phases.items():
            by_phase.setdefault(name, []).append(seconds)
    stats = {}
    for name, of_phase in by_phase.items():
        spread = TimingStats.of(of_phase)
        if spread is not None:
            stats[name] = spread
    return stats


def uncontended_phases(profile: Profile) -> dict[str, float]:
    """Return the median seconds of each phase, without the time that the training thread lost.

    The training thread loses time while another thread uses its CPU core. The times come from the
    module-timing steps. The result is empty if the lost time is unknown. If the lost time is known,
    module times exclude it as well.
    """
    phases = []
    for step in profile.steps:
        if step.kind == "module_timing" and not is_disturbed(step.marks):
            phases.append(step.uncontended_phases)
    if not all(phases):
        return {}
    return {name: spread.median for name, spread in _phase_stats(phases).items()}


def _rate(units: Sequence[int | None], seconds: Sequence[float], usual: int | None) -> float | None:
    """Return the samples or tokens per second.

    Args:
        units: The number of samples or tokens in each step. `None` if it is unknown for a step.
        seconds: The duration of each step.
        usual: The number that is used for steps with an unknown number. If it is `None`, these
            steps are left out.
    """
    total = 0
    total_seconds = 0.0
    for recorded, took in zip(units, seconds, strict=True):
        number = usual if recorded is None else recorded
        if number is not None:
            total += number
            total_seconds += took
    return ratio(total, total_seconds)


def _host_collectives(profile: Profile) -> dict[tuple[str, str], float]:
    """Return the seconds of collectives on the host that do not overlap with computation.

    The seconds come from the traced steps. They are keyed by module and pass (forward or backward),
    and are at most the self time of the module. The result is empty if a device was traced, because
    the step breakdown then uses the communication time of the device.
    """
    if profile.trace is None or profile.trace.device_compute_seconds is not None:
        return {}
    exposed: dict[tuple[str, str], float] = {}
    for collective in profile.communication:
        when = step_phase(collective.phase)
        if when in PASSES and collective.exposed_seconds:
            key = (collective.module, when)
            exposed[key] = exposed.get(key, 0.0) + collective.exposed_seconds
    for (name, when), seconds in exposed.items():
        exposed[name, when] = min(seconds, _self_seconds(profile.modules[name], when))
    return exposed


def _self_seconds(module: ModuleProfile, when: str) -> float:
    seconds = 0.0
    for phase in PASSES[when]:
        seconds += median_of(module.work(phase).self_seconds) or 0.0
    return seconds


def traced_seconds(profile: Profile, *, own: bool = False) -> dict[str, float]:
    """Return the seconds per step of each traced operator.

    If a device was traced, the seconds are device times, otherwise host times. If `own` is true,
    the time of an operator excludes the operators that it calls.
    """
    trace = profile.trace
    steps = profile.traced_steps
    if trace is None or steps is None:
        return {}
    field = "device_seconds" if trace.has_device_times else "host_seconds"
    if own:
        field = f"self_{field}"
    return {operator.name: getattr(operator, field) / steps for operator in trace.operators}
