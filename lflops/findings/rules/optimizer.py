"""The rule about an optimizer whose step takes longer than its operators need."""

from lflops.findings.evidence import StepEvidence, allowance
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Candidate, Threshold
from lflops.profile.module_names import plain
from lflops.profile.profile import OptimizerSettings, Work

SECONDS_PER_CALL = 20e-6
"""Upper bound on the seconds of one operator call on a CPU, without the time to move its bytes."""

SECONDS_PER_BYTE = 1 / 5e9
"""Upper bound on the seconds that an optimizer's operator on a CPU needs per byte that it moves."""

SECONDS_PER_CACHED_BYTE = 1 / 20e9
"""Like `SECONDS_PER_BYTE`, but for small operators, because their tensors fit into a cache."""

LARGEST_CACHED_BYTES = 1 << 20
"""An operator counts as small if it moves fewer bytes than this per call."""

LAUNCH_SECONDS = 0.0003
"""Seconds for which a device waits until the host has launched the optimizer's kernels.

This is the value for an optimizer that updates all parameters at once (`fused` or `foreach`).
"""

SLOW_ON_DEVICE = 2.0
"""An optimizer on a device is slow if it takes this many times as long as its operators need."""


class SlowOptimizer(PartRule):
    """The optimizer takes a lot of time, and takes longer than its operators need.

    On a CPU, lflops assumes that the operators need up to 20 µs per call and 0.2 ns per byte. On
    other devices, it assumes the time to launch the operators and to move their bytes. There, the
    optimizer is an issue only if it takes more than twice this time.
    """

    name = "optimizer"
    threshold = Threshold(share=0.10)
    phrase = "optimizer work"
    fix = "Pass fused=True to the optimizer if it accepts this argument, or use larger batches"
    fix_of_fast_optimizer = "Use larger batches, so that the optimizer makes fewer steps"

    def advise_in(self, module: str, step: StepEvidence) -> str:
        optimizers = step.profile.run.optimizers
        if not optimizers:
            return super().advise_in(module, step)
        for optimizer in optimizers:
            if optimizer.max_iter is not None:
                return _advice_about_iterations(optimizer)
        for optimizer in optimizers:
            if optimizer.accepts_fused and not optimizer.fused:
                return f"Pass fused=True to {plain(optimizer.class_name)}, or use larger batches"
        for optimizer in optimizers:
            if optimizer.accepts_foreach and not optimizer.foreach and not optimizer.fused:
                return f"Pass foreach=True to {plain(optimizer.class_name)}, or use larger batches"
        return self.fix_of_fast_optimizer

    def judged_seconds(self, candidate: Candidate, step: StepEvidence) -> float:
        seconds = step.uncontended(self.name, candidate.seconds or 0.0)
        return step.at_most_median(self.name, seconds)

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        needed = needed_seconds(step)
        if not step.times.uncontended:
            needed *= allowance(step.lost_cpu_share)
        return self.judged_seconds(candidate, step) > needed


def _advice_about_iterations(optimizer: OptimizerSettings) -> str:
    """Return the advice on an optimizer such as LBFGS, which repeats its work in each step."""
    name = plain(optimizer.class_name)
    return (
        f"Lower history_size or max_iter: in each of its up to {optimizer.max_iter} iterations per "
        f"step, {name} computes with up to history_size vectors, each as long as all parameters "
        "together. What the closure computes counts as forward and backward"
    )


def needed_seconds(step: StepEvidence) -> float:
    """Return an upper bound on the seconds per step that the operators of the optimizer need.

    On a device, this is the time to launch the operators' kernels and to move their bytes,
    multiplied by `SLOW_ON_DEVICE`.
    """
    work = step.root.optimizer
    run = step.profile.run
    if run.hardware is not None and run.device_type != "cpu":
        bandwidth = run.hardware.bandwidth_bytes_per_second
        if bandwidth:
            return SLOW_ON_DEVICE * (work.bytes_moved / bandwidth + LAUNCH_SECONDS)
    return work.calls * SECONDS_PER_CALL + work.bytes_moved * _seconds_per_byte(work)


def _seconds_per_byte(work: Work) -> float:
    is_cached = work.bytes_moved < work.calls * LARGEST_CACHED_BYTES
    return SECONDS_PER_CACHED_BYTE if is_cached else SECONDS_PER_BYTE
