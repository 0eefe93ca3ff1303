"""The rows of the modules that have nodes in a compiled graph.

A module has the name by which the compiled function reaches it, as `L['self'].blocks.0`. Which row that is depends on the module that
runs: a graph may be compiled once and run for each of twelve blocks.
"""

import re
from collections.abc import Collection, Sequence

from torch import nn

from lflops.collect.model.module_tree import ModuleTree
from lflops.profile.module_names import ancestry

_ROOT = re.compile(r"^[LG]\['(\w+)'\]")
_ITEM = re.compile(r"\.?(?:_modules)?\[['\"]?([^\]'\"]+)['\"]?\]")
_CLOSURE, _HELD = ".cell_contents", "__closure__"


def rows_of(modules: Sequence[tuple[str, str]], running: str, tree: ModuleTree, owners: Collection[str] = ()) -> list[str | None]:
    """The row of each module of a graph while a module runs; `None` where several could be meant, or none.

    The compiled function is the running module's, or that of one below it that is the only one to have such modules. `modules` has names
    and classes, `owners` the rows whose parameters the graph was given.
    """
    named = [_path(name) for name, _ in modules]
    rows: list[str | None] = [None] * len(modules)
    for root in {root for root, _ in named}:
        wanted = [(number, path, modules[number][1]) for number, (at, path) in enumerate(named) if at == root]
        # What a closure holds may be any module, and the variable of a compiled function the running one's wrapper.
        named_so = [(path, kind) for _, path, kind in wanted]
        base = _base(named_so, running, tree, owners, exact=_HELD in root)
        if base is not None:
            for number, path, _ in wanted:
                module = _below(tree.modules[base], path)
                rows[number] = tree.row(module, base) if path and module is not None and module in tree else base
    return rows


def _base(wanted: Sequence[tuple[str, str]], running: str, tree: ModuleTree, owners: Collection[str], *, exact: bool) -> str | None:
    running = tree.nearest(running)
    if _has_all(running, wanted, tree, exact=exact):
        return running
    below = [row for row in tree.modules if row.startswith(f"{running}." if running else "") and row != running]
    fitting = [row for row in below if _has_all(row, wanted, tree, exact=exact)]
    if len(fitting) > 1:
        fitting = [row for row in fitting if owners and all(row in ancestry(owner) for owner in owners)]
    return fitting[0] if len(fitting) == 1 else None


def _has_all(row: str, wanted: Sequence[tuple[str, str]], tree: ModuleTree, *, exact: bool) -> bool:
    return all(
        (module := _below(tree.modules.get(row), path)) is not None and ((not path and not exact) or type(module).__name__ == kind)
        for path, kind in wanted
    )


def _below(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in filter(None, path.split(".")):
        child = getattr(module, name, None)
        module = child if isinstance(child, nn.Module) else None
    return module


def _path(name: str) -> tuple[str, str]:
    """The variable that a name begins with, and the path from it: `L['self'].blocks[0]` is `self` and `blocks.0`.

    A variable of a closure is one as well: `L['args'][1].__closure__[0].cell_contents.blocks`.
    """
    variable, _, path = name.rpartition(_CLOSURE)
    begins = None if variable else _ROOT.match(name)
    path = _ITEM.sub(r".\1", path[begins.end() if begins else 0 :])
    parts = [part for part in path.split(".") if part and part != "_modules"]
    return begins.group(1) if begins else variable, ".".join(parts)
