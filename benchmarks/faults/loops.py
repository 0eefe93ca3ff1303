"""Define the loops of a training run: a custom loop from the documentation, and Lightning."""

import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import Profiler
from torch import Tensor, zeros
from torch.utils.data import DataLoader

import lflops
from benchmarks.faults.parts import Parts


class Unwatched:
    """A replacement for a monitor that does nothing."""

    def data(self, loader: Any) -> Any:
        """Return the loader."""
        return loader

    def step(self, _batch: Any) -> Any:
        """Return a context manager that does nothing."""
        return contextlib.nullcontext()

    within = stage = step


def plain(parts: Parts, folder: Path | None) -> list[float]:
    """Run a custom loop, with a monitor if there is a folder.

    Returns the moments at which its steps end.
    """
    parts.wrap()
    ends: list[float] = []
    with contextlib.ExitStack() as contexts:
        for context in parts.contexts:
            contexts.enter_context(context())
        monitor: Any = Unwatched()
        if folder is not None:
            settings: dict[str, Any] = {
                "dirpath": folder,
                "html": False,
                "on_error": "raise",
                "log": lambda _line: None,
            }
            monitor = contexts.enter_context(
                lflops.monitor(parts.wrapped, parts.optimizer, **settings)
            )
        for step, batch in enumerate(monitor.data(parts.loader()), 1):
            with monitor.step(batch):
                loss = parts.loss(batch)
                parts.backward(loss)
                parts.clip()
                parts.optimizer.step()
                parts.optimizer.zero_grad()
                parts.after_step(step)
                if parts.log_every and step % parts.log_every == 0:
                    with monitor.within("logging"):
                        parts.logging()
            for name, event in parts.events(step):
                with monitor.stage("validate") if name == "validation" else monitor.within(name):
                    event()
            ends.append(time.perf_counter())
    return ends


class Module(LightningModule):
    """A LightningModule that trains the parts."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.model = parts.model

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.parts.loss(batch)

    def validation_step(self, _batch: Tensor, _: int) -> None:
        self.parts.validating()

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        self.parts.backward(loss)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.parts.clip()

    def configure_optimizers(self) -> Any:
        return self.parts.optimizer


class Events(Callback):
    """A callback that runs what is due after a step."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.ends: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_train_batch_end(
        self, _trainer: Any, _module: Any, _outputs: Any, _batch: Any, index: int
    ) -> None:
        self.parts.after_step(index + 1)
        if self.parts.log_every and (index + 1) % self.parts.log_every == 0:
            self.parts.logging()


class Saves(TorchCheckpointIO):
    """Checkpoint storage on a disk that is slower."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        self.parts.saving()


def lightning(parts: Parts, folder: Path | None, profiler: Profiler | None = None) -> list[float]:
    """Run a Trainer, with a monitor if there is a folder, and optionally with a profiler.

    Returns the moments at which its steps begin.
    """
    callbacks: list[Any] = [events := Events(parts)]
    with contextlib.ExitStack() as contexts:
        for context in parts.contexts:
            contexts.enter_context(context())
        saved = contexts.enter_context(tempfile.TemporaryDirectory())
        if parts.save_every:
            callbacks += [
                ModelCheckpoint(dirpath=saved, every_n_train_steps=parts.save_every, save_top_k=-1)
            ]
        callbacks += (
            [lflops.FlopsMonitor(dirpath=folder, html=False, on_error="raise")]
            if folder is not None
            else []
        )
        trainer = Trainer(
            max_epochs=1,
            callbacks=callbacks,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=bool(parts.save_every),
            default_root_dir=saved,
            num_sanity_val_steps=0,
            detect_anomaly=torch.is_anomaly_enabled(),
            plugins=[Saves(parts)],
            profiler=profiler,
            **({"val_check_interval": parts.validate_every} if parts.validate_every else {}),
        )
        trainer.fit(
            Module(parts), parts.loader(), DataLoader(zeros(1, 1)) if parts.validate_every else None
        )
    return events.ends


LOOPS = {"plain": plain, "lightning": lightning}
