"""Test the payload of the page: module columns, facts, phases, breakdown and comparison."""

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
    """Return the payload of a profile as the page reads it."""
    return json.decode(json.encode(payload(analyze(given))))


def test_counts_are_columns_in_the_order_of_the_modules() -> None:
    """Each count is a column in the order of the modules, with and without submodules.

    The linear layer of the encoder has 512 MACs in forward, and the head has 128.
    """
    columns = as_read(small_profile())["modules"]
    assert MODULES == columns["name"]
    assert [640, 512, 512, 0, 128] == columns["forward.macs"]
    assert [0, 0, 512, 0, 128] == columns["forward.self_macs"]
    assert [768, 512, 512, 0, 256] == columns["backward.macs"]
    assert [178, 144, 144, 0, 34] == columns["parameters"]
    assert ["Model", "Sequential", "Linear", "GELU", "Linear"] == columns["kind"]


def test_a_time_is_the_median_and_null_where_it_is_unknown() -> None:
    """A time is the median in seconds, or null if it is unknown.

    In `small_profile`, an operator call takes 100 µs. Forward has three calls, one of them in the
    head. The encoder itself runs no operator, and nothing was recomputed.
    """
    columns = as_read(small_profile())["modules"]
    assert pytest.approx([3e-4, 2e-4, 1e-4, 1e-4, 1e-4]) == columns["forward.seconds"]
    assert [None, None] == columns["forward.self_seconds"][:2]
    assert pytest.approx([1e-4, 1e-4, 1e-4]) == columns["forward.self_seconds"][2:]
    assert columns["recompute.seconds"] is None


def test_what_all_modules_have_alike_is_said_once() -> None:
    """A column in which all modules have the same value is this value instead of a list.

    If there is only one module, its name is a list nevertheless.
    """
    columns = as_read(small_profile())["modules"]
    assert 0 == columns["forward.comm_bytes"]
    assert columns["compiled"] is False
    assert 1 == columns["calls"]
    alone = as_read(profile({"": weights(3)}, []))["modules"]
    assert [""] == alone["name"]
    assert 3 == alone["parameters"]


def test_a_count_beyond_what_the_page_can_hold_is_a_text() -> None:
    """Counts of 2^53 and more are strings with all digits; smaller counts are numbers."""
    cells = [
        product("a", "aten::mm", "forward", macs=2**53 - 1, bytes_moved=1),
        product("b", "aten::mm", "forward", macs=2**53 + 1, bytes_moved=1),
    ]
    huge = profile({"": {}, "a": {}, "b": {}}, cells)
    assert [str(2**54), 2**53 - 1, "9007199254740993"] == as_read(huge)["modules"]["forward.macs"]


def test_where_nothing_was_counted_no_count_is_known() -> None:
    """Without a counting step, counts are null instead of 0."""
    times = replace(small_profile(), notes=(Note(code="not_counted", subject="", values={}),))
    shown = as_read(times)
    assert [None] * 5 == [shown["modules"][f"{phase}.macs"] for phase in PHASES]
    assert "MACs" not in {fact["label"] for fact in shown["report"]["model"]}


def test_the_spread_of_ranks_is_the_module_s_worst() -> None:
    """The rank spread of a module is the excess of its slowest rank over the median rank.

    The head takes 300 µs on the slowest rank and 200 µs on the median rank. For all other modules
    the spread is unknown.
    """
    spread = as_read(small_profile())["modules"]["rank_spread"]
    assert [None, None, None, None, pytest.approx(0.5)] == spread


def timed() -> Payload:
    """Return the payload of one matmul of 1,000 MACs, on a chip of 10 kFLOP/s.

    The step takes 1 s, half of it forward.
    """
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
    """The step of 1 s has 2,000 FLOPs of possible 10,000, so MFU is 20 %."""
    facts = {fact.name: fact for fact in timed().report.speed}
    assert "20.0 %" == facts["MFU"].text
    assert "4.00" == facts["samples/s"].text
    assert "1.00 s" == facts["step"].text
    assert "2.00 kFLOP/s" == facts["achieved"].text
    assert "2 × MACs of forward" == facts["achieved"].remark


