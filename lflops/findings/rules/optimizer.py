"""The optimizer's step."""

from lflops.findings.evidence import StepEvidence, allowance
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Candidate, Threshold
from lflops.profile.profile import Work

SECONDS_PER_CALL = 20e-6
"""Upper bound of the time of an optimizer's operator call on a CPU, without moving its bytes."""

SECONDS_PER_BYTE = 1 / 5e9
"""Upper bound of the time per byte that an optimizer's operator moves on a CPU."""

SECONDS_PER_CACHED_BYTE = 1 / 20e9
"""Upper bound of the time per byte for small operators with tensors that fit into a cache."""

LARGEST_CACHED_BYTES = 1 << 20
"""Maximum bytes of an operator with tensors that count as cached."""

LAUNCH_SECONDS = 0.0003
"""Time in which a device waits for the launches of an optimizer.

The optimizer updates all parameters at once.
"""

SLOW_ON_DEVICE = 2.0
"""Smallest ratio of an optimizer's time on a device to the time that its bytes need."""


class SlowOptimizer(PartRule):
    """The optimizer takes a lot of time, and more than its operators need.

    On a CPU, the operators need 20 µs per call and 0.2 ns per byte. On a device, they need the time
    to move their bytes, and the optimizer is an issue if it takes twice as long.
    """

    name = "optimizer"
    threshold = Threshold(share=0.10)
    phrase = "optimizer work"
    fix = "Pass fused=True to the optimizer, or use larger batches"

    def judged_seconds(self, candidate: Candidate, step: StepEvidence) -> float:
        seconds = step.uncontended(self.name, candidate.seconds or 0.0)
        return step.at_most_median(self.name, seconds)

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        needed = needed_seconds(step)
        if not step.times.uncontended:
            needed *= allowance(step.lost_cpu_share)
        return self.judged_seconds(candidate, step) > needed


def needed_seconds(step: StepEvidence) -> float:
    """Upper bound of the seconds that the operators of the optimizer need."""
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
