"""Train with Trainers in the processes of one group.

As a script, it is a training run for which Lightning itself starts the ranks.

python trainer_ranks.py FOLDER
"""

import functools
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lflops
from lflops.profile.profile import Profile
from lflops.ranks.collect import collector as gather
from lflops.schedule import Schedule
from tests.support.lightning_runs import CLASSES, WIDTH, fit, loader, watching
from tests.support.ports import free_port
from tests.support.process_state import Facts, bits, random_numbers
from tests.support.processes import fork_context

WIDE = 12
BATCHES = 16
"""Of each rank."""
FEW = 10
"""With so many the window is told of at the end: it waits for clean steps until then."""
SECONDS = 600
"""That the processes may take for anything."""
FIRST = Schedule(wait=0, warmup=1, active=2)
"""Counts the first batch of all."""
SOON = Schedule(wait=1, warmup=2, active=2)
IN_THE_WINDOW = 3
"""A batch of this schedule's."""
FEWER = FEW - 1
"""With so many its window still waits for a clean step when the training ends, so nobody has told of it before."""


class Ranks:
    """Processes that know which rank each of them is, as a launcher tells it.

    What takes long to import is imported once for all.
    """

    def __init__(self, world: int) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
        self._ranks = [
            ProcessPoolExecutor(
                1,
                mp_context=fork_context(),
                initializer=_stand,
                initargs=(place | {"LOCAL_RANK": str(rank)},),
            )
            for rank in range(world)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            for process in list(rank._processes.values()):
                process.kill()
            rank.shutdown()

    def run(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """What each gives.

        Raises:
            ExceptionGroup: With the error of each rank that was left by one.
        """
        outcomes = self.outcomes(function, *given)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
            raise ExceptionGroup("ranks were left by errors", errors)
        return outcomes

    def outcomes(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """What each gives, or the error that it is left by."""
        running = [rank.submit(function, *given) for rank in self._ranks]
        return [each.exception(SECONDS) or each.result() for each in running]


def _stand(place: dict[str, str]) -> None:
    os.environ.update(place)


class Layers(nn.Module):
    """Two that may be spread over ranks, and a head that each rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.down(torch.relu(self.up(x)))))


class Spread(LightningModule):
    """Layers that are spread as the strategy wants it, with a record of the losses.

    Draws from every generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = Layers()
        self.losses: list[object] = []

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            parallelize_module(
                self.net, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        if data.size() > 1:
            for module in (self.net.up, self.net.down, self.net):
                fully_shard(module, mesh=data)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        drawn = random.random() + float(np.random.rand())  # noqa: NPY002, S311 - the global ones are what can be left changed
        loss = F.cross_entropy(self.net(x) * drawn, y)
        self.losses.append(bits(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def facts(self) -> Facts:
        """What became of it on this rank."""
        whole = {
            name: getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
            for name, tensor in self.state_dict().items()
        }
        return {
            "losses": self.losses,
            **{name: bits(tensor) for name, tensor in whole.items()},
            **random_numbers(),
        }


class Flat(DDPStrategy):
    """As Lightning's `FSDPStrategy` on a device that it is not for.

    The LightningModule is within the outermost unit, layers are others.
    """

    def _setup_model(self, model: Any) -> Any:
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy
        )


STRATEGIES: dict[str, tuple[int, int, Callable[[], Any]]] = {
    "ddp": (2, 1, lambda: "ddp"),
    "tensors": (1, 2, lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)),
    "shards": (2, 1, lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)),
    "flat shards": (2, 1, Flat),
    "shards of tensors": (
        2,
        2,
        lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
    ),
}
"""By how many the data and the tensors are divided, and Lightning's strategy for that."""


def rank() -> int:
    """Which this process is."""
    return int(os.environ["LOCAL_RANK"])


def train(
    name: str, *callbacks: Any, module: Spread | None = None, batches: int = BATCHES, **options: Any
) -> Spread:
    """From the same beginning."""
    data, tensor, strategy = STRATEGIES[name]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global one is what models draw from
    module = Spread() if module is None else module
    fit(
        module,
        *callbacks,
        batches=batches * data,
        strategy=strategy(),
        devices=data * tensor,
        **options,
    )
    return module


class Draws(Callback):
    """Draws a number in the middle of the run, on the last rank alone."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == BATCHES // 2 and trainer.global_rank == trainer.world_size - 1:
            torch.rand(1)


class Trained(NamedTuple):
    """What one rank has of a training from its very first batch, of one whose window opens later, and of two that nobody watched."""

    first: list[Profile]
    later: list[Profile]
    watched: list[Facts]
    alone: Facts
    meddled: Facts


def trained(name: str) -> Trained:
    """One after the other in the same processes: nothing of the first is in any cache."""
    first, later = watching(schedule=FIRST), watching(schedule=SOON)
    watched = [train(name, monitor).facts() for monitor in (first, later)]
    return Trained(
        first.profiles, later.profiles, watched, train(name).facts(), train(name, Draws()).facts()
    )


def on_a_device(strategy: str) -> list[Profile]:
    """Of a training with one of Lightning's strategies that are for GPUs alone."""
    monitor = watching(schedule=SOON)
    fit(Spread(), monitor, batches=BATCHES, strategy=strategy, accelerator="gpu")
    return monitor.profiles


class Mixed(Spread):
    """Multiplies what the first layer gave with itself.

    Under tensor parallelism each rank does that with its own columns.
    """

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        between = self.net.up(x)
        return F.cross_entropy(self.net.head(self.net.down(between @ between.t() @ between)), y)


def mixed(*, told: bool) -> list[Profile]:
    """What the monitor tells, beside a count in one piece or not."""
    whole, batch = Mixed(), next(iter(loader(1)))
    with lflops.counting(whole) as counted:
        whole.training_step(batch, 0).backward()
    monitor = watching(schedule=SOON, logical=counted.profile if told else None)
    train("tensors", monitor, module=Mixed(), batches=FEW)
    return monitor.profiles


class Ended(NamedTuple):
    """How a training ended on a rank.

    By which error, after how many steps, and what the monitor tells of it.
    """

    error: str | None
    losses: int
    profiles: list[Profile]


def ended(deed: str, watched: bool) -> Ended:
    """Train while the last rank comes to grief.

    Its process ends with its training, unless that goes on.
    """
    gather.EXIT_SECONDS = (
        60.0  # nobody waits for so long: all have handed in what they have long before
    )
    module = Failing(deed) if deed in {"raises", "is killed"} else Spread()
    units = _raising if deed == "cannot be watched" and rank() else None
    monitor = watching(schedule=SOON, gather_timeout=GIVEN[deed], on_error="warn", units=units)
    more = [Leaving()] if deed == "is killed at the end" else []
    error = None
    try:
        train(
            "ddp",
            *more,
            *([monitor] if watched else []),
            module=module,
            batches=FEWER if more else FEW,
        )
    except Exception as left:  # noqa: BLE001 - whatever it is, it is what is asked for
        error = type(left).__name__
        if rank():
            os._exit(1)
    return Ended(error, len(module.losses), monitor.profiles)


GIVEN = {
    "raises": 100.0,
    "is killed": 100.0,
    "cannot be watched": 100.0,
    "is killed at the end": 4.0,
}
"""Seconds: where nobody is to be waited for as many as would fail the test, else a few."""


class Failing(Spread):
    """On the last rank, in the window."""

    def __init__(self, deed: str) -> None:
        super().__init__()
        self.deed = deed

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank and batch_idx == IN_THE_WINDOW:
            if self.deed == "is killed":
                os._exit(1)
            raise ValueError("planted")
        return super().training_step(batch, batch_idx)


class Leaving(Callback):
    """Kills the last rank when its last step is over, before the monitor can tell of it."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank:
            os._exit(1)


def _raising(batch: Any) -> Any:
    raise ValueError("planted")


class Uneven(Spread):
    """Has so many batches to be validated with on each rank."""

    def __init__(self, batches: tuple[int, int]) -> None:
        super().__init__()
        self.batches = batches
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.batches[self.global_rank])


class Validated(NamedTuple):
    """What the monitor tells, what became of the training, and of one that nobody watched."""

    profiles: list[Profile]
    watched: Facts
    alone: Facts


def validated(batches: tuple[int, int], folder: Path) -> Validated:
    """Train and validate, three times within the fit.

    The folder outlives it: a rank whose report nobody takes keeps it there.
    """
    schedule = Schedule(wait=1, warmup=1, active=1)
    monitor = watching(
        schedule=schedule,
        stages=("train", "validate"),
        gather_timeout=float(SECONDS),
        dirpath=folder,
    )
    options = {"use_distributed_sampler": False, "val_check_interval": 4, "num_sanity_val_steps": 0}
    # The first of all trainings in a process draws other numbers than those that follow, watched or
    # not.
    _, watched, alone = (
        train("ddp", *each, module=Uneven(batches), batches=6, **options).facts()
        for each in ([], [monitor], [])
    )
    return Validated(monitor.profiles, watched, alone)


class Reader(Callback):
    """Notes how many windows were told of before the last step."""

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor
        self.told = 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.told = len(self.monitor.profiles)


def told_meanwhile() -> int:
    """How many windows the main process has told of while the training went on, with time enough for it."""
    monitor = watching(schedule=SOON)
    reader = Reader(monitor)

    class Waiting(Callback):
        """Has patience for what is under way, as a step that takes long."""

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            results = monitor._run._results
            if results is not None and results._collector is not None:
                for job in results._collector._jobs:
                    job.wait(12)

    train("ddp", monitor, Waiting(), reader, batches=2 * BATCHES)
    return reader.told


if __name__ == "__main__":
    fit(
        Spread(),
        watching(schedule=SOON, dirpath=sys.argv[1], trace=True, trace_ranks="all"),
        batches=2 * BATCHES,
        strategy="ddp",
        devices=2,
    )
