"""Collect the steps of one window, and make its profile.

A window is a few consecutive steps that lflops profiles. The user's schedule defines when it opens.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Literal

from msgspec.structs import replace

from lflops.analysis.step_times import step_times
from lflops.monitoring.window.step_timer import TimedStep
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import MainFunction, ModulePhase
from lflops.profile.series import summed
from lflops.profile.steps import Step
from lflops.profile.timeline import StepTimeline, median_first
from lflops.timing.clock import Clock
from lflops.timing.module_hooks import hook_overhead
from lflops.timing.module_times import attach_module_times
from lflops.timing.stack_samples import WITH_MODULES, FunctionTimes
from lflops.timing.step_phases import BETWEEN, OTHER
from lflops.trace.record.tracer import Recording

# number of unprofiled steps that a window needs for reliable totals
WANTED = 5

# The schedule sets the number of module-timing steps in a window. If a module seems slow but these
# steps are too few to be sure, modules are timed in further steps: first until `TIMING_STEPS` steps
# are timed, then in `MORE_TIMING_STEPS` steps at a time, until `MOST_TIMING_STEPS` are timed.
TIMING_STEPS = 8
MORE_TIMING_STEPS = 4
MOST_TIMING_STEPS = 16

# The Python stack is sampled in further steps if a phase outside the layers takes at least
# `SAMPLED_SHARE` of the step. The steps together should have `SAMPLED_SECONDS` of the phase. If the
# largest number of steps has less than `LEAST_SAMPLED_SECONDS`, no samples are taken.
SAMPLED_SHARE = 0.09
SAMPLED_SECONDS = 0.06
LEAST_SAMPLED_SECONDS = 0.01
FEWEST_SAMPLED_STEPS = 3
MOST_SAMPLED_STEPS = 16

# Maximum number of further steps that are counted if the counted step ran no backward.
MOST_EXTRA_COUNTS = 3

# Maximum number of steps after the end of a window in which it collects missing steps.
PATIENCE = 20
# Maximum number of steps that a window keeps from the time before its warm-up: the last steps.
LONGEST_WAIT = 100

# Maximum number of hooks of the training loop whose times are in a profile: the slowest hooks.
MOST_HOOKS = 5

# The time between backward and the optimizer counts as work on gradients if it is at least this
# share of the step and at least this many seconds.
CLIP_SHARE = 0.05
CLIP_SECONDS = 2e-4


RequestedMode = Literal["count", "module_timing", "stack_sampling"]
"""The work that a window requests for a further step.

