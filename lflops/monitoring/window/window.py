"""One window of the schedule.

What was counted in it, the steps around that, and the profile that they make.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter

from msgspec.structs import replace

from lflops.monitoring.window.step_timer import TimedStep
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import ModulePhase
from lflops.profile.series import summed
from lflops.profile.steps import Step
from lflops.profile.timeline import StepTimeline
from lflops.timing.clock import Clock
from lflops.timing.module_hooks import hook_overhead
from lflops.timing.module_times import attach_module_times
from lflops.timing.step_phases import BETWEEN, OTHER
from lflops.trace.record.tracer import Recording

# clean steps that the figures should rest on
WANTED = 5

HOOKED, MORE, MOST_HOOKED = 8, 4, 16
"""Hooked steps that tell whether a module is slow.

At first, how many more where they do not, and at the most.
"""

# steps after its end that a window waits for those that it wants
PATIENCE = 20
# steps of a wait that are kept, the last ones
LONGEST_WAIT = 100
_CLIP, _LEAST_CLIP = (
    0.05,
    2e-4,
    # of the step, and seconds: so long is clip, if it is between backward and the optimizer; else it is
    # other
)


class Window:
    """Gathers until it is closed: a window of the schedule, numbered from 0.

    Its wait began at step `begin` of the run.
    """

    def __init__(self, number: int, begin: int) -> None:
        self.number = number
        self.begin = begin
        # whether its warm-up has begun
        self.opened = False
        self.counted: Profile | None = (
            # what was counted, with the run's facts; `None` until then
            None
        )
        self.recording: Recording | None = (
            # what its traced steps showed; `None` where there are none
            None
        )
        self.last: int | None = (
            # what the loggers call its last step; `None` until that is over
            None
        )
        self._wait_steps: deque[TimedStep] = deque(maxlen=LONGEST_WAIT)
        self._steps: list[TimedStep] = []
        self._end: int | None = None
        self._last = -1
        self._steps_after_end = 0
        self._hooked_after = range(0)

    def end(self, ordinal: int, last: int) -> None:
        """Its last step, which the loggers call so, was the one before this."""
        self.last = last
        self._end = ordinal

    @property
    def complete(self) -> bool:
        """Whether all its steps were; it may wait for some of those after them."""
        return self._end is not None

    @property
    def more_hooked(self) -> int:
        """How many further steps would be hooked, if those so far cannot tell.

        0 where enough are, or none was to be.
        """
        hooked = sum(step.hooked is not None for step in self._steps)
        if not hooked or self._steps_after_end >= PATIENCE:
            return 0
        return HOOKED - hooked if hooked < HOOKED else min(MORE, MOST_HOOKED - hooked)

    def hook(self, ordinal: int, more: int) -> None:
        """Wait for so many hooked steps, from this one on."""
        self._hooked_after = range(ordinal, ordinal + more)

    def hooks(self, ordinal: int) -> bool:
        """Whether this step is one of them."""
        return ordinal in self._hooked_after

    def add(self, step: TimedStep) -> None:
        """Add a step, if it is one of the window's.

        One after its end if it has hooks for it, or is clean and clean ones are wanted.
        """
        if step.ordinal < self.begin or (
            step.hooked and not self.opened
            # the hooks are of the window before
        ):
            return
        self._last = step.ordinal
        after = self._end is not None and step.ordinal >= self._end
        self._steps_after_end += after
        wanted = self.hooks(step.ordinal) or (step.is_unprofiled and self._clean < WANTED)
        if (step.is_complete or step.counted) if not after else (step.is_complete and wanted):
            (self._steps if self.opened else self._wait_steps).append(step)

    @property
    def ready(self) -> bool:
        """Whether all its steps are there, and with them the clean ones that it wants, or it has waited long enough for those."""
        if self._end is None or self._last < max(self._end, self._hooked_after.stop) - 1:
            return False
        return self._clean >= WANTED or self._steps_after_end >= PATIENCE

    @property
    def is_worth_reporting(self) -> bool:
        """Whether it is complete, or the run's end has cut it short, and it has anything in it that the last one has not."""
        return (
            self.complete
            or self.counted is not None
            or self.opened
            or (self.number == 0 and bool(self._wait_steps))
        )

    def profile(
        self,
        counted: Profile,
        step: int,
        notes: Iterable[Note],
        *,
        of: Callable[[TimedStep], Step],
        clock: Clock,
        failed: bool,
    ) -> tuple[Profile, tuple[Mapping[ModulePhase, float], ...]]:
        """The window as a value, and the own seconds of modules in each of its hooked steps."""
        steps = _with_clip(tuple(map(of, (*self._wait_steps, *self._steps))))
        usual = next(
            (each for each in steps if each.kind == "counting"), steps[-1] if steps else None
        )
        few = (
            ()
            if self._clean >= WANTED
            else (Note(code="few_clean_steps", subject="", values={"steps": self._clean}),)
        )
        run = replace(
            counted.run,
            step=step if self.last is None else self.last,
            window=self.number,
            partial=failed or not self.complete or counted.run.partial,
            samples_per_step=counted.run.samples_per_step if usual is None else usual.samples,
            tokens_per_step=counted.run.tokens_per_step if usual is None else usual.tokens,
        )
        profile = replace(counted, run=run, steps=steps, notes=(*counted.notes, *notes, *few))
        pass_times = [step.hooked.pass_times() for step in self._steps if step.hooked]
        profile = replace(profile, timelines=self._timelines(clock))
        kernels = {} if self.recording is None else self.recording.kernels
        return (
            attach_module_times(profile, pass_times, hook_overhead(clock), kernels)
            if pass_times
            else (profile, ())
        )

    def _timelines(self, clock: Clock) -> tuple[StepTimeline, ...]:
        hooked = [
            (clock.seconds(step.device_marks[0][0], step.device_marks[-1]), step)
            for step in self._steps
            if step.hooked
        ]
        if not hooked or (self.recording is not None and self.recording.timeline is not None):
            return ()
        _, median = sorted(hooked, key=itemgetter(0))[(len(hooked) - 1) // 2]
        return (median.hooked.timeline(median.device_marks),) if median.hooked else ()

    @property
    def _clean(self) -> int:
        return sum(step.is_unprofiled for step in (*self._wait_steps, *self._steps))


def _with_clip(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps, in which what is between backward and the optimizer is clip, or other where it is short in half of them or more."""
    clean = [step for step in steps if step.is_unprofiled and step.phases and step.seconds]
    long = sum(
        step.phases.get(BETWEEN, 0.0) >= max(_CLIP * (step.seconds or 0.0), _LEAST_CLIP)
        for step in clean
    )
    name = "clip" if 2 * long > len(clean) else OTHER

    def named(phases: Mapping[str, float]) -> dict[str, float]:
        in_order = sorted(phases.items(), key=lambda item: item[0] == BETWEEN and name == OTHER)
        return summed((name if phase == BETWEEN else phase, seconds) for phase, seconds in in_order)

    return tuple(
        replace(
            step,
            phases=named(step.phases),
            host_phases=named(step.host_phases),
            uncontended_phases=named(step.uncontended_phases),
        )
        for step in steps
    )
