"""Compare two runs of a model module by module.

Modules are paired even if they were wrapped or renamed. The result has the changes and their
causes. The second run can also be checked against limits.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
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
    Caveat,
    CommonFactor,
    Judge,
    Measured,
    Timing,
    Verdict,
    judge_of,
    judge_of_steps,
    slowed_by,
)
from lflops.display import Displayed
from lflops.profile.json_file import load
from lflops.profile.module_names import parent_of, spelled_out
from lflops.profile.profile import Profile
from lflops.profile.records import PASS_PHASES, PHASES, Phase
from lflops.profile.series import grouped, multiplied, ratio, sum_known

_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module"}
)
"""Names of the attribute in which a wrapper stores the module that it wraps.

The wrappers are DDP, FSDP, torch.compile, checkpointing and Lightning's Fabric.
"""

_Key = Callable[["ModuleNode"], Hashable]


@dataclass(eq=False)
class ModuleNode:
    """A module in the module tree of a run, merged with the modules that wrap it, such as DDP.

    Attributes:
        name: Name of the outermost wrapper, or of the module if it is not wrapped.
        rows: Indices in the run's columns. The indices of the wrappers come first, starting with
            the outermost wrapper. The index of the module is last.
        label: Last part of `name`.
        kind: Class of the module, not of its wrappers.
        children: Nodes of the modules directly below the module.
        build: A number that identifies the structure. Nodes of both runs have the same number if
            they and all nodes below them have the same classes.
        work: A number that identifies the structure and the work. Nodes of both runs have the same
            number if they and all nodes below them have the same classes, parameters and forward
            MACs.
    """

    name: str
    rows: list[int]
    label: str
    kind: str
    children: list["ModuleNode"] = field(default_factory=list)
    build: int = 0
    work: int = 0

    def walk(self) -> Iterator["ModuleNode"]:
        """Yield the node and all nodes below it, in the model's order."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


# For each paired node of both runs, its partner in the other run.
_Partners = dict[ModuleNode, ModuleNode]

NodePair = tuple[ModuleNode | None, ModuleNode | None]
"""A module in the first and in the second run. One of the two is `None` if only one run has it."""


def matched(before: ComparedRun, after: ComparedRun) -> tuple[NodePair, ...]:
    """Pair the modules of two runs.

    The result has all modules of the first run in its order, each with its partner in the second
    run. Then it has the modules that were added in the second run.

    A wrapper and the wrapped module count as one module. If the model of one run is an attribute of
    the other run's LightningModule, this LightningModule also counts as a wrapper of the model.

    The roots are paired first, and then the children of each pair. Two children are paired if they
    have the same key. These keys are tried one after the other, where the label is the last part of
    the name and the work is the `ModuleNode.work` number:

    1. Label and work.
    2. Label and class, if the label is not a number.
    3. Work.
    4. Label and class.
    5. Structure (the `ModuleNode.build` number), if both runs have the same number of children
       with it.
    6. Label.

    If several children have the same key, they are paired in their order. A module without a
    partner may have moved elsewhere in the model, so the whole tree is searched for its label and
    work.
    """
    first = _root(before)
    second = _root(after)
    _unwrap_model(first, second)
    numbers: dict[Hashable, int] = {}
    _number(before, first, numbers)
    _number(after, second, numbers)

    partners: _Partners = {}
    _pair(partners, first, second)
    left = _unpaired(partners, first.walk())
    right = _unpaired(partners, second.walk())
    for one, other in _same(left, right, attrgetter("label", "work"), as_many=True):
        if one not in partners and other not in partners:
            _pair(partners, one, other)

    pairs: list[NodePair] = []
    for node in first.walk():
        pairs.append((node, partners.get(node)))
    for node in _unpaired(partners, second.walk()):
        pairs.append((None, node))
    return tuple(pairs)


def _pair(partners: _Partners, before: ModuleNode, after: ModuleNode) -> None:
    """Pair two nodes, and then the nodes below them that have equal keys (see `_KEYS`)."""
    waiting = [(before, after)]
    while waiting:
        one, other = waiting.pop()
        partners[one] = other
        partners[other] = one
        for key, as_many in _KEYS:
            left = _unpaired(partners, one.children)
            right = _unpaired(partners, other.children)
            if not left or not right:
                break
            for first, second in _same(left, right, key, as_many=as_many):
                partners[first] = second
                partners[second] = first
                waiting.append((first, second))


