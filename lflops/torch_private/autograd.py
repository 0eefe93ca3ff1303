"""Access autograd: sequence numbers of nodes, ids of passes, leaves, and autograd's profiler."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.profiler import profile

from lflops.error_guard import CleanupStack, replace_attribute
from lflops.torch_private.known_torch import known_torch
from lflops.torch_private.modules import never_compiled

with known_torch():
    from torch._C import _current_autograd_node, _current_graph_task_id
    from torch.autograd import _get_sequence_nr, _profiler_enabled  # type: ignore[attr-defined]

NO_BACKWARD = -1
"""The value of `backward_id()` outside a backward pass."""

ACCUMULATES_GRADIENT = 1 << 62
"""Smallest sequence number of the autograd nodes that write `.grad`.

No operator of forward created these nodes, so they have no number in the order of creation.
"""

next_sequence_number: Callable[[], int] = _get_sequence_nr
"""Returns the sequence number of the next autograd node that this thread builds."""

backward_id: Callable[[], int] = _current_graph_task_id
"""Returns the id of the backward pass that this thread is running.

Later passes have larger ids.
"""

current_node: Callable[[], Any] = _current_autograd_node
"""Returns the autograd node that this thread is running, or `None`."""

profiler_is_recording: Callable[[], bool] = _profiler_enabled
"""Returns whether one of torch's profilers is recording."""


def wrap_profilers(undo: CleanupStack, call: Callable[[], None]) -> None:
    """Call a function before each start of a torch profiler, until `undo` is closed."""
    prepare = profile._prepare_trace

    @functools.wraps(prepare)
    def after_the_call(self: profile) -> None:
        call()
        prepare(self)  # type: ignore[no-untyped-call]

    replace_attribute(undo, profile, "_prepare_trace", after_the_call)


def wrap_backward(
    undo: CleanupStack, begins: Callable[[Any], Any], ends: Callable[[Any], Any]
) -> None:
    """Call functions before and after each backward pass that writes gradients.

    torch has no hook for this. Therefore the function that calls the autograd engine is wrapped
    until `undo` is closed.

    Args:
        undo: Removes the wrapper when it is closed.
        begins: Called before the pass with the tensors from which it starts.
        ends: Called after the pass with the result of `begins`. It is not called if this result is
            `None`, or if the pass raised an exception.
    """
    with known_torch():
        run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def with_calls(tensors: Any, *args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
        begun = begins(tensors) if accumulate_grad else None
        result = run_backward(tensors, *args, accumulate_grad=accumulate_grad, **kwargs)
        if begun is not None:
            ends(begun)
        return result

    never_compiled(with_calls, within=False)
    for each in (begins, ends):
        never_compiled(each)
    replace_attribute(undo, torch.autograd, "_engine_run_backward", with_calls)


def watch_derivatives(undo: CleanupStack, called: Callable[[], None]) -> None:
    """Call a function before each backward pass that computes derivatives for further use.

    Such a pass returns the derivatives (`torch.autograd.grad`), or builds a graph of them so that
    they can be differentiated again (`create_graph=True`).

    Args:
        undo: Stops the calls when it is closed.
        called: Called before each such pass.
    """
    with known_torch():
        run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def with_call(tensors: Any, *args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
        # torch passes the gradients, `retain_graph` and `create_graph` by position.
        creates_graph = bool(args[2:3] and args[2])
        if creates_graph or not accumulate_grad:
            called()
        return run_backward(tensors, *args, accumulate_grad=accumulate_grad, **kwargs)

    never_compiled(with_call, within=False)
    never_compiled(called)
    replace_attribute(undo, torch.autograd, "_engine_run_backward", with_call)


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass.

    The function is called before callbacks that are registered later.
    """
    Variable._execution_engine.queue_callback(callback)


sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Returns the sequence number of an autograd node.

Each thread numbers nodes in the order of their creation.
"""


def node_name(node: Any) -> str:
    """Return the name of an autograd node's class, which is different for each custom operator."""
    return str(node.name())


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that get a `.grad` from a backward pass that starts at `tensors`."""
    found = [tensor for tensor in tensors if tensor.is_leaf]
    for node in nodes_behind(tensor.grad_fn for tensor in tensors):
        if sequence_number(node) >= ACCUMULATES_GRADIENT and hasattr(node, "variable"):
            found.append(node.variable)
    return found


def nodes_behind(
    nodes: Iterable[Any], is_passed: Callable[[Any], bool] | None = None
) -> Iterator[Any]:
    """Yield the given autograd nodes and all nodes that are reachable from them, each node once.

    If `is_passed` returns false for a node, the search does not continue from this node.
    """
    waiting = list(nodes)
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if is_passed is None or is_passed(node):
                waiting.extend(following for following, _ in node.next_functions)
