"""Test the predicted step times of `what_if`, with a profile whose times are round numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import lflops
from lflops.analysis.what_if import ERRORS, STEP_ERROR, what_if
from lflops.cli.main import main
from lflops.hardware.chips import Hardware
from lflops.profile.notes import Note
from lflops.profile.profile import Profile, with_works
from lflops.profile.records import ModulePhase, TimingStats
from lflops.profile.steps import Step

PHASES = {"data": 20.0, "forward": 20.0, "backward": 40.0, "optimizer": 10.0, "other": 10.0}
SLOW = Hardware("slow", {"fp32": 1e3}, 1e3)


def of(seconds: float) -> TimingStats:
    """Return the statistics of five equal times."""
    return TimingStats(median=seconds, low=seconds, high=seconds, n=5)


def profile(**phases: float) -> Profile:
    """Return the profile of a model with two equal layers and a step of 100 s.

    The first layer takes 10 s of forward and 20 s of backward. `phases` are seconds of phases that
    differ from `PHASES`.
    """
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    found = lflops.count(model, torch.zeros(2, 4), backward=True)
    phases = PHASES | phases
    steps = tuple(
        Step(index=index, kind="unprofiled", seconds=sum(phases.values()), phases=phases)
        for index in range(5)
    )
    timed = {("0", "forward"): 10.0, ("0", "backward"): 20.0, ("", "recompute"): 8.0}
    works = {}
    for (row, phase), seconds in timed.items():
        work = found.modules[row].work(phase)  # type: ignore[arg-type]
        place = ModulePhase(row, phase)  # type: ignore[arg-type]
        works[place] = replace(work, seconds=of(seconds))
    return replace(found, steps=steps, modules=with_works(found.modules, works))


@pytest.mark.parametrize(
    ("question", "seconds"),
    [
        ({}, 100.0),
        ({"without": "data"}, 80.0),
        ({"without": ["data", "other"]}, 70.0),
        ({"scale": {"data": 0.5}}, 90.0),
        # The layer has half of the weights, so half of the optimizer's time is saved as well.
        ({"without": "0"}, 100.0 - 10 - 20 - 10 / 2),
        ({"scale": {"0": 2.0}}, 130.0),
        ({"without": "recompute"}, 92.0),
        # The time of the optimizer does not depend on the number of samples or batches.
        ({"batch": 2}, 190.0),
        ({"accumulation": 3}, 280.0),
        ({"without": "data", "batch": 2}, 150.0),
    ],
    ids=str,
)
def test_the_seconds_of_a_change_are_those_of_its_phases(question: Any, seconds: float) -> None:
    """The predicted seconds follow from `PHASES` and the times of the first layer.

    They lie within the interval, and the phases add up to them.
    """
    found = what_if(profile(), **question)
    assert found.seconds == pytest.approx(seconds)
    assert found.measured == pytest.approx(100.0)
    assert found.low < seconds < found.high
    assert sum(found.phases.values()) == pytest.approx(seconds)


def test_the_interval_is_the_error_of_the_change_and_of_any_step() -> None:
    """The removed wait of 20 s and the remaining step of 80 s each have an error.

    The interval has the root of the sum of their squares.
    """
    error = ((ERRORS["phase"] * 20) ** 2 + (STEP_ERROR * 80) ** 2) ** 0.5
    found = what_if(profile(), without="data")
    assert (found.low, found.high) == pytest.approx((80 - error, 80 + error))


def test_another_chip_shortens_what_its_peak_and_bandwidth_bound() -> None:
    """With twice the peak and bandwidth, the known work takes half the time.

    The rest of forward and backward may stay as it is, so they become shorter, but not shorter than
    half. The wait for data does not change.
    """
    given = profile()
    given = replace(given, run=replace(given.run, hardware=SLOW, dtype="float32"))
    found = what_if(given, hardware=Hardware("fast", {"fp32": 2e3}, 2e3))
    assert found.phases["data"] == 20.0
    assert 10.0 <= found.phases["forward"] < 20.0
    assert 20.0 <= found.phases["backward"] < 40.0
    assert found.low < found.seconds < 100.0


def test_another_chip_by_hand() -> None:
    """The times on a chip with four times the peak and twice the bandwidth, worked out by hand.

    Forward and backward take 60 s, and the peak of 8 FLOP/s needs 2 * (64 + 96) / 8 = 40 s of them
    for the matmuls. The bytes take almost no time at 1e9 bytes/s. The other 20 s are inefficient
    kernels: on the new chip, they take a quarter of this time at best, and all of it at worst. The
    optimizer moves bytes, so its 10 s become 5 s at best.
    """
    given = profile(data=20.0, other=10.0)
    slow = Hardware("a", {"fp32": 8.0}, 1e9)
    given = replace(given, run=replace(given.run, hardware=slow, dtype="float32"))
    forward_macs = given.total(phase="forward")
    backward_macs = given.total(phase="backward")
    assert forward_macs == 2 * 2 * 4 * 4
    # The first layer's input needs no gradient, so backward has three matmuls.
    assert backward_macs == 3 * 2 * 4 * 4

    matmul_seconds = 2 * (forward_macs + backward_macs) / 8
    rest = 60.0 - matmul_seconds
    # The remaining share of forward and backward.
    low = (matmul_seconds / 4 + rest / 4) / 60
    high = (matmul_seconds / 4 + rest) / 60
    middle = (low + high) / 2
    found = what_if(given, hardware=Hardware("b", {"fp32": 32.0}, 2e9))
    assert found.phases == pytest.approx(
        {"data": 20, "forward": 20 * middle, "backward": 40 * middle, "optimizer": 7.5, "other": 10}
    )

    share_error = (high - low) / 2
    errors = (20 * share_error, 40 * share_error, 10 * 0.25, STEP_ERROR * found.seconds)
    error = sum(each**2 for each in errors) ** 0.5
    assert (found.low, found.high) == pytest.approx((found.seconds - error, found.seconds + error))


def test_times_of_a_busy_machine_are_doubted(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """There is a caveat if other programs took a third of the needed CPU time, and else none."""
    given = profile()
    hooked = Step(
        index=9, kind="module_timing", seconds=100.0, phases={}, cpu_lost=30.0, cpu_user=60.0
    )
    busy = replace(given, steps=(*given.steps, hooked), run=replace(given.run, device_type="cpu"))
    assert what_if(busy, without="data").caveats == ("busy",)
    assert what_if(given, without="data").caveats == ()
    busy.save(tmp_path / "train.profile.json")
    # The command reads the last window of a folder.
    assert 0 == main(["what-if", str(tmp_path), "--without", "data"])
    printed = capfdbinary.readouterr().out
    assert b"unreliable: " in printed
    assert b"other processes took 33 % of the CPU time" in printed


def test_modules_that_were_timed_too_roughly_are_doubted_where_one_is_asked_for() -> None:
    """Module times that were scaled by 3 lead to a caveat if the question is about a module."""
    note = Note(code="time_scaled", subject="", values={"forward": 3.0})
    rough = replace(profile(), notes=(note,))
    assert what_if(rough, without="0").caveats == ("modules",)
    assert what_if(rough, without="data").caveats == ()


def test_exposed_communication_may_be_replaced_by_another_wait() -> None:
    """The ten seconds of waiting are saved at best. At worst, another wait takes their place."""
    given = profile()
    given = replace(given, steps=tuple(replace(step, waiting=10.0) for step in given.steps))
    found = what_if(given, without="communication")
    assert found.seconds == pytest.approx(90.0)
    assert found.high > 100.0


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (
            {"without": "dat"},
            (
                "what_if: 'dat' is not part of this profile: pass the name of a module, or one of "
                "data, forward"
            ),
        ),
        ({"without": "1"}, "what_if: the module '1' was not timed"),
        ({"without": ["", "0"]}, "what_if: '0' is inside '': pass only one of the two"),
        (
            {"scale": {"data": -1}},
            "what_if: scale['data']=-1: pass a factor of at least 0 for the time of 'data'",
        ),
        ({"batch": 0}, "what_if: batch=0: pass a factor above 0 for the number of samples"),
        ({"accumulation": 1.5}, "what_if: accumulation=1.5: pass a whole number, at least 1"),
        ({"without": "communication"}, "what_if: the communication of this run was not timed"),
        (
            {"hardware": "H200 SXM"},
            "what_if: hardware= needs the peak FLOP/s and the bandwidths of the profiled chip and of the new chip",
        ),
    ],
    ids=str,
)
def test_a_wrong_question_is_named(question: Any, message: str) -> None:
    """The error names the wrong argument and the accepted values."""
    with pytest.raises(lflops.ProfileError) as error:
        what_if(profile(), **question)
    assert message in str(error.value)


def test_a_profile_without_times_is_refused() -> None:
    """A profile of a count has no steps, so there is nothing to predict from."""
    with pytest.raises(
        lflops.ProfileError, match="has no step that was timed while nothing was profiled"
    ):
        what_if(replace(profile(), steps=()), without="data")


def test_the_shell_answers_in_one_line(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command prints one sentence, or JSON, or the reason why its arguments are wrong."""
    monkeypatch.chdir(tmp_path)
    profile().save("profile.json")
    assert 0 == main(["what-if", "profile.json", "--without", "data", "--scale", "other=0.5"])
    assert capfdbinary.readouterr().out.startswith(b"about 75.0 s per step (")
    assert 0 == main(["what-if", "profile.json", "--accumulation", "3", "--json"])
    assert json.loads(capfdbinary.readouterr().out)["seconds"] == pytest.approx(280)
    assert 0 != main(["what-if", "profile.json", "--scale", "data"])
    assert b"--scale data: pass the name" in capfdbinary.readouterr().err
