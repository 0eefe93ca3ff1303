"""Count and time the same pass, for those who have but one.

Counting is what takes the time then, so it is stamped as well, around every operator, and left out; what torch needs to get to it cannot be
stamped and is taken off by a trial's figure. What remains is near the truth on a CPU, and `observer_ratio` says how far it was from it.
"""

import contextlib
import functools
import statistics
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lflops.collect.attribution.module_tracker import ModuleTracker
from lflops.collect.attribution.user_scopes import listening
from lflops.collect.count import Counting, Ignored
from lflops.collect.counting.accumulator import Extent
from lflops.collect.counting.dispatch_mode import CountingMode, OperatorCounter
from lflops.collect.counting.operators import Operator
from lflops.collect.inputs.batch import samples_and_tokens
from lflops.collect.inputs.tensors import device_of
from lflops.collect.timing.attach_times import with_times
from lflops.collect.timing.clock import Clock, HostClock, clock_of, seconds_of
from lflops.collect.timing.scale_to_clean import scale_to_clean
from lflops.collect.timing.stamps import ENTERS, NO_OVERHEAD, OPERATOR, HookOverhead, PassTimes, Stamp, pass_times
from lflops.collect.torch_private.autograd import NO_BACKWARD, backward_id
from lflops.collect.torch_private.dispatch_modes import pop_mode, push_mode, without_modes
from lflops.collect.torch_private.modules import remove_hook
from lflops.profile.model import Profile
from lflops.profile.records import ModulePhase, Step

__all__ = ["CountAndTime"]

MODULES, TRIALS = 50, 9
"""On how many modules, how often, it is tried what being watched costs them."""

ROOT, OUTSIDE = ModulePhase("", "forward"), ModulePhase("", "other")


class CountAndTime:
    """Counts and times whatever runs inside of a `with`. `profile` is there when it is left.

    Args:
        model: What is run.
        ignore: Names or classes of modules whose own work and time are left out.
        clock: What times it; `None` is that of the model's device.
        glue: What being watched costs beside what is stamped; `None` finds out.

    Raises:
        CountError: An argument is wrong, or times cannot be taken where the model is.
    """

    def __init__(self, model: nn.Module, *, ignore: Ignored = (), clock: Clock | None = None, glue: HookOverhead | None = None) -> None:
        """Touch nothing yet."""
        self._watch = _Watch(clock or clock_of(device_of([*model.parameters(), *model.buffers()])))
        self._glue = glue
        self._counting = Counting({"": model}, ignore=ignore, counter=partial(_WatchedCounter, self._watch))
        self._undo = contextlib.ExitStack()
        self._model: nn.Module | None = model
        self._batch: tuple[int | None, int | None] | None = None

    def __enter__(self) -> Self:
        """Begin."""
        watch = self._watch
        watch.home = threading.get_ident()
        if self._glue is None:
            self._glue = _glue() if isinstance(watch.clock, HostClock) else NO_OVERHEAD
        with contextlib.ExitStack() as undo:
            # One hook before the count's own, one behind: what lies between them is the observer's.
            undo.callback(remove_hook, register_module_forward_pre_hook(lambda *_: watch.observe(ENTERS)))
            undo.callback(remove_hook, register_module_forward_hook(lambda *_: watch.observe(), always_call=True))
            undo.enter_context(self._counting)
            undo.callback(remove_hook, register_module_forward_pre_hook(lambda *_: watch.go_on()))
            undo.callback(remove_hook, register_module_forward_hook(self._left, with_kwargs=True, always_call=True))
            undo.enter_context(listening(watch))
            self._undo = undo.pop_all()
        watch.go_on()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        self._watch.observe()
        self._undo.__exit__(kind, error, trace)
        self._model = self._watch.scopes = None  # what was watched may be freed while the profile is read

    @property
    def profile(self) -> Profile:
        """What was counted and timed.

        Raises:
            CountError: The `with` has not been left yet.
        """
        samples, tokens = self._batch or (None, None)
        profile = self._counting.profile
        run = replace(profile.run, samples_per_step=samples, tokens_per_step=tokens)
        return _joined(replace(profile, run=run), self.lap, self._glue or NO_OVERHEAD)

    def _left(self, module: nn.Module, *values: Any) -> None:
        """Go on behind a module; what the model itself was first called with says how much was in a batch."""
        if module is self._model and self._batch is None and len(values) == 3:  # without keyword arguments where forward has failed
            self._batch = samples_and_tokens(*values[:2])
        self._watch.go_on()

    @property
    def lap(self) -> PassTimes:
        """What was timed, glue and all."""
        return self._watch.lap()


