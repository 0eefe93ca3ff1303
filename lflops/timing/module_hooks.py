"""Which module runs when.

Stamps at the boundaries of modules, in forward and in backward; and what torch takes to call the
hooks.

Forward: hooks before and after every module. Backward: at each boundary the newest autograd node
    that the tensors crossing it lead to
gets a hook. The engine runs the nodes of a thread from the newest to the oldest. So backward runs
forward's segments in reverse order, and the hook runs where its segment begins:

    forward     root | q | root | k | root          nodes built in q, in k, and in the root after them
    backward    root (from its newest node) | k (from k's newest) | q

Some nodes are reached by no crossing tensor: those of a gate that is computed early and used late.
They are looked for when the module is left. What a checkpoint computes again within backward is
stamped as recompute.
"""

import functools
import statistics
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, mm, nn
from torch.autograd import backward

from lflops.attribution.hooks import ModuleListener, install_hooks
from lflops.attribution.module_tracker import Frame, FrameStack
from lflops.error_guard import CleanupStack, Guard, unguarded
from lflops.inputs.tensors import nodes_of
from lflops.model.module_tree import ModuleTree
from lflops.profile.records import ModulePhase, Phase
from lflops.timing.clock import Clock, DeviceClock, HostClock, device_clock, seconds_of
from lflops.timing.module_times import (
    ENTERS,
    NO_OVERHEAD,
    SEGMENT,
    HookOverhead,
    PassTimes,
    Stamp,
    pass_times,
)
from lflops.torch_private.autograd import (
    NO_BACKWARD,
    after_backward,
    backward_id,
    next_sequence_number,
    sequence_number,
)
from lflops.torch_private.dispatch_modes import isolated
from lflops.torch_private.modules import InternalModule

MOST_NODES = (
    # autograd nodes that are searched for those of a segment that no crossing tensor leads to
    2000
)
_Ranges = list[
    tuple[int, int, str]
    # numbers of nodes without a hook, from and up to, and the row that built them
]


@dataclass(slots=True)
class _TimedFrame(Frame):
    """A module or scope that is running."""

    # what its time belongs to
    module_phase: ModulePhase
    module_row: (
        str | None
        # the nearest row at or above it that is a module's; `None` where that has to be looked up
    )
    # its nodes that no crossing tensor led to
    unhooked: _Ranges = field(default_factory=list)


class _PassStack:
    """The frames of forward or of recompute; the first is what runs outside of all modules."""

    def __init__(self, phase: Phase, outside: Phase) -> None:
        self.phase = phase
        self.outside = _TimedFrame(0, ModulePhase("", outside), None)
        self.frames: FrameStack[_TimedFrame] = FrameStack([self.outside])
        # the number of its first node
        self.segment = 0


