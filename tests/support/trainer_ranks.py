"""Train with Trainers in the processes of one process group.

`python trainer_ranks.py FOLDER` is a training run for which Lightning itself starts the ranks. It
writes profiles and traces to the folder.
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
from lflops.monitoring.schedule import Schedule
from lflops.profile.profile import Profile
from lflops.ranks.collect import collector as gather
from tests.support.lightning_runs import CLASSES, WIDTH, fit, loader, watching
from tests.support.ports import free_port
from tests.support.process_state import Facts, bits, random_numbers
from tests.support.processes import fork_context

WIDE = 12
BATCHES = 16
"""Number of batches of each rank."""
FEW = 10
"""Number of batches with which the window of `SOON` closes only at the end of the run.

Until then it waits for unprofiled steps.
"""
SECONDS = 600
"""Timeout of the processes in seconds."""
FIRST = Schedule(wait=0, warmup=1, active=2)
"""A schedule whose counting step is the first batch of the run."""
SOON = Schedule(wait=1, warmup=2, active=2)
IN_THE_WINDOW = 3
"""Index of a batch in the window of `SOON`."""
FEWER = FEW - 1
"""Number of batches with which the window of `SOON` still lacks an unprofiled step at the end.

So no rank has sent its report on the window before the training ends.
"""


class Ranks:
    """Processes with the environment variables with which a launcher sets their ranks.

    They are forks of a process that has imported the slow modules.
    """

    def __init__(self, world: int) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
        self._ranks = []
        for rank in range(world):
            environment = place | {"LOCAL_RANK": str(rank)}
            executor = ProcessPoolExecutor(
                1, mp_context=fork_context(), initializer=_set_environment, initargs=(environment,)
            )
            self._ranks.append(executor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            for process in list(rank._processes.values()):
                process.kill()
            rank.shutdown()

    def run(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """Call a function on all ranks, and return the results.

        Raises:
            ExceptionGroup: The errors of all ranks on which the function raised one.
        """
        outcomes = self.outcomes(function, *given)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if errors:
            raise ExceptionGroup("ranks were left by errors", errors)
        return outcomes

    def outcomes(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """Call a function on all ranks, and return the result or the error of each rank."""
        running = [rank.submit(function, *given) for rank in self._ranks]
        return [each.exception(SECONDS) or each.result() for each in running]


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


class Layers(nn.Module):
    """Two layers that may be divided among ranks, and a head that each rank has completely."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.down(torch.relu(self.up(x)))))


class Spread(LightningModule):
    """A module that distributes its layers as the strategy requires, and records its losses.

    It draws random numbers from torch, Python and NumPy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = Layers()
        self.losses: list[object] = []

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
        data = self.device_mesh["data_parallel"]
        tensor = self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self.net, tensor, plan)
        if data.size() > 1:
            for module in (self.net.up, self.net.down, self.net):
                fully_shard(module, mesh=data)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        # The global generators are used because lflops could leave their states changed.
        drawn = random.random() + float(np.random.rand())  # noqa: NPY002, S311
        loss = F.cross_entropy(self.net(x) * drawn, y)
        self.losses.append(bits(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def facts(self) -> Facts:
        """Return the results of training on this rank: losses, weights and random states."""
        weights = {}
        for name, tensor in self.state_dict().items():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            weights[name] = bits(local)
        return {"losses": self.losses} | weights | random_numbers()


class Flat(DDPStrategy):
    """A strategy that does the same as Lightning's `FSDPStrategy`, but on the CPU.

    The outermost FSDP unit contains the LightningModule, and large layers are separate units.
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
"""Ways to distribute a model, by name.

The numbers are the ranks that divide the data and the ranks that divide the tensors. The function
makes Lightning's strategy.
"""


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["LOCAL_RANK"])


def train(
    name: str, *callbacks: Any, module: Spread | None = None, batches: int = BATCHES, **options: Any
) -> Spread:
    """Train with one of the `STRATEGIES`, with the same seeds in every run."""
    data, tensor, strategy = STRATEGIES[name]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the modules draw from the global generator
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
    """Draw a random number in the middle of the run, only on the last rank."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == BATCHES // 2 and trainer.global_rank == trainer.world_size - 1:
            torch.rand(1)


class Trained(NamedTuple):
    """The results of four training runs on one rank.

    Attributes:
        first: Profiles of a monitor whose window begins with the first batch.
        later: Profiles of a monitor whose window begins later.
        watched: Results of the runs with these two monitors.
        alone: Results of a run without a monitor.
        meddled: Results of a run without a monitor, in which one rank draws a random number more.
    """

    first: list[Profile]
    later: list[Profile]
    watched: list[Facts]
    alone: Facts
    meddled: Facts


def trained(name: str) -> Trained:
    """Train four times in the same processes, with and without monitors.

    A run with a monitor comes first, so that no cache has results of an earlier run.
    """
    first = watching(schedule=FIRST)
    later = watching(schedule=SOON)
    watched = [train(name, monitor).facts() for monitor in (first, later)]
    alone = train(name).facts()
    meddled = train(name, Draws()).facts()
    return Trained(first.profiles, later.profiles, watched, alone, meddled)


def on_a_device(strategy: str) -> list[Profile]:
    """Train on a GPU with one of Lightning's strategies that need one, and return the profiles."""
    monitor = watching(schedule=SOON)
    fit(Spread(), monitor, batches=BATCHES, strategy=strategy, accelerator="gpu")
    return monitor.profiles


