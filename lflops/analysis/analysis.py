"""Provide `Analysis`, an object with all results that can be computed from a profile.

Reports read these results and format them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lflops.analysis.compare.compared_run import ComparedRun, compared_run, run_figures
from lflops.analysis.module_outliers import Outliers, outliers
from lflops.analysis.operators import (
    Operator,
    UnsupportedOperator,
    operators,
    unsupported_operators,
)
from lflops.analysis.roofline import Fusion, LazyRoofline, LowerBound, fusion, lower_bound
from lflops.analysis.step_breakdown import StepBreakdown
from lflops.analysis.step_times import StepTimes, step_times
from lflops.analysis.tree import (
    BusyModules,
    ModuleRow,
    WorkCounts,
    busiest,
    flat,
    identical_subtrees,
    totals,
    tree,
    unsharded_macs,
)
from lflops.analysis.utilization import Utilization, utilization_at
from lflops.estimation.prediction import Prediction, predict
from lflops.findings.evaluate import findings_of_step
from lflops.findings.evidence import StepEvidence
from lflops.findings.finding import Finding
from lflops.hardware.chips import Hardware
from lflops.hardware.peaks import chip_of
from lflops.memory.peak import (
    Checkpointed,
    Holder,
    MemoryFit,
    checkpointed,
    memory_fit_of,
    memory_holders,
    peak_moment,
)
from lflops.profile.module_names import children
from lflops.profile.notes import notes_with
from lflops.profile.profile import Moment, Profile
from lflops.profile.records import Phase
from lflops.ranks.communication import Collective, communication
from lflops.ranks.straggler import Stragglers
from lflops.ranks.stragglers import stragglers


@dataclass(frozen=True, eq=False)
class Analysis:
    """All results that can be computed from a profile, such as its step breakdown and roofline.

    Each result is computed when it is first read, and then kept. `chip` is the chip whose peaks the
    profile is compared with, or `None` if the chip is unknown.
    """

    profile: Profile
    chip: Hardware | None

    @cached_property
    def step_times(self) -> StepTimes:
        return step_times(self.profile)

    @cached_property
    def utilization(self) -> Utilization:
        return utilization_at(self.profile, self.chip, self.step_times)

    @property
    def breakdown(self) -> StepBreakdown | None:
        """The parts into which the time of the mean step is divided, or `None` if unknown."""
        return self.utilization.breakdown

    @cached_property
    def roofline(self) -> LazyRoofline:
        return LazyRoofline(self.profile, self.chip)

    @cached_property
    def fusion(self) -> tuple[Fusion, ...]:
        """The bytes that compiled modules move in each phase, with and without fusion."""
        return fusion(self.profile)

    @cached_property
    def lower_bound(self) -> LowerBound | None:
        return lower_bound(self.profile, self.chip)

    @cached_property
    def predicted(self) -> Prediction | None:
        """Predicted time of a training step on the chip, or `None` if lflops cannot predict it."""
        return predict(self.profile, self.chip)

    @cached_property
    def evidence(self) -> StepEvidence:
        """The results that the rules of `lflops.findings` read."""
        return StepEvidence(
            profile=self.profile,
            times=self.step_times,
            utilization=self.utilization,
            stragglers=self.stragglers,
            outliers=self.outliers.found,
            busiest=self.busiest,
            patterns=self.patterns,
            children=self.children,
            has_spare_memory=self._has_spare_memory,
        )

    @property
    def _has_spare_memory(self) -> bool:
        fit = self.memory_fit
        return fit is not None and 2 * fit.needed_bytes <= fit.usable_bytes

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Reasons why the step takes as long as it does.

        Issues come first. Findings that only show where the other time goes come after them.
        """
        return findings_of_step(self.evidence)

    @cached_property
    def compared(self) -> ComparedRun:
        """The data of this run that a comparison with another run needs."""
        figures = run_figures(self.profile, self.step_times, self.utilization.mfu)
        return compared_run(self.profile, figures)

    @cached_property
    def children(self) -> Mapping[str, Sequence[str]]:
        return children(self.profile.modules)

    @cached_property
    def identical_subtrees(self) -> Mapping[str, int]:
        return identical_subtrees(self.profile, self.children)

    @cached_property
    def patterns(self) -> Mapping[str, str]:
        return self.profile.patterns(self.children)

    @cached_property
    def busiest(self) -> tuple[BusyModules, ...]:
        """The modules in descending order of self time. Identical modules are one entry."""
        return busiest(self.profile, self.patterns, self.step_times.communicating)

    @cached_property
    def outliers(self) -> Outliers:
        """Modules that are slower than identical modules.

        If it is uncertain whether another module is slow, the result has the reason.
        """
        return outliers(
            self.profile,
            self.patterns,
            self.identical_subtrees,
            self.children,
            self.step_times.mean,
        )

    @cached_property
    def uncalled(self) -> tuple[str, ...]:
        """The names of modules that were never called, which may be a mistake in the model.

        Two kinds of modules are left out, because for them it is no mistake. The first are modules
        without parameters, such as metrics. The second are modules whose weights are used without a
        call. For example, the loss may multiply by the weights of the model's head, and the
        optimizer still updates them.
        """
        uncalled = []
        for name in self.profile.uncalled:
            module = self.profile.modules[name]
            if not name or (module.parameters and not module.optimizer.calls):
                uncalled.append(name)
        return tuple(uncalled)

    @cached_property
    def totals(self) -> Mapping[Phase, WorkCounts]:
        return totals(self.profile)

    @property
    def total_macs(self) -> int:
        """MACs of all phases together."""
        return sum(counts.macs for counts in self.totals.values())

    @cached_property
    def unsharded_macs(self) -> Mapping[str, int | None]:
        return unsharded_macs(self.profile)

    @cached_property
    def is_staged(self) -> bool:
        """Return whether ranks run different modules, such as the stages of a pipeline.

        If they do, each rank does only a part of the work that is counted for the root module.
        """
        notes = notes_with("ranks_differ", self.profile.notes)
        return any(note.values.get("rows_of_others") for note in notes)

    @cached_property
    def unsupported(self) -> tuple[UnsupportedOperator, ...]:
        return unsupported_operators(self.profile)

    def operators(self, phase: Phase | None) -> tuple[Operator, ...]:
        return operators(self.profile, phase)

    def tree(
        self, *, depth: int = -1, sort: str | None = None, phase: Phase | None = "forward"
    ) -> tuple[ModuleRow, ...]:
        return tree(
            self.profile,
            depth=depth,
            sort=sort,
            phase=phase,
            below=self.children,
            groups=self.identical_subtrees,
        )

    def flat(
        self, *, sort: str | None = None, phase: Phase | None = "forward"
    ) -> tuple[ModuleRow, ...]:
        return flat(self.profile, sort=sort, phase=phase)

    @property
    def peak_bytes(self) -> int | None:
        if self.profile.memory is not None:
            return self.profile.memory.peak_bytes
        return self.profile.modules[""].peak_bytes

    @cached_property
    def memory_fit(self) -> MemoryFit | None:
        """The verdict on whether the step fits into the chip's memory, or `None` if unknown."""
        return memory_fit_of(self.profile, self.chip)

    @cached_property
    def peak_moment(self) -> Moment | None:
        """The operator that reached the memory peak, or `None` if it is unknown."""
        if self.profile.memory is None:
            return None
        return peak_moment(self.profile.memory)

    @cached_property
    def holders(self) -> tuple[Holder, ...]:
        """The modules that hold the bytes that are alive at the memory peak."""
        if self.profile.memory is None:
            return ()
        return memory_holders(self.profile.memory, self.patterns)

    @cached_property
    def checkpointed(self) -> tuple[Checkpointed, ...]:
        """The memory that activation checkpointing would save, for each block."""
        return checkpointed(self.profile)

    @cached_property
    def stragglers(self) -> Stragglers:
        return stragglers(self.profile)

    @cached_property
    def communication(self) -> tuple[Collective, ...]:
        return communication(self.profile, self.chip)


def analyze(profile: Profile, hardware: Hardware | str | None = None) -> Analysis:
    """Return the analysis of a profile. Its results are computed when they are read.

    Args:
        profile: The profile.
        hardware: The chip that the profile is compared with, or its name in the table of chips. By
            default, the chip of the run.
    """
    return Analysis(profile, chip_of(profile, hardware))