class ModuleTimer:
    """Stamps what runs while its hooks are installed.

    Passes one after the other, each between `begin` and `end`.
    """

    def __init__(self, tree: ModuleTree, clock: Clock) -> None:
        self.tree = tree
        self.home = threading.get_ident()
        self._clock = clock
        self._mark = clock.mark
        self._stamps: list[Stamp] = []
        self._parts: dict[str, list[Stamp]] = {}
        self._paused = False
        # whether the engine calls `_end_segments` after this backward
        self._ends_backward = False
        self._forward, self._recompute = (
            _PassStack("forward", "forward"),
            _PassStack("recompute", "backward"),
        )
        self._handles: list[Any] = []
        self._guard: Guard = unguarded

    def install(self, undo: CleanupStack, guard: Guard = unguarded) -> None:
        """Install the hooks, on the thread that is the first, until `undo` is closed.

        That also removes those on autograd nodes.
        """
        self.home = threading.get_ident()
        self._guard = guard
        undo.add(self._release)
        install_hooks(undo, self, guard=guard)

    def begin(self) -> None:
        """Start a pass: from here on the root's forward runs."""
        self._paused = False
        self._stamps = []
        self._parts = {"forward": self._stamps}
        self._forward, self._recompute = (
            _PassStack("forward", "forward"),
            _PassStack("recompute", "backward"),
        )
        self._forward.segment = next_sequence_number()
        self._stamps.append((self._mark(), self._forward.outside.module_phase, ""))

    def set_aside(self) -> None:
        """Leave out of the pass what runs until its next part begins, also where that runs modules."""
        self._paused = True
        self._stamps.append((self._mark(), None, ""))

    def begin_backward(self, results: Any) -> None:
        """Go on to backward, from these results; once more, if there was one before."""
        self._paused = False
        self._end_segment(self._forward, results, self._forward.frames[-1])
        self._hook_unhooked(self._forward.outside.unhooked, results)
        running = self._recompute.outside.module_phase = ModulePhase("", "backward")
        self._ends_backward = False
        self._stamps = self._parts.setdefault("backward", [])
        self._stamps.append((self._mark(), running, ""))

    def resume_forward(self) -> None:
        """Go on with forward, after a backward or something that was set aside."""
        self._paused = False
        self._stamps = self._parts["forward"]
        self._forward.segment = next_sequence_number()
        self._stamps.append((self._mark(), self._forward.frames[-1].module_phase, ""))

    def end(self) -> dict[str, list[Stamp]]:
        """End the pass. Returns the stamps of its parts, to be read when the clock has settled."""
        self._stamps.append((self._mark(), None, ""))
        self._release()
        parts, self._parts, self._stamps = self._parts, {}, []
        return parts

    def pass_times(self, parts: Mapping[str, list[Stamp]]) -> dict[str, PassTimes]:
        """The seconds of each part, from settled stamps."""
        return {part: pass_times(stamps, self._clock) for part, stamps in parts.items()}

    def follows_this_thread(self) -> bool:
        """Whether a part runs that is not set aside, and this thread is the first, or goes backward."""
        return not self._paused and (
            threading.get_ident() == self.home or backward_id() != NO_BACKWARD
        )

    def enter_module(self, module: nn.Module, args: Any) -> None:
        if module in self.tree and self.follows_this_thread():
            self._stamps.append((self._mark(), None, ENTERS))
            stack = self._stack()
            row = self.tree.row(module, self._module_row(stack.frames[-1]))
            self._push(stack, _TimedFrame(id(module), ModulePhase(row, stack.phase), row), args)

    def leave_module(self, module: nn.Module, *values: Any) -> None:
        if module in self.tree and self.follows_this_thread():
            self._pop(id(module), values[-1])

    def enter_scope(self, key: int, name: str) -> None:
        self._stamps.append((self._mark(), None, ""))
        stack = self._stack()
        above = stack.frames[-1]
        row = f"{above.module_phase.fqn}.{name}" if above.module_phase.fqn else name
        self._push(
            stack, _TimedFrame(key, ModulePhase(row, stack.phase), self._module_row(above)), None
        )

    def leave_scope(self, key: int) -> None:
        self._pop(key, _NO_OUTPUT)

    def _stack(self) -> _PassStack:
        return self._forward if backward_id() == NO_BACKWARD else self._recompute

    def _module_row(self, frame: _TimedFrame) -> str:
        return (
            self.tree.nearest(frame.module_phase.fqn)
            if frame.module_row is None
            else frame.module_row
        )

    def _push(self, stack: _PassStack, frame: _TimedFrame, crossing: Any) -> None:
        above = stack.frames[-1]
        if (
            above is not self._recompute.outside
            # its segments are those of forward, and have their hooks
        ):
            self._end_segment(stack, crossing, above)
        stack.frames.append(frame)
        stack.segment = next_sequence_number()
        self._stamps.append((self._mark(), frame.module_phase, ""))

    def _pop(self, key: int, output: Any) -> None:
        mark = self._mark()
        stack = self._stack()
        removed = stack.frames.cut(key)
        if not removed:
            return
        self._stamps.append((mark, None, ""))
        frame, above = removed[0], stack.frames[-1]
        self._end_segment(stack, output, frame)
        if frame.unhooked:
            self._hook_unhooked(frame.unhooked, output)
            # the output of what is left next may lead there
            if output is _NO_OUTPUT:
                above.unhooked.extend(frame.unhooked)
        stack.segment = next_sequence_number()
        self._stamps.append((self._mark(), above.module_phase, ""))

    def _end_segment(self, stack: _PassStack, crossing: Any, frame: _TimedFrame) -> None:
        """Hook the newest node of the frame's segment that the crossing tensors lead to, and begin the next segment."""
        end = next_sequence_number()
        if end == stack.segment:
            return
        row = frame.module_phase.fqn
        newest, number = _newest(crossing, stack.segment, end)
        if newest is not None:
            self._hook(newest, row)
        if number + 1 < end:
            frame.unhooked.append((number + 1, end, row))
        stack.segment = end

    def _hook_unhooked(self, unhooked: _Ranges, output: Any) -> None:
        """Hook the newest node of each range that the output leads back to."""
        if not unhooked:
            return
        first = min(start for start, _, _ in unhooked)
        newest: dict[int, tuple[int, Any]] = {}
        waiting: list[Any] = list(nodes_of(output))
        seen: set[Any] = set()
        while waiting and len(seen) < MOST_NODES:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            number = sequence_number(node)
            for index, (start, end, _) in enumerate(unhooked):
                if start <= number < end and number > newest.get(index, (-1, None))[0]:
                    newest[index] = (number, node)
            if number >= first:
                waiting.extend(each for each, _ in node.next_functions)
        for index, (_, node) in newest.items():
            self._hook(node, unhooked[index][2])

    def _hook(self, node: Any, row: str) -> None:
        self._handles.append(
            node.register_prehook(
                self._guard(partial(self._begin_segment, ModulePhase(row, "backward")))
            )
        )

    def _begin_segment(self, module_phase: ModulePhase, _gradients: Any) -> None:
        if not self._paused:
            self._recompute.outside.module_phase = module_phase
            self._stamps.append((self._mark(), module_phase, SEGMENT))
            if not self._ends_backward:
                self._ends_backward = True
                after_backward(self._guard(self._end_segments))

    def _end_segments(self) -> None:
        """Every node has run: what the engine calls now is the root's own, as DDP's wait for the gradients of all ranks."""
        if not self._paused:
            running = self._recompute.outside.module_phase = ModulePhase("", "backward")
            self._stamps.append((self._mark(), running, ""))

    def _release(self) -> None:
        """Remove the hooks on nodes: a graph that the user keeps is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


# passed to `_pop` when a scope ends without an output
_NO_OUTPUT = object()


def _newest(crossing: Any, start: int, end: int) -> tuple[Any, int]:
    """The newest node numbered within, and its number.

    `None` and the number before the first where there is none.
    """
    newest, best = None, start - 1
    for value in crossing if type(crossing) is tuple else (crossing,):
        for node in (
            (value.grad_fn,) if type(value) is Tensor else () if value is None else nodes_of(value)
        ):
            if node is not None and best < (number := sequence_number(node)) < end:
                newest, best = node, number
    return newest, best


LEAVES = 100

view_as = Tensor.view_as


class Chain:
    """Modules one after the other, in a module.

    Each chain has its own classes, and so its own hooks.
    """

    def __init__(self, weight: Tensor | None = None) -> None:

        class Own(InternalModule):
            pass

        class Leaf(Own):
            """One product where it has a weight, one autograd node where a gradient is asked for, else nothing.

            No layer of torch's: making one would draw random numbers. No function of torch's that
            users replace.
            """

            def forward(self, x: Tensor) -> Tensor:
                if weight is not None:
                    return mm(x, weight)
                return view_as(x, x) if x.requires_grad else x

        leaves = {str(number): Leaf() for number in range(LEAVES)}

        class Root(Own):
            """Runs the leaves."""

            def forward(self, x: Tensor) -> Tensor:
                for leaf in leaves.values():
                    x = leaf(x)
                return x

        self._own = Own
        self.root = Root(leaves=Own(**leaves))
        self.hooked()

    def hooked(self, listener: ModuleListener | None = None) -> None:
        """From here on, call a listener's hooks for each module; without one, none."""
        if listener is None:
            self._own.hooked()
        else:
            self._own.hooked(listener.enter_module, listener.leave_module)


