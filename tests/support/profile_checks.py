"""Check the rules that every profile must follow, and read single figures of its modules."""

import math
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from lflops.analysis.utilization import utilization
from lflops.hardware.chips import DTYPES, Hardware
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, Phase

FIGURES = ("calls", "macs", "executed_macs", "flops", "bytes_moved", "comm_bytes")


def consistent(profile: Profile) -> Profile:
    """Check that the figures of a profile add up, and return the profile.

    Op counts and communication must add up to the self values, and these to the inclusive values.
    The self values of all modules must add up to the values of the root.
    """
    own: dict[tuple[str, Phase, str], int] = {}
    inclusive: dict[tuple[str, Phase, str], int] = {}
    for row, module in profile.modules.items():
        for phase in PHASES:
            for figure in FIGURES:
                own[row, phase, figure] = getattr(module.work(phase), f"self_{figure}")
                inclusive[row, phase, figure] = getattr(module.work(phase), figure)
    assert _nonzero(_counted(profile)) == _nonzero(own)

    added_up: Counter[tuple[str, Phase, str]] = Counter()
    for (row, phase, figure), value in own.items():
        for above in ancestry(row):
            added_up[above, phase, figure] += value
    assert added_up == inclusive

    for phase in PHASES:
        for figure in FIGURES:
            total = sum(own[row, phase, figure] for row in profile.modules)
            assert total == inclusive["", phase, figure], (phase, figure)
    return profile


def _counted(profile: Profile) -> Counter[tuple[str, Phase, str]]:
    """Add up the op counts and the communication of each module and phase."""
    sums: Counter[tuple[str, Phase, str]] = Counter()
    for cell in profile.op_counts:
        # Op counts have no `comm_bytes`.
        for figure in FIGURES[:-1]:
            sums[cell.module, cell.phase, figure] += getattr(cell, figure)
    for each in profile.communication:
        sums[each.module, each.phase, "calls"] += each.calls
        sums[each.module, each.phase, "comm_bytes"] += each.bytes
    return sums


def _nonzero(sums: Mapping[tuple[str, Phase, str], int]) -> dict[tuple[str, Phase, str], int]:
    return {key: value for key, value in sums.items() if value}


ABACUS = Hardware("abacus", dict.fromkeys(DTYPES, 1e9), 1e9)
"""A chip with 1 GFLOP/s in each dtype and 1 GB/s."""


def spent(profile: Profile) -> Profile:
    """Check that the step breakdown adds up to 100 %, if there is one, and return the profile."""
    breakdown = utilization(profile, ABACUS).breakdown
    assert breakdown is None or math.isclose(1.0, sum(breakdown.parts.values()), abs_tol=1e-3)
    return profile


def macs(profile: Profile, phase: Phase) -> dict[str, int]:
    """Check a profile with `consistent`, and return the self MACs of each module in a phase.

    Modules without MACs are left out.
    """
    return _own(profile, phase, "macs")


def flops(profile: Profile, phase: Phase) -> dict[str, int]:
    """Check a profile with `consistent`, and return the self FLOPs of each module in a phase.

    Modules without FLOPs are left out.
    """
    return _own(profile, phase, "flops")


def calls(profile: Profile) -> dict[str, int]:
    """Return the number of calls of each module, without modules that were never called."""
    return {row: module.calls for row, module in profile.modules.items() if module.calls}


def _own(profile: Profile, phase: Phase, figure: str) -> dict[str, int]:
    found = {}
    for row, module in consistent(profile).modules.items():
        value = getattr(module.work(phase), f"self_{figure}")
        if value:
            found[row] = value
    return found


def names_what_is_taken(
    call: Callable[[], object], error: type[Exception], said: list[str], *, shorter_than: int
) -> None:
    """Check that a call raises an error whose message names what is accepted.

    Args:
        call: The call.
        error: The class of the error.
        said: Words that the message must contain, in this order.
        shorter_than: The message must have fewer characters than this.
    """
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [] == [word for word in said if word not in message]
    assert sorted(said, key=message.index) == said
    assert len(message) < shorter_than
