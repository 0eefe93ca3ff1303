"""What a window leaves in the Trainer's loggers and in its log directory."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from lflops.analyze.analysis import Analysis
from lflops.profile.model import Phase, Profile, Work
from lflops.report import html as page
from lflops.report.deepspeed_text.summary import summary
from lflops.session.inputs.settings import Settings
from lflops.session.inputs.training import Training
from lflops.session.outlets.failures import Failures
from lflops.session.outlets.paths import open_text
from lflops.session.outlets.tensorboard_logger import LONGEST_TEXT, TensorBoardOutput
from lflops.session.outlets.writer import is_tensorboard

__all__ = ["Outlets", "busiest", "module_scalars", "scalars"]

PHASES = ("data", "forward", "backward", "optimizer")
LEARNING: tuple[Phase, ...] = ("forward", "backward")


def scalars(analysis: Analysis) -> dict[str, float]:
    """The figures of a window that are worth a curve; the unknown ones are left out."""
    profile, paced, used = analysis.profile, analysis.step_times, analysis.utilization
    run = profile.run
    times = {"step": paced.seconds, **{phase: paced.phases.get(phase) for phase in PHASES}}
    found = {f"{name}_ms": None if spread is None else spread.median * 1e3 for name, spread in times.items()}
    found |= {"mfu": used.mfu, "hfu": used.hfu}
    found["tflops_per_device"] = None if used.flops_per_second is None else used.flops_per_second / 1e12
    found["samples_per_second"] = paced.samples_per_second
    found["tokens_per_second"] = paced.tokens_per_second
    found["peak_memory_gib"] = None if profile.memory is None else profile.memory.peak_bytes / 2**30
    found["observer_overhead"] = None if run.observer_ratio is None else run.observer_ratio - 1
    return {name: value for name, value in found.items() if value is not None}


def busiest(profile: Profile, number: int) -> tuple[str, ...]:
    """So many modules at most, of those that were timed: the ones with the most forward and backward of their own."""
    spent = {name: sum(_own(row.work(phase)) or 0 for phase in LEARNING) for name, row in profile.modules.items()}
    return tuple(sorted((name for name in spent if spent[name]), key=lambda name: -spent[name])[:number])


def module_scalars(profile: Profile, names: Iterable[str]) -> dict[tuple[str, str], float]:
    """Times and FLOP/s of modules themselves, by figure and module; the unknown ones are left out."""
    found: dict[tuple[str, str], float] = {}
    for name in names:
        if name not in profile.modules:
            continue
        row, label = profile.modules[name], name or "root"
        seconds = {phase: _own(row.work(phase)) for phase in LEARNING}
        found |= {(f"{phase}_ms", label): each * 1e3 for phase, each in seconds.items() if each is not None}
        spent = sum(each or 0 for each in seconds.values())
        if spent and profile.is_counted:
            found["tflops", label] = 2 * sum(row.work(phase).own_macs for phase in LEARNING) / spent / 1e12
    return found


def _own(work: Work) -> float | None:
    return None if work.own_seconds is None else work.own_seconds.median


class Outlets:
    """Where one monitor's results go; all of them on the main process alone.

    Args:
        training: Whose loggers they are.
        settings: How the text is to be, and where it goes.
        monitor: Which of the loop's monitors this is, from 1.
        failures: What becomes of an error of one of them.
    """

    def __init__(self, training: Training, settings: Settings, monitor: int, failures: Failures) -> None:
        """Write nothing yet."""
        self._failures = failures
        self._loop = training.loop
        self._loggers = training.loggers
        self._settings = settings
        self._root = "lflops" if monitor == 1 else f"lflops_{monitor}"
        self._boards = [TensorBoardOutput(logger, self._root) for logger in training.loggers if is_tensorboard(logger)]
        self._busiest: dict[str, tuple[str, ...]] = {}

    def scalars(self, values: Mapping[str, float], stage: str, step: int) -> None:
        """Log them to every logger, under the stage's name."""
        self._log({(self._root, stage, name): value for name, value in values.items()}, step)

    def module_scalars(self, profile: Profile, step: int) -> None:
        """Log to every logger what the busiest modules took: in all windows of a stage those that were so in the first."""
        stage = profile.run.stage or ""
        if not self._busiest.get(stage):
            self._busiest[stage] = busiest(profile, self._settings.module_scalars)
        found = module_scalars(profile, self._busiest[stage])
        self._log({(f"{self._root}_modules", stage, *names): value for names, value in found.items()}, step)

    def _log(self, values: Mapping[tuple[str, ...], float], step: int) -> None:
        if not values:
            return
        for number, logger in enumerate(self._loggers, 1):
            outlet = f"logger {number}, a {type(logger).__name__},"
            if outlet not in self._failures:
                with self._failures.contained(outlet):
                    given = getattr(logger, "group_separator", "/")
                    separator = given if isinstance(given, str) else "/"
                    logger.log_metrics({separator.join(names): value for names, value in values.items()}, step=step)

    def window(self, analysis: Analysis, path: Path | None, step: int) -> tuple[str, list[Path]]:
        """Log a window's text, and write the page beside its file.

        Args:
            analysis: The window.
            path: Its file, if it is to have one.
            step: The loggers' x-axis.

        Returns:
            The text, and the files that were written.
        """
        text, files = "", []
        if path is not None and self._settings.html:
            with self._failures.contained("the page"):
                page.save(analysis, path.with_suffix(".html"))
                files.append(path.with_suffix(".html"))
        with self._failures.contained("the summary"):
            text = self._text(analysis, detailed=self._settings.detailed)
        if self._settings.output_file is not None:
            output = Path(self._settings.output_file)
            with self._failures.contained(f"output_file={str(output)!r}"):
                with open_text(output, self._loop) as file:
                    file.write(f"{text}\n")
                files.append(output)
        for board in self._boards:
            with self._failures.contained("TensorBoard's text, tab and figures"):
                brief = text if len(text.splitlines()) <= LONGEST_TEXT else self._text(analysis, detailed=False)
                board.window(analysis, brief, step)
        return text, files

    def end(self, profiles: Iterable[Profile], step: int) -> None:
        """The run is over, with these windows."""
        for board in self._boards:
            with self._failures.contained("TensorBoard's table of runs"):
                board.end(profiles, step)

    def _text(self, analysis: Analysis, *, detailed: bool) -> str:
        asked = self._settings
        return summary(analysis, module_depth=asked.module_depth, top_modules=asked.top_modules, detailed=detailed)
