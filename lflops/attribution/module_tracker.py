"""Track which module and which phase of a step is running.

Operators are counted and modules are timed with this tracker.

Forward: each thread has a stack of the modules that it has entered. Global module hooks update the
stack, and store nothing on the modules. A module or scope on the stack is called a frame.

Backward: when forward runs a differentiable operator, torch builds an autograd node. It numbers the
nodes of each thread in the order in which they are built. When a module is entered or left, the
tracker stores the next number. These numbers divide the nodes into segments, and each segment
belongs to the module that ran at that time. In backward, the number of the running node shows its
segment, and so the module that built the node. This works for any type of arguments and results.

    forward     enter q   mm   leave q   enter k   mm   leave k
    number                5                        6
    boundaries  5 q, 6 root, 6 k, 7 root
    backward    node 6: k, node 5: q

If several threads build nodes, the same number occurs more than once, and a node does not record
which thread built it. There are three cases:

* Activation checkpointing rebuilds nodes during backward. On a GPU, this happens on the thread that
  autograd has for the device. A nested backward pass on the same thread runs these nodes and frees
  them, so `in_inner_backward` recognizes this case.
* With `create_graph`, backward builds nodes for a second backward pass, also on this thread.
* The user runs forward on a second thread.

In the last two cases, the nodes live longer. Each node is marked with the thread that built it (see
`Claims`). If the thread of a node is still unclear, the work of the node is assigned to the root
module, and a note in the profile reports this (see `ambiguous`).
"""

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lflops.attribution.hooks import LISTENERS, install_hooks
from lflops.attribution.python_stack import (
    caller,
    checkpoint_is_running,
    in_inner_backward,
    is_running,
)
from lflops.error_guard import CleanupStack, Guard, unguarded
from lflops.inputs.tensors import nodes_of, tensors_in
from lflops.model.module_tree import ModuleTree
from lflops.profile.module_names import name_below
from lflops.profile.records import Phase
from lflops.torch_private.autograd import (
    ACCUMULATES_GRADIENT,
    NO_BACKWARD,
    backward_id,
    current_node,
    next_sequence_number,
    nodes_behind,
    sequence_number,
)


class AutogradSegments:
    """Maps the numbers of one thread's autograd nodes to the modules that built the nodes.

    A segment is a range of numbers that belong to the same module.

    Attributes:
        lasting: Whether the thread built nodes that a later backward pass may run. Nodes that are
            built by recomputation do not count, because they are freed in the same pass.
    """

    def __init__(self, start: int) -> None:
        self.lasting = False
        self._starts: list[int] = []
        self._fqns: list[str] = []
        self._end = start

    def mark(self, number: int, fqn: str) -> None:
        """Begin a new segment: the node with this number and all later nodes belong to `fqn`."""
        if self._starts and self._starts[-1] >= number:
            self._fqns[-1] = fqn
        else:
            self._starts.append(number)
            self._fqns.append(fqn)
        self._end = number

    def extend(self, number: int, fqn: str) -> None:
        """Assign the nodes after the last assigned node to the module `fqn`.

        `number` is the number that the next node will get.
        """
        if number > self._end:
            self.mark(self._end, fqn)
            self._end = number

    def close(self, number: int) -> None:
        """Keep the modules of all nodes before `number`, also in later calls of `extend`."""
        self._end = number

    def name_of(self, number: int) -> str:
        """Return the name of the module that built a node.

        The root is returned if the node was built before the tracking began.
        """
        index = bisect_right(self._starts, number) - 1
        return self._fqns[index] if index >= 0 else ""

    def spans(self, number: int) -> bool:
        """Return whether the thread built a node with the given number while it was tracked."""
        return bool(self._starts) and self._starts[0] <= number < self._end


