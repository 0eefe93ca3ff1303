"""Define the evidence about a step: the facts that all rules about the step read.

Facts that are expensive to compute are computed once, when a rule first reads them.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from lflops.analysis.module_outliers import Outlier
from lflops.analysis.step_breakdown import StepBreakdown
from lflops.analysis.step_times import StepTimes, lost_share
from lflops.analysis.tree import BusyModules
from lflops.analysis.utilization import Utilization
from lflops.findings.own_operators import OperatorTimes
from lflops.findings.repeats import UnlikeRepeat, unlike_repeats
from lflops.profile.notes import are_times_far_off, names_in
from lflops.profile.profile import ModuleProfile, Profile, Run
from lflops.profile.records import PASSES
from lflops.profile.series import ratio, summed
from lflops.profile.steps import Step, is_disturbed
from lflops.ranks.straggler import Stragglers

REPORTED_SHARE = 0.02
"""Minimum cost of a reported finding, as a share of the step. A rule may set another minimum."""

CONTENDED_SHARE = 0.1
"""The CPU is contended if other programs take at least this share of the process's CPU time."""

LARGEST_LOST_SHARE = 0.8
"""Upper limit of the lost CPU share (the share of CPU time that other programs took).

A higher share is treated as this value, so that the thresholds of rules do not rise without limit.
"""

MANY_HOST_SYNCS = 10
"""If the host waits for the device less often than this per step, the waits are ignored.

A loop that only logs the loss waits less often.
"""

LEAST_SLEEP_SHARE = 0.6
"""A sleep is reported only if one module has at least this share of the sleeping time.

Sleeping time is time in which the training thread uses no CPU. If no module has this share, the
times of repeated modules, such as `layers.0` and `layers.1`, are added up. If no sum has this share
either, nothing is reported.
"""

UNCERTAIN_WAIT = 0.1
"""Maximum error of the time that a thread waits for a core, as a share of the waiting time.

The waiting time that the operating system reports is too short. It was 2 to 7 % too short in steps
that took twice as long because of other programs.
"""

BATCH_HANDOVER_SECONDS = 0.0015
"""Maximum seconds that the training thread waits while a worker hands over a finished batch.

The CPU time that the training thread needs to receive the batch is not included.
`handover_seconds` adds it.
"""


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """Time in which the training thread uses no CPU.

    Attributes:
        module: The module in which the thread sleeps during forward. If the thread sleeps in
            several repeated modules, this is their pattern, such as `layers.*.mlp`.
        seconds: Seconds of sleep per step.
    """

    module: str
    seconds: float


