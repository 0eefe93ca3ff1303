"""Parts of a step in words: what each is called, what it is, and what usually shortens it."""

from lflops.analyze.causes import Row, row_of
from lflops.analyze.speed.budget import Budget
from lflops.profile.model import Profile
from lflops.profile.notes import filled
from lflops.profile.records import PHASES
from lflops.profile.series import grouped
from lflops.report.lines.text import plain

_KINDS, _COVERED = 3, 2 / 3  # at most so many kinds of modules are read for a part, which together have this share of it

_LABELS = {"memory_bound": "memory-bound", "below_roof": "slower than the chip allows"}


def label_of(name: str) -> str:
    """What a part is called, next to its share."""
    return _LABELS.get(name, plain(name.replace("_", " ")))


def advice(profile: Profile, name: str, module: str = "") -> str:
    """What usually shortens a part, of which a module may have the most."""
    row = _row(profile, name)
    return filled(row.next, {"where": plain(module) or "the model"}) or f"Name what is in {plain(name)} with lflops.scope"


def _row(profile: Profile, name: str) -> Row:
    return row_of("never_called" if name == "other" and "" in profile.uncalled else name)


def what_it_is(profile: Profile, budget: Budget | None, name: str) -> str:
    """What a part of the step is: "memory-bound work"."""
    kinds = _kinds(profile, budget, name) if budget is not None and name == "memory_bound" else {}
    most_of_it = [profile.modules[module] for of_kind in kinds.values() for module in of_kind]
    if most_of_it and not any(module.work(phase).own_macs for module in most_of_it for phase in PHASES):
        return "memory-bound pointwise work"
    if name == "idle" and budget is not None and budget.idle:
        most = max(budget.idle, key=lambda phase: budget.idle[phase])
        return f"{row_of(name).what}, mostly while the host runs {'no module' if most == 'other' else plain(most)}"
    unseen = [each.replace("_", "-") for each in budget.inside_rest] if budget is not None and name == "below_roof" else []
    return ", or ".join([_row(profile, name).what or plain(name), *unseen])


def _kinds(profile: Profile, budget: Budget, part: str) -> dict[str, list[str]]:
    having = (module for module, parts in budget.modules.items() if parts[part])
    modules = grouped(having, lambda module: profile.modules[module].kind or module)
    shares = {kind: sum(budget.modules[module][part] for module in names) for kind, names in modules.items()}
    kinds = sorted(shares, key=lambda kind: -shares[kind])
    before = [sum(shares[each] for each in kinds[:index]) for index in range(len(kinds))]
    return {kind: modules[kind] for kind, covered in zip(kinds[:_KINDS], before, strict=False) if covered < _COVERED * sum(shares.values())}
