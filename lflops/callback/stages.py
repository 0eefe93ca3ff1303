"""The stages that a Trainer goes through, each with a schedule of its own."""

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["STAGES", "Stage"]


@dataclass(frozen=True)
class Stage:
    """What is different from stage to stage.

    Attributes:
        name: As Lightning's hooks and our files name it.
        function: What the Trainer was asked for when it goes through this stage alone.
    """

    name: str
    function: str

    @property
    def learns(self) -> bool:
        """Whether the batches of this stage are followed by backward and an optimizer."""
        return self.name == "train"

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
    "train": Stage("train", "fit"),
    "validate": Stage("validate", "validate"),
    "test": Stage("test", "test"),
    "predict": Stage("predict", "predict"),
}
"""By the names that `FlopsMonitor` takes."""
