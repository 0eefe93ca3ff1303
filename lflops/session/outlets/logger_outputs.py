"""What each kind of logger is given of a window besides curves: text, pictures, the table of modules, files.

In TensorBoard all of it goes through the logger's own writer, because TensorBoard reads but one file of a folder.
"""

import shlex
import tempfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import msgspec

from lflops.analyze.analysis import Analysis
from lflops.extras import offered
from lflops.profile.model import Profile
from lflops.profile.records import PHASES
from lflops.profile.series import sum_known

__all__ = ["LONGEST_TEXT", "OUTPUTS", "Output"]

LONGEST_TEXT = 100  # lines: TensorBoard renders every text that it keeps anew on each request

_CHARTS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, dict[str, str]])

LAYOUT = {group: {name: ["Multiline", [tags]] for name, tags in charts.items()} for group, charts in _CHARTS.items()}
"""The same in every run: TensorBoard merges the layouts of all of them, and drops only what is equal to the letter."""

COLUMNS = ("module", "class", "calls", "parameters", "forward MACs", "backward MACs", "forward ms", "backward ms", "total ms")


class Output(Protocol):
    """What a kind of logger is given besides curves. `root` is the first part of all names."""

    name: str
    _logger: Any
    _root: str

    def __init__(self, logger: Any, root: str) -> None:
        self._logger = logger
        self._root = root

    def window(self, analysis: Analysis, text: str, step: int, files: Sequence[Path]) -> Callable[[], None]:
        """A window is closed, and these files of it were written. Any thread may call this; the training calls the result."""

    def end(self, profiles: Sequence[Profile], step: int, traces: Sequence[Path]) -> None:
        """The run is over, with these windows, the last of each stage, and these traces."""

    def where(self) -> str:
        """Where a reader sees what was logged, as the rest of a sentence."""


class TensorBoardOutput(Output):
    """A logger whose experiment is a SummaryWriter. `root` is the first part of the tags."""

    name = "TensorBoard"
    _laid_out = False

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
        return f"in TensorBoard, tab LFLOPS: tensorboard --logdir {shlex.quote(str(self._logger.log_dir))}"

    def end(self, profiles: Sequence[Profile], step: int, traces: Sequence[Path]) -> None:  # noqa: ARG002 - the same
        """Write what the last window of each stage totals, and the run's row in the table of hyperparameters, with the logger's own."""
        # What the table's columns are is left open: TensorBoard takes the first list of them that it finds for that of all runs, and
        # without one all curves
        from torch.utils.tensorboard.summary import hparams

        if not profiles:
            return
        writer = self._logger.experiment
        for profile in profiles:
            for name, value in totals(profile).items():
                writer.add_scalar(f"{self._root}_totals/{profile.run.stage}/{name}", value, step)
        told = getattr(self._logger, "hparams", {})
        given = {str(name): value if isinstance(value, int | float | str) else str(value) for name, value in told.items()}
        given = _hyperparameters(profiles[0]) | given
        _, begun, ended = hparams(given, {})
        for summary in (begun, ended):
            writer.file_writer.add_summary(summary, step)


class WandbOutput(Output):
    """A run of wandb, by a logger whose experiment it is."""

    name = "Weights & Biases"

    def window(self, analysis: Analysis, text: str, step: int, files: Sequence[Path]) -> Callable[[], None]:  # noqa: ARG002 - not on an axis
        import wandb
        from PIL import Image

        run, stage = self._logger.experiment, f"{self._root}/{analysis.profile.run.stage}"
        seen: dict[str, Any] = {f"{stage}/modules": wandb.Table(columns=list(COLUMNS), data=module_table(analysis))}
        seen |= {f"{stage}/{each.name}": wandb.Image(Image.open(BytesIO(each.png))) for each in drawn(analysis)}
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        seen[f"{stage}/summary"] = wandb.Html(f"<pre>{escaped}</pre>", inject=False)
        for page in (path for path in files if path.suffix == ".html"):
            seen[f"{stage}/page"] = wandb.Html(page.read_text("utf-8"), inject=False)
        kept = [path for path in files if path.name.endswith(".profile.json")]

        def log() -> None:
            run.log(seen)
            if kept:
                artifact = wandb.Artifact(f"{self._root}-{analysis.profile.run.stage}-{run.id}", type="profile")
                for path in kept:
                    artifact.add_file(str(path))
                run.log_artifact(artifact)

        return log

    def where(self) -> str:
        run = self._logger.experiment
        return f"in Weights & Biases: {run.url or f'wandb sync {Path(run.dir).parent}'}"

    def end(self, profiles: Sequence[Profile], step: int, traces: Sequence[Path]) -> None:  # noqa: ARG002 - not on an axis
        import wandb

        run = self._logger.experiment
        for profile in profiles:
            run.summary.update({f"{self._root}/{profile.run.stage}/{name}": value for name, value in totals(profile).items()})
        if traces:
            artifact = wandb.Artifact(f"{self._root}-traces-{run.id}", type="trace")
            for path in traces:
                artifact.add_file(str(path), name=f"{path.parent.name}/{path.name}")
            run.log_artifact(artifact)


