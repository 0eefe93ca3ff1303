"""Who runs when: stamps at the boundaries of modules, in forward and in backward.

Forward: hooks before and behind every module. Backward: at each boundary the newest autograd node that the tensors crossing it lead to
gets a hook of its own. The engine runs the nodes of a thread from the newest to the oldest, so backward is forward's row of segments
reversed, and that hook runs where the segment's part of it begins:

    forward     root | q | root | k | root          nodes built in q, in k, and in the root behind them
    backward    root (from its newest node) | k (from k's newest) | q

Nodes of a segment that no crossing tensor leads to, as those of a gate computed early and used late, are looked for when the module is
left. What a checkpoint computes again within backward is stamped as recompute.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lflops.collect.attribution.user_scopes import listening
from lflops.collect.inputs.tensors import nodes_of
from lflops.collect.model.compile_guard import uncompiled, unremarked_hooks
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.timing.clock import Clock
from lflops.collect.timing.stamps import ENTERS, SEGMENT, PassTimes, Stamp, pass_times
from lflops.collect.torch_private.autograd import NO_BACKWARD, backward_id, next_sequence_number, sequence_number
from lflops.collect.torch_private.modules import remove_hook
from lflops.profile.records import ModulePhase, Phase

__all__ = ["ModuleTimer"]

FARTHEST = 2000
"""Nodes that are looked at for those of a segment that no crossing tensor leads to."""

_Unfound = list[tuple[int, int, str]]
"""Numbers of nodes without a hook, and the row that built them."""


@dataclass(slots=True)
class _Frame:
    key: int
    place: ModulePhase
    module_row: str
    unfound: _Unfound = field(default_factory=list)


class _Lane:
    """What one of forward and recompute has entered and not yet left."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.stack: list[_Frame] = []
        self.segment = 0  # the number of its first node
        self.unfound: _Unfound = []  # outside of every frame


