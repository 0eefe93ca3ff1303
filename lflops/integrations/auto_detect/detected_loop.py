"""`AutoDetectedLoop`: monitor a training loop that does not call lflops."""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import nn

from lflops.inputs.batch import BatchReader
from lflops.inputs.batch_size import loader_batch_size
from lflops.integrations.auto_detect.detected_phases import AutoDetectedPhases
from lflops.integrations.loops.monitor import Loop, LoopMonitor
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.run import RunLedger
from lflops.torch_private.data_loader import sampler_of

MOST_SHAPES = 256
"""Maximum number of different batch shapes that are remembered."""


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
