"""The page's table of modules."""

from operator import attrgetter

from lflops.analyze.analysis import Analysis
from lflops.profile.model import PHASES
from lflops.report.payload.columns import Columns, column

__all__ = ["modules"]

IN_MODULES = ("forward", "backward", "recompute")
_OF_MODULES = ("kind", "calls", "compiled", "owner", "parameters", "own_parameters", "trainable_parameters", "peak_bytes")
_COUNTED = tuple(prefix + field for field in ("macs", "flops", "bytes_moved", "comm_bytes") for prefix in ("", "own_"))
_TIMED = ("seconds", "own_seconds", "device_seconds")


def modules(analysis: Analysis) -> Columns:
    """Columns of each module, then of its work in each phase, inclusive and `own_`. The names are always a list.

    `identical` is a number: modules that have the same are identical in all counts, all the way down.
    """
    spreads: dict[str, float] = {}
    for stat in analysis.profile.rank_stats:
        if stat.median and not stat.waits and stat.phase in IN_MODULES:
            spreads[stat.module] = max(stat.spread / stat.median, spreads.get(stat.module, 0.0))
    profile = analysis.profile
    rows, counted = profile.modules.values(), profile.is_counted
    columns: Columns = {"name": list(profile.modules)}
    columns |= {field: column(getattr(row, field) for row in rows) for field in _OF_MODULES}
    columns["rank_spread"] = column(spreads.get(name) for name in profile.modules)
    columns["identical"] = column(analysis.identical_subtrees[name] for name in profile.modules)
    for phase in PHASES:
        works = [row.work(phase) for row in rows]
        for field in _COUNTED:
            columns[f"{phase}.{field}"] = column(map(attrgetter(field), works)) if counted else None
        for own in ("", "own_"):
            pairs = map(attrgetter(f"{own}macs", f"{own}executed_macs"), works)
            columns[f"{phase}.{own}masked_flops"] = column([2 * (macs - executed) for macs, executed in pairs]) if counted else None
        for field in _TIMED:
            spreads_of_phase = map(attrgetter(field), works)
            columns[f"{phase}.{field}"] = column([None if each is None else each.median for each in spreads_of_phase])
    return columns
