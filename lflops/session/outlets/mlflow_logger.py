"""What a window leaves in MLflow: pictures, the table of modules, the page, the profile and traces as artifacts of the run."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lflops.analyze.analysis import Analysis
from lflops.errors import needed_by
from lflops.profile.model import Profile
from lflops.session.outlets.table import COLUMNS, module_table, totals

__all__ = ["MLflowOutput"]


class MLflowOutput:
    """A run of MLflow, by a logger whose experiment is a client and that has a `run_id`. `root` is the folder of the artifacts."""

    name = "MLflow"

    def __init__(self, logger: Any, root: str) -> None:
        self._logger = logger
        self._root = root

    def window(self, analysis: Analysis, text: str, step: int, files: Sequence[Path]) -> Callable[[], None]:  # noqa: ARG002 - not on an axis
        """What can be seen of a window, and its files."""
        with needed_by("a figure"):
            from lflops.report.figures.pictures import pictures

        client, run = self._logger.experiment, self._logger.run_id
        folder = f"{self._root}/{analysis.profile.run.stage}-{analysis.profile.run.window}"
        rows = module_table(analysis)
        drawn = list(pictures(analysis))

        def log() -> None:
            client.log_text(run, text, f"{folder}/summary.txt")
            client.log_table(run, {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}, f"{folder}/modules.json")
            with tempfile.TemporaryDirectory() as temporary:
                for each in drawn:
                    path = Path(temporary, f"{each.name}.png")
                    path.write_bytes(each.png)
                    client.log_artifact(run, str(path), folder)
            for path in files:
                client.log_artifact(run, str(path), folder)

        return log

    def where(self) -> str:
        """The artifacts of the run."""
        return f"in MLflow, run {self._logger.run_id}: artifacts below {self._root}"

    def end(self, profiles: Iterable[Profile], step: int, traces: Sequence[Path]) -> None:  # noqa: ARG002 - not on an axis
        """Keep the totals as parameters of the run, and the traces."""
        client, run = self._logger.experiment, self._logger.run_id
        last = {profile.run.stage: profile for profile in profiles}
        for stage, profile in last.items():
            for name, value in totals(profile).items():
                client.log_param(run, f"{self._root}.{stage}.{name}", value)
        for path in traces:
            client.log_artifact(run, str(path), f"{self._root}/traces/{path.parent.name}")
