"""When a step's live memory is at its peak."""

from lflops.profile import Memory, Moment

__all__ = ["peak_moment"]


def peak_moment(memory: Memory) -> Moment | None:
    """The operator that reached the peak, and what was alive before it ran; `None` where an older file does not say which it is."""
    if any(moment.index is not None for moment in memory.timeline):
        return next((moment for moment in memory.timeline if moment.index == memory.peak_index), None)
    found = memory.timeline[memory.peak_index] if memory.peak_index < len(memory.timeline) else None
    return found if found is not None and found.live_bytes <= memory.peak_bytes else None