def _unpaired(partners: _Partners, nodes: Iterable[ModuleNode]) -> list[ModuleNode]:
    return [node for node in nodes if node not in partners]


def _depth(name: str) -> int:
    if not name:
        return 0
    return name.count(".") + 1


def _root(run: ComparedRun) -> ModuleNode:
    """Return the root of a run's module tree, in which wrappers are merged with their modules."""
    nodes: dict[str, ModuleNode] = {}
    parents_first = sorted(range(len(run.names)), key=lambda row: _depth(run.names[row]))
    for row in parents_first:
        name = run.names[row]
        parent, _, label = name.rpartition(".")
        kind = run.kinds[row].removeprefix("FSDP")
        nodes[name] = ModuleNode(name=name, rows=[row], label=label, kind=kind)
        if name:
            nodes[parent].children.append(nodes[name])
    for node in nodes.values():
        while len(node.children) == 1 and node.children[0].label in _WRAPPERS:
            _absorb(node, node.children[0])
    return nodes[""]


def _absorb(node: ModuleNode, child: ModuleNode) -> None:
    """Merge a node with the child that it wraps."""
    at = node.children.index(child)
    node.rows += child.rows
    node.kind = child.kind
    node.children[at : at + 1] = child.children


def _unwrap_model(before: ModuleNode, after: ModuleNode) -> None:
    """Merge a root with one of its children if this child is the whole model of the other run.

    For example, one run may train a model directly, and the other run may train a LightningModule
    that has this model in an attribute.
    """
    most = _shared(before, after)
    best = None
    for root, other in ((before, after), (after, before)):
        for child in root.children:
            shared = _shared(child, other)
            if child.children and shared > most:
                most = shared
                best = (root, child)
    if best is None:
        return
    root, child = best
    labels = {node.label for node in root.children if node is not child}
    if labels.isdisjoint(node.label for node in child.children):
        _absorb(root, child)


def _shared(one: ModuleNode, other: ModuleNode) -> int:
    """Count how many modules below the first node also exist below the second node.

    Two modules are the same if they have the same class and the same name relative to their node.
    """
    shared = 0
    waiting = [(one, other)]
    while waiting:
        left, right = waiting.pop()
        by_label = {node.label: node for node in right.children}
        for node in left.children:
            if node.label in by_label:
                counterpart = by_label[node.label]
                shared += node.kind == counterpart.kind
                waiting.append((node, counterpart))
    return shared


def _number(run: ComparedRun, root: ModuleNode, numbers: dict[Hashable, int]) -> None:
    """Set the attributes `build` and `work` of all nodes in the tree of a run.

    `numbers` has the numbers that were already assigned. It must be the same dictionary for both
    runs, so that nodes with the same structure or work get the same number in both.
    """
    parameters = run.columns["self_parameters"]
    macs = run.columns["forward.self_macs"]
    for node in reversed(list(root.walk())):
        figures = []
        for row in node.rows:
            if parameters[row] or macs[row]:
                figures.append((parameters[row], macs[row] or 0))
        builds = []
        works = []
        for child in node.children:
            builds.append(child.build)
            works.append(child.work)
        build = ("build", node.kind, *builds)
        work = ("work", node.kind, tuple(figures), *works)
        node.build = numbers.setdefault(build, len(numbers))
        node.work = numbers.setdefault(work, len(numbers))


def _same(
    left: Sequence[ModuleNode], right: Sequence[ModuleNode], key: _Key, *, as_many: bool
) -> Iterator[tuple[ModuleNode, ModuleNode]]:
    """Yield the pairs of nodes that have the same key. Nodes with the same key are paired in order.

    If `as_many` is true, a key is used only if both sides have the same number of nodes with it.
    If one run has more of them, lflops could only guess which nodes belong together.
    """
    by_key = grouped(right, key)
    for value, nodes in grouped(left, key).items():
        others = by_key.get(value, [])
        if value is not None and (not as_many or len(nodes) == len(others)):
            yield from zip(nodes, others, strict=False)


