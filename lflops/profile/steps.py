"""Define the steps of a run, and which of them count as unprofiled.

In an unprofiled step, lflops only reads the clock. Step times and throughput come only from
unprofiled steps. In a module-timing step, hooks time every module. These steps are used to divide
the time of unprofiled steps among modules.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from lflops.profile.records import Count, Seconds

StepKind = Literal["unprofiled", "counting", "module_timing", "stack_sampling", "traced"]
"""The way in which lflops observed a step. In an unprofiled step, lflops only read the clock."""

DISTURBANCES = frozenset(
    {"warmup", "recompiled", "new_shapes", "validation", "checkpoint", "background"}
)
"""Marks in `Step.marks` which mean that the duration of the step is not typical.

The mark `no_update` does not have this meaning, because a step without an update of the parameters
takes about as long as other steps.
"""

EVENTS = ("validation", "checkpoint")
"""Marks of steps with work that the training loop does between batches.

They are a part of `DISTURBANCES`. Nevertheless, ranks are compared in steps with these marks,
because validation or a checkpoint may take longer on some ranks than on others.
"""

WITHIN_FORWARD = ("prefill", "decode")
"""The phases of text generation. Their times are also included in the forward phase."""


def is_disturbed(marks: Collection[str]) -> bool:
    """Return whether the time of a step with these marks is not typical."""
    return not DISTURBANCES.isdisjoint(marks)


def is_compared(marks: Collection[str]) -> bool:
    """Return whether a step with these marks is used to compare ranks.

    Steps with validation or a checkpoint are used, steps with other disturbances are not.
    """
    return DISTURBANCES.difference(EVENTS).isdisjoint(marks)


def is_unprofiled(kind: StepKind, marks: Collection[str]) -> bool:
    """Return whether lflops only read the clock in a step and its duration is typical."""
    return kind == "unprofiled" and not is_disturbed(marks)


class Step(Struct, frozen=True, kw_only=True, gc=False):
    """A timed optimizer step.

    Attributes:
        index: Number of the step.
        kind: How lflops observed the step. `unprofiled`: without hooks or traces. `counting`: with
            a dispatch mode that counts operators. `module_timing`: with hooks that time modules.
            `stack_sampling`: with hooks that time modules, and a thread that samples the Python
            stack. `traced`: with torch.profiler.
        seconds: Duration of the step.
        phases: Seconds of each phase, which add up to the duration of the step. They are measured
            on the CUDA stream, or on the host for a CPU.
        host_phases: On CUDA, the seconds of each phase on the host.
        cpu_user: CPU seconds of all threads in user mode. `None` in steps in which it was not read.
        cpu_system: CPU seconds of all threads in the operating system's kernel, read in the same
            steps as `cpu_user`.
        cpu_lost: Seconds in which threads of the process were ready to run while other processes
            had the CPU, summed over the threads. Only in module-timing steps; `None` if the system
            does not provide it.
        waiting: Seconds at the end of backward in which the rank waits for the gradients of other
            ranks. They are included in the phase `backward`.
        thread_cpu: CPU seconds of the training thread. Only in module-timing steps; with several
            ranks, in all steps.
        thread_waited: Seconds in which the training thread was ready to run while another thread
            had its CPU core. Known in the same steps as `thread_cpu`.
        waited_by_phase: The seconds of `thread_waited` in each phase; the phase `wait` is the end
            of backward. Known only if unprofiled steps of several ranks are compared, otherwise
            `None`.
        fetching_cpu: CPU seconds that the training thread needed to get the batch of the step. Only
            in module-timing steps.
        fetching_waited: The part of `thread_waited` before the batch of the step was available.
            Only in module-timing steps.
        uncontended_phases: Seconds of each phase without the time in which another thread had the
            CPU core of the training thread. Only in module-timing steps on a busy machine. The
            module times of these steps exclude the time of the other threads as well.
        samples: Number of samples in the step. In a merged profile, the sum over the batches of all
            ranks. `None` if unknown.
        tokens: Number of tokens in the step. In a merged profile, the sum over the batches of all
            ranks. `None` if unknown.
        marks: Events in the step: any of `DISTURBANCES`, or `no_update` if the optimizer did not
            update the parameters.
    """

    index: Count
    kind: StepKind
    seconds: Seconds | None
    phases: Mapping[str, Seconds]
    host_phases: Mapping[str, Seconds] = {}
    cpu_user: Seconds | None = None
    cpu_system: Seconds | None = None
    cpu_lost: Seconds | None = None
    waiting: Seconds | None = None
    thread_cpu: Seconds | None = None
    thread_waited: Seconds | None = None
    waited_by_phase: Mapping[str, Seconds] | None = None
    fetching_cpu: Seconds | None = None
    fetching_waited: Seconds | None = None
    uncontended_phases: Mapping[str, Seconds] = {}
    samples: Count | None = None
    tokens: Count | None = None
    marks: tuple[str, ...] = ()

    @property
    def is_unprofiled(self) -> bool:
        """Return whether lflops only read the clock in the step and its duration is typical."""
        return is_unprofiled(self.kind, self.marks)


def with_phases(steps: Sequence[Step]) -> tuple[Sequence[Step], float]:
    """Return the steps whose phases were timed, and a factor for the times of these phases.

    If CUDA timing events are expensive, phases are timed only in some steps. The mean time of a
    phase in these steps, multiplied by the factor, is an estimate of its mean time in all steps.
    The factor is the mean duration of all steps, divided by the mean duration of the steps whose
    phases were timed. If no phases were timed, all steps are returned.
    """
    known = [step for step in steps if step.phases] or steps
    mean_of_known = _mean_seconds(known)
    scale = 1.0
    if mean_of_known:
        scale = _mean_seconds(steps) / mean_of_known
    return known, scale


def _mean_seconds(steps: Sequence[Step]) -> float:
    return sum(step.seconds or 0.0 for step in steps) / max(len(steps), 1)
