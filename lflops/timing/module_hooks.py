"""Stamp the boundaries of modules in forward and backward, and measure the overhead of the hooks.

A stamp is a mark of the clock together with the module and phase that run from then on. In forward,
hooks before and after every module make the stamps.

Autograd has no hooks for modules, so backward is timed with hooks on autograd nodes. Wherever
forward enters or leaves a module, a segment of nodes ends: all nodes that were built since the last
boundary. Autograd runs the nodes of a thread from the newest to the oldest, so backward runs the
segments in reverse order. In each segment, it is enough to hook the node that runs first:

    forward     root | q | root | k | root          nodes built in q, in k, and in the root
    backward    root (from its newest node) | k (from k's newest) | q

When backward begins, the timer walks from the loss through the graph, and hooks the newest node of
each segment that it reaches.

The timer is not informed about every backward pass. For example, a module's own forward may call
`autograd.grad`, or a checkpoint may recompute a graph and run backward in it. For such passes, the
timer hooks the `grad_fn` of a module's inputs and outputs as soon as the module begins or ends. If
a module has built nodes that are newer than all hooked nodes, the timer searches for them in the
graph behind the outputs. An example is a gate that is computed early and used late.

A pass with `create_graph=True` builds nodes too. They belong to the module whose segment is running
in this pass. Work that a checkpoint recomputes in backward is stamped as recompute.
"""

import bisect
import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, mm, nn
from torch.autograd import backward

from lflops.attribution.hooks import ModuleListener, install_hooks
from lflops.attribution.module_tracker import Frame, FrameStack
from lflops.error_guard import CleanupStack, Guard, unguarded
from lflops.inputs.tensors import nodes_of
from lflops.model.module_tree import ModuleTree
from lflops.profile.module_names import name_below
from lflops.profile.records import ModulePhase, Phase
from lflops.timing.clock import Clock, DeviceClock, HostClock, device_clock, seconds_of
from lflops.timing.module_times import (
    MODULE_ENTERED,
    NO_OVERHEAD,
    SEGMENT_BEGAN,
    HookOverhead,
    PassTimes,
    Stamp,
    pass_times,
)
from lflops.torch_private.autograd import (
    ACCUMULATES_GRADIENT,
    NO_BACKWARD,
    after_backward,
    backward_id,
    next_sequence_number,
    nodes_behind,
    sequence_number,
)
from lflops.torch_private.dispatch_modes import isolated
from lflops.torch_private.modules import InternalModule

MOST_NODES = 2000
"""Maximum number of autograd nodes to visit when a module ends, in search of nodes to hook."""

MOST_NODES_OF_LOSS = 200_000
"""Maximum number of autograd nodes to visit when backward begins, in search of nodes to hook."""

_Range = tuple[int, int, str]
"""A segment: consecutive autograd nodes that one module built.

The values are the sequence number of its first node, the number after its last node, and the name
of the module.
"""

_Ranges = list[_Range]
"""Ranges of autograd nodes that have no hook yet."""


@dataclass(slots=True)
class _TimedFrame(Frame):
    """A module or scope that is running.

    Attributes:
        module_phase: The module and phase that the frame's time belongs to.
        module_fqn: Name of the module itself, or of the innermost module around a scope; `None` if
            it must be looked up.
        unhooked: Ranges of nodes that the frame built and that have no hook yet.
    """

    module_phase: ModulePhase
    module_fqn: str | None
    unhooked: _Ranges = field(default_factory=list)


class _PassStack:
    """The modules and scopes that are running (the frames), in forward or in recompute.

    Attributes:
        phase: The phase of the modules: `forward` or `recompute`.
        outside: The outermost frame. It stands for code outside all modules.
        segment: Sequence number of the first autograd node of the current segment. A segment ends
            when a module begins or ends.
    """

    def __init__(self, phase: Phase, outside: Phase) -> None:
        self.phase = phase
        self.outside = _TimedFrame(0, ModulePhase("", outside), None)
        self.frames: FrameStack[_TimedFrame] = FrameStack([self.outside])
        self.segment = 0


