"""Runs trainings with and without a monitor, each in processes of its own, and compares what became of them.

`python -m tests.harmless.judge NAME... CULPRIT=NAME...` prints a line of JSON for each case, watched by lflops or by a culprit.

This process imports what takes long and runs nothing itself. Each run is a fork of it for each rank, so both begin in the same state. A run
that takes too long is killed with all its processes.
"""

import argparse
import atexit
import contextlib
import faulthandler
import gc
import importlib
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.harmless import lightning_driver, loop_driver, transformers_driver
from tests.harmless.case import Case, Facts, Run, Watch
from tests.harmless.cases import CASES
from tests.harmless.culprits import CULPRITS, HANGING
from tests.support.ports import free_port

__all__ = ["Verdict", "judge", "prepare"]

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
USUAL = {"trace": False, "html": False}
LATE = ("torch._dynamo", "torch._higher_order_ops", "torch.utils.tensorboard", "lflops.session.results")
"""What trainings import while they run, and what takes long."""
SHORT = {"wait": 1, "warmup": 1, "active": 1, "repeat": 3}
"""Windows that open and close several times in a dozen batches."""


@dataclass(frozen=True)
class Verdict:
    """Of one pair.

    Attributes:
        case: Its name.
        by: Who watched.
        outcome: "equal", "different", "hung", or "unsteady" where two runs that nobody watched differ as well.
        difference: The first one, with both values.
        off: What the monitor warned of as it gave up, if it did.
        windows: How many profiles it has written.
        seconds: That both runs took.
        differing: The names of all facts that differ.
    """

    case: str
    by: str
    outcome: str
    difference: str = ""
    off: str = ""
    windows: int = 0
    seconds: float = 0.0
    differing: tuple[str, ...] = ()


class _Ranks:
    """The processes of one run."""

    def __init__(self, case: Case, watch: Watch, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.hung = False
        port = free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        self.waiting = {self._fork(case, watch, rank, port): rank for rank in range(case.ranks)}
        self.groups = list(self.waiting)
        self.statuses: dict[int, int] = {}

    def _fork(self, case: Case, watch: Watch, rank: int, port: int) -> int:
        with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of threads; those of torch's libraries wait for work
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
            of_rank |= {"status": self.statuses[rank], "printed": [line for line in printed.splitlines() if line.startswith("user:")]}
            facts |= {f"{name} (rank {rank})" if len(self.statuses) > 1 else name: value for name, value in of_rank.items()}
        return facts

    def said(self) -> str:
        """What they wrote to stderr."""
        return "\n".join((self.folder / str(rank) / "stderr").read_text("utf-8", "replace") for rank in sorted(self.statuses))


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
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        os.chdir(folder)
        (folder / "work").mkdir()
        os.chdir(folder / "work")
        os.environ.update(TMPDIR=str(folder), LFLOPS_CHIPS=os.devnull, OMP_NUM_THREADS="1", TQDM_DISABLE="1", CUDA_VISIBLE_DEVICES="")
        if case.ranks > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks, "NODE_RANK": 0}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
            os.environ.update({name: str(value) for name, value in place.items()})
        if case.ranks > 1 and case.driver == "Lightning":
            del os.environ["RANK"]  # Lightning counts by the others
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global one is what models draw from
        torch.manual_seed(0)
        facts = RUNS[case.driver](case, watch)
        (folder / "facts").write_bytes(pickle.dumps(facts))
        status = 0
    except BaseException:  # noqa: BLE001 - a process that was forked must not go on as the judge
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


class _Pair:
    """The runs of one case, one after the other: nobody's, a watched one, and nobody's again where those two differ."""

    def __init__(self, case: Case, by: str, folder: Path) -> None:
        self.case, self.by, self.folder = case, by, folder
        settings = USUAL | {"schedule": _schedule()} | dict(case.settings)
        self.watches = [Watch(), Watch(by, settings if by == "lflops" else {}), Watch()]
        self.begun = time.monotonic()
        self.runs: list[_Ranks] = []
        self.verdict: Verdict | None = None
        self._next(SECONDS)

    def _next(self, seconds: float) -> None:
        number = len(self.runs)
        self.runs.append(_Ranks(self.case, self.watches[number], self.folder / str(number), seconds))

    def over(self) -> bool:
        """Begin the next run if one has ended; whether all have."""
        if self.verdict is None and self.runs[-1].over():
            self._go_on()
        return self.verdict is not None

    def _go_on(self) -> None:
        last = self.runs[-1]
        if len(self.runs) == 1:
            if last.hung or "outcome" not in " ".join(last.facts()):
                self._close("broken", last.said()[-1500:])
                return
            longest = max((LONG.get(trait, 0.0) for trait in self.case.traits), default=0.0)
            usual = max(LEAST, TIMES * (time.monotonic() - last.started), longest)
            self._next(SOON if self.by in HANGING else usual)
            return
        plain, watched = self.runs[0].facts(), self.runs[1].facts()
        differing = _differing(plain, watched)
        if len(self.runs) == 2:
            if self.runs[1].hung:
                self._close("hung", _where(self.runs[1].said()), differing)
            elif not differing:
                self._close("equal")
            else:
                self._next(SECONDS)
            return
        again = _differing(plain, last.facts())
        steady = [name for name in differing if name not in again]
        self._close("different" if steady else "unsteady", _first(plain, watched, steady or differing, self.runs[1].said()), steady or differing)

    def _close(self, outcome: str, difference: str = "", differing: Sequence[str] = ()) -> None:
        off = re.search(r"FlopsMonitor has failed.*", self.runs[1].said()) if len(self.runs) > 1 else None
        seconds = time.monotonic() - self.begun
        windows = len(list((self.folder / "1").rglob("*.profile.json")))
        said = off.group() if off else ""
        self.verdict = Verdict(self.case.name, self.by, outcome, difference, said, windows, round(seconds, 1), tuple(differing))
        shutil.rmtree(self.folder, ignore_errors=True)


