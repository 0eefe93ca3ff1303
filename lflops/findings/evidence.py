"""Collect the evidence about a step that all rules read.

Each value is computed once.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from lflops.analysis.outliers import Outlier
from lflops.analysis.step_breakdown import StepBreakdown
from lflops.analysis.step_times import StepTimes, lost_share
from lflops.analysis.tree import BusyModules
from lflops.analysis.utilization import Utilization
from lflops.findings.own_operators import OperatorTimes
from lflops.findings.repeats import UnlikeRepeat, unlike_repeats
from lflops.profile.notes import are_times_far_off
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import PASSES
from lflops.profile.series import ratio, summed
from lflops.profile.steps import Step, is_disturbed
from lflops.ranks.straggler import Stragglers

REPORTED_SHARE = 0.02
"""A finding is reported if it costs at least this share of the step, unless its rule sets another.
"""

CONTENDED_SHARE = 0.1
"""The CPU is contended if other programs take at least this share of the process's CPU time."""

LARGEST_LOST_SHARE = 0.8
"""Upper limit of the lost CPU share (the share of CPU time that other programs took).

A higher lost share is treated as this value, so that thresholds do not rise without a limit.
"""

MANY_HOST_SYNCS = 10
"""Minimum number of waits of the host for the device, per step, that matter.

A loop that only logs the loss waits less often.
"""

LEAST_SLEEP_SHARE = 0.6
"""Minimum share of the sleeping time that a module must have, so that a finding names it.

Sleeping time is time in which the training thread uses no CPU. If no module has this share, the
times of repeated modules are added up. If their sum is also too small, nothing is reported.
"""

UNCERTAIN_WAIT = 0.1
"""Maximum error of the time that a thread waited for a core, as a share of this time.

The operating system reports a time that is too short: in steps that took twice as long because of
other programs, 2 to 7 % of the waiting time was missing.
"""

BATCH_HANDOVER_SECONDS = 0.0015
"""Maximum waiting time to receive a finished batch from a worker process, in seconds.

The CPU time of the training thread for receiving the batch is added to this time.
"""


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """Time in which the training thread uses no CPU.

    Attributes:
        module: The module that spends this time in its forward. If repeated modules spend it
            together, their pattern, such as `layers.*.mlp`.
        seconds: Seconds per step.
    """

    module: str
    seconds: float


