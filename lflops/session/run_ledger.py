"""The ledger of a monitored run: what the training, torch.compile and the session itself mark in it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lflops.boundary import Boundary, Undo
from lflops.collect.inputs.batch_reader import BatchReader
from lflops.collect.inputs.devices import allocator_stats
from lflops.collect.timing.clock import ThreadSchedule
from lflops.collect.torch_private.modules import Compilations, compile_seconds
from lflops.ledger.account import Ledger
from lflops.ledger.keeper import Keeper
from lflops.ledger.recorder import TrainPhases, process_age
from lflops.session.inputs.phases import RUN, Phases
from lflops.session.inputs.training import Stage, Training
from lflops.session.window_requests import WindowRequests


class RunLedger:
    """Marks what one run does, from its set-up to its end."""

    def __init__(self, rank: int, ranks: int, requests: WindowRequests) -> None:
        self._device: torch.device | None = None  # of the training, once it has begun
        self._keeper = Keeper(rank, ranks, retries=self._allocator_retries, schedule=ThreadSchedule().read, look=requests.look)
        self._recorder = self._keeper.recorder
        self._compilations = Compilations(partial(self._recorder.enter, "compilation"), partial(self._recorder.leave_last, "compilation"))
        self._reader = BatchReader()
        self._ends_step: Callable[[], bool] | None = None  # of the training's batches, once it has begun
        self._logged_step: Callable[[], int] = _none_done
        self.curves = self._keeper.curves
        self.enter, self.leave_last = self._recorder.enter, self._recorder.leave_last

    def install(self, phases: Phases, folder: Path | None, boundary: Boundary, undo: Undo) -> None:
        """Listen from here on, until `undo` is closed. The folder gets the file; `None` for no file."""
        undo.add(self.stop, "interrupted")
        self._keeper.start(folder)
        if self._keeper.is_first:  # of the process, whose compilations until now no one has heard
            self._recorder.note_past("compilation", min(compile_seconds(), process_age()))
        undo.add(self._compilations.stop)
        self._compilations.listen(boundary.guard)
        undo.add(phases.listen("train", TrainPhases(self._recorder), boundary.guard))
        undo.add(phases.listen(RUN, self._recorder, boundary.guard))

    def begin_training(self, training: Training, stage: Stage) -> None:
        """The stage begins whose steps are those of the ledger."""
        self._ends_step, self._logged_step, self._device = stage.ends_step, training.logged_step, training.device

    def epoch_ends(self) -> None:
        """What follows is between two epochs, until a batch is asked for."""
        self._recorder.rest("between_epochs")

    def batch_ends(self, batch: Any, *, touched: bool) -> None:
        """A batch of the training ends, and perhaps its step. `touched` is whether lflops counted, timed or traced it."""
        self._compilations.listen_again()
        if self._ends_step is not None and self._ends_step():
            self._recorder.step_ends(self._logged_step() + 1, touched=touched, shapes=self._reader.shapes(batch))

    def stop(self, ended: str) -> None:
        """The run has ended: "finished", or the class of the exception. What follows is after it. It can be called again.

        Raises:
            OSError: The file could not be written.
        """
        self._ends_step, self._logged_step = None, _none_done
        self._keeper.stop(ended)
        error, self._keeper.error = self._keeper.error, None
        if error is not None:
            raise error

    @property
    def account(self) -> Ledger:
        """The account until now, or until the run ended."""
        return self._keeper.ledger()

    def _allocator_retries(self) -> int:
        """How often the allocator of the training's device has freed its cache and tried again."""
        return 0 if self._device is None else allocator_stats(self._device).get("num_alloc_retries", 0)


def _none_done() -> int:
    return 0
