"""Test that a training run that is out of memory writes a report and raises its error unchanged."""

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
from lflops.monitoring.schedule import Schedule
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
"""The step that fails, after the window."""
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Head(nn.Linear):
    """A layer that raises the error in step `LATE`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(WIDTH, CLASSES)
        self.error = error
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch uses this name
        self.calls += 1
        if self.calls > LATE:
            raise self.error
        return super().forward(input)


def failing(error: Exception, folder: Path, **options: Any) -> list[str]:
    """Train until the error, and return the names of the reports. The same error must be raised."""
    # An error that was raised before would keep its old traceback.
    error = type(error)(*error.args)
    model = Classifier()
    model.head = Head(error)
    monitor = watching(schedule=Schedule(wait=1, warmup=1, active=2), dirpath=folder, **options)
    with pytest.raises(type(error)) as raised:
        fit(model, monitor)
    assert raised.value is error
    return sorted(path.name for path in folder.glob("oom-*"))


def test_a_report_says_where_it_was_and_who_held_what(tmp_path: Path) -> None:
    """The report has the module, phase and step of the error, and the counted memory by category.

    The head fails in the forward of step 12. The counting step has the parameters of two layers,
    (8 + 1) × (8 + 3) floats.
    """
    assert ["oom-12-rank0.json", "oom-12-rank0.txt"] == failing(OUT, tmp_path, on_oom=True)
    report = json.decode((tmp_path / "oom-12-rank0.json").read_bytes(), type=OutOfMemory)
    assert "head" == report.module
    assert "forward" == report.phase
    assert 12 == report.step
    assert str(OUT) == report.error
    assert (WIDTH + 1) * (WIDTH + CLASSES) * 4 == report.counted["parameters"]
    assert report.explained is None
    text = (tmp_path / "oom-12-rank0.txt").read_text().splitlines()
    assert [str(OUT), "memory ran out in step 12, in forward, in head"] == text[:2]
    assert {"by category", "by module"} <= set(text)


def test_a_training_whose_stage_has_no_windows_leaves_one_too(tmp_path: Path) -> None:
    """With `stages=()`, nothing is counted, but there is still a report.

    A second run that fails in the same step does not overwrite the report of the first one.
    """
    first = ["oom-12-rank0.json", "oom-12-rank0.txt"]
    assert first == failing(OUT, tmp_path, on_oom=True, stages=())
    both = ["oom-12-rank0-2.json", "oom-12-rank0-2.txt", "oom-12-rank0.json", "oom-12-rank0.txt"]
    assert both == failing(OUT, tmp_path, on_oom=True, stages=())


def test_without_being_asked_or_with_another_error_there_is_none(tmp_path: Path) -> None:
    """Without `on_oom`, or with an error that has nothing to do with memory, there is no report."""
    assert [] == failing(OUT, tmp_path)
    assert [] == failing(ValueError("a wrong value"), tmp_path, on_oom=True)


class Operators(TorchDispatchMode):
    """Records every operator as an allocation of 4 bytes, with the Python stack of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator unchanged, and record it."""
        if operator.namespace == "aten":
            stack = [
                (frame.f_code.co_filename, line, frame.f_code.co_name)
                for frame, line in traceback.walk_stack(None)
            ]
            self.recorder.allocate(4, stack)
            self.names.append(operator.__name__)
        return operator(*args, **(kwargs or {}))


def test_the_phases_of_a_real_training_are_told_by_its_stacks() -> None:
    """The phase of an allocation in a Lightning run is derived from its Python stack.

    This is difficult, because Lightning runs forward and backward in a closure that the optimizer's
    step calls. Of the 6 steps, 5 count as ended, because nothing follows the last one.
    """
    with Operators() as operators:
        fit(Classifier(), batches=6)
    snapshot = snapshot_of(operators.recorder.snapshot())
    found = explain(snapshot)
    assert 6 == found.forward_passes
    assert 5 == found.optimizer_steps
    allocations = [entry for entry in snapshot.trace if entry.action == "alloc"]
    phases: dict[str, set[str | None]] = {}
    for name, entry in zip(operators.names, allocations, strict=True):
        phases.setdefault(name, set()).add(phase_of(entry.stack))
    assert {"forward"} == phases["relu.default"]
    assert {"backward"} == phases["_log_softmax_backward_data.default"]
    assert {"optimizer"} == phases["addcdiv_.default"]


def test_errors_of_memory_are_known() -> None:
    """`ran_out_of_memory` recognizes errors of torch for CUDA and the CPU, and those of Python."""
    cpu = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 99 bytes."
    )
    for error in (OUT, cpu, MemoryError()):
        assert ran_out_of_memory(error) is True
    for other in (RuntimeError("shapes"), None):
        assert ran_out_of_memory(other) is False


def test_with_a_snapshot_the_cause_is_the_first_line() -> None:
    """A report with a memory snapshot begins with the cause, as `lflops memory` shows it."""
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
    assert (
        "memory ran out in step 3, in an unknown phase, while no module of the model was running"
        in lines
    )
    assert lines[-1].startswith("no earlier step was a counting step")
