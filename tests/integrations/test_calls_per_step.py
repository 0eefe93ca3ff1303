"""Limit the overhead of an unprofiled step: the number of Python calls into lflops.

Unlike seconds, this number is the same on every machine. A step lasts from one batch to the next.
Each call of a function of lflops counts, and so does each time that a generator of lflops resumes.
Functions of torch, Lightning and Python do not count.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lflops
from lflops import FlopsMonitor, Schedule
from lflops.error_guard import unguarded
from lflops.monitoring.inputs.phases import Phases
from lflops.timing.clock import ThreadSchedule
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, QUIET
from tests.support.warm_python import WarmPython

pytestmark = [
    *LIGHTNINGS_WARNINGS,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ROOT = str(Path(lflops.__file__).parent)
WIDTH, BATCH = 8, 4
FIRST, LAST = 12, 30
"""The steps whose calls are compared with the limit. `FIRST` leaves out the warm-up of the run."""

WAIT = Schedule(wait=10_000, warmup=1, active=1)
"""Opens no window: the wait is longer than the run, so every step is unprofiled."""
SETTINGS: dict[str, Any] = {"schedule": WAIT, "hardware": None, "on_error": "raise"}


class Over(Exception):  # noqa: N818 - ends a run
    """Ends the training run after enough steps."""


class Calls:
    """Counts the calls into lflops in each step, in this thread.

    Two kinds of calls would vary and are left out. Reads of the system's scheduling counters depend
    on how busy the machine is. Garbage collections depend on what the process did before.
    """

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self._calls = Counter[str]()

    def __enter__(self) -> Self:
        gc.disable()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _count(self, frame: FrameType, event: str, _value: object) -> None:
        code = frame.f_code
        is_call_into_lflops = event == "call" and code.co_filename.startswith(ROOT)
        if is_call_into_lflops and code is not ThreadSchedule.read.__code__:
            self._calls[code.co_qualname] += 1

    def step_ends(self) -> None:
        self.steps.append(self._calls)
        self._calls = Counter()
        if len(self.steps) > LAST:
            raise Over

    @property
    def most(self) -> Counter[str]:
        """The calls by function, in the step with the most calls."""
        return max(self.steps[FIRST:LAST], key=Counter.total)


class Points:
    """A logger that drops all values. With a logger, lflops also computes the curves."""

    def log_metrics(self, values: Any, step: int) -> None:
        """Drop the values."""


def batches() -> DataLoader[Any]:
    """Return batches of inputs and targets, more than the steps that run before `Over`."""
    data = [(torch.ones(WIDTH), torch.ones(WIDTH)) for _ in range(BATCH * 2 * LAST)]
    return DataLoader(data, batch_size=BATCH)


class Model(LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def in_lightning(calls: Calls, folder: Path) -> None:
    """Train with a Lightning Trainer."""

    class Ends(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            calls.step_ends()

    trainer = Trainer(
        callbacks=[Ends(), FlopsMonitor(**SETTINGS)],
        max_epochs=1,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        **QUIET,
    )
    trainer.fit(Model(), batches())


def in_a_loop(calls: Calls, folder: Path) -> None:
    """Train in a custom loop."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.monitor(model, optimizer, logger=Points(), dirpath=folder, **SETTINGS) as monitor:
        for inputs, targets in monitor.data(batches()):
            calls.step_ends()
            with monitor.step((inputs, targets)):
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def with_engine(calls: Calls, folder: Path, engine: Any, prepared: Any, clip: Any) -> None:
    """Train in a custom loop that runs backward and clipping through an engine."""
    model, optimizer = prepared
    settings = SETTINGS | {"engine": engine, "logger": Points(), "dirpath": folder}
    with lflops.monitor(model, optimizer, **settings) as monitor:
        for inputs, targets in monitor.data(batches()):
            calls.step_ends()
            with monitor.step((inputs, targets)):
                engine.backward((model(inputs) - targets).square().mean())
                clip(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()


def in_fabric(calls: Calls, folder: Path) -> None:
    """Train with Fabric."""
    engine = Fabric(accelerator="cpu", devices=1)
    model = nn.Linear(WIDTH, WIDTH)
    prepared = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def clip(model: Any, optimizer: Any) -> None:
        engine.clip_gradients(model, optimizer, max_norm=1.0)

    with_engine(calls, folder, engine, prepared, clip)


def in_accelerate(calls: Calls, folder: Path) -> None:
    """Train with an `accelerate.Accelerator`."""
    accelerate = pytest.importorskip("accelerate")
    engine = accelerate.Accelerator(cpu=True)
    model = nn.Linear(WIDTH, WIDTH)
    prepared = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def clip(model: Any, _optimizer: Any) -> None:
        engine.clip_grad_norm_(model.parameters(), 1.0)

    with_engine(calls, folder, engine, prepared, clip)


def in_transformers(calls: Calls, folder: Path) -> None:
    """Train with a transformers Trainer."""
    transformers = pytest.importorskip("transformers")
    from lflops.huggingface import FlopsCallback

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            calls.step_ends()

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.product(x) - labels).square().mean()}

    data = [{"x": torch.ones(WIDTH), "labels": torch.ones(WIDTH)} for _ in range(BATCH * 2 * LAST)]
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    transformers.Trainer(
        WithLoss(),
        args,
        train_dataset=data,
        callbacks=[Ends(), FlopsCallback(log=lambda _: None, **SETTINGS)],
    ).train()


