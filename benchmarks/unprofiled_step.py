"""The cost of an unprofiled step in each loop: Python calls, bytecode instructions and CPU time.

Only calls and instructions of lflops in the training thread count. The largest step is reported,
and the numbers are the same on every machine. CPU time is compared in pairs of blocks of steps with
and without lflops, which alternate in one process on one core. The interval holds the median
difference with a confidence of 95 %. It follows from the ranks of the differences, so it needs no
assumption about their distribution.
"""

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
"""Number of steps at the start of a run that are left out."""
EDGE = 3
"""Number of blocks at the start and at the end of a run that are left out.

If the length of a run is known, lflops opens a window before its end.
"""
AUTO_DETECTED = "auto-detected"
KEPT_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Settings of glibc's allocator: one heap, which only grows."""


class Scale(NamedTuple):
    """The size of a training run, and the number of steps after which two runs alternate."""

    width: int
    rows: int
    steps_of_block: int


SCALES = {
    "1 ms": Scale(64, 8, 10),
    "5 ms": Scale(256, 96, 8),
    "50 ms": Scale(1024, 192, 8),
}
Run = Callable[[Size], object]


class Cost(NamedTuple):
    """The CPU time of a step without something, and what it adds.

    Attributes:
        without: Seconds of a step without it.
        added: The median difference of the pairs, in seconds.
        low: The lower end of the interval of this median.
        high: The upper end of the interval.
    """

    without: float
    added: float
    low: float
    high: float


def auto_detected(size: Size) -> None:
    """Train in a plain loop without a line of lflops."""
    model = Model(size.width)
    optimizer = optimizer_of(model)
    for batch in DataLoader(Rows(size), batch_size=size.rows):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def watched_auto_detected(size: Size) -> None:
    """Train in the plain loop with `LFLOPS` set, which opens no window by default."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LFLOPS"] = f"html=false,dirpath={folder}"
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
    """Return, for each loop and each other tool, a run without it and a run with it."""
    plain = {name: lambda size, run=run: run(None, size) for name, run in LOOPS.items()}
    watched = {name: lambda size, run=run: run(NEVER, size) for name, run in LOOPS.items()}
    found: dict[str, tuple[Run, Run]] = {name: (plain[name], watched[name]) for name in LOOPS}
    found[AUTO_DETECTED] = (auto_detected, watched_auto_detected)
    lightning = plain["Lightning"]
    found["nothing: Lightning twice"] = (lightning, lightning)
    found["an empty callback in Lightning"] = (
        lightning,
        lambda size: in_lightning(None, size, [Callback()]),
    )
    found["Lightning's ThroughputMonitor"] = (lightning, throughput)
    found["Lightning's PyTorchProfiler, traced steps"] = (lightning, profiled)
    return found


def in_child(work: Callable[[], Any]) -> Any:
    """Run `work` in a forked process, which does not change this process, and return its result."""
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


class Turns:
    """Two training runs in one process on one core, which alternate after a few steps.

    A block of steps of one run is compared with the next block of the other, some milliseconds
    later, because the speed of a shared machine changes within seconds.

    Attributes:
        blocks: For each run, the mean CPU time of a step in each of its blocks.
    """

    def __init__(self, steps_of_block: int) -> None:
        self.blocks: list[list[float]] = [[], []]
        self._steps = steps_of_block
        self._turn = [threading.Semaphore(0), threading.Semaphore(0)]
        self._is_over = [False, False]
        self._number: dict[int, int] = {}
        self._begun: list[float | None] = [None, None]
        self._forwards = [0, 0]

    def run(self, trainings: Sequence[Callable[[], object]], in_main_thread: int) -> None:
        """Run both training runs: one in the main thread, and the other in a second thread."""
        drivers.CLOCKS.append(self._forward)
        other = 1 - in_main_thread
        thread = threading.Thread(target=self._train, args=(other, trainings[other]))
        self._turn[0].release()
        thread.start()
        self._train(in_main_thread, trainings[in_main_thread])
        thread.join()

    def _train(self, number: int, training: Callable[[], object]) -> None:
        torch.set_num_threads(1)
        self._number[threading.get_ident()] = number
        self._turn[number].acquire()
        try:
            training()
        finally:
            self._is_over[number] = True
            self._turn[1 - number].release()

    def _forward(self) -> float:
        """At the end of a block, let the other run continue, and wait for it."""
        number = self._number[threading.get_ident()]
        now = time.thread_time()
        at_end = self._forwards[number] % self._steps == 0
        self._forwards[number] += 1
        if not at_end:
            return now
        begun = self._begun[number]
        if begun is not None:
            self.blocks[number].append((now - begun) / self._steps)
        other = 1 - number
        if not self._is_over[other]:
            self._turn[other].release()
            self._turn[number].acquire()
        self._begun[number] = time.thread_time()
        return now


def blocks_in_turn(
    without: Run, with_it: Run, scale: Scale, rounds: int, in_main_thread: int
) -> tuple[list[float], list[float]]:
    """Return the CPU time of a step in each block of both runs.

    The first and the last blocks are left out.
    """
    steps = (rounds + 2 * EDGE) * scale.steps_of_block
    size = Size(scale.width, scale.rows, steps)
    turns = Turns(scale.steps_of_block)
    turns.run([partial(without, size), partial(with_it, size)], in_main_thread)
    plain, watched = turns.blocks
    return plain[EDGE : EDGE + rounds], watched[EDGE : EDGE + rounds]


def means_in_children(
    without: Run, with_it: Run, scale: Scale, rounds: int
) -> tuple[list[float], list[float]]:
    """Return the CPU times of a step in runs in separate processes, alternately.

    This is for the auto-detected loop. In the same process, lflops would also detect the plain
    loop.
    """

    def of_steps(run: Run) -> float:
        drivers.CLOCKS.append(time.thread_time)
        FORWARDS.clear()
        steps = 4 * scale.steps_of_block
        run(Size(scale.width, scale.rows, 2 * steps))
        return mean(
            after - before for before, after in pairwise(FORWARDS[steps // 2 : -steps // 2])
        )

    plain, watched = [], []
    for number in range(rounds):
        order = [without, with_it] if number % 2 else [with_it, without]
        seconds = {run: in_child(partial(of_steps, run)) for run in order}
        plain.append(seconds[without])
        watched.append(seconds[with_it])
    return plain, watched


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return two of the values, between which the median lies with 95 % confidence."""
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


