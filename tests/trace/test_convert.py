"""Test the copy of a trace for torch-tb-profiler: its names of events, and its modules."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lflops.cli.main import main
from lflops.errors import ProfileError
from lflops.trace import annotate_in_background as program
from lflops.trace.annotate import PROCESS_ID
from lflops.trace.convert import convert_for_tb_profiler, place

TRAINER = 5
"""The thread that trains."""

ENGINE = 9
"""The thread of the autograd engine."""


def event(
    name: str, category: str, start: float, length: float, *, thread: int = TRAINER, **args: Any
) -> dict[str, Any]:
    """Return a slice. Its times are in microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": length,
        "args": args,
    }


def module(
    row: str,
    phase: str,
    start: float,
    length: float,
    *,
    thread: int = 0,
    kind: str | None = "Linear",
) -> dict[str, Any]:
    """Return the slice of a module as `annotate` writes it, which has three tracks for a thread."""
    track = 3 * thread + ["forward", "recompute", "backward"].index(phase)
    args = {"module": row, "phase": phase}
    if kind:
        args["kind"] = kind
    slice_of_module = event(row or "(model)", "lflops_module", start, length, thread=track)
    return slice_of_module | {"pid": PROCESS_ID, "args": args}


def node(start: float, length: float, thread: int = TRAINER) -> dict[str, Any]:
    """Return an autograd node."""
    return event("autograd::engine::evaluate_function: X", "cpu_op", start, length, thread=thread)


STEP = event("ProfilerStep#0", "user_annotation", 0, 100)


