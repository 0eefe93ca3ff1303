"""Start a TensorBoard in a separate process, with the LFLOPS tab or with torch-tb-profiler.

The process with the LFLOPS tab cannot import torch or Lightning, because the tab must not need it.
"""

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]

_SERVER = """
import sys
sys.modules |= dict.fromkeys(["torch", "lightning", "pytorch_lightning", "rich", "matplotlib"])
from tensorboard import default, program
from lflops.tensorboard.tab import Tab
board = program.TensorBoard(plugins=[*default.get_static_plugins(), Tab])
board.configure(argv=["tensorboard", "--logdir", sys.argv[1], "--port", "0", "--reload_interval", "1", *sys.argv[2:]])
print(board.launch(), flush=True)
sys.stdin.read()
"""

_PROFILER = """
import sys
from tensorboard import default, program
from torch_tb_profiler.plugin import TorchProfilerPlugin
if __name__ == "__main__":  # it reads each trace in a process that loads this program anew
    board = program.TensorBoard(plugins=[*default.get_static_plugins(), TorchProfilerPlugin])
    board.configure(argv=["tensorboard", "--logdir", sys.argv[1], "--port", "0"])
    print(board.launch(), flush=True)
    sys.stdin.read()
"""

PATIENCE = 600
"""Seconds within which a server must have read its files."""


class Board:
    """A running TensorBoard.

    Args:
        address: Its address.
        plugin: The plugin that receives the requests.
    """

    def __init__(self, address: str, plugin: str = "lflops") -> None:
        self.address = address
        self.plugin = plugin

    def get(self, route: str, **parameters: Any) -> tuple[int, dict[str, str], bytes]:
        """Send a request, and return status, headers and body.

        `accept` is the accepted encoding and `headers` are further headers. All other parameters
        become the query.
        """
        headers = {"Accept-Encoding": parameters.pop("accept", "identity")}
        headers |= parameters.pop("headers", {})
        url = f"{self.address}data/plugin/{self.plugin}/{route}?{urlencode(parameters)}"
        try:
            with urlopen(Request(url, headers=headers)) as answer:  # noqa: S310 - our own server
                return answer.status, dict(answer.headers), answer.read()
        except HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    def json(self, route: str, **parameters: Any) -> Any:
        """Send a request, and return the JSON of the response."""
        status, headers, body = self.get(route, **parameters)
        assert status == 200, (route, parameters, body)
        if headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        return json.loads(body)

    def windows(self, *, expected: int) -> dict[str, Any]:
        """Wait until the tab lists so many windows and problems together, and return its list."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            found: dict[str, Any] = json.loads(self.get("windows")[2])
            if len(found["windows"]) + len(found["problems"]) >= expected:
                return found
            time.sleep(0.05)
        raise AssertionError(f"TensorBoard never listed {expected}: {found}")


@contextmanager
def board(logdir: Path, *options: str) -> Iterator[Board]:
    """Start a TensorBoard with the LFLOPS tab."""
    with _runs([sys.executable, "-c", _SERVER, str(logdir), *options]) as address:
        yield Board(address)


@contextmanager
def profiler_board(logdir: Path, folder: Path, runs: int) -> Iterator[Board]:
    """Start a TensorBoard with torch-tb-profiler, and wait until it has read all runs.

    Its warnings are ignored.

    Args:
        logdir: The folder with the runs.
        folder: A folder for the program that is started.
        runs: The number of runs.
    """
    program = folder / "profiler_board.py"
    program.write_text(_PROFILER)
    with _runs([sys.executable, "-W", "ignore", str(program), str(logdir)]) as address:
        shown = Board(address, "pytorch_profiler")
        until = time.monotonic() + PATIENCE
        found = shown.json("runs")
        while len(found["runs"]) < runs:
            if time.monotonic() >= until:
                raise AssertionError(f"torch-tb-profiler never read {runs} runs: {found}")
            time.sleep(0.05)
            found = shown.json("runs")
        yield shown


@contextmanager
def _runs(command: list[str]) -> Iterator[str]:
    """Start a server, and yield its address. The server ends when its stdin is closed."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        address = process.stdout.readline().strip()
        assert address, "TensorBoard did not start"
        try:
            yield address
        finally:
            process.communicate()


def write(writer: Any, tag: str, value: bytes, *, metadata: bytes = b"4", step: int = 0) -> None:
    """Write a summary for the plugin of lflops. Its value and metadata may be any bytes."""
    summary_metadata = SummaryMetadata(
        plugin_data=SummaryMetadata.PluginData(plugin_name="lflops", content=metadata),
        data_class=DATA_CLASS_TENSOR,
    )
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[value])
    writer.file_writer.add_summary(
        Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=summary_metadata)]), step
    )
