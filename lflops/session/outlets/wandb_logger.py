"""What a window leaves in Weights & Biases: pictures, the table of modules, the page, the profile and traces as an artifact."""

from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from lflops.analyze.analysis import Analysis
from lflops.errors import needed_by
from lflops.profile.model import Profile
from lflops.session.outlets.table import COLUMNS, module_table, totals

__all__ = ["WandbOutput"]


class WandbOutput:
    """A run of wandb, by a logger whose experiment it is."""

    name = "Weights & Biases"

    def __init__(self, logger: Any, root: str) -> None:
        self._logger = logger
        self._root = root

    def window(self, analysis: Analysis, text: str, step: int, files: Sequence[Path]) -> Callable[[], None]:  # noqa: ARG002 - not on an axis
        """What can be seen of a window, and its files."""
        import wandb
        from PIL import Image

        with needed_by("a figure"):
            from lflops.report.figures.pictures import pictures

        run, stage = self._logger.experiment, f"{self._root}/{analysis.profile.run.stage}"
        seen: dict[str, Any] = {f"{stage}/modules": wandb.Table(columns=list(COLUMNS), data=module_table(analysis))}
        seen |= {f"{stage}/{each.name}": wandb.Image(Image.open(BytesIO(each.png))) for each in pictures(analysis)}
        seen[f"{stage}/summary"] = wandb.Html(f"<pre>{_escaped(text)}</pre>", inject=False)
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
        """The run's page, or what uploads it where it is offline."""
        run = self._logger.experiment
        return f"in Weights & Biases: {run.url or f'wandb sync {Path(run.dir).parent}'}"

    def end(self, profiles: Iterable[Profile], step: int, traces: Sequence[Path]) -> None:  # noqa: ARG002 - not on an axis
        """Put the totals into the run's summary, and keep the traces."""
        import wandb

        run = self._logger.experiment
        for profile in profiles:
            run.summary.update({f"{self._root}/{profile.run.stage}/{name}": value for name, value in totals(profile).items()})
        if traces:
            artifact = wandb.Artifact(f"{self._root}-traces-{run.id}", type="trace")
            for path in traces:
                artifact.add_file(str(path), name=f"{path.parent.name}/{path.name}")
            run.log_artifact(artifact)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
