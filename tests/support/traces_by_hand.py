"""Write traces by hand, event by event, late in a quarter of a year.

The input is times in nanoseconds, and the output is a file in the format of torch.profiler.
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
"""Nanoseconds; so late a float of microseconds is off by one."""

BASE = 1_790_857_026_000_000_000
MAIN, BACKWARD = 100, 101
"""Threads."""

GPU_TRACES = "LFLOPS_GPU_TRACES"
"""Names a folder with traces of GPUs that others recorded, and TraceLens's answers in a folder beside each."""


def gpu_traces() -> Path:
    """That folder; the test is skipped where there is none."""
    folder = os.environ.get(GPU_TRACES, "")
    if not folder or not Path(folder).is_dir():
        pytest.skip(f"needs traces of GPUs: set {GPU_TRACES} to a folder that has them")
    return Path(folder)


class TraceByHand:
    """Events, added one after the other; times are nanoseconds after the trace's beginning."""

    def __init__(self, **header: Any) -> None:
        """Begin with what the trace says of itself."""
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
        """Any slice."""
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
        """A kernel, and the call that launched it if there is one.

        Returns the number that both have.
        """
        self._correlation += 1
        of_both = {"correlation": self._correlation}
        self.event(
            cat,
            name,
            start,
            end,
            pid=device,
            tid=stream,
            **{"device": device, "stream": stream, **of_both, **args},
        )
        if launch is not None:
            self.event("cuda_runtime", call, *launch, tid=thread, **of_both)
        return self._correlation

    def copy(self, start: int, end: int, **more: Any) -> None:
        """A copy from the host to the device."""
        self.kernel(
            "Memcpy HtoD (Pinned -> Device)",
            start,
            end,
            **{"cat": "gpu_memcpy", "call": "cudaMemcpyAsync", **more},
        )

    def call(self, name: str, start: int, end: int, *, thread: int = MAIN) -> None:
        """A call of the runtime that launches nothing."""
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
        """An operator of the host; all that is not a tensor has an empty shape."""
        if shapes is not None:
            args["Input Dims"] = shapes
            args["Input type"] = (
                types if types is not None else ["float" if shape else "Scalar" for shape in shapes]
            )
            args["Concrete Inputs"] = values if values is not None else [""] * len(shapes)
        self.event("cpu_op", name, start, end, tid=thread, **args)

    def step(self, number: int, start: int, end: int) -> None:
        """A step of the profiler."""
        self.event("user_annotation", f"ProfilerStep#{number}", start, end)

    def text(self) -> bytes:
        """The file."""
        return msgspec.json.format(
            msgspec.json.Encoder(decimal_format="number").encode(
                {**self.header, "traceEvents": self.events}
            ),
            indent=2,
        )

    def write(self, path: Path) -> Path:
        """Write the file, packed if its name says so."""
        path.write_bytes(
            gzip.compress(self.text(), mtime=0) if path.suffix == ".gz" else self.text()
        )
        return path

    def read(self, folder: Path) -> RecordedTrace:
        """Write the file and read it."""
        return read_trace(self.write(folder / "by_hand.pt.trace.json"))


def small_gpu_trace(**header: Any) -> TraceByHand:
    """Two steps of 1000 ns on a chip of the table.

    A product of 2 x 3 x 4, a copy, a collective, idle time of each usual kind.
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
    """A trace's text without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()
