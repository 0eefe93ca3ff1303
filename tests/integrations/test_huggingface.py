"""Test `FlopsCallback` in a real transformers Trainer.

The counts must be right, the training result must be the same as without the callback, and no hook
or wrapper may remain.
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
"""MACs of one forward pass of `Model`, worked out by hand: one matmul for each layer."""
BACKWARD = 2 * FORWARD - BATCH * WIDTH * HIDDEN
"""MACs of one backward pass: two matmuls for each layer, except that the data has no gradient."""

SHORT = Schedule(wait=1, warmup=1, active=2, repeat=1)


class Model(nn.Module):
    """A model for a transformers Trainer: two layers, and a loss in the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits."""
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
    """Raises `error` when step `step` begins."""

    def __init__(self, step: int, error: type[BaseException]) -> None:
        self.step, self.error = step, error

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise the error if this is the step."""
        if state.global_step == self.step:
            raise self.error


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    """Return a Trainer on the CPU with 20 steps and no reporters.

    `options` override the defaults of its `TrainingArguments`.
    """
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1000,
        "seed": 3,
        "remove_unused_columns": False,
    }
    args = transformers.TrainingArguments(str(folder), **(arguments | options))
    return transformers.Trainer(
        Model(), args, train_dataset=DATA, eval_dataset=DATA[:32], callbacks=[*callbacks]
    )


def quiet(_message: str) -> None:
    """Log nothing."""


def watching(**settings: Any) -> FlopsCallback:
    """Return a callback with one short window that raises internal errors."""
    defaults: dict[str, Any] = {
        "schedule": SHORT,
        "log": quiet,
        "on_error": "raise",
        "hardware": None,
    }
    return FlopsCallback(**(defaults | settings))


def macs(profile: Profile) -> tuple[int, int]:
    """Return the MACs of forward and of backward."""
    root = profile.modules[""]
    return root.forward.macs, root.backward.macs


def left(trained: Any) -> list[str]:
    """Return the wrappers left on a Trainer and its accelerator, and the modules with hooks."""
    wrapped = []
    for owner in (trained, trained.accelerator):
        attributes = vars(owner).items()
        wrapped += [name for name, value in attributes if "Wrapper" in type(value).__name__]
    hooks = [
        name
        for name, each in trained.model.named_modules()
        if each._forward_hooks or each._forward_pre_hooks
    ]
    return wrapped + hooks


def test_calls_of_the_model_that_prepare_a_batch_are_inference(tmp_path: Path) -> None:
    """Such calls have the phase inference, not host-to-device copy; their MACs count as forward.

    A Trainer for reinforcement learning generates its batches like this. The three calls in
    `_prepare_inputs` and the forward pass itself are four forward passes.
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
    """The profile has MACs, phases, times and run data, and is saved in the Trainer's folder."""
    callback = watching()
    trained = trainer(tmp_path, callback)
    trained.train()
    (profile,) = callback.profiles
    assert (FORWARD, BACKWARD) == macs(profile)
    assert (BATCH, "train") == (profile.run.samples_per_step, profile.run.stage)
    phases = set(analyze(profile).step_times.phases)
    assert {"data", "transfer", "forward", "backward", "clip", "optimizer", "other"} == phases
    assert profile.modules["first"].backward.seconds is not None
    assert list(tmp_path.rglob("*.profile.json"))
    assert [] == left(trained)


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """Weights and evaluation losses equal those of a run without lflops.

    The run has every kind of step, and evaluations between them.
    """

    def evaluation_losses(trained: Any) -> list[float]:
        history = trained.state.log_history
        return [entry["eval_loss"] for entry in history if "eval_loss" in entry]

    options = {"eval_strategy": "steps", "eval_steps": 7}
    plain = trainer(tmp_path, **options)
    schedule = Schedule(wait=2, warmup=1, active=2, repeat=2)
    callback = watching(schedule=schedule, stages=("train", "validate"))
    monitored = trainer(tmp_path, callback, **options)
    plain.train()
    monitored.train()
    expected = [bits(each) for each in plain.model.parameters()]
    assert expected == [bits(each) for each in monitored.model.parameters()]
    assert evaluation_losses(plain) == evaluation_losses(monitored)


def test_gradients_are_accumulated(tmp_path: Path) -> None:
    """A step includes all batches of one optimizer update, here two."""
    callback = watching(trace=False)
    trainer(tmp_path, callback, gradient_accumulation_steps=2).train()
    (profile,) = callback.profiles
    assert (2 * FORWARD, 2 * BACKWARD, 2) == (*macs(profile), profile.run.accumulation)


