"""The steps of a run as values, and the rule that says which of them are clean.

Every time of a profile rests on clean steps.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from lflops.profile.records import Count, Seconds

StepKind = Literal[
    "unprofiled", "counting", "module_timing", "traced"
    # what lflops did in a step: nothing but reading the clock, or one of the others
]

DISTURBANCES = frozenset(
    {"warmup", "recompiled", "new_shapes", "validation", "checkpoint", "background"}
)
"""Marks of steps whose time is not typical.

`no_update` is no disturbance: such a step is as long as the others.
"""

EVENTS = ("validation", "checkpoint")
"""Disturbances that the training itself causes, between its batches.

They can take longer on one rank than on another.
"""

# the phases of generating, which are parts of forward
WITHIN_FORWARD = ("prefill", "decode")


def is_disturbed(marks: Collection[str]) -> bool:
    return not DISTURBANCES.isdisjoint(marks)


def is_compared(marks: Collection[str]) -> bool:
    """Whether the step says something of the ranks.

    Nothing disturbed it but an event, in which ranks are compared too.
    """
    return DISTURBANCES.difference(EVENTS).isdisjoint(marks)


def is_unprofiled(kind: StepKind, marks: Collection[str]) -> bool:
    """Whether a step is a clean step: lflops only read the clock in it, and nothing disturbed it."""
    return kind == "unprofiled" and not is_disturbed(marks)


class Step(Struct, frozen=True, kw_only=True, gc=False):
    """One optimizer step, as timed.

    Attributes:
        kind: `clean` ran without hooks or traces; `counted` ran under the dispatch mode, `hooked`
            with module hooks, `traced` under Kineto.
        phases: Seconds of each phase, which add up to the step: stream time on CUDA, host time on a
            CPU.
        host_phases: On CUDA, the host's seconds in each phase.
        cpu_user: Seconds of the CPU in the process's own code, over all threads. It is not read in
            each step.
        cpu_system: The same in the system's kernel.
        cpu_lost: Seconds in which its threads were ready to run and other processes had the CPU,
            added up; of hooked steps. `None` where the system does not say, or the machine is not
            Linux.
        waiting: Seconds at the end of backward in which the gradients of other ranks are awaited; a
            part of backward.
        thread_cpu: Seconds of the CPU in the training's thread. Read of hooked steps, and on
            several ranks of all; so is the next.
        thread_waited: Seconds in which that thread was ready to run and the system had given its
            core to another one.
        fetching_cpu: Seconds of the CPU in that thread until the step's batch was there; of hooked
            steps.
        uncontended_phases: Seconds of each phase without those in which another thread had this thread's
            core; of hooked steps on a busy machine. Then the times of modules are without them as
            well.
        marks: Other events in the step: one of the `DISTURBANCES`, or `no_update`.
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
    fetching_cpu: Seconds | None = None
    uncontended_phases: Mapping[str, Seconds] = {}
    samples: Count | None = None
    tokens: Count | None = None
    marks: tuple[str, ...] = ()

    @property
    def is_unprofiled(self) -> bool:
        """Whether it is a clean step; a step of kind `clean` is none where it was disturbed."""
        return is_unprofiled(self.kind, self.marks)


def with_phases(steps: Sequence[Step]) -> tuple[Sequence[Step], float]:
    """Those whose phases are known, and the factor from their mean to that of all.

    Where an event is dear, some alone are marked.
    """
    known = [step for step in steps if step.phases] or steps
    mean, of_known = (
        sum(step.seconds or 0.0 for step in each) / max(len(each), 1) for each in (steps, known)
    )
    return known, mean / of_known if of_known else 1.0
