"""One step of the training with its modules hooked, to divide forward and backward over them."""

from itertools import pairwise
from typing import Any

from lflops.error_guard import CleanupStack, Guard, call_each
from lflops.model.module_tree import ModuleTree
from lflops.monitoring.inputs.training import Stage
from lflops.profile.timeline import SelfTime, StepTimeline, longest, nested
from lflops.timing.clock import Clock, CpuWatch, HostClock, OwnClock, OwnMark, ThreadSchedule
from lflops.timing.module_hooks import ModuleTimer
from lflops.timing.module_times import PassTimes, Stamp
from lflops.timing.step_phases import OTHER, WAIT, PhaseMarks, StepPhases

_WITHOUT_SLICE = frozenset(
    {"forward", "backward", WAIT, OTHER, ""}
    # phases of a step that have the slices of their modules, or none
)


class ModuleTimingStep:
    """Stamps the modules from its start until it is stopped.

    The LightningModule is the root, and training_step its forward.
    """

    def __init__(
        self, stage: Stage, tree: ModuleTree, clock: Clock, *, is_alone: bool = False
    ) -> None:
        self._stage = stage
        self._clock = clock
        # Where others have the core for much of the time, what they take is left out. Ranks are
        # compared with it.
        own = OwnClock()
        self._own = own if is_alone and isinstance(clock, HostClock) and own.is_needed else None
        self._begun_at = own.now()
        self._timer = ModuleTimer(tree, self._own or clock)
        self._own_phases = None if self._own is None else StepPhases(self._own)
        self._marked: PhaseMarks | None = None
        self._phases: list[str] = []
        self._begun = False
        self._cpu: CpuWatch | None = None
        # CPU seconds that other processes took from it; `None` until it is stopped, and where the
        # system does not say.
        self.cpu_lost: float | None = None
        self._passes: list[dict[str, list[Stamp]]] = []
        self._undo = CleanupStack()

    def start(self, guard: Guard) -> None:
        self._timer.install(self._undo, guard)
        self._undo.add(self._stage.listen(self))
        if self._own_phases is not None:
            self._undo.add(self._stage.listen(self._own_phases))
            self._own_phases.begin()
        self._cpu = CpuWatch()

    def stop(self) -> None:
        """It can be called again."""
        if self._own_phases is not None and self._cpu is not None:
            self._marked = self._own_phases.end()
        call_each([self._end_pass, self._undo.close])
        if self._cpu is not None:
            self.cpu_lost, self._cpu = self._cpu.lost(), None

    def fetching(self, begin: bytes | None) -> float | None:
        """Seconds that the thread was on a core from the step's begin until its batch was there.

        `None` is unknown.
        """
        return (ThreadSchedule.between(begin, self._begun_at) or (None,))[0]

    def uncontended_phases(
        self, step: PhaseMarks, fetching: float, waited: float | None
    ) -> dict[str, float]:
        """Seconds of each phase without what others had of the core, which was `waited` in all.

        Empty where that was not read.
        """
        # `fetching` are the seconds of data, with what others had.
        if self._own is None or self._own_phases is None or self._marked is None or waited is None:
            return {}
        (first, *_), _, last = self._marked
        # Its modules are hooked when the batch is there. What others had until then, they had while
        # it was fetched.
        before = self._clock.seconds(step[0][0], first.before) - max(
            waited - self._own.waited(first, last), 0.0
        )
        own = self._own_phases.seconds(self._marked)
        return {**own, "data": min(max(before, 0.0) + own.get("data", 0.0), fetching)}

    def pass_times(self) -> dict[str, PassTimes]:
        """Read the settled stamps of forward and of backward, over all passes of the step."""
        sums: dict[str, PassTimes] = {}
        for each in self._passes:
            for part, times in self._timer.pass_times(each).items():
                sums.setdefault(part, PassTimes()).add(times)
        return sums

    def timeline(self, step: PhaseMarks) -> StepTimeline:
        """The step in time, by the settled stamps; its phases are marked by the same clock."""
        marks, phases, end = step

        def at(mark: Any) -> int:
            return max(
                round(
                    1e9
                    * self._clock.seconds(
                        marks[0], mark.before if isinstance(mark, OwnMark) else mark
                    )
                ),
                0,
            )

        stretches = []
        for stamps in (stamps for each in self._passes for stamps in each.values()):
            moments = [(at(mark), key) for mark, key, _ in stamps]
            stretches += [
                SelfTime(*key, start, stop)
                for (start, key), (stop, _) in pairwise(moments)
                if key is not None
            ]
        between = pairwise([*map(at, marks), at(end)])
        stretches += [
            SelfTime("", phase, *ends)
            for phase, ends in zip(phases, between, strict=True)
            if phase not in _WITHOUT_SLICE
        ]
        return longest(
            "module_timing", at(end), nested(sorted(stretches, key=lambda each: each.start))
        )

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        """Forward begins or goes on; backward begins, from the loss; anything else is set aside."""
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
                self._timer.begin_backward(
                    given[:1]
                    # the loss; what follows it, the optimizer, leads everywhere
                )

    def leave(self) -> None:
        """Back to what it was within."""
        self.drop()
        if self._begun:
            self._timer.set_aside()
            if self._phases[-1:] == ["forward"]:
                self._timer.resume_forward()

    def drop(self) -> None:
        """Leave the phase by an exception: no stamp is taken."""
        if self._phases:
            self._phases.pop()

    def _end_pass(self) -> None:
        if self._begun:
            self._begun = False
            self._passes.append(self._timer.end())
