"""Test the server of the LFLOPS tab in a real TensorBoard, with its two data loaders.

Tests that need no server call the functions that pack, read and check payloads.
"""

import json
import os
import subprocess
import sys
import tomllib
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import msgspec
import pytest
from msgspec.structs import replace
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops.analysis.analysis import analyze
from lflops.profile.records import Trace
from lflops.report.payload.compare import compared_windows
from lflops.report.payload.memory import timeline
from lflops.report.payload.payload import payload
from lflops.tensorboard.payload_event import LARGEST, head, metadata_problem, packed, unpacked
from lflops.tensorboard.payload_traces import trace_file
from lflops.tensorboard.tab import Tab, opened
from tests.support.profile_builders import small_profile
from tests.support.repository import ROOT
from tests.support.tensorboard_server import Board, board, write

SMALL = msgspec.json.encode(payload(analyze(small_profile())))
NAME = "host_0.7.pt.trace.json.gz"
TRACE = b"a trace"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two good windows of one run, and a run with every kind of bad value."""
    path = tmp_path_factory.mktemp("logs")
    with SummaryWriter(path / "good") as writer:
        lflops.tensorboard.log(writer, small_profile(), 8)
        lflops.tensorboard.log(writer, small_profile(), 9)
    with SummaryWriter(path / "bad") as writer:
        write(writer, "future", b"?", metadata=b"1")
        write(writer, "foreign", b"?", metadata=b"{}")
        write(writer, "text", b"not deflated")
        write(writer, "cut", packed(SMALL)[:-9])
        write(writer, "large", zlib.compress(bytes(LARGEST + 1)))
        write(writer, "other", zlib.compress(b'{"weights":1}'))
        write(writer, "bare", packed(b'{"lflops":4}'))
        write(writer, "newer", packed(b'{"lflops":12}'))
        write(writer, "mixed", b"not deflated", step=1)
        lflops.tensorboard.log(writer, small_profile(), 2, tag="mixed")
    return path


PROBLEMS = [
    "cut of run bad, step 0 is unreadable: its end is missing",
    "foreign of run bad was not written by lflops",
    (
        "future of run bad has format version 1, but this version of lflops reads only "
        "version 4: open it with the version of lflops that wrote it"
    ),
    "large of run bad, step 0 was not written by lflops",
    "mixed of run bad, step 1 is unreadable: it is damaged, or not compressed with deflate",
    (
        "newer of run bad, step 0 has format version 12, but this version of lflops reads only "
        "version 4: open it with the version of lflops that wrote it"
    ),
    "other of run bad, step 0 was not written by lflops",
    "text of run bad, step 0 is unreadable: it is damaged, or not compressed with deflate",
]


@pytest.fixture(scope="module", params=["--load_fast=false", "--load_fast=true"])
def server(logdir: Path, request: pytest.FixtureRequest) -> Iterator[Board]:
    """Start TensorBoard on the log directory, once with each of its two data loaders."""
    with board(logdir, request.param) as running:
        yield running


def test_what_can_be_shown_is_listed_and_what_cannot_is_named(server: Board) -> None:
    """Each unreadable, newer or foreign value is listed as a problem with its reason.

    The readable windows of the same run are listed nevertheless.
    """
    found = server.windows(expected=4 + len(PROBLEMS))
    assert PROBLEMS == sorted(found["problems"])
    places = {(each["run"], each["tag"], each["step"]) for each in found["windows"]}
    assert {
        ("good", "lflops/fit/profile", 8),
        ("good", "lflops/fit/profile", 9),
        ("bad", "mixed", 2),
        ("bad", "bare", 0),
    } == places


def test_what_is_listed_has_the_figures_that_it_is_followed_by(server: Board) -> None:
    """The list has the figures of a window that the page shows as trends over steps.

    By `small_profile`, a step takes 3 ms and has 4 samples, and the peak is 3000 bytes. The list
    has no MFU and no tokens per second, because they are unknown.
    """
    found = server.windows(expected=4 + len(PROBLEMS))
    shown = found["windows"][0]["head"]
    figures = shown["figures"]
    assert (8, "window 0, step 8", "fit", "ddp", 2) == tuple(
        shown[name] for name in ("step", "when", "kind", "strategy", "ranks")
    )
    assert {"achieved", "samples/s", "step", "data", "peak live memory"} == figures.keys()
    assert (pytest.approx(4 / 3e-3), 3e-3, 3000) == tuple(
        figures[label] for label in ("samples/s", "step", "peak live memory")
    )


def test_a_window_comes_as_it_was_logged(server: Board, logdir: Path) -> None:
    """A window is sent as it was logged, compressed only if the request accepts deflate.

    In the payload, the paths of traces are relative to the folder of the run.
    """
    server.windows(expected=4 + len(PROBLEMS))
    logged = msgspec.json.encode(payload(analyze(small_profile()), logdir / "good"))
    for accept, sent in ("identity", logged), ("gzip, deflate", packed(logged)):
        status, headers, body = server.get(
            "window", run="good", tag="lflops/fit/profile", step=8, accept=accept
        )
        assert (200, "application/json", sent) == (status, headers["Content-Type"], body)
        assert ("deflate" if sent is not logged else None) == headers.get("Content-Encoding")


def test_the_timeline_of_a_window_comes_by_itself(server: Board) -> None:
    """The timeline of a window has its own route; without a timeline, the reply is 404.

    It equals the timeline that Python computes, and is compressed only if the request accepts
    deflate.
    """
    server.windows(expected=4 + len(PROBLEMS))
    analysis = analyze(small_profile())
    logged = msgspec.json.encode(timeline(analysis, payload(analysis).memory))
    for accept, sent in ("identity", logged), ("gzip, deflate", packed(logged)):
        status, _, body = server.get(
            "timeline", run="good", tag="lflops/fit/profile", step=8, accept=accept
        )
        assert (200, sent) == (status, body)
    status, _, body = server.get("timeline", run="bad", tag="bare", step=0)
    assert (404, b"this window has no timeline") == (status, body)
    assert 404 == server.get("timeline", run="good", tag="lflops/fit/profile", step=7)[0]


def test_a_window_that_cannot_be_shown_is_refused(server: Board) -> None:
    """The reply for an unreadable window gives the reason; an unknown window is not found."""
    server.windows(expected=4 + len(PROBLEMS))
    status, _, body = server.get("window", run="bad", tag="large", step=0)
    assert (
        422,
        f"this window is too large: it has more than {LARGEST} bytes after decompression".encode(),
    ) == (status, body)
    for run, tag, step in (
        ("good", "lflops/fit/profile", 7),
        ("../..", "/etc/passwd", 0),
        ("", "", "x"),
    ):
        assert 404 == server.get("window", run=run, tag=tag, step=step)[0]


def test_two_windows_are_compared(server: Board, logdir: Path) -> None:
    """The comparison equals that of Python, compressed only if the request accepts deflate."""
    server.windows(expected=4 + len(PROBLEMS))
    logged = msgspec.json.encode(payload(analyze(small_profile()), logdir / "good"))
    before = {"before_run": "good", "before_tag": "lflops/fit/profile", "before_step": 8}
    for accept, sent in (
        ("identity", compared_windows(logged, logged)),
        ("deflate", packed(compared_windows(logged, logged))),
    ):
        status, headers, body = server.get(
            "compare", **before, run="bad", tag="mixed", step=2, accept=accept
        )
        assert (200, "application/json", sent) == (status, headers["Content-Type"], body)


def test_windows_that_cannot_be_compared_are_refused(server: Board) -> None:
    """The reply names the window and the reason; an unknown window is not found."""
    server.windows(expected=4 + len(PROBLEMS))
    good = {"run": "good", "tag": "lflops/fit/profile", "step": 8}
    before_good = {f"before_{name}": value for name, value in good.items()}
    for tag, problem in (
        ("cut", "is unreadable: its end is missing"),
        ("other", "was not written by lflops"),
    ):
        other = {"run": "bad", "tag": tag, "step": 0}
        before_other = {f"before_{name}": value for name, value in other.items()}
        for before, after in (before_good, other), (before_other, good):
            status, _, body = server.get("compare", **before, **after)
            assert (422, f"{tag} of run bad, step 0 {problem}".encode()) == (status, body)
    status, _, body = server.get("compare", **before_good, run="bad", tag="bare", step=0)
    assert 422 == status
    assert (
        b"these windows lack data that a comparison needs: Object missing required field `modules`"
        == body
    )
    assert 404 == server.get("compare", **good)[0]
    unknown = {"before_run": "good", "before_tag": "x", "before_step": 8}
    assert 404 == server.get("compare", **good, **unknown)[0]


def test_the_page_s_files_are_served_and_no_others(server: Board) -> None:
    """The tab serves only the style sheet and one script; all other paths are not found.

    The script contains all modules that the entry imports, and exports `render` to TensorBoard.
    """
    style = (ROOT / "lflops" / "page" / "shell" / "style.css").read_bytes()
    status, headers, sheet = server.get("shell/style.css")
    assert (200, style) == (status, sheet)
    assert "text/css" == headers["Content-Type"].partition(";")[0]
    status, headers, script = server.get("entry/tensorboard.js")
    assert 200 == status
    assert "text/javascript" == headers["Content-Type"].partition(";")[0]
    assert script.decode().endswith("export const { render } = $entry_tensorboard;\n")
    assert b"const $shell_app = (() => {" in script
    assert b"\nimport " not in script
    for path in ("shell/app.js", "../tensorboard/tab.py", "..%2Fprofile.py", "tab.py"):
        assert 404 == server.get(path)[0]


def test_tensorboard_shows_the_tab_by_the_entry_point() -> None:
    """The entry point in `pyproject.toml` names the plugin class."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    assert resolve_name(points["tensorboard_plugins"]["lflops"]) is Tab


