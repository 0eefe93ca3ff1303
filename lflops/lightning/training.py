"""A Trainer, read into the values that a session takes."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from lflops.lightning.compat import say
from lflops.lightning.phase_hooks import phases_of
from lflops.lightning.stages import STAGES
from lflops.session.inputs.training import Stage, Training

__all__ = ["stage_of", "training_of"]


def training_of(trainer: Any, pl_module: Any) -> Training:
    """The run of a Trainer. To be asked when a stage begins, by when the model is on its device and wrapped."""
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
        precision=_precision_of(trainer),
        # A Trainer that was given the module compiled has the plain one, whose training_step is a compiled function.
        is_compiled=getattr(pl_module, "_compiler_ctx", None) is not None,
        scales_gradients=getattr(trainer.precision_plugin, "scaler", None) is not None,
        loggers=trainer.loggers,
        log_every=trainer.log_every_n_steps,
        logged_step=partial(_logged_step, trainer),
        say=say,
    )


def stage_of(name: str, trainer: Any, pl_module: Any) -> Stage:
    """One stage of it."""
    stage = STAGES[name]
    learns, automatic = name == "train", pl_module.automatic_optimization
    return Stage(
        name=name,
        learns=learns,
        listen=partial(phases_of(trainer).listen, name),
        accumulation=lambda: trainer.accumulate_grad_batches if learns and automatic else 1,
        ends_step=lambda: not learns or _ends_step(trainer, pl_module),
        batches_left=_batches_left(trainer, pl_module) if learns else stage.batches_left(trainer),
        updates=frozenset({"backward", "optimizer"}) if learns and automatic else frozenset(),
        fetches_itself=stage.fetches_itself(pl_module),
    )


def _root_of(trainer: Any, pl_module: Any) -> nn.Module:
    """The module whose names are those of the model, with what holds its parameters: torch's first FSDP keeps some outside of it."""
    around = trainer.strategy.model
    wraps = type(around).__name__ == "FullyShardedDataParallel" and around.module is pl_module
    root: nn.Module = around if wraps else pl_module
    return root


def _logged_step(trainer: Any) -> int:
    """The loggers' x-axis, which several optimizers do not move several times."""
    steps: int = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001 - Lightning's own monitors read it
    return steps


def _ends_step(trainer: Any, pl_module: Any) -> bool:
    """Whether the batch that ends now ends a step. In manual optimization each does: only the user knows more."""
    if trainer.accumulate_grad_batches == 1 or not pl_module.automatic_optimization:
        return True
    return not trainer.fit_loop.epoch_loop._should_accumulate()  # noqa: SLF001 - Lightning's own monitor asks it


def _batches_left(trainer: Any, pl_module: Any) -> float:
    """Batches that the run will have; infinity where that is not known."""
    of_epochs: float = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and not math.isinf(trainer.num_training_batches):
        of_epochs = trainer.num_training_batches * (trainer.max_epochs - trainer.current_epoch)
    of_steps: float = math.inf
    if trainer.max_steps >= 0 and pl_module.automatic_optimization:
        of_steps = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    return max(min(of_epochs, of_steps), 0)


def _precision_of(trainer: Any) -> str:
    """As Lightning names it, and whether products of float32 run as TF32."""
    name = str(trainer.precision)
    return f"{name}, tf32" if trainer.strategy.root_device.type == "cuda" and _tf32() else name


def _tf32() -> bool:
    backend: Any = torch.backends.cuda.matmul
    if hasattr(backend, "fp32_precision"):
        return bool(backend.fp32_precision == "tf32")
    return torch.get_float32_matmul_precision() != "highest"  # before torch 2.9
