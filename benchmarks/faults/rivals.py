"""Collect the findings of other tools in the same training runs.

The tools are TraceML and gpuprof, started as in their READMEs, and the profilers of torch and
Lightning.

python -m benchmarks.faults.rivals DIR [--seeds 1] [--kinds data_waits nothing] [--record]

Requires `pip install traceml-ai gpuprof`. Both tools are made for GPUs, but these training runs use
a CPU. The runs are custom loops on one rank without lflops. For torch, the search for bad patterns
is used. Lightning's profiler has a table but no verdict, so its finding is the largest row, from a
run with a Trainer. The text of each tool is stored in `DIR/KIND-SEED/TOOL.txt`, and existing files
are not made again. Two results are recorded: whether the first finding of a tool is about the
fault, and whether any finding is. `ABOUT` has the words that show it.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.kinds import KINDS
from benchmarks.faults.loops import lightning
from benchmarks.faults.parts import Parts
from benchmarks.faults.training import SHARES
from benchmarks.results import record
from lflops.profile.series import summed
from tests.support.ports import free_port
from tests.support.repository import ROOT

SECONDS = 180

INTRODUCTION = [
    "Loops of one's own on a CPU, for Lightning a Trainer. **TraceML and gpuprof are made for GPUs**: what they know of kernels, of a",
    "device's memory and of its idle time is not asked for, and most of these faults are not theirs to find. torch's advisor looks",
    "for patterns in a trace. Lightning's profiler has a table and no verdict: shown is its largest row. *Right* is lenient: any word",
    "for the fault does, and where TraceML calls all of it `residual`, or gpuprof `waiting on the loader`, that is right in each such",
    "training.",
    "",
]

ABOUT = {
    "data": r"loader|input|prefetch|worker",
    "outside": r"residual|\.item|sync|outside|metric",
    "slow module": r"blocks\.\d|layer|module",
    "tiny operators": r"launch|small (kernel|op)|blocks\.\d|tiny",
    "wide dtype": r"float64|fp64|double|dtype|precision",
    "recompute": r"recompute|checkpoint",
    "unused work": r"unused",
    "frozen": r"frozen|requires_grad",
    "eval mode": r"eval",
    "padding": r"padding",
    "hooks": r"hook|anomaly",
    "backward twice": r"backward.*(twice|2 calls|retain)|retain_graph",
    "clip": r"clip|residual",
    "optimizer": r"optimizer",
    "outside all phases": r"residual|outside|between",
    "logging": r"logging|residual",
    "checkpoint": r"saving|checkpoint(ing)? (time|save)|stall",
    "validation": r"validation|eval",
    "garbage collection": r"garbage|\bgc\b",
    "compilation": r"compil",
    "graph breaks": r"graph break",
    "threads": r"thread|oversubscri",
    "busy machine": r"cpu.*(pegged|100|contention|high)|high cpu",
    "another thread": r"gil|thread",
    "memory grows": r"memory (creep|grow|leak)|creep",
}
"""For each label, a pattern that matches a sentence about the fault.

The patterns are lenient: a tool that always reports `residual` is right for several labels.
"""

ACTIONS = {
    "data": r"dataloader_next",
    "outside": r"training_step",
    "clip": r"clip",
    "optimizer": r"optimizer_step",
    "outside all phases": r"on_train_batch_end",
    "garbage collection": r"on_train_batch_end",
    "logging": r"on_train_batch_end",
    "checkpoint": r"save_checkpoint|ModelCheckpoint",
    "validation": r"validation|evaluation",
}
"""For each label, the rows of Lightning's table that contain the fault.

Faults with other labels are in no row.
"""

WITHIN_OPTIMIZER = (
    r"\.(training_step|backward)$|zero_grad|clip|(before|after)_(backward|optimizer_step)"
)
"""Rows of Lightning's table whose time is also in the row `optimizer_step`."""

# A row of Lightning's table: the action and its seconds.
ROW = r"^\|  (\S+?)(?:\{.*\}\S*)?\s*\|\s*[\d.e-]+\s*\|\s*\d+\s*\|\s*([\d.e-]+)\s*\|"


