"""Seconds of operators in a step, as a trace has them."""

from lflops.profile.model import Profile

__all__ = ["traced_seconds"]


def traced_seconds(profile: Profile, *, own: bool = False) -> dict[str, float]:
    """Seconds a step of each traced operator, all its calls together: on the device where one was recorded, else on the host.

    Args:
        profile: With a trace, or without: then there are none.
        own: Without the operators that it calls.
    """
    trace = profile.trace
    if trace is None or not trace.batches:
        return {}
    side = "device_seconds" if any(each.own_device_seconds for each in trace.operators) else "host_seconds"
    batches = profile.run.accumulation or 1
    return {each.name: getattr(each, f"own_{side}" if own else side) * batches / trace.batches for each in trace.operators}
