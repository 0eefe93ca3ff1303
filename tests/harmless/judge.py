"""Run cases with and without a monitor, each in separate processes, and compare the results.

`python -m tests.harmless.judge NAME... CULPRIT=NAME...` prints a line of JSON for each case. The
monitor is lflops, or the named culprit.

This process only imports the modules that take long to import. Each rank of a run is a fork of this
process, so all runs begin in the same state. A run that takes too long is killed with all its
processes.
"""

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lflops import Schedule
from tests.harmless import lightning_driver, loop_driver, transformers_driver
from tests.harmless.case import Case, Facts, Run, Verdict, Watch
from tests.harmless.cases import CASES
from tests.harmless.culprits import CULPRITS, HANGING
from tests.support.ports import free_port

__all__ = ["judge", "prepare"]

SECONDS = 120.0
"""Maximum seconds of a run without a monitor."""
LEAST = 25.0
TIMES = 6.0
"""A monitored run may take `TIMES` times as long as the run without a monitor.

It may always take `LEAST` seconds.
"""
SOON = 8.0
"""Maximum seconds of a run with a culprit that never returns."""
LONG = {"measured peaks": 240.0}
"""Maximum seconds for traits with which lflops computes for long before the first step."""
RUNS: dict[str, Run] = {
    "Lightning": lightning_driver.run,
    "transformers": transformers_driver.run,
    "your own loop": loop_driver.run,
    "Accelerate": loop_driver.run,
    "Fabric": loop_driver.run,
}
TRAITS = {"Lightning": lightning_driver.TRAITS, "transformers": transformers_driver.TRAITS}
USUAL = {"trace": False, "html": False}
"""Settings of the lflops monitor, unless the case has others."""
LATE = (
    "torch._dynamo",
    "torch._higher_order_ops",
    "torch.utils.tensorboard",
    "lflops.monitoring.window_publisher",
)
"""Modules that runs import late and that take long to import."""
SHORT = {"wait": 1, "warmup": 1, "active": 1, "repeat": 3}
"""A schedule with windows that open and close several times in a dozen batches."""


