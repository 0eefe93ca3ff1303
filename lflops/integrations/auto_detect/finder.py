"""Detect the training loop that calls an optimizer, and monitor it.

A transformers Trainer is monitored with `FlopsCallback`, and any other loop with torch's hooks.

    step 1    At its end, the modules that hold the optimizer's parameters are found and hooked.
    step 2    At its end, it is known which of these modules were called: they are the models. The
              monitor begins. The first two steps get numbers, but their durations are unknown.
    step 3    The first monitored step.

This module keeps no model and no optimizer alive. Only one loop is monitored at a time. Its
monitoring ends when the process ends, or when only optimizers of other loops make steps.
"""

import atexit
import gc
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import RLock, get_ident
from typing import Any
from weakref import ref

from torch import is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lflops.attribution.hooks import hook_models
from lflops.error_guard import CleanupStack
from lflops.integrations.auto_detect import entry
from lflops.integrations.auto_detect.detected_loop import AutoDetectedLoop
from lflops.integrations.auto_detect.entry import VARIABLE, settings_line
from lflops.monitoring.inputs.messages import warn
from lflops.monitoring.inputs.settings import settings_of
from lflops.monitoring.run import OPEN, MonitoredRun
from lflops.torch_private.modules import call_last, is_called_last, self_parts

DEEPEST = 4
"""Number of the step at which the search for the models of a loop ends.

If a step has called none of the hooked modules, their children are hooked for the next step. At the
step with this number, the hooked modules are treated as the models even if they were not called.
"""

IDLE = 32
"""A loop is over if other optimizers make this many steps while its own optimizer makes none."""

# Messages go to standard error, because another program may read standard output.
_tell = partial(print, file=sys.stderr, flush=True)