def _label_and_class(node: ModuleNode) -> Hashable:
    """Return the label and the class of a node as a key.

    Return `None` if the label is a number, because a number does not identify a module.
    """
    if node.label.isdecimal():
        return None
    return node.label, node.kind


_KEYS: tuple[tuple[_Key, bool], ...] = (
    (attrgetter("label", "work"), False),
    (_label_and_class, False),
    (attrgetter("work"), False),
    (attrgetter("label", "kind"), False),
    (attrgetter("build"), True),
    (attrgetter("label"), False),
)
"""Keys that pair the submodules of the two runs, the most reliable key first.

The second value is whether the key needs the same number of submodules in both runs.
"""


Side = Literal["before", "after"]


class ModuleDiff(Struct, frozen=True, kw_only=True):
    """The changes of one module. It may exist in both runs or only in one of them.

    Attributes:
        before: Name in the first run, or `None` if the module was added. A wrapper and the module
            that it wraps count as one module with the name of the wrapper.
        after: Name in the second run, or `None` if the module was removed.
        kind: Class in the second run, or in the first run if the module was removed.
        pattern: Name with `*` for the indices of repeated modules, such as `layers.*.mlp`.
        self_work: Work and time without submodules.
        inclusive: Work and time with submodules. The verdict on this time ignores the part of the
            change that happened in submodules.
        peak_bytes: Peak of the live bytes (bytes of existing tensors) while the module ran.
    """

    before: str | None
    after: str | None
    kind: str
    pattern: str
    self_work: ModuleFigures
    inclusive: ModuleFigures
    peak_bytes: Change

    @property
    def name(self) -> str:
        """Name in the second run, or in the first run if the module was removed."""
        if self.after is not None:
            return self.after
        return self.before or ""

    @property
    def time_ratio(self) -> float | None:
        """The second time divided by the first time, for the times in `news`.

        It is `None` if `news` is a self time that was almost 0 in the first run.
        """
        is_own = self.news is self.self_work.time
        whole = self.inclusive.time.before
        if is_own and _is_tiny(self.news.before, whole):
            return None
        return self.news.ratio

    @property
    def macs_ratio(self) -> float | None:
        """The MACs in the second run divided by the MACs in the first run, without submodules.

        If the module itself had almost no MACs in the first run, submodules are included.
        """
        own = self.self_work.macs
        whole = self.inclusive.macs
        if _is_tiny(own.before, whole.before):
            return whole.ratio
        return own.ratio

    @property
    def news(self) -> Timing:
        """The time that reports show for this module.

        This is the self time if it changed by more than noise, and otherwise the inclusive time.
        """
        own = self.self_work.time
        costs_more = own.verdict is None and own.lost is not None
        if own.verdict in CHANGED or costs_more:
            return own
        return self.inclusive.time


_TINY = 0.05
"""A self value below this share of the value with submodules counts as almost 0.

No ratio is computed from such a value, because the ratio would be meaningless.
"""


def _is_tiny(own: float | None, whole: float | None) -> bool:
    return own is not None and whole is not None and own < _TINY * whole


