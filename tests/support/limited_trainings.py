"""Small training runs, each in a process with a memory limit.

The operating system enforces the limit, so no code of lflops is involved.

`RLIMIT_DATA` bounds the private memory of a process. Every tensor of 32 KiB or more is mapped by
itself, and unmapped when it is freed. So the limit applies to live tensors. It is relative to the
memory of the process after the same training run without a limit, so it does not include the memory
of libraries.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

MAPPED_FROM = 32 * 2**10
TRAINS, OUT_OF_MEMORY = 0, 3
STEPS = 2


class Case(NamedTuple):
    """A training.

    Attributes:
        build: Makes the model.
        batch: From a number of samples to the model's argument.
        samples: How many.
        optimizer: Makes the optimizer.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    samples: int
    optimizer: Callable[[list[nn.Parameter]], Optimizer]


def perceptron() -> nn.Module:
    """Four layers."""
    return nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())),
        nn.Linear(1024, 1024),
    )


def convolutions() -> nn.Module:
    """Three convolutions, each with batch norm."""
    widths = (3, 32, 32, 32)
    blocks = (
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise(widths)
    )
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def transformer() -> nn.Module:
    """Two encoder layers."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Recurrent(nn.Module):
    """An LSTM, and a layer on its last result."""

    def __init__(self) -> None:
        super().__init__()
        self.op_counts, self.head = (
            nn.LSTM(128, 256, num_layers=2, batch_first=True),
            nn.Linear(256, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """What the last step gives."""
        out: Tensor = self.head(self.op_counts(x)[0][:, -1])
        return out


def recurrent() -> nn.Module:
    """Two layers of cells."""
    return Recurrent()


def embeddings() -> nn.Module:
    """A bag of words, and their sum."""
    return nn.Sequential(
        nn.Embedding(20_000, 256), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32)
    )


CASES: dict[str, Case] = {
    "perceptron, SGD": Case(
        perceptron, lambda samples: torch.randn(samples, 1024), 4096, torch.optim.SGD
    ),
    "convolutions with batch norm, Adam": Case(
        convolutions, lambda samples: torch.randn(samples, 3, 48, 48), 48, torch.optim.Adam
    ),
    "transformer, AdamW": Case(
        transformer, lambda samples: torch.randn(samples, 64, 256), 32, torch.optim.AdamW
    ),
    "LSTM, RMSprop": Case(
        recurrent, lambda samples: torch.randn(samples, 64, 128), 48, torch.optim.RMSprop
    ),
    "embedding, SGD with momentum": Case(
        embeddings,
        lambda samples: torch.randint(20_000, (samples, 32)),
        256,
        partial(torch.optim.SGD, momentum=0.9, lr=1e-3),
    ),
}


def loss_of(out: Tensor) -> Tensor:
    """A number to go backward from."""
    return F.mse_loss(out, torch.zeros_like(out))


def train(case: Case, samples: int) -> None:
    """Make some steps. Nothing is kept when they are over."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = case.optimizer(list(model.parameters()))
    batch = case.batch(samples)
    for _ in range(STEPS):
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def map_every_tensor() -> None:
    """Let the C library map each tensor by itself, and give memory back at once.

    One thread trains.
    """
    library, trim_threshold, mmap_threshold, arenas = ctypes.CDLL(None), -1, -3, -8
    for setting, value in (
        (mmap_threshold, MAPPED_FROM),
        (trim_threshold, MAPPED_FROM),
        (arenas, 1),
    ):
        library.mallopt(setting, value)
    torch.set_num_threads(1)


def data_bytes() -> int:
    """What the limit is on."""
    return int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024


@contextmanager
def limited(limit_bytes: int) -> Iterator[None]:
    """At most so many bytes more than now."""
    limit = data_bytes() + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    yield


def trains(name: str, limit_bytes: int) -> bool:
    """Whether a training ends in so many bytes. It runs in a fork of this process.

    Raises:
        RuntimeError: It ended otherwise than by running out of memory.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _in_child(CASES[name], limit_bytes)
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (TRAINS, OUT_OF_MEMORY):
        raise RuntimeError(f"{name}: the process ended with {status}")
    return status == TRAINS


def _in_child(case: Case, limit_bytes: int) -> int:
    train(case, case.samples)
    with limited(limit_bytes):
        try:
            train(case, case.samples)
        except (MemoryError, RuntimeError) as error:
            text = str(error).lower()
            if (
                not isinstance(error, MemoryError)
                and "memory" not in text
                and "could not create a primitive" not in text
            ):
                raise
            return OUT_OF_MEMORY
    return TRAINS
