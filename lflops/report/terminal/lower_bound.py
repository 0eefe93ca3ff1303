"""How short a step can be on a chip, on a terminal."""

from rich.console import Group
from rich.text import Text

from lflops import units
from lflops.analyze.speed.lower_bound import LowerBound
from lflops.report.terminal.text import margin, text

__all__ = ["render_bounds"]

LISTED = 10


def render_bounds(bounds: LowerBound) -> Group:
    """The whole, the phases, and the modules right below the root that take longest."""
    table = margin()
    said = f"{units.duration(bounds.seconds)}: a bound, every operator at the peak or at the bandwidth of {bounds.hardware}"
    table.add_row("at least", text(said))
    for phase, seconds in bounds.by_phase.items():
        table.add_row("", _line(seconds, bounds, phase))
    below = sorted(((seconds, row) for row, seconds in bounds.by_module.items() if row and "." not in row), reverse=True)
    for place, (seconds, row) in enumerate(below[:LISTED]):
        table.add_row("" if place else "by module", _line(seconds, bounds, row))
    if bounds.unknown:
        table.add_row("no peak for", text(", ".join(bounds.unknown), "yellow"))
    return Group(table)


def _line(seconds: float, bounds: LowerBound, of: str) -> Text:
    share = seconds / bounds.seconds if bounds.seconds else None
    return text(f"{units.duration(seconds):>12}  {units.percent(share):>6}  {of}")