class _Ranks:
    """The processes of one run, one for each rank."""

    def __init__(self, case: Case, watch: Watch, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.seconds = 0.0
        self.hung = False
        port = free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        self.waiting = {self._fork(case, watch, rank, port): rank for rank in range(case.ranks)}
        self.groups = list(self.waiting)
        self.statuses: dict[int, int] = {}

    def _fork(self, case: Case, watch: Watch, rank: int, port: int) -> int:
        # Python 3.12 warns of threads, but the threads of torch's libraries only wait for work.
        with warnings.catch_warnings(action="ignore"):
            child = os.fork()
        if not child:
            _child(case, watch, rank, port, self.folder / str(rank))
        return child

    def over(self) -> bool:
        """Return whether all processes have ended. Kill them if they take too long."""
        for child in list(self.waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                self.statuses[self.waiting.pop(child)] = os.waitstatus_to_exitcode(status)
        if self.waiting and time.monotonic() > self.deadline:
            self.hung = True
            for child in self.waiting:
                # The signal makes the process print its stack.
                os.kill(child, signal.SIGUSR1)
            time.sleep(0.2)
            for child, rank in self.waiting.items():
                _kill(child)
                os.waitpid(child, 0)
                self.statuses[rank] = -int(signal.SIGKILL)
            self.waiting.clear()
        if not self.waiting:
            self.seconds = time.monotonic() - self.started
            # The ranks may have started other processes and left them behind.
            for group in self.groups:
                _kill(group)
        return not self.waiting

    def kill(self) -> None:
        """Kill all processes at once."""
        self.deadline = 0.0
        self.over()

    def facts(self) -> Facts:
        """Return the facts of all ranks. With several ranks, the names end with the rank."""
        facts: Facts = {}
        for rank in sorted(self.statuses):
            place = self.folder / str(rank)
            path = place / "facts"
            of_rank: Facts = {}
            if path.exists():
                of_rank = pickle.loads(path.read_bytes())  # noqa: S301 - written by our own process
            printed = (place / "stdout").read_text("utf-8", "replace")
            of_rank["status"] = self.statuses[rank]
            of_rank["printed"] = [line for line in printed.splitlines() if line.startswith("user:")]
            suffix = f" (rank {rank})" if len(self.statuses) > 1 else ""
            for name, value in of_rank.items():
                facts[f"{name}{suffix}"] = value
        return facts

    def said(self) -> list[str]:
        """Return the text that each rank wrote to stderr."""
        return [
            (self.folder / str(rank) / "stderr").read_text("utf-8", "replace")
            for rank in sorted(self.statuses)
        ]


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _child(case: Case, watch: Watch, rank: int, port: int, folder: Path) -> None:
    """Run one rank in a fork of the judge, and exit as a program does. Never returns."""
    status = 1
    try:
        os.setsid()
        folder.mkdir(parents=True)
        for name, target in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), target)
        # The handler prints the stack of a crash, and the stack of a run that hangs.
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        os.chdir(folder)
        (folder / "work").mkdir()
        os.chdir(folder / "work")
        os.environ.update(
            TMPDIR=str(folder),
            XDG_CACHE_HOME=str(folder),
            LFLOPS_CHIPS=os.devnull,
            OMP_NUM_THREADS="1",
            TQDM_DISABLE="1",
            CUDA_VISIBLE_DEVICES="",
        )
        if case.ranks > 1:
            place: dict[str, Any] = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "NODE_RANK": 0,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": case.ranks,
                "LOCAL_WORLD_SIZE": case.ranks,
                "ACCELERATE_USE_CPU": "true",
            }
            os.environ.update({name: str(value) for name, value in place.items()})
        if case.ranks > 1 and case.driver == "Lightning":
            # Lightning computes it from the other variables.
            del os.environ["RANK"]
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - models draw from the global generator
        torch.manual_seed(0)
        facts = RUNS[case.driver](case, watch)
        if "never left" in case.traits:
            # The monitor is still on and has its hooks. Only the end of the run is compared.
            facts = {name: value for name, value in facts.items() if name in {"outcome", "losses"}}
        # The file is renamed, so a rank that is killed while it writes has no incomplete facts.
        (folder / "part").write_bytes(pickle.dumps(facts))
        (folder / "part").rename(folder / "facts")
        status = 0
    except BaseException:  # noqa: BLE001 - a fork must not continue as the judge
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # This runs the destructors of libraries, as at the end of a program.
        ctypes.CDLL(None).exit(status)


