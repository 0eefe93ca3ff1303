"""Make files with damaged bytes for every reader of lflops, and record how the readers respond.

A reader may accept a file, or refuse it with one line and exit status 2. A traceback, more time or
more memory than allowed is a defect.
"""

import contextlib
import gzip
import io
import json
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from lflops.analysis.analysis import analyze
from lflops.cli.main import main
from lflops.report.payload.compare import compared_windows
from lflops.report.payload.payload import payload as payload_of
from lflops.tensorboard.payload_event import head, inflated, packed, unpacked
from lflops.tensorboard.payload_traces import trace_file
from lflops.trace.annotate_in_background import main as annotate
from tests.memory.snapshots.test_causes import PLANTED
from tests.support.damaged_files import CHIP, DEEPSPEED, deepspeed
from tests.support.ledgers import write_resumed_run
from tests.support.ncu_logs import CSV, LOG, RAW
from tests.support.profile_builders import small_profile
from tests.support.traces_by_hand import small_gpu_trace

LONGEST = 5
"""Seconds that a command may take for a file."""

MEMORY = 300_000_000
MEMORY_PER_BYTE = 10
"""A command may use `MEMORY` bytes, and in addition `MEMORY_PER_BYTE` for each byte of the file."""

TRACE = "a_0.1.pt.trace.json"


class Reader(NamedTuple):
    """Files of one kind, and the commands that read them.

    Attributes:
        file: The name of the damaged file.
        originals: Undamaged files.
        commands: The commands that run in the folder of the file, in this order.
        is_compressed: Whether the file is compressed after it was damaged. The file can then be
            decompressed, and the reader of its text receives the damage.
    """

    file: str
    originals: Sequence[bytes]
    commands: Sequence[str]
    is_compressed: bool = False


def originals(folder: Path) -> dict[str, Reader]:
    """Return the readers by name. The undamaged files of some are first written to a folder."""
    small_profile().save(folder / "profile")
    write_resumed_run(folder / "ledger")
    profile = (folder / "profile").read_bytes()
    ledgers = [each.read_bytes() for each in (folder / "ledger").iterdir()]
    trace = small_gpu_trace().text()
    calls = b'{"batches":1,"rank":0,"world_size":1,"calls":[]}'
    snapshots = [PLANTED[name][0]().snapshot() for name in ("outputs in a list", "logits")]
    shown = ["show x", "show x --operators", "why x", "what-if x --batch 2", "html x --json"]
    traced = [f"trace show {TRACE}", "trace merge .", "trace compat .", f"roofline {TRACE}"]
    packed_traces = [each.replace(".json", ".json.gz") for each in traced]
    payload = msgspec.json.encode(payload_of(analyze(small_profile())))
    return {
        "profile": Reader("x", [profile], shown),
        "two profiles": Reader("x", [profile], ["diff x x"]),
        "trace": Reader(TRACE, [trace], traced),
        "compressed trace": Reader(f"{TRACE}.gz", [gzip.compress(trace, mtime=0)], packed_traces),
        "trace in gzip": Reader(f"{TRACE}.gz", [trace], packed_traces, is_compressed=True),
        "raw trace": Reader("raw", [trace], ["annotate"]),
        "recorded calls": Reader("calls", [calls], ["annotate"]),
        "snapshot": Reader("x", [*map(pickle.dumps, snapshots)], ["memory x", "memory x x"]),
        "old snapshot": Reader("x", [pickle.dumps(snapshots[0], 1)], ["memory x"]),
        "ledger": Reader("rank0-1.ledger.jsonl", ledgers, ["ledger .", "window ."]),
        "log of Nsight Compute": Reader(
            "x", [LOG.encode(), CSV.encode(), RAW.encode()], ["roofline --ncu x"]
        ),
        "table of chips": Reader("x.toml", [CHIP.encode()], ["hardware x.toml"]),
        "DeepSpeed's configuration": Reader("x", [json.dumps(DEEPSPEED).encode()], ["deepspeed"]),
        "payload of an event": Reader("x", [packed(payload)], ["event"]),
        "payload in an event": Reader("x", [payload], ["packed event"]),
    }


class Edit(NamedTuple):
    """A change of a file: some bytes are replaced by other bytes.

    Attributes:
        at: The place, as a share of the file's length.
        removed: Number of bytes that are removed.
        added: The bytes that are inserted.
        repeated: How many times they are inserted.
    """

    at: float
    removed: int
    added: bytes
    repeated: int = 1


