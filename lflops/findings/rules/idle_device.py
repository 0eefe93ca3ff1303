"""The rule about idle time of the device."""

from lflops import units
from lflops.findings.evidence import StepEvidence
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Threshold

LARGE_CLIPPING_SHARE = 0.05
"""If clipping takes at least this share of the step, it can be why the host waits for the device.

If clipping takes less, the host waits because of calls such as `.item()`.
"""


class IdleDevice(PartRule):
    """The device is idle in forward and backward, because the host is too slow.

    lflops reports this only for a device that was traced. If the host waits for the device at least
    ten times per step, for example in `.item()`, an idle time of 10 % of the step is already an
    issue. This lower threshold does not apply if work on gradients takes at least 5 % of the step,
    because this work may be the reason for the waits.
    """

    name = "idle"
    label = "idle device"
    threshold = Threshold(share=0.20)
    share_with_host_syncs = 0.10
    phrase = "idle time of the device"
    fix = "Launch fewer and larger kernels: use larger batches, torch.compile or CUDA graphs"
    fix_with_host_syncs = (
        "Within the step, avoid .item(), .cpu(), conditions on tensors, and prints of tensors: "
        "each of them makes the host wait for the device"
    )

    def issue_share(self, step: StepEvidence) -> float | None:
        clipping = step.times.phases.get("clip", 0.0)
        if step.host_syncs and clipping < LARGE_CLIPPING_SHARE * step.uncontended_mean:
            return self.share_with_host_syncs
        return self.threshold.share

    def phrase_for(self, step: StepEvidence) -> str:
        idle = {} if step.breakdown is None else step.breakdown.idle
        if not idle:
            return self.phrase
        syncs = ""
        if step.host_syncs:
            syncs = (
                f" (the host waits for the device {units.count(step.host_syncs)} times per step)"
            )
        return f"{self.phrase}, mostly in {max(idle, key=idle.__getitem__)}{syncs}"

    def part_fix(self, step: StepEvidence) -> str:
        return self.fix_with_host_syncs if step.host_syncs else self.fix
