import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, Trace
from lflops.profile.steps import Step
from lflops.report.payload.payload import Payload, payload
from tests.support.profile_builders import (
    product,
    profile,
    run,
    small_profile,
    untimed,
    weights,
    with_seconds,
)

MODULES = ["", "encoder", "encoder.0", "encoder.1", "head"]


def as_read(given: Profile) -> Any:
    """What arrives at the page."""
    return json.decode(json.encode(payload(analyze(given))))


def test_counts_are_columns_in_the_order_of_the_modules() -> None:
    """512 MACs in the encoder's linear layer, 128 in the head.

    All below a module is in its total, and its own are what it did itself.
    """
    columns = as_read(small_profile())["modules"]
    assert MODULES == columns["name"]
    assert [640, 512, 512, 0, 128] == columns["forward.macs"]
    assert [0, 0, 512, 0, 128] == columns["forward.self_macs"]
    assert [768, 512, 512, 0, 256] == columns["backward.macs"]
    assert [178, 144, 144, 0, 34] == columns["parameters"]
    assert ["Model", "Sequential", "Linear", "GELU", "Linear"] == columns["kind"]


def test_a_time_is_the_median_and_null_where_it_is_unknown() -> None:
    """100 µs an operator call.

    Three in forward, one of them the head's; the encoder itself ran none, and nothing was computed
    again.
    """
    columns = as_read(small_profile())["modules"]
    assert pytest.approx([3e-4, 2e-4, 1e-4, 1e-4, 1e-4]) == columns["forward.seconds"]
    assert [None, None, pytest.approx(1e-4), pytest.approx(1e-4), pytest.approx(1e-4)] == columns[
        "forward.self_seconds"
    ]
    assert columns["recompute.seconds"] is None


def test_what_all_modules_have_alike_is_said_once() -> None:
    """No collective moved a byte in forward, nothing is compiled.

    The only module's name is a list all the same.
    """
    columns = as_read(small_profile())["modules"]
    assert (0, False, 1) == (columns["forward.comm_bytes"], columns["compiled"], columns["calls"])
    alone = as_read(profile({"": weights(3)}, []))["modules"]
    assert ([""], 3) == (alone["name"], alone["parameters"])


def test_a_count_beyond_what_the_page_can_hold_is_a_text() -> None:
    """The last odd number that a double holds is a number; from 2^53 on all digits are kept."""
    macs = {"": 2**53 - 1 + 2**53 + 1, "a": 2**53 - 1, "b": 2**53 + 1}
    huge = profile(
        {"": {}, "a": {}, "b": {}},
        [product(name, "aten::mm", "forward", macs=macs[name], bytes_moved=1) for name in "ab"],
    )
    assert [str(2**54), 2**53 - 1, "9007199254740993"] == as_read(huge)["modules"]["forward.macs"]


def test_where_nothing_was_counted_no_count_is_known() -> None:
    """A window of times alone: the zeros of its work are not shown as such."""
    times = replace(small_profile(), notes=(Note(code="not_counted", subject="", values={}),))
    shown = as_read(times)
    assert [None] * 5 == [shown["modules"][f"{phase}.macs"] for phase in PHASES]
    assert "MACs" not in {fact["label"] for fact in shown["report"]["model"]}


def test_the_spread_of_ranks_is_the_module_s_worst() -> None:
    """The head takes 300 µs on the slow rank and 200 µs on the median one: half as much again.

    Of the others nothing is known.
    """
    assert [None, None, None, None, pytest.approx(0.5)] == as_read(small_profile())["modules"][
        "rank_spread"
    ]


def timed() -> Payload:
    """One product of 1000 MACs on a chip of 10 kFLOP/s, in a clean step of 1 s, half of which is forward."""
    step = Step(
        index=0, kind="unprofiled", seconds=1.0, phases={"data": 0.25, "forward": 0.5}, samples=4
    )
    counted = profile(
        {"": {"class_name": "Linear"}},
        [product("", "aten::mm", "forward", macs=1000, bytes_moved=1)],
        run=run(
            kind="training",
            stage="train",
            window=1,
            step=7,
            partial=True,
            hardware=Hardware("abacus", {"fp32": 1e4}),
        ),
        steps=(step,),
    )
    return payload(analyze(with_seconds(counted)))


def test_the_facts_say_what_was_reached() -> None:
    """2 * 1000 FLOPs in 1 s, of 10 kFLOP/s: 20 %."""
    facts = {fact.name: fact for fact in timed().report.speed}
    assert ("20.0 %", "4.00", "1.00 s") == tuple(
        facts[name].text for name in ("MFU", "samples/s", "step")
    )
    assert ("2.00 kFLOP/s", "2 × MACs of forward") == (
        facts["achieved"].text,
        facts["achieved"].remark,
    )


