"""What a window leaves in the Trainer's loggers and in its log directory.

For loops that have no logger of their framework, a `SummaryWriter` of torch or a run of Weights &
Biases is made one. In TensorBoard all goes through the logger's own writer, because TensorBoard
reads but one file of a folder.
"""

import contextlib
import shlex
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from lflops.analysis.analysis import Analysis
from lflops.analysis.utilization import MODEL_PHASES, flops_per_second
from lflops.errors import CountError
from lflops.extras import offered
from lflops.inputs.arguments import describe
from lflops.ledger.account import Ledger
from lflops.monitoring.inputs.messages import Failures
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import Training
from lflops.monitoring.outputs.paths import OutputPaths, open_text
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import PASS_PHASES, PHASES
from lflops.profile.series import sum_known
from lflops.report import html as page
from lflops.report.ledger import end_lines
from lflops.report.log_text import log_text
from lflops.report.ranks import slow_ranks
from lflops.report.report import report_of

# lines: TensorBoard renders every text that it keeps anew on each request
LONGEST_TEXT = 100

_CHARTS = msgspec.toml.decode(
    Path(__file__).with_name("charts.toml").read_bytes(), type=dict[str, dict[str, str]]
)

LAYOUT = {
    group: {name: ["Multiline", [tags]] for name, tags in charts.items()}
    for group, charts in _CHARTS.items()
}
"""The same in every run:

TensorBoard merges the layouts of all of them, and drops only what is equal to the letter.
"""

COLUMNS = (
    "module",
    "class",
    "calls",
    "parameters",
    "forward MACs",
    "backward MACs",
    "forward ms",
    "backward ms",
    "total ms",
)


class Output(Protocol):
    """What a kind of logger is given besides curves. `root` is the first part of all names."""

    name: str
    _logger: Any
    _root: str

    def __init__(self, logger: Any, root: str) -> None:
        self._logger = logger
        self._root = root

    def window(
        self, analysis: Analysis, text: str, step: int, files: Sequence[Path]
    ) -> Callable[[], None]:
        """A window is closed, and these files of it were written.

        Any thread may call this; the training calls the result.
        """

    def end(self, profiles: Sequence[Profile], step: int, traces: Sequence[Path]) -> None:
        """The run is over, with these windows, the last of each stage, and these traces."""

    def where(self) -> str:
        """Where a reader sees what was logged, as the rest of a sentence."""


class TensorBoardOutput(Output):
    """A logger whose experiment is a SummaryWriter. `root` is the first part of the tags."""

    name = "TensorBoard"
    _laid_out = False

    def window(
        self,
        analysis: Analysis,
        text: str,
        step: int,
        files: Sequence[Path],  # noqa: ARG002
    ) -> Callable[[], None]:
        """The text, what the tab draws and the figures.

        With the first window also a layout for the custom scalars.
        """
        from lflops.tensorboard.events import (
            summary_of,
            # with tensorboard, which who has no such logger may not have
        )

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
        # What the table's columns are is left open: TensorBoard takes the first list of them that
        # it finds for that of all runs, and without one all curves
        from torch.utils.tensorboard.summary import hparams

        if not profiles:
            return
        writer = self._logger.experiment
        for profile in profiles:
            for name, value in totals(profile).items():
                writer.add_scalar(f"{self._root}_totals/{profile.run.stage}/{name}", value, step)
        told = getattr(self._logger, "hparams", {})
        given = {
            str(name): value if isinstance(value, int | float | str) else str(value)
            for name, value in told.items()
        }
        given = _hyperparameters(profiles[0]) | given
        _, begun, ended = hparams(given, {})
        for summary in (begun, ended):
            writer.file_writer.add_summary(summary, step)


class WandbOutput(Output):
    """A run of wandb, by a logger whose experiment it is."""

    name = "Weights & Biases"

    def window(
        self,
        analysis: Analysis,
        text: str,
        step: int,  # noqa: ARG002
        files: Sequence[Path],
    ) -> Callable[[], None]:
        import wandb
        from PIL import Image

        run, stage = self._logger.experiment, f"{self._root}/{analysis.profile.run.stage}"
        seen: dict[str, Any] = {
            f"{stage}/modules": wandb.Table(columns=list(COLUMNS), data=module_table(analysis))
        }
        seen |= {
            f"{stage}/{each.name}": wandb.Image(Image.open(BytesIO(each.png)))
            for each in drawn(analysis)
        }
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        seen[f"{stage}/summary"] = wandb.Html(f"<pre>{escaped}</pre>", inject=False)
        for path in (each for each in files if each.suffix == ".html"):
            seen[f"{stage}/page"] = wandb.Html(path.read_text("utf-8"), inject=False)
        kept = [path for path in files if path.name.endswith(".profile.json")]

        def log() -> None:
            run.log(seen)
            if kept:
                artifact = wandb.Artifact(
                    f"{self._root}-{analysis.profile.run.stage}-{run.id}", type="profile"
                )
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
            run.summary.update(
                {
                    f"{self._root}/{profile.run.stage}/{name}": value
                    for name, value in totals(profile).items()
                }
            )
        if traces:
            artifact = wandb.Artifact(f"{self._root}-traces-{run.id}", type="trace")
            for path in traces:
                artifact.add_file(str(path), name=f"{path.parent.name}/{path.name}")
            run.log_artifact(artifact)


