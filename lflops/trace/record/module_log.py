"""When modules, scopes and optimizer steps were entered and left while Kineto recorded, and which of them an operator belongs to.

`ModuleLog` only writes down moments and the numbers that torch gives to autograd nodes, so that
recorded steps stay what they are. `Replay` reads its entries together with Kineto's events, in the
order of time. In forward the moments say which module runs. In backward the number of a node says
which module built it; a module that is entered while a node runs is computed again.

    entries      enter q (node 5)   leave q (node 7)         enter k (node 7)   leave k (node 9)
    events                aten::addmm                                 aten::addmm             node 8    node 6
    belongs to            q, forward                                  k, forward              k         q, backward
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
from lflops.profile.records import PHASES, Call, ModulePhase, Phase
from lflops.torch_private.autograd import NO_BACKWARD, backward_id, next_sequence_number
from lflops.torch_private.dispatch_modes import without_modes

# begins the name of the one event that ties a thread's log to its Kineto events
THREAD = "lflops: thread "

SCOPE, OPTIMIZER, CLOSURE, LEAVE, STEP = "part:", "step of", "closure", "leave", "step"

LogEntry = tuple[int, int, int, str | nn.Module]
"""Nanoseconds since 1970, as Kineto counts them.

The number of the next autograd node; the key to leave by; what is entered or left.
"""


class ModuleLog:
    """Logs what is entered and left while its hooks are installed, by thread."""

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.home = threading.get_ident()
        # the entries by Python's number of the thread
        self.threads: dict[int, list[LogEntry]] = {}

    def install(self, undo: CleanupStack, guard: Guard = unguarded) -> None:
        """Install the hooks, on the thread that trains, until `undo` is closed."""
        self.home = threading.get_ident()
        self.threads = {self.home: []}
        unremark_hooks(undo)
        install_hooks(undo, self, self, guard=guard)

    def step(self) -> None:
        """Log that a training step begins: what has not been left by now was left by an exception."""
        self._write(0, STEP)

    def outside(self, phase: Phase) -> None:
        """Log the phase outside of every module from now on.

        A module's forward and any backward change it.
        """
        self._write(0, phase)

    def follows_this_thread(self) -> bool:
        """Whether this thread is the one that trains, or goes backward."""
        return threading.get_ident() == self.home or backward_id() != NO_BACKWARD

    def enter_module(self, module: nn.Module, _args: Any) -> None:
        if module in self.tree:
            self._write(id(module), module)

    def leave_module(self, module: nn.Module, *_values: Any) -> None:
        if module in self.tree:
            self._write(id(module), LEAVE)

    def enter_scope(self, key: int, name: str) -> None:
        """Log the beginning of a scope; its row is found when the log is read."""
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

    def _write(self, key: int, what: str | nn.Module) -> None:
        thread = self.threads.get(threading.get_ident())
        if thread is None:
            thread = self.threads[threading.get_ident()] = []
            with without_modes(), record_function(f"{THREAD}{threading.get_ident()}"):
                pass
        thread.append((time.time_ns(), next_sequence_number(), key, what))


@dataclass(slots=True)
class _Run:
    """Nodes of one row that ran one after the other."""

    row: str
    start: int
    end: int
    device: int = 0


# the key of autograd nodes: no object has it as its identity
NODE = 0


@dataclass(slots=True)
class _ReplayFrame(Frame):
    # `None` for a closure: what is outside of every module
    module_phase: ModulePhase | None
    start: int
    is_call: bool = False
    innermost: bool = True
    device: int = 0
    # of a node
    run: _Run | None = None


class Replay:
    """One thread's log, as time goes by."""

    def __init__(
        self,
        tree: ModuleTree,
        entries: Sequence[LogEntry],
        *,
        thread: int = 0,
        segments: Mapping[int, AutogradSegments],
        own: AutogradSegments,
    ) -> None:
        self._tree = tree
        self._entries = entries
        self._thread = thread
        # the numberings of threads by Kineto's number of the thread, complete but for that of this
        # one
        self._segments = segments
        # this thread's, to be filled
        self._own = own
        self._next = 0
        self._outside: Phase = "other"
        self._frames: FrameStack[_ReplayFrame] = FrameStack()
        # of those that run, the inner ones first to end
        self._node_ends: list[float] = [inf]
        self._calls: list[Call] = []
        self._runs: list[_Run] = []
        self._node_row = ""
        self._in_a_row = False
        self.module_phase = ModulePhase(
            "",
            self._outside,
            # what the operator that runs now belongs to
        )
        # when the next entry or the end of a node is to be read; before that, nothing changes
        self.due: float = inf
        self._update()

    def go_on(self, now: float) -> None:
        """Read all entries up to that moment."""
        while self.due <= now:
            if self.due == self._node_ends[-1]:
                self._end(self._frames.cut(NODE), self.due)
            else:
                self._next += 1
                self._read(*self._entries[self._next - 1])
            self._update()

    def begin_node(self, number: int, built_on: int, start: int, end: int) -> None:
        """Begin a node of backward.

        One that no thread built writes `.grad`, and runs right after the node that made the
        gradient.
        """
        if built_on:
            segments = self._segments.get(built_on)
            self._node_row = "" if segments is None else segments.row(number)
        self._outside = "other"
        run = self._runs[-1] if self._runs else None
        if run is not None and self._in_a_row and run.row == self._node_row and run.end <= start:
            run.end = end
        else:
            run = _Run(self._node_row, start, end)
            self._runs.append(run)
        self._in_a_row = True
        self._frames.append(
            _ReplayFrame(NODE, ModulePhase(self._node_row, "backward"), start, run=run)
        )
        self._node_ends.append(end)
        self._update()

    def on_device(self, nanoseconds: int) -> None:
        """Add the device's time for the operator that runs now."""
        for frame in self._frames:
            frame.device += nanoseconds
        if self._frames and (run := self._frames[-1].run) is not None:
            run.device += nanoseconds

    def finish(self) -> list[Call]:
        """Read the rest. Returns all calls, and the runs of backward."""
        while self.due < inf:
            self.go_on(self.due)
        runs = [
            Call(
                run.row,
                "backward",
                run.start,
                run.end,
                run.device,
                innermost=True,
                thread=self._thread,
            )
            for run in self._runs
        ]
        return self._calls + runs

    def _update(self) -> None:
        top = self._frames[-1] if self._frames else None
        self.module_phase = (
            ModulePhase("", self._outside)
            if top is None or top.module_phase is None
            else top.module_phase
        )
        entry = self._entries[self._next][0] if self._next < len(self._entries) else inf
        self.due = min(entry, self._node_ends[-1])

    def _read(self, moment: int, number: int, key: int, what: str | nn.Module) -> None:
        self._in_a_row = False
        if what == LEAVE:
            self._end(self._frames.cut(key), moment)
        elif what == STEP:
            frames, self._frames = self._frames, FrameStack()
            self._end(frames, moment)
            self._outside = "other"
        elif what in PHASES:
            self._outside = next(phase for phase in PHASES if phase == what)
        elif what == OPTIMIZER:
            self._frames.append(_ReplayFrame(key, ModulePhase("", "optimizer"), moment))
        elif what == CLOSURE:
            self._frames.append(_ReplayFrame(key, None, moment))
        else:
            self._enter(moment, key, what)
        top = self._frames[-1].module_phase if self._frames else None
        self._own.mark(number, "" if top is None else top.fqn)

    def _enter(self, moment: int, key: int, what: str | nn.Module) -> None:
        top = self._frames[-1] if self._frames else None
        above = "" if top is None or top.module_phase is None else top.module_phase.fqn
        if isinstance(what, str):
            name = what.removeprefix(SCOPE)
            row = f"{above}.{name}" if above else name
        else:
            row = self._tree.row(what, self._tree.nearest(above))
        if top is None or top.module_phase is None:
            self._outside = "forward"
        else:
            top.innermost = False
            top.is_call = (
                top.is_call and top.module_phase.fqn != row
                # a call of a wrapper is one of what it wraps
            )
        again = any(frame.run is not None for frame in self._frames)
        self._frames.append(
            _ReplayFrame(
                key, ModulePhase(row, "recompute" if again else "forward"), moment, is_call=True
            )
        )

    def _end(self, frames: Sequence[_ReplayFrame], moment: float) -> None:
        """Add the calls of frames that have been left, the inner ones first."""
        for frame in reversed(frames):
            if frame.run is not None:
                self._node_ends.pop()
            elif frame.is_call and frame.module_phase is not None:
                times = frame.start, int(moment), frame.device
                self._calls.append(Call(*frame.module_phase, *times, frame.innermost, self._thread))  # type: ignore[arg-type]
