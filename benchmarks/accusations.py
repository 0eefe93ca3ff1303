"""How often is a clean training accused of a slow module, and how often is a planted one named?

Windows of small trainings, in your own loop and in Lightning, on an idle machine and beside two
processes that compute. In half of them nothing is planted, so every module that is named is a false
accusation. In the others one of six equal blocks waits; what it waits is 5 % of the step and more.
"""

import argparse
import itertools
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from results import beside, keep_freed_memory, record
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lflops
from lflops import FlopsMonitor, Profile, Schedule
from lflops.analysis.analysis import Analysis, analyze

BLOCKS, STEPS, BUSY, SLOW = 6, 34, 2, 2
SCHEDULE = Schedule(wait=5, warmup=2, active=3)
"""The default."""
SHARES = (0.05, 0.1, 0.2)
"""Of the step: what is planted."""


class Block(nn.Module):
    """Layers around which data goes as well, and a wait.

    Args:
        layers: What it runs.
    """

    seconds = 0.0

    def __init__(self, layers: nn.Module) -> None:
        """Wait for nothing yet."""
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Work, then hold the processor."""
        out = x + self.layers(x)
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return out


class Attention(nn.Module):
    """Causal attention of 4 heads.

    Args:
        width: Of a token.
    """

    def __init__(self, width: int) -> None:
        """Make the projections."""
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def mlp() -> tuple[nn.Module, Tensor]:
    """A perceptron of equal blocks."""
    width = 256
    blocks = (
        Block(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)))
        for _ in range(BLOCKS)
    )
    return nn.Sequential(*blocks, nn.Linear(width, 16)), torch.randn(192, width)


def gpt() -> tuple[nn.Module, Tensor]:
    """A decoder of equal blocks."""
    width = 128

    def block() -> Block:
        mix = nn.Sequential(nn.LayerNorm(width), Attention(width))
        return Block(
            nn.Sequential(
                Block(mix),
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
        )

    return nn.Sequential(
        *(block() for _ in range(BLOCKS)), nn.LayerNorm(width), nn.Linear(width, 64)
    ), torch.randn(4, 64, width)


def cnn() -> tuple[nn.Module, Tensor]:
    """Residual blocks of convolutions."""
    channels = 16

    def block() -> Block:
        convolutions = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        return Block(
            nn.Sequential(
                *itertools.chain.from_iterable(
                    (each, nn.BatchNorm2d(channels), nn.ReLU()) for each in convolutions
                )
            )
        )

    return nn.Sequential(
        *(block() for _ in range(BLOCKS)), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ), torch.randn(16, channels, 16, 16)


class Task(LightningModule):
    """A model and its loss, for Lightning.

    Args:
        model: What is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take it."""
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning gives it
        """Anything that has gradients."""
        loss: Tensor = self.model(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The usual one."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


OFF: dict[str, Any] = {
    "dirpath": None,
    "trace": False,
    "html": False,
    "track": False,
    "hardware": None,
    "on_error": "raise",
}


def in_a_loop(model: nn.Module, x: Tensor) -> Profile:
    """A plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with lflops.monitor(model, optimizer, schedule=SCHEDULE, log=lambda _: None, **OFF) as monitor:
        for batch in monitor.data([x] * STEPS):
            with monitor.step(batch):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return monitor.profiles[0]


def in_lightning(model: nn.Module, x: Tensor) -> Profile:
    """A Trainer with the callback."""
    monitor = FlopsMonitor(SCHEDULE, **OFF)
    flags = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    Trainer(max_steps=STEPS, accelerator="cpu", callbacks=[monitor], **flags).fit(
        Task(model), DataLoader([x] * STEPS, batch_size=None)
    )
    return monitor.profiles[0]


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"MLP": mlp, "GPT": gpt, "CNN": cnn}
LOOPS: dict[str, Callable[[nn.Module, Tensor], Profile]] = {
    "loop": in_a_loop,
    "Lightning": in_lightning,
}


class Window(NamedTuple):
    """What a window said.

    Attributes:
        model: By its name. So is `loop`.
        is_busy: Whether other processes computed.
        share: Of the step that was planted; 0 is nothing.
        accused: The modules that it named, the first one first.
        doubt: Why it could not tell.
    """

    model: str
    loop: str
    is_busy: bool
    share: float
    accused: tuple[str, ...]
    doubt: str | None

    @property
    def is_named(self) -> bool:
        """Whether the planted block, or something in it, was named first."""
        return bool(self.accused) and self.accused[0].removeprefix("model.").partition(".")[
            0
        ] == str(SLOW)


def window(
    model: str, loop: str, *, is_busy: bool, share: float, seed: int
) -> tuple[Window, Analysis]:
    """One training, and what its window said."""
    torch.manual_seed(seed)
    made, x = MODELS[model]()
    if share:
        with beside(0):
            usual = analyze(LOOPS[loop](made, x)).step_times.seconds
        slow = made.get_submodule(str(SLOW))
        if usual is not None and isinstance(slow, Block):
            slow.seconds = usual.median * share / (1 - share)
    with beside(BUSY * is_busy):
        said = analyze(LOOPS[loop](made, x))
    return Window(
        model,
        loop,
        is_busy,
        share,
        tuple(each.module for each in said.outliers),
        said.outliers_doubt,
    ), said


def table(windows: list[Window]) -> list[str]:
    """A row for each machine and what was planted."""
    lines = [
        "| machine | planted | windows | a module named | the planted one first | cannot tell |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for is_busy, share in sorted({(each.is_busy, each.share) for each in windows}):
        these = [each for each in windows if (each.is_busy, each.share) == (is_busy, share)]
        named = f"{sum(each.is_named for each in these)}" if share else "–"
        doubts = Counter(each.doubt for each in these if each.doubt)
        why = f"{sum(doubts.values())}" + (
            f" ({', '.join(f'{name} {number}' for name, number in doubts.items())})"
            if doubts
            else ""
        )
        machine, planted = (
            f"beside {BUSY} busy processes" if is_busy else "idle",
            f"{share:.0%}" if share else "nothing",
        )
        lines.append(
            f"| {machine} | {planted} | {len(these)} | {sum(bool(each.accused) for each in these)} | {named} | {why} |"
        )
    return lines


def main() -> None:
    """Run the windows in turn, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clean", type=int, default=204, help="Windows of trainings with nothing planted."
    )
    parser.add_argument("--planted", type=int, default=72, help="Windows with a slow block.")
    parser.add_argument(
        "--dry", action="store_true", help="Print what is wrong, and write no table."
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    keep_freed_memory()
    kinds = list(itertools.product((False, True), LOOPS, MODELS))
    windows = []
    for seed in range(options.clean + options.planted):
        is_busy, loop, model = kinds[seed % len(kinds)]
        share = 0.0 if seed < options.clean else SHARES[seed // len(kinds) % len(SHARES)]
        each, said = window(model, loop, is_busy=is_busy and not share, share=share, seed=seed)
        windows.append(each)
        if options.dry and (each.accused if not share else not each.is_named):
            print(
                each,
                [(one.module, one.seconds, one.usual_seconds) for one in said.outliers],
                said.step_times.seconds,
                flush=True,
            )
    lines = table(windows)
    kinds_of = f"{', '.join(MODELS)} of {BLOCKS} equal blocks; {' and '.join(LOOPS)}; the default schedule, one thread."
    print("\n".join(lines)) if options.dry else record(
        "accusations.py", "Accusations", [*lines, "", f"{kinds_of} Idle: it has the CPU first."]
    )


if __name__ == "__main__":
    main()
