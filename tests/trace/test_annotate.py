"""What is added to a trace: on traces written here, and on one of torch's."""

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
    """A trace as torch writes it, with white space in it."""
    path = folder / "trace.json.raw"
    path.write_text(
        json.dumps(
            {"schemaVersion": 1, "traceEvents": list(events), "baseTimeNanoseconds": BASE, **more},
            indent=2,
        )
    )
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
    """Its times are in nanoseconds behind the trace's beginning."""
    return Call(row, phase, BASE + start, BASE + end, device, innermost, thread)


def calls(*slices: Call, batches: int = 1) -> RecordedCalls:
    """What was called."""
    return RecordedCalls(batches=batches, rank=3, world_size=8, calls=slices)


def annotated(
    folder: Path, told: RecordedCalls, *, profile: Profile | None = None, **more: Any
) -> dict[str, Any]:
    """What is in the annotated file."""
    into = folder / "host_3.1.pt.trace.json.gz"
    annotate(written(folder, **more), told, into, profile=profile)
    content: dict[str, Any] = json.loads(gzip.decompress(into.read_bytes()))
    return content


def of(content: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The events of that kind that were added."""
    return [
        event
        for event in content["traceEvents"]
        if event["pid"] == PROCESS_ID and event["ph"] == kind
    ]


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Of a block: `up` in each of two products in forward."""
    return lflops.count(Block(), (sequence(),), backward=True)


def test_all_that_was_there_stays(tmp_path: Path) -> None:
    """The recorded event comes first, as it was."""
    content = annotated(tmp_path, calls(call("up", "forward", 100, 200)), trace_id="abc")
    assert RECORDED == content["traceEvents"][0]
    assert (1, "abc", BASE) == (
        content["schemaVersion"],
        content["trace_id"],
        content["baseTimeNanoseconds"],
    )


def test_a_trace_without_events_gets_some(tmp_path: Path) -> None:
    """No comma stands before the first."""
    content = annotated(tmp_path, calls(call("up", "forward", 100, 200)), events=())
    assert {PROCESS_ID} == {event["pid"] for event in content["traceEvents"]}


def test_each_call_is_a_slice_in_the_trace_s_own_time(tmp_path: Path, profile: Profile) -> None:
    """100 ns of which `up` products, each a multiplication and an addition."""
    (slice_,) = of(
        annotated(tmp_path, calls(call("up", "forward", 2500, 2600)), profile=profile), "X"
    )
    assert (2.5, 0.1) == (slice_["ts"], slice_["dur"])
    assert ("up", "lflops_module") == (slice_["name"], slice_["cat"])
    args = slice_["args"]
    assert ("up", "forward", "Linear", 5 * 7 + 7, up) == tuple(
        args[key] for key in ("module", "phase", "kind", "parameters", "MACs")
    )
    assert 2 * up / 100e-9 == pytest.approx(args["FLOP/s"])


def test_work_is_shared_by_the_calls_of_a_row(tmp_path: Path, profile: Profile) -> None:
    """Four calls in two batches, each half a batch's; the rates go by their times."""
    told = calls(
        *(call("up", "forward", start, start + 100) for start in (0, 200, 400, 600)), batches=2
    )
    slices = of(annotated(tmp_path, told, profile=profile), "X")
    assert [up // 2] * 4 == [slice_["args"]["MACs"] for slice_ in slices]
    assert [up / 100e-9] * 4 == pytest.approx([slice_["args"]["FLOP/s"] for slice_ in slices])


def test_a_step_of_several_batches_is_counted_once(tmp_path: Path, profile: Profile) -> None:
    """Two batches are one step of the profile, whose work they share."""
    of_two = msgspec.structs.replace(
        profile, run=msgspec.structs.replace(profile.run, accumulation=2)
    )
    told = calls(call("up", "forward", 0, 100), call("up", "forward", 200, 300), batches=2)
    assert [up / 2] * 2 == [
        slice_["args"]["MACs"] for slice_ in of(annotated(tmp_path, told, profile=of_two), "X")
    ]


def test_backward_has_one_rate_for_all_stretches_of_a_row(tmp_path: Path, profile: Profile) -> None:
    """Its input wants no gradient, so `up` once, in 100 and 300 ns.

    How the work is spread over them is not known.
    """
    told = calls(call("up", "backward", 0, 100), call("up", "backward", 200, 500))
    args = [slice_["args"] for slice_ in of(annotated(tmp_path, told, profile=profile), "X")]
    assert [2 * up / 400e-9] * 2 == pytest.approx([each["FLOP/s"] for each in args])
    assert all("MACs" not in each for each in args)


def test_where_a_device_works_the_rate_is_the_device_s(tmp_path: Path, profile: Profile) -> None:
    """The host was done in 10 ns, the device took 50; a call that had it do nothing has no rate."""
    told = calls(call("up", "forward", 0, 10, device=50), call("down", "forward", 20, 30))
    first, second = (
        slice_["args"] for slice_ in of(annotated(tmp_path, told, profile=profile), "X")
    )
    assert 2 * up / 50e-9 == pytest.approx(first["FLOP/s"])
    assert "FLOP/s" not in second


def test_what_is_not_known_is_left_out(tmp_path: Path, profile: Profile) -> None:
    """A row that the profile does not have; and any row without a profile."""
    for known in (profile, None):
        (slice_,) = of(
            annotated(tmp_path, calls(call("elsewhere", "forward", 0, 10)), profile=known), "X"
        )
        assert {"module": "elsewhere", "phase": "forward"} == slice_["args"]


def test_the_rate_of_the_innermost_calls_is_a_curve(tmp_path: Path, profile: Profile) -> None:
    """It falls to nothing behind each; the outer call draws none."""
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
    """The totals of each device, at their times."""
    events = [
        {
            "ph": "i",
            "name": "[memory]",
            "pid": 5,
            "tid": 5,
            "ts": ts,
            "args": {"Total Allocated": total, "Device Type": kind, "Device Id": index},
        }
        for ts, total, kind, index in ((1.0, 400, 0, -1), (2.0, 800, 1, 0))
    ]
    points = of(annotated(tmp_path, calls(), events=(RECORDED, *events)), "C")
    assert [("allocated bytes (CPU)", 1.0, 400), ("allocated bytes (device 0)", 2.0, 800)] == [
        (point["name"], point["ts"], point["args"][point["name"]]) for point in points
    ]


def test_the_process_has_a_track_for_each_phase_and_thread(tmp_path: Path) -> None:
    """Numbers for whoever reads, names for whoever looks."""
    told = calls(
        call("up", "forward", 0, 10),
        call("up", "backward", 20, 30),
        call("up", "recompute", 22, 23, thread=1),
    )
    content = annotated(tmp_path, told)
    names = {
        event["args"]["name"]: event["tid"]
        for event in of(content, "M")
        if event["name"] == "thread_name"
    }
    assert {"forward": 0, "backward": 2, "recompute (thread 1)": 4} == names
    assert [0, 2, 4] == [slice_["tid"] for slice_ in of(content, "X")]
    assert [PROCESS] == [
        event["args"]["name"] for event in of(content, "M") if event["name"] == "process_name"
    ]


@pytest.mark.parametrize(
    ("torch_s", "expected"), [(None, {"rank": 3, "world_size": 8}), ({"rank": 5}, {"rank": 5})]
)
def test_the_rank_is_told_where_torch_has_not(tmp_path: Path, torch_s: Any, expected: Any) -> None:
    """It does where there is a process group."""
    more = {} if torch_s is None else {"distributedInfo": torch_s}
    assert expected == annotated(tmp_path, calls(), **more)["distributedInfo"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"traceEvents": 5, "baseTimeNanoseconds": "x"}']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file, and nothing is written."""
    path, into = tmp_path / "broken.json", tmp_path / "out.gz"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"broken\.json"):
        annotate(path, calls(), into)
    assert [path] == list(tmp_path.iterdir())


def reported(**changes: Any) -> dict[str, Any]:
    """What torch says of memory, in an event."""
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
    """What torch wrote stays to the byte.

    The curve has the other event's point, and the caller learns of one without.
    """
    (into := tmp_path / "out.gz").touch()
    trace = written(tmp_path, [RECORDED, reported(**changes), reported(ts=3.0)])
    assert 1 == annotate(trace, calls(), into).number
    content = json.loads(gzip.decompress(into.read_bytes()))
    assert json.loads(trace.read_text())["traceEvents"] == content["traceEvents"][:3]
    assert [(3.0, {"allocated bytes (CPU)": 64})] == [
        (each["ts"], each["args"]) for each in of(content, "C")
    ]
    assert 0 == annotate(written(tmp_path, [RECORDED, reported()]), calls(), into).number


def test_an_infinite_rate_is_annotated_as_unknown(tmp_path: Path) -> None:
    """JSON has no such number, so no viewer reads a trace with one."""
    trace = written(tmp_path, [RECORDED | {"args": {"GB/s": 7.5}}])
    trace.write_text(trace.read_text().replace("7.5", "-inf"))
    assert 0 == annotate(trace, calls(), tmp_path / "out.gz").number
    assert {"GB/s": None} == json.loads(gzip.decompress((tmp_path / "out.gz").read_bytes()))[
        "traceEvents"
    ][0]["args"]


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full before its end."""

    def full(*_: Any) -> None:
        raise OSError("no space left")

    trace = written(tmp_path)
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="no space left"):
        pack(trace, tmp_path / "out.gz")
    assert [trace] == list(tmp_path.iterdir())


def told_beside(trace: Path, told: RecordedCalls) -> Path:
    """The calls in their file."""
    path = trace.with_name("calls")
    path.write_bytes(msgspec.json.encode(told))
    return path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch-tb-profiler."""
    monkeypatch.setattr(program, "is_wanted", lambda: False)


def test_the_program_annotates_and_takes_away_what_it_read(
    tmp_path: Path, profile: Profile, alone: None
) -> None:
    """Nothing but the packed trace is left."""
    trace, into, saved = written(tmp_path), tmp_path / "out.gz", tmp_path / "saved" / "p.json"
    profile.save(saved)
    assert 0 == main(
        [
            str(path)
            for path in (
                trace,
                told_beside(trace, calls(call("up", "forward", 0, 10))),
                into,
                saved,
            )
        ]
    )
    assert {into, saved.parent} == set(tmp_path.iterdir())
    assert up == of(json.loads(gzip.decompress(into.read_bytes())), "X")[0]["args"]["MACs"]


def test_the_program_packs_what_it_cannot_annotate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], alone: None
) -> None:
    """The profile is not there: the trace is, as it was, and the reason is told."""
    trace, into = written(tmp_path), tmp_path / "out.gz"
    text = trace.read_bytes()
    assert 1 == main(
        [str(trace), str(told_beside(trace, calls())), str(into), str(tmp_path / "missing.json")]
    )
    assert text == gzip.decompress(into.read_bytes())
    assert "missing.json" in capsys.readouterr().err
    assert [into] == list(tmp_path.iterdir())


