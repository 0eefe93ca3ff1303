"""The modules and scopes of a trace: slices of lflops, frames of Python's stack, scopes of `record_function`.

A frame has the class and a number, as `Linear_3`; a slice of lflops has the module's name. Backward is in the module whose forward made the
node, where the trace has the numbers that tell. All times are of launches inside, so a module's time is its kernels'.
"""

import re
from typing import Literal

from msgspec import Struct

from lflops.profile.series import grouped, sums
from lflops.trace_analysis.host_walk import HostWalk

_NUMBER = re.compile(r"(?<![A-Za-z])\d+")


class SpanTimes(Struct, frozen=True, kw_only=True):
    """Modules or scopes of one name but for its numbers; nanoseconds."""

    kind: Literal["module", "scope"]
    name: str  # with a star in place of each number, where there are several
    phase: str  # as lflops names it; forward also stands for what has none
    instances: int  # how many different names it stands for
    calls: int
    device: int  # of the kernels that were launched inside, with all below it
    own_device: int  # the same without what is below it
    host: int  # inclusive


def span_times(walk: HostWalk, kind: Literal["module", "scope"]) -> tuple[SpanTimes, ...]:
    """The modules or the scopes, the most of the device's time first, or of the host's."""
    spans = (each for each in walk.spans.values() if each.kind == kind)
    rows = (
        SpanTimes(
            kind=kind,
            name=pattern if len(found) > 1 else found[0].name,
            phase=phase,
            instances=len(found),
            **sums(found, "calls", "device", "own_device", "host"),
        )
        for (pattern, phase), found in grouped(spans, lambda each: (_NUMBER.sub("*", each.name), each.phase)).items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.device, -row.host, row.name)))
