"""Annotate a recorded trace in a separate process without torch, so that training continues.

An annotated trace also shows the modules and their FLOP/s. The arguments of the process are `TRACE
CALLS INTO [PROFILE]`, which are all paths.
"""

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lflops.errors import ProfileError
from lflops.files import read, write_whole
from lflops.profile.json_file import load
from lflops.trace.annotate import RecordedCalls, annotate, pack
from lflops.trace.convert import convert_for_tb_profiler, is_wanted
from lflops.trace.files import LARGEST_RAW, LeftOut

FAILED = 1
"""Exit status of the background process if the trace is not annotated."""

NO_COPY = 2
"""Exit status of the background process if only the copy for torch-tb-profiler is missing."""

PARTLY = 3
"""Exit status of the background process if unreadable events were left out."""

LONGEST = 60.0
"""Maximum number of seconds that the end of a training run waits for an annotated trace."""

_DAMAGED = (
    ArithmeticError,
    OSError,
    ProfileError,
    RecursionError,
    ValueError,
    msgspec.MsgspecError,
)
"""Errors that occur if a file is damaged, or cannot be read or written."""

NICENESS = 10
"""Niceness of the background process. It is set before the process imports anything large.

With 10, Linux gives the process a tenth of the CPU time of a busy thread of the training run. With
19, it gets a seventieth: on two cores that other programs kept busy, a run of 20 steps then took 37
and 40 s instead of 6 and 13 s, because its end waited for the trace.
"""

_PROGRAM = f"""
import json, os, sys
try:
    os.nice(int(sys.argv.pop(1)))
except OSError:
    pass
sys.path[:] = json.loads(sys.argv.pop(1))
from {__name__} import main
sys.exit(main(sys.argv[1:]))
"""
"""Code of the background process.

Its first two arguments are the niceness, and the import path as a JSON list.
"""

_PACKAGES = ("lflops", "msgspec", "torch_tb_profiler")
"""The packages that the background process imports."""

_MISSING = {NO_COPY: "a copy for torch-tb-profiler", PARTLY: "some events"}
"""Values of `AnnotationProcess.lacks`, keyed by the exit status of the background process."""


class AnnotationProcess:
    """A process that adds modules to a trace. It continues if the training process ends first.

    Attributes:
        into: Path of the annotated trace.
        lacks: Words for messages that say what the trace lacks, for example `the modules`. They are
            valid only if `finish` returned a reason.
    """

    def __init__(
        self, trace: Path, into: Path, calls: RecordedCalls, profile: Path | None = None
    ) -> None:
        """Start the process.

        Args:
            trace: The trace that torch wrote. It is removed when `into` has been written.
            into: Path of the annotated trace.
            calls: The recorded calls of modules.
            profile: File of a profile with the work of each module, if there is one.
        """
        self.into = into
        self.lacks = "the modules"
        self._trace = trace
        self._calls_file = trace.with_name(f"{trace.name}.calls")
        self._failure: str | None = None
        write_whole(self._calls_file, msgspec.json.encode(calls))
        paths = [trace, self._calls_file, into]
        if profile is not None:
            paths.append(profile)
        # A pipe would fill up if nothing reads it. `finish` or `leave` closes the file.
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        try:
            self._process = self._start([str(path.absolute()) for path in paths])
        except BaseException:
            self._stderr.close()
            self._calls_file.unlink(missing_ok=True)
            raise

    def _start(self, arguments: list[str]) -> "subprocess.Popen[bytes]":
        # An isolated interpreter adds neither the current folder nor PYTHONPATH to its import path.
        options = [str(NICENESS), json.dumps(search_path())]
        command = [sys.executable, "-I", "-c", _PROGRAM, *options, *arguments]
        return subprocess.Popen(  # noqa: S603 - our own program, on our own files
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            # Ctrl-C in the terminal must stop only the training run. A new session would do that
            # too, but Linux gives each session an equal share of the CPU (autogroup), whatever the
            # niceness of its processes. On two cores, the training run would lose one of them.
            process_group=0,
        )

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None

    def finish(self, seconds: float | None = None) -> str | None:
        """Wait for the process. If it failed, compress the trace without annotations.

        Args:
            seconds: Maximum number of seconds to wait. Default: `LONGEST`.

        Returns:
            The reason why the trace is not annotated, not copied, incomplete or not finished;
            `None` if it is complete.
        """
        seconds = LONGEST if seconds is None else seconds
        try:
            status = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"the background process is still running after {seconds:g} s"
        if not self._stderr.closed:
            self._read_failure(status)
        if self._trace.exists():
            pack(self._trace, self.into)
            self._trace.unlink()
            self._calls_file.unlink(missing_ok=True)
        return self._failure

    def _read_failure(self, status: int) -> None:
        self._stderr.seek(0)
        last_line = self._stderr.read().strip().rpartition("\n")[2]
        self._stderr.close()
        if status:
            self._failure = last_line or f"exit status {status}"
        self.lacks = _MISSING.get(status, self.lacks)

    def leave(self) -> None:
        """Stop watching the process. It continues and writes the trace."""
        self._stderr.close()
        if self.is_done:
            return
        # A thread waits for the process, so that it does not become a zombie. A daemon thread does
        # not keep the interpreter from ending.
        name = f"lflops: {self.into.name}"
        threading.Thread(target=self._process.wait, name=name, daemon=True).start()


def search_path() -> list[str]:
    """Return the import path of the background process.

    It is the import path of this process without the current folder and the folder of the training
    script, because other people may put files into these folders during the run. But a folder that
    contains a package that the background process needs is kept.
    """
    left_out: set[Path] = set()
    with contextlib.suppress(OSError):
        left_out.add(Path.cwd().resolve())
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None:
        left_out.add(Path(script).resolve().parent)
    for package in _PACKAGES:
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(package)
            if found is not None and found.origin is not None:
                left_out.discard(Path(found.origin).resolve().parent.parent)
    folders = []
    for folder in map(Path, sys.path):
        if folder.is_absolute() and folder.resolve() not in left_out:
            folders.append(str(folder))
    return folders


def main(arguments: Sequence[str]) -> int:
    """Add modules to a trace, and copy the trace for torch-tb-profiler if that is installed.

    If adding modules fails, the trace is compressed without them. The input trace and the file of
    calls are removed.

    Returns:
        The exit status: 0, `FAILED`, `NO_COPY` or `PARTLY`. The reason is written to stderr.
    """
    trace, calls_file, into = map(Path, arguments[:3])
    failure: Exception | None = None
    left_out = LeftOut()
    status = 0
    try:
        calls = msgspec.json.decode(read(calls_file, LARGEST_RAW), type=RecordedCalls)
        profile = None
        if len(arguments) > 3:
            profile = load(arguments[3])
        left_out = annotate(trace, calls, into, profile=profile)
    except _DAMAGED as error:
        failure = error
        status = FAILED
        pack(trace, into)
    trace.unlink()
    calls_file.unlink(missing_ok=True)
    if is_wanted():
        try:
            _, left_out_of_copy = convert_for_tb_profiler(into)
            if left_out_of_copy.number:
                left_out = left_out_of_copy
        except (ProfileError, OSError) as error:
            failure = failure or error
            status = status or NO_COPY
    if failure is not None:
        sys.stderr.write(f"{failure}\n")
    elif left_out.number:
        status = PARTLY
        sys.stderr.write(
            f"{left_out.number} of the events cannot be read; first error: {left_out.first}\n"
        )
    return status