class MLflowOutput(Output):
    """A run of MLflow, by a logger whose experiment is a client and that has a `run_id`.

    `root` is the folder of the artifacts.
    """

    name = "MLflow"

    def window(
        self,
        analysis: Analysis,
        text: str,
        step: int,  # noqa: ARG002
        files: Sequence[Path],
    ) -> Callable[[], None]:
        client, run = self._logger.experiment, self._logger.run_id
        folder = f"{self._root}/{analysis.profile.run.stage}-{analysis.profile.run.window}"
        rows = module_table(analysis)
        pictures = drawn(analysis)

        def log() -> None:
            client.log_text(run, text, f"{folder}/summary.txt")
            client.log_table(
                run,
                {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)},
                f"{folder}/modules.json",
            )
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
    return [
        picture for pictures in offered("pictures", "a figure") for picture in pictures(analysis)
    ]


def module_table(analysis: Analysis) -> list[list[Any]]:
    """A row for each module, those below it included; `None` for what is unknown."""
    rows = []
    for name, module in analysis.profile.modules.items():
        works = [module.work(phase) for phase in PASS_PHASES]
        milliseconds = [
            None if work.seconds is None else work.seconds.median * 1e3 for work in works
        ]
        macs = [work.macs for work in works[:2]]
        total = (
            None
            if milliseconds[0] is None
            else sum_known(each for each in milliseconds if each is not None)
        )
        rows.append(
            [
                name or "(model)",
                module.class_name,
                module.calls,
                module.parameters,
                *macs,
                *milliseconds[:2],
                total,
            ]
        )
    return rows


def totals(profile: Profile) -> dict[str, float]:
    """The totals of a step, for a table of runs. Nothing where nothing was counted."""
    if not profile.is_counted:
        return {}
    root = profile.modules[""]
    macs = {phase: root.work(phase).macs for phase in PHASES}
    return {"parameters": root.parameters} | {
        f"{phase}_gmacs": count / 1e9 for phase, count in macs.items() if count
    }


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


class WriterLogger:
    """Logs to a `SummaryWriter`, which stays its owner's to close."""

    def __init__(self, writer: Any) -> None:
        self.experiment = writer
        self.log_dir: str = writer.log_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step)


class RunLogger:
    """Logs to a run of Weights & Biases, which stays its owner's to finish.

    The run counts its own steps, so each point holds the training's step as `lflops_step`, and our
    curves are drawn over that.
    """

    def __init__(self, run: Any) -> None:
        self.experiment = run
        self.log_dir = str(
            Path(run.dir).parent
            # what is in `dir` itself is uploaded, and the artifacts have it already
        )
        run.define_metric("lflops_step", hidden=True)
        for name in ("lflops/*", "lflops_modules/*"):
            run.define_metric(name, step_metric="lflops_step")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.experiment.log({**metrics, "lflops_step": step})


def loggers_of(given: Any) -> list[Any]:
    """Loggers unchanged, or loggers around the given writers.

    One, several in a list, or none; a `CountError` for anything else.
    """
    return [
        _logger_of(each)
        for each in (given if isinstance(given, list | tuple) else [] if given is None else [given])
    ]


def _logger_of(given: Any) -> Any:
    if callable(getattr(given, "log_metrics", None)):
        return given
    if callable(getattr(given, "add_scalar", None)):
        return WriterLogger(given)
    if callable(getattr(given, "define_metric", None)) and callable(getattr(given, "log", None)):
        return RunLogger(given)
    raise CountError(
        f"logger={describe(given)}: give a SummaryWriter, a run of wandb, or an object with log_metrics(values, step=...)"
    )


# two points are no curve
FEWEST_WINDOWS = 3

