"""Run scripts that each need a separate process, without importing torch each time.

One process imports torch, and each script begins in a fork of this process.

For the script, this is like a new interpreter that has imported torch and run nothing else. It
starts in milliseconds instead of seconds, and ends like any other program, with the exit handlers
of its libraries. `python -m tests.support.warm_python` starts the process that reads requests.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from tests.support.repository import ROOT

SECONDS = 900
"""After which a script is killed."""
LOADED = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torchmetrics")
"""What takes long, of others.

Lightning loads the last one, and that loads transformers where they are installed.
"""


class Script(NamedTuple):
    """A program's text and its arguments, as `python -c` takes them, and the folder that it has lflops from."""

    code: str
    arguments: tuple[object, ...] = ()
    path: Path = ROOT


class Ended(NamedTuple):
    """The exit status, negative for a signal, and what was printed."""

    status: int
    out: str
    err: str


class WarmPython:
    """The program that loads once, and runs scripts when it is asked to.

    It starts with the first of them.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.communicate()

    def run(self, code: str, *arguments: object) -> Ended:
        """Run one script in the repository's folder, to its end."""
        return self.together([Script(code, arguments)])[0]

    def together(self, scripts: Sequence[Script]) -> list[Ended]:
        """Run them at once, each in its process, and wait for all."""
        if self._server is None:
            command = [sys.executable, "-m", "tests.support.warm_python"]
            # torch would load lflops as one of its backends, and a script has its own folder to
            # load it from.
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
        with tempfile.TemporaryDirectory() as folder:
            request = {
                "folder": folder,
                "environment": dict(os.environ),
                "scripts": [
                    (script.code, [str(each) for each in script.arguments], str(script.path))
                    for script in scripts
                ],
            }
            print(json.dumps(request), file=self._server.stdin, flush=True)
            statuses = json.loads(self._server.stdout.readline())
            printed = [
                [Path(folder, f"{name}{number}").read_text("utf-8") for name in ("out", "err")]
                for number in range(len(scripts))
            ]
        return [Ended(status, *texts) for status, texts in zip(statuses, printed, strict=True)]


def asked() -> str | None:
    """A script's text, in the process that is to run it.

    None in the one that runs none, when its input ends.
    """
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for number, (code, arguments, path) in enumerate(request["scripts"]):
            with warnings.catch_warnings(
                action="ignore"
            ):  # Python 3.12 warns of threads; those of torch's libraries wait for work
                child = os.fork()
            if not child:
                os.environ.clear()
                os.environ.update(request["environment"])
                _redirect(Path(request["folder"]), number)
                signal.alarm(SECONDS)
                sys.argv = ["-c", *arguments]
                sys.path[:] = [path, *(each for each in sys.path if each != str(ROOT))]
                return str(code)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(json.dumps(statuses) + "\n")
        sys.stdout.flush()
    return None


def _redirect(folder: Path, number: int) -> None:
    """Read from nowhere, and write into the files that the one who asked reads."""
    for target, name in enumerate(
        [Path(os.devnull), folder / f"out{number}", folder / f"err{number}"]
    ):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, target)
        os.close(opened)


if __name__ == "__main__":
    for module in LOADED:
        importlib.import_module(module)
    gc.freeze()  # else each would copy all that is loaded only to look through it
    if (script := asked()) is not None:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `python -c` does