class _Watch:
    """The stamps of one watched pass."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.scopes: ModuleTracker | None = None
        self.home = threading.get_ident()
        self._stamps: list[Stamp] = []
        self._backward = NO_BACKWARD  # in which somebody was last said to go on

    def observe(self, why: str = "") -> None:
        """From here on the observer runs."""
        if self.counts_here():
            self._leave_backward()
            self._stamps.append((self.clock.mark(), None, why))
            self._backward = NO_BACKWARD

    def go_on(self, place: ModulePhase | None = None) -> None:
        """From here on the place runs; `None` asks which one it is."""
        if self.counts_here() and self.scopes is not None:
            place = ModulePhase(*self.scopes.between()) if place is None else place
            self._stamps.append((self.clock.mark(), place, ""))
            self._backward = backward_id()

    def _leave_backward(self) -> None:
        """Nobody says when a backward pass ends: what followed its last operator was no part of it if by now it is over."""
        now = backward_id()
        if self._backward not in {NO_BACKWARD, now} and self.scopes is not None:
            mark, _, why = self._stamps.pop()
            self._stamps.append((mark, OUTSIDE if now > self._backward else ModulePhase(*self.scopes.between()), why))

    def counts_here(self) -> bool:
        """Two threads at once would cut each other's time short."""
        return threading.get_ident() == self.home or backward_id() != NO_BACKWARD

    def place(self) -> tuple[str, str]:
        """The count's to say."""
        return "", ""

    def enter(self, *_: Any) -> None:
        """A named part of the step begins; the count has heard of it before."""
        self.go_on()

    def leave(self, *_: Any) -> None:
        """And ends."""
        self.go_on()

    def lap(self) -> PassTimes:
        """What the stamps say."""
        self.clock.settle()
        return pass_times(self._stamps, self.clock)


class _WatchedCounter(OperatorCounter):
    """A counter whose modes stamp what they do."""

    def __init__(self, watch: _Watch, scopes: ModuleTracker, extent: Extent) -> None:
        super().__init__(scopes, extent)
        self.watch = watch
        watch.scopes = scopes

    def follow(self) -> Callable[[], None]:
        mode = _WatchedMode(self)
        push_mode(mode)
        return lambda: pop_mode(mode)


class _WatchedMode(CountingMode):
    """Stamps what counting an operator takes, and what the operator itself does."""

    def __init__(self, counter: _WatchedCounter) -> None:
        super().__init__(counter)
        self._watch = counter.watch

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._scopes.between() == ("", "other"):
            return function(*args, **(kwargs or {}))  # outside of the model: another model's, perhaps
        self._watch.observe(OPERATOR)
        try:
            return super().__torch_dispatch__(function, types, args, kwargs)
        finally:
            self._watch.go_on()

    def _run(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        return super()._run(operator, partial(self._timed, function), args, kwargs)

    def _timed(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._watch.go_on(ModulePhase(*self._scopes.current(args)))
        try:
            return function(*args, **kwargs)
        finally:
            self._watch.observe()


def _joined(profile: Profile, lap: PassTimes, glue: HookOverhead) -> Profile:
    ignored = frozenset(note.subject for note in profile.notes if note.code == "ignored")
    timed = with_times(profile, scale_to_clean([{"": lap}], {}, glue, ignored))
    phases = {phase: spread.median for phase in ("forward", "backward", "recompute") if (spread := timed.modules[""].work(phase).seconds)}
    update = sum(max(seconds - lap.glue(place, glue), 0.0) for place, seconds in lap.own.items() if place.phase == "optimizer")
    phases |= {"optimizer": update} if update else {}
    seconds = sum(phases.values())
    watched = seconds + lap.observer + sum(lap.glue(place, glue) for place in lap.own)
    run = profile.run
    step = Step(index=0, kind="counted", seconds=seconds, phases=phases, samples=run.samples_per_step, tokens=run.tokens_per_step)
    return replace(timed, run=replace(run, kind="measure", observer_ratio=watched / seconds if seconds else None), steps=(step,))


@functools.cache
def _glue() -> HookOverhead:
    """What torch takes to get to hooks and modes and back: tried on modules that do nothing, and on modules that do little."""
    with without_modes(), torch.inference_mode(mode=False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _tried()


def _tried() -> HookOverhead:
    weight = torch.ones(8, 8, device="cpu")
    idle, small = (nn.Sequential(*(_Small(each) for _ in range(MODULES))) for each in (None, weight))
    x, clock = weight[:1], HostClock()
    found = []
    for _ in range(TRIALS):
        clean, lap = seconds_of(clock, partial(idle, x)), _watched(idle, x, clock)
        inside = sum(lap.own.values()) - lap.own[ROOT] - clean
        outside = lap.own[ROOT]
        clean, lap = seconds_of(clock, partial(small, x)), _watched(small, x, clock)
        operators = sum(lap.own.values()) - clean - inside - outside
        found.append((inside / MODULES, outside / MODULES, operators / sum(lap.operators.values())))
    inside, outside, operator = (max(statistics.median(column), 0.0) for column in zip(*found, strict=True))
    return HookOverhead(inside=inside, outside=outside, operator=operator)


class _Small(nn.Module):
    """One product, or nothing to do. No layer of torch's: making one would draw random numbers."""

    def __init__(self, weight: Tensor | None) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x if self.weight is None else nn.functional.linear(x, self.weight)


def _watched(model: nn.Module, x: Tensor, clock: HostClock) -> PassTimes:
    watching = CountAndTime(model, clock=clock, glue=NO_OVERHEAD)
    with watching:
        model(x)
    return watching.lap
