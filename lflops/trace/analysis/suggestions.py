"""Suggest how to reduce the time in which the device does not compute, or computes slowly."""

from collections.abc import Iterator
from typing import NamedTuple

from lflops.profile.module_names import plain
from lflops.trace.analysis.idle import Cause
from lflops.trace.analysis.steps import device_timelines
from lflops.trace.analysis.summary import TraceSummary
from lflops.trace.analysis.text import nanoseconds, share
from lflops.trace.device_states import DeviceTimeline, total


class Suggestion(NamedTuple):
    """A way to reduce a part of the device's time.

    Attributes:
        title: A few words for this part of the time.
        time: Nanoseconds of this part, in a step. If the trace has no steps, in the whole trace.
        action: What to do, as the end of a sentence.
        sentence: The whole suggestion as a sentence.
        evidence: A further sentence about what takes the time. It may be empty.
    """

    title: str
    time: int
    action: str
    sentence: str
    evidence: str = ""


class IdleCause(NamedTuple):
    """Words for one cause of idle time.

    Attributes:
        label: Name of the cause in tables and legends.
        when: Clause that completes "the device is idle, mostly …".
        next: Advice to reduce this idle time; empty if there is no general advice.
    """

    label: str
    when: str
    next: str = ""


_FEWER_KERNELS = "launch fewer and larger kernels (torch.compile, CUDA graphs, larger batches)"

CAUSES: dict[Cause, IdleCause] = {
    "data_loader": IdleCause(
        "data loader",
        "while the host waits for the data loader",
        "use more DataLoader workers, persistent_workers=True, or cheaper transforms",
    ),
    "synchronising": IdleCause(
        "synchronising",
        "while the host synchronises with the device",
        "avoid .item(), .cpu() and printing tensors in the step",
    ),
    "allocating": IdleCause(
        "allocating",
        "while the host allocates memory",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or warm up before the recording",
    ),
    "launching": IdleCause("launching", "while the host launches kernels", _FEWER_KERNELS),
    "operators": IdleCause(
        "operators on the host",
        "while the host runs the operators that launch the next kernels",
        _FEWER_KERNELS,
    ),
    "python": IdleCause("Python", "while the host runs Python between operators", _FEWER_KERNELS),
    "launch_latency": IdleCause(
        "launch latency",
        "between the launch of a kernel and its start",
        "launch work further ahead of the device: avoid synchronization, or use CUDA graphs",
    ),
    "queued": IdleCause("queued work", "between kernels that were already queued"),
    "not_recorded": IdleCause("not recorded", "for reasons that the trace does not show"),
}

HOST: frozenset[Cause] = frozenset({"launching", "operators", "python"})
"""Causes of idle time that the first sentence about a trace can sum up.

It says "the host prepares launches" for all of them.
"""

SMALL = 0.01
"""Smallest share of the analyzed time that a device state must take to be mentioned.

It is also the smallest relative difference to MFU for which HFU is mentioned.
"""
LARGE = 0.05
"""Each of these times is mentioned in the verdict on a trace only if it is above this share.

* The time in a device state other than computing: above this share of the analyzed time, a sentence
  says how to reduce it.
* The time before the first device work: above this share of the time of all steps, a sentence
  states it. If the trace has no steps, the time of the whole recording is used.
* The time of a category of kernels that can be fused: above this share of the time of all kernels,
  the sentence about fusing names the category.
"""
MOST_OF_IDLE = 0.6
"""If the largest cause takes at least this share of the idle time, it is always named.

Otherwise, the causes in `HOST` are named together if their sum is larger than the largest cause.
"""

_FUSABLE = frozenset({"pointwise", "copy", "reduction", "fill"})
"""Categories of kernels that torch.compile can fuse with each other."""
_MUCH_FUSABLE = 0.25
"""Kernels that can be fused are mentioned if they take more than this share of the kernel time."""

_LISTED_OPERATORS = 3
"""Maximum number of operators that a suggestion names."""

LOSSES = {
    "idle": "idle",
    "exposed_communication": "communication that does not overlap with computation",
    "exposed_copies": "copying that does not overlap with computation",
}


def losses(device: DeviceTimeline) -> list[tuple[str, int]]:
    """Return the device states except computing, with their times. The longest time comes first.

    States that take less than `SMALL` of the analyzed time are left out.
    """
    found = []
    for state in LOSSES:
        time = getattr(device, state)
        if time > SMALL * device.window:
            found.append((state, time))
    return sorted(found, key=lambda loss: -loss[1])


