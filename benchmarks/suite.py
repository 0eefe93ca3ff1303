"""Whether the test suite can be trusted: `make test` several times on a quiet machine, then beside processes that keep every core busy."""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from results import record

ROOT = Path(__file__).parents[1]
COUNTS = ("passed", "failed", "skipped")


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
        return sum(int(number) for number, what in re.findall(r"(\d+) (\w+)", closing[-1] if closing else "") if what in names)

    @property
    def failures(self) -> list[str]:
        """The names of the tests that failed."""
        return re.findall(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep so many cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
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
            [shutil.which("make") or "make", "test"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    return Run(busy, time.perf_counter() - start, ended.returncode, ended.stdout + ended.stderr)


def main() -> None:
    """Run the suite, print what failed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quiet", type=int, default=5, help="runs on a quiet machine")
    parser.add_argument("--beside", type=int, default=3, help="runs beside a busy process for each core")
    asked = parser.parse_args()
    lines = ["| run | busy processes | time | passed | failed | skipped | exit status |", "|--:|--:|--:|--:|--:|--:|--:|"]
    failures: list[str] = []
    for number, busy in enumerate([0] * asked.quiet + [os.cpu_count() or 1] * asked.beside, 1):
        found = run(busy)
        minutes, seconds = divmod(round(found.seconds), 60)
        counts = " | ".join(str(found.count(name)) for name in COUNTS)
        lines.append(f"| {number} | {busy} | {minutes} min {seconds} s | {counts} | {found.status} |")
        print(lines[-1], flush=True)
        failures += [f"- run {number}: `{name}`" for name in found.failures]
        if found.status:
            Path(f"suite-{number}.log").write_text(found.output, "utf-8")
    record("suite.py", "Whether the test suite can be trusted", [*lines, "", *(failures or ["No test failed."])])


if __name__ == "__main__":
    main()
