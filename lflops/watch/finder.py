"""Finds the loop that an optimizer steps in, and watches it: a Trainer of transformers by its callback, any other loop by torch's hooks.

    step 1    ends: the modules that hold the optimizer's parameters are found, and hooked for one step.
    step 2    ends: those that were called are the models. A monitor begins, with two steps that took no time.
    step 3    is the first that is watched.

Nothing here keeps a model or an optimizer alive. One loop is watched at a time; it ends with the process, or when others step in its place.
"""

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lflops.boundary import Boundary, Undo
from lflops.collect.attribution.hooks import hook_model, hook_optimizers
from lflops.collect.torch_private.data_loader import hear_fetches
from lflops.collect.torch_private.modules import call_last, is_called_last
from lflops.collect.torch_private.self_check import check_data_loader
from lflops.loops.monitor import Loop, LoopMonitor
from lflops.loops.phases import RUNNING, LoopPhases
from lflops.profile.series import gathered
from lflops.session.inputs.messages import warn
from lflops.session.inputs.settings import Settings, settings_of
from lflops.session.run import OPEN
from lflops.watch import entry
from lflops.watch.entry import VARIABLE, settings_line


class FoundLoop:
    """A loop that calls these models, watched from the end of a step on, of which it has made `steps`."""

    def __init__(self, models: Sequence[nn.Module], steps: int, *, log: Callable[[str], None], settings: dict[str, Any]) -> None:
        alive: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
        for each in models:
            name = type(each).__name__ if len(models) > 1 else ""
            alive[name if name not in alive else f"{name}{len(alive)}"] = each
        self._phases = FoundPhases(self._validates)
        loop = Loop(alive, (), engine=None, loggers=(), accumulation=1, log_every=0, steps=None, log=log)
        self._monitor = LoopMonitor(loop, Settings(**settings), self._phases)
        self._phases.epoch_ends = self._monitor.epoch_ends
        self._validation = contextlib.ExitStack()
        self._monitor.__enter__()
        for _ in range(steps + 1):  # those before have no time
            self._monitor.next_step()
            self._monitor.mark("cold")

    def step_ends(self) -> None:
        self._monitor.next_step(self._phases.trained())

    def close(self, error: BaseException | None) -> None:
        self._validation.close()
        self._monitor.__exit__(None if error is None else type(error), error, None)

    def _validates(self, *, begins: bool) -> None:
        self._validation.close()
        if begins:
            self._validation.enter_context(self._monitor.stage("validate"))


class FoundPhases(LoopPhases):
    """The phases of a loop that tells nothing itself.

    A model in eval mode that is called without gradients is validated, until it is trained again, its loader is asked, or another one ends.
    If no call is heard: from where another loader is asked for a batch without gradients, until one is with them, or backward begins.
    """

    epoch_ends: Callable[[], None]  # is called when the training's loader is at its end

    def __init__(self, validates: Callable[..., None]) -> None:
        super().__init__()
        self._batch: Any = None  # the last one that was fetched for this step
        self._validates = validates  # is called where a validation begins, and where it ends
        self._is_validating = self._was_fetched = False  # and whether that was seen by a batch
        self._last: ref[Any] | None = None  # the loader's iterator that fetched last
        self._trains: ref[Any] | None = None  # the one that had fetched last when the last step ended

    def install(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], boundary: Boundary, undo: Undo) -> None:
        """Hook the models, all optimizers and all data loaders."""
        check_data_loader()
        super().install(models, optimizers, boundary, undo)
        guard = boundary.guard
        hook_optimizers(undo, guard(self._optimizer_begins), guard(partial(self.leave_last, "optimizer")))
        hear_fetches(undo, guard(self._fetch_begins), guard(self._fetch_ends))

    def trained(self) -> Any:
        """A step has ended. Returns its batch; `None` without one."""
        batch, self._batch, self._trains = self._batch, None, self._last
        return batch

    def _model_is_called(self, model: nn.Module, *_: object) -> None:
        is_validated = not torch.is_grad_enabled() and (self._was_fetched or not model.training)
        if is_validated is not self._is_validating:
            self._turn(begins=is_validated)
        super()._model_is_called(model)

    def _fetch_begins(self, iterator: Any) -> int | None:
        if threading.get_ident() != self._thread or self.depth_of("data") is not None:
            return None
        learns, trains = torch.is_grad_enabled(), self._trains is not None and self._trains() is iterator
        begins = bool(self._expected) and not (self._is_validating or trains or learns or self._trains is None)
        if begins or (self._is_validating and (trains or (learns and self._was_fetched))):
            self._turn(begins=begins, was_fetched=True)
        return self.begin("data", RUNNING)

    def _backward_begins(self, losses: Sequence[Any]) -> int | None:
        if self._was_fetched:
            self._turn(begins=False)
        return super()._backward_begins(losses)

    def _turn(self, *, begins: bool, was_fetched: bool = False) -> None:
        self._is_validating, self._was_fetched = begins, begins and was_fetched
        self._validates(begins=begins)

    def _fetch_ends(self, around: int | None, iterator: Any, batch: Any) -> None:
        if around is None:
            return
        self.leave(around)
        if isinstance(batch, StopIteration):
            if self._is_validating:  # what follows, as to save a checkpoint, is no part of it
                self._turn(begins=False)
            if self._trains is not None and self._trains() in {None, iterator}:  # or the training's is gone
                self.epoch_ends()
        elif not (self._is_validating or isinstance(batch, BaseException)):
            self._last, self._batch = ref(iterator), batch


