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
    """Two good windows of one run, and a run of all that can be wrong."""
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
    "foreign of run bad is not a summary of lflops",
    "future of run bad has format 1, but this lflops reads 4: show it with the version of lflops that wrote it",
    "large of run bad, step 0 is not a summary of lflops",
    "mixed of run bad, step 1 is unreadable: it is damaged, or not compressed with deflate",
    "newer of run bad, step 0 has format 12, but this lflops reads 4: show it with the version of lflops that wrote it",
    "other of run bad, step 0 is not a summary of lflops",
    "text of run bad, step 0 is unreadable: it is damaged, or not compressed with deflate",
]


@pytest.fixture(scope="module", params=["--load_fast=false", "--load_fast=true"])
def server(logdir: Path, request: pytest.FixtureRequest) -> Iterator[Board]:
    """With either of the loaders that TensorBoard has."""
    with board(logdir, request.param) as running:
        yield running


def test_what_can_be_shown_is_listed_and_what_cannot_is_named(server: Board) -> None:
    """The unreadable, the future and the foreign one with the reason.

    The windows beside them all the same.
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
    """3 ms and 4 samples a step, a peak of 3000 bytes; MFU and tokens are unknown."""
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
    """Deflated where the browser takes that, else inflated.

    Its traces are named as they are reached from the run's folder.
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
    """As Python makes it, deflated where the browser takes that; a window that has none says so."""
    server.windows(expected=4 + len(PROBLEMS))
    analysis = analyze(small_profile())
    logged = msgspec.json.encode(timeline(analysis, payload(analysis).memory))
    for accept, sent in ("identity", logged), ("gzip, deflate", packed(logged)):
        status, _, body = server.get(
            "timeline", run="good", tag="lflops/fit/profile", step=8, accept=accept
        )
        assert (200, sent) == (status, body)
    assert (404, b"this window has no timeline") == server.get(
        "timeline", run="bad", tag="bare", step=0
    )[::2]
    assert 404 == server.get("timeline", run="good", tag="lflops/fit/profile", step=7)[0]


def test_a_window_that_cannot_be_shown_is_refused(server: Board) -> None:
    """With the reason; and one that is not there is not found, whatever it is called."""
    server.windows(expected=4 + len(PROBLEMS))
    status, _, body = server.get("window", run="bad", tag="large", step=0)
    assert (422, f"this window inflates to more than {LARGEST} bytes".encode()) == (status, body)
    for run, tag, step in (
        ("good", "lflops/fit/profile", 7),
        ("../..", "/etc/passwd", 0),
        ("", "", "x"),
    ):
        assert 404 == server.get("window", run=run, tag=tag, step=step)[0]


def test_two_windows_are_compared(server: Board, logdir: Path) -> None:
    """As Python compares their profiles; deflated where the browser takes that."""
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
    """With the reason, which names the window; one that is not there is not found."""
    server.windows(expected=4 + len(PROBLEMS))
    good = {"run": "good", "tag": "lflops/fit/profile", "step": 8}
    for tag, problem in (
        ("cut", "is unreadable: its end is missing"),
        ("other", "is not a summary of lflops"),
    ):
        other = {"run": "bad", "tag": tag, "step": 0}
        for before, after in (good, other), (other, good):
            status, _, body = server.get(
                "compare", **{f"before_{name}": each for name, each in before.items()}, **after
            )
            assert (422, f"{tag} of run bad, step 0 {problem}".encode()) == (status, body)
    status, _, body = server.get(
        "compare",
        **{f"before_{name}": each for name, each in good.items()},
        run="bad",
        tag="bare",
        step=0,
    )
    assert (
        422,
        b"these windows lack data that a comparison needs: Object missing required field `modules`",
    ) == (
        status,
        body,
    )
    assert (
        404
        == server.get("compare", **good)[0]
        == server.get("compare", **good, before_run="good", before_tag="x", before_step=8)[0]
    )


def test_the_page_s_files_are_served_and_no_others(server: Board) -> None:
    """The style sheet as it is, and one script with all modules that the entry imports, which gives TensorBoard `render`."""
    style = (ROOT / "lflops" / "page" / "shell" / "style.css").read_bytes()
    (sheet, sheet_headers, sent), (status, headers, script) = (
        server.get("shell/style.css"),
        server.get("entry/tensorboard.js"),
    )
    assert (200, 200, style) == (sheet, status, sent)
    assert ["text/css", "text/javascript"] == [
        each["Content-Type"].partition(";")[0] for each in (sheet_headers, headers)
    ]
    assert script.decode().endswith("export const { render } = $entry_tensorboard;\n")
    assert b"const $shell_app = (() => {" in script
    assert b"\nimport " not in script
    for path in ("shell/app.js", "../tensorboard/tab.py", "..%2Fprofile.py", "tab.py"):
        assert 404 == server.get(path)[0]


