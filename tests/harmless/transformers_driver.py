"""Run cases with the Trainer of transformers and `FlopsCallback`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from lflops.integrations.huggingface import FlopsCallback
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
)
from tests.harmless.tasks import Net, tensors

__all__ = ["TRAITS", "run"]

ROWS = 96


class Model(nn.Module):
    """A model for the Trainer, which returns the loss if it receives labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor | None = None, **more: Any) -> dict[str, Tensor]:
        logits = self.net(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[Any]):
    """A data set of single rows."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = tensors(index)
        return {"x": x[0], "labels": y[0]}


class Stream(IterableDataset[Any]):
    """A data set of single rows, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return (Rows()[index] for index in range(ROWS))


class Tokens(Dataset[Any]):
    """A data set for a language model."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(16, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class UserCallback(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """A callback of the user, which records each event with the flags of the control."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.events: list[tuple[str, int, str]] = []

    def on_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record an event. Logs that have only values of lflops are left out."""
        flags = "".join(str(int(value)) for value in vars(control).values())
        logs = kwargs.get("logs") if event == "on_log" else None
        if logs is not None and _is_of_lflops(logs):
            return
        self.events.append((event, state.global_step, flags))
        if logs is not None:
            self.recorder.add(logs, state.global_step)

    def on_step_begin(self, *given: Any, **kwargs: Any) -> None:
        self.on_event("on_step_begin", *given, **kwargs)

    def on_step_end(self, *given: Any, **kwargs: Any) -> None:
        self.on_event("on_step_end", *given, **kwargs)

    def on_log(self, *given: Any, **kwargs: Any) -> None:
        self.on_event("on_log", *given, **kwargs)

    def on_evaluate(self, *given: Any, **kwargs: Any) -> None:
        self.on_event("on_evaluate", *given, **kwargs)

    def on_save(self, *given: Any, **kwargs: Any) -> None:
        self.on_event("on_save", *given, **kwargs)

    def on_epoch_end(self, *given: Any, **kwargs: Any) -> None:
        self.on_event("on_epoch_end", *given, **kwargs)

    def on_train_end(self, *given: Any, **kwargs: Any) -> None:
        self.on_event("on_train_end", *given, **kwargs)


def _is_of_lflops(logs: Any) -> bool:
    """Return whether logs have only values of lflops. The Trainer adds the epoch to all logs."""
    return all("lflops" in name or name == "epoch" for name in logs)


class Harming(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """A callback that runs a culprit."""

    def __init__(self, name: str) -> None:
        self.culprit = Culprit(name)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.culprit.step(model, control)


class Decides(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """A callback of the user that sets flags of the control."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_log = state.global_step % 3 == 0
        control.should_evaluate = state.global_step == 7
        control.should_training_stop = state.global_step == 10
        return control


