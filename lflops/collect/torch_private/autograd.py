"""Autograd: the numbers of nodes and backward passes, the leaves of a graph, and autograd's profiler."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.profiler import profile

from lflops.collect.torch_private.known_torch import known_torch

with known_torch():
    from torch._C import _current_autograd_node, _current_graph_task_id
    from torch.autograd import _get_sequence_nr, _profiler_enabled  # type: ignore[attr-defined]

NO_BACKWARD = -1  # `backward_id()` outside of a backward pass
ACCUMULATES_GRADIENT = 1 << 62  # nodes that write `.grad` have sequence numbers from here on. No forward operator built them.
next_sequence_number: Callable[[], int] = _get_sequence_nr  # the number of the next autograd node that this thread builds

backward_id: Callable[[], int] = _current_graph_task_id
"""The number of the backward pass that this thread is running; later passes have higher numbers."""

current_node: Callable[[], Any] = _current_autograd_node  # the autograd node that this thread is evaluating, or `None`
profiler_is_recording: Callable[[], bool] = _profiler_enabled  # whether one of torch's profilers is recording


def hear_profilers(call: Callable[[], None]) -> None:
    """Call the function whenever a profiler of torch's is about to get ready, until `hear_profilers_no_more`."""
    prepare = profile._prepare_trace

    @functools.wraps(prepare)
    def after_the_call(self: profile) -> None:
        call()
        prepare(self)  # type: ignore[no-untyped-call]

    after_the_call.calls = call  # type: ignore[attr-defined]
    profile._prepare_trace = after_the_call  # type: ignore[method-assign]


def hear_profilers_no_more(call: Callable[[], None]) -> None:
    """End that. Where somebody else has replaced the method since, theirs stays, and calls ours."""
    current: Any = profile._prepare_trace
    if getattr(current, "calls", None) is call:
        profile._prepare_trace = current.__wrapped__  # type: ignore[method-assign]


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
    writing = (node for node in nodes if sequence_number(node) >= ACCUMULATES_GRADIENT and hasattr(node, "variable"))
    return [*(tensor for tensor in tensors if tensor.is_leaf), *(node.variable for node in writing)]


def nodes_behind(nodes: Iterable[Any], is_passed: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """These autograd nodes and all that they lead back to, each once. The walk goes on from a node only if `is_passed` returns true."""
    waiting, seen = list(nodes), set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if is_passed is None or is_passed(node):
                waiting.extend(following for following, _ in node.next_functions)
