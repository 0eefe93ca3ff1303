"""Check the rules that every profile must follow, and read rows of a profile with short functions."""

import math
from collections import Counter
from collections.abc import Callable

import pytest

from lflops.analysis.utilization import utilization
from lflops.hardware.chips import DTYPES, Hardware
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, Phase

FIGURES = ("calls", "macs", "executed_macs", "flops", "bytes_moved", "comm_bytes")


def consistent(profile: Profile) -> Profile:
    """The profile, once it is seen to add up.

    Cells to own values, own values to inclusive ones, all of them to the root's.
    """
    cells: Counter[tuple[str, str, str]] = Counter()
    for cell in profile.op_counts:
        cells.update(
            {(cell.module, cell.phase, figure): getattr(cell, figure) for figure in FIGURES[:-1]}
        )
    for each in profile.communication:
        cells.update(
            {
                (each.module, each.phase, "calls"): each.calls,
                (each.module, each.phase, "comm_bytes"): each.bytes,
            }
        )
    own = {
        (row, phase, figure): getattr(module.work(phase), f"self_{figure}")
        for row, module in profile.modules.items()
        for phase in PHASES
        for figure in FIGURES
    }
    assert {key: sums for key, sums in cells.items() if sums} == {
        key: value for key, value in own.items() if value
    }
    below: Counter[tuple[str, Phase, str]] = Counter()
    for (row, phase, figure), value in own.items():
        below.update({(above, phase, figure): value for above in ancestry(row)})
    assert below == {
        (row, phase, figure): getattr(profile.modules[row].work(phase), figure)
        for row, phase, figure in own
    }
    assert {
        (phase, figure): sum(own[row, phase, figure] for row in profile.modules)
        for phase in PHASES
        for figure in FIGURES
    } == {
        (phase, figure): getattr(profile.modules[""].work(phase), figure)
        for phase in PHASES
        for figure in FIGURES
    }
    return profile


ABACUS = Hardware("abacus", dict.fromkeys(DTYPES, 1e9), 1e9)


def spent(profile: Profile) -> Profile:
    """The profile, once its step's breakdown is seen to add up, where it has the times for one."""
    breakdown = utilization(profile, ABACUS).breakdown
    assert breakdown is None or math.isclose(1.0, sum(breakdown.parts.values()), abs_tol=1e-3)
    return profile


def macs(profile: Profile, phase: Phase) -> dict[str, int]:
    """The MACs of every row's own in one phase, of a profile that adds up.

    Rows without any are left out.
    """
    return _own(profile, phase, "macs")


def flops(profile: Profile, phase: Phase) -> dict[str, int]:
    """The same of FLOPs."""
    return _own(profile, phase, "flops")


def calls(profile: Profile) -> dict[str, int]:
    """How often each row was called; rows that never were are left out."""
    return {row: module.calls for row, module in profile.modules.items() if module.calls}


def _own(profile: Profile, phase: Phase, figure: str) -> dict[str, int]:
    own = {
        row: getattr(module.work(phase), f"self_{figure}")
        for row, module in consistent(profile).modules.items()
    }
    return {row: value for row, value in own.items() if value}


def names_what_is_taken(
    call: Callable[[], object], error: type[Exception], said: list[str], *, shorter_than: int
) -> None:
    """The call raises that error, whose message has these words in this order, and is one line that can be read."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [] == [word for word in said if word not in message]
    assert sorted(said, key=message.index) == said
    assert len(message) < shorter_than
