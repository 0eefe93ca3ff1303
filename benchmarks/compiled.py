"""Measure the cost of recording compiled code, and the share of its time with a known module.

There are five models, and a planted slow block. Each model is compiled in separate processes with
fresh caches: once without and once with a record of its graphs.
"""

import argparse
import hashlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from results import record
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from lflops.model.module_tree import ModuleTree
from lflops.trace.record.compiled_time import CompiledTimes, CompileTracking
from lflops.trace.record.tracer import Tracer

STEPS, TRACED = 15, 9
WIDTH, WIDE = 256, 4096


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, inner),
            nn.Linear(inner, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply a norm, two linear layers with a GELU between them, and the residual."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """A sequence of blocks, optionally with a graph break after each block."""

    def __init__(self, *inner: int, breaks: bool = False) -> None:
        super().__init__()
        self.blocks, self.breaks = nn.ModuleList(map(Block, inner)), breaks

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()  # noqa: SLF001 - it has no public name
        return x.square().mean()


class Experts(nn.Module):
    """A mixture of four experts.

    Each expert processes the quarter of the tokens for which the gate gives it the highest weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(WIDTH, 4),
            nn.ModuleList(Block(4 * WIDTH) for _ in range(4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        weights, chosen = self.gate(x).softmax(-1).topk(len(x) // 4, dim=0)
        out = x
        for number, expert in enumerate(self.experts):
            tokens = chosen[:, number]
            out = out.index_add(0, tokens, expert(x[tokens]) * weights[:, number, None])
        return out.square().mean()


def language(model: nn.Module) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Return a language model and the function that computes its loss."""
    ids = torch.randint(1000, (2, 64))
    return model, lambda compiled: compiled(input_ids=ids, labels=ids).loss


def images() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Return ResNet-50 with one bottleneck per stage, and the function that computes its loss."""
    pixels, labels = torch.randn(2, 3, 96, 96), torch.randint(1000, (2,))
    model = ResNetForImageClassification(ResNetConfig(depths=[1, 1, 1, 1], num_labels=1000))
    return model, lambda compiled: compiled(pixel_values=pixels, labels=labels).loss


def rows(model: nn.Module) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Return a model with rows of features as input, and the function that computes its loss."""
    # The input requires a gradient, because every block inside a model passes a gradient on.
    x = torch.randn(512, WIDTH, requires_grad=True)
    return model, lambda compiled: compiled(x)


LAYERS = int(os.environ.get("LAYERS", "4"))
GPT2 = GPT2Config(n_layer=LAYERS)
BERT = BertConfig(num_hidden_layers=LAYERS)
CASES: dict[str, Callable[[], tuple[nn.Module, Callable[[Any], Tensor]]]] = {
    f"GPT-2 small, {LAYERS} of 12 layers": lambda: language(GPT2LMHeadModel(GPT2)),
    f"BERT base, {LAYERS} of 12 layers": lambda: language(BertForMaskedLM(BERT)),
    "ResNet-50, 4 of 16 bottlenecks": images,
    "a mixture of 4 experts": lambda: rows(Experts()),
    "3 blocks, a graph break after each": lambda: rows(Blocks(512, 512, 512, breaks=True)),
}
BOTH_WAYS = [list(CASES)[number] for number in (0, 3, 4)]
PLANTED = "planted"
ROUNDS = 40


def child(name: str, *, recorded: bool, both: bool) -> dict[str, Any]:
    """Compile one model, and time it.

    Args:
        name: The name of the model.
        recorded: Whether its graphs are recorded. In this case, the model is also traced.
        both: Whether a copy without a record is timed as well, in alternation. Inductor's caches
            already contain its code.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = CASES[name]()
    copy = deepcopy(model)
    # This loads inductor, and tries the C++ compiler.
    torch.compile(lambda x: x.sin().sum())(torch.ones(3, requires_grad=True)).backward()
    before = kernel_files()
    tracking = CompileTracking()
    if recorded:
        tracking.start()
    torch._dynamo.reset()  # noqa: SLF001 - it has no public name
    compiled = torch.compile(model)
    found: dict[str, Any] = {
        "compile": cpu_seconds_of(loss, compiled),
        "kernels": kernels(kernel_files() - before),
    }
    if not recorded:
        return found | {"loss": seeded(loss, compiled)}
    found |= looked_into(compiled, lambda: loss(compiled).backward())
    tracking.stop()
    found["loss"] = seeded(loss, compiled)
    if both:
        plain = torch.compile(copy)
        seconds = [
            (cpu_seconds_of(loss, plain), cpu_seconds_of(loss, compiled)) for _ in range(STEPS + 1)
        ][1:]
        found["step"] = statistics.median(without for without, _ in seconds)
        found["ratio"] = statistics.median(
            with_record / without for without, with_record in seconds
        )
    return found


def seeded(loss: Callable[[Any], Tensor], model: Any) -> float:
    """Return the loss, with the same dropout in every process."""
    torch.manual_seed(1)
    return loss(model).item()


def cpu_seconds_of(loss: Callable[[Any], Tensor], model: Any) -> float:
    """Return the CPU time of a step."""
    start = cpu_seconds()
    loss(model).backward()
    return cpu_seconds() - start


def kernel_files() -> set[Path]:
    """Return the C++ kernels in inductor's folder."""
    return set(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.main.cpp"))


def kernels(files: set[Path]) -> tuple[int, str]:
    """Return the number of different C++ kernels, and a hash of their text.

    The hash leaves out the lines that make the kernels visible to Kineto.
    """
    profiled = re.compile(r".*(RAIIAtenRecordFunctionHandle|aoti_runtime/utils\.h).*\n")
    texts = sorted({profiled.sub("", path.read_text()) for path in files})
    return len(texts), hashlib.sha256("".join(texts).encode()).hexdigest()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the compilers that it ran.

    Other programs on the machine do not affect it.
    """
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + compilers.ru_utime + compilers.ru_stime


def looked_into(
    model: nn.Module, step: Callable[[], object], steps: int = TRACED
) -> dict[str, Any]:
    """Trace some steps, and return what the trace contains about compiled code."""
    times = traced(model, step, steps)
    code = times.code
    parts = sum(kernel.host_seconds for kernel in code.kernels) + code.unassigned_seconds
    return {
        "graphs": code.graphs,
        "assigned": 1 - code.unassigned_seconds / code.seconds,
        "divided": code.divided_seconds / code.seconds,
        "off": abs(parts / code.seconds - 1),
    }


def traced(model: nn.Module, step: Callable[[], object], steps: int) -> CompiledTimes:
    """Trace some steps."""
    tracer = Tracer(ModuleTree({"": model}), inside_compiled=True)
    tracer.begin()
    for number in range(steps):
        step()
        tracer.step(batch=number < steps - 1)
    with tempfile.TemporaryDirectory() as folder:
        recording = tracer.stop(Path(folder), "benchmark", whole=None)
    if recording is None or recording.compiled is None:
        raise SystemExit(f"there is no recording: {tracer.refusal}")
    return recording.compiled


def planted() -> dict[str, float]:
    """Compare a wide block among twelve blocks with the same block compiled alone.

    Both run in every step of one traced window.

    Returns:
        The median and the quartiles of the ratio of both times, step by step; the number of
        steps in which the wide block is the slowest of the twelve; and its share of the time of
        the twelve.
    """
    torch.set_num_threads(1)
    tracking = CompileTracking()
    tracking.start()
    both, losses = nn.ModuleDict(), {}
    for name, inner in {"twelve": [*[512] * 7, WIDE, *[512] * 4], "alone": [WIDE]}.items():
        model, losses[name] = rows(Blocks(*inner))
        both[name] = torch.compile(model)

    def step() -> None:
        for name, loss in losses.items():
            loss(both[name]).backward()

    for _ in range(3):
        step()
    took = by_block(traced(both, step, ROUNDS))
    tracking.stop()
    low, median, high = statistics.quantiles(
        [each["twelve.blocks.7"] / each["alone.blocks.0"] for each in took], n=4
    )
    among = [
        {block: seconds for block, seconds in each.items() if block.startswith("twelve.blocks")}
        for each in took
    ]
    slowest = sum(max(each, key=lambda block: each[block]) == "twelve.blocks.7" for each in among)
    share = statistics.median(each["twelve.blocks.7"] / sum(each.values()) for each in among)
    return {"ratio": median, "low": low, "high": high, "slowest": slowest, "share": share}


def by_block(times: CompiledTimes) -> list[dict[str, float]]:
    """Return the seconds of each block in each step, forward and backward together."""
    steps: list[dict[str, float]] = []
    for batch in times.host:
        sums: dict[str, float] = {}
        for by_module in batch.values():
            for key, took in by_module.items():
                block = ".".join(
                    key.fqn.removeprefix("_orig_mod.").replace("._orig_mod", "").split(".")[:3]
                )
                sums[block] = sums.get(block, 0.0) + took / 1e9
        steps.append(sums)
    return steps


def measured(name: str, folder: str, *options: str) -> dict[str, Any]:
    """Run `child` or `planted` in a separate process, with inductor's caches in a folder."""
    command = [sys.executable, __file__, "--child", name, *options]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603 - this very file
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(name, options, found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure, and write the section."""
    lines = [
        "| model | graphs | share of time assigned to modules | share of time in fused kernels that are divided among modules | difference between the sum of the parts and the time of the compiled code |",
        "|---|---|---|---|---|",
    ]
    costs = [
        "",
        "| model | first step without lflops | first step with lflops | step without lflops | change with lflops | same loss | same kernels |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            both = name in BOTH_WAYS
            plain = measured(name, folder) if both else {}
            each = measured(name, folder, "--recorded", *(["--both"] if both else []))
        lines.append(
            f"| {name} | {each['graphs']} | {each['assigned']:.2%} | {each['divided']:.1%} | {each['off']:.1e} |"
        )
        if both:
            loss, same = (
                "yes" if plain[fact] == each[fact] else "no" for fact in ("loss", "kernels")
            )
            times = f"{plain['compile']:.1f} s | {each['compile']:.1f} s | {1e3 * each['step']:.1f} ms | {each['ratio'] - 1:+.1%}"
            costs.append(f"| {name} | {times} | {loss} | {same}, {each['kernels'][0]} |")
    with tempfile.TemporaryDirectory() as folder:
        wide = measured(PLANTED, folder)
    lines += [
        *costs,
        "",
        "In a model with twelve blocks, the eighth block is 8 times as wide as the others. lflops shows it as the slowest block in",
        f"{wide['slowest']} of {ROUNDS} steps, with {wide['share']:.1%} of the time of all blocks. This time is {wide['ratio']:.3f} times the time of",
        f"the same block compiled alone (quartiles {wide['low']:.3f} to {wide['high']:.3f}). Both run in every step of one traced window, and the",
        "ratio is computed for each step.",
        "",
        "The first step compiles the model. Times are CPU times of the process and of the compilers that it starts. One thread,",
        "inductor's C++ backend, empty caches, models with their real widths. Not run on CUDA.",
    ]
    record("compiled.py", "Inside of compiled code", lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=[*CASES, PLANTED])
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--both", action="store_true")
    given = parser.parse_args()
    if given.child:
        print(
            json.dumps(
                planted()
                if given.child == PLANTED
                else child(given.child, recorded=given.recorded, both=given.both)
            )
        )
    else:
        main()
