"""Measure the cost of reading traces: the seconds for 200,000 events, the memory for 1 GB of JSON.

Each trace is read in a separate process.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from results import record

EVENTS = 200_000
GIGABYTE = 10**9
ROUNDS = 5
READ = """
import sys, time
from pathlib import Path
from lflops.trace.analysis.summary import summarise
from lflops.trace.analysis.read_trace import read_trace
begin = time.process_time()
trace = read_trace(Path(sys.argv[1]))
read = time.process_time()
summarise(trace)
end = time.process_time()
assert "torch" not in sys.modules
largest = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(trace.events, read - begin, end - read, largest)
"""
TYPES = '["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "Scalar", "Scalar"]'
SHAPES = [
    f"[[{out}], [788, {width}], [{width}, {out}], [], []]"
    for out, width in ((768, 768), (3072, 768), (768, 3072))
]


def operators(number: int, begin: float) -> list[str]:
    """Return the events of a linear layer, as Kineto writes them.

    There are 10 events: four operators, two runtime calls, a kernel, the two ends of an arrow, and
    a module.
    """
    shapes = SHAPES[number % len(SHAPES)]
    at = [f"{begin + offset:.3f}" for offset in range(0, 60, 5)]
    args = f'"Concrete Inputs": ["", "", "", "1", "1"], "Input type": {TYPES}, "Input Dims": {shapes}, "Ev Idx": {number}'
    event = '{{"ph": "X", "cat": "{}", "name": "{}", "pid": {}, "tid": {}, "ts": {}, "dur": {:.3f},\n"args": {{{}}}}}'
    arrow = (
        '{{"ph": "{}", "id": {}, "pid": {}, "tid": {}, "ts": {}, "cat": "ac2g", "name": "ac2g"}}'
    )
    kernel = (
        f'"External id": {number}, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {number}, "registers per thread": '
        '90, "shared memory": 0, "blocks per SM": 2.5, "warps per SM": 10.0, "grid": [12, 7, 1], "block": [128, 1, 1]'
    )
    name = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(cutlass::Params)"
    return [
        event.format("cpu_op", "aten::linear", 1, 1, at[0], 50, args),
        event.format("cpu_op", "aten::t", 1, 1, at[1], 3, args),
        event.format("cpu_op", "aten::transpose", 1, 1, at[1], 2, args),
        event.format("cpu_op", "aten::addmm", 1, 1, at[2], 30, f'"External id": {number}, {args}'),
        event.format(
            "cuda_runtime",
            "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
            1,
            1,
            at[3],
            1,
            '"cbid": 5, "correlation": 0',
        ),
        event.format(
            "cuda_runtime",
            "cudaLaunchKernel",
            1,
            1,
            at[4],
            4,
            f'"External id": {number}, "cbid": 211, "correlation": {number}',
        ),
        event.format("kernel", name, 0, 7, at[6], 22, kernel),
        arrow.format("s", number, 1, 1, at[4]),
        arrow.format("f", number, 0, 7, at[6]),
        event.format(
            "python_function",
            f"nn.Module: Linear_{number % 70}",
            1,
            1,
            at[0],
            51,
            f'"Python id": {number}',
        ),
    ]


def write(path: Path, *, events: int | None = None, size: int | None = None) -> None:
    """Write a trace with a number of events, or with a size in bytes, and with large timestamps."""
    with path.open("w") as file:
        file.write(
            '{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}], "traceEvents": [\n'
        )
        file.write(
            '{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}'
        )
        number = written = 0
        while (events is not None and 10 * number + 1 < events) or (
            size is not None and written < size
        ):
            text = ",\n".join(["", *operators(number + 1, 6_800_000_000_000 + 60.0 * number)])
            written += file.write(text)
            number += 1
        file.write('\n], "baseTimeNanoseconds": 1790857026000000000}\n')


def read(path: Path) -> tuple[int, float, float, int]:
    """Read a trace in a separate process.

    Returns the number of events, the seconds of reading and of the analysis, and the largest
    resident set in bytes.
    """
    command = [sys.executable, "-c", READ, str(path)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()  # noqa: S603 - our own program
    return int(out[0]), float(out[1]), float(out[2]), int(out[3]) * 1024


def main() -> None:
    """Write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the events, for a look")
    part = 10 if parser.parse_args().quick else 1
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write(path, events=EVENTS // part)
        size = path.stat().st_size
        rounds = [read(path) for _ in range(ROUNDS)]
        found = [median(each[place] for each in rounds) for place in range(4)]
        rows.append((int(found[0]), size, found[1], found[2], found[3]))
        write(path, size=GIGABYTE // part)
        size = path.stat().st_size
        events, seconds, analysis, memory = read(path)
        rows.append((events, size, seconds, analysis, memory))
    lines = [
        "| events | JSON | read | analyse | largest resident set |",
        "|--:|--:|--:|--:|--:|",
        *(
            f"| {events:,} | {size / 1e6:.0f} MB | {seconds:.2f} s | {analysis:.2f} s | {memory / 1e9:.2f} GB |"
            for events, size, seconds, analysis, memory in rows
        ),
        "",
        f"Linear layers as Kineto writes them, with shapes. Medians of {ROUNDS} processes, and one process for the gigabyte.",
        "Seconds are the processor's: those of the clock on a machine with nothing else to do.",
    ]
    record("trace_reader.py", "What reading a trace costs", lines)


if __name__ == "__main__":
    main()
