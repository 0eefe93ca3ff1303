"""What would lower the peak of memory, in sentences."""

from collections.abc import Iterator

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.memory.savings import Saving
from lflops.report.lines.text import plain

__all__ = ["savings"]


def savings(analysis: Analysis) -> Iterator[tuple[str, int, str]]:
    """What to do, the bytes that it saves at the most, and its cost."""
    for each in analysis.savings:
        yield _what(each), each.bytes, _cost(each, analysis)


def _what(saving: Saving) -> str:
    if saving.kind == "gradients":
        return "free the gradients before forward: optimizer.zero_grad(set_to_none=True) right after the step"
    if saving.kind == "fused_optimizer":
        return "update in place: an optimizer with fused=True makes no temporary tensors"
    return f"checkpoint {plain(saving.module)}{f' ×{saving.modules}' if saving.modules > 1 else ''}"


def _cost(saving: Saving, analysis: Analysis) -> str:
    total = sum(counts.macs for counts in analysis.totals.values())
    if not saving.macs or not total:
        return ""
    return f"{units.count(saving.macs)} MACs more, {units.percent(saving.macs / total)} of the step's"