class Claims:
    """Records which thread built an autograd node. It is used only if several threads build nodes.

    Each thread numbers its own nodes, so nodes of two threads can have the same number, and a node
    does not record its thread. So each node is claimed for the thread that built it: the
    `AutogradSegments` of this thread are stored in `Node.metadata`, a
    dictionary that torch provides for such purposes. `release` removes these entries.
    """

    def __init__(self) -> None:
        self._claimed: list[dict[Any, Any]] = []

    def claim(self, nodes: Iterable[Any], segments: AutogradSegments) -> None:
        """Record that a thread built `nodes`, and all nodes that backward reaches from `nodes`.

        `segments` are the segments of this thread. Nodes that are already claimed do not change.
        """
        for node in nodes_behind(nodes):
            if sequence_number(node) < ACCUMULATES_GRADIENT and self not in node.metadata:
                node.metadata[self] = segments
                self._claimed.append(node.metadata)

    def owner(self, node: Any) -> AutogradSegments | None:
        """Return the segments of the thread that built a node, or `None` if it was not claimed."""
        segments: AutogradSegments | None = node.metadata.get(self)
        return segments

    def release(self) -> None:
        """Remove all entries that `claim` has stored, because the user may keep the graph."""
        for metadata in self._claimed:
            metadata.pop(self, None)
        self._claimed.clear()


@dataclass(slots=True)
class Frame:
    """A module or scope that has been entered but not left.

    Attributes:
        key: Identifies the frame when it is left. For a module, it is the module's `id`.
    """

    key: int


AnyFrame = TypeVar("AnyFrame", bound=Frame)


class FrameStack(list[AnyFrame]):
    """A stack of frames; the innermost frame is the last."""

    __slots__ = ()

    def cut(self, key: int) -> list[AnyFrame]:
        """Remove and return the innermost frame with this key and all frames inside this frame.

        The outermost of these frames comes first. The result is empty if no frame has the key.
        Usually, the frame contains no other frames. If an interrupt has left inner frames, they are
        still on the stack, because torch called no hook for them.
        """
        if self and self[-1].key == key:
            return [self.pop()]
        for position in reversed(range(len(self))):
            if self[position].key == key:
                removed = self[position:]
                del self[position:]
                return removed
        return []


@dataclass(slots=True)
class TrackedFrame(Frame):
    """A module or scope that a `ModuleTracker` follows.

    Attributes:
        fqn: Name of the module or scope in the module tree.
        module_fqn: Name of the module itself, or of the innermost module around a scope.
        backward: Number of the backward pass in which the frame was entered; `NO_BACKWARD` outside
            backward.
        caller: The Python frame that called a module; `None` for a scope. If that Python frame has
            ended, the module has ended as well: an interrupt left the module, and torch called no
            hook.
    """

    fqn: str
    module_fqn: str
    backward: int
    caller: FrameType | None


class ThreadState:
    """The modules, optimizer steps and backward passes that one thread is running.

    Attributes:
        stack: The modules and scopes that the thread is in.
        segments: The segments of the thread's autograd nodes; `None` until they are first needed.
        calls: Number of calls of each module.
        backward: Number of the latest backward pass on this thread.
        differentiated: Whether that pass builds autograd nodes so that it can itself be
            differentiated (with `create_graph`). False if it builds no nodes, or builds them only
            because checkpointing recomputes forward.
        writes_gradient: Whether the node that backward runs or last ran writes `.grad`.
        recomputed_round: Number of forward passes that the tracker had seen when this thread last
            recomputed modules in backward; -1 if it never has.
        detour: Whether nodes were built outside the running frame since the last operator. The
            next operator must then begin a new segment. This happens after nodes are built in
            backward, or after an exception has left a frame.
        unfollow: Function to call when the thread has left all modules; `None` if there is none.
        steps: The running optimizer steps, and for each step the number of the backward pass in
            which it began. While a step runs its closure, an entry with `None` instead of an
            optimizer follows.
    """

    def __init__(self) -> None:
        self.stack: FrameStack[TrackedFrame] = FrameStack()
        self.segments: AutogradSegments | None = None
        self.calls: Counter[str] = Counter()
        self.backward = NO_BACKWARD
        self.differentiated = False
        self.writes_gradient = False
        self.recomputed_round = -1
        self.detour = False
        self.unfollow: Callable[[], None] | None = None
        self.steps: list[tuple[Optimizer | None, int]] = []


class ThreadLocal(threading.local):
    """Gives each thread its own `ThreadState`, with the modules that run in this thread."""

    def __init__(self) -> None:
        self.state = ThreadState()


