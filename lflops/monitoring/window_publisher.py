"""Publish closed windows: merge the profiles of all ranks, then save, log and keep the result.

A window is a few consecutive steps that lflops profiles. Each rank has one profile of each window.
"""

import contextlib
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait as wait_for
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from lflops.analysis.analysis import Analysis, analyze
from lflops.hardware.calibrate import forget
from lflops.monitoring.inputs.messages import Failures, monitor_name, warn
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import Training
from lflops.monitoring.outputs.loggers import PreparedWindow, Reporters
from lflops.monitoring.outputs.paths import OutputPaths, claim, release
from lflops.profile.notes import notes_with
from lflops.profile.profile import Profile
from lflops.profile.records import ModulePhase, RankComparison
from lflops.profile.steps import Step
from lflops.ranks.collect.collector import RankCollector
from lflops.ranks.collect.topology import topology_of
from lflops.ranks.merge.merge import merge
from lflops.ranks.reported_stragglers import ReportedStragglers

Result = TypeVar("Result")

# the key in the ranks' store under which the main process announces the folder for files
_FOLDER = "folder"

# If a profile has at least this many modules and operators, a background thread creates its page
# and the outputs of loggers. For smaller profiles, the training thread creates them in about 50 ms.
LARGE = 5_000

# Maximum number of windows of a run that are kept in memory, because a window of a large model
# takes a few MB, and a schedule may repeat without end.
MOST_PROFILES = 32
# maximum number of seconds that the end of a run waits for pages that are being written
LONGEST = 30.0


def _shares(own: Iterable[Step], merged: Iterable[Step]) -> dict[str, float]:
    """Return the samples and tokens of all ranks, divided by the samples and tokens of this rank.

    For example, `{"samples": 4.0}` means that all ranks together have 4 times as many samples as
    this rank. Unknown values are left out.

    Args:
        own: The steps of a window on this rank.
        merged: The same steps, each with the sums over all ranks.
    """
    own_steps = {(step.index, step.kind): step for step in own}
    totals = {"samples": 0, "tokens": 0}
    own_totals = {"samples": 0, "tokens": 0}
    for step in merged:
        own_step = own_steps.get((step.index, step.kind))
        if own_step is None:
            continue
        for name in totals:
            units = getattr(step, name)
            own_units = getattr(own_step, name)
            if units is not None and own_units:
                totals[name] += units
                own_totals[name] += own_units
    shares = {}
    for name, own_total in own_totals.items():
        if own_total:
            shares[name] = totals[name] / own_total
    return shares


def _ended(profile: Profile, *, cut_short: bool) -> str:
    """Return the last part of a window's log message; empty if the window ended as planned.

    The text says whether the window ended early, and names the ranks whose profiles are missing. A
    window ended early if it was cut short on this rank, or if a rank failed.
    """
    missing = ", ".join(note.subject for note in notes_with("ranks_missing", profile.notes))
    failed = any(rank.status == "failed" for rank in profile.ranks)
    is_partial = profile.run.partial and not missing
    text = ""
    if cut_short or failed or is_partial:
        text = ", earlier than planned"
    if missing:
        text += f", without the reports of ranks {missing}"
    return text


class _Closed(NamedTuple):
    """A window (a few profiled steps) that is over and will be logged.

    Attributes:
        message: The first line of the text to log.
        files: The files of the window that have already been written.
        step: The step at which loggers show the results of the window.
        is_first: Whether it is the first window of the run.
    """

    analysis: Analysis
    message: str
    files: list[Path]
    step: int
    is_first: bool


