"""Find the allocations alive at a snapshot's peak, each with a category and a line of code.

The category and the line are derived from the stack that torch recorded for the allocation.

The trace of a snapshot is the list of events that torch recorded: allocations, frees and failed
requests.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

from msgspec import Struct

from lflops.memory.snapshots.read import AUTOGRAD, Block, Entry, Frame, Snapshot, Stack
from lflops.profile.records import Phase
from lflops.profile.series import grouped

OPTIMIZER = "torch/optim/"
"""The folder of torch's optimizers."""

FREED = ("free_requested", "free")
"""The actions of events in the trace that free an allocation."""

RECOMPUTES = ("recompute_fn", "unpack_hook", "backward")
"""Functions of `torch.utils.checkpoint` that recompute activations in backward."""

_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Actions of events that increase (1) or decrease (-1) the reserved memory."""

Label = TypeVar("Label")


class Alive(NamedTuple):
    """An allocation that is alive at the peak.

    Attributes:
        bytes: The bytes that were requested.
        stack: The code that made the allocation.
        passes_ago: Number of forward passes that have begun since the allocation; `None` if the
            allocation was made before the recording.
        steps_ago: Number of optimizer steps that have ended since the allocation; `None` if the
            allocation was made before the recording.
        outlives_step: For an allocation of an optimizer, whether it is still alive after the
            optimizer step.
    """

    bytes: int
    stack: Stack
    passes_ago: int | None = None
    steps_ago: int | None = None
    outlives_step: bool = True


class Peak(NamedTuple):
    """The memory when a request failed, or at the peak if none failed.

    Attributes:
        ran_out: The request that failed; `None` if memory did not run out.
        alive: The live allocations.
        passes: Number of forward passes that have begun since the recording started.
        steps: Number of optimizer steps that have ended since the recording started.
        reserved: Bytes in segments.
    """

    ran_out: Entry | None
    alive: tuple[Alive, ...]
    passes: int
    steps: int
    reserved: int

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.alive)


def peak_of(snapshot: Snapshot) -> Peak:
    """Return the memory at the last failed request, or at the peak if none failed."""
    at = peak_index(snapshot)
    lasting = lasting_state(snapshot.trace)
    events = allocation_events(snapshot.trace[: at + 1])
    made = {event.entry.address: event for event in events if event.entry.action == "alloc"}
    passes = events[-1].passes if events else 0
    steps = events[-1].steps if events else 0
    alive = []
    for address, (size, stack) in alive_before(snapshot, at).items():
        event = made.get(address)
        if event is None:
            alive.append(Alive(size, stack))
            continue
        allocation = Alive(
            bytes=size,
            stack=event.entry.stack or stack,
            passes_ago=passes - event.passes,
            steps_ago=steps - event.steps,
            outlives_step=event.trace_index in lasting,
        )
        alive.append(allocation)
    # The snapshot contains the segments at the end of the trace. Therefore the events since the
    # peak are undone.
    reserved = sum(segment.size for segment in snapshot.segments)
    for entry in snapshot.trace[at:]:
        reserved -= _RESERVES.get(entry.action, 0) * entry.size
    return Peak(
        ran_out=failure_at(snapshot, at),
        alive=tuple(alive),
        passes=passes,
        steps=steps,
        reserved=reserved,
    )


def failure_at(snapshot: Snapshot, index: int) -> Entry | None:
    """Return the event at this index of the trace if it is a failed request, or `None` if not."""
    if index < len(snapshot.trace) and snapshot.trace[index].action == "oom":
        return snapshot.trace[index]
    return None


def alive_before(snapshot: Snapshot, at: int) -> dict[int, tuple[int, Stack]]:
    """Return the size and stack of each allocation that is alive before the event at index `at`.

    The result is keyed by address. A snapshot contains only the allocations that are alive at the
    end of the trace. Therefore all events from the last one back to `at` are undone.
    """
    alive: dict[int, tuple[int, Stack]] = {}
    for block in _active_blocks(snapshot):
        alive[block.address] = (block.requested, block.stack)
    records_frees = _records_stacks_of_frees(snapshot.trace)
    for entry in reversed(snapshot.trace[at:]):
        if entry.action == "alloc":
            alive.pop(entry.address, None)
        elif entry.action in FREED:
            alive[entry.address] = (entry.size, () if records_frees else entry.stack)
    return alive


def _active_blocks(snapshot: Snapshot) -> Iterator[Block]:
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.state == "active_allocated":
                yield block


def _records_stacks_of_frees(trace: tuple[Entry, ...]) -> bool:
    """Return whether the events of frees have the stack of the code that freed the memory.

    If not, these events have the stack of the code that allocated the memory. The trace then also
    shows which code made the allocations that are older than the trace.
    """
    made = {entry.address: entry.stack for entry in trace if entry.action == "alloc"}
    for entry in trace:
        if entry.action in FREED and made.get(entry.address, entry.stack) != entry.stack:
            return True
    return False


def peak_index(snapshot: Snapshot) -> int:
    """Return the index of the event in the trace at which memory use is at its peak.

    This is the last allocation that failed because memory ran out. If none failed, it is the event
    just before which the most bytes are allocated.
    """
    trace = snapshot.trace
    for index in reversed(range(len(trace))):
        if trace[index].action == "oom":
            return index
    live = sum(size for size, _ in alive_before(snapshot, len(trace)).values())
    most = live
    peak = len(trace)
    for index in reversed(range(len(trace))):
        entry = trace[index]
        if entry.action == "alloc":
            live -= entry.size
        elif entry.action in FREED:
            live += entry.size
        if live > most:
            most = live
            peak = index
    return peak


def lasting_state(trace: tuple[Entry, ...]) -> frozenset[int]:
    """Return the indexes in the trace of the allocations that are the optimizer's state.

    These are allocations of an optimizer that are still alive after the optimizer step that made
    them. If memory runs out during a step, the end of the step is not recorded. An allocation is
    then assumed to be temporary in two cases: one of torch's optimizers made it, or an allocation
    with the same stack was freed in the same step.
    """
    lasting: set[int] = set()
    # Indexes of the allocations of the running step that are alive, keyed by address.
    made: dict[int, int] = {}
    freed: set[Stack] = set()
    for index, entry in enumerate(trace):
        if entry.action == "alloc" and phase_of(entry.stack) == "optimizer":
            made[entry.address] = index
        elif entry.action == "alloc":
            # The step has ended.
            lasting.update(made.values())
            made = {}
            freed = set()
        elif entry.action in FREED and entry.address in made:
            freed.add(trace[made.pop(entry.address)].stack)
    ends_in_step = trace and trace[-1].action == "oom"
    for index in made.values():
        stack = trace[index].stack
        is_temporary = ends_in_step and (stack in freed or _is_torch_optimizer(stack))
        if not is_temporary:
            lasting.add(index)
    return frozenset(lasting)


def _is_torch_optimizer(stack: Stack) -> bool:
    """Return whether a stack is in one of torch's optimizers, such as `torch/optim/adam.py`.

    Such an optimizer creates its state in `_init_group`, and also many temporary tensors. The file
    `optimizer.py` does not count, because any optimizer may run its code.
    """
    for frame in stack:
        if OPTIMIZER in frame.file and not frame.file.endswith("/optimizer.py"):
            return True
    return False


class AllocationEvent(NamedTuple):
    """An allocation, or a request that failed.

    Attributes:
        trace_index: Index of the event in the trace.
        entry: The event.
        passes: Number of forward passes that have begun, including a pass that begins with this
            event.
        steps: Number of optimizer steps that have ended before this event.
    """

    trace_index: int
    entry: Entry
    passes: int
    steps: int


def allocation_events(trace: tuple[Entry, ...]) -> list[AllocationEvent]:
    """Return the allocations and failed requests of a trace.

    Each one has the number of forward passes and of optimizer steps before it.

    A trace does not record where passes begin. A forward pass is assumed to begin at the first
    allocation by a module's forward after an allocation by other code, such as backward. An
    optimizer step is assumed to end at the first allocation by other code.
    """
    events = []
    passes = 0
    steps = 0
    latest: Phase = "other"
    for index, entry in enumerate(trace):
        if entry.action not in ("alloc", "oom"):
            continue
        if not _recomputes(entry.stack):
            phase = phase_of(entry.stack)
            if phase == "forward" and latest != "forward":
                passes += 1
            if latest == "optimizer" and phase != "optimizer":
                steps += 1
            latest = phase
        events.append(AllocationEvent(index, entry, passes, steps))
    return events


def _recomputes(stack: Stack) -> bool:
    for frame in stack:
        if frame.file.endswith("torch/utils/checkpoint.py") and frame.function in RECOMPUTES:
            return True
    return False


class Change(NamedTuple, Generic[Label]):
    """The change of the live memory by one event: an allocation, a free or a failed request.

    Attributes:
        trace_index: Index of the event in the trace; -1 for an allocation that is older than the
            trace.
        label: The label of the allocation, which the caller of `changes` chooses, for example a
            category. `None` if the allocation is unknown, or for a failed request.
        bytes: The bytes that the event adds, negative for a free; 0 for a failed request.
    """

    trace_index: int
    label: Label | None
    bytes: int


def changes(
    snapshot: Snapshot,
    label_older: Callable[[int, Stack], Label],
    label_new: Callable[[int, Entry], Label],
) -> Iterator[Change[Label]]:
    """Yield the changes of live memory in order, each with the label of its allocation.

    The allocations that are older than the trace come first.

    Args:
        snapshot: The snapshot.
        label_older: A function that returns the label of an allocation that is older than the
            trace. Its arguments are the bytes and the stack of the allocation.
        label_new: A function that returns the label of an allocation in the trace. Its arguments
            are the index of the event in the trace, and the event.
    """
    held: dict[int, tuple[Label, int]] = {}
    for address, (nbytes, stack) in alive_before(snapshot, 0).items():
        label = label_older(nbytes, stack)
        held[address] = (label, nbytes)
        yield Change(-1, label, nbytes)
    for index, entry in enumerate(snapshot.trace):
        if entry.action == "alloc":
            label = label_new(index, entry)
            held[entry.address] = (label, entry.size)
            yield Change(index, label, entry.size)
        elif entry.action in FREED and entry.address in held:
            label, nbytes = held.pop(entry.address)
            yield Change(index, label, -nbytes)
        elif entry.action in (*FREED, "oom"):
            yield Change(index, None, 0)


def phase_of(stack: Stack) -> Phase:
    """Return the phase of a step in which code with this stack runs.

    The innermost frame that belongs to a phase determines the phase. Outer frames are ignored,
    because Lightning runs forward and backward in a closure that the optimizer's `step` calls. An
    empty stack means backward, because backward runs in a thread without a Python stack.
    """
    for frame in stack:
        # `_call_impl` calls a module's hooks.
        if frame.function in ("forward", "_call_impl"):
            return "forward"
        if frame.file == AUTOGRAD or frame.function in ("backward", "_engine_run_backward"):
            return "backward"
        if _is_optimizer(frame):
            return "optimizer"
        if "closure" in frame.function:
            return "other"
    return "other" if stack else "backward"


def _is_optimizer(frame: Frame) -> bool:
    """Return whether a frame runs code of an optimizer.

    The frame is in the folder of torch's optimizers, or its function is `step` and the name of its
    file contains `optim`.
    """
    if OPTIMIZER in frame.file and "swa_utils" not in frame.file:
        return True
    return frame.function == "step" and "optim" in frame.file.lower()


Category = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "temporary",
    "copy",
    "other",
    "unknown",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

MOVES = frozenset(
    {
        "to",
        "cuda",
        "_apply",
        "to_empty",
        "load_state_dict",
        "reset_parameters",
        "materialize_meta_module",
    }
)
"""Names of methods of `nn.Module` that allocate parameters."""

COPIES = ("deepcopy", "__deepcopy__", "update_parameters")
"""Functions that copy a model."""

EMA = re.compile(r"swa_utils|(?<![a-z])ema(?![a-z])")
"""Pattern for the names of files that average weights, such as `ema.py` but not `schema.py`."""

LIBRARIES = re.compile(
    r"(site|dist)-packages/|/lib(64)?/python\d|/torch/|/torchinductor_|"
    r"^<(frozen|string|eval_with_key)"
)
"""Pattern for files that are not the user's code: libraries and generated code."""


