"""Collect the reports of all ranks on rank 0, without disturbing the training run.

A report is one rank's profile of one window (a few consecutive steps). Reports go through the
key-value store that the process group was created with, on a separate connection and on background
threads. No collective is run, so ranks can report at different times, and a rank that never reports
does not block the other ranks. Rank 0 waits for reports on a background thread. Training waits for
the reports only at the end of the run. Normally, it waits for at most the timeout, or longer if
rank 0 is still reading reports that have arrived. After an exception, it waits for at most one
second.

During the whole run, each rank also sends its unprofiled steps to rank 0. In an unprofiled step,
lflops only reads the clock.
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
from lflops.ranks.merge.rank_table import waiting_places
from lflops.ranks.merge.unprofiled_steps import UnprofiledSteps, most_steps


class SharedSteps:
    """Sends a rank's unprofiled steps to rank 0, which keeps the last steps of all ranks.

    Attributes:
        comparisons: The latest comparison of the ranks, by stage (such as `train`). Empty on ranks
            other than 0.
    """

    def __init__(self, store: RankStore, rank: int, ranks: int) -> None:
        self.comparisons: dict[str, RankComparison] = {}
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._unsent: dict[str, list[Step]] = {}
        # How many times each rank has sent steps of each stage.
        self._times: dict[tuple[str, int], int] = {}
        self._steps: dict[str, UnprofiledSteps] = {}
        self._waits: dict[str, set[ModulePhase]] = {}

    def add(self, stage: str, steps: Iterable[Step]) -> None:
        """Queue steps of this rank for the next call of `send`.

        If too many steps are queued, the oldest are dropped.
        """
        unsent = self._unsent.setdefault(stage, [])
        unsent.extend(steps)
        del unsent[: -most_steps(self._ranks)]

    def send(self) -> None:
        """Send the queued steps of this rank to rank 0.

        On rank 0, instead store the queued steps, read the steps that the other ranks have sent,
        and compare the ranks. A comparison takes long, so it is made only in calls 1, 2, 4, 8, ….
        """
        for stage in list(self._unsent):
            steps = self._unsent[stage]
            self._unsent[stage] = []
            number = self._times.get((stage, self._rank), 0) + 1
            self._times[stage, self._rank] = number
            if self._rank:
                # After rank 0 has ended its run, it reads no steps.
                if steps and not self._store.has("left/0"):
                    self._store.put(f"steps/{stage}/{self._rank}/{number}", msgpack.encode(steps))
                continue
            if stage not in self._steps:
                self._steps[stage] = UnprofiledSteps()
            self._steps[stage].add(0, steps, ranks=self._ranks)
            self._take(stage)
            # Compare in calls 1, 2, 4, 8, …, so that the cost of all comparisons grows slowly.
            if number.bit_count() == 1:
                self._compare(stage)

    def take_last(self, pause: Callable[[float], object], is_over: Callable[[], bool]) -> None:
        """Wait until all other ranks have ended their run, then read the last steps that they sent.

        Called on rank 0 at the end of the run. The wait also ends when `is_over` returns True.
        """
        poll(lambda: self._store.number("left") >= self._ranks - 1, pause, is_over, 0.1)
        for stage in self._steps:
            self._take(stage)

    def compare(self) -> None:
        """Update `comparisons`: compare the ranks in each stage, in all steps that are kept."""
        for stage in self._steps:
            self._compare(stage)

    def improve(self, profile: Profile) -> Profile:
        """Return a window's profile in which the ranks are compared in as many steps as possible.

        `profile` is merged from the reports on a window, and compares the ranks only in the steps
        of the window. During the whole run, the ranks also send unprofiled steps to rank 0. If all
        ranks have more of these steps in common than the window has, the ranks are compared in
        these steps instead. Otherwise, the profile is returned unchanged.
        """
        stage = profile.run.stage or ""
        of_window = profile.unprofiled_comparison
        if of_window is None:
            # The ranks have different modules, so they are not compared in unprofiled steps.
            self._waits.pop(stage, None)
            return profile
        self._waits[stage] = waiting_places(profile)
        if stage not in self._steps or self._steps[stage].common <= of_window.steps:
            return profile
        self._compare(stage)
        return replace(profile, unprofiled_comparison=self.comparisons.get(stage, of_window))

    def _take(self, stage: str) -> None:
        for rank in range(1, self._ranks):
            number = self._times.get((stage, rank), 0) + 1
            while self._store.has(f"steps/{stage}/{rank}/{number}"):
                sent = self._store.take(f"steps/{stage}/{rank}/{number}")
                steps = msgpack.decode(sent, type=list[Step])
                self._steps[stage].add(rank, steps, ranks=self._ranks)
                self._times[stage, rank] = number
                number += 1

    def _compare(self, stage: str) -> None:
        if stage not in self._waits:
            return
        comparison = self._steps[stage].compared(self._waits[stage])
        if comparison is not None:
            self.comparisons[stage] = comparison


# Deadlines at the end of the run, as shares of the timeout. By PATIENCE, this rank has stopped
# waiting for reports. By PUT_TOGETHER, the reports are merged. By GOODBYE, the other ranks are
# notified that this rank has ended its run. In the rest of the timeout, the threads end.
PATIENCE = 0.7
PUT_TOGETHER = 0.85
GOODBYE = 0.9

# Maximum time that rank 0 waits for the reports on a window during the run, as a multiple of the
# timeout. It is long because ranks do not close a window at the same step.
WHILE_TRAINING = 20.0

# Maximum timeout in seconds after an exception. It gives the process some time to finish work in
# progress.
EXIT_SECONDS = 1.0
# Delay in seconds before a background thread starts its work. Two threads that start together slow
# each other down.
HEAD_START = 0.01
# Maximum time in seconds that rank 0 waits for the last unprofiled steps of other ranks at the end
# of the run. The wait is short, because these steps add little to the steps that rank 0 has.
LAST_STEPS = 2.0
# Maximum time in seconds that the shutdown of the interpreter waits for background threads, because
# a thread that outlives the interpreter crashes. It never waits longer than the timeout.
LAST_SECONDS = 3.0


class RankCollector:
    """Sends the reports of this rank to rank 0. On rank 0, merges the reports of all ranks.

    A report is one rank's profile of one window (a few consecutive steps). Each training run needs
    a new collector, and a store with a prefix that no other program uses. Only `finish` blocks: for
    at most `timeout` seconds, or longer while the store still answers requests.

    Attributes:
        comparisons: The comparison of the ranks in the run's unprofiled steps, by stage (such as
            `train`). Empty on ranks other than 0.
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
        # Set when no thread may wait any longer for other ranks.
        self._hurry = threading.Event()
        self._pause = self._hurry.wait if pause is None else pause
        # The time at which waiting for reports ends, and the time at which all threads should have
        # ended. `finish` sets both.
        self._deadline = math.inf
        self._end = math.inf
        self._jobs: list[_Job] = []
        self._shared = SharedSteps(self._store, rank, topology.world_size)
        self.comparisons: Mapping[str, RankComparison] = self._shared.comparisons
        self._sharing: _Job | None = None
        self._at_exit: weakref.finalize[[], Any] | None = None

    def push(self, profile: Profile, steps: tuple[Mapping[ModulePhase, float], ...] = ()) -> None:
        """Start to send this rank's report on a window to rank 0, and return immediately.

        `steps` has the times of modules in each module-timing step; see `RankReport.steps`.
        """
        topology = self._topology
        profile = replace(profile, run=topology.of(profile.run))
        coordinates = topology.coordinates.get(self._rank, {})
        report = RankReport(self._rank, profile, steps, topology.node, coordinates)
        window = RankWindow(self._store, f"{profile.run.stage}/{profile.run.window}", topology)
        if self._rank:
            self._start(_Job(lambda: window.hand_in(report), instead=lambda: profile))
            return
        latest = self._clock() + WHILE_TRAINING * self._timeout

        def is_over() -> bool:
            return self._hurry.is_set() or self._clock() >= min(latest, self._deadline)

        self._start(
            _Job(
                lambda: self._shared.improve(window.collected(report)),
                wait=partial(window.wait_for_all, self._pause, is_over),
                instead=lambda: merge({0: profile}),
            )
        )

    def share(self, stage: str, steps: Iterable[Step]) -> None:
        """Start to send unprofiled steps of this rank to rank 0, and return immediately."""
        self._shared.add(stage, steps)
        if self._sharing is None or not self._sharing.is_running:
            self._sharing = _Job(self._shared.send)
            self._run(self._sharing)

    @property
    def pending(self) -> bool:
        """Return whether a report is in progress, or complete but not yet returned by `ready`."""
        return bool(self._jobs)

    @property
    def busy(self) -> bool:
        """Return whether a background thread is working, and not only waiting for other ranks.

        A working thread may slow down the current training step, so the step must not be treated as
        typical.
        """
        return any(job.is_working for job in self._jobs)

    def ready(self) -> list[Profile]:
        """Return the merged profiles that are new since the last call, in the order of the windows.

        On ranks other than 0, returns only the profiles that this rank could not send to rank 0.
        """
        profiles = []
        while self._jobs and not self._jobs[0].is_running:
            profiles += self._jobs.pop(0).results()
        self._rest()
        return profiles

    def finish(self, *, failed: bool = False) -> list[Profile]:
        """Wait for the reports in progress, and return the profiles that `ready` has not returned.

        No report may be pushed after this call. Pass `failed=True` if the run or the monitor raised
        an exception; then this method does not wait for other ranks.
        """
        now = self._clock()
        seconds = min(EXIT_SECONDS, self._timeout) if failed else self._timeout
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
        profiles = []
        for job in self._jobs:
            profiles += job.results()
        self._hurry.set()
        self._jobs = [job for job in self._jobs if job.is_running]
        # This thread starts at once, because the store disappears when the process of rank 0 ends.
        leaving = _Job(lambda: self._leave(failed=failed), head_start=0.0)
        self._start(leaving)
        leaving.wait(now + GOODBYE * seconds - self._clock())
        self._rest()
        return profiles

    def _share_last(self, seconds: float) -> None:
        """At the end of the run, send the unprofiled steps that this rank has not sent yet.

        Rank 0 instead waits at most `seconds` for the steps of the other ranks, and compares the
        ranks.
        """
        latest = self._clock() + seconds

        def is_over() -> bool:
            return self._hurry.is_set() or self._clock() >= latest

        def end() -> None:
            self._shared.send()
            if not self._rank:
                self._shared.take_last(self._pause, is_over)
                # The reports on the windows show where ranks wait.
                for job in self._jobs:
                    job.wait(latest - self._clock())
                self._shared.compare()

        if self._sharing is not None:
            self._sharing.wait(seconds)
        last = _Job(end, head_start=0.0)
        self._sharing = last
        self._run(last)
        if self._rank:
            last.wait(seconds)

    def _let_collect(self, answers: int, seconds: float) -> None:
        """Wait longer for the threads that collect reports, as long as they make progress.

        On a busy machine, these threads may be slow. Without the longer wait, reports that are
        already in the store would be lost. The threads make progress as long as the store answers
        their requests.

        Args:
            answers: The value of `RankStore.answers` before the normal wait. If the store has
                answered no request since then, this method returns immediately.
            seconds: Maximum time to wait for the next answer of the store.
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
        if self._sharing is None:
            return self._jobs
        return [*self._jobs, self._sharing]

    def _rest(self) -> None:
        """If no thread is running, unregister the exit handler, which would stop the threads."""
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
        """Notify the other ranks that this rank has ended its run.

        The other ranks then stop waiting for this rank and sending to it.
        """
        self._store.put(f"left/{self._rank}", b"failed" if failed else b"ended")
        self._store.add("left")


class _Job(threading.Thread):
    """Runs a task, such as sending or collecting reports, on its own daemon thread.

    Args:
        action: The task. It may return a profile, which becomes the result.
        wait: A function that waits for other ranks. The thread calls it before `action`. Until
            `wait` returns, `is_working` is false.
        instead: A function that returns a fallback profile. `results` calls it if `action` has
            failed or is not done in time.
        head_start: Seconds that the thread sleeps before it starts to work.
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
        # `None` after this function has returned.
        self._before = wait
        self._action = action
        self._instead = instead
        self._result: Profile | None = None
        # `None` after the action has succeeded.
        self._problem: str | None = "this took too long"

    is_running = property(threading.Thread.is_alive)

    @property
    def is_working(self) -> bool:
        return self.is_running and self._before is None

    def wait(self, seconds: float) -> None:
        self.join(max(seconds, 0.0))

    def results(self) -> list[Profile]:
        """Return a list with the profile that `action` returned; empty if it returned none.

        If `action` failed or is not done in time, the list has the fallback profile with the note
        `gather_failed`. If there is no fallback, the list is empty.
        """
        if self._problem is None or self._instead is None:
            if self._result is None:
                return []
            return [self._result]
        profile = self._instead()
        failure = Note(code="gather_failed", subject="", values={"error": self._problem})
        return [replace(profile, notes=(*profile.notes, failure))]

    def run(self) -> None:
        time.sleep(self._head_start)
        try:
            if self._before is not None:
                self._before()
                self._before = None
            self._result = self._action()
            self._problem = None
        except Exception as error:  # noqa: BLE001 - no failure may reach the user's training run
            self._problem = f"{type(error).__name__}: {error}"
