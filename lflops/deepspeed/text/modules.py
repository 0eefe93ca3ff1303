"""The second and third part of the text: classes of modules by depth, and the model as torch prints it with figures for each module."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Literal

from msgspec import Struct

from lflops.analyze.analysis import Analysis
from lflops.analyze.modules.tree import Row, numbered, tree, walk
from lflops.deepspeed.text import units as short_units
from lflops.profile.model import ModuleProfile, Profile
from lflops.profile.series import grouped, sum_known
from lflops.report.lines.text import plain
from lflops.units import UNKNOWN


class Kind(Struct, frozen=True, kw_only=True):
    """All modules of one class at one depth, each with what is below it; no module is in another one of the same depth."""

    kind: str
    modules: int
    parameters: int  # what this rank holds of them
    macs: int  # in forward
    seconds: float | None  # in forward, the medians added up; `None` where one that ran has none, or none ran


def by_depth(profile: Profile, depth: int = -1) -> tuple[tuple[Kind, ...], ...]:
    """The classes at depth 0, which is the root alone, at depth 1, and so on, in the model's order.

    The last depth is `depth`; -1, and anything deeper than the model, is the innermost. Less is a `ValueError`.
    """
    if depth < -1:
        raise ValueError(f"depth={depth!r}: give -1 for all depths, 0 for the model alone, or how many to go below it")
    levels = grouped((module for module in profile.modules.values() if depth == -1 or module.depth <= depth), attrgetter("depth"))
    kinds = (grouped(levels[level], attrgetter("kind")) for level in sorted(levels))
    return tuple(tuple(_kind(kind, modules) for kind, modules in by_kind.items()) for by_kind in kinds)


def most(kinds: Iterable[Kind], metric: Literal["parameters", "macs", "seconds"], number: int) -> dict[str, float]:
    """The kinds with the most of a metric, sorted; kinds for which it is unknown are left out."""
    known = [(kind.kind, value) for kind in kinds if (value := getattr(kind, metric)) is not None]
    return dict(sorted(known, key=lambda each: -each[1])[:number])


def _kind(kind: str, modules: list[ModuleProfile]) -> Kind:
    ran = [module.forward.seconds for module in modules if module.calls or module.forward.calls]
    return Kind(
        kind=kind,
        modules=len(modules),
        parameters=sum(module.local_parameters for module in modules),
        macs=sum(module.forward.macs for module in modules),
        seconds=sum_known(None if spread is None else spread.median for spread in ran) if ran else None,
    )


_LEGEND = """\
Behind a module's name: its params, MACs and fwd latency, each with its share of the whole model's; its fwd FLOPS; what torch prints of it.
The modules below it are included. What is left beyond their sum is the module's own: functions that its forward calls itself.
Parameters that modules share are counted in the first of them."""

_FOLDED = "12 x: the figures are those of one of 12 modules with the same counts, its latency their mean."


def aggregated(profile: Profile, *, module_depth: int = -1, top_modules: int = 1) -> str:
    """The second part, without a heading: at each depth down to `module_depth`, the classes with the most parameters, MACs and time."""
    lines = [f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:"]
    for depth, kinds in enumerate(by_depth(profile, module_depth)):
        lines += [
            f"depth {depth}:",
            f"    params      - {_named(most(kinds, 'parameters', top_modules), short_units.params)}",
            f"    MACs        - {_named(most(kinds, 'macs', top_modules), short_units.macs)}",
            f"    fwd latency - {_named(most(kinds, 'seconds', top_modules), short_units.duration)}",
        ]
    return "\n".join(lines)


def _named(figures: Mapping[str, float], unit: Callable[[float], str]) -> str:
    return str({plain(kind): unit(value) for kind, value in figures.items()}) if figures else UNKNOWN


def detailed(analysis: Analysis, *, fold: bool = False) -> str:
    """The third part, without a heading; with `fold`, modules with the same counts share their lines."""
    modules, identical = analysis.profile.modules, analysis.identical_subtrees
    groups = numbered(analysis.children, lambda name: (identical[name], modules[name].detail)) if fold else None
    rows = tree(analysis.profile, fold=False, below=analysis.children, groups=groups)
    legend = f"{_LEGEND}\n{_FOLDED}" if any(row.repeat for row in walk(rows)) else _LEGEND
    return "\n".join([legend, "", *_module(analysis, rows[0], frozenset(analysis.uncalled))])


def _module(analysis: Analysis, row: Row, uncalled: frozenset[str]) -> Iterator[str]:
    kind = f"{row.times} x {plain(row.kind)}" if row.repeat else plain(row.kind)
    figures = ", ".join(_figures(analysis.profile, row, never_called=row.name in uncalled))
    if not row.children:
        yield f"{kind}({figures})"
        return
    yield f"{kind or 'all of it'}("
    yield f"  {figures}"
    for child in row.children:
        first, *rest = _module(analysis, child, uncalled)
        yield f"  ({_label(child)}): {first}"
        for line in rest:
            yield f"  {line}"
    yield ")"


def _label(row: Row) -> str:
    """The last part of the name; of modules that share their lines both numbers, as torch prints them, or all names."""
    labels = [name.rpartition(".")[2] for name in row.names]
    ends = (labels[0], labels[-1]) if row.repeat and all(label.isdecimal() for label in labels) else ()
    return plain("-".join(ends) if ends else ", ".join(labels))


def _figures(profile: Profile, row: Row, *, never_called: bool) -> Iterator[str]:
    module, seconds = profile.modules[row.name], row.seconds["forward"]
    root, work = profile.modules[""], module.forward
    total = root.forward.seconds.median if root.forward.seconds else None
    params = short_units.percent(module.local_parameters, root.local_parameters)
    yield f"{short_units.params(module.local_parameters)} = {params} Params"
    yield f"{short_units.macs(work.macs)} = {short_units.percent(work.macs, root.forward.macs)} MACs"
    yield f"{short_units.duration(seconds)} = {short_units.percent(seconds, total)} latency"
    yield short_units.rate(work.flops / seconds) if seconds else f"{UNKNOWN} FLOPS"
    if module.owner is not None:
        yield f"shares {plain(module.owner) or 'the model itself'}"
    if module.compiled:
        yield "compiled"
    if never_called:
        yield "never called"
    if module.detail:
        yield plain(module.detail)
