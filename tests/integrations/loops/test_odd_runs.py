"""Test runs with unusual modules, unusual folder names, and child processes that end in a step."""

import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn

import lflops
from lflops.trace.analysis.read_trace import read_trace
from tests.support.warm_python import WarmPython


class Unequal(nn.Linear):
    """A module that raises if it is compared, printed or converted to `bool`."""

    def __eq__(self, _other: object) -> NoReturn:
        raise RuntimeError("compared")

    __hash__ = nn.Linear.__hash__

    def __repr__(self) -> NoReturn:
        raise RuntimeError("printed")

    def __bool__(self) -> NoReturn:
        raise RuntimeError("asked")


def train(model: nn.Module, folder: Path) -> lflops.Profile:
    """Train ten steps with one window, and return its profile. Errors of lflops are raised."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.monitor(
        model,
        optimizer,
        schedule=lflops.Schedule(wait=1, warmup=1, active=2, repeat=1),
        dirpath=folder,
        hardware=None,
        log=lambda _: None,
        on_error="raise",
    ) as monitor:
        for batch in monitor.data([torch.ones(2, 4)] * 10):
            with monitor.step(batch):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    (profile,) = monitor.profiles
    return profile


@pytest.mark.parametrize("is_root", [False, True])
def test_a_module_that_cannot_be_compared_is_counted(is_root: bool, tmp_path: Path) -> None:
    """Such a module is counted and traced, as the model itself and as a part of it.

    2 samples through 4 × 3 weights are 24 MACs.
    """
    odd = Unequal(4, 3)
    profile = train(odd if is_root else nn.Sequential(odd), tmp_path)
    assert 24 == profile.modules[""].forward.macs
    assert profile.trace is not None


@pytest.mark.parametrize("name", [b"\xe2\x98\x83", b"no\xff", b"a,b=c\nd"])
def test_a_folder_may_have_a_name_that_kineto_does_not_accept(name: bytes, tmp_path: Path) -> None:
    """The profile and the trace are written to such a folder and can be read back.

    The names are a snowman, bytes that are not UTF-8, and a name with a comma and a line break.
    """
    folder = tmp_path / os.fsdecode(name)
    train(nn.Sequential(nn.Linear(4, 4)), folder)
    (file,) = folder.glob("train-*.profile.json")
    (trace,) = folder.glob("lflops_traces/train-*/*.pt.trace.json.gz")
    assert lflops.load(file).trace is not None
    assert read_trace(trace).events


FORKS = """
import os, sys, tempfile
from pathlib import Path
import torch, lflops
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
folder = Path(tempfile.mkdtemp())
statuses = []
with lflops.monitor(
    model,
    optimizer,
    schedule=lflops.Schedule(wait=1, warmup=1, active=2, repeat=1),
    dirpath=folder,
    hardware=None,
    trace=False,
    log=lambda _: None,
    on_error="raise",
) as monitor:
    for batch in monitor.data([torch.ones(2, 4)] * 5):
        with monitor.step(batch):
            model(batch).sum().backward()
            child = os.fork()
            if not child:
                sys.exit(7)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            optimizer.step()
            optimizer.zero_grad()
ledger = lflops.load_run(folder)
files = sorted(each.suffix for each in folder.iterdir() if not each.name.startswith("train"))
print(set(statuses), len(statuses), ledger.steps, len(ledger.starts), len(monitor.profiles), files)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_child_that_ends_within_a_step_leaves_the_run_alone(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A forked child that exits in each step does not change the profile, the ledger or the files.

    The child's `SystemExit` passes through the step and the monitor, which must do nothing there.
    The script prints the children's exit statuses, the steps, and the profiles of the parent.
    """
    ended = warm_python.run(FORKS, tmp_path, destroys_objects=True)
    assert (0, "{7} 5 5 1 1 ['.jsonl']") == (ended.status, ended.out.strip()), ended.err
