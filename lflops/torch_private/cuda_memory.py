"""Record the history of torch's CUDA allocator, and take snapshots of its memory."""

from typing import Any

import torch


def is_recording_memory() -> bool:
    """Return whether the allocator is recording its history. Without CUDA, the result is false."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return enabled is not None and bool(enabled())


def record_memory(most: int) -> None:
    """Start to record the allocations and frees of the allocator, with Python stacks.

    The allocator keeps the last `most` allocations and frees.
    """
    torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=most)


def stop_recording_memory() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> Any:
    """Take a snapshot of the allocator's memory and recorded history, in plain containers."""
    return torch.cuda.memory._snapshot()
