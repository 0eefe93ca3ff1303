"""A plain loop that was found: its steps by its optimizer, its phases by the hooks of models, optimizers and data loaders."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from lflops.boundary import Boundary, Undo
from lflops.collect.attribution.hooks import hook_optimizers
from lflops.collect.torch_private.data_loader import hear_fetches
from lflops.collect.torch_private.self_check import check_data_loader
from lflops.loops.monitor import Loop, LoopMonitor
from lflops.loops.phases import LoopPhases
from lflops.session.inputs.settings import Settings


class FoundLoop:
    """A loop that is watched from the end of a step on.

    Args:
        models: That it calls.
        steps: That it has made.
        log: Is called with what there is to say, on the main process.
        settings: The arguments of a monitor.
    """

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
        for _ in range(steps + 1):
            self._monitor.next_step()

    def step_ends(self) -> None:
        """Its optimizer has made a step."""
        batch, self._phases.batch = self._phases.batch, None
        self._monitor.next_step(batch)

    def close(self, error: BaseException | None) -> None:
        """The loop is over."""
        self._validation.close()
        self._monitor.__exit__(None if error is None else type(error), error, None)

    def _validates(self, *, begins: bool) -> None:
        self._validation.close()
        if begins:
            self._validation.enter_context(self._monitor.stage("validate"))


class FoundPhases(LoopPhases):
    """The phases of a loop that tells nothing itself.

    A model in eval mode that is called without gradients is validated, until it is trained again or its loader is asked for the next batch.

    Args:
        validates: Is called when a validation begins and when it ends.
    """

    epoch_ends: Callable[[], None]  # is called when the training's loader is at its end

    def __init__(self, validates: Callable[..., None]) -> None:
        super().__init__()
        self.batch: Any = None  # the last one that was fetched for this step
        self._validates = validates
        self._is_validating = False
        self._thread = threading.get_ident()
        self._last: ref[Any] | None = None  # the loader's iterator that fetched last
        self._trains: ref[Any] | None = None  # the one whose batch the model was trained with
        self._around: int | None = None  # phases around a fetch that is going on

    def install(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], boundary: Boundary, undo: Undo) -> None:
        """Hook the models, all optimizers and all data loaders."""
        check_data_loader()
        super().install(models, optimizers, boundary, undo)
        guard = boundary.guard
        hook_optimizers(undo, guard(self._optimizer_begins), guard(partial(self.leave_last, "optimizer")))
        hear_fetches(undo, guard(self._fetch_begins), guard(self._fetch_ends))

    def _model_is_called(self, model: nn.Module) -> None:
        self._validate(begins=not (model.training or torch.is_grad_enabled()))
        if not self._is_validating:
            self._trains = self._last
        super()._model_is_called(model)

    def _validate(self, *, begins: bool) -> None:
        if begins != self._is_validating:
            self._is_validating = begins
            self._validates(begins=begins)

    def _fetch_begins(self, iterator: Any) -> None:
        if threading.get_ident() == self._thread and self._around is None:
            if self._is_validating and self._trains is not None and self._trains() is iterator:
                self._validate(begins=False)
            self._around = self.begin("data", ())

    def _fetch_ends(self, iterator: Any, batch: Any) -> None:
        if threading.get_ident() != self._thread or self._around is None:
            return
        self.leave(self._around)
        self._around = None
        if isinstance(batch, StopIteration):
            if self._trains is not None and self._trains() is iterator:
                self.epoch_ends()
        elif not isinstance(batch, BaseException):
            self._last, self.batch = ref(iterator), batch
