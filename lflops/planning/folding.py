"""A model with fewer of its equal blocks, so that trials of a deep model are short."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace
from torch import nn

from lflops.planning.block_chain import Chain

KEPT = 6  # blocks of a run in a folded model: in the middle there are two with neighbours like themselves
WORTHWHILE = 10  # shorter runs are not folded


class Fold(NamedTuple):
    """A run of equal blocks in a container, and how many are left in the folded model."""

    container: str
    first: int
    length: int
    kept: int = KEPT

    def block(self, number: int) -> str:
        """The name of the container's block with this number."""
        return f"{self.container}.{number}" if self.container else str(number)

    @property
    def removed(self) -> range:
        """The numbers of the blocks that are left out: the middle of the run."""
        begin = self.first + self.kept // 2
        return range(begin, begin + self.length - self.kept)


def folds_of(blocks: Mapping[str, nn.Module]) -> list[Fold]:
    """The runs of equal blocks that are worth folding.

    Blocks are equal that have the same classes, parameters and settings. A setting that counts with the block is its number.
    """
    runs: list[list[str]] = []
    for name in blocks:
        container, _, number = name.rpartition(".")
        before = Fold(container, 0, 0).block(int(number) - 1)
        if runs and runs[-1][-1] == before and _are_equal(blocks[before], blocks[name]):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [Fold(run[0].rpartition(".")[0], int(run[0].rpartition(".")[2]), len(run)) for run in runs if len(run) >= WORTHWHILE]


@contextlib.contextmanager
def folded(model: nn.Module, folds: Sequence[Fold]) -> Iterator[None]:
    """A context in which the model lacks what is removed; the others of a container are numbered anew."""
    removed = _removed(folds)
    containers = {name: model.get_submodule(name) for name in removed}
    before = {name: dict(container.named_children()) for name, container in containers.items()}
    try:
        for name, container in containers.items():
            left = [module for number, module in before[name].items() if int(number) not in removed[name]]
            _refill(container, {str(number): module for number, module in enumerate(left)})
        yield
    finally:
        for name, container in containers.items():
            _refill(container, before[name])


def full_names(folds: Sequence[Fold], blocks: Sequence[str]) -> dict[str, str]:
    """From the name of each block in the folded model to its name in the whole one, which has `blocks`."""
    removed = _removed(folds)
    names = {}
    for block in blocks:
        container, _, number = block.rpartition(".")
        gone = removed.get(container, set())
        if int(number) not in gone:
            shift = sum(each < int(number) for each in gone)
            names[f"{container}.{int(number) - shift}" if container else str(int(number) - shift)] = block
    return names


def stretched(chain: Chain, after: int, copies: int, *, base: int, fixed: int) -> Chain | None:
    """The chain with copies of block `after` behind it; `None` if it and the next one did not run the same operators.

    Each copy adds `base` to what is alive before the first block, and `fixed` to the most that is alive outside of the blocks.
    """
    if chain.kinds[after] != chain.kinds[after + 1]:
        return None
    each = chain.offsets[after] - chain.offsets[after + 1]  # gradients of one block
    between = [chain.offsets[after + 1] + each * (copies - copy) for copy in range(copies)]
    return replace(
        chain,
        kinds=(*chain.kinds[: after + 1], *[chain.kinds[after]] * copies, *chain.kinds[after + 1 :]),
        base=chain.base + base * copies,
        fixed=chain.fixed + fixed * copies,
        offsets=(*(offset + each * copies for offset in chain.offsets[: after + 1]), *between, *chain.offsets[after + 1 :]),
    )


def _removed(folds: Sequence[Fold]) -> dict[str, set[int]]:
    removed: dict[str, set[int]] = {}
    for fold in folds:
        removed.setdefault(fold.container, set()).update(fold.removed)
    return removed


def _refill(container: nn.Module, children: Mapping[str, nn.Module]) -> None:
    for name in [name for name, _ in container.named_children()]:
        delattr(container, name)
    for name, module in children.items():
        container.add_module(name, module)


def _are_equal(block: nn.Module, following: nn.Module) -> bool:
    pairs = list(zip(block.named_modules(), following.named_modules(), strict=False))
    if len(pairs) != sum(1 for _ in block.modules()) or len(pairs) != sum(1 for _ in following.modules()):
        return False
    return all(name == its and _make(module) == _make(other) and _settings_agree(module, other) for (name, module), (its, other) in pairs)


def _make(module: nn.Module) -> tuple[Any, ...]:
    held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return type(module), module.training, tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in held)


def _settings_agree(module: nn.Module, following: nn.Module) -> bool:
    """Whether plain attributes are equal, but for numbers that count with the block."""
    own, other = (
        {name: value for name, value in vars(each).items() if value is None or isinstance(value, bool | int | float | str | tuple)}
        for each in (module, following)
    )
    counting = {
        name: value for name, value in other.items() if type(value) is int and type(before := own.get(name)) is int and value == before + 1
    }
    return own.keys() == other.keys() and own | counting == other
