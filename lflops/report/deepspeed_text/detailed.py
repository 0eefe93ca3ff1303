"""The third part of the text: the model as torch prints it, with what each module holds, does and takes."""

from collections.abc import Iterator, Mapping, Sequence

from lflops.profile.model import ModuleProfile, Profile
from lflops.report.deepspeed_text import units as short_units
from lflops.report.terminal.text import plain
from lflops.units import UNKNOWN

__all__ = ["detailed"]

_LEGEND = """\
Behind a module's name: its params, MACs and fwd latency, each with its share of the whole model's; its fwd FLOPS; what torch prints of it.
The modules below it are included. What is left beyond their sum is the module's own: functions that its forward calls itself.
Parameters that modules share are counted in the first of them."""


def detailed(profile: Profile) -> str:
    """The text, without a heading."""
    below: dict[str, list[str]] = {name: [] for name in profile.modules}
    for name in filter(None, profile.modules):
        below[name.rpartition(".")[0]].append(name)
    return "\n".join([_LEGEND, "", *_module(profile, "", below, frozenset(profile.uncalled))])


def _module(profile: Profile, name: str, below: Mapping[str, Sequence[str]], uncalled: frozenset[str]) -> Iterator[str]:
    """The lines of a module and of those below it."""
    module = profile.modules[name]
    figures = ", ".join(_figures(profile, module, never_called=name in uncalled))
    if not below[name]:
        yield f"{plain(module.kind)}({figures})"
        return
    yield f"{plain(module.kind) or 'all of it'}("
    yield f"  {figures}"
    for child in below[name]:
        first, *rest = _module(profile, child, below, uncalled)
        yield f"  ({plain(child.rpartition('.')[2])}): {first}"
        for line in rest:
            yield f"  {line}"
    yield ")"


def _figures(profile: Profile, module: ModuleProfile, *, never_called: bool) -> Iterator[str]:
    """What stands behind a module's name."""
    root, work = profile.modules[""], module.forward
    seconds = work.seconds.median if work.seconds else None
    whole = root.forward.seconds.median if root.forward.seconds else None
    params = short_units.percent(module.local_parameters, root.local_parameters)
    yield f"{short_units.params(module.local_parameters)} = {params} Params"
    yield f"{short_units.macs(work.macs)} = {short_units.percent(work.macs, root.forward.macs)} MACs"
    yield f"{short_units.duration(seconds)} = {short_units.percent(seconds, whole)} latency"
    yield short_units.rate(work.flops / seconds) if seconds else f"{UNKNOWN} FLOPS"
    if module.owner is not None:
        yield f"shares {plain(module.owner) or 'the root'}"
    if module.compiled:
        yield "compiled"
    if never_called:
        yield "never called"
    if module.detail:
        yield plain(module.detail)