class Mixed(Spread):
    """A module that multiplies the result of the first layer by itself.

    Under tensor parallelism, each rank multiplies its own columns.
    """

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        between = self.net.up(x)
        return F.cross_entropy(self.net.head(self.net.down(between @ between.t() @ between)), y)


def mixed(*, told: bool) -> list[Profile]:
    """Train with tensor parallelism, and return the profiles.

    If `told` is true, the monitor receives a count of the whole model as `logical`.
    """
    whole = Mixed()
    batch = next(iter(loader(1)))
    with lflops.counting(whole) as counted:
        whole.training_step(batch, 0).backward()
    monitor = watching(schedule=SOON, logical=counted.profile if told else None)
    train("tensors", monitor, module=Mixed(), batches=FEW)
    return monitor.profiles


class Ended(NamedTuple):
    """The end of a training run on one rank.

    Attributes:
        error: Name of the class of the error that ended it; `None` if there was none.
        losses: Number of steps.
        profiles: The profiles of the monitor.
    """

    error: str | None
    losses: int
    profiles: list[Profile]


def ended(deed: str, watched: bool) -> Ended:
    """Train two ranks while something goes wrong on the last rank.

    If its training ends with an error, its process ends too.

    Args:
        deed: What goes wrong, a key of `GIVEN`.
        watched: Whether there is a monitor.
    """
    # No rank really waits for so long, because all ranks send their reports long before.
    gather.EXIT_SECONDS = 60.0
    module = Failing(deed) if deed in {"raises", "is killed"} else Spread()
    units = _raising if deed == "cannot be watched" and rank() else None
    monitor = watching(schedule=SOON, gather_timeout=GIVEN[deed], on_error="warn", units=units)
    callbacks: list[Any] = []
    batches = FEW
    if deed == "is killed at the end":
        callbacks.append(Leaving())
        batches = FEWER
    if watched:
        callbacks.append(monitor)
    error = None
    try:
        train("ddp", *callbacks, module=module, batches=batches)
    except Exception as left:  # noqa: BLE001 - the class of any error is a result
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
"""For each misfortune, the `gather_timeout` of the monitor in seconds.

It is so long that a test fails if a rank waits for it. Only if the last rank is killed at the end,
the first rank has to wait, so the timeout is short.
"""


class Failing(Spread):
    """A module that raises an error or kills its process, on the last rank and in the window."""

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
    """Kill the last rank after its last step, before the monitor can send its report."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank:
            os._exit(1)


def _raising(batch: Any) -> Any:
    raise ValueError("planted")


class Uneven(Spread):
    """A module whose ranks have different numbers of validation batches."""

    def __init__(self, batches: tuple[int, int]) -> None:
        super().__init__()
        self.batches = batches
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.batches[self.global_rank])


class Validated(NamedTuple):
    """The results of two training runs with validation.

    Attributes:
        profiles: The profiles of the monitor.
        watched: Results of the run with the monitor.
        alone: Results of the run without a monitor.
    """

    profiles: list[Profile]
    watched: Facts
    alone: Facts


def validated(batches: tuple[int, int], folder: Path) -> Validated:
    """Train with and without a monitor, and validate three times in each run.

    Args:
        batches: Number of validation batches of each rank.
        folder: The folder of the monitor. A rank whose report is not collected writes it there.
    """
    schedule = Schedule(wait=1, warmup=1, active=1)
    monitor = watching(
        schedule=schedule,
        stages=("train", "validate"),
        gather_timeout=float(SECONDS),
        dirpath=folder,
    )
    options = {"use_distributed_sampler": False, "val_check_interval": 4, "num_sanity_val_steps": 0}

    def results(*callbacks: Any) -> Facts:
        return train("ddp", *callbacks, module=Uneven(batches), batches=6, **options).facts()

    # The first training run in a process draws other random numbers than the later ones, with or
    # without a monitor. So its results are not used.
    results()
    watched = results(monitor)
    alone = results()
    return Validated(monitor.profiles, watched, alone)


class Reader(Callback):
    """A callback that records the number of profiles before the last step, as `told`."""

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor
        self.told = 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.told = len(self.monitor.profiles)


def told_meanwhile() -> int:
    """Return the number of profiles that the monitor has published before the end of training.

    After each step, the run waits for reports in progress.
    """
    monitor = watching(schedule=SOON)
    reader = Reader(monitor)

    class Waiting(Callback):
        """Wait for the reports in progress after each step, as if the step was long."""

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
