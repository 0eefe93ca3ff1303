"""Dynamo, which makes the graphs of torch.compile.

Each graph as it is handed to a backend, and where its compiled code is called from.

Import it within a function only, once dynamo is loaded or needed: to load it takes a second.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from lflops.error_guard import CleanupStack, replace_attribute
from lflops.torch_private.known_torch import known_torch

with known_torch():
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.utils import CleanupManager
    from torch._higher_order_ops import utils as operators_with_code

PREFIX = "__compiled_fn"
# the meta data of a node that has the modules around it
MODULES = "nn_module_stack"
# marks the graph of a checkpointed region whose user chooses what is recomputed
RECOMPUTES_SOME = "_checkpoint_context_fn"


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A graph as dynamo handed it to its backend.

    No tensor of the model or of a batch is kept alive.
    """

    # a copy. Of the nodes' meta data only the modules are kept: names and classes, outermost first
    graph: fx.Graph
    attributes: Mapping[
        str, Any
        # what its `get_attr` nodes name: other graphs, or anything else that is no tensor
    ]
    # the backend's name
    backend: str
    # whether the user chooses which of its results are kept for backward
    chooses: bool = False

    @classmethod
    def of(cls, module: fx.GraphModule, backend: str) -> "CapturedGraph":
        """Copy a graph."""
        graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in module.graph.nodes:
            made = copied[node] = graph.node_copy(node, copied.__getitem__)
            made.meta = {MODULES: _modules(node)}
        attributes = {
            str(node.target): _attribute(module, node.target, backend)
            for node in module.graph.nodes
            if node.op == "get_attr"
        }
        return cls(
            graph=graph,
            attributes=attributes,
            backend=backend,
            chooses=RECOMPUTES_SOME in module.meta,
        )

    def module(self) -> fx.GraphModule:
        """A module that runs the graph, for operators that take one."""
        attributes = {
            name: each.module() if isinstance(each, CapturedGraph) else each
            for name, each in self.attributes.items()
        }
        return fx.GraphModule(attributes, self.graph)


@dataclass(frozen=True)
class CompiledCode:
    """Where generated code calls the compiled function of a graph."""

    scope: dict[str, Any]
    name: str

    @property
    def function(self) -> Any:
        return self.scope.get(self.name)

    def replace(self, function: Any) -> None:
        if self.name in self.scope:
            self.scope[self.name] = function


_GRAPHS: dict[str, CapturedGraph] = {}

_LOCK = threading.RLock()
_USERS: dict[int, weakref.ref[Any]] = {}
"""Those that need the graphs, by identity.

While there are any, dynamo's call of its backend is replaced.
"""


def keep_graphs(user: object) -> None:
    """Copy each graph that is compiled, until `release_graphs` or the user's death.

    It is known until its code is gone.
    """
    with _LOCK:
        _USERS[id(user)] = weakref.ref(user, partial(_release, id(user)))
        original: Any = OutputGraph.call_user_compiler
        if not hasattr(original, "_lflops_original"):

            def call_user_compiler(self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
                _keep(gm, self)
                return original(self, gm, *args, **kwargs)

            call_user_compiler._lflops_original = original  # type: ignore[attr-defined]
            OutputGraph.call_user_compiler = call_user_compiler  # type: ignore[method-assign]


def release_graphs(user: object) -> None:
    """End that for one user. It can be called again."""
    _release(id(user))


def _release(user: int, _reference: object = None) -> None:
    with _LOCK:
        _USERS.pop(user, None)
        ours: Any = OutputGraph.call_user_compiler
        if not _USERS and hasattr(ours, "_lflops_original"):
            OutputGraph.call_user_compiler = ours._lflops_original  # type: ignore[method-assign]


def graph_of(code: CompiledCode, function: Any) -> CapturedGraph | None:
    """The graph of a compiled function.

    `None` for one that was compiled before anybody kept graphs.
    """
    known = _GRAPHS.get(code.name)
    if known is None:
        runs = getattr(function, "_torchdynamo_orig_callable", function)
        module = getattr(runs, "__self__", runs)
        # the backend `eager` compiles nothing
        if isinstance(module, fx.GraphModule):
            with contextlib.suppress(Exception):
                known = _GRAPHS[code.name] = CapturedGraph.of(module, "eager")
    return known


def compiled_code() -> list[CompiledCode]:
    """Every compiled function that is alive. Graphs of others are forgotten."""
    hooks = [hook for each in list(CleanupManager.instance.values.values()) for hook in each]
    found = [
        CompiledCode(hook.scope, hook.name)
        for hook in hooks
        if hook.name.startswith(PREFIX) and hook.name in hook.scope
    ]
    for gone in _GRAPHS.keys() - {each.name for each in found}:
        del _GRAPHS[gone]
    return found


def excluded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which dynamo does not look into."""
    left_alone: Callable[..., Any] = torch.compiler.disable(function)
    return left_alone


@contextlib.contextmanager
def with_control_flow_compiled() -> Iterator[None]:
    """Within, `torch.cond` and the like, called eagerly, trace their branches although the stance is to run all code eagerly."""
    # Without that, tensors of a branch that are not among its operands get no gradient
    original: Any = operators_with_code.setup_compilation_env

    @contextlib.contextmanager
    def setup_compilation_env() -> Iterator[Any]:
        with torch.compiler.set_stance("default"), original() as backend:
            yield backend

    with CleanupStack() as undo:
        replace_attribute(undo, operators_with_code, "setup_compilation_env", setup_compilation_env)
        yield


def _keep(module: fx.GraphModule, output: Any) -> None:
    """Keep a graph; an error leaves it unknown, and does not end the user's compilation."""
    with contextlib.suppress(Exception):
        name = module.meta.get("backend_id")
        if name is not None:
            compiler = output.compiler_fn
            backend = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", "")
            _GRAPHS[name] = CapturedGraph.of(module, str(backend))


def _modules(node: fx.Node) -> tuple[tuple[str, str, str], ...]:
    """Each module around a node, outermost first: dynamo's key of the call, its name, its class."""
    stack = node.meta.get(MODULES) or {}
    return tuple(
        (str(key), str(name), kind if isinstance(kind, str) else kind.__name__)
        for key, (name, kind) in stack.items()
    )


def _attribute(module: fx.GraphModule, name: Any, backend: str) -> Any:
    value = attrgetter(str(name))(module)
    if isinstance(value, fx.GraphModule):
        return CapturedGraph.of(value, backend)
    if isinstance(value, Tensor):
        # it would be kept alive
        raise TypeError("a tensor is part of the graph")
    return value