@dataclass(frozen=True, eq=False, kw_only=True)
class StepEvidence:
    """The known facts about the step of one profile.

    Attributes:
        profile: The profile.
        times: Times of the unprofiled steps.
        utilization: MFU and the step breakdown.
        stragglers: Ranks that make other ranks wait.
        outliers: Modules that are slower than identical modules.
        busiest: The modules with the most self time, in descending order. Repeated modules are one
            entry.
        patterns: The pattern of each module's name, such as `layers.*.mlp` for `layers.3.mlp`.
            Repeated modules have the same pattern. A module that is not repeated has its name as
            pattern.
        children: Names of the modules directly below each module.
        has_spare_memory: Whether the step needs at most half of the device's memory.
    """

    profile: Profile
    times: StepTimes
    utilization: Utilization
    stragglers: Stragglers = field(default_factory=Stragglers)
    outliers: Sequence[Outlier] = ()
    busiest: Sequence[BusyModules] = ()
    patterns: Mapping[str, str]
    children: Mapping[str, Sequence[str]]
    has_spare_memory: bool = False

    @property
    def breakdown(self) -> StepBreakdown | None:
        """Shares of the mean unprofiled step, or `None` without a known peak."""
        return self.utilization.breakdown

    @property
    def mean(self) -> float:
        """Seconds of the mean unprofiled step, or 0 if there is none."""
        return self.times.mean or 0.0

    @property
    def root(self) -> ModuleProfile:
        return self.profile.modules[""]

    @property
    def unit(self) -> Literal["step", "pass"]:
        """The word for the timed unit: `step` or `pass`."""
        return "step" if self.profile.run.kind == "training" else "pass"

    @property
    def is_on_cpu(self) -> bool:
        return self.profile.run.device_type == "cpu"

    @property
    def is_lightning(self) -> bool:
        """Return whether Lightning runs the training loop.

        Only Lightning's strategies have names that end in `Strategy`.
        """
        return (self.profile.run.strategy or "").endswith("Strategy")

    # Modules.

    @cached_property
    def are_module_times_unreliable(self) -> bool:
        return are_times_far_off(self.profile.notes)

    def modules_at(self, pattern: str) -> list[str]:
        """Return the names of the modules with this pattern."""
        return [name for name, of_module in self.patterns.items() if of_module == pattern]

    @property
    def cannot_locate_time(self) -> bool:
        """Return whether lflops cannot tell which modules take the time of forward and backward.

        This is the case if module times are unreliable and the chip's peak is unknown.
        """
        return self.breakdown is None and self.are_module_times_unreliable

    @property
    def inefficient_share_of_root(self) -> float:
        """Share of the step that the root, outside submodules, loses to inefficient kernels."""
        if self.breakdown is None:
            return 0.0
        return self.breakdown.modules.get("", {}).get("inefficient_kernels", 0.0)

    @cached_property
    def unlike_repeats(self) -> Sequence[UnlikeRepeat]:
        """Repeated modules that are slower than the other repeats because they do different work.

        They run more operators or use a wider dtype.
        """
        least = REPORTED_SHARE * self.mean
        return unlike_repeats(self.profile, self.patterns, self.children, least)

    # Waiting.

    @cached_property
    def communication_seconds(self) -> float:
        """Seconds in which modules exchange data or wait for other ranks, and compute nothing."""
        return sum(self.times.communicating.values())

    @cached_property
    def host_syncs(self) -> int:
        return host_syncs(self.profile)

    @property
    def pass_seconds(self) -> float:
        """Seconds of forward and backward."""
        return sum(self.times.phases.get(phase, 0.0) for phase in PASSES)

    @cached_property
    def operator_times(self) -> OperatorTimes:
        return OperatorTimes(self.profile, self.contention)

    @cached_property
    def sleep(self) -> Sleep | None:
        """The module in which the training thread sleeps (uses no CPU), and for how long it sleeps.

        `None` if the thread does not sleep, or if it does not mostly sleep in one module or in
        modules with one pattern.
        """
        seconds = sleeping_seconds(self.profile)
        if not seconds or self.are_module_times_unreliable:
            return None
        by_module = {name: self._beyond_operators(name) for name in self.profile.modules}
        by_pattern = summed(
            (self.patterns.get(name, name), seconds) for name, seconds in by_module.items()
        )
        least = LEAST_SLEEP_SHARE * seconds
        module = max(by_module, key=by_module.__getitem__)
        if by_module[module] >= least:
            return Sleep(module=module, seconds=min(seconds, by_module[module]))
        pattern = max(by_pattern, key=by_pattern.__getitem__)
        if by_pattern[pattern] >= least:
            return Sleep(module=pattern, seconds=min(seconds, by_pattern[pattern]))
        return None

    def _beyond_operators(self, module: str) -> float:
        """Return the seconds of a module's forward, excluding its submodules and its operators."""
        forward = self.profile.modules[module].forward
        if forward.self_seconds is None:
            return 0.0
        operators = self.operator_times.of({module}, {"forward"})
        if forward.self_macs and not operators.traced:
            return 0.0
        around = 0.0
        if not module:
            around = self.seconds_around_model
        return max(forward.self_seconds.median + around - operators.seconds, 0.0)

    def sleeping_in(self, module: str) -> float:
        """Seconds in which the training thread uses no CPU in the given module or pattern."""
        if self.sleep is None:
            return 0.0
        place = self.sleep.module
        if module not in {place, self.patterns.get(place, place)}:
            return 0.0
        return self.sleep.seconds

    @property
    def seconds_around_model(self) -> float:
        """Seconds of the forward phase before and after the call of the model."""
        forward = self.root.forward.seconds
        if forward is None:
            return 0.0
        return max(self.times.phases.get("forward", 0.0) - forward.median, 0.0)

    # Other programs on the machine.

    @cached_property
    def lost_cpu_share(self) -> float:
        """Share of the process's CPU time that other programs took."""
        return lost_share(self.profile)

    @property
    def is_cpu_contended(self) -> bool:
        return self.lost_cpu_share >= CONTENDED_SHARE

    @property
    def contention(self) -> float:
        """Factor by which a span of time may be longer because other programs use the CPU."""
        if not self.is_cpu_contended:
            return 1.0
        return 1 / (1 - min(self.lost_cpu_share, LARGEST_LOST_SHARE))

    @cached_property
    def uncontended_mean(self) -> float:
        """Seconds of the mean step, minus the time that other programs took (if it is known)."""
        return sum(self.times.uncontended.values()) if self.times.uncontended else self.mean

    @cached_property
    def _uncontended_share_of_passes(self) -> float:
        """Share of the forward and backward time that is not a delay by other programs."""
        if not self.pass_seconds:
            return 1.0
        return sum(self.times.uncontended.get(phase, 0.0) for phase in PASSES) / self.pass_seconds

    def uncontended(self, name: str, seconds: float) -> float:
        """Return `seconds` without the time that other programs took.

        If that time is unknown, `seconds` is returned unchanged.

        Args:
            name: Name of the phase or of the part of the step, such as "optimizer" or
                "memory_bound".
            seconds: Time of this phase or part, per step.
        """
        if not self.times.uncontended:
            return seconds
        return self.times.uncontended.get(name, seconds * self._uncontended_share_of_passes)

    def at_most_median(self, phase: str, seconds: float) -> float:
        """Return `seconds`, limited to the median time of the phase.

        If `seconds` is a mean, it may be too high, because other programs delay some steps a lot
        and others not at all. The median is not affected by a few delayed steps.
        """
        spread = self.times.spreads.get(phase)
        return seconds if spread is None else min(seconds, spread.median)