class _Trial:
    """The runs of one case, one after the other.

    The first run has no monitor. Then there is one run for each monitor.

    If a monitored run differs, the case runs again without a monitor. Facts that also differ in
    this run are unsteady, and the monitor is not their cause.
    """

    def __init__(
        self,
        case: Case,
        watchers: Sequence[str],
        folder: Path,
        read: Callable[[Case, Path], None] | None,
    ) -> None:
        self.case = case
        self.folder = folder
        self.read = read
        self.watchers = list(watchers)
        self.verdicts: list[Verdict] = []
        self._again: Facts | None = None
        self._numbers = itertools.count()
        self._begun = time.monotonic()
        self._plain: _Ranks | None = None
        self._watched: _Ranks | None = None
        self._facts: Facts = {}
        self._running = self._start(Watch(), SECONDS)

    def _start(self, watch: Watch, seconds: float) -> _Ranks:
        return _Ranks(self.case, watch, self.folder / str(next(self._numbers)), seconds)

    def over(self) -> bool:
        """Start the next run if the current one has ended. Return whether all runs have ended."""
        if self.watchers and self._running.over():
            self._go_on()
        if not self.watchers:
            shutil.rmtree(self.folder, ignore_errors=True)
        return not self.watchers

    def kill(self) -> None:
        """Kill the current run at once."""
        self._running.kill()

    def _go_on(self) -> None:
        """Use the results of the run that has ended, and start the next run."""
        ended = self._running
        if self._plain is None:
            self._plain = ended
            self._facts = ended.facts()
            if ended.hung or not any(name.startswith("outcome") for name in self._facts):
                for by in list(self.watchers):
                    self._close(by, "broken", " / ".join(ended.said())[-1500:])
                return
        elif self._watched is None:
            self._watched = ended
            differing = _differing(self._facts, ended.facts())
            if differing and self._again is None and not ended.hung:
                self._running = self._start(Watch(), SECONDS)
                return
            self._compare(differing)
        else:
            self._again = ended.facts()
            self._compare(_differing(self._facts, self._watched.facts()))
        if self.watchers:
            self._watched = None
            self._begun = time.monotonic()
            self._running = self._start(*self._next())

    def _next(self) -> tuple[Watch, float]:
        """Return the monitor of the next run, and the maximum seconds of this run."""
        by = self.watchers[0]
        if by in HANGING:
            return Watch(by), SOON
        longest = max((LONG.get(trait, 0.0) for trait in self.case.traits), default=0.0)
        plain = self._plain.seconds if self._plain is not None else 0.0
        settings = USUAL | {"schedule": Schedule(**SHORT)} | dict(self.case.settings)
        return Watch(by, settings if by == "lflops" else {}), max(LEAST, TIMES * plain, longest)

    def _compare(self, differing: list[str]) -> None:
        """Append the verdict on the current monitor, given the names of the differing facts."""
        assert self._watched is not None
        by = self.watchers[0]
        watched = self._watched.facts()
        said = self._watched.said()
        unsteady = [] if self._again is None else _differing(self._facts, self._again)
        steady = [name for name in differing if name not in unsteady]
        if self._watched.hung:
            self._close(by, "hung", "; ".join(map(_where, said)), differing)
        elif steady:
            self._close(by, "different", _first(self._facts, watched, steady, said), steady)
        elif differing:
            self._close(by, "unsteady", _first(self._facts, watched, differing, [""]), differing)
        else:
            self._close(by, "equal")

    def _close(
        self, by: str, outcome: str, difference: str = "", differing: Sequence[str] = ()
    ) -> None:
        """Append a verdict on the monitor `by`, which is then done."""
        self.watchers.remove(by)
        profiles: list[Path] = []
        off = ""
        if self._watched is not None:
            profiles = sorted(self._watched.folder.rglob("*.profile.json"))
            off = _warning(self._watched.said())
        if self.read is not None:
            for path in profiles:
                self.read(self.case, path)
        alone = ""
        for name, value in self._facts.items():
            if name.startswith("outcome") and value != "ended":
                alone = _short(value)
                break
        verdict = Verdict(
            case=self.case.name,
            by=by,
            outcome=outcome,
            difference=difference,
            off=off,
            windows=len(profiles),
            alone=alone,
            seconds=round(time.monotonic() - self._begun, 1),
            differing=tuple(differing),
        )
        self.verdicts.append(verdict)


def _warning(said: Sequence[str]) -> str:
    """Return the warning of a monitor that turned itself off; empty if there is none."""
    for text in said:
        match = re.search(r"FlopsMonitor has failed.*", text)
        if match is not None:
            return match.group()
    return ""


FIRST = ("status", "outcome", "losses", "printed", "logged", "log_history", "callback_metrics")
"""Beginnings of the names of facts that come first in a list of differences."""


def _differing(plain: Facts, watched: Facts) -> list[str]:
    """Return the names of the facts that differ, the most important facts first."""
    missing = object()
    names = []
    for name in {**plain, **watched}:
        if plain.get(name, missing) != watched.get(name, missing):
            names.append(name)
    return sorted(names, key=_place)


def _place(name: str) -> int:
    for place, beginning in enumerate(FIRST):
        if name.startswith(beginning):
            return place
    return len(FIRST)


def _first(plain: Facts, watched: Facts, differing: Sequence[str], said: Sequence[str]) -> str:
    """Describe the first difference. For a crash, add where it was.

    For lists and dicts, only the first entry that differs is described.
    """
    name = differing[0]
    before = plain.get(name, "nothing")
    after = watched.get(name, "nothing")
    if isinstance(before, list) and isinstance(after, list):
        for number, pair in enumerate(zip(before, after, strict=False)):
            if pair[0] != pair[1]:
                return f"{name}[{number}]: {_short(pair[0])} became {_short(pair[1])}"
        longer = max(before, after, key=len)
        rest = longer[min(len(before), len(after)) :]
        return f"{name}: {len(before)} entries became {len(after)}: {_short(rest)}"
    if isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in {**before, **after} if before.get(key) != after.get(key))
        return f"{name}[{key!r}]: {_short(before.get(key))} became {_short(after.get(key))}"
    text = f"{name}: {_short(before)} became {_short(after)}"
    if name.startswith("status"):
        for line in _why(said):
            text += f" ({line})"
    return text