class Diff(Struct, Displayed, frozen=True, kw_only=True):
    """The changes from a first run to a second run. `None` means unknown.

    Attributes:
        facts: Circumstances that differ, such as the device, the dtype or the samples per step,
            before and after. The fact `phases` lists the phases that ran. If only one run has a
            phase, such as the optimizer, the work of this phase is not compared.
        whole: Factor by which all modules are slower or faster, for example because the second run
            used a slower machine. Module times are divided by it before they are judged.
        step: Time of the unprofiled steps. It is judged without division by `whole`.
        phases: Times of the phases of unprofiled steps. They are divided by `whole` and judged, as
            module times are.
        mfu: Model FLOPs utilization before and after, as a fraction.
        samples_per_second: Samples per second over the unprofiled steps.
        tokens_per_second: Tokens per second over the unprofiled steps.
        peak_bytes: Peak of the live bytes (bytes of existing tensors).
        unreliable: The runs (`before`, `after`) whose module times are unreliable according to
            their profiles. If there is at least one, no module time is judged.
        cpu_lost: Share of the CPU time that other processes took, in each run.
        modules: The modules of the first run in its order, the root first. Then the modules that
            were added in the second run.
    """

    facts: Mapping[str, tuple[Fact, Fact]]
    whole: CommonFactor | None
    step: Timing
    phases: Mapping[str, Timing]
    mfu: Change
    samples_per_second: Change
    tokens_per_second: Change
    peak_bytes: Change
    unreliable: tuple[Side, ...] = ()
    cpu_lost: tuple[float | None, float | None] = (None, None)
    modules: tuple[ModuleDiff, ...]

    @property
    def status(self) -> Verdict | Literal["cannot tell"] | None:
        """The verdict on the step time: slower, faster, the same, or `cannot tell`.

        It is `None` if a time is unknown. It is `cannot tell` if both times are known, but there is
        a reason not to judge them, which is in `step.caveat`.
        """
        if self.step.verdict is None and self.step.caveat is not None:
            return "cannot tell"
        return self.step.verdict

    @property
    def slower(self) -> tuple[ModuleDiff, ...]:
        """Modules that became slower, sorted by the time that they lost, the most first.

        A module is included only if neither noise nor a slowdown of the whole run explains its
        change.
        """
        return self._judged("slower")

    @property
    def faster(self) -> tuple[ModuleDiff, ...]:
        """Modules that became faster, sorted by the time that they saved, the most first.

        A module is included only if neither noise nor a speed-up of the whole run explains its
        change.
        """
        return self._judged("faster")

    @property
    def added(self) -> tuple[ModuleDiff, ...]:
        """Modules that are only in the second run."""
        return tuple(module for module in self.modules if module.before is None)

    @property
    def removed(self) -> tuple[ModuleDiff, ...]:
        """Modules that are only in the first run."""
        return tuple(module for module in self.modules if module.after is None)

    def _judged(self, verdict: Verdict) -> tuple[ModuleDiff, ...]:
        modules = [module for module in self.modules if module.news.verdict == verdict]
        return tuple(sorted(modules, key=lambda module: -abs(module.news.lost or 0.0)))


class Comparison(NamedTuple):
    """A `Diff`, and the data of its modules in both runs, in the order of `Diff.modules`."""

    diff: Diff
    pairs: Sequence[ModulePair]


def diff(before: Profile | str | PathLike[str], after: Profile | str | PathLike[str]) -> Diff:
    """Compare two runs.

    Modules are paired by name, even if they were wrapped or renamed. Work is exact, so every change
    of the work is listed. A time is judged only if the work did not change. A slower machine slows
    down all modules, so the times are first divided by the median ratio over the modules. Then a
    confidence interval decides whether the remaining change is more than noise. The interval is
    computed from the variation of the steps, as described in
    `lflops.analysis.compare.significance`. If a profile is an estimate or a count, it has no times,
    so only work and memory are compared.

    Args:
        before: A profile, or the path of its file.
        after: A second profile, of the same model or of a changed version of it.

    Raises:
        ProfileError: A file cannot be read.
    """
    return compare(_compared_run(before), _compared_run(after)).diff


def _compared_run(run: Profile | str | PathLike[str]) -> ComparedRun:
    if not isinstance(run, Profile):
        run = load(run)
    return compared_run(run)


