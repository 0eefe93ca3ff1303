"""The program that annotates a recorded trace: in its own process, without torch, so that training goes on.

python -m lflops.traces.annotate_main TRACE CALLS INTO [PROFILE]
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lflops.errors import ProfileError
from lflops.profile.json_file import load
from lflops.traces.annotate import Calls, annotate, pack
from lflops.traces.convert import compat, is_wanted

__all__ = ["NO_COPY", "main"]

NO_COPY = 2
"""The exit status where only the copy for torch-tb-profiler is missing."""


def main(arguments: Sequence[str]) -> int:
    """Annotate a trace, pack it as it is where that fails, and copy it for torch-tb-profiler where that is installed.

    What it read is taken away.

    Returns:
        0, or 1 where the trace is there but not annotated, or `NO_COPY`; the reason is on stderr.
    """
    trace, told, into = map(Path, arguments[:3])
    failure: Exception | None = None
    status = 0
    try:
        calls = msgspec.json.decode(told.read_bytes(), type=Calls)
        annotate(trace, calls, into, profile=load(arguments[3]) if len(arguments) > 3 else None)
    except (ProfileError, msgspec.MsgspecError, OSError) as error:
        failure, status = error, 1
        pack(trace, into)
    trace.unlink()
    told.unlink(missing_ok=True)
    try:
        if is_wanted():
            compat(into)
    except (ProfileError, OSError) as error:
        failure, status = failure or error, status or NO_COPY
    if failure is not None:
        sys.stderr.write(f"{failure}\n")
    return status


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(10)  # here and not in `main`, which may be called in a process that has more to do
    sys.exit(main(sys.argv[1:]))
