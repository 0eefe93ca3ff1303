"""Rules about the optimizer's time: of a step, and of a run without a profiled window."""

from collections.abc import Sequence

from lflops import units
from lflops.findings.evidence import StepEvidence, allowance
from lflops.findings.own_operators import MANY_CALLS
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Candidate, Threshold
from lflops.findings.run_rule import UncertainRule
from lflops.profile.module_names import plain
from lflops.profile.profile import OptimizerSettings, Profile, Work
from lflops.profile.series import summed

SECONDS_PER_CALL = 20e-6
"""Upper bound on the seconds of one operator call on a CPU, without the time to move its bytes."""

SECONDS_PER_BYTE = 1 / 5e9
"""Upper bound on the seconds that an optimizer's operator on a CPU needs per byte that it moves."""

SECONDS_PER_CACHED_BYTE = 1 / 20e9
"""Like `SECONDS_PER_BYTE`, but for small operators, because their tensors fit into a cache."""

LARGEST_CACHED_BYTES = 1 << 20
"""An operator counts as small if it moves fewer bytes than this per call."""

LAUNCH_SECONDS = 0.0003
"""Seconds for which a device waits until the host has launched the optimizer's kernels.

This is the value for an optimizer that updates all parameters at once (`fused` or `foreach`).
"""

SLOW_ON_DEVICE = 2.0
"""An optimizer on a device is slow if it takes this many times as long as its operators need."""

MOST_CALLS_PER_MODULE = 200
"""An optimizer that makes more operator calls than this for one module computes in a Python loop.

Seven optimizers of torch 2.13, without `foreach`, make 12 to 34 calls for a linear layer, and a
module has few parameters of its own.
"""

MOST_CALLS_OF_ROOT = 1000
"""Like `MOST_CALLS_PER_MODULE`, but for the root.

The root also has the calls of optimizers that work on a flat copy of all parameters.
"""

WITHOUT_FOREACH = {"LBFGS", "Muon", "SparseAdam"}
"""The optimizers of torch 2.13 that do not accept `foreach`."""

MANY_PARAMETERS = {"ParameterDict", "ParameterList"}
"""Classes of modules that can have any number of parameters of their own."""

MAIN_EMBEDDING_SHARE = 0.5
"""Sparse gradients are advised if one embedding causes this share of the optimizer's traffic."""

FEW_ROWS = 0.05
"""A step reads few rows of an embedding if it moves at most this share of the embedding's bytes."""


class SlowOptimizer(PartRule):
    """The optimizer takes a lot of time, and takes longer than its operators need.

    On a CPU, lflops assumes that the operators need up to 20 µs per call and 0.2 ns per byte. On
    other devices, it assumes the time to launch the operators and to move their bytes. There, the
    optimizer is an issue only if it takes more than twice this time.
    """

    name = "optimizer"
    threshold = Threshold(share=0.10)
    phrase = "optimizer work"
    fix = "Pass fused=True to the optimizer if it accepts this argument, or use larger batches"
    fix_in_transformers = (
        "Use an optimizer with one fused kernel, such as optim='adamw_torch_fused' of "
        "TrainingArguments, or larger batches"
    )
    fix_of_fast_optimizer = "Use larger batches, so that the optimizer makes fewer steps"

    def advise_in(self, module: str, step: StepEvidence) -> str:
        optimizers = step.profile.run.optimizers
        iterating = [each for each in optimizers if each.max_iter is not None]
        embedding = embedding_with_few_rows(step.profile)
        if iterating:
            return _advice_about_iterations(iterating[0])
        if embedding is not None:
            return _advice_about_sparse_gradients(embedding, optimizers)
        if _looped_calls(step.profile):
            return _advice_about_loops(step.root.optimizer.calls)
        if not optimizers:
            return super().advise_in(module, step)
        advice = _advice_about_arguments(optimizers, is_on_cpu=step.is_on_cpu)
        if not advice:
            return _advice_about_own_loop(optimizers, step) or self.fix_of_fast_optimizer
        is_in_transformers = step.profile.run.monitor == "FlopsCallback"
        return self.fix_in_transformers if is_in_transformers else advice

    def judged_seconds(self, candidate: Candidate, step: StepEvidence) -> float:
        seconds = step.uncontended(self.name, candidate.seconds or 0.0)
        return step.at_most_median(self.name, seconds)

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        needed = needed_seconds(step)
        if not step.times.uncontended:
            needed *= allowance(step.lost_cpu_share)
        return self.judged_seconds(candidate, step) > needed


def _advice_about_arguments(optimizers: Sequence[OptimizerSettings], *, is_on_cpu: bool) -> str:
    """Return the advice on an argument that makes an optimizer faster. Empty if there is none.

    On a CPU, `foreach=True` often makes an optimizer slower, because its intermediate results are
    lists of tensors as large as all parameters.
    """
    for optimizer in optimizers:
        if optimizer.accepts_fused and not optimizer.fused:
            instead = " instead of foreach=True" if optimizer.foreach else ""
            name = plain(optimizer.class_name)
            return f"Pass fused=True{instead} to {name}, or use larger batches"
    if is_on_cpu:
        return ""
    for optimizer in optimizers:
        if optimizer.accepts_foreach and not optimizer.foreach and not optimizer.fused:
            return f"Pass foreach=True to {plain(optimizer.class_name)}, or use larger batches"
    return ""


