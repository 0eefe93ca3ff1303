"""Print the model as torch does, with the parameters, MACs and latency of each module."""

from collections.abc import Iterator

from lflops.analysis.analysis import Analysis
from lflops.analysis.tree import ModuleRow, numbered, tree, walk
from lflops.integrations.deepspeed.text import units
from lflops.profile.module_names import plain
from lflops.profile.records import median_of
from lflops.profile.series import ratio
from lflops.units import UNKNOWN

_LEGEND = (
    "The text after a module's name shows its params, MACs and fwd latency, each also as a share "
    "of the whole model. Then come its fwd FLOPS, and the text that torch prints for the module.\n"
    "These figures include the submodules. Any difference from the sum of the submodules comes "
    "from functions that the module's forward calls directly.\nParameters that several modules "
    "share are counted in the first of these modules."
)

_FOLDED = (
    "A line with, for example, 12 x stands for 12 modules with the same counts. It shows the "
    "counts of one of these modules, and the mean of their latencies."
)


def detailed(analysis: Analysis, *, fold: bool) -> str:
    """Return the text that lists the model, module by module, with a legend.

    Args:
        analysis: The profile with its results.
        fold: Whether modules with the same counts are listed only once, such as "12 x Block".
    """
    modules = analysis.profile.modules
    identical = analysis.identical_subtrees
    groups = None
    if fold:
        # Modules for which torch prints different text are listed separately.
        groups = numbered(analysis.children, lambda name: (identical[name], modules[name].detail))
    (root,) = tree(analysis.profile, fold=False, below=analysis.children, groups=groups)
    lines = [_LEGEND]
    if any(row.repeat for row in walk([root])):
        lines.append(_FOLDED)
    return "\n".join([*lines, "", *_module(analysis, root)])


def _module(analysis: Analysis, row: ModuleRow) -> Iterator[str]:
    """Yield the lines about a module and the modules below it."""
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
    """Return the last part of a module's name, such as `mlp`.

    For repeated modules that are listed only once, returns the range of their numbers, such as
    `0-11`, or a list of their names.
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
    root_seconds = median_of(root.forward.seconds)
    seconds_share = units.percent(seconds, root_seconds)
    yield f"{units.params(parameters)} = {parameters_share} Params"
    yield f"{units.macs(macs)} = {macs_share} MACs"
    yield f"{units.duration(seconds)} = {seconds_share} latency"
    rate = ratio(module.forward.flops, seconds)
    yield f"{UNKNOWN} FLOPS" if rate is None else units.rate(rate)
    if module.owner is not None:
        yield f"shares parameters of {plain(module.owner) or 'the model itself'}"
    if module.compiled:
        yield "compiled"
    if row.name in analysis.uncalled:
        yield "never called"
    if module.detail:
        yield plain(module.detail)
