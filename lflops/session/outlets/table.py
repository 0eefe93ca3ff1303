"""The modules of a window as a table, and its totals: for loggers that show such."""

from typing import Any

from lflops.analyze.analysis import Analysis
from lflops.profile.model import PHASES, Profile
from lflops.profile.series import sum_known

__all__ = ["COLUMNS", "module_table", "totals"]

COLUMNS = ("module", "class", "calls", "parameters", "forward MACs", "backward MACs", "forward ms", "backward ms", "total ms")


def module_table(analysis: Analysis) -> list[list[Any]]:
    """A row for each module, those below it included; `None` for what is unknown."""
    rows = []
    for name, module in analysis.profile.modules.items():
        works = [module.work(phase) for phase in ("forward", "backward", "recompute")]
        milliseconds = [None if work.seconds is None else work.seconds.median * 1e3 for work in works]
        macs = [work.macs for work in works[:2]]
        total = None if milliseconds[0] is None else sum_known(each for each in milliseconds if each is not None)
        rows.append([name or "(model)", module.kind, module.calls, module.parameters, *macs, *milliseconds[:2], total])
    return rows


def totals(profile: Profile) -> dict[str, float]:
    """What a step is, for a table of runs. Nothing where nothing was counted."""
    if not profile.is_counted:
        return {}
    root = profile.modules[""]
    macs = {phase: root.work(phase).macs for phase in PHASES}
    return {"parameters": root.parameters} | {f"{phase}_gmacs": count / 1e9 for phase, count in macs.items() if count}
