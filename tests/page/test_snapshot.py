"""The page of a snapshot of CUDA's memory, in a real browser."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lflops
from lflops.cli.main import main
from tests.support.browser import Seen
from tests.support.malicious_names import IMAGE
from tests.support.memory_snapshots import BUILD, Recorder, forward

MIB = 2**20


def test_a_snapshot_is_a_timeline_and_a_treemap_down_to_stacks(
    opening: Callable[..., Seen], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters are 2 MiB and activations 6 MiB at the peak, of which 4 MiB are of line 31.

    Then the activations are freed.
    """
    recorder = Recorder()
    recorder.allocate(MIB, BUILD, 2)
    made = recorder.allocate(2 * MIB, forward(31), 2) + recorder.allocate(
        2 * MIB, [("/app/more.py", 7, IMAGE), *forward(32)]
    )
    recorder.free(made)
    file, page = tmp_path / "snapshot.pickle", tmp_path / "page.html"
    file.write_bytes(pickle.dumps(recorder.snapshot()))
    assert 0 == main(["memory", str(file), "--html", str(page)])
    assert f"{page}\n" == capsys.readouterr().out
    seen = opening(page.as_uri())
    tiles = seen.page.locator(".treemap .tile")
    tiles.first.wait_for()
    assert [page.as_uri()] == seen.asked
    assert ["activations 6.00 MiB", "parameters 2.00 MiB"] == seen.page.locator(
        ".treemap-head"
    ).all_inner_texts()
    lines = seen.page.get_by_role("table", name="by line of code").locator("tbody tr")
    assert [
        ["activations", "model.py:31 forward", "2", "4.00 MiB", "50.0 %"],
        ["parameters", "module.py:1329 convert", "2", "2.00 MiB", "25.0 %"],
        ["activations", f"more.py:7 {IMAGE}", "1", "2.00 MiB", "25.0 %"],
    ] == sorted(
        (row.locator("td").all_inner_texts() for row in lines.all()),
        key=lambda row: (row[3] < "4", row[1]),
    )
    slider = seen.page.get_by_role("slider")
    assert (
        seen.page.locator(".timeline-caption")
        .inner_text()
        .startswith(f"8.00 MiB at the peak, in alloc of more.py:7 {IMAGE}, forward, entry 10")
    )
    slider.press("End")
    assert (
        seen.page.locator(".timeline-caption")
        .inner_text()
        .startswith("2.00 MiB after free_requested")
    )
    seen.page.get_by_label("group the treemap by").select_option("file")
    assert {"model.py 4.00 MiB", "module.py 2.00 MiB", "more.py 2.00 MiB"} == set(
        seen.page.locator(".treemap-head").all_inner_texts()
    )
    tiles.first.click()
    assert (
        "/app/train.py:12 training_step" in seen.page.get_by_label("stack", exact=True).inner_text()
    )
    assert 0 == seen.page.locator("img").count()


def test_a_failure_is_marked_where_it_was(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """8 MiB were alive before, 5 MiB when 9 more were asked for."""
    recorder = Recorder()
    recorder.allocate(5 * MIB, BUILD)
    recorder.free(recorder.allocate(3 * MIB, forward(31)))
    recorder.fail(9 * MIB, forward(40))
    file, page = tmp_path / "snapshot.pickle", tmp_path / "page.html"
    file.write_bytes(pickle.dumps(recorder.snapshot()))
    assert 0 == main(["memory", str(file), "--html", str(page)])
    seen = opening(page.as_uri())
    assert (
        seen.page.locator(".timeline-caption")
        .inner_text()
        .startswith("5.00 MiB at the failure, in oom of model.py:40 forward")
    )
    assert ["failure 5.00 MiB"] == seen.page.locator(".mark-label").all_text_contents()
    assert "Alive at the failure" in seen.page.locator("h2").all_inner_texts()


def test_modules_are_those_of_the_profile(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """A layer whose result of 16 rows has 64 bytes for each.

    The parameters of 1 MiB were there before the step.
    """
    profile = lflops.count(nn.Sequential(nn.Linear(4, 16)), torch.zeros(16, 4), backward=True)
    profile.save(saved := tmp_path / "step.profile.json")
    recorder = Recorder()
    recorder.allocate(MIB, BUILD)
    recorder.forget()
    recorder.allocate(16 * 64, forward(31))
    file, page = tmp_path / "snapshot.pickle", tmp_path / "page.html"
    file.write_bytes(pickle.dumps(recorder.snapshot()))
    assert 0 == main(["memory", str(file), "--profile", str(saved), "--html", str(page)])
    seen = opening(page.as_uri())
    table = seen.page.get_by_role("table", name="by module")
    table.wait_for()
    assert ["module", "forward", "peak"] == table.locator("th").all_inner_texts()
    rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    assert [
        ["before this step", "1.00 MiB", "1.00 MiB"],
        ["0, made in forward", "1.00 KiB", "1.00 KiB"],
    ] == rows


def test_json_or_the_snapshot_itself_is_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, and the snapshot is still there."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(Recorder().snapshot()))
    for arguments, said in (
        (["--html", str(file)], "this file is the snapshot"),
        (["--html", str(tmp_path / "x"), "--json"], "--json writes no page"),
    ):
        assert 2 == main(["memory", str(file), *arguments])
        assert said in capsys.readouterr().err
    assert pickle.loads(file.read_bytes()) == Recorder().snapshot()  # noqa: S301 - written above
