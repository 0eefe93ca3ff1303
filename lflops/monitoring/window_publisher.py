"""What becomes of a window that is closed.

It is put together with those of all ranks, saved, logged and kept.
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
from lflops.monitoring.inputs.messages import Failures, warn
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

Result = TypeVar("Result")

# the key of the ranks' store under which the main process says where files go
_FOLDER = "folder"

LARGE = 5_000
"""Modules and operators of a profile, from which on the page and what loggers are given are made in a thread: of less it takes 50 ms."""

# windows of a run that are kept in memory: one of a large model has a few MB, and a schedule may
# repeat without end
KEPT = 32
# seconds that the end of a training waits for pages that are being written
LONGEST = 30.0


def _shares(own: Iterable[Step], merged: Iterable[Step]) -> dict[str, float]:
    """The samples and tokens of all ranks over those of this rank; what is unknown is left out."""
    here = {(step.index, step.kind): step for step in own}
    pairs = [
        (step, here[step.index, step.kind]) for step in merged if (step.index, step.kind) in here
    ]
    shares = {}
    for name in ("samples", "tokens"):
        units = [
            (getattr(everywhere, name), getattr(own_step, name)) for everywhere, own_step in pairs
        ]
        known = [
            (everywhere, self_units)
            for everywhere, self_units in units
            if everywhere is not None and self_units
        ]
        if known:
            shares[name] = sum(everywhere for everywhere, _ in known) / sum(
                self_units for _, self_units in known
            )
    return shares


def _ended(profile: Profile, *, cut_short: bool) -> str:
    """How the window's end was not the planned one.

    That a rank's report is missing does not cut it short.
    """
    missing = ", ".join(note.subject for note in notes_with("ranks_missing", profile.notes))
    failed = any(rank.status == "failed" for rank in profile.ranks)
    early = (
        " before its end" if cut_short or failed or (profile.run.partial and not missing) else ""
    )
    return early + (f" without the reports of ranks {missing}" if missing else "")


class _Closed(NamedTuple):
    """A window that is closed, and has yet to be logged."""

    analysis: Analysis
    # what the log says of it first
    message: str
    # those that are already written
    files: list[Path]
    # the loggers' x-axis
    step: int
    # of the run
    is_first: bool


class WindowPublisher:
    """The windows of one monitor in one run of the Trainer, of all stages.

    Every process makes one, for they have to agree.

    `monitor` says which of the loop's monitors it is for, from 1; the `store` is one that all ranks
    reach, `None` where they have none. A `CountError` says that what the user says of the ranks
    cannot be.
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
        # The last windows, `KEPT` at most, those of all ranks together, on the main process.
        # Earlier ones are in their files.
        self.profiles: list[Profile] = []
        # how many windows there were
        self._closed = 0
        # by stage
        self._last: dict[str | None, Profile] = {}
        self._traces: list[Path] = []
        # By stage, how many times the samples and the tokens of this rank all ranks have together,
        # as the last window had them.
        self.shares: dict[str, Mapping[str, float]] = {}
        self.run_curves: Callable[[], dict[str, float]] = (
            # figures of the whole run, for each point of the training's curves
            dict
        )
        self._training = training
        # the last that was
        self._saved: tuple[Profile, Path] | None = None
        self._own: dict[
            tuple[str | None, int | None], tuple[bool, tuple[Step, ...]]
            # this rank's, until all are merged
        ] = {}
        # by stage, the last that was looked at
        self._compared: dict[str, RankComparison] = {}
        self._accused: set[Hashable] = set()
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
        self._gather = (
            None
            if store is None
            else RankCollector(store, training.rank, self.topology, timeout=settings.gather_timeout)
        )
        self.failures = Failures(raised=settings.on_error == "raise")
        # Where results go; `None` on all processes but the main one.
        self.outlets = (
            Reporters(training, settings, monitor, self.failures) if training.is_main else None
        )
        # `None` for no files
        paths = OutputPaths.of(log_dir, settings.dirpath, monitor)
        # that the run has a part of
        self._folder = None if paths is None else paths.profiles
        if paths is not None:
            paths = paths.within(_part_of(paths.profiles, training, store, settings.gather_timeout))
        self.paths = paths
        self.compares_ranks = (
            self._gather is not None
            # whether the clean steps of all ranks come together
        )
        # Whether this rank's windows are of use to anybody.
        self.wants_windows = (
            self.compares_ranks or self.outlets is not None or self.paths is not None
        )
        if self._gather is None and self.topology.world_size > 1 and self.outlets is not None:
            kept = (
                "there is no folder for what the others have"
                if paths is None
                else f"each keeps its own in {paths.profiles}"
            )
            warn(
                f"FlopsMonitor: the ranks have no store to reach each other by: {kept}; lflops.merge makes one profile of them"
            )

    @property
    def pending(self) -> bool:
        """Whether windows are on their way."""
        return bool(self._in_background) or (self._gather is not None and self._gather.pending)

    @property
    def busy(self) -> bool:
        """Whether something of that works in the background."""
        return bool(self._in_background) or (self._gather is not None and self._gather.busy)

    def add(self, profile: Profile, steps: tuple[Mapping[ModulePhase, float], ...]) -> None:
        """A window of this rank is closed.

        `steps` has the own seconds of modules in each of its hooked steps.
        """
        if self.outlets is not None:
            self._own[profile.run.stage, profile.run.window] = profile.run.partial, profile.steps
        if self._gather is not None:
            self._gather.push(profile, steps)
        elif self.topology.world_size == 1:
            self._report(profile)
        else:
            alone = replace(profile, run=self.topology.of(profile.run))
            self._save_of_rank(alone)
            if self.outlets is not None:
                self._report(merge({self._training.rank: alone}))

    def share(self, stage: str, steps: Iterable[Step]) -> None:
        """Hand in the clean steps of this rank since the last time.

        On the main process see what those of all ranks say.
        """
        if self._gather is not None:
            self._gather.share(stage, steps)
            self._compare_ranks()

    def _compare_ranks(self, *, is_last: bool = False) -> None:
        """Name the ranks that make the others wait, if no window has named them.

        At the end the last window names them, too.
        """
        outlets = self.outlets
        for stage, compared in (
            {} if self._gather is None or outlets is None else self._gather.comparisons.items()
        ):
            window = self._last.get(stage)
            if (
                window is None
                or outlets is None
                or (compared is self._compared.get(stage) and not is_last)
            ):
                continue
            if compared.steps <= (
                0 if window.unprofiled_comparison is None else window.unprofiled_comparison.steps
            ):
                continue
            self._compared[stage] = compared
            profile = replace(window, unprofiled_comparison=compared)
            analysis = analyze(profile)
            found = outlets.slow_ranks(analysis)
            for culprit in [each for each in found if each not in self._accused]:
                self._accused.add(culprit)
                self._training.say(
                    f"lflops: in the last {compared.steps} undisturbed steps {found[culprit]}"
                )
            if is_last:
                self.profiles[:] = [profile if each is window else each for each in self.profiles]
                self._last[stage] = profile
                path = None if self.paths is None else self.paths.profile(profile.run)
                if (
                    path is not None
                    and found.keys() != outlets.slow_ranks(analyze(window)).keys()
                    and self.save(profile, path)
                ):
                    outlets.save_page(analysis, path)

    def report_ready(self) -> bool:
        """Tell of the windows that have become ready. Returns whether there were any."""
        ready = [] if self._gather is None else self._gather.ready()
        for profile in ready:
            self._report(profile)
        return self._log_prepared() or bool(ready)

    def finish(self, *, failed: bool) -> None:
        """No more windows come: tell of those that are on their way.

        After a failure no rank is waited for.
        """
        try:
            for profile in [] if self._gather is None else self._gather.finish(failed=failed):
                self._report(profile)
            self._log_prepared()
            self._log_unprepared(0.0 if failed else LONGEST)
            if not failed:
                self._compare_ranks(is_last=True)
            if self.outlets is not None and not failed:
                self.outlets.end([*self._last.values()], self._traces, self._training.logged_step())
        finally:
            if self._folder is not None and self._training.is_main:
                release(self._folder, self._training.loop)

    def save(self, profile: Profile, path: Path, outlet: str = "the profile's file") -> bool:
        """Write a window's file and the folders above it, unless it was the last that was written.

        The annotation of a trace reads it.
        """
        # Returns whether it is there. `outlet` is what the file is called where it cannot be
        # written.
        if self._saved is None or self._saved[0] is not profile or self._saved[1] != path:
            self._saved = None
            with self.failures.contained(outlet):
                profile.save(path)
                self._saved = profile, path
        return self._saved is not None

    def _save_of_rank(self, profile: Profile) -> None:
        if self.paths is not None:
            self.save(
                profile,
                self.paths.of_rank(profile.run, self._training.rank),
                "the file of this rank's profile",
            )

    def _report(self, profile: Profile) -> None:
        if self.outlets is None:
            self._save_of_rank(profile)
            return
        self._closed += 1
        self.profiles.append(profile)
        del self.profiles[:-KEPT]
        self._last[profile.run.stage] = profile
        self._traces += [] if profile.trace is None else map(Path, profile.trace.files.values())
        run, files = profile.run, []
        path = None if self.paths is None else self.paths.profile(run)
        if path is not None and self.save(profile, path):
            files.append(path)
        cut_short, own = self._own.pop((run.stage, run.window), (run.partial, ()))
        self.shares[run.stage or ""] = _shares(own, profile.steps)
        step = self._training.logged_step()
        analysis = analyze(profile)
        self._accused.update(self.outlets.slow_ranks(analysis) if profile.ranks else ())
        message = f"lflops: {run.stage} window {run.window} closed at step {run.step}{_ended(profile, cut_short=cut_short)}"
        closed = _Closed(analysis, message, files, step, is_first=self._closed == 1)
        prepare = partial(self.outlets.prepare, analysis, path, step)
        if len(profile.modules) + len(profile.op_counts) < LARGE and not self._in_background:
            self._log(closed, prepare())
        else:
            # One after the other: each is compared with the last, and texts are appended.
            before = [call for _, call in self._in_background]
            self._in_background.append(
                (closed, in_background(prepare, f"lflops: {run.stage} window {run.window}", before))
            )

    def _log(self, closed: _Closed, prepared: PreparedWindow) -> None:
        if self.outlets is None:
            return
        files = [*closed.files, *prepared.files]
        more = list(_where(files, self.outlets.where())) if closed.is_first else []
        others = [str(file) for file in files if not any(str(file) in line for line in more)]
        message = [
            closed.message,
            prepared.text,
            *_labelled("files", others),
            *_labelled("to see more", more),
        ]
        self.outlets.log(prepared)
        if closed.analysis.utilization.is_peak_too_low and forget(closed.analysis.chip):
            message.append(
                "lflops: this step exceeds the peak that was measured, so the next run measures it again"
            )
        self._training.say("\n".join(filter(None, message)))
        self.outlets.window_scalars(closed.analysis, closed.step)
        self.outlets.module_scalars(closed.analysis, closed.step)

    def _log_unprepared(self, seconds: float) -> None:
        """Wait so long, at most, for the windows that the background is still busy with, and log them, if need be without what it makes."""
        end = time.monotonic() + seconds
        while self._in_background:
            wait_for([self._in_background[0][1]], max(end - time.monotonic(), 0.0))
            if self._log_prepared():
                continue
            closed, _ = self._in_background.popleft()
            self._log(closed, PreparedWindow("", [], []))
            if seconds:
                run = closed.analysis.profile.run
                into = (
                    ""
                    if self.paths is None
                    else f" in {self.paths.profile(run).with_suffix('.html')}"
                )
                warn(
                    f"FlopsMonitor: the page{into} and the summary were not done in {seconds:g} s, and are left out; all else goes on"
                )

    def _log_prepared(self) -> bool:
        """Log the windows that the background is done with, in their order.

        Returns whether there were any.
        """
        logged = False
        while self._in_background and self._in_background[0][1].done():
            closed, call = self._in_background.popleft()
            self._log(closed, call.result())
            logged = True
        return logged


