"""Record when modules, scopes and optimizer steps run, and assign traced operators to them.

`ModuleLog` only records times and the sequence numbers of autograd nodes, so that a recorded step
runs as usual. `Replay` reads the log together with Kineto's events, in chronological order. In
forward, the times show which module runs. In backward, the number of a node shows which module
built the node. A module that is entered while a backward node runs is recomputed.

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
from lflops.model.compile_guard import unremark_hooks
from lflops.model.module_tree import ModuleTree
from lflops.profile.module_names import name_below
from lflops.profile.records import PHASES, Call, ModulePhase, Phase
from lflops.torch_private.autograd import NO_BACKWARD, backward_id, next_sequence_number
from lflops.torch_private.dispatch_modes import without_modes

THREAD = "lflops: thread "
"""Prefix of the event that connects a thread's log with its Kineto events."""

SCOPE = "part:"
"""Prefix of the name of a scope that is entered."""

OPTIMIZER = "step of"
CLOSURE = "closure"
LEAVE = "leave"
STEP = "step"

LogEntry = tuple[int, int, int, str | nn.Module]
"""Nanoseconds since 1970, the number of the next autograd node, the key of a frame, and the event.

The event is a module or a scope that is entered, `OPTIMIZER`, `CLOSURE`, `LEAVE`, `STEP`, or a
phase.
"""


class ModuleLog:
    """A log of the modules and scopes that are entered and left, by thread.

    Attributes:
        tree: The names of the modules.
        home: Python's number of the training thread.
        threads: Log entries by Python's thread number.
    """

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.home = threading.get_ident()
        self.threads: dict[int, list[LogEntry]] = {}

    def install(self, undo: CleanupStack, guard: Guard = unguarded) -> None:
        """Install the hooks until `undo` is closed. Call this on the training thread."""
        self.home = threading.get_ident()
        self.threads = {self.home: []}
        unremark_hooks(undo)
        install_hooks(undo, self, self, guard=guard)

    def step(self) -> None:
        """Log the start of a training step, which ends all frames that an exception left open."""
        self._write(0, STEP)

    def outside(self, phase: Phase) -> None:
        """Log the phase of work outside all modules. It applies until a module or backward runs."""
        self._write(0, phase)

    def follows_this_thread(self) -> bool:
        """Return whether this is the training thread or a thread that runs backward."""
        return threading.get_ident() == self.home or backward_id() != NO_BACKWARD

    def enter_module(self, module: nn.Module, _args: Any) -> None:
        if module in self.tree:
            self._write(id(module), module)

    def leave_module(self, module: nn.Module, *_values: Any) -> None:
        if module in self.tree:
            self._write(id(module), LEAVE)

    def enter_scope(self, key: int, name: str) -> None:
        """Log the beginning of a scope. `Replay` determines its full name."""
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
    """Successive backward nodes of one module.

    Attributes:
        fqn: The module.
        start: Nanoseconds since 1970.
        end: Nanoseconds since 1970.
        device: Nanoseconds of the kernels that these nodes launched.
    """

    fqn: str
    start: int
    end: int
    device: int = 0


NODE = 0
"""Key of the frames of autograd nodes. No Python object has this id."""


@dataclass(slots=True)
class _ReplayFrame(Frame):
    """A running module, scope, optimizer step, closure or node.

    Attributes:
        module_phase: The module and phase of its operators; `None` for a closure, which is outside
            all modules.
        start: Nanoseconds since 1970.
        is_call: Whether it is a call of a module or scope.
        innermost: Whether it contains no other call.
        device: Nanoseconds of the kernels launched in it.
        run: The run of backward nodes that a node belongs to.
    """

    module_phase: ModulePhase | None
    start: int
    is_call: bool = False
    innermost: bool = True
    device: int = 0
    run: _Run | None = None


class Replay:
    """Replays the log of one thread in chronological order.

    Attributes:
        module_phase: The module and phase that are running.
        due: Time of the next log entry or of the next end of a node, whichever is earlier. Nothing
            changes before this time.
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
        """Prepare to replay.

        Args:
            tree: The names of the modules.
            entries: The log of the thread.
            thread: Number of the thread in the result.
            segments: For each thread, keyed by Kineto's thread number, the modules of the autograd
                nodes that the thread built. Threads that have already been replayed have complete
                segments.
            own: The segments of this thread, which the replay fills.
        """
        self._tree = tree
        self._entries = entries
        self._thread = thread
        self._segments = segments
        self._own = own
        self._next = 0
        self._outside: Phase = "other"
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
        """Process all log entries and node ends up to a moment."""
        while self.due <= now:
            if self.due == self._node_ends[-1]:
                self._end(self._frames.cut(NODE), self.due)
            else:
                self._next += 1
                self._read(*self._entries[self._next - 1])
            self._update()

    def begin_node(self, number: int, built_on: int, start: int, end: int) -> None:
        """Begin a backward node.

        A node that no thread built writes `.grad`. It runs right after the node that computed the
        gradient, so it belongs to the same module.

        Args:
            number: The node's number.
            built_on: Kineto's number of the thread that built it; 0 if no thread did.
            start: Nanoseconds since 1970.
            end: Nanoseconds since 1970.
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
        """Add the device time of the current operator to all running frames."""
        for frame in self._frames:
            frame.device += nanoseconds
        top = self._top
        if top is not None and top.run is not None:
            top.run.device += nanoseconds

    def finish(self) -> list[Call]:
        """Read the rest of the log, and return all calls and all runs of backward nodes."""
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
        # A module may define equality, so it is not compared.
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
            self._outside = next(phase for phase in PHASES if phase == event)
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
        """Add the calls of frames that have ended, the inner frames first."""
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