def test_the_tab_loads_nothing_that_it_does_not_need() -> None:
    """The tab imports no package that only training needs; comparing windows imports only msgspec.

    TensorBoard imports plugins outside any `try`, so a failed import would stop TensorBoard.
    """
    heavy = {"torch", "lightning", "pytorch_lightning", "rich", "matplotlib", "msgspec"}
    for module, needed in (
        ("lflops.tensorboard.tab", set()),
        ("lflops.report.payload.compare", {"msgspec"}),
    ):
        code = f"import sys; import {module}; print(*{heavy - needed} & sys.modules.keys())"
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "" == ended.stdout.strip()


def test_a_payload_is_read_back() -> None:
    """A payload of at most `LARGEST` bytes is unpacked; a larger payload is refused."""
    assert SMALL == unpacked(packed(SMALL))
    start = b'{"lflops":4'
    whole = start + bytes(LARGEST - len(start))
    assert whole == unpacked(packed(whole))
    with pytest.raises(ValueError, match="bytes after decompression"):
        unpacked(packed(whole + b" "))


@pytest.mark.parametrize("value", [None, "text", 1.5, b"", b"x"])
def test_what_is_no_payload_is_refused(value: object) -> None:
    """The error says what is wrong with the value."""
    with pytest.raises(ValueError, match=r"^(is unreadable|was not written by lflops)"):
        unpacked(value)


