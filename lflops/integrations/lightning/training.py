"""A Trainer, read into the values that a session takes, and the folder of its run.

Lightning under either of its names.
"""

import importlib
import math
import secrets
import sys
import time
from functools import partial
from inspect import signature
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from lflops.errors import MissingPackageError
from lflops.integrations.lightning.phase_hooks import STEPS, phases_of
from lflops.monitoring.inputs.training import Stage, Training

__all__ = ["Base", "MisconfigurationException", "say"]

_NAMES = ("pytorch_lightning", "lightning.pytorch")


def _packages() -> list[ModuleType]:
    """Those that are installed.

    Loading one makes it the one in whose name the other logs; one that was loaded before stays so.
    """
    users = [sys.modules[name] for name in _NAMES if name in sys.modules]
    logs = [_rank_zero(package).rank_zero_module.log for package in users]
    found = []
    for name in _NAMES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name not in {name, name.partition(".")[0]}:
                raise
    if not found:
        raise MissingPackageError(
            "FlopsMonitor needs lightning or pytorch-lightning, and neither is installed: pip install lightning"
        )
    for log in logs[-1:]:
        _rank_zero(found[0]).rank_zero_module.log = log
    return found


def _rank_zero(package: ModuleType) -> Any:
    return importlib.import_module(f"{package.__name__}.utilities.rank_zero")


_FOUND = _packages()

if TYPE_CHECKING:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Callback as Base
else:
    Base = type("Base", tuple(each.Callback for each in reversed(_FOUND)), {})
    MisconfigurationException = type(
        "MisconfigurationException",
        tuple(
            importlib.import_module(
                f"{each.__name__}.utilities.exceptions"
            ).MisconfigurationException
            for each in reversed(_FOUND)
        ),
        {"__module__": __name__},
    )


def say(message: str) -> None:
    """Log a message of the main process's, as Lightning logs its own."""
    _rank_zero(_FOUND[0]).rank_zero_info(message)


# below the Trainer's directory: a folder for each Trainer that has no logger
RUNS = "lflops_runs"

_RUN_FOLDERS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
# Trainers whose folder was logged
_NAMED: WeakSet[Any] = WeakSet()


def training_of(trainer: Any, pl_module: Any) -> Training:
    """The run of a Trainer.

    To be asked when a stage begins, by when the model is on its device and wrapped.
    """
    strategy = trainer.strategy
    return Training(
        loop=trainer,
        model=pl_module,
        root=_root_of(trainer, pl_module),
        device=strategy.root_device,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        node=str(trainer.node_rank),
        is_main=trainer.is_global_zero,
        strategy=type(strategy).__name__,
        mesh=getattr(strategy, "device_mesh", None),
        sampler=getattr(strategy, "distributed_sampler_kwargs", None),
        precision=str(trainer.precision),
        # A Trainer that was given the module compiled has the plain one, whose training_step is a
        # compiled function.
        is_compiled=getattr(pl_module, "_compiler_ctx", None) is not None,
        scales_gradients=getattr(trainer.precision_plugin, "scaler", None) is not None,
        looks_for_unused=getattr(strategy.model, "find_unused_parameters", False),
        loggers=trainer.loggers,
        log_every=trainer.log_every_n_steps,
        # The loggers' x-axis, which several optimizers do not move several times: Lightning's own
        # monitors read it.
        logged_step=lambda: trainer.fit_loop.epoch_loop._batches_that_stepped,  # noqa: SLF001
        say=say,
    )


def stage_of(name: str, trainer: Any, pl_module: Any) -> Stage:
    learns, automatic = name == "train", pl_module.automatic_optimization
    return Stage(
        name=name,
        learns=learns,
        listen=partial(phases_of(trainer).listen, name),
        accumulation=lambda: trainer.accumulate_grad_batches if learns and automatic else 1,
        ends_step=lambda: not learns or _ends_step(trainer, pl_module),
        batches_left=_batches_left(trainer, pl_module) if learns else _batches_of(trainer, name),
        updates=frozenset({"backward", "optimizer"}) if learns and automatic else frozenset(),
        fetches_itself="dataloader_iter" in signature(getattr(pl_module, STEPS[name])).parameters,
    )


