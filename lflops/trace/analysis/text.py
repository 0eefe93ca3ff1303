"""Format times, shares and operators of a trace."""

from lflops import units


def nanoseconds(value: int | None) -> str:
    """Format a time in nanoseconds, for example `34.89 ms`."""
    if value is None:
        return units.UNKNOWN
    if 0 < value < 1000:
        return f"{value} ns"
    return units.duration(value / 1e9)


def share(part: float, whole: float) -> str:
    """Format a part of a whole, for example `62.0 %`."""
    return units.percent(part / whole if whole else None)


def short_operator_name(name: str) -> str:
    """Return an operator's name without torch's namespace."""
    return name.removeprefix("aten::")