@pytest.mark.parametrize(
    "written",
    [
        b"[1]",
        b"null",
        b'{"figures":',
        b'{"figures":{"step":1' + b"0" * 400 + b"}}",
        b'{"a":' * 600 + b"1",
        b"\xff",
    ],
)
def test_what_is_no_head_shows_nothing(written: bytes) -> None:
    """A head that is damaged or missing gives no figures, and no error."""
    empty: dict[str, object] = {"partial": False, "figures": {}, "ranges": {}}
    assert head(packed(b'{"lflops":4,"head":' + written)) in ({}, empty)
    assert {} == head(packed(b'{"lflops":4,"title":"x"}'))


def test_of_a_head_only_what_has_its_type_is_taken() -> None:
    """Fields with an unexpected type are left out of the head.

    Figures must be finite numbers, and ranges must be pairs of numbers.
    """
    written = (
        b'{"step":7,"kind":"fit","device":3,"figures":{"step":0.5,"pass":2,"x":"1","y":NaN},'
        b'"ranges":{"step":[0.4,0.6],"z":[1]}}'
    )
    figures = {"step": 0.5, "pass": 2.0}
    ranges = {"step": [0.4, 0.6]}
    expected = {"kind": "fit", "step": 7, "partial": False, "figures": figures, "ranges": ranges}
    assert expected == head(packed(b'{"lflops":4,"head":' + written + b',"title":"x"}'))


def test_versions_are_told_apart() -> None:
    """Format 4 has no problem, other numbers are other versions, and any other text is foreign.

    Of a very long number, the message shows only the first nine digits.
    """
    assert "" == metadata_problem(b"4")
    assert metadata_problem(b"3" * 1000).startswith("has format version 333333333, ")
    assert "was not written by lflops" == metadata_problem(b"") == metadata_problem(b"\xff")


