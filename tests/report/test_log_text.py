"""Test what a window writes to the log, for handmade profiles.

One of them has too much of everything.
"""

from msgspec.structs import replace

import lflops
from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.notes import Note
from lflops.profile.profile import UnsupportedCall
from lflops.profile.records import Rank, RankWait
from lflops.report.diff import headline
from lflops.report.log_text import log_text
from tests.support.profile_builders import (
    clocked,
    profile,
    run,
    small_comparison,
    small_profile,
    spread,
    untimed,
)
from tests.support.screens import gpt_training

MOST = 40
CHIP = Hardware("abacus", {"fp32": 1e9}, bandwidth_bytes_per_second=1e9, memory_bytes=64 * 2**30)


def lines_of(text: str) -> dict[str, str]:
    """Return the first line of each label."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        found.setdefault(line[:16].strip(), " ".join(line[16:].split()))
    return found


def test_the_step_its_phases_and_the_modules_are_there() -> None:
    """The log has the step, its phases, the slowest module, ranks and unsupported operators.

    Forward takes 1 of 3 ms. The first layer has 3 operator calls of 100 µs, which is a tenth of the
    step, for 2 * 1024 FLOPs.
    """
    found = lines_of(log_text(analyze(small_profile())))
    assert "Model, training, fit, step 8, window 0" == found["profiled"]
    assert "3.00 ms of one unprofiled step" == found["step"]
    assert "1.00 ms 33.3 % of the step" == found["forward"]
    assert "encoder.0 Linear 300 µs 10.0 % 6.83 MFLOP/s" == found["most time"]
    assert found["MFU"].startswith("– the peak of cpu is unknown")
    assert found["peak live memory"].startswith("2.93 KiB, of these activations ")
    assert "1 of 2 reported; missing: 1" == found["ranks"]
    assert found["not counted"].startswith("my_ops::scan")


def test_the_verdict_says_why_and_what_next() -> None:
    """The log has the findings, a fix and the confidence.

    Backward takes 1.5 ms of 3 ms, of which three operator calls of 100 µs belong to modules.
    """
    given = small_profile()
    found = lines_of(log_text(analyze(replace(given, run=replace(given.run, hardware=CHIP)))))
    assert (
        "23.3 % of the step (700 µs) is spent in Model itself, outside its layers, or between "
        "the model and backward."
    ) == found["why"]
    assert "40.0 % of the step (1.20 ms) is spent in backward, outside the layers." == found["also"]
    assert found["next"].startswith(
        "Keep .item(), image logging, prints and Python loops out of the model's forward"
    )
    assert found["verdict"].startswith("A step takes 3.00 ms, at ")
    assert found["confidence"].startswith("1 unprofiled step; ")


def test_without_a_peak_the_wait_for_data_is_named() -> None:
    """The data wait of 2 of 3 ms is named although no peak is known."""
    given = small_profile()
    waiting = replace(given.steps[0], phases={"data": 2e-3, "forward": 1e-3})
    found = lines_of(log_text(analyze(replace(given, steps=(waiting,)))))
    assert "66.7 % of the step (2.00 ms) is spent waiting for data." == found["why"]
    assert found["next"].startswith("Load batches in DataLoader workers")


def test_a_window_with_too_much_of_everything_is_cut() -> None:
    """The text has at most `MOST` lines, and says what is left out.

    The profile has 100 modules, 50 unsupported operators, 30 notes, and 64 ranks that wait for each
    other.
    """
    names = [f"layer_{number}" for number in range(100)]
    given = clocked(
        profile({"": {}, **{name: {"class_name": "Linear"} for name in names}}, []),
        {(name, "forward"): 1e-3 for name in names},
    )
    phases = dict.fromkeys(
        ("data", "transfer", "forward", "backward", "clip", "optimizer", "other"), 0.5
    )
    (step, *_) = small_profile().steps
    wait = RankWait(
        module="", phase="backward", for_rank=0, ranks=1, seconds=1.0, longest=1.0, longest_rank=0
    )
    waits = tuple(replace(wait, for_rank=n) for n in range(64))
    rank = Rank(
        rank=0,
        node="0",
        host="h",
        device="d",
        coordinates={},
        status="ok",
        step=spread(1.0),
        macs=0,
    )
    ranks = tuple(replace(rank, rank=n, macs=n) for n in range(64))
    unsupported = tuple(
        UnsupportedCall(module="", operator=f"my::op_{n}", phase="forward", calls=1, bytes=1)
        for n in range(50)
    )
    worst = replace(
        given,
        run=run(kind="training", stage="train", window=0, step=1, world_size=64, hardware=CHIP),
        steps=(replace(step, seconds=3.5, phases=phases, tokens=9),),
        unsupported=unsupported,
        notes=tuple(Note(code="ended_early", subject=str(n), values={}) for n in range(30)),
        ranks=ranks,
        rank_comparison=replace(small_comparison(), waits=waits),
    )
    text = log_text(analyze(worst))
    assert MOST >= len(text.splitlines())
    assert "95 other modules" in text
    assert "and 48 more operators  48 calls, 48 B" in text
    assert "28 more notes, see lflops show" in text


def test_a_window_without_times_has_its_work() -> None:
    """If the run ended before an unprofiled step, the log has the work but no times."""
    text = log_text(analyze(untimed(small_profile())))
    assert {"profiled", "peak live memory"} <= lines_of(text).keys()
    assert not {"step", "most time", "why"} & lines_of(text).keys()


def test_names_of_modules_do_not_drive_the_terminal() -> None:
    """Control characters in names, which come from the user, are not printed."""
    given = clocked(
        profile({"": {}, "\x1b[31m": {"class_name": "Linear"}}, []), {("\x1b[31m", "forward"): 1e-3}
    )
    assert "\x1b" not in log_text(analyze(given))


def test_a_window_says_what_changed_since_the_one_before() -> None:
    """The log of a second window has the first sentence of its comparison with the first window.

    One layer takes five times as long in the second window.
    """
    first = gpt_training()
    second = gpt_training(slow=5.0)
    assert "vs last window" not in lines_of(log_text(analyze(first)))
    changed = lines_of(log_text(analyze(second), first))["vs last window"]
    assert changed == " ".join(headline(lflops.diff(first, second))[0].split())
    assert changed.startswith("The step")