def test_tensorboard_shows_the_tab_by_the_entry_point() -> None:
    """What pyproject.toml names is the plugin."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    assert resolve_name(points["tensorboard_plugins"]["lflops"]) is Tab


def test_the_tab_loads_nothing_that_it_does_not_need() -> None:
    """What only training needs may be missing: plugins are loaded outside of any `try`.

    Comparing needs msgspec.
    """
    heavy = {"torch", "lightning", "pytorch_lightning", "rich", "matplotlib", "msgspec"}
    for module, needed in (
        ("lflops.tensorboard.tab", set()),
        ("lflops.report.payload.compare", {"msgspec"}),
    ):
        code = f"import sys; import {module}; print(*{heavy - needed} & sys.modules.keys())"
        assert (
            ""
            == subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, text=True
            ).stdout.strip()
        )


def test_a_payload_is_read_back() -> None:
    """Up to the bound, and not beyond it."""
    assert SMALL == unpacked(packed(SMALL))
    start = b'{"lflops":4'
    whole = start + bytes(LARGEST - len(start))
    assert whole == unpacked(packed(whole))
    with pytest.raises(ValueError, match="inflates to more than"):
        unpacked(packed(whole + b" "))


@pytest.mark.parametrize("value", [None, "text", 1.5, b"", b"x"])
def test_what_is_no_payload_is_refused(value: object) -> None:
    """As an error that says so."""
    with pytest.raises(ValueError, match=r"^is "):
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
    """Whatever stands where it would be; nor does that of a payload that has none."""
    empty: dict[str, object] = {"partial": False, "figures": {}, "ranges": {}}
    assert head(packed(b'{"lflops":4,"head":' + written)) in ({}, empty)
    assert {} == head(packed(b'{"lflops":4,"title":"x"}'))


def test_of_a_head_only_what_has_its_type_is_taken() -> None:
    """Numbers, words and pairs of numbers; the rest is left out."""
    written = b'{"step":7,"kind":"fit","device":3,"figures":{"step":0.5,"pass":2,"x":"1","y":NaN},"ranges":{"step":[0.4,0.6],"z":[1]}}'
    figures, ranges = {"step": 0.5, "pass": 2.0}, {"step": [0.4, 0.6]}
    expected = {"kind": "fit", "step": 7, "partial": False, "figures": figures, "ranges": ranges}
    assert expected == head(packed(b'{"lflops":4,"head":' + written + b',"title":"x"}'))


def test_versions_are_told_apart() -> None:
    """Ours fits; a number is another version, however long; anything else is not ours."""
    assert "" == metadata_problem(b"4")
    assert metadata_problem(b"3" * 1000).startswith("has format 333333333, ")
    assert "is not a summary of lflops" == metadata_problem(b"") == metadata_problem(b"\xff")


def test_a_writer_that_is_none_is_refused(tmp_path: Path) -> None:
    """And one that is closed."""
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
    """A run whose summary names its trace, and one whose summary names whatever somebody would like to have."""
    folder = tmp_path_factory.mktemp("traced")
    logs, secret = folder / "logs", folder / NAME
    (trace := logs / "good" / "lflops_traces" / "w" / NAME).parent.mkdir(parents=True)
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
        lflops.tensorboard.log(
            writer, replace(small_profile(), trace=Trace(files={"0": str(trace)})), 8
        )
    with SummaryWriter(logs / "bad") as writer:
        write(
            writer,
            "asks",
            packed(
                json.dumps({"lflops": 4, "traces": [{"file": file} for file in REFUSED]}).encode()
            ),
        )
        write(writer, "odd", packed(b'{"lflops":4,"traces":[3,{"file":3},{}]}'))
        write(writer, "none", packed(b'{"lflops":4}'))
        write(writer, "cut", packed(SMALL)[:-9])
    with board(logs) as running:
        running.windows(expected=5)
        yield running


REFUSED = {
    f"../../{NAME}": (403, b"the trace is not below the log directory"),
    f"out_{NAME}": (403, b"the trace is not below the log directory"),
    f"linked/{NAME}": (403, b"the trace is not below the log directory"),
    "../../../../../../../../etc/passwd": (403, b"the summary lists a file that is not a trace"),
    "/etc/passwd": (403, b"the summary lists a file that is not a trace"),
    "weights.pt": (403, b"the summary lists a file that is not a trace"),
    f"folder_{NAME}": (404, b"the trace cannot be read: is a folder, a pipe or a device"),
    f"pipe_{NAME}": (404, b"the trace cannot be read: is a folder, a pipe or a device"),
    f"a\r\nb: c{NAME}": (403, b"the summary lists a file that is not a trace"),
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
"""What a summary may name, and what comes of it."""


def test_a_trace_is_served_by_the_summary_s_name(traced: Board) -> None:
    """As it is, to be saved under its own name."""
    status, headers, body = traced.get(
        "trace", run="good", tag="lflops/fit/profile", step=8, index=0
    )
    assert (200, TRACE, str(len(TRACE))) == (status, body, headers["Content-Length"])
    assert f'attachment; filename="{NAME}"' == headers["Content-Disposition"]


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=range(len(REFUSED)))
def test_a_trace_that_is_none_or_elsewhere_is_refused(traced: Board, index: int) -> None:
    """Whatever a summary names."""
    status, _, body = traced.get("trace", run="bad", tag="asks", step=0, index=index)
    assert [*REFUSED.values()][index] == (status, body)


def test_a_request_names_no_file(traced: Board) -> None:
    """It says which of a summary's it wants.

    What a summary holds that is no list of files is refused as well.
    """
    for run in ("../..", "/etc", "good/../good", "", "bad/linked"):
        assert 404 == traced.get("trace", run=run, tag="lflops/fit/profile", step=8, index=0)[0]
    for index in ("1", "-1", "", "x", "²", "0" * 9, NAME, f"../../{NAME}"):
        assert (
            404
            == traced.get(
                "trace", run="good", tag="lflops/fit/profile", step=8, index=index, file=NAME
            )[0]
        )
    assert 404 == traced.get("trace", run="good", tag="lflops/fit/profile", step=8)[0]
    assert [403, 403, 403, 404] == [
        traced.get("trace", run="bad", tag="odd", step=0, index=index)[0] for index in range(4)
    ]
    assert 404 == traced.get("trace", run="bad", tag="none", step=0, index=0)[0]
    assert 403 == traced.get("trace", run="bad", tag="cut", step=0, index=0)[0]


def test_an_absolute_name_is_held_to_the_same(tmp_path: Path) -> None:
    """Elsewhere it is refused, by whichever way it is named.

    Below the log directory it is what it is.
    """
    logs = tmp_path / "logs"
    logs.mkdir()
    for folder in (logs, tmp_path):
        (folder / NAME).write_bytes(TRACE)

    def named(file: Path) -> bytes:
        return json.dumps({"lflops": 4, "traces": [{"file": str(file)}]}).encode()

    with pytest.raises(ValueError, match="is not below the log directory"):
        opened(named(tmp_path / NAME), "0", logs / "run", logs)
    with opened(named(logs / NAME), "0", logs / "run", logs).file as file:
        assert TRACE == file.read()


@pytest.mark.parametrize(
    ("site", "expected"),
    [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)],
)
def test_a_page_of_another_site_gets_nothing(traced: Board, site: str, expected: int) -> None:
    """Browsers say with each request whose page makes it; scripts cannot change that."""
    status, headers, body = traced.get("windows", headers={"Sec-Fetch-Site": site})
    assert expected == status
    assert "same-origin" == headers["Cross-Origin-Resource-Policy"]
    assert (expected == 403) == (body == b"the request came from another site")


def test_a_payload_of_millions_of_values_takes_little_memory() -> None:
    """Sixty megabytes of empty objects would be gigabytes of Python's dictionaries."""
    values = b"{}," * (LARGEST // 3 - 100)
    payload = b'{"lflops":4,"other":[' + values + b'{}],"traces":[' + values[:3000000] + b"{}]}"
    tracemalloc.start()
    with pytest.raises(LookupError, match="lists no such trace"):
        trace_file(payload, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_a_ledger_elsewhere_is_refused(tmp_path: Path) -> None:
    """A link in a folder of the run leads out of the log directory."""
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
    assert (403, b"the ledger is not below the log directory") == (status, body)


def test_a_ledger_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    """Anybody who can write into the folder of a run can make one."""
    with SummaryWriter(tmp_path / "run") as writer:
        lflops.tensorboard.log(writer, small_profile(), 8)
    (tmp_path / "run" / "lflops").mkdir()
    os.mkfifo(tmp_path / "run" / "lflops" / "rank0-1-1.ledger.jsonl")
    with board(tmp_path) as running:
        running.windows(expected=1)
        status, _, body = running.get("run", run="run", tag="lflops/fit/profile", step=8)
    assert 422 == status
    assert b"is a folder, a pipe or a device" in body
