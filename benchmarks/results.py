"""Functions that all benchmarks share.

They steady the process, alternate between steps, and write a section of RESULTS.md with machine and
date.
"""

import contextlib
import ctypes
import datetime as dt
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import median

import torch

RESULTS = pathlib.Path(__file__).with_name("RESULTS.md")
HEAD = "# Measured\n\nEach section names the script that printed it; `make bench` replaces the sections.\n"


def record(script: str, title: str, lines: Sequence[str]) -> None:
    """Print a section, and replace the script's previous section in RESULTS.md at its place.

    The section of a script names the script at the beginning of its third line.
    """
    section = "\n".join(
        [f"## {title}", "", f"`benchmarks/{script}`, {_machine()}.", "", *lines, ""]
    )
    print(section)
    text = RESULTS.read_text() if RESULTS.exists() else HEAD
    sections = re.split(r"(?m)^(?=## )", text)
    head = re.compile(rf"## .*\n\n`benchmarks/{re.escape(script)}`")
    place = next((place for place, each in enumerate(sections) if head.match(each)), len(sections))
    sections[place : place + 1] = [section]
    RESULTS.write_text("\n".join(each.strip() + "\n" for each in sections))


def in_turn(
    ways: Mapping[str, Callable[[], AbstractContextManager[object]]],
    step: Callable[[], None],
    rounds: int,
    steps: int = 1,
    *,
    cpu: bool = False,
) -> tuple[float, dict[str, float]]:
    """Run steps in each way to watch them, alternately.

    So a slow moment of the machine affects all ways.

    Args:
        ways: The ways to watch a step. The first does nothing.
        step: The step.
        rounds: Number of rounds. Two more rounds are discarded.
        steps: Number of steps in each round.
        cpu: Whether to compare the least CPU time of each way instead of medians of seconds. This
            varies less while other programs run.

    Returns:
        The seconds of a plain step, and the ratio of each other way to it: the median over the
        rounds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    clock = time.process_time if cpu else time.perf_counter
    for each in range(rounds + 2):
        for name, way in ways.items():
            with way():
                start = clock()
                for _ in range(steps):
                    step()
                elapsed = (clock() - start) / steps
            if each >= 2:
                seconds[name].append(elapsed)
    plain, *others = seconds.items()
    if cpu:
        return min(plain[1]), {name: min(taken) / min(plain[1]) for name, taken in others}
    return median(plain[1]), {
        name: median(a / b for a, b in zip(taken, plain[1], strict=True)) for name, taken in others
    }


BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that keeps a core busy until its parent process has ended or was killed."""


@contextlib.contextmanager
def beside(processes: int, *, first: bool = True) -> Iterator[None]:
    """Run other processes that compute during the block.

    Without other processes, this process gets a higher priority, if possible, as on an idle
    machine.
    """
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]  # noqa: S603
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(
            0,
            *(
                (os.SCHED_OTHER, os.sched_param(0))
                if others or not first
                else (os.SCHED_RR, os.sched_param(1))
            ),
        )
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def keep_freed_memory() -> None:
    """Make the C library keep freed memory.

    Otherwise, new memory causes page faults at different moments in each run.
    """
    library, mmap_threshold, trim_threshold = ctypes.CDLL(None), -3, -1
    library.mallopt(mmap_threshold, 1 << 30)
    library.mallopt(trim_threshold, (1 << 31) - 1)


def _machine() -> str:
    today = dt.datetime.now(dt.UTC).date().isoformat()
    cpu = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.machine(),
    )
    return f"{today}, {cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def _cpuinfo() -> list[str]:
    path = pathlib.Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
