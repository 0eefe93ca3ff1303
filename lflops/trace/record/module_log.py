"""Record when modules, scopes and optimizer steps run, and assign traced operators to them.

While a step is recorded, `ModuleLog` only stores times and the sequence numbers of autograd nodes,
so it hardly slows down the step. Later, `Replay` reads the log together with Kineto's events, in
chronological order. In forward, the times show which module runs. In backward, the sequence number
of a node shows which module built the node in forward. If a module is entered while a backward node
runs, the module is being recomputed.

    entries         enter q (node 5)   leave q (node 7)
    events                   aten::addmm                          node 6
    module, phase            q, forward                           q, backward
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from lflops.attribution.hooks import install_hooks
from lflops.attribution.module_tracker import AutogradSegments, Frame, FrameStack
from lflops.error_guard import CleanupStack, Guard, unguarded
from lflops.model.compile_guard import hide_hook_warning
from lflops.model.module_tree import ModuleTree
from lflops.profile.module_names import name_below
from lflops.profile.records import PHASES, Call, ModulePhase, Phase
from lflops.torch_private.autograd import NO_BACKWARD, backward_id, next_sequence_number
from lflops.torch_private.dispatch_modes import without_modes

THREAD = "lflops: thread "
"""Prefix of the name of an event that is recorded once on each thread.

Kineto and Python number threads differently. The name of this event ends with Python's number, so
it shows which Kineto thread a log belongs to.
"""

SCOPE = "part:"
"""Prefix of a log entry for the beginning of a scope. The scope's name follows."""

OPTIMIZER = "step of"
CLOSURE = "closure"
LEAVE = "leave"
STEP = "step"

LogEntry = tuple[int, int, int, str | nn.Module]
"""One entry of the log: the time, the number of the next autograd node, a key, and the event.

The time is in nanoseconds since 1970. The entries for the beginning and the end of a module, scope,
optimizer step or closure have the same key. The event is one of these:

* a module, which is entered
* `SCOPE` and the name of a scope, which is entered
* `OPTIMIZER`: The step of an optimizer begins.
* `CLOSURE`: The closure that an optimizer calls begins.
* `LEAVE`: The module, scope, optimizer step or closure with the same key ends.
* `STEP`: A training step begins.
* a phase, to which work outside all modules belongs from now on
"""


class ModuleLog:
    """Records when each thread enters and leaves modules and scopes.

    `Replay` reads this log to find out which module ran each operator.

    Attributes:
        tree: The names of the modules.
        home: The training thread, as returned by `threading.get_ident`.
        threads: The log entries of each thread. The keys are also from `threading.get_ident`.
    """

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.home = threading.get_ident()
        self.threads: dict[int, list[LogEntry]] = {}

    def install(self, undo: CleanupStack, guard: Guard = unguarded) -> None:
        """Install the hooks. Closing `undo` removes them. Call this on the training thread."""
        self.home = threading.get_ident()
        self.threads = {self.home: []}
        hide_hook_warning(undo)
        install_hooks(undo, self, self, guard=guard)

    def step(self) -> None:
        """Log the start of a training step.

        If an exception left a module, the log has no `LEAVE` entry for the module. Such modules
        end here.
        """
        self._write(0, STEP)

    def outside(self, phase: Phase) -> None:
        """Log the phase to which work outside all modules belongs from now on.

        The phase is valid until the next module is called or the next backward pass begins.
        """
        self._write(0, phase)

    def follows_this_thread(self) -> bool:
        """Return whether the current thread is the training thread or runs backward."""
        return threading.get_ident() == self.home or backward_id() != NO_BACKWARD

    def enter_module(self, module: nn.Module, _args: Any) -> None:
        if module in self.tree:
            self._write(id(module), module)

    def leave_module(self, module: nn.Module, *_values: Any) -> None:
        if module in self.tree:
            self._write(id(module), LEAVE)

    def enter_scope(self, key: int, name: str) -> None:
        """Log the beginning of a scope. `Replay` determines the scope's full name."""
        self._write(key, SCOPE + name)

    def leave_scope(self, key: int) -> None:
        self._write(key, LEAVE)

    def enter_step(self, optimizer: Optimizer) -> None:
        self._write(id(optimizer), OPTIMIZER)

    def leave_step(self, optimizer: Optimizer) -> None:
        self._write(id(optimizer), LEAVE)

    def enter_closure(self, key: int) -> None:
        self._write(key, CLOSURE)

    leave_closure = leave_scope

    def _write(self, key: int, event: str | nn.Module) -> None:
        number = threading.get_ident()
        entries = self.threads.get(number)
        if entries is None:
            entries = []
            self.threads[number] = entries
            with without_modes(), record_function(f"{THREAD}{number}"):
                pass
        entries.append((time.time_ns(), next_sequence_number(), key, event))


