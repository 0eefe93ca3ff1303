"""List all rules, in the order in which they are evaluated."""

from collections.abc import Iterator

from lflops.findings.part_rule import NamedPhase, PartRule
from lflops.findings.rule import ModuleRule, Rule, StepRule
from lflops.findings.rules.between_epochs import BetweenEpochs
from lflops.findings.rules.busiest_module import BusiestModule
from lflops.findings.rules.checkpoints import RepeatedWork, SavingCheckpoints
from lflops.findings.rules.communication import (
    CommunicationOfRun,
    ExposedCommunication,
    LightningCollectives,
)
from lflops.findings.rules.compilation import Compilation
from lflops.findings.rules.data_wait import DataWait, DataWaitOfRun
from lflops.findings.rules.device_copies import (
    ExposedCopies,
    HostToDeviceCopy,
    InferenceInStep,
)
from lflops.findings.rules.frozen_layers import FrozenLayers, GradientsOfFrozenWeights
from lflops.findings.rules.gradient_hooks import GradientHooks
from lflops.findings.rules.gradient_work import GradientWork
from lflops.findings.rules.growing_memory import GrowingMemory
from lflops.findings.rules.idle_device import IdleDevice
from lflops.findings.rules.later_steps import LongerThanInWindow
from lflops.findings.rules.logging_time import Logging
from lflops.findings.rules.memory_driver import AllocatingMemory
from lflops.findings.rules.module_parts import (
    BackwardOutsideModules,
    ForwardOutsideModules,
    IdealCompute,
    InefficientKernels,
    MemoryBoundWork,
    RecomputedMatmuls,
)
from lflops.findings.rules.no_matmuls import NoMatmuls
from lflops.findings.rules.optimizer import OptimizerWithoutWindow, SlowOptimizer
from lflops.findings.rules.other_work import (
    OtherWork,
    OtherWorkOfRun,
    OtherWorkWithoutWindow,
)
from lflops.findings.rules.outside_layers import OutsideLayers
from lflops.findings.rules.padding import Padding
from lflops.findings.rules.precision import DoublePrecision, UnusedTensorCores, WideDtype
from lflops.findings.rules.python_code import PythonCode
from lflops.findings.rules.python_loops import PythonLoop
from lflops.findings.rules.recomputation import Recomputation
from lflops.findings.rules.repeated_backward import FurtherDerivatives, RepeatedBackward
from lflops.findings.rules.sleep import SleepingThread
from lflops.findings.rules.slow_module import MoreOperators, SlowModule
from lflops.findings.rules.slow_rank import AlternatingStragglers, SlowRank
from lflops.findings.rules.slow_settings import (
    AnomalyMode,
    EvalMode,
    FindUnusedParameters,
    GraphBreaks,
)
from lflops.findings.rules.slow_steps import (
    AllocatorRetries,
    GarbageCollection,
    LargerBatches,
    NotScheduled,
    SlowStepsOfOtherRanks,
    Swapping,
    UnexplainedSlowSteps,
)
from lflops.findings.rules.threads import ComputingThread, TooManyThreads
from lflops.findings.rules.time_without_module import AllOfBackward, AllOfForward
from lflops.findings.rules.untrained_modules import UntrainedModules
from lflops.findings.rules.unused_layers import UnusedLayer
from lflops.findings.rules.validation import Inference, Validation
from lflops.findings.rules.wrong_peak import PeakTooLow
from lflops.findings.run_rule import RunRule

SETTING_RULES: tuple[StepRule, ...] = (
    AnomalyMode(),
    EvalMode(),
    GraphBreaks(),
    FindUnusedParameters(),
    TooManyThreads(),
    ComputingThread(),
    Padding(),
)
"""Rules about the settings of the training run."""

RANK_RULES: tuple[StepRule, ...] = (SlowRank(), AlternatingStragglers())
"""Rules about slow ranks.

The cost of a slow rank is subtracted from the costs of other findings that contain the same time.
"""