def steps_of(parts: Parts, around: Callable[[], Any]) -> None:
    """Run a custom loop."""
    for step, batch in enumerate(parts.loader(), 1):
        with around():
            parts.backward(parts.loss(batch))
            parts.clip()
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            parts.after_step(step)
            if parts.log_every and step % parts.log_every == 0:
                parts.logging()
        for _, event in parts.events(step):
            event()


def train(name: str, seed: int, tool: str) -> None:
    """Run a training run with a tool in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind, draw = KINDS[name], random.Random(f"{name} {seed}")  # noqa: S311 - nothing is secret
    draw.choice(kind.loops)
    parts = Parts(f"{seed} {name}")
    kind.change(parts, draw, draw.uniform(*SHARES) * parts.usual_seconds)
    with contextlib.ExitStack() as contexts:
        for context in parts.contexts:
            contexts.enter_context(context())
        RUNS[tool](parts)
    parts.end()


def under_gpuprof(parts: Parts) -> None:
    """Run with gpuprof, as its README does."""
    import gpuprof

    with gpuprof.profile("run"):
        steps_of(parts, contextlib.nullcontext)


def under_traceml(parts: Parts) -> None:
    """Run a custom loop with TraceML inside `traceml run`, as its README does."""
    import traceml_ai

    traceml_ai.init(mode="auto")
    steps_of(parts, lambda: traceml_ai.trace_step(parts.model))


def under_torch(parts: Parts) -> None:
    """Run some steps with torch's profiler, then search for bad patterns."""
    from torch.profiler import _pattern_matcher, profile

    parts.data.batches = 20
    with profile(with_stack=True, record_shapes=True, profile_memory=True) as profiler:
        steps_of(parts, contextlib.nullcontext)
    _pattern_matcher.report_all_anti_patterns(profiler, should_benchmark=False, print_enable=True)


def under_lightning(parts: Parts) -> None:
    """Run with a profiler of Lightning."""
    from lightning.pytorch.profilers import SimpleProfiler

    lightning(parts, None, profiler := SimpleProfiler())
    print(profiler.summary())


RUNS = {
    "gpuprof": under_gpuprof,
    "TraceML": under_traceml,
    "torch": under_torch,
    "Lightning": under_lightning,
}


