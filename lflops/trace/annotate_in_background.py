"""Annotates a recorded trace in its own process, without torch, so that training goes on.

The trace is there in the end.

The process runs `python -m lflops.trace.annotate_in_background TRACE CALLS INTO [PROFILE]`.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lflops.errors import ProfileError
from lflops.profile.json_file import load
from lflops.trace.annotate import Calls, annotate, pack
from lflops.trace.convert import compat, is_wanted

# the exit status where events were left out that cannot be read
PARTLY = 3
# the exit status where only the copy for torch-tb-profiler is missing
NO_COPY = 2
# seconds that the end of a training waits for a trace to be annotated
LONGEST = 60.0


class AnnotationProcess:
    """A trace that is being annotated. The process goes on by itself if this one ends first.

    The `trace`, as torch wrote it, is taken away when the packed one is there, `into`. The file
    `profile` says how much a call computes.
    """

    def __init__(self, trace: Path, into: Path, calls: Calls, profile: Path | None = None) -> None:
        self._trace, self.into = trace, into
        # what there is not, where `finish` says why
        self.lacks = "the modules"
        self._calls_file = trace.with_name(f"{trace.name}.calls")
        self._failure: str | None = None
        self._calls_file.write_bytes(msgspec.json.encode(calls))
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `finish` or `leave` closes it; a pipe would fill up where nobody reads
        paths = [trace, self._calls_file, into, *([] if profile is None else [profile])]
        home = str(Path(__file__).parents[2])
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program, on our own files
                [
                    sys.executable,
                    "-m",
                    "lflops.trace.annotate_in_background",
                    *(str(path.absolute()) for path in paths),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, [home, os.environ.get("PYTHONPATH")])
                    ),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                # Ctrl-C in the terminal is meant for the training
                start_new_session=True,
            )
        except BaseException:
            self._said.close()
            raise

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None

    def finish(self, seconds: float | None = None) -> str | None:
        """Wait for it so long at most, by default `LONGEST`, and pack the trace unannotated where it failed."""
        # Tells why it is not annotated, or not copied, or not yet; `None` where it is.
        seconds = LONGEST if seconds is None else seconds
        try:
            status = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"still at work after {seconds:g} s"
        if not self._said.closed:
            self._said.seek(0)
            last = self._said.read().strip().rpartition("\n")[2]
            self._said.close()
            self._failure = last or f"exit status {status}" if status else None
            self.lacks = {
                NO_COPY: "a copy for torch-tb-profiler",
                PARTLY: "what cannot be read",
            }.get(status, self.lacks)
        if self._trace.exists():
            pack(self._trace, self.into)
            self._trace.unlink()
            self._calls_file.unlink(missing_ok=True)
        return self._failure

    def leave(self) -> None:
        """Leave the process to itself.

        It goes on and writes the trace, and why it fails is not read.
        """
        # A thread waits for it, so that it does not stay a zombie. The thread does not keep the
        # interpreter from ending.
        self._said.close()
        if not self.is_done:
            threading.Thread(
                target=self._process.wait, name=f"lflops: {self.into.name}", daemon=True
            ).start()


def main(arguments: Sequence[str]) -> int:
    """Annotate a trace, pack it as it is where that fails, and copy it for torch-tb-profiler where that is installed."""
    # What it read is taken away. The status is 0, or 1 where the trace is there but not annotated,
    # or `NO_COPY`, or `PARTLY`; the reason is on stderr.
    trace, told, into = map(Path, arguments[:3])
    failure: Exception | None = None
    damage: list[str] = []
    status = 0
    try:
        calls = msgspec.json.decode(told.read_bytes(), type=Calls)
        damage = annotate(
            trace, calls, into, profile=load(arguments[3]) if len(arguments) > 3 else None
        )
    except (ProfileError, msgspec.MsgspecError, OSError) as error:
        failure, status = error, 1
        pack(trace, into)
    trace.unlink()
    told.unlink(missing_ok=True)
    try:
        if is_wanted():
            damage = compat(into)[1] or damage
    except (ProfileError, OSError) as error:
        failure, status = failure or error, status or NO_COPY
    if failure is not None:
        sys.stderr.write(f"{failure}\n")
    elif damage:
        status = PARTLY
        sys.stderr.write(f"{len(damage)} of its events, the first because of this: {damage[0]}\n")
    return status


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        # here and not in `main`, which may be called in a process that has more to do
        os.nice(10)
    sys.exit(main(sys.argv[1:]))
