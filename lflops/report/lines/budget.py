"""The budget of a step as sentences: its largest parts, and what usually shortens them."""

from collections.abc import Iterator, Mapping

from lflops import units
from lflops.analyze.speed.budget import IN_MODULES, Budget
from lflops.profile.model import PHASES, ModuleProfile, Profile
from lflops.profile.notes import are_times_far_off
from lflops.report.lines.text import plain

__all__ = ["advice", "largest", "sorted_parts", "what_it_is"]

_LARGEST = 3
_KINDS, _COVERED = 3, 2 / 3

_ADVICE: Mapping[str, tuple[str, str]] = {
    "useful": ("useful matrix multiplication", "Use a lower precision to shorten it"),
    "recompute": ("recomputed matrix multiplication", "Checkpoint fewer layers, if memory allows it"),
    "memory_bound": ("memory-bound work", "Fuse it, for example with torch.compile"),
    "below_roof": ("below the roofline", "Use larger batches, or fewer and larger kernels (torch.compile)"),
    "data": ("waiting for data", "Use more DataLoader workers, persistent_workers=True, or cheaper transforms"),
    "transfer": ("copying batches to the device", "Use pin_memory=True, or smaller dtypes in the batch"),
    "clip": ("gradient clipping", "Clip with foreach=True, or less often"),
    "optimizer": ("optimizer work", "Use fused=True or foreach=True, or larger batches"),
    "other": ("outside all phases: logging, callbacks, metrics, zeroing gradients", "Log less often, and keep .item() out of the step"),
    "communication": ("communication that overlaps with no computation", "Use larger buckets, gradient accumulation, or a faster link"),
    "copy": ("copies that overlap with nothing", "Use pin_memory=True and non_blocking=True"),
    "idle": (
        "idle time of the device",
        "Use fewer and larger kernels (torch.compile), no .item() in the step, and more DataLoader workers",
    ),
    "forward": ("forward outside the counted modules", "Count ignored modules, and name the rest with lflops.scope"),
    "backward": ("backward outside the counted modules", "Count ignored modules, and name the rest with lflops.scope"),
}
"""Of each part: what it is, as the rest of "20 % of the step is", and what usually shortens it."""


def largest(profile: Profile, budget: Budget) -> Iterator[str]:
    """The three largest parts, each with what usually shortens it."""
    for name, share in sorted_parts(budget)[:_LARGEST]:
        yield f"{units.percent(share)} {_sentence(profile, budget, name)}"


def sorted_parts(budget: Budget) -> list[tuple[str, float]]:
    """All parts with their shares, the largest first."""
    return sorted(budget.parts.items(), key=lambda part: -part[1])


def _sentence(profile: Profile, budget: Budget, name: str) -> str:
    what = what_it_is(profile, budget, name)
    if name in IN_MODULES and are_times_far_off(profile.notes):
        return f"{what}, roughly: the times of modules are unreliable here"
    kinds = _kinds(profile, budget, name) if name in IN_MODULES else {}
    named = [f"{len(modules)} {kind}" if len(modules) > 1 else kind for kind, modules in kinds.items()]
    where = f" ({plain(', '.join(named))})" if named else ""
    if name == "idle" and budget.idle:
        most = max(budget.idle, key=lambda phase: budget.idle[phase])
        where = f", mostly while the host runs {'no module' if most == 'other' else plain(most)}"
    unseen = [each.replace("_", "-") for each in budget.inside_rest] if name == "below_roof" else []
    within = f", including {' or '.join(unseen)} time that was not measured separately" if unseen else ""
    return f"{what}{where}{within}. {advice(name)}."


def what_it_is(profile: Profile, budget: Budget | None, name: str) -> str:
    """What a part of the step is: "memory-bound work"."""
    kinds = _kinds(profile, budget, name) if budget is not None and name == "memory_bound" else {}
    if kinds and not any(_multiplies(profile.modules[module]) for of_kind in kinds.values() for module in of_kind):
        return "memory-bound pointwise work"
    return _ADVICE[name][0] if name in _ADVICE else plain(name)


def advice(name: str) -> str:
    """What usually shortens a part."""
    return _ADVICE[name][1] if name in _ADVICE else "Use lflops.scope to see what is in it"


def _kinds(profile: Profile, budget: Budget, part: str) -> dict[str, list[str]]:
    """The modules of the kinds that most of a part is in, the most first."""
    shares: dict[str, float] = {}
    modules: dict[str, list[str]] = {}
    for module, parts in budget.modules.items():
        if parts[part]:
            kind = profile.modules[module].kind or module or "the root"
            shares[kind] = shares.get(kind, 0.0) + parts[part]
            modules.setdefault(kind, []).append(module)
    kinds = sorted(shares, key=lambda kind: -shares[kind])
    before = [sum(shares[each] for each in kinds[:index]) for index in range(len(kinds))]
    return {kind: modules[kind] for kind, covered in zip(kinds[:_KINDS], before, strict=False) if covered < _COVERED * sum(shares.values())}


def _multiplies(module: ModuleProfile) -> bool:
    return any(module.work(phase).own_macs for phase in PHASES)