class ModuleTimer:
    """Measures the time of each module in one pass after another.

    A pass lasts from `begin` to `end`. It consists of forward and, usually, backward. While the
    timer is installed, its hooks record a timestamp whenever another module begins to run.
    """

    def __init__(self, tree: ModuleTree, clock: Clock) -> None:
        self.tree = tree
        self.home = threading.get_ident()
        self._clock = clock
        self._mark = clock.mark
        self._stamps: list[Stamp] = []
        self._parts: dict[str, list[Stamp]] = {}
        self._paused = True
        # The modules that were entered while no pass was running, and that are still running. A
        # pass may begin inside such a module: torch calls global hooks first, so the module has
        # already been entered when another of its hooks begins the pass.
        self._entered_before: FrameStack[_TimedFrame] = FrameStack()
        # set after `_end_segments` was registered to run at the end of this backward
        self._ends_backward = False
        self._forward = _PassStack("forward", "forward")
        self._recompute = _PassStack("recompute", "backward")
        # the segments that the home thread has built in all passes, in the order of their ends
        self._segments: list[_Range] = []
        # the segment that a pass with `create_graph=True` is building, without its end
        self._derivative: tuple[int, str] | None = None
        self._handles: list[Any] = []
        self._hooked: set[int] = set()
        self._guard: Guard = unguarded

    def install(self, undo: CleanupStack, guard: Guard = unguarded) -> None:
        """Install the hooks until `undo` is closed.

        The calling thread becomes the home thread: the thread whose forward is timed. Closing
        `undo` also removes the hooks on autograd nodes.
        """
        self.home = threading.get_ident()
        self._guard = guard
        undo.add(self._release)
        install_hooks(undo, self, guard=guard)

    def begin(self) -> None:
        """Start a pass, which begins with forward. Modules may be running already."""
        self._paused = False
        self._stamps = []
        self._parts = {"forward": self._stamps}
        self._forward = _PassStack("forward", "forward")
        self._forward.frames.extend(self._entered_before)
        self._entered_before.clear()
        self._recompute = _PassStack("recompute", "backward")
        self._forward.segment = next_sequence_number()
        self._stamps.append((self._mark(), self._forward.frames[-1].module_phase, ""))

    def set_aside(self) -> None:
        """Exclude the time from now until the next part of the pass begins.

        Modules that are called during this time are not timed either.
        """
        self._paused = True
        self._entered_before.clear()
        self._stamps.append((self._mark(), None, ""))

    def begin_backward(self, results: Any) -> None:
        """Begin or resume the part `backward` of the pass.

        `results` are the tensors from which backward starts, for example the loss.
        """
        self._paused = False
        self._end_segment(self._forward, results, self._forward.frames[-1])
        self._hook_reachable(results)
        self._ends_backward = False
        self._stamps = self._parts.setdefault("backward", [])
        self._resume_around_segments()

    def resume_forward(self) -> None:
        """Resume the part `forward` of the pass, after a backward pass or excluded code."""
        self._paused = False
        self._stamps = self._parts["forward"]
        self._forward.segment = next_sequence_number()
        self._stamps.append((self._mark(), self._forward.frames[-1].module_phase, ""))

    def end(self) -> dict[str, list[Stamp]]:
        """End the pass, and return the time stamps of each part of the pass, by the part's name.

        Call `settle` of the clock before computing times from the stamps. The hooks on autograd
        nodes stay, because a later pass may use the graph of this pass. For example, the graph of a
        generator is used after a discriminator was trained.
        """
        self._stamps.append((self._mark(), None, ""))
        parts = self._parts
        self._parts = {}
        self._stamps = []
        return parts

    def pass_times(self, parts: Mapping[str, list[Stamp]]) -> dict[str, PassTimes]:
        """Compute the times of each part from its stamps. Call `settle` of the clock first."""
        return {part: pass_times(stamps, self._clock) for part, stamps in parts.items()}

    @property
    def running_module(self) -> str:
        """The name of the module that is running now, or "" outside modules.

        Any thread can read this property.
        """
        stamps = self._stamps
        module_phase = stamps[-1][1] if stamps else None
        return "" if module_phase is None else module_phase.fqn

    def follows_this_thread(self) -> bool:
        """Return whether this thread is timed now: it is the home thread, or it runs backward.

        Between `set_aside` and the next part, no thread is timed.
        """
        return not self._paused and (
            threading.get_ident() == self.home or backward_id() != NO_BACKWARD
        )

    def enter_module(self, module: nn.Module, args: Any) -> None:
        if module not in self.tree:
            return
        if self.follows_this_thread():
            self._stamps.append((self._mark(), None, MODULE_ENTERED))
            stack = self._stack()
            fqn = self.tree.name_of(module, self._module_fqn(stack.frames[-1]))
            self._push(stack, _TimedFrame(id(module), ModulePhase(fqn, stack.phase), fqn), args)
        elif threading.get_ident() == self.home:
            above = self._entered_before[-1] if self._entered_before else self._forward.outside
            fqn = self.tree.name_of(module, self._module_fqn(above))
            frame = _TimedFrame(id(module), ModulePhase(fqn, "forward"), fqn)
            self._entered_before.append(frame)

    def leave_module(self, module: nn.Module, *values: Any) -> None:
        if module not in self.tree:
            return
        if self.follows_this_thread():
            self._pop(id(module), values[-1])
        elif threading.get_ident() == self.home:
            self._entered_before.cut(id(module))

    def enter_scope(self, key: int, name: str) -> None:
        self._stamps.append((self._mark(), None, ""))
        stack = self._stack()
        above = stack.frames[-1]
        fqn = name_below(above.module_phase.fqn, name)
        frame = _TimedFrame(key, ModulePhase(fqn, stack.phase), self._module_fqn(above))
        self._push(stack, frame, None)

    def leave_scope(self, key: int) -> None:
        self._pop(key, _NO_OUTPUT)

    def _stack(self) -> _PassStack:
        return self._forward if backward_id() == NO_BACKWARD else self._recompute

    def _module_fqn(self, frame: _TimedFrame) -> str:
        if frame.module_fqn is None:
            return self.tree.nearest(frame.module_phase.fqn)
        return frame.module_fqn

    def _push(self, stack: _PassStack, frame: _TimedFrame, crossing: Any) -> None:
        above = stack.frames[-1]
        # Outside modules, backward runs the segments of forward, which already have hooks.
        if above is not self._recompute.outside:
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
        frame = removed[0]
        above = stack.frames[-1]
        self._end_segment(stack, output, frame)
        if frame.unhooked:
            self._hook_unhooked(frame.unhooked, output)
            # The output of an enclosing module may lead to these nodes.
            if output is _NO_OUTPUT:
                above.unhooked.extend(frame.unhooked)
        stack.segment = next_sequence_number()
        self._stamps.append((self._mark(), above.module_phase, ""))

    def _end_segment(self, stack: _PassStack, crossing: Any, frame: _TimedFrame) -> None:
        """End the current segment, and hook the nodes in it that created the tensors in `crossing`.

        These tensors are inputs or outputs of a module. The nodes of all of them get hooks, because
        backward does not reach the node of an output that is not used. If nodes of the segment are
        newer than all hooked nodes, their range is added to `frame.unhooked`.
        """
        end = next_sequence_number()
        if end == stack.segment:
            return
        fqn = frame.module_phase.fqn
        if threading.get_ident() == self.home:
            self._segments.append((stack.segment, end, fqn))
        crossing_nodes = _nodes_in(crossing, stack.segment, end)
        for node in crossing_nodes.values():
            self._hook(node, fqn)
        number = max(crossing_nodes, default=stack.segment - 1)
        if number + 1 < end:
            frame.unhooked.append((number + 1, end, fqn))
        stack.segment = end

    def _hook_unhooked(self, unhooked: _Ranges, output: Any) -> None:
        """Hook one node of each range in `unhooked`: the newest node that a search finds in it.

        The search begins at `output`, goes back through the autograd graph, and visits at most
        `MOST_NODES` nodes.
        """
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
                best, _ = newest.get(index, (-1, None))
                if start <= number < end and number > best:
                    newest[index] = (number, node)
            if number >= first:
                waiting.extend(each for each, _ in node.next_functions)
        for index, (_, node) in newest.items():
            self._hook(node, unhooked[index][2])

    def _hook_reachable(self, results: Any) -> None:
        """Hook the autograd nodes with which a backward from `results` will enter each module.

        Such a node is the newest one that a module's forward built, among those that can be reached
        from the tensors in `results`.
        """
        places = _SegmentsByNumber(self._segments)
        newest: dict[_Range, tuple[int, Any]] = {}
        behind = nodes_behind(nodes_of(results), lambda node: sequence_number(node) >= places.first)
        for node in islice(behind, MOST_NODES_OF_LOSS):
            number = sequence_number(node)
            segment = places.of(number)
            if segment is not None and (segment not in newest or number > newest[segment][0]):
                newest[segment] = (number, node)
        for (_, _, fqn), (number, node) in newest.items():
            if number not in self._hooked:
                self._hook(node, fqn)

    def _hook(self, node: Any, fqn: str) -> None:
        self._hooked.add(sequence_number(node))
        self._handles.append(
            node.register_prehook(
                self._guard(partial(self._begin_segment, ModulePhase(fqn, "backward")))
            )
        )

    def _begin_segment(self, module_phase: ModulePhase, gradients: Any) -> None:
        if self._paused:
            return
        self._end_derivative(gradients)
        if torch.is_grad_enabled() and threading.get_ident() == self.home:
            self._end_segment(self._forward, None, self._forward.frames[-1])
            self._derivative = (next_sequence_number(), module_phase.fqn)
        self._recompute.outside.module_phase = module_phase
        self._stamps.append((self._mark(), module_phase, SEGMENT_BEGAN))
        if not self._ends_backward:
            self._ends_backward = True
            after_backward(self._guard(self._end_segments))

    def _end_derivative(self, gradients: Any = None) -> None:
        """Record the autograd nodes that the running segment of backward has created.

        Backward creates nodes only with `create_graph=True`. The nodes of the gradients that the
        next segment receives get hooks, because a further `autograd.grad` in forward may
        differentiate them again.
        """
        if self._derivative is not None:
            start, fqn = self._derivative
            end = next_sequence_number()
            if end > start:
                self._segments.append((start, end, fqn))
            for node in _nodes_in(gradients, start, end).values():
                self._hook(node, fqn)
            self._forward.segment = end
            self._derivative = None

    def _end_segments(self) -> None:
        """Record that the last autograd node of a backward pass has run.

        Autograd now runs its final callbacks, such as DDP's wait for the gradients of all ranks.
        `_resume_around_segments` chooses the module to which their time belongs.
        """
        self._ends_backward = False
        self._end_derivative()
        if not self._paused:
            self._resume_around_segments()

    def _resume_around_segments(self) -> None:
        """Record that no segment of backward is running from now on.

        A segment is a series of consecutive autograd nodes that one module built. Time outside all
        segments usually belongs to the root module in the phase `backward`. But if a module's
        forward calls `autograd.grad`, the time belongs to this module.
        """
        running = ModulePhase("", "backward")
        self._recompute.outside.module_phase = running
        if self._stamps is self._parts.get("forward"):
            running = self._forward.frames[-1].module_phase
        self._stamps.append((self._mark(), running, ""))

    def _release(self) -> None:
        """Remove the hooks from all autograd nodes, because the user may keep the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._segments.clear()


class _SegmentsByNumber:
    """Finds the segment of an autograd node by the sequence number of the node.

    If a module's forward calls `autograd.grad`, one segment can contain another segment. A node
    then belongs to the innermost segment around it.

    Attributes:
        first: The sequence number of the oldest node in any segment.
    """

    def __init__(self, segments: Iterable[_Range]) -> None:
        self._segments = sorted(segments, key=lambda segment: (segment[0], -segment[1]))
        self._starts = [start for start, _, _ in self._segments]
        ends = [end for _, end, _ in self._segments]
        # the largest end of each segment and all segments before it
        self._largest_ends = list(accumulate(ends, max))
        self.first = self._starts[0] if self._starts else ACCUMULATES_GRADIENT

    def of(self, number: int) -> _Range | None:
        """Return the segment of a node, or `None` if the node is in no segment."""
        place = bisect.bisect_right(self._starts, number) - 1
        while place >= 0 and number < self._largest_ends[place]:
            segment = self._segments[place]
            if number < segment[1]:
                return segment
            place -= 1
        return None


_NO_OUTPUT = object()
"""Passed to `_pop` when a scope ends without an output."""


def _nodes_in(crossing: Any, start: int, end: int) -> dict[int, Any]:
    """Return the nodes that are the `grad_fn` of the given tensors, keyed by sequence number.

    Only nodes with a number from `start` to `end - 1` are returned.
    """
    found: dict[int, Any] = {}
    values = crossing if type(crossing) is tuple else (crossing,)
    for value in values:
        if value is None:
            continue
        # For a plain tensor, reading `grad_fn` avoids a call of `nodes_of`.
        nodes = (value.grad_fn,) if type(value) is Tensor else nodes_of(value)
        for node in nodes:
            if node is None:
                continue
            number = sequence_number(node)
            if start <= number < end:
                found[number] = node
    return found


LEAVES = 100

# Seconds after which no further trial of the overhead begins, if `FEWEST_TRIALS` have run.
MOST_SECONDS = 0.1
FEWEST_TRIALS = 3

view_as = Tensor.view_as


class Chain:
    """A module for measuring hook overhead. It calls `LEAVES` small modules one after the other.

    Hooks are set on a class, and each chain creates a new class. So the hooks of a chain do not run
    for any other module.
    """

    def __init__(self, weight: Tensor | None = None) -> None:

        class Hooked(InternalModule):
            """The class on which hooks are set, and the base class of the chain's modules."""

        class Leaf(Hooked):
            """Runs one matmul if there is a weight, builds one autograd node, or does nothing.

            It is not one of torch's layers, because torch draws random numbers when it creates a
            layer, which would change the user's run. It calls no torch function that users might
            replace.
            """

            def forward(self, x: Tensor) -> Tensor:
                if weight is not None:
                    return mm(x, weight)
                return view_as(x, x) if x.requires_grad else x

        leaves = {str(number): Leaf() for number in range(LEAVES)}

        class Root(Hooked):
            """Calls the leaves one after the other."""

            def forward(self, x: Tensor) -> Tensor:
                for leaf in leaves.values():
                    x = leaf(x)
                return x

        self._hooked_class = Hooked
        self.root = Root(leaves=Hooked(**leaves))
        self.hooked()

    def hooked(self, listener: ModuleListener | None = None) -> None:
        """From now on, call a listener for each module of the chain. `None` removes the hooks."""
        if listener is None:
            self._hooked_class.hooked()
        else:
            self._hooked_class.hooked(listener.enter_module, listener.leave_module)


