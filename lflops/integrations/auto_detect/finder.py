"""Finds the loop that an optimizer steps in, and watches it.

A Trainer of transformers by its callback, any other loop by torch's hooks.

    step 1    ends: the modules that hold the optimizer's parameters are found, and hooked for one step.
    step 2    ends: those that were called are the models. A monitor begins, with two steps that took no time.
    step 3    is the first that is watched.

Nothing here keeps a model or an optimizer alive. One loop is watched at a time; it ends with the
process, or when others step in its place.
"""

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import RLock, get_ident
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lflops.attribution.hooks import hook_models, hook_optimizers
from lflops.error_guard import CleanupStack, ErrorGuard
from lflops.integrations.auto_detect import entry
from lflops.integrations.auto_detect.entry import VARIABLE, settings_line
from lflops.integrations.loops.monitor import Loop, LoopMonitor
from lflops.integrations.loops.phases import RUNNING, LoopPhases
from lflops.monitoring.inputs.messages import warn
from lflops.monitoring.inputs.settings import Settings, settings_of
from lflops.monitoring.run import OPEN, MonitoredRun, RunLedger
from lflops.profile.series import gathered
from lflops.torch_private.autograd import NO_BACKWARD, backward_id
from lflops.torch_private.data_loader import hear_fetches
from lflops.torch_private.modules import call_last, is_called_last, self_parts
from lflops.torch_private.self_check import check_data_loader


class AutoDetectedLoop(LoopMonitor):
    """A loop that calls these models, watched from the end of a step on, of which it has made `steps`."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        steps: int,
        *,
        log: Callable[[str], None],
        settings: dict[str, Any],
    ) -> None:
        alive: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
        for each in models:
            name = type(each).__name__ if len(models) > 1 else ""
            alive[name if name not in alive else f"{name}{len(alive)}"] = each
        self.phases = AutoDetectedPhases(self._validates, self.epoch_ends)
        loop = Loop(
            alive, (), engine=None, loggers=(), accumulation=1, log_every=0, steps=None, log=log
        )
        super().__init__(loop, Settings(**settings), self.phases)
        # where steps are left to its thread
        self._ledger: RunLedger | None = None
        self._validation = contextlib.ExitStack()
        self._shapes: dict[
            Hashable, Hashable
            # those of the batches so far, so that equal ones are one object
        ] = {}
        self.__enter__()
        self._batch_begins(None)
        # those before have no time
        for _ in range(steps):
            self.mark("warmup")
            self._next_step(None)
        self.mark("warmup")

    def step_ends(self) -> None:
        """A step is over, and the next one begins.

        While nothing but the ledger listens, its thread sees to that.
        """
        phases, ledger = self.phases, self._ledger
        batch, phases.batch, phases.home, phases.is_fetching = (
            phases.batch,
            None,
            get_ident(),
            False,
        )
        phases.trains_by = phases.fetches_by
        if ledger is not None and ledger.requests.due is None and phases.tape.runs:
            self._steps_done += 1
            shapes = ledger.reader.shapes(batch)
            if len(self._shapes) < MOST_SHAPES:
                shapes = self._shapes.setdefault(shapes, shapes)
            phases.tape.note(
                AutoDetectedLoop._passes,
                self,
                ledger,
                shapes,
                *ledger.recorder.read(self._steps_done),
            )
        else:
            with phases.boundary:
                phases.tape.stop()
            phases.tape.raise_error()
            self._next_step(batch)

    def other_step_ends(self) -> None:
        """An optimizer has made a step that ends none of the loop's."""
        self.phases.tape.note(AutoDetectedPhases.leave_last, self.phases, "optimizer")

    def close(self, error: BaseException | None) -> None:
        self.phases.tape.stop()
        self._validation.close()
        self.__exit__(None if error is None else type(error), error, None)

    def _next_step(self, batch: Any) -> None:
        self._batch_ends(batch)
        self._batch_begins(None)
        self._ledger = self._run.lone_ledger
        self.phases.tape.runs = self._ledger is not None

    def _passes(self, ledger: RunLedger, shapes: Hashable, *read: Any) -> None:
        self.phases.end_step()
        ledger.step_ends(read, shapes, touched=False)
        self.phases.begin_step()

    def _validates(self, *, begins: bool, loading: int = 0) -> None:
        self._validation.close()
        if begins:
            self._validation.enter_context(self.stage("validate"))
            if loading:
                self._run.belongs(loading, "data", "validation")