class MainCause(NamedTuple):
    """The main cause of the idle time, in words.

    Attributes:
        when: Clause that completes "the device is idle, mostly …".
        next: Advice to reduce this idle time. It may be empty.
        share: The cause's share of the idle time.
        are_operators: Whether the host runs operators in most of this time.
    """

    when: str
    next: str
    share: float
    are_operators: bool


def main_cause(summary: TraceSummary) -> MainCause:
    """Return the main cause of the idle time. Several causes on the host may count as one."""
    idle = sum(summary.idle.values())
    largest = max(summary.idle, key=lambda cause: summary.idle[cause])
    largest_time = summary.idle[largest]
    host_time = sum(summary.idle.get(cause, 0) for cause in HOST)
    if largest_time < MOST_OF_IDLE * idle and host_time > largest_time:
        when = "while the host prepares launches"
        return MainCause(when, _FEWER_KERNELS, host_time / idle, are_operators=False)
    words = CAUSES[largest]
    return MainCause(words.when, words.next, largest_time / idle, largest == "operators")


def suggestions(summary: TraceSummary) -> list[Suggestion]:
    """Return suggestions, the one about the most time first, or none without device work."""
    device = summary.device
    if device is None:
        return []
    found = [*_about_fusable_kernels(summary)]
    for state, time in losses(device):
        if time > LARGE * device.window:
            found += _about_state(summary, device, state)
    return sorted(found, key=lambda suggestion: -suggestion.time)


def _about_state(summary: TraceSummary, device: DeviceTimeline, state: str) -> Iterator[Suggestion]:
    # The times are sums over all devices.
    devices = max(len(summary.devices), 1)
    time = getattr(device, state) // devices
    each = ""
    if summary.steps:
        number = len(summary.steps) * devices
        time = getattr(total(device_timelines(summary.steps)), state) // number
        each = f" ({nanoseconds(time)} of a step)"
    title = LOSSES[state]
    if state == "exposed_communication":
        action = (
            "overlap it with backward (DDP buckets, FSDP prefetching), accumulate gradients over "
            "more batches, or send smaller dtypes"
        )
        yield Suggestion(title, time, action, f"To reduce communication{each}: {action}.")
    elif state == "exposed_copies":
        action = "copy from pinned memory with non_blocking=True, before the data is needed"
        yield Suggestion(title, time, action, f"To hide the time of copies{each}: {action}.")
    elif summary.idle:
        cause = main_cause(summary)
        if cause.next:
            title = f"idle device, mostly {cause.when}"
            evidence = _operators_on_host(summary) if cause.are_operators else ""
            sentence = f"To reduce the idle time{each}: {cause.next}."
            # The advice is only about this cause.
            yield Suggestion(title, int(time * cause.share), cause.next, sentence, evidence)


def _operators_on_host(summary: TraceSummary) -> str:
    """Return a sentence with the operators that take the most time on the host."""
    slowest = sorted(summary.operators, key=lambda row: -row.self_host)[:_LISTED_OPERATORS]
    whole = sum(row.self_host for row in summary.operators)
    named = []
    for row in slowest:
        named.append(f"{plain(row.name)} ({share(row.self_host, whole)})")
    if not named:
        return ""
    listed = ", ".join(named)
    return f"The slowest operators on the host, with their share of the time of all: {listed}."


def _about_fusable_kernels(summary: TraceSummary) -> Iterator[Suggestion]:
    """Yield a suggestion to fuse kernels with torch.compile.

    Yields nothing if such kernels take little time, or if the trace already has Triton kernels.
    """
    if any(kernel.name.startswith("triton_") for kernel in summary.kernels):
        return
    whole = summary.work_time
    time = sum(row.device for row in summary.categories if row.category in _FUSABLE)
    if time <= _MUCH_FUSABLE * whole:
        return
    names = []
    for row in summary.categories:
        if row.category in _FUSABLE and row.device > LARGE * whole:
            names.append(row.category)
    kernels = f"{' and '.join(names)} kernels"
    yield Suggestion(
        title=f"{kernels} that can be fused",
        time=time // ((len(summary.steps) or 1) * max(len(summary.devices), 1)),
        action="fuse them with torch.compile",
        sentence=(
            f"{share(time, whole)} of the kernel time is spent in {kernels}, which torch.compile "
            "can fuse."
        ),
    )
