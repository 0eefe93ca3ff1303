"""Test with torch's trace validator that the traces which lflops annotates and merges are valid."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lflops.model.module_tree import ModuleTree
from lflops.trace.analysis.merge import merge
from lflops.trace.annotate import PROCESS, RecordedCalls, annotate
from lflops.trace.record.tracer import Tracer
from tests.support.traces_by_hand import gpu_traces

validator = pytest.importorskip(
    "torch.profiler._trace_validator", reason="torch has no validator of traces before 2.13"
)


def violations(path: Path) -> list[str]:
    """Return the violations that torch's validator finds in a trace."""
    passed, found = validator.validate_trace(str(path))
    assert passed is not bool(found)
    return [str(each) for each in found]


def gpu_trace(folder: Path, rank: int, *, kernel_at: float = 20.0) -> Path:
    """Write the trace of a GPU, and return its path.

    It has a launch at 10 µs and its kernel, a collective with its message, and an autograd node.
    """
    message = {
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 8,
        "Out msg nelems": 8,
        "Group size": 2,
    }
    node = "MulBackward0" if rank else "AddBackward0"
    events: list[dict[str, Any]] = [
        {
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": 10.0,
            "args": {"External id": 3, "correlation": 4},
        },
        {
            "cat": "kernel",
            "name": f"gemm_{rank}",
            "ts": kernel_at,
            "args": {"External id": 3, "correlation": 4, "device": 0},
        },
        {"cat": "cpu_op", "name": "record_param_comms", "ts": 30.0, "args": message},
        {
            "cat": "cpu_op",
            "name": f"autograd::engine::evaluate_function: {node}",
            "ts": 40.0,
            "args": {"Sequence number": 7},
        },
    ]
    slices = [{"ph": "X", "pid": 1, "tid": 1, "dur": 2.0} | each for each in events]
    path = folder / f"a_{rank}.1.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": slices}))
    return path


def test_an_annotated_training_is_valid(tmp_path: Path) -> None:
    """The annotated trace of a real run with checkpointing is valid.

    Its modules are slices in the trace.
    """
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    tracer = Tracer(ModuleTree({"": model}))
    assert tracer.begin()
    model[1](checkpoint(model[0], torch.randn(4, 8), use_reentrant=False)).sum().backward()
    recording = tracer.stop(tmp_path, "host_0")
    assert recording is not None
    assert recording.raw is not None
    recorded = RecordedCalls(batches=1, rank=0, world_size=1, calls=tuple(recording.calls))
    annotate(recording.raw, recorded, recording.path)
    assert PROCESS.encode() in gzip.decompress(recording.path.read_bytes())
    assert [] == violations(recording.path)


def test_a_merged_trace_is_valid(tmp_path: Path) -> None:
    """A merged trace is valid.

    Both ranks use the same numbers, 3 for a launch and 7 for an autograd node, for different
    events. The clock of rank 1 begins 15 µs before the clock of rank 0.
    """
    gpu_trace(tmp_path, 0)
    path = gpu_trace(tmp_path, 1)
    content = {"baseTimeNanoseconds": -15000} | json.loads(path.read_text())
    path.write_text(json.dumps(content))
    assert [] == violations(Path(merge(tmp_path).file))


def test_the_validator_sees_what_is_wrong(tmp_path: Path) -> None:
    """The validator finds two kinds of errors that the test puts into a trace.

    They are a kernel before its launch, and two traces in one file that use the same numbers.
    """
    assert [] == violations(gpu_trace(tmp_path, 0))
    (early,) = violations(gpu_trace(tmp_path, 0, kernel_at=5.0))
    assert "_check_gpu_kernel_causality" in early
    events = []
    for rank in (0, 1):
        events += json.loads(gpu_trace(tmp_path, rank).read_text())["traceEvents"]
    (tmp_path / "both.json").write_text(json.dumps(events))
    (shared,) = violations(tmp_path / "both.json")
    assert "_check_backward_seq_id_uniqueness" in shared


def test_a_gpus_trace_has_no_more_violations_than_before(tmp_path: Path) -> None:
    """Annotating traces of real GPUs adds no violation to those that they already have."""
    for path in sorted(gpu_traces().glob("*.json.gz")):
        raw = tmp_path / "raw"
        into = tmp_path / "annotated.json.gz"
        with gzip.open(path) as source, raw.open("wb") as target:
            shutil.copyfileobj(source, target)
        if not raw.read_bytes().lstrip().startswith(b"["):
            annotate(raw, RecordedCalls(batches=1, rank=0, world_size=1, calls=()), into)
            assert violations(path) == violations(into), path.name
