"""Training runs on a GPU with one fault or none, for `gpu.py`.

Records the verdict of lflops on each run, and the cost of the fault.
"""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import lflops

WIDE, ROWS = 1024, 16
STEPS = 80

Change = Callable[["Parts"], None]


class Batches(Dataset[Tensor]):
    """A data set that returns the same batch each time, after a delay."""

    def __init__(self, batch: Tensor) -> None:
        self.batch, self.seconds = batch, 0.0

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, _: int) -> Tensor:
        time.sleep(self.seconds)
        return self.batch


class Parts:
    """The parts of a training run without faults. A fault changes one of them.

    Layers in bfloat16 are trained to reproduce a batch, whose copy to the device is asynchronous.
    """

    def __init__(self, device: str, layers: nn.Module) -> None:
        self.device, self.module = device, layers.to(device)
        batch = torch.randn(
            ROWS,
            512 if device == "cuda" else 8,
            layers.width,
            generator=torch.Generator().manual_seed(1),
        )
        self.data = Batches(batch.pin_memory() if device == "cuda" else batch)
        # Arguments of the optimizer.
        self.how: dict[str, Any] = {}
        self.after_forward: Callable[[Tensor], object] = lambda _: None
        self.after_backward: Callable[[], object] = lambda: None
        self.after_step: Callable[[], object] = lambda: None

    def seconds(self, folder: str | None) -> float:
        """Train, with a monitor if there is a folder.

        Returns the median seconds of the steps in the second half.
        """
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, **self.how)
        loader: Any = DataLoader(self.data, batch_size=None)
        ends: list[float] = []
        with contextlib.ExitStack() as contexts:
            monitor: Any = None
            if folder is not None:
                options: dict[str, Any] = {
                    "dirpath": folder,
                    "html": False,
                    "on_error": "raise",
                    "log": lambda _: None,
                }
                monitor = contexts.enter_context(lflops.monitor(self.module, optimizer, **options))
                loader = monitor.data(loader)
            for batch in loader:
                with contextlib.nullcontext() if monitor is None else monitor.step(batch):
                    x = batch.to(self.device, non_blocking=True)
                    with torch.autocast(self.device, torch.bfloat16):
                        loss = self.module.loss(x)
                    self.after_forward(loss)
                    loss.backward()
                    self.after_backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    self.after_step()
                if self.device == "cuda":
                    torch.cuda.synchronize()
                ends.append(time.perf_counter())
        return median(later - earlier for earlier, later in itertools.pairwise(ends[STEPS // 2 :]))


def nothing(_: Parts) -> None:
    """The run has no fault."""


def loader_sleeps(parts: Parts) -> None:
    """The loader delays each batch."""
    parts.data.seconds = 0.01


def reads_scalars(parts: Parts) -> None:
    """After forward, the host reads 200 numbers one by one, and waits for each."""
    parts.after_forward = lambda loss: sum(each.item() for each in loss.detach().expand(200))


def tiny_operators(parts: Parts) -> None:
    """One layer adds zero 200 times."""
    forward = parts.module.layers[1].forward
    parts.module.layers[1].forward = lambda x: forward(
        functools.reduce(lambda a, _: a + 0.0, range(200), x)
    )


def one_layer_in_fp64(parts: Parts) -> None:
    """One layer is in float64 by accident."""
    layer = parts.module.layers[1].double()
    forward = layer.forward

    def wide(x: Tensor) -> Tensor:
        with torch.autocast(parts.device, enabled=False):
            return forward(x.double()).to(x.dtype)

    layer.forward = wide


def checkpoints_all(parts: Parts) -> None:
    """All layers are checkpointed, although there is enough memory."""
    for layer in parts.module.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def optimizer_by_tensor(parts: Parts) -> None:
    """The optimizer updates one tensor after the other."""
    parts.how = {"foreach": False}


def clips_by_tensor(parts: Parts) -> None:
    """A custom loop clips gradients, and waits for each norm."""

    def clip() -> None:
        for each in parts.module.parameters():
            if each.grad is not None and each.grad.norm().item() > 1.0:
                each.grad.mul_(0.5)

    parts.after_backward = clip


def copies_pageable_memory(parts: Parts) -> None:
    """A batch is copied from pageable memory.

    It is eight times as large as needed, and an eighth of it is used.
    """
    batch = torch.empty(8 * ROWS, *parts.data.batch.shape[1:]).copy_(
        parts.data.batch.repeat(8, 1, 1)
    )
    parts.data.batch = batch
    loss = parts.module.loss
    parts.module.loss = lambda x: loss(x[:ROWS])


def empties_the_cache(parts: Parts) -> None:
    """Each step empties the allocator's cache."""
    parts.after_step = torch.cuda.empty_cache


def batch_of_one(parts: Parts) -> None:
    """The batch is so small that the device waits for the host's launches."""
    parts.data.batch = parts.data.batch[:1]


def all_in_fp32(parts: Parts) -> None:
    """Autocast is off."""
    loss = parts.module.loss

    def narrow(x: Tensor) -> Tensor:
        with torch.autocast(parts.device, enabled=False):
            return loss(x)

    parts.module.loss = narrow


def looks_for_nan_in_each_layer(parts: Parts) -> None:
    """A hook on each layer searches for NaN, so the host waits for the device."""

    def finite(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
        if not torch.isfinite(out).all():
            raise ArithmeticError("not finite")

    for layer in parts.module.layers:
        layer.register_forward_hook(finite)


FAULTS: tuple[Change, ...] = (
    nothing,
    loader_sleeps,
    reads_scalars,
    tiny_operators,
    one_layer_in_fp64,
    checkpoints_all,
    optimizer_by_tensor,
    clips_by_tensor,
    copies_pageable_memory,
    empties_the_cache,
    batch_of_one,
    all_in_fp32,
    looks_for_nan_in_each_layer,
)


def told(
    device: str,
    layers: Callable[[], nn.Module],
    folder_of: Callable[[str], contextlib.AbstractContextManager[str]],
) -> Iterator[str]:
    """Yield a line with the verdict on each fault."""
    for fault in FAULTS:
        plain, watched = Parts(device, layers()), Parts(device, layers())
        fault(plain)
        fault(watched)
        with folder_of(fault.__name__) as folder:
            without, within = plain.seconds(None), watched.seconds(folder)
            found = lflops.explain(folder)
        said = [
            " ".join(filter(None, (each.cause, each.module, f"{each.share or 0:.0%}")))
            for each in found.findings
            if each.is_issue
        ]
        ms = f"{1e3 * without:.2f} ms, watched {1e3 * within:.2f}"
        yield f"{fault.__name__.replace('_', ' ')} ({ms}): {', '.join(said) or f'{found.status}, {found.because}'}"