class AutoDetectedPhases(LoopPhases):
    """The phases of a loop that tells nothing itself.

    What happens is noted on the tape, with what is known only then.

    A model in eval mode that is called without gradients is validated, until it is trained again,
    its loader is asked, or another one ends. If no call is heard: from where another loader is
    asked for a batch without gradients, until one is with them, or backward begins.
    """

    def __init__(self, validates: Callable[..., None], epoch_ends: Callable[[], None]) -> None:
        super().__init__()
        # the last one that was fetched with gradients
        self.batch: Any = None
        # the thread that trains
        self.home = get_ident()
        self.is_fetching = False
        # the loader's iterator that gave the batch
        self.fetches_by: ref[Any] | None = None
        # the one that gave the last step's
        self.trains_by: ref[Any] | None = None
        # is called where a validation begins, and where it ends
        self._validates = validates
        # when the training's loader is at its end
        self._epoch_ends = epoch_ends
        # and whether that was seen by a batch
        self._is_validating = self._was_fetched = False
        # whether the training's loader is at its end
        self._is_between = False
        # the loader's iterator that fetched last
        self._last: ref[Any] | None = None
        self._begun = self._took = (
            # when it began to, and how long it took; 0 if a step has ended since
            0
        )
        self._trains: ref[Any] | None = (
            # the one that had fetched last when the last step ended
            None
        )

    def install(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        boundary: ErrorGuard,
        undo: CleanupStack,
    ) -> None:
        """Hook the models, all optimizers and all data loaders.

        The ends of optimizers' steps are heard by the finder.
        """
        check_data_loader()
        super().install(models, optimizers, boundary, undo)
        hook_optimizers(
            undo,
            boundary.guard(lambda *_: self.tape.note(AutoDetectedPhases._optimizer_begins, self)),
            None,
        )
        hear_fetches(undo, boundary.guard(self._hear_fetch), boundary.guard(self._hear_batch))

    def _model_is_called(self, *given: Any) -> None:
        self.tape.note(AutoDetectedPhases._called, self, is_grad_enabled(), given[0].training)

    def _hear_fetch(self, iterator: Any) -> int | None:
        if self.is_fetching or get_ident() != self.home:
            return None
        self.is_fetching = True
        self.tape.note(AutoDetectedPhases._fetch_begins, self, is_grad_enabled(), ref(iterator))
        return 0

    def _hear_batch(self, begun: int | None, iterator: Any, batch: Any) -> None:
        if begun is None:
            return
        self.is_fetching, failed = False, isinstance(batch, BaseException)
        if is_grad_enabled() and not failed:
            self.batch, self.fetches_by = batch, ref(iterator)
        is_gone = failed and self.trains_by is not None and self.trains_by() is None
        self.tape.note(
            AutoDetectedPhases._fetch_ends,
            self,
            None if is_gone else ref(iterator),
            type(batch) if failed else None,
        )

    def _backward_begins(self, losses: Sequence[Any]) -> int | None:
        if backward_id() != NO_BACKWARD or get_ident() != self.home:
            return None
        if self.awaits_others:
            self.hear_wait(*losses)
        self.tape.note(AutoDetectedPhases._learns, self, () if self.tape.runs else (*losses,))
        return 0

    def _backward_ends(self, _around: int) -> None:
        self.tape.note(AutoDetectedPhases.leave_last, self, "backward")

    def end_step(self, *, failed: bool = False) -> None:
        """The loader that has fetched last is the training's."""
        self._trains, self._took = self._last, 0
        super().end_step(failed=failed)

    def _called(self, learns: bool, trains: bool) -> None:  # noqa: FBT001 - one by one, as they are noted
        is_validated = not learns and (self._was_fetched or not trains)
        if is_validated is not self._is_validating:
            self._turn(begins=is_validated, loading=0 if self._last is self._trains else self._took)
        self._is_between = self._is_between and not learns
        # else it is a sample of the model after an epoch, or the like
        if not self._is_between:
            super()._model_is_called()

    def _fetch_begins(self, learns: bool, loader: "ref[Any]") -> None:  # noqa: FBT001 - the same
        trains = self._trains is loader
        begins = bool(self._expected) and not (
            self._is_validating or trains or learns or self._trains is None
        )
        if begins or (self._is_validating and (trains or (learns and self._was_fetched))):
            self._turn(begins=begins, was_fetched=True)
        self._begun, self._is_between = self.tape.now(), False
        self.enter("data", RUNNING)

    def _fetch_ends(self, loader: "ref[Any] | None", error: type[BaseException] | None) -> None:
        """A loader gives a batch, or ends.

        `None` where one ends, and the training's iterator is gone.
        """
        self.leave_last("data")
        if error is StopIteration:
            # what follows, as to save a checkpoint, is no part of it
            if self._is_validating:
                self._turn(begins=False)
            if self._trains is not None and (loader is None or loader is self._trains):
                self._is_between = True
                self._epoch_ends()
        elif error is None and not self._is_validating:
            self._last, self._took = loader, self.tape.now() - self._begun

    def _learns(self, losses: tuple[Any, ...]) -> None:
        if self._is_validating:
            self._turn(begins=False)
        if self._in_step and self.depth_of("backward") is None:
            self.enter("backward", RUNNING, losses)

    def _turn(self, *, begins: bool, was_fetched: bool = False, loading: int = 0) -> None:
        self._is_validating, self._was_fetched = begins, begins and was_fetched
        self._validates(begins=begins, loading=loading)


