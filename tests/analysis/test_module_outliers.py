"""Test when a module counts as slower than identical modules.

The runs have six identical blocks of 10 ms in a step of 100 ms. If the third block takes longer, it
is flagged, or there is a caveat, or there is neither.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import Analysis, analyze
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, Phase, TimingStats
from lflops.profile.steps import Step
from tests.support.profile_builders import clocked, product, profile, run

MS = 1e-3
BLOCKS = [f"blocks.{number}" for number in range(6)]
SLOW = "blocks.2"


def said(
    slow: float, *, n: int = 8, spread: float = 0.01, lost: float | None = None, **facts: Any
) -> Analysis:
    """Return the analysis of a run in which the third block takes `slow` ms of forward.

    Args:
        slow: Milliseconds of the third block.
        n: The number of module-timing steps.
        spread: The distance between the quartiles of each time, as a share of the median.
        lost: Milliseconds that other processes took, of the 100 ms of CPU time that each
            module-timing step needed. `None` if unknown.
        facts: Fields of the run.
    """
    rows = {name: {"class_name": "Block"} for name in ["", "blocks", *BLOCKS]}
    steps = [Step(index=0, kind="unprofiled", seconds=100 * MS, phases={"forward": 100 * MS})]
    cpu_lost = None if lost is None else lost * MS
    for index in range(1, n + 1):
        timed = Step(
            index=index,
            kind="module_timing",
            seconds=100 * MS,
            phases={},
            cpu_user=(100 - (lost or 0)) * MS,
            cpu_system=0.0,
            cpu_lost=cpu_lost,
        )
        steps.append(timed)
    cells = [product(name, "aten::mm", "forward", macs=1000, bytes_moved=10) for name in BLOCKS]
    own: dict[tuple[str, Phase], float] = {(name, "forward"): 10 * MS for name in BLOCKS}
    own[SLOW, "forward"] = slow * MS
    made = clocked(profile(rows, cells, run=run(kind="training", **facts), steps=tuple(steps)), own)

    modules = {}
    for name, module in made.modules.items():
        works = {}
        for phase in PHASES:
            work = module.work(phase)
            if work.seconds is not None:
                median = work.seconds.median
                low = median * (1 - spread / 2)
                high = median * (1 + spread / 2)
                work = replace(work, seconds=TimingStats(median=median, low=low, high=high, n=n))
            works[phase] = work
        modules[name] = replace(module, **works)
    return analyze(replace(made, modules=modules))


def names(analysis: Analysis) -> list[str]:
    """Return the names of the flagged modules."""
    return [each.module for each in analysis.outliers.found]


def test_a_slow_block_is_named_with_its_excess() -> None:
    """A block of 15 ms is flagged, because the others take 10 ms: the excess is 5 % of the step."""
    (found,) = said(15).outliers.found
    assert (SLOW, 5) == (found.module, found.others)
    assert (15 * MS, 10 * MS) == pytest.approx((found.seconds, found.usual_seconds))
    assert said(15).outliers.caveat is None


@pytest.mark.parametrize("slow", [10, 11.9])
def test_less_than_a_fifth_more_is_nothing(slow: float) -> None:
    """In runs without an issue, the first and last blocks may take a tenth more than the others."""
    assert ([], None) == (names(said(slow)), said(slow).outliers.caveat)


def test_the_threshold_is_a_share_of_the_step_and_not_of_what_has_a_time() -> None:
    """An excess of 300 µs in a step of 111 ms is only 0.3 %, although the block is 3 times slower.

    Only the blocks have a time here, so it would be a large share of all times of modules.
    """
    rows = {name: {"class_name": "Block"} for name in ["", "blocks", *BLOCKS]}
    step = Step(index=0, kind="unprofiled", seconds=111 * MS, phases={"forward": 111 * MS})
    own: dict[tuple[str, Phase], float] = {(name, "forward"): 0.15 * MS for name in BLOCKS}
    own[SLOW, "forward"] = 0.45 * MS
    cells = [product(name, "aten::mm", "forward", macs=1000, bytes_moved=10) for name in BLOCKS]
    made = clocked(profile(rows, cells, run=run(kind="training"), steps=(step,)), own)
    assert [] == names(analyze(made))


def with_recompute(given: Profile) -> Profile:
    """Return the profile with one untimed call in the recompute phase of every module.

    Fused attention has such a call: its backward computes a matmul of forward again.
    """
    modules = {}
    for name, module in given.modules.items():
        recompute = replace(module.recompute, calls=1, seconds=None)
        modules[name] = replace(module, recompute=recompute)
    return replace(given, modules=modules)


def test_a_block_with_attention_can_be_accused() -> None:
    """The untimed recompute phase is part of backward, so the block's time is still known."""
    assert [SLOW] == names(analyze(with_recompute(said(15).profile)))
    assert [] == names(analyze(with_recompute(said(10.4).profile)))


def test_three_hooked_steps_are_too_few() -> None:
    """With three module-timing steps, a slow block is only a caveat. Else there is no caveat."""
    assert ([], "few_steps") == (names(said(15, n=3)), said(15, n=3).outliers.caveat)
    assert said(10, n=3).outliers.caveat is None


def test_steps_that_vary_accuse_nobody() -> None:
    """If the steps vary much, a slow block is not flagged, but there is a caveat.

    The quartiles are 60 % of 15 ms apart: an error of 0.93 * 9 ms * sqrt(8) / 7 = 3.4 ms. Four
    times this error is more than the excess of 5 ms.
    """
    assert ([], "varied") == (names(said(15, spread=0.6)), said(15, spread=0.6).outliers.caveat)


@pytest.mark.parametrize(
    ("lost", "accused"), [(0, [SLOW]), (4, [SLOW]), (6, []), (60, []), (None, [SLOW])]
)
def test_what_other_processes_took_is_no_excess(lost: float | None, accused: list[str]) -> None:
    """If other processes took more CPU time than the excess, the block is not flagged.

    The excess is 5 % of the step: 6 ms of 100 ms of lost CPU time explain it, and 4 ms do not.
    `None` is the value on systems other than Linux, where the lost time is unknown.
    """
    found = said(15, lost=lost)
    caveat = None if accused else "busy"
    assert (accused, caveat) == (names(found), found.outliers.caveat)


def test_on_a_gpu_the_processor_is_no_excuse() -> None:
    """On a GPU, module times are measured on the stream, so lost CPU time does not explain them."""
    assert [SLOW] == names(said(15, lost=60, device_type="cuda"))


def test_times_that_are_far_off_are_a_doubt() -> None:
    """Module times that had to be scaled by 3 are unreliable, so a slow block is only a caveat."""
    far = replace(
        said(15).profile, notes=(Note(code="time_scaled", subject="", values={"forward": 3.0}),)
    )
    assert ([], "scaled") == (names(analyze(far)), analyze(far).outliers.caveat)
