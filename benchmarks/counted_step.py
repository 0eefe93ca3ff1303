"""Compare the counting step with the steps around it.

Compares peak memory, losses and random numbers, for eager and compiled models on the CPU. Each
model is trained twice from one seed: without lflops, and with one counting step. Peaks come from
the allocator, without the parameters.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from overhead import THIN
from results import record
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import BertConfig, BertForMaskedLM

from lflops.flop_counter.count import Counting

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.cpu_allocator import allocated

# Number of steps in a run, the number of the counting step, and the length of a sequence.
STEPS, COUNTED, LENGTH = (
    7,
    4,
    2048,
)


class Around(nn.Module):
    """A module that applies a function to a layer and the input."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], width: int = 512) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


def attention() -> nn.Module:
    """Create a model with causal flex attention, which is compiled.

    Without compilation, flex attention would store the matrix of all scores. On a CPU, flex
    attention has no backward, so only the layer after it is trained.
    """
    mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")
    compiled = torch.compile(flex_attention)
    return Around(lambda layer, x: layer(compiled(x, x, x, block_mask=mask)), 16)


def loop(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply the layer to four slices, one after the other, with `scan`."""
    parts = x.unflatten(0, (4, -1))
    return scan(
        lambda carry, part: ((new := torch.tanh(layer(part) + carry)), new.clone()),
        torch.zeros_like(parts[0]),
        parts,
    )[1]


def mlp() -> nn.Module:
    """Create two layers with dropout."""
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP, eager": (mlp, lambda: torch.randn(1024, 512)),
    "MLP, compiled": (lambda: torch.compile(mlp()), lambda: torch.randn(1024, 512)),
    "BERT, 12 layers, eager": (
        lambda: BertForMaskedLM(BertConfig(**THIN)),
        lambda: torch.randint(1000, (4, 128)),
    ),
    "flex attention, compiled, length 2,048": (attention, lambda: torch.randn(1, 2, LENGTH, 16)),
    "cond": (
        lambda: Around(lambda layer, x: torch.cond(x.sum() > 0, lambda y: -layer(y), layer, (x,))),
        lambda: torch.randn(1024, 512),
    ),
    "scan": (lambda: Around(loop), lambda: torch.randn(1024, 512)),
}


def train(name: str, counted: int | None) -> tuple[list[int], list[tuple[float, float]]]:
    """Train a model, and return the peak memory of each step, and its loss with a random number.

    `counted` is the number of the step that is counted, or `None`.
    """
    seen: list[tuple[float, float]] = []
    torch.manual_seed(0)
    model, x = (make() for make in MODELS[name])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with Counting({"": model}) if len(seen) == counted else nullcontext():
            optimizer.zero_grad()
            out = model(x)
            loss = (out if isinstance(out, Tensor) else out.logits).square().mean()
            loss.backward()
            optimizer.step()
        seen.append((loss.item(), torch.rand(()).item()))

    with TemporaryDirectory() as folder:
        return allocated(lambda: step, Path(folder), STEPS), seen


def main() -> None:
    """Train each model twice, and write the table."""
    lines = [
        "| model | peak of the steps before and after, MiB | peak of the counting step, MiB | ratio | losses and random numbers |",
        "|---|--:|--:|--:|---|",
    ]
    for name in MODELS:
        (_, plain), (peaks, watched) = train(name, None), train(name, COUNTED)
        torch.compiler.reset()
        around = max(peaks[COUNTED - 1], peaks[COUNTED + 1])
        ratio, same = peaks[COUNTED] / around, "equal" if plain == watched else "differ"
        lines.append(
            f"| {name} | {around / 2**20:,.1f} | {peaks[COUNTED] / 2**20:,.1f} | {ratio:.3f} | {same} |"
        )
    record("counted_step.py", "The counted step beside its neighbours", lines)


if __name__ == "__main__":
    main()