def compare(before: ComparedRun, after: ComparedRun) -> Comparison:
    """Compare two runs in the same way as `diff`, from data that was already extracted."""
    first = before.figures
    second = after.figures
    nodes = matched(before, after)
    phases = _shared_phases(first, second)
    left = SharedPhases(before, phases)
    right = SharedPhases(after, phases)
    pairs = []
    for one, other in nodes:
        pairs.append(ModulePair(_side(left, one), _side(right, other)))

    unreliable: list[Side] = []
    if not first.has_reliable_times:
        unreliable.append("before")
    if not second.has_reliable_times:
        unreliable.append("after")
    lost = (first.cpu_lost or 0.0, second.cpu_lost or 0.0)
    judge = None
    if not unreliable:
        judge = _judge(pairs, first.step, lost)
    judge_of_step = judge_of_steps(None, first.step, times=1, lost=lost)
    names = dict.fromkeys([*first.phases, *second.phases])
    judge_of_phases = judge_of_steps(judge, first.step, times=len(names), lost=lost)
    phase_times = {}
    for name in names:
        phase_times[name] = judge_of_phases.timing(first.phases.get(name), second.phases.get(name))

    def change(figure: str) -> Change:
        return Change(before=getattr(first, figure), after=getattr(second, figure))

    compared = Diff(
        facts=_facts(first, second),
        whole=judge.whole if judge else None,
        step=judge_of_step.timing(first.step, second.step),
        phases=phase_times,
        mfu=change("mfu"),
        samples_per_second=change("samples_per_second"),
        tokens_per_second=change("tokens_per_second"),
        peak_bytes=change("peak_bytes"),
        unreliable=tuple(unreliable),
        cpu_lost=(first.cpu_lost, second.cpu_lost),
        modules=_modules(nodes, pairs, judge, module_patterns(before), module_patterns(after)),
    )
    return Comparison(compared, pairs)


def _side(of: SharedPhases, node: ModuleNode | None) -> ModuleSide | None:
    if node is None:
        return None
    return ModuleSide(of, node.rows)


def _shared_phases(first: RunFigures, second: RunFigures) -> list[Phase]:
    """Return the phases that ran in both runs. Only these phases are compared.

    If both runs have a backward pass, the result includes recomputation, even if only one run
    recomputes.
    """
    shared = {*first.phases_ran} & {*second.phases_ran}
    if "backward" in shared:
        shared.add("recompute")
    return [phase for phase in PHASES if phase in shared]


def _facts(first: RunFigures, second: RunFigures) -> dict[str, tuple[Fact, Fact]]:
    """Return the circumstances that differ, such as the device, with their values in both runs."""
    before = dict(first.facts)
    after = dict(second.facts)
    if first.counted and second.counted:
        before["phases"] = _phase_names(first)
        after["phases"] = _phase_names(second)
    facts = {}
    for name, value in before.items():
        if value != after.get(name):
            facts[name] = (value, after.get(name))
    return facts


def _phase_names(run: RunFigures) -> str:
    return ", ".join(phase for phase in run.phases_ran if phase != "recompute")


def _judge(
    pairs: Sequence[ModulePair], step: Measured | None, lost: tuple[float, float]
) -> Judge | None:
    known = []
    for pair in pairs:
        if pair.same_work(own=True):
            first, second = pair.times(own=True)
            if first and second:
                known.append((first, second))
    root, _ = pairs[0].times(own=False)
    modules = 0.0
    if root:
        modules = root.seconds
    step_seconds = modules
    if step:
        step_seconds = step.seconds
    return judge_of(known, modules=modules, step=step_seconds, times=2 * len(known), lost=lost)


def _modules(
    nodes: Sequence[NodePair],
    pairs: Sequence[ModulePair],
    judge: Judge | None,
    patterns_before: Mapping[str, str],
    patterns_after: Mapping[str, str],
) -> tuple[ModuleDiff, ...]:
    """Compare all modules, submodules before the modules that contain them.

    The order matters: to judge the inclusive time of a module, it must be known how much of its
    change happened in its submodules.
    """
    explained: dict[ModuleNode | None, float] = {}
    modules = []
    for (before, after), pair in reversed(list(zip(nodes, pairs, strict=True))):
        own = pair.figures(judge, own=True)
        inside = _lost(own.time)
        name_before = name_after = None
        kind = pattern = ""
        if before is not None:
            inside += sum(explained[child] for child in before.children)
            name_before = before.name
            kind = before.kind
            pattern = patterns_before[before.name]
        if after is not None:
            name_after = after.name
            kind = after.kind
            pattern = patterns_after[after.name]
        inclusive = pair.figures(judge, inside, own=False)
        explained[before] = _lost(inclusive.time) or inside
        module = ModuleDiff(
            before=name_before,
            after=name_after,
            kind=kind,
            pattern=pattern,
            self_work=own,
            inclusive=inclusive,
            peak_bytes=pair.change(ModuleSide.peak),
        )
        modules.append(module)
    return tuple(reversed(modules))


