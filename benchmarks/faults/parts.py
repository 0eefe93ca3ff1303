"""Create the parts of a small training run without faults from a seed; a fault changes one of them."""

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter

MODELS = ("mlp", "attention", "convolution", "recurrent")
WARM, TIMED = 3, 8


def nothing(*_: Any) -> None:
    """Do nothing, where no fault is planted."""


class Batches(Dataset[Tensor]):
    """A data set that returns the same sample in every batch.

    Args:
        shape: Shape of a row.
        rows: Number of rows in a batch.
        batches: Number of batches.
    """

    def __init__(self, shape: tuple[int, ...], rows: int, batches: int) -> None:
        self.rows, self.batches = rows, batches
        self.sample = torch.randn(shape)
        self.first_of_batch: Callable[[int], Any] = nothing
        self.factors = [1.0]

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, batch: int) -> Tensor:
        self.first_of_batch(batch)
        rows = max(int(self.rows * self.factors[batch % len(self.factors)]), 1)
        return self.sample.expand(rows, *self.sample.shape).contiguous()

    def more_rows(self, factor: float) -> None:
        """Multiply the number of rows in each batch."""
        self.factors = [factor]


class Recurrent(nn.Module):
    """A GRU, which processes the tokens one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(x)[0]
        return out


class Attention(nn.Module):
    """Attention with four heads and an optional mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = (
            None
            if self.mask is None
            else self.mask[:, None, None, : x.shape[1]].expand(len(x), 4, x.shape[1], -1)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    """One of the equal layers.

    Attributes:
        before: Function that runs before the block's work.
        around: Function that runs the block's work, if any, such as a checkpoint.
    """

    def __init__(self, work: nn.Module) -> None:
        super().__init__()
        self.work = work
        self.before: Callable[[], Any] = nothing
        self.around: Callable[..., Tensor] | None = None
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        y = x if self.dtype is None else x.to(self.dtype)
        y = self.work(y) if self.around is None else self.around(self.work, y)
        return x + y.to(x.dtype)

    def widen(self) -> None:
        """Convert the block to float64."""
        self.double()
        self.dtype = torch.float64


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, blocks: list[Block], width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 8)
        self.unused: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.unused is not None:
            self.unused(x)
        return self.head(x.flatten(2).mean(2) if x.dim() == 4 else x)


def block_of(name: str, width: int) -> Block:
    """Create a block of a model."""
    feed = [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)]
    works: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: nn.Sequential(nn.LayerNorm(width), *feed),
        "attention": lambda: nn.Sequential(nn.LayerNorm(width), Attention(width), *feed),
        "convolution": lambda: nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        ),
        "recurrent": lambda: nn.Sequential(Recurrent(width), nn.LayerNorm(width)),
    }
    return Block(works[name]())


