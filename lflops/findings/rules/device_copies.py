"""Copies between the host and the device."""

from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Threshold


class HostToDeviceCopy(PartRule):
    """The step waits while the batch is copied to the device."""

    name = "transfer"
    label = "host-to-device copy"
    threshold = Threshold(share=0.10)
    verb = "is spent"
    phrase = "copying batches to the device"
    fix = "Give the DataLoader pin_memory=True, or the batch smaller dtypes"


class ExposedCopies(PartRule):
    """A traced device copies and computes nothing during this."""

    name = "copy"
    threshold = Threshold(share=0.10)
    verb = "is spent on"
    phrase = "copies that do not overlap with computation"
    fix = (
        "Copy from pinned memory with non_blocking=True, copy fewer bytes, or copy the next batch "
        "on another stream while this one computes"
    )
