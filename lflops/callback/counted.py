"""One batch of the training, counted."""

from collections.abc import Callable, Mapping
from typing import Any

from lflops.callback.wraps import listen
from lflops.collect.passes import Counting, Ignored
from lflops.observations import Phase
from lflops.profile import Profile

__all__ = ["CountedBatch"]


class CountedBatch:
    """Counts what runs on this thread from when it is made until it is stopped. The LightningModule is the root.

    Args:
        trainer: Tells when training_step runs.
        pl_module: What is trained.
        batch: What it is trained on.
        ignore: As `count` takes it.
    """

    def __init__(self, trainer: Any, pl_module: Any, batch: Any, ignore: Ignored) -> None:
        """Begin."""
        positional = tuple(batch) if isinstance(batch, list | tuple) else () if isinstance(batch, Mapping) else (batch,)
        named = {str(name): value for name, value in batch.items()} if isinstance(batch, Mapping) else {}
        self._counting = Counting({"": pl_module}, ignore=ignore, batch=(positional, named))
        self._counting.__enter__()
        self._deaf: Callable[[], None] = listen(trainer, _Forward(self._counting))

    def stop(self, error: BaseException | None = None) -> Profile:
        """End, by an error or without one, and tell what was counted."""
        self._deaf()
        self._counting.__exit__(None if error is None else type(error), error, None)
        return self._counting.profile


class _Forward:
    """Tells a count that what runs in training_step outside of every module is forward."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self._phases: list[Phase] = ["other"]

    @property
    def innermost(self) -> str:
        """Whether it is forward."""
        return self._phases[-1]

    def enter(self, phase: str, *_given: Any) -> None:
        """Forward, or something else; what comes behind a backward in the same training_step is clipping and the like."""
        if phase in {"backward", "optimizer"}:
            self._phases = ["other"] * len(self._phases)
        self._phases.append("forward" if phase == "forward" else "other")
        self._counting.outside(self._phases[-1])

    def leave(self) -> None:
        """Back to what it was within."""
        self._phases.pop()
        self._counting.outside(self._phases[-1])

    drop = leave