class Parts:
    """The parts of a training run without faults. A fault may change them.

    Args:
        seed: Seed from which all parts are drawn.
        rank: Rank of this process.
        ranks: Number of ranks.
    """

    def __init__(self, seed: str, rank: int = 0, ranks: int = 1) -> None:
        draw = random.Random(seed)  # noqa: S311 - nothing is secret
        torch.manual_seed(draw.randrange(1 << 30))
        self.rank, self.ranks = rank, ranks
        self.name = draw.choice(MODELS)
        self.depth = draw.randint(4, 8)
        self.width = {
            "mlp": draw.choice((192, 256)),
            "attention": 128,
            "convolution": draw.choice((16, 24)),
            "recurrent": 96,
        }[self.name]
        self.rows = {"mlp": 96, "attention": 4, "convolution": 8, "recurrent": 4}[
            self.name
        ] * draw.choice((1, 2))
        self.length = {"mlp": (), "attention": (48,), "convolution": (), "recurrent": (24,)}[
            self.name
        ]
        self.blocks = [block_of(self.name, self.width) for _ in range(self.depth)]
        self.slow_block = draw.randrange(1, self.depth)
        self.model = Model(self.blocks, self.width)
        self.optimizer: torch.optim.Optimizer = draw.choice((torch.optim.SGD, torch.optim.AdamW))(
            self.model.parameters(), lr=1e-4
        )
        self.steps = 120
        shape = (self.width, 12, 12) if self.name == "convolution" else (*self.length, self.width)
        self.data = Batches(shape, self.rows, self.steps)
        self.workers = 0
        self.collating: Callable[[], Any] = nothing
        self.in_step: Callable[[], Any] = nothing
        self.backward: Callable[[Tensor], None] = lambda loss: loss.backward()
        self.clip: Callable[[], None] = nothing
        self.after_step: Callable[[int], Any] = nothing
        self.log_every = self.save_every = self.validate_every = 0
        self.logging: Callable[[], Any] = nothing
        self.saving: Callable[[], Any] = nothing
        self.validating: Callable[[], Any] = nothing
        self.contexts: list[Callable[[], AbstractContextManager[Any]]] = []
        self.others: list[Any] = []
        self.keep: list[Any] = []
        self.ddp: dict[str, Any] = {}
        self.wrapped: nn.Module = self.model
        self.by_hand = False
        self.is_over = False
        self.usual_seconds = self._usual()
        self._writer: SummaryWriter | None = None

    def _usual(self) -> float:
        """Return the seconds of a step without faults and without a loop."""
        took = []
        for _ in range(WARM + TIMED):
            start = time.perf_counter()
            self.model(self.data[0]).square().mean().backward()
            took.append(time.perf_counter() - start)
            self.optimizer.zero_grad()
        return sorted(took[WARM:])[TIMED // 2]

    def loss(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        out: Tensor = self.wrapped(batch)
        self.in_step()
        return out.square().mean()

    def wrap(self) -> None:
        """Wrap the model with DDP if there are several ranks."""
        if self.ranks > 1 and not self.by_hand:
            self.wrapped = DistributedDataParallel(self.wrapped, **self.ddp)

    def loader(self) -> DataLoader[Tensor]:
        """Return a loader of all batches."""

        def collated(items: list[Tensor]) -> Tensor:
            self.collating()
            return items[0]

        return DataLoader(self.data, batch_size=1, collate_fn=collated, num_workers=self.workers)

    def events(self, step: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield what is due after a step, under the names of the ledger's categories."""
        if self.validate_every and step % self.validate_every == 0:
            yield "validation", self.validating
        if self.save_every and step % self.save_every == 0:
            yield "checkpoint_save", self.save

    def save(self) -> None:
        """Save a checkpoint."""
        with tempfile.TemporaryFile() as file:
            torch.save(self.model.state_dict(), file)
        self.saving()

    @property
    def writer(self) -> SummaryWriter:
        """Return a writer for TensorBoard."""
        self._writer = self._writer or SummaryWriter(tempfile.mkdtemp())
        return self._writer

    def write_histograms(self, seconds: float) -> None:
        """Write histograms for about this number of seconds."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.writer.add_histogram("weights", self.model.head.weight)

    def write_images(self, seconds: float) -> None:
        """Write images for about this number of seconds."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.writer.add_image("input", torch.rand(3, 64, 64))

    def widen(self) -> None:
        """Convert the model and the data to float64."""
        self.model.double()
        self.data.sample = self.data.sample.double()

    def add_unused_branch(self) -> None:
        """Add as many blocks again, whose output is not used."""
        self.model.unused = nn.Sequential(*(block_of(self.name, self.width) for _ in self.blocks))

    def pad(self, factor: float) -> None:
        """Make batches longer, and mask the padding."""
        if self.name == "attention":
            length, full = self.length[0], int(self.length[0] * factor)
            self.data.sample = F.pad(self.data.sample, (0, 0, 0, full - length))
            there = torch.arange(full) < length
            for block in self.blocks:
                block.work[1].mask = there.expand(self.rows, full)  # type: ignore[index, union-attr]
        else:
            self.data.more_rows(factor)

    def compile(self, *, dynamic: bool) -> None:
        """Compile the model with a backend that generates no code."""
        torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - a setting that users make
        self.wrapped = torch.compile(self.model, backend="aot_eager", dynamic=dynamic)

    def vary_rows(self) -> None:
        """Change the number of rows from batch to batch."""
        draw = random.Random(self.depth)  # noqa: S311 - nothing is secret
        self.data.factors = [draw.uniform(0.5, 1.5) for _ in range(17)]

    def average_by_hand(self) -> None:
        """Average gradients parameter by parameter, instead of with DDP."""
        self.by_hand = True

        def average(loss: Tensor) -> None:
            loss.backward()
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    distributed.all_reduce(parameter.grad)
                    parameter.grad /= self.ranks

        self.backward = average

    def end(self) -> None:
        """End all other processes."""
        self.is_over = True
        for other in self.others:
            other.kill()
            other.wait()
