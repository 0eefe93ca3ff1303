"""The budget of a step as sentences: its largest parts, and what usually shortens them."""

from collections.abc import Iterator, Mapping

from lflops import units
from lflops.analyze.speed.budget import IN_MODULES, Budget
from lflops.profile.model import PHASES, ModuleProfile, Profile
from lflops.profile.notes import are_times_far_off
from lflops.report.lines.text import plain

__all__ = ["advice", "largest", "parts", "what_it_is"]

_LARGEST = 3
_KINDS, _COVERED = 3, 2 / 3

_ADVICE: Mapping[str, tuple[str, str]] = {
    "useful": ("is the model's products at the peak", "a lower precision, or fewer of them"),
    "recompute": ("is products that are computed again", "checkpoint fewer layers, where memory allows it"),
    "memory_bound": ("is memory-bound work", "fuse it, torch.compile does"),
    "below_roof": ("is below the roof", "larger batches, fewer and larger kernels, torch.compile"),
    "data": ("is the wait for data", "more DataLoader workers, persistent_workers, cheaper transforms"),
    "transfer": ("is the transfer of batches", "pin_memory=True, smaller dtypes in the batch"),
    "clip": ("is gradient clipping", "clip with foreach=True, or less often"),
    "optimizer": ("is the optimizer", "fused=True or foreach=True, or larger batches"),
    "other": ("is in no phase: logging, callbacks, metrics, zeroed gradients", "log less often, keep .item() out of the step"),
    "communication": ("is communication without computation at the same time", "larger buckets, accumulated gradients, a faster link"),
    "copy": ("is copies with nothing else running", "pin_memory=True and non_blocking=True"),
    "idle": ("finds the device idle", "fewer and larger kernels, torch.compile, no .item() in the step, more DataLoader workers"),
    "forward": ("is forward of what is left out", "ask for it to be counted"),
    "backward": ("is backward of what is left out", "ask for it to be counted"),
}


def largest(profile: Profile, budget: Budget) -> Iterator[str]:
    """The three largest parts, a sentence each with what usually helps."""
    for name, share in _sorted(budget)[:_LARGEST]:
        yield _sentence(profile, budget, name, share)


def parts(profile: Profile, budget: Budget) -> Iterator[tuple[str, float, str]]:
    """All parts, the largest first: name, share, and of the three largest the sentence."""
    for index, (name, share) in enumerate(_sorted(budget)):
        yield name.replace("_", " "), share, _sentence(profile, budget, name, share) if index < _LARGEST else ""


def _sorted(budget: Budget) -> list[tuple[str, float]]:
    return sorted(budget.parts.items(), key=lambda part: -part[1])


def _sentence(profile: Profile, budget: Budget, name: str, share: float) -> str:
    what, helps = what_it_is(profile, budget, name), advice(name)
    kinds = _kinds(profile, budget, name) if name in IN_MODULES else {}
    named = [f"{len(modules)} × {kind}" if len(modules) > 1 else kind for kind, modules in kinds.items()]
    where = f" in {plain(' + '.join(named))}" if named else ""
    if name == "idle" and budget.idle:
        most = max(budget.idle, key=lambda phase: budget.idle[phase])
        where = f", mostly with the host in {'no module' if most == 'other' else plain(most)}"
    unseen = [each.replace("_", "-") for each in budget.inside_rest] if name == "below_roof" else []
    within = f", and in it what is {' or '.join(unseen)}, which is not measured separately" if unseen else ""
    if name in IN_MODULES and are_times_far_off(profile.notes):
        return f"{units.percent(share)} {what}, a rough share: the modules' times are far off here"
    return f"{units.percent(share)} {what}{where}{within}: {helps}"


def what_it_is(profile: Profile, budget: Budget, name: str) -> str:
    """What a part of the step is, as the rest of a sentence: "is below the roof"."""
    kinds = _kinds(profile, budget, name) if name == "memory_bound" else {}
    if kinds and not any(_multiplies(profile.modules[module]) for of_kind in kinds.values() for module in of_kind):
        return "is memory-bound pointwise work"
    return _ADVICE[name][0] if name in _ADVICE else f"is {plain(name)}"


def advice(name: str) -> str:
    """What usually shortens a part."""
    return _ADVICE[name][1] if name in _ADVICE else "divide it with lflops.scope"


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
