"""Test `lflops trace show`: its text, its JSON, and its error for a file that is no trace."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lflops.cli.main import main
from tests.support.traces_by_hand import TraceByHand, small_gpu_trace


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path, columns: int = 120) -> str:
    """Run `lflops trace show`, which must succeed, and return what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        assert 0 == main(["trace", "show", *map(str, arguments)])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run `lflops trace show`, which must exit with status 2, and return its one line on stderr."""
    assert 2 == main(["trace", "show", *map(str, arguments)])
    captured = capsys.readouterr()
    assert not captured.out
    (line,) = captured.err.splitlines()
    return line


def test_the_verdict_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict is the first line, and the advice follows in the order of the costs.

    Of 1500 ns, 600 are computing, 300 are exposed communication, 100 are exposed copies, and 500
    are idle. In the idle time, the host runs Python before its next launch.
    """
    text = shown(capsys, small_gpu_trace().write(tmp_path / "a.pt.trace.json.gz"))
    verdict = " ".join(text.partition("To reduce")[0].split())
    rest = text.splitlines()
    assert (
        "33.3 % of the GPU's 1.50 µs is idle, mostly while the host runs Python between operators; "
        "20.0 % is communication that does not overlap with computation; 6.7 % is copying that "
        "does not overlap with computation; 40.0 % is computing." == verdict
    )
    advice = ["To reduce the idle time", "To reduce communication", "To hide the time of copies"]
    places = [text.index(each) for each in advice]
    assert sorted(places) == places
    assert "A step takes 1.00 µs (median of 2" in text
    assert "NVIDIA H100 80GB HBM3 (device 0)" in text
    assert "rank              1 (2 ranks in total)" in rest
    assert ["ProfilerStep#0", "1.00", "µs", "30.0", "%", "50.0", "%", "15.0", "%", "5.0", "%"] in [
        line.split() for line in rest
    ]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_it_fits_its_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    """The text fits the width: long names of kernels are cut, but no number is."""
    trace = small_gpu_trace()
    trace.kernel(
        "void at::native::" + "very_long_name<float, 4>" * 20, 1700, 1800, launch=(1660, 1670)
    )
    text = shown(capsys, trace.write(tmp_path / "a.json"), columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    assert any(
        line.startswith("very_") and "100 ns" in line and "…" in line for line in text.splitlines()
    )


def test_json_has_integers_of_nanoseconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON has integers of nanoseconds that add up, and null for unknown values."""
    path = small_gpu_trace().write(tmp_path / "a.json")
    (found,) = json.loads(shown(capsys, path, "--json"))["traces"]
    device = found["device"]
    states = ("computing", "exposed_communication", "exposed_copies", "idle")
    assert device["window"] == sum(device[state] for state in states) == 1500
    assert sum(found["idle"].values()) == device["idle"] == 500
    assert (1, 2, None) == (found["rank"], found["world_size"], found["devices"][0]["memory"])


def test_a_trace_of_the_host_is_shown_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a trace without a device, the first line says that there is no device work."""
    trace = TraceByHand()
    trace.step(0, 0, 1000)
    trace.operator("aten::mm", 10, 60)
    assert "no device work" in shown(capsys, trace.write(tmp_path / "a.json")).splitlines()[0]


def test_names_from_a_file_do_not_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences in the names of kernels, steps, devices and categories are removed."""
    bad = "\x1b]0;x\x07\n[red]"
    trace = TraceByHand(deviceProperties=[{"id": 0, "name": bad}])
    trace.kernel(bad, 0, 10, launch=(-20, -10))
    trace.event("user_annotation", f"ProfilerStep#{bad}", -30, 50)
    trace.event(bad, "x", 0, 1)
    text = shown(capsys, trace.write(tmp_path / "a.json"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert 3 <= text.count("[red]")


def test_several_files_are_shown_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several files are shown in the order in which they are passed."""
    files = [small_gpu_trace().write(tmp_path / f"{name}.json") for name in "ba"]
    text = shown(capsys, *files)
    assert 2 == text.count("of the GPU's 1.50 µs is idle")
    assert text.index("b.json") < text.index("a.json")
    assert 2 == len(json.loads(shown(capsys, *files, "--json"))["traces"])


BAD: dict[str, bytes] = {
    "empty": b"",
    "profile": b'{"version": "1.0", "modules": {}}',
    "truncated": small_gpu_trace().text()[:-400],
    "no events": b'{"traceEvents": []}',
    "time": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": "x", "dur": 1}]}',
    "no time": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "dur": 1}]}',
    "invalid time null": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": null}]}',
    "huge time": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1e300, "dur": 1}]}',
    "arguments": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 1, "args": {"device": "all"}}]}',
}


