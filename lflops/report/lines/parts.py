"""Parts of a step in words: what each is called, what it is, and what usually shortens it."""

from collections.abc import Mapping
from typing import NamedTuple

from lflops.analyze.speed.budget import Budget
from lflops.profile.model import Profile
from lflops.profile.records import PHASES
from lflops.profile.series import grouped
from lflops.report.lines.text import plain

_KINDS, _COVERED = 3, 2 / 3


class _Words(NamedTuple):
    """What a part is, as the rest of "20 % of the step is", and what usually shortens it; `it` is the module that has the most of it."""

    what: str
    advice: str


_MEASURE_AGAIN = "Time more steps by module (active=8 in the schedule), on a machine that does nothing else"

_WORDS: Mapping[str, _Words] = {
    "useful": _Words("useful matrix multiplication", "Multiply in a lower precision"),
    "recompute": _Words("recomputed matrix multiplication", "Checkpoint fewer layers, if memory allows it"),
    "memory_bound": _Words("memory-bound work", "Fuse {it}, for example with torch.compile"),
    "below_roof": _Words("slower than the chip allows", "Use larger batches, or give {it} fewer and larger kernels (torch.compile)"),
    "data": _Words("waiting for data", "Give the DataLoader more workers, persistent_workers=True, or cheaper transforms"),
    "transfer": _Words("copying batches to the device", "Give the DataLoader pin_memory=True, or the batch smaller dtypes"),
    "clip": _Words("gradient clipping", "Clip gradients with foreach=True, or less often"),
    "optimizer": _Words("optimizer work", "Give the optimizer fused=True, or use larger batches"),
    "other": _Words(
        "outside all phases: logging, callbacks, metrics, zeroing gradients", "Log less often, and keep .item() out of the step"
    ),
    "never_called": _Words("outside all phases, as the watched model was never called", "Give lflops the model that the loop calls"),
    "sync": _Words("waiting for other ranks in Lightning's own collectives", "Log with sync_dist=True less often"),
    "communication": _Words(
        "communication, or waiting for other ranks, while nothing is computed",
        "Communicate less often (gradient accumulation), in larger messages, or on a faster link",
    ),
    "copy": _Words("copies that overlap with nothing", "Copy from pinned memory with non_blocking=True"),
    "idle": _Words(
        "idle time of the device", "Give the device fewer and larger kernels (torch.compile), no .item(), and batches from more workers"
    ),
    "all_forward": _Words("forward, and no one can say in which module", _MEASURE_AGAIN),
    "all_backward": _Words("backward, and no one can say in which module", _MEASURE_AGAIN),
    "forward": _Words("forward outside of the layers", "Count ignored modules, and name the rest with lflops.scope"),
    "backward": _Words("backward outside of the layers", "Count ignored modules, and name the rest with lflops.scope"),
}

_LABELS = {"memory_bound": "memory-bound", "below_roof": "slower than the chip allows"}


def label_of(name: str) -> str:
    """What a part is called, next to its share."""
    return _LABELS.get(name, plain(name.replace("_", " ")))


def advice(profile: Profile, name: str, module: str = "") -> str:
    """What usually shortens a part, of which a module may have the most."""
    words = _words(profile, name)
    return f"Name what is in {plain(name)} with lflops.scope" if words is None else words.advice.format(it=plain(module) or "the model")


def _words(profile: Profile, name: str) -> _Words | None:
    return _WORDS.get("never_called" if name == "other" and "" in profile.uncalled else name)


def what_it_is(profile: Profile, budget: Budget | None, name: str) -> str:
    """What a part of the step is: "memory-bound work"."""
    kinds = _kinds(profile, budget, name) if budget is not None and name == "memory_bound" else {}
    most_of_it = [profile.modules[module] for of_kind in kinds.values() for module in of_kind]
    if most_of_it and not any(module.work(phase).own_macs for module in most_of_it for phase in PHASES):
        return "memory-bound pointwise work"
    if name == "idle" and budget is not None and budget.idle:
        most = max(budget.idle, key=lambda phase: budget.idle[phase])
        return f"{_WORDS[name].what}, mostly while the host runs {'no module' if most == 'other' else plain(most)}"
    unseen = [each.replace("_", "-") for each in budget.inside_rest] if budget is not None and name == "below_roof" else []
    words = _words(profile, name)
    return ", or ".join([plain(name) if words is None else words.what, *unseen])


def _kinds(profile: Profile, budget: Budget, part: str) -> dict[str, list[str]]:
    having = (module for module, parts in budget.modules.items() if parts[part])
    modules = grouped(having, lambda module: profile.modules[module].kind or module)
    shares = {kind: sum(budget.modules[module][part] for module in names) for kind, names in modules.items()}
    kinds = sorted(shares, key=lambda kind: -shares[kind])
    before = [sum(shares[each] for each in kinds[:index]) for index in range(len(kinds))]
    return {kind: modules[kind] for kind, covered in zip(kinds[:_KINDS], before, strict=False) if covered < _COVERED * sum(shares.values())}
