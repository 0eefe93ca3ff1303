"""Write traces by hand, event by event, in the format of torch.profiler.

The arguments are times in nanoseconds. The traces are late in a quarter of a year, where times are
most difficult to read exactly.
"""

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.recorded import RecordedTrace
from tests.support.quarters import DAY

BEGIN = 79 * DAY * 1000
"""Start of the traces in nanoseconds. At this time a float of microseconds is wrong by one."""

BASE = 1_790_857_026_000_000_000

# Threads of the host.
MAIN = 100
BACKWARD = 101

GPU_TRACES = "LFLOPS_GPU_TRACES"
"""Environment variable with the path of a folder of recorded GPU traces.

Next to each trace there is a folder with the results of TraceLens for it.
"""


def gpu_traces() -> Path:
    """Return the folder of recorded GPU traces, or skip the test if there is none."""
    folder = os.environ.get(GPU_TRACES, "")
    if not folder or not Path(folder).is_dir():
        pytest.skip(f"needs traces of GPUs: set {GPU_TRACES} to a folder that has them")
    return Path(folder)


class TraceByHand:
    """A trace to which events are added. Times are nanoseconds since the start of the trace."""

    def __init__(self, **header: Any) -> None:
        """Begin without events. `header` has further fields of the trace."""
        self.header: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": BASE, **header}
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def event(
        self,
        cat: str,
        name: str,
        start: int,
        end: int,
        *,
        tid: int = MAIN,
        pid: int = 5,
        **args: Any,
    ) -> dict[str, Any]:
        """Add a slice of any category, and return it."""
        times = {"ts": Decimal(BEGIN + start) / 1000, "dur": Decimal(end - start) / 1000}
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}
        )
        return self.events[-1]

    def kernel(
        self,
        name: str,
        start: int,
        end: int,
        *,
        launch: tuple[int, int] | None = None,
        thread: int = MAIN,
        call: str = "cudaLaunchKernel",
        stream: int = 7,
        device: int = 0,
        cat: str = "kernel",
        **args: Any,
    ) -> int:
        """Add a kernel, and the runtime call that launched it.

        Args:
            name: Name of the kernel.
            start: Its start.
            end: Its end.
            launch: Start and end of the runtime call; `None` adds no call.
            thread: The thread of the runtime call.
            call: Name of the runtime call.
            stream: The stream of the kernel.
            device: The device of the kernel.
            cat: The category of the slice.
            **args: Further arguments of the slice.

        Returns:
            The correlation number of the kernel and the call.
        """
        self._correlation += 1
        number = self._correlation
        all_args = {"device": device, "stream": stream, "correlation": number} | args
        self.event(cat, name, start, end, pid=device, tid=stream, **all_args)
        if launch is not None:
            self.event("cuda_runtime", call, *launch, tid=thread, correlation=number)
        return number

    def copy(self, start: int, end: int, **more: Any) -> None:
        """Add a copy from the host to the device. `more` has further arguments of `kernel`."""
        options: dict[str, Any] = {"cat": "gpu_memcpy", "call": "cudaMemcpyAsync"} | more
        self.kernel("Memcpy HtoD (Pinned -> Device)", start, end, **options)

    def call(self, name: str, start: int, end: int, *, thread: int = MAIN) -> None:
        """Add a call of the runtime that launches nothing."""
        self._correlation += 1
        self.event("cuda_runtime", name, start, end, tid=thread, correlation=self._correlation)

    def operator(
        self,
        name: str,
        start: int,
        end: int,
        *,
        thread: int = MAIN,
        shapes: Sequence[Any] | None = None,
        types: Sequence[Any] | None = None,
        values: Sequence[str] | None = None,
        **args: Any,
    ) -> None:
        """Add an operator of the host.

        Args:
            name: Name of the operator.
            start: Its start.
            end: Its end.
            thread: Its thread.
            shapes: Shapes of its arguments. An argument that is not a tensor has an empty shape.
            types: Types of its arguments. By default tensors are floats.
            values: Values of its arguments. By default they are empty.
            **args: Further arguments of the slice.
        """
        if shapes is not None:
            if types is None:
                types = [_type_of(shape) for shape in shapes]
            if values is None:
                values = [""] * len(shapes)
            args["Input Dims"] = shapes
            args["Input type"] = types
            args["Concrete Inputs"] = values
        self.event("cpu_op", name, start, end, tid=thread, **args)

    def step(self, number: int, start: int, end: int) -> None:
        """Add a step of the profiler."""
        self.event("user_annotation", f"ProfilerStep#{number}", start, end)

    def text(self) -> bytes:
        """Return the JSON of the trace."""
        content = {**self.header, "traceEvents": self.events}
        encoded = msgspec.json.Encoder(decimal_format="number").encode(content)
        return msgspec.json.format(encoded, indent=2)

    def write(self, path: Path) -> Path:
        """Write the trace, and return the path. It is compressed if the path ends in `.gz`."""
        text = self.text()
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
        return path

    def read(self, folder: Path) -> RecordedTrace:
        """Write the trace, and read it with lflops."""
        return read_trace(self.write(folder / "by_hand.pt.trace.json"))


def _type_of(shape: Sequence[int]) -> str:
    """Return the type of an argument with this shape. Only a tensor has a shape."""
    return "float" if shape else "Scalar"


def small_gpu_trace(**header: Any) -> TraceByHand:
    """Return a trace of two steps of 1000 ns on an H100.

    Each step has a matmul with 2 * 3 * 4 MACs, a collective, a copy, and idle time.
    """
    device = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936}
    trace = TraceByHand(
        deviceProperties=[device], distributedInfo={"rank": 1, "world_size": 2}, **header
    )
    for number, begin in enumerate((0, 1000)):
        trace.step(number, begin, begin + 1000)
        trace.operator(
            "aten::mm",
            begin + 50,
            begin + 150,
            shapes=[[2, 3], [3, 4]],
            types=["c10::BFloat16"] * 2,
        )
        trace.kernel(
            "sm90_xmma_gemm_bf16bf16_f32",
            begin + 150,
            begin + 450,
            launch=(begin + 80, begin + 120),
        )
        trace.kernel(
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            begin + 400,
            begin + 600,
            launch=(begin + 160, begin + 170),
            stream=9,
        )
        trace.copy(begin + 600, begin + 650, launch=(begin + 180, begin + 190))
    return trace


def as_json(value: Mapping[str, Any]) -> bytes:
    """Return a trace as JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()
