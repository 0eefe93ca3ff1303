"""The cost of an unprofiled step in each loop: Python calls, bytecode instructions and CPU time.

Only calls and instructions of lflops in the training thread count. The largest step is reported,
and the numbers are the same on every machine. CPU time is compared in pairs of runs with and
without lflops, which alternate in one process on one core. The interval holds the median difference
with a confidence of 95 %. It follows from the ranks of the differences, so it needs no assumption
about their distribution.
"""

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import comb
from pathlib import Path
from statistics import mean, median
from types import FrameType
from typing import Any, NamedTuple

import drivers
import torch
from drivers import FORWARDS, LOOPS, Model, Rows, Size, in_lightning, optimizer_of
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.profilers import PyTorchProfiler
from results import record
from torch.utils.data import DataLoader

import lflops
from lflops import Schedule
from lflops.timing.clock import ThreadSchedule

ROOT = str(Path(lflops.__file__).parent)
NEVER = Schedule(wait=10**9)
WARM = 10
"""The steps at the start of a run that are left out."""
SIZES = {
    "1 ms": Size(64, 8, 150),
    "5 ms": Size(256, 96, 60),
    "50 ms": Size(1024, 192, 25),
}
Run = Callable[[Size], object]


class Cost(NamedTuple):
    """The CPU time that a step takes without something, and what it adds.

    Attributes:
        without: Seconds of a step without it.
        added: The median difference of the pairs, in seconds.
        low: The lower end of the interval of this median.
        high: The upper end of the interval.
        elsewhere: Seconds a step that other threads of the process take more, in the median.
    """

    without: float
    added: float
    low: float
    high: float
    elsewhere: float


def auto_detected(size: Size) -> None:
    """Train in a plain loop without a line of lflops."""
    model = Model(size.width)
    optimizer = optimizer_of(model)
    for batch in DataLoader(Rows(size), batch_size=size.rows):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def watched_auto_detected(size: Size) -> None:
    """The same with `LFLOPS` set."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LFLOPS"] = f"wait=1000000,trace=false,html=false,dirpath={folder}"
        from lflops.integrations.auto_detect.entry import watch

        watch()
        auto_detected(size)


def profiled(size: Size) -> None:
    """Train in Lightning with its profiler, which traces every step with torch.profiler."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=size.steps)
        in_lightning(None, size, profiler=PyTorchProfiler(folder, "trace", schedule=schedule))


def throughput(size: Size) -> None:
    """Train in Lightning with its monitor of the throughput."""
    in_lightning(None, size, [ThroughputMonitor(batch_size_fn=lambda batch: len(batch["x"]))])


def pairs() -> dict[str, tuple[Run, Run]]:
    """For each loop and each tool beside lflops, a run without it and a run with it."""
    plain = {name: lambda size, run=run: run(None, size) for name, run in LOOPS.items()}
    watched = {name: lambda size, run=run: run(NEVER, size) for name, run in LOOPS.items()}
    found: dict[str, tuple[Run, Run]] = {name: (plain[name], watched[name]) for name in LOOPS}
    found["auto-detected"] = (auto_detected, watched_auto_detected)
    lightning = plain["Lightning"]
    found["an empty callback in Lightning"] = (
        lightning,
        lambda size: in_lightning(None, size, [Callback()]),
    )
    found["Lightning's ThroughputMonitor"] = (lightning, throughput)
    found["Lightning's PyTorchProfiler, traced steps"] = (lightning, profiled)
    return found


