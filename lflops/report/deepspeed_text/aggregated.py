"""The second part of the text: at each depth, the classes of modules that have the most parameters, MACs and time."""

from collections.abc import Callable, Mapping

from lflops.analyze.modules.by_depth import by_depth, most
from lflops.profile.model import Profile
from lflops.report.deepspeed_text import units as short_units
from lflops.report.terminal.text import plain
from lflops.units import UNKNOWN

__all__ = ["aggregated"]


def aggregated(profile: Profile, *, module_depth: int = -1, top_modules: int = 1) -> str:
    """The text, without a heading.

    Args:
        profile: What to show.
        module_depth: The last depth; 0 is the root alone, -1 and whatever is too deep are the innermost.
        top_modules: How many classes to name for each figure.

    Raises:
        ValueError: There is no such depth.
    """
    lines = [f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:"]
    for depth, kinds in enumerate(by_depth(profile, module_depth)):
        lines += [
            f"depth {depth}:",
            f"    params      - {_named(most(kinds, 'parameters', top_modules), short_units.params)}",
            f"    MACs        - {_named(most(kinds, 'macs', top_modules), short_units.macs)}",
            f"    fwd latency - {_named(most(kinds, 'seconds', top_modules), short_units.duration)}",
        ]
    return "\n".join(lines)


def _named(figures: Mapping[str, float], unit: Callable[[float], str]) -> str:
    return str({plain(kind): unit(value) for kind, value in figures.items()}) if figures else UNKNOWN
