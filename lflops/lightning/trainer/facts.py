"""What a Trainer says of the run, and what of it a profile keeps."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from lflops.collect.model.module_tree import ModuleTree, parameter_sizes
from lflops.errors import CountError
from lflops.lightning.trainer.stages import Stage
from lflops.profile.model import Profile, Run

__all__ = [
    "accumulation_of",
    "batches_left",
    "check_same_model",
    "facts_of",
    "is_compiled_whole",
    "precision_of",
    "reader_of_logged_step",
    "root_of",
    "steps_here",
]


def root_of(trainer: Any, pl_module: Any) -> nn.Module:
    """The module whose names are those of the model, with whatever holds its parameters: torch's first FSDP keeps some outside of it."""
    around = trainer.strategy.model
    wraps = type(around).__name__ == "FullyShardedDataParallel" and around.module is pl_module
    root: nn.Module = around if wraps else pl_module
    return root


def check_same_model(counted: Profile, pl_module: Any, root: nn.Module) -> None:
    """See that a profile from elsewhere is one of this model.

    Raises:
        CountError: Its modules or parameters are others.
    """
    parameters = sum(each.elements for each in parameter_sizes(ModuleTree({"": root})))
    strange = next((name for name, _ in pl_module.named_modules() if name not in counted.modules), None)
    if strange is not None or counted.modules[""].parameters != parameters:
        other = (
            f"has no module {strange!r}" if strange is not None else f"has {counted.modules[''].parameters} parameters, not {parameters}"
        )
        raise CountError(f"count: the profile is of another model: it {other}: give one of lflops.count or lflops.counting of this module")


def reader_of_logged_step(trainer: Any) -> Callable[[], int]:
    """Make a function that reads the loggers' x-axis, which several optimizers do not move several times.

    Every step calls it, so no Python runs in it.
    """
    loop, name = trainer.fit_loop.epoch_loop, "_batches_that_stepped"
    return partial(getattr, loop, name) if hasattr(loop, name) else partial(getattr, trainer, "global_step")


def is_compiled_whole(pl_module: Any) -> bool:
    """Whether the Trainer was given the module compiled: then it has the plain one, whose training_step is a compiled function."""
    return getattr(pl_module, "_compiler_ctx", None) is not None


def steps_here(trainer: Any, pl_module: Any) -> bool:
    """Whether the batch that ends now ends a step. In manual optimization each does: only the user knows more."""
    if trainer.accumulate_grad_batches == 1 or not pl_module.automatic_optimization:
        return True
    return not trainer.fit_loop.epoch_loop._should_accumulate()  # noqa: SLF001 - Lightning's own monitor asks it


def accumulation_of(trainer: Any, pl_module: Any) -> int:
    """Batches to a step."""
    batches: int = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
    return batches


def batches_left(trainer: Any, pl_module: Any) -> float:
    """How many batches the run will have, as far as that is known; infinity where it is not."""
    of_epochs: float = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and not math.isinf(trainer.num_training_batches):
        of_epochs = trainer.num_training_batches * (trainer.max_epochs - trainer.current_epoch)
    of_steps: float = math.inf
    if trainer.max_steps >= 0 and pl_module.automatic_optimization:
        of_steps = (trainer.max_steps - trainer.global_step) * accumulation_of(trainer, pl_module)
    return max(min(of_epochs, of_steps), 0)


def facts_of(profile: Profile, stage: Stage, trainer: Any, pl_module: Any) -> Run:
    """The run's facts: what the count found, and what the Trainer knows better."""
    return replace(
        profile.run,
        kind="training",
        stage=stage.name,
        dtype=_dtype(profile) or profile.run.dtype,
        precision=precision_of(trainer),
        accumulation=accumulation_of(trainer, pl_module) if stage.learns else None,
        strategy=type(trainer.strategy).__name__,
    )


def precision_of(trainer: Any) -> str:
    """As Lightning names it, and whether products of float32 run as TF32."""
    name = str(trainer.precision)
    return f"{name}, tf32" if trainer.strategy.root_device.type == "cuda" and _tf32() else name


def _tf32() -> bool:
    backend: Any = torch.backends.cuda.matmul
    if hasattr(backend, "fp32_precision"):
        return bool(backend.fp32_precision == "tf32")
    return torch.get_float32_matmul_precision() != "highest"  # before torch 2.9


def _dtype(profile: Profile) -> str | None:
    """What most of the contractions ran in: autocast is the Trainer's business, or the user's, and over when one could ask for it."""
    macs: Counter[str] = Counter()
    for cell in profile.cells:
        if cell.phase in {"forward", "backward"}:
            macs[cell.dtype] += cell.macs
    dtype, most = macs.most_common(1)[0] if macs else ("", 0)
    return dtype if most else None
