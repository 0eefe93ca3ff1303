"""Measure the cost of a trace: the recorded steps, the pause after them, and the analysis.

The analysis runs while training continues.
"""

import argparse
import contextlib
import gzip
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import msgspec
import torch
from callback import fit
from overhead import THIN, step_of
from results import in_turn, record
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig

import lflops
from lflops import FlopsMonitor, Schedule
from lflops.model.module_tree import ModuleTree
from lflops.trace.annotate import AnnotationProcess, Calls
from lflops.trace.record import tracer as kineto
from lflops.trace.record.tracer import Tracer
from lflops.trace.recorded import STEP

EVENTS = 200_000
ACTIVE = 3
HIGHEST = """
import sys
from lflops.trace.annotate import main
main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
"""A script that annotates a trace, and prints its peak memory in KiB.

The system's value for a child process would begin with the peak of its parent.
"""


def ratios(
    model: torch.nn.Module, step: Callable[[], None], rounds: int
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a plain step, and the ratio to it of each recorded step.

    Starting and stopping the profiler is not included.
    """
    tree = ModuleTree({"": model})

    @contextlib.contextmanager
    def torchs() -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU]):
            yield

    @contextlib.contextmanager
    def ours() -> Iterator[None]:
        tracer = Tracer(tree)
        tracer.begin()
        yield
        tracer.abandon()

    ways = {
        "plain": contextlib.nullcontext,
        "torch.profiler": torchs,
        "`Tracer`, with the boundaries of modules": ours,
    }
    return in_turn(ways, step, rounds, ACTIVE)


class Stopwatch:
    """Times the parts of `Tracer.stop`.

    Each part is a function in the module of `Tracer`.
    """

    PARTS = ("other_profiler_runs", "recorded_events", "read", "join")

    def __init__(self) -> None:
        """Create an empty dictionary of seconds."""
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Replace each part by a timed function during the block."""
        parts = {name: getattr(kineto, name) for name in self.PARTS}
        for name, part in parts.items():
            setattr(kineto, name, self._timed(name, part))
        try:
            yield
        finally:
            for name, part in parts.items():
                setattr(kineto, name, part)

    def _timed(self, name: str, part: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            result = part(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0) + time.perf_counter() - start
            return result

        return timed


def large(folder: Path) -> list[str]:
    """Record a trace with the largest number of events that a window can have.

    Returns lines with the time that each processing step takes.
    """
    torch.set_num_threads(1)
    model, step = step_of(BertConfig(**THIN), 1, 16)
    ids = torch.randint(1000, (1, 16))
    lflops.count(model, kwargs={"input_ids": ids, "labels": ids}, backward=True).save(
        folder / "profile.json"
    )
    tree = ModuleTree({"": model})
    tracer, steps = Tracer(tree), 3
    while True:
        tracer.begin()
        for number in range(steps):
            step()
            if number < steps - 1:
                tracer.step()
        watch = Stopwatch()
        with watch.running():
            start = time.perf_counter()
            recording = tracer.stop(folder, "host_0")
            stall = time.perf_counter() - start
        if recording is None or recording.raw is None or recording.events >= EVENTS:
            break
        recording.raw.unlink()
        steps = -(-EVENTS * steps // recording.events) + 1
    if recording is None or recording.raw is None:
        return [f"No trace: {tracer.refusal}."]
    joined = sum(watch.seconds[name] for name in ("recorded_events", "read", "join"))
    size = recording.raw.stat().st_size
    copy = shutil.copy(recording.raw, folder / "copy")
    start = time.perf_counter()
    annotation = AnnotationProcess(
        recording.raw,
        recording.path,
        recording.calls,
        batches=steps,
        profile=folder / "profile.json",
    )
    started = time.perf_counter() - start
    failure = annotation.finish()
    annotated = time.perf_counter() - start
    told = folder / "calls"
    told.write_bytes(
        msgspec.json.encode(
            Calls(batches=steps, rank=0, world_size=1, calls=tuple(recording.calls))
        )
    )
    command = [sys.executable, "-c", HIGHEST, copy, told, folder / "again", folder / "profile.json"]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024  # noqa: S603 - our own program
    with gzip.open(recording.path) as file:
        unpacked = sum(map(len, file))
    return [
        "",
        f"This table shows what happens at the end of a trace of {recording.events:,} events ({steps} steps of the BERT with hidden size 48, {len(recording.calls):,} calls of modules):",
        "",
        "| | seconds |",
        "|---|--:|",
        f"| assigning events to modules, and making the table of operators | {joined:.2f} |",
        f"| looking for other profilers | {watch.seconds['other_profiler_runs']:.2f} |",
        f"| all of `Tracer.stop`, which stops training after the last step. torch needs the rest of this time to stop and to write the trace | {stall:.2f} |",
        f"| starting the process that writes module names into the trace file | {started:.3f} |",
        f"| until this process has finished{'' if failure is None else f' ({failure})'} | {annotated:.2f} |",
        "",
        (
            f"This process uses at most {peak:.0f} MiB of memory. The trace file grows from {size / 1e6:.0f} MB to {unpacked / 1e6:.0f} MB; "
            f"compressed, it has {recording.path.stat().st_size / 1e6:.1f} MB."
        ),
    ]


def step_times() -> list[str]:
    """Compare the times of traced steps in the trace with the times that the monitor measures.

    Returns lines of the section.
    """
    with tempfile.TemporaryDirectory() as directory:
        monitor = FlopsMonitor(Schedule(wait=2, warmup=1, active=20), dirpath=directory)
        fit(BertConfig(**THIN), (1, 16), monitor, 60)
        (window,) = monitor.profiles
        (path,) = window.trace.files.values()
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    ours = [step.seconds * 1e3 for step in window.steps if step.kind == "traced"]
    traced = [
        event["dur"] / 1e3
        for event in events
        if event.get("name", "").startswith(STEP) and event.get("cat") == "user_annotation"
    ]
    off = [a / b - 1 for a, b in zip(traced, ours, strict=True)]
    return [
        "",
        (
            f"{len(ours)} traced steps in a Trainer, by the trace's ProfilerStep beside the monitor's clock: {median(traced):.3f} and "
            f"{median(ours):.3f} ms, at worst {max(off, key=abs):+.1%} apart."
        ),
    ]


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    lines = [
        "| training step (AdamW) | plain | recorded by | ratio to plain |",
        "|---|--:|---|--:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        behind = large(Path(folder))
    cases = [
        (
            "BERT, 12 layers, hidden 48, batch 1, length 16, one thread (launch-bound)",
            BertConfig(**THIN),
            1,
            16,
            1,
            rounds,
        ),
        (
            "BERT-base, batch 4, length 128",
            BertConfig(),
            4,
            128,
            torch.get_num_threads(),
            max(rounds // 2, 5),
        ),
    ]
    for title, config, batch, length, threads, times in cases:
        torch.set_num_threads(threads)
        model, step = step_of(config, batch, length)
        plain, found = ratios(model, step, times)
        lines += [
            f"| {title} | {plain * 1e3:.1f} ms | {name} | {ratio:.2f} |"
            for name, ratio in found.items()
        ]
    lines += [
        "",
        f"All times are medians of {rounds} rounds of {ACTIVE} steps (half as many rounds for BERT-base).",
        "The plain and the recorded steps alternate in one process. Not run on CUDA.",
    ]
    record("traces.py", "Traces", [*lines, *behind, *step_times()])


if __name__ == "__main__":
    main()
