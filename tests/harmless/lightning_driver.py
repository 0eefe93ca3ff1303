"""Run cases with Lightning's Trainer and `FlopsMonitor`."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lflops import FlopsMonitor
from tests.harmless.case import Case, Facts, Watch
from tests.harmless.culprits import Culprit
from tests.harmless.facts import (
    Recorder,
    around,
    attributes,
    checkpoints,
    digest,
    of_modules,
    of_optimizers,
    own,
    says,
)
from tests.harmless.tasks import TASKS, Loads, Net

__all__ = ["LOGS", "PLACES", "TRAITS", "run"]

BATCHES = 12


class Batches(Dataset[Any]):
    """The batches of a task. Each batch is a sample for the loader."""

    def __init__(self, task: str, length: int) -> None:
        self.task = TASKS[task]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.task.batch(index)


class Stream(IterableDataset[Any]):
    """The batches of a task, as a data set without a length."""

    def __init__(self, task: str, length: int) -> None:
        self.task = TASKS[task]
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return (self.task.batch(index) for index in range(self.length))


class Module(LightningModule):
    """A LightningModule that trains a task. Traits add base classes to it."""

    def __init__(self, plan: "Plan") -> None:
        super().__init__()
        self.plan = plan
        # `BatchSizeFinder` changes this attribute.
        self.batch_size = 1
        self.lr = 0.01
        self.net = TASKS[plan.task].model()
        self.losses: list[str] = []
        self.calls: dict[str, int] = {}
        self.mean = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def note(self, what: str) -> None:
        """Count a call."""
        self.calls[what] = self.calls.get(what, 0) + 1

    def record(self, loss: Tensor, place: str) -> None:
        """Log the loss as the case says, if this is the case's place for logging."""
        if self.plan.log is not None and self.plan.place == place:
            self.plan.log(self, loss.detach(), place)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.plan.loss(self, batch, batch_idx)
        self.losses.append(digest(loss))
        self.record(loss, "training_step")
        if not batch_idx % 4:
            says(f"batch {batch_idx} loss {loss.item()!r}")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = TASKS[self.plan.task].loss(self.net, batch)
        self.note("validation_step")
        self.record(loss, "validation_step")
        if self.plan.monitored:
            self.log("val_loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", TASKS[self.plan.task].loss(self.net, batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return TASKS[self.plan.task].loss(self.net, batch)

    def on_train_epoch_end(self) -> None:
        says(f"epoch {self.current_epoch} over")
        self.record(torch.tensor(float(self.current_epoch)), "on_train_epoch_end")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")
        gradient = next(each.grad for each in self.parameters() if each.grad is not None)
        self.record(gradient.sum(), "on_before_optimizer_step")

    def on_validation_epoch_end(self) -> None:
        self.record(torch.tensor(1.5), "on_validation_epoch_end")

    def configure_optimizers(self) -> Any:
        return self.plan.optimizers(self)

    def train_dataloader(self) -> Any:
        return loader(self.plan, BATCHES)

    def val_dataloader(self) -> Any:
        return loader(self.plan, 2)


class Plan:
    """The model, the data and the options of a case. Traits change them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.task = "net"
        self.kind: type[Module] = Module
        self.options: dict[str, Any] = {}
        self.callbacks: list[Any] = []
        self.log: Callable[[LightningModule, Tensor, str], None] | None = None
        self.place = "training_step"
        self.validated = False
        self.monitored = False
        self.stream = False
        self.workers = 0
        self.ending: tuple[int, Callable[[Module], Any]] | None = None
        self.stages: list[Callable[[Trainer, Module, Plan], Any]] = [fit]
        self.monitors = 1
        self.recorded = True
        self.recorder = Recording()
        self.outputs: list[Any] = []

    def loss(self, module: Module, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch. If the case ends at this batch, end it."""
        if self.ending is not None and index == self.ending[0]:
            self.ending[1](module)
        return TASKS[self.task].loss(module.net, batch)

    def optimizers(self, module: Module) -> Any:
        """Return AdamW. Traits replace this method."""
        return torch.optim.AdamW(module.parameters(), lr=module.lr)


def loader(plan: Plan, length: int) -> DataLoader[Any]:
    """Return a data loader of the plan's task, with `length` batches for each rank."""
    data: Any
    if plan.stream:
        data = Stream(plan.task, length)
    else:
        # A sampler divides these batches among the ranks.
        data = Batches(plan.task, length * plan.case.ranks)
    return DataLoader(data, batch_size=None, num_workers=plan.workers)


class Recording(Logger):
    """A logger of the user, which records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()

    name = "recording"
    version = "0"

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.recorder.add(metrics, step)


class UserCallback(Callback):
    """A callback of the user, which counts the calls of its hooks, and logs if the case says so."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.note("callback: batch begins")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.note(f"callback: batch ends with {type(outputs).__name__}")
        pl_module.record(torch.tensor(float(batch_idx)), "callback's on_train_batch_end")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.note("callback: after backward")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.record(torch.tensor(2.5), "callback's on_train_epoch_end")

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            pl_module.record(torch.tensor(3.5), "callback's on_validation_epoch_end")

    def state_dict(self) -> dict[str, Any]:
        return {"of": "the user"}


class Harming(Callback):
    """A callback that runs a culprit."""

    def __init__(self, name: str) -> None:
        self.culprit = Culprit(name)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.culprit.step(pl_module, trainer)


# The forms of logging: each calls `self.log` in another way.

LOGS: dict[str, Callable[[Any, Tensor, str], None]] = {
    "log": lambda module, value, place: module.log("loss", value),
    "log on_step": lambda module, value, place: module.log(
        "loss", value, on_step="batch" in place or "step" in place, on_epoch=True
    ),
    "log on_epoch": lambda module, value, place: module.log(
        "loss", value, on_epoch=True, on_step=False
    ),
    "log sync_dist": lambda module, value, place: module.log(
        "loss", value, sync_dist=True, on_epoch=True
    ),
    "log prog_bar": lambda module, value, place: module.log(
        "loss", value, prog_bar=True, logger=False
    ),
    "log sum": lambda module, value, place: module.log(
        "loss", value, reduce_fx="sum", on_epoch=True, on_step=False, sync_dist=True
    ),
    "log max": lambda module, value, place: module.log(
        "loss", value, reduce_fx=torch.max, on_epoch=True, on_step=False
    ),
    "log batch_size": lambda module, value, place: module.log(
        "loss", value, batch_size=4, on_epoch=True, on_step=False
    ),
    "log rank_zero_only": lambda module, value, place: module.log(
        "loss", value, rank_zero_only=True
    ),
    "log_dict": lambda module, value, place: module.log_dict(
        {"a": value, "b": value * 2}, on_epoch=True, on_step=False, sync_dist=True
    ),
    "log number": lambda module, value, place: module.log("number", 3.5),
    "log metric object": lambda module, value, place: _log_metric(module, value),
    "log metric collection": lambda module, value, place: _log_collection(module, value),
    "log twice": lambda module, value, place: _log_twice(module, value),
    "log to the logger": lambda module, value, place: _log_to_logger(module, value),
}

PLACES = (
    "training_step",
    "validation_step",
    "on_train_epoch_end",
    "on_before_optimizer_step",
    "on_validation_epoch_end",
    "callback's on_train_batch_end",
    "callback's on_train_epoch_end",
    "callback's on_validation_epoch_end",
)


def _log_metric(module: Any, value: Tensor) -> None:
    module.mean.update(value)
    module.log("mean", module.mean, on_epoch=True)


def _log_twice(module: Any, value: Tensor) -> None:
    module.log("first", value)
    module.log("second", value * 2, on_epoch=True)


def _log_to_logger(module: Any, value: Tensor) -> None:
    if module.logger:
        module.logger.log_metrics({"direct": float(value)}, step=module.global_step)


def _log_collection(module: Any, value: Tensor) -> None:
    scores = value.reshape(1, 1).expand(1, 3) * torch.tensor([1.0, 2.0, 3.0])
    module.accuracy(scores, torch.tensor([2]))
    module.log("accuracy", module.accuracy, on_step=False, on_epoch=True)


# Stages: the calls of the Trainer in a case.


def fit(trainer: Trainer, module: Module, plan: Plan) -> None:
    """Train."""
    trainer.fit(module)


def fit_again(trainer: Trainer, module: Module, plan: Plan) -> None:
    """Train for one more epoch with the same Trainer."""
    trainer.fit_loop.max_epochs = (trainer.fit_loop.max_epochs or 0) + 1
    trainer.fit(module)


def validate(trainer: Trainer, module: Module, plan: Plan) -> None:
    """Validate outside of fit."""
    plan.outputs.append(own(trainer.validate(module, loader(plan, 6), verbose=False)[0]))


def test(trainer: Trainer, module: Module, plan: Plan) -> None:
    """Test."""
    plan.outputs.append(own(trainer.test(module, loader(plan, 6), verbose=False)[0]))


def predict(trainer: Trainer, module: Module, plan: Plan) -> None:
    """Predict."""
    plan.outputs.append(digest(trainer.predict(module, loader(plan, 6))))


def resume(trainer: Trainer, module: Module, plan: Plan) -> None:
    """Save a checkpoint, and train for one more epoch from this checkpoint."""
    # The working directories of all ranks have this parent, so all ranks use the same file.
    path = Path.cwd().parents[1] / "last.ckpt"
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs = (trainer.fit_loop.max_epochs or 0) + 1
    trainer.fit(module, ckpt_path=path, weights_only=False)


# Traits: functions that change the plan of a case.

Trait = Callable[[Plan], None]


def _options(**options: Any) -> Trait:
    """Return a trait with options of the Trainer."""
    return lambda plan: plan.options.update(options)


def _validated(**options: Any) -> Trait:
    """Return a trait with validation that logs its loss, and options of the Trainer."""

    def change(plan: Plan) -> None:
        plan.validated = True
        plan.monitored = True
        plan.options.update(options)

    return change


def _with(*make: Callable[[], Any], validated: bool = False, **options: Any) -> Trait:
    """Return a trait with callbacks, which the functions in `make` create."""

    def change(plan: Plan) -> None:
        plan.callbacks += [each() for each in make]
        plan.options.update(options)
        if validated:
            plan.validated = True
            plan.monitored = True

    return change


def _then(*stages: Callable[[Trainer, Module, Plan], Any], validated: bool = False) -> Trait:
    """Return a trait that runs these stages instead of fit."""

    def change(plan: Plan) -> None:
        plan.stages = list(stages)
        plan.validated = plan.validated or validated
        plan.monitored = plan.validated

    return change


def _is(*kinds: type) -> Trait:
    """Return a trait that adds base classes to the LightningModule."""

    def change(plan: Plan) -> None:
        plan.kind = type("Made", (*kinds, plan.kind), {})

    return change


def _sets(**values: Any) -> Trait:
    """Return a trait that sets attributes of the plan."""
    return lambda plan: vars(plan).update(values)


def _several(*traits: Trait) -> Trait:
    """Return a trait that applies several traits."""

    def change(plan: Plan) -> None:
        for trait in traits:
            trait(plan)

    return change


def _ends(index: int, deed: Callable[[Module], Any]) -> Trait:
    """Return a trait that does something at the batch with this index, such as raising an error."""
    return lambda plan: vars(plan).update(ending=(index, deed))


def _raise(error: BaseException) -> Callable[[Module], None]:
    def deed(module: Module) -> None:
        raise error

    return deed


def _stop(module: Module) -> None:
    module.trainer.should_stop = True


class Manual:
    """Manual optimization with two optimizers, as for a GAN."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)  # type: ignore[call-arg]
        self.automatic_optimization = False
        self.other = Net()

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            loss = TASKS[self.plan.task].loss(net, batch)
            if net is self.net:
                self.record(loss, "training_step")
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(digest(loss))
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self: Any) -> Any:
        optimizers = [
            torch.optim.Adam(self.net.parameters()),
            torch.optim.SGD(self.other.parameters(), lr=0.1),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]


class ReturnsDict:
    """The training step returns a dict with the loss and other entries."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        return {"loss": loss, "more": [1, "text"]}


class SkipsSome:
    """The training step returns `None` for some batches."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 0:
            return None
        return super().training_step(batch, batch_idx)  # type: ignore[misc]


class EndsEpochs:
    """A hook ends each epoch early."""

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 8 else None


class Overrides:
    """The module overrides hooks of Lightning, and counts their calls."""

    def backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.note("backward")
        super().backward(loss, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> None:
        self.note("optimizer_step")
        super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

    def optimizer_zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.note("zero_grad")
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.note("clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.2)

    def transfer_batch_to_device(self: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.note("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]

    def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
        self.note("scheduler")
        scheduler.step()


class LooksAtItself:
    """The training step checks that the strategy still has the methods of the first step.

    Lightning itself compares the method with which `self.log` reduces values.
    """

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        strategy = self.trainer.strategy
        seen = self.__dict__.setdefault("seen", {})
        for name in (
            "training_step",
            "backward",
            "optimizer_step",
            "reduce",
            "barrier",
            "broadcast",
            "batch_to_device",
        ):
            method = getattr(strategy, name)
            is_first = seen.setdefault(name, method) == method
            self.note(f"{name} is the first one: {is_first}")
        return super().training_step(batch, batch_idx)  # type: ignore[misc]


class DrawsBatches:
    """The training step receives the iterator of the loader instead of a batch."""

    def training_step(self: Any, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)  # type: ignore[misc]


class Compiled:
    """A part of the model is compiled."""

    def configure_model(self: Any) -> None:
        if not hasattr(self.net.body, "_orig_mod"):
            self.net.body = torch.compile(self.net.body, backend="aot_eager")


class Sharded:
    """The model is distributed by FSDP2 and tensor parallelism, as the device mesh says."""

    def configure_model(self: Any) -> None:
        data = self.device_mesh["data_parallel"]
        tensor = self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            parallelize_module(
                self.net, tensor, {"body.0": ColwiseParallel(), "head": RowwiseParallel()}
            )
        if data.size() > 1:
            for module in (self.net.body[0], self.net.head, self.net):
                fully_shard(module, mesh=data)


class Spy:
    """A strategy of the user that counts the calls of two of its methods."""

    calls: dict[str, int]

    def _count(self: Any, name: str) -> None:
        calls = self.__dict__.setdefault("calls", {})
        calls[name] = calls.get(name, 0) + 1

    def reduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._count("reduce")
        return super().reduce(*args, **kwargs)  # type: ignore[misc]

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._count("step")
        return super().training_step(*args, **kwargs)  # type: ignore[misc]


class OwnStrategy(Spy, SingleDeviceStrategy):
    """The strategy of the user for one rank."""


class OwnDDPStrategy(Spy, DDPStrategy):
    """The strategy of the user for several ranks."""


def _own_strategy(plan: Plan) -> None:
    if plan.case.ranks > 1:
        plan.options["strategy"] = OwnDDPStrategy()
    else:
        plan.options["strategy"] = OwnStrategy(device="cpu")


class Schedulers:
    """Two forms in which a LightningModule can return its optimizers and schedulers."""

    @staticmethod
    def step(module: Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    @staticmethod
    def plateau(module: Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch"},
        }


class Data(LightningDataModule):
    """A data module, with `prepare_data` on each node or only once."""

    def __init__(self, plan: Plan, *, per_node: bool) -> None:
        super().__init__()
        self.plan = plan
        self.prepare_data_per_node = per_node

    def prepare_data(self) -> None:
        says("prepared")

    def train_dataloader(self) -> Any:
        return loader(self.plan, BATCHES)

    def val_dataloader(self) -> Any:
        return loader(self.plan, 2)


def _with_data(*, per_node: bool) -> Trait:
    """Return a trait that trains with a data module."""

    def fit_data(trainer: Trainer, module: Module, plan: Plan) -> None:
        trainer.fit(module, datamodule=Data(plan, per_node=per_node))

    return _sets(stages=[fit_data])


def _global_hooks(plan: Plan) -> None:
    """Register hooks on all modules. The number of their calls is one of the case's outputs."""
    calls = plan.outputs
    calls.append([0])

    def count(*_: Any) -> None:
        calls[0][0] += 1

    modules = nn.modules.module
    modules.register_module_forward_pre_hook(count)
    modules.register_module_forward_hook(count)
    modules.register_module_full_backward_hook(count)


def _checkpoint(**options: Any) -> Callable[[], ModelCheckpoint]:
    return lambda: ModelCheckpoint(dirpath="checkpoints", **options)


TRAITS: dict[str, Trait] = {
    **{name: _sets(task=name) for name in TASKS},
    **{name: _sets(log=log) for name, log in LOGS.items()},
    **{f"in {place}": _sets(place=place, validated=True) for place in PLACES},
    # Validation and checkpoints.
    "validated": _validated(),
    "validated at times": _validated(val_check_interval=5),
    "validated at fractions": _validated(val_check_interval=0.5, max_epochs=2),
    "validated, no sanity check": _validated(num_sanity_val_steps=0),
    "validated with gradients": _validated(inference_mode=False),
    "checkpoint every 3 steps": _with(
        _checkpoint(every_n_train_steps=3, save_top_k=-1), enable_checkpointing=True
    ),
    "checkpoint of the best": _with(
        _checkpoint(monitor="val_loss", save_top_k=1, save_last=True),
        validated=True,
        enable_checkpointing=True,
    ),
    "checkpoint at the epoch's end": _with(
        _checkpoint(save_on_train_epoch_end=True, save_last=True),
        enable_checkpointing=True,
        max_epochs=2,
    ),
    "checkpoint when it ends by an exception": _with(
        _checkpoint(save_on_exception=True), enable_checkpointing=True
    ),
    "resumed": _then(fit, resume),
    # Callbacks.
    "early stopping": _with(
        lambda: EarlyStopping("val_loss", patience=0, min_delta=10.0), validated=True, max_epochs=4
    ),
    "early stopping in steps": _with(
        lambda: EarlyStopping(
            "loss", patience=0, min_delta=10.0, check_on_train_epoch_end=True, strict=False
        ),
        max_epochs=4,
    ),
    "learning rates": _with(lambda: LearningRateMonitor("step")),
    "SWA": _with(lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1), max_epochs=4),
    "EMA": _with(lambda: EMAWeightAveraging(decay=0.9)),
    "accumulation scheduled": _with(
        lambda: GradientAccumulationScheduler({0: 1, 1: 3}), max_epochs=2
    ),
    "device stats": _with(DeviceStatsMonitor),
    "throughput": _with(lambda: ThroughputMonitor(batch_size_fn=lambda batch: 4, window_size=3)),
    "timer": _with(lambda: Timer("00:01:00:00", verbose=False)),
    "progress": _with(RichProgressBar, enable_progress_bar=True),
    "lambda callback": _with(
        lambda: LambdaCallback(on_train_batch_end=lambda *_: says("batch over"))
    ),
    "lr finder": _with(lambda: LearningRateFinder(num_training_steps=6)),
    "batch size finder": _with(
        lambda: BatchSizeFinder(
            mode="power", steps_per_trial=2, max_trials=2, batch_arg_name="batch_size"
        )
    ),
    # The Trainer's options.
    "accumulated": _options(accumulate_grad_batches=2),
    "clipped": _options(gradient_clip_val=0.1),
    "clipped by value": _options(gradient_clip_val=0.1, gradient_clip_algorithm="value"),
    "bf16": _options(precision="bf16-mixed"),
    "bf16 true": _options(precision="bf16-true"),
    "double": _options(precision="64-true"),
    "two epochs": _options(max_epochs=2),
    "in steps": _options(max_epochs=-1, max_steps=15),
    "no inference mode": _options(inference_mode=False),
    "fast_dev_run": _options(fast_dev_run=3),
    "one batch": _options(limit_train_batches=1),
    "overfit": _options(overfit_batches=3, max_epochs=3),
    "barebones": _several(_sets(recorded=False), _options(barebones=True)),
    "deterministic": _options(deterministic=True),
    "anomaly": _options(detect_anomaly=True),
    "loaders reloaded": _options(reload_dataloaders_every_n_epochs=1, max_epochs=2),
    "model summary": _options(enable_model_summary=True),
    "log every step": _options(log_every_n_steps=1),
    "simple profiler": lambda plan: plan.options.update(profiler=SimpleProfiler(filename=None)),
    "advanced profiler": lambda plan: plan.options.update(
        profiler=AdvancedProfiler(dirpath=".", filename="advanced")
    ),
    "torch profiler": lambda plan: plan.options.update(
        profiler=PyTorchProfiler(dirpath=".", filename="torch", export_to_chrome=False)
    ),
    "csv logger": lambda plan: plan.options.update(
        logger=[plan.recorder, CSVLogger("csv", flush_logs_every_n_steps=2)]
    ),
    "tensorboard": lambda plan: plan.options.update(
        logger=[plan.recorder, TensorBoardLogger("board")]
    ),
    "no logger": _several(_sets(recorded=False), _options(logger=False)),
    # Optimizers.
    "manual": _is(Manual),
    "scheduler each step": _sets(optimizers=Schedulers.step),
    "scheduler on a plateau": _several(
        _validated(max_epochs=3), _sets(optimizers=Schedulers.plateau)
    ),
    "LBFGS": _sets(optimizers=lambda module: torch.optim.LBFGS(module.parameters(), max_iter=2)),
    "no optimizer": _sets(optimizers=lambda module: None),
    "fused optimizer": _sets(
        optimizers=lambda module: torch.optim.AdamW(module.parameters(), fused=True)
    ),
    # Modules.
    "returns a dict": _is(ReturnsDict),
    "skips some": _is(SkipsSome),
    "ends epochs": _is(EndsEpochs),
    "overrides": _is(Overrides),
    "looks at the strategy": _is(LooksAtItself),
    "takes the iterator": _is(DrawsBatches),
    "compiled": _is(Compiled),
    "global module hooks": _global_hooks,
    # Data.
    "stream": _sets(stream=True),
    "workers": _sets(workers=1),
    "data module": _with_data(per_node=True),
    "data module, per cluster": _with_data(per_node=False),
    # Endings.
    "raises": _ends(5, _raise(ValueError("planted"))),
    "raises at once": _ends(0, _raise(ValueError("planted"))),
    "KeyboardInterrupt": _ends(5, _raise(KeyboardInterrupt())),
    "SystemExit": _ends(5, _raise(SystemExit(3))),
    "StopIteration": _ends(5, _raise(StopIteration())),
    "should_stop": _ends(5, _stop),
    # Stages.
    "fits twice": _then(fit, fit_again),
    "all stages": _then(fit, validate, test, predict, validated=True),
    "validates alone": _then(validate, validated=True),
    "tests alone": _then(test),
    "predicts alone": _then(predict),
    "two monitors": _sets(monitors=2),
    # Strategies.
    "own strategy": _own_strategy,
    "FSDP2": _several(
        _is(Sharded),
        lambda plan: plan.options.update(strategy=ModelParallelStrategy(plan.case.ranks, 1)),
    ),
    "tensor parallel": _several(
        _is(Sharded),
        lambda plan: plan.options.update(strategy=ModelParallelStrategy(1, plan.case.ranks)),
    ),
    "static graph": lambda plan: plan.options.update(strategy=DDPStrategy(static_graph=True)),
    "unused parameters": _options(strategy="ddp_find_unused_parameters_true"),
}


def run(case: Case, watch: Watch) -> Facts:
    """Run a case, and return its facts."""
    torch.manual_seed(0)
    plan = Plan(case)
    for trait in case.traits:
        TRAITS[trait](plan)
    if plan.place != "training_step" and plan.log is None:
        raise ValueError(f"{case.name} logs nothing")
    monitors: list[Any] = []
    if watch.by == "lflops":
        for number in range(plan.monitors):
            settings = {"dirpath": f"lflops{number}"} | watch.settings
            monitors.append(FlopsMonitor(**settings))
    elif watch.by != "nobody":
        monitors = [Harming(watch.by)]
    options = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": case.ranks,
        "strategy": "ddp" if case.ranks > 1 else "auto",
        "log_every_n_steps": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "limit_val_batches": 2 if plan.validated else 0,
    }
    if plan.recorded:
        options["logger"] = plan.recorder
    options |= plan.options
    if options.get("barebones"):
        options = {
            key: value for key, value in options.items() if not key.startswith(("enable", "log"))
        }
    if "fast_dev_run" in options:
        options.pop("limit_val_batches")
    module = plan.kind(plan)
    trainer = Trainer(callbacks=[UserCallback(), *plan.callbacks, *monitors], **options)
    facts: Facts = {}
    with around(facts):
        for stage in plan.stages:
            stage(trainer, module, plan)
    return facts | _results(trainer, module, plan)


