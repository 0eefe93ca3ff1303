"""Whether the test suite can be trusted.

`make test` several times on a quiet machine, then beside processes that keep every core busy.

With `--one-core 20` the files of tests that start processes or threads, so many times: on one core,
each time in another order, beside two busy processes. With `--at-once 4` four such runs keep each
other busy in place of these, two on each of two cores.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from results import record

ROOT = Path(__file__).parents[1]
COUNTS = ("passed", "failed", "skipped")
STARTS = re.compile(
    r"support\.processes|torchrun|warm_python|threading|subprocess|os\.fork|multiprocessing|trainer_ranks|gather_rank"
)
"""In the source of tests that start processes or threads."""


class Run(NamedTuple):
    """One run of the suite.

    Attributes:
        busy: How many busy processes ran during it.
        seconds: How long it took.
        status: The exit status of `make test`.
        output: What it printed.
    """

    busy: int
    seconds: float
    status: int
    output: str

    def count(self, name: str) -> int:
        """How many tests passed, failed or were skipped; an error counts as a failure."""
        names = ("failed", "errors", "error") if name == "failed" else (name,)
        closing = re.findall(r"^=+ (.*) in [\d.]+s.*=+$", self.output, re.MULTILINE)
        return sum(
            int(number)
            for number, what in re.findall(r"(\d+) (\w+)", closing[-1] if closing else "")
            if what in names
        )

    @property
    def failures(self) -> list[str]:
        """The names of the tests that failed."""
        return re.findall(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep so many cores busy."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(busy: int) -> Run:
    """Run the suite once."""
    environment = {name: value for name, value in os.environ.items() if name != "LFLOPS"}
    start = time.perf_counter()
    with busy_processes(busy):
        ended = subprocess.run(  # noqa: S603 - our own command
            [shutil.which("make") or "make", "test"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    return Run(busy, time.perf_counter() - start, ended.returncode, ended.stdout + ended.stderr)


def with_processes(matching: str) -> list[str]:
    """The files of tests that start processes or threads, as pytest is given them."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [
        str(path.relative_to(ROOT)) for path in paths if STARTS.search(path.read_text("utf-8"))
    ]
    return [name for name in names if re.search(matching, name)]


def run_on_one_core(files: list[str], seed: int, core: int) -> Run:
    """Run some files of tests once, in an order of the seed's."""
    command = [
        "taskset",
        "-c",
        str(core),
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "--shuffle",
        str(seed),
        *files,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "LFLOPS"}
    start = time.perf_counter()
    ended = subprocess.run(  # noqa: S603
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    found = Run(2, time.perf_counter() - start, ended.returncode, ended.stdout + ended.stderr)
    print(row(seed, found), flush=True)
    if found.status:
        Path(f"suite-one-core-{seed}.log").write_text(found.output, "utf-8")
    return found


def row(seed: int, found: Run) -> str:
    """What came out of one run on one core, as a row of the table."""
    return f"| {seed} | {found.seconds / 60:.1f} min | {' | '.join(str(found.count(name)) for name in COUNTS)} |"


def one_core(seeds: range, at_once: int, matching: str) -> None:
    """Run the tests with processes or threads, and write their table."""
    files, cores = with_processes(matching), sorted(os.sched_getaffinity(0))
    with busy_processes(2 if at_once == 1 else 0), ThreadPoolExecutor(at_once) as lanes:
        runs = [
            *lanes.map(
                lambda seed: run_on_one_core(files, seed, cores[seed % at_once % len(cores)]), seeds
            )
        ]
    beside = "2 busy processes" if at_once == 1 else f"{at_once - 1} other such runs"
    lines = [
        f"{len(files)} files of tests that start processes or threads, on one core, beside {beside}.",
        "",
    ]
    lines += ["| order | time | passed | failed | skipped |", "|--:|--:|--:|--:|--:|"]
    failures: list[str] = []
    for seed, found in zip(seeds, runs, strict=True):
        lines.append(row(seed, found))
        failures += [f"- order {seed}: `{name}`" for name in found.failures]
        if found.status and not found.failures:
            failures.append(f"- order {seed}: pytest ended with {found.status} and named no test")
    closing = [*lines, "", *(failures or ["No test failed."])]
    if matching:
        print("\n".join(closing))
    else:
        record(
            "suite.py --one-core",
            "Whether the tests with processes and threads can be trusted",
            closing,
        )


def main() -> None:
    """Run the suite, print what failed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quiet", type=int, default=5, help="runs on a quiet machine")
    parser.add_argument(
        "--beside", type=int, default=3, help="runs beside a busy process for each core"
    )
    parser.add_argument(
        "--one-core",
        type=int,
        metavar="RUNS",
        help="in place of these: of the tests with processes, on one core",
    )
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="RUNS", help="of those on one core"
    )
    parser.add_argument(
        "--first", type=int, default=1, help="of the orders on one core: the first one's number"
    )
    parser.add_argument(
        "--matching",
        default="",
        help="a regular expression that finds names of files, of those on one core; prints alone",
    )
    asked = parser.parse_args()
    if asked.one_core is not None:
        one_core(range(asked.first, asked.first + asked.one_core), asked.at_once, asked.matching)
        return
    lines = [
        "| run | busy processes | time | passed | failed | skipped | exit status |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    failures: list[str] = []
    for number, busy in enumerate([0] * asked.quiet + [os.cpu_count() or 1] * asked.beside, 1):
        found = run(busy)
        minutes, seconds = divmod(round(found.seconds), 60)
        counts = " | ".join(str(found.count(name)) for name in COUNTS)
        lines.append(
            f"| {number} | {busy} | {minutes} min {seconds} s | {counts} | {found.status} |"
        )
        print(lines[-1], flush=True)
        failures += [f"- run {number}: `{name}`" for name in found.failures]
        if found.status:
            Path(f"suite-{number}.log").write_text(found.output, "utf-8")
    record(
        "suite.py",
        "Whether the test suite can be trusted",
        [*lines, "", *(failures or ["No test failed."])],
    )


if __name__ == "__main__":
    main()
