"""The page of a trace: what it draws, and that it is one file without a script or a request."""

import re
from pathlib import Path

import pytest

from lflops.cli.main import main
from lflops.trace.analysis.page import trace_page
from lflops.trace.analysis.summary import summarise_all
from tests.support.traces_by_hand import TraceByHand, small_gpu_trace


def page(folder: Path, *traces: TraceByHand) -> str:
    """The page of traces."""
    return trace_page(summarise_all([trace.read(folder) for trace in traces]))


def test_the_verdict_and_every_table_are_in_it(tmp_path: Path) -> None:
    """As on a terminal: states, idle time, steps, categories, kernels, operators with their shapes."""
    text = page(tmp_path, small_gpu_trace())
    assert '<p class="first">33.3 % of the GPU&#x27;s 1.50 µs is idle' in text
    headings = re.findall("<h2>(.*?)</h2>", text)
    wanted = [
        "timeline",
        "idle time by cause",
        "streams",
        "steps",
        "kernels",
        "operators",
        "operators with their shapes",
        "collectives",
    ]
    assert set(wanted) <= set(headings)
    assert "mm 2×3 3×4" in text


def test_bars_are_as_long_as_their_nanoseconds(tmp_path: Path) -> None:
    """Of 1500 ns 600 compute, 300 communicate, 100 copy, 500 are idle.

    Each step of 1000 ns has its own line.

    By category it is 1100 ns: 50 ns of each step's product run beside the collective.
    """
    text = page(tmp_path, small_gpu_trace())
    bars = re.findall(r'<div class="stack">(.*)</div>\n', text)
    first, work, second, *steps = [
        list(map(int, re.findall(r"flex: (\d+) 1 0", bar))) for bar in bars
    ]
    assert [600, 300, 100, 500] == first
    assert (1100, 500) == (sum(work), sum(second))
    assert [[300, 150, 50, 500]] * 2 == [bar[:4] for bar in steps]


def test_a_trace_of_the_host_has_a_chart_of_where_its_step_goes(tmp_path: Path) -> None:
    """Two steps of 1000 ns: in each mm takes 300 ns itself, add 100 ns, and 600 ns are between operators.

    Tables are folded below.
    """
    trace = TraceByHand()
    for step in (0, 1000):
        trace.step(step // 1000, step, step + 1000)
        trace.operator("aten::mm", step + 100, step + 400)
        trace.operator("aten::add", step + 500, step + 600)
    text = page(tmp_path, trace)
    bar, *steps = re.findall(r'<div class="stack">(.*)</div>\n', text)
    assert [("300", "gemm"), ("100", "pointwise"), ("600", "between operators")] == re.findall(
        r'flex: (\d+) 1 0.*?title="(.*?)"', bar
    )
    assert ["1000"] * 2 == [each for step in steps for each in re.findall(r"flex: (\d+) 1 0", step)]
    assert text.count("<table>") == text.count("<details>") > 1


def test_only_what_is_the_same_looks_alike_in_its_charts(tmp_path: Path) -> None:
    """Of states, categories and causes of idle time."""
    swatches = re.findall(
        r'<span class="swatch" style="background: (.*?)"></span>(.*?):',
        page(tmp_path, small_gpu_trace()),
    )
    same = {"communicating only": "communication", "copying only": "copy"}
    looks = {(same.get(name, name), look) for look, name in swatches}
    assert 9 == len(looks) == len({name for name, _ in looks}) == len({look for _, look in looks})


def test_it_is_one_file_without_a_script(tmp_path: Path) -> None:
    """Nothing that a browser would fetch or run."""
    text = page(tmp_path, small_gpu_trace())
    assert "default-src 'none'" in text
    assert not re.search(r"<script|https?://|url\(|@import|src=|\bon\w+=", text)


def test_names_from_a_file_are_text(tmp_path: Path) -> None:
    """A kernel, a device and a scope that are markup."""
    bad = '<img src=x onerror="alert(1)">\x00'
    trace = TraceByHand(deviceProperties=[{"id": 0, "name": bad}])
    trace.kernel(bad, 0, 10, launch=(-20, -10))
    trace.event("user_annotation", bad, -30, 50)
    text = page(tmp_path, trace)
    assert "<img" not in text
    assert 3 <= text.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;")


def test_ranks_and_traces_of_the_host_have_their_sections(tmp_path: Path) -> None:
    """Two ranks begin with who comes last; a trace without a device says so."""
    ranks = []
    for rank, length in enumerate((200, 50)):
        ranks.append(TraceByHand(distributedInfo={"rank": rank, "world_size": 2}))
        ranks[-1].kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, length)
    text = page(tmp_path, *ranks)
    assert text.index("Rank 1 arrives last at 1 of 1 collective") < text.index(
        "is communication that does not overlap with computation; 0 % is computing"
    )
    host = TraceByHand()
    host.operator("aten::mm", 0, 10)
    assert "no device work" in page(tmp_path, host)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And never over a trace, nor beside JSON."""
    trace, out = small_gpu_trace().write(tmp_path / "a.json"), tmp_path / "deep" / "a.html"
    assert 0 == main(["trace", "show", str(trace), "--html", str(out)])
    assert f"{out}\n" == capsys.readouterr().out
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert 2 == main(["trace", "show", str(trace), "--html", str(trace)])
    assert "is a trace itself" in capsys.readouterr().err
    assert 2 == main(["trace", "show", str(trace), "--html", str(out), "--json"])
