"""Pair the modules of two runs, across wrappers and renames."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lflops.analyze.compare.compared_run import ComparedRun
from lflops.profile.series import grouped

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module"})
"""Names under which DDP, FSDP, torch.compile, checkpointing and Lightning's Fabric register the one module that they wrap."""

_Key = Callable[["ModuleNode"], Hashable]


@dataclass(eq=False)
class ModuleNode:
    """A module in a run's tree, together with the modules that wrap it: from outside they are one module."""

    name: str  # of the outermost
    rows: list[int]  # of all of them as positions in the run's columns, the outermost first
    label: str  # the last part of its name
    kind: str  # the class of the innermost, that which is wrapped
    children: list["ModuleNode"] = field(default_factory=list)  # the modules below the innermost
    build: int = 0  # a number that is the same for two nodes, of either run, with the same classes all the way down
    work: int = 0  # a number that is the same for two nodes with the same parameters and MACs of forward, too

    def walk(self) -> Iterator["ModuleNode"]:
        """Itself and every node below it, in the model's order."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


_Partners = dict[ModuleNode, ModuleNode]  # by node, of either run

Pair = tuple[ModuleNode | None, ModuleNode | None]  # the same module before and after; `None` where it was added or removed


def matched(before: ComparedRun, after: ComparedRun) -> tuple[Pair, ...]:
    """Each module of either run once: those of the first run in its order, then the added ones.

    A wrapper and the wrapped module count as one. So do a module, such as a LightningModule, and the whole model in one of its attributes.
    The children of a pair are paired by one key after the other:

    1. Label and work, where work is the classes, parameters and forward MACs all the way down.
    2. Label and class, if the label is no number.
    3. Work.
    4. Label and class, if the label is a number.
    5. All classes below, if both sides have equally many modules of them.
    6. Label.

    Of several children with the same key, the first is paired with the first. A module without a partner may have moved. It is searched for
    anywhere, by label and work.
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
    return (*((node, partners.get(node)) for node in one.walk()), *((None, node) for node in _single(partners, other.walk())))


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
        range(len(run.names)), key=lambda row: run.names[row].count(".") + bool(run.names[row])
    ):  # stable: siblings keep the order
        name = run.names[row]
        above, _, label = name.rpartition(".")
        nodes[name] = ModuleNode(name=name, rows=[row], label=label, kind=run.kinds[row].removeprefix("FSDP"))
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
    """Where one run's whole model is an attribute of the other's root, as in a LightningModule, make root and model one node."""
    inside = [(root, other, child) for root, other in ((before, after), (after, before)) for child in root.children if child.children]
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
    parameters, macs = run.columns["own_parameters"], run.columns["forward.own_macs"]
    for node in reversed(list(root.walk())):
        figures = tuple((parameters[row], macs[row] or 0) for row in node.rows if parameters[row] or macs[row])
        node.build = numbers.setdefault(("build", node.kind, *(child.build for child in node.children)), len(numbers))
        node.work = numbers.setdefault(("work", node.kind, figures, *(child.work for child in node.children)), len(numbers))


def _same(left: Sequence[ModuleNode], right: Sequence[ModuleNode], key: _Key, *, as_many: bool) -> Iterator[tuple[ModuleNode, ModuleNode]]:
    """The nodes with the same key, in order. With `as_many` both sides must have as many, or the pairs would be a guess."""
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