class WindowPublisher:
    """Publishes the windows of all stages for one monitor in one run.

    Every process creates a publisher, because each rank sends its windows to rank 0.

    Args:
        training: The training run.
        settings: The settings of the monitor.
        log_dir: The run's folder, or `None`.
        monitor: The number of the monitor among the loop's monitors, from 1.
        store: A store that all ranks can reach, or `None`.

    Attributes:
        profiles: The profiles of the last `MOST_PROFILES` windows, each merged from all ranks.
            Empty if this is not the main process.
        shares: For each stage, the samples and tokens of all ranks in the last window, divided by
            the samples and tokens of this rank.
        run_curves: Returns metrics of the whole run, which are added to each point of the loggers'
            curves.
        topology: The coordinates of the ranks in each kind of parallelism.
        failures: The outputs that have failed.
        reporters: Writes windows to all outputs. `None` if this is not the main process.
        paths: The paths of files, or `None` if no files are written.
        compares_ranks: Whether the unprofiled steps of all ranks are compared.
        wants_windows: Whether the windows of this rank are sent, logged or saved at all.

    Raises:
        CountError: If the user's description of the ranks is wrong.
    """

    def __init__(
        self,
        training: Training,
        settings: Settings,
        log_dir: str | None,
        *,
        monitor: int,
        store: Any,
    ) -> None:
        self.profiles: list[Profile] = []
        self.shares: dict[str, Mapping[str, float]] = {}
        self.run_curves: Callable[[], dict[str, float]] = dict
        # the number of published windows, the last window of each stage, and the traces of all
        # windows
        self._closed = 0
        self._last: dict[str | None, Profile] = {}
        self._traces: list[Path] = []
        self._training = training
        # the profile that was saved last, and its path
        self._saved: tuple[Profile, Path] | None = None
        # Whether this rank's window is partial, and its steps, keyed by stage and window. They are
        # kept until the windows of all ranks are merged.
        self._own: dict[tuple[str | None, int | None], tuple[bool, tuple[Step, ...]]] = {}
        # for each stage, the last rank comparison that was handled
        self._compared: dict[str, RankComparison] = {}
        # keys of the logged sentences about slow ranks (see `Reporters.slow_rank_sentences`)
        self._flagged: set[Hashable] = set()
        self._reported = ReportedStragglers()
        self._in_background: deque[tuple[_Closed, Future[PreparedWindow]]] = deque()
        self.topology = topology_of(
            training.world_size,
            training.rank,
            function=settings.topology,
            mesh=training.mesh,
            model=training.model,
            sampler=training.sampler,
            node=training.node,
        )
        self._collector: RankCollector | None = None
        if store is not None:
            self._collector = RankCollector(
                store, training.rank, self.topology, timeout=settings.gather_timeout
            )
        self.failures = Failures(raised=settings.on_error == "raise")
        self.reporters: Reporters | None = None
        if training.is_main:
            self.reporters = Reporters(training, settings, monitor, self.failures)
        paths = OutputPaths.of(log_dir, settings.dirpath, monitor)
        # the folder in which the run has claimed a part
        self._folder = None if paths is None else paths.profiles
        if paths is not None:
            if training.is_main:
                paths.remove_leftovers()
            part = _part_of(paths.profiles, training, store, settings.gather_timeout)
            paths = paths.within(part)
        self.paths = paths
        self.compares_ranks = self._collector is not None
        self.wants_windows = (
            self.compares_ranks or self.reporters is not None or self.paths is not None
        )
        if self._collector is None and self.topology.world_size > 1 and self.reporters is not None:
            self._warn_of_lone_ranks()

    def _warn_of_lone_ranks(self) -> None:
        if self.paths is None:
            kept = (
                "The run has no folder, so the profiles of the other ranks are not saved: "
                "set a folder with dirpath=, and merge the profiles with lflops.merge"
            )
        else:
            kept = (
                f"Each rank saves its own profile in {self.paths.profiles}: "
                "merge the profiles with lflops.merge"
            )
        warn(
            f"{monitor_name()}: the profiles of the ranks are not merged, because the ranks have "
            f"no common key-value store of torch.distributed. {kept}"
        )

    @property
    def pending(self) -> bool:
        """Return whether any window is not published yet."""
        return bool(self._in_background) or (
            self._collector is not None and self._collector.pending
        )

    @property
    def busy(self) -> bool:
        """Return whether a background thread is working on a window."""
        return bool(self._in_background) or (self._collector is not None and self._collector.busy)

    def add(self, profile: Profile, steps: tuple[Mapping[ModulePhase, float], ...]) -> None:
        """Publish a closed window of this rank.

        Args:
            profile: The profile of the window.
            steps: For each module-timing step, the self seconds of each module and phase.
        """
        run = profile.run
        if self.reporters is not None:
            self._own[run.stage, run.window] = run.partial, profile.steps
        if self._collector is not None:
            self._collector.push(profile, steps)
        elif self.topology.world_size == 1:
            self._report(profile)
        else:
            alone = replace(profile, run=self.topology.of(run))
            self._save_of_rank(alone)
            if self.reporters is not None:
                self._report(merge({self._training.rank: alone}))

    def share(self, stage: str, steps: Iterable[Step]) -> None:
        """Send unprofiled steps of this rank to rank 0. On rank 0, log which ranks are slow."""
        if self._collector is not None:
            self._collector.share(stage, steps)
            self._compare_ranks()

    def _compare_ranks(self, *, is_last: bool = False) -> None:
        """Log which ranks make other ranks wait, unless they have been logged before.

        The ranks are compared over the last unprofiled steps of the run. These are more steps than
        the unprofiled steps of a window. At the end of the run (`is_last`), this comparison also
        replaces the comparison in the last window of each stage.
        """
        if self._collector is None or self.reporters is None:
            return
        for stage, compared in self._collector.comparisons.items():
            window = self._last.get(stage)
            is_new = compared is not self._compared.get(stage) or is_last
            if window is not None and is_new and _has_more_steps(compared, window):
                self._compared[stage] = compared
                self._compare_in_window(self.reporters, window, compared, is_last=is_last)

    def _compare_in_window(
        self, reporters: Reporters, window: Profile, compared: RankComparison, *, is_last: bool
    ) -> None:
        """Log the slow ranks in `compared` that have not been logged before.

        If a rank is logged, and the window's file does not show the same slow ranks, the file is
        saved again. At the end of the run (`is_last`), the window's profile and page are replaced
        too.
        """
        compared = self._reported.added_to(compared, window.run.stage)
        profile = replace(window, unprofiled_comparison=compared)
        analysis = analyze(profile)
        slow = reporters.slow_rank_sentences(analysis)
        is_new = False
        for key, sentence in slow.items():
            if key not in self._flagged:
                is_new = True
                self._flagged.add(key)
                self._training.log(
                    f"lflops: in the last {compared.steps} unprofiled steps {sentence}"
                )
        self._reported.keep(profile, analysis.stragglers)
        if not is_new and not is_last:
            return
        # Save now, so that the file agrees with the log however the run ends.
        path = None
        differs = slow.keys() != reporters.slow_rank_sentences(analyze(window)).keys()
        if self.paths is not None and differs:
            path = self.paths.profile(profile.run)
        is_saved = path is not None and self.save(profile, path)
        if not is_last:
            return
        self.profiles[:] = [profile if each is window else each for each in self.profiles]
        self._last[profile.run.stage] = profile
        if path is not None and is_saved:
            reporters.save_page(analysis, path)

    def report_ready(self) -> bool:
        """Publish the windows that all ranks have reported, or whose outputs are prepared.

        Returns whether any window was published.
        """
        ready = [] if self._collector is None else self._collector.ready()
        for profile in ready:
            self._report(profile)
        return self._log_prepared() or bool(ready)

    def finish(self, *, failed: bool) -> None:
        """Publish all pending windows at the end of the run. After a failure, do not wait."""
        try:
            if self._collector is not None:
                for profile in self._collector.finish(failed=failed):
                    self._report(profile)
            self._log_prepared()
            self._log_unprepared(0.0 if failed else LONGEST)
            if not failed:
                self._compare_ranks(is_last=True)
            if self.reporters is not None and not failed:
                last = list(self._last.values())
                self.reporters.end(last, self._traces, self._training.logged_step())
        finally:
            if self._folder is not None and self._training.is_main:
                release(self._folder, self._training.loop)

    def save(self, profile: Profile, path: Path, outlet: str = "the profile's file") -> bool:
        """Write a window's file and the folders above it, unless the last call wrote it already.

        Args:
            profile: The profile of the window.
            path: The file.
            outlet: How the warning describes the file if it cannot be written.

        Returns:
            Whether the file exists.
        """
        if self._saved is None or self._saved[0] is not profile or self._saved[1] != path:
            self._saved = None
            with self.failures.contained(outlet):
                profile.save(path)
                self._saved = profile, path
        return self._saved is not None

    def _save_of_rank(self, profile: Profile) -> None:
        if self.paths is not None:
            path = self.paths.of_rank(profile.run, self._training.rank)
            self.save(profile, path, "the file of this rank's profile")

    def _report(self, profile: Profile) -> None:
        """Publish a window: keep its profile, save it, and log it.

        On ranks other than 0, only save the profile, because it could not be sent to rank 0.
        """
        if self.reporters is None:
            self._save_of_rank(profile)
            return
        run = profile.run
        self._keep(profile)
        path = None
        saved = []
        if self.paths is not None:
            path = self.paths.profile(run)
            if self.save(profile, path):
                saved.append(path)
        cut_short, own = self._own.pop((run.stage, run.window), (run.partial, ()))
        self.shares[run.stage or ""] = _shares(own, profile.steps)
        step = self._training.logged_step()
        analysis = analyze(profile)
        if profile.ranks:
            self._flagged.update(self.reporters.slow_rank_sentences(analysis))
            self._reported.keep(profile, analysis.stragglers)
        ended = _ended(profile, cut_short=cut_short)
        closed = _Closed(
            analysis,
            f"lflops: {run.stage} window {run.window} closed at step {run.step}{ended}",
            saved,
            step,
            is_first=self._closed == 1,
        )
        prepare = partial(self.reporters.prepare, analysis, path, step)
        if len(profile.modules) + len(profile.op_counts) < LARGE and not self._in_background:
            self._log(closed, prepare())
        else:
            # prepare windows in order, because each window is compared with the previous window,
            # and each text is appended to a file
            before = [future for _, future in self._in_background]
            future = in_background(prepare, f"lflops: {run.stage} window {run.window}", before)
            self._in_background.append((closed, future))

    def _keep(self, profile: Profile) -> None:
        self._closed += 1
        self.profiles.append(profile)
        del self.profiles[:-MOST_PROFILES]
        self._last[profile.run.stage] = profile
        if profile.trace is not None:
            self._traces += map(Path, profile.trace.files.values())

    def _log(self, closed: _Closed, prepared: PreparedWindow) -> None:
        """Write the text of a window to the log, and its results to all loggers."""
        if self.reporters is None:
            return
        files = [*closed.files, *prepared.files]
        places: list[str] = []
        if closed.is_first:
            places += _places(files, self.reporters.where())
        shown = "\n".join(places)
        others = [str(file) for file in files if str(file) not in shown]
        message = [
            closed.message,
            prepared.text,
            *_labelled("files", others),
            *_labelled("to see more", places),
        ]
        self.reporters.log(prepared)
        if closed.analysis.utilization.is_peak_too_low and forget(closed.analysis.chip):
            message.append(
                "lflops: this step is faster than the measured peak allows, so the next run"
                " measures the peak again"
            )
        self._training.log("\n".join(filter(None, message)))
        self.reporters.window_scalars(closed.analysis, closed.step)
        self.reporters.module_scalars(closed.analysis, closed.step)

    def _log_unprepared(self, seconds: float) -> None:
        """Wait at most `seconds` for the background threads, and log the remaining windows.

        A window that is not ready is logged without its page and summary.
        """
        end = time.monotonic() + seconds
        while self._in_background:
            wait_for([self._in_background[0][1]], max(end - time.monotonic(), 0.0))
            if self._log_prepared():
                continue
            closed, _ = self._in_background.popleft()
            self._log(closed, PreparedWindow("", [], []))
            if seconds:
                self._warn_of_missing_page(closed.analysis.profile, seconds)

    def _warn_of_missing_page(self, profile: Profile, seconds: float) -> None:
        where = ""
        if self.paths is not None:
            page = self.paths.profile(profile.run).with_suffix(".html")
            where = f" in {page}"
        warn(
            f"{monitor_name()}: the page{where} and the summary of a window are left out, because "
            f"they were not finished in {seconds:g} s; all other outputs continue"
        )

    def _log_prepared(self) -> bool:
        """Log the windows that background threads have prepared, in order.

        Returns whether any window was logged.
        """
        logged = False
        while self._in_background and self._in_background[0][1].done():
            closed, future = self._in_background.popleft()
            self._log(closed, future.result())
            logged = True
        return logged


