"""The ranks of a run become one profile, out of the training's way.

Each hands its report in when it has one, rank 0 collects.

Reports go through the store that the process group was made by, on a connection and on threads of
our own. No collective is run, so no rank has to arrive at the same time, or at all. Where rank 0
waits, it is on its own thread; only at the end of the training somebody waits for that, no longer
than the timeout, and after an exception hardly at all.

The clean steps of all ranks are on their way to rank 0 all through the run: some numbers for each
step, now and then.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from msgspec import msgpack
from msgspec.structs import replace

from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import ModulePhase, RankComparison
from lflops.profile.steps import Step
from lflops.ranks.collect.report import RankReport
from lflops.ranks.collect.store import RankStore, poll
from lflops.ranks.collect.topology import Topology
from lflops.ranks.collect.window_reports import RankWindow
from lflops.ranks.merge.merge import merge
from lflops.ranks.merge.rank_table import waits_in
from lflops.ranks.merge.steps import UnprofiledSteps, most_steps


class SharedSteps:
    """Hands in a rank's clean steps, and on rank 0 keeps the last ones of all ranks."""

    def __init__(self, store: RankStore, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._unsent: dict[str, list[Step]] = {}
        # that a rank has shared steps of a stage
        self._times: dict[tuple[str, int], int] = {}
        self._steps: dict[str, UnprofiledSteps] = {}
        self._waits: dict[str, set[ModulePhase]] = {}
        # On rank 0, by stage, what these steps say of the ranks, as far as that was looked at.
        self.comparisons: dict[str, RankComparison] = {}

    def add(self, stage: str, steps: Iterable[Step]) -> None:
        """Take further steps of this rank. What is not sent in time is forgotten."""
        unsent = self._unsent.setdefault(stage, [])
        unsent.extend(steps)
        del unsent[: -most_steps(self._ranks)]

    def send(self) -> None:
        """Leave them for rank 0.

        On that, take what the others have left, and look at all of it now and then.
        """
        for stage in list(self._unsent):
            steps, self._unsent[stage] = self._unsent[stage], []
            number = self._times[stage, self._rank] = self._times.get((stage, self._rank), 0) + 1
            if not self._rank:
                self._steps.setdefault(stage, UnprofiledSteps()).add(0, steps, ranks=self._ranks)
                self._take(stage)
                if (
                    not number & number - 1
                    # 1, 2, 4, 8, …: all of it stays in proportion to the run
                ):
                    self._compare(stage)
            elif steps and not self._store.has("left/0"):
                self._store.put(f"steps/{stage}/{self._rank}/{number}", msgpack.encode(steps))

    def take_last(self, pause: Callable[[float], object], is_over: Callable[[], bool]) -> None:
        """On rank 0, at the end.

        Wait until the others have left, or until it is over, and take all that is there.
        """
        poll(lambda: self._store.number("left") >= self._ranks - 1, pause, is_over, 0.1)
        for stage in self._steps:
            self._take(stage)

    def compare(self) -> None:
        for stage in self._steps:
            self._compare(stage)

    def improve(self, profile: Profile) -> Profile:
        """A window of all ranks, with the comparison of the run's clean steps where these are more than its own."""
        stage, of_window = profile.run.stage or "", profile.unprofiled_comparison
        # ranks with different modules
        if of_window is None:
            self._waits.pop(stage, None)
            return profile
        self._waits[stage] = waits_in(profile)
        if stage in self._steps and self._steps[stage].common > of_window.steps:
            self._compare(stage)
            return replace(profile, unprofiled_comparison=self.comparisons.get(stage, of_window))
        return profile

    def _take(self, stage: str) -> None:
        for rank in range(1, self._ranks):
            number = self._times.get((stage, rank), 0) + 1
            while self._store.has(key := f"steps/{stage}/{rank}/{number}"):
                self._steps[stage].add(
                    rank, msgpack.decode(self._store.take(key), type=list[Step]), ranks=self._ranks
                )
                self._times[stage, rank] = number
                number += 1

    def _compare(self, stage: str) -> None:
        found = self._steps[stage].compared(self._waits[stage]) if stage in self._waits else None
        if found is not None:
            self.comparisons[stage] = found


PATIENCE, PUT_TOGETHER, GOODBYE = 0.7, 0.85, 0.9
"""Shares of the timeout at the end.

When waiting for reports, merging them, and notifying the others that this rank leaves must be done.

The rest is left for threads to end in.
"""

WHILE_TRAINING = 20.0
"""Times the timeout that a window's reports may take to come while the training goes on.

Ranks do not close it at the same step.
"""

# in place of the timeout where an exception is on its way, so that what is under way is not lost
# with the process
EXIT_SECONDS = 1.0
# seconds that a thread of ours leaves to the training's: two that begin together get in each
# other's way
HEAD_START = 0.01
# seconds that late ranks have, while the training goes on, to hand in times that they are asked for
ANSWERS = 15.0
# seconds that the end waits for the last clean steps of other ranks, at most: they add little to
# those that are there
LAST_STEPS = 2.0
# how long interpreter shutdown waits for our threads: a thread that outlives Python crashes. Never
# beyond the timeout.
LAST_SECONDS = 3.0


class RankCollector:
    """Hands a rank's reports in, and on rank 0 makes profiles of those of all ranks.

    One for each monitor and each fit.

    The keys of the store are used by no other program. The end of the training waits `timeout`
    seconds at most; nothing else ever waits.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        topology: Topology,
        *,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._store = RankStore(store)
        self._rank = rank
        self._topology = topology
        self._timeout = timeout
        self._clock = clock
        self._hurry = threading.Event()
        self._pause = self._hurry.wait if pause is None else pause
        self._deadline = self._end = math.inf
        self._jobs: list[_Job] = []
        # of times that this rank keeps
        self._offers: list[_Job] = []
        self._shared = SharedSteps(self._store, rank, topology.world_size)
        self.comparisons: Mapping[str, RankComparison] = (
            self._shared.comparisons
            # on rank 0, by stage, what the run's clean steps say
        )
        self._sharing: _Job | None = None
        self._at_exit: weakref.finalize[[], Any] | None = None

    def push(self, profile: Profile, steps: tuple[Mapping[ModulePhase, float], ...] = ()) -> None:
        """Hand in what this rank has to tell of a window; returns at once.

        `steps` are as in `RankReport`.
        """
        topology = self._topology
        profile = replace(profile, run=topology.of(profile.run))
        report = RankReport(
            self._rank, profile, steps, topology.node, topology.coordinates.get(self._rank, {})
        )
        window = RankWindow(self._store, f"{profile.run.stage}/{profile.run.window}", topology)
        latest = self._clock() + WHILE_TRAINING * self._timeout
        if self._rank:
            self._start(_Job(lambda: self._hand_in(window, report), instead=lambda: profile))
            return

        def is_over(latest: float) -> bool:
            return self._hurry.is_set() or self._clock() >= min(latest, self._deadline)

        def collect() -> Profile:
            until = self._clock() + ANSWERS
            return self._shared.improve(
                window.collected(report, self._pause, lambda: self._is_ending or is_over(until))
            )

        wait = partial(window.wait_for_all, self._pause, lambda: is_over(latest))
        self._start(_Job(collect, wait=wait, instead=lambda: merge({0: profile})))

    def _hand_in(self, window: RankWindow, report: RankReport) -> None:
        """Hand a report in.

        A rank that keeps its times waits on another thread to be asked for them, until the training
        ends.
        """
        times = window.hand_in(report)
        if times is not None and not self._is_ending:
            wait = partial(window.answer, self._rank, times, self._pause, lambda: self._is_ending)
            self._offers = [offer for offer in self._offers if offer.is_running]
            self._offers.append(offer := _Job(lambda: None, wait=wait))
            offer.start()

    @property
    def _is_ending(self) -> bool:
        return self._deadline < math.inf

    def share(self, stage: str, steps: Iterable[Step]) -> None:
        """Hand in the clean steps of this rank since the last time; returns at once."""
        self._shared.add(stage, steps)
        if self._sharing is None or not self._sharing.is_running:
            self._sharing = _Job(self._shared.send)
            self._run(self._sharing)

    @property
    def pending(self) -> bool:
        """Whether a report of this rank is under way, or a profile not passed on yet."""
        return bool(self._jobs)

    @property
    def busy(self) -> bool:
        """Whether anything works in the background rather than waits.

        Such a step is not comparable with the others.
        """
        return any(job.is_working for job in self._jobs)

    def ready(self) -> list[Profile]:
        """The merged profiles that have become ready since the last time, in the order of the windows."""
        # On other ranks than 0 these are their own, of which the first will know nothing: those
        # that could not be handed in.
        found = []
        while self._jobs and not self._jobs[0].is_running:
            found += self._jobs.pop(0).results()
        self._rest()
        return found

    def finish(self, *, failed: bool = False) -> list[Profile]:
        """End: no more windows come.

        Waits for what is under way, and gives what `ready` has not given yet.
        """
        # If it failed, because an exception is on its way or the monitor itself has failed, no rank
        # is waited for.
        now, seconds = self._clock(), min(EXIT_SECONDS, self._timeout) if failed else self._timeout
        self._deadline = now + PATIENCE * seconds
        self._end = now + seconds
        if failed:
            self._hurry.set()
        if self._sharing is not None and not failed:
            self._share_last(min(LAST_STEPS, PATIENCE * seconds))
        answers = self._store.answers
        for job in self._jobs:
            job.wait(now + PUT_TOGETHER * seconds - self._clock())
        if not failed and not self._rank:
            self._let_collect(answers, PATIENCE * seconds)
        if self._sharing is not None:
            self._sharing.wait(now + PUT_TOGETHER * seconds - self._clock())
        found = [profile for job in self._jobs for profile in job.results()]
        self._hurry.set()
        self._jobs = [job for job in self._jobs if job.is_running]
        # At once: when the first rank's process is gone, so is the store.
        self._start(leaving := _Job(lambda: self._leave(failed=failed), head_start=0.0))
        leaving.wait(now + GOODBYE * seconds - self._clock())
        self._rest()
        return found

    def _share_last(self, seconds: float) -> None:
        """The end: the last steps of all ranks go to rank 0, which waits for them a little."""
        latest = self._clock() + seconds

        def end() -> None:
            self._shared.send()
            if not self._rank:
                self._shared.take_last(
                    self._pause, lambda: self._hurry.is_set() or self._clock() >= latest
                )
                # the windows say where ranks wait
                for job in self._jobs:
                    job.wait(latest - self._clock())
                self._shared.compare()

        if self._sharing is not None:
            self._sharing.wait(seconds)
        self._sharing = last = _Job(end, head_start=0.0)
        self._run(last)
        if self._rank:
            last.wait(seconds)

    def _let_collect(self, answers: int, seconds: float) -> None:
        """Wait for the collector as long as the store answers it.

        Reports that are there must not be lost on a busy machine.
        """
        while any(job.is_running for job in self._jobs) and self._store.answers > answers:
            answers = self._store.answers
            begun = self._clock()
            for job in self._jobs:
                job.wait(begun + seconds - self._clock())
            self._end = max(self._end, self._clock() + (1 - PATIENCE) * self._timeout)

    def _start(self, job: "_Job") -> None:
        self._jobs.append(job)
        self._run(job)

    def _run(self, job: "_Job") -> None:
        if self._at_exit is None:
            self._at_exit = weakref.finalize(self._hurry, self._stop)
        job.start()

    @property
    def _all_jobs(self) -> list["_Job"]:
        return [*self._jobs, *self._offers, *([] if self._sharing is None else [self._sharing])]

    def _rest(self) -> None:
        """Stop watching for the end of the process: nothing is under way."""
        if self._at_exit is not None and not any(job.is_running for job in self._all_jobs):
            self._at_exit.detach()
            self._at_exit = None

    def _stop(self) -> None:
        self._hurry.set()
        self._store.close()
        until = min(self._clock() + LAST_SECONDS, self._end)
        for job in self._all_jobs:
            job.wait(until - self._clock())

    def _leave(self, *, failed: bool) -> None:
        """Notify the others that this rank leaves: they stop waiting and sending."""
        self._store.put(f"left/{self._rank}", b"failed" if failed else b"ended")
        self._store.add("left")


class _Job(threading.Thread):
    """Something that runs on its own daemon thread.

    `wait` comes before it, and is no work; `instead` is its result if it fails.
    """

    def __init__(
        self,
        action: Callable[[], Profile | None] | Callable[[], None],
        *,
        wait: Callable[[], None] | None = None,
        instead: Callable[[], Profile] | None = None,
        head_start: float = HEAD_START,
    ) -> None:
        super().__init__(name="lflops-gather", daemon=True)
        self._head_start = head_start
        # until it is over
        self._before = wait
        self._action = action
        self._instead = instead
        self._result: Profile | None = None
        # `None` once it is done
        self._problem: str | None = "it was not done in time"

    is_running = property(threading.Thread.is_alive)

    @property
    def is_working(self) -> bool:
        return self.is_running and self._before is None

    def wait(self, seconds: float) -> None:
        self.join(max(seconds, 0.0))

    def results(self) -> list[Profile]:
        """The result; where it has failed, or is not done, the fallback profile with a `gather_failed` note."""
        found = self._result
        if self._problem is not None and self._instead is not None:
            alone, failure = (
                self._instead(),
                Note(code="gather_failed", subject="", values={"error": self._problem}),
            )
            found = replace(alone, notes=(*alone.notes, failure))
        return [] if found is None else [found]

    def run(self) -> None:
        time.sleep(self._head_start)
        try:
            if self._before is not None:
                self._before()
                self._before = None
            self._result = self._action()
            self._problem = None
        except Exception as error:  # noqa: BLE001 - whatever it is, the user's training does not hear of it
            self._problem = f"{type(error).__name__}: {error}"
