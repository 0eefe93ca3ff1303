"""Describe the training run of a Trainer for lflops, and choose the folder of its files.

Lightning may be installed as `lightning` or as `pytorch_lightning`.
"""

import importlib
import math
import secrets
import sys
import time
from functools import partial
from inspect import signature
from operator import attrgetter
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from lflops.errors import MissingPackageError
from lflops.inputs.batch_size import loader_batch_size
from lflops.integrations.lightning.hook_times import LightningHookTimes
from lflops.integrations.lightning.trainer_phases import STEPS, phases_of
from lflops.monitoring.inputs.training import Stage, Training

__all__ = ["Base", "MisconfigurationException", "ProfilerBase", "say"]

_NAMES = ("pytorch_lightning", "lightning.pytorch")


def _packages() -> list[ModuleType]:
    """Import the installed packages of Lightning, `pytorch_lightning` and `lightning.pytorch`.

    Importing one package changes the Python logger of the other package. If one of them was already
    imported, its logger is restored.
    """
    imported = [sys.modules[name] for name in _NAMES if name in sys.modules]
    logs = [_rank_zero(package).rank_zero_module.log for package in imported]
    found = []
    for name in _NAMES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name not in {name, name.partition(".")[0]}:
                raise
    if not found:
        raise MissingPackageError(
            "FlopsMonitor needs lightning or pytorch-lightning, and neither is installed: "
            "pip install lightning"
        )
    if logs:
        _rank_zero(found[0]).rank_zero_module.log = logs[-1]
    return found


def _rank_zero(package: ModuleType) -> Any:
    return importlib.import_module(f"{package.__name__}.utilities.rank_zero")


_FOUND = _packages()

if TYPE_CHECKING:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Callback as Base
    from lightning.pytorch.profilers import Profiler as ProfilerBase
else:
    _packages_reversed = _FOUND[::-1]
    _exceptions = [
        importlib.import_module(f"{package.__name__}.utilities.exceptions")
        for package in _packages_reversed
    ]
    Base = type("Base", tuple(package.Callback for package in _packages_reversed), {})
    ProfilerBase = type(
        "ProfilerBase", tuple(package.profilers.Profiler for package in _packages_reversed), {}
    )
    MisconfigurationException = type(
        "MisconfigurationException",
        tuple(module.MisconfigurationException for module in _exceptions),
        {"__module__": __name__},
    )


LOGGERS_WITH_OWN_FOLDER = tuple(
    getattr(package.loggers, name)
    for package in _FOUND
    for name in ("TensorBoardLogger", "CSVLogger")
)
"""Classes of Lightning's loggers whose `log_dir` is a folder of one run."""


def say(message: str) -> None:
    """Log a message on the main process in the way that Lightning logs its own messages."""
    _rank_zero(_FOUND[0]).rank_zero_info(message)


RUNS = "lflops_runs"
"""Name of a folder with a subfolder for each Trainer.

The folder is in the directory of the Trainer or of the logger. It is used if there is no logger, or
if the logger uses one directory for all runs.
"""

_RUN_FOLDERS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The subfolder of `RUNS` for each Trainer that uses one."""

_NAMED: WeakSet[Any] = WeakSet()
"""Trainers for which a message about the folder was logged, so that it is logged only once."""


def training_of(trainer: Any, pl_module: Any) -> Training:
    """Describe the training run of a Trainer.

    Call this when a stage begins. Before that, the model is not on its device and not wrapped.
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
        monitor="FlopsMonitor",
        strategy=type(strategy).__name__,
        mesh=getattr(strategy, "device_mesh", None),
        sampler=getattr(strategy, "distributed_sampler_kwargs", None),
        precision=str(trainer.precision),
        # If a Trainer is passed a compiled module, it keeps the original module, and the module's
        # training_step is a compiled function.
        is_compiled=getattr(pl_module, "_compiler_ctx", None) is not None,
        scales_gradients=getattr(trainer.precision_plugin, "scaler", None) is not None,
        looks_for_unused=getattr(strategy.model, "find_unused_parameters", False),
        loggers=trainer.loggers,
        log_every=trainer.log_every_n_steps,
        # The step on the x-axis of loggers, which Lightning's own monitors also read. It advances
        # by one even if several optimizers make a step.
        logged_step=partial(attrgetter("fit_loop.epoch_loop._batches_that_stepped"), trainer),
        knows_step=lambda: True,
        log=say,
    )


def stage_of(name: str, trainer: Any, pl_module: Any) -> Stage:
    phases = phases_of(trainer)
    listen = partial(phases.listen, name)
    fetches_itself = "dataloader_iter" in signature(getattr(pl_module, STEPS[name])).parameters
    if name != "train":
        return Stage(
            name=name,
            learns=False,
            listen=listen,
            log=phases.log,
            accumulation=lambda: 1,
            ends_step=lambda: True,
            batches_left=_batches_of(trainer, name),
            updates=frozenset(),
            fetches_itself=fetches_itself,
            loader_size=lambda: _loader_size(trainer, name),
        )
    automatic = pl_module.automatic_optimization
    return Stage(
        name=name,
        learns=True,
        listen=listen,
        log=phases.log,
        accumulation=lambda: trainer.accumulate_grad_batches if automatic else 1,
        ends_step=partial(_ends_step, trainer, pl_module),
        batches_left=_batches_left(trainer, pl_module),
        updates=frozenset({"backward", "optimizer"} if automatic else ()),
        fetches_itself=fetches_itself,
        loader_size=lambda: _loader_size(trainer, name),
        hook_times=LightningHookTimes(trainer, phases),
    )