def _has_more_steps(compared: RankComparison, window: Profile) -> bool:
    """Return whether `compared` covers more steps than the comparison in a window's profile."""
    earlier = window.unprofiled_comparison
    return compared.steps > (0 if earlier is None else earlier.steps)


def _labelled(label: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"{label:<16}  {line}"
        label = ""


def _places(files: Sequence[Path], logged: Sequence[str]) -> Iterator[str]:
    """Yield lines that explain where to see the results of the run."""
    profiles = [file for file in files if file.name.endswith(".profile.json")]
    if profiles:
        yield f"on a terminal: lflops show {shlex.quote(str(profiles[0]))}"
    pages = [file for file in files if file.suffix == ".html"]
    if pages:
        yield f"in a browser: {pages[0]}"
    yield from logged


def _part_of(folder: Path, training: Training, store: Any, timeout: float) -> str:
    """Return the part of a folder that is reserved for the run: "" or a subfolder (see `claim`).

    The main process reserves it, and sends its name to the other ranks. A rank that does not
    receive the name writes to the folder itself, where its files have unique names.
    """
    if training.is_main:
        part = claim(folder, training.loop)
        if store is not None:
            with contextlib.suppress(Exception):
                store.set(_FOLDER, part)
        return part
    with contextlib.suppress(Exception):
        store.wait([_FOLDER], timedelta(seconds=timeout / 4))
        return str(store.get(_FOLDER).decode())
    return ""


def in_background(
    function: Callable[[], Result], name: str, after: Sequence[Future[Any]] = ()
) -> Future[Result]:
    """Call a function in a daemon thread, after all futures in `after` are done.

    The interpreter does not wait for the thread, so it can exit even if the file system hangs.
    Files are written atomically, so no file is left half written.
    """
    future: Future[Result] = Future()

    def call() -> None:
        try:
            wait_for(after)
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future
