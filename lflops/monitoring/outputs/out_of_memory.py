"""Write a report when memory runs out.

The report has the step, phase and module that were running, and the memory of the last counted
step. On CUDA, it also explains a snapshot of the allocator: why memory ran out, and what filled it.
"""

import itertools
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from msgspec import Struct, json
from torch import nn

from lflops import units
from lflops.extras import offered
from lflops.files import write_whole
from lflops.monitoring.inputs.training import Training
from lflops.profile.profile import Profile
from lflops.torch_private.cuda_memory import (
    is_recording_memory,
    memory_snapshot,
    record_memory,
    stop_recording_memory,
)
from lflops.torch_private.self_check import check_cuda_memory

RECORDED = 100_000
"""Maximum number of allocations and frees in the allocator's history.

This is enough for a few steps of a large model.
"""

MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")
"""Texts in the message of a `RuntimeError` that show that memory ran out."""

MOST_MODULES = 10
"""Maximum number of modules in the report."""

OomPhase = Literal["forward", "backward", "optimizer"]


class OutOfMemory(Struct, frozen=True, kw_only=True):
    """Report on a training run that ended because memory ran out.

    Attributes:
        error: The message of the error.
        step: The last step on the loggers' x-axis.
        module: The innermost running module; `None` outside modules, such as in an optimizer step.
        phase: The running phase, or `None` if unknown.
        counted: Bytes of each category of tensors, such as `gradients`, at the memory peak of the
            last counted step. Empty if no step was counted.
        counted_modules: Bytes of each module at that peak, for the modules with the most bytes.
        explained: The explanation of the allocator's snapshot; `None` without CUDA.
    """

    error: str
    step: int
    module: str | None
    phase: OomPhase | None
    counted: Mapping[str, int]
    counted_modules: Mapping[str, int]
    explained: Any = None


class MemoryHistory:
    """Records the history of the CUDA allocator during one run.

    If the user is already recording it, this class does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._records = False

    def start(self) -> None:
        """Start recording, if the device is a CUDA device."""
        if self._device.type != "cuda":
            return
        check_cuda_memory(self._device)
        self._records = not is_recording_memory()
        if self._records:
            record_memory(RECORDED)

    def stop(self) -> None:
        """Stop recording, unless the user started it."""
        if self._records:
            stop_recording_memory()
            self._records = False


def ran_out_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in MESSAGES)


def write_report(
    error: BaseException, training: Training, profile: Profile | None, folder: Path
) -> Path:
    """Write the report as text and JSON, and return the path of the text file.

    `profile` has the memory of the last counted step. It is `None` if no step was counted.
    """
    report = _report(error, training, profile)
    folder.mkdir(parents=True, exist_ok=True)
    text = _unused_path(folder, f"oom-{report.step}-rank{training.rank}")
    write_whole(text, "".join(f"{line}\n" for line in report_lines(report)).encode())
    write_whole(text.with_suffix(".json"), json.format(json.encode(report)) + b"\n")
    return text


def _unused_path(folder: Path, name: str) -> Path:
    """Return the path of a new text file.

    If another run has already written a report about the same step, a number is added to the name.
    """
    path = folder / f"{name}.txt"
    for number in itertools.count(2):
        if not path.exists():
            break
        path = folder / f"{name}-{number}.txt"
    return path


def _report(error: BaseException, training: Training, profile: Profile | None) -> OutOfMemory:
    module, phase = _place(error.__traceback__, training.model)
    counted: Mapping[str, int] = {}
    counted_modules: Mapping[str, int] = {}
    if profile is not None and profile.memory is not None:
        counted = profile.memory.by_category
        by_size = sorted(profile.memory.by_module.items(), key=lambda item: -item[1])
        counted_modules = dict(by_size[:MOST_MODULES])
    return OutOfMemory(
        error=str(error) or type(error).__name__,
        step=training.logged_step(),
        module=module,
        phase=phase,
        counted=counted,
        counted_modules=counted_modules,
        explained=_explained(training.device),
    )


def _explained(device: torch.device) -> Any:
    """Return an explanation of the allocator's snapshot, or `None` without CUDA."""
    if device.type != "cuda":
        return None
    total = torch.cuda.mem_get_info(device)[1]
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    explained = None
    for explain in offered("explain_snapshot", "the report about memory"):
        explained = explain(memory_snapshot(), device.index, total, allowed)
    return explained


def _place(trace: TracebackType | None, model: nn.Module) -> tuple[str | None, OomPhase | None]:
    """Return the innermost module and the phase that were running when an error was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    module: str | None = None
    phase: OomPhase | None = None
    for frame, _ in traceback.walk_tb(trace):
        code = frame.f_code
        instance = frame.f_locals.get("self")
        module = names.get(id(instance), module)
        if "torch/optim/" in code.co_filename.replace("\\", "/"):
            phase = "optimizer"
            module = None
        elif code.co_name == "backward":
            phase = "backward"
        elif code.co_name == "forward":
            phase = "forward"
    return module, phase


def report_lines(report: OutOfMemory) -> Iterator[str]:
    """Yield lines with the cause, the running step and module, and the largest uses of memory."""
    if report.explained is not None:
        yield from report.explained.lines()
        yield ""
    yield report.error.splitlines()[0]
    phase = report.phase or "an unknown phase"
    where = "while no module of the model was running"
    if report.module is not None:
        where = f"in {report.module or 'the model itself'}"
    yield f"memory ran out in step {report.step}, in {phase}, {where}"
    yield ""
    if not report.counted:
        yield "no earlier step was a counting step, so the memory that a step needs is unknown"
        return
    total = sum(report.counted.values())
    yield f"in the last counting step, the peak of live memory was {units.size(total)}"
    for title, parts in (("by category", report.counted), ("by module", report.counted_modules)):
        yield title
        for name, nbytes in sorted(parts.items(), key=lambda item: -item[1]):
            if nbytes:
                label = name.replace("_", " ") or "the model itself"
                share = units.percent(nbytes / total)
                yield f"  {units.size(nbytes):>12}  {share:>6}  {label}"
