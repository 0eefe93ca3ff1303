"""Time the modules in one step: timestamps divide forward and backward among the modules."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from lflops.error_guard import CleanupStack, Guard, call_each
from lflops.model.module_tree import ModuleTree
from lflops.monitoring.inputs.training import Stage
from lflops.phase_log import WAIT
from lflops.profile.timeline import SelfTime, StepTimeline, longest, nested
from lflops.timing.clock import (
    Clock,
    CpuWatch,
    HostClock,
    ThreadSchedule,
    UncontendedClock,
    UncontendedMark,
)
from lflops.timing.module_hooks import ModuleTimer
from lflops.timing.module_times import PassTimes, Stamp
from lflops.timing.step_phases import OTHER, MarkedPhases, PhaseMarks

# Phases that are not drawn in the timeline. The modules that run in these phases are drawn.
_WITHOUT_SLICE = frozenset({"forward", "backward", WAIT, OTHER, ""})


class ModuleTimingStep:
    """Times the modules in one step, with hooks that take timestamps from `start` to `stop`.

    In Lightning, the root module is the LightningModule, and `training_step` is its forward.

    Attributes:
        cpu_lost: Seconds in which threads of this process were ready to run but other processes had
            the CPU, summed over the threads. It is `None` before `stop`, and if the system does not
            report it.
        hook_seconds: The seconds that each hook of the training loop took in this step, such as a
            callback's `on_train_batch_end`.
    """

    def __init__(
        self, stage: Stage, tree: ModuleTree, clock: Clock, *, is_alone: bool = False
    ) -> None:
        self._stage = stage
        self._clock = clock
        # On a busy machine, module times exclude the time in which other threads use this thread's
        # core. With several ranks they include it, because it can make a rank late.
        uncontended = UncontendedClock()
        leaves_out = is_alone and isinstance(clock, HostClock) and uncontended.is_needed
        self._uncontended_clock = uncontended if leaves_out else None
        self._begun_at = uncontended.now()
        self._timer = ModuleTimer(tree, self._uncontended_clock or clock)
        self._uncontended_phases: MarkedPhases | None = None
        if self._uncontended_clock is not None:
            self._uncontended_phases = MarkedPhases(self._uncontended_clock)
        self._marked: PhaseMarks | None = None
        self._phases: list[str] = []
        # whether a forward pass, with the backward pass after it, is being timed
        self._begun = False
        self._cpu: CpuWatch | None = None
        self.cpu_lost: float | None = None
        self.hook_seconds: Mapping[str, float] = {}
        self._passes: list[dict[str, list[Stamp]]] = []
        self._cleanup = CleanupStack()

    def start(self, guard: Guard) -> None:
        """Install the hooks."""
        self._timer.install(self._cleanup, guard)
        self._cleanup.add(self._stage.listen(self))
        if self._uncontended_phases is not None:
            self._cleanup.add(self._stage.listen(self._uncontended_phases))
            self._uncontended_phases.begin()
        self._cpu = CpuWatch()

    def stop(self) -> None:
        """Remove the hooks. Can be called repeatedly."""
        if self._uncontended_phases is not None and self._cpu is not None:
            self._marked = self._uncontended_phases.end()
        call_each([self._end_pass, self._cleanup.close])
        if self._cpu is not None:
            self.cpu_lost = self._cpu.lost()
            self._cpu = None

    @property
    def running_module(self) -> str:
        """The name of the module that is running now, or "" outside modules."""
        return self._timer.running_module

    def fetching(self, begin: bytes | None) -> tuple[float | None, float | None]:
        """Return how long the training thread ran and waited for a core to fetch the step's batch.

        Args:
            begin: The thread's scheduler counters at the start of the step, as in `ThreadSchedule`.

        Returns:
            The seconds that the thread ran on a core, and the seconds that it waited for a core.
            Both are `None` if the system does not report the counters.
        """
        return ThreadSchedule.between(begin, self._begun_at) or (None, None)

    def uncontended_phases(
        self, step: PhaseMarks, fetching: float, waited: float | None
    ) -> dict[str, float]:
        """Return the seconds of each phase, without the training thread's waits for a core.

        The result is empty if these waits were not measured.

        Args:
            step: The timestamps of the step's phases.
            fetching: Seconds of the phase `data`, including the waits for a core.
            waited: Seconds that the thread waited for a core in the whole step; `None` if unknown.
        """
        if (
            self._uncontended_clock is None
            or self._uncontended_phases is None
            or self._marked is None
            or waited is None
        ):
            return {}
        first = self._marked[0][0]
        last = self._marked[2]
        # A step begins with the callbacks that run after the previous step, and with fetching the
        # batch. The hooks are installed after that, so all waits that they did not measure were at
        # the beginning of the step.
        before_hooks = self._clock.seconds(step[0][0], first.before)
        waited_before_hooks = max(waited - self._uncontended_clock.waited(first, last), 0.0)
        begin = max(before_hooks - waited_before_hooks, 0.0)
        phases = self._uncontended_phases.seconds(self._marked)
        data = min(begin + phases.get("data", 0.0), fetching)
        other = max(begin - fetching, 0.0) + phases.get("other", 0.0)
        return {**phases, "data": data, "other": other}

    def pass_times(self) -> dict[str, PassTimes]:
        """Return the times of modules in each part of the step: `forward` and `backward`.

        They are sums over the batches of the step. Call this after the device has reached all
        timestamps.
        """
        sums: dict[str, PassTimes] = {}
        for stamps in self._passes:
            for part, times in self._timer.pass_times(stamps).items():
                sums.setdefault(part, PassTimes()).add(times)
        return sums

    def timeline(self, step: PhaseMarks) -> StepTimeline:
        """Return the timeline of the step: when each module and each phase ran.

        Call this after the device has reached all timestamps. `step` has the timestamps of the
        phases.
        """
        start = step[0][0]
        times = [*self._module_times(start), *self._phase_times(step)]
        times.sort(key=lambda time: time.start)
        end = self._nanoseconds(start, step[2])
        return longest("module_timing", end, nested(times))

    def _module_times(self, start: Any) -> Iterator[SelfTime]:
        for timed_pass in self._passes:
            for stamps in timed_pass.values():
                moments = [(self._nanoseconds(start, mark), key) for mark, key, _ in stamps]
                for (begin, key), (end, _) in pairwise(moments):
                    if key is not None:
                        yield SelfTime(*key, begin, end)

    def _phase_times(self, step: PhaseMarks) -> Iterator[SelfTime]:
        marks, phases, end = step
        moments = [self._nanoseconds(marks[0], mark) for mark in (*marks, end)]
        for phase, (begin, stop) in zip(phases, pairwise(moments), strict=True):
            if phase not in _WITHOUT_SLICE:
                yield SelfTime("", phase, begin, stop)

    def _nanoseconds(self, start: Any, mark: Any) -> int:
        """Return the nanoseconds from the start of the step to a timestamp.

        The timestamp is from the step's clock or from the `UncontendedClock`.
        """
        moment = mark.before if isinstance(mark, UncontendedMark) else mark
        return max(round(1e9 * self._clock.seconds(start, moment)), 0)

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        """Begin a phase. Modules are timed in forward and backward, but not in other phases.

        For backward, the first element of `given` is the loss.
        """
        within_forward = "forward" in self._phases
        self._phases.append(phase)
        if phase == "forward" and not within_forward:
            self._end_pass()
            self._begun = True
            self._timer.begin()
        elif self._begun:
            self._timer.set_aside()
            if phase == "forward":
                self._timer.resume_forward()
            elif phase == "backward":
                # pass only the loss, because the next argument, the optimizer, refers to every
                # parameter
                self._timer.begin_backward(given[:1])

    def leave(self) -> None:
        """End the innermost phase, and time modules again if the enclosing phase is forward."""
        self.drop()
        if self._begun:
            self._timer.set_aside()
            if self._phases[-1:] == ["forward"]:
                self._timer.resume_forward()

    def drop(self) -> None:
        """End the innermost phase because of an exception, without taking a timestamp."""
        if self._phases:
            self._phases.pop()

    def _end_pass(self) -> None:
        if self._begun:
            self._begun = False
            self._passes.append(self._timer.end())
