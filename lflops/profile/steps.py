"""Define the steps of a run, and the rule for unprofiled steps.

All times of a profile come from unprofiled steps.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from lflops.profile.records import Count, Seconds

StepKind = Literal["unprofiled", "counting", "module_timing", "traced"]
"""How lflops observed a step.

In an unprofiled step, lflops only read the clock.
"""

DISTURBANCES = frozenset(
    {"warmup", "recompiled", "new_shapes", "validation", "checkpoint", "background"}
)
"""Marks of steps with a time that is not typical.

`no_update` is not a disturbance, because such a step is as long as other steps.
"""

EVENTS = ("validation", "checkpoint")
"""Disturbances that the training loop causes between batches.

Their length may differ between ranks.
"""

WITHIN_FORWARD = ("prefill", "decode")
"""The phases of generation, which are parts of forward."""


def is_disturbed(marks: Collection[str]) -> bool:
    """Return whether the time of a step with these marks is not typical."""
    return not DISTURBANCES.isdisjoint(marks)


def is_compared(marks: Collection[str]) -> bool:
    """Return whether ranks are compared in a step with these marks.

    Ranks are also compared in events such as validation.
    """
    return DISTURBANCES.difference(EVENTS).isdisjoint(marks)


def is_unprofiled(kind: StepKind, marks: Collection[str]) -> bool:
    """Return whether lflops only read the clock in a step, and no event disturbed the step."""
    return kind == "unprofiled" and not is_disturbed(marks)


class Step(Struct, frozen=True, kw_only=True, gc=False):
    """A timed optimizer step.

    Attributes:
        kind: `unprofiled` ran without hooks or traces, `counting` under the dispatch mode,
            `module_timing` with module hooks, `traced` under Kineto.
        phases: Seconds of each phase, which add up to the step: stream time on CUDA, host time on a
            CPU.
        host_phases: On CUDA, host seconds of each phase.
        cpu_user: CPU seconds of all threads in the code of the process. Not read in every step.
        cpu_system: CPU seconds of all threads in the operating system's kernel.
        cpu_lost: Seconds in which threads were ready to run while other processes had the CPU,
            summed over the threads, in module-timing steps. `None` if the system does not provide
            it.
        waiting: Seconds at the end of backward in which the rank waits for the gradients of other
            ranks. Part of backward.
        thread_cpu: CPU seconds of the training thread, in module-timing steps; with several ranks,
            in all steps.
        thread_waited: Seconds in which the training thread was ready to run while another thread
            had its core; in the same steps as `thread_cpu`.
        waited_by_phase: `thread_waited` by phase, where `wait` is the end of backward. Known only
            if unprofiled steps of several ranks are compared, otherwise `None`.
        fetching_cpu: CPU seconds of the training thread until the step's batch was available, in
            module-timing steps.
        fetching_waited: The part of `thread_waited` until the step's batch was available, in
            module-timing steps.
        uncontended_phases: Seconds of each phase, without the time in which another thread had the
            core of the training thread; in module-timing steps on a busy machine. Module times
            exclude this time as well.
        marks: Other events in the step: `DISTURBANCES` or `no_update`.
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
        """Return whether lflops only read the clock in this step, and no event disturbed it."""
        return is_unprofiled(self.kind, self.marks)


def with_phases(steps: Sequence[Step]) -> tuple[Sequence[Step], float]:
    """Return the steps with known phases, and the factor that scales them to all steps.

    If timing events are expensive, only some steps have known phases. The factor is the mean
    duration of all steps, divided by the mean duration of the steps with known phases.
    """
    known = [step for step in steps if step.phases] or steps
    mean_of_known = _mean_seconds(known)
    scale = _mean_seconds(steps) / mean_of_known if mean_of_known else 1.0
    return known, scale


def _mean_seconds(steps: Sequence[Step]) -> float:
    return sum(step.seconds or 0.0 for step in steps) / max(len(steps), 1)
