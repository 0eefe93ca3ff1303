"""Predict changes of real training runs with `lflops.what_if`, and then measure them.

The runs use this CPU. A change is predicted from a profile of the original run.

    python -m benchmarks.what_if [WORD ...]

A word selects the changes with this word in their name. The original and the changed run alternate
several times, and the measured ratio is the median over these pairs. A prediction is right if its
interval contains this ratio.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lflops
from benchmarks.results import record

WIDTH, BLOCKS, ROWS, STEPS, PAIRS = 192, 6, 128, 24, 5


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the layers to the input."""
        return x + self.down(torch.tanh(self.up(x)))


class Repeated(nn.Module):
    """A layer that runs several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.layer = times, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer several times."""
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Training(NamedTuple):
    """A training run. A change changes one of its fields.

    Attributes:
        rows: Number of rows in a batch.
        blocks: Number of blocks.
        wide: Hidden width of the first block, as a multiple of the model's width.
        further: Number of times that a further module runs.
        dtype: Dtype of the model.
        recompute: Whether the blocks are checkpointed.
        wait: Seconds of CPU time that the loader needs for a batch.
        items: Number of times that a step reads a value of a large tensor.
        clip: Whether gradients are clipped.
        optimizer: Name of the optimizer.
        foreach: Whether the optimizer works on lists of tensors.
        accumulation: Number of batches in a step.
        attention: Length of a sequence in tokens; 0 means no attention.
    """

    rows: int = ROWS
    blocks: int = BLOCKS
    wide: int = 4
    further: int = 0
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    wait: float = 0.0
    items: int = 0
    clip: bool = False
    optimizer: str = "adamw"
    foreach: bool = False
    accumulation: int = 1
    attention: int = 0

    def model(self) -> nn.Module:
        """Build the model."""
        torch.manual_seed(0)
        return Model(self).to(self.dtype)


class Model(nn.Module):
    """Blocks, optionally with attention before them and a further module after them."""

    def __init__(self, of: Training) -> None:
        super().__init__()
        self.of = of
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True) if of.attention else None
        self.blocks = nn.ModuleList(
            Block(WIDTH * (of.wide if index == 0 else 4)) for index in range(of.blocks)
        )
        self.further = Repeated(of.further) if of.further else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply all parts."""
        if self.attention is not None:
            x = x.view(-1, self.of.attention, WIDTH)
            x = (x + self.attention(x, x, x, need_weights=False)[0]).reshape(-1, WIDTH)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.of.recompute else block(x)
        return x if self.further is None else self.further(x)


def busy(seconds: float) -> None:
    """Use the CPU for some seconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def loader(of: Training, batches: int) -> Iterator[Tensor]:
    """Yield batches, each after its wait."""
    x = torch.randn(of.rows, WIDTH, dtype=of.dtype)
    for _ in range(batches):
        busy(of.wait)
        yield x


