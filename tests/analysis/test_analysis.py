"""Test that an `Analysis` computes each value only once for all reports.

The calls are counted with a profile function of Python.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lflops
from lflops.analysis.analysis import Analysis, analyze
from lflops.integrations.deepspeed.text.summary import summary
from lflops.report.figures.pictures import pictures
from lflops.report.payload.payload import payload
from lflops.report.terminal.memory import render_memory
from lflops.report.terminal.modules import render, render_operators
from tests.support.profile_builders import small_profile
from tests.support.terminal import printed

MADE_ONCE = {
    "step_times",
    "utilization_at",
    "step_breakdown",
    "ceilings",
    "children",
    "identical_subtrees",
    "totals",
    "unsharded_macs",
    "operator_rows",
    "unsupported_operators",
    "peak_moment",
    "memory_holders",
    "fold_storages",
    "stragglers",
    "slowest_first",
}
"""Names of functions that compute a result from a profile. Properties of `Analysis` call them."""


def calls_of_all_reports(analysis: Callable[[], Analysis]) -> Counter[str]:
    """Make all reports, and return how often each function of `MADE_ONCE` ran.

    The reports are the page, the text of the log, three views on a terminal, and the figures.
    `analysis` is called for each of them.
    """
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_code.co_name
        file = Path(frame.f_code.co_filename)
        if (
            event == "call"
            and name in MADE_ONCE
            # In analysis.py, properties have the same names as the functions.
            and file.stem != "analysis"
            and file.parent.name in {"analysis", "findings", "memory", "profile", "ranks"}
        ):
            calls[name] += 1

    sys.setprofile(count)
    try:
        payload(analysis())
        summary(analysis())
        for view in (render(analysis()), render_operators(analysis()), render_memory(analysis())):
            printed(view)
        list(pictures(analysis()))
    finally:
        sys.setprofile(None)
    return calls


def test_every_value_is_made_once_for_all_reports() -> None:
    """All reports of one analysis call each function once."""
    shared = analyze(small_profile())
    assert dict.fromkeys(MADE_ONCE, 1) == calls_of_all_reports(lambda: shared)


def test_a_value_that_is_made_twice_would_be_seen() -> None:
    """The test above can fail: a separate analysis for each report repeats the work.

    The page, the text and two of the terminal views then each compute the step times.
    """
    assert 4 == calls_of_all_reports(lambda: analyze(small_profile()))["step_times"]


def test_nothing_is_computed_before_it_is_read() -> None:
    """A new analysis holds only the profile and the chip. A value is computed when it is read."""
    analysis = analyze(small_profile(), "H100 SXM")
    assert {"profile", "chip"} == vars(analysis).keys()
    assert "H100 SXM" in str(analysis.utilization.hardware)
    assert analysis.utilization is analysis.utilization


def test_the_public_functions_agree_with_it() -> None:
    """The public functions accept a profile and return the same values as its analysis."""
    profile = small_profile()
    analysis = analyze(profile, "A100 SXM 80GB")
    assert lflops.utilization(profile, "A100 SXM 80GB") == analysis.utilization
    assert lflops.roofline(profile, "A100 SXM 80GB") == analysis.roofline.points()
    assert lflops.stragglers(profile) == analysis.stragglers
