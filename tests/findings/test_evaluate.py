"""Test the costs of findings if ranks wait for each other: no second is part of two findings.

The expected values are worked out by hand.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.analysis.step_breakdown import step_breakdown
from lflops.analysis.step_times import step_times
from lflops.analysis.utilization import utilization_at
from lflops.findings.evaluate import candidates_of_step
from lflops.findings.evidence import StepEvidence
from lflops.hardware.chips import Hardware
from lflops.profile.profile import Communication, Profile
from lflops.profile.records import Phase, Straggler, Trace
from lflops.profile.steps import Step
from lflops.ranks.straggler import Stragglers
from tests.support.profile_builders import clocked, product, profile, run

CHIP = Hardware("chip", {"fp32": 1000.0}, None)
"""1 FLOP takes a thousandth of a second."""

OWN: dict[tuple[str, Phase], float] = {
    ("", "forward"): 0.25,
    ("linear", "forward"): 0.75,
    ("", "backward"): 1.25,
    ("linear", "backward"): 0.75,
}
"""Self time of each module.

With `waiting=1.0`, the model waits for other ranks in 1 s of the 1.25 s of its own backward.
"""


def waiting(**fields: Any) -> Profile:
    """Return the profile of one unprofiled step of 4 s.

    At the peak of the chip, the matmuls of `linear` need 0.1 s in forward and 0.2 s in backward.
    `fields` are fields of the step, such as `waiting`.
    """
    phases = {"forward": 1.0, "backward": 2.0, "optimizer": 1.0}
    cells = [
        product("linear", "aten::addmm", "forward", macs=50, bytes_moved=0),
        product("linear", "aten::mm", "backward", macs=100, bytes_moved=0),
    ]
    rows: dict[str, dict[str, Any]] = {
        "": {"class_name": "Model"},
        "linear": {"class_name": "Linear"},
    }
    step = Step(index=0, kind="unprofiled", seconds=4.0, phases=phases, **fields)
    return clocked(
        profile(
            rows, cells, run=run(kind="training", hardware=CHIP, device_type="cpu"), steps=(step,)
        ),
        OWN,
    )


def evidence(given: Profile, **lost: Any) -> StepEvidence:
    """Return the evidence of a profile. With `lost`, rank 1 is a straggler with these fields."""
    facts: dict[str, Any] = {
        "modules": 1,
        "slow_rank": 1,
        "pattern": "steady",
        "slow_steps": 9,
        "steps": 9,
        "seconds": 2.0,
        "usual": 1.0,
    }
    rows = (Straggler(**facts | lost),) if lost else ()
    times = step_times(given)
    return StepEvidence(
        profile=given,
        times=times,
        utilization=utilization_at(given, CHIP, times),
        stragglers=Stragglers(rows=rows, step_seconds=4.0),
        patterns={},
        children={"": ["linear"], "linear": []},
    )


def found(given: Profile, **lost: Any) -> dict[str, float | None]:
    """Return the seconds of each candidate, by the name of its rule."""
    candidates = candidates_of_step(evidence(given, **lost))
    return {candidate.rule.name: candidate.seconds for candidate in candidates}


def test_waiting_for_other_ranks_is_no_work_of_the_model() -> None:
    """The wait of 1 s is communication, and is not in the time outside the layers.

    The layers take 1.5 s and need 0.3 s. Outside the layers, forward takes 0.25 s and backward
    1.25 s, which includes the wait.
    """
    expected = {"inefficient_kernels": 1.2, "communication": 1.0, "optimizer": 1.0, "outside": 0.5}
    assert pytest.approx(expected) == found(waiting(waiting=1.0))
    assert pytest.approx({"inefficient_kernels": 1.2, "optimizer": 1.0, "outside": 1.5}) == found(
        waiting()
    )


def test_parts_of_the_budget_add_up_with_the_waiting() -> None:
    """The parts of 4 s: 0.3 s of ideal compute, 1 s each for wait and optimizer, and 1.7 s left."""
    given = waiting(waiting=1.0)
    divided = step_breakdown(given, CHIP, step_times(given))
    assert divided is not None
    expected = {
        "ideal_compute": 0.3,
        "inefficient_kernels": 1.7,
        "communication": 1.0,
        "optimizer": 1.0,
    }
    assert pytest.approx(expected) == {name: share * 4 for name, share in divided.parts.items()}


def test_collectives_within_modules_are_no_work_of_theirs() -> None:
    """Collectives inside a module, as under FSDP, are communication and not time of the module.

    They take 0.5 s of the 0.75 s that `linear` takes in forward, and as much in backward. If they
    seem to take 2 s, only 0.75 s count, because `linear` does not take longer.
    """

    def exchanged(backward: float) -> Profile:
        seconds: dict[Phase, float] = {"forward": 0.5, "backward": backward}
        rows = tuple(
            Communication(
                module="linear",
                phase=phase,
                collective="_allgather_base_",
                group="0",
                group_size=2,
                calls=1,
                bytes=8,
                exposed_seconds=each,
            )
            for phase, each in seconds.items()
        )
        return replace(waiting(), communication=rows, trace=Trace(files={}))

    assert pytest.approx(
        {"inefficient_kernels": 0.2, "communication": 1.0, "optimizer": 1.0, "outside": 1.5}
    ) == found(exchanged(0.5))
    assert {("linear", "forward"): 0.5, ("linear", "backward"): 0.75} == step_times(
        exchanged(2.0)
    ).communicating
    times = analyze(replace(exchanged(0.5), run=replace(exchanged(0.5).run, hardware=None)))
    assert {"linear": 0.5, "Model": 1.5} == {
        each.name or each.kind: pytest.approx(each.seconds) for each in times.busiest
    }
    assert [pytest.approx(1.0)] == [
        each.seconds for each in times.findings if each.cause == "communication"
    ]


@pytest.mark.parametrize(
    ("module", "phase", "lost", "rest"),
    [
        (
            "linear",
            "forward",
            0.5,
            {"inefficient_kernels": 0.7, "communication": 1.0, "optimizer": 1.0, "outside": 0.5},
        ),
        ("linear", "recompute", 1.5, {"communication": 0.7, "optimizer": 1.0, "outside": 0.5}),
        (
            "",
            "backward",
            0.25,
            {"inefficient_kernels": 1.2, "communication": 1.0, "optimizer": 1.0, "outside": 0.25},
        ),
        (
            "",
            "optimizer",
            0.5,
            {"inefficient_kernels": 1.2, "communication": 1.0, "optimizer": 0.5, "outside": 0.5},
        ),
        (
            "",
            "data",
            0.5,
            {"inefficient_kernels": 1.2, "communication": 0.5, "optimizer": 1.0, "outside": 0.5},
        ),
    ],
)
def test_what_a_slow_rank_costs_is_in_no_other_cause(
    module: str, phase: str, lost: float, rest: dict[str, float]
) -> None:
    """The cost of a slow rank is subtracted from the part in which the rank is slow.

    The step is that of a rank that waited. If the part takes less time in this step than the slow
    rank costs, the rest is subtracted from communication.
    """
    assert pytest.approx({"rank": lost} | rest) == found(
        waiting(waiting=1.0), module=module, phase=phase, seconds_lost=lost
    )


BUSY = {"cpu_user": 1.0, "cpu_system": 0.0, "cpu_lost": 3.0}
"""CPU seconds of a step in which other programs took three quarters of the needed CPU time."""


@pytest.mark.parametrize(
    ("fields", "cause", "seconds", "is_issue"),
    [
        ({}, None, 0.5, True),
        ({}, None, 0.15, False),
        (BUSY, None, 0.5, False),
        (BUSY, "thread", 0.5, False),
        (BUSY, None, 1.0, True),
        (BUSY, "work", 0.5, True),
    ],
)
def test_a_slow_rank_must_lose_more_where_others_take_the_cores(
    fields: dict[str, float], cause: str | None, seconds: float, is_issue: bool
) -> None:
    """A slow rank is an issue if it costs at least 5 % of the step of 4 s.

    If other programs leave only a quarter of the CPU time, it must cost 20 %. The threshold is
    still 5 % if the rank has more work, because other programs cannot cause that.
    """
    step = evidence(
        waiting(waiting=1.0, **fields),
        module="linear",
        phase="forward",
        seconds_lost=seconds,
        cause=cause,
    )
    (rank,) = (each for each in candidates_of_step(step) if each.rule.name == "rank")
    assert is_issue == rank.rule.is_issue(rank, step)
