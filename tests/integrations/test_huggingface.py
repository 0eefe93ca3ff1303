"""`FlopsCallback` in a real Trainer of transformers.

Figures, the same training, and nothing left on.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lflops import CountError, Profile, Schedule
from lflops.analysis.analysis import analyze
from tests.support.process_state import bits

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lflops.integrations.huggingface import FlopsCallback  # noqa: E402 - transformers first

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WIDTH, HIDDEN, CLASSES, BATCH = 16, 32, 4, 8
FORWARD = BATCH * (WIDTH * HIDDEN + HIDDEN * CLASSES)
BACKWARD = 2 * FORWARD - BATCH * WIDTH * HIDDEN
"""MACs by hand: each product twice, but for the gradient of the data."""

SHORT = Schedule(wait=1, warmup=1, active=2, repeat=1)


class Model(nn.Module):
    """What a Trainer takes: its output has a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Two products."""
        logits = self.second(torch.tanh(self.first(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


DATA = [
    {"x": x, "labels": y}
    for x, y in zip(
        torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(1)),
        torch.arange(160) % CLASSES,
        strict=True,
    )
]


class Breaks(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Ends a training by an exception."""

    def __init__(self, step: int, error: type[BaseException]) -> None:
        self.step, self.error = step, error

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """In the middle of it."""
        if state.global_step == self.step:
            raise self.error


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    """A Trainer that reports to nobody."""
    arguments = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
    }
    arguments |= {
        "disable_tqdm": True,
        "logging_steps": 1000,
        "seed": 3,
        "remove_unused_columns": False,
    } | options
    args = transformers.TrainingArguments(str(folder), **arguments)
    return transformers.Trainer(
        Model(), args, train_dataset=DATA, eval_dataset=DATA[:32], callbacks=[*callbacks]
    )


def quiet(_message: str) -> None:
    """Log nothing."""


def watching(**settings: Any) -> FlopsCallback:
    """Raises what goes wrong."""
    return FlopsCallback(
        **({"schedule": SHORT, "log": quiet, "on_error": "raise", "hardware": None} | settings)
    )


def macs(profile: Profile) -> tuple[int, int]:
    """Of forward and backward."""
    root = profile.modules[""]
    return root.forward.macs, root.backward.macs


def left(trained: Any) -> list[str]:
    """What is still set on a Trainer and its accelerator, and hooks on the model and the optimizer."""
    wrapped = [
        name
        for owner in (trained, trained.accelerator)
        for name, value in vars(owner).items()
        if "Wrapper" in type(value).__name__
    ]
    hooks = [
        name
        for name, each in trained.model.named_modules()
        if each._forward_hooks or each._forward_pre_hooks
    ]
    return wrapped + hooks


def test_calls_of_the_model_that_prepare_a_batch_are_inference(tmp_path: Path) -> None:
    """A Trainer that generates its own batches, as for reinforcement learning.

    The calls are no copies to a device, and they are counted as forward.
    """

    class Generates(transformers.Trainer):  # type: ignore[misc, unused-ignore]
        def _prepare_inputs(self, inputs: Any) -> Any:
            prepared = super()._prepare_inputs(inputs)
            with torch.no_grad():
                for _ in range(3):
                    self.model(**prepared)
            return prepared

    callback = watching()
    usual = trainer(tmp_path, callback)
    Generates(
        Model(),
        usual.args,
        train_dataset=DATA,
        callbacks=[callback],
    ).train()
    (profile,) = callback.profiles
    assert (4 * FORWARD, BACKWARD) == macs(profile)
    phases = analyze(profile).step_times.phases
    assert {"data", "transfer", "inference", "forward", "backward"} <= phases.keys()
    ledger = callback.ledger
    assert ledger is not None
    assert ledger.seconds["inference"] > 0


def test_a_trainer_is_counted_and_timed(tmp_path: Path) -> None:
    """Its files are below the Trainer's folder; the phases are the Trainer's methods."""
    callback = watching()
    trained = trainer(tmp_path, callback)
    trained.train()
    (profile,) = callback.profiles
    assert (FORWARD, BACKWARD) == macs(profile)
    assert (BATCH, "train") == (profile.run.samples_per_step, profile.run.stage)
    assert {"data", "transfer", "forward", "backward", "clip", "optimizer", "other"} == set(
        analyze(profile).step_times.phases
    )
    assert profile.modules["first"].backward.seconds is not None
    assert list(tmp_path.rglob("*.profile.json"))
    assert [] == left(trained)


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """Over every kind of step, with evaluations between."""
    options = {"eval_strategy": "steps", "eval_steps": 7}
    first = trainer(tmp_path, **options)
    second = trainer(
        tmp_path,
        watching(
            schedule=Schedule(wait=2, warmup=1, active=2, repeat=2), stages=("train", "validate")
        ),
        **options,
    )
    first.train()
    second.train()
    assert [bits(each) for each in first.model.parameters()] == [
        bits(each) for each in second.model.parameters()
    ]
    losses = [
        [entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry]
        for each in (first, second)
    ]
    assert losses[0] == losses[1]


