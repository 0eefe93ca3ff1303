"""Import the packages of a client once, and fork a worker for each of its cells.

Imports take longer than these training runs. Clients under `lflops run` are not forked, because
lflops is requested when torch is imported.

python -m benchmarks.clients.warm MODULE ...

Each line of the input is a JSON object with `arguments` of the worker, and a file `output` for its
printed text. The answer is a line with the exit status of the worker.
"""

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

TIME_LIMIT = 180
"""Seconds after which a worker is stopped."""


def main() -> None:
    """Import the modules, then fork a worker for each line of the input."""
    warnings = Path(os.devnull).open("w")  # noqa: SIM115 - stays open until the process ends
    with contextlib.redirect_stdout(warnings), contextlib.redirect_stderr(warnings):
        importlib.import_module("benchmarks.clients.worker")
        for name in sys.argv[1:]:
            importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _work(request["arguments"], request["output"])
        print(json.dumps(_status_of(child)), flush=True)


def _work(arguments: list[str], output: str) -> None:
    """Run the worker in the forked process."""
    from benchmarks.clients import worker

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    status = 0
    try:
        worker.main(arguments)
    except BaseException:  # noqa: BLE001 - the exit status reports every error
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status_of(child: int) -> int | str:
    """Return the exit status of a worker. A worker that takes too long is killed."""
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return f"stopped after {TIME_LIMIT} s"


if __name__ == "__main__":
    main()
