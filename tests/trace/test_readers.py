"""Test that other programs can read annotated traces.

Each reader runs in a separate process, if it is installed.
"""

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lflops
from lflops.model.module_tree import ModuleTree
from lflops.trace.annotate import RecordedCalls
from lflops.trace.annotate_in_background import AnnotationProcess
from lflops.trace.record.tracer import Tracer
from tests.support.small_models import Projections, sequence

TB_PROFILER = """
import json, sys, tempfile
from torch_tb_profiler.consts import WORKER_PATTERN
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator
folder, file = sys.argv[1:]
worker, span = WORKER_PATTERN.match(file).groups()
data = RunProfileData.parse(worker, 1, f"{folder}/{file}", tempfile.mkdtemp())
views = [view.name for view in RunGenerator(worker, 1, data).generate_run_profile().views]
steps = {name: costs.costs[-1] for name, costs in zip(data.steps_names, data.steps_costs)}
operators = {each.name: each.calls for each in data.op_list_groupby_name}
print(json.dumps({"worker": worker, "views": views, "steps": steps, "operators": operators, "rank": data.distributed_info["rank"]}))
"""

HTA = """
import json, sys
from hta.trace_analysis import TraceAnalysis
folder, file = sys.argv[1:]
trace = TraceAnalysis(trace_files={4: f"{folder}/{file}"}, trace_dir="").t
names = trace.symbol_table.get_sym_table()
rows = trace.get_trace(4)
slices, products = (rows["cat"] == names.index("lflops_module")), (rows["name"] == names.index("aten::addmm"))
print(json.dumps({"slices": int(slices.sum()), "products": int(products.sum())}))
"""


def installed(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if the reader is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")


def read_by(script: str, trace: Path) -> dict[str, object]:
    """Run a reader on a trace, and return its results. Its warnings are ignored."""
    command = [sys.executable, "-W", "ignore", "-c", script, str(trace.parent), trace.name]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    said: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return said


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return the annotated trace of three training batches on rank 4."""
    model = Projections()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lflops.count(model, (sequence(),), backward=True).save(tmp_path / "p.json")
    tracer = Tracer(ModuleTree({"": model}), record_shapes=True, profile_memory=True)
    tracer.begin()
    for batch in range(3):
        model(sequence()).sum().backward()
        optimizer.step()
        if batch < 2:
            tracer.step()
    recording = tracer.stop(tmp_path / "window", "host_4")
    assert recording is not None
    told = RecordedCalls(batches=3, rank=4, world_size=8, calls=tuple(recording.calls))
    annotation = AnnotationProcess(recording.raw, recording.path, told, tmp_path / "p.json")
    assert None is annotation.finish(600)
    return recording.path


@installed("torch_tb_profiler")
def test_torch_tb_profiler_reads_it(trace: Path) -> None:
    """torch-tb-profiler finds the batches as steps, and only torch's operators as operators.

    The durations of the steps are in microseconds.
    """
    said = read_by(TB_PROFILER, trace)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {}
    for event in events:
        name, _, number = event["name"].partition("#")
        if name == "ProfilerStep" and number in {"0", "1", "2"}:
            steps[number] = event["dur"]
    assert ("host_4", 4) == (said["worker"], said["rank"])
    assert ["overall", "operator", "trace", "memory"] == said["views"]
    assert steps == pytest.approx(said["steps"], rel=0.01)
    operators = said["operators"]
    assert isinstance(operators, dict)
    assert 3 * 4 == operators["aten::addmm"]
    assert not {"stem", "q", "k", "v"} & operators.keys()


@installed("hta")
def test_holistic_trace_analysis_reads_it(trace: Path) -> None:
    """Holistic Trace Analysis finds the slices of modules and the matmuls.

    It leaves out the last of the three steps. Each of the other two steps has five modules in
    forward and six slices in backward.
    """
    assert {"slices": 2 * 5 + 2 * 6, "products": 2 * 4} == read_by(HTA, trace)