_TAGS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, tuple[str, ...]]
)
"""Each tag, and the fact that it logs; where the report has no HFU, it is the MFU."""


def scalars(analysis: Analysis) -> dict[str, float]:
    """The figures of a window that are worth a curve; the unknown ones are left out."""
    report, factors = report_of(analysis), {"s": 1e3, "FLOP/s": 1e-12, "bytes": 2**-30}
    found = {}
    for tag, names in _TAGS.items():
        fact = next((fact for name in names if (fact := report.fact(name)) is not None), None)
        if fact is not None and fact.value is not None:
            found[tag] = fact.value * factors.get(fact.unit, 1.0)
    ratio = analysis.profile.run.observer_ratio
    return found if ratio is None else found | {"observer_overhead": ratio - 1}


class PreparedWindow(NamedTuple):
    """A window that only has to be logged."""

    text: str
    files: list[Path]
    logs: list[tuple[Output, Callable[[], None]]]


def _shown_to(logger: Output) -> str:
    return f"what {logger.name} is shown of a window"


class Reporters:
    """Where one monitor's results go; all of them on the main process alone."""

    def __init__(
        self, training: Training, settings: Settings, monitor: int, failures: Failures
    ) -> None:
        self._failures = failures
        self._loop = training.loop
        self._loggers = training.loggers
        self._settings = settings
        self._root = "lflops" if monitor == 1 else f"lflops_{monitor}"
        kinds = (
            (logger, [base.__name__ for base in type(logger).__mro__ if base.__name__ in OUTPUTS])
            for logger in training.loggers
        )
        self._outputs = [OUTPUTS[names[0]](logger, self._root) for logger, names in kinds if names]
        self._busiest: dict[
            str, tuple[str, ...]
            # the modules of each stage that have curves; those that repeat are one
        ] = {}
        self._held_back: defaultdict[str, deque[tuple[dict[tuple[str, str], float], int]]] = (
            defaultdict(deque)
            # their points, and steps
        )
        # windows of each stage
        self._closed: Counter[str] = Counter()
        # the last of each stage
        self._windows: dict[str | None, Profile] = {}
        self._on_curves: set[tuple[str, str]] = (
            set()
            # stages, and the figures that points of theirs have
        )

    def window_scalars(self, analysis: Analysis, step: int) -> None:
        """Log to every logger the figures of a window that have no curve over all steps yet."""
        stage = analysis.profile.run.stage or ""
        values = {
            name: value
            for name, value in scalars(analysis).items()
            if (stage, name) not in self._on_curves
        }
        self._log({(self._root, stage, name): value for name, value in values.items()}, step)

    def point(self, values: Mapping[str, float], stage: str, step: int) -> None:
        """Log a point of a stage's curves to every logger.

        A tag is one curve: from then on windows do not log these figures.
        """
        self._on_curves.update((stage, name) for name in values)
        self._log({(self._root, stage, name): value for name, value in values.items()}, step)

    def module_scalars(self, analysis: Analysis, step: int) -> None:
        """Log to every logger what the busiest modules took, from the third window on.

        In all windows those that were so in the first.
        """
        stage = analysis.profile.run.stage or ""
        if not self._busiest.get(stage):
            self._busiest[stage] = tuple(
                each.pattern for each in analysis.busiest[: self._settings.module_scalars]
            )
        self._held_back[stage].append(
            (module_scalars(analysis.profile, analysis.patterns, self._busiest[stage]), step)
        )
        self._closed[stage] += 1
        while self._closed[stage] >= FEWEST_WINDOWS and self._held_back[stage]:
            values, at = self._held_back[stage].popleft()
            self._log(
                {
                    (f"{self._root}_modules", stage, *names): value
                    for names, value in values.items()
                },
                at,
            )

    def _log(self, values: Mapping[tuple[str, ...], float], step: int) -> None:
        if not values:
            return
        for number, logger in enumerate(self._loggers, 1):
            outlet = f"logger {number}, a {type(logger).__name__},"
            if outlet not in self._failures:
                with self._failures.contained(outlet):
                    given = getattr(logger, "group_separator", None)
                    separator = given if isinstance(given, str) else "/"
                    metrics = {separator.join(names): value for names, value in values.items()}
                    if given is None:
                        logger.log_metrics(metrics, step=step)
                    else:
                        # Lightning calls its loggers by names alone
                        logger.log_metrics(metrics=metrics, step=step)

    def prepare(self, analysis: Analysis, path: Path | None, step: int) -> PreparedWindow:
        """Write the page next to a window's file, if it has one, and make all that the loggers are given.

        Any thread may do this.
        """
        text, long, stage = "", "", analysis.profile.run.stage
        files = [] if path is None else self.save_page(analysis, path)
        with self._failures.contained("the summary"):
            if self._settings.detailed or self._settings.output_file is not None or self._outputs:
                long = self._long_text(analysis, detailed=True)
            text = long if self._settings.detailed else log_text(analysis, self._windows.get(stage))
        if self._settings.output_file is not None:
            output = Path(self._settings.output_file)
            with self._failures.contained(f"output_file={str(output)!r}"):
                with open_text(output, self._loop) as file:
                    file.write(f"{long}\n")
                files.append(output)
        written = [file for file in (path, *files) if file is not None and file.exists()]
        logs = []
        for logger in self._outputs:
            with self._failures.contained(_shown_to(logger)):
                shown = (
                    long
                    if len(long.splitlines()) <= LONGEST_TEXT
                    else self._long_text(analysis, detailed=False)
                )
                logs.append((logger, logger.window(analysis, shown, step, written)))
        with self._failures.contained("what is logged of modules"):
            # that the training's thread finds them there
            _ = analysis.busiest, analysis.patterns
        self._windows[stage] = analysis.profile
        return PreparedWindow(text, files, logs)

    def save_page(self, analysis: Analysis, path: Path) -> list[Path]:
        """Write the page next to a window's file, if there is to be one.

        Returns what was written.
        """
        if self._settings.html:
            with self._failures.contained("the page"):
                page.save(analysis, path.with_suffix(".html"))
                return [path.with_suffix(".html")]
        return []

    def slow_ranks(self, analysis: Analysis) -> dict[Hashable, str]:
        """A sentence about each rank that makes the others wait, by what tells it from the others."""
        found: dict[Hashable, str] = {}
        with self._failures.contained("the summary"):
            found |= slow_ranks(analysis)
        return found

    def log(self, prepared: PreparedWindow) -> None:
        for logger, log in prepared.logs:
            with self._failures.contained(_shown_to(logger)):
                log()

    def end(self, profiles: Sequence[Profile], traces: Iterable[Path], step: int) -> None:
        """The run is over.

        `profiles` are the last windows of its stages, `traces` those of all windows.
        """
        traces = [path for path in traces if path.exists()]
        for logger in self._outputs:
            with self._failures.contained(f"what {logger.name} is shown of the run"):
                logger.end(profiles, step, traces)

    def where(self) -> list[str]:
        """Where a reader sees what the loggers show of a run; those that fail say nothing."""
        found = []
        for logger in self._outputs:
            # the log's line is no reason to warn
            with contextlib.suppress(Exception):
                found.append(logger.where())
        return found

    def _long_text(self, analysis: Analysis, *, detailed: bool) -> str:
        asked = self._settings
        for summary in offered("summary", "the summary"):
            return str(
                summary(
                    analysis,
                    module_depth=asked.module_depth,
                    top_modules=asked.top_modules,
                    detailed=detailed,
                    fold=True,
                )
            )
        return log_text(analysis, None)