def hook_overhead(clock: Clock) -> HookOverhead:
    """Measure the overhead of a `ModuleTimer` that uses the given clock.

    For a clock that is neither a `DeviceClock` nor a `HostClock`, as in tests, the overhead is
    assumed to be zero.
    """
    if isinstance(clock, DeviceClock):
        return _of_timer(clock.device)
    if isinstance(clock, HostClock):
        return _of_timer(None)
    return NO_OVERHEAD


def median_overhead(
    trial: Callable[[], HookOverhead],
    *,
    trials: int,
    now: Callable[[], float] = time.perf_counter,
) -> HookOverhead:
    """Run several trials, and return the median of each field; negative medians become 0.

    The training run waits during the trials. So no further trial begins after `MOST_SECONDS`, once
    `FEWEST_TRIALS` trials have run. The trials run without the user's dispatch modes and hooks.
    """
    tried: list[HookOverhead] = []
    latest = now() + MOST_SECONDS
    with isolated():
        while len(tried) < trials and (len(tried) < FEWEST_TRIALS or now() < latest):
            tried.append(trial())
    medians = {}
    for each in fields(HookOverhead):
        median = statistics.median(getattr(result, each.name) for result in tried)
        medians[each.name] = max(median, 0.0)
    return HookOverhead(**medians)


