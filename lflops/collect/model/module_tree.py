"""The names of a model's modules, and who owns its parameters."""

from collections import deque
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from lflops.collect.torch_private.modules import child_modules, is_compiled

__all__ = ["ModuleTree"]

TRANSPARENT = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names under which wrappers of torch's own register what they wrap. They are no level of the model, so they are no part of a name."""


class ModuleTree:
    """Modules by the row that they are shown in.

    A module is named by the caller that registers it, at any depth below; a module that its caller does not register keeps the first name
    that a walk from the root finds. Modules are told apart by identity: a user's class may define equality.

    Args:
        roots: Name to module; `{"": model}` where there is one.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        """Walk the modules once; the model is referred to, never written to."""
        self.modules: dict[str, nn.Module] = {}
        self.compiled: set[str] = set()
        self.wrappers: dict[int, nn.Module] = {}
        self._first: dict[int, str] = {}
        self._rows: dict[tuple[str, int], str] = {}
        self._owners: dict[int, tuple[nn.Parameter, str]] = {}
        for name, module in roots.items():
            self._walk(name, module)

    def __contains__(self, module: nn.Module) -> bool:
        """Whether the module is one of the tree's."""
        return id(module) in self._first

    def row(self, module: nn.Module, caller: str) -> str:
        """The row of a module of the tree when the module in row `caller` calls it."""
        key = (caller, id(module))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._find(module, caller)
        return row

    def first_row(self, module: nn.Module) -> str:
        """The row of a module of the tree by its own first name."""
        return self._first[id(module)]

    def nearest(self, row: str) -> str:
        """The nearest row at or above this one that is a module's: a named part of a step is none."""
        while row and row not in self.modules:
            row = row.rpartition(".")[0]
        return row

    def owner(self, parameter: Tensor | None) -> str:
        """The row that counts a parameter: the first that holds it; the root for one that none does."""
        found = self._owners.get(id(parameter))
        return "" if found is None else found[1]

    def parameters(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Every parameter once, with the row that counts it."""
        yield from self._owners.values()

    def _walk(self, name: str, module: nn.Module) -> None:
        waiting = [(name, module)]
        while waiting:
            name, module = waiting.pop()
            if module in self:
                continue
            self._first[id(module)] = name
            if is_compiled(module):
                self.compiled.add(name)
            if any(key in TRANSPARENT for key, _ in child_modules(module)):
                self.wrappers[id(module)] = module
            self.modules[name] = module
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), (parameter, name))
            children = [(_below(name, key), child) for key, child in child_modules(module) if child is not None]
            waiting.extend(reversed(children))

    def _find(self, module: nn.Module, caller: str) -> str:
        start = self.modules.get(caller)
        first = self._first[id(module)]
        if start is None or start is module:
            return first if start is None else caller
        seen = {id(start)}
        waiting = deque([(caller, start)])
        while waiting:
            name, parent = waiting.popleft()
            for key, child in child_modules(parent):
                if child is None or id(child) in seen:
                    continue
                row = _below(name, key)
                if child is module:
                    self._add(row, child)
                    return row
                seen.add(id(child))
                waiting.append((row, child))
        return first

    def _add(self, row: str, module: nn.Module) -> None:
        """Keep a further name of a shared module, once something runs under it."""
        self.modules.setdefault(row, module)


def _below(name: str, key: str) -> str:
    if key in TRANSPARENT:
        return name
    return f"{name}.{key}" if name else key
