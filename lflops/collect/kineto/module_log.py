"""When modules, named parts and optimizer steps were entered and left while Kineto recorded, and whose an operator is that ran then.

`Boundaries` only writes down moments and the numbers that torch gives to autograd nodes: the recorded steps are to stay what they are.
`Replay` reads that beside Kineto's events, in the order of time. Forward is told by the moments. A node of backward is told by its number,
which says between which boundaries it was built; and a module that is entered while a node runs is computed again.

    boundaries   enter q (node 5)   leave q (node 7)         enter k (node 7)   leave k (node 9)
    events                aten::addmm                                 aten::addmm             node 8    node 6
    whose                 q, forward                                  k, forward              k         q, backward
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function

from lflops.collect.attribution.autograd_segments import AutogradSegments
from lflops.collect.attribution.user_scopes import listening
from lflops.collect.model.compile_guard import uncompiled, unremarked_hooks
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.torch_private.autograd import NO_BACKWARD, backward_id, next_sequence_number
from lflops.collect.torch_private.modules import remove_hook
from lflops.profile.records import PHASES, Call, ModulePhase, Phase

__all__ = ["THREAD", "LogEntry", "ModuleLog", "Replay"]

THREAD = "lflops: thread "
"""Begins the name of the one event by which a thread's boundaries and its Kineto events are known to be the same thread's."""

PART, OPTIMIZER, CLOSURE, LEAVE, STEP = "part:", "step of", "closure", "leave", "step"

LogEntry = tuple[int, int, int, str | nn.Module]
"""Nanoseconds since 1970, which is Kineto's clock; the number of the next autograd node; what is left by the same key; and what it is."""