def hook_overhead(clock: Clock) -> HookOverhead:
    """The overhead of a `ModuleTimer` with this clock; none for a clock that is not this machine's."""
    if isinstance(clock, DeviceClock):
        return _of_timer(clock.device)
    return _of_timer(None) if isinstance(clock, HostClock) else NO_OVERHEAD


def median_overhead(trial: Callable[[], HookOverhead], *, trials: int) -> HookOverhead:
    """Medians of so many trials, none below 0. Nothing of the user's sees what they run."""
    with isolated():
        tried = [trial() for _ in range(trials)]
    medians = {
        each.name: statistics.median(getattr(one, each.name) for one in tried)
        for each in fields(HookOverhead)
    }
    return HookOverhead(**{name: max(seconds, 0.0) for name, seconds in medians.items()})


def of_module_calls(
    clock: Clock, timed: Callable[[Chain, Tensor], PassTimes]
) -> tuple[float, float]:
    """The overhead of a call in the module and in its caller, from calls of modules that do nothing.

    `timed` runs a pass with hooks.
    """
    chain, x = Chain(), torch.ones((), device="cpu", dtype=torch.float32)
    clean, own = seconds_of(clock, partial(chain.root, x)), timed(chain, x).own
    in_leaves = sum(seconds for (row, _), seconds in own.items() if row.startswith("leaves."))
    return (in_leaves - clean) / LEAVES, (sum(own.values()) - in_leaves) / LEAVES


@functools.cache
def _of_timer(device: torch.device | None) -> HookOverhead:
    """With a device's clock; with the host's where there is none."""
    clock = HostClock() if device is None else device_clock(device)

    def trial() -> HookOverhead:
        inside, outside = of_module_calls(
            clock, lambda chain, x: _timed(clock, chain, x)["forward"]
        )
        chain, x = Chain(), torch.ones((), requires_grad=True, device="cpu", dtype=torch.float32)
        clean = seconds_of(clock, partial(backward, chain.root(x)))
        hooked = sum(_timed(clock, chain, x, with_backward=True)["backward"].own.values())
        return HookOverhead(inside=inside, outside=outside, segment=(hooked - clean) / LEAVES)

    return median_overhead(trial, trials=15)


def _timed(
    clock: Clock, chain: Chain, x: Tensor, *, with_backward: bool = False
) -> dict[str, PassTimes]:
    """Times of a pass in which a timer's hooks are called for the chain's modules, and for no others in the process."""
    timer = ModuleTimer(ModuleTree({"": chain.root}), clock)
    chain.hooked(timer)
    try:
        timer.begin()
        result = chain.root(x)
        if with_backward:
            timer.set_aside()
            timer.begin_backward(result)
            backward(result)
        stamps = timer.end()
    finally:
        chain.hooked()
    clock.settle()
    return timer.pass_times(stamps)