def _schedule() -> Any:
    from lflops import Schedule

    return Schedule(**SHORT)


def _differing(plain: Facts, watched: Facts) -> list[str]:
    missing = object()
    names = [name for name in {**plain, **watched} if plain.get(name, missing) != watched.get(name, missing)]
    first = ("status", "outcome", "losses", "printed", "logged", "log_history", "callback_metrics")
    return sorted(names, key=lambda name: next((i for i, each in enumerate(first) if name.startswith(each)), len(first)))


def _first(plain: Facts, watched: Facts, differing: Sequence[str], said: str) -> str:
    """The first difference in words; within lists, the first entry that differs."""
    name = differing[0]
    before, after = plain.get(name, "nothing"), watched.get(name, "nothing")
    if isinstance(before, list) and isinstance(after, list):
        for number, pair in enumerate(zip(before, after, strict=False)):
            if pair[0] != pair[1]:
                return f"{name}[{number}]: {_short(pair[0])} became {_short(pair[1])}"
        return f"{name}: {len(before)} entries became {len(after)}: {_short((before if len(before) > len(after) else after)[min(len(before), len(after)):])}"
    if isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in {**before, **after} if before.get(key) != after.get(key))
        return f"{name}[{key!r}]: {_short(before.get(key))} became {_short(after.get(key))}"
    told = said.strip().splitlines()[-1:] if name.startswith("status") else []
    return f"{name}: {_short(before)} became {_short(after)}" + "".join(f" ({line})" for line in told)


def _short(value: Any) -> str:
    text = re.sub(r"\s+", " ", str(value))
    return text if len(text) <= 300 else f"{text[:300]}…"


def _where(said: str) -> str:
    """Where a killed run was: the innermost frames of the main thread, and who of lflops is among them."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', said.rpartition("Current thread")[2] or said)
    named = [f"{'/'.join(path.split('/')[-2:])}:{line} {name}" for path, line, name in frames]
    ours = [f"{path.partition('/lflops/')[2]}:{line} {name}" for path, line, name in frames if "/lflops/" in path]
    return "in " + " < ".join(named[:4]) + (f"; of lflops: {' < '.join(ours[:3])}" if ours else "")


def judge(cases: Sequence[tuple[Case, str]], *, processes: int = 2) -> Iterator[Verdict]:
    """Run and compare them, so many busy processes at a time.

    Args:
        cases: What to run, and who watches: "lflops", or a culprit.
        processes: Of all runs together; a run with more ranks has the machine for itself.
    """
    waiting, running = list(cases), list[_Pair]()
    directory = tempfile.mkdtemp()  # which no fork takes away as it ends
    number = 0
    try:
        while waiting or running:
            while waiting and (not running or sum(each.case.ranks for each in running) + waiting[0][0].ranks <= processes):
                number += 1
                running.append(_Pair(*waiting.pop(0), Path(directory, str(number))))
            for pair in [each for each in running if each.over()]:
                running.remove(pair)
                if pair.verdict is not None:
                    yield pair.verdict
            time.sleep(0.005)
    finally:
        for pair in running:
            pair.runs[-1].kill()
        shutil.rmtree(directory, ignore_errors=True)


def prepare() -> None:
    """Before anything is forked: one thread, what is imported late is here, and nothing of it is looked through for garbage."""
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
    parser.add_argument("names", nargs="*", help="of cases, with `CULPRIT=` before them where no lflops watches")
    asked = parser.parse_args()
    chosen = [(CASES[name], "lflops") for name in CASES if asked.matching is not None and re.search(asked.matching, name)]
    for given in asked.names:
        by, equals, name = given.partition("=")
        chosen.append((CASES[name], by) if equals and by in CULPRITS else (CASES[given], "lflops"))
    prepare()
    for verdict in judge(chosen):
        print(json.dumps(asdict(verdict)), flush=True)  # noqa: T201 - who asked reads it


if __name__ == "__main__":
    main()
