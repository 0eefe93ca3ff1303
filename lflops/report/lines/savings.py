"""What would lower a step's peak of memory, in words."""

from collections.abc import Iterator

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.memory.peak import Saving
from lflops.analyze.memory.peak import savings as savings_of
from lflops.report.lines.text import plain


def savings(analysis: Analysis) -> Iterator[tuple[str, int, str]]:
    """List what to do, the bytes that it saves at the most, and its cost."""
    for each in savings_of(analysis.profile.memory, analysis.peak_moment, analysis.checkpointed, analysis.patterns):
        yield _what(each), each.bytes, _cost(each, analysis)


def _what(saving: Saving) -> str:
    if saving.kind == "gradients":
        return "free the gradients before forward: optimizer.zero_grad(set_to_none=True) right after the step"
    if saving.kind == "fused_optimizer":
        return "update in place: an optimizer with fused=True makes no temporary tensors"
    if saving.kind == "chunked_loss":
        return f"logits and loss hold {units.size(saving.bytes)}: use a loss that computes them for a chunk of the tokens at a time"
    return f"checkpoint {plain(saving.module)}{f' ×{saving.modules}' if saving.modules > 1 else ''}"


def _cost(saving: Saving, analysis: Analysis) -> str:
    total = sum(counts.macs for counts in analysis.totals.values())
    if not saving.macs or not total:
        return ""
    return f"{units.count(saving.macs)} MACs more, {units.percent(saving.macs / total)} of the step's"
