"""Find sequences of equal blocks in a model, and temporarily remove some of these blocks.

A sequence has consecutive equal blocks of one container, such as the layers of a transformer.
Blocks are equal if they have the same classes, parameters and settings. In a folded model, the
middle blocks of each sequence are removed, so that estimates are faster. A fold is such a sequence,
with the number of blocks that stay.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lflops.model.compile_guard import force_eager
from lflops.profile.module_names import name_below
from lflops.torch_private.dispatch_modes import InternalMode, on_stack, without_own_modes

# Number of blocks that a folded model keeps in a sequence of equal blocks. The first and the last
# block may behave differently. With six blocks, the two middle blocks are not next to the first or
# the last block.
USUALLY_KEPT = 6
# A sequence is folded only if it has at least this many equal blocks.
WORTHWHILE = 10


class Fold(NamedTuple):
    """A sequence of equal blocks in a container, and how many of them a folded model keeps.

    In a folded model, the middle blocks of the sequence are removed.

    Attributes:
        container: Name of the container, such as `layers`; empty for the model itself.
        first: Number of the first block, such as 0 for `layers.0`.
        length: Number of blocks in this sequence in the whole model.
        kept: Number of blocks that stay in the folded model.
    """

    container: str
    first: int
    length: int
    kept: int = USUALLY_KEPT

    def block(self, number: int) -> str:
        """Return the full name of the block with this number, such as `layers.3` for number 3."""
        return name_below(self.container, str(number))

    @property
    def removed(self) -> range:
        """Numbers of the middle blocks, which the folded model does not have."""
        begin = self.first + self.kept // 2
        return range(begin, begin + self.length - self.kept)


def folds_of(blocks: Mapping[str, nn.Module]) -> list[Fold]:
    """Return the sequences of equal blocks that are long enough to be folded.

    Blocks are equal if they have the same classes, parameters and settings. If a setting increases
    by one from block to block, it is the number of the block, and the blocks still count as equal.
    """
    runs: list[Fold] = []
    previous = ""
    for name, block in blocks.items():
        container, _, digits = name.rpartition(".")
        number = int(digits)
        is_next = previous == name_below(container, str(number - 1))
        if runs and is_next and _are_equal(blocks[previous], block):
            runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
        else:
            runs.append(Fold(container, number, 1))
        previous = name
    return [run for run in runs if run.length >= WORTHWHILE]


def shorter_folds(folds: Sequence[Fold]) -> Iterator[tuple[Fold, list[Fold]]]:
    """Yield each fold, with a copy of all `folds` in which this fold keeps one block less."""
    for place, fold in enumerate(folds):
        yield fold, [*folds[:place], fold._replace(kept=fold.kept - 1), *folds[place + 1 :]]


@contextlib.contextmanager
def folded(model: nn.Module, folds: Sequence[Fold]) -> Iterator[None]:
    """Remove the middle blocks of the sequences in `folds` from a model inside a context.

    The remaining blocks are renumbered without gaps. At the end, all blocks are restored.
    """
    held: list[tuple[nn.Module, dict[str, nn.Module], list[int]]] = []
    for name, removed in _removed(folds).items():
        container = model.get_submodule(name)
        held.append((container, dict(container.named_children()), removed))
    try:
        for container, children, removed in held:
            _refill(container, _without(children, removed))
        yield
    finally:
        for container, children, _ in held:
            _refill(container, children)


def _without(children: Mapping[str, nn.Module], removed: Sequence[int]) -> dict[str, nn.Module]:
    """Return the children of a container without the removed blocks, renumbered without gaps.

    `removed` are the numbers of the removed blocks. Children whose names are not numbers keep their
    names.
    """
    left: dict[str, nn.Module] = {}
    for name, module in children.items():
        if not name.isdecimal():
            left[name] = module
        elif int(name) not in removed:
            left[str(_new_number(int(name), removed))] = module
    return left


def _new_number(number: int, removed: Sequence[int]) -> int:
    """Return the number of a remaining block after the blocks in `removed` were removed."""
    return number - sum(other < number for other in removed)


def full_names(folds: Sequence[Fold], blocks: Sequence[str]) -> dict[str, str]:
    """Map the name of each block in the folded model to the block's name in the whole model.

    In the folded model, the middle blocks of each sequence in `folds` are removed. `blocks` are the
    names of all blocks in the whole model.
    """
    removed = _removed(folds)
    names: dict[str, str] = {}
    for block in blocks:
        container, _, digits = block.rpartition(".")
        number = int(digits)
        gone = removed.get(container, [])
        if number not in gone:
            names[name_below(container, str(_new_number(number, gone)))] = block
    return names


def _removed(folds: Sequence[Fold]) -> dict[str, list[int]]:
    """Return the numbers of the removed blocks, keyed by container."""
    removed: dict[str, list[int]] = {}
    for fold in folds:
        removed.setdefault(fold.container, []).extend(fold.removed)
    return removed


def _refill(container: nn.Module, children: Mapping[str, nn.Module]) -> None:
    for name in dict(container.named_children()):
        delattr(container, name)
    for name, module in children.items():
        container.add_module(name, module)


def _are_equal(block: nn.Module, following: nn.Module) -> bool:
    modules = dict(block.named_modules())
    others = dict(following.named_modules())
    if list(modules) != list(others):
        return False
    for one, other in zip(modules.values(), others.values(), strict=True):
        if _structure(one) != _structure(other) or not _settings_agree(one, other):
            return False
    return True


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Describe a module without its submodules, to compare it with a module of another block.

    The description has the module's class, whether it is in training mode, and the name, shape,
    dtype and `requires_grad` of each parameter and buffer.
    """
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    shapes = [(name, each.shape, each.dtype, each.requires_grad) for name, each in tensors]
    return type(module), module.training, shapes