def test_gradients_are_accumulated(tmp_path: Path) -> None:
    """A step is all of its batches."""
    callback = watching(trace=False)
    trainer(tmp_path, callback, gradient_accumulation_steps=2).train()
    (profile,) = callback.profiles
    assert (2 * FORWARD, 2 * BACKWARD, 2) == (*macs(profile), profile.run.accumulation)


def test_evaluation_is_a_stage_of_its_own(tmp_path: Path) -> None:
    """It has no backward."""
    callback = watching(stages=("train", "validate"), trace=False)
    trainer(
        tmp_path, callback, eval_strategy="steps", eval_steps=10, per_device_eval_batch_size=BATCH
    ).train()
    by_stage = {profile.run.stage: profile for profile in callback.profiles}
    assert (FORWARD, BACKWARD) == macs(by_stage["train"])
    assert (FORWARD, 0) == macs(by_stage["validate"])


@pytest.mark.parametrize("step", [1, 2, 3, 5])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_on(
    step: int, error: type[BaseException], tmp_path: Path
) -> None:
    """In a clean, a counted, a traced and a hooked step; it comes out as it was."""
    trained = trainer(tmp_path, watching(), Breaks(step, error))
    with pytest.raises(error):
        trained.train()
    assert [] == left(trained)


def test_a_second_training_begins_anew(tmp_path: Path) -> None:
    """With the same Trainer."""
    callback = watching(trace=False)
    trained = trainer(tmp_path, callback)
    for _ in range(2):
        trained.train()
        (profile,) = callback.profiles
        assert FORWARD == macs(profile)[0]


def test_the_trainers_own_log_is_as_without(tmp_path: Path) -> None:
    """Every loss of it, and nothing of ours."""
    histories = []
    for callbacks in ((), (watching(trace=False),)):
        trained = trainer(tmp_path, *callbacks, logging_steps=5)
        trained.train()
        histories.append(
            [
                {name: entry[name] for name in entry.keys() & {"loss", "step"}}
                for entry in trained.state.log_history
            ]
        )
        assert not any("lflops" in name for entry in trained.state.log_history for name in entry)
    assert histories[0] == histories[1]
    assert [5, 10, 15, 20] == [entry["step"] for entry in histories[0] if "loss" in entry]


class Reporter(transformers.integrations.NeptuneCallback):  # type: ignore[misc, unused-ignore]
    """Stands in for a reporter that transformers ships."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, set[str]]] = []

    def setup(self, *_: Any, **__: Any) -> None:
        """Need no service."""

    on_init_end = on_train_begin = on_train_end = on_save = __del__ = setup

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write down what it is given, and tamper with what it was given it with."""
        self.logged.append((state.global_step, set(logs)))
        control.should_training_stop = any("lflops" in name for name in logs)


def test_curves_go_to_the_trainers_reporters(tmp_path: Path) -> None:
    """Under the Trainer's own step, with a control flag of their own."""
    reporter = Reporter()
    trained = trainer(tmp_path, watching(trace=False), reporter, logging_steps=5)
    trained.train()
    assert {10, 15, 20} <= {
        step for step, names in reporter.logged if "lflops/train/step_ms" in names
    }
    assert 20 == trained.state.global_step


def test_tensorboard_gets_text_and_the_tab(tmp_path: Path) -> None:
    """In the folder of the Trainer's own curves."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer(tmp_path, watching(trace=False), logging_steps=5, report_to=["tensorboard"]).train()
    folder = next(iter((tmp_path / "runs").iterdir())) if (tmp_path / "runs").exists() else tmp_path
    found = EventAccumulator(str(folder)).Reload()
    assert {"train/loss", "lflops/train/step_ms"} <= set(found.Tags()["scalars"])
    assert {"lflops/train/summary/text_summary"} <= set(found.Tags()["tensors"])


def test_copies_and_pickles_have_the_settings() -> None:
    """As a Trainer copies its callbacks, and a process is given them."""
    callback = watching(trace=False)
    for each in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):  # noqa: S301 - its own
        assert {"trace": False} == {
            name: value for name, value in each._settings.items() if name == "trace"
        }


def test_a_caller_that_is_no_trainer_is_refused() -> None:
    """The error says what to do."""
    with pytest.raises(CountError, match=r"pass the callback in Trainer\(callbacks="):
        FlopsCallback().on_train_begin(None, None, None)


def test_a_wrong_setting_is_named_before_the_training(tmp_path: Path) -> None:
    """With those that are."""
    with pytest.raises(CountError, match="'scheduel' is not an argument"):
        FlopsCallback(scheduel=3)
