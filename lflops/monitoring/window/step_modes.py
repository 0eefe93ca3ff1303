"""Define the modes in which a step can run.

    unprofiled       only the clock is read                   `StepMode`
    counting         every operator is counted                `CountingStepMode` in counting_step.py
    traced           torch.profiler records the step          `TracedMode` in traced_steps.py
    module-timing    hooks take timestamps on every module    `ModuleTimingMode`
    stack-sampling   a thread also samples the Python stack   `StackSamplingMode`

A session, which monitors one stage, has one current mode. The mode changes only between two steps.
All modes of a window (a few consecutive steps that lflops profiles) are created when it opens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lflops.error_guard import Guard
from lflops.model.module_tree import ModuleTree
from lflops.monitoring.inputs.training import Stage
from lflops.monitoring.window.module_timing_step import ModuleTimingStep
from lflops.profile.profile import Profile
from lflops.profile.steps import StepKind
from lflops.timing.clock import Clock
from lflops.timing.stack_samples import StackSample, StackSampler


class EndedStep(NamedTuple):
    """Describes how a step that has ended was profiled.

    Attributes:
        kind: The way in which the step was profiled, such as `counting`. It can be `unprofiled` in
            any mode, for example if a step in the counting mode did not have to be counted.
        module_timing: The timestamps of the module hooks, or `None` if the step was not in the
            module-timing mode.
        stacks: Samples of the Python stack of the training thread.
    """

    kind: StepKind
    module_timing: ModuleTimingStep | None = None
    stacks: Sequence[StackSample] = ()


class StepMode:
    """Profiles steps in one way, for example by counting operators or by timing modules.

    This base class is the mode of unprofiled steps, in which lflops only reads a clock.

    The session of a stage, such as training, calls the methods in this order:

        prepare                           the window of the mode opens
        begin_step                        between two steps, before each step in this mode
            begin_batch ... end_batch     around each batch of the step
            continue_step                 between two batches that accumulate gradients
            end_step                      the last batch of the step is over
        leave                             between two steps, if the next step has another mode

    The session can call `abandon`, `pause`, `finish` and `remove` at any point in between. After
    `abandon`, the step begins again with `begin_batch`.

    Attributes:
        touches_step: Whether a step in this mode takes longer than without lflops.
        works_between_steps: Whether `begin_step` and `leave` are slow. If so, their time is not
            included in any step.
    """

    touches_step = False
    works_between_steps = False

    def prepare(self) -> None:
        """Do the set-up that must not happen during a timed step."""

    def begin_step(self) -> None:
        """Prepare the next step before its first batch is fetched."""

    def begin_batch(self, batch: Any, *, begins_step: bool) -> None:
        """Install the hooks for a batch. `begins_step` is true for the first batch of a step."""

    def end_batch(self, batch: Any) -> Profile | None:  # noqa: ARG002 - modes may read it
        """Remove the hooks for a batch. Return its profile, or `None` if it was not counted."""
        return None

    def continue_step(self) -> None:
        """Prepare the next batch of the same step, between two batches."""

    def end_step(self) -> EndedStep:
        """Remove the hooks for the step, and return how the step was profiled."""
        return EndedStep("unprofiled")

    def leave(self) -> None:
        """Pass the collected data to the window, because the next step has another mode."""

    def abandon(self) -> None:
        """Discard the current step, because a batch did not end and yet training continues."""

    def pause(self) -> None:
        """Keep the data collected so far, because the stage ends but can begin again later."""

    def finish(self, error: BaseException | None) -> None:
        """Pass the collected data to the window, because the run ends normally or after `error`."""

    def remove(self) -> None:
        """Remove every hook and discard the current step. Can be called repeatedly."""


class ModuleTimingMode(StepMode):
    """Times all modules from the first batch of a step to the end of the step.

    The hooks of the training loop, such as methods of callbacks, are timed as well. Some of them
    run between two steps, so they are timed from before the first module-timing step of a window
    until after the last one.
    """

    touches_step = True

    def __init__(
        self, stage: Stage, tree: ModuleTree, clock: Clock, guard: Guard, *, is_alone: bool
    ) -> None:
        self._stage = stage
        self._tree = tree
        self._clock = clock
        self._guard = guard
        self._is_alone = is_alone
        self._step: ModuleTimingStep | None = None
        self._hooks_before: Mapping[str, float] = {}

    def begin_step(self) -> None:
        if self._stage.hook_times is not None:
            self._stage.hook_times.start()
            self._hooks_before = dict(self._stage.hook_times.seconds)

    def begin_batch(self, batch: Any, *, begins_step: bool) -> None:  # noqa: ARG002
        if begins_step:
            self._step = ModuleTimingStep(
                self._stage, self._tree, self._clock, is_alone=self._is_alone
            )
            self._step.start(self._guard)

    def end_step(self) -> EndedStep:
        step = self._step
        self.abandon()
        if step is None:
            return EndedStep("unprofiled")
        if self._stage.hook_times is not None:
            step.hook_seconds = _increase(self._stage.hook_times.seconds, self._hooks_before)
        return EndedStep("module_timing", step)

    def leave(self) -> None:
        self._stop_watching_loop()

    def abandon(self) -> None:
        if self._step is not None:
            self._step.stop()
        self._step = None

    def pause(self) -> None:
        self._stop_watching_loop()

    def finish(self, error: BaseException | None) -> None:  # noqa: ARG002
        self._stop_watching_loop()

    def remove(self) -> None:
        self._stop_watching_loop()
        self.abandon()

    def _stop_watching_loop(self) -> None:
        if self._stage.hook_times is not None:
            self._stage.hook_times.stop()


class StackSamplingMode(ModuleTimingMode):
    """Samples the Python stack of the training thread, to find out in which function time is spent.

    The hooks on the modules show in which module the function was called. The times of the modules
    are not used, because taking samples makes the step longer.
    """

    def __init__(self, stage: Stage, tree: ModuleTree, clock: Clock, guard: Guard) -> None:
        super().__init__(stage, tree, clock, guard, is_alone=False)
        self._sampler = StackSampler(stage.log.clock, self._running_module)

    def _running_module(self) -> str:
        step = self._step
        return "" if step is None else step.running_module

    def begin_step(self) -> None:
        self._sampler.start()

    def end_step(self) -> EndedStep:
        self.abandon()
        return EndedStep("stack_sampling", stacks=self._sampler.take_samples())

    def _stop_watching_loop(self) -> None:
        self._sampler.stop()


def _increase(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    increase = {}
    for name, seconds in after.items():
        increase[name] = seconds - before.get(name, 0.0)
    return increase
