"""Log a window's results to the loggers of a training run: curves, text, tables and figures.

A window is a few consecutive steps that lflops profiles.

A loop without a framework's logger passes a torch `SummaryWriter` or a Weights & Biases run, which
is wrapped in a logger. All TensorBoard data goes through the logger's writer, because TensorBoard
reads only one file per folder.
"""

import contextlib
import html
import shlex
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from lflops.analysis.analysis import Analysis
from lflops.analysis.utilization import MODEL_PHASES, flops_per_second
from lflops.errors import CountError
from lflops.extras import offered
from lflops.files import read, write_whole
from lflops.findings.finding import first_issue
from lflops.inputs.arguments import describe
from lflops.ledger.account import Ledger
from lflops.monitoring.inputs.messages import Failures
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import Training
from lflops.monitoring.outputs.paths import OutputPaths, append_text
from lflops.profile.module_names import plain
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import PASS_PHASES, PHASES, median_of
from lflops.profile.series import multiplied
from lflops.report import html as page
from lflops.report.first_screen.merged_findings import findings_of
from lflops.report.first_screen.screen import first_screen
from lflops.report.first_screen.text import first_screen_markdown, first_screen_rows
from lflops.report.first_screen.window import WindowSummary, window_summary
from lflops.report.ledger import HOW_TO_PROFILE, has_losses, headline
from lflops.report.log_text import log_text
from lflops.report.ranks import slow_rank_sentences
from lflops.report.summary_facts import report_of
from lflops.report.text import joined
from lflops.report.verdict import LARGE_COST

_CHARTS = msgspec.toml.decode(
    Path(__file__).with_name("charts.toml").read_bytes(), type=dict[str, dict[str, str]]
)

# maximum bytes of a page that is logged
_LARGEST_PAGE = 1 << 30


def _layout() -> dict[str, dict[str, list[Any]]]:
    layout: dict[str, dict[str, list[Any]]] = {}
    for group, charts in _CHARTS.items():
        layout[group] = {name: ["Multiline", [tags]] for name, tags in charts.items()}
    return layout


LAYOUT = _layout()
"""The layout of TensorBoard's custom scalars.

The layout is the same in every run, because TensorBoard merges the layouts of all runs and drops
only duplicates.
"""

# the columns of the table of modules
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
    """Writes the results of windows to one kind of logger, such as TensorBoard or MLflow.

    A window is a few consecutive steps that lflops profiles. Curves are not included, because they
    are logged in the same way for all kinds of loggers.

    Attributes:
        name: The name of the product, for warnings.

    Args:
        logger: The logger.
        root: The first part of all names under which something is logged, such as `lflops`.
    """

    name: str
    _logger: Any
    _root: str

    def __init__(self, logger: Any, root: str) -> None:
        self._logger = logger
        self._root = root

    def window(
        self, analysis: Analysis, text: str, step: int, files: Sequence[Path]
    ) -> Callable[[], None]:
        """Prepare to log a closed window. Any thread may call this method.

        Args:
            analysis: The analysis of the window's profile.
            text: The summary of the window as Markdown.
            step: The step on the logger's x-axis.
            files: The files of the window that were written.

        Returns:
            A function that logs the window, to be called in the training thread.
        """

    def end(self, profiles: Sequence[Profile], step: int, traces: Sequence[Path]) -> None:
        """Log the end of the run: the profile of each stage's last window, and the traces."""

    def where(self) -> str:
        """Describe where the outputs can be seen, for example "in MLflow, run 12"."""