def test_a_writer_that_is_none_is_refused(tmp_path: Path) -> None:
    """`log` accepts neither `None` nor a closed writer."""
    writer = SummaryWriter(tmp_path)
    writer.close()
    for given in (writer, None):
        with pytest.raises(
            TypeError,
            match=f"writer={type(given).__name__}: pass a torch.utils.tensorboard.SummaryWriter",
        ):
            lflops.tensorboard.log(given, small_profile(), 0)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """Start TensorBoard on a run with a valid trace and a run with hostile or broken paths."""
    folder = tmp_path_factory.mktemp("traced")
    logs = folder / "logs"
    secret = folder / NAME
    trace = logs / "good" / "lflops_traces" / "w" / NAME
    trace.parent.mkdir(parents=True)
    (logs / "bad").mkdir()
    for file in (trace, logs / "bad" / "weights.pt"):
        file.write_bytes(TRACE)
    secret.write_bytes(b"a secret")
    (logs / "bad" / f"out_{NAME}").symlink_to(secret)
    (logs / "bad" / f"round_{NAME}").symlink_to(logs / "bad" / f"round_{NAME}")
    (logs / "bad" / "linked").symlink_to(folder)
    (logs / "bad" / f"folder_{NAME}").mkdir()
    os.mkfifo(logs / "bad" / f"pipe_{NAME}")
    with SummaryWriter(logs / "good") as writer:
        with_trace = replace(small_profile(), trace=Trace(files={"0": str(trace)}))
        lflops.tensorboard.log(writer, with_trace, 8)
    with SummaryWriter(logs / "bad") as writer:
        hostile = {"lflops": 4, "traces": [{"file": file} for file in REFUSED]}
        write(writer, "asks", packed(json.dumps(hostile).encode()))
        write(writer, "odd", packed(b'{"lflops":4,"traces":[3,{"file":3},{}]}'))
        write(writer, "none", packed(b'{"lflops":4}'))
        write(writer, "cut", packed(SMALL)[:-9])
    with board(logs) as running:
        running.windows(expected=5)
        yield running


REFUSED = {
    f"../../{NAME}": (403, b"the file is not a trace in TensorBoard's log directory"),
    f"out_{NAME}": (403, b"the file is not a trace in TensorBoard's log directory"),
    f"linked/{NAME}": (403, b"the file is not a trace in TensorBoard's log directory"),
    "../../../../../../../../etc/passwd": (403, b"this window lists a file that is not a trace"),
    "/etc/passwd": (403, b"this window lists a file that is not a trace"),
    "weights.pt": (403, b"this window lists a file that is not a trace"),
    f"folder_{NAME}": (
        404,
        b"the trace cannot be read: not a regular file, but a folder, a pipe or a device",
    ),
    f"pipe_{NAME}": (
        404,
        b"the trace cannot be read: not a regular file, but a folder, a pipe or a device",
    ),
    f"a\r\nb: c{NAME}": (403, b"this window lists a file that is not a trace"),
    f"missing_{NAME}": (
        404,
        b"the trace does not exist, or is still being written in the background",
    ),
    f"round_{NAME}": (
        404,
        b"the trace does not exist, or is still being written in the background",
    ),
    f"a\0b/{NAME}": (404, b"the trace does not exist, or is still being written in the background"),
}
"""Paths in the hostile summary, each with the status and the text of the reply."""


def test_a_trace_is_served_by_the_summary_s_name(traced: Board) -> None:
    """A trace is sent unchanged, as a download with the name of its file."""
    status, headers, body = traced.get(
        "trace", run="good", tag="lflops/fit/profile", step=8, index=0
    )
    assert (200, TRACE, str(len(TRACE))) == (status, body, headers["Content-Length"])
    assert f'attachment; filename="{NAME}"' == headers["Content-Disposition"]


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=range(len(REFUSED)))
def test_a_trace_that_is_none_or_elsewhere_is_refused(traced: Board, index: int) -> None:
    """Each hostile or broken path is refused with its own reason."""
    status, _, body = traced.get("trace", run="bad", tag="asks", step=0, index=index)
    assert [*REFUSED.values()][index] == (status, body)