def category_of(alive: Alive, parameter_sizes: frozenset[int] = frozenset()) -> Category:
    """Return the category of an allocation, derived from the code that made it.

    Backward runs in a thread without a Python stack, so the code that allocates is unknown. An
    allocation of backward is assumed to be a gradient if it has the size of a parameter, and
    temporary otherwise.
    """
    if not alive.stack and alive.passes_ago is None:
        return "unknown"
    if any(map(_copies_model, alive.stack)):
        return "copy"
    return _category_in_step(alive, parameter_sizes)


def _category_in_step(alive: Alive, parameter_sizes: frozenset[int]) -> Category:
    stack = alive.stack
    phase = phase_of(stack)
    if phase == "optimizer":
        initializes = any(frame.function == "_init_group" for frame in stack)
        return "optimizer_state" if initializes or alive.outlives_step else "temporary"
    if phase == "forward" or any("nn/functional.py" in frame.file for frame in stack):
        return "activations"
    if any(map(_makes_parameters, stack)):
        return "parameters"
    if phase == "backward":
        return "gradients" if alive.bytes in parameter_sizes else "temporary"
    return "other"


def sizes_of_parameters(alive: Iterable[Alive]) -> frozenset[int]:
    """Return the sizes of parameters in bytes, which are also the possible sizes of gradients.

    The sizes of allocations of unknown category are included, because these allocations are older
    than the recording, and many of them are parameters.
    """
    sizes = set()
    for each in alive:
        if category_of(each) in ("parameters", "unknown"):
            sizes.add(each.bytes)
    return frozenset(sizes)