def _why(said: Sequence[str]) -> list[str]:
    """Return the reason for an exit status: the place of a crash, or the last line on stderr."""
    for text in said:
        if "Fatal Python error" in text:
            return [_where(text), text]
    return said[0].strip().splitlines()[-1:]


def _short(value: Any) -> str:
    text = re.sub(r"\s+", " ", str(value))
    return text if len(text) <= 300 else f"{text[:300]}…"


def _where(said: str) -> str:
    """Return the innermost frames of the main thread of a killed run, and the frames of lflops."""
    stack = said.rpartition("Current thread")[2] or said
    named = []
    ours = []
    for path, line, name in re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack):
        end_of_path = "/".join(path.split("/")[-2:])
        named.append(f"{end_of_path}:{line} {name}")
        if "/lflops/" in path:
            ours.append(f"{path.partition('/lflops/')[2]}:{line} {name}")
    place = "in " + " < ".join(named[:4])
    if ours:
        place += f"; of lflops: {' < '.join(ours[:3])}"
    return place


def judge(
    cases: Sequence[tuple[Case, str]],
    *,
    processes: int = 2,
    read: Callable[[Case, Path], None] | None = None,
) -> Iterator[Verdict]:
    """Run cases with and without their monitors, and yield a verdict for each monitor.

    Args:
        cases: The cases, each with the name of its monitor: "lflops" or a culprit.
        processes: Maximum number of ranks of all runs at a time. A run with more ranks runs alone.
        read: Called with the path of each profile before the file is deleted.

    Raises:
        ValueError: A case has a trait that its driver does not have.
    """
    for case, _ in cases:
        unknown = set(case.traits) - set(TRAITS.get(case.driver, loop_driver.TRAITS))
        if unknown:
            raise ValueError(f"{case.name}: no driver knows {', '.join(unknown)}")
    watchers: dict[Case, list[str]] = {}
    for case, by in cases:
        watchers.setdefault(case, []).append(by)
    waiting = list(watchers)
    running: list[_Trial] = []
    number = itertools.count()
    # Not a `TemporaryDirectory`: each fork would delete it when it exits.
    directory = tempfile.mkdtemp()
    try:
        while waiting or running:
            busy = sum(each.case.ranks for each in running)
            while waiting and (not running or busy + waiting[0].ranks <= processes):
                case = waiting.pop(0)
                folder = Path(directory, str(next(number)))
                running.append(_Trial(case, watchers[case], folder, read))
                busy += case.ranks
            for trial in [each for each in running if each.over()]:
                running.remove(trial)
                yield from trial.verdicts
            time.sleep(0.005)
    finally:
        for trial in running:
            trial.kill()
        shutil.rmtree(directory, ignore_errors=True)


def prepare() -> None:
    """Prepare this process for forks.

    It has one thread, and has imported the modules in `LATE`. The garbage collector ignores all
    existing objects.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", message="FlopsMonitor")
    for module in LATE:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def main() -> None:
    """Judge the cases that the command line names, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matching", help="all cases with a name that matches this expression")
    parser.add_argument(
        "names", nargs="*", help="names of cases; `CULPRIT=NAME` runs a culprit instead of lflops"
    )
    asked = parser.parse_args()
    chosen = []
    if asked.matching is not None:
        for name, case in CASES.items():
            if re.search(asked.matching, name):
                chosen.append((case, "lflops"))
    for given in asked.names:
        by, equals, name = given.partition("=")
        if equals and by in CULPRITS:
            chosen.append((CASES[name], by))
        else:
            chosen.append((CASES[given], "lflops"))
    prepare()
    for verdict in judge(chosen):
        print(json.dumps(asdict(verdict)), flush=True)  # noqa: T201 - the output of a script


if __name__ == "__main__":
    main()
