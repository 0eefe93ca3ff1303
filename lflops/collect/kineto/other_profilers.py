"""Other profilers in this process. torch knows only of one that records; to start ours next to one that gets ready is a crash."""

from collections.abc import Sequence
from typing import Any

import torch

from lflops.collect.torch_private.autograd import profiler_is_recording
from lflops.garbage import SearchTimeout, alive

__all__ = ["other_profiler_runs", "recorded_events"]


def other_profiler_runs() -> bool:
    """Whether a profiler of torch's has been got ready or entered and is not stopped; also where that cannot be found out in a second."""
    if profiler_is_recording():
        return True
    entered, begun = _and_its_subclasses(torch.autograd.profiler.profile), _and_its_subclasses(torch.profiler.profile)
    try:
        return any(_is_entered(each) if type(each) in entered else _is_begun(each) for each in alive(entered | begun))
    except SearchTimeout:
        return True  # that is not known; to start ours next to one that gets ready would be a crash


def _is_entered(each: torch.autograd.profiler.profile) -> bool:
    return bool(each.enabled and each.entered and each.kineto_results is None)


def _is_begun(each: torch.profiler.profile) -> bool:
    return each.step_rec_fn is not None and not _is_over(each)


def recorded_events(profiler: torch.profiler.profile) -> Sequence[Any]:
    """Kineto's own events, of which torch makes its own in a hundred times as long."""
    results = None if profiler.profiler is None else profiler.profiler.kineto_results
    return () if results is None else results.events()


def _is_over(begun: torch.profiler.profile) -> bool:
    """Whether it was stopped while it recorded, which it does not say itself in torch 2.8 and 2.11: its last cycle has results.

    One that was stopped while it waited looks the same there as one that still waits.
    """
    in_a_cycle = begun.current_action.name in ("WARMUP", "RECORD", "RECORD_AND_SAVE") and not begun.acc_events
    return in_a_cycle and begun.profiler is not None and begun.profiler.kineto_results is not None


def _and_its_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_and_its_subclasses, kind.__subclasses__()))