def test_the_step_is_cut_into_its_phases_and_its_budget() -> None:
    """Phases as the step tells them, and the quarter of it that is in none.

    The breakdown's parts add up to 1, and each says what helps.
    """
    shown = timed()
    parts = [fact for fact in shown.report.speed if fact.of == "step"]
    assert [("data", 0.25, 0.25), ("forward", 0.5, 0.5), ("other", 0.25, 0.25)] == [
        (part.name, part.value, part.share) for part in parts
    ]
    assert pytest.approx(1.0) == sum(part.share for part in shown.report.breakdown)
    assert all(part.advice for part in shown.report.breakdown)
    assert (True, "Linear, train", "window 1, step 7") == (
        shown.partial,
        shown.title,
        shown.head.when,
    )


def test_what_is_missing_is_said() -> None:
    """Without times there are no phases and no breakdown, but a reason.

    What was not counted and the ranks' notes are doubts.
    """
    shown = payload(analyze(untimed(small_profile())))
    assert ((), ()) == (shown.report.speed, shown.report.breakdown)
    assert shown.report.why_no_breakdown
    doubts = [fact.text for fact in shown.report.remarks if fact.is_caveat]
    assert any("my_ops::scan" in text for text in doubts)
    assert (
        1 == shown.report.verdict.caveats
    )  # the rank's note: the line about confidence says itself that an operator is not counted
    assert 2 == len(doubts)
    nothing = payload(analyze(profile({"": {}}, []))).report.remarks
    assert not [fact for fact in nothing if fact.is_caveat and fact.label == "not counted"]


def test_a_side_of_a_comparison_says_how_sure_its_times_are() -> None:
    """Quartiles a tenth of 100 µs on either side, over 3 steps: 0.93 * 20 µs * sqrt(3) / 2 = 16.1 µs.

    One clean step has no error.
    """
    side = as_read(small_profile())["compare"]
    assert [None, None, 1.611e-5, 1.611e-5, 1.611e-5] == side["times"]["forward.self_error"]
    assert [3, 2, 1, 1, 1] == side["times"]["forward.calls"]
    assert (
        [3e-3, None],
        {"data": [2e-4, None], "forward": [1e-3, None], "backward": [1.5e-3, None]},
    ) == (side["step"], side["phases"])
    assert (True, ["forward", "backward", "optimizer", "other"], 3000) == (
        side["counted"],
        side["phases_ran"],
        side["peak_bytes"],
    )
    assert ("training", "ddp", 2) == tuple(
        side["facts"][fact] for fact in ("kind", "strategy", "world_size")
    )


def test_the_version_comes_first() -> None:
    """Whoever reads a part of it can tell what it is."""
    assert json.encode(payload(analyze(small_profile()))).startswith(b'{"lflops":4,"head":{')


def test_traces_are_named_as_they_are_reached_from_a_folder() -> None:
    """From the run's own to one beside it.

    Without a folder as the profile has them; without a trace there is none.
    """
    traced = replace(
        small_profile(),
        trace=Trace(
            files={
                "0": "logs/a/lflops_traces/w/h_0.pt.trace.json.gz",
                "3": "logs/b.pt.trace.json.gz",
            }
        ),
    )
    seen = [(each.rank, each.file) for each in payload(analyze(traced), Path("logs/a")).traces]
    assert [("0", "lflops_traces/w/h_0.pt.trace.json.gz"), ("3", "../b.pt.trace.json.gz")] == seen
    assert [*traced.trace.files.values()] == [each.file for each in payload(analyze(traced)).traces]
    assert () == payload(analyze(replace(traced, trace=None))).traces


LOADED = """
import sys
from lflops.analysis.analysis import analyze
from lflops.profile.json_file import load
from lflops.report.payload.payload import payload
from msgspec import json
json.encode(payload(analyze(load(sys.argv[1]))))
print(*{"rich", "matplotlib", "torch", "lightning"} & sys.modules.keys())
"""


def test_making_a_payload_loads_neither_rich_nor_matplotlib(tmp_path: Path) -> None:
    """In a fresh process, of a profile that has something for every view."""
    small_profile().save(tmp_path / "small.json")
    command = [sys.executable, "-c", LOADED, tmp_path / "small.json"]
    assert "\n" == subprocess.run(command, check=True, capture_output=True, text=True).stdout