def sleeping_seconds(profile: Profile) -> float:
    """Seconds per step in which the training thread uses no CPU for an unknown reason.

    The thread sleeps, or it waits for a lock, a file or the network. Waits for a core or for a
    batch are not included. The result is 0 on accelerators and with several ranks, because there
    the thread also waits for the device or for other ranks.
    """
    run = profile.run
    if run.device_type not in {"cpu", None} or run.world_size > 1:
        return 0.0
    known = []
    for step in profile.steps:
        if step.kind == "module_timing" and not is_disturbed(step.marks):
            seconds = _sleep_of(step)
            if seconds is not None:
                known.append(seconds)
    if not known:
        return 0.0
    return max(statistics.median(known), 0.0)


def _sleep_of(step: Step) -> float | None:
    """Seconds of a step without CPU use, minus the waits for a core or a batch.

    The wait for a core is increased by `UNCERTAIN_WAIT`, because the measured wait is too short.
    The result may therefore be too small.
    """
    if step.seconds is None or step.thread_cpu is None:
        return None
    # A wait for a core while the batch is fetched is part of `waited`, so it is not subtracted twice.
    scheduled = (step.fetching_cpu or 0.0) + (step.fetching_waited or 0.0)
    fetching = max(step.phases.get("data", 0.0) - scheduled, 0.0)
    waited = (step.thread_waited or 0.0) * (1 + UNCERTAIN_WAIT)
    return step.seconds - step.thread_cpu - waited - fetching


def host_syncs(profile: Profile) -> int:
    """Return how often per traced step the host waits for a device stream, such as in `.item()`.

    Returns 0 if the host waits less than `MANY_HOST_SYNCS` times per step.
    """
    if profile.trace is None:
        return 0
    calls = 0
    for operator in profile.trace.operators:
        if operator.name.endswith("StreamSynchronize"):
            calls += operator.calls
    per_step = round(ratio(calls, profile.traced_steps) or 0)
    if per_step >= MANY_HOST_SYNCS:
        return per_step
    return 0


def allowance(lost_cpu_share: float) -> float:
    """Factor by which thresholds rise if other programs take `lost_cpu_share` of the CPU time.

    It is 1 if they take less than `CONTENDED_SHARE`, and 2.25 if they take a third.
    """
    if lost_cpu_share < CONTENDED_SHARE:
        return 1.0
    return (1 - min(lost_cpu_share, LARGEST_LOST_SHARE)) ** -2


def handover_seconds(profile: Profile) -> float:
    """Seconds per step that it takes to receive a finished batch from a worker process.

    More workers do not shorten this time. Returns 0 without workers.
    """
    known = [step.fetching_cpu for step in profile.steps if step.fetching_cpu is not None]
    if not known or not profile.run.workers:
        return 0.0
    return statistics.median(known) + BATCH_HANDOVER_SECONDS