def _lost(time: Timing) -> float:
    """Return the seconds by which a time became longer, or 0 if the change is within the noise."""
    if time.verdict not in CHANGED:
        return 0.0
    return time.lost or 0.0


class Limit(Struct, frozen=True, kw_only=True):
    """A limit that the second run was checked against, and the result.

    Attributes:
        name: Name of the limit.
        allowed: Largest allowed value. For MFU, the smallest allowed value.
        found: Value of the second run, or `None` if it is unknown.
        is_broken: Whether the limit is violated, or `None` if this cannot be decided.
        caveat: Reason why `is_broken` is `None` although the value is known.
    """

    name: Literal["max_regress", "min_mfu", "max_memory"]
    allowed: float
    found: float | None
    is_broken: bool | None
    caveat: Caveat | None = None


def limits(
    diff: Diff,
    *,
    max_regress: float | None = None,
    min_mfu: float | None = None,
    max_memory: float | None = None,
) -> tuple[Limit, ...]:
    """Check the second run against limits.

    Args:
        diff: The comparison.
        max_regress: Largest allowed slowdown of the step, as a fraction. A slowdown within the
            noise passes. A slowdown of the whole machine violates the limit. If other processes on
            the machine explain the slowdown, the result is unknown.
        min_mfu: Smallest allowed MFU, as a fraction.
        max_memory: Largest allowed number of bytes alive at once.
    """
    checked = []
    if max_regress is not None:
        checked.append(_regress_limit(diff.step, max_regress))
    if min_mfu is not None:
        checked.append(_mfu_limit(diff.mfu.after, diff.cpu_lost[1] or 0.0, min_mfu))
    if max_memory is not None:
        peak = diff.peak_bytes.after
        broken = None
        if peak is not None:
            broken = peak > max_memory
        checked.append(Limit(name="max_memory", allowed=max_memory, found=peak, is_broken=broken))
    return tuple(checked)


def _regress_limit(step: Timing, allowed: float) -> Limit:
    caveat = step.caveat
    # With too few steps, the slowdown itself counts as unknown, so no caveat is necessary.
    if caveat == "few_steps":
        caveat = None
    regress = None
    broken = None
    if step.ratio is not None:
        if step.low is not None or caveat is not None:
            regress = step.ratio - 1
        if step.low is not None:
            broken = step.low > 1 and step.ratio - 1 > allowed
    return Limit(
        name="max_regress", allowed=allowed, found=regress, is_broken=broken, caveat=caveat
    )


def _mfu_limit(mfu: float | None, lost: float, allowed: float) -> Limit:
    if mfu is None:
        return Limit(name="min_mfu", allowed=allowed, found=None, is_broken=None)
    is_less = mfu < allowed
    if is_less and mfu * slowed_by(lost) >= allowed:
        return Limit(name="min_mfu", allowed=allowed, found=mfu, is_broken=None, caveat="busy")
    return Limit(name="min_mfu", allowed=allowed, found=mfu, is_broken=is_less)


CauseKind = Literal["slower", "faster", "work", "added", "removed", "phase"]

# Largest difference between two ratios of work that still count as equal. A batch of twice the size
# does not exactly double the work of the loss.
_SAME_RATIO = 0.02


class DiffCause(Struct, frozen=True, kw_only=True):
    """A change of a phase or of modules that may explain why the time of the step changed.

    Attributes:
        kind: `phase` for a phase whose time changed. For modules, `slower`, `faster`, `work` (they
            do different work), `added` or `removed`.
        name: Name of the phase, of the module, or of a group of modules. A group is named by its
            pattern, such as `layers.*.mlp`, or by its class if the names differ.
        modules: Number of modules, or 0 for a phase.
        seconds: Seconds by which this change made the step longer. Negative if it made the step
            shorter, and `None` if this is unknown.
        ratio: Second time divided by first time. If the work differs, it is the ratio of the MACs,
            or of the FLOPs if there are no MACs. `None` means unknown.
        low: Lower end of the confidence interval of the ratio of times.
        high: Upper end of the confidence interval of the ratio of times.
    """

    kind: CauseKind
    name: str
    modules: int
    seconds: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class BatchChange(Struct, frozen=True, kw_only=True):
    """A change in the number of samples per step.

    Attributes:
        explains_work: Whether the MACs of the step changed by the same factor as the number of
            samples.
    """

    before: int
    after: int
    explains_work: bool

    @property
    def ratio(self) -> float:
        return self.after / self.before


