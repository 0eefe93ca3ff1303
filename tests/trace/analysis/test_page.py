"""Test the page of a trace: its charts, and that it is one file without scripts or requests."""

import re
from pathlib import Path

import pytest

from lflops.cli.main import main
from lflops.trace.analysis.page import trace_page
from lflops.trace.analysis.summary import summarise_all
from tests.support.traces_by_hand import TraceByHand, small_gpu_trace


def page(folder: Path, *traces: TraceByHand) -> str:
    """Return the page of the traces."""
    return trace_page(summarise_all([trace.read(folder) for trace in traces]))


def test_the_verdict_and_every_table_are_in_it(tmp_path: Path) -> None:
    """The page has the verdict and all tables that the terminal has."""
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


def test_a_card_says_how_much_a_fix_saves_at_most(tmp_path: Path) -> None:
    """In each of two steps, the device is idle for 500 ns and only communicates for 150 ns.

    In 400 of the 500 idle nanoseconds of the trace, the host runs Python. A fix of this cause saves
    four fifths of the idle time.
    """
    text = page(tmp_path, small_gpu_trace())
    savings = re.findall('<span class="saving">(.*?)</span>', text)
    assert ["−400 ns", "−150 ns", "−50 ns"] == savings
    causes = re.findall('<b class="cause">(.*?)</b>', text)
    assert causes[0].startswith("Idle device, mostly while the host")
    assert "Communication that does not overlap with computation" == causes[1]


def test_bars_are_as_long_as_their_nanoseconds(tmp_path: Path) -> None:
    """The lengths of the bars are the nanoseconds.

    Of 1500 ns, 600 are computing, 300 are communication, 100 are copies, and 500 are idle. Each
    step of 1000 ns has a bar. The bar of categories has 1100 ns, because 50 ns of each step's
    matmul run at the same time as the collective.
    """
    text = page(tmp_path, small_gpu_trace())
    bars = re.findall(r'<div class="stack">(.*)</div>\n', text)
    lengths = [list(map(int, re.findall(r"flex: (\d+) 1 0", bar))) for bar in bars]
    first, work, second, *steps = lengths
    assert [600, 300, 100, 500] == first
    assert (1100, 500) == (sum(work), sum(second))
    assert [[300, 150, 50, 500]] * 2 == [bar[:4] for bar in steps]


def test_a_trace_of_the_host_has_a_chart_of_where_its_step_goes(tmp_path: Path) -> None:
    """The page of a trace without a device has a chart of the host's step; its tables are folded.

    In each of two steps of 1000 ns, mm takes 300 ns, add takes 100 ns, and 600 ns are between
    operators.
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
    lengths = []
    for step in steps:
        lengths += re.findall(r"flex: (\d+) 1 0", step)
    assert ["1000"] * 2 == lengths
    assert text.count("<table>") == text.count("<details>") > 1


def test_only_what_is_the_same_looks_alike_in_its_charts(tmp_path: Path) -> None:
    """In the charts, each state, category and cause of idle time has one look, and no other has it.

    The states of communication and copies look like the categories with the same meaning.
    """
    text = page(tmp_path, small_gpu_trace())
    swatches = re.findall(r'<span class="swatch" style="background: (.*?)"></span>(.*?):', text)
    same = {"communicating only": "communication", "copying only": "copy"}
    pairs = {(same.get(name, name), look) for look, name in swatches}
    names = {name for name, _ in pairs}
    looks = {look for _, look in pairs}
    assert 9 == len(pairs) == len(names) == len(looks)


def test_it_is_one_file_without_a_script(tmp_path: Path) -> None:
    """The page has nothing that a browser would load or run."""
    text = page(tmp_path, small_gpu_trace())
    assert "default-src 'none'" in text
    assert not re.search(r"<script|https?://|url\(|@import|src=|\bon\w+=", text)


def test_names_from_a_file_are_text(tmp_path: Path) -> None:
    """HTML in the names of kernels, devices and ranges is escaped."""
    bad = '<img src=x onerror="alert(1)">\x00'
    trace = TraceByHand(deviceProperties=[{"id": 0, "name": bad}])
    trace.kernel(bad, 0, 10, launch=(-20, -10))
    trace.event("user_annotation", bad, -30, 50)
    text = page(tmp_path, trace)
    assert "<img" not in text
    assert 3 <= text.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;")


def test_ranks_and_traces_of_the_host_have_their_sections(tmp_path: Path) -> None:
    """The page of two ranks begins with the rank that arrives last.

    The page of a trace without a device says that it has no device work.
    """
    ranks = []
    for rank, length in enumerate((200, 50)):
        trace = TraceByHand(distributedInfo={"rank": rank, "world_size": 2})
        trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, length)
        ranks.append(trace)
    text = page(tmp_path, *ranks)
    last_rank = text.index("Rank 1 arrives last at 1 of 1 collective")
    verdict = "is communication that does not overlap with computation; 0 % is computing"
    assert last_rank < text.index(verdict)
    host = TraceByHand()
    host.operator("aten::mm", 0, 10)
    assert "no device work" in page(tmp_path, host)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--html` writes the page, but not over a trace, and not together with `--json`."""
    trace = small_gpu_trace().write(tmp_path / "a.json")
    out = tmp_path / "deep" / "a.html"
    assert 0 == main(["trace", "show", str(trace), "--html", str(out)])
    assert f"{out}\n" == capsys.readouterr().out
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert 2 == main(["trace", "show", str(trace), "--html", str(trace)])
    assert "is a trace itself" in capsys.readouterr().err
    assert 2 == main(["trace", "show", str(trace), "--html", str(out), "--json"])