def copied(folder: Path, *events: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Write a trace with these events, and return the content of its copy."""
    trace = folder / "train-0-1" / "host_0.7.pt.trace.json"
    trace.parent.mkdir(exist_ok=True)
    trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, **more}))
    copy, _ = convert_for_tb_profiler(trace)
    content: dict[str, Any] = json.loads(gzip.decompress(copy.read_bytes()))
    return content


def modules(content: dict[str, Any]) -> list[tuple[str, int, int, int, float, float]]:
    """Return the name, thread, number, parent's number, start and end of each module."""
    found = []
    for each in content["traceEvents"]:
        if each.get("cat") == "python_function":
            name = each["name"].removeprefix("nn.Module: ")
            number = each["args"]["Python module id"]
            parent = each["args"]["Python parent id"]
            end = each["ts"] + each["dur"]
            found.append((name, each["tid"], number, parent, each["ts"], end))
    return found


def test_categories_get_the_names_that_it_knows(tmp_path: Path) -> None:
    """Categories are renamed to those that torch-tb-profiler reads.

    A category that it would misunderstand gets a name that it ignores. All others stay.
    """
    told = [
        ("cuda_runtime", "cudaLaunchKernel", "runtime"),
        ("cuda_driver", "cuLaunchKernel", "runtime"),
        ("gpu_user_annotation", "ProfilerStep#0", "gpu_annotation"),
        ("python_function", "nn.Module: Linear_0", "python_frame"),
        (
            "user_annotation",
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
            "cpu_op",
        ),
        ("user_annotation", "ProfilerStep#0", "user_annotation"),
        ("user_annotation", "mine", "user_annotation"),
        ("kernel", "gemm", "kernel"),
        ("fwdbwd", "fwdbwd", "fwdbwd"),
    ]
    content = copied(tmp_path, *[event(name, category, 1, 2) for category, name, _ in told])
    assert [(category, name) for _, name, category in told] == [
        (each["cat"], each["name"]) for each in content["traceEvents"]
    ]


def test_collectives_get_the_names_that_it_knows(tmp_path: Path) -> None:
    """Collectives are renamed to the names that torch-tb-profiler reads."""
    told = {
        "nccl:_all_gather_base": "nccl:all_gather",
        "nccl:_reduce_scatter_base": "nccl:reduce_scatter",
        "nccl:all_to_all": "nccl:all_to_all",
    }
    content = copied(tmp_path, *[event(name, "user_annotation", 1, 2) for name in told])
    assert list(told.values()) == [each["name"] for each in content["traceEvents"]]


def test_all_else_stays_and_the_events_come_last(tmp_path: Path) -> None:
    """All other content stays, and the list of events comes last.

    torch-tb-profiler inserts its own fields before the last bracket. The field `Framework` of
    Lightning is removed, because with it torch-tb-profiler would not search for modules.
    """
    point = {
        "ph": "C",
        "cat": "?",
        "name": "FLOP/s",
        "pid": 1,
        "tid": 0,
        "ts": 2.0,
        "args": {"FLOP/s": 3},
    }
    content = copied(
        tmp_path, point, INFO=[1], Framework="pytorch-lightning", distributedInfo={"rank": 0}
    )
    assert [
        ("schemaVersion", 1),
        ("INFO", [1]),
        ("distributedInfo", {"rank": 0}),
        ("traceEvents", [point]),
    ] == list(content.items())


def test_calls_of_modules_become_modules_where_they_ran(tmp_path: Path) -> None:
    """Calls of modules become module events on the thread on which they ran.

    Each has the number of its place in the module tree, and comes before the operators in it.
    """
    operator = event("aten::mm", "cpu_op", 12, 6)
    calls = (
        module("body", "forward", 10, 10, kind="Sequential"),
        module("body.0", "forward", 12, 6),
        module("head", "forward", 20, 5, kind=None),
    )
    content = copied(tmp_path, STEP, operator, *calls)
    assert [
        ("body (Sequential)", TRAINER, 1, 0, 10, 20),
        ("body.0 (Linear)", TRAINER, 2, 1, 12, 18),
        ("head", TRAINER, 3, 0, 20, 25),
    ] == modules(content)
    assert "aten::mm" == content["traceEvents"][4]["name"]


def test_a_place_is_one_row_however_often_it_is_called(tmp_path: Path) -> None:
    """A module has one number for all of its calls from the same caller.

    With another caller, or without a caller, it has another number.
    """
    calls = [module("a", "forward", start, 10) for start in (0, 10, 60)]
    calls += [module("b", "forward", start, 2) for start in (1, 62, 80)]
    content = copied(tmp_path, STEP, *calls)
    assert [1, 2, 1, 1, 2, 3] == [number for _, _, number, _, _, _ in modules(content)]
    assert [0, 1, 0, 0, 1, 0] == [around for _, _, _, around, _, _ in modules(content)]


def test_backward_is_one_module_a_step(tmp_path: Path) -> None:
    """The backward pass of each step is one module event, with the backward slices of the modules.

    It is on the thread of the autograd nodes. A recompute slice is in the backward slice that
    needs it.
    """
    second = event("ProfilerStep#1", "user_annotation", 100, 100)
    stretches = [
        module("head", "backward", 40, 10, thread=1),
        module("", "backward", 55, 5, thread=1),
        module("head", "backward", 140, 10, thread=1),
    ]
    nodes = [node(each["ts"], 3, ENGINE) for each in stretches]
    again = module("body", "recompute", 42, 4, thread=1)
    forward = module("head", "forward", 20, 10)
    content = copied(tmp_path, STEP, second, *nodes, forward, *stretches, again)
    assert [
        ("head (Linear)", TRAINER, 1, 0, 20, 30),
        ("backward", ENGINE, 2, 0, 40, 60),
        ("head (Linear) backward", ENGINE, 3, 2, 40, 50),
        ("body (Linear) recompute", ENGINE, 4, 3, 42, 46),
        ("(model) (Linear) backward", ENGINE, 5, 2, 55, 60),
        ("backward", ENGINE, 2, 0, 140, 150),
        ("head (Linear) backward", ENGINE, 3, 2, 140, 150),
    ] == modules(content)


def test_forward_between_two_backwards_is_in_neither(tmp_path: Path) -> None:
    """A forward pass between two backward passes, as with two optimizers, is in neither of them."""
    calls = (
        module("a", "backward", 10, 10),
        module("a", "forward", 20, 10),
        module("a", "backward", 30, 10),
    )
    content = copied(tmp_path, STEP, *calls, node(10, 10), node(30, 10))
    assert [(10, 20), (30, 40)] == [
        (start, end) for name, _, _, _, start, end in modules(content) if name == "backward"
    ]


def test_calls_whose_thread_nobody_tells_and_that_cross_are_left_out(tmp_path: Path) -> None:
    """A call is left out if it crosses another call, or if its thread is unknown.

    torch-tb-profiler would otherwise leave out the calls that it crosses.
    """
    calls = (
        module("a", "forward", 10, 10),
        module("b", "forward", 15, 10),
        module("c", "forward", 10, 10, thread=2),
    )
    assert ["a (Linear)"] == [name for name, *_ in modules(copied(tmp_path, STEP, *calls))]


def test_what_ends_together_ends_together(tmp_path: Path) -> None:
    """Events with the same end also have the same end if their times are added as floats.

    Both events end at 4387374628185.086. As floats, 4387374628158.489 + 26.597 is less than
    4387374628183.178 + 1.908.
    """
    outer = (4387374628158.489, 26.597)
    inner = (4387374628183.178, 1.908)
    assert outer[0] + outer[1] < inner[0] + inner[1]
    content = copied(tmp_path, event("outer", "cpu_op", *outer), event("inner", "cpu_op", *inner))
    first, second = (each["ts"] + each["dur"] for each in content["traceEvents"])
    assert first == second == pytest.approx(4387374628185.086, abs=0.001)


def test_the_copies_of_a_folder_are_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lflops trace compat` writes the copies of a folder's traces to a folder next to it.

    The copies are compressed and have the names of the traces. A merged trace has no copy.
    """
    folder = tmp_path / "train-0-1"
    beside = tmp_path / "compat-train-0-1"
    copied(tmp_path, STEP)
    (folder / "host_1.8.pt.trace.json.gz").write_bytes(
        gzip.compress((folder / "host_0.7.pt.trace.json").read_bytes(), mtime=0)
    )
    (folder / "merged.trace.json.gz").touch()
    copies = [beside / f"host_{each}.pt.trace.json.gz" for each in ("0.7", "1.8")]
    assert 0 == main(["trace", "compat", str(folder)])
    assert [*map(str, copies)] == capsys.readouterr().out.splitlines()
    assert copies == sorted(beside.iterdir())
    assert 0 == main(["trace", "compat", str(folder), "--json"])
    assert {"files": [*map(str, copies)], "damaged": [0, 0]} == json.loads(capsys.readouterr().out)
    assert 2 == main(["trace", "compat", str(tmp_path / "missing")])
    assert "missing: is not a folder" in capsys.readouterr().err


DAMAGED = {
    "no object": 1,
    "no time": {"ph": "i", "name": "a", "ts": "soon"},
    "no length": {"ph": "X", "name": "a", "ts": 1, "dur": "long"},
    "a slice that never began": {"ph": "X", "name": "a", "dur": 1},
    "a name that is a list": {"ph": "M", "name": ["a"]},
    "a category that is a number": {"ph": "M", "name": "a", "cat": 5},
    "a module without a phase": module("a", "forward", 1, 2) | {"args": {"module": "a"}},
    "a module on no track": module("a", "forward", 1, 2) | {"tid": "first"},
    "a step without a time": {**STEP, "ts": None},
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_event_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A damaged event is missing in the copy, and the command prints how many are left out.

    Otherwise, the copy is the same as without the damaged event.
    """
    events = [STEP, event("aten::mm", "cpu_op", 12, 6), module("up", "forward", 10, 20)]
    whole = copied(tmp_path, *events)
    assert whole == copied(tmp_path, DAMAGED[kind], *events)  # type: ignore[arg-type]
    folder = str(tmp_path / "train-0-1")
    assert 0 == main(["trace", "compat", folder])
    assert (
        ".pt.trace.json.gz: left out 1 event that cannot be read; first error: "
        in capsys.readouterr().out
    )
    assert 0 == main(["trace", "compat", folder, "--json"])
    assert [1] == json.loads(capsys.readouterr().out)["damaged"]


def test_an_infinite_rate_costs_no_trace(tmp_path: Path) -> None:
    """A rate of `inf`, which C++ writes for a copy without duration, is unknown in the copy.

    No event is left out.
    """
    trace = tmp_path / "w" / "a.pt.trace.json"
    trace.parent.mkdir()
    text = json.dumps({"traceEvents": [STEP | {"args": {"GB/s": 7.5}}]})
    trace.write_text(text.replace("7.5", "inf"))
    copy, left_out = convert_for_tb_profiler(trace)
    assert 0 == left_out.number
    content = json.loads(gzip.decompress(copy.read_bytes()))
    assert {"GB/s": None} == content["traceEvents"][0]["args"]


def test_broken_json_is_refused_with_its_line_and_column(tmp_path: Path) -> None:
    """Malformed JSON is an error with the line and the column, also in a compressed file.

    The name of the compressed file does not end with `.gz`. A compressed file that is damaged is
    another error.
    """
    trace = tmp_path / "w" / "a.pt.trace.json"
    trace.parent.mkdir()
    text = b'{"traceEvents": [\n{"name": "a"},\n  {"name": "b" "}\n]}'
    for content in (text, gzip.compress(text, mtime=0)):
        trace.write_bytes(content)
        with pytest.raises(
            ProfileError,
            match=r"a\.pt\.trace\.json: is not a .* trace: line 3, column 16: JSON is malformed",
        ):
            convert_for_tb_profiler(trace)
    trace.write_bytes(gzip.compress(text, mtime=0)[:12] + b"\xff" * 30)
    with pytest.raises(
        ProfileError, match=r"a\.pt\.trace\.json: cannot be read: Compressed file ended"
    ):
        convert_for_tb_profiler(trace)


@pytest.mark.parametrize(
    "events",
    [
        "",
        "null",
        "[1]",
        '[{"name": "a", "ts": "b"}]',
        '[{"name": "a", "cat": "lflops_module", "tid": 0}]',
    ],
)
def test_what_is_no_trace_is_refused(events: str, tmp_path: Path) -> None:
    """A file that is no trace is an error that names the file, and no file is written."""
    folder = tmp_path / "w"
    folder.mkdir()
    trace = folder / "a.pt.trace.json"
    trace.write_text(f'{{"traceEvents": {events}}}')
    with pytest.raises(ProfileError, match=r"a\.pt\.trace\.json: is not a torch.profiler trace"):
        convert_for_tb_profiler(trace)
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file() and path != trace]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_program_writes_it_where_its_reader_is_installed(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The annotation program copies the annotated trace if torch-tb-profiler is installed."""
    monkeypatch.setattr(program, "is_wanted", lambda: wanted)
    folder = tmp_path / "w"
    folder.mkdir()
    raw = folder / "raw"
    raw.write_text(json.dumps({"traceEvents": [STEP]}))
    told = folder / "calls"
    told.write_text(
        '{"batches":1,"rank":3,"world_size":4,"calls":[["up","forward",10000,20000,0,true,0]]}'
    )
    into = folder / "a.1.pt.trace.json.gz"
    assert 0 == program.main([str(raw), str(told), str(into)])
    assert wanted == place(into).exists()
    if wanted:
        content = json.loads(gzip.decompress(place(into).read_bytes()))
        assert [("up", TRAINER, 1, 0, 10, 20)] == modules(content)


def test_the_program_says_what_the_copy_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The annotation program prints the events that the copy leaves out.

    The trace is still annotated and copied.
    """
    folder = tmp_path / "w"
    folder.mkdir()
    raw = folder / "raw"
    raw.write_text(json.dumps({"traceEvents": [STEP, {"ph": "i", "name": "a", "ts": "soon"}]}))
    told = folder / "calls"
    told.write_text(
        '{"batches":1,"rank":3,"world_size":4,"calls":[["up","forward",10000,20000,0,true,0]]}'
    )
    into = folder / "a.1.pt.trace.json.gz"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program, "is_wanted", lambda: True)
        assert program.PARTLY == program.main([str(raw), str(told), str(into)])
    assert (
        "1 of the events cannot be read; first error: invalid time soon" in capsys.readouterr().err
    )
    content = json.loads(gzip.decompress(place(into).read_bytes()))
    assert [("up", TRAINER, 1, 0, 10, 20)] == modules(content)


def test_a_copy_that_cannot_be_written_takes_nothing_from_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the copy cannot be written, the trace is still annotated.

    The copy cannot be written, because there is a file with the name of its folder.
    """
    folder = tmp_path / "w"
    folder.mkdir()
    (tmp_path / "compat-w").touch()
    raw = folder / "raw"
    raw.write_text('{"traceEvents": []}')
    told = folder / "calls"
    told.write_text('{"batches":1,"rank":0,"world_size":1,"calls":[]}')
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program, "is_wanted", lambda: True)
        assert program.NO_COPY == program.main([str(raw), str(told), str(folder / "a.gz")])
    assert "compat-w" in capsys.readouterr().err
    assert [folder / "a.gz"] == list(folder.iterdir())
