"""What looking inside of compiled code costs, and how much of its time is assigned to modules: five models, and a planted slow block.

Each model is compiled in processes of their own, with fresh caches: without a record of its graphs and with one.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from results import record
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from lflops.collect.kineto.compile_tracking import CompileTracking
from lflops.collect.kineto.compiled_time import CompiledTimes
from lflops.collect.kineto.tracer import Tracer
from lflops.collect.model.module_tree import ModuleTree

STEPS, TRACED = 15, 9
WIDTH, WIDE = 256, 4096


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Two products, and what is between."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks one after the other, with graph breaks where they are asked for."""

    def __init__(self, *inner: int, breaks: bool = False) -> None:
        super().__init__()
        self.blocks, self.breaks = nn.ModuleList(map(Block, inner)), breaks

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()  # noqa: SLF001 - it has no public name
        return x.square().mean()


class Experts(nn.Module):
    """Four experts, each of which computes all tokens, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Block(512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        weights = self.gate(x).softmax(-1)
        return sum((expert(x) * weights[:, number, None] for number, expert in enumerate(self.experts)), torch.zeros(())).square().mean()


def language(model: nn.Module) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """A language model and its step."""
    ids = torch.randint(1000, (4, 128))
    return model, lambda compiled: compiled(input_ids=ids, labels=ids).loss


def images() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """A ResNet of bottlenecks and its step."""
    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], layer_type="bottleneck", num_labels=10)
    pixels, labels = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
    return ResNetForImageClassification(config), lambda compiled: compiled(pixel_values=pixels, labels=labels).loss


def rows(model: nn.Module) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """A model of rows and its step."""
    x = torch.randn(512, WIDTH, requires_grad=True)  # as within a model, where every block passes a gradient on
    return model, lambda compiled: compiled(x)


SMALL = {"vocab_size": 1000, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
CASES: dict[str, Callable[[], tuple[nn.Module, Callable[[Any], Tensor]]]] = {
    "GPT-2, 2 layers of 128": lambda: language(GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_layer=2, n_embd=128, n_head=4))),
    "BERT, 2 layers of 128": lambda: language(BertForMaskedLM(BertConfig(**SMALL))),
    "ResNet, 4 bottlenecks": images,
    "4 experts and a gate": lambda: rows(Experts()),
    "3 blocks, a graph break after each": lambda: rows(Blocks(512, 512, 512, breaks=True)),
    "12 blocks, the eighth 8 times as wide": lambda: rows(Blocks(*[512] * 7, WIDE, *[512] * 4)),
}
BOTH_WAYS = list(CASES)[2:5]
PLANTED = "planted"
ROUNDS = 9


def child(name: str, *, recorded: bool) -> dict[str, Any]:
    """Compile one model, and time it; with a record trace it as well."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = CASES[name]()
    tracking = CompileTracking()
    if recorded:
        tracking.start()
    compiled = torch.compile(model)

    def step() -> float:
        start = cpu_seconds()
        loss(compiled).backward()
        return cpu_seconds() - start

    first = step()
    seconds = [step() for _ in range(STEPS)]
    found: dict[str, Any] = {"compile": first, "step": statistics.median(seconds), "loss": loss(compiled).item()}
    if recorded:
        found |= looked_into(compiled, step)
        tracking.stop()
    return found


def cpu_seconds() -> float:
    """Of this process and the compilers that it ran: other programs on the machine are in neither."""
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + compilers.ru_utime + compilers.ru_stime