def _root_of(trainer: Any, pl_module: Any) -> nn.Module:
    """The module whose names are those of the model, with what holds its parameters.

    Torch's first FSDP keeps some outside of it.
    """
    around = trainer.strategy.model
    wraps = type(around).__name__ == "FullyShardedDataParallel" and around.module is pl_module
    root: nn.Module = around if wraps else pl_module
    return root


def _ends_step(trainer: Any, pl_module: Any) -> bool:
    """Whether the batch that ends now ends a step.

    In manual optimization each does: only the user knows more.
    """
    if trainer.accumulate_grad_batches == 1 or not pl_module.automatic_optimization:
        return True
    return not trainer.fit_loop.epoch_loop._should_accumulate()  # noqa: SLF001 - Lightning's own monitor asks it


def _batches_left(trainer: Any, pl_module: Any) -> float:
    of_epochs: float = math.inf
    if (
        trainer.max_epochs is not None
        and trainer.max_epochs >= 0
        and not math.isinf(trainer.num_training_batches)
    ):
        of_epochs = trainer.num_training_batches * (trainer.max_epochs - trainer.current_epoch)
    of_steps: float = math.inf
    if trainer.max_steps >= 0 and pl_module.automatic_optimization:
        of_steps = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    return max(min(of_epochs, of_steps), 0)


def _batches_of(trainer: Any, stage: str) -> float:
    """Batches of a stage in which nothing is learned; infinity if unknown.

    Validations of a fit come again, with one schedule over all.
    """
    if trainer.state.fn.value != stage:
        return math.inf
    batches: float = sum(getattr(trainer, f"{stage}_loop").max_batches)
    return batches


def log_dir_of(trainer: Any, *, without_logger: bool) -> str | None:
    """The folder that a run's files go below.

    `None` for no files. To be called by all ranks: they agree on the main process's.
    """
    if trainer.fast_dev_run or getattr(trainer, "barebones", False):
        return None
    logger = trainer.loggers[0] if trainer.loggers else None
    if logger is not None and isinstance(getattr(logger, "log_dir", None), str | PathLike):
        folder = (
            trainer.log_dir
            # of a logger that Lightning does not know that is where it saves, or nothing
        )
        return None if folder is None else _local(trainer, str(folder))
    if logger is None and not without_logger:
        return None
    # A logger without a folder for the run has one for all its runs. In that of MLflow each folder
    # is an experiment.
    above = (
        trainer.default_root_dir
        if logger is None or type(logger).__name__ == "MLFlowLogger"
        else getattr(logger, "save_dir", None)
    )
    if not isinstance(above, str | PathLike) or _local(trainer, str(above)) is None:
        return None
    if trainer not in _RUN_FOLDERS:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        _RUN_FOLDERS[trainer] = folder = trainer.strategy.broadcast(
            str(Path(above, RUNS, name).absolute())
        )
    if logger is None and trainer not in _NAMED:
        _NAMED.add(trainer)
        folder = _RUN_FOLDERS[trainer]
        say(
            f"lflops: the Trainer has no logger, so the files of this run go to {folder}; FlopsMonitor(dirpath=...) chooses another folder"
        )
    return _RUN_FOLDERS[trainer]


def _local(trainer: Any, folder: str) -> str | None:
    """The folder, unless it is the address of a remote one.

    Files are written to this machine alone.
    """
    if "://" not in folder:
        return folder
    if trainer not in _NAMED:
        _NAMED.add(trainer)
        say(
            f"lflops: the run is logged to {folder}, so lflops writes no files; FlopsMonitor(dirpath=...) chooses a folder of this machine"
        )
    return None
