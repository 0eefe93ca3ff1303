"""Run a training run with or without a fault, each in a separate process."""

import contextlib
import multiprocessing
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.faults.kinds import KINDS, Kind
from benchmarks.faults.loops import LOOPS
from benchmarks.faults.parts import Parts
from tests.support.ports import free_port

SHARES = (0.15, 0.8)
"""Range of the cost of a fault that can choose it, as a share of a usual step."""

# The first steps are not measured, because the schedule's window is in them.
FIRST = 20
# Time limit of a training run in seconds, and the number of tries.
SECONDS, TRIES = 240, 3

KEPT: list[Parts] = []
"""Objects that stay alive until the process ends."""


def trained(name: str, seed: int, rank: int, port: int, folder: Path | None) -> dict[str, Any]:
    """Run a training run in this process, and return the facts about it."""
    kind, draw = KINDS[name], random.Random(f"{name} {seed}")  # noqa: S311 - nothing is secret
    # Several threads would wait for each other while other programs use the cores.
    torch.set_num_threads(1)
    if kind.ranks > 1:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(kind.ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        distributed.init_process_group("gloo")
    loop = draw.choice(kind.loops)
    parts = Parts(f"{seed} {name}", rank, kind.ranks)
    KEPT.append(parts)
    seconds = draw.uniform(*SHARES) * parts.usual_seconds
    if kind.ranks > 1:
        # All ranks plant a fault of the same cost.
        shared = torch.tensor([seconds])
        distributed.broadcast(shared, 0)
        seconds = float(shared)
    if folder is not None:
        kind.change(parts, draw, seconds)
    try:
        ends = LOOPS[loop](parts, folder)
    finally:
        parts.end()
    if kind.ranks > 1:
        distributed.destroy_process_group()
    steps = [
        later - earlier for earlier, later in zip(ends[FIRST:], ends[FIRST + 1 :], strict=False)
    ]
    module = f"blocks.{parts.slow_block}" if kind.label.module else ""
    return {
        "kind": name,
        "seed": seed,
        "word": kind.label.word,
        "module": module,
        "loop": loop,
        "model": parts.name,
        "planted": seconds if kind.can_choose and kind.label.word else None,
        "usual": parts.usual_seconds,
        "step": sum(steps) / len(steps),
    }


def in_processes(kind: Kind, name: str, seed: int, folder: Path | None) -> dict[str, Any] | None:
    """Run a training run in one process per rank, and return the facts from rank 0.

    If a process fails or takes too long, the run is repeated. Returns `None` if all tries fail.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", __name__])
    for _ in range(TRIES):
        answers: Any = context.Queue()
        port = free_port()
        processes = [
            context.Process(target=answer, args=(answers, name, seed, rank, port, folder))
            for rank in range(kind.ranks)
        ]
        for process in processes:
            process.start()
        found: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(Exception):
            for _rank in processes:
                found.update([answers.get(timeout=SECONDS)])
        for process in processes:
            process.join(10)
            process.kill()
        if len(found) == kind.ranks:
            return found[0]
        if folder is not None:
            shutil.rmtree(folder)
            folder.mkdir()
    return None


def answer(answers: Any, *of: Any) -> None:
    """Run a rank, send its facts to the parent process, and end the process at once.

    If a model is deleted after its process group, gloo's threads may wait forever.
    """
    warnings.simplefilter("ignore")
    # The workers of data loaders are forked, as in a program that a user starts.
    multiprocessing.set_start_method("fork", force=True)
    answers.put((of[2], trained(*of)))
    answers.close()
    answers.join_thread()
    os._exit(0)
