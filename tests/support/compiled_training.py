"""Compile and train a model twice: without and with a record of its graphs.

This script runs in a separate process. It prints as JSON the results of both runs, the contents of
traces, and anything that was left behind. Its argument is a folder for inductor's caches.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Kernels without vector instructions compile in half of the time.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"

import torch
from msgspec import to_builtins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lflops.model.module_tree import ModuleTree
from lflops.torch_private.modules import compilations
from lflops.trace.record.compiled_time import CompileTracking
from lflops.trace.record.tracer import Recording, Tracer

FOLDER = Path(sys.argv[1])


class Block(nn.Module):
    """A residual block of two linear layers with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16, bias=False)
        self.down = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the output of the two layers."""
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Two identical blocks. The second one uses activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss: the sum of the second block's output."""
        return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False).sum()


def train(compiled: Callable[[Net], Any], *, trace: bool = True) -> dict[str, Any]:
    """Compile a model and train it for four steps.

    Args:
        compiled: Compiles the model.
        trace: Whether to trace the last two steps.

    Returns:
        Losses, weights, the number of compilations in the first two steps (`graphs`) and in the
        last two (`later`), and the compiled code of the trace.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    model = compiled(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    x = torch.randn(32, 16)
    before = compilations()
    losses: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    for _ in range(2):
        step()
    graphs = compilations() - before
    if trace:
        code = traced(model, step)
    else:
        code = None
        step()
        step()
    weights = [parameter.tolist() for parameter in net.parameters()]
    return {
        "losses": losses,
        "weights": weights,
        "graphs": graphs,
        "later": compilations() - before - graphs,
        "code": code,
    }


def traced(model: nn.Module, step: Callable[[], None]) -> Any:
    """Trace two steps, and return the compiled code of the trace as JSON values."""
    tracer = Tracer(ModuleTree({"": model}), inside_compiled=True)
    tracer.begin()
    step()
    tracer.step()
    step()
    recording: Recording | None = tracer.stop(FOLDER, "host_0")
    assert recording is not None
    assert recording.compiled is not None
    return to_builtins(recording.compiled.code)


def kernels() -> list[str]:
    """Return the sorted texts of the generated C++ kernels.

    The lines that record a kernel in a Kineto trace are removed, so that kernels of a run with such
    a record can be compared with kernels of a run without one.
    """
    profiled = re.compile(r".*(RAIIAtenRecordFunctionHandle|aoti_runtime/utils\.h).*\n")
    sources = {profiled.sub("", path.read_text()) for path in FOLDER.rglob("*.main.cpp")}
    return sorted(sources)


def settings() -> dict[str, Any]:
    """Return the state of inductor that `CompileTracking` may change and has to restore.

    A setting has a default, which all threads share, and an override by the current thread.
    """
    from torch._inductor import config, debug

    entries = config._config  # type: ignore[attr-defined,unused-ignore]
    values = {
        name: (repr(entry.default), repr(entry.user_override.get()))
        for name, entry in entries.items()
    }
    return {
        "values": values,
        "graph": debug._pre_grad_graph_id,
        "nodes": debug._inductor_post_to_pre_grad_nodes.get("lflops"),
    }


def by_block() -> Any:
    """Trace a forward of two blocks, each of which is compiled separately.

    Dynamo compiles one graph and runs it for both blocks.
    """
    torch._dynamo.reset()
    net = nn.Sequential(Block(), Block())
    for block in net:
        block.compile()
    x = torch.randn(32, 16)
    with torch.no_grad():
        net(x)
        return traced(net, lambda: net(x))


class Broken(nn.Module):
    """Two identical layers, each in a separate graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run both layers, with a graph break between them."""
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def by_graph() -> Any:
    """Trace a forward of two graphs that have identical code."""
    torch._dynamo.reset()
    net: Any = torch.compile(Broken())
    x = torch.randn(32, 16)
    with torch.no_grad():
        net(x)
        return traced(net, lambda: net(x))


def main() -> None:
    """Do all training runs and traces, and print the results as JSON."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"plain": train(torch.compile, trace=False)}
    plain_kernels = kernels()
    before = settings()
    tracking = CompileTracking()
    tracking.start()
    if tracking.refusal is not None:
        print(json.dumps({"refusal": tracking.refusal}))  # noqa: T201
        return
    found["changed"] = settings() != before
    found["recorded"] = train(torch.compile)
    found["kernels"] = (len(plain_kernels), kernels() == plain_kernels)
    hits = torch._dynamo.utils.counters["aot_autograd"]
    found["hits before"] = hits["autograd_cache_hit"]
    found["from cache"] = train(torch.compile)
    found["hits"] = hits["autograd_cache_hit"]
    found["by block"] = by_block()
    found["by graph"] = by_graph()
    tracking.stop()
    found["refusal"] = tracking.refusal
    found["left"] = settings() != before
    found["unrecorded"] = train(torch.compile)["code"]
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