def test_the_step_is_cut_into_its_phases_and_its_budget() -> None:
    """The phases and the breakdown of the step add up to the step.

    A quarter of the step is in no phase, so it is `other`. Each part of the breakdown has advice.
    """
    shown = timed()
    parts = [fact for fact in shown.report.speed if fact.of == "step"]
    assert [("data", 0.25, 0.25), ("forward", 0.5, 0.5), ("other", 0.25, 0.25)] == [
        (part.name, part.value, part.share) for part in parts
    ]
    assert pytest.approx(1.0) == sum(part.share for part in shown.report.breakdown)
    assert all(part.advice for part in shown.report.breakdown)
    assert shown.partial is True
    assert "Linear, train" == shown.title
    assert "window 1, step 7" == shown.head.when


def test_what_is_missing_is_said() -> None:
    """Without times there are no phases and no breakdown, but a reason.

    Unsupported operators and the notes of ranks are caveats.
    """
    shown = payload(analyze(untimed(small_profile())))
    assert () == shown.report.speed
    assert () == shown.report.breakdown
    assert shown.report.why_no_breakdown
    caveats = [fact.text for fact in shown.report.remarks if fact.is_caveat]
    assert any("my_ops::scan" in text for text in caveats)
    # Only the note of the rank: the line about confidence itself reports the unsupported operator.
    assert 1 == shown.report.verdict.caveats
    assert 2 == len(caveats)
    nothing = payload(analyze(profile({"": {}}, []))).report.remarks
    assert not [fact for fact in nothing if fact.is_caveat and fact.label == "not counted"]


def test_a_side_of_a_comparison_says_how_sure_its_times_are() -> None:
    """The data for comparisons has the standard errors of self times.

    With quartiles 10 % around the median of 100 µs in 3 steps, the error is 0.93 * 20 µs * sqrt(3)
    / 2 = 16.1 µs. The only unprofiled step has no error.
    """
    side = as_read(small_profile())["compare"]
    assert [None, None, 1.611e-5, 1.611e-5, 1.611e-5] == side["times"]["forward.self_error"]
    assert [3, 2, 1, 1, 1] == side["times"]["forward.calls"]
    assert [3e-3, None] == side["step"]
    phases = {"data": [2e-4, None], "forward": [1e-3, None], "backward": [1.5e-3, None]}
    assert phases == side["phases"]
    assert side["counted"] is True
    assert ["forward", "backward", "optimizer", "other"] == side["phases_ran"]
    assert 3000 == side["peak_bytes"]
    assert "training" == side["facts"]["kind"]
    assert "ddp" == side["facts"]["strategy"]
    assert 2 == side["facts"]["world_size"]


def test_the_version_comes_first() -> None:
    """The format is the first field, so a reader of the first bytes can identify the payload."""
    assert json.encode(payload(analyze(small_profile()))).startswith(b'{"lflops":4,"head":{')


def test_traces_are_named_as_they_are_reached_from_a_folder() -> None:
    """Paths of traces are relative to the given folder, even if the trace is outside of it.

    Without a folder, they are the paths of the profile.
    """
    files = {
        "0": "logs/a/lflops_traces/w/h_0.pt.trace.json.gz",
        "3": "logs/b.pt.trace.json.gz",
    }
    traced = replace(small_profile(), trace=Trace(files=files))
    seen = [(each.rank, each.file) for each in payload(analyze(traced), Path("logs/a")).traces]
    assert [("0", "lflops_traces/w/h_0.pt.trace.json.gz"), ("3", "../b.pt.trace.json.gz")] == seen
    assert [*files.values()] == [each.file for each in payload(analyze(traced)).traces]
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
    """A new process that makes a payload does not import rich, matplotlib, torch or Lightning."""
    small_profile().save(tmp_path / "small.json")
    command = [sys.executable, "-c", LOADED, tmp_path / "small.json"]
    assert "\n" == subprocess.run(command, check=True, capture_output=True, text=True).stdout
