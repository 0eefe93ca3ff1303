"""Test that every command refuses pipes, devices and gzip bombs.

The refusal is one line, and the command does not wait.
"""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.damaged_files import run_one
from tests.support.repository import ROOT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="no pipes here")

TRACE = "a_0.1.pt.trace.json"
READERS = {
    "show": "show x.profile.json",
    "show of a folder": "show .",
    "why": "why x.profile.json",
    "why of a folder": "why .",
    "what-if": "what-if x.profile.json --batch 2",
    "html": "html x.profile.json",
    "diff": "diff x.profile.json x.profile.json",
    "diff of traces": f"diff {TRACE} {TRACE}",
    "roofline": "roofline x.profile.json",
    "roofline of a trace": f"roofline {TRACE}",
    "roofline with a log": "roofline --ncu log.csv",
    "hardware": "hardware chips.toml",
    "estimate": "estimate config.json",
    "memory": "memory snapshot.pickle",
    "ledger of a folder": "ledger .",
    "window": "window .",
    "trace show": f"trace show {TRACE}",
    "trace merge": "trace merge .",
    "trace compat": "trace compat .",
    "deepspeed": "deepspeed config.json",
}
NAMES = {
    "x.profile.json",
    TRACE,
    "log.csv",
    "chips.toml",
    "config.json",
    "snapshot.pickle",
    "rank0-1-1.ledger.jsonl",
}


def refusal(command: str) -> str:
    """Run a command that must refuse a file, and return its error line."""
    outcome = run_one(command.split())
    assert (2, "", "") == (outcome.status, outcome.out, outcome.trace), outcome
    (line,) = outcome.err.splitlines()
    return line


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
@pytest.mark.parametrize("command", READERS.values(), ids=READERS)
def test_what_is_no_file_is_refused(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command refuses a pipe or a device instead of reading it.

    No process writes into the pipe, and the device has no end, so reading would never finish.
    """
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        if kind == "pipe":
            os.mkfifo(name)
        else:
            Path(name).symlink_to("/dev/zero")
    assert "not a regular file, but a folder, a pipe or a device" in refusal(command)


PROGRAM = """
import sys
from pathlib import Path
from lflops.cli.main import main
status = main(sys.argv[1:])
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
sys.exit(status)
"""
"""A script that runs a command and prints its peak memory in KiB."""


def peak_and_line(command: str, folder: Path) -> tuple[int, str]:
    """Run a command that must refuse a file; return its peak memory in bytes and its error line."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    return int(ended.stdout) << 10, line


# A long name, so that a file of this size has few events to read.
EVENT = b'{"ph": "X", "cat": "kernel", "name": "%b", "ts": 1, "dur": 1, "args": {}},\n' % (
    b"k" * 900
)
ZEROS = bytes(10_000_000)


@pytest.mark.parametrize("repeated", [EVENT * 10_000, ZEROS], ids=["events", "zeros"])
@pytest.mark.parametrize("command", ["trace show {}", "trace merge .", "trace compat ."])
def test_a_gzip_bomb_is_refused(command: str, repeated: bytes, tmp_path: Path) -> None:
    """A command refuses a file that decompresses to about 500 MB, without using that much memory.

    A gzip file may consist of several gzip files in a row. The test repeats one of them.
    """
    begin = gzip.compress(b'{"traceEvents": [', mtime=0)
    content = begin + gzip.compress(repeated, mtime=0) * 50
    path = tmp_path / f"{TRACE}.gz"
    path.write_bytes(content)
    memory, line = peak_and_line(command.format(path.name), tmp_path)
    assert path.name in line
    assert memory < 300e6 + 10 * len(content)