class TensorBoardOutput(Output):
    """Writes to a logger whose `experiment` is a `SummaryWriter`."""

    name = "TensorBoard"
    _laid_out = False

    def window(
        self,
        analysis: Analysis,
        text: str,
        step: int,
        files: Sequence[Path],  # noqa: ARG002
    ) -> Callable[[], None]:
        """Prepare the text of the window and the data for TensorBoard's LFLOPS tab.

        With the first window, `LAYOUT` is logged too.
        """
        # imported here, because runs without a TensorBoard logger may not have tensorboard
        from lflops.tensorboard.events import summary_of

        writer = self._logger.experiment
        root = f"{self._root}/{analysis.profile.run.stage}"
        shown = summary_of(analysis, Path(writer.log_dir), tag=f"{root}/profile")

        def log() -> None:
            writer.add_text(f"{root}/summary", text, global_step=step)
            _file_writer(writer).add_summary(shown, step)
            if not self._laid_out:
                writer.add_custom_scalars(LAYOUT)
                self._laid_out = True

        return log

    def where(self) -> str:
        log_dir = shlex.quote(str(self._logger.log_dir))
        return f"in TensorBoard, tab LFLOPS: tensorboard --logdir {log_dir}"

    def end(self, profiles: Sequence[Profile], step: int, traces: Sequence[Path]) -> None:  # noqa: ARG002
        """Write the run's hyperparameters, the number of parameters, and the MACs of a step.

        If the logger has a hyperparameter with the same name, the logger's value is written. The
        list of hyperparameters to show is not written, because TensorBoard applies the first such
        list to all runs.
        """
        from torch.utils.tensorboard.summary import hparams

        if not profiles:
            return
        writer = self._logger.experiment
        parameters = _hyperparameters(profiles[0]) | totals(profiles[0])
        for name, value in getattr(self._logger, "hparams", {}).items():
            is_plain = isinstance(value, int | float | str)
            parameters[str(name)] = value if is_plain else str(value)
        _, begun, ended = hparams(parameters, {})
        for summary in (begun, ended):
            _file_writer(writer).add_summary(summary, step)


def _file_writer(writer: Any) -> Any:
    """Return the file writer of a `SummaryWriter`, and open it again if it was closed.

    Lightning closes the writer at the end of each run of a Trainer, and the Trainer of transformers
    closes it before the run ends.
    """
    return writer.file_writer or writer._get_file_writer()  # noqa: SLF001


class WandbOutput(Output):
    """Writes to a logger whose `experiment` is a Weights & Biases run."""

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

        run = self._logger.experiment
        stage = f"{self._root}/{analysis.profile.run.stage}"
        table = wandb.Table(columns=list(COLUMNS), data=module_table(analysis))
        logged: dict[str, Any] = {f"{stage}/modules": table}
        for picture in figures_of(analysis):
            logged[f"{stage}/{picture.name}"] = wandb.Image(Image.open(BytesIO(picture.png)))
        summary = f"<pre>{html.escape(text, quote=False)}</pre>"
        logged[f"{stage}/summary"] = wandb.Html(summary, inject=False)
        for path in files:
            if path.suffix == ".html":
                logged[f"{stage}/page"] = wandb.Html(
                    read(path, _LARGEST_PAGE).decode(), inject=False
                )
        kept = [path for path in files if path.name.endswith(".profile.json")]

        def log() -> None:
            run.log(logged)
            if kept:
                name = f"{self._root}-{analysis.profile.run.stage}-{run.id}"
                artifact = wandb.Artifact(name, type="profile")
                for path in kept:
                    artifact.add_file(str(path))
                run.log_artifact(artifact)

        return log

    def where(self) -> str:
        run = self._logger.experiment
        place = run.url or f"wandb sync {Path(run.dir).parent}"
        return f"in Weights & Biases: {place}"

    def end(self, profiles: Sequence[Profile], step: int, traces: Sequence[Path]) -> None:  # noqa: ARG002
        import wandb

        run = self._logger.experiment
        for profile in profiles:
            for name, value in totals(profile).items():
                run.summary[f"{self._root}/{profile.run.stage}/{name}"] = value
        if traces:
            artifact = wandb.Artifact(f"{self._root}-traces-{run.id}", type="trace")
            for path in traces:
                artifact.add_file(str(path), name=f"{path.parent.name}/{path.name}")
            run.log_artifact(artifact)


class MLflowOutput(Output):
    """Writes to a logger that has a `run_id`, and whose `experiment` is an MLflow client.

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
        client = self._logger.experiment
        run = self._logger.run_id
        folder = f"{self._root}/{analysis.profile.run.stage}-{analysis.profile.run.window}"
        columns = zip(*module_table(analysis), strict=True)
        table = {name: list(column) for name, column in zip(COLUMNS, columns, strict=True)}
        pictures = figures_of(analysis)

        def log() -> None:
            client.log_text(run, text, f"{folder}/summary.md")
            client.log_table(run, table, f"{folder}/modules.json")
            with tempfile.TemporaryDirectory() as temporary:
                for picture in pictures:
                    path = Path(temporary, f"{picture.name}.png")
                    write_whole(path, picture.png)
                    client.log_artifact(run, str(path), folder)
            for path in files:
                client.log_artifact(run, str(path), folder)

        return log

    def where(self) -> str:
        return f"in MLflow, run {self._logger.run_id}: artifacts below {self._root}"

    def end(self, profiles: Sequence[Profile], step: int, traces: Sequence[Path]) -> None:  # noqa: ARG002
        client = self._logger.experiment
        run = self._logger.run_id
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
"""For each class of loggers, the class that writes to it.