def of_module_calls(
    clock: Clock, timed: Callable[[Chain, Tensor], PassTimes]
) -> tuple[float, float]:
    """Return the hook overhead of one module call, in the called module and in the calling module.

    Both values are in seconds. The modules do nothing. So all of their measured time is overhead,
    except for the time that a pass takes without hooks. `timed` runs a chain with hooks, and
    returns the times of its modules.
    """
    chain = Chain()
    x = torch.ones((), device="cpu", dtype=torch.float32)
    plain = seconds_of(clock, partial(chain.root, x))
    self_seconds = timed(chain, x).self_seconds
    of_leaves = []
    for (fqn, _), seconds in self_seconds.items():
        if fqn.startswith("leaves."):
            of_leaves.append(seconds)
    in_leaves = sum(of_leaves)
    in_root = sum(self_seconds.values()) - in_leaves
    return (in_leaves - plain) / LEAVES, in_root / LEAVES


@functools.cache
def _of_timer(device: torch.device | None) -> HookOverhead:
    """Measure the overhead of a `ModuleTimer` that uses the clock of a device.

    If `device` is `None`, the timer uses the host clock.
    """
    clock = HostClock() if device is None else device_clock(device)

    def trial() -> HookOverhead:
        inside, outside = of_module_calls(
            clock, lambda chain, x: _timed(clock, chain, x)["forward"]
        )
        chain = Chain()
        x = torch.ones((), requires_grad=True, device="cpu", dtype=torch.float32)
        plain = seconds_of(clock, partial(backward, chain.root(x)))
        times = _timed(clock, chain, x, with_backward=True)["backward"]
        hooked = sum(times.self_seconds.values())
        return HookOverhead(inside=inside, outside=outside, segment=(hooked - plain) / LEAVES)

    return median_overhead(trial, trials=15)


def _timed(
    clock: Clock, chain: Chain, x: Tensor, *, with_backward: bool = False
) -> dict[str, PassTimes]:
    """Time a chain of small modules in forward and, if `with_backward` is true, in backward.

    The timer's hooks run only for the modules of the chain. The keys of the result are "forward"
    and, if it was timed, "backward".
    """
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