def cost(name: str, without: Run, with_it: Run, scale: Scale, rounds: int) -> Cost:
    """Compare the CPU time of steps with and without something, alternately."""
    if name == AUTO_DETECTED:
        plain, watched = means_in_children(without, with_it, scale, rounds)
        added = [after - before for before, after in zip(plain, watched, strict=True)]
        return Cost(median(plain), median(added), *interval_of_median(added))
    # The main thread or the first thread may be faster, so both runs are measured in both roles.
    orders = [
        in_child(partial(blocks_in_turn, without, with_it, scale, rounds, in_main_thread))
        for in_main_thread in (0, 1)
    ]
    (plain, watched), (plain_again, watched_again) = orders
    added = [
        (after - before + after_again - before_again) / 2
        for before, after, before_again, after_again in zip(
            plain, watched, plain_again, watched_again, strict=True
        )
    ]
    return Cost(median(plain + plain_again), median(added), *interval_of_median(added))


class Instructions:
    """Counts calls into lflops and the bytecode instructions in them, by step."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self._step = Counter[str]()

    def next_step(self) -> float:
        """Begin a step."""
        self.steps.append(self._step)
        self._step = Counter()
        return 0.0

    def trace(self, frame: FrameType, event: str, _value: object) -> Any:
        """Trace the functions of lflops, but not the functions of other packages."""
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
    """Return the most calls and the most bytecode instructions of lflops in a step."""
    found = Instructions()
    drivers.CLOCKS.append(found.next_step)
    size = Size(8, 4, 40)
    # The ledger times garbage collections, whose number depends on the previous work.
    gc.disable()
    sys.settrace(found.trace)
    try:
        run(size)
    finally:
        sys.settrace(None)
    steps = found.steps[WARM + 5 : -5]
    return max(step["call"] for step in steps), max(step["opcode"] for step in steps)


def work_lines() -> Iterator[str]:
    """Yield a line for each loop with the work of lflops in a step, without measuring time."""
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


def keep_memory() -> None:
    """Start this program again, with settings that keep freed memory.

    Otherwise, glibc returns the activations of some steps to the system. Page faults of half a
    millisecond then begin or end by chance, in either run.
    """
    if os.environ.get("MALLOC_ARENA_MAX") != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEPT_MEMORY)  # noqa: S606


def main() -> None:
    """Measure every loop, and write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="pairs of blocks; 0 times nothing")
    parser.add_argument("--size", choices=SCALES, action="append")
    parser.add_argument("--loop", action="append")
    parser.add_argument("--print", action="store_true", help="record nothing")
    asked = parser.parse_args()
    keep_memory()
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
        "| in each step | calls | instructions | size | step | added | 95 % interval | share of step |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, (without, with_it) in pairs().items():
        if asked.loop and name not in asked.loop:
            continue
        calls, instructions = in_child(lambda run=with_it: work_of_step(run))
        for size_name in asked.size or SCALES:
            found = cost(name, without, with_it, SCALES[size_name], asked.rounds)
            lines.append(
                f"| {name} | {calls or '–'} | {instructions or '–'} | {size_name}"
                f" | {found.without * 1e3:.2f} ms | {found.added * 1e6:.0f} µs"
                f" | {found.low * 1e6:.0f} to {found.high * 1e6:.0f} µs"
                f" | {found.added / found.without:.1%} |"
            )
            print(lines[-1], flush=True)
    lines += [
        "",
        "The table shows CPU time of the training thread. A run with lflops and a run without lflops are two threads of one",
        f"process. They alternate in blocks of 8 or 10 steps, with {asked.rounds} pairs of blocks. Each run is measured both as the main",
        "thread and as the second thread. torch uses one thread on one core. For the auto-detected loop, pairs of processes are",
        "compared, without a window. In all processes, glibc keeps freed memory. Not run on CUDA.",
    ]
    if not asked.print:
        record("unprofiled_step.py", "What an unprofiled step costs", lines)


if __name__ == "__main__":
    main()
