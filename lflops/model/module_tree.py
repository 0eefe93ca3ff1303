"""Find the names of a model's modules, the owners of its parameters, and its repeated blocks.

Modules in a compiled graph are more difficult to find. There, the name of a module is the Python
expression with which the compiled function reaches the module, such as `L['self'].blocks.0`. A
graph can be compiled once and run for each of twelve blocks, so the same expression can refer to
different modules. The running module determines the module to which the expression refers.
"""

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lflops.profile.module_names import ancestry, name_below
from lflops.torch_private.dispatch_modes import without_modes
from lflops.torch_private.distributed import flat_parts
from lflops.torch_private.modules import child_modules, is_compiled, packed_parameters, unwrapped
from lflops.torch_private.tensors import local_part

TRANSPARENT = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attribute names under which torch's wrappers store the module that they wrap.

lflops leaves them out of the names of modules, so that a wrapped module keeps its name.
"""


class ModuleTree:
    """A model's modules, keyed by name.

    A module that is used in several places has several names. When it is called, its name is its
    path below the module that calls it. If the caller does not contain it, its name is the first
    name that a walk from the root finds. Modules are compared by identity, because the class of a
    module may define equality.

    Attributes:
        modules: The modules, keyed by name.
        compiled: The names of compiled modules.
        wrappers: Modules that wrap another module, keyed by `id()`.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.compiled: set[str] = set()
        self.wrappers: dict[int, nn.Module] = {}
        self._first: dict[int, str] = {}
        self._fqns: dict[tuple[str, int], str] = {}
        self._owners: dict[int, tuple[nn.Parameter, str]] = {}
        for name, module in roots.items():
            self._walk(name, module)

    def __contains__(self, module: nn.Module) -> bool:
        """Return whether the module is in the tree.

        The wrapper that `torch.compile(module)` creates is not a part of the model. If the wrapped
        module is in the tree, the wrapper is added under the name of this module.
        """
        if id(module) in self._first:
            return True
        if not is_compiled(module):
            return False
        name = self._first.get(id(unwrapped(module)))
        if name is None:
            return False
        self._first[id(module)] = name
        self.compiled.add(name)
        self.wrappers[id(module)] = module
        return True

    def name_of(self, module: nn.Module, caller: str) -> str:
        """Return the name of a module for a call in which the module named `caller` calls it."""
        key = (caller, id(module))
        fqn = self._fqns.get(key)
        if fqn is None:
            fqn = self._find(module, caller)
            self._fqns[key] = fqn
        return fqn

    def first_name(self, module: nn.Module) -> str:
        """Return the name under which a walk from the root first finds a module."""
        return self._first[id(module)]

    def nearest(self, fqn: str) -> str:
        """Return the name of the innermost module that contains `fqn`.

        If `fqn` is the name of a module, this is `fqn` itself. `fqn` may also be the name of a
        scope, which the user opened with `lflops.scope` inside a module.
        """
        while fqn and fqn not in self.modules:
            fqn = fqn.rpartition(".")[0]
        return fqn

    def owner(self, parameter: Tensor | None) -> str:
        """Return the name of the module to which a parameter is attributed.

        If several modules share the parameter, this is the first of them. If no module has the
        parameter, it is attributed to the root.
        """
        found = self._owners.get(id(parameter))
        return "" if found is None else found[1]

    def parameters(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Yield every parameter once, with the name of the module to which it is attributed."""
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
            for key, child in reversed(list(child_modules(module))):
                if child is not None:
                    waiting.append((_below(name, key), child))

    def _find(self, module: nn.Module, caller: str) -> str:
        """Search a module below `caller`, and return its name there.

        If `caller` does not contain the module, its first name is returned.
        """
        start = self.modules.get(caller)
        first = self._first[id(module)]
        if start is None:
            return first
        if start is module:
            return caller
        parent_name, _, key = first.rpartition(".")
        if parent_name == caller and dict(child_modules(start)).get(key) is module:
            return first
        seen = {id(start)}
        waiting = deque([(caller, start)])
        while waiting:
            name, parent = waiting.popleft()
            for key, child in child_modules(parent):
                if child is None or id(child) in seen:
                    continue
                fqn = _below(name, key)
                if child is module:
                    # A shared module gets another name when it runs under that name.
                    self.modules.setdefault(fqn, module)
                    return fqn
                seen.add(id(child))
                waiting.append((fqn, child))
        return first


def _below(name: str, key: str) -> str:
    if key in TRANSPARENT:
        return name
    return name_below(name, key)


class ParameterSize(NamedTuple):
    """The number of elements of one of the model's parameters.

    Attributes:
        fqn: Name of the module to which the parameter is attributed.
        stored_in: The tensor that stores the elements. This is the parameter itself, or the flat
            parameter into which a wrapper such as FSDP has merged several parameters.
        elements: Number of elements on all ranks together.
        local_elements: Number of elements on this rank.
    """

    fqn: str
    stored_in: Tensor
    elements: int
    local_elements: int


def parameter_sizes(tree: ModuleTree) -> Iterator[ParameterSize]:
    """Yield the size of every parameter once. Lazy parameters without a shape are left out."""
    flattened = set()
    for wrapper in tree.wrappers.values():
        for part in flat_parts(wrapper):
            flattened.add(id(part.stored_in))
            fqn = tree.first_name(part.module)
            yield ParameterSize(fqn, part.stored_in, part.elements, part.local_elements)
    for parameter, fqn in tree.parameters():
        if id(parameter) not in flattened and not isinstance(parameter, UninitializedParameter):
            yield ParameterSize(fqn, parameter, *_sizes(parameter))
    # If lflops is counting operators, it must not count the operators that unpack parameters.
    with without_modes():
        for fqn, module in tree.modules.items():
            if fqn != tree.first_name(module):
                continue
            for packed in packed_parameters(module):
                yield ParameterSize(fqn, packed, packed.numel(), packed.numel())


def _sizes(parameter: Any) -> tuple[int, int]:
    """Return the number of elements of a parameter, on all ranks together and on this rank.

    DeepSpeed replaces a sharded parameter with an empty tensor. The attributes of this tensor have
    the size of the parameter and its shard.
    """
    elements = getattr(parameter, "ds_numel", None)
    if elements is None:
        return parameter.numel(), local_part(parameter).numel()
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return elements, parameter.numel()
    return elements, min(shard.numel(), elements)


def blocks_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model, keyed by name: the outermost numbered modules with parameters.

    A module is numbered if its key in its container is a number, such as `0` for `layers.0`.
    """
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_numbered = name.rpartition(".")[2].isdecimal()
        is_in_block = any(name.startswith(f"{block}.") for block in blocks)
        if is_numbered and not is_in_block and next(module.parameters(), None) is not None:
            blocks[name] = module
    return blocks


_ROOT = re.compile(r"^[LG]\['(\w+)'\]")
_ITEM = re.compile(r"\.?(?:_modules)?\[['\"]?([^\]'\"]+)['\"]?\]")
_CLOSURE = ".cell_contents"
_HELD = "__closure__"


def names_in_tree(
    modules: Sequence[tuple[str, str]], running: str, tree: ModuleTree, owners: Collection[str] = ()
) -> list[str | None]:
    """Return the name in the tree for each module of a compiled graph.

    A name is `None` if no module in the tree, or more than one, can be the module of the graph. The
    compiled function is assumed to belong to the running module if this module contains all modules
    of the graph. Otherwise, it is assumed to belong to the only module below the running module
    that contains them.

    Args:
        modules: For each module of the graph, its name there (a Python expression) and the name of
            its class.
        running: The name of the running module.
        tree: The model's modules.
        owners: The names of the modules that own the parameters passed to the graph. They help to
            choose if several modules match.
    """
    by_root: dict[str, list[_Reference]] = {}
    for number, (name, class_name) in enumerate(modules):
        root, path = _path(name)
        by_root.setdefault(root, []).append(_Reference(number, path, class_name))
    fqns: list[str | None] = [None] * len(modules)
    for root, references in by_root.items():
        # A variable of a closure may hold any module. A variable of a compiled function may hold a
        # wrapper of the running module.
        base = _base(references, running, tree, owners, exact=_HELD in root)
        if base is None:
            continue
        for reference in references:
            fqn = base
            module = _module_below(tree.modules[base], reference.path)
            if reference.path and module is not None and module in tree:
                fqn = tree.name_of(module, base)
            fqns[reference.number] = fqn
    return fqns


class _Reference(NamedTuple):
    """A module of a compiled graph. Its name in the graph begins with a variable.

    Attributes:
        number: Index of the module in the graph.
        path: Path of the module below the variable, such as `blocks.0` in `L['self'].blocks.0`.
        class_name: Name of the module's class.
    """

    number: int
    path: str
    class_name: str


def _base(
    references: Sequence[_Reference],
    running: str,
    tree: ModuleTree,
    owners: Collection[str],
    *,
    exact: bool,
) -> str | None:
    """Return the name of the module to which a variable of a compiled graph refers.

    Returns `None` if no module matches, or more than one. `references` are the modules of the graph
    whose names begin with this variable.
    """
    running = tree.nearest(running)
    if _has_all(running, references, tree, exact=exact):
        return running
    prefix = f"{running}." if running else ""
    candidates = []
    for fqn in tree.modules:
        is_below = fqn.startswith(prefix) and fqn != running
        if is_below and _has_all(fqn, references, tree, exact=exact):
            candidates.append(fqn)
    if len(candidates) > 1:
        for owner in owners:
            candidates = [fqn for fqn in candidates if fqn in ancestry(owner)]
    if len(candidates) != 1:
        return None
    return candidates[0]


def _has_all(fqn: str, references: Sequence[_Reference], tree: ModuleTree, *, exact: bool) -> bool:
    """Return whether a module contains all referenced modules at their paths.

    Their classes must match as well. With `exact`, this includes the class of the module itself.
    """
    for reference in references:
        module = _module_below(tree.modules.get(fqn), reference.path)
        if module is None:
            return False
        is_checked = bool(reference.path) or exact
        if is_checked and type(module).__name__ != reference.class_name:
            return False
    return True


def _module_below(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in filter(None, path.split(".")):
        child = getattr(module, name, None)
        module = None
        if isinstance(child, nn.Module):
            module = child
    return module


def _path(name: str) -> tuple[str, str]:
    """Split a name into the variable at its start and the path below the variable.

    `L['self'].blocks[0]` becomes `self` and `blocks.0`. The contents of a closure count as a
    variable as well: `L['args'][1].__closure__[0].cell_contents.blocks`.
    """
    variable, _, path = name.rpartition(_CLOSURE)
    if not variable:
        root = _ROOT.match(name)
        if root is not None:
            variable = root.group(1)
            path = path[root.end() :]
    path = _ITEM.sub(r".\1", path)
    parts = [part for part in path.split(".") if part and part != "_modules"]
    return variable, ".".join(parts)