# levels below the outermost module at which those are looked for that the loop calls
DEEPEST = 4
# shapes of batches that are remembered
MOST_SHAPES = 256
# steps of other optimizers after which a loop whose optimizer makes none is over
IDLE = 32

_tell = partial(
    print,
    file=sys.stderr,
    flush=True,
    # what a script prints itself may be read by another program
)


class Finder:
    """What is known of the loops of this process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._is_off = False
        self._lock = RLock()
        self._home = (
            get_ident()
            # the thread of the loop; while it is watched, what others train is not seen
        )
        # whose steps are those of the loop
        self._optimizer: ref[Optimizer] | None = None
        self._steps_of_others = 0
        # that were made before the loop is watched
        self._steps = 0
        # how many runs this process has begun, if the script begins none; to count them is quicker
        # than to ask `OPEN`
        self._begun = 0
        self._candidates: list[ref[nn.Module]] = []
        self._called: list[ref[nn.Module]] = []
        self._looking = CleanupStack()
        # a `AutoDetectedLoop`, or the callback of a Trainer
        self._watched: Any = None
        atexit.register(self.close)

    def close(self, error: BaseException | None = None) -> None:
        """The loop is over, or the process.

        Then by an error that Python has shown, if there was one.
        """
        watched, self._watched, self._optimizer = self._watched, None, None
        self._looking.close()
        if watched is not None and self._process == os.getpid():
            with suppress(Exception):
                watched.close(error or getattr(sys, "last_value", None))

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step.

        What goes wrong here ends the watching, and nothing else.
        """
        # To begin, to end and to count a step adds and removes hooks like the one that calls this.
        # Torch fails in any but the last one.
        known = None if self._optimizer is None else self._optimizer()
        is_elsewhere = known is not None and self._watched is not None and get_ident() != self._home
        if (
            self._is_off
            or is_elsewhere
            or not is_called_last(entry.step_ends)
            or not self._lock.acquire(blocking=False)
        ):
            return
        try:
            if known is optimizer:
                self._steps_of_others = 0
                if self._watched is None:
                    self._look_again()
                elif (
                    MonitoredRun.begun != self._begun and len(OPEN) > 1
                    # the script has begun to watch for itself
                ):
                    self.close()
                else:
                    self._watched.step_ends()
            elif known is None or self._steps_of_others == IDLE:
                if self._optimizer is not None:
                    self.close()
                self._look(optimizer)
            else:
                self._steps_of_others += 1
                if self._watched is not None:
                    self._watched.other_step_ends()
        except Exception as error:  # noqa: BLE001 - it is the training's step
            self._is_off = True
            self.close(error)
            warn(f"{VARIABLE}={os.environ.get(VARIABLE)!r}: this training is not watched: {error}")
        finally:
            self._lock.release()

    def _look(self, optimizer: Optimizer) -> None:
        if OPEN:
            return
        self._watched = None
        if "transformers.trainer" in sys.modules:
            from lflops.integrations.huggingface import FlopsCallback, running_trainer

            if (trainer := running_trainer()) is not None:
                self._watched = FlopsCallback(log=_tell, **settings_of(settings_line() or ""))
                self._watched.join(trainer)
                return
        self._optimizer, self._home, self._begun = (
            ref(optimizer),
            get_ident(),
            MonitoredRun.begun + 1,
        )
        self._steps, self._steps_of_others = 1, 0
        self._expect(modules_of(optimizer))

    def _look_again(self) -> None:
        self._looking.close()
        self._steps += 1
        candidates, called = (_alive(each) for each in (self._candidates, self._called))
        children = [child for each in candidates for child in each.children()]
        if not called and children and self._steps < DEEPEST:
            self._expect(children)
            return
        self._watched = AutoDetectedLoop(
            called or candidates,
            self._steps,
            log=_tell,
            settings=settings_of(settings_line() or ""),
        )

    def _expect(self, modules: Iterable[nn.Module]) -> None:
        """Notice which of these are called for a training step."""
        self._called, self._candidates = [], [ref(each) for each in modules]
        hook_models(self._looking, _alive(self._candidates), self._is_called)

    def _is_called(self, module: nn.Module, *_: object) -> None:
        if is_grad_enabled() and all(each() is not module for each in self._called):
            self._called.append(ref(module))


def modules_of(optimizer: Optimizer) -> list[nn.Module]:
    """The outermost modules that hold parameters of an optimizer, of all modules that there are."""
    wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    above = gathered((id(child), each) for each in modules for child in self_parts(each)[0])
    reached = {
        id(each): each for each in modules if any(id(own) in wanted for own in self_parts(each)[1])
    }
    to_climb = [*reached.values()]
    while to_climb:
        found = [each for each in above.get(id(to_climb.pop()), ()) if id(each) not in reached]
        reached.update((id(each), each) for each in found)
        to_climb += found
    return [each for number, each in reached.items() if number not in above]


def _alive(modules: Iterable["ref[nn.Module]"]) -> list[nn.Module]:
    return [module for each in modules if (module := each()) is not None]


def _step_begins(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not is_compiling() and not is_called_last(entry.step_ends):
        call_last(entry.step_ends)


def _begin_anew() -> None:
    global current  # noqa: PLW0603 - one process, one finder
    if isinstance(watched := current._watched, AutoDetectedLoop):  # noqa: SLF001 - of the process that this one was forked from
        watched.phases.tape.forget()
    current = Finder()


current = Finder()
os.register_at_fork(after_in_child=_begin_anew)
register_optimizer_step_pre_hook(_step_begins)
