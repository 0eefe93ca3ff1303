"""What a window leaves in a TensorBoardLogger, all of it through the logger's own writer: TensorBoard reads but one file of a folder."""

from collections.abc import Iterable
from typing import Any

from torch.utils.tensorboard.summary import hparams

from lflops.analyze.analysis import Analysis
from lflops.profile.model import PHASES, Profile
from lflops.tensorboard.events import log_analysis

__all__ = ["LONGEST_TEXT", "TensorBoardOutput", "totals"]

LONGEST_TEXT = 100
"""Lines: TensorBoard renders every text that it keeps anew on each request."""

LAYOUT = {
    "lflops": {
        "step": ["Multiline", [r"^lflops\S*/(?:step|data|forward|backward|optimizer)_ms$"]],
        "utilization": ["Multiline", [r"^lflops\S*/(?:mfu|hfu)$"]],
        "TFLOP/s per device": ["Multiline", [r"^lflops\S*/tflops_per_device$"]],
        "samples and tokens per second": ["Multiline", [r"^lflops\S*/(?:samples|tokens)_per_second$"]],
    },
    "lflops modules": {
        "forward, ms": ["Multiline", [r"^lflops\S*_modules/[^/]+/forward_ms/"]],
        "backward, ms": ["Multiline", [r"^lflops\S*_modules/[^/]+/backward_ms/"]],
        "TFLOP/s": ["Multiline", [r"^lflops\S*_modules/[^/]+/tflops/"]],
    },
}
"""The same in every run: TensorBoard merges the layouts of all of them, and drops only what is equal to the letter."""


def totals(profile: Profile) -> dict[str, float]:
    """What a step is, for a table of runs: what it takes is there as curves. Nothing where nothing was counted."""
    if not profile.is_counted:
        return {}
    root = profile.modules[""]
    macs = {phase: root.work(phase).macs for phase in PHASES}
    return {"parameters": root.parameters} | {f"{phase}_gmacs": count / 1e9 for phase, count in macs.items() if count}


class TensorBoardOutput:
    """One logger's.

    Args:
        logger: A TensorBoardLogger.
        root: The first part of the tags.
    """

    def __init__(self, logger: Any, root: str) -> None:
        """Write nothing yet."""
        self._logger = logger
        self._root = root
        self._laid_out = False

    def window(self, analysis: Analysis, text: str, step: int) -> None:
        """Write the text, what the tab draws and the figures; with the first window also a layout for the custom scalars."""
        writer, root = self._logger.experiment, f"{self._root}/{analysis.profile.run.stage}"
        lines = text.splitlines()
        if len(lines) > LONGEST_TEXT:
            lines = [*lines[: LONGEST_TEXT - 1], "…"]
        writer.add_text(f"{root}/summary", "\n".join(["```", *lines, "```"]), global_step=step)
        log_analysis(writer, analysis, step, tag=f"{root}/profile")
        if not self._laid_out:
            writer.add_custom_scalars(LAYOUT)
            self._laid_out = True

    def end(self, profiles: Iterable[Profile], step: int) -> None:
        """Write what the last window of each stage totals, and that the run is one for the table of hyperparameters, with the logger's own.

        What the table's columns are is left open: TensorBoard takes the first list of them that it finds for that of all runs, and without
        one all curves.
        """
        last = {profile.run.stage: profile for profile in profiles}
        if not last:
            return
        writer = self._logger.experiment
        for stage, profile in last.items():
            for name, value in totals(profile).items():
                writer.add_scalar(f"{self._root}_totals/{stage}/{name}", value, step)
        told = getattr(self._logger, "hparams", {})
        given = {str(name): value if isinstance(value, int | float | str) else str(value) for name, value in told.items()}
        _, begun, ended = hparams(given, {})
        for summary in (begun, ended):
            writer.file_writer.add_summary(summary, step)