def step(
    of: Training, model: nn.Module, optimizer: Any, x: Tensor, *, last: bool, monitor: Any = None
) -> None:
    """Run one batch.

    A monitor is notified of clipping, because no hook detects it.
    """
    loss = model(x).square().mean() / of.accumulation
    loss.backward()
    for _ in range(of.items):
        x.sort().values.sum().item()
    if not last:
        return
    if of.clip:
        with contextlib.nullcontext() if monitor is None else monitor.phase("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def started(of: Training) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer."""
    model = of.model()
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return model, kinds[of.optimizer](model.parameters(), lr=1e-6, foreach=of.foreach)


def profiled(of: Training) -> lflops.Profile:
    """Return the profile of a training run, as a user would record it."""
    model, optimizer = started(of)
    schedule = lflops.Schedule(wait=3, warmup=1, active=16)
    how: dict[str, Any] = {
        "schedule": schedule,
        "trace": False,
        "ledger": False,
        "log": lambda _: None,
    }
    with lflops.monitor(model, optimizer, accumulation=of.accumulation, **how) as monitor:
        for index, x in enumerate(monitor.data(loader(of, 48 * of.accumulation))):
            with monitor.step(x):
                step(
                    of,
                    model,
                    optimizer,
                    x,
                    last=(index + 1) % of.accumulation == 0,
                    monitor=monitor,
                )
    return monitor.profiles[-1]


def seconds(of: Training) -> float:
    """Return the median seconds of a step without lflops."""
    model, optimizer = started(of)
    took, begin = [], time.perf_counter()
    for index, x in enumerate(loader(of, STEPS * of.accumulation)):
        step(of, model, optimizer, x, last=(last := (index + 1) % of.accumulation == 0))
        if last:
            took.append(time.perf_counter() - begin)
            begin = time.perf_counter()
    gc.collect()
    return median(took[3:])


class Change(NamedTuple):
    """A change of a training run, and the question that predicts its effect."""

    name: str
    before: Training
    after: dict[str, Any]
    question: Callable[[lflops.Profile], Any]


def asks(**question: Any) -> Callable[[lflops.Profile], Any]:
    """Return a function that passes a question about a profile to `what_if`."""
    return lambda profile: lflops.what_if(profile, **question)


PLAIN = Training()
CHANGES = [
    Change("loader's wait removed", Training(wait=0.02), {"wait": 0.0}, asks(without="data")),
    Change("loader's wait halved", Training(wait=0.02), {"wait": 0.01}, asks(scale={"data": 0.5})),
    Change("a short wait removed", Training(wait=0.003), {"wait": 0.0}, asks(without="data")),
    Change("last of six blocks removed", PLAIN, {"blocks": 5}, asks(without="blocks.5")),
    Change(
        "three of six blocks removed",
        PLAIN,
        {"blocks": 3},
        asks(without=["blocks.3", "blocks.4", "blocks.5"]),
    ),
    Change(
        "first block twice as wide",
        PLAIN,
        {"wide": 8},
        asks(scale={"blocks.0": 2.0, "optimizer": 7 / 6}),
    ),
    Change(
        "first block half as wide",
        PLAIN,
        {"wide": 2},
        asks(scale={"blocks.0": 0.5, "optimizer": 11 / 12}),
    ),
    Change(
        "a further module removed", Training(further=4), {"further": 0}, asks(without="further")
    ),
    Change(
        "a further module twice as fast",
        Training(further=8),
        {"further": 4},
        asks(scale={"further": 0.5}),
    ),
    Change(
        "recomputing off", Training(recompute=True), {"recompute": False}, asks(without="recompute")
    ),
    Change(
        "recomputing off, large batch",
        Training(recompute=True, rows=512),
        {"recompute": False},
        asks(without="recompute"),
    ),
    Change(
        "float64 to float32",
        Training(dtype=torch.float64),
        {"dtype": torch.float32},
        asks(scale=dict.fromkeys(["forward", "backward", "optimizer"], 0.5)),
    ),
    Change(".item() removed", Training(items=8), {"items": 0}, asks(without="other")),
    Change("batch doubled", PLAIN, {"rows": 2 * ROWS}, asks(batch=2)),
    Change("batch halved", PLAIN, {"rows": ROWS // 2}, asks(batch=0.5)),
    Change("batch times four", PLAIN, {"rows": 4 * ROWS}, asks(batch=4)),
    Change("two batches accumulated", PLAIN, {"accumulation": 2}, asks(accumulation=2)),
    Change("accumulation off", Training(accumulation=4), {"accumulation": 1}, asks(accumulation=1)),
    Change("clipping removed", Training(clip=True), {"clip": False}, asks(without="clip")),
    Change(
        "attention removed", Training(attention=64), {"attention": 0}, asks(without="attention")
    ),
]


def main() -> None:
    """Predict, measure, and write the table."""
    torch.set_num_threads(1)
    words = sys.argv[1:]
    rows, held = [], 0
    for change in CHANGES:
        if words and not any(word in change.name for word in words):
            continue
        profile = profiled(change.before)
        found = change.question(profile)
        after = change.before._replace(**change.after)
        pairs = [(seconds(change.before), seconds(after)) for _ in range(PAIRS)]
        measured = median(b / a for a, b in pairs)
        low, predicted, high = (
            each / found.measured for each in (found.low, found.seconds, found.high)
        )
        held += low <= measured <= high
        rows.append(
            f"| {change.name} | {1e3 * found.measured:.1f} ms | {predicted:.2f} ({low:.2f} to {high:.2f}) | {measured:.2f} "
            f"| {measured / predicted - 1:+.0%} | {'yes' if low <= measured <= high else 'no'} |"
        )
        sys.stderr.write(rows[-1] + "\n")
    table = [
        "| change | step without the change | predicted ratio (interval) | measured ratio | difference | in the interval |",
        "|---|--:|--:|--:|--:|---|",
        *rows,
    ]
    lines = [
        *table,
        "",
        f"{held} of {len(rows)} intervals hold: they contain the measured ratio. Steps are measured without lflops.",
        f"Each ratio is the median of {PAIRS} pairs of runs.",
    ]
    if words:
        print("\n".join(lines))
    else:
        record("what_if.py", "What-ifs, predicted and measured", lines)


if __name__ == "__main__":
    main()