def batch_change(diff: Diff) -> BatchChange | None:
    """Return the change of the number of samples per step.

    Return `None` if the number did not change, or if it is unknown.
    """
    before, after = diff.facts.get("samples_per_step", (None, None))
    if not isinstance(before, int) or not isinstance(after, int) or not before:
        return None
    work = diff.modules[0].inclusive.macs.ratio
    explains_work = work is not None and _is_same(work, after / before)
    return BatchChange(before=before, after=after, explains_work=explains_work)


def causes(diff: Diff) -> tuple[DiffCause, ...]:
    """Return the changes that may explain why the time of the step changed, the largest first.

    Changes of work that only follow from another batch size are left out.
    """
    batch = batch_change(diff)
    explained = None
    if batch and batch.explains_work:
        explained = batch.ratio
    found = [
        *_module_changes(diff, explained),
        *_phase_changes(diff),
        *_placed("added", diff, diff.added),
        *_placed("removed", diff, diff.removed),
    ]
    return tuple(sorted(found, key=lambda cause: -abs(cause.seconds or 0.0)))


def _phase_changes(diff: Diff) -> Iterator[DiffCause]:
    """Yield the phases with changed times, except phases in which modules already show the change.

    The change is the difference of the measured times. It is not corrected by the factor by which
    all modules became slower or faster, because this factor does not apply to, for example, a data
    wait.
    """
    for name, time in diff.phases.items():
        is_shown_by_modules = diff.whole is not None and name in PASS_PHASES
        if time.verdict not in CHANGED or is_shown_by_modules:
            continue
        if time.before is None or time.after is None:
            continue
        seconds = time.after - time.before
        if abs(seconds) >= LEAST_SHARE * (diff.step.before or 0.0):
            yield DiffCause(kind="phase", name=name, modules=0, seconds=seconds, ratio=time.ratio)


def _module_changes(diff: Diff, explained: float | None) -> Iterator[DiffCause]:
    changed: list[tuple[CauseKind, ModuleDiff]] = []
    for module in diff.modules:
        if module.before is None or module.after is None:
            continue
        verdict = module.news.verdict
        if verdict in ("slower", "faster"):
            changed.append((verdict, module))
        elif module.self_work.time.lost is not None and _has_other_work(module, explained):
            changed.append(("work", module))
    for kind, name, modules in _grouped(diff, changed):
        times = [module.news for module in modules]
        low = high = None
        if kind == "work":
            ratio = _ratio_of_work(modules)
        else:
            ratio = _ratio_if_changed(times)
            low, high = _interval(times, diff.whole)
        yield DiffCause(
            kind=kind,
            name=name,
            modules=len(modules),
            seconds=sum_known(time.lost for time in times),
            ratio=ratio,
            low=low,
            high=high,
        )


def _ratio_of_work(modules: Sequence[ModuleDiff]) -> float | None:
    """Return the factor by which the MACs of a group of modules changed, without submodules.

    If the modules themselves had almost no MACs in the first run, submodules are included. If the
    factor is unknown or 0, or if the MACs did not change, return the factor of the FLOPs.
    """
    macs = [module.self_work.macs for module in modules]
    whole = [module.inclusive.macs for module in modules]
    macs_before, _ = _added_up(macs)
    whole_before, _ = _added_up(whole)
    if _is_tiny(macs_before, whole_before):
        macs = whole
    flops = [module.self_work.flops for module in modules]
    return _ratio_if_changed(macs) or _ratio_if_changed(flops)


