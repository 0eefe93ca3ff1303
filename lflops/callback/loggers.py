"""What a window leaves in the Trainer's loggers and in its log directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lflops.analyze.pace import pace
from lflops.analyze.utilization import utilization
from lflops.callback.settings import Settings
from lflops.profile import Profile
from lflops.report import page
from lflops.report.summary import summary
from lflops.tensorboard.events import log

__all__ = ["Outlets", "scalars"]

PHASES = ("data", "forward", "backward", "optimizer")
LONGEST_TEXT = 100
"""Lines: TensorBoard renders every text that it keeps anew on each request."""

LAYOUT = {
    "lflops": {
        "step": ["Multiline", [rf"^lflops\S*/(?:step|{'|'.join(PHASES)})_ms$"]],
        "utilization": ["Multiline", [r"^lflops\S*/(?:mfu|hfu)$"]],
        "TFLOP/s per device": ["Multiline", [r"^lflops\S*/tflops_per_device$"]],
        "samples and tokens per second": ["Multiline", [r"^lflops\S*/(?:samples|tokens)_per_second$"]],
    }
}
"""The same in every run: TensorBoard merges the layouts of all of them, and drops only what is equal to the letter."""


def scalars(profile: Profile) -> dict[str, float]:
    """The figures of a window that are worth a curve; the unknown ones are left out."""
    paced, used, run = pace(profile), utilization(profile), profile.run
    times = {"step": paced.seconds, **{phase: paced.phases.get(phase) for phase in PHASES}}
    found = {f"{name}_ms": None if spread is None else spread.median * 1e3 for name, spread in times.items()}
    found |= {"mfu": used.mfu, "hfu": used.hfu}
    found["tflops_per_device"] = None if used.flops_per_second is None else used.flops_per_second / 1e12
    found["samples_per_second"] = _of_all_ranks(paced.samples_per_second, run.data_parallel_size)
    found["tokens_per_second"] = _of_all_ranks(paced.tokens_per_second, run.data_parallel_size)
    found["peak_memory_gib"] = None if profile.memory is None else profile.memory.peak_bytes / 2**30
    found["observer_overhead"] = None if run.observer_ratio is None else run.observer_ratio - 1
    return {name: value for name, value in found.items() if value is not None}


def _of_all_ranks(rate: float | None, ranks: int | None) -> float | None:
    return None if rate is None or ranks is None else rate * ranks


class Outlets:
    """Where one monitor's results go; all of them on the main process alone.

    Args:
        trainer: Whose loggers they are.
        settings: How the text is to be, and where it goes.
        place: Which of the Trainer's monitors this is, from 1.
    """

    def __init__(self, trainer: Any, settings: Settings, place: int) -> None:
        """Write nothing yet."""
        self._trainer = trainer
        self._settings = settings
        self._root = "lflops" if place == 1 else f"lflops_{place}"
        self._laid_out = False
        self._printed = False

    def scalars(self, values: Mapping[str, float], stage: str, step: int) -> None:
        """Log them to every logger, under the stage's name."""
        if not values:
            return
        for logger in self._trainer.loggers:
            separator = getattr(logger, "group_separator", "/")
            logger.log_metrics({separator.join((self._root, stage, name)): value for name, value in values.items()}, step=step)

    def window(self, profile: Profile, saved: Path | None, step: int) -> tuple[str, list[Path]]:
        """Log a window's text, and write the page beside its file.

        Args:
            profile: The window.
            saved: Its file, if it has one.
            step: The loggers' x-axis.

        Returns:
            The text, and the files of the window.
        """
        files = [] if saved is None else [saved]
        if saved is not None and self._settings.html:
            files.append(saved.with_suffix(".html"))
            page.save(profile, files[-1])
        text = self._text(profile, detailed=self._settings.detailed)
        if self._settings.output_file is not None:
            path = Path(self._settings.output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if self._printed else "w", encoding="utf-8") as file:
                file.write(f"{text}\n")
            self._printed = True
            files.append(path)
        for logger in self._trainer.loggers:
            if type(logger).__name__ == "TensorBoardLogger":
                self._to_tensorboard(logger.experiment, text, profile, step)
        return text, files

    def _to_tensorboard(self, writer: Any, text: str, profile: Profile, step: int) -> None:
        lines = text.splitlines()
        if len(lines) > LONGEST_TEXT:
            lines = self._text(profile, detailed=False).splitlines()
        if len(lines) > LONGEST_TEXT:
            lines = [*lines[: LONGEST_TEXT - 1], "…"]
        fenced = "\n".join(["```", *lines, "```"])
        writer.add_text(f"{self._root}/{profile.run.stage}/summary", fenced, global_step=step)
        log(writer, profile, step, tag=f"{self._root}/{profile.run.stage}/profile")
        if not self._laid_out:
            writer.add_custom_scalars(LAYOUT)
            self._laid_out = True

    def _text(self, profile: Profile, *, detailed: bool) -> str:
        asked = self._settings
        return summary(profile, module_depth=asked.module_depth, top_modules=asked.top_modules, detailed=detailed)