LOADERS = {
    "train": "train_dataloader",
    "validate": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}
"""For each stage, the attribute of a Trainer that holds the stage's data loaders."""


def _loader_size(trainer: Any, stage: str) -> int | None:
    """Return how many samples the data loader of a stage puts into a batch.

    Returns `None` if the stage has several loaders, or if the number is unknown.
    """
    loaders = getattr(trainer, LOADERS[stage])
    if isinstance(loaders, list) and len(loaders) == 1:
        return loader_batch_size(loaders[0])
    return loader_batch_size(loaders)


def _root_of(trainer: Any, pl_module: Any) -> nn.Module:
    """Return the root module: the model or, with FSDP1, its wrapper.

    FSDP1 keeps some of the parameters in the wrapper.
    """
    around = trainer.strategy.model
    wraps = type(around).__name__ == "FullyShardedDataParallel" and around.module is pl_module
    root: nn.Module = around if wraps else pl_module
    return root


def _ends_step(trainer: Any, pl_module: Any) -> bool:
    """Return whether the current batch is the last batch of a step.

    In manual optimization, each batch counts as a step, because the number of batches over which
    gradients are accumulated is unknown. After StochasticWeightAveraging, Lightning runs an epoch
    without backward and optimizer, to update batch norms. Its batches belong to no step.
    """
    if getattr(trainer.fit_loop, "_skip_backward", False):
        return False
    if trainer.accumulate_grad_batches == 1 or not pl_module.automatic_optimization:
        return True
    # Lightning's own monitors call this method.
    return not trainer.fit_loop.epoch_loop._should_accumulate()  # noqa: SLF001


def _batches_left(trainer: Any, pl_module: Any) -> float:
    """Return the number of batches until the end of the run; infinity if unknown."""
    left = math.inf
    batches = trainer.num_training_batches
    epochs = trainer.max_epochs
    if epochs is not None and epochs >= 0 and batches and not math.isinf(batches):
        left = batches * (epochs - trainer.current_epoch)
        epoch_loop = trainer.fit_loop.epoch_loop
        if epoch_loop.restarting:
            # After a checkpoint inside an epoch, only the rest of this epoch is trained.
            left -= epoch_loop.batch_progress.current.completed % batches
    if trainer.max_steps >= 0 and pl_module.automatic_optimization:
        steps = trainer.max_steps - trainer.global_step
        left = min(left, steps * trainer.accumulate_grad_batches)
    return max(left, 0)


def _batches_of(trainer: Any, stage: str) -> float:
    """Return the number of batches of validation, test or prediction; infinity if unknown.

    For validation during `fit`, the number is unknown: `fit` validates repeatedly, and the schedule
    continues from one validation to the next.
    """
    if trainer.state.fn.value != stage:
        return math.inf
    batches: float = sum(getattr(trainer, f"{stage}_loop").max_batches)
    return batches


def log_dir_of(trainer: Any, *, without_logger: bool) -> str | None:
    """Return the folder for a run's files, or `None` if no files are written.

    The main process calls this function, and sends the result to the other ranks.

    Args:
        trainer: The Trainer.
        without_logger: Whether to write files if the Trainer has no logger.
    """
    if trainer.fast_dev_run or getattr(trainer, "barebones", False):
        return None
    logger: Any = trainer.loggers[0] if trainer.loggers else None
    if logger is None and not without_logger:
        return None
    if isinstance(getattr(logger, "log_dir", None), str | PathLike):
        # As in `trainer.log_dir`, which all ranks would have to read at the same time.
        has_own_folder = isinstance(logger, LOGGERS_WITH_OWN_FOLDER)
        folder = logger.log_dir if has_own_folder else logger.save_dir
        if folder is None:
            return None
        return _local(trainer, str(folder))
    # Other loggers have one folder for all runs. In MLflow's folder, each folder is an experiment.
    above = getattr(logger, "save_dir", None)
    if logger is None or type(logger).__name__ == "MLFlowLogger":
        above = trainer.default_root_dir
    if not isinstance(above, str | PathLike) or _local(trainer, str(above)) is None:
        return None
    if trainer not in _RUN_FOLDERS:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        _RUN_FOLDERS[trainer] = str(Path(above, RUNS, name).absolute())
    folder = _RUN_FOLDERS[trainer]
    if logger is None and trainer not in _NAMED:
        _NAMED.add(trainer)
        say(
            f"lflops: the Trainer has no logger, so the files of this run go to {folder}; "
            "set another folder with FlopsMonitor(dirpath=...)"
        )
    return folder


def _local(trainer: Any, folder: str) -> str | None:
    """Return the folder, or `None` if it is remote, such as `s3://bucket`.

    lflops writes files only to this machine. For a remote folder, it writes no files and logs a
    message about this.
    """
    if "://" not in folder:
        return folder
    if trainer not in _NAMED:
        _NAMED.add(trainer)
        say(
            f"lflops: the folder {folder} of this run is not on this machine, so lflops writes no "
            "files; set a local folder with FlopsMonitor(dirpath=...)"
        )
    return None
