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
from lflops.inputs.batch import BatchReader
from lflops.inputs.batch_size import loader_batch_size
from lflops.integrations.auto_detect import entry
from lflops.integrations.auto_detect.entry import VARIABLE, settings_line
from lflops.integrations.loops.monitor import Loop, LoopMonitor
from lflops.integrations.loops.phases import RUNNING, LoopPhases
from lflops.monitoring.inputs.messages import warn
from lflops.monitoring.inputs.settings import Settings, settings_of
from lflops.monitoring.run import OPEN, MonitoredRun, RunLedger
from lflops.phase_log import RUN
from lflops.torch_private.autograd import NO_BACKWARD, backward_id
from lflops.torch_private.data_loader import sampler_of, wrap_fetches
from lflops.torch_private.modules import call_last, is_called_last, self_parts
from lflops.torch_private.self_check import check_data_loader


class AutoDetectedLoop(LoopMonitor):
    """Monitors a loop that was detected after its first `steps` steps.

    Args:
        models: The models that the loop calls.
        owner: The module that contains these models, if the loop never calls the module itself.
        steps: Number of steps before the loop was detected. They are included in the number of
            steps, but their durations are unknown.
        log: Function that receives the summary of each window, which is a few profiled steps.
        settings: The arguments of `FlopsMonitor`.
    """

    name = "lflops"
    follows_update = True

    def __init__(
        self,
        models: Sequence[nn.Module],
        steps: int,
        *,
        owner: nn.Module | None = None,
        log: Callable[[str], None],
        settings: dict[str, Any],
    ) -> None:
        alive: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
        for model in models:
            name = ""
            if len(models) > 1:
                name = type(model).__name__
            if name in alive:
                name = f"{name}{len(alive)}"
            alive[name] = model
        self.phases = AutoDetectedPhases(self._validates, self.epoch_ends)
        loop = Loop(
            alive,
            (),
            engine=None,
            loggers=(),
            accumulation=1,
            log_every=0,
            steps=None,
            log=log,
            owner=Loop.owner if owner is None else ref(owner),
        )
        super().__init__(loop, Settings(**settings), self.phases)
        # set while the ledger's thread handles the steps
        self._ledger: RunLedger | None = None
        self._has_several_batches = False
        self._validation = contextlib.ExitStack()
        # Shapes of the batches so far, so that equal shapes are the same object.
        self._shapes: dict[Hashable, Hashable] = {}
        self._reader = BatchReader()
        self.__enter__()
        self.batch_begins(None)
        # The durations of the steps before the detection are unknown.
        for _ in range(steps):
            self.mark("warmup")
            self._next_step(None)
        self.mark("warmup")

    def step_ends(self) -> None:
        """End the current step and begin the next step.

        While no window needs the steps, they are only recorded in the ledger, the time account of
        the run. Then this method only queues the work, and the ledger's thread does the work later.
        """
        phases = self.phases
        ledger = self._ledger
        batch = phases.batch
        phases.batch = None
        # With gradient accumulation, the last batch is only a part of the step's input.
        self._has_several_batches = phases.fetched > 1
        if self._has_several_batches:
            batch = None
        phases.fetched = 0
        phases.home = get_ident()
        phases.is_fetching = False
        phases.trains_by = phases.fetches_by
        if ledger is None or ledger.requests.due is not None or not phases.deferred.runs:
            with phases.guard:
                phases.deferred.stop()
            phases.deferred.raise_error()
            self._next_step(batch)
            return
        self._steps_done += 1
        shapes = self._reader.shapes(batch)
        if len(self._shapes) < MOST_SHAPES:
            shapes = self._shapes.setdefault(shapes, shapes)
        step = self._steps_done
        counters = ledger.counters.read(step)
        phases.deferred.note(
            AutoDetectedLoop._end_deferred_step, self, ledger, shapes, step, *counters
        )

    def other_step_ends(self) -> None:
        """End the optimizer phase after the step of another optimizer.

        Only the loop's own optimizer ends a step of the loop.
        """
        self.phases.deferred.note(AutoDetectedPhases.leave_last, self.phases, "optimizer")

    def loader_size(self, stage: str) -> int | None:
        fetches_by = self.phases.fetches_by
        if stage != "train" or fetches_by is None or self._has_several_batches:
            return None
        return loader_batch_size(sampler_of(fetches_by()))

    def close(self, error: BaseException | None) -> None:
        self.phases.deferred.stop()
        self._validation.close()
        self.__exit__(None if error is None else type(error), error, None)

    def _next_step(self, batch: Any) -> None:
        self.batch_ends(batch)
        self.batch_begins(None)
        self._ledger = self._run.lone_ledger
        if self._ledger is not None:
            self.phases.deferred.start()

    def _end_deferred_step(
        self, ledger: RunLedger, shapes: Hashable, step: int, *counters: Any
    ) -> None:
        """End a step that only the ledger needs. The ledger's thread calls this method later."""
        self.phases.end_step()
        ledger.listen_again()
        ledger.end_step(step, shapes, counters=counters)
        self.phases.begin_step()

    def _validates(self, *, begins: bool, has_loader: bool = False, loading: int = 0) -> None:
        """Handle the beginning or the end of a validation or of inference.

        Args:
            begins: True at the beginning, false at the end.
            has_loader: Whether a loader other than the training loader fetched the last batch.
            loading: Duration of that fetch in nanoseconds. The ledger moves this time from the wait
                for data to validation.
        """
        self._validation.close()
        if begins:
            # Calls without gradients are a validation only if another loader loads their batches.
            category = "validation" if has_loader else "inference"
            self._validation.enter_context(self.stage_in("validate", category))
            if loading:
                self._run.move_time(loading, "data", "validation")


