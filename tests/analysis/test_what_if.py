"""What-ifs of a profile whose times are round figures."""

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
    """A time without a spread."""
    return TimingStats(median=seconds, low=seconds, high=seconds, n=5)


def profile(**phases: float) -> Profile:
    """Of two equal layers: a step of 100 s, in which the first layer has 10 s of forward and 20 s of backward."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    found = lflops.count(model, torch.zeros(2, 4), backward=True)
    phases = PHASES | phases
    steps = tuple(
        Step(index=index, kind="unprofiled", seconds=sum(phases.values()), phases=phases)
        for index in range(5)
    )
    timed = {("0", "forward"): 10.0, ("0", "backward"): 20.0, ("", "recompute"): 8.0}
    works = {
        ModulePhase(row, phase): replace(found.modules[row].work(phase), seconds=of(seconds))  # type: ignore[arg-type]
        for (row, phase), seconds in timed.items()
    }
    return replace(found, steps=steps, modules=with_works(found.modules, works))


@pytest.mark.parametrize(
    ("question", "seconds"),
    [
        ({}, 100.0),
        ({"without": "data"}, 80.0),
        ({"without": ["data", "other"]}, 70.0),
        ({"scale": {"data": 0.5}}, 90.0),
        (
            {"without": "0"},
            100.0 - 10 - 20 - 10 / 2,
        ),  # its weight is half of what the optimizer updates
        ({"scale": {"0": 2.0}}, 130.0),
        ({"without": "recompute"}, 92.0),
        ({"batch": 2}, 190.0),  # all but the optimizer
        ({"accumulation": 3}, 280.0),
        ({"without": "data", "batch": 2}, 150.0),
    ],
    ids=str,
)
def test_the_seconds_of_a_change_are_those_of_its_phases(question: Any, seconds: float) -> None:
    """Which are round figures."""
    found = what_if(profile(), **question)
    assert found.seconds == pytest.approx(seconds)
    assert found.measured == pytest.approx(100.0)
    assert found.low < seconds < found.high
    assert sum(found.phases.values()) == pytest.approx(seconds)


def test_the_interval_is_the_error_of_the_change_and_of_any_step() -> None:
    """The wait is 20 s, and the step is 80 s afterwards.

    Errors add up as the sides of a right angle.
    """
    error = ((ERRORS["phase"] * 20) ** 2 + (STEP_ERROR * 80) ** 2) ** 0.5
    found = what_if(profile(), without="data")
    assert (found.low, found.high) == pytest.approx((80 - error, 80 + error))


def test_another_chip_shortens_what_its_peak_and_bandwidth_bound() -> None:
    """Twice as fast in both: known work halves, and what is slower than the chip allows may stay.

    The wait for data does.
    """
    given = profile()
    given = replace(given, run=replace(given.run, hardware=SLOW, dtype="float32"))
    found = what_if(given, hardware=Hardware("fast", {"fp32": 2e3}, 2e3))
    assert found.phases["data"] == 20.0
    assert 10.0 <= found.phases["forward"] < 20.0
    assert 20.0 <= found.phases["backward"] < 40.0
    assert found.low < found.seconds < 100.0


def test_another_chip_by_hand() -> None:
    """Four times the peak and twice the bandwidth, for a forward of 20 s and a backward of 40 s, 32 MACs and 96 MACs.

    At 8 FLOP/s the products take 8 s and 24 s. Each layer moves 24 numbers of 4 bytes or more,
    which 1e9 bytes/s hides. What is left, 12 s and 16 s, is slower than the chip allows: at best a
    quarter of it stays, at worst all. The optimizer moves bytes: half of it at best.
    """
    given = profile(data=20.0, other=10.0)
    given = replace(
        given, run=replace(given.run, hardware=Hardware("a", {"fp32": 8.0}, 1e9), dtype="float32")
    )
    macs = given.total(phase="forward"), given.total(phase="backward")
    assert macs == (2 * 2 * 4 * 4, 3 * 2 * 4 * 4)  # the first layer's input needs no gradient
    products, rest = 2 * sum(macs) / 8, 60.0 - 2 * sum(macs) / 8
    low, high = (products / 4 + rest / 4) / 60, (products / 4 + rest) / 60
    found = what_if(given, hardware=Hardware("b", {"fp32": 32.0}, 2e9))
    middle, off = (low + high) / 2, (high - low) / 2
    assert found.phases == pytest.approx(
        {"data": 20, "forward": 20 * middle, "backward": 40 * middle, "optimizer": 7.5, "other": 10}
    )
    error = (
        (20 * off) ** 2 + (40 * off) ** 2 + (10 * 0.25) ** 2 + (STEP_ERROR * found.seconds) ** 2
    ) ** 0.5
    assert (found.low, found.high) == pytest.approx((found.seconds - error, found.seconds + error))


def test_times_of_a_busy_machine_are_doubted(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Others had a third of the CPU time that was needed; of a quiet machine nothing is said."""
    given = profile()
    hooked = Step(
        index=9, kind="module_timing", seconds=100.0, phases={}, cpu_lost=30.0, cpu_user=60.0
    )
    busy = replace(given, steps=(*given.steps, hooked), run=replace(given.run, device_type="cpu"))
    assert what_if(busy, without="data").caveats == ("busy",)
    assert what_if(given, without="data").caveats == ()
    busy.save(tmp_path / "train.profile.json")
    assert 0 == main(["what-if", str(tmp_path), "--without", "data"])  # the last window of a folder
    assert b"unreliable: " in (drawn := capfdbinary.readouterr().out)
    assert b"other processes took 33 % of the CPU time" in drawn