def _results(trainer: Trainer, module: Module, plan: Plan) -> Facts:
    calls = {name: each.calls for name, each in module.named_modules() if isinstance(each, Net)}
    shown = {
        name: own(getattr(trainer, name))
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    }
    facts = {
        "losses": module.losses,
        "calls of the module's hooks": dict(sorted(module.calls.items())),
        "logged": plan.recorder.recorder.entries,
        **shown,
        "outputs": plan.outputs,
        "calls of the model": calls,
        "calls of the strategy": vars(trainer.strategy).get("calls"),
        "looks into the batch": Loads.looks,
        "progress": (
            trainer.global_step,
            trainer.current_epoch,
            trainer.should_stop,
            str(trainer.state.status),
            str(trainer.state.fn),
        ),
        "scheduler": [digest(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs],
        **of_optimizers(trainer.optimizers),
        **attributes(
            Trainer=trainer,
            strategy=trainer.strategy,
            profiler=trainer.profiler,
            loop=trainer.fit_loop,
            epoch_loop=trainer.fit_loop.epoch_loop,
        ),
        **of_modules(module),
    }
    return facts | (checkpoints(Path.cwd()) if trainer.is_global_zero else {})


def every(count: int, names: Any) -> list[str]:
    """Return the first of the names and every `count`-th name after it."""
    return list(itertools.islice(names, 0, None, count))