class Finder:
    """Detects and monitors the training loops of this process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._is_off = False
        self._lock = RLock()
        # Thread of the loop. While the loop is monitored, steps in other threads are ignored.
        self._home = get_ident()
        # the optimizer that defines the steps of the loop
        self._optimizer: ref[Optimizer] | None = None
        self._steps_of_others = 0
        # number of steps of the loop before it is monitored
        self._steps = 0
        # The value of `MonitoredRun.begun` as long as the script itself begins no run. Comparing
        # the two numbers is faster than reading `OPEN`.
        self._begun = 0
        self._outermost: list[ref[nn.Module]] = []
        self._candidates: list[ref[nn.Module]] = []
        self._called: list[ref[nn.Module]] = []
        self._looking = CleanupStack()
        # an `AutoDetectedLoop`, or the callback of a Trainer
        self._watched: Any = None
        atexit.register(self.close)

    def close(self, error: BaseException | None = None) -> None:
        """End the monitoring, because the loop or the process ends.

        Args:
            error: The exception that ended the run. If it is `None`, the last exception that Python
                has displayed is used, if there is one.
        """
        watched = self._watched
        self._watched = None
        self._optimizer = None
        self._looking.close()
        if watched is not None and self._process == os.getpid():
            with suppress(Exception):
                watched.close(error or getattr(sys, "last_value", None))

    def step_ends(self, optimizer: Optimizer) -> None:
        """Handle the end of an optimizer's step.

        An error in lflops ends the monitoring, but not the training run.
        """
        known = None
        if self._optimizer is not None:
            known = self._optimizer()
        is_elsewhere = known is not None and self._watched is not None and get_ident() != self._home
        # The code below adds and removes hooks of the same kind as the hook that runs this method.
        # Torch fails if any hook except the last one does so.
        if self._is_off or is_elsewhere or not is_called_last(entry.step_ends):
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            if known is optimizer:
                self._loop_steps()
            elif known is None or self._steps_of_others == IDLE:
                if self._optimizer is not None:
                    self.close()
                self._look(optimizer)
            else:
                self._steps_of_others += 1
                if self._watched is not None:
                    self._watched.other_step_ends()
        except Exception as error:  # noqa: BLE001 - this is a step of the training run
            self._is_off = True
            self.close(error)
            asked = os.environ.get(VARIABLE)
            warn(
                f"{VARIABLE}={asked!r}: this training run is not monitored because of an error: "
                f"{error}"
            )
        finally:
            self._lock.release()

    def _loop_steps(self) -> None:
        self._steps_of_others = 0
        if self._watched is None:
            self._look_again()
        elif MonitoredRun.begun != self._begun and len(OPEN) > 1:
            # The script has begun its own monitoring.
            self.close()
        else:
            self._watched.step_ends()

    def _look(self, optimizer: Optimizer) -> None:
        """Begin to detect the loop that calls an optimizer."""
        if OPEN:
            return
        self._watched = None
        if "transformers.trainer" in sys.modules:
            from lflops.integrations.huggingface import FlopsCallback, running_trainer

            trainer = running_trainer()
            if trainer is not None:
                self._watched = FlopsCallback(log=_tell, **settings_of(settings_line() or ""))
                self._watched.join(trainer)
                return
        self._optimizer = ref(optimizer)
        self._home = get_ident()
        self._begun = MonitoredRun.begun + 1
        self._steps = 1
        self._steps_of_others = 0
        outermost = modules_of(optimizer)
        self._outermost = [ref(each) for each in outermost]
        self._expect(outermost)

    def _look_again(self) -> None:
        """Monitor the modules that the last step called.

        If it called none of the hooked modules, hook their children and wait for another step.
        """
        self._looking.close()
        self._steps += 1
        candidates = _alive(self._candidates)
        called = _alive(self._called)
        if not called and self._steps < DEEPEST:
            children: list[nn.Module] = []
            for module in candidates:
                children += module.children()
            if children:
                self._expect(children)
                return
        self._watched = AutoDetectedLoop(
            called or candidates,
            self._steps,
            owner=_owner_of(called, _alive(self._outermost)),
            log=_tell,
            settings=settings_of(settings_line() or ""),
        )

    def _expect(self, modules: Iterable[nn.Module]) -> None:
        """Hook the given modules, to detect which of them the next step calls."""
        self._called = []
        self._candidates = [ref(each) for each in modules]
        hook_models(self._looking, _alive(self._candidates), self._is_called)

    def _is_called(self, module: nn.Module, *_: object) -> None:
        if is_compiling() or not is_grad_enabled():
            return
        if all(each() is not module for each in self._called):
            self._called.append(ref(module))


def modules_of(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost modules of this process that contain parameters of an optimizer."""
    wanted = set[int]()
    for group in optimizer.param_groups:
        wanted.update(id(parameter) for parameter in group["params"])
    above: dict[int, list[nn.Module]] = {}
    reached: dict[int, nn.Module] = {}
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):
            continue
        children, parameters = self_parts(module)
        for child in children:
            above.setdefault(id(child), []).append(module)
        if any(id(parameter) in wanted for parameter in parameters):
            reached[id(module)] = module
    # Add all modules that contain these modules, up to the outermost modules.
    to_climb = list(reached)
    while to_climb:
        for module in above.get(to_climb.pop(), ()):
            if id(module) not in reached:
                reached[id(module)] = module
                to_climb.append(id(module))
    return [module for number, module in reached.items() if number not in above]


def _owner_of(models: Sequence[nn.Module], outermost: Iterable[nn.Module]) -> nn.Module | None:
    """Return the outermost module that contains all models, or `None` if it is one of them."""
    wanted = {id(model) for model in models}
    for module in outermost:
        if wanted and wanted <= {id(each) for each in module.modules()}:
            return None if id(module) in wanted else module
    return None


def _alive(modules: Iterable["ref[nn.Module]"]) -> list[nn.Module]:
    alive = []
    for each in modules:
        module = each()
        if module is not None:
            alive.append(module)
    return alive


def _step_begins(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not is_compiling() and not is_called_last(entry.step_ends):
        call_last(entry.step_ends)


def _begin_anew() -> None:
    """Create a new finder in a forked process.

    The loop that the parent process monitors is not monitored in the forked process.
    """
    global current  # noqa: PLW0603 - each process has one finder
    watched = current._watched  # noqa: SLF001 - of the parent process
    if isinstance(watched, AutoDetectedLoop):
        watched.phases.deferred.clear()
    current = Finder()


current = Finder()
os.register_at_fork(after_in_child=_begin_anew)
register_optimizer_step_pre_hook(_step_begins)