class OwnLoss(transformers.Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer that overrides methods which users often override, and counts their calls."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        OwnLoss.calls += 1
        return super().compute_loss(model, inputs, *args, **kwargs) * 2

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        OwnLoss.calls += 1
        return super().training_step(*args, **kwargs)

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        OwnLoss.calls += not _is_of_lflops(logs)
        super().log(logs, *args, **kwargs)


class Raises(transformers.Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer that fails in the middle of the run."""

    error: BaseException = ValueError("planted")

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 5 and self.model.training:
            raise self.error
        return super().compute_loss(*args, **kwargs)


class Interrupted(Raises):
    """A Trainer that is interrupted by Ctrl-C in the middle of the run."""

    error = KeyboardInterrupt("planted")


def _metrics(prediction: Any) -> dict[str, float]:
    is_right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(is_right.mean())}


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    )


class Plan:
    """The model, the data and the arguments of a case. Traits change them."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        self.kind: type[transformers.Trainer] = transformers.Trainer
        self.model: Callable[[], nn.Module] = Model
        self.data: Any = Rows()
        self.callbacks: list[Any] = []
        self.stages: list[Callable[[Any], Any]] = [lambda trainer: trainer.train()]
        self.monitors = 1


def _arguments(**arguments: Any) -> Callable[[Plan], None]:
    return lambda plan: plan.arguments.update(arguments)


def _sets(**values: Any) -> Callable[[Plan], None]:
    return lambda plan: vars(plan).update(values)


def _resume(trainer: Any) -> Any:
    trainer.args.max_steps = 16
    return trainer.train(resume_from_checkpoint=True)


def _several(*changes: Callable[[Plan], None]) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        for each in changes:
            each(plan)

    return change


EVALUATED = _arguments(eval_strategy="steps", eval_steps=4)
TRAITS: dict[str, Callable[[Plan], None]] = {
    "logs each step": _arguments(logging_steps=1),
    "logs each 3 steps": _arguments(logging_steps=3),
    "logs at the epoch's end": _arguments(logging_strategy="epoch"),
    "logs the first step": _arguments(logging_first_step=True),
    "logs nothing": _arguments(logging_strategy="no"),
    "evaluated": EVALUATED,
    "evaluated each epoch": _arguments(eval_strategy="epoch", num_train_epochs=2, max_steps=-1),
    "evaluated at the start": _several(EVALUATED, _arguments(eval_on_start=True)),
    "metrics": _several(EVALUATED, lambda plan: plan.given.update(compute_metrics=_metrics)),
    "saved": _arguments(save_strategy="steps", save_steps=4),
    "the best is loaded": _several(
        EVALUATED,
        _arguments(
            save_strategy="steps",
            save_steps=4,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            save_total_limit=2,
        ),
    ),
    "resumed": _several(
        _arguments(save_strategy="steps", save_steps=4),
        _sets(stages=[lambda trainer: trainer.train(), _resume]),
    ),
    "early stopping": _several(
        EVALUATED,
        _arguments(
            load_best_model_at_end=True,
            save_strategy="steps",
            save_steps=4,
            metric_for_best_model="eval_loss",
        ),
        lambda plan: plan.callbacks.append(transformers.EarlyStoppingCallback(1, 10.0)),
    ),
    "accumulated": _arguments(gradient_accumulation_steps=2, max_steps=6),
    "not clipped": _arguments(max_grad_norm=0),
    "bf16": _arguments(bf16=True),
    "cosine": _arguments(lr_scheduler_type="cosine", warmup_steps=3),
    "plateau": _several(
        EVALUATED,
        _arguments(lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="eval_loss"),
    ),
    "SGD": _arguments(optim="sgd"),
    "Adafactor": _arguments(optim="adafactor"),
    "label smoothing": _several(
        _sets(model=_gpt2, data=Tokens()), _arguments(label_smoothing_factor=0.1)
    ),
    "GPT-2": _sets(model=_gpt2, data=Tokens()),
    "GPT-2, checkpointed": _several(
        _sets(model=_gpt2, data=Tokens()), _arguments(gradient_checkpointing=True)
    ),
    "GPT-2, noise": _several(
        _sets(model=_gpt2, data=Tokens()), _arguments(neftune_noise_alpha=5.0)
    ),
    "compiled": _arguments(torch_compile=True, torch_compile_backend="aot_eager"),
    "stream": _sets(data=Stream()),
    "workers": _arguments(dataloader_num_workers=1),
    "epochs": _arguments(num_train_epochs=2, max_steps=-1),
    "own loss": _sets(kind=OwnLoss),
    "raises": _sets(kind=Raises),
    "KeyboardInterrupt": _sets(kind=Interrupted),
    "decides itself": lambda plan: plan.callbacks.append(Decides()),
    "trained twice": _sets(
        stages=[lambda trainer: trainer.train(), lambda trainer: trainer.train()]
    ),
    "evaluates and predicts": _sets(
        stages=[
            lambda trainer: trainer.train(),
            lambda trainer: own(trainer.evaluate()),
            lambda trainer: digest(trainer.predict(Rows())[0]),
        ]
    ),
    "tensorboard": _arguments(report_to=["tensorboard"]),
    "two monitors": _sets(monitors=2),
    "full determinism": _arguments(full_determinism=True),
    "NaN kept": _arguments(logging_nan_inf_filter=False),
    "tokens counted": _several(
        _sets(model=_gpt2, data=Tokens()), _arguments(include_num_input_tokens_seen="all")
    ),
}


def run(case: Case, watch: Watch) -> Facts:
    """Run a case, and return its facts."""
    torch.manual_seed(0)
    plan = Plan()
    user_callback = UserCallback()
    for trait in case.traits:
        TRAITS[trait](plan)
    callbacks = [user_callback, *plan.callbacks]
    if watch.by == "lflops":
        for number in range(plan.monitors):
            settings: dict[str, Any] = {"dirpath": f"lflops{number}", "log": lambda text: None}
            callbacks.append(FlopsCallback(**(settings | watch.settings)))
    elif watch.by != "nobody":
        callbacks.append(Harming(watch.by))
    arguments = {
        "per_device_train_batch_size": 4,
        "max_steps": 12,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 2,
        "seed": 3,
        "remove_unused_columns": False,
    }
    args = transformers.TrainingArguments("out", **(arguments | plan.arguments))
    trainer = plan.kind(
        plan.model(),
        args,
        train_dataset=plan.data,
        eval_dataset=Rows(),
        callbacks=callbacks,
        **plan.given,
    )
    if "GPT-2" in " ".join(case.traits) or isinstance(plan.data, Tokens):
        trainer.eval_dataset = plan.data
    facts: Facts = {}
    outputs: list[Any] = []
    with around(facts):
        for stage in plan.stages:
            outcome = stage(trainer)
            outputs.append(own(outcome.metrics) if hasattr(outcome, "metrics") else outcome)
    history = Recorder()
    for entry in trainer.state.log_history:
        history.add(entry, entry.get("step"))
    state = trainer.state
    scheduler = None
    if trainer.lr_scheduler is not None:
        scheduler = digest(trainer.lr_scheduler.state_dict())
    optimizers = []
    if trainer.optimizer is not None:
        optimizers.append(getattr(trainer.optimizer, "optimizer", trainer.optimizer))
    results = {
        "log_history": history.entries,
        "outputs": outputs,
        "heard": user_callback.events,
        "logs heard": user_callback.recorder.entries,
        "calls of overrides": OwnLoss.calls,
        "calls of the model": {
            name: each.calls
            for name, each in trainer.model.named_modules()
            if isinstance(each, Net)
        },
        "control": sorted((name, value) for name, value in vars(trainer.control).items()),
        "state": (
            state.global_step,
            state.epoch,
            state.best_metric,
            str(state.best_model_checkpoint),
        ),
        "scheduler": scheduler,
        **of_modules(trainer.model),
        **of_optimizers(optimizers),
        **attributes(Trainer=trainer, accelerator=trainer.accelerator, control=trainer.control),
    }
    return facts | results | (_files() if args.process_index == 0 else {})


def _files() -> Facts:
    return checkpoints(Path.cwd())
