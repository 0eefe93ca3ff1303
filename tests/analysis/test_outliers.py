"""Six blocks of 10 ms in a step of 100 ms.

What one of them takes longer is an accusation, a doubt, or nothing.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import Analysis, analyze
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, TimingStats
from lflops.profile.steps import Step
from tests.support.profile_builders import clocked, product, profile, run

MS = 1e-3
BLOCKS = [f"blocks.{number}" for number in range(6)]
SLOW = "blocks.2"


def said(
    slow: float, *, n: int = 8, spread: float = 0.01, lost: float | None = None, **facts: Any
) -> Analysis:
    """What is said where the third block takes so many ms.

    Args:
        slow: Milliseconds of forward.
        n: The number of hooked steps.
        spread: From one quartile to the other, as a share of the median.
        lost: Of the 100 ms of CPU time in each hooked step, milliseconds that were lost to other
            processes.
        facts: Of the run.
    """
    rows = {name: {"class_name": "Block"} for name in ["", "blocks", *BLOCKS]}
    steps = [Step(index=0, kind="unprofiled", seconds=100 * MS, phases={"forward": 100 * MS})]
    steps += [
        Step(
            index=index,
            kind="module_timing",
            seconds=100 * MS,
            phases={},
            cpu_user=(100 - (lost or 0)) * MS,
            cpu_system=0.0,
            cpu_lost=None if lost is None else lost * MS,
        )
        for index in range(1, n + 1)
    ]
    cells = [product(name, "aten::mm", "forward", macs=1000, bytes_moved=10) for name in BLOCKS]
    made = clocked(
        profile(rows, cells, run=run(kind="training", **facts), steps=tuple(steps)),
        {(name, "forward"): (slow if name == SLOW else 10) * MS for name in BLOCKS},
    )

    def spreading(seconds: TimingStats | None) -> TimingStats | None:
        return seconds and TimingStats(
            median=seconds.median,
            low=seconds.median * (1 - spread / 2),
            high=seconds.median * (1 + spread / 2),
            n=n,
        )

    modules = {
        name: replace(
            module,
            **{
                phase: replace(module.work(phase), seconds=spreading(module.work(phase).seconds))
                for phase in PHASES
            },
        )
        for name, module in made.modules.items()
    }
    return analyze(replace(made, modules=modules))


def names(analysis: Analysis) -> list[str]:
    """Of the accused."""
    return [each.module for each in analysis.outliers.found]


def test_a_slow_block_is_named_with_its_excess() -> None:
    """15 ms where the others take 10: 5 % of the step."""
    (found,) = said(15).outliers.found
    assert (SLOW, 5) == (found.module, found.others)
    assert (15 * MS, 10 * MS) == pytest.approx((found.seconds, found.usual_seconds))
    assert said(15).outliers.caveat is None


@pytest.mark.parametrize("slow", [10, 11.9])
def test_less_than_a_fifth_more_is_nothing(slow: float) -> None:
    """Blocks at the ends of a stack take a tenth more than the others in clean trainings."""
    assert ([], None) == (names(said(slow)), said(slow).outliers.caveat)


def test_the_threshold_is_a_share_of_the_step_and_not_of_what_has_a_time() -> None:
    """Nothing but the blocks has a time here. 300 us of a step of 111 ms are 0.3 %, though they are three times what the others take."""
    rows = {name: {"class_name": "Block"} for name in ["", "blocks", *BLOCKS]}
    step = Step(index=0, kind="unprofiled", seconds=111 * MS, phases={"forward": 111 * MS})
    own = {(name, "forward"): (0.45 if name == SLOW else 0.15) * MS for name in BLOCKS}
    cells = [product(name, "aten::mm", "forward", macs=1000, bytes_moved=10) for name in BLOCKS]
    assert [] == names(
        analyze(clocked(profile(rows, cells, run=run(kind="training"), steps=(step,)), own))
    )  # type: ignore[arg-type]


def with_recompute(given: Profile) -> Profile:
    """Each block, and all above it, has a call of recompute without a time, as a fused attention's second product has."""
    modules = {
        name: replace(each, recompute=replace(each.recompute, calls=1, seconds=None))
        for name, each in given.modules.items()
    }
    return replace(given, modules=modules)


def test_a_block_with_attention_can_be_accused() -> None:
    """The phase without a time is within backward, so it hides neither the block's time nor the step's."""
    assert [SLOW] == names(analyze(with_recompute(said(15).profile)))
    assert [] == names(analyze(with_recompute(said(10.4).profile)))


def test_three_hooked_steps_are_too_few() -> None:
    """There is a doubt where something seems slow, and else there is none."""
    assert ([], "few_steps") == (names(said(15, n=3)), said(15, n=3).outliers.caveat)
    assert said(10, n=3).outliers.caveat is None


def test_steps_that_vary_accuse_nobody() -> None:
    """Quartiles 60 % of 15 ms apart are an error of 0.93 * 9 ms * sqrt(8) / 7 = 3.4 ms.

    Four of these are more than 5 ms.
    """
    assert ([], "varied") == (names(said(15, spread=0.6)), said(15, spread=0.6).outliers.caveat)


@pytest.mark.parametrize(
    ("lost", "accused"), [(0, [SLOW]), (4, [SLOW]), (6, []), (60, []), (None, [SLOW])]
)
def test_what_other_processes_took_is_no_excess(lost: float | None, accused: list[str]) -> None:
    """6 of 100 ms of CPU time explain an excess of 5 % of the step, 4 do not.

    Nothing is known outside of Linux.
    """
    found = said(15, lost=lost)
    assert (accused, None if accused else "busy") == (names(found), found.outliers.caveat)


def test_on_a_gpu_the_processor_is_no_excuse() -> None:
    """The modules' time is the stream's."""
    assert [SLOW] == names(said(15, lost=60, device_type="cuda"))


def test_times_that_are_far_off_are_a_doubt() -> None:
    """Modules' times were scaled by 3."""
    far = replace(
        said(15).profile, notes=(Note(code="time_scaled", subject="", values={"forward": 3.0}),)
    )
    assert ([], "scaled") == (names(analyze(far)), analyze(far).outliers.caveat)