def test_the_program_is_nicer_than_the_training() -> None:
    """By 10, from its beginning on; at most 19, which is all there is."""
    code = (
        "import os; from lflops.trace import annotate_in_background as program;"
        "program.main = lambda _: os.getpriority(os.PRIO_PROCESS, 0); program.run()"
    )
    process = subprocess.run([sys.executable, "-c", code], check=False)
    assert min(os.nice(0) + 10, 19) == process.returncode


def test_the_program_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be shared. `python /elsewhere/train.py` does not import from it either."""
    for name in ("msgspec", "lflops", "gzip"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/executed', 'w')")
    monkeypatch.chdir(tmp_path)
    annotation = AnnotationProcess(written(tmp_path), tmp_path / "out.gz", calls())
    assert None is annotation.finish(600)
    assert not (tmp_path / "executed").exists()


def test_the_program_searches_where_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder at the end of the parent's path does not hide the standard library."""
    (folder := tmp_path / "packages").mkdir()
    (folder / "gzip.py").write_text(f"open('{tmp_path}/executed', 'w')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    annotation = AnnotationProcess(written(tmp_path), tmp_path / "out.gz", calls())
    assert None is annotation.finish(600)
    assert not (tmp_path / "executed").exists()


def test_the_program_loads_no_torch() -> None:
    """A process that annotates takes no more than it needs."""
    code = "import sys, lflops.trace.annotate_in_background; print('torch' in sys.modules)"
    assert (
        "False"
        == subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
    )


def recorded(model: nn.Module, folder: Path) -> Recording:
    """Three batches of a training."""
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
    """Each product of torch's lies within the slice of the module that asked for it, by the trace's own times."""
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
    slices = {
        (each["args"]["module"], each["ts"]): each
        for each in of(content, "X")
        if each["args"]["phase"] == "forward"
    }
    products = [event for event in content["traceEvents"] if event["name"] == "aten::linear"]
    assert 3 * 4 == len(products)
    for product, row in zip(
        sorted(products, key=lambda event: event["ts"]), ["stem", "q", "k", "v"] * 3, strict=True
    ):
        around = [
            module
            for (module, start), each in slices.items()
            if start <= product["ts"] and product["ts"] + product["dur"] <= start + each["dur"]
        ]
        assert ["", row] == sorted(around)
    assert 12 + 3 == len(slices)


def test_a_process_that_fails_leaves_the_trace_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not even start the program."""
    trace, into = written(tmp_path), tmp_path / "out.gz"
    text = trace.read_bytes()
    monkeypatch.setattr("sys.executable", "/bin/false")
    annotation = AnnotationProcess(trace, into, calls())
    assert "exit status 1" == annotation.finish()
    assert text == gzip.decompress(into.read_bytes())
    assert [into] == list(tmp_path.iterdir())


def test_an_annotation_that_takes_long_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it is told so, and may ask again, also when it is over."""
    (folder := tmp_path / "window").mkdir()
    trace, into = written(folder), folder / "out.gz"
    waits, told = tmp_path / "waits", tmp_path / "told"
    os.mkfifo(told)
    waits.write_text(f"#!/bin/sh\nread word < {told}\necho $word >&2\nexit 3\n")
    waits.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(waits))
    annotation = AnnotationProcess(trace, into, calls())
    assert "still running after 0 s" == annotation.finish(0)
    assert not annotation.is_done
    told.write_text("enough\n")
    assert ["enough", "enough"] == [annotation.finish(), annotation.finish()]
    assert [into] == list(folder.iterdir())


def test_the_background_process_imports_nothing_from_where_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from the current folder nor from that of the script, nor from a relative one."""
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
    # The twin is a folder in which lflops itself was found.
    monkeypatch.chdir(ROOT)
    assert str(ROOT) in program.search_path() or str(ROOT) not in before