LOOPS: dict[str, tuple[Callable[[Calls, Path], None], int]] = {
    "Lightning": (in_lightning, 40),
    "transformers": (in_transformers, 40),
    "Fabric": (in_fabric, 40),
    "Accelerate": (in_accelerate, 40),
    "lflops.monitor": (in_a_loop, 25),
}
"""For each loop, the function that trains with it and the most calls that a step may make."""


def counted(run: Callable[[Calls, Path], None], folder: Path) -> Counter[str]:
    """Return the calls by function, in the unprofiled step with the most calls."""
    with Calls() as calls, pytest.raises(Over):
        run(calls, folder)
    return calls.most


IN_A_NEW_PROCESS = """
import sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from tests.integrations.test_calls_per_step import LOOPS, counted
calls = counted(LOOPS[sys.argv[1]][0], Path(sys.argv[2]))
print(calls.total(), calls)
"""


@pytest.mark.parametrize(("name", "limit"), [(name, limit) for name, (_, limit) in LOOPS.items()])
def test_an_unprofiled_step_makes_few_calls(
    name: str, limit: int, tmp_path: Path, warm_python: WarmPython
) -> None:
    """No unprofiled step exceeds the limit in `LOOPS`, with curves and the ledger enabled.

    The run has a new process, because hooks that other tests have left would be counted as well.
    """
    ended = warm_python.run(IN_A_NEW_PROCESS, name, tmp_path)
    assert 0 == ended.status, ended.err
    number, calls = ended.out.splitlines()[-1].split(maxsplit=1)
    assert 0 < int(number) <= limit, calls


@pytest.fixture
def _wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrap each transition of a phase in two more guards."""
    for name in ("enter", "leave"):
        method = getattr(Phases, name)
        guard = Phases().guard.guard
        monkeypatch.setattr(Phases, name, guard(guard(unguarded(method))))


@pytest.mark.usefixtures("_wrapped")
def test_a_wrapper_around_each_transition_is_noticed(tmp_path: Path) -> None:
    """Two more calls for each transition exceed the limit, so the test above can fail."""
    assert counted(in_lightning, tmp_path).total() > LOOPS["Lightning"][1]


AUTO_DETECTED = """
import os, sys
os.environ["LFLOPS"] = f"wait=1,warmup=1,active=1,hardware=none,html=false,trace=false,dirpath={sys.argv[1]}"
from lflops.integrations.auto_detect.entry import watch
watch()
import lflops, torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader
from tests.integrations.test_calls_per_step import Calls, Over
from tests.support import stack_sampling
stack_sampling.turn_off()
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
calls = Calls()
try:
    with calls:
        for inputs, targets in DataLoader([(torch.ones(8), torch.ones(8))] * 400, batch_size=4):
            calls.step_ends()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
except Over:
    print(calls.most.total(), calls.most)
"""


def test_a_step_of_an_auto_detected_loop_makes_few_calls(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A step after the only window, which just the ledger reads, makes at most 20 calls."""
    ended = warm_python.run(AUTO_DETECTED, tmp_path)
    assert 0 == ended.status, ended.err
    number, calls = ended.out.splitlines()[0].split(maxsplit=1)
    assert 0 < int(number) <= 20, calls