def test_what_is_odd_is_shown_with_a_remark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unusual events are listed: a negative length, an unknown category, and early work.

    Early work was launched before the recording began.
    """
    trace = small_gpu_trace()
    trace.event("cpu_op", "aten::add", 700, 690)
    trace.event("news", "x", 0, 1)
    trace.event("news", "y", 0, 1)
    trace.kernel("before", -500, -100)
    text = shown(capsys, trace.write(tmp_path / "a.json"))
    assert "clock             1 event with a negative duration, which is treated as 0" in text
    assert "not read          2 events of the unknown category 'news'" in text
    assert "left out          launched before the recording began: 1 kernel, 400 ns" in text


def test_bad_events_are_left_out_with_a_remark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Events that cannot be read are left out, with a line about their number.

    They lack a time, have arguments of the wrong type, or lack a length. Everything else is the
    same as without them.
    """
    trace = small_gpu_trace()
    path = trace.write(tmp_path / "a.json")
    (expected,) = json.loads(shown(capsys, path, "--json"))["traces"]
    del trace.event("cpu_op", "aten::add", 0, 10)["ts"]
    trace.event("cuda_runtime", "cudaLaunchKernel", -9_000_000, 10, correlation="x")
    trace.event("kernel", "gemm", 0, 10)["dur"] = None
    text = shown(capsys, trace.write(path))
    assert (
        "left out          3 events that cannot be read; first error: invalid time nothing: `ts` and `dur` must be "
        "numbers"
    ) in text
    (found,) = json.loads(shown(capsys, path, "--json"))["traces"]
    assert expected | {"damaged": 3, "damage": found["damage"]} == found


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A file that is no trace is an error with exit status 2 and one line that names the file."""
    path = tmp_path / "bad.json"
    path.write_bytes(BAD[kind])
    said = refused(capsys, path)
    assert said.startswith(f"lflops: {path}: is not a torch.profiler trace: ")
    assert "b'" not in said, "Python's bytes are not for people"


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file is an error with its name and the reason."""
    assert f"lflops: {tmp_path}/none.json: cannot be read: No such file or directory" == refused(
        capsys, tmp_path / "none.json"
    )


