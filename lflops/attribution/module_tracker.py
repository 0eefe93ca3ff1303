"""Which module and which phase is running.

The one answer that counting, time spans and traces share.

Forward: a stack of the modules entered, one for each thread, kept by global module hooks, which
    write nothing on the modules.
Backward: torch numbers the autograd nodes of a thread in the order they are built. The number at
    each module boundary divides them into
segments, each with its row; in backward the number of the node that is running says in which
segment it was built. Nothing depends on what the modules take or return.

    forward     enter q   mm   leave q   enter k   mm   leave k       boundaries: 5 q, 6 root, 6 k, 7 root
    number                5                        6
    backward    node 6: k, node 5: q

On a device backward runs on the device's thread, which numbers from 0 itself. What activation
checkpointing builds there again is run by a pass within the pass, on that thread
(`in_inner_backward`), and gone with it. What a differentiated backward builds there lasts, and so
does what a second thread builds in forward. Then nodes are claimed. Where that is not enough, the
root has the work, with a note (`ambiguous`).
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
    """The numbering of one thread, divided at the boundaries of modules."""

    def __init__(self, start: int) -> None:
        # Whether the thread built nodes that a later backward pass can meet. One that only
        # recomputes builds nodes too, but they are gone when the pass is.
        self.lasting = False
        self._starts: list[int] = []
        self._rows: list[str] = []
        self._end = start

    def mark(self, number: int, row: str) -> None:
        """Let nodes from `number` on belong to `row`."""
        if self._starts and self._starts[-1] >= number:
            self._rows[-1] = row
        else:
            self._starts.append(number)
            self._rows.append(row)
        self._end = number

    def extend(self, number: int, row: str) -> None:
        """Let the nodes built since the last boundary, up to `number`, belong to `row`."""
        if number > self._end:
            self.mark(self._end, row)
            self._end = number

    def close(self, number: int) -> None:
        """Let the nodes up to `number` keep the rows that they have."""
        self._end = number

    def row(self, number: int) -> str:
        """The row that built the node of that number; the root for one that was there before."""
        index = bisect_right(self._starts, number) - 1
        return self._rows[index] if index >= 0 else ""

    def spans(self, number: int) -> bool:
        """Whether the thread is known to have built a node of that number."""
        return bool(self._starts) and self._starts[0] <= number < self._end


class Claims:
    """Marks on the nodes themselves, made only when several threads build nodes.

    Their numberings overlap and a node knows no thread.

    The marks are entries in `Node.metadata`, which is there for that; `release` takes them off
    again.
    """

    def __init__(self) -> None:
        self._claimed: list[dict[Any, Any]] = []

    def claim(self, nodes: Iterable[Any], segments: AutogradSegments) -> None:
        """Give these nodes, and all that they lead back to, to `segments`, but for those that have been claimed."""
        for node in nodes_behind(nodes):
            if sequence_number(node) < ACCUMULATES_GRADIENT and self not in node.metadata:
                node.metadata[self] = segments
                self._claimed.append(node.metadata)

    def owner(self, node: Any) -> AutogradSegments | None:
        """The numbering that a node belongs to, where it was claimed."""
        segments: AutogradSegments | None = node.metadata.get(self)
        return segments

    def release(self) -> None:
        """Take the marks off; a graph that the user keeps is as it was."""
        for metadata in self._claimed:
            metadata.pop(self, None)
        self._claimed.clear()


@dataclass(slots=True)
class Frame:
    """Something entered and not yet left."""

    # the identity by which it is left
    key: int


AnyFrame = TypeVar("AnyFrame", bound=Frame)


class FrameStack(list[AnyFrame]):
    """Frames, the innermost last."""

    __slots__ = ()

    def cut(self, key: int) -> list[AnyFrame]:
        """Remove the innermost frame of that key, and those above it, which were left by an exception without a hook; outermost first."""
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
    """A module or scope that a `ModuleTracker` follows."""

    # its row in the tree of names
    row: str
    # the nearest row at or above it that is a module's
    module_row: str
    # the backward pass in which it was entered
    backward: int
    # The Python frame that entered a module. Once that is gone, so is this: after an interrupt
    # torch calls no hook.
    caller: FrameType | None


class ThreadState:
    """What one thread is running."""

    def __init__(self) -> None:
        self.stack: FrameStack[TrackedFrame] = FrameStack()
        self.segments: AutogradSegments | None = None
        self.calls: Counter[str] = Counter()
        # The last backward pass seen here with gradients on, and whether it is one that is itself
        # differentiated
        self.backward = NO_BACKWARD
        self.differentiated = False
        self.writes_gradient = (
            # whether the node that ran last in backward was one that writes `.grad`
            False
        )
        self.recomputed_round = (
            -1
            # the last round of forward in whose backward modules were entered here
        )
        # Whether the next operator has to begin a segment: nodes were built in backward, or a frame
        # was found abandoned
        self.detour = False
        self.unfollow: Callable[[], None] | None = (
            # what to call when the thread has left the tree's modules
            None
        )
        # The optimizer steps that are running, each with the backward pass that it began in; `None`
        # for a step's closure
        self.steps: list[tuple[Optimizer | None, int]] = []


class ThreadLocal(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        self.state = ThreadState()


class ModuleTracker:
    """Follows the modules of a tree through forward, backward, recompute and the optimizer, between `start` and `stop`."""

    def __init__(
        self,
        tree: ModuleTree,
        *,
        phase: Phase = "other",
        follow: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self.tree = tree
        self.ambiguous = 0
        self._phase = (
            # what an operator outside of every module is, until the first module is called
            phase
        )
        # called when another thread enters a module of the tree; returns what to call when it has
        # left
        self._follow = follow
        self._round = 0
        self._local = ThreadLocal()
        self._threads: list[
            AutogradSegments
            # the first thread's own comes first: `start` sees to it
        ] = []
        self._calls: list[Counter[str]] = []
        self._claims = Claims()
        self._hooks = CleanupStack()
        self.home = threading.get_ident()

    def start(self, guard: Guard = unguarded) -> None:
        """Hook in, on the thread that is the first."""
        self.begin()
        install_hooks(self._hooks, self, self, guard=guard)

    def begin(self) -> None:
        """Follow this thread without a hook: only what is entered by name."""
        self.home = threading.get_ident()
        self._boundary("", NO_BACKWARD)

    def stop(self) -> None:
        """Hook out, and take the claims off nodes that live on."""
        self._hooks.close()
        self._claims.release()
        # else it and its followers would keep each other, and the model, alive
        self._follow = None

    def outside(self, phase: Phase) -> None:
        """Say what an operator outside of every module is from now on.

        A module's forward and any backward change that.
        """
        self._phase = phase

    @property
    def calls(self) -> Counter[str]:
        """How often each row was entered in forward."""
        return sum(self._calls, Counter())

    def current(self, operands: Any = ()) -> tuple[str, Phase]:
        """The row and the phase of the operator that this thread is about to run on these operands."""
        backward, state = backward_id(), self._local.state
        phase: Phase
        top = None
        if state.stack:
            top = state.stack[-1]
            if top.backward != backward or not is_running(top.caller):
                top = self._top(backward)
        if state.steps and state.steps[-1][0] is not None and state.steps[-1][1] == backward:
            row, phase = "", "optimizer"
        elif top is not None:
            if backward != NO_BACKWARD:
                return top.row, "recompute"
            row, phase = top.row, "forward"
        elif backward != NO_BACKWARD:
            return self._in_backward(backward)
        else:
            # What can be differentiated is part of a forward; the others are clipping, averages,
            # metrics.
            differentiable = torch.is_grad_enabled() and any(
                each.requires_grad for each in tensors_in(operands)
            )
            row, phase = "", "forward" if differentiable else self._phase
        if state.detour:
            self._segments().extend(next_sequence_number(), row)
            state.detour = False
        return row, phase

    def current_of_view(self, operands: Any) -> tuple[str, Phase]:
        """The same for a view, to whose row nothing is added: in backward it is not looked for."""
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
        """The optimizer whose operator is running.

        Call it only after `current` returned the phase "optimizer".
        """
        return self._local.state.steps[-1][0]

    def writes_gradient(self) -> bool:
        """Whether the running node writes a gradient.

        Call it only after `current` returned the phase "backward".
        """
        return self._local.state.writes_gradient

    def between(self) -> tuple[str, Phase]:
        """The row and the phase that Python code between operators belongs to.

        Outside of every module it is in no pass.
        """
        backward = backward_id()
        top = self._top(backward)
        if self.optimizer is not None:
            return "", "optimizer"
        if backward == NO_BACKWARD:
            return ("", "other") if top is None else (top.row, "forward")
        return self._in_backward(backward) if top is None else (top.row, "recompute")

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose own work is running; the closure of its step is not its work."""
        steps = self._local.state.steps
        return steps[-1][0] if steps and steps[-1][1] == backward_id() else None

    def _running(self) -> tuple[str, str]:
        """The row that is running, and the nearest row at or above it that is a module's."""
        backward = backward_id()
        top = self._top(backward)
        if top is not None:
            return top.row, top.module_row
        row = "" if backward == NO_BACKWARD else self._in_backward(backward)[0]
        return row, self.tree.nearest(row)

    def enter_module(self, module: nn.Module, _args: Any) -> None:
        if module in self.tree and self._is_mine():
            row = self.tree.row(module, self._running()[1])
            self._push(id(module), row, row, caller())

    def leave_module(self, module: nn.Module, *values: Any) -> None:
        if module not in self.tree:
            return
        outermost = self._pop(id(module))
        if (
            outermost
            and len(self._threads) > 1
            and sum(each.lasting for each in self._threads) > 1
            and backward_id() == NO_BACKWARD
        ):
            if threading.get_ident() != self.home:
                self._claims.claim(nodes_of(values[:-1]), self._threads[0])
            self._claims.claim(nodes_of(values[-1]), self._segments())

    def enter_scope(self, key: int, name: str) -> None:
        """Push a frame for a scope; its row is below the one that is running."""
        row, module_row = self._running()
        self._push(key, f"{row}.{name}" if row else name, module_row, None)

    def leave_scope(self, key: int) -> None:
        self._pop(key)

    def enter_row(self, key: int, row: str) -> None:
        """Push a frame for a row of any name.

        It is no call of a module, and changes no phase outside of modules.
        """
        state, backward = self._local.state, backward_id()
        self._top(backward)
        state.stack.append(TrackedFrame(key, row, self.tree.nearest(row), backward, None))
        self._boundary(row, backward)

    def running(self) -> str:
        """The row that is running on this thread."""
        return self._running()[0]

    def enter_step(self, optimizer: Optimizer) -> None:
        self._local.state.steps.append((optimizer, backward_id()))

    def leave_step(self, optimizer: Optimizer | None) -> None:
        """Steps above this one on the stack were left by an exception."""
        steps = self._local.state.steps
        while steps and steps.pop()[0] is not optimizer:
            pass

    def enter_closure(self, _key: int) -> None:
        self._local.state.steps.append((None, backward_id()))

    def leave_closure(self, _key: int) -> None:
        """Steps within it that are still there were left by an exception."""
        self.leave_step(None)

    def follows_this_thread(self) -> bool:
        """Whether this thread is the first, is within a module or goes backward."""
        inside = (
            threading.get_ident() == self.home
            or bool(self._local.state.stack)
            or backward_id() != NO_BACKWARD
        )
        return inside and self._is_mine()

    def _is_mine(self) -> bool:
        """A thread that counts for itself is not counted by others as well."""
        thread = threading.get_ident()
        return thread == self.home or all(thread != each.home for each in LISTENERS)

    def _push(self, key: int, row: str, module_row: str, caller: FrameType | None) -> None:
        state, backward = self._local.state, backward_id()
        if (
            backward == NO_BACKWARD and not state.stack
            # what an exception left was taken off just before
        ):
            self._round += 1
            if self.optimizer is None:
                self._phase = "forward"
            if self._follow is not None and threading.get_ident() != self.home:
                state.unfollow = self._follow()
        state.stack.append(TrackedFrame(key, row, module_row, backward, caller))
        self._boundary(row, backward)
        if (
            backward == NO_BACKWARD and key not in self.tree.wrappers
            # a call of a wrapper is one of what it wraps
        ):
            state.calls[row] += 1

    def _pop(self, key: int) -> bool:
        """Returns whether the frame was the outermost."""
        state = self._local.state
        if not state.stack.cut(key):
            return False
        self._segments().close(
            next_sequence_number()
            # else in recompute what the frame built would go to what runs around it
        )
        self._boundary(self._running()[0], backward_id())
        if not state.stack and state.unfollow is not None:
            unfollow, state.unfollow = state.unfollow, None
            unfollow()
        return not state.stack

    def _top(self, backward: int) -> TrackedFrame | None:
        state = self._local.state
        stack = state.stack
        # A pass is numbered above the one it runs within: a frame of a higher one was left by an
        # exception.
        while stack and (stack[-1].backward > backward or not is_running(stack[-1].caller)):
            stack.pop()
            state.detour = True
        return stack[-1] if stack and stack[-1].backward == backward else None

    def _in_backward(self, backward: int) -> tuple[str, Phase]:
        state, node, row = self._local.state, current_node(), ""
        self._phase, state.writes_gradient = "other", False
        if node is not None:
            number, threads = sequence_number(node), self._threads
            if number >= ACCUMULATES_GRADIENT:
                row, state.writes_gradient = self.tree.owner(getattr(node, "variable", None)), True
            else:
                row = threads[0].row(number) if len(threads) == 1 else self._built_by(node, number)
        if not torch.is_grad_enabled():
            state.backward, state.differentiated = backward, False
            return row, "backward"
        if state.backward != backward:
            state.backward, state.differentiated = backward, not checkpoint_is_running()
        segments = self._segments()
        if state.differentiated and segments is not self._threads[0] and node is not None:
            # What it makes is met by a later backward; what it is made from was there before.
            segments.lasting = True
            self._claims.claim([node], self._threads[0])
        segments.extend(next_sequence_number(), row)
        state.detour = True
        if state.differentiated:
            return row, "backward"
        state.recomputed_round = self._round
        return row, "recompute"

    def _built_by(self, node: Any, number: int) -> str:
        # A pass within the one that recomputed, on the same thread, runs what was recomputed.
        if self._local.state.recomputed_round == self._round and in_inner_backward():
            return self._segments().row(number)
        owner = self._claims.owner(node)
        if owner is not None:
            return owner.row(number)
        lasting = [each for each in self._threads if each.lasting]
        rows = {each.row(number) for each in lasting if each.spans(number)} or {
            lasting[0].row(number)
        }
        if len(rows) > 1:
            self.ambiguous += 1
            return ""
        return rows.pop()

    def _segments(self) -> AutogradSegments:
        state = self._local.state
        if state.segments is None:
            state.segments = AutogradSegments(
                next_sequence_number() - 1
                # the operator that is about to run has its node already
            )
            self._threads.append(state.segments)
            self._calls.append(state.calls)
        return state.segments

    def _boundary(self, row: str, backward: int) -> None:
        segments = self._segments()
        segments.mark(next_sequence_number(), row)
        self._local.state.detour = False
        if backward == NO_BACKWARD:
            segments.lasting = True
        else:
            self._local.state.recomputed_round = self._round
