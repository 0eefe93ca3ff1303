"""The counted step beside its neighbours: peak memory, loss and random numbers, of eager and compiled models.

Each model trains twice from the same seed, without lflops and with one counted step in the middle. Peak memory on a CPU is what the process
has in memory at most during the step (`VmHWM`, set back before each), less what it had before the training; on CUDA it is torch's.
"""

import argparse
import gc
import pathlib
import re
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from overhead import THIN
from results import keep_freed_memory, record
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import gelu
from transformers import BertConfig, BertForMaskedLM

from lflops.collect.count import Counting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALLOWED = 0.05  # how much higher than its neighbours the counted step's peak may be


class Attention(nn.Module):
    """Causal flex attention, compiled: run eagerly it makes the matrix of all scores."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, length, length, device=DEVICE)
        self.attention = torch.compile(flex_attention)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return self.attention(q.contiguous(), k.contiguous(), v.contiguous(), block_mask=self.mask)


class Branches(nn.Module):
    """`torch.cond` between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: gelu(self.yes(x)), self.no, (x,))


def mlp() -> nn.Module:
    """Two layers, with dropout."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.1), nn.Linear(4096, 1024))


def bert() -> nn.Module:
    """The launch-bound model of `overhead.py`."""
    return BertForMaskedLM(BertConfig(**THIN))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP, eager": (mlp, lambda: torch.randn(2048, 1024)),
    "MLP, compiled": (lambda: torch.compile(mlp()), lambda: torch.randn(2048, 1024)),
    "BERT, 12 layers, eager": (bert, lambda: torch.randint(1000, (8, 256))),
    "flex attention, compiled, length 4,096": (lambda: Attention(4096), lambda: torch.randn(1, 4096, 32)),
    "cond, eager": (Branches, lambda: torch.randn(4096, 1024)),
    "cond, compiled": (lambda: torch.compile(Branches()), lambda: torch.randn(4096, 1024)),
}


class Step(NamedTuple):
    """One step of a training."""

    peak: int
    loss: float
    random: float


def memory(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    return 0 if found is None else int(found[1]) * 1024


def train(name: str, steps: int, counted: int | None) -> list[Step]:
    """The steps of one training; `counted` is the number of the one that is counted."""
    gc.collect()
    torch.manual_seed(0)
    make, batch = MODELS[name]
    before = memory("VmRSS")
    model, x = make().to(DEVICE), batch().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    done = []

    def step() -> float:
        optimizer.zero_grad()
        out = model(x)
        loss = (out if isinstance(out, Tensor) else out.logits).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for number in range(steps):
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        if number == counted:
            with Counting({"": model}):
                loss = step()
        else:
            loss = step()
        peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else memory("VmHWM") - before
        done.append(Step(peak, loss, torch.rand(()).item()))
    return done


def main() -> None:
    """Train each model twice and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9)
    steps = parser.parse_args().steps
    keep_freed_memory()
    counted = steps // 2 + 1
    lines = ["| training | neighbours' peak, MiB | counted step's | ratio | losses and random numbers |", "|---|--:|--:|--:|---|"]
    for name in MODELS:
        plain, watched = train(name, steps, None), train(name, steps, counted)
        around = median(each.peak for number, each in enumerate(watched) if abs(number - counted) in {1, 2})
        ratio = watched[counted].peak / around
        equal = [each[1:] for each in plain] == [each[1:] for each in watched]
        mark = "" if ratio <= 1 + ALLOWED else " (too high)"
        peaks = f"{around / 2**20:,.0f} | {watched[counted].peak / 2**20:,.0f} | {ratio:.2f}{mark}"
        lines.append(f"| {name} | {peaks} | {'equal' if equal else 'differ'} |")
        torch.compiler.reset()
    record("counted_step.py", "The counted step beside its neighbours", lines)


if __name__ == "__main__":
    main()