class ModuleTracker:
    """Tracks which module runs in forward, backward, recomputation and optimizer steps.

    Attributes:
        tree: The modules.
        ambiguous: Number of operators in backward whose module is unknown, because it is unclear
            which thread built their autograd node.
        home: Identifier of the thread on which `start` or `begin` was called.
    """

    def __init__(
        self,
        tree: ModuleTree,
        *,
        phase: Phase = "other",
        follow: Callable[[], Callable[[], None]] | None = None,
        follows_update: bool = False,
    ) -> None:
        """Create the tracker.

        Args:
            tree: The modules.
            phase: Until a module is called, operators outside all modules belong to this phase.
            follow: Function that is called when a thread other than the home thread enters a module
                of the tree. It returns the function to call when that thread has left its
                outermost module.
            follows_update: Whether an optimizer has just made its step. Until a module is called,
                operators outside modules are then no part of a forward pass.
        """
        self.tree = tree
        self.ambiguous = 0
        self.home = threading.get_ident()
        self._phase = phase
        self._follow = follow
        self._round = 0
        # Whether a module was called, and then an optimizer made a step. Until a module is called
        # again, operators outside all modules are no part of a forward pass.
        self._has_updated = follows_update
        self._local = ThreadLocal()
        # The segments and the calls of each thread, in the same order. The home thread is the
        # first, because `begin` adds it.
        self._threads: list[AutogradSegments] = []
        self._calls: list[Counter[str]] = []
        self._claims = Claims()
        self._hooks = CleanupStack()

    def start(self, guard: Guard = unguarded) -> None:
        """Install the hooks, and follow the current thread as the home thread."""
        self.begin()
        install_hooks(self._hooks, self, self, guard=guard)

    def begin(self) -> None:
        """Track modules on the current thread, without installing hooks.

        The tracker then only knows modules and scopes that the caller enters, for example with
        `enter_name`.
        """
        self.home = threading.get_ident()
        self._boundary("", NO_BACKWARD)

    def stop(self) -> None:
        """Remove the hooks, and the entries that `Claims` has stored on autograd nodes."""
        self._hooks.close()
        self._claims.release()
        # Otherwise, the tracker and its followers would keep each other and the model alive.
        self._follow = None

    def outside(self, phase: Phase) -> None:
        """Set the phase of operators outside all modules, from now on.

        The next forward pass sets this phase to `forward`, and the next backward pass to `other`.
        """
        self._phase = phase

    @property
    def calls(self) -> Counter[str]:
        """Number of calls of each module in forward."""
        return sum(self._calls, Counter())

    def current(  # noqa: C901 - a call costs too much here
        self, operands: Any = ()
    ) -> tuple[str, Phase]:
        """Return the module and phase of the operator that this thread runs on `operands`."""
        backward = backward_id()
        state = self._local.state
        phase: Phase
        top = None
        if state.stack:
            top = state.stack[-1]
            if top.backward != backward or not is_running(top.caller):
                top = self._top(backward)
        if state.steps and state.steps[-1][0] is not None and state.steps[-1][1] == backward:
            fqn = ""
            phase = "optimizer"
        elif top is not None:
            fqn = top.fqn
            if backward != NO_BACKWARD:
                return fqn, "recompute"
            phase = "forward"
        elif backward != NO_BACKWARD:
            return self._in_backward(backward)
        else:
            fqn = ""
            phase = self._phase
            # A differentiable operator is part of forward, until an optimizer has used the
            # gradients. Other operators are, for example, gradient clipping, averages or metrics.
            if torch.is_grad_enabled() and not self._has_updated:
                for tensor in tensors_in(operands):
                    if tensor.requires_grad:
                        phase = "forward"
                        break
        if state.detour:
            self._segments().extend(next_sequence_number(), fqn)
            state.detour = False
        return fqn, phase

    def current_of_view(self, operands: Any) -> tuple[str, Phase]:
        """Return the module and phase of a view. In backward, the module may be the root instead.

        In most backward passes, this is faster than `current`, because the module is not looked up.
        The module of a view does not matter, because no work is counted for a view.
        """
        state = self._local.state
        if (
            backward_id() == NO_BACKWARD
            or state.stack
            or state.steps
            or len(self._threads) > 1
            or torch.is_grad_enabled()
        ):
            return self.current(operands)
        self._phase = "other"
        return "", "backward"

    def stepping(self) -> Optimizer | None:
        """Return the optimizer whose step runs the current operator.

        Only valid after `current` returned the phase "optimizer".
        """
        return self._local.state.steps[-1][0]

    def writes_gradient(self) -> bool:
        """Return whether the running autograd node writes `.grad` of a parameter.

        Only valid after `current` returned the phase "backward".
        """
        return self._local.state.writes_gradient

    def between(self) -> tuple[str, Phase]:
        """Return the module and phase of Python code between operators.

        Outside all modules and backward passes, the phase is "other".
        """
        backward = backward_id()
        top = self._top(backward)
        if self.optimizer is not None:
            return "", "optimizer"
        is_in_backward = backward != NO_BACKWARD
        if top is not None:
            return top.fqn, "recompute" if is_in_backward else "forward"
        if is_in_backward:
            return self._in_backward(backward)
        return "", "other"

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose step is running.

        `None` if no step is running, or while a step runs its closure.
        """
        steps = self._local.state.steps
        if not steps:
            return None
        optimizer, backward = steps[-1]
        if backward != backward_id():
            return None
        return optimizer

    def _running(self) -> tuple[str, str]:
        """Return the names of the running module or scope and of the innermost running module.

        The two names differ if a scope is running.
        """
        backward = backward_id()
        top = self._top(backward)
        if top is not None:
            return top.fqn, top.module_fqn
        fqn = ""
        if backward != NO_BACKWARD:
            fqn = self._in_backward(backward)[0]
        return fqn, self.tree.nearest(fqn)

    def enter_module(self, module: nn.Module, _args: Any) -> None:
        if module in self.tree and self._is_mine():
            fqn = self.tree.name_of(module, self._running()[1])
            self._push(id(module), fqn, fqn, caller())

    def leave_module(self, module: nn.Module, *values: Any) -> None:
        if module not in self.tree:
            return
        is_outermost = self._pop(id(module))
        if not is_outermost or len(self._threads) == 1:
            return
        threads_with_lasting_nodes = sum(segments.lasting for segments in self._threads)
        if threads_with_lasting_nodes > 1 and backward_id() == NO_BACKWARD:
            if threading.get_ident() != self.home:
                self._claims.claim(nodes_of(values[:-1]), self._threads[0])
            self._claims.claim(nodes_of(values[-1]), self._segments())

    def enter_scope(self, key: int, name: str) -> None:
        """Enter a named scope below the running module."""
        fqn, module_fqn = self._running()
        self._push(key, name_below(fqn, name), module_fqn, None)

    def leave_scope(self, key: int) -> None:
        self._pop(key)

    def enter_name(self, key: int, fqn: str) -> None:
        """Treat the module or scope `fqn` as running, although it is not being called.

        Unlike `enter_module`, this does not count as a call of the module, and it does not change
        the phase of operators outside modules.
        """
        state = self._local.state
        backward = backward_id()
        # Remove the frames that were left by an exception.
        self._top(backward)
        state.stack.append(TrackedFrame(key, fqn, self.tree.nearest(fqn), backward, None))
        self._boundary(fqn, backward)

    def running(self) -> str:
        """Return the name of the module or scope that this thread is running."""
        return self._running()[0]

    def enter_step(self, optimizer: Optimizer) -> None:
        self._local.state.steps.append((optimizer, backward_id()))

    def leave_step(self, optimizer: Optimizer | None) -> None:
        """Leave an optimizer step, and all steps inside it that an exception has left."""
        if optimizer is not None and self._round:
            self._has_updated = True
        steps = self._local.state.steps
        while steps and steps.pop()[0] is not optimizer:
            pass

    def enter_closure(self, _key: int) -> None:
        self._local.state.steps.append((None, backward_id()))

    def leave_closure(self, _key: int) -> None:
        """Leave the closure of a step, and all steps inside it that an exception has left."""
        self.leave_step(None)

    def follows_this_thread(self) -> bool:
        """Return whether this tracker should record what the current thread runs now.

        It always records its home thread (see `home`). It records another thread only while this
        thread is in a module or runs backward, and only if `_is_mine` allows it.
        """
        is_home = threading.get_ident() == self.home
        is_active = bool(self._local.state.stack) or backward_id() != NO_BACKWARD
        return (is_home or is_active) and self._is_mine()

    def _is_mine(self) -> bool:
        """Return whether this tracker is allowed to record what the current thread runs.

        The home thread of a listener is the thread on which it was started. It is reserved for the
        listeners that were started on it; all other threads are open to every tracker.
        """
        thread = threading.get_ident()
        return thread == self.home or all(thread != listener.home for listener in LISTENERS)

    def _push(self, key: int, fqn: str, module_fqn: str, caller: FrameType | None) -> None:
        state = self._local.state
        backward = backward_id()
        # `_running` has just removed the frames that were left by an exception.
        if backward == NO_BACKWARD and not state.stack:
            self._round += 1
            self._has_updated = False
            if self.optimizer is None:
                self._phase = "forward"
            if self._follow is not None and threading.get_ident() != self.home:
                state.unfollow = self._follow()
        state.stack.append(TrackedFrame(key, fqn, module_fqn, backward, caller))
        self._boundary(fqn, backward)
        # A call of a wrapper counts as a call of the module that it wraps.
        if backward == NO_BACKWARD and key not in self.tree.wrappers:
            state.calls[fqn] += 1

    def _pop(self, key: int) -> bool:
        """Remove the frame with this key, and return whether it was the outermost frame."""
        state = self._local.state
        if not state.stack.cut(key):
            return False
        # In recomputation, the nodes that were built inside the frame must not be assigned to the
        # module around the frame.
        self._segments().close(next_sequence_number())
        self._boundary(self._running()[0], backward_id())
        if state.stack:
            return False
        unfollow = state.unfollow
        if unfollow is not None:
            state.unfollow = None
            unfollow()
        return True

    def _top(self, backward: int) -> TrackedFrame | None:
        """Return the innermost frame if it was entered in the given backward pass, else `None`.

        `backward` is the number of the pass, or `NO_BACKWARD` outside backward. Frames that an
        exception has left are removed first.
        """
        state = self._local.state
        stack = state.stack
        # A pass has a higher number than the pass that contains it. So a frame with a higher number
        # than the current pass was left by an exception.
        while stack and (stack[-1].backward > backward or not is_running(stack[-1].caller)):
            stack.pop()
            state.detour = True
        if not stack or stack[-1].backward != backward:
            return None
        return stack[-1]

    def _in_backward(self, backward: int) -> tuple[str, Phase]:
        """Return the module and phase of an operator in backward, outside recomputed modules."""
        state = self._local.state
        node = current_node()
        threads = self._threads
        fqn = ""
        self._phase = "other"
        state.writes_gradient = False
        if node is not None:
            number = sequence_number(node)
            if number >= ACCUMULATES_GRADIENT:
                fqn = self.tree.owner(getattr(node, "variable", None))
                state.writes_gradient = True
            elif len(threads) == 1:
                fqn = threads[0].name_of(number)
            else:
                fqn = self._built_by(node, number)
        if not torch.is_grad_enabled():
            state.backward = backward
            state.differentiated = False
            return fqn, "backward"
        if state.backward != backward:
            state.backward = backward
            state.differentiated = not checkpoint_is_running()
        segments = self._segments()
        if state.differentiated and segments is not threads[0] and node is not None:
            # A later backward pass runs the nodes that this node builds. The node itself existed
            # before.
            segments.lasting = True
            self._claims.claim([node], threads[0])
        segments.extend(next_sequence_number(), fqn)
        state.detour = True
        if state.differentiated:
            return fqn, "backward"
        state.recomputed_round = self._round
        return fqn, "recompute"

    def _built_by(self, node: Any, number: int) -> str:
        """Return the name of the module whose forward built a node of the graph of autograd.

        This is called only if several threads build nodes.
        """
        # A nested pass on the same thread, inside the recomputing pass, runs the recomputed nodes.
        if self._local.state.recomputed_round == self._round and in_inner_backward():
            return self._segments().name_of(number)
        owner = self._claims.owner(node)
        if owner is not None:
            return owner.name_of(number)
        lasting = [segments for segments in self._threads if segments.lasting]
        candidates: set[str] = set()
        for segments in lasting:
            if segments.spans(number):
                candidates.add(segments.name_of(number))
        if len(candidates) > 1:
            self.ambiguous += 1
            return ""
        return candidates.pop() if candidates else lasting[0].name_of(number)

    def _segments(self) -> AutogradSegments:
        state = self._local.state
        if state.segments is None:
            # The node of the operator that is about to run already exists.
            state.segments = AutogradSegments(next_sequence_number() - 1)
            self._threads.append(state.segments)
            self._calls.append(state.calls)
        return state.segments

    def _boundary(self, fqn: str, backward: int) -> None:
        """Begin a new segment on this thread: the nodes that are built next belong to `fqn`."""
        segments = self._segments()
        segments.mark(next_sequence_number(), fqn)
        self._local.state.detour = False
        if backward == NO_BACKWARD:
            segments.lasting = True
        else:
            self._local.state.recomputed_round = self._round
