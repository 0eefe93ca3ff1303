"""Rules about the parts of the time of modules: ideal compute, and time beyond ideal compute."""

from collections.abc import Iterable

from lflops.findings.evidence import StepEvidence
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Threshold
from lflops.profile.profile import ModuleProfile
from lflops.profile.records import PHASES
from lflops.profile.series import grouped

MAIN_CLASSES = 3
"""Maximum number of module classes that are examined to describe memory-bound work.

The classes with the most memory-bound work are examined. If their modules run no matmuls, the
sentence of the finding says "memory-bound pointwise work".
"""

COVERED_SHARE = 2 / 3
"""No further class is examined if the examined classes have this share of memory-bound work."""

UNKNOWN_PARTS = {"idle": "idle time", "memory_bound": "memory-bound work"}
"""Parts of the step that are included in the part `inefficient_kernels` if their time is unknown.

The values are the names of these parts in the sentence of the finding.
"""


class IdealCompute(PartRule):
    """The step's matmuls need this time even if they run at the chip's peak.

    This time is never reported as a finding, but the step breakdown shows it.
    """

    name = "ideal_compute"
    phrase = "useful matrix multiplication"
    fix = "Run the matmuls in a lower precision"


class RecomputedMatmuls(PartRule):
    """Activation checkpointing recomputes matmuls in backward.

    The cost is the time that the recomputed matmuls would take at the chip's peak.

    If the step needs at most half of the device's memory, a cost of 5 % is already an issue.
    """

    name = "recompute"
    threshold = Threshold(share=0.12)
    share_with_spare_memory = 0.05
    verb = "is spent on"
    phrase = "matmuls that activation checkpointing recomputes"
    fix = "Use activation checkpointing for fewer layers if memory allows it"

    def issue_share(self, step: StepEvidence) -> float | None:
        if step.has_spare_memory:
            return self.share_with_spare_memory
        return self.threshold.share


class MemoryBoundWork(PartRule):
    """Operators are limited by memory: moving their bytes takes longer than their arithmetic."""

    name = "memory_bound"
    label = "memory-bound"
    phrase = "memory-bound work"
    fix = "Fuse the operators of {where}, for example with torch.compile"

    def part_fix(self, step: StepEvidence) -> str:
        return self.fix if step.can_fuse else ""

    def phrase_for(self, step: StepEvidence) -> str:
        main = list(_main_modules(step))
        if not main:
            return self.phrase
        for name in main:
            if _runs_matmuls(step.profile.modules[name]):
                return self.phrase
        return "memory-bound pointwise work"


def _runs_matmuls(module: ModuleProfile) -> bool:
    """Return whether a module runs matmuls itself, outside its submodules."""
    return any(module.work(phase).self_macs for phase in PHASES)


def _main_modules(step: StepEvidence) -> Iterable[str]:
    """Yield the modules of the few classes that have most of the memory-bound work."""
    if step.breakdown is None:
        return
    shares = {}
    for name, parts in step.breakdown.modules.items():
        if parts["memory_bound"]:
            shares[name] = parts["memory_bound"]

    def share_of(names: Iterable[str]) -> float:
        return sum(shares[name] for name in names)

    by_class = grouped(shares, lambda name: step.profile.modules[name].class_name or name)
    ordered = sorted(by_class.values(), key=share_of, reverse=True)
    covered = 0.0
    for names in ordered[:MAIN_CLASSES]:
        if covered >= COVERED_SHARE * sum(shares.values()):
            return
        yield from names
        covered += share_of(names)


class InefficientKernels(PartRule):
    """Modules take longer than the least time that their operators need on this chip.

    Typical causes are small kernels, kernel launches and slow memory layouts. If the device was not
    traced, its idle time is included.
    """

    name = "inefficient_kernels"
    label = "inefficient kernels"
    verb = "is lost to"
    phrase = "inefficient kernels"
    fix = "Use larger batches, or let {where} run fewer and larger kernels (torch.compile)"

    def phrase_for(self, step: StepEvidence) -> str:
        parts = [self.phrase]
        if step.breakdown is not None:
            for name in step.breakdown.inside_rest:
                parts.append(UNKNOWN_PARTS[name])
        if len(parts) == 1:
            return self.phrase
        return f"{', '.join(parts[:-1])} or {parts[-1]}"


class ForwardOutsideModules(PartRule):
    """Forward spends time outside all modules that lflops monitors.

    This time is not reported as a separate finding: the cost of the finding `outside` includes it.
    """

    name = "forward"
    verb = "is spent in"
    phrase = "forward, outside the layers"
    fix = (
        "Do not exclude modules with ignore=. Wrap code that runs outside modules in lflops.scope, "
        "so that it has a name"
    )


class BackwardOutsideModules(PartRule):
    """Backward spends time outside all modules that lflops monitors."""

    name = "backward"
    verb = "is spent in"
    phrase = "backward, outside the layers"
    fix = ForwardOutsideModules.fix
