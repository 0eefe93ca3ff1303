"""A training that runs out of memory leaves a report, and its own error as it was."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import json
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lflops.memory.snapshots.explain import explain
from lflops.memory.snapshots.holders import phase_of
from lflops.memory.snapshots.read import snapshot_of
from lflops.monitoring.outputs.out_of_memory import OutOfMemory, ran_out_of_memory, report_lines
from lflops.profile.series import grouped
from lflops.schedule import Schedule
from tests.memory.snapshots.test_causes import logits
from tests.support.lightning_runs import (
    CLASSES,
    LIGHTNINGS_WARNINGS,
    WIDTH,
    Classifier,
    fit,
    watching,
)
from tests.support.memory_snapshots import Recorder

pytestmark = LIGHTNINGS_WARNINGS
LATE = 12
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Head(nn.Linear):
    """Fails in a late batch."""

    def __init__(self, error: Exception) -> None:
        super().__init__(WIDTH, CLASSES)
        self.error, self.calls = error, 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - its name in torch
        self.calls += 1
        if self.calls > LATE:
            raise self.error
        return super().forward(input)


def failing(error: Exception, folder: Path, **options: Any) -> list[str]:
    """Train until the error, which has to be what comes out; returns the names of the reports."""
    error = type(error)(*error.args)  # one that was raised before keeps the traceback of then
    model = Classifier()
    model.head = Head(error)
    monitor = watching(schedule=Schedule(wait=1, warmup=1, active=2), dirpath=folder, **options)
    with pytest.raises(type(error)) as raised:
        fit(model, monitor)
    assert raised.value is error
    return sorted(path.name for path in folder.glob("oom-*"))


def test_a_report_says_where_it_was_and_who_held_what(tmp_path: Path) -> None:
    """The head's forward in the thirteenth step.

    The counted step has the parameters of two layers, (8 + 1) * (8 + 3) floats.
    """
    assert ["oom-12-rank0.json", "oom-12-rank0.txt"] == failing(OUT, tmp_path, on_oom=True)
    report = json.decode((tmp_path / "oom-12-rank0.json").read_bytes(), type=OutOfMemory)
    assert ("head", "forward", 12, str(OUT)) == (
        report.module,
        report.phase,
        report.step,
        report.error,
    )
    assert (WIDTH + 1) * (WIDTH + CLASSES) * 4 == report.counted["parameters"]
    assert report.explained is None
    text = (tmp_path / "oom-12-rank0.txt").read_text().splitlines()
    assert [str(OUT), "step 12, forward, module head"] == text[:2]
    assert {"by category", "by module"} <= set(text)


def test_a_training_whose_stage_has_no_windows_leaves_one_too(tmp_path: Path) -> None:
    """Nothing is counted before.

    A second run that fails in the same step leaves the first one's report.
    """
    assert ["oom-12-rank0.json", "oom-12-rank0.txt"] == failing(
        OUT, tmp_path, on_oom=True, stages=()
    )
    both = ["oom-12-rank0-2.json", "oom-12-rank0-2.txt", "oom-12-rank0.json", "oom-12-rank0.txt"]
    assert both == failing(OUT, tmp_path, on_oom=True, stages=())


def test_without_being_asked_or_with_another_error_there_is_none(tmp_path: Path) -> None:
    """The twins."""
    assert [] == failing(OUT, tmp_path)
    assert [] == failing(ValueError("a wrong value"), tmp_path, on_oom=True)


class Operators(TorchDispatchMode):
    """Takes every operator for an allocation, with the stack that the training has there."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder, self.names = Recorder(), list[str]()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run it as it is."""
        if operator.namespace == "aten":
            stack = [
                (frame.f_code.co_filename, line, frame.f_code.co_name)
                for frame, line in traceback.walk_stack(None)
            ]
            self.recorder.allocate(4, stack)
            self.names.append(operator.__name__)
        return operator(*args, **(kwargs or {}))


def test_the_phases_of_a_real_training_are_told_by_its_stacks() -> None:
    """Lightning runs forward and backward in a closure that the optimizer's step calls.

    The sixth step has not ended.
    """
    with Operators() as operators:
        fit(Classifier(), batches=6)
    snapshot = snapshot_of(operators.recorder.snapshot())
    found = explain(snapshot)
    assert (6, 5) == (found.forward_passes, found.optimizer_steps)
    stacks = (entry.stack for entry in snapshot.trace if entry.action == "alloc")
    phases = grouped(zip(operators.names, map(phase_of, stacks), strict=True), lambda pair: pair[0])
    expected = {
        "relu.default": "forward",
        "_log_softmax_backward_data.default": "backward",
        "addcdiv_.default": "optimizer",
    }
    assert expected == {name: phases[name][0][1] for name in expected}
    assert all(len({phase for _, phase in phases[name]}) == 1 for name in expected)


def test_errors_of_memory_are_known() -> None:
    """Torch's on CUDA and on a CPU, and Python's; not any error of a run."""
    cpu = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."
    )
    assert [True, True, True, False, False] == [
        ran_out_of_memory(each) for each in (OUT, cpu, MemoryError(), RuntimeError("shapes"), None)
    ]


def test_with_a_snapshot_the_cause_is_the_first_line() -> None:
    """As `lflops memory` says it."""
    report = OutOfMemory(
        error="CUDA out of memory.\nmore",
        step=3,
        module=None,
        phase=None,
        counted={},
        counted_modules={},
        explained=explain(snapshot_of(logits().snapshot())),
    )
    lines = list(report_lines(report))
    assert lines[0].startswith("One tensor takes 8.00 GiB")
    assert "CUDA out of memory." in lines
    assert "step 3, phase unknown, no module of the model was running" in lines
    assert lines[-1].startswith("no step was counted before")
