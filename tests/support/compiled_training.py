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
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = (
    "0"  # kernels without vector instructions compile in half of the time
)

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
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Two products and what is between."""
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Two equal blocks, of which the second is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False).sum()


def train(compiled: Callable[[Net], Any], *, trace: bool = True) -> dict[str, Any]:
    """Compile, and train for four steps, of which the last two may be traced.

    Returns what came of it.
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
    """What the trace of two steps says of compiled code."""
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
    """The generated C++ kernels by their text, without the lines that make Kineto show them."""
    profiled = re.compile(r".*(RAIIAtenRecordFunctionHandle|aoti_runtime/utils\.h).*\n")
    sources = {profiled.sub("", path.read_text()) for path in FOLDER.rglob("*.main.cpp")}
    return sorted(sources)


def settings() -> dict[str, Any]:
    """Inductor's settings in this thread and in others, and what else is changed meanwhile."""
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
    """What a trace says of a forward in which each block is compiled by itself.

    One graph, for both.
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
    """Two equal layers, each of which is a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A graph break between them."""
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def by_graph() -> Any:
    """What a trace says of two graphs of equal code."""
    torch._dynamo.reset()
    net: Any = torch.compile(Broken())
    x = torch.randn(32, 16)
    with torch.no_grad():
        net(x)
        return traced(net, lambda: net(x))


def main() -> None:
    """Train, and print."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"plain": train(torch.compile, trace=False)}
    plain_kernels, before = kernels(), settings()
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
    found["refusal"], found["left"] = tracking.refusal, settings() != before
    found["unrecorded"] = train(torch.compile)["code"]
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
