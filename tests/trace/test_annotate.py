"""Test what `annotate` adds to a trace, with traces written by hand and with one of torch."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import lflops
from lflops.errors import ProfileError
from lflops.model.module_tree import ModuleTree
from lflops.profile.profile import Profile
from lflops.profile.records import Call
from lflops.trace import annotate_in_background as program
from lflops.trace.annotate import PROCESS, PROCESS_ID, RecordedCalls, annotate, pack
from lflops.trace.annotate_in_background import AnnotationProcess, main
from lflops.trace.record.tracer import Recording, Tracer
from tests.support.quarters import exact
from tests.support.repository import ROOT
from tests.support.small_models import Block, Projections, sequence, up

BASE = 1_700_000_000_000_000_000
RECORDED = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": 5,
    "tid": 5,
    "ts": 1.5,
    "dur": 2.0,
}


def written(folder: Path, events: Sequence[dict[str, Any]] = (RECORDED,), **more: Any) -> Path:
    """Write a trace with white space, as torch writes it, and return its path."""
    content = {"schemaVersion": 1, "traceEvents": list(events), "baseTimeNanoseconds": BASE, **more}
    path = folder / "trace.json.raw"
    path.write_text(json.dumps(content, indent=2))
    return path


def call(
    row: str,
    phase: Any,
    start: int,
    end: int,
    *,
    device: int = 0,
    innermost: bool = True,
    thread: int = 0,
) -> Call:
    """Return a call of a module. Its times are nanoseconds since the beginning of the trace."""
    return Call(row, phase, BASE + start, BASE + end, device, innermost, thread)


def calls(*slices: Call, batches: int = 1) -> RecordedCalls:
    """Return the recorded calls of rank 3 of 8."""
    return RecordedCalls(batches=batches, rank=3, world_size=8, calls=slices)


def annotated(
    folder: Path, told: RecordedCalls, *, profile: Profile | None = None, **more: Any
) -> dict[str, Any]:
    """Annotate a trace, and return the content of the annotated file."""
    into = folder / "host_3.1.pt.trace.json.gz"
    annotate(written(folder, **more), told, into, profile=profile)
    content: dict[str, Any] = json.loads(gzip.decompress(into.read_bytes()))
    return content


def of(content: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the events of the kind `kind` that were added."""
    added = [event for event in content["traceEvents"] if event["pid"] == PROCESS_ID]
    return [event for event in added if event["ph"] == kind]


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Return the profile of a block with two matmuls in forward, which have `up` MACs each."""
    return lflops.count(Block(), (sequence(),), backward=True)


def test_all_that_was_there_stays(tmp_path: Path) -> None:
    """The header and the recorded events stay unchanged, and the recorded events come first."""
    content = annotated(tmp_path, calls(call("up", "forward", 100, 200)), trace_id="abc")
    assert RECORDED == content["traceEvents"][0]
    assert (1, "abc") == (content["schemaVersion"], content["trace_id"])
    assert BASE == content["baseTimeNanoseconds"]


def test_a_trace_without_events_gets_some(tmp_path: Path) -> None:
    """If the trace has no events, the added events are valid JSON, without a leading comma."""
    content = annotated(tmp_path, calls(call("up", "forward", 100, 200)), events=())
    assert {PROCESS_ID} == {event["pid"] for event in content["traceEvents"]}


def test_each_call_is_a_slice_in_the_trace_s_own_time(tmp_path: Path, profile: Profile) -> None:
    """Each call becomes a slice in the time of the trace, with its work and its rate.

    The call takes 100 ns and has `up` MACs, which are two FLOPs each.
    """
    told = calls(call("up", "forward", 2500, 2600))
    (slice_,) = of(annotated(tmp_path, told, profile=profile), "X")
    assert (2.5, 0.1) == (slice_["ts"], slice_["dur"])
    assert ("up", "lflops_module") == (slice_["name"], slice_["cat"])
    args = slice_["args"]
    assert ("up", "forward", "Linear") == (args["module"], args["phase"], args["kind"])
    assert (5 * 7 + 7, up) == (args["parameters"], args["MACs"])
    assert 2 * up / 100e-9 == pytest.approx(args["FLOP/s"])


def test_work_is_shared_by_the_calls_of_a_row(tmp_path: Path, profile: Profile) -> None:
    """The calls of a module in a batch share its work equally.

    There are four calls in two batches, so each has half of the work of a batch.
    """
    starts = (0, 200, 400, 600)
    told = calls(*(call("up", "forward", start, start + 100) for start in starts), batches=2)
    slices = of(annotated(tmp_path, told, profile=profile), "X")
    assert [up // 2] * 4 == [slice_["args"]["MACs"] for slice_ in slices]
    assert [up / 100e-9] * 4 == pytest.approx([slice_["args"]["FLOP/s"] for slice_ in slices])


def test_a_step_of_several_batches_is_counted_once(tmp_path: Path, profile: Profile) -> None:
    """With gradient accumulation, the batches of a step share the work of the step.

    Two batches are one step of the profile.
    """
    accumulating = msgspec.structs.replace(profile.run, accumulation=2)
    of_two = msgspec.structs.replace(profile, run=accumulating)
    told = calls(call("up", "forward", 0, 100), call("up", "forward", 200, 300), batches=2)
    slices = of(annotated(tmp_path, told, profile=of_two), "X")
    assert [up / 2] * 2 == [slice_["args"]["MACs"] for slice_ in slices]


def test_backward_has_one_rate_for_all_stretches_of_a_row(tmp_path: Path, profile: Profile) -> None:
    """All backward slices of a module have the same rate, and no MACs.

    It is unknown how the work is divided among the slices of 100 and 300 ns. Backward has `up` MACs
    once, because the input needs no gradient.
    """
    told = calls(call("up", "backward", 0, 100), call("up", "backward", 200, 500))
    args = [slice_["args"] for slice_ in of(annotated(tmp_path, told, profile=profile), "X")]
    assert [2 * up / 400e-9] * 2 == pytest.approx([each["FLOP/s"] for each in args])
    assert all("MACs" not in each for each in args)


def test_where_a_device_works_the_rate_is_the_device_s(tmp_path: Path, profile: Profile) -> None:
    """If a device works, the rate refers to the time of the device: 50 ns instead of 10 ns.

    A call that launches nothing on the device has no rate.
    """
    told = calls(call("up", "forward", 0, 10, device=50), call("down", "forward", 20, 30))
    first, second = of(annotated(tmp_path, told, profile=profile), "X")
    assert 2 * up / 50e-9 == pytest.approx(first["args"]["FLOP/s"])
    assert "FLOP/s" not in second["args"]


def test_what_is_not_known_is_left_out(tmp_path: Path, profile: Profile) -> None:
    """A slice has no work if its module is not in the profile, or if there is no profile."""
    told = calls(call("elsewhere", "forward", 0, 10))
    for known in (profile, None):
        (slice_,) = of(annotated(tmp_path, told, profile=known), "X")
        assert {"module": "elsewhere", "phase": "forward"} == slice_["args"]


def test_the_rate_of_the_innermost_calls_is_a_curve(tmp_path: Path, profile: Profile) -> None:
    """The rate of the innermost calls is a curve that falls to 0 after each call.

    An outer call adds no points.
    """
    told = calls(
        call("", "forward", 0, 500, innermost=False),
        call("up", "forward", 100, 200),
        call("down", "forward", 300, 400),
    )
    points = [
        (point["ts"], point["args"]["FLOP/s"])
        for point in of(annotated(tmp_path, told, profile=profile), "C")
    ]
    rate = pytest.approx(2 * up / 100e-9)
    assert [(0.1, rate), (0.2, 0), (0.3, rate), (0.4, 0)] == points


def test_memory_is_a_curve_where_it_was_recorded(tmp_path: Path) -> None:
    """If the trace has memory events, the allocated bytes of each device are a curve."""
    event = {"ph": "i", "name": "[memory]", "pid": 5, "tid": 5}
    of_cpu = {"Total Allocated": 400, "Device Type": 0, "Device Id": -1}
    of_device = {"Total Allocated": 800, "Device Type": 1, "Device Id": 0}
    events = [event | {"ts": 1.0, "args": of_cpu}, event | {"ts": 2.0, "args": of_device}]
    points = of(annotated(tmp_path, calls(), events=(RECORDED, *events)), "C")
    assert [("allocated bytes (CPU)", 1.0, 400), ("allocated bytes (device 0)", 2.0, 800)] == [
        (point["name"], point["ts"], point["args"][point["name"]]) for point in points
    ]


def test_the_process_has_a_track_for_each_phase_and_thread(tmp_path: Path) -> None:
    """The added process has a track with a number and a name for each phase on each thread."""
    told = calls(
        call("up", "forward", 0, 10),
        call("up", "backward", 20, 30),
        call("up", "recompute", 22, 23, thread=1),
    )
    content = annotated(tmp_path, told)
    of_threads = [event for event in of(content, "M") if event["name"] == "thread_name"]
    of_process = [event for event in of(content, "M") if event["name"] == "process_name"]
    names = {event["args"]["name"]: event["tid"] for event in of_threads}
    assert {"forward": 0, "backward": 2, "recompute (thread 1)": 4} == names
    assert [0, 2, 4] == [slice_["tid"] for slice_ in of(content, "X")]
    assert [PROCESS] == [event["args"]["name"] for event in of_process]


@pytest.mark.parametrize(
    ("torch_s", "expected"), [(None, {"rank": 3, "world_size": 8}), ({"rank": 5}, {"rank": 5})]
)
def test_the_rank_is_told_where_torch_has_not(tmp_path: Path, torch_s: Any, expected: Any) -> None:
    """The rank is added to the header unless torch has written it.

    Torch writes it if there is a process group.
    """
    more = {} if torch_s is None else {"distributedInfo": torch_s}
    assert expected == annotated(tmp_path, calls(), **more)["distributedInfo"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"traceEvents": 5, "baseTimeNanoseconds": "x"}']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    """A file that is no trace is an error that names the file, and no file is written."""
    path = tmp_path / "broken.json"
    into = tmp_path / "out.gz"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"broken\.json"):
        annotate(path, calls(), into)
    assert [path] == list(tmp_path.iterdir())


def reported(**changes: Any) -> dict[str, Any]:
    """Return a memory event as torch writes it, with some changes."""
    args = {"Device Type": 0, "Device Id": -1, "Total Allocated": 64}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "pid": 5,
        "tid": 5,
        "ts": 1.5,
        "s": "t",
        "args": args,
    } | changes


@pytest.mark.parametrize(
    "changes", [{"ts": "soon"}, {"args": 5}, {"args": {"Device Type": 0, "Total Allocated": "all"}}]
)
def test_a_damaged_event_costs_its_point_of_the_curve(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A damaged memory event has no point in the curve, and is counted.

    The events that torch wrote stay unchanged. The curve has the point of the other event.
    """
    into = tmp_path / "out.gz"
    into.touch()
    trace = written(tmp_path, [RECORDED, reported(**changes), reported(ts=3.0)])
    assert 1 == annotate(trace, calls(), into).number
    content = json.loads(gzip.decompress(into.read_bytes()))
    assert json.loads(trace.read_text())["traceEvents"] == content["traceEvents"][:3]
    assert [(3.0, {"allocated bytes (CPU)": 64})] == [
        (each["ts"], each["args"]) for each in of(content, "C")
    ]
    assert 0 == annotate(written(tmp_path, [RECORDED, reported()]), calls(), into).number