@dataclass(frozen=True, eq=False, kw_only=True)
class StepEvidence:
    """The measured facts about the typical step of a profile, which all rules about a step read.

    Attributes:
        profile: The profile.
        times: Times of the unprofiled steps.
        utilization: MFU and the step breakdown.
        stragglers: Ranks that make other ranks wait.
        outliers: Modules that are slower than identical modules.
        busiest: The modules in descending order of self time. Repeated modules are one entry.
        patterns: The pattern of each module's name, such as `layers.*.mlp` for `layers.3.mlp`.
            Repeated modules have the same pattern. The pattern of a module that is not repeated is
            its name.
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
        """The parts of the mean unprofiled step, or `None` if the chip's peak is unknown."""
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
        """The word that sentences use for a step: `step` in a training run, otherwise `pass`."""
        return "step" if self.profile.run.kind == "training" else "pass"

    @property
    def is_on_cpu(self) -> bool:
        return self.profile.run.device_type == "cpu"

    @property
    def can_fuse(self) -> bool:
        """Return whether advice to fuse operators with torch.compile makes sense.

        Compiled code does not support second derivatives or several backward passes.
        """
        return not self.profile.run.takes_derivatives

    @property
    def is_lightning(self) -> bool:
        """Return whether Lightning runs the training loop."""
        return is_lightning(self.profile.run)

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
        """Share of the step that is lost to inefficient kernels of the root, without submodules."""
        if self.breakdown is None:
            return 0.0
        return self.breakdown.modules.get("", {}).get("inefficient_kernels", 0.0)

    @cached_property
    def unlike_repeats(self) -> Sequence[UnlikeRepeat]:
        """Modules that are slower than the other modules with the same pattern, with the reason.

        The reason is that they run more operators or use a wider dtype.
        """
        least = REPORTED_SHARE * self.mean
        return unlike_repeats(self.profile, self.patterns, self.children, least)

    # Waiting.

    @cached_property
    def communication_seconds(self) -> float:
        """Seconds per step in which modules communicate or wait for other ranks.

        In this time, nothing is computed.
        """
        return sum(self.times.communicating.values())

    @cached_property
    def host_syncs(self) -> int:
        return host_syncs(self.profile)

    @property
    def pass_seconds(self) -> float:
        """Seconds of forward and backward, per step."""
        return _seconds_of_passes(self.times.phases)

    @cached_property
    def operator_times(self) -> OperatorTimes:
        return OperatorTimes(self.profile, self.contention)

    @cached_property
    def sleep(self) -> Sleep | None:
        """The module in which the training thread sleeps (uses no CPU), and for how long it sleeps.

        `None` if the thread does not sleep, if module times are unreliable, or if no module and no
        group of repeated modules has at least `LEAST_SLEEP_SHARE` of the sleeping time.
        """
        seconds = sleeping_seconds(self.profile)
        if not seconds or self.are_module_times_unreliable:
            return None
        by_module = {}
        of_patterns = []
        for name in self.profile.modules:
            beyond = self._beyond_operators(name)
            by_module[name] = beyond
            of_patterns.append((self.patterns.get(name, name), beyond))
        by_pattern = summed(of_patterns)
        least = LEAST_SLEEP_SHARE * seconds
        module = max(by_module, key=by_module.__getitem__)
        if by_module[module] >= least:
            return Sleep(module=module, seconds=min(seconds, by_module[module]))
        pattern = max(by_pattern, key=by_pattern.__getitem__)
        if by_pattern[pattern] >= least:
            return Sleep(module=pattern, seconds=min(seconds, by_pattern[pattern]))
        return None

    def _beyond_operators(self, module: str) -> float:
        """Return the seconds of a module's forward, without its submodules and its operators.

        For the root, the time before and after the call of the model is included. Returns 0 if the
        time of the module or of its matmuls is unknown.
        """
        seconds = self.self_forward(module)
        operators = self.operator_times.of({module}, {"forward"})
        if self.profile.modules[module].forward.self_macs and not operators.traced:
            return 0.0
        return max(seconds - operators.seconds, 0.0)

    def self_forward(self, module: str) -> float:
        """Return the seconds of a module's forward without its submodules; 0 if unknown.

        For the root, the time before and after the call of the model is included.
        """
        seconds = self.profile.modules[module].forward.self_seconds
        if seconds is None:
            return 0.0
        return seconds.median if module else seconds.median + self.seconds_around_model

    @cached_property
    def hooked_shares(self) -> dict[str, float]:
        """Modules whose own time includes forward hooks of the user, with a share of 1 or less.

        The share is 1 for a module with a hook before its forward. The time of a hook after a
        forward counts for the module that calls it. For such a module, this is the share of the
        modules that it calls which have hooks.
        """
        hooked = set(names_in("forward_hooks", self.profile.notes))
        called = Counter[str]()
        with_hooks = Counter[str]()
        for name, module in self.profile.modules.items():
            if name and module.calls:
                caller = self._caller_of(name)
                called[caller] += 1
                with_hooks[caller] += name in hooked
        shares = {name: number / called[name] for name, number in with_hooks.items() if number}
        return shares | dict.fromkeys(names_in("forward_pre_hooks", self.profile.notes), 1.0)

    def _caller_of(self, name: str) -> str:
        """Return the nearest module above a module that is itself called.

        A container such as `ModuleList` is never called.
        """
        above = name
        while above:
            above = above.rpartition(".")[0]
            module = self.profile.modules.get(above)
            if module is not None and module.calls:
                return above
        return ""

    def sleeping_in(self, module: str) -> float:
        """Return the seconds per step that the training thread sleeps in a module or pattern.

        The result is 0 unless `sleep` names this module or pattern.
        """
        if self.sleep is None:
            return 0.0
        place = self.sleep.module
        if module not in {place, self.patterns.get(place, place)}:
            return 0.0
        return self.sleep.seconds

    def main_function(self, phase: str, module: str = "") -> str:
        """Return the function of the user that takes most of a phase.

        For example, return `collate (train.py:8)`. Returns the empty string if there is no such
        function, or if no stacks were sampled.

        Args:
            phase: The name of the phase.
            module: Name of the module in which the function is called, or a pattern of modules.
                Empty for code outside all layers.
        """
        places = []
        for function in self.profile.main_functions:
            pattern = self.patterns.get(function.module, function.module)
            if function.phase == phase and module in {function.module, pattern}:
                places.append((function.samples, function.place))
        _, place = max(places, default=(0, ""))
        return place

    @property
    def seconds_around_model(self) -> float:
        """Seconds of the forward phase in which no module runs, neither forward nor backward.

        Modules run backward in this phase if its code calls `torch.autograd.grad`.
        """
        forward = self.root.forward.seconds
        if forward is None:
            return 0.0
        in_modules = forward.median + self._backward_in_forward
        return max(self.times.phases.get("forward", 0.0) - in_modules, 0.0)

    @property
    def _backward_in_forward(self) -> float:
        """Seconds in which modules run backward inside the forward phase.

        The backward times of modules include these seconds, but the backward phase does not.
        """
        in_modules = 0.0
        for work in (self.root.backward, self.root.recompute):
            if work.seconds is not None:
                in_modules += work.seconds.median
        return max(in_modules - self.times.phases.get("backward", 0.0), 0.0)

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
        """Factor by which a measured time can be too long because other programs use the CPU."""
        if not self.is_cpu_contended:
            return 1.0
        return 1 / (1 - min(self.lost_cpu_share, LARGEST_LOST_SHARE))

    @cached_property
    def uncontended_mean(self) -> float:
        """Seconds of a step without the time that other programs took.

        If that time is unknown, these are the seconds of the mean step.
        """
        return sum(self.times.uncontended.values()) if self.times.uncontended else self.mean

    @cached_property
    def _uncontended_share_of_passes(self) -> float:
        """Share of the time of forward and backward in which no other program took the CPU."""
        if not self.pass_seconds:
            return 1.0
        return _seconds_of_passes(self.times.uncontended) / self.pass_seconds

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
        """Return `seconds` or the median time of the phase, whichever is smaller.

        `seconds` is a mean, which is too high if other programs delay a few steps a lot. A few
        delayed steps hardly change the median.
        """
        spread = self.times.spreads.get(phase)
        return seconds if spread is None else min(seconds, spread.median)