def _labelled(label: str, lines: Iterable[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield f"{'' if index else label:<16}  {line}"


def _where(files: Sequence[Path], logged: Sequence[str]) -> Iterator[str]:
    """Where text, tables and pictures of the run can be seen."""
    profile = next((file for file in files if file.name.endswith(".profile.json")), None)
    if profile is not None:
        yield f"on a terminal: lflops show {shlex.quote(str(profile))}"
    page = next((file for file in files if file.suffix == ".html"), None)
    if page is not None:
        yield f"in a browser: {page}"
    yield from logged


def _part_of(folder: Path, training: Training, store: Any, timeout: float) -> str:
    """The part of a folder that the run's files go to.

    The main process claims it, and the others hear of it.
    """
    if training.is_main:
        part = claim(folder, training.loop)
        if store is not None:
            with contextlib.suppress(
                Exception
                # the others take the whole folder then, where their files have unique names
            ):
                store.set(_FOLDER, part)
        return part
    with contextlib.suppress(Exception):
        store.wait([_FOLDER], timedelta(seconds=timeout / 4))
        return str(store.get(_FOLDER).decode())
    return ""


def in_background(
    function: Callable[[], Result], name: str, after: Sequence[Future[Any]] = ()
) -> Future[Result]:
    """Call it after others, in a thread that ends with the interpreter: a hanging file system holds no exit.

    It renames whole files.
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