def _interval(
    times: Sequence[Timing], whole: CommonFactor | None
) -> tuple[float | None, float | None]:
    """Return the smallest interval that contains the confidence intervals of a group of modules.

    The confidence intervals are relative to the factor by which all modules became slower or
    faster, so they are multiplied by this factor.
    """
    factor = 1.0
    if whole is not None:
        factor = whole.ratio
    lows = []
    highs = []
    for time in times:
        if time.low is not None:
            lows.append(time.low * factor)
        if time.high is not None:
            highs.append(time.high * factor)
    return min(lows, default=None), max(highs, default=None)


def _has_other_work(module: ModuleDiff, explained: float | None) -> bool:
    """Return whether a module's own work changed, and not only because of the batch size.

    `explained` is the factor by which the batch size changed, or `None`.
    """
    own = module.self_work
    if not own.differs:
        return False
    ratio = own.macs.ratio if own.macs.before else own.flops.ratio
    return explained is None or ratio is None or not _is_same(ratio, explained)


def _placed(
    kind: Literal["added", "removed"], diff: Diff, modules: Sequence[ModuleDiff]
) -> Iterator[DiffCause]:
    """Yield a cause for each group of modules that were added or removed.

    If a module was added or removed together with its submodules, the submodules are left out.
    """
    names = {module.name for module in modules}
    uppermost: list[tuple[CauseKind, ModuleDiff]] = []
    for module in modules:
        if not module.name or parent_of(module.name) not in names:
            uppermost.append((kind, module))
    for _, name, group in _grouped(diff, uppermost):
        before, after = _added_up([module.inclusive.time for module in group])
        seconds = multiplied(before, -1.0)
        if kind == "added":
            seconds = after
        yield DiffCause(kind=kind, name=name, modules=len(group), seconds=seconds or None)


def _grouped(
    diff: Diff, changed: Sequence[tuple[CauseKind, ModuleDiff]]
) -> Iterator[tuple[CauseKind, str, list[ModuleDiff]]]:
    """Combine the changes of similar modules into groups, and yield each group with a name.

    Modules are similar if they have the same kind of change and the same pattern, such as
    `layers.*.mlp`. Some modules are grouped by class instead of pattern: modules that were added or
    removed, and modules with changed work but unchanged MACs, such as dropouts.
    """

    def group(change: tuple[CauseKind, ModuleDiff]) -> tuple[CauseKind, str]:
        kind, module = change
        is_work_without_matmuls = kind == "work" and not module.self_work.macs.differs
        is_by_class = kind in ("added", "removed") or is_work_without_matmuls
        if is_by_class and module.kind:
            return kind, module.kind
        return kind, module.pattern

    sizes = Counter(module.pattern for module in diff.modules)
    for (kind, _), changes in grouped(changed, group).items():
        modules = [module for _, module in changes]
        yield kind, _name_of(modules, sizes), modules


def _name_of(modules: Sequence[ModuleDiff], sizes: Mapping[str, int]) -> str:
    """Return a name for a group of modules.

    A pattern is a name with `*` for the indices of repeated modules, such as `layers.*.mlp`.
    `sizes` has the number of all modules that match each pattern. The first case that applies
    determines the name of the group:

    * The group is a single module: the name of the module.
    * The modules match different patterns: their class.
    * The group contains all modules that match a pattern: the pattern.
    * All other groups: the list of the modules' names.
    """
    first = modules[0]
    if len(modules) == 1:
        return first.name or first.kind
    if any(module.pattern != first.pattern for module in modules):
        return first.kind
    if len(modules) == sizes[first.pattern]:
        return first.pattern
    return spelled_out(module.name for module in modules)


def _ratio_if_changed(changes: Sequence[Change | Timing]) -> float | None:
    """Add up several numbers in each run, and return the second sum divided by the first sum.

    Return `None` if a number is unknown, or if both sums are the same.
    """
    before, after = _added_up(changes)
    if after == before:
        return None
    return ratio(after, before)


def _added_up(changes: Sequence[Change | Timing]) -> tuple[float | None, float | None]:
    """Return the sums of several numbers in the first and in the second run.

    A sum is `None` if one of its numbers is unknown.
    """
    before = []
    after = []
    for change in changes:
        before.append(change.before)
        after.append(change.after)
    return sum_known(before), sum_known(after)


def _is_same(one: float, other: float) -> bool:
    return abs(one / other - 1) <= _SAME_RATIO