def output(name: str, seed: int, tool: str, folder: Path) -> str:
    """Return the output of a tool for a training run, in a separate process."""
    training = [str(Path(__file__)), "--train", name, str(seed), tool]
    command = [sys.executable, *training]
    if tool == "TraceML":
        script, *arguments = training
        options = ["--run-name", f"{name}-{seed}", "--aggregator-port", str(free_port())]
        command = [
            str(Path(sys.executable).with_name("traceml")),
            "run",
            script,
            *options,
            "--args",
            *arguments,
        ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    started = subprocess.Popen(  # noqa: S603 - of this program
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = started.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        # TraceML starts other processes, so the whole group is killed.
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
        return "failed: it took too long"
    return printed if started.returncode == 0 else f"failed: {errors.strip().splitlines()[-1:]}"


def said(tool: str, text: str) -> list[str]:
    """Return the sentences of a tool's verdict, in order."""
    if tool == "TraceML":
        found = re.findall(r"\|  (?:Verdict|Why|Next): (.*?)\s*(?:\|\||\|)", text)
        return [" ".join(found)] if found else []
    if tool == "gpuprof":
        return [
            each
            for each in re.findall(r"\[(?:HIGH|MED|LOW|CRIT\w*)\]\s+(.*)", text)
            if "Estimated cost" not in each
        ]
    if tool == "Lightning":
        return rows_of(text)
    return re.findall(r"^(?:You are|Detected|There) .*", text, re.MULTILINE)


def rows_of(text: str) -> list[str]:
    """Return the large rows of Lightning's table, the largest first.

    These have at least a tenth of the epoch, without the time that is also in other rows.
    """
    rows = [(action, float(seconds)) for action, seconds in re.findall(ROW, text, re.MULTILINE)]
    own = summed(
        (action.rpartition("]")[2].lstrip("."), seconds)
        for action, seconds in rows
        if not action.startswith(("run_training", "Total"))
    )
    within = sum(seconds for action, seconds in own.items() if re.search(WITHIN_OPTIMIZER, action))
    own |= {
        action: seconds - within
        for action, seconds in own.items()
        if action.endswith(".optimizer_step")
    }
    epoch = dict(rows).get("run_training_epoch", math.inf)
    large = sorted(
        (item for item in own.items() if item[1] >= epoch / 10), key=lambda item: -item[1]
    )
    return [f"{action}: {100 * seconds / epoch:.0f} % of the epoch" for action, seconds in large]


def runs(tool: str, name: str) -> bool:
    """Return whether a kind can be planted in the loop that a tool supports."""
    return ("lightning" if tool == "Lightning" else "plain") in KINDS[name].loops


def table(folder: Path, seeds: list[int], kinds: list[str]) -> Iterator[str]:
    """Yield a table row for each kind, with the first finding of each tool."""
    right: dict[str, Counter[str]] = {tool: Counter() for tool in RUNS}
    yield "| planted | label | " + " | ".join(RUNS) + " |"
    yield "|---|---|" + "---|" * len(RUNS)
    for seed in seeds:
        for name in kinds:
            word, cells = KINDS[name].label.word, []
            for tool in RUNS:
                file = folder / f"{name}-{seed}" / f"{tool}.txt"
                if not runs(tool, name) or not file.exists():
                    cells.append("–")
                    continue
                text = file.read_text()
                sentences = said(tool, text)
                # The default matches nothing.
                words = (ACTIONS if tool == "Lightning" else ABOUT).get(word, "(?!)")
                about = [re.search(words, each, re.IGNORECASE) is not None for each in sentences]
                right[tool][
                    "failed" if text.startswith("failed") else "faults" if word else "clean"
                ] += 1
                right[tool]["first"] += any(about[:1])
                right[tool]["any"] += any(about)
                right[tool]["accused"] += (
                    bool(sentences) and not word and not sentences[0].startswith("COMPUTE-BOUND")
                )
                mark = (
                    "**right** "
                    if any(about[:1])
                    else "(right among others) "
                    if any(about)
                    else ""
                )
                cells.append(
                    f"{mark}{sentences[0][:90]}"
                    if sentences
                    else "failed"
                    if text.startswith("failed")
                    else "nothing"
                )
            yield (
                f"| {name}, {seed} | {word or 'none'} | "
                + " | ".join(each.replace("|", "∣") for each in cells)
                + " |"
            )
    yield ""
    for tool, counts in right.items():
        accused = (
            f"; says something of {counts['accused']} of {counts['clean']} in which nothing is wrong"
            if tool != "Lightning"
            else ""
        )
        failed = (
            f"; {counts['failed']} more failed or took longer than {SECONDS} s"
            if counts["failed"]
            else ""
        )
        yield f"- {tool}: first in {counts['first']} of {counts['faults']}, anywhere in {counts['any']}{accused}{failed}."


def main() -> None:
    """Run all training runs that do not exist yet, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=[name for name, each in KINDS.items() if each.ranks == 1 and "plain" in each.loops],
    )
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--no-runs", action="store_true", help="the table of those that are there")
    parser.add_argument("--train", nargs=3, metavar=("KIND", "SEED", "TOOL"))
    given = parser.parse_args()
    if given.train:
        name, seed, tool = given.train
        train(name, int(seed), tool)
        return
    for seed in given.seeds if not given.no_runs else ():
        for name in given.kinds:
            folder = given.folder.absolute() / f"{name}-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            for tool in RUNS:
                if runs(tool, name) and not (folder / f"{tool}.txt").exists():
                    (folder / f"{tool}.txt").write_text(text := output(name, seed, tool, folder))
                    print(
                        json.dumps(
                            [
                                name,
                                seed,
                                tool,
                                *said(tool, text)[:2],
                                *([text] if text.startswith("failed") else []),
                            ]
                        ),
                        flush=True,
                    )
    lines = [*INTRODUCTION, *table(given.folder, given.seeds, given.kinds)]
    if given.record:
        record("rivals", "The same trainings under other tools", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
