"""Autograd: the numbers of nodes and backward passes, the leaves of a graph, and autograd's profiler."""

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

# `backward_id()` outside of a backward pass
NO_BACKWARD = -1
ACCUMULATES_GRADIENT = (
    1 << 62
    # nodes that write `.grad` have sequence numbers from here on. No forward operator built them.
)
next_sequence_number: Callable[[], int] = (
    # the number of the next autograd node that this thread builds
    _get_sequence_nr
)

backward_id: Callable[[], int] = _current_graph_task_id
"""The number of the backward pass that this thread is running; later passes have higher numbers."""

current_node: Callable[[], Any] = (
    # the autograd node that this thread is evaluating, or `None`
    _current_autograd_node
)
profiler_is_recording: Callable[[], bool] = (
    # whether one of torch's profilers is recording
    _profiler_enabled
)


def hear_profilers(undo: CleanupStack, call: Callable[[], None]) -> None:
    """Call the function whenever a profiler of torch's is about to get ready, until `undo` is closed."""
    prepare = profile._prepare_trace

    @functools.wraps(prepare)
    def after_the_call(self: profile) -> None:
        call()
        prepare(self)  # type: ignore[no-untyped-call]

    replace_attribute(undo, profile, "_prepare_trace", after_the_call)


def hear_backward(
    undo: CleanupStack, begins: Callable[[Any], Any], ends: Callable[[Any], Any]
) -> None:
    """Call a function with the tensors that a backward pass begins with, if it writes gradients, and one after it with what it returned."""
    # The second is not called where the first returned nothing, or after an exception. torch has no
    # hook for that. So the function that calls the engine is replaced by one that goes on to it,
    # until `undo` is closed.
    with known_torch():
        run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def heard(tensors: Any, *args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
        begun = begins(tensors) if accumulate_grad else None
        result = run_backward(tensors, *args, accumulate_grad=accumulate_grad, **kwargs)
        if begun is not None:
            ends(begun)
        return result

    never_compiled(heard, within=False)
    for each in (begins, ends):
        never_compiled(each)
    replace_attribute(undo, torch.autograd, "_engine_run_backward", heard)


def after_backward(callback: Callable[[], None]) -> None:
    """Call the function when all nodes of the running backward pass have run, before the callbacks that are registered later."""
    Variable._execution_engine.queue_callback(callback)


sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The number of an autograd node: its thread numbers them in the order in which it builds them."""


def node_name(node: Any) -> str:
    """The name of an autograd node's class, in which a custom operator has its own."""
    return str(node.name())


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose `.grad` a backward pass from these tensors would write."""
    nodes = nodes_behind(tensor.grad_fn for tensor in tensors)
    writing = (
        node
        for node in nodes
        if sequence_number(node) >= ACCUMULATES_GRADIENT and hasattr(node, "variable")
    )
    return [*(tensor for tensor in tensors if tensor.is_leaf), *(node.variable for node in writing)]


def nodes_behind(
    nodes: Iterable[Any], is_passed: Callable[[Any], bool] | None = None
) -> Iterator[Any]:
    """These autograd nodes and all that they lead back to, each once.

    The walk goes on from a node only if `is_passed` returns true.
    """
    waiting, seen = list(nodes), set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if is_passed is None or is_passed(node):
                waiting.extend(following for following, _ in node.next_functions)