def in_child(work: Callable[[], Any]) -> Any:
    """The result of `work` in a forked process, which leaves nothing behind in this one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            with open(os.devnull, "w") as nothing:  # noqa: PTH123 - the end of a pipe is no path
                sys.stdout = nothing
                result = work()
            os.write(writer, json.dumps(result).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as results:
        answer = results.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the child that measured ended with status {status}")
    return json.loads(answer)


def cpu_seconds(run: Run, size: Size) -> tuple[float, float]:
    """CPU time of a step in the training thread, and in all other threads, as means over a run."""
    process: list[float] = []

    def read() -> float:
        process.append(time.process_time())
        return time.thread_time()

    drivers.CLOCKS.append(read)
    FORWARDS.clear()
    run(size)
    steps = len(FORWARDS) - 1 - WARM
    of_thread = mean(after - before for before, after in pairwise(FORWARDS[WARM:]))
    of_process = (process[-1] - process[WARM]) / steps
    return of_thread, of_process - of_thread


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The interval between two of the values that holds the median with 95 % confidence."""
    ordered = sorted(values)
    count = len(ordered)
    outside = 0.0
    rank = 0
    while True:
        outside += 2 * comb(count, rank) / 2**count
        if outside > 0.05:
            break
        rank += 1
    first = max(rank - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def cost(without: Run, with_it: Run, size: Size, rounds: int) -> Cost:
    """Compare the CPU time of runs with and without something, in turn."""
    plain, added, elsewhere = [], [], []
    for number in range(rounds):
        order = [without, with_it] if number % 2 else [with_it, without]
        seconds = {run: in_child(lambda run=run: cpu_seconds(run, size)) for run in order}
        plain.append(seconds[without][0])
        added.append(seconds[with_it][0] - seconds[without][0])
        elsewhere.append(seconds[with_it][1] - seconds[without][1])
    low, high = interval_of_median(added)
    return Cost(median(plain), median(added), low, high, median(elsewhere))


class Instructions:
    """Counts calls into lflops and the bytecode instructions in them, by step of the training."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self._step = Counter[str]()

    def next_step(self) -> float:
        """Begin a step."""
        self.steps.append(self._step)
        self._step = Counter()
        return 0.0

    def trace(self, frame: FrameType, event: str, _value: object) -> Any:
        """Trace the functions of lflops, and nothing of the functions that they call."""
        code = frame.f_code
        reads_system = code is ThreadSchedule.read.__code__
        if reads_system or not code.co_filename.startswith(ROOT):
            return None
        frame.f_trace_opcodes = True
        self._step[event] += 1
        return self._opcode

    def _opcode(self, _frame: FrameType, event: str, _value: object) -> Any:
        self._step[event] += 1
        return self._opcode


def work_of_step(run: Run) -> tuple[int, int]:
    """The most calls and the most bytecode instructions of lflops in an unprofiled step."""
    found = Instructions()
    drivers.CLOCKS.append(found.next_step)
    size = Size(8, 4, 40)
    # the ledger times garbage collections, whose number depends on what ran before
    gc.disable()
    sys.settrace(found.trace)
    try:
        run(size)
    finally:
        sys.settrace(None)
    steps = found.steps[WARM + 5 : -5]
    return max(step["call"] for step in steps), max(step["opcode"] for step in steps)


def work_lines() -> Iterator[str]:
    """A line for each loop of the work of lflops in a step. No time is measured."""
    yield "The unprofiled step with the most work of lflops, in the training thread:"
    yield ""
    yield "| loop | Python calls | bytecode instructions |"
    yield "|---|--:|--:|"
    for name, (_, with_it) in pairs().items():
        calls, instructions = in_child(lambda run=with_it: work_of_step(run))
        if calls:
            yield f"| {name} | {calls} | {instructions} |"
    yield ""
    yield "All loops are before their first window. CPU time was not measured."


def main() -> None:
    """Measure every loop, and write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="pairs of runs; 0 times nothing")
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--loop", action="append")
    parser.add_argument("--print", action="store_true", help="record nothing")
    asked = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lflops").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if not asked.rounds:
        record("unprofiled_step.py", "What an unprofiled step costs", list(work_lines()))
        return
    lines = [
        "| in each step | calls | instructions | size | step | added | 95 % interval | share of step | other threads |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, (without, with_it) in pairs().items():
        if asked.loop and name not in asked.loop:
            continue
        calls, instructions = in_child(lambda run=with_it: work_of_step(run))
        for size_name in asked.size or SIZES:
            found = cost(without, with_it, SIZES[size_name], asked.rounds)
            lines.append(
                f"| {name} | {calls or '–'} | {instructions or '–'} | {size_name}"
                f" | {found.without * 1e3:.2f} ms | {found.added * 1e6:.0f} µs"
                f" | {found.low * 1e6:.0f} to {found.high * 1e6:.0f} µs"
                f" | {found.added / found.without:.1%} | {found.elsewhere * 1e6:.0f} µs |"
            )
            print(lines[-1], flush=True)
    lines += [
        "",
        f"CPU time of the training thread, {asked.rounds} pairs of runs in turn, one thread of torch on one core.",
        "Other threads: the CPU time that the ledger's thread adds. Not run on CUDA.",
    ]
    if not asked.print:
        record("unprofiled_step.py", "What an unprofiled step costs", lines)


if __name__ == "__main__":
    main()