class MLflowOutput(Output):
    """A run of MLflow, by a logger whose experiment is a client and that has a `run_id`. `root` is the folder of the artifacts."""

    name = "MLflow"

    def window(self, analysis: Analysis, text: str, step: int, files: Sequence[Path]) -> Callable[[], None]:  # noqa: ARG002 - not on an axis
        client, run = self._logger.experiment, self._logger.run_id
        folder = f"{self._root}/{analysis.profile.run.stage}-{analysis.profile.run.window}"
        rows = module_table(analysis)
        pictures = drawn(analysis)

        def log() -> None:
            client.log_text(run, text, f"{folder}/summary.txt")
            client.log_table(run, {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}, f"{folder}/modules.json")
            with tempfile.TemporaryDirectory() as temporary:
                for each in pictures:
                    path = Path(temporary, f"{each.name}.png")
                    path.write_bytes(each.png)
                    client.log_artifact(run, str(path), folder)
            for path in files:
                client.log_artifact(run, str(path), folder)

        return log

    def where(self) -> str:
        return f"in MLflow, run {self._logger.run_id}: artifacts below {self._root}"

    def end(self, profiles: Sequence[Profile], step: int, traces: Sequence[Path]) -> None:  # noqa: ARG002 - not on an axis
        client, run = self._logger.experiment, self._logger.run_id
        for profile in profiles:
            for name, value in totals(profile).items():
                client.log_param(run, f"{self._root}.{profile.run.stage}.{name}", value)
        for path in traces:
            client.log_artifact(run, str(path), f"{self._root}/traces/{path.parent.name}")


OUTPUTS: dict[str, Callable[[Any, str], Output]] = {
    "TensorBoardLogger": TensorBoardOutput,
    "WriterLogger": TensorBoardOutput,
    "WandbLogger": WandbOutput,
    "RunLogger": WandbOutput,
    "MLFlowLogger": MLflowOutput,
}
"""By the name of a logger's class, or of one that it is derived from."""


def drawn(analysis: Analysis) -> list[Any]:
    """A profile's figures: their names, and the PNG files."""
    return [picture for pictures in offered("pictures", "a figure") for picture in pictures(analysis)]


def module_table(analysis: Analysis) -> list[list[Any]]:
    """A row for each module, those below it included; `None` for what is unknown."""
    rows = []
    for name, module in analysis.profile.modules.items():
        works = [module.work(phase) for phase in ("forward", "backward", "recompute")]
        milliseconds = [None if work.seconds is None else work.seconds.median * 1e3 for work in works]
        macs = [work.macs for work in works[:2]]
        total = None if milliseconds[0] is None else sum_known(each for each in milliseconds if each is not None)
        rows.append([name or "(model)", module.kind, module.calls, module.parameters, *macs, *milliseconds[:2], total])
    return rows


def totals(profile: Profile) -> dict[str, float]:
    """The totals of a step, for a table of runs. Nothing where nothing was counted."""
    if not profile.is_counted:
        return {}
    root = profile.modules[""]
    macs = {phase: root.work(phase).macs for phase in PHASES}
    return {"parameters": root.parameters} | {f"{phase}_gmacs": count / 1e9 for phase, count in macs.items() if count}


def _hyperparameters(profile: Profile) -> dict[str, bool | int | float | str]:
    run = profile.run
    known = {
        "precision": run.precision,
        "batch_size": run.samples_per_step,
        "world_size": run.world_size,
        "device": run.device_name,
        "strategy": run.strategy,
    }
    return {name: value for name, value in known.items() if value is not None}