def test_a_request_names_no_file(traced: Board) -> None:
    """A request selects a trace by its index in the summary; it cannot name a file.

    An unknown run or an invalid index is not found, and a summary whose list of traces is damaged
    is refused.
    """
    for run in ("../..", "/etc", "good/../good", "", "bad/linked"):
        assert 404 == traced.get("trace", run=run, tag="lflops/fit/profile", step=8, index=0)[0]
    for index in ("1", "-1", "", "x", "²", "0" * 9, NAME, f"../../{NAME}"):
        status, _, _ = traced.get(
            "trace", run="good", tag="lflops/fit/profile", step=8, index=index, file=NAME
        )
        assert 404 == status
    assert 404 == traced.get("trace", run="good", tag="lflops/fit/profile", step=8)[0]
    assert [403, 403, 403, 404] == [
        traced.get("trace", run="bad", tag="odd", step=0, index=index)[0] for index in range(4)
    ]
    assert 404 == traced.get("trace", run="bad", tag="none", step=0, index=0)[0]
    assert 403 == traced.get("trace", run="bad", tag="cut", step=0, index=0)[0]


def test_an_absolute_name_is_held_to_the_same(tmp_path: Path) -> None:
    """An absolute path is served if it is below the log directory, and refused otherwise."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for folder in (logs, tmp_path):
        (folder / NAME).write_bytes(TRACE)

    def named(file: Path) -> bytes:
        return json.dumps({"lflops": 4, "traces": [{"file": str(file)}]}).encode()

    with pytest.raises(ValueError, match="is not a trace in TensorBoard's log directory"):
        opened(named(tmp_path / NAME), "0", logs / "run", logs)
    with opened(named(logs / NAME), "0", logs / "run", logs).file as file:
        assert TRACE == file.read()


@pytest.mark.parametrize(
    ("site", "expected"),
    [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)],
)
def test_a_page_of_another_site_gets_nothing(traced: Board, site: str, expected: int) -> None:
    """Requests that a page of another site makes are refused.

    Browsers send `Sec-Fetch-Site` with each request, and scripts cannot change this header.
    """
    status, headers, body = traced.get("windows", headers={"Sec-Fetch-Site": site})
    assert expected == status
    assert "same-origin" == headers["Cross-Origin-Resource-Policy"]
    assert (expected == 403) == (body == b"the request came from another site")


def test_a_payload_of_millions_of_values_takes_little_memory() -> None:
    """Searching 60 MB of empty objects for a trace allocates less than 10 MiB.

    As Python dictionaries, these objects would take gigabytes.
    """
    values = b"{}," * (LARGEST // 3 - 100)
    payload = b'{"lflops":4,"other":[' + values + b'{}],"traces":[' + values[:3000000] + b"{}]}"
    tracemalloc.start()
    with pytest.raises(LookupError, match="has no trace with this number"):
        trace_file(payload, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_a_ledger_elsewhere_is_refused(tmp_path: Path) -> None:
    """A ledger is refused if a link in the run's folder leads out of the log directory."""
    logs = tmp_path / "logs"
    with SummaryWriter(logs / "run") as writer:
        lflops.tensorboard.log(writer, small_profile(), 8)
    name = "rank0-1-1.ledger.jsonl"
    (tmp_path / name).write_text("")
    (logs / "run" / "lflops" / "part").mkdir(parents=True)
    (logs / "run" / "lflops" / "part" / name).symlink_to(tmp_path / name)
    with board(logs) as running:
        running.windows(expected=1)
        status, _, body = running.get("run", run="run", tag="lflops/fit/profile", step=8)
    assert (403, b"the ledger is outside TensorBoard's log directory") == (status, body)


def test_a_ledger_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    """A named pipe is refused and not opened, because the server would wait for a writer.

    Any user who can write into the folder of a run can create such a pipe.
    """
    with SummaryWriter(tmp_path / "run") as writer:
        lflops.tensorboard.log(writer, small_profile(), 8)
    (tmp_path / "run" / "lflops").mkdir()
    os.mkfifo(tmp_path / "run" / "lflops" / "rank0-1-1.ledger.jsonl")
    with board(tmp_path) as running:
        running.windows(expected=1)
        status, _, body = running.get("run", run="run", tag="lflops/fit/profile", step=8)
    assert 422 == status
    assert b"not a regular file, but a folder, a pipe or a device" in body