def _copies_model(frame: Frame) -> bool:
    return frame.function in COPIES or EMA.search(_file_name(frame).lower()) is not None


def _makes_parameters(frame: Frame) -> bool:
    if frame.function in ("load_state_dict", "to_empty"):
        return True
    in_module = "nn/modules/" in frame.file or "nn/parameter.py" in frame.file
    return in_module and (frame.function in MOVES or frame.function == "__init__")


def line_of(stack: Stack) -> str:
    """Return the innermost line of the user's code as `file:line function`; empty without a stack.

    If there is no such line, the result is the innermost line of a library other than torch. If
    there is no such library either, it is the innermost frame. If the stack has no Python, the
    result is the C++ function.
    """
    if not stack:
        return ""
    frame = _users_frame(stack)
    if not frame.is_python:
        return frame.function
    return f"{_file_name(frame)}:{frame.line} {frame.function}"


def _users_frame(stack: Stack) -> Frame:
    python = [frame for frame in stack if frame.is_python]
    for frame in python:
        if not LIBRARIES.search(frame.file):
            return frame
    for frame in python:
        if "/torch/" not in frame.file:
            return frame
    return stack[0]


def _file_name(frame: Frame) -> str:
    return frame.file.rpartition("/")[2]


class StackHolder(Struct, frozen=True, kw_only=True):
    """The allocations of one category that one line of code made.

    Attributes:
        category: The category.
        line: `file:line function`; empty if the stack is unknown.
        count: Number of these allocations.
        bytes: Bytes of these allocations.
    """

    category: Category
    line: str
    count: int
    bytes: int


def holders_of(
    alive: Iterable[Alive], parameter_sizes: frozenset[int] = frozenset()
) -> tuple[StackHolder, ...]:
    """Group allocations by category and line of code, sorted by bytes in descending order."""
    groups = grouped(alive, lambda each: (category_of(each, parameter_sizes), line_of(each.stack)))
    holders = []
    for (category, line), held in groups.items():
        nbytes = sum(each.bytes for each in held)
        holders.append(StackHolder(category=category, line=line, count=len(held), bytes=nbytes))
    return tuple(sorted(holders, key=lambda holder: (-holder.bytes, holder.line)))
