"""Detect the phases of a training loop that does not call lflops, with hooks of torch."""

from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any
from weakref import ref

from torch import is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer

from lflops.attribution.hooks import hook_optimizers
from lflops.error_guard import CleanupStack, ErrorGuard
from lflops.integrations.loops.phases import RUNNING, LoopPhases
from lflops.phase_log import RUN
from lflops.torch_private.autograd import NO_BACKWARD, backward_id
from lflops.torch_private.data_loader import wrap_fetches
from lflops.torch_private.self_check import check_data_loader


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
