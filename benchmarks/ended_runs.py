"""End training runs by signals at random moments, and check the files that they leave.

python benchmarks/ended_runs.py [--runs N] [--seed N]

A run has one or two ranks, and receives SIGINT, SIGTERM or SIGKILL. It must end with the same exit
status as a run without lflops. Its files must be readable. Temporary files of a killed run must be
removed when the next run in the folder begins. No process may remain.
"""

import argparse
import gzip
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import lflops
from lflops.ledger.ledger_file import read_segment
from lflops.monitoring.outputs.paths import OutputPaths
from lflops.trace.analysis.read_trace import read_trace

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SECONDS = 4.0
"""A signal is sent at a random time within this number of seconds."""
NOT_CONNECTED = "Gloo connectFullMesh failed"
"""Error with which gloo ends a rank if it cannot connect to another rank in time.

Such a rank has not trained at all.
"""
PATIENCE = 60.0
"""Seconds after which a run or a background process counts as hanging."""


class Ended(NamedTuple):
    """A run that a signal has ended."""

    sent: signal.Signals
    ranks: int
    statuses: tuple[int | None, ...]
    problems: list[str]


def train(folder: Path, rank: int, ranks: int, *, is_monitored: bool) -> None:
    """Train until a signal arrives, with one window after the other."""
    torch.manual_seed(0)
    if ranks > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}.store", rank=rank, world_size=ranks
        )
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.ones(8, 32)] * 100_000
    if not is_monitored:
        for batch in batches:
            _step(model, optimizer, batch)
        return
    schedule = lflops.Schedule(wait=2, warmup=1, active=2)
    with lflops.monitor(
        model, optimizer, schedule=schedule, dirpath=folder, hardware=None, ledger=True, log=_ignore
    ) as monitor:
        for batch in monitor.data(batches):
            with monitor.step(batch):
                _step(model, optimizer, batch)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.001)


def _ignore(_message: str) -> None:
    pass


def start(folder: Path, rank: int, ranks: int, *, is_monitored: bool) -> int:
    """Start a rank as a process with its own session, and return its process ID.

    It is a fork of this process, which has imported torch, but has not run anything.
    """
    child = os.fork()
    if child:
        return child
    os.setsid()
    log = os.open(log_of(folder, rank), os.O_RDWR | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    train(folder, rank, ranks, is_monitored=is_monitored)
    # This ends the interpreter as any program does.
    sys.exit(0)


def log_of(folder: Path, rank: int) -> Path:
    """Return the path of the file with the output of a rank."""
    return folder.with_name(f"{folder.name}.rank{rank}.log")


def end_run(chance: random.Random, number: int, top: Path, *, is_monitored: bool) -> Ended:
    """Start a run, end it with a signal, and check the files that it left."""
    sent = SIGNALS[number % len(SIGNALS)]
    ranks = 1 + number // len(SIGNALS) % 2
    folder = top / f"run{number}"
    children = [start(folder, rank, ranks, is_monitored=is_monitored) for rank in range(ranks)]
    time.sleep(chance.uniform(0, SECONDS))
    for child in children:
        os.kill(child, sent)
    statuses = tuple(map(wait_for, children))
    problems = look_at(folder) if is_monitored else []
    shutil.rmtree(folder, ignore_errors=True)
    return Ended(sent, ranks, statuses, problems)


def wait_for(child: int) -> int | None:
    """Return the exit status of a process: negative for a signal, `None` if it hangs."""
    latest = time.monotonic() + PATIENCE
    while time.monotonic() < latest:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def look_at(folder: Path) -> list[str]:
    """Return the problems of a run that has ended.

    These are files that cannot be read, temporary files that the next run does not remove, and
    processes that remain.
    """
    latest = time.monotonic() + PATIENCE
    while processes_of(folder):
        if time.monotonic() > latest:
            return [f"a process stays: {processes_of(folder)}"]
        time.sleep(0.05)
    # The next run in the folder does the same.
    OutputPaths(folder, folder / "lflops_traces").remove_leftovers()
    problems = []
    for path in folder.rglob("*"):
        if path.is_file():
            problem = problem_of(path)
            if problem:
                problems.append(problem)
    return problems


def problem_of(path: Path) -> str:
    """Return why a file cannot be read or should not exist, or an empty text."""
    try:
        if path.name.endswith((".profile.json", ".json")) and "trace" not in path.name:
            lflops.load(path)
        elif path.name.endswith(".ledger.jsonl"):
            read_segment(path)
        elif path.name.endswith(".pt.trace.json.gz"):
            read_trace(path)
            gzip.decompress(path.read_bytes())
        elif path.name.startswith(".lflops-"):
            return f"left: {path.name}"
    except Exception as error:  # noqa: BLE001 - every error is a problem of the file
        return f"{path.name}: {type(error).__name__}: {error}"
    return ""


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of processes that contain the path of a folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if f"{folder}/" in command:
                found.append(command)
    return found


def main() -> int:
    """End runs without lflops first, and then runs with lflops."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--runs", type=int, default=200)
    arguments.add_argument("--plain", type=int, default=24, help="runs without lflops")
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chance = random.Random(given.seed)  # noqa: S311 - to be the same each time
    top = Path(tempfile.mkdtemp())
    usual: dict[tuple[signal.Signals, int], set[int | None]] = {}
    for number in range(given.plain):
        plain = end_run(chance, number, top, is_monitored=False)
        usual.setdefault((plain.sent, plain.ranks), set()).update(plain.statuses)
    wrong = 0
    counts: Counter[str] = Counter()
    for number in range(given.runs):
        ended = end_run(chance, number, top, is_monitored=True)
        problems = list(ended.problems)
        outcome = f"{ended.sent.name}, {ended.ranks} ranks: {ended.statuses}"
        others = set(ended.statuses) - usual[ended.sent, ended.ranks]
        if others:
            logs = [log_of(top / f"run{number}", rank) for rank in range(ended.ranks)]
            said = [log.read_text().strip().rpartition("\n")[2] for log in logs]
            if any(NOT_CONNECTED in line for line in said):
                outcome = "gloo did not connect the ranks"
            else:
                problems.append(f"exit statuses {ended.statuses}: {said}")
        counts[outcome] += 1
        wrong += bool(problems)
        for problem in problems:
            print(f"run {number}, {ended.sent.name}, {ended.ranks} ranks: {problem}", flush=True)
    for outcome, runs in sorted(counts.items()):
        print(f"{runs:4} runs: {outcome}")
    print(f"without lflops: {usual}")
    print(f"{given.runs} runs, {wrong} with a problem")
    shutil.rmtree(top, ignore_errors=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