def log_ledger(ledger: Ledger, paths: OutputPaths | None, say: Callable[[str], None]) -> None:
    """Say where the run's time went, if anything in it is worth saying."""
    if lines := end_lines(ledger, None if paths is None else str(paths.profiles)):
        say("\n".join(lines))


def module_scalars(
    profile: Profile, patterns: Mapping[str, str], names: Iterable[str]
) -> dict[tuple[str, str], float]:
    """Times and TFLOP/s of modules themselves, by figure and pattern; modules of one pattern are added up.

    What is unknown is left out.
    """
    scalars: dict[tuple[str, str], float] = {}
    rows_of: dict[str, list[ModuleProfile]] = {pattern: [] for pattern in names}
    for name, row in profile.modules.items():
        if (pattern := patterns[name]) in rows_of:
            rows_of[pattern].append(row)
    for pattern, rows in rows_of.items():
        label, total = pattern or "root", 0.0
        for phase in MODEL_PHASES:
            seconds = [
                each.median
                for each in map(attrgetter(f"{phase}.self_seconds"), rows)
                if each is not None
            ]
            if seconds:
                scalars[f"{phase}_ms", label] = sum(seconds) * 1e3
                total += sum(seconds)
        macs = sum(sum(map(attrgetter(f"{phase}.self_macs"), rows)) for phase in MODEL_PHASES)
        rate = flops_per_second(macs, total) if profile.is_counted else None
        if rate is not None:
            scalars["tflops", label] = rate / 1e12
    return scalars
