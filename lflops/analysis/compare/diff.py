"""Two runs of a model, module by module, paired across wrappers and renames.

What changed and what for; limits for the second.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Literal, NamedTuple

from msgspec import Struct

from lflops.analysis.compare.compared_run import (
    Change,
    ComparedRun,
    Fact,
    ModuleFigures,
    ModulePair,
    ModuleSide,
    RunFigures,
    SharedPhases,
    compared_run,
    module_patterns,
)
from lflops.analysis.compare.significance import (
    CHANGED,
    LEAST_SHARE,
    CommonFactor,
    Doubt,
    Judge,
    Measured,
    Timing,
    Verdict,
    judge_of,
    judge_of_steps,
    slowed_by,
)
from lflops.profile.json_file import load
from lflops.profile.module_names import spelled_out
from lflops.profile.profile import Profile
from lflops.profile.records import PASS_PHASES, PHASES
from lflops.profile.series import grouped, sum_known

_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module"}
)
"""Names under which DDP, FSDP, torch.compile, checkpointing and Lightning's Fabric register the one module that they wrap."""

_Key = Callable[["ModuleNode"], Hashable]


@dataclass(eq=False)
class ModuleNode:
    """A module in a run's tree, together with the modules that wrap it.

    From outside they are one module.
    """

    # of the outermost
    name: str
    # of all of them as positions in the run's columns, the outermost first
    rows: list[int]
    # the last part of its name
    label: str
    # the class of the innermost, that which is wrapped
    kind: str
    # the modules below the innermost
    children: list["ModuleNode"] = field(default_factory=list)
    # a number that is the same for two nodes, of either run, with the same classes all the way down
    build: int = 0
    # a number that is the same for two nodes with the same parameters and MACs of forward, too
    work: int = 0

    def walk(self) -> Iterator["ModuleNode"]:
        """Itself and every node below it, in the model's order."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


# by node, of either run
_Partners = dict[ModuleNode, ModuleNode]

Pair = tuple[
    ModuleNode | None, ModuleNode | None
    # the same module before and after; `None` where it was added or removed
]


def matched(before: ComparedRun, after: ComparedRun) -> tuple[Pair, ...]:
    """Each module of either run once: those of the first run in its order, then the added ones.

    A wrapper and the wrapped module count as one. So do a module, such as a LightningModule, and
    the whole model in one of its attributes. The children of a pair are paired by one key after the
    other:

    1. Label and work, where work is the classes, parameters and forward MACs all the way down.
    2. Label and class, if the label is no number.
    3. Work.
    4. Label and class, if the label is a number.
    5. All classes below, if both sides have equally many modules of them.
    6. Label.

    Of several children with the same key, the first is paired with the first. A module without a
    partner may have moved. It is searched for anywhere, by label and work.
    """
    one, other = _root(before), _root(after)
    _unwrap_model(one, other)
    numbers: dict[Hashable, int] = {}
    _number(before, one, numbers)
    _number(after, other, numbers)
    partners: _Partners = {}
    _pair(partners, one, other)
    left, right = (_single(partners, root.walk()) for root in (one, other))
    for pair in _same(left, right, lambda node: (node.label, node.work), as_many=True):
        if not any(node in partners for node in pair):
            _pair(partners, *pair)
    return (
        *((node, partners.get(node)) for node in one.walk()),
        *((None, node) for node in _single(partners, other.walk())),
    )


def _pair(partners: _Partners, before: ModuleNode, after: ModuleNode) -> None:
    waiting = [(before, after)]
    while waiting:
        one, other = waiting.pop()
        partners[one], partners[other] = other, one
        for key, as_many in _KEYS:
            left, right = _single(partners, one.children), _single(partners, other.children)
            if not left or not right:
                break
            pairs = list(_same(left, right, key, as_many=as_many))
            for first, second in pairs:
                partners[first], partners[second] = second, first
            waiting += pairs


def _single(partners: _Partners, nodes: Iterable[ModuleNode]) -> list[ModuleNode]:
    return [node for node in nodes if node not in partners]


def _root(run: ComparedRun) -> ModuleNode:
    nodes: dict[str, ModuleNode] = {}
    for row in sorted(
        range(len(run.names)),
        key=lambda at: run.names[at].count(".") + bool(run.names[at]),
        # a stable sort
    ):
        name = run.names[row]
        above, _, label = name.rpartition(".")
        nodes[name] = ModuleNode(
            name=name, rows=[row], label=label, kind=run.kinds[row].removeprefix("FSDP")
        )
        if name:
            nodes[above].children.append(nodes[name])
    for node in nodes.values():
        while len(node.children) == 1 and node.children[0].label in _WRAPPERS:
            _absorb(node, node.children[0])
    return nodes[""]


def _absorb(node: ModuleNode, inner: ModuleNode) -> None:
    """Make a node and a child of it, which it wraps, one node."""
    at = node.children.index(inner)
    node.rows += inner.rows
    node.kind = inner.kind
    node.children[at : at + 1] = inner.children


def _unwrap_model(before: ModuleNode, after: ModuleNode) -> None:
    """Make root and model one node where one run's whole model is an attribute of the other's root, as in a LightningModule."""
    inside = [
        (root, other, child)
        for root, other in ((before, after), (after, before))
        for child in root.children
        if child.children
    ]
    best = max(inside, key=lambda each: _shared(each[2], each[1]), default=None)
    if best is None or _shared(best[2], best[1]) <= _shared(before, after):
        return
    root, _, child = best
    labels = {node.label for node in root.children if node is not child}
    if labels.isdisjoint(node.label for node in child.children):
        _absorb(root, child)


def _shared(one: ModuleNode, other: ModuleNode) -> int:
    """How many paths lead from both to modules of the same class."""
    shared, waiting = 0, [(one, other)]
    while waiting:
        left, right = waiting.pop()
        labels = {node.label: node for node in right.children}
        both = [(node, labels[node.label]) for node in left.children if node.label in labels]
        shared += sum(first.kind == second.kind for first, second in both)
        waiting += both
    return shared


def _number(run: ComparedRun, root: ModuleNode, numbers: dict[Hashable, int]) -> None:
    parameters, macs = run.columns["self_parameters"], run.columns["forward.self_macs"]
    for node in reversed(list(root.walk())):
        figures = tuple(
            (parameters[row], macs[row] or 0) for row in node.rows if parameters[row] or macs[row]
        )
        node.build = numbers.setdefault(
            ("build", node.kind, *(child.build for child in node.children)), len(numbers)
        )
        node.work = numbers.setdefault(
            ("work", node.kind, figures, *(child.work for child in node.children)), len(numbers)
        )


def _same(
    left: Sequence[ModuleNode], right: Sequence[ModuleNode], key: _Key, *, as_many: bool
) -> Iterator[tuple[ModuleNode, ModuleNode]]:
    """The nodes with the same key, in order.

    With `as_many` both sides must have as many, or the pairs would be a guess.
    """
    theirs = grouped(right, key)
    for each, nodes in grouped(left, key).items():
        others = theirs.get(each, [])
        if each is not None and (not as_many or len(nodes) == len(others)):
            yield from zip(nodes, others, strict=False)


_KEYS: tuple[tuple[_Key, bool], ...] = (
    (lambda node: (node.label, node.work), False),
    (lambda node: None if node.label.isdecimal() else (node.label, node.kind), False),
    (lambda node: node.work, False),
    (lambda node: (node.label, node.kind), False),
    (lambda node: node.build, True),
    (lambda node: node.label, False),
)
"""What makes two children of a pair a pair, the surest first, and whether there must be as many of them on both sides."""


Side = Literal["before", "after"]


class ModuleDiff(Struct, frozen=True, kw_only=True):
    """A module in both runs, or in one of them."""

    before: (
        str | None
        # its name; `None` where it was added. A wrapper and what it wraps are one module, with the
        # wrapper's name.
    )
    # its name; `None` where it was removed
    after: str | None
    # its class: after, where it is there
    kind: str
    # its name with `*` for the numbers of what repeats
    pattern: str
    # itself, without what is below it
    own: ModuleFigures
    inclusive: (
        # with all below it. Its time is judged by what no module below explains.
        ModuleFigures
    )
    # the most bytes alive while it ran
    peak_bytes: Change

    @property
    def name(self) -> str:
        """After, or before where it was removed."""
        return (self.before if self.after is None else self.after) or ""

    @property
    def news(self) -> Timing:
        """Its own time where that is slower or faster, or costs more for other work.

        Else the inclusive one.
        """
        own = self.own.time
        return (
            own
            if own.verdict in CHANGED or (own.verdict is None and own.lost is not None)
            else self.inclusive.time
        )


class Diff(Struct, frozen=True, kw_only=True):
    """What changed from one run to another. `None` is unknown."""

    # What differs in the circumstances of the runs, as device, dtype or samples a step: before and
    # after. The same of `phases` that ran: what only one run has, as an optimizer, is in no figure.
    facts: Mapping[str, tuple[Fact, Fact]]
    # How much slower or faster all modules are, as on a slower machine; it is taken out of their
    # times before they are judged
    whole: CommonFactor | None
    # of the clean steps; judged with nothing taken out
    step: Timing
    # of the clean steps; judged as the modules are
    phases: Mapping[str, Timing]
    # a share of 1
    mfu: Change
    # of the clean steps. So is `tokens_per_second`.
    samples_per_second: Change
    tokens_per_second: Change
    # the most bytes alive
    peak_bytes: Change
    unreliable: tuple[
        Side, ...
        # the runs whose profile says that its modules' times are no measure: then no module is judged
    ] = ()
    # The share of the CPU time that each run was ready to use and other processes took
    cpu_lost: tuple[float | None, float | None] = (None, None)
    modules: tuple[
        ModuleDiff, ...
        # those before in their order, the root first, then what was added
    ]

    @property
    def status(self) -> Verdict | Literal["cannot tell"] | None:
        """The verdict on the step.

        Of steps that were timed and cannot be judged `cannot tell`, for the reason in `step.doubt`.
        """
        return self.step.verdict or ("cannot tell" if self.step.doubt else None)

    @property
    def slower(self) -> tuple[ModuleDiff, ...]:
        """The modules that are slower, beyond the whole run and the noise; the largest loss first."""
        return self._judged("slower")

    @property
    def faster(self) -> tuple[ModuleDiff, ...]:
        """The modules that are faster; the largest gain first."""
        return self._judged("faster")

    @property
    def added(self) -> tuple[ModuleDiff, ...]:
        """The modules that are only in the second run."""
        return tuple(module for module in self.modules if module.before is None)

    @property
    def removed(self) -> tuple[ModuleDiff, ...]:
        """The modules that are only in the first run."""
        return tuple(module for module in self.modules if module.after is None)

    def _judged(self, verdict: Verdict) -> tuple[ModuleDiff, ...]:
        modules = [module for module in self.modules if module.news.verdict == verdict]
        return tuple(sorted(modules, key=lambda module: -abs(module.news.lost or 0.0)))


class Comparison(NamedTuple):
    """A diff, and the sides of each of its modules."""

    diff: Diff
    pairs: Sequence[ModulePair]


def diff(before: Profile | str | PathLike[str], after: Profile | str | PathLike[str]) -> Diff:
    """Compare two runs.

    Modules are matched by name, across wrappers and renames. Work is exact, so every difference in
    it is listed. A time is judged only where the work is the same. The median ratio over the
    modules is taken out first, because a slower machine changes all modules. Then an interval from
    the steps' spread decides whether the rest is more than noise; the docstring of `significance`
    explains how. An estimate or a count has no times, so only its work and its memory are compared.

    Args:
        before: A profile, or the path of its file.
        after: Another one, of the same model or of a changed version of it.

    Raises:
        ProfileError: A file cannot be read.
    """
    first, second = (each if isinstance(each, Profile) else load(each) for each in (before, after))
    return compare(compared_run(first), compared_run(second)).diff


def compare(before: ComparedRun, after: ComparedRun) -> Comparison:
    """Compare two runs, as `diff` does."""
    first, second = before.figures, after.figures
    nodes = matched(before, after)
    shared = {*first.phases_ran} & {*second.phases_ran}
    # that only one of them recomputes is a change
    if "backward" in shared:
        shared.add("recompute")
    phases = tuple(phase for phase in PHASES if phase in shared)
    left, right = SharedPhases(before, phases), SharedPhases(after, phases)
    pairs = [
        ModulePair(
            ModuleSide(left, one.rows) if one else None,
            ModuleSide(right, two.rows) if two else None,
        )
        for one, two in nodes
    ]
    sides: tuple[tuple[Side, RunFigures], ...] = (("before", first), ("after", second))
    unreliable: tuple[Side, ...] = tuple(side for side, run in sides if not run.has_reliable_times)
    lost = first.cpu_lost or 0.0, second.cpu_lost or 0.0
    judge = None if unreliable else _judge(pairs, first.step, lost)

    names = dict.fromkeys([*first.phases, *second.phases])
    of_steps = judge_of_steps(judge, first.step, times=len(names), lost=lost)
    facts: dict[str, tuple[Fact, Fact]] = {
        name: (value, second.facts.get(name)) for name, value in first.facts.items()
    }
    if first.counted and second.counted:
        one, other = (
            ", ".join(phase for phase in run.phases_ran if phase != "recompute")
            for run in (first, second)
        )
        facts["phases"] = one, other

    def change(figure: str) -> Change:
        return Change(before=getattr(first, figure), after=getattr(second, figure))

    compared = Diff(
        facts={name: pair for name, pair in facts.items() if pair[0] != pair[1]},
        whole=judge.whole if judge else None,
        step=judge_of_steps(None, first.step, times=1, lost=lost).timing(first.step, second.step),
        phases={
            name: of_steps.timing(first.phases.get(name), second.phases.get(name)) for name in names
        },
        mfu=change("mfu"),
        samples_per_second=change("samples_per_second"),
        tokens_per_second=change("tokens_per_second"),
        peak_bytes=change("peak_bytes"),
        unreliable=unreliable,
        cpu_lost=(first.cpu_lost, second.cpu_lost),
        modules=_modules(nodes, pairs, judge, (module_patterns(before), module_patterns(after))),
    )
    return Comparison(compared, pairs)


def _judge(
    pairs: Sequence[ModulePair], step: Measured | None, lost: tuple[float, float]
) -> Judge | None:
    times = [pair.times(own=True) for pair in pairs if pair.same_work(own=True)]
    known = [(first, second) for first, second in times if first and second]
    root = pairs[0].times(own=False)[0]
    modules = root.seconds if root else 0.0
    return judge_of(
        known,
        modules=modules,
        step=step.seconds if step else modules,
        times=2 * len(known),
        lost=lost,
    )


def _modules(
    nodes: Sequence[Pair],
    pairs: Sequence[ModulePair],
    judge: Judge | None,
    patterns: tuple[Mapping[str, str], Mapping[str, str]],
) -> tuple[ModuleDiff, ...]:
    """From below upwards: an inclusive time is judged by what no module below explains."""
    explained: dict[ModuleNode | None, float] = {}
    modules = []
    for (one, other), pair in reversed(list(zip(nodes, pairs, strict=True))):
        own = pair.figures(judge, own=True)
        inside = _lost(own.time) + sum(explained[child] for child in (one.children if one else ()))
        inclusive = pair.figures(judge, inside, own=False)
        explained[one] = _lost(inclusive.time) or inside
        modules.append(
            ModuleDiff(
                before=one.name if one else None,
                after=other.name if other else None,
                kind=other.kind if other else one.kind if one else "",
                pattern=patterns[1][other.name] if other else patterns[0][one.name] if one else "",
                own=own,
                inclusive=inclusive,
                peak_bytes=pair.change(ModuleSide.peak),
            )
        )
    return tuple(reversed(modules))


def _lost(time: Timing) -> float:
    """The seconds that a time lost or gained, if it changed by more than noise."""
    return time.lost if time.verdict in CHANGED and time.lost is not None else 0.0


class Limit(Struct, frozen=True, kw_only=True):
    """One limit and its result."""

    # of the figure
    name: Literal["max_regress", "min_mfu", "max_memory"]
    # the most, or of MFU the least
    allowed: float
    # the run's figure
    found: float | None
    # `None` where it is unknown
    broken: bool | None
    doubt: Doubt | None = (
        # why no one can tell whether it is broken, where the figure is known
        None
    )


def limits(
    diff: Diff,
    *,
    max_regress: float | None = None,
    min_mfu: float | None = None,
    max_memory: float | None = None,
) -> tuple[Limit, ...]:
    """Check the second run against the given limits: shares of 1, and the most bytes alive at once."""
    # A step that is longer within the noise does not break `max_regress`; a slower machine does,
    # unless other processes made it slow.
    step, mfu, peak = diff.step, diff.mfu.after, diff.peak_bytes.after
    made = []
    if max_regress is not None:
        doubt = None if step.doubt == "few_steps" else step.doubt
        regress = (
            None if step.ratio is None or (step.low is None and doubt is None) else step.ratio - 1
        )
        broken = (
            None if step.low is None or regress is None else step.low > 1 and regress > max_regress
        )
        made.append(
            Limit(
                name="max_regress", allowed=max_regress, found=regress, broken=broken, doubt=doubt
            )
        )
    if min_mfu is not None:
        is_less = None if mfu is None else mfu < min_mfu
        is_busy = (
            is_less and mfu is not None and mfu * slowed_by(diff.cpu_lost[1] or 0.0) >= min_mfu
        )
        made.append(
            Limit(
                name="min_mfu",
                allowed=min_mfu,
                found=mfu,
                broken=None if is_busy else is_less,
                doubt="busy" if is_busy else None,
            )
        )
    if max_memory is not None:
        made.append(
            Limit(
                name="max_memory",
                allowed=max_memory,
                found=peak,
                broken=None if peak is None else peak > max_memory,
            )
        )
    return tuple(made)


CauseKind = Literal["slower", "faster", "work", "added", "removed", "phase"]

# two ratios of work that differ by less are the same: a batch of twice the size does not do twice
# the work of the loss
_SAME_RATIO = 0.02


class Cause(Struct, frozen=True, kw_only=True):
    """A change of the step's time, or one that may be."""

    # a phase or a module that is slower or faster, a module that does other work, or one that was
    # added or removed
    kind: CauseKind
    # of the phase or the module, with `*` for the numbers of what repeats; the class of modules of
    # several names
    name: str
    # how many modules it is about; 0 for a phase
    modules: int
    # what a step lost by it; a gain is negative, `None` is unknown
    seconds: float | None
    ratio: float | None = (
        # of a time; of other work of its MACs, or of its FLOPs where it has no MACs. `None` is
        # unknown.
        None
    )
    # the lower end of the interval of a time's ratio
    low: float | None = None
    # its upper end
    high: float | None = None


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
    return BatchChange(
        before=before,
        after=after,
        explains_work=work is not None and _is_same(work, after / before),
    )