def test_neither_torch_nor_lightning_is_loaded(tmp_path: Path) -> None:
    """The command imports none of the large packages: torch, lightning, matplotlib and numpy."""
    path = small_gpu_trace().write(tmp_path / "a.json")
    code = (
        "import sys; from lflops.cli.main import main; "
        "status = main(['trace', 'show', sys.argv[1]]);"
        "print(status, sorted("
        "{'torch', 'lightning', 'pytorch_lightning', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code, str(path)]
    run: Any = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "0 []" == run.stdout.splitlines()[-1]


def test_products_are_shown_with_their_rate_and_the_mfu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Matmuls are shown with their rate, and the MFU of the steps.

    Each of two steps of 1000 ns has 24 MACs. In all, there are 96 FLOPs in 600 ns on the device.
    """
    text = shown(capsys, small_gpu_trace().write(tmp_path / "a.json"))
    assert "in bf16 (H100 SXM): 48.00 MFLOP/s in matmuls with known FLOPs, over 2 steps" in text
    line = next(line for line in text.splitlines() if line.startswith("mm 2×3 3×4"))
    assert ["600", "ns", "160.00", "M", "2"] == line.split()[3:8]


def test_another_chip_can_be_judged_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--hardware` selects a chip by its name. An unknown name is an error."""
    path = small_gpu_trace().write(tmp_path / "a.json")
    assert "(A100 SXM 80GB)" in shown(capsys, path, "--hardware", "A100-SXM4-80GB")
    assert "hardware='H1000'" in refused(capsys, path, "--hardware", "H1000")


def test_operators_that_were_not_counted_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator without shapes, whose FLOPs are unknown, is listed as not counted."""
    trace = TraceByHand()
    trace.operator("aten::mm", 0, 100)
    trace.kernel("gemm", 200, 350, launch=(40, 50))
    text = " ".join(shown(capsys, trace.write(tmp_path / "a.json")).split())
    assert (
        "not counted aten::mm, 1 call, 150 ns on the device: the FLOPs are unknown, because "
        "the shapes were not recorded or are not sufficient"
    ) in text


def test_the_roofline_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`lflops roofline` shows the roofs of the chip, and each matmul of a trace below them.

    A call moves 2 * (6 + 12 + 8) bytes, at 3.35 TB/s. `--figure` is only for profiles.
    """
    path = small_gpu_trace().write(tmp_path / "a.pt.trace.json")
    assert 0 == main(["roofline", str(path)])
    text = capsys.readouterr().out
    assert "roof              989.50 TFLOP/s in bf16, 3.35 TB/s: H100 SXM" in text
    assert 0 == main(["roofline", str(path), "--json"])
    (row,) = json.loads(capsys.readouterr().out)["operators"]
    assert 2 * 52 / 3.35e12 == pytest.approx(row["roof_seconds"])
    assert 2 == main(["roofline", str(path), "--figure", str(tmp_path / "a.svg")])
    assert "--figure draws only profiles, but " in capsys.readouterr().err


def test_traces_of_several_ranks_begin_with_who_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the traces of several ranks, the first line says which rank arrives last.

    The all-reduce takes 50 ns on the second rank and 200 ns on the first, which waits for 150 ns.
    """
    files = []
    for rank, length in enumerate((200, 50)):
        trace = TraceByHand(distributedInfo={"rank": rank, "world_size": 2})
        trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, length)
        files.append(trace.write(tmp_path / f"{rank}.json"))
    text = shown(capsys, *files)
    first = (
        "Rank 1 arrives last at 1 of 1 collective; rank 0 waits the longest, 150 ns in "
        "total; the transfers take 50 ns in total."
    )
    assert first == text.splitlines()[0]
    assert {"0": 150, "1": 0} == json.loads(shown(capsys, *files, "--json"))["ranks"]["waiting"]


def test_collectives_and_modules_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Collectives are shown with their bandwidth, and modules with their times."""
    trace = small_gpu_trace()
    trace.event("python_function", "nn.Module: Linear_0", 45, 155)
    about = {
        "Collective name": "allreduce",
        "In msg nelems": 500,
        "Out msg nelems": 500,
        "Group size": 4,
        "dtype": "Half",
    }
    trace.kernel("ncclDevKernel_AllReduce_Sum_f16", 2000, 2500, launch=(1900, 1910), **about)
    lines = [line.split() for line in shown(capsys, trace.write(tmp_path / "a.json")).splitlines()]
    assert ["Linear_0", "300", "ns", "300", "ns", "1", "110", "ns"] in lines
    assert [
        "all_reduce",
        "500",
        "ns",
        "100.0",
        "%",
        "1",
        "1000",
        "B",
        "3.00",
        "GB/s",
        "2.00",
        "GB/s",
        "4",
        "–",
    ] in lines


def test_much_time_in_small_kernels_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If much time is spent in small kernels, the text suggests torch.compile.

    Of 1000 ns, 300 are pointwise kernels and 100 are reductions. A Triton kernel shows that the
    model is already compiled.
    """
    trace = TraceByHand()
    trace.kernel("ampere_sgemm_128x64", 0, 600, launch=(-20, -10))
    trace.kernel("vectorized_elementwise_kernel<add>", 600, 900, launch=(-9, -8))
    trace.kernel("reduce_kernel<sum>", 900, 1000, launch=(-7, -6))
    said = (
        "40.0 % of the kernel time is spent in pointwise and reduction kernels, which "
        "torch.compile can fuse."
    )
    assert said in " ".join(shown(capsys, trace.write(tmp_path / "a.json")).split())
    trace.kernel("triton_poi_fused_add_0", 1000, 1001, launch=(-5, -4))
    assert said[7:] not in " ".join(shown(capsys, trace.write(tmp_path / "a.json")).split())


def test_work_of_before_the_recording_is_no_idle_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Work that was launched before the recording began is no idle time, and is reported.

    It runs for the first 500 of 600 ns in which the device has no other work.
    """
    trace = TraceByHand()
    trace.step(0, 0, 1000)
    trace.kernel("before", 0, 500)
    trace.kernel("first", 600, 900, launch=(20, 40))
    said = (
        "When the first step starts, the device still runs work that was launched before the "
        "recording began: 1 kernel, 500 ns. This work is left out of all figures."
    )
    assert said in " ".join(shown(capsys, trace.write(tmp_path / "a.json")).split())


def test_the_verdict_names_one_cause_where_one_is_most_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict names the cause that has most of the idle time.

    In 800 of 900 idle ns, the host runs Python. If several kinds of host work share the time, they
    are named together.
    """
    trace = TraceByHand()
    trace.kernel("a", 0, 100, launch=(-20, -10))
    trace.kernel("b", 1000, 1100, launch=(900, 1000))
    text = shown(capsys, trace.write(tmp_path / "a.json"))
    assert (
        "81.8 % of the GPU's 1.10 µs is idle, mostly while the host runs Python between operators; "
        "18.2 % is computing." == text.splitlines()[0]
    )
    trace.operator("aten::mm", 500, 1000)
    text = shown(capsys, trace.write(tmp_path / "a.json"))
    assert "is idle, mostly while the host prepares launches; 18.2 %" in text.splitlines()[0]


def test_a_thread_of_countless_overlapping_events_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace with more than 1,000 overlapping events of one thread is rejected.

    For each event, all events around it are read. A trace with 900 overlapping events, as many as
    Python can nest, is shown.
    """
    path = tmp_path / "deep.pt.trace.json"
    for depth, status in ((900, 0), (1_100, 2)):
        events = []
        for number in range(depth):
            events.append(
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": f"aten::op{number}",
                    "pid": 1,
                    "tid": 1,
                    "ts": number,
                    "dur": 2 * depth - 2 * number,
                }
            )
        path.write_text(json.dumps({"traceEvents": events}))
        assert main(["trace", "show", str(path)]) == status
    assert "more than 1,000 events of one thread overlap" in capsys.readouterr().err