DEEPEST = 4  # levels below the outermost module at which those are looked for that the loop calls
IDLE = 32  # steps of other optimizers after which a loop whose optimizer makes none is over

_tell = partial(print, file=sys.stderr, flush=True)  # what a script prints itself may be read by another program


class Finder:
    """What is known of the loops of this process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.is_off = False
        self._optimizer: ref[Optimizer] | None = None  # whose steps are those of the loop
        self._steps_of_others = 0
        self._steps = 0  # that were made before the loop is watched
        self._candidates: list[ref[nn.Module]] = []
        self._called: list[ref[nn.Module]] = []
        self._looking = Undo()
        self._watched: Any = None  # a `FoundLoop`, or the callback of a Trainer
        atexit.register(self.close)

    def close(self, error: BaseException | None = None) -> None:
        """The loop is over, or the process: then by an error that Python has shown, if there was one."""
        watched, self._watched, self._optimizer = self._watched, None, None
        self._looking.close()
        if watched is not None and self.process == os.getpid():
            with suppress(Exception):
                watched.close(error or getattr(sys, "last_value", None))

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step."""
        known = None if self._optimizer is None else self._optimizer()
        if known is optimizer:
            self._steps_of_others = 0
            if self._watched is None:
                self._look_again()
            elif len(OPEN) > 1:  # the script has begun to watch for itself
                self.close()
            else:
                self._watched.step_ends()
        elif known is None or self._steps_of_others == IDLE:
            if self._optimizer is not None:
                self.close()
            self._look(optimizer)
        else:
            self._steps_of_others += 1

    def _look(self, optimizer: Optimizer) -> None:
        if OPEN:
            return
        self._watched = None
        if "transformers.trainer" in sys.modules:
            from lflops.huggingface import FlopsCallback, running_trainer

            if (trainer := running_trainer()) is not None:
                self._watched = FlopsCallback(log=_tell, **settings_of(settings_line() or ""))
                self._watched.join(trainer)
                return
        self._optimizer, self._steps, self._steps_of_others = ref(optimizer), 1, 0
        self._expect(modules_of(optimizer))

    def _look_again(self) -> None:
        self._looking.close()
        self._steps += 1
        candidates, called = (_alive(each) for each in (self._candidates, self._called))
        children = [child for each in candidates for child in each.children()]
        if not called and children and self._steps < DEEPEST:
            self._expect(children)
            return
        self._watched = FoundLoop(called or candidates, self._steps, log=_tell, settings=settings_of(settings_line() or ""))

    def _expect(self, modules: Iterable[nn.Module]) -> None:
        """Notice which of these are called for a training step."""
        self._called, self._candidates = [], [ref(each) for each in modules]
        for each in _alive(self._candidates):
            hook_model(self._looking, each, self._is_called)

    def _is_called(self, module: nn.Module, *_: object) -> None:
        if torch.is_grad_enabled() and all(each() is not module for each in self._called):
            self._called.append(ref(module))


def step_ends(optimizer: Optimizer) -> None:
    """An optimizer has made a step. What goes wrong here ends the watching, and nothing else."""
    global _finder  # noqa: PLW0603 - one process, one finder
    if _finder.process != os.getpid():  # a fork begins anew
        _finder = Finder()
    # To begin, to end and to count a step adds and removes hooks like the one that calls this. Torch would fail in any but the last one.
    if _finder.is_off or not is_called_last(entry.step_ends):
        return
    try:
        _finder.step_ends(optimizer)
    except Exception as error:  # noqa: BLE001 - it is the training's step
        _finder.is_off = True
        _finder.close(error)
        warn(f"{VARIABLE}={os.environ.get(VARIABLE)!r}: this training is not watched: {error}")


def modules_of(optimizer: Optimizer) -> list[nn.Module]:
    """The outermost modules that hold parameters of an optimizer, of all modules that there are."""
    wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    above = gathered((id(child), each) for each in modules for child in each.children())
    reached = {id(each): each for each in modules if any(id(own) in wanted for own in each.parameters(recurse=False))}
    to_climb = [*reached.values()]
    while to_climb:
        found = [each for each in above.get(id(to_climb.pop()), ()) if id(each) not in reached]
        reached.update((id(each), each) for each in found)
        to_climb += found
    return [each for number, each in reached.items() if number not in above]


def _alive(modules: Iterable["ref[nn.Module]"]) -> list[nn.Module]:
    return [module for each in modules if (module := each()) is not None]


def _step_begins(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not is_called_last(entry.step_ends):
        call_last(entry.step_ends)


_finder = Finder()
register_optimizer_step_pre_hook(_step_begins)