def causes(diff: Diff) -> tuple[Cause, ...]:
    """The changes, those that cost or win the most first.

    What a larger batch explains is not among them.
    """
    batch = batch_change(diff)
    explained = batch.ratio if batch and batch.explains_work else None
    found = [*_module_changes(diff, explained), *_phases(diff), *_added_and_removed(diff)]
    return tuple(sorted(found, key=lambda cause: -abs(cause.seconds or 0.0)))


def _phases(diff: Diff) -> Iterator[Cause]:
    """Phases that no module shows, as they were measured.

    What all modules have in common is not taken out of a wait for data.
    """
    for name, time in diff.phases.items():
        if (
            time.verdict in CHANGED
            and time.before is not None
            and time.after is not None
            and not (diff.whole and name in PASS_PHASES)
        ):
            seconds = time.after - time.before
            if abs(seconds) >= LEAST_SHARE * (diff.step.before or 0.0):
                yield Cause(kind="phase", name=name, modules=0, seconds=seconds, ratio=time.ratio)


def _module_changes(diff: Diff, explained: float | None) -> Iterator[Cause]:
    changed: list[tuple[CauseKind, ModuleDiff]] = []
    for module in diff.modules:
        verdict = module.news.verdict
        if module.before is None or module.after is None:
            continue
        if verdict in ("slower", "faster"):
            changed.append((verdict, module))
        elif module.own.time.lost is not None and _has_other_work(module, explained):
            changed.append(("work", module))
    # the intervals are of what is beyond it
    whole = diff.whole.ratio if diff.whole else 1.0
    for kind, name, modules in _grouped(diff, changed):
        times = [module.news for module in modules]
        work = _ratio(module.own.macs for module in modules) or _ratio(
            module.own.flops for module in modules
        )
        yield Cause(
            kind=kind,
            name=name,
            modules=len(modules),
            seconds=sum_known(time.lost for time in times),
            ratio=work if kind == "work" else _ratio(times),
            low=min((time.low * whole for time in times if time.low is not None), default=None)
            if kind != "work"
            else None,
            high=max((time.high * whole for time in times if time.high is not None), default=None)
            if kind != "work"
            else None,
        )


