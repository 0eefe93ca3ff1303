"""The model as torch prints it, with the figures of each module."""

from collections.abc import Iterator

from lflops.analysis.analysis import Analysis
from lflops.analysis.tree import ModuleRow, numbered, tree, walk
from lflops.integrations.deepspeed.text import units
from lflops.profile.module_names import plain
from lflops.profile.series import ratio
from lflops.units import UNKNOWN

_LEGEND = (
    "Behind a module's name: its params, MACs and fwd latency, each with its share of the whole "
    "model's; its fwd FLOPS; what torch prints of it.\n"
    "The modules below it are included. What is left beyond their sum is the module's own: "
    "functions that its forward calls itself.\n"
    "Parameters that modules share are counted in the first of them."
)

_FOLDED = (
    "12 x: the figures are those of one of 12 modules with the same counts, its latency their mean."
)


def detailed(analysis: Analysis, *, fold: bool) -> str:
    """The legend, and the lines of the model.

    With `fold`, modules with the same counts share their lines.
    """
    modules = analysis.profile.modules
    identical = analysis.identical_subtrees
    groups = None
    if fold:
        # Also separate the text that torch prints for the modules.
        groups = numbered(analysis.children, lambda name: (identical[name], modules[name].detail))
    (root,) = tree(analysis.profile, fold=False, below=analysis.children, groups=groups)
    lines = [_LEGEND]
    if any(row.repeat for row in walk([root])):
        lines.append(_FOLDED)
    return "\n".join([*lines, "", *_module(analysis, root)])


def _module(analysis: Analysis, row: ModuleRow) -> Iterator[str]:
    """The lines of a module and of the modules below it."""
    name = plain(row.class_name)
    if row.repeat:
        name = f"{row.times} x {name}"
    figures = ", ".join(_figures(analysis, row))
    if not row.children:
        yield f"{name}({figures})"
        return
    yield f"{name or 'all of it'}("
    yield f"  {figures}"
    for child in row.children:
        first, *rest = _module(analysis, child)
        yield f"  ({_label(child)}): {first}"
        for line in rest:
            yield f"  {line}"
    yield ")"


def _label(row: ModuleRow) -> str:
    """The last part of the module's name.

    Repeated modules have the range of their numbers, as torch prints it, or all their names.
    """
    labels = [name.rpartition(".")[2] for name in row.names]
    if row.repeat and all(label.isdecimal() for label in labels):
        return plain(f"{labels[0]}-{labels[-1]}")
    return plain(", ".join(labels))


def _figures(analysis: Analysis, row: ModuleRow) -> Iterator[str]:
    module = analysis.profile.modules[row.name]
    root = analysis.profile.modules[""]
    parameters = module.local_parameters
    parameters_share = units.percent(parameters, root.local_parameters)
    macs = module.forward.macs
    macs_share = units.percent(macs, root.forward.macs)
    seconds = row.seconds["forward"]
    root_seconds = None if root.forward.seconds is None else root.forward.seconds.median
    seconds_share = units.percent(seconds, root_seconds)
    yield f"{units.params(parameters)} = {parameters_share} Params"
    yield f"{units.macs(macs)} = {macs_share} MACs"
    yield f"{units.duration(seconds)} = {seconds_share} latency"
    rate = ratio(module.forward.flops, seconds)
    yield f"{UNKNOWN} FLOPS" if rate is None else units.rate(rate)
    if module.owner is not None:
        yield f"shares {plain(module.owner) or 'the model itself'}"
    if module.compiled:
        yield "compiled"
    if row.name in analysis.uncalled:
        yield "never called"
    if module.detail:
        yield plain(module.detail)