The key is the name of the logger's class or of one of its base classes.
"""


def figures_of(analysis: Analysis) -> list[Any]:
    """Return the figures of a window, each with a `name` and a `png`."""
    figures: list[Any] = []
    for pictures in offered("pictures", "drawing a figure"):
        figures += pictures(analysis)
    return figures


def markdown_of(analysis: Analysis) -> str:
    """Return the summary of a window, the first screen of its report, as Markdown."""
    return "\n".join(first_screen_markdown(first_screen(window_summary(analysis), None)))


def module_table(analysis: Analysis) -> list[list[Any]]:
    """Return a table with one row for each module and the columns `COLUMNS`.

    The values include submodules. Unknown values are `None`.
    """
    return [_table_row(name, module) for name, module in analysis.profile.modules.items()]


def _table_row(name: str, module: ModuleProfile) -> list[Any]:
    milliseconds: list[float | None] = []
    for phase in PASS_PHASES:
        seconds = median_of(module.work(phase).seconds)
        milliseconds.append(multiplied(seconds, 1e3))
    forward, backward, *_ = milliseconds
    total = None
    if forward is not None:
        total = sum(each for each in milliseconds if each is not None)
    return [
        name or "(model)",
        module.class_name,
        module.calls,
        module.parameters,
        module.work("forward").macs,
        module.work("backward").macs,
        forward,
        backward,
        total,
    ]


def totals(profile: Profile) -> dict[str, float]:
    """Return the number of parameters, and the MACs of each phase of a step in units of 10⁹.

    Loggers show these values in their tables of runs. The result is empty if nothing was counted.
    """
    if not profile.is_counted:
        return {}
    root = profile.modules[""]
    found: dict[str, float] = {"parameters": root.parameters}
    for phase in PHASES:
        macs = root.work(phase).macs
        if macs:
            found[f"{phase}_gmacs"] = macs / 1e9
    return found


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
    """Logs to a `SummaryWriter`. The owner of the writer closes it."""

    def __init__(self, writer: Any) -> None:
        self.experiment = writer
        self.log_dir: str = writer.log_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step)


class RunLogger:
    """Logs to a Weights & Biases run. The owner of the run finishes it.

    Weights & Biases has its own step counter. So each point contains the training step as
    `lflops_step`, which is the x-axis of the curves.
    """

    def __init__(self, run: Any) -> None:
        self.experiment = run
        # `run.dir` itself is not used, because Weights & Biases uploads every file in it, and the
        # artifacts already contain the files of lflops.
        self.log_dir = str(Path(run.dir).parent)
        run.define_metric("lflops_step", hidden=True)
        for name in ("lflops/*", "lflops_modules/*"):
            run.define_metric(name, step_metric="lflops_step")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.experiment.log({**metrics, "lflops_step": step})


def loggers_of(given: Any) -> list[Any]:
    """Convert a logger, a writer, a list of them, or `None` to a list of loggers.

    Raises:
        CountError: If `given` is anything else.
    """
    if given is None:
        return []
    if isinstance(given, list | tuple):
        return [_logger_of(each) for each in given]
    return [_logger_of(given)]


def _logger_of(given: Any) -> Any:
    if callable(getattr(given, "log_metrics", None)):
        return given
    if callable(getattr(given, "add_scalar", None)):
        return WriterLogger(given)
    if callable(getattr(given, "define_metric", None)) and callable(getattr(given, "log", None)):
        return RunLogger(given)
    raise CountError(
        f"logger={describe(given)}: pass a SummaryWriter, a wandb run, or an object with a "
        "method log_metrics(values, step=...)"
    )


# minimum number of windows for curves of modules, since two points do not show a curve
FEWEST_WINDOWS = 3

_TAGS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, tuple[str, ...]]
)
"""The report facts that are logged under each tag (the name of a curve).