def test_an_infinite_rate_is_annotated_as_unknown(tmp_path: Path) -> None:
    """An infinite rate becomes unknown, because JSON has no such number and viewers reject it."""
    trace = written(tmp_path, [RECORDED | {"args": {"GB/s": 7.5}}])
    trace.write_text(trace.read_text().replace("7.5", "-inf"))
    into = tmp_path / "out.gz"
    assert 0 == annotate(trace, calls(), into).number
    content = json.loads(gzip.decompress(into.read_bytes()))
    assert {"GB/s": None} == content["traceEvents"][0]["args"]


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing the compressed file fails because the disk is full, no partial file remains."""

    def full(*_: Any) -> None:
        raise OSError("no space left")

    trace = written(tmp_path)
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="no space left"):
        pack(trace, tmp_path / "out.gz")
    assert [trace] == list(tmp_path.iterdir())


def told_beside(trace: Path, told: RecordedCalls) -> Path:
    """Write the recorded calls to a file next to the trace, and return its path."""
    path = trace.with_name("calls")
    path.write_bytes(msgspec.json.encode(told))
    return path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program run as if torch-tb-profiler were not installed."""
    monkeypatch.setattr(program, "is_wanted", lambda: False)


def test_the_program_annotates_and_takes_away_what_it_read(
    tmp_path: Path, profile: Profile, alone: None
) -> None:
    """The program annotates a trace and removes its input files; the profile remains."""
    trace = written(tmp_path)
    into = tmp_path / "out.gz"
    saved = tmp_path / "saved" / "p.json"
    profile.save(saved)
    told = told_beside(trace, calls(call("up", "forward", 0, 10)))
    assert 0 == main([str(trace), str(told), str(into), str(saved)])
    assert {into, saved.parent} == set(tmp_path.iterdir())
    assert up == of(json.loads(gzip.decompress(into.read_bytes())), "X")[0]["args"]["MACs"]


