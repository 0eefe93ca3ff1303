"""Small training runs, each in a process with a memory limit.

The operating system enforces the limit, so no code of lflops is involved.

`RLIMIT_DATA` limits the private memory of a process. The C library maps each tensor of 32 KiB or
more separately, and unmaps it when it is freed. So the limit applies to live tensors. It is
relative to the memory of the process after the same training run without a limit, so it does not
include the memory of libraries.
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
"""Tensors of this many bytes or more are mapped separately."""

# The exit status of a training process.
TRAINS = 0
OUT_OF_MEMORY = 3

STEPS = 2


class Case(NamedTuple):
    """A training run.

    Attributes:
        build: Builds the model.
        batch: Makes a batch, the model's argument, with a number of samples.
        samples: The number of samples.
        optimizer: Makes the optimizer for the parameters.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    samples: int
    optimizer: Callable[[list[nn.Parameter]], Optimizer]


def perceptron() -> nn.Module:
    """Return four linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 1024))


def convolutions() -> nn.Module:
    """Return three convolutions, each with batch norm, and a linear layer."""
    widths = (3, 32, 32, 32)
    blocks = (
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise(widths)
    )
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def transformer() -> nn.Module:
    """Return two encoder layers of a transformer."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Recurrent(nn.Module):
    """An LSTM, and a linear layer on its last time step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the head for the last time step."""
        states, _ = self.lstm(x)
        out: Tensor = self.head(states[:, -1])
        return out


def recurrent() -> nn.Module:
    """Return a recurrent network with two layers."""
    return Recurrent()


def embeddings() -> nn.Module:
    """Return an embedding and two linear layers."""
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
    """Return a loss for any output of a model."""
    return F.mse_loss(out, torch.zeros_like(out))


def train(case: Case, samples: int) -> None:
    """Train for `STEPS` steps. Model, optimizer and batch are freed at the end."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = case.optimizer(list(model.parameters()))
    batch = case.batch(samples)
    for _ in range(STEPS):
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def map_every_tensor() -> None:
    """Let the C library map each tensor separately and return freed memory at once.

    Torch is limited to one thread.
    """
    library = ctypes.CDLL(None)
    # The numbers of M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX in malloc.h.
    trim_threshold = -1
    mmap_threshold = -3
    arenas = -8
    for setting, value in (
        (mmap_threshold, MAPPED_FROM),
        (trim_threshold, MAPPED_FROM),
        (arenas, 1),
    ):
        library.mallopt(setting, value)
    torch.set_num_threads(1)


def data_bytes() -> int:
    """Return the private memory of this process in bytes, to which `RLIMIT_DATA` applies."""
    status = Path("/proc/self/status").read_text()
    kibibytes = status.split("VmData:")[1].split()[0]
    return int(kibibytes) * 1024


@contextmanager
def limited(limit_bytes: int) -> Iterator[None]:
    """Limit the private memory to so many bytes more than it has now.

    The limit stays after the end of the block, so the process should end there.
    """
    limit = data_bytes() + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    yield


def trains(name: str, limit_bytes: int) -> bool:
    """Return True if a training run finishes within so many bytes, or False if it runs out of them.

    The training run is in a fork of this process.

    Raises:
        RuntimeError: The training run failed for another reason.
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
            # Torch and oneDNN report a lack of memory with these texts.
            text = str(error).lower()
            lacks_memory = "memory" in text or "could not create a primitive" in text
            if not isinstance(error, MemoryError) and not lacks_memory:
                raise
            return OUT_OF_MEMORY
    return TRAINS
