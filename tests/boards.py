"""A TensorBoard with the LFLOPS tab, in a process of its own in which nothing that training needs can be loaded."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING

_SERVER = """
import sys
sys.modules |= dict.fromkeys(["torch", "lightning", "pytorch_lightning", "rich", "matplotlib", "msgspec"])
from tensorboard import default, program
from lflops.tensorboard.tab import Tab
board = program.TensorBoard(plugins=[*default.get_static_plugins(), Tab])
board.configure(argv=["tensorboard", "--logdir", sys.argv[1], "--port", "0", "--reload_interval", "1", *sys.argv[2:]])
print(board.launch(), flush=True)
sys.stdin.read()
"""


PATIENCE = 50_000
"""Questions to a server that is still reading: some minutes."""


class Board:
    """A TensorBoard that runs.

    Args:
        address: Where it answers.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, route: str, **parameters: Any) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        accepted = parameters.pop("accept", "identity")
        url = f"{self.address}data/plugin/lflops/{route}?{urlencode(parameters)}"
        try:
            with urlopen(Request(url, headers={"Accept-Encoding": accepted})) as answer:  # noqa: S310 - our own server
                return answer.status, dict(answer.headers), answer.read()
        except HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    def windows(self, *, told: int) -> dict[str, Any]:
        """What the tab lists, as soon as TensorBoard has read so many windows and problems."""
        for _ in range(PATIENCE):
            found: dict[str, Any] = json.loads(self.get("windows")[2])
            if len(found["windows"]) + len(found["problems"]) >= told:
                return found
        raise AssertionError(f"TensorBoard never told of {told}: {found}")


@contextmanager
def board(logdir: Path, *options: str) -> Iterator[Board]:
    """Runs as long as it is used; it ends with its input."""
    command = [sys.executable, "-c", _SERVER, str(logdir), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        address = process.stdout.readline().strip()
        assert address, "TensorBoard did not start"
        try:
            yield Board(address)
        finally:
            process.communicate()


def write(writer: Any, tag: str, value: bytes, *, beside: bytes = b"1", step: int = 0) -> None:
    """A summary under our plugin's name that may hold anything."""
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="lflops", content=beside), data_class=DATA_CLASS_TENSOR)
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[value])
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)]), step)
