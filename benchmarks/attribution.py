"""Compare the time that lflops attributes to each module with the time of the module alone.

The reference is two clock readings around one module at a time. It is compared with `measure`, and
then with `FlopsMonitor` in a Trainer, with and without a trace.

There are two models. The large model has Linears that share an input, a frozen Linear, a Linear
with an input that needs no gradient, a LayerNorm and an in-place residual sum. The tiny model has
150 Linears of 8 features and one of 1024; there, hooks cost as much as a module.
"""

import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from results import keep_freed_memory, record
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lflops
from lflops import FlopsMonitor, Schedule

WIDTH, ROWS = 1024, 256
ROUNDS, REPEATS = 15, 3


class Block(nn.Module):
    """Three projections of one input, an early gate, and an in-place residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = F.silu(self.q(h)) * self.k(h) + self.v(h)
        y += x
        return y


class Large(nn.Module):
    """A stem, two blocks with a frozen layer between them, and a head.

    The input of the stem needs no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.first = Block()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.second = Block()
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.frozen(self.first(self.stem(x)))))


class Tiny(nn.Module):
    """A large module, then 150 tiny modules that together take half as long."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.learned = nn.Parameter(torch.randn(ROWS, 8))
        self.tiny = nn.Sequential(*(nn.Linear(8, 8) for _ in range(150)))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) + self.tiny(self.learned).sum()


class Stamp(torch.autograd.Function):
    """An operator that does nothing in forward, and records the time in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: list[float]) -> Tensor:
        ctx.times = times
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.times.append(time.perf_counter())
        return gradient, None


def watched_alone(model: nn.Module, name: str, x: Tensor) -> tuple[float, float]:
    """Return the median seconds of forward and backward of one module inside the model.

    Only this module is timed, by two clock readings, without lflops.
    """
    module = model.get_submodule(name)
    plain = module.forward
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(REPEATS + 2):
        begun: list[float] = []
        ended: list[float] = []

        def marked(given: Tensor, begun: list[float] = begun, ended: list[float] = ended) -> Tensor:
            given = Stamp.apply(given, ended) if given.requires_grad else given
            start = time.perf_counter()
            out = plain(given)
            forward.append(time.perf_counter() - start)
            return Stamp.apply(out, begun)

        model.zero_grad()
        module.forward = marked
        out = model(x)
        torch.autograd.backward(out, torch.ones_like(out))
        # If the input of the module needs no gradient, backward ends with the module.
        ended.append(time.perf_counter())
        del module.forward
        backward.append(ended[0] - begun[0])
    return statistics.median(forward[2:]), statistics.median(backward[2:])


def compared(model: nn.Module, x: Tensor, names: list[str]) -> dict[str, list[float]]:
    """Return the seconds of forward and backward of each module.

    The first two values are from `measure`, the last two from `watched_alone`. All are medians over
    rounds that alternate between the two.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        profile = lflops.measure(model, x, backward=True, warmup=2, repeats=REPEATS)
        for name in names:
            forward, backward = (
                profile.modules[name].work(phase).seconds for phase in ("forward", "backward")
            )
            found[name].append([forward.median, backward.median, *watched_alone(model, name, x)])
    return {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }


class Fitted(LightningModule):
    """A LightningModule that trains a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, x: Tensor, _: int) -> Tensor:
        return self.model(x).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Alone(Callback):
    """A callback that times one module of a fit, as `watched_alone` does."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.plain = module.forward
        self.forward: list[float] = []
        self.begun: list[float] = []
        self.ended: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        self.module.forward = self.marked

    def marked(self, given: Tensor) -> Tensor:
        given = Stamp.apply(given, self.ended) if given.requires_grad else given
        start = time.perf_counter()
        out = self.plain(given)
        self.forward.append(time.perf_counter() - start)
        return Stamp.apply(out, self.begun)

    def on_after_backward(self, *_: Any) -> None:
        if len(self.ended) < len(self.begun):
            self.ended.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        del self.module.forward

    def medians(self) -> tuple[float, float]:
        """Return the median seconds of forward and backward, without the first steps."""
        backward = [end - begin for begin, end in zip(self.begun, self.ended, strict=True)]
        return statistics.median(self.forward[3:]), statistics.median(backward[3:])


def fit(model: nn.Module, x: Tensor, callback: Callback, steps: int) -> None:
    """Train for some steps on the same batch."""
    trainer = Trainer(
        max_steps=steps,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    trainer.fit(Fitted(model), DataLoader([x] * steps, batch_size=None))  # type: ignore[arg-type]


def compared_in_trainer(
    model: nn.Module, x: Tensor, names: list[str], *, trace: bool
) -> dict[str, list[float]]:
    """Return the values of `compared` for `FlopsMonitor` in a Trainer.

    The reference is another fit in which only the one module is timed.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(ROUNDS // 2):
        with tempfile.TemporaryDirectory() as directory:
            monitor = FlopsMonitor(
                Schedule(wait=5, warmup=1, active=5), trace=trace, dirpath=directory
            )
            fit(model, x, monitor, 6 + (15 if trace else 10))
        for name in names:
            forward, backward = (
                monitor.profiles[0].modules[f"model.{name}"].work(phase).seconds
                for phase in ("forward", "backward")
            )
            alone = Alone(model.get_submodule(name))
            fit(model, x, alone, 3 + 2 * REPEATS)
            found[name].append([forward.median, backward.median, *alone.medians()])
    return {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }


def table(title: str, cases: list[tuple[nn.Module, dict[str, list[float]]]]) -> list[str]:
    """Return a table with a row for each module and phase, and the largest error."""
    lines = [f"| module | phase | {title} | watched alone | off by |", "|---|---|--:|--:|--:|"]
    worst = 0.0
    for model, found in cases:
        for name, (forward, backward, forward_alone, backward_alone) in found.items():
            for phase, ours, truth in (
                ("forward", forward, forward_alone),
                ("backward", backward, backward_alone),
            ):
                worst = max(worst, abs(ours / truth - 1))
                row = f"{type(model).__name__} `{name}`"
                lines.append(
                    f"| {row} | {phase} | {ours * 1e3:.3f} ms | {truth * 1e3:.3f} ms | {ours / truth - 1:+.1%} |"
                )
    return [*lines, "", f"Worst: {worst:.1%}.", ""]


def main() -> None:
    """Compare, and write the tables."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    blocks = [f"{block}.{part}" for block in ("first", "second") for part in ("q", "k", "v")]
    cases = [
        (Large(), ["stem", "first", "frozen", "second", *blocks, "head"]),
        (Tiny(), ["tiny", "product"]),
    ]
    lines = table("`measure`", [(model, compared(model, x, names)) for model, names in cases])
    for trace in (False, True):
        title = f"`FlopsMonitor`, {'behind' if trace else 'without'} a trace"
        lines += table(
            title,
            [(model, compared_in_trainer(model, x, names, trace=trace)) for model, names in cases],
        )
    lines += [
        f"Medians of {ROUNDS} rounds, in a Trainer of {ROUNDS // 2}, all in turn in one process; one thread."
    ]
    record("attribution.py", "Whose time it is", lines)


if __name__ == "__main__":
    main()