# The attributes in which torch keeps parameters, buffers and submodules. They are not settings.
_TABLES = ("_parameters", "_buffers", "_modules")


def _settings_agree(module: nn.Module, following: nn.Module) -> bool:
    """Return whether two corresponding modules of consecutive blocks have the same attributes.

    An integer that increases by one counts as the same, because it is the number of the block.
    Parameters, buffers and submodules are not compared here.
    """
    before = _settings(module)
    after = _settings(following)
    if before.keys() != after.keys():
        return False
    return all(_is_same_setting(before[name], after[name]) for name in before)


def _settings(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TABLES}


def _is_same_setting(before: Any, after: Any) -> bool:
    is_number_of_block = type(before) is int and type(after) is int and after == before + 1
    if is_number_of_block:
        return True
    try:
        return bool(_comparable(before) == _comparable(after))
    except Exception:  # noqa: BLE001 - the user's `__eq__`; such blocks count as different
        return False


def _comparable(value: Any) -> Any:
    """Convert the value of a setting so that equal settings of two blocks compare as equal.

    A bound method is replaced with its function, because methods of two blocks are never equal. A
    tensor is replaced with its shape and dtype.
    """
    comparable = value
    if isinstance(value, list | tuple):
        comparable = [_comparable(each) for each in value]
    elif isinstance(value, dict):
        comparable = _comparable(list(value.items()))
    elif isinstance(value, partial):
        comparable = _comparable([value.func, value.args, value.keywords])
    elif isinstance(value, MethodType):
        comparable = value.__func__
    elif isinstance(value, Tensor):
        comparable = (value.shape, value.dtype)
    return comparable


def run_alike(model: nn.Module, call: Callable[[], object], fold: Fold) -> bool:
    """Return whether a model calls its equal blocks once each, in order, and in the same way.

    Two blocks are called in the same way if their inputs have the same shapes and the same origin,
    for example the previous block, and if the same operators run before both calls. To find out,
    the model runs without gradients. Only the first block of the sequence is computed. All other
    blocks return results of the same shapes.

    Args:
        model: The model.
        call: Function that calls the model.
        fold: The sequence of equal blocks.
    """
    calls = _Calls()
    blocks: list[nn.Module] = []
    for number in range(fold.first, fold.first + fold.length):
        blocks.append(model.get_submodule(fold.block(number)))
    forwards = [vars(block).get("forward") for block in blocks]
    try:
        for number, block in enumerate(blocks):
            vars(block)["forward"] = partial(calls.stand_in, number, block.forward)
        with torch.no_grad(), force_eager(), on_stack(calls):
            call()
    except _UnknownStructureError:
        return False
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            if forward is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = forward
    return calls.are_alike(fold.length)