class ModuleLog:
    """Writes down what is entered and left between entering and leaving `hooked`, by thread.

    Args:
        tree: The modules and their names.
    """

    def __init__(self, tree: ModuleTree) -> None:
        """Touch nothing yet."""
        self._tree = tree
        self.home = threading.get_ident()
        self.threads: dict[int, list[LogEntry]] = {}

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook in, on the thread that trains; hook out."""
        self.home = threading.get_ident()
        self.threads = {self.home: []}
        with contextlib.ExitStack() as hooks:
            for handle in (
                register_module_forward_pre_hook(uncompiled(self._enter_module, self._tree.compiled)),
                # always_call: early-stopped recomputation leaves forward by an exception
                register_module_forward_hook(uncompiled(self._leave_module, self._tree.compiled), always_call=True),
            ):
                hooks.callback(remove_hook, handle)
            hooks.callback(register_optimizer_step_pre_hook(self._enter_optimizer).remove)
            hooks.callback(register_optimizer_step_post_hook(self._leave_optimizer).remove)
            hooks.enter_context(listening(self))
            hooks.enter_context(unremarked_hooks())
            yield

    def step(self) -> None:
        """A step begins: whatever has not been left by now was left unsaid."""
        self._write(0, STEP)

    def outside(self, phase: Phase) -> None:
        """Say what is outside of every module from now on; a module's forward and any backward change that."""
        self._write(0, phase)

    def counts_here(self) -> bool:
        """Whether this thread is the one that trains, or goes backward."""
        return threading.get_ident() == self.home or backward_id() != NO_BACKWARD

    def place(self) -> tuple[str, str]:
        """Where a part is, is found when the boundaries are read."""
        return "", ""

    def enter(self, key: int, row: str, _module_row: str, _caller: FrameType | None) -> None:
        """Something that is no module is entered."""
        self._write(key, PART + row)

    def leave(self, key: int) -> None:
        """And left."""
        self._write(key, LEAVE)

    def _write(self, key: int, what: str | nn.Module) -> None:
        thread = self.threads.get(threading.get_ident())
        if thread is None:
            thread = self.threads[threading.get_ident()] = []
            with record_function(f"{THREAD}{threading.get_ident()}"):
                pass
        thread.append((time.time_ns(), next_sequence_number(), key, what))

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        if module in self._tree:
            self._write(id(module), module)

    def _leave_module(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if module in self._tree:
            self._write(id(module), LEAVE)

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._write(id(optimizer), OPTIMIZER)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None

        def outside_of_the_step() -> Any:
            self._write(id(closure), CLOSURE)
            try:
                return closure()
            finally:
                self._write(id(closure), LEAVE)

        if "closure" in kwargs:
            return args, {**kwargs, "closure": outside_of_the_step}
        return (args[0], outside_of_the_step, *args[2:]), kwargs

    def _leave_optimizer(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._write(id(optimizer), LEAVE)


@dataclass(slots=True)
class _Run:
    """Nodes of one row that ran one behind the other."""

    row: str
    start: int
    end: int
    device: int = 0


@dataclass(slots=True)
class _Frame:
    key: int
    place: ModulePhase | None  # `None` for a closure: what is outside of every module
    start: int
    is_call: bool = False
    innermost: bool = True
    device: int = 0
    run: _Run | None = None  # of a node


class Replay:
    """One thread's boundaries, as time goes by.

    Args:
        tree: The modules and their names.
        boundaries: In the order of time.
        thread: Which of the threads it is.
        segments: The numberings of threads by what Kineto calls them, complete but for that of this thread.
        own: This thread's, to be filled.

    Attributes:
        place: Whose the operator is that runs now.
        due: When the next boundary or the end of a node is to be read; before that, nothing changes.
    """

    def __init__(
        self,
        tree: ModuleTree,
        boundaries: Sequence[LogEntry],
        *,
        thread: int = 0,
        segments: Mapping[int, AutogradSegments],
        own: AutogradSegments,
    ) -> None:
        """Read nothing yet."""
        self._tree = tree
        self._boundaries = boundaries
        self._thread = thread
        self._segments = segments
        self._own = own
        self._next = 0
        self._outside: Phase = "other"
        self._frames: list[_Frame] = []
        self._node_ends: list[float] = [inf]  # of those that run, the inner ones first to end
        self._calls: list[Call] = []
        self._runs: list[_Run] = []
        self._node_row = ""
        self._in_a_row = False
        self.place = ModulePhase("", self._outside)
        self.due: float = inf
        self._look()

    def go_on(self, now: float) -> None:
        """Read what has come by then."""
        while self.due <= now:
            if self.due == self._node_ends[-1]:
                self._cut(max(place for place, frame in enumerate(self._frames) if frame.run is not None), self.due)
            else:
                self._next += 1
                self._read(*self._boundaries[self._next - 1])
            self._look()

    def begin_node(self, number: int, built_on: int, start: int, end: int) -> None:
        """A node of backward begins. One that no thread built writes `.grad`, and runs right behind the node that made the gradient."""
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
        self._frames.append(_Frame(0, ModulePhase(self._node_row, "backward"), start, run=run))
        self._node_ends.append(end)
        self._look()

    def on_device(self, nanoseconds: int) -> None:
        """The operator that runs now has the device do something."""
        for frame in self._frames:
            frame.device += nanoseconds
        if self._frames and (run := self._frames[-1].run) is not None:
            run.device += nanoseconds

    def finish(self) -> list[Call]:
        """Read the rest. Returns all calls, and the runs of backward."""
        while self.due < inf:
            self.go_on(self.due)
        runs = [Call(run.row, "backward", run.start, run.end, run.device, innermost=True, thread=self._thread) for run in self._runs]
        return self._calls + runs

    def _look(self) -> None:
        """Find out whose time it is, and until when."""
        top = self._frames[-1] if self._frames else None
        self.place = ModulePhase("", self._outside) if top is None or top.place is None else top.place
        boundary = self._boundaries[self._next][0] if self._next < len(self._boundaries) else inf
        self.due = min(boundary, self._node_ends[-1])

    def _read(self, moment: int, number: int, key: int, what: str | nn.Module) -> None:
        self._in_a_row = False
        if what == LEAVE:
            place = next((place for place in reversed(range(len(self._frames))) if self._frames[place].key == key), None)
            if place is not None:
                self._cut(place, moment)
        elif what == STEP:
            self._cut(0, moment)
            self._outside = "other"
        elif what in PHASES:
            self._outside = next(phase for phase in PHASES if phase == what)
        elif what == OPTIMIZER:
            self._frames.append(_Frame(key, ModulePhase("", "optimizer"), moment))
        elif what == CLOSURE:
            self._frames.append(_Frame(key, None, moment))
        else:
            self._enter(moment, key, what)
        top = self._frames[-1].place if self._frames else None
        self._own.mark(number, "" if top is None else top.row)

    def _enter(self, moment: int, key: int, what: str | nn.Module) -> None:
        top = self._frames[-1] if self._frames else None
        above = "" if top is None or top.place is None else top.place.row
        if isinstance(what, str):
            name = what.removeprefix(PART)
            row = f"{above}.{name}" if above else name
        else:
            row = self._tree.row(what, self._tree.nearest(above))
        if top is None or top.place is None:
            self._outside = "forward"
        else:
            top.innermost = False
            top.is_call = top.is_call and top.place.row != row  # a call of a wrapper is one of what it wraps
        again = any(frame.run is not None for frame in self._frames)
        self._frames.append(_Frame(key, ModulePhase(row, "recompute" if again else "forward"), moment, is_call=True))

    def _cut(self, place: int, moment: float) -> None:
        """Leave a frame, and those above it that were left unsaid."""
        for frame in reversed(self._frames[place:]):
            if frame.run is not None:
                self._node_ends.pop()
            elif frame.is_call and frame.place is not None:
                row, phase = frame.place
                self._calls.append(Call(row, phase, frame.start, int(moment), frame.device, frame.innermost, self._thread))
        del self._frames[place:]