@pytest.mark.parametrize(("accumulation", "steps"), [(3, 21), (8, 9)])
def test_the_last_batches_of_an_epoch_are_a_step(
    accumulation: int, steps: int, tmp_path: Path
) -> None:
    """The ledger has the same steps as the Trainer if an epoch ends with fewer batches.

    An epoch has 20 batches. With an accumulation of 3, it has 6 whole steps and one of 2 batches,
    and with 8, it has 2 whole steps and one of 4 batches. The run has 3 epochs.
    """
    callback = watching(schedule=Schedule(wait=1000))
    run = trainer(tmp_path, callback, gradient_accumulation_steps=accumulation, num_train_epochs=3)
    run.train()
    assert callback.ledger is not None
    assert (steps, steps) == (run.state.global_step, callback.ledger.steps)
    assert "cpu" == callback.ledger.device


def test_evaluation_is_a_stage_of_its_own(tmp_path: Path) -> None:
    """Evaluation gets a separate profile, in which backward has no MACs."""
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
    """An exception in any kind of step reaches the caller, and all hooks and wrappers are removed.

    The four steps are an unprofiled, a counting, a traced and a module-timing step.
    """
    trained = trainer(tmp_path, watching(), Breaks(step, error))
    with pytest.raises(error):
        trained.train()
    assert [] == left(trained)


def test_a_second_training_begins_anew(tmp_path: Path) -> None:
    """A second `train` of the same Trainer replaces the profile of the first one."""
    callback = watching(trace=False)
    trained = trainer(tmp_path, callback)
    for _ in range(2):
        trained.train()
        (profile,) = callback.profiles
        assert FORWARD == macs(profile)[0]


def test_the_trainers_own_log_is_as_without(tmp_path: Path) -> None:
    """The Trainer's log has the same losses with and without lflops, and no values of lflops."""
    histories = []
    for callbacks in ((), (watching(trace=False),)):
        trained = trainer(tmp_path, *callbacks, logging_steps=5)
        trained.train()
        history = []
        for entry in trained.state.log_history:
            assert not any("lflops" in name for name in entry)
            history.append({name: entry[name] for name in entry.keys() & {"loss", "step"}})
        histories.append(history)
    assert histories[0] == histories[1]
    assert [5, 10, 15, 20] == [entry["step"] for entry in histories[0] if "loss" in entry]


class Reporter(transformers.integrations.NeptuneCallback):  # type: ignore[misc, unused-ignore]
    """Stands in for a reporter that transformers ships, because it inherits from one."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, set[str]]] = []

    def setup(self, *_: Any, **__: Any) -> None:
        """Connect to no service."""

    on_init_end = on_train_begin = on_train_end = on_save = __del__ = setup

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the names in `logs`; if they are of lflops, request a stop in `control`."""
        self.logged.append((state.global_step, set(logs)))
        control.should_training_stop = any("lflops" in name for name in logs)


def test_curves_go_to_the_trainers_reporters(tmp_path: Path) -> None:
    """Reporters receive the curves at the Trainer's step numbers.

    They receive a separate `control`: the reporter requests a stop in it, and all 20 steps run.
    """
    reporter = Reporter()
    trained = trainer(tmp_path, watching(trace=False), reporter, logging_steps=5)
    trained.train()
    steps = {step for step, names in reporter.logged if "lflops/train/step_ms" in names}
    assert {10, 15, 20} <= steps
    assert 20 == trained.state.global_step


def test_tensorboard_gets_text_and_the_tab(tmp_path: Path) -> None:
    """Curves and the summary text are in the event files that the Trainer writes its loss to."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer(tmp_path, watching(trace=False), logging_steps=5, report_to=["tensorboard"]).train()
    # Some versions of transformers write to a subfolder of `runs`, others to the folder itself.
    folder = tmp_path
    if (tmp_path / "runs").exists():
        folder = next(iter((tmp_path / "runs").iterdir()))
    found = EventAccumulator(str(folder)).Reload()
    assert {"train/loss", "lflops/train/step_ms"} <= set(found.Tags()["scalars"])
    assert {"lflops/train/summary/text_summary"} <= set(found.Tags()["tensors"])


def test_copies_and_pickles_have_the_settings() -> None:
    """A Trainer copies its callbacks, and a callback that goes to another process is pickled."""
    callback = watching(trace=False)
    copied = copy.deepcopy(callback)
    unpickled = pickle.loads(pickle.dumps(callback))  # noqa: S301 - the test made this pickle
    for each in (copied, unpickled):
        assert False is each._settings["trace"]


def test_a_caller_that_is_no_trainer_is_refused() -> None:
    """If no Trainer calls `on_train_begin`, the error explains how to pass the callback."""
    with pytest.raises(CountError, match=r"pass the callback in Trainer\(callbacks="):
        FlopsCallback().on_train_begin(None, None, None)


def test_a_wrong_setting_is_named_before_the_training(tmp_path: Path) -> None:
    """A misspelled argument raises in the constructor, and the message names it."""
    with pytest.raises(CountError, match="'scheduel' is not an argument"):
        FlopsCallback(scheduel=3)