The work is to count operators, to time modules, or to sample Python stacks. The schedule uses the
same names.
"""


class Window:
    """Collects the steps of one window, and makes the window's profile.

    A window is a few consecutive steps that lflops profiles.

    Args:
        number: The number of the window, from 0.
        begin: The number of the first step that belongs to the window. The window waits from this
            step until its warm-up begins.

    Attributes:
        opened: Whether the window's warm-up has begun.
        counted: The profile of the counting step, without times; `None` before this step. If an
            earlier step had the same shapes, it is the profile of that step.
        recording: The recording of the window's traced steps, if there is one.
    """

    def __init__(self, number: int, begin: int) -> None:
        self.number = number
        self.begin = begin
        self.opened = False
        self.counted: Profile | None = None
        self.recording: Recording | None = None
        self._wait_steps: deque[TimedStep] = deque(maxlen=LONGEST_WAIT)
        self._steps: list[TimedStep] = []
        # The number of the step after the window, and the window's last step on the loggers'
        # x-axis. Both are `None` until the window ends.
        self._end: int | None = None
        self._last_logged_step: int | None = None
        # the number of the last step that was passed to `add`
        self._last = -1
        self._steps_after_end = 0
        # the mode of each further step that was requested, keyed by the number of the step
        self._requested: dict[int, RequestedMode] = {}

    def end(self, ordinal: int, logged_step: int) -> None:
        """End the window before step `ordinal`.

        `logged_step` is the number of the window's last step on the loggers' x-axis.
        """
        self._last_logged_step = logged_step
        self._end = ordinal

    @property
    def has_ended(self) -> bool:
        """Return whether the window has ended.

        A window that has ended may still collect the later steps that it needs (see `add`).
        """
        return self._end is not None

    @property
    def may_extend(self) -> bool:
        """Return whether the window may request further steps.

        It may not if it ended too many steps ago, or if it times no modules.
        """
        return self._timed_steps > 0 and self._steps_after_end < PATIENCE

    @property
    def _timed_steps(self) -> int:
        return sum(step.module_timing is not None for step in self._steps)

    @property
    def missing_timing_steps(self) -> int:
        """Number of further module-timing steps that are needed to judge whether a module is slow.

        It is 0 if the window already has the maximum number of such steps.
        """
        timed = self._timed_steps
        if timed < TIMING_STEPS:
            return TIMING_STEPS - timed
        return min(MORE_TIMING_STEPS, MOST_TIMING_STEPS - timed)

    def missing_stack_steps(self, profile: Profile) -> int:
        """Return in how many further steps to sample the Python stack of the training thread.

        It is 0 unless so much time is spent outside the layers that a report should name the
        function that takes it. `profile` is the window's profile so far.
        """
        times = step_times(profile)
        if "stack_sampling" in self._requested.values() or times.mean is None:
            return 0
        of_root = profile.modules[""].forward.self_seconds
        seconds = 0.0 if of_root is None else of_root.median
        for phase, took in times.phases.items():
            if phase not in WITH_MODULES:
                seconds = max(seconds, took)
        is_enough = MOST_SAMPLED_STEPS * seconds >= LEAST_SAMPLED_SECONDS
        if seconds < SAMPLED_SHARE * times.mean or not is_enough:
            return 0
        wanted = math.ceil(SAMPLED_SECONDS / seconds)
        return min(max(wanted, FEWEST_SAMPLED_STEPS), MOST_SAMPLED_STEPS)

    @property
    def has_counts_left(self) -> bool:
        """Return whether the window may request another counting step.

        The window needs another one if the counted step ran no backward. The loop then skipped the
        batch, for example because `training_step` returned `None`. The number of further counting
        steps is limited.
        """
        return list(self._requested.values()).count("count") < MOST_EXTRA_COUNTS

    def request(self, steps: range, mode: RequestedMode) -> None:
        """Request that the steps with these numbers run in this mode."""
        self._requested |= dict.fromkeys(steps, mode)

    def requested_mode(self, ordinal: int) -> RequestedMode | None:
        """Return the mode that this window has requested for a step, or `None`."""
        return self._requested.get(ordinal)

    def add(self, step: TimedStep) -> None:
        """Add a step if it belongs to the window.

        After the end of the window, only these steps belong to it: steps that it has requested, and
        unprofiled steps if it still has too few. An incomplete step is left out, unless it is the
        counting step.
        """
        # While this window waits for its warm-up, such steps were requested by the previous window.
        is_requested = step.kind in {"counting", "module_timing", "stack_sampling"}
        is_of_earlier_window = is_requested and not self.opened
        if step.ordinal < self.begin or is_of_earlier_window:
            return
        self._last = step.ordinal
        if self._end is None or step.ordinal < self._end:
            is_taken = step.is_complete or step.kind == "counting"
        else:
            self._steps_after_end += 1
            is_taken = step.is_complete and self._wants(step)
        if is_taken:
            steps = self._steps if self.opened else self._wait_steps
            steps.append(step)

    def _wants(self, step: TimedStep) -> bool:
        if self.requested_mode(step.ordinal) is not None:
            return True
        return step.is_unprofiled and self._unprofiled_steps < WANTED

    @property
    def ready(self) -> bool:
        """Return whether the window has all of its steps, or has waited long enough for them."""
        if self._end is None:
            return False
        if self._last < max([self._end - 1, *self._requested]):
            return False
        return self._unprofiled_steps >= WANTED or self._steps_after_end >= PATIENCE

    @property
    def is_worth_reporting(self) -> bool:
        """Return whether to report this window when the run ends.

        A window is reported if it has opened. A window that is still waiting for its warm-up is
        reported only if it is the first one and has steps.
        """
        if self.has_ended or self.opened or self.counted is not None:
            return True
        return self.number == 0 and bool(self._wait_steps)

    def profile(
        self,
        counted: Profile,
        logged_step: int,
        notes: Iterable[Note],
        *,
        read: Callable[[TimedStep], Step],
        clock: Clock,
        failed: bool,
    ) -> tuple[Profile, tuple[Mapping[ModulePhase, float], ...]]:
        """Make the window's profile.

        Args:
            counted: The counted profile, to which the times of the window are added.
            logged_step: The last step on the loggers' x-axis, used if the window has not ended.
            notes: Notes that are added to the notes of `counted`.
            read: Reads the times of a step.
            clock: The clock of the steps.
            failed: Whether an error ended the run.

        Returns:
            The profile, and for each module-timing step the self seconds of each module and phase.
        """
        known_steps = [read(step) for step in (*self._wait_steps, *self._steps)]
        name_of_gap = _name_of_gap(known_steps)
        steps = [_with_gap_named(step, name_of_gap) for step in known_steps]
        all_notes = [*counted.notes, *notes]
        if self._unprofiled_steps < WANTED:
            values = {"steps": self._unprofiled_steps}
            all_notes.append(Note(code="few_unprofiled_steps", subject="", values=values))
        run = replace(
            counted.run,
            step=logged_step if self._last_logged_step is None else self._last_logged_step,
            window=self.number,
            partial=failed or not self.has_ended or counted.run.partial,
        )
        usual = _usual_step(steps)
        if usual is not None:
            run = replace(run, samples_per_step=usual.samples, tokens_per_step=usual.tokens)
        profile = replace(
            counted,
            run=run,
            steps=tuple(steps),
            notes=tuple(all_notes),
            timelines=self._timelines(clock),
            hooks=self._hook_seconds(),
            main_functions=self._main_functions(name_of_gap),
        )
        pass_times = []
        for step in self._steps:
            if step.module_timing is not None:
                pass_times.append(step.module_timing.pass_times())
        if not pass_times:
            return profile, ()
        kernels = {} if self.recording is None else self.recording.kernels
        return attach_module_times(profile, pass_times, hook_overhead(clock), kernels)

    def _hook_seconds(self) -> dict[str, float]:
        """Return the slowest hooks of the training loop, such as methods of callbacks.

        For each of these hooks, the value is its mean seconds per module-timing step.
        """
        timed = [step.module_timing for step in self._steps if step.module_timing is not None]
        totals = summed(chain.from_iterable(step.hook_seconds.items() for step in timed))
        slowest = sorted(totals, key=totals.__getitem__, reverse=True)
        means = {}
        for hook in slowest[:MOST_HOOKS]:
            if totals[hook] > 0:
                means[hook] = totals[hook] / len(timed)
        return means

    def _main_functions(self, name_of_gap: str) -> tuple[MainFunction, ...]:
        """Return the user's functions that take most of a phase.

        `name_of_gap` is the name of the phase between backward and the optimizer.
        """
        times = FunctionTimes({BETWEEN: name_of_gap})
        for step in self._steps:
            times.add(step.stacks, step.host_marks or step.device_marks)
        return times.main_functions()

    def _timelines(self, clock: Clock) -> tuple[StepTimeline, ...]:
        """Return the timelines of module-timing steps.

        The result is empty if the trace already has timelines.
        """
        if self.recording is not None and self.recording.timelines:
            return ()
        timed = [step for step in self._steps if step.module_timing is not None]
        if not timed:
            return ()

        def length(step: TimedStep) -> float:
            return clock.seconds(step.device_marks[0][0], step.device_marks[-1])

        timelines = []
        for step in median_first(timed, length):
            if step.module_timing is not None:
                shown = step.module_timing.timeline(step.device_marks)
                timelines.append(replace(shown, step=step.ordinal))
        return tuple(timelines)

    @property
    def _unprofiled_steps(self) -> int:
        return sum(step.is_unprofiled for step in (*self._wait_steps, *self._steps))


def _usual_step(steps: Sequence[Step]) -> Step | None:
    """Return the step whose samples and tokens the profile reports.

    It is the counting step or, if there is none, the last step.
    """
    for step in steps:
        if step.kind == "counting":
            return step
    if not steps:
        return None
    return steps[-1]


def _name_of_gap(steps: Iterable[Step]) -> str:
    """Return the name of the phase between backward and the optimizer.

    It is `clip` (work on gradients) if the phase is long in most unprofiled steps, and `other` if
    not.
    """
    timed = [step for step in steps if step.is_unprofiled and step.phases and step.seconds]
    long = sum(_has_long_clip(step) for step in timed)
    return "clip" if 2 * long > len(timed) else OTHER


def _with_gap_named(step: Step, name: str) -> Step:
    """Rename the phase between backward and the optimizer of a step."""
    return replace(
        step,
        phases=_renamed(step.phases, name),
        host_phases=_renamed(step.host_phases, name),
        uncontended_phases=_renamed(step.uncontended_phases, name),
    )


def _has_long_clip(step: Step) -> bool:
    limit = max(CLIP_SHARE * (step.seconds or 0.0), CLIP_SECONDS)
    return step.phases.get(BETWEEN, 0.0) >= limit


def _renamed(phases: Mapping[str, float], name: str) -> dict[str, float]:
    """Rename the phase between backward and the optimizer to `name`.

    If there is already a phase with this name, the times are added up.
    """
    items = list(phases.items())
    if name == OTHER:
        # put the renamed phase last, so that an existing phase `other` keeps its position
        items.sort(key=lambda item: item[0] == BETWEEN)
    renamed: dict[str, float] = {}
    for phase, seconds in items:
        key = name if phase == BETWEEN else phase
        renamed[key] = renamed.get(key, 0.0) + seconds
    return renamed
