"""The page's table of modules."""

from operator import attrgetter, sub

from lflops.analyze.analysis import Analysis
from lflops.profile.records import PHASES
from lflops.report.payload.columns import Columns, column

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
    columns |= {field: column(map(attrgetter(field), rows)) for field in _OF_MODULES}
    columns["rank_spread"] = column(spreads.get(name) for name in profile.modules)
    columns["identical"] = column(analysis.identical_subtrees[name] for name in profile.modules)
    for phase in PHASES:
        works, whole = list(map(attrgetter(phase), rows)), profile.modules[""].work(phase)
        for field in _COUNTED:
            has_any = getattr(whole, field.removeprefix("own_"))  # the root has all of it: without any, no module has to be looked at
            columns[f"{phase}.{field}"] = None if not counted else column(map(attrgetter(field), works)) if has_any else 0
        for own in ("", "own_"):
            masked = map(sub, map(attrgetter(f"{own}macs"), works), map(attrgetter(f"{own}executed_macs"), works))
            has_any = whole.macs != whole.executed_macs
            columns[f"{phase}.{own}masked_flops"] = None if not counted else column([2 * macs for macs in masked]) if has_any else 0
        for field in _TIMED:
            columns[f"{phase}.{field}"] = column([None if each is None else each.median for each in map(attrgetter(field), works)])
    return columns
