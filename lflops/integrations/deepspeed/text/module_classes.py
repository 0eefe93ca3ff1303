"""Find the module classes with the most parameters, MACs and time at each depth."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Literal

from msgspec import Struct

from lflops.integrations.deepspeed.text import units
from lflops.profile.module_names import plain
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.series import grouped
from lflops.units import UNKNOWN


class ModuleClass(Struct, frozen=True, kw_only=True):
    """All modules of one class at one depth, with their submodules.

    Attributes:
        name: Name of the class.
        modules: Number of modules.
        parameters: Number of parameters on this rank, summed over the modules.
        macs: MACs of forward, summed over the modules.
        seconds: Seconds of forward: the sum of the median times of those modules that ran. `None`
            if one of these times is unknown, or if no module ran.
    """

    name: str
    modules: int
    parameters: int
    macs: int
    seconds: float | None


def by_depth(profile: Profile, depth: int = -1) -> list[list[ModuleClass]]:
    """Return the module classes at each depth: at depth 0 (only the root), at depth 1, and so on.

    Classes are in the order in which they first occur in the model.

    Args:
        profile: The profile.
        depth: The largest depth; -1 for all depths.

    Raises:
        ValueError: The depth is below -1.
    """
    if depth < -1:
        raise ValueError(
            f"depth={depth!r}: pass -1 for all depths, 0 for only the model, or the number of "
            "levels below the model"
        )
    levels = grouped(profile.modules.values(), attrgetter("depth"))
    found = []
    for level in sorted(levels):
        if depth == -1 or level <= depth:
            by_class = grouped(levels[level], attrgetter("class_name"))
            found.append([_module_class(name, modules) for name, modules in by_class.items()])
    return found


def _module_class(name: str, modules: list[ModuleProfile]) -> ModuleClass:
    return ModuleClass(
        name=name,
        modules=len(modules),
        parameters=sum(module.local_parameters for module in modules),
        macs=sum(module.forward.macs for module in modules),
        seconds=_forward_seconds(modules),
    )


def _forward_seconds(modules: list[ModuleProfile]) -> float | None:
    """Return the total forward seconds of the modules that ran.

    Returns `None` if one of the times is unknown, or if no module ran.
    """
    total = None
    for module in modules:
        if not module.calls and not module.forward.calls:
            continue
        if module.forward.seconds is None:
            return None
        total = (total or 0.0) + module.forward.seconds.median
    return total


def most(
    classes: Iterable[ModuleClass], metric: Literal["parameters", "macs", "seconds"], number: int
) -> dict[str, float]:
    """Return the `number` classes with the largest values of a metric, largest first.

    The result maps the name of a class to its value. Classes with an unknown value are left out.
    """
    values: dict[str, float] = {}
    for each in classes:
        value = getattr(each, metric)
        if value is not None:
            values[each.name] = value
    largest = sorted(values, key=values.__getitem__, reverse=True)[:number]
    return {name: values[name] for name in largest}


def aggregated(profile: Profile, *, module_depth: int = -1, top_modules: int = 1) -> str:
    """Return the table of module classes as text.

    For each depth, it lists the classes with the most parameters, MACs and time.

    Args:
        profile: The profile.
        module_depth: The largest depth; -1 for all depths.
        top_modules: Number of classes that are listed for each depth and metric.
    """
    number = f"Top {top_modules} modules"
    lines = [f"{number} in terms of params, MACs or fwd latency at different model depths:"]
    for depth, classes in enumerate(by_depth(profile, module_depth)):
        parameters = most(classes, "parameters", top_modules)
        macs = most(classes, "macs", top_modules)
        seconds = most(classes, "seconds", top_modules)
        lines += [
            f"depth {depth}:",
            f"    params      - {_named(parameters, units.params)}",
            f"    MACs        - {_named(macs, units.macs)}",
            f"    fwd latency - {_named(seconds, units.duration)}",
        ]
    return "\n".join(lines)


def _named(values: Mapping[str, float], unit: Callable[[float], str]) -> str:
    if not values:
        return UNKNOWN
    return str({plain(name): unit(value) for name, value in values.items()})
