"""The stages that a Trainer goes through, each with its own schedule."""

import math
from dataclasses import dataclass
from inspect import signature
from typing import Any

__all__ = ["STAGES", "LightningStage"]


@dataclass(frozen=True)
class LightningStage:
    """What is different from stage to stage.

    Attributes:
        name: As Lightning's hooks and our files name it.
        function: What the Trainer was asked for when it goes through this stage alone.
        step: The method of a LightningModule that a batch goes to.
    """

    name: str
    function: str
    step: str

    def fetches_itself(self, pl_module: Any) -> bool:
        """Whether that method takes the iterator: what is at hand when a batch begins is then the one before."""
        return "dataloader_iter" in signature(getattr(pl_module, self.step)).parameters

    def batches_left(self, trainer: Any) -> float:
        """How many batches it will have, of a stage in which nothing is learned; infinity where that is not known.

        Within a fit validations come again and again, and the schedule goes on from one to the next.
        """
        if trainer.state.fn.value != self.function:
            return math.inf
        loop = trainer.predict_loop if self.name == "predict" else getattr(trainer, f"{self.name}_loop")
        batches: float = sum(loop.max_batches)
        return batches


STAGES = {
    "train": LightningStage("train", "fit", "training_step"),
    "validate": LightningStage("validate", "validate", "validation_step"),
    "test": LightningStage("test", "test", "test_step"),
    "predict": LightningStage("predict", "predict", "predict_step"),
}
"""By the names that `FlopsMonitor` takes."""