@dataclass(slots=True)
class _Run:
    """A series of consecutive backward nodes that belong to the same module.

    Attributes:
        fqn: The module.
        start: Start of the first node in nanoseconds since 1970.
        end: End of the last node in nanoseconds since 1970.
        device: Total time of the kernels that these nodes launched, in nanoseconds.
    """

    fqn: str
    start: int
    end: int
    device: int = 0


NODE = 0
"""Key of all autograd nodes while they run.

The keys of running modules and scopes are the ids of Python objects, and no object has the id 0.
"""


@dataclass(slots=True)
class _ReplayFrame(Frame):
    """A module, scope, optimizer step, closure or backward node that is running.

    Attributes:
        module_phase: The module and phase to which its operators belong; `None` for a closure,
            which is outside all modules.
        start: Start in nanoseconds since 1970.
        is_call: Whether it is a call of a module or scope.
        innermost: Whether no other module or scope is called inside it.
        device: Total time of the kernels that were launched inside it, in nanoseconds.
        run: For a backward node, the series of nodes of the same module; otherwise `None`.
    """

    module_phase: ModulePhase | None
    start: int
    is_call: bool = False
    innermost: bool = True
    device: int = 0
    run: _Run | None = None


class Replay:
    """Replays the module log of one thread, to find out which module and phase ran at each time.

    The log, which `ModuleLog` records, is read in chronological order.

    Attributes:
        module_phase: The module and phase that are running at the current time of the replay.
        due: Time of the next change: the next log entry, or the end of the running backward node.
    """

    def __init__(
        self,
        tree: ModuleTree,
        entries: Sequence[LogEntry],
        *,
        thread: int = 0,
        segments: Mapping[int, AutogradSegments],
        own: AutogradSegments,
    ) -> None:
        """Prepare to replay a log.

        Args:
            tree: The names of the modules.
            entries: The log of the thread.
            thread: Number of the thread in the calls that `finish` returns.
            segments: For each thread, the modules that built its autograd nodes. The key is
                Kineto's number of the thread. The training thread must be replayed first, because
                other threads run the backward nodes that it built.
            own: The value for this thread in `segments`. The replay fills it.
        """
        self._tree = tree
        self._entries = entries
        self._thread = thread
        self._segments = segments
        self._own = own
        self._next = 0
        self._outside = "other"
        self._frames: FrameStack[_ReplayFrame] = FrameStack()
        # End times of the running nodes, the innermost last.
        self._node_ends: list[float] = [inf]
        self._calls: list[Call] = []
        self._runs: list[_Run] = []
        self._node_fqn = ""
        # True if no log entry was read since the latest node.
        self._continues_run = False
        self.module_phase = ModulePhase("", self._outside)
        self.due: float = inf
        self._update()

    def go_on(self, now: float) -> None:
        """Process the log entries and the ends of backward nodes up to the time `now`."""
        while self.due <= now:
            if self.due == self._node_ends[-1]:
                self._end(self._frames.cut(NODE), self.due)
            else:
                self._next += 1
                self._read(*self._entries[self._next - 1])
            self._update()

    def begin_node(self, number: int, built_on: int, start: int, end: int) -> None:
        """Begin a backward node.

        If no thread is recorded for the node, it is a node that writes `.grad`. It runs right after
        the node that computed the gradient, so it belongs to the same module.

        Args:
            number: The node's sequence number.
            built_on: Kineto's number of the thread that built it; 0 if none is recorded.
            start: Start in nanoseconds since 1970.
            end: End in nanoseconds since 1970.
        """
        if built_on:
            segments = self._segments.get(built_on)
            self._node_fqn = "" if segments is None else segments.name_of(number)
        self._outside = "other"
        run = None
        if self._runs and self._continues_run:
            run = self._runs[-1]
        if run is not None and run.fqn == self._node_fqn and run.end <= start:
            run.end = end
        else:
            run = _Run(self._node_fqn, start, end)
            self._runs.append(run)
        self._continues_run = True
        module_phase = ModulePhase(self._node_fqn, "backward")
        self._frames.append(_ReplayFrame(NODE, module_phase, start, run=run))
        self._node_ends.append(end)
        self._update()

    def on_device(self, nanoseconds: int) -> None:
        """Add an operator's device time to all modules, scopes, steps and nodes that run now."""
        for frame in self._frames:
            frame.device += nanoseconds
        top = self._top
        if top is not None and top.run is not None:
            top.run.device += nanoseconds

    def finish(self) -> list[Call]:
        """Read the rest of the log, and return all calls.

        A call in backward is a series of consecutive nodes that belong to the same module.
        """
        while self.due < inf:
            self.go_on(self.due)
        for run in self._runs:
            call = Call(
                run.fqn,
                "backward",
                run.start,
                run.end,
                run.device,
                innermost=True,
                thread=self._thread,
            )
            self._calls.append(call)
        return self._calls

    @property
    def _top(self) -> _ReplayFrame | None:
        return self._frames[-1] if self._frames else None

    def _update(self) -> None:
        running = None
        if self._top is not None:
            running = self._top.module_phase
        self.module_phase = running or ModulePhase("", self._outside)
        entry = self._entries[self._next][0] if self._next < len(self._entries) else inf
        self.due = min(entry, self._node_ends[-1])

    def _read(self, moment: int, number: int, key: int, event: str | nn.Module) -> None:
        self._continues_run = False
        # The type is checked first, because a module may define its own `==`.
        if isinstance(event, nn.Module):
            self._enter(moment, key, event)
        elif event == LEAVE:
            self._end(self._frames.cut(key), moment)
        elif event == STEP:
            open_frames = self._frames
            self._frames = FrameStack()
            self._end(open_frames, moment)
            self._outside = "other"
        elif event in PHASES:
            self._outside = event
        elif event == OPTIMIZER:
            self._frames.append(_ReplayFrame(key, ModulePhase("", "optimizer"), moment))
        elif event == CLOSURE:
            self._frames.append(_ReplayFrame(key, None, moment))
        else:
            self._enter(moment, key, event)
        running = None
        if self._top is not None:
            running = self._top.module_phase
        self._own.mark(number, "" if running is None else running.fqn)

    def _enter(self, moment: int, key: int, event: str | nn.Module) -> None:
        """Begin a call of a module or a scope."""
        top = self._top
        running = None if top is None else top.module_phase
        above = "" if running is None else running.fqn
        if isinstance(event, str):
            name = event.removeprefix(SCOPE)
            fqn = name_below(above, name)
        else:
            fqn = self._tree.name_of(event, self._tree.nearest(above))
        if top is None or running is None:
            self._outside = "forward"
        else:
            top.innermost = False
            # A wrapper and the module inside it have the same name and count as one call.
            top.is_call = top.is_call and running.fqn != fqn
        in_node = any(frame.run is not None for frame in self._frames)
        module_phase = ModulePhase(fqn, "recompute" if in_node else "forward")
        self._frames.append(_ReplayFrame(key, module_phase, moment, is_call=True))

    def _end(self, frames: Sequence[_ReplayFrame], moment: float) -> None:
        """Store the calls of frames that have ended. The first of `frames` is the outermost."""
        for frame in reversed(frames):
            if frame.run is not None:
                self._node_ends.pop()
            elif frame.is_call and frame.module_phase is not None:
                fqn, phase = frame.module_phase
                call = Call(
                    fqn,
                    phase,  # type: ignore[arg-type]
                    frame.start,
                    int(moment),
                    frame.device,
                    innermost=frame.innermost,
                    thread=self._thread,
                )
                self._calls.append(call)
