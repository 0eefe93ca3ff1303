"""One fit: which batch is counted, which steps are kept, when a window is told of, and how all of it ends."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from msgspec.structs import replace
from torch.optim.optimizer import register_optimizer_step_post_hook

from lflops.callback.bases import say
from lflops.callback.counted import CountedBatch
from lflops.callback.curve import Curve
from lflops.callback.cycle import added
from lflops.callback.facts import check_same_model, data_parallel_size, facts_of, is_compiled_whole, logged_step, steps_here
from lflops.callback.hooked import HookedStep
from lflops.callback.loggers import Outlets, scalars
from lflops.callback.planning import planned
from lflops.callback.settings import Settings
from lflops.callback.steps import Lap, Steps, signature
from lflops.callback.window import Window
from lflops.callback.wraps import listen
from lflops.collect.calibrate import hardware_of
from lflops.collect.counting.mode import Extent
from lflops.collect.modules import ModuleTree
from lflops.collect.passes import Counting
from lflops.collect.timing.clock import Clock, HostClock, StreamClock
from lflops.collect.timing.phases import Phases
from lflops.profile import Note, Profile

__all__ = ["Session"]


class Session:
    """What a monitor is while a Trainer fits.

    Args:
        settings: What is asked for.
        trainer: The one that fits.
        pl_module: What it fits.
        outlets: Where results go; `None` on all processes but the main one.
        profiles: The windows that are closed are added to it.

    Attributes:
        over: Whether there is nothing left to do.
    """

    def __init__(self, settings: Settings, trainer: Any, pl_module: Any, outlets: Outlets | None, profiles: list[Profile]) -> None:
        """Begin at the start of training."""
        self.over = False
        self._profiles = profiles
        self._settings = settings
        self._trainer = trainer
        self._module = pl_module
        self._outlets = outlets
        device = trainer.strategy.root_device
        self._hardware = hardware_of(settings.hardware, device)
        Counting({"": pl_module}, ignore=settings.ignore_modules)  # a wrong name is said now
        if isinstance(settings.count, Profile):
            check_same_model(settings.count, pl_module)
        self._clock: Clock = StreamClock() if device.type == "cuda" else HostClock()
        self._plan, self._notes = planned(settings.schedule, trainer, pl_module)
        self._place = self._plan.place(0)
        self._idle_until = self._plan.waits_until(0)
        self._window = Window(0, 0)
        self._waiting: list[Window] = []
        self._in_batch = False
        self._counting: CountedBatch | None = None
        self._tree = ModuleTree({"": pl_module})
        self._hooked: HookedStep | None = None
        self._cycle: list[Profile] | None = None
        self._counted: dict[Hashable, Profile] = {}
        self._nothing_counted: Profile | None = None
        self._last_batch = 0
        self._at = logged_step(trainer)
        tracked = settings.track and outlets is not None and trainer.loggers and trainer.log_every_n_steps
        phases = Phases(self._clock)
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        updating = frozenset({"backward", "optimizer"}) if pl_module.automatic_optimization else frozenset()
        self._steps = Steps(phases, settings.units, updating=updating, scaled=scaled)
        self._curve = Curve(self._steps.seconds, data_parallel_size(trainer)) if tracked else None
        self._updates = register_optimizer_step_post_hook(self._steps.update) if scaled else None
        self._unwrap: Callable[[], None] | None = listen(trainer, phases)

    def batch_begins(self, batch: Any) -> None:
        """Count it, if its step is the one to count."""
        if self._in_batch:
            self._abandon()
        self._in_batch = True
        if not self._steps.shapes:
            self._cycle = [] if self._is_to_be_counted(batch) else None
            if self._place.phase == "active":
                self._hooked = HookedStep(self._trainer, self._tree, self._clock)
        if self._cycle is not None:
            self._counting = CountedBatch(self._trainer, self._module, batch, self._settings.ignore_modules)

    def batch_ends(self, batch: Any) -> None:
        """Take note of it, and of the step that may end with it."""
        self._in_batch = False
        profile = self._stop_counting()
        shapes = self._steps.batch(batch)
        self._last_batch = id(batch)
        if profile is not None and self._cycle is not None:
            self._cycle.append(profile)
            self._learn(shapes, profile)
        if not steps_here(self._trainer, self._module):
            return
        if self._cycle:
            self._window.counted = self._counted[self._steps.shapes[0]] = self._with_facts(added(self._cycle))
        self._at = logged_step(self._trainer)
        self._steps.end(self._at, counted=bool(self._cycle), hooked=self._unhook())
        self._cycle = None
        self._advance()

    def mark(self, mark: str) -> None:
        """Note what else happens in this step."""
        self._steps.mark(mark)

    def close(self, error: BaseException | None = None) -> None:
        """End, however the fit ends: tell of the windows that have something to tell, and leave no trace.

        After an error nothing waits for the device, or for anybody.
        """
        if self.over:
            return
        self.over = True
        unfinished = self._stop_counting(error)
        if error is not None:
            self._notes.append(Note(code="ended_early", subject=type(error).__name__, values={}))
            if self._window.counted is None and unfinished is not None:
                self._window.counted = self._with_facts(unfinished)
        else:
            self._clock.settle()
        self.detach()
        for lap in self._steps.read():
            self._take(lap)
        cut_short = [] if self._window.complete or not self._window.worth_telling else [self._window]
        told: dict[str, float] = {}
        for window in (*self._waiting, *cut_short):
            told |= self._tell(window, failed=error is not None)
        if self._outlets is not None:
            self._outlets.scalars(told, self._at)

    def detach(self) -> None:
        """Take off whatever is on."""
        self._stop_counting()
        self._unhook()
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None
            self._steps.tapped = False
        if self._updates is not None:
            self._updates.remove()
            self._updates = None

    def _is_to_be_counted(self, batch: Any) -> bool:
        if self._place.phase != "count" or self._settings.count is not True:
            return False
        # Where training_step takes the iterator, what is at hand is the last batch.
        known = None if id(batch) == self._last_batch else self._counted.get(signature(batch))
        self._window.counted = known
        return known is None

    def _stop_counting(self, error: BaseException | None = None) -> Profile | None:
        """What was counted since the batch began; nothing where it was not being counted."""
        counting, self._counting = self._counting, None
        return None if counting is None else counting.stop(error)

    def _unhook(self) -> HookedStep | None:
        """What the hooks of this step have stamped; nothing where it had none."""
        hooked, self._hooked = self._hooked, None
        if hooked is not None:
            hooked.stop()
        return hooked

    def _abandon(self) -> None:
        """The last batch was left before it was over, and the fit goes on: count another step."""
        self._stop_counting()
        self._unhook()
        self._cycle = None
        self._steps.tear()

    def _with_facts(self, profile: Profile) -> Profile:
        notes = profile.notes
        if is_compiled_whole(self._module) and all(note.code != "compiled_ran_eager" for note in notes) and profile.cells:
            notes = (*notes, Note(code="compiled_ran_eager", subject="1", values={}))
        return replace(profile, run=facts_of(profile, self._trainer, self._module, self._hardware), notes=notes)

    def _learn(self, shapes: Hashable, profile: Profile) -> None:
        if self._curve is not None:
            self._curve.learn(shapes, self._with_facts(profile))

    def _advance(self) -> None:
        """A step is over: read those that can be read, and do what is due. In most steps nothing is."""
        log = self._curve is not None and not (self._at + 1) % self._trainer.log_every_n_steps
        if self._steps.ordinal < self._idle_until and not self._waiting and not log:
            return
        for lap in self._steps.read():
            self._take(lap)
        busy = self._move_on()
        told: dict[str, float] = {}
        ready = [window for window in self._waiting if window.ready]
        for window in ready:
            self._waiting.remove(window)
            told |= self._tell(window, failed=False)
        if self._unwrap is not None and self._window.complete and not self._waiting:
            self.detach()
            self.over = self._curve is None
        if log and self._curve is not None:
            told = self._curve.point() | told
        if told and self._outlets is not None:
            self._outlets.scalars(told, self._at)
        if busy or ready or told:
            self._steps.resume()

    def _move_on(self) -> bool:
        """Go to the next window where the last is over, and say where one opens. Returns whether anything was done."""
        self._place = phase, number = self._plan.place(self._steps.ordinal)
        self._idle_until = self._plan.waits_until(self._steps.ordinal)
        if number != self._window.number and not self._window.complete:
            self._window.end(self._steps.ordinal)
            self._waiting.append(self._window)
            if phase != "over":
                self._window = Window(number, self._steps.ordinal)
        if phase in {"wait", "over"} or self._window.opened:
            return False
        self._window.opened = True
        say(f"lflops: window {number} opens at step {self._at + 1}")
        return True

    def _take(self, lap: Lap) -> None:
        for window in self._waiting:
            window.take(lap)
        if not self._window.complete:
            self._window.take(lap)
        if self._curve is not None:
            self._curve.take(lap)

    def _tell(self, window: Window, *, failed: bool) -> dict[str, float]:
        """Make a window's profile, and hand it on. Returns its figures for the loggers."""
        if self._outlets is None:
            return {}
        step = self._at
        counted = window.counted or self._uncounted()
        profile = window.profile(counted, step, self._notes, of=self._steps.step, clock=self._clock, failed=failed)
        self._profiles.append(profile)
        text, files = self._outlets.window(profile, step)
        written = f": {', '.join(files)}" if files else ""
        say(f"lflops: window {window.number} closed at step {step}{' before its end' if profile.run.partial else ''}{written}\n{text}")
        return scalars(profile)

    def _uncounted(self) -> Profile:
        """The profile of a run that was not counted here: what was counted elsewhere, or nothing at all."""
        if isinstance(self._settings.count, Profile):
            return self._with_facts(self._settings.count)
        if self._nothing_counted is None:
            with torch.no_grad(), Counting({"": self._module}, extent=Extent(traffic=False, memory=False)) as nothing:
                pass
            profile = self._with_facts(nothing.profile)
            notes = (note for note in profile.notes if note.code != "compiled_ran_eager")
            self._nothing_counted = replace(profile, notes=(*notes, Note(code="not_counted", subject="", values={})))
        return self._nothing_counted