class ModuleTimer:
    """Stamps what runs, while it is entered; passes one after the other, each between `begin` and `end`.

    Args:
        tree: The modules and their names.
        clock: What the marks are read from.
    """

    def __init__(self, tree: ModuleTree, clock: Clock) -> None:
        """Touch nothing yet."""
        self._tree = tree
        self._clock = clock
        self._mark = clock.mark
        self._stamps: list[Stamp] = []
        self._parts: dict[str, list[Stamp]] = {}
        self._aside = False
        self._outside = ModulePhase("", "forward")
        self._running = ModulePhase("", "backward")
        self._forward, self._recompute = _Lane("forward"), _Lane("recompute")
        self._handles: list[Any] = []
        self.home = threading.get_ident()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook in, on the thread that is the first; hook out."""
        self.home = threading.get_ident()
        with contextlib.ExitStack() as hooks:
            if self._tree.compiled:
                hooks.enter_context(unremarked_hooks())
            for handle in (
                register_module_forward_pre_hook(uncompiled(self._enter_module, self._tree.compiled)),
                # always_call: early-stopped recomputation leaves forward by an exception
                register_module_forward_hook(uncompiled(self._leave_module, self._tree.compiled), with_kwargs=True, always_call=True),
            ):
                hooks.callback(remove_hook, handle)
            hooks.enter_context(listening(self))
            hooks.callback(self._release)
            yield

    def begin(self) -> None:
        """Start a pass: from here on the root's forward runs."""
        self._aside = False
        self._stamps = []
        self._parts = {"forward": self._stamps}
        self._forward, self._recompute = _Lane("forward"), _Lane("recompute")
        self._forward.segment = next_sequence_number()
        self._stamps.append((self._mark(), self._outside, ""))

    def set_aside(self) -> None:
        """What runs until the next part begins is none of the pass, also where it runs modules."""
        self._aside = True
        self._stamps.append((self._mark(), None, ""))

    def begin_backward(self, results: Any) -> None:
        """Go on to backward, from these results; once more, if there was one before."""
        self._aside = False
        self._divide(self._forward, results, self._now(self._forward).row)
        self._find(self._forward.unfound, results)
        self._running = ModulePhase("", "backward")
        self._stamps = self._parts.setdefault("backward", [])
        self._stamps.append((self._mark(), self._running, ""))

    def resume_forward(self) -> None:
        """Go on with forward, behind a backward or something that was set aside."""
        self._aside = False
        self._stamps = self._parts["forward"]
        self._forward.segment = next_sequence_number()
        self._stamps.append((self._mark(), self._now(self._forward), ""))

    def end(self) -> dict[str, list[Stamp]]:
        """The pass is over. Returns the stamps of its parts, to be read when the clock has settled."""
        self._stamps.append((self._mark(), None, ""))
        self._release()
        parts, self._parts, self._stamps = self._parts, {}, []
        return parts

    def laps(self, parts: Mapping[str, list[Stamp]]) -> dict[str, PassTimes]:
        """What settled stamps say of each part."""
        return {part: pass_times(stamps, self._clock) for part, stamps in parts.items()}

    def counts_here(self) -> bool:
        """Whether a part runs that is not set aside, and this thread is the first, or goes backward."""
        return not self._aside and (threading.get_ident() == self.home or backward_id() != NO_BACKWARD)

    def place(self) -> tuple[str, str]:
        """The row that is running, and the nearest row at or above it that is a module."""
        return self._above(self._lane())

    def _above(self, lane: _Lane) -> tuple[str, str]:
        if lane.stack:
            top = lane.stack[-1]
            return top.place.row, top.module_row
        row = "" if lane is self._forward else self._running.row
        return row, self._tree.nearest(row)

    def enter(self, key: int, row: str, module_row: str, _caller: FrameType | None) -> None:
        """Something that is no module is entered."""
        self._stamps.append((self._mark(), None, ""))
        lane = self._lane()
        self._push(lane, _Frame(key, ModulePhase(row, lane.phase), module_row), self._above(lane)[0], None)

    def leave(self, key: int) -> None:
        """And left."""
        self._pop(key, None)

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module in self._tree and self.counts_here():
            self._stamps.append((self._mark(), None, ENTERS))
            lane = self._lane()
            above, caller = self._above(lane)
            row = self._tree.row(module, caller)
            self._push(lane, _Frame(id(module), ModulePhase(row, lane.phase), row), above, args)

    def _leave_module(self, module: nn.Module, *values: Any) -> None:
        if module in self._tree and self.counts_here():
            self._pop(id(module), values)

    def _lane(self) -> _Lane:
        return self._forward if backward_id() == NO_BACKWARD else self._recompute

    def _push(self, lane: _Lane, frame: _Frame, above: str, crossing: Any) -> None:
        if lane.stack or lane is self._forward:
            self._divide(lane, crossing, above)
        lane.stack.append(frame)
        lane.segment = next_sequence_number()
        self._stamps.append((self._mark(), frame.place, ""))

    def _pop(self, key: int, values: tuple[Any, ...] | None) -> None:
        mark = self._mark()
        lane = self._lane()
        place = len(lane.stack) - 1  # nearly always the last; others may have been left unsaid
        while place >= 0 and lane.stack[place].key != key:
            place -= 1
        if place < 0:
            return
        self._stamps.append((mark, None, ""))
        frame = lane.stack[place]
        # Torch leaves keyword arguments out where forward was left by an exception; the output comes last.
        self._divide(lane, None if values is None else values[-1], frame.place.row)
        if frame.unfound:
            self._find(frame.unfound, None if values is None else values[-1])
        del lane.stack[place:]
        if values is None:  # no output to look from: the next one that is left may lead there
            (lane.stack[-1] if lane.stack else lane).unfound.extend(frame.unfound)
        lane.segment = next_sequence_number()
        self._stamps.append((self._mark(), self._now(lane), ""))

    def _now(self, lane: _Lane) -> ModulePhase:
        if lane.stack:
            return lane.stack[-1].place
        return self._outside if lane is self._forward else self._running

    def _divide(self, lane: _Lane, crossing: Any, row: str) -> None:
        """End the segment of a row, and hook the newest of its nodes that the crossing tensors lead to."""
        end = next_sequence_number()
        if end == lane.segment:
            return
        newest, number = _newest(crossing, lane.segment, end)
        if newest is not None:
            self._hook(newest, row)
        if number + 1 < end:
            (lane.stack[-1] if lane.stack else lane).unfound.append((number + 1, end, row))
        lane.segment = end

    def _find(self, unfound: _Unfound, output: Any) -> None:
        """Hook the newest node of each range that the output leads back to."""
        if not unfound:
            return
        first = min(start for start, _, _ in unfound)
        newest: dict[int, tuple[int, Any]] = {}
        waiting: list[Any] = list(nodes_of(output))
        seen: set[Any] = set()
        while waiting and len(seen) < FARTHEST:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            number = sequence_number(node)
            for index, (start, end, _) in enumerate(unfound):
                if start <= number < end and number > newest.get(index, (-1, None))[0]:
                    newest[index] = (number, node)
            if number >= first:
                waiting.extend(each for each, _ in node.next_functions)
        for index, (_, node) in newest.items():
            self._hook(node, unfound[index][2])

    def _hook(self, node: Any, row: str) -> None:
        self._handles.append(node.register_prehook(partial(self._begin_segment, ModulePhase(row, "backward"))))

    def _begin_segment(self, place: ModulePhase, _gradients: Any) -> None:
        if not self._aside:
            self._running = place
            self._stamps.append((self._mark(), place, SEGMENT))

    def _release(self) -> None:
        """A graph that the user keeps is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _newest(crossing: Any, start: int, end: int) -> tuple[Any, int]:
    """The newest node numbered within, and its number; `None` and the number before the first where there is none."""
    newest, best = None, start - 1
    for value in crossing if type(crossing) is tuple else (crossing,):
        for node in (value.grad_fn,) if type(value) is Tensor else () if value is None else nodes_of(value):
            if node is not None and best < (number := sequence_number(node)) < end:
                newest, best = node, number
    return newest, best
