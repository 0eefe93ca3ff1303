"""What a window writes to the log, by hand.

Of a profile made for it, and of one that has too much of everything.
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
    """The first line of each label."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        found.setdefault(line[:16].strip(), " ".join(line[16:].split()))
    return found


def test_the_step_its_phases_and_the_modules_are_there() -> None:
    """Of 3 ms: forward 1; the first layer took 3 operator calls of 100 µs, a tenth of the step, for 2 * 1024 FLOPs."""
    found = lines_of(log_text(analyze(small_profile())))
    assert "Model, training, fit, step 8, window 0" == found["profiled"]
    assert ("3.00 ms of one unprofiled step", "1.00 ms 33.3 % of the step") == (
        found["step"],
        found["forward"],
    )
    assert "encoder.0 Linear 300 µs 10.0 % 6.83 MFLOP/s" == found["most time"]
    assert found["MFU"].startswith("– the peak of cpu is not known")
    assert found["peak live memory"].startswith("2.93 KiB, of these activations ")
    assert "1 of 2 reported; missing: 1" == found["ranks"]
    assert found["not counted"].startswith("my_ops::scan")


def test_the_verdict_says_why_and_what_next() -> None:
    """Backward takes 1.5 of 3 ms, of which the modules have three calls of 100 µs."""
    given = small_profile()
    found = lines_of(log_text(analyze(replace(given, run=replace(given.run, hardware=CHIP)))))
    assert (
        "23.3 % of the step (700 µs) is spent in Model itself, outside its layers, or between it and backward."
        == found["why"]
    )
    assert "40.0 % of the step (1.20 ms) is backward outside the layers." == found["also"]
    assert found["next"].startswith(
        "Keep .item(), images, prints and loops in Python out of the model's forward"
    )
    assert found["verdict"].startswith("A step takes 3.00 ms, at ")
    assert found["confidence"].startswith("1 unprofiled step; ")


def test_without_a_peak_the_wait_for_data_is_named() -> None:
    """2 of 3 ms."""
    given = small_profile()
    waiting = replace(given.steps[0], phases={"data": 2e-3, "forward": 1e-3})
    found = lines_of(log_text(analyze(replace(given, steps=(waiting,)))))
    assert "66.7 % of the step (2.00 ms) is spent waiting for data." == found["why"]
    assert found["next"].startswith("Use more DataLoader workers")


def test_a_window_with_too_much_of_everything_is_cut() -> None:
    """100 modules, 50 operators without a formula, 30 notes and 64 ranks that wait for each other."""
    names = [f"layer_{number}" for number in range(100)]
    given = clocked(
        profile({"": {}, **{name: {"class_name": "Linear"} for name in names}}, []),
        {(name, "forward"): 1e-3 for name in names},
    )
    phases = dict.fromkeys(
        ("data", "transfer", "forward", "backward", "clip", "optimizer", "other"), 0.5
    )
    (step, *_) = small_profile().steps
    waits = tuple(
        RankWait(
            module="",
            phase="backward",
            for_rank=n,
            ranks=1,
            seconds=1.0,
            longest=1.0,
            longest_rank=0,
        )
        for n in range(64)
    )
    worst = replace(
        given,
        run=run(kind="training", stage="train", window=0, step=1, world_size=64, hardware=CHIP),
        steps=(replace(step, seconds=3.5, phases=phases, tokens=9),),
        unsupported=tuple(
            UnsupportedCall(module="", operator=f"my::op_{n}", phase="forward", calls=1, bytes=1)
            for n in range(50)
        ),
        notes=tuple(Note(code="ended_early", subject=str(n), values={}) for n in range(30)),
        ranks=tuple(
            Rank(
                rank=n,
                node="0",
                host="h",
                device="d",
                coordinates={},
                status="ok",
                step=spread(1.0),
                macs=n,
            )
            for n in range(64)
        ),
        rank_comparison=replace(small_comparison(), waits=waits),
    )
    text = log_text(analyze(worst))
    assert MOST >= len(text.splitlines())
    assert "95 other modules" in text
    assert "and 48 more operators  48 calls, 48 B" in text
    assert "28 more, see lflops show" in text


def test_a_window_without_times_has_its_work() -> None:
    """The run ended before a clean step."""
    text = log_text(analyze(untimed(small_profile())))
    assert {"profiled", "peak live memory"} <= lines_of(text).keys()
    assert not {"step", "most time", "why"} & lines_of(text).keys()


def test_names_of_modules_do_not_drive_the_terminal() -> None:
    """They come from the user."""
    given = clocked(
        profile({"": {}, "\x1b[31m": {"class_name": "Linear"}}, []), {("\x1b[31m", "forward"): 1e-3}
    )
    assert "\x1b" not in log_text(analyze(given))


def test_a_window_says_what_changed_since_the_one_before() -> None:
    """In the second one layer takes five times as long; the first has nothing to be compared with."""
    first, second = gpt_training(), gpt_training(slow=5.0)
    assert "since the last" not in lines_of(log_text(analyze(first)))
    changed = lines_of(log_text(analyze(second), first))["since the last"]
    assert changed == " ".join(headline(lflops.diff(first, second))[0].split())
    assert changed.startswith("The step")
