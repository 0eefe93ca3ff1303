"""One batch of the training, counted."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from lflops.collect.count import Counting, Ignored
from lflops.lightning.window.outside_modules import Outside
from lflops.lightning.window.phase_hooks import listen
from lflops.profile.model import Profile

__all__ = ["CountedBatch"]


class CountedBatch:
    """Counts what runs on this thread from when it is made until it is stopped. The LightningModule is the root.

    Args:
        trainer: Tells when training_step, or what stands for it, runs.
        stage: Which of the Trainer's it is.
        root: What is trained.
        batch: What it is trained on.
        ignore: As `count` takes it.
        logical: As `count` takes it.
    """

    def __init__(self, trainer: Any, stage: str, root: Any, batch: Any, *, ignore: Ignored, logical: Profile | None) -> None:
        """Begin."""
        positional = tuple(batch) if isinstance(batch, list | tuple) else () if isinstance(batch, Mapping) else (batch,)
        named = {str(name): value for name, value in batch.items()} if isinstance(batch, Mapping) else {}
        self._counting = Counting({"": root}, ignore=ignore, logical=logical, batch=(positional, named))
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._counting)
            self._deaf: Callable[[], None] = listen(trainer, stage, Outside(self._counting.outside))
            undo.pop_all()

    def stop(self, error: BaseException | None = None) -> Profile:
        """End, by an error or without one, and tell what was counted."""
        self._deaf()
        self._counting.__exit__(None if error is None else type(error), error, None)
        return self._counting.profile