class AutoDetectedPhases(LoopPhases):
    """Detects the phases of a loop that does not call lflops.

    Events, such as the call of a model, are recorded when they happen and processed later. An event
    is recorded together with everything that is known only at that moment, such as whether
    gradients are enabled.

    When a model in eval mode is called without gradients, a validation begins if the last batch
    came from a loader other than the training loader. Otherwise the call is inference. The
    validation ends when a model is called for training, when the training loader fetches a batch,
    or when a loader ends. Later calls in eval mode are inference, for example for a test set.

    A model in training mode can also be called without gradients, for example to act in a rollout.
    Then only this call is in the phase `inference`. But there are two cases in which such a call is
    the beginning of forward: a model with reentrant checkpointing, which is called again in
    backward, and a generator whose output trains only another model. In the second case, exactly
    one call without gradients comes before backward. After the first backward pass, lflops knows
    whether one of the two cases applies.

    If the loop calls no model, a validation begins when another loader fetches a batch while
    gradients are disabled. It ends when a batch is fetched while gradients are enabled, or with a
    backward pass.

    Attributes:
        batch: The last batch that was fetched while gradients were enabled.
        fetched: Number of these batches since the last step ended.
        home: Id of the thread that trains.
        is_fetching: Set while a data loader fetches a batch.
        fetches_by: Weak reference to the data loader iterator that fetched `batch`.
        trains_by: Weak reference to the data loader iterator that fetched the batch of the last
            step.
    """

    def __init__(self, validates: Callable[..., None], epoch_ends: Callable[[], None]) -> None:
        """Create the detector.

        Args:
            validates: Called when a validation or inference begins and when it ends.
            epoch_ends: Called when the training loader ends.
        """
        super().__init__()
        self.batch: Any = None
        self.fetched = 0
        self.home = get_ident()
        self.is_fetching = False
        self.fetches_by: ref[Any] | None = None
        self.trains_by: ref[Any] | None = None
        self._validates = validates
        self._epoch_ends = epoch_ends
        # set while `torch.save` runs
        self._is_saving = False
        # set during a validation and during inference
        self._is_validating = False
        # set if the validation was detected by a fetch
        self._was_fetched = False
        # Since the last backward pass: whether a model was called with gradients, and the number of
        # calls without gradients.
        self._calls_with = False
        self._calls_without = 0
        # set if a call without gradients is the beginning of forward
        self._without_is_forward = False
        # set if backward has called a model again
        self._recomputes = False
        # set after the training loader has ended
        self._is_between = False
        # Since the training loader fetched its last batch: the number of batches of other loaders,
        # and of calls of models in eval mode without gradients. A loop may fetch a batch ahead.
        self._validation_batches = 0
        self._validation_calls = 0
        # iterator of the loader that made the last fetch
        self._last: ref[Any] | None = None
        # moment at which the last fetch began
        self._begun = 0
        # duration of the last fetch in nanoseconds; 0 if a step has ended since then
        self._took = 0
        # iterator of the training loader, which made the last fetch before the end of the last step
        self._trains: ref[Any] | None = None

    def install(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        guard: ErrorGuard,
        undo: CleanupStack,
    ) -> None:
        """Hook the models, all optimizers and all data loaders.

        The hooks of optimizers report only the beginning of a step. `Finder.step_ends` handles its
        end.
        """
        check_data_loader()
        super().install(models, optimizers, guard, undo)
        hook_optimizers(undo, self._optimizer_hook(), None)
        wrap_fetches(undo, self._note_fetch, self._note_batch)

    # The following functions run in every step. To be fast, each function appends directly to
    # `self.deferred`, the queue of calls that the ledger's thread makes later, and contains its own
    # error guard.

    def _optimizer_hook(self) -> Callable[..., None]:
        """Return a hook that records the beginning of an optimizer's step."""
        return self._hook_of(AutoDetectedPhases._optimizer_begins)

    def _model_end_hook(self) -> Callable[..., None]:
        """Return a hook that records the end of a model's call."""
        return self._hook_of(AutoDetectedPhases._returns)

    def _hook_of(self, call: Callable[["AutoDetectedPhases"], None]) -> Callable[..., None]:
        """Return a hook that records an event. The function `call` handles the event."""
        deferred = self.deferred

        def event_happens(*_: Any) -> None:
            if is_compiling():
                return
            try:
                if deferred.runs:
                    deferred.append((deferred.clock(), call, 1, self))
                else:
                    call(self)
            except BaseException as error:
                if not self.guard.contains(error):
                    raise

        return event_happens

    def _model_hook(self) -> Callable[..., None]:
        """Return a hook that records the call of a model."""
        deferred = self.deferred
        call = AutoDetectedPhases._called

        def model_is_called(model: nn.Module, *_: Any) -> None:
            if is_compiling():
                return
            try:
                learns = is_grad_enabled()
                if deferred.runs:
                    deferred.append((deferred.clock(), call, 3, self, learns, model.training))
                else:
                    call(self, learns, model.training)
            except BaseException as error:
                if not self.guard.contains(error):
                    raise

        return model_is_called

    def _note_fetch(self, iterator: Any) -> int | None:
        """Record that a data loader begins to fetch a batch.

        Returns 0, or `None` if the fetch is ignored. `_note_batch` receives the result.
        """
        deferred = self.deferred
        try:
            if self.is_fetching or get_ident() != self.home:
                return None
            self.is_fetching = True
            learns = is_grad_enabled()
            loader = ref(iterator)
            if deferred.runs:
                call = AutoDetectedPhases._fetch_begins
                deferred.append((deferred.clock(), call, 3, self, learns, loader))
            else:
                self._fetch_begins(learns, loader)
        except BaseException as error:
            if not self.guard.contains(error):
                raise
            return None
        return 0

    def _note_batch(self, begun: int | None, iterator: Any, batch: Any) -> None:
        """Record the end of the fetch of a batch.

        Args:
            begun: The result of `_note_fetch`.
            iterator: The iterator of the data loader.
            batch: The batch, or the exception that the fetch raised.
        """
        if begun is None:
            return
        deferred = self.deferred
        try:
            self.is_fetching = False
            failed = isinstance(batch, BaseException)
            loader: ref[Any] | None = ref(iterator)
            if failed:
                if self.trains_by is not None and self.trains_by() is None:
                    loader = None
            elif is_grad_enabled():
                self.batch = batch
                self.fetched += 1
                self.fetches_by = loader
            error = type(batch) if failed else None
            if deferred.runs:
                call = AutoDetectedPhases._fetch_ends
                deferred.append((deferred.clock(), call, 3, self, loader, error))
            else:
                self._fetch_ends(loader, error)
        except BaseException as mistake:
            if not self.guard.contains(mistake):
                raise

    def _backward_begins(self, losses: Sequence[Any]) -> int | None:
        deferred = self.deferred
        try:
            if backward_id() != NO_BACKWARD or get_ident() != self.home:
                return None
            if self.awaits_others:
                self.hook_wait(*losses)
            if deferred.runs:
                deferred.append((deferred.clock(), AutoDetectedPhases._learns, 2, self, ()))
            else:
                self._learns((*losses,))
        except BaseException as error:
            if not self.guard.contains(error):
                raise
            return None
        return 0

    def _backward_ends(self, depth: int, *, failed: bool = False) -> None:  # noqa: ARG002
        deferred = self.deferred
        try:
            if deferred.runs:
                call = AutoDetectedPhases.leave_last
                deferred.append((deferred.clock(), call, 2, self, "backward"))
            else:
                self.leave_last("backward")
        except BaseException as error:
            if not self.guard.contains(error):
                raise

    def _save_begins(self) -> int | None:
        """Record that `torch.save` begins. Returns `None` if it runs inside another call of it."""
        if self._is_saving or get_ident() != self.home:
            return None
        self._is_saving = True
        with self.guard:
            if not self.deferred.runs:
                # If only the ledger is kept, no step needs the mark.
                self.checkpoint_begins()
            self.deferred.note(AutoDetectedPhases._enter_checkpoint, self)
        return 0

    def _save_ends(self, depth: int | None) -> None:
        if depth is None:
            return
        self._is_saving = False
        with self.guard:
            self.deferred.note(AutoDetectedPhases.leave_last, self, "checkpoint_save")

    def _enter_checkpoint(self) -> None:
        if self.innermost in {None, "forward"}:
            self.enter("checkpoint_save", RUN)

    def end_step(self, *, failed: bool = False) -> None:
        """End the step.

        From now on, the data loader that fetched the last batch is treated as the training loader.
        """
        self._trains = self._last
        self._took = 0
        super().end_step(failed=failed)

    def _called(self, learns: bool, trains: bool) -> None:  # noqa: FBT001 - a recorded call
        """Handle the call of a model.

        Args:
            learns: Whether gradients were enabled.
            trains: Whether the model was in training mode.
        """
        is_validated = not learns and (self._was_fetched or not trains)
        self._validation_calls += is_validated
        if is_validated is not self._is_validating:
            has_loader = self._last is not self._trains
            loading = self._took if has_loader else 0
            self._turn(begins=is_validated, has_loader=has_loader, loading=loading)
        # Calls without gradients between two epochs, for example to generate samples, are not part
        # of a step.
        self._is_between = self._is_between and not learns
        if self._is_between or not self._in_step:
            return
        innermost = self.innermost
        if innermost == "backward":
            self._recomputes = True
            return
        if innermost == "inference" and learns:
            # The call without gradients has raised an exception, or it calls a model that learns.
            self.leave_last("inference")
            self._open_calls = 0
            innermost = self.innermost
        self._open_calls += 1
        if learns:
            self._calls_with = True
        else:
            self._calls_without += 1
        is_inference = not (learns or self._recomputes or self._without_is_forward)
        if innermost is None and is_inference:
            self.enter("inference", RUNNING)
            return
        if self._stage == "train" and innermost != "inference":
            self._has_called = True
        if innermost in {None, "optimizer"}:
            self.enter("forward", RUNNING)

    def _returns(self) -> None:
        """Handle the end of a model's call."""
        innermost = self.innermost
        if not self._open_calls or innermost == "backward":
            return
        self._open_calls -= 1
        if innermost == "inference" and not self._open_calls:
            self.leave_last("inference")

    def _optimizer_begins(self) -> None:
        if self._in_step:
            self.enter("optimizer", RUNNING)

    def _fetch_begins(self, learns: bool, loader: "ref[Any]") -> None:  # noqa: FBT001 - a recorded call
        """Handle the beginning of the fetch of a batch.

        Args:
            learns: Whether gradients were enabled.
            loader: Weak reference to the iterator of the data loader.
        """
        trains = self._trains is loader
        if self._is_validating:
            changes = trains or (learns and self._was_fetched)
        else:
            is_other = self._trains is not None and not trains
            changes = bool(self._expected) and is_other and not learns
        if changes:
            self._turn(begins=not self._is_validating, has_loader=True, was_fetched=True)
        self._begun = self.log.clock()
        self._is_between = False
        self.enter("data", RUNNING)

    def _fetch_ends(self, loader: "ref[Any] | None", error: type[BaseException] | None) -> None:
        """Handle the end of a fetch: a batch was fetched, or the data loader has ended.

        Args:
            loader: Weak reference to the iterator of the data loader. `None` if the loader has
                ended and the iterator of the training loader no longer exists.
            error: Class of the exception that the fetch raised: `StopIteration` at the end of the
                loader. `None` if a batch was fetched.
        """
        self.leave_last("data")
        if error is StopIteration:
            # The code after a validation, for example saving a checkpoint, is not part of it.
            if self._is_validating:
                self._turn(begins=False)
                if self._validation_calls >= self._validation_batches:
                    # Each batch was used. Later calls without gradients are inference.
                    self._last = self._trains
            if self._trains is not None and (loader is None or loader is self._trains):
                self._is_between = True
                self._epoch_ends()
        elif error is None:
            is_other = loader is not self._trains
            self._validation_batches = self._validation_batches + 1 if is_other else 0
            if not is_other:
                self._validation_calls = 0
            if not self._is_validating:
                self._last = loader
                self._took = self.log.clock() - self._begun

    def _learns(self, losses: tuple[Any, ...]) -> None:
        """Handle the beginning of a backward pass."""
        if self._is_validating:
            self._turn(begins=False)
        is_in_backward = any(phase == "backward" for phase, _ in self.running)
        if not self._in_step or is_in_backward:
            return
        if self._calls_without:
            is_alone = self._calls_without == 1 and not self._calls_with
            self._without_is_forward = is_alone
            self._has_called |= is_alone
        self._calls_with = False
        self._calls_without = 0
        self.enter("backward", RUNNING, losses)

    def _turn(
        self,
        *,
        begins: bool,
        has_loader: bool = False,
        was_fetched: bool = False,
        loading: int = 0,
    ) -> None:
        """Begin or end a validation or inference.

        Args:
            begins: True to begin, false to end.
            has_loader: See `AutoDetectedLoop._validates`.
            was_fetched: Whether the reason is the fetch of a batch, not the call of a model.
            loading: See `AutoDetectedLoop._validates`.
        """
        self._is_validating = begins
        self._was_fetched = begins and was_fetched
        self._validates(begins=begins, has_loader=has_loader, loading=loading)


DEEPEST = 4
"""Number of the step at which the search for the models of a loop ends.

If a step has called none of the hooked modules, their children are hooked for the next step. At the
step with this number, the hooked modules are treated as the models even if they were not called.
"""

MOST_SHAPES = 256
"""Maximum number of different batch shapes that are remembered."""

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