def _advice_about_own_loop(optimizers: Sequence[OptimizerSettings], step: StepEvidence) -> str:
    """Return the advice on an optimizer of the user that loops over the parameters.

    Empty if there is no such optimizer.
    """
    calls = step.root.optimizer.calls
    for optimizer in optimizers:
        is_torchs = optimizer.accepts_foreach or optimizer.class_name in WITHOUT_FOREACH
        if not is_torchs and not optimizer.accepts_fused and calls >= MANY_CALLS:
            return (
                f"{plain(optimizer.class_name)} makes {units.count(calls)} operator calls in a "
                "step. If it loops over the parameters, let it use torch._foreach functions and no "
                ".item(), or use larger batches"
            )
    return ""


def _advice_about_loops(calls: int) -> str:
    return (
        f"The optimizer makes {units.count(calls)} operator calls in a step. Compute with whole "
        "tensors, or with torch._foreach functions, instead of loops over rows"
    )


def _advice_about_iterations(optimizer: OptimizerSettings) -> str:
    """Return the advice on an optimizer such as LBFGS, which repeats its work in each step."""
    name = plain(optimizer.class_name)
    return (
        f"Lower history_size or max_iter: in each of its up to {optimizer.max_iter} iterations per "
        f"step, {name} computes with up to history_size vectors, each as long as all parameters "
        "together. What the closure computes counts as forward and backward"
    )


TAKE_SPARSE = {"SGD", "Adagrad", "SparseAdam"}
"""Optimizers of torch that update only the rows of a sparse gradient."""


def _advice_about_sparse_gradients(name: str, optimizers: Sequence[OptimizerSettings]) -> str:
    """Return the advice on an embedding whose gradient could be sparse."""
    advice = (
        f"A step reads few rows of {plain(name)}, and the optimizer updates all of them. If no "
        "weight decay or gradient clipping applies to this embedding, pass sparse=True to it"
    )
    names = {optimizer.class_name for optimizer in optimizers}
    if names and names <= TAKE_SPARSE:
        return advice
    return f"{advice} and train it with torch.optim.SparseAdam"


def embedding_with_few_rows(profile: Profile) -> str | None:
    """Return the embedding with most of the optimizer's work, if a step reads few of its rows.

    The gradient of such an embedding could be sparse, so that the optimizer updates only these
    rows. Return `None` if there is no such embedding, if its gradient is sparse already, or if
    another module has the same weight, because its gradient is then dense.
    """
    read = summed(
        (count.module, count.bytes_moved)
        for count in profile.op_counts
        if (count.operator, count.phase) == ("embedding", "forward")
    )
    shared = {module.owner for module in profile.modules.values()}
    least = MAIN_EMBEDDING_SHARE * profile.modules[""].optimizer.bytes_moved
    for count in profile.op_counts:
        name = count.module
        if count.operator != "embedding_dense_backward" or name not in read or name in shared:
            continue
        module = profile.modules[name]
        if module.optimizer.self_bytes_moved >= least and (
            read[name] <= FEW_ROWS * module.parameter_bytes
        ):
            return name
    return None


def needed_seconds(step: StepEvidence) -> float:
    """Return an upper bound on the seconds per step that the operators of the optimizer need.

    On a device, this is the time to launch the operators' kernels and to move their bytes,
    multiplied by `SLOW_ON_DEVICE`.
    """
    work = step.root.optimizer
    run = step.profile.run
    if run.hardware is not None and run.device_type != "cpu":
        bandwidth = run.hardware.bandwidth_bytes_per_second
        if bandwidth:
            return SLOW_ON_DEVICE * (work.bytes_moved / bandwidth + LAUNCH_SECONDS)
    calls = work.calls - _looped_calls(step.profile)
    return calls * SECONDS_PER_CALL + work.bytes_moved * _seconds_per_byte(work)


def _looped_calls(profile: Profile) -> int:
    """Return the number of the optimizer's operator calls beyond the most calls of each module.

    An optimizer such as LBFGS, which repeats its work in each step, is left out.
    """
    if any(optimizer.max_iter is not None for optimizer in profile.run.optimizers):
        return 0
    calls = 0
    for name, module in profile.modules.items():
        if module.class_name in MANY_PARAMETERS:
            continue
        most = MOST_CALLS_PER_MODULE if name else MOST_CALLS_OF_ROOT
        calls += max(module.optimizer.self_calls - most, 0)
    return calls


def _seconds_per_byte(work: Work) -> float:
    is_cached = work.bytes_moved < work.calls * LARGEST_CACHED_BYTES
    return SECONDS_PER_CACHED_BYTE if is_cached else SECONDS_PER_BYTE


class OptimizerWithoutWindow(UncertainRule):
    """The optimizer takes a lot of time, in a run without a profiled window."""

    name = "optimizer"
    category = "training/optimizer"
    threshold = SlowOptimizer.threshold
    phrase = SlowOptimizer.phrase
    fix = (
        "Use larger batches. If the optimizer accepts fused=True and does not use it yet, pass "
        "this argument"
    )
