"""Access dynamo, which creates the graphs of torch.compile.

This module copies each graph that dynamo passes to a backend, and finds the code that calls the
compiled functions.

Import this module only in a function, once dynamo is loaded or needed, because loading dynamo takes
a second.
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
"""Prefix of the names of compiled functions."""

MODULES = "nn_module_stack"
"""Metadata key of the modules in which a graph node was created."""

RECOMPUTES_SOME = "_checkpoint_context_fn"
"""Metadata key that marks a region of a graph with selective activation checkpointing.

In such a region, the user chooses which results are recomputed in backward.
"""


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A copy of a graph that dynamo passed to its backend.

    The copy keeps no tensor of the model or a batch alive.

    Attributes:
        graph: A copy of the graph. The only metadata of a node is the modules in which it was
            created, outermost first.
        attributes: The values that the graph's `get_attr` nodes read, keyed by name. A graph inside
            this graph is a `CapturedGraph`. No value is a tensor.
        backend: The name of the backend.
        chooses: Whether the graph is a region with selective activation checkpointing, in which the
            user chooses which results are kept for backward.
    """

    graph: fx.Graph
    attributes: Mapping[str, Any]
    backend: str
    chooses: bool = False

    @classmethod
    def of(cls, module: fx.GraphModule, backend: str) -> "CapturedGraph":
        """Copy the graph of a module that dynamo passed to its backend.

        Raises:
            TypeError: The graph contains a tensor as a constant.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        attributes = {}
        for node in module.graph.nodes:
            copy = graph.node_copy(node, copies.__getitem__)
            copy.meta = {MODULES: _modules(node)}
            copies[node] = copy
            if node.op == "get_attr":
                attributes[str(node.target)] = _attribute(module, node.target, backend)
        return cls(
            graph=graph,
            attributes=attributes,
            backend=backend,
            chooses=RECOMPUTES_SOME in module.meta,
        )

    def module(self) -> fx.GraphModule:
        """Create a module that runs the graph."""
        attributes = dict(self.attributes)
        for name, value in self.attributes.items():
            if isinstance(value, CapturedGraph):
                attributes[name] = value.module()
        return fx.GraphModule(attributes, self.graph)


@dataclass(frozen=True)
class CompiledCode:
    """The global variable through which dynamo's generated code calls a compiled function.

    The compiled function can be replaced by assigning another function to this variable.

    Attributes:
        scope: The global variables of the generated code.
        name: The name of the variable that holds the compiled function.
    """

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
"""The objects that have called `keep_graphs`, by their id.

While there is at least one object, a wrapper around dynamo's call of its backend copies each graph.
"""


def keep_graphs(user: object) -> None:
    """Keep a copy of each graph that is compiled from now on.

    Copying ends when `release_graphs` is called for `user`, or when `user` is freed. A copy is kept
    as long as the compiled code exists.

    Args:
        user: The object that needs the graphs.
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
    """Stop copying graphs for `user`, which was passed to `keep_graphs`.

    A second call does nothing.
    """
    _release(id(user))


def _release(user: int, _reference: object = None) -> None:
    with _LOCK:
        _USERS.pop(user, None)
        ours: Any = OutputGraph.call_user_compiler
        if not _USERS and hasattr(ours, "_lflops_original"):
            OutputGraph.call_user_compiler = ours._lflops_original  # type: ignore[method-assign]


def graph_of(code: CompiledCode, function: Any) -> CapturedGraph | None:
    """Return the graph of a compiled function.

    Returns `None` if the function was compiled before `keep_graphs` was called.

    Args:
        code: The global variable through which generated code calls the function.
        function: The function. For the backend `eager`, the graph is found through it.
    """
    known = _GRAPHS.get(code.name)
    if known is not None:
        return known
    original = getattr(function, "_torchdynamo_orig_callable", function)
    module = getattr(original, "__self__", original)
    # The backend `eager` compiles nothing, so the function still is the graph.
    if isinstance(module, fx.GraphModule):
        with contextlib.suppress(Exception):
            known = CapturedGraph.of(module, "eager")
            _GRAPHS[code.name] = known
    return known


def compiled_code() -> list[CompiledCode]:
    """Return all compiled functions that still exist, and drop the graphs of other functions."""
    found = []
    for hooks in list(CleanupManager.instance.values.values()):
        for hook in hooks:
            if hook.name.startswith(PREFIX) and hook.name in hook.scope:
                found.append(CompiledCode(hook.scope, hook.name))
    for gone in _GRAPHS.keys() - {code.name for code in found}:
        del _GRAPHS[gone]
    return found


def excluded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `function` that dynamo does not compile."""
    uncompiled: Callable[..., Any] = torch.compiler.disable(function)
    return uncompiled


@contextlib.contextmanager
def with_control_flow_compiled() -> Iterator[None]:
    """Return a context in which `torch.cond` and similar operators compile their branches.

    They are compiled even if `torch.compiler.set_stance` makes torch run all code eagerly. Without
    this, a tensor that a branch uses but that is not passed as an operand would get no gradient.
    """
    original: Any = operators_with_code.setup_compilation_env

    @contextlib.contextmanager
    def setup_compilation_env() -> Iterator[Any]:
        with torch.compiler.set_stance("default"), original() as backend:
            yield backend

    with CleanupStack() as undo:
        replace_attribute(undo, operators_with_code, "setup_compilation_env", setup_compilation_env)
        yield


def _keep(module: fx.GraphModule, output: Any) -> None:
    """Keep a copy of a graph that dynamo passes to its backend.

    If an error occurs, the graph is not kept, and the user's compilation continues.

    Args:
        module: The graph.
        output: dynamo's `OutputGraph`, which has the backend.
    """
    with contextlib.suppress(Exception):
        name = module.meta.get("backend_id")
        if name is not None:
            compiler = output.compiler_fn
            backend = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", "")
            _GRAPHS[name] = CapturedGraph.of(module, str(backend))


def _modules(node: fx.Node) -> tuple[tuple[str, str, str], ...]:
    """Return the modules in which a graph node was created, outermost first.

    Each item has dynamo's key for the call of the module, the name of the module, and the name of
    its class.
    """
    stack = node.meta.get(MODULES) or {}
    modules = []
    for key, (name, kind) in stack.items():
        class_name = kind if isinstance(kind, str) else kind.__name__
        modules.append((str(key), str(name), class_name))
    return tuple(modules)


def _attribute(module: fx.GraphModule, name: Any, backend: str) -> Any:
    value = attrgetter(str(name))(module)
    if isinstance(value, fx.GraphModule):
        return CapturedGraph.of(value, backend)
    if isinstance(value, Tensor):
        # The copy would keep the tensor alive.
        raise TypeError("the graph contains a tensor as a constant")
    return value
