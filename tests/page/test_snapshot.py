"""Test in a browser the page of a CUDA memory snapshot."""

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
    """The page shows the peak by category, by line of code and by file, and the memory over time.

    At the peak, parameters have 2 MiB and activations 6 MiB, 4 MiB of them from line 31. At the
    end, the activations are freed.
    """
    recorder = Recorder()
    recorder.allocate(MIB, BUILD, 2)
    made = recorder.allocate(2 * MIB, forward(31), 2)
    made += recorder.allocate(2 * MIB, [("/app/more.py", 7, IMAGE), *forward(32)])
    recorder.free(made)
    file = tmp_path / "snapshot.pickle"
    page = tmp_path / "page.html"
    file.write_bytes(pickle.dumps(recorder.snapshot()))
    assert 0 == main(["memory", str(file), "--html", str(page)])
    assert f"{page}\n" == capsys.readouterr().out
    seen = opening(page.as_uri())
    tiles = seen.page.locator(".treemap .tile")
    tiles.first.wait_for()
    assert [page.as_uri()] == seen.asked
    heads = seen.page.locator(".treemap-head")
    assert ["activations 6.00 MiB", "parameters 2.00 MiB"] == heads.all_inner_texts()
    table = seen.page.get_by_role("table", name="by line of code").locator("tbody tr")
    lines = [row.locator("td").all_inner_texts() for row in table.all()]
    # Two lines have 2 MiB, in any order, so the lines are sorted by code.
    lines.sort(key=lambda line: (line[3] < "4", line[1]))
    assert [
        ["activations", "model.py:31 forward", "2", "4.00 MiB", "50.0 %"],
        ["parameters", "module.py:1329 convert", "2", "2.00 MiB", "25.0 %"],
        ["activations", f"more.py:7 {IMAGE}", "1", "2.00 MiB", "25.0 %"],
    ] == lines
    caption = seen.page.locator(".timeline-caption")
    at_peak = f"8.00 MiB at the peak, in alloc of more.py:7 {IMAGE}, forward, entry 10"
    assert caption.inner_text().startswith(at_peak)
    seen.page.get_by_role("slider").press("End")
    assert caption.inner_text().startswith("2.00 MiB after free_requested")
    seen.page.get_by_label("group the treemap by").select_option("file")
    by_file = {"model.py 4.00 MiB", "module.py 2.00 MiB", "more.py 2.00 MiB"}
    assert by_file == set(heads.all_inner_texts())
    tiles.first.click()
    stack = seen.page.get_by_label("stack", exact=True)
    assert "/app/train.py:12 training_step" in stack.inner_text()
    assert 0 == seen.page.locator("img").count()


def test_a_failure_is_marked_where_it_was(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """A failed allocation is marked, and the page shows the memory at the failure.

    When 9 MiB were requested, 5 MiB were alive. Earlier, 8 MiB had been alive.
    """
    recorder = Recorder()
    recorder.allocate(5 * MIB, BUILD)
    recorder.free(recorder.allocate(3 * MIB, forward(31)))
    recorder.fail(9 * MIB, forward(40))
    file = tmp_path / "snapshot.pickle"
    page = tmp_path / "page.html"
    file.write_bytes(pickle.dumps(recorder.snapshot()))
    assert 0 == main(["memory", str(file), "--html", str(page)])
    seen = opening(page.as_uri())
    caption = seen.page.locator(".timeline-caption").inner_text()
    assert caption.startswith("5.00 MiB at the failure, in oom of model.py:40 forward")
    assert ["failure 5.00 MiB"] == seen.page.locator(".mark-label").all_text_contents()
    assert "Alive at the failure" in seen.page.locator("h2").all_inner_texts()


def test_modules_are_those_of_the_profile(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """With a profile, the memory of the snapshot is divided among modules.

    The result of the layer has 16 rows of 64 bytes. The parameters of 1 MiB were allocated before
    the recorded step.
    """
    profile = lflops.count(nn.Sequential(nn.Linear(4, 16)), torch.zeros(16, 4), backward=True)
    saved = tmp_path / "step.profile.json"
    profile.save(saved)
    recorder = Recorder()
    recorder.allocate(MIB, BUILD)
    recorder.forget()
    recorder.allocate(16 * 64, forward(31))
    file = tmp_path / "snapshot.pickle"
    page = tmp_path / "page.html"
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
    """Invalid arguments are an error of one line, and the snapshot is not overwritten."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(Recorder().snapshot()))
    for arguments, said in (
        (["--html", str(file)], "is the snapshot itself"),
        (["--html", str(tmp_path / "x"), "--json"], "--json writes no HTML file"),
    ):
        assert 2 == main(["memory", str(file), *arguments])
        assert said in capsys.readouterr().err
    assert pickle.loads(file.read_bytes()) == Recorder().snapshot()  # noqa: S301 - written above
