"""Test that real training runs name the user's function that takes the time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lflops
from lflops import Profile
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, QUIET, watching
from tests.support.warm_python import WarmPython

pytestmark = [*LIGHTNINGS_WARNINGS, pytest.mark.usefixtures("samples_stacks")]
STEPS = 60
HERE = Path(__file__).name


def busy(rounds: int) -> int:
    """Compute in Python for some milliseconds."""
    total = 0
    for number in range(rounds):
        total += number * number % 7
    return total


def collate(samples: list[Tensor]) -> Tensor:
    """Make a batch, slowly."""
    busy(200_000)
    return torch.stack(samples)


class Net(LightningModule):
    """A model with a slow metric in `training_step`, outside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def metric(self) -> int:
        """Compute a metric, slowly."""
        return busy(200_000)

    def training_step(self, batch: Tensor) -> Tensor:
        """Compute the metric and the loss."""
        self.metric()
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def functions(profile: Profile) -> dict[str, str]:
    """Return the names of the functions outside modules, by phase."""
    found = {}
    for each in profile.main_functions:
        assert each.file.endswith(HERE)
        assert each.samples >= 4
        assert 0.5 <= each.share <= 1
        if not each.module:
            found[each.phase] = each.name
    return found


def test_lightning() -> None:
    """In a Trainer, `collate_fn` and a method of the module call the function that takes the time.

    Nothing of this is in a step whose time counts.
    """
    monitor = watching()
    trainer = Trainer(max_epochs=1, callbacks=[monitor], logger=False, **QUIET)
    trainer.fit(Net(), DataLoader(torch.ones(STEPS, 8), collate_fn=collate))
    (profile,) = monitor.profiles
    assert {"data": "busy", "forward": "busy"}.items() <= functions(profile).items()
    kinds = [step.kind for step in profile.steps]
    assert 3 <= kinds.count("stack_sampling")
    assert all(not step.is_unprofiled for step in profile.steps if step.kind != "unprofiled")


class SlowSGD(torch.optim.SGD):
    """An optimizer with a slow step."""

    def step(self, closure: Any = None) -> Any:
        """Work in Python, then update."""
        self.work()
        return super().step(closure)

    def work(self) -> None:
        """Work in Python, without calling other functions."""
        total = 0
        for number in range(300_000):
            total += number


def evaluate() -> int:
    """Work between two steps, without calling other functions."""
    total = 0
    for number in range(300_000):
        total += number
    return total


@pytest.mark.parametrize("is_planted", [True, False])
def test_a_loop_of_the_user(tmp_path: Path, *, is_planted: bool) -> None:
    """In a loop, the optimizer's function and what the loop calls are named, if they take time."""
    model = nn.Linear(8, 8)
    kind = SlowSGD if is_planted else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"html": False, "trace": False, "on_error": "raise"}
    with lflops.monitor(
        model, optimizer, dirpath=tmp_path, log=lambda _: None, **settings
    ) as monitor:
        for _ in range(STEPS):
            with monitor.step():
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if is_planted:
                    evaluate()
    (profile,) = monitor.profiles
    expected = {"optimizer": "SlowSGD.work", "other": "evaluate"} if is_planted else {}
    found = functions(profile)
    assert expected == {phase: name for phase, name in found.items() if name in expected.values()}


SCRIPT = """
import torch
from torch import nn

def loss_of(y):
    total = 0
    for number in range(300_000):
        total += number
    return y.pow(2).mean()

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    loss = loss_of(model(torch.ones(4, 8)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

START = """
import os, runpy, sys
os.environ["LFLOPS"] = f"wait=5,dirpath={sys.argv[1]},hardware=none,html=false,trace=false"
from lflops.integrations.auto_detect.entry import watch
watch()  # torch calls it when it is imported
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def test_a_script_that_does_not_mention_lflops(warm_python: WarmPython, tmp_path: Path) -> None:
    """In a detected loop, the loss is named, which runs between the model and backward."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = warm_python.run(START, tmp_path / "out", script)
    assert 0 == ended.status, ended.err
    (path,) = (tmp_path / "out").rglob("*.profile.json")
    found = lflops.load(path).main_functions
    assert ("forward", "", "loss_of", "train.py") in {
        (each.phase, each.module, each.name, each.file) for each in found
    }
