"""What makes a run slower or faster than another one: its largest changes, those of repeated modules as one."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from lflops.analyze.compare.diff import Diff, ModuleDiff
from lflops.analyze.compare.module_pair import Change
from lflops.analyze.compare.significance import CHANGED, LEAST_SHARE, Timing
from lflops.profile.module_names import spelled_out
from lflops.profile.series import grouped, sum_known

CauseKind = Literal["slower", "faster", "work", "added", "removed", "phase"]

_OF_MODULES = frozenset({"forward", "backward", "recompute"})  # phases that the modules' times show more exactly
_SAME_RATIO = 0.02  # two ratios of work that differ by less are the same: a batch of twice the size does not do twice the work of the loss


class Cause(Struct, frozen=True, kw_only=True):
    """A change of the step's time, or one that may be."""

    kind: CauseKind  # a phase or a module that is slower or faster, a module that does other work, or one that was added or removed
    name: str  # of the phase or the module, with `*` for the numbers of what repeats; the class of modules of several names
    modules: int  # how many modules it is about; 0 for a phase
    seconds: float | None  # what a step lost by it; a gain is negative, `None` is unknown
    ratio: float | None = None  # of a time; of other work of its MACs, or of its FLOPs where it has no MACs. `None` is unknown.
    low: float | None = None  # the lower end of the interval of a time's ratio
    high: float | None = None  # its upper end


class BatchChange(Struct, frozen=True, kw_only=True):
    """Another number of samples a step, and whether the work changed as that did."""

    before: int
    after: int
    explains_work: bool

    @property
    def ratio(self) -> float:
        """After over before."""
        return self.after / self.before


def batch_change(diff: Diff) -> BatchChange | None:
    """The change of the batch; `None` where it is the same or unknown."""
    before, after = diff.facts.get("samples_per_step", (None, None))
    if not isinstance(before, int) or not isinstance(after, int) or not before:
        return None
    work = diff.modules[0].inclusive.macs.ratio
    return BatchChange(before=before, after=after, explains_work=work is not None and _is_same(work, after / before))


def causes(diff: Diff) -> tuple[Cause, ...]:
    """The changes, those that cost or win the most first; what a larger batch explains is not among them."""
    batch = batch_change(diff)
    explained = batch.ratio if batch and batch.explains_work else None
    found = [*_modules(diff, explained), *_phases(diff), *_added_and_removed(diff)]
    return tuple(sorted(found, key=lambda cause: -abs(cause.seconds or 0.0)))


def _phases(diff: Diff) -> Iterator[Cause]:
    """Phases that no module shows, as they were measured: what all modules have in common is not taken out of a wait for data."""
    for name, time in diff.phases.items():
        if time.verdict in CHANGED and time.before is not None and time.after is not None and not (diff.whole and name in _OF_MODULES):
            seconds = time.after - time.before
            if abs(seconds) >= LEAST_SHARE * (diff.step.before or 0.0):
                yield Cause(kind="phase", name=name, modules=0, seconds=seconds, ratio=time.ratio)


def _modules(diff: Diff, explained: float | None) -> Iterator[Cause]:
    changed: list[tuple[CauseKind, ModuleDiff]] = []
    for module in diff.modules:
        verdict = module.news.verdict
        if module.before is None or module.after is None:
            continue
        if verdict in ("slower", "faster"):
            changed.append((verdict, module))
        elif module.own.time.lost is not None and _has_other_work(module, explained):
            changed.append(("work", module))
    whole = diff.whole.ratio if diff.whole else 1.0  # the intervals are of what is beyond it
    for kind, name, modules in _grouped(diff, changed):
        times = [module.news for module in modules]
        work = _ratio(module.own.macs for module in modules) or _ratio(module.own.flops for module in modules)
        yield Cause(
            kind=kind,
            name=name,
            modules=len(modules),
            seconds=sum_known(time.lost for time in times),
            ratio=work if kind == "work" else _ratio(times),
            low=min((time.low * whole for time in times if time.low is not None), default=None) if kind != "work" else None,
            high=max((time.high * whole for time in times if time.high is not None), default=None) if kind != "work" else None,
        )


def _has_other_work(module: ModuleDiff, explained: float | None) -> bool:
    """Whether its work changed, and otherwise than the whole batch did."""
    own = module.own
    ratio = own.macs.ratio if own.macs.before else own.flops.ratio
    return own.differs and not (explained is not None and ratio is not None and _is_same(ratio, explained))


def _added_and_removed(diff: Diff) -> Iterator[Cause]:
    sides: tuple[tuple[CauseKind, tuple[ModuleDiff, ...], int], ...] = (("added", diff.added, 1), ("removed", diff.removed, -1))
    for kind, modules, sign in sides:
        names = {module.name for module in modules}
        uppermost = [module for module in modules if not module.name or module.name.rpartition(".")[0] not in names]
        for _, name, group in _grouped(diff, [(kind, module) for module in uppermost]):
            seconds = sum_known((each.inclusive.time.after if sign > 0 else each.inclusive.time.before) for each in group)
            yield Cause(kind=kind, name=name, modules=len(group), seconds=sign * seconds if seconds else None)


def _grouped(diff: Diff, changed: Sequence[tuple[CauseKind, ModuleDiff]]) -> Iterator[tuple[CauseKind, str, list[ModuleDiff]]]:
    """Those of one pattern are one. So are modules of a class that came, went, or do other work without any products, as dropouts."""

    def group(change: tuple[CauseKind, ModuleDiff]) -> tuple[CauseKind, str]:
        kind, module = change
        by_class = kind in ("added", "removed") or (kind == "work" and not module.own.macs.differs)
        return kind, module.kind if by_class and module.kind else module.pattern

    sizes = Counter(module.pattern for module in diff.modules)
    for (kind, _), changes in grouped(changed, group).items():
        modules = [module for _, module in changes]
        pattern, *others = {module.pattern for module in modules}
        is_whole = len(modules) == sizes[pattern]
        label = modules[0].kind if others else pattern if is_whole else spelled_out(module.name for module in modules)
        yield kind, modules[0].name or modules[0].kind if len(modules) == 1 else label, modules


def _ratio(changes: Iterable[Change | Timing]) -> float | None:
    both = [(change.before, change.after) for change in changes]
    before, after = (sum_known(side) for side in zip(*both, strict=True))
    return after / before if before and after is not None and after != before else None


def _is_same(one: float, other: float) -> bool:
    return abs(one / other - 1) <= _SAME_RATIO