MODULE_RULES: tuple[ModuleRule, ...] = (
    GradientHooks(),
    SlowModule(),
    MoreOperators(),
    SleepingThread(),
    WideDtype(),
    DoublePrecision(),
    OutsideLayers(),
)
"""Rules about the times of modules.

The cost of such a finding is subtracted from the finding of `PART_RULES` that contains the same
time.
"""

PART_RULES: tuple[PartRule, ...] = (
    DataWait(),
    HostToDeviceCopy(),
    InferenceInStep(),
    ExposedCopies(),
    GradientWork(),
    SlowOptimizer(),
    OtherWork(),
    ExposedCommunication(),
    LightningCollectives(),
    IdleDevice(),
    AllocatingMemory(),
    InefficientKernels(),
    MemoryBoundWork(),
    RecomputedMatmuls(),
    ForwardOutsideModules(),
    BackwardOutsideModules(),
    IdealCompute(),
)
"""Rules about the parts of the step, which do not overlap.

A part is a phase outside modules, such as the data wait, or one kind of time in modules, such as
memory-bound work.
"""

WORK_RULES: tuple[StepRule, ...] = (
    AllOfForward(),
    AllOfBackward(),
    RepeatedBackward(),
    FurtherDerivatives(),
    UnusedTensorCores(),
    Recomputation(),
    FrozenLayers(),
    GradientsOfFrozenWeights(),
    UnusedLayer(),
    UntrainedModules(),
    PythonCode(),
    NoMatmuls(),
)
"""Rules about unnecessary work, and about time that cannot be attributed to a module."""

LAST_RULES: tuple[StepRule, ...] = (PythonLoop(), BusiestModule(), PeakTooLow())
"""Rules that are evaluated last, because they depend on the findings of all other rules."""

RUN_RULES: tuple[RunRule, ...] = (
    DataWaitOfRun(),
    OtherWorkOfRun(),
    Validation(),
    Inference(),
    SavingCheckpoints(),
    Logging(),
    Compilation(),
    BetweenEpochs(),
    RepeatedWork(),
    GarbageCollection(),
    NotScheduled(),
    Swapping(),
    AllocatorRetries(),
    SlowStepsOfOtherRanks(),
    LargerBatches(),
    LongerThanInWindow(),
    UnexplainedSlowSteps(),
    OtherWorkWithoutWindow(),
    OptimizerWithoutWindow(),
    CommunicationOfRun(),
    GrowingMemory(),
)
"""Rules about a whole run, based on its ledger (the time account of the run)."""

_PART_RULES = {rule.name: rule for rule in PART_RULES}


def part_rule(name: str) -> PartRule:
    """Return the rule about the part of the step with this name.

    For a user-defined phase, this is the general rule `NamedPhase`.
    """
    return _PART_RULES.get(name) or NamedPhase(name)


def step_rules() -> Iterator[StepRule]:
    """Yield all rules about the step."""
    yield from SETTING_RULES
    yield from RANK_RULES
    yield from MODULE_RULES
    yield from PART_RULES
    yield from WORK_RULES
    yield from LAST_RULES


def issue_share(name: str) -> float | None:
    """Return the minimum cost at which the rule with this name finds an issue.

    The cost is a share of the step. If the only rules with this name are about the run, it is a
    share of the run. Returns `None` if no rule has this name, or if the rule never finds an issue.
    """
    share = None
    for rule in (*RUN_RULES, *step_rules()):
        if rule.name == name:
            share = rule.threshold.share
    return share


def all_rules() -> dict[str, list[Rule]]:
    """Return all rules by name.

    Several rules can have the same name. For example, one rule "data" looks for a data wait in the
    typical step, and another rule "data" looks for it in the whole run.
    """
    by_name: dict[str, list[Rule]] = {}
    for rule in (*step_rules(), *RUN_RULES):
        by_name.setdefault(rule.name, []).append(rule)
    return by_name
