"""What a profile is asked for: one figure of its modules and operators, in one phase or in all of them."""

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

from lflops import units
from lflops.profile.records import PHASES, Phase

if TYPE_CHECKING:
    from lflops.profile.model import Profile

__all__ = ["Asked", "Metric", "ancestry", "by_module", "by_module_and_operator", "by_operator", "pattern", "summary", "total", "uncalled"]

Asked = Phase | Literal["all"] | None
"""A phase; `"all"` and `None` add the phases up."""

_HOLDS_WEIGHTS = "NonDynamicallyQuantizableLinear"
"""What torch's MultiheadAttention keeps its `out_proj` in, to compute with it by a function."""

Metric = Literal["macs", "executed_macs", "flops", "bytes_moved"]
"""A field of `Work`."""


def by_module(profile: "Profile", phase: Asked, metric: Metric) -> dict[str, int]:
    """Of each module and all below it."""
    phases = _checked(phase, metric)
    return {name: sum(getattr(module.work(each), metric) for each in phases) for name, module in profile.modules.items()}


def by_operator(profile: "Profile", phase: Asked, module: str, metric: Metric) -> dict[str, int]:
    """Of each operator in a module and below it, the most first; operators with none are left out."""
    _check_module(profile, module)
    found: dict[str, int] = {}
    for name, operator, figure in _figures(profile, phase, metric):
        if module in ancestry(name):
            found[operator] = found.get(operator, 0) + figure
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def by_module_and_operator(profile: "Profile", phase: Asked, metric: Metric) -> dict[str, dict[str, int]]:
    """Of each operator in each module and below it."""
    table: dict[str, dict[str, int]] = {name: {} for name in profile.modules}
    for name, operator, figure in _figures(profile, phase, metric):
        for above in ancestry(name):
            table[above][operator] = table[above].get(operator, 0) + figure
    return table


def total(profile: "Profile", module: str, phase: Asked, metric: Metric) -> int:
    """Of one module and all below it."""
    _check_module(profile, module)
    return sum(getattr(profile.modules[module].work(each), metric) for each in _checked(phase, metric))


def summary(profile: "Profile") -> str:
    """One line for a debugger or a notebook."""
    root = profile.modules.get("")
    macs = ", ".join(f"{units.count(root.work(phase).macs)} MACs {phase}" for phase in PHASES[:2]) if root else ""
    missing = len({entry.operator for entry in profile.uncounted})
    parts = [root.kind if root else "", macs, f"modules: {len(profile.modules)}", f"operators not counted: {missing}"]
    return f"<Profile {', '.join(filter(None, parts))}>"


def uncalled(profile: "Profile") -> tuple[str, ...]:
    """The modules that were never called, in the model's order."""
    called = {above for name, module in profile.modules.items() if module.calls for above in ancestry(name)}
    scripts = {note.subject for note in profile.notes if note.code == "scripted"}
    return tuple(
        name
        for name, module in profile.modules.items()
        if name not in called and module.kind != _HOLDS_WEIGHTS and scripts.isdisjoint(ancestry(name)[1:])
    )


def pattern(name: str) -> str:
    """A module's name without its numbers, as `layers.*.mlp`: those that differ in them alone have the same."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def ancestry(name: str) -> tuple[str, ...]:
    """A row's name and those of all the rows above it, itself first, the root last."""
    names = [name]
    while name:
        name = name.rpartition(".")[0]
        names.append(name)
    return tuple(names)


def _figures(profile: "Profile", phase: Asked, metric: Metric) -> Iterator[tuple[str, str, int]]:
    """Module, operator and figure of each cell that has one."""
    phases = _checked(phase, metric)
    return ((cell.module, cell.operator, getattr(cell, metric)) for cell in profile.cells if cell.phase in phases and getattr(cell, metric))


def _checked(phase: Asked, metric: Metric) -> tuple[Phase, ...]:
    """The phases that are meant."""
    if metric not in get_args(Metric):
        raise ValueError(f"metric={metric!r}: give one of {', '.join(get_args(Metric))}")
    if phase is None or phase == "all":
        return PHASES
    if phase not in PHASES:
        raise ValueError(f"phase={phase!r}: give one of {', '.join(PHASES)}, all")
    return (phase,)


def _check_module(profile: "Profile", module: str) -> None:
    if module not in profile.modules:
        near = difflib.get_close_matches(str(module), profile.modules, 1)
        raise ValueError(f"module={module!r}: no such module" + (f", the nearest is {near[0]!r}" if near else ""))