def damaged(reader: Reader, original: bytes, edits: Sequence[Edit]) -> bytes:
    """Return an original file after these changes."""
    content = original
    for edit in edits:
        place = int(edit.at * len(content))
        end = place + edit.removed
        content = content[:place] + edit.added * edit.repeated + content[end:]
    return gzip.compress(content, 1, mtime=0) if reader.is_compressed else content


class Defect(NamedTuple):
    """A forbidden result of a command.

    Attributes:
        command: The command.
        what: What it did, such as an exception or an exit status.
    """

    command: str
    what: str


def read_all(reader: Reader, content: bytes, folder: Path) -> list[Defect]:
    """Write a file, run all commands of its reader on it, and return the defects."""
    path = folder / reader.file
    path.write_bytes(content)
    found = []
    for command in reader.commands:
        found += [Defect(command, what) for what in defects(command, content, folder)]
    for each in folder.rglob("*"):
        if each.is_file():
            each.unlink()
    return found


def defects(command: str, content: bytes, folder: Path) -> Iterator[str]:
    """Run a command, and yield a description of each defect."""
    before = memory("VmRSS")
    begin = time.monotonic()
    status, errors, raised = run(command, content, folder)
    seconds = time.monotonic() - begin
    used = memory("VmHWM") - before
    if raised:
        yield raised
    elif status not in {0, 1, 2}:
        yield f"exit status {status}"
    elif status == 2 and len(errors.splitlines()) != 1:
        yield f"not one line: {errors!r}"
    if seconds > LONGEST:
        yield f"{seconds:.1f} s"
    if used > MEMORY + MEMORY_PER_BYTE * len(content):
        yield f"{used / 1e6:.0f} MB for {len(content)} bytes"


def memory(field: str) -> int:
    """Return a field of `/proc/self/status` in bytes, and reset the peak memory `VmHWM`."""
    value = 0
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{field}:"):
                value = int(line.split()[1]) << 10
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return value


def run(command: str, content: bytes, folder: Path) -> tuple[int, str, str]:
    """Run a command, and return its exit status, its stderr, and the exception if there was one."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.StringIO()
    here = Path.cwd()

    def is_late(*_: object) -> None:
        raise TimeoutError(f"more than {4 * LONGEST} s")

    signal.signal(signal.SIGALRM, is_late)
    signal.alarm(4 * LONGEST)
    os.chdir(folder)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            special = SPECIAL.get(command)
            status = main(command.split()) if special is None else special(content)
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        place = traceback.extract_tb(error.__traceback__)[-1]
        return 3, "", f"{type(error).__name__}: {error} at {place.filename}:{place.lineno}"
    finally:
        signal.alarm(0)
        os.chdir(here)
    return status, err.getvalue(), ""


def read_event(value: bytes) -> int:
    """Read a value of a TensorBoard summary as the tab does.

    Each function may raise a `ValueError` or a `LookupError`.
    """
    calls: list[Callable[[], object]] = [
        lambda: head(value),
        lambda: inflated(value),
        lambda: compared_windows(unpacked(value), unpacked(value)),
        lambda: trace_file(unpacked(value), 0),
    ]
    for call in calls:
        with contextlib.suppress(ValueError, LookupError):
            call()
    return 0


def annotated(_: bytes) -> int:
    """Run the background process that annotates a trace.

    It reads two files. One of them is damaged, and this function writes the other one.
    """
    raw = Path("raw")
    if not raw.exists():
        raw.write_bytes(small_gpu_trace().text())
    calls = Path("calls")
    if not calls.exists():
        calls.write_text('{"batches":1,"rank":0,"world_size":1,"calls":[]}')
    return min(annotate(["raw", "calls", f"{TRACE}.gz"]), 1)


SPECIAL: Mapping[str, Callable[[bytes], int]] = {
    "deepspeed": lambda _: deepspeed("x"),
    "event": read_event,
    "packed event": lambda content: read_event(packed(content)),
    "annotate": annotated,
}
"""Readers that are not commands of the command line."""

INTERESTING = [
    b"",
    b"\x00",
    b"\xff",
    b'"',
    b"\\",
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b"-",
    b"1e999",
    b"9" * 400,
    b"null",
    b"NaN",
    b'{"a":',
    b"\x1f\x8b",
    b"}(",
    b"2\x86",
    b"\x94",
    b"r\xff\xff\xff\x7f",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
]
"""Bytes that have a special meaning in JSON, gzip or pickle files."""