def is_lightning(run: Run) -> bool:
    """Return whether Lightning runs the training loop.

    Only Lightning's strategies have names that end in `Strategy`.
    """
    return (run.strategy or "").endswith("Strategy")


def _seconds_of_passes(phases: Mapping[str, float]) -> float:
    """Return the seconds of forward and backward. `phases` has the seconds of each phase."""
    return sum(phases.get(phase, 0.0) for phase in PASSES)


def sleeping_seconds(profile: Profile) -> float:
    """Return the seconds that the training thread sleeps in a median step.

    In this time, the thread uses no CPU: it sleeps, or it waits for a lock, a file or the network.
    Waits for a core or for a batch are not included. The result is 0 on accelerators and with
    several ranks, because there the thread also waits for the device or for other ranks.
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
    """Return the seconds of a step in which the training thread slept, or `None` if unknown.

    This is the time without CPU use, minus the waits for a core or a batch. The wait for a core is
    increased by `UNCERTAIN_WAIT`, because the measured wait is too short. Therefore, the result can
    be too small.
    """
    if step.seconds is None or step.thread_cpu is None:
        return None
    # `waited` includes the wait for a core while the batch is fetched, so `fetching` excludes it.
    scheduled = (step.fetching_cpu or 0.0) + (step.fetching_waited or 0.0)
    fetching = max(step.phases.get("data", 0.0) - scheduled, 0.0)
    waited = (step.thread_waited or 0.0) * (1 + UNCERTAIN_WAIT)
    return step.seconds - step.thread_cpu - waited - fetching


def host_syncs(profile: Profile) -> int:
    """Return how often the host waits for a device stream in a traced step, as in `.item()`.

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
    """Return the factor by which thresholds rise because other programs use the CPU.

    `lost_cpu_share` is the share of the CPU time that they take. The factor is 1 if the share is
    below `CONTENDED_SHARE`, and 2.25 if it is a third.
    """
    if lost_cpu_share < CONTENDED_SHARE:
        return 1.0
    return (1 - min(lost_cpu_share, LARGEST_LOST_SHARE)) ** -2


def handover_seconds(profile: Profile) -> float:
    """Return the maximum seconds per step to receive a finished batch from a worker process.

    More workers do not shorten this time. Returns 0 without workers.
    """
    known = [step.fetching_cpu for step in profile.steps if step.fetching_cpu is not None]
    if not known or not profile.run.workers:
        return 0.0
    return statistics.median(known) + BATCH_HANDOVER_SECONDS
