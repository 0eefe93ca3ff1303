"""The report when memory runs out.

Where the training was, the memory of its last counted step, and the allocator's snapshot explained.
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
from lflops.monitoring.inputs.training import Training
from lflops.profile.profile import Profile
from lflops.torch_private.cuda_memory import (
    is_recording_memory,
    memory_snapshot,
    record_memory,
    stop_recording_memory,
)
from lflops.torch_private.self_check import check_cuda_memory

# allocations and frees that are remembered: a few steps of a large model
RECORDED = 100_000

MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")
LISTED = 10


class OutOfMemory(Struct, frozen=True, kw_only=True):
    """A training's end."""

    # the message
    error: str
    step: int
    module: (
        str | None
        # the innermost module that was running; `None` where none was, as in an optimizer's step
    )
    # `None` where the code does not say
    phase: Literal["forward", "backward", "optimizer"] | None
    # bytes by category at the peak of the last counted step
    counted: Mapping[str, int]
    # the modules that held the most then
    counted_modules: Mapping[str, int]
    # from the allocator's snapshot; `None` without CUDA
    explained: Any = None


class MemoryHistory:
    """The allocator's history, recorded for one run; a recording of the user's is left alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_ours = False

    def start(self) -> None:
        """Begin, where the device is CUDA's."""
        if self._device.type == "cuda":
            check_cuda_memory(self._device)
            self._is_ours = not is_recording_memory()
        if self._is_ours:
            record_memory(RECORDED)

    def stop(self) -> None:
        """End it, if it is ours."""
        if self._is_ours:
            stop_recording_memory()
            self._is_ours = False


def ran_out_of_memory(error: BaseException | None) -> bool:
    is_kind = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_kind or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in MESSAGES)
    )


def write_report(
    error: BaseException, training: Training, profile: Profile | None, folder: Path
) -> Path:
    """Write the report as text and JSON, with the profile of the last counted step.

    Returns the text's path.
    """
    report = _report(error, training, profile)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"oom-{report.step}-rank{training.rank}"
    texts = (
        folder / f"{name}{f'-{number}' if number > 1 else ''}.txt" for number in itertools.count(1)
    )
    text = next(
        each
        for each in texts
        if not each.exists()
        # another run may have ended in the same step
    )
    text.write_text("".join(f"{line}\n" for line in report_lines(report)), encoding="utf-8")
    text.with_suffix(".json").write_bytes(json.format(json.encode(report)) + b"\n")
    return text


def _report(error: BaseException, training: Training, profile: Profile | None) -> OutOfMemory:
    module, phase = _place(error.__traceback__, training.model)
    memory = profile.memory if profile is not None else None
    held = (
        sorted(memory.by_module.items(), key=lambda item: -item[1])[:LISTED]
        if memory is not None
        else ()
    )
    explained = None
    if training.device.type == "cuda":
        total = torch.cuda.mem_get_info(training.device)[1]
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(training.device))
        for explain in offered("explain_snapshot", "a report of memory"):
            explained = explain(memory_snapshot(), training.device.index, total, allowed)
    return OutOfMemory(
        error=str(error) or type(error).__name__,
        step=training.logged_step(),
        module=module,
        phase=phase,
        counted=memory.by_category if memory is not None else {},
        counted_modules=dict(held),
        explained=explained,
    )


def _place(
    at: TracebackType | None, model: nn.Module
) -> tuple[str | None, Literal["forward", "backward", "optimizer"] | None]:
    names = {id(module): name for name, module in model.named_modules()}
    module: str | None = None
    phase: Literal["forward", "backward", "optimizer"] | None = None
    for frame, _ in traceback.walk_tb(at):
        code = frame.f_code
        own = frame.f_locals.get("self")
        module = names.get(id(own), module)
        if "torch/optim/" in code.co_filename.replace("\\", "/"):
            phase, module = "optimizer", None
        elif code.co_name == "backward":
            phase = "backward"
        elif code.co_name == "forward":
            phase = "forward"
    return module, phase


def report_lines(report: OutOfMemory) -> Iterator[str]:
    """The cause, where the training was, and who held what."""
    if report.explained is not None:
        yield from report.explained.lines()
        yield ""
    yield report.error.splitlines()[0]
    where = (
        f"module {report.module or 'the model itself'}"
        if report.module is not None
        else "no module of the model was running"
    )
    yield f"step {report.step}, {report.phase or 'phase unknown'}, {where}"
    yield ""
    if not report.counted:
        yield "no step was counted before, so that its memory is not known"
        return
    total = sum(report.counted.values())
    yield f"the last counted step had {units.size(total)} alive at its peak"
    for title, parts in (("by category", report.counted), ("by module", report.counted_modules)):
        yield title
        for name, nbytes in sorted(parts.items(), key=lambda item: -item[1]):
            if nbytes:
                yield f"  {units.size(nbytes):>12}  {units.percent(nbytes / total):>6}  {name.replace('_', ' ') or 'the model itself'}"
