"""What is alive at the moment to explain, and who holds it.

A category and a line of code, from the stack of each allocation.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar

from msgspec import Struct

from lflops.memory.snapshots.read import AUTOGRAD, Entry, Frame, Snapshot, Stack
from lflops.profile.records import Phase
from lflops.profile.series import grouped

OPTIMIZER = "torch/optim/"
FREED = ("free_requested", "free")
_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
Label = TypeVar("Label")
RECOMPUTES = (
    "recompute_fn",
    "unpack_hook",
    "backward",
    # functions of `torch.utils.checkpoint` that run in backward
)


class Alive(NamedTuple):
    """An allocation that is alive at the moment."""

    # what was asked for
    bytes: int
    # the code that allocated it
    stack: Stack
    passes_ago: int | None = (
        # how many forward passes have begun since; `None` where it is older than the trace
        None
    )
    steps_ago: int | None = (
        # how many optimizer steps have ended since; `None` where it is older than the trace
        None
    )
    outlives_step: bool = (
        # of what an optimizer made: whether it is there when that step has ended
        True
    )


class Peak(NamedTuple):
    """What is alive at the moment."""

    # the request that failed; `None` where memory did not run out
    ran_out: Entry | None
    alive: tuple[Alive, ...]
    # how many forward passes have begun in the trace before the moment
    passes: int
    # how many optimizer steps have ended there
    steps: int
    # bytes in segments then
    reserved: int

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.alive)


def peak_of(snapshot: Snapshot) -> Peak:
    """The moment of the last failure, else of the most bytes alive, from the end of the trace backward."""
    at = peak_place(snapshot)
    grown = sum(_GROWS.get(entry.action, 0) * entry.size for entry in snapshot.trace[at:])
    births = births_in(snapshot.trace[: at + 1])
    now, made = (
        births[-1] if births else None,
        {each.entry.address: each for each in births if each.entry.action == "alloc"},
    )
    lasting = lasting_state(snapshot.trace)
    held = []
    for address, (size, stack) in alive_before(snapshot, at).items():
        born = made.get(address)
        if born is None or now is None:
            held.append(Alive(size, stack))
        else:
            ago = now.passes - born.passes, now.steps - born.steps
            held.append(Alive(size, born.entry.stack or stack, *ago, born.place in lasting))
    ran_out = (
        snapshot.trace[at]
        if at < len(snapshot.trace) and snapshot.trace[at].action == "oom"
        else None
    )
    reserved = sum(segment.size for segment in snapshot.segments) - grown
    passes, steps = (0, 0) if now is None else (now.passes, now.steps)
    return Peak(ran_out=ran_out, alive=tuple(held), passes=passes, steps=steps, reserved=reserved)


def alive_before(snapshot: Snapshot, at: int) -> dict[int, tuple[int, Stack]]:
    """Size and stack of each allocation, by address, before an entry of the trace.

    What is alive in the end, with all since undone.
    """
    # A recording may have the stack that frees, and not the one that allocated. Then it says
    # nothing of what is older than the trace.
    made = {entry.address: entry.stack for entry in snapshot.trace if entry.action == "alloc"}
    of_frees = any(
        made.get(entry.address, entry.stack) != entry.stack
        for entry in snapshot.trace
        if entry.action in FREED
    )
    blocks = (
        block
        for segment in snapshot.segments
        for block in segment.blocks
        if block.state == "active_allocated"
    )
    alive = {block.address: (block.requested, block.stack) for block in blocks}
    for entry in reversed(snapshot.trace[at:]):
        if entry.action == "alloc":
            alive.pop(entry.address, None)
        elif entry.action in FREED:
            alive[entry.address] = (entry.size, () if of_frees else entry.stack)
    return alive


def peak_place(snapshot: Snapshot) -> int:
    """The place in the trace before which the most is alive.

    Of the last failure, where there is one.
    """
    trace = snapshot.trace
    failures = [place for place, entry in enumerate(trace) if entry.action == "oom"]
    if failures:
        return failures[-1]
    most = live = sum(size for size, _ in alive_before(snapshot, len(trace)).values())
    moment = len(trace)
    for place in range(len(trace) - 1, -1, -1):
        entry = trace[place]
        if entry.action == "alloc":
            live -= entry.size
        elif entry.action in FREED:
            live += entry.size
        if live > most:
            most, moment = live, place
    return moment


def lasting_state(trace: tuple[Entry, ...]) -> frozenset[int]:
    """The places in the trace of what optimizers allocate and still have when the step has ended."""
    # A failure may be in the middle of a step. Then what a line of the user's made is state if that
    # line has freed nothing in the step. Torch's optimizers make their state in `_init_group`, and
    # many temporary tensors at once.
    lasting: set[int] = set()
    # in the step that is running, by address
    made: dict[int, int] = {}
    freed: set[Stack] = set()
    for place, entry in enumerate(trace):
        if entry.action == "alloc" and phase_of(entry.stack) == "optimizer":
            made[entry.address] = place
        elif entry.action == "alloc":
            lasting.update(made.values())
            made, freed = {}, set()
        elif entry.action in FREED and entry.address in made:
            freed.add(trace[made.pop(entry.address)].stack)
    if trace and trace[-1].action == "oom":
        # An optimizer's own code, as `torch/optim/adam.py`, is torch's; all derive from
        # `optimizer.py`.
        files = {
            at: [frame.file for frame in trace[place].stack]
            for at, place in made.items()
            if trace[place].stack not in freed
        }
        made = {
            at: made[at]
            for at, each in files.items()
            if not any(OPTIMIZER in f and not f.endswith("/optimizer.py") for f in each)
        }
    return frozenset(lasting.union(made.values()))


class Birth(NamedTuple):
    """How many forward passes had begun, and optimizer steps ended, at an allocation, or at a request that failed."""

    place: int
    entry: Entry
    passes: int
    steps: int


def births_in(trace: tuple[Entry, ...]) -> list[Birth]:
    """When each allocation in the trace was made, and each request failed."""
    # A forward pass begins where a module's forward allocates after anything else did: the loss,
    # backward, an optimizer, a batch. An optimizer's step has ended when anything but an optimizer
    # allocates.
    births = []
    passes = steps = 0
    in_forward = in_optimizer = False
    for place, entry in enumerate(trace):
        if entry.action not in ("alloc", "oom"):
            continue
        in_backward = (
            frame.function
            for frame in entry.stack
            if frame.file.endswith("torch/utils/checkpoint.py")
        )
        if not any(function in RECOMPUTES for function in in_backward):
            begins, optimizes = (
                phase_of(entry.stack) == phase for phase in ("forward", "optimizer")
            )
            passes += begins and not in_forward
            steps += in_optimizer and not optimizes
            in_forward, in_optimizer = begins, optimizes
        births.append(Birth(place, entry, passes, steps))
    return births


def changes(
    snapshot: Snapshot,
    of_older: Callable[[int, Stack], Label],
    of_new: Callable[[int, Entry], Label],
) -> Iterator[tuple[int, Label | None, int]]:
    """The bytes by label that come and go, by place.

    At -1 what is older than the trace; at a request that failed, 0 of none.
    """
    held = {
        address: (of_older(*older), older[0])
        for address, older in alive_before(snapshot, 0).items()
    }
    yield from ((-1, label, nbytes) for label, nbytes in held.values())
    for place, entry in enumerate(snapshot.trace):
        if entry.action == "alloc":
            held[entry.address] = of_new(place, entry), entry.size
            yield place, *held[entry.address]
        elif entry.action in FREED and entry.address in held:
            label, nbytes = held.pop(entry.address)
            yield place, label, -nbytes
        elif entry.action in (*FREED, "oom"):
            yield place, None, 0


def phase_of(stack: Stack) -> Phase:
    """The phase of the innermost frame that has one.

    Backward runs in a thread without a Python stack.
    """
    # Innermost, because Lightning runs forward and backward in a closure that the optimizer's
    # `step` calls. `_call_impl` calls a module's hooks. An optimizer is torch's, derived from
    # torch's, or the `step` of a file that is named after it.
    for frame in stack:
        if frame.function in ("forward", "_call_impl"):
            return "forward"
        if frame.file == AUTOGRAD or frame.function in ("backward", "_engine_run_backward"):
            return "backward"
        if (OPTIMIZER in frame.file and "swa_utils" not in frame.file) or (
            frame.function == "step" and "optim" in frame.file.lower()
        ):
            return "optimizer"
        if "closure" in frame.function:
            return "other"
    return "other" if stack else "backward"


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
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "temporary",
    "copy",
    "other",
    "unknown",
)

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
COPIES = ("deepcopy", "__deepcopy__", "update_parameters")
# in the names of files; `schema.py` is none
EMA = re.compile(r"swa_utils|(?<![a-z])ema(?![a-z])")
LIBRARIES = re.compile(
    r"(site|dist)-packages/|/lib(64)?/python\d|/torch/|/torchinductor_|^<(frozen|string|eval_with_key)"
)


class StackHolder(Struct, frozen=True, kw_only=True):
    """Allocations of one category that one line of code made, as `file:line function`.

    Empty where the stack is unknown.
    """

    category: Category
    line: str
    count: int
    bytes: int


def category_of(alive: Alive, parameter_sizes: frozenset[int] = frozenset()) -> Category:
    """The category of an allocation, by the code that made it."""
    # Backward runs in a thread without a Python stack: what it makes is a gradient where it has the
    # size of a parameter, else temporary
    if not alive.stack and alive.passes_ago is None:
        return "unknown"
    functions = {frame.function for frame in alive.stack}
    category: Category = next(
        (category for category, holds in _RULES if holds(alive.stack, functions)), "other"
    )
    if category != "temporary":
        return category
    if phase_of(alive.stack) == "optimizer":
        return "optimizer_state" if alive.outlives_step else "temporary"
    return "gradients" if alive.bytes in parameter_sizes else "temporary"


def sizes_of_parameters(alive: Iterable[Alive]) -> frozenset[int]:
    """The sizes in bytes that gradients may have.

    Those of parameters, and of what was there before the recording.
    """
    return frozenset(each.bytes for each in alive if category_of(each) in ("parameters", "unknown"))


def _copies(stack: Stack, functions: set[str]) -> bool:
    return not functions.isdisjoint(COPIES) or any(
        EMA.search(frame.file.rpartition("/")[2].lower()) for frame in stack
    )


def _makes_parameters(frame: Frame) -> bool:
    in_module = "nn/modules/" in frame.file or "nn/parameter.py" in frame.file
    return (
        in_module and (frame.function in MOVES or frame.function == "__init__")
    ) or frame.function in ("load_state_dict", "to_empty")


def line_of(stack: Stack) -> str:
    """The innermost line of the user's code.

    Where there is none of a library's, torch's last; without Python what C++ ran.
    """
    if not stack:
        return ""
    python = [frame for frame in stack if frame.is_python]
    own = (frame for frame in python if not LIBRARIES.search(frame.file))
    others = (frame for frame in python if "/torch/" not in frame.file)
    frame = next(own, None) or next(others, None) or stack[0]
    return (
        f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"
        if frame.is_python
        else frame.function
    )


def holders_of(
    alive: Iterable[Alive], parameter_sizes: frozenset[int] = frozenset()
) -> tuple[StackHolder, ...]:
    """Allocations by category and line, the most bytes first."""
    rows = (
        StackHolder(
            category=category, line=line, count=len(held), bytes=sum(each.bytes for each in held)
        )
        for (category, line), held in grouped(
            alive, lambda each: (category_of(each, parameter_sizes), line_of(each.stack))
        ).items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.line)))


_RULES: tuple[tuple[Category, Callable[[Stack, set[str]], bool]], ...] = (
    ("copy", _copies),
    (
        "optimizer_state",
        lambda stack, functions: phase_of(stack) == "optimizer" and "_init_group" in functions,
    ),
    ("temporary", lambda stack, _: phase_of(stack) == "optimizer"),
    (
        "activations",
        lambda stack, _: (
            phase_of(stack) == "forward" or any("nn/functional.py" in frame.file for frame in stack)
        ),
    ),
    ("parameters", lambda stack, _: any(map(_makes_parameters, stack))),
    ("temporary", lambda stack, _: phase_of(stack) == "backward"),
)
"""The first that holds."""
