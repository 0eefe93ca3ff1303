"""The planted fault "step logging" as callbacks of the Trainers.

The callbacks have no attributes, because some clients copy, pickle or store their callbacks.
"""

from typing import Any

RUNS: list[Any] = []
"""The run of this process, in which the callbacks log."""


def _log(model: Any) -> None:
    for run in RUNS:
        run.log_step(model)


def callback_for(framework: str) -> Any:
    """A callback for a Trainer of `lightning.pytorch`, `pytorch_lightning` or `transformers`."""
    if framework == "transformers":
        from transformers import TrainerCallback

        class LogSteps(TrainerCallback):
            def on_step_end(self, _args: Any, _state: Any, _control: Any, **kwargs: Any) -> None:
                _log(kwargs["model"])

        return LogSteps()
    if framework == "pytorch_lightning":
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback

    class LogBatches(Callback):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, _trainer: Any, module: Any, *_: Any) -> None:
            _log(module)

    return LogBatches()
