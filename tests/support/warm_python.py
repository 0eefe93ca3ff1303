"""Run scripts that each need a separate process, without importing torch each time.

One process imports torch, and each script begins in a fork of this process.

For the script, this is like a new interpreter that has imported torch and run nothing else. It
starts in milliseconds instead of seconds. At its end, it waits for its threads and runs its exit
handlers. It destroys all objects only on request, because this takes half a second: each object of
torch is in memory that a fork has to copy first.

`python -m tests.support.warm_python` starts the process that reads requests.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

from tests.support.repository import ROOT

SECONDS = 900
"""Seconds after which a script is killed."""
LOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchmetrics",
)
"""Packages that take long to import.

Lightning imports torchmetrics, and torchmetrics imports transformers if it is installed. Optimizers
import `torch._dynamo` when they are created.
"""


class Script(NamedTuple):
    """A script as for `python -c`.

    Attributes:
        code: The code.
        arguments: The arguments, which are converted to text.
        path: The folder from which it imports lflops.
        destroys_objects: Whether all objects are destroyed at the end.
    """

    code: str
    arguments: tuple[object, ...] = ()
    path: Path = ROOT
    destroys_objects: bool = False


class Ended(NamedTuple):
    """The result of a script.

    Attributes:
        status: The exit status; negative for a signal.
        out: The text on stdout.
        err: The text on stderr.
    """

    status: int
    out: str
    err: str


class WarmPython:
    """A server process that imports torch once and runs scripts on request.

    It starts with the first request.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.communicate()

    def run(self, code: str, *arguments: object, destroys_objects: bool = False) -> Ended:
        """Run one script in the folder of the repository, and wait for its end."""
        script = Script(code, arguments, destroys_objects=destroys_objects)
        return self.together([script])[0]

    def together(self, scripts: Sequence[Script]) -> list[Ended]:
        """Run scripts at the same time, each in a separate process, and wait for all of them."""
        if self._server is None:
            command = [sys.executable, "-m", "tests.support.warm_python"]
            # Otherwise torch would import lflops as one of its backends, but each script imports
            # lflops from its own folder.
            environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            self._server = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        to_run = []
        for script in scripts:
            arguments = [str(each) for each in script.arguments]
            to_run.append((script.code, arguments, str(script.path), script.destroys_objects))
        with tempfile.TemporaryDirectory() as folder:
            request = {"folder": folder, "environment": dict(os.environ), "scripts": to_run}
            print(json.dumps(request), file=self._server.stdin, flush=True)
            statuses = json.loads(self._server.stdout.readline())
            ended = []
            for number, status in enumerate(statuses):
                out = Path(folder, f"out{number}").read_text("utf-8")
                err = Path(folder, f"err{number}").read_text("utf-8")
                ended.append(Ended(status, out, err))
        assert len(ended) == len(scripts)
        return ended


def asked() -> tuple[str, bool] | None:
    """Fork a child for each requested script.

    In a child, return the code that it must run, and whether it destroys all objects at the end. In
    the server, return `None` when the input ends.
    """
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for number, (code, arguments, path, destroys_objects) in enumerate(request["scripts"]):
            # Python 3.12 warns about a fork of a process with threads. The threads of torch's
            # libraries only wait for work, so this is safe.
            with warnings.catch_warnings(action="ignore"):
                child = os.fork()
            if not child:
                os.environ.clear()
                os.environ.update(request["environment"])
                _redirect(Path(request["folder"]), number)
                signal.alarm(SECONDS)
                sys.argv = ["-c", *arguments]
                sys.path[:] = [path, *(each for each in sys.path if each != str(ROOT))]
                return str(code), destroys_objects
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(json.dumps(statuses) + "\n")
        sys.stdout.flush()
    return None


def _redirect(folder: Path, number: int) -> None:
    """Let stdin be empty, and let stdout and stderr go to the files that `together` reads."""
    files = [Path(os.devnull), folder / f"out{number}", folder / f"err{number}"]
    for target, name in enumerate(files):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, target)
        os.close(opened)


def _end(status: int) -> NoReturn:
    """Do what the interpreter does at its end, except for the destruction of all objects."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for module in LOADED:
        importlib.import_module(module)
    # Without this, a garbage collection in a child would touch, and so copy, all loaded objects.
    gc.freeze()
    request = asked()
    if request is not None:
        script, destroys_objects = request
        status = 0
        try:
            # This is what `python -c` does.
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})  # noqa: S102
        except Exception as error:  # noqa: BLE001
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
        if destroys_objects:
            sys.exit(status)
        _end(status)