def _has_other_work(module: ModuleDiff, explained: float | None) -> bool:
    """Whether its work changed, and otherwise than the whole batch did."""
    own = module.own
    ratio = own.macs.ratio if own.macs.before else own.flops.ratio
    return own.differs and not (
        explained is not None and ratio is not None and _is_same(ratio, explained)
    )


def _added_and_removed(diff: Diff) -> Iterator[Cause]:
    sides: tuple[tuple[CauseKind, tuple[ModuleDiff, ...], int], ...] = (
        ("added", diff.added, 1),
        ("removed", diff.removed, -1),
    )
    for kind, modules, sign in sides:
        names = {module.name for module in modules}
        uppermost = [
            module
            for module in modules
            if not module.name or module.name.rpartition(".")[0] not in names
        ]
        for _, name, group in _grouped(diff, [(kind, module) for module in uppermost]):
            seconds = sum_known(
                (each.inclusive.time.after if sign > 0 else each.inclusive.time.before)
                for each in group
            )
            yield Cause(
                kind=kind,
                name=name,
                modules=len(group),
                seconds=sign * seconds if seconds else None,
            )


def _grouped(
    diff: Diff, changed: Sequence[tuple[CauseKind, ModuleDiff]]
) -> Iterator[tuple[CauseKind, str, list[ModuleDiff]]]:
    """Those of one pattern are one.

    So are modules of a class that came, went, or do other work without any products, as dropouts.
    """

    def group(change: tuple[CauseKind, ModuleDiff]) -> tuple[CauseKind, str]:
        kind, module = change
        by_class = kind in ("added", "removed") or (kind == "work" and not module.own.macs.differs)
        return kind, module.kind if by_class and module.kind else module.pattern

    sizes = Counter(module.pattern for module in diff.modules)
    for (kind, _), changes in grouped(changed, group).items():
        modules = [module for _, module in changes]
        pattern, *others = {module.pattern for module in modules}
        is_whole = len(modules) == sizes[pattern]
        label = (
            modules[0].kind
            if others
            else pattern
            if is_whole
            else spelled_out(module.name for module in modules)
        )
        yield kind, modules[0].name or modules[0].kind if len(modules) == 1 else label, modules


def _ratio(changes: Iterable[Change | Timing]) -> float | None:
    both = [(change.before, change.after) for change in changes]
    before, after = (sum_known(side) for side in zip(*both, strict=True))
    return after / before if before and after is not None and after != before else None


def _is_same(one: float, other: float) -> bool:
    return abs(one / other - 1) <= _SAME_RATIO
