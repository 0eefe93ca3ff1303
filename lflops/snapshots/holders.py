"""Who holds the bytes that are alive: a category and a line of code, from the stack of each allocation."""

from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

from lflops.snapshots.peak import Alive, is_optimizer
from lflops.snapshots.read import Frame, Stack

Category = Literal["parameters", "gradients", "optimizer_state", "activations", "temporary", "copy", "other", "unknown"]
CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer_state", "activations", "temporary", "copy", "other", "unknown")

MOVES = frozenset({"to", "cuda", "_apply", "to_empty", "load_state_dict", "reset_parameters", "materialize_meta_module"})
COPIES = ("deepcopy", "__deepcopy__", "update_parameters")
EMA = ("swa_utils", "ema")
LIBRARIES = ("site-packages/", "dist-packages/", "lib/python", "<frozen", "torch/")


class StackHolder(Struct, frozen=True, kw_only=True):
    """Allocations of one category that one line of code made, as `file:line function`; empty where the stack is unknown."""

    category: Category
    line: str
    count: int
    bytes: int


def category_of(alive: Alive, parameter_sizes: frozenset[int] = frozenset()) -> Category:
    """What an allocation is, by the code that made it.

    Backward runs in a thread without a Python stack: what it makes is a gradient where it has the size of a parameter, else temporary.
    """
    if not alive.stack and alive.passes_ago is None:
        return "unknown"
    functions = {frame.function for frame in alive.stack}
    category: Category = next((category for category, holds in _RULES if holds(alive.stack, functions)), "other")
    return "gradients" if category == "temporary" and not is_optimizer(alive.stack) and alive.bytes in parameter_sizes else category


def sizes_of_parameters(alive: Iterable[Alive]) -> frozenset[int]:
    """The sizes in bytes that gradients may have: those of parameters, and of what was there before the recording."""
    return frozenset(each.bytes for each in alive if category_of(each) in ("parameters", "unknown"))


def _copies(stack: Stack, functions: set[str]) -> bool:
    return not functions.isdisjoint(COPIES) or any(word in frame.file.rpartition("/")[2].lower() for frame in stack for word in EMA)


def _backward(stack: Stack, _functions: set[str]) -> bool:
    """Without a Python stack, or within autograd's."""
    return not stack or any("autograd" in frame.file or "torch::autograd" in frame.function for frame in stack)


def _makes_parameters(frame: Frame) -> bool:
    in_module = "nn/modules/" in frame.file or "nn/parameter.py" in frame.file
    return (in_module and (frame.function in MOVES or frame.function == "__init__")) or frame.function in ("load_state_dict", "to_empty")


def line_of(stack: Stack) -> str:
    """The innermost line of the user's code; of a library's where there is none."""
    if not stack:
        return ""
    own = next(
        (frame for frame in stack if frame.file and not any(each in frame.file for each in LIBRARIES) and "??" not in frame.file), None
    )
    frame = own or stack[0]
    return f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"


def holders_of(alive: Iterable[Alive], parameter_sizes: frozenset[int] = frozenset()) -> tuple[StackHolder, ...]:
    """Allocations by category and line, the most bytes first."""
    sums: dict[tuple[Category, str], list[int]] = {}
    for each in alive:
        entry = sums.setdefault((category_of(each, parameter_sizes), line_of(each.stack)), [0, 0])
        entry[0] += 1
        entry[1] += each.bytes
    rows = (StackHolder(category=category, line=line, count=count, bytes=nbytes) for (category, line), (count, nbytes) in sums.items())
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.line)))


_RULES: tuple[tuple[Category, Callable[[Stack, set[str]], bool]], ...] = (
    ("copy", _copies),
    ("optimizer_state", lambda stack, functions: is_optimizer(stack) and "_init_group" in functions),
    ("temporary", lambda stack, _: is_optimizer(stack)),
    ("activations", lambda stack, functions: "forward" in functions or any("nn/functional.py" in frame.file for frame in stack)),
    ("parameters", lambda stack, _: any(map(_makes_parameters, stack))),
    ("temporary", _backward),
)
"""The first that holds."""