class _UnknownStructureError(Exception):
    """A block returned an object that cannot be copied as the output of the next block.

    Supported outputs are tensors, numbers, `None`, and lists, tuples and dictionaries of them.
    """


class _BlockCall(NamedTuple):
    """The description of a call of a block, to compare it with the calls of other blocks.

    Attributes:
        number: The block's position in the sequence, from 0.
        shapes: The shapes of all inputs (see `_described`).
        origins: The origins of all inputs (see `_origin`).
        operators: The operators that ran outside the blocks since the previous call.
    """

    number: int
    shapes: list[Any]
    origins: list[str]
    operators: list[Any]

    def is_like(self, other: "_BlockCall") -> bool:
        """Return whether two calls differ at most in the number of the block."""
        return self == other._replace(number=self.number)


class _Calls(InternalMode):
    """Records the calls of equal blocks, and the operators that run between these calls."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_BlockCall] = []
        self._operators: list[Any] = []
        self._in_block = False
        self._inputs: list[Any] = []
        self._output: Any = None

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if not self._in_block:
            self._operators.append((function, _described(out)))
        return out

    def stand_in(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run instead of the forward of a block, record the call, and return an output.

        For the first block, `forward` is run. For all other blocks, the output is an empty copy of
        the output of the previous block.
        """
        inputs = list(_leaves((args, kwargs)))
        if not self._calls:
            self._in_block = True
            self._output = forward(*args, **kwargs)
            self._in_block = False
            output = self._output
        else:
            output = self._like(self._output, self._inputs, inputs)
        shapes: list[Any] = []
        origins: list[str] = []
        for each in inputs:
            shapes.append(_described(each))
            origins.append(_origin(each, self._inputs, self._output))
        self._calls.append(_BlockCall(number, shapes, origins, self._operators))
        self._operators = []
        self._inputs = inputs
        self._output = output
        return output

    def are_alike(self, blocks: int) -> bool:
        """Return whether each block was called once, in order, and in the same way as the others.

        `blocks` is the number of blocks. The inputs of the first block can have another origin,
        because the first block has no previous block.
        """
        if [call.number for call in self._calls] != list(range(blocks)):
            return False
        second = self._calls[1]
        if self._calls[0].shapes != second.shapes:
            return False
        return all(call.is_like(second) for call in self._calls[1:])

    def _like(self, output: Any, before: list[Any], inputs: list[Any]) -> Any:
        """Return an output for a block, with the structure and shapes of the previous output.

        If the previous block returned one of its inputs, the corresponding input of this block is
        returned.

        Args:
            output: The output of the previous block.
            before: The inputs of the previous block.
            inputs: The inputs of this block.
        """
        if isinstance(output, Tensor):
            for place, each in enumerate(before):
                if each is output:
                    return inputs[place]
            with without_own_modes():
                return torch.empty_strided(
                    output.shape, output.stride(), dtype=output.dtype, device=output.device
                )
        if type(output) in (list, tuple):
            return type(output)(self._like(each, before, inputs) for each in output)
        if type(output) is dict:
            return {name: self._like(each, before, inputs) for name, each in output.items()}
        if output is None or isinstance(output, bool | float | int):
            return output
        raise _UnknownStructureError


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        for each in value:
            yield from _leaves(each)
    elif type(value) is dict:
        for name, each in value.items():
            yield name
            yield from _leaves(each)
    else:
        yield value


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if type(value) in (list, tuple):
        return [_described(each) for each in value]
    return value if isinstance(value, bool | float | int | str) else type(value)


def _origin(value: Any, inputs: list[Any], output: Any) -> str:
    """Return where an input of a block comes from, as a word.

    The word is "output" for the output of the previous block, "input" for an input of the previous
    block, "elsewhere" for another tensor, and "no tensor" for other objects. `inputs` and `output`
    belong to the previous block.
    """
    if not isinstance(value, Tensor):
        return "no tensor"
    if _contains(_leaves(output), value):
        return "output"
    return "input" if _contains(inputs, value) else "elsewhere"


def _contains(values: Iterable[Any], tensor: Tensor) -> bool:
    """Return whether one of the values is this tensor itself, not only an equal tensor."""
    return any(value is tensor for value in values)