A fact is a named number of the report. If a tag has several facts, the first fact that the report
contains is logged.
"""

# factors that convert the report's units to the units of the tags: ms, TFLOP/s and GiB
_FACTORS = {"s": 1e3, "FLOP/s": 1e-12, "bytes": 2**-30}


def scalars(analysis: Analysis) -> dict[str, float]:
    """Return the metrics of a window that are logged as curves. Unknown metrics are left out."""
    report = report_of(analysis)
    found = {}
    for tag, names in _TAGS.items():
        facts = [report.fact(name) for name in names]
        fact = next(filter(None, facts), None)
        if fact is not None and fact.value is not None:
            found[tag] = fact.value * _FACTORS.get(fact.unit, 1.0)
    return found


MOST_ROWS_AT_END = 5_000
"""Number of modules and operators from which a page counts as large.

A large HTML page is not written again when the run ends, because this takes seconds.
"""


class PreparedWindow(NamedTuple):
    """A window that is ready to be logged.

    Attributes:
        text: The text for the log.
        files: The files that were written.
        logs: Pairs of an output and a function that logs the window to this output.
    """

    text: str
    files: list[Path]
    logs: list[tuple[Output, Callable[[], None]]]


def _outlet(output: Output) -> str:
    """Return the name that warnings use for an output, such as "the MLflow output of a profile"."""
    return f"the {output.name} output of a profile"


class Reporters:
    """Writes the results of one monitor to all of its outputs, on the main process."""

    def __init__(
        self, training: Training, settings: Settings, monitor: int, failures: Failures
    ) -> None:
        self._failures = failures
        self._loop = training.loop
        self._loggers = training.loggers
        self._settings = settings
        self._root = "lflops" if monitor == 1 else f"lflops_{monitor}"
        self._outputs = self._outputs_of(training.loggers)
        # for each stage, the name patterns of the modules that have curves; repeated modules share
        # a pattern, and so they share a curve
        self._busiest: dict[str, tuple[str, ...]] = {}
        # for each stage, the points of these curves that wait until there are enough windows, each
        # with its step
        self._held_back: defaultdict[str, deque[tuple[dict[tuple[str, str], float], int]]] = (
            defaultdict(deque)
        )
        # the number of windows of each stage
        self._closed: Counter[str] = Counter()
        # the last window of each stage
        self._windows: dict[str | None, Profile] = {}
        # the first screen's summary of the last training window, and the path of the last page
        self.window: WindowSummary | None = None
        self._last_page: Path | None = None
        # metrics that have had a value other than 0
        self._begun: set[tuple[str, ...]] = set()
        # the pairs of a stage and a metric that `point` has logged
        self._on_curves: set[tuple[str, str]] = set()

    def _outputs_of(self, loggers: Iterable[Any]) -> list[Output]:
        outputs = []
        for logger in loggers:
            for base in type(logger).__mro__:
                if base.__name__ in OUTPUTS:
                    outputs.append(OUTPUTS[base.__name__](logger, self._root))
                    break
        return outputs

    def window_scalars(self, analysis: Analysis, step: int) -> None:
        """Log the metrics of a window as points of curves.

        Metrics that `point` logs during the whole run are left out.
        """
        stage = analysis.profile.run.stage or ""
        values: dict[tuple[str, ...], float] = {}
        for name, value in scalars(analysis).items():
            if (stage, name) not in self._on_curves:
                values[self._root, stage, name] = value
        self._log(values, step)

    def point(self, metrics: Mapping[str, float], stage: str, step: int) -> None:
        """Log metrics of the steps since the last call as points of curves.

        This method is also called outside windows. From now on, `window_scalars` leaves out these
        metrics, because otherwise the curves would have two points for the same steps.
        """
        self._on_curves.update((stage, name) for name in metrics)
        self._log({(self._root, stage, name): value for name, value in metrics.items()}, step)

    def module_scalars(self, analysis: Analysis, step: int) -> None:
        """Log the metrics of the modules that took the most time in the first window.

        Nothing is logged before the third window, because two points do not show a curve. The third
        window also logs the points of the first two.
        """
        stage = analysis.profile.run.stage or ""
        if not self._busiest.get(stage):
            busiest = analysis.busiest[: self._settings.module_scalars]
            self._busiest[stage] = tuple(modules.pattern for modules in busiest)
        metrics = module_scalars(analysis.profile, analysis.patterns, self._busiest[stage])
        self._held_back[stage].append((metrics, step))
        self._closed[stage] += 1
        if self._closed[stage] < FEWEST_WINDOWS:
            return
        root = f"{self._root}_modules"
        while self._held_back[stage]:
            values, at = self._held_back[stage].popleft()
            self._log({(root, stage, *names): value for names, value in values.items()}, at)

    def _log(self, values: Mapping[tuple[str, ...], float], step: int) -> None:
        """Log metrics to every logger that has not failed.

        A metric is left out until its value differs from 0 for the first time, because a curve of
        zeros is useless.
        """
        self._begun.update(names for names, value in values.items() if value)
        values = {names: value for names, value in values.items() if names in self._begun}
        if not values:
            return
        for number, logger in enumerate(self._loggers, 1):
            outlet = f"the output of logger {number}, a {type(logger).__name__},"
            if outlet not in self._failures:
                with self._failures.contained(outlet):
                    _log_metrics(logger, values, step)

    def prepare(self, analysis: Analysis, path: Path | None, step: int) -> PreparedWindow:
        """Write a window's HTML page and the user's `output_file`, and prepare to log the window.

        The page is written next to `path`, the file of the window's profile. `path` is `None` if
        the run has no folder for files. Any thread may call this method.
        """
        settings = self._settings
        stage = analysis.profile.run.stage
        files = [] if path is None else self.save_page(analysis, path)
        text = ""
        detailed = ""
        with self._failures.contained("the summary"):
            if settings.detailed or settings.output_file is not None:
                detailed = self._detailed_text(analysis)
            before = self._windows.get(stage)
            text = detailed if settings.detailed else log_text(analysis, before)
        if settings.output_file is not None:
            text_file = Path(settings.output_file)
            with self._failures.contained(f"output_file={str(text_file)!r}"):
                append_text(text_file, f"{detailed}\n", self._loop)
                files.append(text_file)
        written = [file for file in (path, *files) if file is not None and file.exists()]
        logs = []
        for output in self._outputs:
            with self._failures.contained(_outlet(output)):
                log = output.window(analysis, markdown_of(analysis), step, written)
                logs.append((output, log))
        with self._failures.contained("the scalars of each module"):
            # computed here, so that the training thread does not wait for these values
            _ = analysis.busiest, analysis.patterns
        self._windows[stage] = analysis.profile
        with self._failures.contained("the summary"):
            if self.window is None or stage == "train":
                self.window = window_summary(analysis)
        return PreparedWindow(text, files, logs)

    def save_page(self, analysis: Analysis, path: Path) -> list[Path]:
        """Write the HTML page of a window next to its file `path`, if the setting `html` is on.

        Returns the written files.
        """
        if not self._settings.html:
            return []
        page_path = path.with_suffix(".html")
        written = []
        with self._failures.contained("the page"):
            page.save(analysis, page_path)
            written.append(page_path)
            self._last_page = page_path
        return written

    def save_run_page(self, profiles: Sequence[Profile], ledger: Ledger) -> None:
        """Write the last HTML page again when the run ends.

        The new page has all windows of its stage, and the whole ledger (the run's time account).
        The page of a large model is not written again, because this takes seconds.
        """
        if self._last_page is None or not profiles:
            return
        if page.rows_of(profiles[-1]) >= MOST_ROWS_AT_END:
            return
        stage = profiles[-1].run.stage
        windows = [profile for profile in profiles if profile.run.stage == stage]
        with self._failures.contained("the page"):
            page.write(page.page_of_run(windows, ledger), self._last_page, is_named=False)

    def slow_rank_sentences(self, analysis: Analysis) -> dict[Hashable, str]:
        """Return a sentence about each rank that makes other ranks wait.

        The key of a sentence identifies the rank and its delay, so that no sentence is logged
        twice.
        """
        found: dict[Hashable, str] = {}
        with self._failures.contained("the summary"):
            found.update(slow_rank_sentences(analysis))
        return found

    def log(self, prepared: PreparedWindow) -> None:
        """Log a prepared window to all loggers."""
        for output, log in prepared.logs:
            with self._failures.contained(_outlet(output)):
                log()

    def end(self, profiles: Sequence[Profile], traces: Iterable[Path], step: int) -> None:
        """Log the end of the run.

        Args:
            profiles: The last window of each stage.
            traces: The traces of all windows.
            step: The last step.
        """
        traces = [path for path in traces if path.exists()]
        for output in self._outputs:
            with self._failures.contained(f"the {output.name} output of the run"):
                output.end(profiles, step, traces)

    def where(self) -> list[str]:
        """Return the places where the outputs can be seen. A logger that fails is left out."""
        found = []
        for output in self._outputs:
            with contextlib.suppress(Exception):
                found.append(output.where())
        return found

    def _detailed_text(self, analysis: Analysis) -> str:
        """Return a window's text for `detailed` and `output_file`.

        It has the format of DeepSpeed's profiler.
        """
        settings = self._settings
        for summary in offered("summary", "the summary"):
            text = summary(
                analysis,
                module_depth=settings.module_depth,
                top_modules=settings.top_modules,
                detailed=True,
                fold=True,
            )
            return str(text)
        return log_text(analysis, None)


def _log_metrics(logger: Any, values: Mapping[tuple[str, ...], float], step: int) -> None:
    separator = getattr(logger, "group_separator", None)
    joint = separator if isinstance(separator, str) else "/"
    metrics = {joint.join(names): value for names, value in values.items()}
    if separator is None:
        logger.log_metrics(metrics, step=step)
    else:
        # Lightning passes both arguments by name
        logger.log_metrics(metrics=metrics, step=step)


def log_run(
    ledger: Ledger,
    window: WindowSummary | None,
    paths: OutputPaths | None,
    say: Callable[[str], None],
    *,
    only_on_request: bool = False,
) -> None:
    """Log a summary of the whole run.

    If the run had no window and nothing stands out in its ledger, the summary is one line that
    names the folder. Such a run gets no summary if it has no folder or no steps.

    Args:
        ledger: The ledger of the run.
        window: The last window of the run, or `None`.
        paths: The folder of the run, or `None` if nothing is written.
        say: Writes a text to the log.
        only_on_request: Whether windows only open on request. If there was no request, the summary
            says how to profile a window.
    """
    advice = HOW_TO_PROFILE if only_on_request and window is None else ""
    if window is None and not _stands_out(ledger):
        if paths is not None and ledger.steps:
            where = shlex.quote(str(paths.profiles))
            ended = (
                f"lflops: the run has ended: {headline(ledger)}; to see more: lflops why {where}"
            )
            say(joined(ended, advice, separator="\n"))
        return
    lines = ["lflops: the run has ended"]
    for label, text in first_screen_rows(first_screen(window, ledger), ledger):
        lines.append(f"{label:<14}  {plain(text)}")
    if paths is not None:
        where = shlex.quote(str(paths.profiles))
        # Without a window, the folder has no profile to show.
        command = "why" if window is None else "show"
        lines.append(f"{'to see more':<14}  lflops {command} {where}; lflops ledger {where}")
        if advice:
            lines.append(f"{'':<14}  {advice}")
    say("\n".join(lines))


def _stands_out(ledger: Ledger) -> bool:
    """Return whether a run lost much time or memory, has an issue, or has a large finding."""
    found = findings_of(None, ledger)
    if has_losses(ledger) or first_issue(found) is not None:
        return True
    return any((finding.share or 0.0) >= LARGE_COST for finding in found)


def module_scalars(
    profile: Profile, patterns: Mapping[str, str], names: Iterable[str]
) -> dict[tuple[str, str], float]:
    """Return the self times and TFLOP/s of modules, keyed by metric and name pattern.

    Repeated modules have one pattern, such as `layers.*.mlp`, and their times are added up. Unknown
    metrics are left out.

    Args:
        profile: The profile with the times of modules.
        patterns: The pattern of each module.
        names: The patterns to return.
    """
    modules_of: dict[str, list[ModuleProfile]] = {pattern: [] for pattern in names}
    for name, module in profile.modules.items():
        if patterns[name] in modules_of:
            modules_of[patterns[name]].append(module)
    scalars: dict[tuple[str, str], float] = {}
    for pattern, modules in modules_of.items():
        label = pattern or "root"
        seconds = 0.0
        macs = 0
        for phase in MODEL_PHASES:
            works = [module.work(phase) for module in modules]
            timed = [work.self_seconds.median for work in works if work.self_seconds is not None]
            if timed:
                scalars[f"{phase}_ms", label] = sum(timed) * 1e3
            seconds += sum(timed)
            macs += sum(work.self_macs for work in works)
        rate = None
        if profile.is_counted:
            rate = flops_per_second(macs, seconds)
        if rate:
            scalars["tflops", label] = rate / 1e12
    return scalars