def test_modules_that_were_timed_too_roughly_are_doubted_where_one_is_asked_for() -> None:
    """Their times were scaled by three."""
    note = Note(code="time_scaled", subject="", values={"forward": 3.0})
    rough = replace(profile(), notes=(note,))
    assert what_if(rough, without="0").caveats == ("modules",)
    assert what_if(rough, without="data").caveats == ()


def test_exposed_communication_may_be_replaced_by_another_wait() -> None:
    """Ten seconds of waiting: gone at best, and still there at worst."""
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
        ({"without": "1"}, "what_if: '1' was not timed"),
        ({"without": ["", "0"]}, "what_if: '0' is inside '': pass only one of the two"),
        (
            {"scale": {"data": -1}},
            "what_if: scale['data']=-1: pass a factor for its time, 0 or more",
        ),
        ({"batch": 0}, "what_if: batch=0: pass a factor for the number of samples"),
        ({"accumulation": 1.5}, "what_if: accumulation=1.5: pass a whole number, at least 1"),
        ({"without": "communication"}, "what_if: 'communication' was not timed"),
        (
            {"hardware": "H200 SXM"},
            "what_if: hardware= needs the peaks and bandwidths of both chips",
        ),
    ],
    ids=str,
)
def test_a_wrong_question_is_named(question: Any, message: str) -> None:
    """With what is taken."""
    with pytest.raises(lflops.ProfileError) as error:
        what_if(profile(), **question)
    assert message in str(error.value)


def test_a_profile_without_times_is_refused() -> None:
    """A count has none."""
    with pytest.raises(lflops.ProfileError, match="has no unprofiled step"):
        what_if(replace(profile(), steps=()), without="data")


def test_the_shell_answers_in_one_line(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as JSON."""
    monkeypatch.chdir(tmp_path)
    profile().save("profile.json")
    assert 0 == main(["what-if", "profile.json", "--without", "data", "--scale", "other=0.5"])
    assert capfdbinary.readouterr().out.startswith(b"about 75.0 s per step (")
    assert 0 == main(["what-if", "profile.json", "--accumulation", "3", "--json"])
    assert json.loads(capfdbinary.readouterr().out)["seconds"] == pytest.approx(280)
    assert 0 != main(["what-if", "profile.json", "--scale", "data"])
    assert b"--scale data: pass a name" in capfdbinary.readouterr().err
