"""What a window leaves in a TensorBoardLogger, all of it through the logger's own writer: TensorBoard reads but one file of a folder."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lflops.analyze.analysis import Analysis
from lflops.profile.model import Profile
from lflops.session.outlets.table import totals

__all__ = ["LONGEST_TEXT", "TensorBoardOutput"]

LONGEST_TEXT = 100
"""Lines: TensorBoard renders every text that it keeps anew on each request."""

LAYOUT = {
    "lflops": {
        "step": ["Multiline", [r"^lflops\S*/(?:step|data|forward|backward|optimizer)_ms$"]],
        "utilization": ["Multiline", [r"^lflops\S*/(?:mfu|hfu)$"]],
        "TFLOP/s per device": ["Multiline", [r"^lflops\S*/tflops_per_device$"]],
        "samples per second": ["Multiline", [r"^lflops\S*/samples_per_second$"]],
        "tokens per second": ["Multiline", [r"^lflops\S*/tokens_per_second$"]],
    },
    "lflops modules": {
        "forward, ms": ["Multiline", [r"^lflops\S*_modules/[^/]+/forward_ms/"]],
        "backward, ms": ["Multiline", [r"^lflops\S*_modules/[^/]+/backward_ms/"]],
        "TFLOP/s": ["Multiline", [r"^lflops\S*_modules/[^/]+/tflops/"]],
    },
}
"""The same in every run: TensorBoard merges the layouts of all of them, and drops only what is equal to the letter."""


def hyperparameters(profile: Profile) -> dict[str, bool | int | float | str]:
    """What distinguishes a run from others."""
    run = profile.run
    known = {
        "precision": run.precision,
        "batch_size": run.samples_per_step,
        "world_size": run.world_size,
        "device": run.device_name,
        "strategy": run.strategy,
    }
    return {name: value for name, value in known.items() if value is not None}


class TensorBoardOutput:
    """A logger whose experiment is a SummaryWriter. `root` is the first part of the tags."""

    name = "TensorBoard"

    def __init__(self, logger: Any, root: str) -> None:
        self._logger = logger
        self._root = root
        self._laid_out = False

    def window(self, analysis: Analysis, text: str, step: int, files: Sequence[Path]) -> Callable[[], None]:  # noqa: ARG002 - it keeps none
        """The text, what the tab draws and the figures; with the first window also a layout for the custom scalars."""
        from lflops.tensorboard.events import summary_of  # with tensorboard, which who has no such logger may not have

        writer, root = self._logger.experiment, f"{self._root}/{analysis.profile.run.stage}"
        lines = text.splitlines()
        if len(lines) > LONGEST_TEXT:
            lines = [*lines[: LONGEST_TEXT - 1], "…"]
        shown = summary_of(writer, analysis, tag=f"{root}/profile")

        def log() -> None:
            writer.add_text(f"{root}/summary", "\n".join(["```", *lines, "```"]), global_step=step)
            writer.file_writer.add_summary(shown, step)
            if not self._laid_out:
                writer.add_custom_scalars(LAYOUT)
                self._laid_out = True

        return log

    def where(self) -> str:
        """The command, and the tab."""
        return f"in TensorBoard, tab LFLOPS: tensorboard --logdir {shlex.quote(str(self._logger.log_dir))}"

    def end(self, profiles: Iterable[Profile], step: int, traces: Sequence[Path]) -> None:  # noqa: ARG002 - the same
        """Write what the last window of each stage totals, and the run's row in the table of hyperparameters, with the logger's own.

        What the table's columns are is left open: TensorBoard takes the first list of them that it finds for that of all runs, and without
        one all curves.
        """
        from torch.utils.tensorboard.summary import hparams

        last = {profile.run.stage: profile for profile in profiles}
        if not last:
            return
        writer = self._logger.experiment
        for stage, profile in last.items():
            for name, value in totals(profile).items():
                writer.add_scalar(f"{self._root}_totals/{stage}/{name}", value, step)
        told = getattr(self._logger, "hparams", {})
        given = {str(name): value if isinstance(value, int | float | str) else str(value) for name, value in told.items()}
        given = hyperparameters(next(iter(last.values()))) | given
        _, begun, ended = hparams(given, {})
        for summary in (begun, ended):
            writer.file_writer.add_summary(summary, step)
