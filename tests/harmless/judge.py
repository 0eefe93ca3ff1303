"""Runs trainings with and without a monitor, each in processes of its own, and compares what became of them.

`python -m tests.harmless.judge NAME... CULPRIT=NAME...` prints a line of JSON for each case,
watched by lflops or by a culprit.

This process imports what takes long and runs nothing itself. Each run is a fork of it for each
rank, so both begin in the same state. A run that takes too long is killed with all its processes.
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
"""That a run may take that nobody watches."""
LEAST, TIMES = 25.0, 6.0
"""Seconds that a watched run has at least, and how many times as long as the other one."""
SOON = 8.0
"""For culprits that never come back."""
LONG = {"measured peaks": 240.0}
"""Traits with which lflops computes for long before the first step."""
RUNS: dict[str, Run] = {
    "Lightning": lightning_driver.run,
    "transformers": transformers_driver.run,
    "your own loop": loop_driver.run,
    "Accelerate": loop_driver.run,
    "Fabric": loop_driver.run,
}
TRAITS = {"Lightning": lightning_driver.TRAITS, "transformers": transformers_driver.TRAITS}
USUAL = {"trace": False, "html": False}
LATE = (
    "torch._dynamo",
    "torch._higher_order_ops",
    "torch.utils.tensorboard",
    "lflops.monitoring.window_publisher",
)
"""What trainings import while they run, and what takes long."""
SHORT = {"wait": 1, "warmup": 1, "active": 1, "repeat": 3}
"""Windows that open and close several times in a dozen batches."""


class _Ranks:
    """The processes of one run."""

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
        with warnings.catch_warnings(
            action="ignore"
        ):  # Python 3.12 warns of threads; those of torch's libraries wait for work
            child = os.fork()
        if not child:
            _child(case, watch, rank, port, self.folder / str(rank))
        return child

    def over(self) -> bool:
        """Whether all have ended, or were killed."""
        for child in list(self.waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                self.statuses[self.waiting.pop(child)] = os.waitstatus_to_exitcode(status)
        if self.waiting and time.monotonic() > self.deadline:
            self.hung = True
            for child in self.waiting:
                os.kill(child, signal.SIGUSR1)  # which prints where it is
            time.sleep(0.2)
            for child, rank in self.waiting.items():
                _kill(child)
                os.waitpid(child, 0)
                self.statuses[rank] = -int(signal.SIGKILL)
            self.waiting.clear()
        if not self.waiting:
            self.seconds = time.monotonic() - self.started
            for group in self.groups:
                _kill(group)  # what they have started and left
        return not self.waiting

    def kill(self) -> None:
        """End it at once."""
        self.deadline = 0.0
        self.over()

    def facts(self) -> Facts:
        """Of all ranks, by name and rank."""
        facts: Facts = {}
        for rank in sorted(self.statuses):
            place = self.folder / str(rank)
            path = place / "facts"
            of_rank = pickle.loads(path.read_bytes()) if path.exists() else {}  # noqa: S301 - our own process's
            printed = (place / "stdout").read_text("utf-8", "replace")
            of_rank |= {
                "status": self.statuses[rank],
                "printed": [line for line in printed.splitlines() if line.startswith("user:")],
            }
            facts |= {
                f"{name} (rank {rank})" if len(self.statuses) > 1 else name: value
                for name, value in of_rank.items()
            }
        return facts

    def said(self) -> list[str]:
        """What each wrote to stderr."""
        return [
            (self.folder / str(rank) / "stderr").read_text("utf-8", "replace")
            for rank in sorted(self.statuses)
        ]


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _child(case: Case, watch: Watch, rank: int, port: int, folder: Path) -> None:
    """Run one rank in a fork of the judge, and end as a program does. Never returns."""
    status = 1
    try:
        os.setsid()
        folder.mkdir(parents=True)
        for name, target in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), target)
        faulthandler.enable()  # says where a crash was
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
            }
            place |= {
                "WORLD_SIZE": case.ranks,
                "LOCAL_WORLD_SIZE": case.ranks,
                "ACCELERATE_USE_CPU": "true",
            }
            os.environ.update({name: str(value) for name, value in place.items()})
        if case.ranks > 1 and case.driver == "Lightning":
            del os.environ["RANK"]  # Lightning counts by the others
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global one is what models draw from
        torch.manual_seed(0)
        facts = RUNS[case.driver](case, watch)
        if (
            "never left" in case.traits
        ):  # a monitor that is on at the process's end has its hooks; how the process ends is compared
            facts = {name: value for name, value in facts.items() if name in {"outcome", "losses"}}
        (folder / "part").write_bytes(pickle.dumps(facts))
        (folder / "part").rename(folder / "facts")  # a rank that is killed as it writes has none
        status = 0
    except BaseException:  # noqa: BLE001 - a process that was forked must not go on as the judge
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        ctypes.CDLL(None).exit(status)  # with the destructors of libraries, as a program ends


class _Trial:
    """The runs of one case, one after the other.

    One that nobody watches, and for each who watches it a watched one.

    Where a watched one differs, nobody's is run again: what differs then as well is not the
    watcher's doing.
    """

    def __init__(
        self,
        case: Case,
        watchers: Sequence[str],
        folder: Path,
        read: Callable[[Case, Path], None] | None,
    ) -> None:
        self.case, self.folder, self.read = case, folder, read
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
        """Begin the next run if one has ended; whether all have."""
        if self.watchers and self._running.over():
            self._go_on()
        if not self.watchers:
            shutil.rmtree(self.folder, ignore_errors=True)
        return not self.watchers

    def kill(self) -> None:
        """End it at once."""
        self._running.kill()

    def _go_on(self) -> None:
        ended = self._running
        if self._plain is None:
            self._plain, self._facts = ended, ended.facts()
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
        by = self.watchers[0]
        if by in HANGING:
            return Watch(by), SOON
        longest = max((LONG.get(trait, 0.0) for trait in self.case.traits), default=0.0)
        plain = self._plain.seconds if self._plain is not None else 0.0
        settings = USUAL | {"schedule": Schedule(**SHORT)} | dict(self.case.settings)
        return Watch(by, settings if by == "lflops" else {}), max(LEAST, TIMES * plain, longest)

    def _compare(self, differing: list[str]) -> None:
        assert self._watched is not None
        by, watched = self.watchers[0], self._watched.facts()
        unsteady = [] if self._again is None else _differing(self._facts, self._again)
        steady = [name for name in differing if name not in unsteady]
        if self._watched.hung:
            self._close(by, "hung", "; ".join(map(_where, self._watched.said())), differing)
        elif steady:
            self._close(
                by, "different", _first(self._facts, watched, steady, self._watched.said()), steady
            )
        elif differing:
            self._close(by, "unsteady", _first(self._facts, watched, differing, [""]), differing)
        else:
            self._close(by, "equal")

    def _close(
        self, by: str, outcome: str, difference: str = "", differing: Sequence[str] = ()
    ) -> None:
        self.watchers.remove(by)
        said = [] if self._watched is None else self._watched.said()
        off = next(
            (
                match.group()
                for text in said
                if (match := re.search(r"FlopsMonitor has failed.*", text))
            ),
            "",
        )
        profiles = (
            [] if self._watched is None else sorted(self._watched.folder.rglob("*.profile.json"))
        )
        for path in profiles if self.read is not None else ():
            self.read(self.case, path)
        ends = {
            name: value
            for name, value in self._facts.items()
            if name.startswith("outcome") and value != "ended"
        }
        alone = _short(next(iter(ends.values()), ""))
        seconds = round(time.monotonic() - self._begun, 1)
        self.verdicts.append(
            Verdict(
                self.case.name,
                by,
                outcome,
                difference,
                off,
                len(profiles),
                alone,
                seconds,
                tuple(differing),
            )
        )


def _differing(plain: Facts, watched: Facts) -> list[str]:
    missing = object()
    names = [
        name
        for name in {**plain, **watched}
        if plain.get(name, missing) != watched.get(name, missing)
    ]
    first = ("status", "outcome", "losses", "printed", "logged", "log_history", "callback_metrics")
    return sorted(
        names,
        key=lambda name: next(
            (i for i, each in enumerate(first) if name.startswith(each)), len(first)
        ),
    )


def _first(plain: Facts, watched: Facts, differing: Sequence[str], said: Sequence[str]) -> str:
    """The first difference in words; within lists, the first entry that differs.

    Of a crash, where it was.
    """
    name = differing[0]
    before, after = plain.get(name, "nothing"), watched.get(name, "nothing")
    if isinstance(before, list) and isinstance(after, list):
        for number, pair in enumerate(zip(before, after, strict=False)):
            if pair[0] != pair[1]:
                return f"{name}[{number}]: {_short(pair[0])} became {_short(pair[1])}"
        longer = max(before, after, key=len)
        return f"{name}: {len(before)} entries became {len(after)}: {_short(longer[min(len(before), len(after)) :])}"
    if isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in {**before, **after} if before.get(key) != after.get(key))
        return f"{name}[{key!r}]: {_short(before.get(key))} became {_short(after.get(key))}"
    crashed = next((each for each in said if "Fatal Python error" in each), None)
    told = (
        []
        if not name.startswith("status")
        else said[0].strip().splitlines()[-1:]
        if crashed is None
        else [_where(crashed), crashed]
    )
    return f"{name}: {_short(before)} became {_short(after)}" + "".join(
        f" ({line})" for line in told
    )


def _short(value: Any) -> str:
    text = re.sub(r"\s+", " ", str(value))
    return text if len(text) <= 300 else f"{text[:300]}…"


def _where(said: str) -> str:
    """Where a killed run was.

    The innermost frames of the main thread, and who of lflops is among them.
    """
    frames = re.findall(
        r'File "([^"]+)", line (\d+) in (\S+)', said.rpartition("Current thread")[2] or said
    )
    named = [f"{'/'.join(path.split('/')[-2:])}:{line} {name}" for path, line, name in frames]
    ours = [
        f"{path.partition('/lflops/')[2]}:{line} {name}"
        for path, line, name in frames
        if "/lflops/" in path
    ]
    return "in " + " < ".join(named[:4]) + (f"; of lflops: {' < '.join(ours[:3])}" if ours else "")


def judge(
    cases: Sequence[tuple[Case, str]],
    *,
    processes: int = 2,
    read: Callable[[Case, Path], None] | None = None,
) -> Iterator[Verdict]:
    """Run and compare them, so many busy processes at a time.

    Args:
        cases: What to run, and who watches: "lflops", or a culprit.
        processes: Of all runs together; a run with more ranks has the machine for itself.
        read: Called with each profile's file before it is deleted.

    Raises:
        ValueError: A case names a trait that its driver does not know.
    """
    for case, _ in cases:
        if unknown := set(case.traits) - set(TRAITS.get(case.driver, loop_driver.TRAITS)):
            raise ValueError(f"{case.name}: no driver knows {', '.join(unknown)}")
    watchers: dict[Case, list[str]] = {}
    for case, by in cases:
        watchers.setdefault(case, []).append(by)
    waiting, running, number = list(watchers), list[_Trial](), itertools.count()
    directory = tempfile.mkdtemp()  # which no fork takes away as it ends
    try:
        while waiting or running:
            while waiting and (
                not running
                or sum(each.case.ranks for each in running) + waiting[0].ranks <= processes
            ):
                case = waiting.pop(0)
                running.append(
                    _Trial(case, watchers[case], Path(directory, str(next(number))), read)
                )
            for trial in [each for each in running if each.over()]:
                running.remove(trial)
                yield from trial.verdicts
            time.sleep(0.005)
    finally:
        for trial in running:
            trial.kill()
        shutil.rmtree(directory, ignore_errors=True)


def prepare() -> None:
    """Before anything is forked.

    One thread, what is imported late is here, and nothing of it is looked through for garbage.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", message="FlopsMonitor")
    for module in LATE:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def main() -> None:
    """Judge the cases that are named, in their order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matching", help="all cases whose name this regular expression finds")
    parser.add_argument(
        "names", nargs="*", help="of cases, with `CULPRIT=` before them where no lflops watches"
    )
    asked = parser.parse_args()
    chosen = [
        (CASES[name], "lflops")
        for name in CASES
        if asked.matching is not None and re.search(asked.matching, name)
    ]
    for given in asked.names:
        by, equals, name = given.partition("=")
        chosen.append((CASES[name], by) if equals and by in CULPRITS else (CASES[given], "lflops"))
    prepare()
    for verdict in judge(chosen):
        print(json.dumps(asdict(verdict)), flush=True)  # noqa: T201 - who asked reads it


if __name__ == "__main__":
    main()
