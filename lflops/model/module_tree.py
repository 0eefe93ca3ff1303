"""The names of a model's modules, which module owns each parameter, and which modules are blocks.

A model's repeated parts.

In a compiled graph a module has the name by which the compiled function reaches it, as
`L['self'].blocks.0`. Which row that is depends on the module that runs: a graph may be compiled
once and run for each of twelve blocks.
"""

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lflops.profile.module_names import ancestry
from lflops.torch_private.dispatch_modes import without_modes
from lflops.torch_private.distributed import flat_parts
from lflops.torch_private.modules import child_modules, is_compiled, packed_parameters, unwrapped
from lflops.torch_private.tensors import local_part

TRANSPARENT = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names under which torch's wrappers register the wrapped module.

They are left out of a module's name.
"""


class ModuleTree:
    """A model's modules by row.

    A module's row is its name below the module that calls it. If the caller does not contain it, it
    is the first name that a walk from the root finds. Modules are compared by identity, because a
    user's class may define equality.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.compiled: set[str] = set()
        self.wrappers: dict[int, nn.Module] = {}
        self._first: dict[int, str] = {}
        self._rows: dict[tuple[str, int], str] = {}
        self._owners: dict[int, tuple[nn.Parameter, str]] = {}
        for name, module in roots.items():
            self._walk(name, module)

    def __contains__(self, module: nn.Module) -> bool:
        """Whether the module is in the tree.

        A compiled wrapper that no module holds has the row of what it wraps.
        """
        if (
            id(module) not in self._first
            and is_compiled(module)
            and (name := self._first.get(id(unwrapped(module)))) is not None
        ):
            self._first[id(module)] = name
            self.compiled.add(name)
            self.wrappers[id(module)] = module
        return id(module) in self._first

    def row(self, module: nn.Module, caller: str) -> str:
        """The row of a module of the tree when the module in row `caller` calls it."""
        key = (caller, id(module))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._find(module, caller)
        return row

    def first_row(self, module: nn.Module) -> str:
        """The row of a module by the first name that a walk from the root finds."""
        return self._first[id(module)]

    def nearest(self, row: str) -> str:
        """The nearest row at or above this one that is a module, and not a named scope."""
        while row and row not in self.modules:
            row = row.rpartition(".")[0]
        return row

    def owner(self, parameter: Tensor | None) -> str:
        """The row that counts a parameter: the first module that has it; the root if none has."""
        found = self._owners.get(id(parameter))
        return "" if found is None else found[1]

    def parameters(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Every parameter once, with the row that counts it."""
        yield from self._owners.values()

    def _walk(self, name: str, module: nn.Module) -> None:
        waiting = [(name, module)]
        while waiting:
            name, module = waiting.pop()
            if id(module) in self._first:
                continue
            self._first[id(module)] = name
            if is_compiled(module):
                self.compiled.add(name)
            if any(key in TRANSPARENT for key, _ in child_modules(module)):
                self.wrappers[id(module)] = module
            self.modules[name] = module
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), (parameter, name))
            children = [
                (_below(name, key), child)
                for key, child in child_modules(module)
                if child is not None
            ]
            waiting.extend(reversed(children))

    def _find(self, module: nn.Module, caller: str) -> str:
        start = self.modules.get(caller)
        first = self._first[id(module)]
        if start is None or start is module:
            return first if start is None else caller
        if (
            first.rpartition(".")[0] == caller
            and dict(child_modules(start)).get(first.rpartition(".")[2]) is module
        ):
            return first
        seen = {id(start)}
        waiting = deque([(caller, start)])
        while waiting:
            name, parent = waiting.popleft()
            for key, child in child_modules(parent):
                if child is None or id(child) in seen:
                    continue
                row = _below(name, key)
                if child is module:
                    self.modules.setdefault(
                        row,
                        module,
                        # a further name of a shared module, once it runs under that name
                    )
                    return row
                seen.add(id(child))
                waiting.append((row, child))
        return first


def _below(name: str, key: str) -> str:
    if key in TRANSPARENT:
        return name
    return f"{name}.{key}" if name else key


class ParameterSize(NamedTuple):
    """The size of one of the model's parameters."""

    # that counts it
    row: str
    # the parameter itself, or the flat parameter that has its elements
    stored_in: Tensor
    elements: int
    # on this rank
    local_elements: int


def parameter_sizes(tree: ModuleTree) -> Iterator[ParameterSize]:
    """The size of every parameter, once, except of those without a shape yet."""
    flat = [part for wrapper in tree.wrappers.values() for part in flat_parts(wrapper)]
    for part in flat:
        yield ParameterSize(
            tree.first_row(part.module), part.stored_in, part.elements, part.local_elements
        )
    flattened = {id(part.stored_in) for part in flat}
    for parameter, row in tree.parameters():
        if id(parameter) not in flattened and not isinstance(parameter, UninitializedParameter):
            yield ParameterSize(row, parameter, *_sizes(parameter))
    # or a count that runs meanwhile would include this
    with without_modes():
        for row, module in tree.modules.items():
            for packed in packed_parameters(module) if row == tree.first_row(module) else ():
                yield ParameterSize(row, packed, packed.numel(), packed.numel())


def _sizes(parameter: Any) -> tuple[int, int]:
    """All elements and the local ones.

    DeepSpeed leaves an empty tensor for a sharded parameter, with its size and its shard on it.
    """
    elements = getattr(parameter, "ds_numel", None)
    if elements is None:
        return parameter.numel(), local_part(parameter).numel()
    shard = getattr(parameter, "ds_tensor", None)
    return elements, parameter.numel() if shard is None else min(shard.numel(), elements)


def blocks_in(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with parameters that their container numbers, by name.

    None of them is within another.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if (
            any(name.startswith(f"{block}.") for block in found)
            or not name.rpartition(".")[2].isdecimal()
        ):
            continue
        if next(module.parameters(), None) is not None:
            found[name] = module
    return found


_ROOT = re.compile(r"^[LG]\['(\w+)'\]")
_ITEM = re.compile(r"\.?(?:_modules)?\[['\"]?([^\]'\"]+)['\"]?\]")
_CLOSURE, _HELD = ".cell_contents", "__closure__"


def rows_of(
    modules: Sequence[tuple[str, str]], running: str, tree: ModuleTree, owners: Collection[str] = ()
) -> list[str | None]:
    """The row of each module of a graph while a module runs.

    `None` where several could be meant, or none.
    """
    # The compiled function is the running module's, or that of one below it that is the only one to
    # have such modules. `modules` has names and classes, `owners` the rows whose parameters the
    # graph was given.
    named = [_path(name) for name, _ in modules]
    rows: list[str | None] = [None] * len(modules)
    for root in {root for root, _ in named}:
        wanted = [
            (number, path, modules[number][1])
            for number, (at, path) in enumerate(named)
            if at == root
        ]
        # What a closure holds may be any module, and the variable of a compiled function the
        # running one's wrapper.
        named_so = [(path, kind) for _, path, kind in wanted]
        base = _base(named_so, running, tree, owners, exact=_HELD in root)
        if base is not None:
            for number, path, _ in wanted:
                module = _module_below(tree.modules[base], path)
                rows[number] = (
                    tree.row(module, base)
                    if path and module is not None and module in tree
                    else base
                )
    return rows


def _base(
    wanted: Sequence[tuple[str, str]],
    running: str,
    tree: ModuleTree,
    owners: Collection[str],
    *,
    exact: bool,
) -> str | None:
    running = tree.nearest(running)
    if _has_all(running, wanted, tree, exact=exact):
        return running
    below = [
        row
        for row in tree.modules
        if row.startswith(f"{running}." if running else "") and row != running
    ]
    fitting = [row for row in below if _has_all(row, wanted, tree, exact=exact)]
    if len(fitting) > 1:
        fitting = [
            row for row in fitting if owners and all(row in ancestry(owner) for owner in owners)
        ]
    return fitting[0] if len(fitting) == 1 else None


def _has_all(row: str, wanted: Sequence[tuple[str, str]], tree: ModuleTree, *, exact: bool) -> bool:
    return all(
        (module := _module_below(tree.modules.get(row), path)) is not None
        and ((not path and not exact) or type(module).__name__ == kind)
        for path, kind in wanted
    )


def _module_below(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in filter(None, path.split(".")):
        child = getattr(module, name, None)
        module = child if isinstance(child, nn.Module) else None
    return module


def _path(name: str) -> tuple[str, str]:
    """The variable that a name begins with, and the path from it.

    `L['self'].blocks[0]` is `self` and `blocks.0`.
    """
    # A variable of a closure is one as well: `L['args'][1].__closure__[0].cell_contents.blocks`
    variable, _, path = name.rpartition(_CLOSURE)
    begins = None if variable else _ROOT.match(name)
    path = _ITEM.sub(r".\1", path[begins.end() if begins else 0 :])
    parts = [part for part in path.split(".") if part and part != "_modules"]
    return begins.group(1) if begins else variable, ".".join(parts)