def test_the_program_packs_what_it_cannot_annotate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], alone: None
) -> None:
    """If a trace cannot be annotated, the program compresses it unchanged and prints the reason.

    Here, the profile is missing.
    """
    trace = written(tmp_path)
    into = tmp_path / "out.gz"
    text = trace.read_bytes()
    told = told_beside(trace, calls())
    assert 1 == main([str(trace), str(told), str(into), str(tmp_path / "missing.json")])
    assert text == gzip.decompress(into.read_bytes())
    assert "missing.json" in capsys.readouterr().err
    assert [into] == list(tmp_path.iterdir())


def test_the_program_leaves_the_cores_to_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program has a low priority, in the session of the training run.

    Linux gives each session an equal share of the CPU, so in a session of its own, the program
    would take a core from the training run. It has its own process group, so Ctrl-C in the terminal
    does not reach it.
    """
    monkeypatch.setattr(program, "NICENESS", 10)
    annotation = AnnotationProcess(written(tmp_path), tmp_path / "out.gz", calls())
    process = annotation._process.pid
    # The process has ended, but the system keeps its properties until `finish` asks for its status.
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    group = int(fields[2])
    session = int(fields[3])
    niceness = int(fields[16])
    assert (process, os.getsid(0), os.nice(0) + 10) == (group, session, niceness)
    assert None is annotation.finish()


def test_the_program_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program imports no modules from the current folder, which other users may write to.

    `python /elsewhere/train.py` does not import from it either.
    """
    for name in ("msgspec", "lflops", "gzip"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/executed', 'w')")
    monkeypatch.chdir(tmp_path)
    annotation = AnnotationProcess(written(tmp_path), tmp_path / "out.gz", calls())
    assert None is annotation.finish(600)
    assert not (tmp_path / "executed").exists()


def test_the_program_searches_where_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program has the search path of its parent in the same order.

    So a folder at the end of this path does not hide the standard library.
    """
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "gzip.py").write_text(f"open('{tmp_path}/executed', 'w')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    annotation = AnnotationProcess(written(tmp_path), tmp_path / "out.gz", calls())
    assert None is annotation.finish(600)
    assert not (tmp_path / "executed").exists()


def test_the_program_loads_no_torch_and_has_a_low_priority() -> None:
    """The program does not import torch, because it does not need it.

    Its niceness is read in the same new process, because `tests/conftest.py` changes it in this
    one.
    """
    code = (
        "import sys; from lflops.trace.annotate_in_background import NICENESS; "
        "print('torch' in sys.modules, NICENESS)"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "False 10" == ended.stdout.strip()


def recorded(model: nn.Module, folder: Path) -> Recording:
    """Record three training batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracer = Tracer(ModuleTree({"": model}))
    assert tracer.begin()
    for batch in range(3):
        model(sequence()).sum().backward()
        optimizer.step()
        if batch < 2:
            tracer.step()
    recording = tracer.stop(folder, "host_0")
    assert recording is not None
    return recording


def test_a_trace_of_torch_s_is_annotated_in_another_process(tmp_path: Path) -> None:
    """A real trace is annotated in another process.

    By the times in the trace, each matmul lies within the slice of the module that launched it.
    """
    model = Projections()
    lflops.count(model, (sequence(),), backward=True).save(tmp_path / "p.json")
    recording = recorded(model, tmp_path / "window")
    told = RecordedCalls(
        batches=recording.trace.batches, rank=0, world_size=1, calls=tuple(recording.calls)
    )
    annotation = AnnotationProcess(recording.raw, recording.path, told, tmp_path / "p.json")
    assert None is annotation.finish(600)
    assert annotation.is_done
    assert [recording.path] == list(recording.path.parent.iterdir())
    content = exact(recording.path)
    slices = [each for each in of(content, "X") if each["args"]["phase"] == "forward"]
    matmuls = [event for event in content["traceEvents"] if event["name"] == "aten::linear"]
    matmuls.sort(key=lambda event: event["ts"])
    assert 3 * 4 == len(matmuls)
    for matmul, row in zip(matmuls, ["stem", "q", "k", "v"] * 3, strict=True):
        start = matmul["ts"]
        end = start + matmul["dur"]
        around = []
        for each in slices:
            if each["ts"] <= start and end <= each["ts"] + each["dur"]:
                around.append(each["args"]["module"])
        assert ["", row] == sorted(around)
    assert 12 + 3 == len(slices)


def test_a_process_that_fails_leaves_the_trace_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the annotation process cannot start, the trace is compressed unchanged."""
    trace = written(tmp_path)
    into = tmp_path / "out.gz"
    text = trace.read_bytes()
    monkeypatch.setattr("sys.executable", "/bin/false")
    annotation = AnnotationProcess(trace, into, calls())
    assert "exit status 1" == annotation.finish()
    assert text == gzip.decompress(into.read_bytes())
    assert [into] == list(tmp_path.iterdir())


def test_an_annotation_that_takes_long_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the annotation takes too long, `finish` returns a message, and the process continues.

    `finish` may be called again, also after the process has ended.
    """
    folder = tmp_path / "window"
    folder.mkdir()
    trace = written(folder)
    into = folder / "out.gz"
    waits = tmp_path / "waits"
    told = tmp_path / "told"
    os.mkfifo(told)
    waits.write_text(f"#!/bin/sh\nread word < {told}\necho $word >&2\nexit 3\n")
    waits.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(waits))
    annotation = AnnotationProcess(trace, into, calls())
    assert "the background process is still running after 0 s" == annotation.finish(0)
    assert not annotation.is_done
    told.write_text("enough\n")
    assert ["enough", "enough"] == [annotation.finish(), annotation.finish()]
    assert [into] == list(folder.iterdir())


def test_the_background_process_imports_nothing_from_where_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search path of the program has no folder to which other users may be able to write.

    It has neither the current folder, nor the folder of the script, nor a relative folder.
    """
    for name in ("here", "scripts", "packages"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    script = str(tmp_path / "scripts" / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    added = [str(tmp_path / name) for name in ("here", "scripts", "packages")]
    before = [folder for folder in sys.path if Path(folder).is_absolute()]
    monkeypatch.setattr(sys, "path", ["", ".", *added, *before])
    found = program.search_path()
    assert str(tmp_path / "packages") in found
    assert not {"", ".", *added[:2]} & set(found)
    # A folder from which lflops itself was imported is kept.
    monkeypatch.chdir(ROOT)
    assert str(ROOT) in program.search_path() or str(ROOT) not in before