def looked_into(model: nn.Module, step: Callable[[], object], steps: int = TRACED) -> dict[str, Any]:
    """What traced steps say of the compiled code."""
    tracer = Tracer(ModuleTree({"": model}), inside_compiled=True)
    tracer.begin()
    for number in range(steps):
        step()
        tracer.step(batch=number < steps - 1)
    with tempfile.TemporaryDirectory() as folder:
        recording = tracer.stop(Path(folder), "benchmark", whole=None)
    if recording is None or recording.compiled is None:
        raise SystemExit(f"there is no recording: {tracer.refusal}")
    code = recording.compiled.code
    parts = sum(kernel.host_seconds for kernel in code.kernels) + code.unassigned_seconds
    return {
        "graphs": code.graphs,
        "assigned": 1 - code.unassigned_seconds / code.seconds,
        "divided": code.divided_seconds / code.seconds,
        "off": abs(parts / code.seconds - 1),
        "blocks": by_block(recording.compiled),
    }


def planted() -> dict[str, float]:
    """The wide block among twelve, and compiled alone, in turn: what it takes there over what it takes here, and its rank among them."""
    torch.set_num_threads(1)
    tracking = CompileTracking()
    tracking.start()
    steps = {}
    for name, inner in {"twelve": [*[512] * 7, WIDE, *[512] * 4], "alone": [WIDE]}.items():
        model, loss = rows(Blocks(*inner))
        steps[name] = torch.compile(model), loss
    took: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for number in range(ROUNDS + 2):
        for name, (compiled, loss) in steps.items():
            found = looked_into(compiled, lambda loss=loss, compiled=compiled: loss(compiled).backward(), steps=1)
            if number > 1:
                took[name].append(found["blocks"])
    tracking.stop()
    ratios = [among["blocks.7"] / alone["blocks.0"] for among, alone in zip(took["twelve"], took["alone"], strict=True)]
    return {"ratio": statistics.median(ratios), "slowest": sum(max(each, key=each.get) == "blocks.7" for each in took["twelve"])}


def by_block(times: CompiledTimes) -> dict[str, float]:
    """Median seconds of each block in a step."""
    batches: list[dict[str, float]] = []
    for batch in times.host:
        sums: dict[str, float] = {}
        for by_module in batch.values():
            for key, took in by_module.items():
                block = ".".join(key.row.split(".")[:2])
                sums[block] = sums.get(block, 0.0) + took / 1e9
        batches.append(sums)
    return {block: statistics.median(batch.get(block, 0.0) for batch in batches) for block in batches[0]}


def measured(name: str, *, recorded: bool) -> dict[str, Any]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", name, *(["--recorded"] if recorded else [])]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)  # noqa: S603 - this very file
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(name, recorded, found, file=sys.stderr)
    return found


def main() -> None:
    """Measure, and write the section."""
    inside = {name: measured(name, recorded=True) for name in CASES}
    without = {name: measured(name, recorded=False) for name in BOTH_WAYS}
    lines = [
        "| model | graphs | assigned to modules | in fused kernels that are divided | parts and regions differ by |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {each['graphs']} | {each['assigned']:.1%} | {each['divided']:.1%} | {each['off']:.1e} |"
        for name, each in inside.items()
    ]
    lines += [
        "",
        "| model | first step without | with | step without | with | same loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, plain in without.items():
        each = inside[name]
        times = f"{plain['compile']:.1f} s | {each['compile']:.1f} s | {1e3 * plain['step']:.2f} ms | {1e3 * each['step']:.2f} ms"
        lines.append(f"| {name} | {times} | {'yes' if plain['loss'] == each['loss'] else 'no'} |")
    wide = measured(PLANTED, recorded=True)
    lines += [
        "",
        f"The wide one of twelve blocks is the slowest in {wide['slowest']} of {ROUNDS} rounds. It takes {wide['ratio']:.3f} times what it",
        "takes compiled alone: the median of the rounds, which take turns. Its seconds are of the clock.",
        "",
    ]
    lines += ["First steps, which compile, and steps are in CPU time. One thread, inductor's C++ backend, fresh caches. Not run on CUDA."]
    record("compiled.py", "Inside of compiled code", lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=[*CASES, PLANTED])
    parser.add_argument("--recorded", action="store_true")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(planted() if given.child == PLANTED else child(given.child, recorded=given.recorded)))
    else:
        main()
